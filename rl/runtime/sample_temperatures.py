"""Remember which samples were drawn and at which temperature, so that the learner scores each datum
at its sampling temperature.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from rl.types import Datum, SampledProvenanceSpan, SampledSequence

# number of last tokens by which a sample is looked up: a single token, such as a certain end with
# logprob 0, may end all samples
_TAIL_TOKENS = 16
Digest = tuple[int, int]


class SampleTemperatures:
    """Remember the last `limit` samples of a service. A datum is matched to a sample by its
    provenance, or by the tokens and logprobs at its end.

    Two samples with the same tokens and the same logprobs count as a single sample: along it both
    temperatures give the same distribution.
    """

    def __init__(self, limit: int = 65_536):
        self.limit = limit
        self._lock = threading.Lock()
        self._by_id: OrderedDict[str, float] = OrderedDict()
        # by digest: (temperature, digest of the tail, length)
        self._by_content: OrderedDict[Digest, tuple[float, Digest, int]] = OrderedDict()
        # by digest of the tail: number of samples by length
        self._length_counts: dict[Digest, Counter[int]] = {}

    def record(self, sequence: SampledSequence) -> None:
        """Record a sample and its temperature. Ignore a sequence without temperature, tokens or
        logprobs.
        """
        temperature, tokens = sequence.temperature, sequence.tokens_np
        logprobs = sequence.logprobs_np
        if temperature is None or not len(tokens) or logprobs is None:
            return
        key = _compute_digest(tokens, logprobs)
        tail = _compute_digest(tokens[-_TAIL_TOKENS:], logprobs[-_TAIL_TOKENS:])
        with self._lock:
            self._by_id[sequence.sequence_id] = temperature
            self._remove(key)
            self._by_content[key] = (temperature, tail, len(tokens))
            self._length_counts.setdefault(tail, Counter())[len(tokens)] += 1
            if len(self._by_content) > self.limit:
                self._remove(next(iter(self._by_content)))
            if len(self._by_id) > self.limit:
                self._by_id.popitem(last=False)

    def _remove(self, key: Digest) -> None:
        """Remove a sample from the index by content."""
        entry = self._by_content.pop(key, None)
        if entry is None:
            return
        _, tail, length = entry
        counts = self._length_counts[tail]
        counts[length] -= 1
        if not counts[length]:
            del counts[length]
        if not counts:
            del self._length_counts[tail]

    def find_temperature(self, datum: Datum) -> float | None:
        """Return the datum's temperature if it has any, else the temperature of its recorded
        sample, else None. 0 (greedy) is a known temperature.
        """
        if datum.temperature is not None:
            return datum.temperature
        with self._lock:
            temperature = self._find_by_spans(datum)
            if temperature is None and (content := _get_content(datum)) is not None:
                match = self._find_sample_at_end(*content)
                temperature = None if match is None else match[0]
            return temperature

    def _find_by_spans(self, datum: Datum) -> float | None:
        """Return the temperature of the samples that the datum's provenance names. Return None
        unless they agree.
        """
        temperatures = {
            self._by_id[span.sequence_id]
            for span in datum.loss_fn_input_spans or ()
            if isinstance(span, SampledProvenanceSpan) and span.sequence_id in self._by_id
        }
        return temperatures.pop() if len(temperatures) == 1 else None

    def _find_sample_at_end(
        self, tokens: np.ndarray, logprobs: np.ndarray
    ) -> tuple[float, int] | None:
        """Return (temperature, length) of the longest recorded sample at the end of these tokens
        and logprobs; None if unknown.
        """
        # the tail of a sample shorter than _TAIL_TOKENS is the whole sample
        for last in range(min(_TAIL_TOKENS, len(tokens)), 0, -1):
            tail = _compute_digest(tokens[-last:], logprobs[-last:])
            for length in sorted(self._length_counts.get(tail, ()), reverse=True):
                if length > len(tokens):
                    continue
                digest = _compute_digest(tokens[-length:], logprobs[-length:])
                if digest in self._by_content:
                    return self._by_content[digest][0], length
        return None

    def find_sampled_targets(self, datum: Datum) -> np.ndarray | None:
        """Return which targets of the datum were sampled, bool [N], by its provenance or by tokens
        and logprobs; None if unknown.

        A sample inside the datum is searched where the next position has a logprob of 0, as
        observations have. A sample with all logprobs 0 is not recognized, because any observation
        could match it.
        """
        spans = datum.loss_fn_input_spans
        if spans and any(isinstance(span, SampledProvenanceSpan) for span in spans):
            sampled = np.repeat(
                [isinstance(span, SampledProvenanceSpan) for span in spans],
                [span.length for span in spans],
            )
            return sampled if len(sampled) == datum.model_input.length else None
        content = _get_content(datum)
        if content is None:
            return None
        tokens, logprobs = content
        sampled = np.zeros(len(tokens), bool)
        with self._lock:
            end = len(tokens)
            for candidate in _find_possible_ends(logprobs):
                if candidate > end:  # inside a recognized sample
                    continue
                end = candidate
                while match := self._find_sample_at_end(tokens[:end], logprobs[:end]):
                    begin = end - match[1]
                    if not logprobs[begin:end].any():
                        break
                    sampled[begin:end] = True
                    end = begin
        return sampled if sampled.any() else None


def _find_possible_ends(logprobs: np.ndarray) -> np.ndarray:
    """Return the positions before which a sample may end, from the last: the end of the datum or an
    observation (logprob 0) follows, and a nonzero logprob is among the preceding _TAIL_TOKENS
    positions.
    """
    count = np.concatenate([[0], np.cumsum(logprobs != 0)])
    ends = np.arange(1, len(logprobs) + 1)
    near_nonzero = count[ends] > count[np.maximum(ends - _TAIL_TOKENS, 0)]
    before_observation = np.concatenate([logprobs[1:] == 0, [True]])
    return ends[near_nonzero & before_observation][::-1]


def _get_content(datum: Datum) -> tuple[np.ndarray, np.ndarray] | None:
    """Return (target tokens, logprobs) of a datum. Return None if either is missing, or they are
    not a value per token.
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


def _compute_digest(tokens: np.ndarray, logprobs: np.ndarray) -> Digest:
    """Return hashes of tokens and logprobs, 8 bytes each, which differ in another process."""
    return hash(tokens.astype(np.int32, copy=False).tobytes()), hash(logprobs.tobytes())


def resolve_temperatures(
    sampling_temperatures: Sequence[float | None], get_default: Callable[[], float]
) -> list[float]:
    """Return the temperature to score each datum at: its sampling temperature (1 for greedy
    samples, which carry logprobs at temperature 1), or `get_default()`, the temperature of
    this version's samples, if it is unknown.
    """
    default = get_default() if None in sampling_temperatures else 1.0
    return [
        default if temperature is None else temperature or 1.0
        for temperature in sampling_temperatures
    ]
