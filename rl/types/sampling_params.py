"""Define the sampling parameters. Names and fields follow Tinker's client.

A parameter is added with its field and bounds here, its use in `rl.sampler.token_sampling`, and its
name for HTTP in `rl.serve.openai_schemas.SamplingBody`. The checks, the columns of the running
rows, the server's reading of numbers and the requests to vLLM follow from the field. A number that
vLLM does not have is refused in `rl.vllm.vllm_engine`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from rl.errors import BadRequestError
from rl.types.number_checks import (
    ParameterBounds,
    bounded_field,
    validate_fields,
    validate_integer,
    validate_number,
)

_LARGEST = 2**31 - 1  # limit of token counts and ids
# parameters that leave the probabilities of the tokens at the temperature as they are
_KEEPS_DISTRIBUTION = (
    "max_tokens",
    "seed",
    "stop",
    "temperature",
    "untruncated_logprobs",
    "ignore_eos",
)
_TRUNCATES = ("top_k", "top_p", "min_p")  # keep the most likely token


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Hold the sampling parameters of a request.

    stop: strings, token ids or None. None: the model's EOS tokens stop; `[]`: nothing stops;
        strings and ids stop in addition to EOS.
    top_k, top_p: -1 and 1 mean no truncation.
    temperature: 0 is greedy.
    seed: the same seed (and weights) gives the same samples; the members of a group still differ.
    untruncated_logprobs (extension): return the logprobs of the full distribution at the
        temperature, without bias, penalties, `min_tokens`, `min_p`, top_k and top_p. By default
        logprobs are of the distribution that was sampled from, renormalized after truncation.

    Further extensions, as in vLLM. `changes_distribution` tells whether the distribution is
    changed; the learner rejects samples of a changed distribution.
    min_p: keep only tokens of at least this share of the most likely token's probability, before
        top_k and top_p.
    logit_bias: token ids and the numbers added to their logits, before the temperature.
    min_tokens: do not sample EOS and stop ids before this many tokens.
    ignore_eos: do not stop at EOS; the stops in `stop` still apply.
    presence_penalty, frequency_penalty: subtracted from the logit of a token that the response
        holds, and the second again for every time that it does. After logit_bias.
    repetition_penalty: the logit of a token that the prompt or the response holds is divided by it
        if it is positive, and multiplied otherwise. After logit_bias, before the other penalties.

    Raises ValueError for values out of range.
    """

    max_tokens: int | None = bounded_field(
        None, "a whole number of at least 1, or None for what the context holds", 1, _LARGEST
    )
    seed: int | None = bounded_field(
        None, "a whole number, or None for different samples each time"
    )
    stop: str | Sequence[str] | Sequence[int] | None = None
    temperature: float = bounded_field(
        1.0, "0 (greedy) or at least 0.001: logits are divided by it", 0, gap=(0, 1e-3)
    )
    top_k: int = bounded_field(-1, "at least 1, or -1 for no truncation", -1, _LARGEST, gap=(-1, 1))
    top_p: float = bounded_field(1.0, "in (0, 1]", math.ulp(0.0), 1)
    untruncated_logprobs: bool = False
    min_p: float = bounded_field(0.0, "from 0 (no limit) to 1", 0, 1)
    logit_bias: Mapping[int, float] | None = None
    min_tokens: int = bounded_field(0, "a whole number of at least 0", 0, _LARGEST)
    ignore_eos: bool = False
    presence_penalty: float = bounded_field(0.0, "a number from -2 to 2", -2, 2)
    frequency_penalty: float = bounded_field(0.0, "a number from -2 to 2", -2, 2)
    repetition_penalty: float = bounded_field(1.0, "a number from 0.01 to 100", 0.01, 100)

    @property
    def changes_distribution(self) -> bool:
        """Return whether sampling uses another distribution than the model's at the temperature.

        The learner computes logprobs of the model's distribution at the temperature.
        """
        return any((getattr(self, name) or 0) != (usual or 0) for name, usual in _DISTRIBUTION)

    @property
    def num_biases(self) -> int:
        """Return the number of tokens whose logits are biased."""
        return len(self.logit_bias or ())

    @property
    def penalizes(self) -> bool:
        """Return whether the logits of a token depend on earlier tokens being equal to it."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0, 0, 1)

    def check_vocabulary(self, vocabulary: int) -> None:
        """Raise ValueError for a parameter of a token that is not in the vocabulary."""
        outside = [token for token in self.logit_bias or () if token >= vocabulary]
        if outside:
            raise BadRequestError(
                f"logit_bias names the token {outside[0]}, and the model's ids are 0 to "
                f"{vocabulary - 1}"
            )

    def __post_init__(self) -> None:
        validate_fields(self)
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


# by name: the bounds of each parameter that is a number
PARAMETER_BOUNDS: Mapping[str, ParameterBounds] = {
    parameter.name: parameter.metadata["bounds"]
    for parameter in fields(SamplingParams)
    if "bounds" in parameter.metadata
}
# by name: the default of each parameter that changes the distribution, if it has another value
_DISTRIBUTION: list[tuple[str, Any]] = [
    (parameter.name, parameter.default)
    for parameter in fields(SamplingParams)
    if parameter.name not in _KEEPS_DISTRIBUTION
]
DISTRIBUTION_PARAMETERS = tuple(name for name, _ in _DISTRIBUTION)
# by name: the default of each parameter that truncates the distribution
TRUNCATION_DEFAULTS: Mapping[str, float] = {name: dict(_DISTRIBUTION)[name] for name in _TRUNCATES}


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
        if not isinstance(entry, str):
            expected = "an id of at least 0, or a string"
            validate_integer("a stop token", entry, expected, minimum=0)
        elif not entry:
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
