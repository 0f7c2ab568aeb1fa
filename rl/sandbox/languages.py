"""How programs of a language are built and started."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from functools import cache

from rl.errors import UserError


@dataclass(frozen=True)
class Language:
    """`file`: what the program is called. `build`, `start`: commands; {tool} is the first of
    `needs` that is installed, {here} the program's folder.
    `address_space`: whether the limit on memory holds for addresses too, which some run times
    reserve by gigabytes.
    """

    file: str
    needs: tuple[str, ...] = ()
    build: tuple[str, ...] = ()
    start: tuple[str, ...] = ()
    address_space: bool = True
    environment: dict[str, str] = field(default_factory=dict)
    remedy: str = ""


LANGUAGES: dict[str, Language] = {
    "python": Language("main.py"),
    "c++": Language(
        "main.cpp", ("g++", "clang++", "c++"), ("{tool}", "-O2", "-std=c++17", "-o", "program", "main.cpp"), ("{here}/program",),
        remedy="a C++ compiler (Debian: apt-get install g++)",
    ),
    "bash": Language("main.sh", ("bash",), (), ("{tool}", "main.sh"), remedy="bash"),
    "javascript": Language(
        "main.js", ("node", "nodejs"), (), ("{tool}", "main.js"), address_space=False, remedy="Node (Debian: apt-get install nodejs)",
    ),
}  # fmt: skip
_PLACES = "/usr/local/bin:/usr/bin:/bin"  # what is visible inside


@cache
def command_of(language: str) -> str:
    """The tool of a language that lies where the sandbox sees it. Raises UserError with the remedy."""
    found = LANGUAGES[language]
    for name in found.needs:
        place = shutil.which(name, path=_PLACES)
        if place is not None:
            return place
    if found.needs:
        raise UserError(
            f"no program to run {language} with ({' or '.join(found.needs)} in {_PLACES}): install {found.remedy}"
        )
    return ""
