"""The bookkeeping of running rows as arrays, so that a step costs a few numpy calls however many
rows there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rl.sampler.streams import as_uint64, uniforms
from rl.types import SampledSequence

_UNIFORMS_AHEAD = 8
_FIELDS: dict[str, Any] = {
    "job": np.int64,  # the request's id
    "sample": np.int64,  # which of its samples
    "max_tokens": np.int64,
    "drawn": np.int64,  # tokens drawn so far
    "stop_row": np.int64,  # row of the stop table
    "has_strings": np.bool_,
    "seed": np.uint64,
    "problem": np.uint64,
    "index": np.uint64,  # of the sample in its group, as its random stream counts it
    "temperature": np.float64,
    "top_k": np.int64,
    "top_p": np.float64,
    "min_p": np.float64,
    "min_tokens": np.int64,  # stop ids are not drawn before
    "biased": np.bool_,  # whether the request has a logit bias
    "untruncated_logprobs": np.bool_,
    "buffer": np.int64,  # where its tokens are written
}
# fields that are a request's own
FROM_PARAMS = ("temperature", "top_k", "top_p", "min_p", "min_tokens", "untruncated_logprobs")


class Rows:
    """One entry a running row, in the order of the decoder's slots. Its tokens and logprobs go to a
    buffer that stays put.
    """

    def __init__(self) -> None:
        self._fields: dict[str, np.ndarray] = {
            name: np.zeros(0, dtype) for name, dtype in _FIELDS.items()
        }
        self._tokens = np.zeros((0, 16), np.int64)  # [buffers, longest response so far, rounded up]
        self._logprobs = np.zeros((0, 16), np.float64)
        self._free = np.zeros(0, np.int64)
        # [rows, the next tokens]: drawn ahead, as each call has a fixed cost
        self._uniforms: np.ndarray | None = None
        self._ahead = 0  # columns of it that are used up
        # by buffer: (tokens, version) of those drawn before the weights changed
        self._until: dict[int, list[tuple[int, int]]] = {}

    def __len__(self) -> int:
        return len(self._fields["job"])

    def __getitem__(self, name: str) -> np.ndarray:
        return self._fields[name]

    def enter(
        self, first_sample: list[int], count: list[int], first_index: list[int], **per_request: list
    ) -> None:
        """Add `count` rows for each of some requests, samples `first_sample` onwards.
        `per_request`: the other fields' values.

        `first_index` is the stream index of a request's sample 0.
        """
        counts = np.array(count)
        per_request["seed"] = [as_uint64(seed) for seed in per_request["seed"]]
        per_request["problem"] = [as_uint64(problem) for problem in per_request["problem"]]
        new: dict[str, np.ndarray] = {}
        for name, values in per_request.items():
            new[name] = np.repeat(np.array(values, _FIELDS[name]), counts)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        new["sample"] = np.repeat(first_sample, counts) + within
        new["index"] = (new["sample"] + np.repeat(first_index, counts)).astype(np.uint64)
        new["drawn"] = np.zeros(len(within), np.int64)
        new["buffer"] = self._take_buffers(len(within))
        for buffer in new["buffer"].tolist():
            self._until.pop(buffer, None)
        self._uniforms = None
        self._fields = {name: np.concatenate([self._fields[name], new[name]]) for name in _FIELDS}

    def go_on(self, row: int, begun: SampledSequence) -> None:
        """A row that has just entered has drawn these tokens before."""
        count, buffer = len(begun.tokens), int(self["buffer"][row])
        if count > self._tokens.shape[1]:
            self._pad(0, count - self._tokens.shape[1])
        self._tokens[buffer, :count], self._logprobs[buffer, :count] = begun.tokens, begun.logprobs
        self._fields["drawn"][row] = count
        versions = begun.versions or [begun.version or 0] * count
        ends = [i for i in range(1, count + 1) if i == count or versions[i] != versions[i - 1]]
        self._until[buffer] = [(end, versions[end - 1]) for end in ends]

    def now_of(self, before: int, parked: Sequence[dict[str, np.ndarray]] = ()) -> None:
        """What every row has drawn since this was last called is of the version `before`. `parked`:
        rows that left with `park`.
        """
        every = [self._fields, *parked]
        buffers, lengths = (
            np.concatenate([fields[name] for fields in every]).tolist()
            for name in ("buffer", "drawn")
        )
        for buffer, drawn in zip(buffers, lengths, strict=True):
            if drawn:
                self._until.setdefault(buffer, []).append((drawn, before))

    def versions(self, row: int, now: int) -> list[int]:
        """The version that drew each token of a row; `now`: of the newest."""
        found: list[int] = []
        for end, version in [
            *self._until.get(int(self["buffer"][row]), ()),
            (int(self["drawn"][row]), now),
        ]:
            found += [version] * (end - len(found))
        return found

    def _take_buffers(self, count: int) -> np.ndarray:
        missing = count - len(self._free)
        if missing > 0:
            height = len(self._tokens)
            self._pad(missing, 0)
            self._free = np.concatenate([self._free, np.arange(height, height + missing)])
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def _pad(self, height: int, width: int) -> None:
        self._tokens = np.pad(self._tokens, ((0, height), (0, width)))
        self._logprobs = np.pad(self._logprobs, ((0, height), (0, width)))

    def last_tokens(self) -> np.ndarray:
        """The newest token of each row; rows that have drawn none must not be asked."""
        return self._tokens[self["buffer"], self["drawn"] - 1]

    def uniforms(self) -> np.ndarray:
        """The uniform of each row's next token, float64; to be followed by `record`."""
        # past them where steps that ran by themselves were recorded
        if self._uniforms is None or self._ahead >= _UNIFORMS_AHEAD:
            position = self["drawn"][:, None] + np.arange(_UNIFORMS_AHEAD)
            names = (self["seed"][:, None], self["problem"][:, None], self["index"][:, None])
            self._uniforms, self._ahead = uniforms(*names, position.astype(np.uint64)), 0
        return self._uniforms[:, self._ahead]

    def ahead(self, count: int) -> np.ndarray:
        """The uniforms of each row's next `count` tokens, [count, rows] float64."""
        position = (self["drawn"] + np.arange(count)[:, None]).astype(np.uint64)
        return uniforms(self["seed"], self["problem"], self["index"], position)

    def record(self, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Append a token and its logprob to each row."""
        drawn, width = self["drawn"], self._tokens.shape[1]
        if drawn.max(initial=0) >= width:
            self._pad(0, width)
        self._tokens[self["buffer"], drawn] = tokens
        self._logprobs[self["buffer"], drawn] = logprobs
        self._fields["drawn"] = drawn + 1
        self._ahead += 1

    def response(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """A row's tokens and logprobs so far (views)."""
        buffer, drawn = self["buffer"][row], self["drawn"][row]
        return self._tokens[buffer, :drawn], self._logprobs[buffer, :drawn]

    def responses(self, rows: np.ndarray) -> list[tuple[list[int], list[float]]]:
        """Tokens and logprobs of these rows as lists."""
        drawn = self["drawn"][rows]
        longest = int(drawn.max(initial=0))
        tokens = self._tokens[self["buffer"][rows], :longest].tolist()
        logprobs = self._logprobs[self["buffer"][rows], :longest].tolist()
        return [(t[:n], lp[:n]) for t, lp, n in zip(tokens, logprobs, drawn.tolist(), strict=True)]

    def keep(self, source: np.ndarray) -> None:
        """Keep the rows of `source`, in that order; the others' buffers are free again."""
        gone = np.setdiff1d(self["buffer"], self["buffer"][source], assume_unique=True)
        self._free = np.concatenate([self._free, gone])
        self.reorder(source)

    def park(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """The fields of rows that leave with `reorder` and come back with `unpark`; their buffers
        stay theirs.
        """
        return {name: values[rows] for name, values in self._fields.items()}

    def unpark(self, fields: dict[str, np.ndarray]) -> None:
        self._uniforms = None
        self._fields = {
            name: np.concatenate([self._fields[name], fields[name]]) for name in _FIELDS
        }

    def reorder(self, source: np.ndarray) -> None:
        """The rows of `source`, in that order; who else leaves keeps a buffer."""
        self._fields = {name: values[source] for name, values in self._fields.items()}
        if self._uniforms is not None:
            self._uniforms = self._uniforms[source]
