"""Files and folders of data: which files hold a split, and the rows of a file by its suffix."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl.data.rows import FILE_SUFFIXES, NoSplit, Row, json_lines, json_list, to_the_end
from rl.data.tables import BINARY, DELIMITERS, open_table, read_delimited
from rl.errors import UserError

# Names under which folders keep a split; the first that is there.
ALIASES = {
    "test": ("test", "validation", "valid", "val", "dev", "eval"),
    "train": ("train", "training"),
}
# files that hold no rows
_OTHERS = ("metadata", "info", "config", "state", "dataset_info", "dataset_infos", "dataset_dict")


def read_file(path: Path) -> Iterator[Row]:
    """The rows of a file: one JSON object a line (.jsonl), a list of objects (.json), a table
    (.csv, .tsv, .parquet, .arrow); .gz too.

    UserError for a file that cannot be read to its end (cut off, damaged), whatever is to be done
    about bad rows: it is not known how many are missing.
    """
    if path.name.endswith(BINARY):
        table = open_table([path])
        yield from (table.row(i) for i in range(len(table)))
        return
    try:
        opened = gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    with opened as stream:
        suffix = _suffix(path).removesuffix(".gz")
        if suffix == ".jsonl":
            yield from json_lines(to_the_end(stream, path), path.name)
        elif suffix in DELIMITERS:
            yield from read_delimited(stream, path, suffix)
        else:
            yield from json_list(b"".join(to_the_end(stream, path)), path)


def _suffix(path: Path) -> str:
    return next(
        (
            suffix
            for suffix in sorted(FILE_SUFFIXES, key=len, reverse=True)
            if path.name.endswith(suffix)
        ),
        "",
    )


def find_files(folder: Path, split: str, config: str | None = None) -> list[Path]:
    """The files of a split in a folder, in order. NoSplit, with what is there, where it has none.

    A folder is <split>.jsonl and the like; what `save_to_disk` wrote, of one data set (which is its
    train split) or of several splits; a downloaded hub repository, whose README may name
    configurations and files, or which has train-00000-of-00002.parquet, in it, in data/, in a
    folder of the configuration or of the split; the hub's cache; or, as the train split, any data
    files.
    """
    names = ALIASES.get(split, (split,))
    if (folder / "snapshots").is_dir():
        return find_files(_snapshot(folder), split, config)
    for name in names:
        for found in (
            _exact(folder, name),
            _saved(folder, name),
            _named(folder, name, config),
            _matching(folder, name, config),
        ):
            if found:
                return found
    loose = _data_files(folder)
    if (
        split == "train"
        and loose
        and not (folder / "dataset_dict.json").is_file()
        and not any(map(_other_split, loose))
    ):
        return loose
    there = sorted(path.name for path in folder.iterdir())
    which = f" of configuration {config!r}" if config else ""
    kinds = f"{split}.jsonl or {split}.json (or .parquet, .csv, .arrow)"
    raise NoSplit(
        f"folder {folder} has no {kinds}{which}; it holds {', '.join(there[:20]) or 'nothing'}"
    )


def _exact(folder: Path, name: str) -> list[Path]:
    return [
        folder / f"{name}{suffix}"
        for suffix in FILE_SUFFIXES
        if (folder / f"{name}{suffix}").is_file()
    ][:1]


def _saved(folder: Path, name: str) -> list[Path]:
    """Of what `datasets` saved to disk: several splits in folders of their names, or one data set."""
    if (folder / "dataset_dict.json").is_file():
        return _arrow_files(folder / name)
    return _arrow_files(folder) if name == "train" else []


def _arrow_files(folder: Path) -> list[Path]:
    if not (folder / "state.json").is_file() or not (folder / "dataset_info.json").is_file():
        return []
    listed = _json(folder / "state.json").get("_data_files", [])
    files = [folder / str(item.get("filename")) for item in listed if isinstance(item, dict)]
    if lost := [path.name for path in files if not path.is_file()]:
        raise UserError(
            f"{folder} lacks {', '.join(lost[:5])}, which its state.json names: save the data set anew"
        )
    return files


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UserError(f"{path} cannot be read ({error}): save the data set anew") from error
    return value if isinstance(value, dict) else {}


def _named(folder: Path, name: str, config: str | None) -> list[Path]:
    """The files that the repository's README names for a configuration and split."""
    readme = folder / "README.md"
    head = (
        re.match(
            r"---\n(.*?)\n---", readme.read_text(encoding="utf-8", errors="replace"), re.DOTALL
        )
        if readme.is_file()
        else None
    )
    if head is None:
        return []
    import yaml

    try:
        found = yaml.safe_load(head[1])
    except yaml.YAMLError:
        return []
    configs = [
        item
        for item in (found.get("configs") or [] if isinstance(found, dict) else [])
        if isinstance(item, Mapping)
    ]
    if not configs:
        return []
    known = [str(item.get("config_name")) for item in configs]
    if config is not None and config not in known:
        raise UserError(f"{readme} names no configuration {config!r}: it has {', '.join(known)}")
    usual = next(
        (item for item in configs if item.get("default") or item.get("config_name") == "default"),
        None,
    )
    if config is None and usual is None and len(configs) > 1:
        raise UserError(
            f"{folder} has the configurations {', '.join(known)}: choose one with --dataset-config"
        )
    chosen = next(
        (item for item in configs if item.get("config_name") == config), usual or configs[0]
    )
    files = chosen.get("data_files") or []
    if isinstance(files, (str, list)) and not any(isinstance(item, Mapping) for item in files):
        files = [{"split": "train", "path": files}]
    patterns: list[str] = []
    for item in files:
        if isinstance(item, Mapping) and item.get("split") == name:
            patterns += [item["path"]] if isinstance(item["path"], str) else list(item["path"])
    return [
        path
        for pattern in patterns
        for path in sorted(folder.glob(pattern))
        if path.name.endswith(FILE_SUFFIXES)
    ]


def _matching(folder: Path, name: str, config: str | None) -> list[Path]:
    """Shards of the split by their names, or all that lies in a folder of its name."""
    places = [
        folder / part
        for part in ([config, f"data/{config}"] if config else ["", "data", "main", "default"])
    ]
    pattern = re.compile(rf"(.*[._-])?{re.escape(name)}([._-].*)?", re.IGNORECASE)
    for place in (p for p in places if p.is_dir()):
        found = [
            path
            for path in _data_files(place)
            if pattern.fullmatch(path.name.removesuffix(_suffix(path)))
        ]
        if not found and (place / name).is_dir():
            found = _data_files(place / name)
        if found:
            return found
    return []


def _data_files(folder: Path) -> list[Path]:
    found = [
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name.endswith(FILE_SUFFIXES)
    ]
    return [path for path in found if path.name.partition(".")[0] not in _OTHERS]


def _other_split(path: Path) -> bool:
    words = re.split(r"[._-]", path.name.lower())
    return any(word in words for names in ALIASES.values() for word in names)


def _snapshot(folder: Path) -> Path:
    """Of a repository in the hub's cache: the revision that `main` was when it was fetched, or the
    only one.
    """
    main = folder / "refs" / "main"
    name = main.read_text().strip() if main.is_file() else ""
    there = sorted(path for path in (folder / "snapshots").iterdir() if path.is_dir())
    if not (folder / "snapshots" / name).is_dir() or not name:
        if len(there) != 1:
            raise UserError(
                f"{folder} holds {len(there)} revisions: name one of {', '.join(str(path) for path in there[:5])}"
            )
        return there[0]
    return folder / "snapshots" / name
