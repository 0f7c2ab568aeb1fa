"""Locate installed packages that programs may import in addition to the standard library."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path

from rl.errors import UserError

DEFAULT_PACKAGES = ("numpy",)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def default_packages() -> tuple[str, ...]:
    """Return the installed packages of DEFAULT_PACKAGES."""
    return tuple(name for name in DEFAULT_PACKAGES if importlib.util.find_spec(name) is not None)


@cache
def find_package_paths(packages: tuple[str, ...]) -> dict[str, str]:
    """Return the files and folders of `packages` and their requirements: paths by import name.

    Raises UserError if a package is not installed for this interpreter.
    """
    places: dict[str, str] = {}
    seen: set[str] = set()
    waiting = list(packages)
    while waiting:
        name = waiting.pop()
        distribution = _find_distribution(name)
        if distribution is None:
            if name in packages:
                raise UserError(
                    f"a sandbox needs the package {name!r}, which is not installed here: "
                    f"pip install {name}, or leave it out"
                )
            continue
        key = distribution.metadata["Name"].lower()
        if key in seen:
            continue
        seen.add(key)
        places |= _list_package_files(distribution)
        required = [
            text for text in distribution.requires or [] if "extra" not in text.partition(";")[2]
        ]
        waiting += [match.group() for text in required if (match := _NAME.match(text))]
    return places


def _find_distribution(name: str) -> Distribution | None:
    """Find a distribution by its name (scikit-learn) or by its import name (sklearn)."""
    if _NAME.fullmatch(name) is None:
        raise UserError(f"sandbox packages must be names such as numpy, got {name!r}")
    try:
        return importlib.metadata.distribution(name)
    except PackageNotFoundError:
        owners = importlib.metadata.packages_distributions().get(name)
        return importlib.metadata.distribution(owners[0]) if owners else None


def _list_package_files(distribution: Distribution) -> dict[str, str]:
    """Return the entries of the distribution in site-packages: the first part of each path."""
    first = {file.parts[0] for file in distribution.files or [] if file.suffix != ".pth"} - {
        "..",
        "__pycache__",
    }
    places = {name: Path(str(distribution.locate_file(name))).resolve() for name in first}
    return {name: str(place) for name, place in places.items() if place.exists()}
