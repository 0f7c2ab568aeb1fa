"""Write and read the files of update records: arrays, and metadata as JSON."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl.errors import RunFolderError

_UPDATE_FILE = re.compile(r"step_(\d{6,})(?:_.+)?\.update\.safetensors")
_METADATA_KEY = "update"
TOKEN_VALUES = ("entropies", "ratios")  # of a row, from `add_token_values`


def name_update_file(stage: str, step: int) -> str:
    """Return the name of the record of the update of a step; `stage`: name of a later stage."""
    return f"step_{step:06d}{f'_{stage}' if stage else ''}.update.safetensors"


def write_update_file(
    path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, Any]
) -> None:
    """Replace a record atomically."""
    from safetensors.numpy import save

    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    data = save(contiguous, metadata={_METADATA_KEY: json.dumps(metadata)})
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def list_update_files(folder: Path) -> dict[int, Path]:
    """Return the records below a `folder` of rollouts by step, in order."""
    return {
        int(match[1]): path
        for path in sorted(folder.glob("step_*.update.safetensors"))
        if (match := _UPDATE_FILE.fullmatch(path.name))
    }


def read_update_file(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the arrays and the metadata of a record. Raises RunFolderError if it is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = json.loads((file.metadata() or {})[_METADATA_KEY])
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise RunFolderError(
            f"{path} cannot be read as the record of an update: {error}"
        ) from error
    return arrays, metadata


def add_token_values(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Add `ratios` and `entropies` to the rows of a file of rollouts, or to the sampled turns of a
    row of several turns, from the record of their update.

    A ratio is exp(learner logprob - sampler logprob), an entropy is in nats; both are those of the
    last pass over the batch, and None for a token that the update did not read. Rows of which
    nothing is recorded stay as they are, all of them if the file is missing or damaged.
    """
    if not path.is_file():
        return
    try:
        arrays, metadata = read_update_file(path)
        numbers = _read_last_numbers(arrays, len(metadata["calls"]))
        sources, targets = _index_datums(arrays), arrays["target_tokens"].tolist()
    except (RunFolderError, KeyError, TypeError, ValueError, IndexError):
        return
    for row in rows:
        turns = row.get("turns")
        entries = [row]
        if isinstance(turns, list) and turns:
            entries = [turn for turn in turns if isinstance(turn, dict) and turn.get("sampled")]
        for start, turn_numbers in sources.get(f"{row.get('group')} {row.get('index')}", ()):
            for number in turn_numbers:
                entry = entries[number] if number < len(entries) else {}
                tokens = entry.get("token_ids", entry.get("response_tokens"))
                end = start + (len(tokens) if isinstance(tokens, list) else 0)
                if start == end or targets[start:end] != tokens:
                    break  # a row of another run
                for name, values in numbers.items():
                    entry[name] = values[start:end]
                start = end


def _read_last_numbers(
    arrays: Mapping[str, np.ndarray], num_calls: int
) -> dict[str, list[float | None]]:
    """Return the ratios and, if recorded, the entropies over all tokens of a record."""
    starts = np.cumsum(arrays["datums"][:, 3]) - arrays["datums"][:, 3]
    sampled = arrays["sampled"].astype(np.float64)
    numbers = {name: np.full(len(sampled), np.nan) for name in TOKEN_VALUES}
    for k in range(num_calls):
        members = arrays[f"call/{k}/datums"]
        counts = arrays["datums"][members, 3]
        spans = [np.arange(s, s + n) for s, n in zip(starts[members], counts, strict=True)]
        positions = np.concatenate([np.zeros(0, np.int64), *spans])
        learner = arrays[f"call/{k}/logprobs"].astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            numbers["ratios"][positions] = np.exp(learner - sampled[positions])
        if f"call/{k}/entropies" in arrays:
            numbers["entropies"][positions] = arrays[f"call/{k}/entropies"]
    return {
        name: [value if np.isfinite(value) else None for value in array.tolist()]
        for name, array in numbers.items()
        if np.isfinite(array).any()
    }


def _index_datums(arrays: Mapping[str, np.ndarray]) -> dict[str, list[tuple[int, list[int]]]]:
    """Return the first position and the turns of each datum by "group index" of its row."""
    datums: dict[str, list[tuple[int, list[int]]]] = {}
    start = first_turn = 0
    for (group, index, _, count), turns in zip(
        arrays["datums"].tolist(), arrays["turn_counts"].tolist(), strict=True
    ):
        numbers = arrays["turns"][first_turn : first_turn + turns].tolist()
        datums.setdefault(f"{group} {index}", []).append((start, numbers))
        start, first_turn = start + count, first_turn + turns
    return datums
