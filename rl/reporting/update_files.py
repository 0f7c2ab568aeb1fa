"""Write and read the files of update records: arrays, and metadata as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl.errors import RunFolderError
from rl.jsonl import get_rollout_step, write_atomically

_METADATA_KEY = "update"
TOKEN_VALUES = ("entropies", "ratios")  # of a row, from `add_token_values`


def write_update_file(
    path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, Any]
) -> None:
    """Replace a record atomically."""
    from safetensors.numpy import save

    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    data = save(contiguous, metadata={_METADATA_KEY: json.dumps(metadata)})
    write_atomically(path, data)


def list_update_files(folder: Path) -> dict[int, Path]:
    """Return the records below a `folder` of rollouts by step, in order."""
    paths = sorted(folder.glob("step_*.update.safetensors"))
    return {step: path for path in paths if (step := get_rollout_step(path.name)) is not None}


class UpdateRecord:
    """Hold the record of an update: `arrays`, and the metadata of its `calls`.

    Datum `number` has the tokens `starts[number]` to `ends[number]` of the flat arrays, those of
    the sampled turns `turns[number]` of its answer.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, Any]):
        self.arrays, self.metadata = arrays, metadata
        self.calls: Sequence[Mapping[str, Any]] = metadata["calls"]
        counts = arrays["datums"][:, 3]
        self.ends = np.cumsum(counts)
        self.starts = self.ends - counts
        self.turns = np.split(arrays["turns"], np.cumsum(arrays["turn_counts"])[:-1])
        self._numbers: dict[str, list[int]] = {}
        for number, (group, index, _, _) in enumerate(arrays["datums"].tolist()):
            self._numbers.setdefault(f"{group} {index}", []).append(number)

    def list_datums(self, group: Any, index: Any) -> list[int]:
        """Return the numbers of the datums of an answer."""
        return self._numbers.get(f"{group} {index}", [])

    def list_tokens(self, numbers: Sequence[int]) -> np.ndarray:
        """Return the positions of the tokens of datums in the flat arrays."""
        spans = [np.arange(self.starts[number], self.ends[number]) for number in numbers]
        return np.concatenate([np.zeros(0, np.int64), *spans])


def read_update_file(path: Path) -> UpdateRecord:
    """Read a record. Raises RunFolderError if it is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return UpdateRecord(arrays, json.loads((file.metadata() or {})[_METADATA_KEY]))
    except (OSError, ValueError, KeyError, TypeError, IndexError, SafetensorError) as error:
        raise RunFolderError(
            f"{path} cannot be read as the record of an update: {error}"
        ) from error


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
        record = read_update_file(path)
        values_by_name, targets = _read_last_values(record), record.arrays["target_tokens"].tolist()
    except (RunFolderError, KeyError, TypeError, ValueError, IndexError):
        return
    for row in rows:
        turns = row.get("turns")
        entries = [row]
        if isinstance(turns, list) and turns:
            entries = [turn for turn in turns if isinstance(turn, dict) and turn.get("sampled")]
        for number in record.list_datums(row.get("group"), row.get("index")):
            start = int(record.starts[number])
            for turn in record.turns[number].tolist():
                entry = entries[turn] if turn < len(entries) else {}
                tokens = entry.get("token_ids", entry.get("response_tokens"))
                end = start + (len(tokens) if isinstance(tokens, list) else 0)
                if start == end or targets[start:end] != tokens:
                    break  # a row of another run
                for name, values in values_by_name.items():
                    entry[name] = values[start:end]
                start = end


def _read_last_values(record: UpdateRecord) -> dict[str, list[float | None]]:
    """Return the ratios and, if recorded, the entropies over all tokens of a record."""
    sampled = record.arrays["sampled"].astype(np.float64)
    numbers = {name: np.full(len(sampled), np.nan) for name in TOKEN_VALUES}
    for k in range(len(record.calls)):
        positions = record.list_tokens(record.arrays[f"call/{k}/datums"].tolist())
        learner = record.arrays[f"call/{k}/logprobs"].astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            numbers["ratios"][positions] = np.exp(learner - sampled[positions])
        if f"call/{k}/entropies" in record.arrays:
            numbers["entropies"][positions] = record.arrays[f"call/{k}/entropies"]
    return {
        name: [value if np.isfinite(value) else None for value in array.tolist()]
        for name, array in numbers.items()
        if np.isfinite(array).any()
    }
