"""Define the engine's requests and their checks, their state while they run, their results and
counters.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from rl.rewards import ScoringTask
from rl.sampler.prompt_logprobs import PromptLogprobs
from rl.sampler.stop_conditions import StopCondition
from rl.types import PlacedImage, SampledSequence, SampleResponse, SamplingParams, TensorData


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRequest:
    """Describe `num_samples` responses to a prompt.

    The random stream of sample i is a function of (seed, problem, first_index + i): requests that
    should differ must differ in at least one of the three. `params.seed` is not read here; the
    caller derives `seed` from it.

    `include_prompt_logprobs` requests the untempered logprob of each prompt token,
    `topk_prompt_logprobs` the k most likely tokens at each position, `target_prompt_tokens` (int64
    [prompt tokens - 1, K]) the logprobs of other tokens: row i is for the position of prompt token
    i + 1; -1 requests nothing. `next_token`: a token after the prompt that is scored as if it were
    the prompt's last. It is not fed, so it may be the last token that the context allows.

    `resume_from` (only with `num_samples` 1): a partial sample; sampling resumes after it with the
    same random stream. `images`: the placed images of the prompt.

    `conversation`: the name of a conversation. The next request of that name begins with this
    request's prompt and response, so their keys and values are kept as far as the cache has room.
    `adapter_id`: the number of the model to sample from, in a batch of several
    (`MultiAdapterDecoder`). `scoring`: how the rank that samples scores the samples.
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
    next_token: int | None = None
    resume_from: SampledSequence | None = None
    images: Sequence[PlacedImage] = ()
    conversation: str | None = None
    adapter_id: int | None = None
    scoring: ScoringTask | None = None

    @property
    def scores_prompt(self) -> bool:
        """Return whether any logprobs of prompt positions are requested."""
        return (
            self.include_prompt_logprobs
            or self.topk_prompt_logprobs > 0
            or self.target_prompt_tokens is not None
        )

    def scored_tokens(self) -> list[int]:
        """Return the tokens that the prompt logprobs are of: the prompt, and `next_token`."""
        return [*self.prompt, *(() if self.next_token is None else (self.next_token,))]

    def prompt_key(self) -> tuple:
        """Return a key of the requested prompt logprobs and of the inputs besides the tokens.

        Requests with the same tokens and the same key share a prompt.
        """
        targets = self.target_prompt_tokens
        target_key = None if targets is None else (targets.shape, targets.tobytes())
        return (
            # the tokens may include some of a partial sample, which are not scored
            len(self.prompt) if self.scores_prompt else None,
            self.include_prompt_logprobs,
            self.topk_prompt_logprobs,
            target_key,
            self.next_token,
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

    `prefill_tokens`: prompt tokens computed. `prefix_cached_tokens`: prompt tokens that were not
    computed, because another sequence that begins with them was in the cache. `decoded_rows`: rows
    of logits that a token was sampled from. `fed_tokens`: rows passed through the model to get such
    logits (the logits of a sample's first token come from the prompt, so 1 less per sample).
    `emitted_tokens`: tokens of finished samples. `peak_cache_tokens`: the part of the budget that
    the largest batch took. `drafted_tokens`: of speculative decoding; `accepted_tokens`: those that
    became tokens of a sample.
    """

    prefill_tokens: int = 0
    prefill_prompts: int = 0
    prefix_cached_tokens: int = 0
    fed_tokens: int = 0
    decoded_rows: int = 0
    emitted_tokens: int = 0
    finished_samples: int = 0
    steps: int = 0
    peak_rows: int = 0
    peak_cache_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(slots=True)
class SequenceGroup:
    """Hold the state of a request in the engine.

    `max_tokens` is resolved. `num_admitted` samples have been admitted, `num_unfinished` samples
    have not finished.
    """

    request_id: int
    request: SamplingRequest
    max_tokens: int
    stop_row: int
    stop: StopCondition
    key: tuple  # requests with equal keys share their prompt
    num_unfinished: int
    num_resumed: int = 0  # tokens sampled before it was added; they are prefilled with the prompt
    num_admitted: int = 0
    hashes: Sequence[bytes] = ()  # of the chunks of `key[0]`; empty: no prefix caching
    cached_tokens: int = 0  # of `key[0]`, that were in the cache when the first row was admitted
    sequences: list[SampledSequence | None] = field(default_factory=list)
    reader: PromptLogprobs | None = None

    def make_response(self) -> SampleResponse:
        """Return the response, with the requested logprobs of the prompt's tokens. All samples have
        finished.
        """
        response = SampleResponse(
            [sequence for sequence in self.sequences if sequence is not None],
            prompt_cache_hit_tokens=self.cached_tokens,
        )
        reader = self.reader
        if reader is None:
            return response
        if self.request.include_prompt_logprobs:
            response.prompt_logprobs = list(reader.logprobs)
        if self.request.topk_prompt_logprobs > 0:
            response.topk_prompt_logprobs = list(reader.topk_logprobs)
        if reader.target_logprobs is not None:
            response.target_prompt_logprobs = TensorData(reader.target_logprobs)
        return response


def make_prompt_reader(request: SamplingRequest) -> PromptLogprobs | None:
    """Return the reader of the logprobs of prompt positions; None if none are requested."""
    if not request.scores_prompt:
        return None
    return PromptLogprobs(
        request.scored_tokens(),
        topk=request.topk_prompt_logprobs,
        targets=request.target_prompt_tokens,
    )


def make_divergence_error(requests: Sequence[int]) -> FloatingPointError:
    """Return the error of requests with NaN or infinite logits."""
    return FloatingPointError(
        f"the logits are NaN or infinite for {len(requests)} requests (the first is number "
        f"{requests[0]}): the weights have diverged, or overflow in this dtype; "
        "lower the learning rate, or sample in float32"
    )


def check_request(request: SamplingRequest, vocab: int) -> None:
    """Raise ValueError for a prompt without tokens, for tokens to feed or to score outside the
    vocabulary, and for a wrong number of samples.
    """
    prompt = request.prompt
    if not len(prompt):
        raise ValueError("the prompt is empty: a model needs at least 1 token, for example its BOS")
    tokens, targets = request.scored_tokens(), request.target_prompt_tokens
    if min(tokens) < 0 or max(tokens) >= vocab:
        raise ValueError(f"prompt tokens lie in [0, {vocab}), got {min(tokens)} to {max(tokens)}")
    if targets is not None and targets.max(initial=-1) >= vocab:
        raise ValueError(
            f"target_prompt_tokens are below {vocab}, -1 requests nothing; got {targets.max()}"
        )
    if request.num_samples < 1:
        raise ValueError(f"num_samples is at least 1, got {request.num_samples}")
    resumed = request.resume_from
    if resumed is not None and resumed.tokens and request.num_samples != 1:
        raise ValueError(
            "a request with a partial sample (resume_from) needs num_samples=1, "
            f"got num_samples={request.num_samples}"
        )


def check_params(
    params: SamplingParams,
    stop_ids: Collection[int],
    vocab: int,
    max_tokens: int,
    resumed_tokens: Sequence[int] = (),
) -> None:
    """Raise ValueError for a token outside the vocabulary, min_tokens that cannot be reached, or a
    partial sample (`resumed_tokens`) that is complete.
    """
    params.check_vocabulary(vocab)
    if resumed_tokens and (len(resumed_tokens) >= max_tokens or resumed_tokens[-1] in stop_ids):
        raise ValueError(
            f"resume_from has {len(resumed_tokens)} tokens, the last is {resumed_tokens[-1]}: this "
            f"sample is complete with max_tokens={max_tokens} and the stop ids "
            f"{sorted(stop_ids)!s:.100}, an unfinished sample is expected"
        )
    if params.min_tokens > max_tokens:
        raise ValueError(
            f"min_tokens={params.min_tokens} is more than the {max_tokens} tokens that may be "
            "sampled: lower it"
        )
    if params.min_tokens and len([token for token in stop_ids if token < vocab]) >= vocab:
        raise ValueError(
            f"min_tokens={params.min_tokens} excludes stop ids from sampling, and all {vocab} "
            "tokens are stop ids: lower it to 0"
        )
