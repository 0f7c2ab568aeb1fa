"""Define the state of requests in the engine, and resolve and check their token limits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from rl.sampler.cache import DecodeState
from rl.sampler.decoder import Decoder, check_length
from rl.sampler.prompt_logprobs import PromptReader
from rl.sampler.requests import Request
from rl.types import SampledSequence, SampleResponse, SamplingParams, TensorData


@dataclass(slots=True)
class Job:
    """Hold the state of a request in the engine.

    `max_tokens` is resolved. `entered` samples have been admitted, `left` samples have not
    finished.
    """

    request_id: int
    request: Request
    max_tokens: int
    stop_row: int
    stop_strings: tuple[str, ...]
    key: tuple  # requests with equal keys share their prompt
    left: int
    begun: int = 0  # tokens sampled before it was added; they are prefilled with the prompt
    entered: int = 0
    shares: bool = False  # the prompt was already prefilled for another request
    sequences: list[SampledSequence | None] = field(default_factory=list)
    reader: PromptReader | None = None
    stop_ids: Sequence[int] = ()

    def say_of_prompt(self, response: SampleResponse) -> None:
        """Store the requested logprobs of the prompt's tokens in the response."""
        if self.reader is not None and self.request.include_prompt_logprobs:
            response.prompt_logprobs = list(self.reader.logprobs)
        if self.reader is not None and self.request.topk_prompt_logprobs > 0:
            response.topk_prompt_logprobs = list(self.reader.topk_logprobs)
        if self.reader is not None and self.reader.target_logprobs is not None:
            response.target_prompt_logprobs = TensorData(self.reader.target_logprobs)


@dataclass(slots=True)
class Prompt:
    """Hold a prompt in the cache: the logits after its last token, and the reader of its logprobs.

    `weights`: see `Request`. `conversation`: the name of the conversation that is cached for its
    next turn (without logits); `tokens`: its tokens.
    """

    key: tuple
    logits_V: Tensor
    reader: PromptReader | None
    weights: int | None = None
    conversation: str | None = None
    tokens: tuple[int, ...] = ()


def read_with(requests: Sequence[Request]) -> dict[str, Any]:
    """Return the optional arguments of `DecodeState.prefill`: images and model indices, if any are
    set.
    """
    kwargs: dict[str, Any] = (
        {"images": [request.images for request in requests]}
        if any(request.images for request in requests)
        else {}
    )
    if any(request.weights is not None for request in requests):
        kwargs["weights"] = [request.weights for request in requests]
    return kwargs


def diverged(requests: Sequence[int]) -> FloatingPointError:
    """Return the error of requests with NaN or infinite logits."""
    return FloatingPointError(
        f"the logits are NaN or infinite for {len(requests)} requests (the first is number "
        f"{requests[0]}): the weights have diverged, or overflow in this dtype; "
        "lower the learning rate, or sample in float32"
    )


class Limits(Protocol):
    """Declare the limits of an engine."""

    decoder: Decoder
    max_context: int | None
    kv_cache_tokens: int


def tokens_to_draw(limits: Limits, state: DecodeState, prompt: int, max_tokens: int | None) -> int:
    """Return the maximum number of tokens to sample.

    The last token is never fed, so prompt + max_tokens may exceed the context by 1. Raises
    ValueError if the prompt or the response can never fit.
    """
    switch = limits.decoder.length_switch
    if max_tokens is None:
        if limits.max_context is None:
            raise ValueError(
                "max_tokens=None means up to the context limit, and the model has no limit: "
                "set max_tokens or max_context"
            )
        most = [
            limit
            for limit in (limits.max_context, switch.most(prompt) if switch else None)
            if limit is not None
        ]
        max_tokens = max(min(most) + 1 - prompt, 0)
    if limits.max_context is not None and prompt + max(max_tokens, 1) - 1 > limits.max_context:
        raise ValueError(
            f"a prompt of {prompt} tokens and max_tokens={max_tokens} exceed the context of "
            f"{limits.max_context} tokens: shorten the prompt, lower max_tokens, "
            "or raise max_context up to the model's limit"
        )
    check_length(limits.decoder, prompt, prompt + max(max_tokens, 1) - 1)
    cost = state.cost(1, prompt, 1, max_tokens - 1)
    if cost > limits.kv_cache_tokens:
        raise ValueError(
            f"one sample of a {prompt}-token prompt with max_tokens={max_tokens} takes {cost} "
            f"tokens of KV cache, kv_cache_tokens is {limits.kv_cache_tokens}: "
            "raise kv_cache_tokens or lower max_tokens"
        )
    return max_tokens


def check_biases(
    params: SamplingParams, stop_ids: Collection[int], vocab: int, max_tokens: int
) -> None:
    """Raise ValueError if logit_bias names an unknown token, or if min_tokens cannot be reached."""
    outside = [token for token in params.logit_bias or () if token >= vocab]
    if outside:
        raise ValueError(
            f"logit_bias names the token {outside[0]}, and the model's ids are 0 to {vocab - 1}"
        )
    if params.min_tokens > max_tokens:
        raise ValueError(
            f"min_tokens={params.min_tokens} is more than the {max_tokens} tokens that may be "
            "sampled: lower it"
        )
    if params.min_tokens and len(stop_ids) >= vocab:
        raise ValueError(
            f"min_tokens={params.min_tokens} excludes stop ids from sampling, and all {vocab} "
            "tokens are stop ids: lower it to 0"
        )
