"""Find the code and data that a run's config.json names, from any folder."""

from __future__ import annotations

import filecmp
import importlib.machinery
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl.errors import warn_on_rank_zero

LAUNCH_FOLDER_KEY = "launched_from"  # in config.json: the folder in which the run was started


def is_method_address(name: object) -> bool:
    """Return whether a word names a method by its location."""
    place, colon, attribute = str(name).rpartition(":")
    return (
        isinstance(name, str)
        and bool(colon and place)
        and attribute.isidentifier()
        and not name.startswith("tiny:")
    )


def find_source_file(address: str) -> Path | None:
    """Return the file that `file.py:function` or `module:function` would import, or None. Nothing
    is imported.
    """
    place = address.rpartition(":")[0]
    if place.endswith(".py"):
        return Path(place).expanduser().resolve()
    top, *inner = place.split(".")
    # Look up the top package only: to look inside of it, Python would import it.
    spec = importlib.machinery.PathFinder.find_spec(top, sys.path)
    if spec is None:
        return None
    if spec.submodule_search_locations:
        folder = Path(next(iter(spec.submodule_search_locations)))
        inside = folder.joinpath(*inner)
        return next(
            (
                path.resolve()
                for path in (inside.with_suffix(".py"), inside / "__init__.py")
                if path.is_file()
            ),
            folder.resolve(),
        )
    return Path(spec.origin).resolve() if spec.origin else None


def locate_recorded_files(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's config.json for use in another folder than the one that it was started in.

    Relative files that do not exist here (code and data) are replaced by those of the run's
    starting folder. A file of the same name here counts first, with a warning if it differs.
    Nothing is imported: `rl.trainer.check_trusted` decides about code.
    """
    start = config.get(LAUNCH_FOLDER_KEY)
    if not isinstance(start, str):
        return dict(config)

    def locate(word: str) -> str:
        prefix, place, suffix = _split_address(word, start)
        recorded, here = Path(start, place), Path(place).expanduser()
        if not recorded.exists():
            return word
        if not here.exists():
            return f"{prefix}{recorded}{suffix}"
        if _differs(recorded, here):
            warn_on_rank_zero(
                f"{place} of the current folder is used for this run, which was started with "
                f"{recorded}; the two differ: change to {start} to use the run's"
            )
        return word

    return _replace_files(config, lambda _, word: locate(word))


def match_recorded_files(
    recorded: Mapping[str, Any], requested: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the recorded config of a run, with the requested word for each file that is the same
    file: `scores.py:score` of the starting folder may be requested by its absolute path.
    """
    words = _read_files(requested)
    located = _read_files(locate_recorded_files(recorded))

    def match(key: tuple[Any, ...], word: str) -> str:
        other = words.get(key)
        is_same = other is not None and _make_absolute(other) == _make_absolute(located[key])
        return other if is_same and other is not None else word

    return _replace_files(recorded, match)


def record_resumed_files(
    recorded: Mapping[str, Any], requested: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the config of a resumed run with the recorded starting folder.

    In another folder, a file is recorded by its word of before if it is that file or a copy, and
    else by its absolute path.
    """
    start = recorded.get(LAUNCH_FOLDER_KEY)
    if not isinstance(start, str) or not Path(start).is_dir() or Path(start) == Path.cwd():
        return dict(requested)
    words = _read_files(recorded)

    def choose(key: tuple[Any, ...], word: str) -> str:
        prefix, place, suffix = _split_address(word)
        prefix_before, before, suffix_before = _split_address(words.get(key, ""), start)
        is_same = (prefix, suffix) == (prefix_before, suffix_before) and not _differs(
            Path(start, before), Path(place).expanduser()
        )
        return words[key] if key in words and is_same else _make_absolute(word)

    return {**_replace_files(requested, choose), LAUNCH_FOLDER_KEY: start}


def _split_address(word: str, folder: str = "") -> tuple[str, str, str]:
    """Return ("", path, ":name") of `file.py:name`, ("NAME:", path, "") of a data set's NAME:FILE,
    and ("", word, "") of any other word.

    A word that is the name of a file in `folder` is not split.
    """
    if ".py:" in word:
        place, colon, name = word.rpartition(":")
        return "", place, colon + name
    name, colon, file = word.partition(":")
    is_name = bool(name) and not name.startswith(("/", ".", "~"))
    if not (is_name and file) or Path(folder, word).expanduser().exists():
        return "", word, ""
    return name + colon, file, ""


def _make_absolute(word: str) -> str:
    """Return the word with the absolute path of its file; unchanged if the file does not exist."""
    prefix, place, suffix = _split_address(word)
    path = Path(place).expanduser()
    return f"{prefix}{path.resolve()}{suffix}" if path.exists() else word


def _is_code_file(word: Any) -> bool:
    return isinstance(word, str) and ".py:" in word


def _is_data_path(word: Any) -> bool:
    """Return whether a data set's word is a path: it has a slash or a suffix. A bare word may name
    a generated or published set.
    """
    return isinstance(word, str) and ("/" in word or bool(Path(word).suffix))


# Settings that may name files, and whether a word of theirs does. The value is a word, a list of
# words, or a list of pairs of a word and its weight.
_FILE_SETTINGS: dict[str, Callable[[Any], bool]] = {
    "reward": _is_code_file,
    "rewards": _is_code_file,
    "environment": _is_code_file,
    "dataset": _is_data_path,
    "eval_dataset": _is_data_path,
    "more_datasets": _is_data_path,
    "more_eval_datasets": _is_data_path,
}


def _differs(first: Path, second: Path) -> bool:
    """Return whether two files, or the files of two folders, differ in content or existence."""
    if first.is_dir() and second.is_dir():
        folders = filecmp.dircmp(first, second)
        return bool(folders.left_only or folders.right_only or folders.diff_files)
    return not (first.is_file() and second.is_file() and filecmp.cmp(first, second))


def _read_files(config: Mapping[str, Any]) -> dict[tuple[Any, ...], str]:
    """Return the words of a config that name files, by stage, setting and position."""
    words: dict[tuple[Any, ...], str] = {}

    def collect(key: tuple[Any, ...], word: str) -> str:
        words[key] = word
        return word

    _replace_files(config, collect)
    return words


def _replace_files(
    config: Mapping[str, Any], replace: Callable[[tuple[Any, ...], str], str]
) -> dict[str, Any]:
    """Return a config with `replace(key, word)` for each word that names a file. A key is the
    stage's number, the setting and the position in a list.
    """
    stages = []
    for number, stage in enumerate(config["stages"]):
        settings, method = dict(stage["settings"]), stage["method"]
        if _is_code_file(method):
            method = replace((number, "method", 0), method)
        for name, is_file in _FILE_SETTINGS.items():
            value = settings.get(name)
            words: list[Any] = list(value) if isinstance(value, list) else [value]
            for index, item in enumerate(words):
                match item:
                    case [word, *weight] if is_file(word):
                        words[index] = [replace((number, name, index), word), *weight]
                    case word if is_file(word):
                        words[index] = replace((number, name, index), word)
            if name in settings:
                settings[name] = words if isinstance(value, list) else words[0]
        stages.append({**stage, "method": method, "settings": settings})
    return {**config, "stages": stages}
