"""Define the sampling parameters. Names and fields follow Tinker's client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.types.number_checks import validate_integer, validate_number

_LARGEST = 2**31 - 1  # limit of token counts and ids


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Hold the sampling parameters of a request.

    stop: strings, token ids or None. None: the model's EOS tokens stop; `[]`: nothing stops;
        strings and ids stop in addition to EOS.
    top_k, top_p: -1 and 1 mean no truncation.
    temperature: 0 is greedy.
    seed: the same seed (and weights) gives the same samples; the members of a group still differ.
    untruncated_logprobs (extension): return the logprobs of the full distribution at the
        temperature, without bias, `min_tokens`, `min_p`, top_k and top_p. By default logprobs are
        of the distribution that was sampled from, renormalized after truncation.

    Further extensions, as in vLLM. `changes_distribution` tells whether the distribution is
    changed; the learner rejects samples of a changed distribution.
    min_p: keep only tokens of at least this share of the most likely token's probability, before
        top_k and top_p.
    logit_bias: token ids and the numbers added to their logits, before the temperature.
    min_tokens: do not sample EOS and stop ids before this many tokens.
    ignore_eos: do not stop at EOS; the stops in `stop` still apply.

    Raises ValueError for values out of range.
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
    def changes_distribution(self) -> bool:
        """Return whether sampling uses another distribution than the model's at the temperature.

        The learner computes logprobs of the model's distribution at the temperature.
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
            validate_integer(
                "max_tokens",
                self.max_tokens,
                "a whole number of at least 1, or None for what the context holds",
                minimum=1,
                maximum=_LARGEST,
            )
        if self.seed is not None:
            validate_integer(
                "seed", self.seed, "a whole number, or None for different samples each time"
            )
        if (
            validate_number(
                "temperature",
                self.temperature,
                "a finite number of at least 0 (0 is greedy)",
                minimum=0,
            )
            != 0
        ):
            validate_number(
                "temperature",
                self.temperature,
                "0 (greedy) or at least 0.001: logits are divided by it",
                minimum=1e-3,
            )
        if (
            validate_integer(
                "top_k",
                self.top_k,
                "at least 1, or -1 for no truncation",
                minimum=-1,
                maximum=_LARGEST,
            )
            == 0
        ):
            raise ValueError(f"top_k is at least 1, or -1 for no truncation, got {self.top_k}")
        if validate_number("top_p", self.top_p, "in (0, 1]", minimum=0, maximum=1) == 0:
            raise ValueError(f"top_p is in (0, 1], got {self.top_p}")
        validate_number("min_p", self.min_p, "from 0 (no limit) to 1", minimum=0, maximum=1)
        validate_integer(
            "min_tokens",
            self.min_tokens,
            "a whole number of at least 0",
            minimum=0,
            maximum=_LARGEST,
        )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}: lower "
                "min_tokens or raise max_tokens"
            )
        _check_stop(self.stop)
        if self.min_tokens and _has_texts(self.stop):
            raise ValueError(
                f"min_tokens={self.min_tokens} with the stop texts {self.stop!r}: min_tokens "
                "excludes tokens from sampling, but any tokens may spell a text; use stop token "
                "ids, or leave min_tokens out"
            )
        if self.logit_bias is not None:
            _check_bias(self.logit_bias)


def _check_stop(stop: Any) -> None:
    """Raise ValueError unless `stop` is None, a string, or a sequence of strings and token ids."""
    if stop is None or isinstance(stop, str):
        return
    try:
        entries = [stop] if isinstance(stop, int) else list(stop)
    except TypeError:
        raise ValueError(
            f"stop must be a string, a list of strings or token ids, or None; got {stop!r}"
        ) from None
    for entry in entries:
        if (
            entry == ""
            if isinstance(entry, str)
            else validate_integer(
                "a stop token", entry, "an id of at least 0, or a string", minimum=0
            )
            < 0
        ):
            raise ValueError(
                "stop holds an empty string, which would stop at the first token: remove it, or "
                "pass [] for no stop"
            )


def _has_texts(stop: Any) -> bool:
    return isinstance(stop, str) or (
        not isinstance(stop, int) and any(isinstance(entry, str) for entry in stop or ())
    )


def _check_bias(bias: Any) -> None:
    """Raise ValueError unless `bias` maps token ids to finite numbers from -100 to 100."""
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias maps token ids to numbers from -100 to 100, got {bias!r:.80}")
    for token, value in bias.items():
        validate_integer(
            "a token of logit_bias", token, "an id of at least 0", minimum=0, maximum=_LARGEST
        )
        validate_number(
            f"logit_bias of token {token}",
            value,
            "a number from -100 to 100",
            minimum=-100,
            maximum=100,
        )
