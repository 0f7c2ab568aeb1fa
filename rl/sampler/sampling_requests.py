"""Define the engine's requests, results and counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rl.types import PlacedImage, SampledSequence, SampleResponse, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRequest:
    """Describe `num_samples` responses to a prompt.

    The random stream of sample i is a function of (seed, problem, first_index + i): requests that
    should differ must differ in at least one of the three. `params.seed` is not read here; the
    caller derives `seed` from it.

    `include_prompt_logprobs` requests the untempered logprob of each prompt token,
    `topk_prompt_logprobs` the k most likely tokens at each position, `target_prompt_tokens` (int64
    [prompt tokens - 1, K]) the logprobs of other tokens: row i is for the position of prompt token
    i + 1; -1 requests nothing.

    `resume_from` (only with `num_samples` 1): a partial sample; sampling resumes after it with the
    same random stream. `images`: the placed images of the prompt.

    `conversation`: the name of a conversation. The KV cache of this request's prompt and response
    is kept, as far as the cache has room, for the next request of that name, which prefills only
    its new tokens. `adapter_id`: the number of the model to sample from, in a batch of several
    (`rl.sampler.multi_adapter`).
    """

    prompt: Sequence[int]
    num_samples: int = 1
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    problem: int = 0
    first_index: int = 0
    include_prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    target_prompt_tokens: np.ndarray | None = None
    resume_from: SampledSequence | None = None
    images: Sequence[PlacedImage] = ()
    conversation: str | None = None
    adapter_id: int | None = None

    @property
    def scores_prompt(self) -> bool:
        """Return whether any logprobs of prompt positions are requested."""
        return (
            self.include_prompt_logprobs
            or self.topk_prompt_logprobs > 0
            or self.target_prompt_tokens is not None
        )

    def prompt_key(self) -> tuple:
        """Return a key of the requested prompt logprobs and of the inputs besides the tokens.

        Requests with the same tokens and the same key share a prompt.
        """
        targets = self.target_prompt_tokens
        target_key = None if targets is None else (targets.shape, targets.tobytes())
        return (
            self.include_prompt_logprobs,
            self.topk_prompt_logprobs,
            target_key,
            tuple(self.images),
            self.adapter_id,
        )


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """Hold the response of a finished request, or its error if it failed while other requests
    continue.
    """

    request_id: int
    response: SampleResponse | FloatingPointError

    def result(self) -> SampleResponse:
        """Return the response. Raises the error of a failed request."""
        if isinstance(self.response, FloatingPointError):
            raise self.response
        return self.response


@dataclass(slots=True)
class EngineCounters:
    """Count the engine's work in tokens and rows, without times.

    `prefill_tokens`: prompt tokens computed. `kept_tokens`: prompt tokens that were in the cache of
    an earlier turn, and not computed. `decoded_rows`: rows of logits that a token was sampled from.
    `fed_tokens`: rows passed through the model to get such logits (the logits of a sample's first
    token come from the prompt, so 1 less per sample). `emitted_tokens`: tokens of finished samples.
    `peak_cache_tokens`: the part of the budget that the largest batch took.
    """

    prefill_tokens: int = 0
    prefill_prompts: int = 0
    kept_tokens: int = 0
    fed_tokens: int = 0
    decoded_rows: int = 0
    emitted_tokens: int = 0
    finished_samples: int = 0
    steps: int = 0
    peak_rows: int = 0
    peak_cache_tokens: int = 0
