"""Find the files of a split in a folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from rl.data.row_readers import (
    FILE_SUFFIXES,
    SPLIT_ALIASES,
    MissingSplit,
    get_suffix,
)
from rl.errors import UserError

# files that hold no rows
_METADATA_STEMS = (
    "metadata",
    "info",
    "config",
    "state",
    "dataset_info",
    "dataset_infos",
    "dataset_dict",
)


def find_files(folder: Path, split: str, config: str | None = None) -> list[Path]:
    """Return the files of a split in a folder, in order.

    A folder is one of
    - files such as <split>.jsonl;
    - the output of `save_to_disk`, for a single data set (which is the train split) or for several
      splits;
    - a downloaded hub repository: its README may name configurations and files, or it has files
      such as train-00000-of-00002.parquet, at the top, in data/, or in a folder of the
      configuration or of the split;
    - the hub's cache;
    - any data files, which are the train split.

    Raises MissingSplit, with a listing of the folder, if it has no such split.
    """
    if (folder / "snapshots").is_dir():
        return find_files(_find_snapshot(folder), split, config)
    readme = _files_of_readme(folder, config)
    for name in SPLIT_ALIASES.get(split, (split,)):
        named = [path for suffix in FILE_SUFFIXES if (path := folder / f"{name}{suffix}").is_file()]
        saved = _files_of_saved(folder, name)  # raises if incomplete, also beside a named file
        if files := named[:1] or saved or readme.get(name):
            return files
        if files := _files_by_pattern(folder, name, config):
            splits = [key for key, listed in readme.items() if not {*files}.isdisjoint(listed)]
            if len(splits) > 1:
                raise UserError(
                    f"{folder} has several splits that could be {split!r}: {', '.join(splits)}; "
                    "pass a file of one of them, or a folder of its files"
                )
            return files
    if (
        split == "train"
        and (loose := _data_files(folder))
        and not (folder / "dataset_dict.json").is_file()
        and not any(map(_names_a_split, loose))
    ):
        return loose
    listing = sorted(path.name for path in folder.iterdir())
    config_note = f" of configuration {config!r}" if config else ""
    kinds = f"{split}.jsonl or {split}.json (or .parquet, .csv, .arrow)"
    raise MissingSplit(
        f"folder {folder} has no {kinds}{config_note}; it holds "
        f"{', '.join(listing[:20]) or 'nothing'}"
    )


def _files_of_saved(folder: Path, name: str) -> list[Path]:
    """Return a split's files in the output of `save_to_disk` (see `find_files`), which state.json
    lists. Raises UserError if it cannot be read, or if any file is missing.
    """
    if (folder / "dataset_dict.json").is_file():
        folder /= name
    elif name != "train":
        return []
    state_file = folder / "state.json"
    if not state_file.is_file() or not (folder / "dataset_info.json").is_file():
        return []
    try:
        state = json.loads(state_file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UserError(
            f"{state_file} cannot be read ({error}): save the data set again"
        ) from error
    listed = state.get("_data_files", []) if isinstance(state, dict) else []
    files = [folder / str(item.get("filename")) for item in listed if isinstance(item, dict)]
    if missing := [path.name for path in files if not path.is_file()]:
        raise UserError(
            f"{folder} lacks {', '.join(missing[:5])}, which its state.json names: "
            "save the data set again"
        )
    return files


def _files_of_readme(folder: Path, config: str | None) -> dict[str, list[Path]]:
    """Return the files that the repository's README names for a configuration, by split.

    Raises UserError if the configuration is unknown, or missing and not determined.
    """
    import yaml

    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""
    head = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    try:
        front_matter = yaml.safe_load(head[1]) if head else None
    except yaml.YAMLError:
        return {}
    listed = front_matter.get("configs") or [] if isinstance(front_matter, dict) else []
    configs = [(str(item.get("config_name")), item) for item in listed if isinstance(item, Mapping)]
    names = [name for name, _ in configs]
    if not configs:
        return {}
    if config is not None and config not in names:
        raise UserError(f"{readme} names no configuration {config!r}: it has {', '.join(names)}")
    defaults = [name for name, item in configs if item.get("default") or name == "default"]
    if config is None and not defaults and len(configs) > 1:
        raise UserError(
            f"{folder} has the configurations {', '.join(names)}: choose one with --dataset-config"
        )
    chosen = next(name for name in (config, *defaults, *names) if name is not None)
    files = dict(reversed(configs))[chosen].get("data_files") or []
    if isinstance(files, (str, list)) and not any(isinstance(item, Mapping) for item in files):
        files = [{"split": "train", "path": files}]
    by_split: dict[str, dict[Path, None]] = {}  # each file once
    for item in files:
        if isinstance(item, Mapping):
            patterns = item.get("path") or []
            for pattern in [patterns] if isinstance(patterns, str) else patterns:
                matches = (
                    p for p in sorted(folder.glob(pattern)) if p.name.endswith(FILE_SUFFIXES)
                )
                by_split.setdefault(str(item.get("split")), {}).update(dict.fromkeys(matches))
    return {split: list(matches) for split, matches in by_split.items()}


def _files_by_pattern(folder: Path, name: str, config: str | None) -> list[Path]:
    """Return the shards of the split by file name, or all data files in a folder of its name."""
    parts = [config, f"data/{config}"] if config else ["", "data", "main", "default"]
    pattern = re.compile(rf"(.*[._-])?{re.escape(name)}([._-].*)?", re.IGNORECASE)
    for place in (folder / part for part in parts if (folder / part).is_dir()):
        matches = [
            path
            for path in _data_files(place)
            if pattern.fullmatch(path.name.removesuffix(get_suffix(path)))
        ]
        if not matches and (place / name).is_dir():
            matches = _data_files(place / name)
        if matches:
            return matches
    return []


def _data_files(folder: Path) -> list[Path]:
    """Return the data files directly in a folder, sorted, without metadata files."""
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and path.name.endswith(FILE_SUFFIXES)
        and path.name.partition(".")[0] not in _METADATA_STEMS
    ]


def _names_a_split(path: Path) -> bool:
    """Return whether a file name contains the name of any split."""
    words = re.split(r"[._-]", path.name.lower())
    return any(word in words for names in SPLIT_ALIASES.values() for word in names)


def _find_snapshot(folder: Path) -> Path:
    """Return a revision's folder in the hub's cache: that of `main` at the fetch, else the only
    revision.

    Raises UserError if several revisions are cached and `main` is not among them.
    """
    main = folder / "refs" / "main"
    name = main.read_text().strip() if main.is_file() else ""
    revisions = sorted(path for path in (folder / "snapshots").iterdir() if path.is_dir())
    candidates = [path for path in revisions if path.name == name] or revisions
    if len(candidates) != 1:
        raise UserError(
            f"{folder} holds {len(revisions)} revisions: choose among "
            f"{', '.join(str(path) for path in revisions[:5])}"
        )
    return candidates[0]
