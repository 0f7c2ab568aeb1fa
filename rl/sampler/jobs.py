"""Requests on their way through the engine, and how many tokens one may draw."""

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
    """A request on its way. `max_tokens` is resolved; `entered` samples have a row or are done;
    `left` have not ended.
    """

    request_id: int
    request: Request
    max_tokens: int
    stop_row: int
    stop_strings: tuple[str, ...]
    key: tuple  # requests with equal keys share their prompt
    left: int
    begun: int = 0  # tokens drawn before it was added; they are read with the prompt
    entered: int = 0
    shares: bool = False  # its prompt had been read for another request
    sequences: list[SampledSequence | None] = field(default_factory=list)
    reader: PromptReader | None = None
    stop_ids: Sequence[int] = ()

    def say_of_prompt(self, response: SampleResponse) -> None:
        """What was asked about the prompt's own tokens."""
        if self.reader is not None and self.request.include_prompt_logprobs:
            response.prompt_logprobs = list(self.reader.logprobs)
        if self.reader is not None and self.request.topk_prompt_logprobs > 0:
            response.topk_prompt_logprobs = list(self.reader.topk_logprobs)
        if self.reader is not None and self.reader.target_logprobs is not None:
            response.target_prompt_logprobs = TensorData(self.reader.target_logprobs)


@dataclass(slots=True)
class Prompt:
    """A prompt in the cache: the logits after its last token, and what was read of its own tokens.

    `weights`: see `Request`. `conversation`: whose turns it holds, for the next one (no logits
    then); `tokens`: what they are.
    """

    key: tuple
    logits_V: Tensor
    reader: PromptReader | None
    weights: int | None = None
    conversation: str | None = None
    tokens: tuple[int, ...] = ()


def read_with(requests: Sequence[Request]) -> dict[str, Any]:
    """What `DecodeState.prefill` takes beside the tokens: images, and whose weights read them,
    where any say so.
    """
    also: dict[str, Any] = (
        {"images": [request.images for request in requests]}
        if any(request.images for request in requests)
        else {}
    )
    if any(request.weights is not None for request in requests):
        also["weights"] = [request.weights for request in requests]
    return also


def diverged(requests: Sequence[int]) -> FloatingPointError:
    """What is told of requests whose logits say nothing."""
    return FloatingPointError(
        f"the logits are NaN or infinite for {len(requests)} requests (the first is number {requests[0]}): the weights "
        "have diverged, or overflow in this dtype; lower the learning rate, or sample in float32"
    )


class Limits(Protocol):
    """An engine, as far as its limits go."""

    decoder: Decoder
    max_context: int | None
    kv_cache_tokens: int


def tokens_to_draw(limits: Limits, state: DecodeState, prompt: int, max_tokens: int | None) -> int:
    """Tokens to draw. The last one is never fed, so prompt + max_tokens may be one more than the
    context.

    ValueError where a prompt of that length, or what is to be drawn, can never fit.
    """
    switch = limits.decoder.length_switch
    if max_tokens is None:
        if limits.max_context is None:
            raise ValueError(
                "max_tokens=None goes up to the context limit, and the model has none: set one of the two"
            )
        most = [
            limit
            for limit in (limits.max_context, switch.most(prompt) if switch else None)
            if limit is not None
        ]
        max_tokens = max(min(most) + 1 - prompt, 0)
    if limits.max_context is not None and prompt + max(max_tokens, 1) - 1 > limits.max_context:
        raise ValueError(
            f"a prompt of {prompt} tokens and max_tokens={max_tokens} exceed the context of {limits.max_context} tokens: "
            "shorten the prompt, lower max_tokens, or raise max_context up to the model's own limit"
        )
    check_length(limits.decoder, prompt, prompt + max(max_tokens, 1) - 1)
    cost = state.cost(1, prompt, 1, max_tokens - 1)
    if cost > limits.kv_cache_tokens:
        raise ValueError(
            f"one sample of a {prompt}-token prompt with max_tokens={max_tokens} takes {cost} tokens of KV cache, "
            f"kv_cache_tokens is {limits.kv_cache_tokens}: raise kv_cache_tokens or lower max_tokens"
        )
    return max_tokens


def check_biases(
    params: SamplingParams, stop_ids: Collection[int], vocab: int, max_tokens: int
) -> None:
    """Raises ValueError if logit_bias names a token that the model has not, or if min_tokens cannot
    be reached.
    """
    outside = [token for token in params.logit_bias or () if token >= vocab]
    if outside:
        raise ValueError(
            f"logit_bias names the token {outside[0]}, and the model's ids are 0 to {vocab - 1}"
        )
    if params.min_tokens > max_tokens:
        raise ValueError(
            f"min_tokens={params.min_tokens} is more than the {max_tokens} tokens that may be drawn: lower it"
        )
    if params.min_tokens and len(stop_ids) >= vocab:
        raise ValueError(
            f"min_tokens={params.min_tokens} keeps stop ids from being drawn, and all {vocab} tokens are such: lower it to 0"
        )
