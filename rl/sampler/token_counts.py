"""Keep a table of token counts on the device, for rows with penalties in steps without the host.

A row of the table holds how often a running row has sampled each token, and which tokens are in its
prompt. The steps count the tokens that they sample; a row that starts, resumes, or has sampled
tokens elsewhere is written anew. Shapes: M rows, P rows of the table, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rl.sampler.decode_state import send_to_device
from rl.sampler.running_rows import RunningRows
from rl.sampler.sampling_requests import SequenceGroup

MAX_COUNT = (1 << 14) - 1  # most tokens of a row
IN_PROMPT = 1 << 14  # added to the counts of the tokens of a prompt
MAX_COUNTS = 1 << 26  # most entries of a table, of 2 bytes each

PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


class TokenCountTable:
    """Track which running rows the table on the device holds."""

    def __init__(self) -> None:
        self._table: Tensor | None = None
        # by request and sample: row of the table, and tokens of the running row that are counted
        self._places: dict[tuple[int, int], tuple[int, int]] = {}

    def forget(self) -> None:
        """Drop what is known of the table."""
        self._places = {}

    def advance(self, count: int) -> None:
        """Record that the device samples `count` more tokens of each row that does not end."""
        self._places = {key: (place, n + count) for key, (place, n) in self._places.items()}

    def write(
        self,
        table: Tensor,
        rows: RunningRows,
        groups: Mapping[int, SequenceGroup],
        index: np.ndarray,
    ) -> np.ndarray:
        """Let `table` int16 [P, V] hold the counts of the rows `index` [M], and of no others;
        return their rows of the table [M]. The last row of the table stays as it is.
        """
        if self._table is not table:
            self._table, self._places = table, {}
        fields = (rows[name][index].tolist() for name in ("request_id", "sample", "num_sampled"))
        samples = list(zip(index.tolist(), *fields, strict=True))
        keys = [(request, sample) for _, request, sample, _ in samples]
        known = {key: self._places[key] for key in keys if key in self._places}
        used = {place for place, _ in known.values()}
        free = (place for place in range(len(table) - 1) if place not in used)
        places, changed = dict[tuple[int, int], tuple[int, int]](), list[tuple[int, int]]()
        for row, request, sample, count in samples:
            place, counted = known.get((request, sample)) or (next(free), -1)
            places[request, sample] = place, count
            if counted != count:
                changed.append((place, row))
        self._places = places
        if changed:
            self._write_rows(table, rows, groups, changed)
        return np.array([places[key][0] for key in keys], np.int64)

    def _write_rows(
        self,
        table: Tensor,
        rows: RunningRows,
        groups: Mapping[int, SequenceGroup],
        changed: list[tuple[int, int]],
    ) -> None:
        """Write the counts of rows: pairs of the row of the table and the running row."""
        vocab, sampled, prompts = table.shape[1], [], []
        for place, row in changed:
            request = groups[int(rows["request_id"][row])].request
            sampled.append(place * vocab + rows.response(row)[0])
            if request.params.repetition_penalty != 1:
                prompts.append(place * vocab + np.array(request.prompt, np.int64))
        tokens, counts = np.unique(np.concatenate(sampled), return_counts=True)
        in_prompt = np.unique(np.concatenate([tokens[:0], *prompts]))
        entries = np.union1d(tokens, in_prompt)
        values = np.zeros(len(entries), np.int16)
        values[np.searchsorted(entries, tokens)] = counts
        values[np.searchsorted(entries, in_prompt)] += IN_PROMPT
        places = np.array([place for place, _ in changed])
        on_device = [
            send_to_device(torch.from_numpy(array), table.device)
            for array in (places, entries, values)
        ]
        table.index_fill_(0, on_device[0], 0)
        table.view(-1).index_copy_(0, *on_device[1:])
