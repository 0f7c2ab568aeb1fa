"""What goes into the engine, what comes out, and what it counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rl.types import PlacedImage, SampledSequence, SampleResponse, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """`num_samples` responses to one prompt.

    The random stream of sample i is a function of (seed, problem, first_index + i): requests that
    should differ differ in one of them. `params.seed` is not read here; the caller derives `seed`
    from it. `include_prompt_logprobs` gives the untempered logprob of each prompt token,
    `topk_prompt_logprobs` the k likeliest tokens at each position, `target_prompt_tokens` (int64
    [prompt tokens - 1, K]) those of other tokens: row i's in the place of the prompt's token i + 1;
    -1 asks for nothing. `begun` (of one sample alone): what is drawn of it already; it goes on
    after that, from the same random stream. `images`: of the prompt, placed. `conversation`: a
    name; what this request has read and drawn stays in the cache, as far as there is room, for the
    next request of that name, which reads what is new alone. `weights`: whose these are, by number,
    where a batch is of several (`rl.sampler.mixed`).
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
    begun: SampledSequence | None = None
    images: Sequence[PlacedImage] = ()
    conversation: str | None = None
    weights: int | None = None

    @property
    def scores_prompt(self) -> bool:
        """Whether something is asked of the prompt's own tokens."""
        return (
            self.include_prompt_logprobs
            or self.topk_prompt_logprobs > 0
            or self.target_prompt_tokens is not None
        )

    def reads(self) -> tuple:
        """What is asked of the prompt, and with what it is read: requests with the same tokens
        share them where this is the same.
        """
        targets = self.target_prompt_tokens
        asked = None if targets is None else (targets.shape, targets.tobytes())
        return (
            self.include_prompt_logprobs,
            self.topk_prompt_logprobs,
            asked,
            tuple(self.images),
            self.weights,
        )


@dataclass(frozen=True, slots=True)
class Finished:
    """A request of which every sample has ended; an error: of one that failed where others go on."""

    request_id: int
    response: SampleResponse | FloatingPointError

    def given(self) -> SampleResponse:
        """The response; raises the error."""
        if isinstance(self.response, FloatingPointError):
            raise self.response
        return self.response


@dataclass(slots=True)
class Counters:
    """What was done, in tokens and rows; no clock.

    `prefill_tokens`: prompt tokens read; `kept_tokens`: those that an earlier turn had left in the
    cache, and were not read. `decoded_rows`: rows of logits that were turned into a token.
    `fed_tokens`: rows passed through the model to get such logits (a sample's first comes from the
    prompt's, so one less a sample). `emitted_tokens`: tokens of finished samples.
    `peak_cache_tokens`: what the largest batch took of the budget.
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
