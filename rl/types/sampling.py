"""What is sampled: how tokens are drawn. Names and fields as in Tinker's client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.types.checked import number, whole

_LARGEST = 2**31 - 1  # of what counts tokens


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw tokens.

    `stop`: strings, or token ids, or None. None keeps the model's EOS tokens; `[]` disables every
    stop; strings and ids stop in addition to EOS. `top_k` -1 and `top_p` 1 mean no truncation.
    `temperature` 0 is greedy. `seed`: with the same seed (and weights) the same samples; members of
    a group still differ from each other. `untruncated_logprobs` (an extension): logprobs are those
    of the whole distribution at the temperature, whatever top_k and top_p cut off it before the
    draw; by default they are of what was drawn from, renormalised over what the cuts left. Further
    extensions, as in vLLM; `reshapes` tells which of them change the distribution, and the learner
    refuses samples drawn so: `min_p`: only tokens of at least this share of the likeliest one's
    probability, before top_k and top_p. `logit_bias`: token ids and what is added to their logits,
    before the temperature. `min_tokens`: EOS and stop ids are not drawn before so many tokens.
    `ignore_eos`: EOS ends nothing; stops of one's own do. `untruncated_logprobs` leaves bias,
    `min_tokens` and `min_p` out as well.
    """

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] | Sequence[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    untruncated_logprobs: bool = False
    min_p: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    min_tokens: int = 0
    ignore_eos: bool = False

    @property
    def reshapes(self) -> bool:
        """Whether tokens are drawn from another distribution than the model's own at the
        temperature, which is what the learner scores.
        """
        return (
            self.top_k != -1
            or self.top_p < 1
            or self.min_p > 0
            or bool(self.logit_bias)
            or self.min_tokens > 0
        )

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            whole(
                "max_tokens",
                self.max_tokens,
                "a whole number of at least 1, or None for what the context holds",
                least=1,
                most=_LARGEST,
            )
        if self.seed is not None:
            whole("seed", self.seed, "a whole number, or None for draws that are new each time")
        if (
            number(
                "temperature",
                self.temperature,
                "a finite number of at least 0 (0 is greedy)",
                least=0,
            )
            != 0
        ):
            number(
                "temperature",
                self.temperature,
                "0 (greedy) or at least 0.001: logits are divided by it",
                least=1e-3,
            )
        if (
            whole(
                "top_k", self.top_k, "at least 1, or -1 for no truncation", least=-1, most=_LARGEST
            )
            == 0
        ):
            raise ValueError(f"top_k is at least 1, or -1 for no truncation, got {self.top_k}")
        if number("top_p", self.top_p, "in (0, 1]", least=0, most=1) == 0:
            raise ValueError(f"top_p is in (0, 1], got {self.top_p}")
        number("min_p", self.min_p, "from 0 (no limit) to 1", least=0, most=1)
        whole("min_tokens", self.min_tokens, "a whole number of at least 0", least=0, most=_LARGEST)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}: lower the one or raise the other"
            )
        _check_stop(self.stop)
        if self.min_tokens and _has_texts(self.stop):
            raise ValueError(
                f"min_tokens={self.min_tokens} with the stop texts {self.stop!r}: min_tokens keeps tokens from being drawn, and a text may "
                "be spelt by any; give stop token ids, or leave min_tokens out"
            )
        if self.logit_bias is not None:
            _check_bias(self.logit_bias)


def _check_stop(stop: Any) -> None:
    """Raises ValueError unless `stop` is None, a string, or a sequence of strings and token ids."""
    if stop is None or isinstance(stop, str):
        return
    try:
        entries = [stop] if isinstance(stop, int) else list(stop)
    except TypeError:
        raise ValueError(
            f"stop is a string, a list of strings or token ids, or None; got {stop!r}"
        ) from None
    for entry in entries:
        if (
            entry == ""
            if isinstance(entry, str)
            else whole("a stop token", entry, "an id of at least 0, or a string", least=0) < 0
        ):
            raise ValueError(
                "stop holds an empty string, which would stop at once: leave it out, or pass [] for no stop"
            )


def _has_texts(stop: Any) -> bool:
    return isinstance(stop, str) or (
        not isinstance(stop, int) and any(isinstance(entry, str) for entry in stop or ())
    )


def _check_bias(bias: Any) -> None:
    """Raises ValueError unless `bias` maps token ids to finite numbers from -100 to 100."""
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias maps token ids to numbers from -100 to 100, got {bias!r:.80}")
    for token, value in bias.items():
        whole("a token of logit_bias", token, "an id of at least 0", least=0, most=_LARGEST)
        number(
            f"logit_bias of token {token}", value, "a number from -100 to 100", least=-100, most=100
        )
