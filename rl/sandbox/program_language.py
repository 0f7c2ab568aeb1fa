"""Define the commands that build and start programs of each language."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import cache

from rl.errors import UserError


@dataclass(frozen=True)
class Language:
    """Describe a language.

    `file`: file name of the program. `build`, `start`: commands; {tool} stands for the first
    installed program of `needs`, {here} for the program's folder. `address_space`: whether the
    memory limit applies to the address space too; some runtimes reserve gigabytes of addresses.
    """

    file: str
    needs: tuple[str, ...] = ()
    build: tuple[str, ...] = ()
    start: tuple[str, ...] = ()
    address_space: bool = True
    remedy: str = ""


LANGUAGES: dict[str, Language] = {
    "python": Language("main.py"),
    "c++": Language(
        "main.cpp",
        ("g++", "clang++", "c++"),
        ("{tool}", "-O2", "-std=c++17", "-o", "program", "main.cpp"),
        ("{here}/program",),
        remedy="a C++ compiler (Debian: apt-get install g++)",
    ),
    "bash": Language("main.sh", ("bash",), (), ("{tool}", "main.sh"), remedy="bash"),
    "javascript": Language(
        "main.js",
        ("node", "nodejs"),
        (),
        ("{tool}", "main.js"),
        address_space=False,
        remedy="Node (Debian: apt-get install nodejs)",
    ),
}
_SEARCH_PATH = "/usr/local/bin:/usr/bin:/bin"  # folders visible in the sandbox


@cache
def find_command(language: str) -> str:
    """Return the path of the tool of a language within the folders that the sandbox mounts. Raises
    UserError with the remedy if it is missing.
    """
    config = LANGUAGES[language]
    for name in config.needs:
        place = shutil.which(name, path=_SEARCH_PATH)
        if place is not None:
            return place
    if config.needs:
        raise UserError(
            f"no program to run {language} with ({' or '.join(config.needs)} in {_SEARCH_PATH}): "
            f"install {config.remedy}"
        )
    return ""
