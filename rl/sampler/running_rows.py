"""Keep the state of running rows as arrays, so that a step costs a few numpy calls for any number
of rows.

The uniforms of a row are counter-based: a token's random number depends on its indices, not on
earlier samples. They come from Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011, "Parallel random
numbers: as easy as 1, 2, 3"), vectorised over rows in numpy. Key: the seed. Counter: the position
in the response, the index in the group and the problem. So a sample's stream depends neither on the
rest of the batch, nor on the number of ranks, nor on the order of requests.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from rl.sampler.decode_state import find_missing, index_in_row
from rl.sampler.sampling_requests import SequenceGroup
from rl.types import SampledSequence, SamplingParams

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10
_MASK64 = (1 << 64) - 1
_UNIFORMS_AHEAD = 16
_NEWEST = np.iinfo(np.int64).min  # version of tokens of the newest weights, until they change
# a column for each parameter that is a number or a flag, by name
_PARAM_COLUMNS: dict[str, Any] = {
    parameter.name: type(parameter.default)
    for parameter in fields(SamplingParams)
    if isinstance(parameter.default, (bool, int, float))
}
_FIELDS: dict[str, Any] = {
    "request_id": np.int64,  # the request's id
    "sample": np.int64,  # index among the request's samples
    "max_tokens": np.int64,
    "num_sampled": np.int64,  # tokens sampled so far
    "stop_row": np.int64,  # row of the stop table
    "has_strings": np.bool_,
    "seed": np.uint64,
    "problem": np.uint64,
    "index": np.uint64,  # of the sample in its group, for its random stream
    "num_biases": np.int64,  # see `SamplingParams`
    "penalizes": np.bool_,
    "first_uniform": np.int64,  # index of the token of the row's first uniform in `_uniforms`
    "buffer": np.int64,  # index of the buffer of its tokens
    **_PARAM_COLUMNS,
}


def make_param_columns(params: Sequence[SamplingParams]) -> dict[str, np.ndarray]:
    """Return the columns of the sampling parameters, with an entry for each of `params`."""
    names = (*_PARAM_COLUMNS, "num_biases", "penalizes")
    return {
        name: np.array([getattr(each, name) for each in params], _FIELDS[name]) for name in names
    }


class RunningRows:
    """Hold an entry for each running row, in the order of the decoder's slots.

    Its tokens and logprobs are in a buffer with a fixed index.
    """

    def __init__(self) -> None:
        self._fields: dict[str, np.ndarray] = {
            name: np.zeros(0, dtype) for name, dtype in _FIELDS.items()
        }
        self._tokens = np.zeros((0, 16), np.int64)  # [buffers, longest response so far, rounded up]
        self._logprobs = np.zeros((0, 16), np.float64)
        self._versions = np.zeros((0, 16), np.int64)  # of the weights, see `record_version`
        self._free_buffers = np.zeros(0, np.int64)
        # [tokens from `first_uniform` on, rows]: generated ahead, as each call has a fixed cost
        self._uniforms: np.ndarray | None = None
        # `RowSamplingSettings` of these rows, made when they are sampled
        self.settings: Any = None

    def __len__(self) -> int:
        return len(self._fields["request_id"])

    def __getitem__(self, name: str) -> np.ndarray:
        """Return the array of a field, with an entry for each row."""
        return self._fields[name]

    def add(self, groups: Sequence[SequenceGroup], counts: Sequence[int]) -> None:
        """Add rows for the next `counts` waiting samples of these groups."""
        requests = [group.request for group in groups]
        columns = make_param_columns([request.params for request in requests])
        values: dict[str, list] = {
            "request_id": [group.request_id for group in groups],
            "sample": [group.num_admitted for group in groups],
            "max_tokens": [group.max_tokens for group in groups],
            "stop_row": [group.stop_row for group in groups],
            "has_strings": [bool(group.stop.strings) for group in groups],
            "seed": [as_uint64(request.seed) for request in requests],
            "problem": [as_uint64(request.problem) for request in requests],
        }
        columns |= {name: np.array(column, _FIELDS[name]) for name, column in values.items()}
        new = {name: np.repeat(column, counts) for name, column in columns.items()}
        starts = np.cumsum(counts) - counts
        new["sample"] += np.arange(len(new["sample"])) - np.repeat(starts, counts)
        first_index = np.repeat([request.first_index for request in requests], counts)
        new["index"] = (new["sample"] + first_index).astype(np.uint64)
        new["num_sampled"] = new["first_uniform"] = np.zeros(len(first_index), np.int64)
        new["buffer"] = self._take_buffers(len(first_index))
        self._versions[new["buffer"]] = _NEWEST
        self.restore(new)

    def resume(self, row: int, resume_from: SampledSequence) -> None:
        """Restore a partial sample's tokens, logprobs and versions in a newly entered row."""
        count, buffer = len(resume_from.tokens), int(self["buffer"][row])
        if count > self._tokens.shape[1]:
            self._pad(0, count - self._tokens.shape[1])
        self._tokens[buffer, :count], self._logprobs[buffer, :count] = (
            resume_from.tokens,
            resume_from.logprobs,
        )
        self._versions[buffer, :count] = resume_from.versions or resume_from.version or 0
        self._fields["num_sampled"][row] = count

    def record_version(self, version: int, preempted: Sequence[dict[str, np.ndarray]] = ()) -> None:
        """Record that every row's tokens since the last call were sampled by version `version`.

        `preempted`: the fields of preempted rows.
        """
        for rows in (self._fields, *preempted):
            versions = self._versions[rows["buffer"]]
            is_sampled = np.arange(versions.shape[1]) < rows["num_sampled"][:, None]
            versions[is_sampled & (versions == _NEWEST)] = version
            self._versions[rows["buffer"]] = versions

    def find_versions(self, row: int, newest: int) -> tuple[int, list[int] | None]:
        """Return the oldest weight version that sampled a token of a row, and the version of each
        token if they differ. `newest`: the newest version.
        """
        versions = self._versions[self["buffer"][row], : self["num_sampled"][row]]
        if (versions == _NEWEST).all():
            return newest, None
        versions = np.where(versions == _NEWEST, newest, versions)
        oldest = int(versions.min())
        return oldest, versions.tolist() if (versions != oldest).any() else None

    def _take_buffers(self, count: int) -> np.ndarray:
        """Take `count` free buffers, adding buffers if too few are free."""
        missing = count - len(self._free_buffers)
        if missing > 0:
            height = len(self._tokens)
            self._pad(missing, 0)
            self._free_buffers = np.concatenate(
                [self._free_buffers, np.arange(height, height + missing)]
            )
        taken, self._free_buffers = self._free_buffers[:count], self._free_buffers[count:]
        return taken

    def _pad(self, height: int, width: int) -> None:
        """Add `height` buffers, and `width` tokens to each buffer."""
        self._tokens = np.pad(self._tokens, ((0, height), (0, width)))
        self._logprobs = np.pad(self._logprobs, ((0, height), (0, width)))
        self._versions = np.pad(self._versions, ((0, height), (0, width)), constant_values=_NEWEST)

    def last_tokens(self) -> np.ndarray:
        """Return the newest token of each row; every row must have at least 1 token."""
        return self._tokens[self["buffer"], self["num_sampled"] - 1]

    def next_uniforms(self, ahead: int = 0) -> np.ndarray:
        """Return the uniform of each row's next token, float64. `ahead`: tokens after it whose
        uniforms an `expand` reads next.
        """
        if self._find_uniforms(1 + ahead) is None:
            self.generate_uniforms(_UNIFORMS_AHEAD * (1 + ahead))
        return self.uniforms_ahead(1)[0]

    def uniforms_ahead(self, count: int, start: int = 0) -> np.ndarray:
        """Return the uniforms of `count` tokens of each row, [count, rows] float64, after its next
        `start` tokens.
        """
        index = self._find_uniforms(count, start)
        if index is None:
            index = self.generate_uniforms(count, start)
        assert self._uniforms is not None
        steps = index + np.arange(count)[:, None]
        return self._uniforms.take(steps * len(self) + np.arange(len(self)))

    def _find_uniforms(self, count: int, start: int = 0) -> np.ndarray | None:
        """Return the index in `_uniforms` of each row's token after its next `start` tokens; None
        if `count` tokens from there on have not been generated.
        """
        index = self["num_sampled"] + start - self["first_uniform"]
        size = 0 if self._uniforms is None else len(self._uniforms)
        fits = index.min(initial=0) >= 0 and index.max(initial=0) + count <= size
        return index if fits else None

    def generate_uniforms(self, count: int, start: int = 0) -> np.ndarray:
        """Generate what `uniforms_ahead` returns, while the device works; return the index of the
        first.
        """
        self._fields["first_uniform"] = first = self["num_sampled"] + start
        position = (first + np.arange(count)[:, None]).astype(np.uint64)
        self._uniforms = philox_uniforms(self["seed"], self["problem"], self["index"], position)
        return np.zeros_like(first)

    def record(
        self, tokens: np.ndarray, logprobs: np.ndarray, counts: np.ndarray | int = 1
    ) -> None:
        """Append to each of the newest N rows the first `counts` of its next tokens [S, N], with
        their logprobs.
        """
        first, num_sampled = len(self) - tokens.shape[1], self["num_sampled"].copy()
        width, least = self._tokens.shape[1], int(num_sampled[first:].max(initial=0)) + len(tokens)
        if least > width:
            self._pad(0, max(width, least - width))
        starts = self["buffer"][first:] * self._tokens.shape[1] + num_sampled[first:]
        places = starts + np.arange(len(tokens))[:, None]
        for buffer, values in ((self._tokens, tokens), (self._logprobs, logprobs)):
            buffer.reshape(-1)[places] = values
        num_sampled[first:] += counts
        self._fields["num_sampled"] = num_sampled

    def expand(self, rows: np.ndarray) -> RunningRows:
        """Return a view with an entry for each of `rows` [X], ascending. The entries of a row are
        consecutive positions: entry i counts i more tokens, written by `write_ahead`.
        """
        index = index_in_row(rows)
        self.next_uniforms(int(index.max(initial=0)))
        view = self._view(rows)
        view._uniforms = self._uniforms[:, rows] if self._uniforms is not None else None
        view.advance(index)
        return view

    def newest(self, count: int) -> RunningRows:
        """Return a view of the newest `count` rows, to be read only."""
        return self._view(slice(len(self) - count, None))

    def _view(self, rows: np.ndarray | slice) -> RunningRows:
        """Return a view with an entry for each of `rows`."""
        view = copy.copy(self)
        view._fields, view._uniforms, view.settings = self.select(rows), None, None
        return view

    def write_ahead(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """Write tokens after those of each row, without counting them (`advance`); `rows` [X]
        ascend.
        """
        places = self["num_sampled"][rows] + index_in_row(rows)
        # with the token after those of each row
        width = max(int(places.max(initial=0)) + 1, int(self["num_sampled"].max(initial=0))) + 1
        if width > self._tokens.shape[1]:
            self._pad(0, width)
        self._tokens[self["buffer"][rows], places] = tokens

    def next_tokens(self) -> np.ndarray:
        """Return the token that `write_ahead` wrote after those of each row."""
        return self._tokens[self["buffer"], self["num_sampled"]]

    def replace_next(self, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Replace the tokens that `write_ahead` wrote, and count them."""
        places = self["buffer"], self["num_sampled"]
        self._tokens[places], self._logprobs[places] = tokens, logprobs
        self.advance(1)

    def advance(self, counts: np.ndarray | int) -> None:
        """Count `counts` more tokens of each row."""
        self._fields["num_sampled"] = self["num_sampled"] + counts

    def response(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a row's tokens and logprobs so far (views)."""
        buffer, num_sampled = self["buffer"][row], self["num_sampled"][row]
        return self._tokens[buffer, :num_sampled], self._logprobs[buffer, :num_sampled]

    def padded_responses(self) -> np.ndarray:
        """Return the tokens of all rows, [N, longest response]; what follows a response is
        unspecified.
        """
        return self._tokens[self["buffer"], : self["num_sampled"].max(initial=0)]

    def responses(self, rows: np.ndarray) -> list[tuple[list[int], list[float]]]:
        """Return tokens and logprobs of these rows as lists."""
        num_sampled = self["num_sampled"][rows]
        longest = int(num_sampled.max(initial=0))
        tokens = self._tokens[self["buffer"][rows], :longest].tolist()
        logprobs = self._logprobs[self["buffer"][rows], :longest].tolist()
        return [
            (t[:n], lp[:n]) for t, lp, n in zip(tokens, logprobs, num_sampled.tolist(), strict=True)
        ]

    def keep_rows(self, source: np.ndarray) -> None:
        """Keep the rows of `source`, in that order, and free the buffers of the other rows."""
        freed = self["buffer"][find_missing(source, len(self))]
        self._free_buffers = np.concatenate([self._free_buffers, freed])
        self.reorder(source)

    def select(self, rows: np.ndarray | slice) -> dict[str, np.ndarray]:
        """Return the fields of some rows. Preempted rows leave with `reorder`, keep their buffers,
        and return with `restore`.
        """
        return {name: values[rows] for name, values in self._fields.items()}

    def release(self, fields: dict[str, np.ndarray]) -> None:
        """Free the buffers of rows with these fields, from `select`."""
        self._free_buffers = np.concatenate([self._free_buffers, fields["buffer"]])

    def restore(self, fields: dict[str, np.ndarray]) -> None:
        """Append the rows with these fields, from `select`."""
        self._uniforms = self.settings = None
        self._fields = {
            name: np.concatenate([self._fields[name], fields[name]]) for name in _FIELDS
        }

    def reorder(self, source: np.ndarray) -> None:
        """Keep the rows of `source`, in that order; removed rows keep their buffers."""
        self._fields, self.settings = self.select(source), None
        if self._uniforms is not None:
            self._uniforms = self._uniforms.take(source, 1)


def as_uint64(value: int) -> np.uint64:
    """Return a Python integer of any sign and size modulo 2^64."""
    return np.uint64(value & _MASK64)


def philox4x32(
    counter: tuple[np.ndarray, ...], key: tuple[np.ndarray, ...]
) -> tuple[np.ndarray, ...]:
    """Run ten Philox rounds on four counter words and two key words; return four words.

    Each word is an uint64 array holding 32 bits.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = _MULTIPLIERS[0] * c0  # 32 x 32 bits fit in 64
        product1 = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _HALF) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def philox_uniforms(
    seed: np.ndarray, problem: np.ndarray, index: np.ndarray, position: np.ndarray
) -> np.ndarray:
    """Return uniforms in [0, 1) with 53 bits, float64, for each row of the (broadcast) uint64
    arguments.

    `index` (of the sample in its group) and `position` (of the token in its response) count modulo
    2^32.
    """
    seed, problem, index, position = np.broadcast_arrays(seed, problem, index, position)
    counter = (position & _LOW, index & _LOW, problem & _LOW, problem >> _HALF)
    word0, word1, _, _ = philox4x32(counter, (seed & _LOW, seed >> _HALF))
    bits = ((word0 << _HALF) | word1) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
