"""What is sampled: how tokens are drawn. Names and fields as in Tinker's client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl.types.checked import number, whole

_LARGEST = 2**31 - 1  # of what counts tokens


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw tokens.

    `stop`: strings, or token ids, or None. None keeps the model's EOS tokens; `[]` disables every stop; strings and ids
    stop in addition to EOS. `top_k` -1 and `top_p` 1 mean no truncation. `temperature` 0 is greedy.
    `seed`: with the same seed (and weights) the same samples; members of a group still differ from each other.
    `untruncated_logprobs` (an extension): logprobs are those of the whole distribution at the temperature, whatever top_k and top_p
    cut off it before the draw; by default they are of what was drawn from, renormalised over what the cuts left.
    """

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] | Sequence[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    untruncated_logprobs: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            whole("max_tokens", self.max_tokens, "a whole number of at least 1, or None for what the context holds", least=1, most=_LARGEST)
        if self.seed is not None:
            whole("seed", self.seed, "a whole number, or None for draws that are new each time")
        if number("temperature", self.temperature, "a finite number of at least 0 (0 is greedy)", least=0) != 0:
            number("temperature", self.temperature, "0 (greedy) or at least 0.001: logits are divided by it", least=1e-3)
        if whole("top_k", self.top_k, "at least 1, or -1 for no truncation", least=-1, most=_LARGEST) == 0:
            raise ValueError(f"top_k is at least 1, or -1 for no truncation, got {self.top_k}")
        if number("top_p", self.top_p, "in (0, 1]", least=0, most=1) == 0:
            raise ValueError(f"top_p is in (0, 1], got {self.top_p}")
        _check_stop(self.stop)


def _check_stop(stop: Any) -> None:
    """Raises ValueError unless `stop` is None, a string, or a sequence of strings and token ids."""
    if stop is None or isinstance(stop, str):
        return
    try:
        entries = [stop] if isinstance(stop, int) else list(stop)
    except TypeError:
        raise ValueError(f"stop is a string, a list of strings or token ids, or None; got {stop!r}") from None
    for entry in entries:
        if entry == "" if isinstance(entry, str) else whole("a stop token", entry, "an id of at least 0, or a string", least=0) < 0:
            raise ValueError("stop holds an empty string, which would stop at once: leave it out, or pass [] for no stop")
