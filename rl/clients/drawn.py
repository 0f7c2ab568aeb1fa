"""Remembers what samples were drawn and at which temperature, so that the learner scores each datum
as it was sampled.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from rl.types import Datum, SampledProvenanceSpan, SampledSequence

# tokens that a sample is looked for by: one alone, a sure end with the logprob 0, may be that of
# all samples
_TAIL = 16


class DrawnSamples:
    """The last `limit` samples of a service. A datum is known by its provenance, or by tokens and
    logprobs at its end.

    Two samples with the same tokens and the same logprobs count as one: along it both temperatures
    give one distribution.
    """

    def __init__(self, limit: int = 65_536):
        self.limit = limit
        self._lock = threading.Lock()
        self._by_id: OrderedDict[str, float] = OrderedDict()
        # temperature, tail, length
        self._by_content: OrderedDict[bytes, tuple[float, bytes, int]] = OrderedDict()
        # by the last tokens and their logprobs: how many of which length
        self._lengths: dict[bytes, dict[int, int]] = {}

    def note(self, sequence: SampledSequence) -> None:
        temperature = sequence.temperature
        if temperature is None or not sequence.tokens or sequence.logprobs is None:
            return
        tokens, logprobs = (
            np.asarray(sequence.tokens, np.int64),
            np.asarray(sequence.logprobs, np.float32),
        )
        key, tail = _digest(tokens, logprobs), _digest(tokens[-_TAIL:], logprobs[-_TAIL:])
        with self._lock:
            self._by_id[sequence.sequence_id] = temperature
            self._drop(key)
            self._by_content[key] = (temperature, tail, len(tokens))
            counts = self._lengths.setdefault(tail, {})
            counts[len(tokens)] = counts.get(len(tokens), 0) + 1
            if len(self._by_content) > self.limit:
                self._drop(next(iter(self._by_content)))
            if len(self._by_id) > self.limit:
                self._by_id.popitem(last=False)

    def _drop(self, key: bytes) -> None:
        known = self._by_content.pop(key, None)
        if known is None:
            return
        _, tail, length = known
        counts = self._lengths[tail]
        counts[length] -= 1
        if not counts[length]:
            del counts[length]
        if not counts:
            del self._lengths[tail]

    def temperature_of(self, datum: Datum) -> float | None:
        """What the datum says, else what is remembered of its sample, else None."""
        if datum.temperature is not None:
            return datum.temperature
        with self._lock:
            found = self._by_spans(datum)
            return self._by_logprobs(datum) if found is None else found  # 0 is one that is known

    def _by_spans(self, datum: Datum) -> float | None:
        spans = [
            span
            for span in datum.loss_fn_input_spans or ()
            if isinstance(span, SampledProvenanceSpan)
        ]
        found = {self._by_id[span.sequence_id] for span in spans if span.sequence_id in self._by_id}
        return found.pop() if len(found) == 1 else None

    def _by_logprobs(self, datum: Datum) -> float | None:
        content = _content(datum)
        known = self._ending_with(*content) if content is not None else None
        return None if known is None else known[0]

    def _ending_with(self, tokens: np.ndarray, logprobs: np.ndarray) -> tuple[float, int] | None:
        """Return (temperature, length) of the sample that these tokens and logprobs end with; None
        if no sample is known.
        """
        # a sample shorter than _TAIL is its own tail
        for last in range(min(_TAIL, len(tokens)), 0, -1):
            for length in sorted(
                self._lengths.get(_digest(tokens[-last:], logprobs[-last:]), ()), reverse=True
            ):
                known = (
                    self._by_content.get(_digest(tokens[-length:], logprobs[-length:]))
                    if length <= len(tokens)
                    else None
                )
                if known is not None:
                    return known[0], length
        return None

    def sampled_targets(self, datum: Datum) -> np.ndarray | None:
        """Return which targets of the datum were sampled, bool [N], by its provenance or by tokens
        and logprobs; None if unknown.

        A sample inside the datum is looked for where the next position has a logprob of 0, as
        observations have. A sample all of whose logprobs are 0 is not recognised: any observation
        could be taken for it.
        """
        spans = datum.loss_fn_input_spans
        if spans and any(isinstance(span, SampledProvenanceSpan) for span in spans):
            sampled = np.repeat(
                [isinstance(span, SampledProvenanceSpan) for span in spans],
                [span.length for span in spans],
            )
            return sampled if len(sampled) == datum.model_input.length else None
        content = _content(datum)
        if content is None:
            return None
        tokens, logprobs = content
        sampled = np.zeros(len(tokens), bool)
        with self._lock:
            end = len(tokens)
            for candidate in _possible_ends(logprobs):
                if candidate > end:  # inside a sample that was recognised
                    continue
                end = candidate
                while known := self._ending_with(tokens[:end], logprobs[:end]):
                    begin = end - known[1]
                    if not logprobs[begin:end].any():
                        break
                    sampled[begin:end] = True
                    end = begin
        return sampled if sampled.any() else None


def _possible_ends(logprobs: np.ndarray) -> np.ndarray:
    """Positions that a sample may end before, from the last: an observation (logprob 0) or nothing
    follows, and not only zeros precede.
    """
    count = np.concatenate([[0], np.cumsum(logprobs != 0)])
    ends = np.arange(1, len(logprobs) + 1)
    near = count[ends] > count[np.maximum(ends - _TAIL, 0)]
    followed = np.concatenate([logprobs[1:] == 0, [True]])
    return ends[near & followed][::-1]


def _content(datum: Datum) -> tuple[np.ndarray, np.ndarray] | None:
    """Return (target tokens, logprobs) of a datum; None if it lacks them, or they are not one value
    a token.
    """
    fields = datum.loss_fn_inputs
    if "logprobs" not in fields or "target_tokens" not in fields:
        return None
    tokens, logprobs = fields["target_tokens"].array, fields["logprobs"].array
    return (
        (tokens, logprobs)
        if tokens.ndim == 1 and tokens.shape == logprobs.shape and len(tokens)
        else None
    )


def _digest(tokens: np.ndarray, logprobs: np.ndarray) -> bytes:
    return hashlib.blake2b(tokens.tobytes() + logprobs.tobytes(), digest_size=16).digest()


def as_drawn(drawn_at: Sequence[float | None], of_the_version: Callable[[], float]) -> list[float]:
    """The temperature to score each datum at: its own (greedy samples carry logprobs at 1), else
    that of this version's samples.
    """
    rest = of_the_version() if any(one is None for one in drawn_at) else 1.0
    return [rest if one is None else one or 1.0 for one in drawn_at]


def mean_temperature(temperatures: Sequence[float]) -> float:
    """Their mean; exactly theirs where they are all the same."""
    return temperatures[0] if len(set(temperatures)) == 1 else sum(temperatures) / len(temperatures)
