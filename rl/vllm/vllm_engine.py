"""Sample from vLLM servers behind the interface of the engine in this process."""

from __future__ import annotations

import hashlib
import queue
import sys
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl.errors import ContextLengthError
from rl.layers import ExpertLayout
from rl.sampler import (
    Decoder,
    EngineCounters,
    FinishedRequest,
    SamplingRequest,
    StopStringMatcher,
    build_stop_condition,
    check_params,
)
from rl.types import (
    DISTRIBUTION_PARAMETERS,
    PARAMETER_BOUNDS,
    TRUNCATION_DEFAULTS,
    PlacedImage,
    SampledSequence,
    SampleResponse,
)
from rl.vllm.sample_reply import ReplyRules, read_prompt_logprobs, read_samples
from rl.vllm.server_pool import RejectedRequestError, ServerPool
from rl.vllm.vllm_decoder import VllmDecoder
from rl.vllm.vllm_server import VllmServer

_STEP_SECONDS = 0.05  # time that a step waits for samples
_SAMPLES_PER_REQUEST = 16  # at most: a failed request costs all of its samples
_GREEDY_TEMPERATURE = 0.0


@dataclass
class _RequestState:
    """Hold a request whose samples are not complete."""

    request: SamplingRequest
    rules: ReplyRules
    stop_strings: tuple[str, ...]
    sequences: dict[int, SampledSequence] = field(default_factory=dict)
    # of the prompt, returned by the request of sample 0
    prompt_logprobs: list[float | None] | None = None
    topk_logprobs: list[list[tuple[int, float]] | None] | None = None
    futures: list[Future[None]] = field(default_factory=list)


class VllmEngine:
    """Sample with the servers of `decoder`, which samples while this process does other work.

    The interface is that of `rl.sampler.Engine`: requests may be added, and the weights changed,
    between any two steps. A step waits for samples to arrive, at most 50 ms. The random stream of a
    sample is a function of its request, but the tokens also depend on rounding in the server's
    batch. `experts`: of the model, if samples record the experts of their tokens. Raises UserError
    from `step` if no server returns a right sample within three attempts.
    """

    def __init__(
        self,
        decoder: VllmDecoder,
        eos_token_ids: Sequence[int] = (),
        tokenizer: Any = None,
        max_context: int | None = None,
        version: int = 0,
        experts: ExpertLayout | None = None,
    ):
        self.decoder, self.version, self._experts = decoder, version, experts
        self.eos_token_ids = tuple(sorted({int(token) for token in eos_token_ids}))
        self._model_context = max_context
        self.counters = EngineCounters()
        self._stop_strings = StopStringMatcher(tokenizer) if tokenizer is not None else None
        self._states: dict[int, _RequestState] = {}
        # (request id, first sample, samples or their error); from the threads that wait for servers
        self._results: queue.SimpleQueue[tuple[int, int, list[SampledSequence] | BaseException]] = (
            queue.SimpleQueue()
        )
        self._next_id = 0

    @property
    def pool(self) -> ServerPool:
        """Return the servers."""
        return self.decoder.pool

    @property
    def max_context(self) -> int:
        """Return the number of tokens of the longest sequence, once the servers have weights."""
        return min(self.pool.max_context, self._model_context or sys.maxsize)

    @property
    def busy(self) -> bool:
        """Return whether any request is unfinished."""
        return bool(self._states)

    def add(self, request: SamplingRequest) -> int:
        """Send a request to the servers and return its id.

        Raises ValueError, before anything is sent, if the request is invalid or asks for what the
        servers do not return.
        """
        prompt = [int(token) for token in request.scored_tokens()]
        vocab = self.decoder.vocab_size
        if not prompt or min(prompt) < 0 or max(prompt) >= vocab:
            raise ValueError(f"a prompt has at least 1 token, in [0, {vocab}); got {prompt[:8]}")
        self.decoder.check_images(prompt, request.images)
        if request.num_samples < 1:
            raise ValueError(f"num_samples is at least 1, got {request.num_samples}")
        _check_supported(request)
        if request.topk_prompt_logprobs and self.pool.uses_adapters:
            raise ValueError(
                "vLLM 0.32 with --enable-lora fails at logprobs of prompts, which likely tokens "
                "need: leave topk_prompt_logprobs out (in a request to /v1: top_logprobs, or "
                "logprobs above 0), or start the servers without --enable-lora"
            )
        topk, most = request.topk_prompt_logprobs, self.pool.max_logprobs
        if topk > most >= 0:
            raise ValueError(
                f"topk_prompt_logprobs={topk} is above the {most} logprobs that a vLLM server "
                "returns: lower it, or start the servers with a larger --max-logprobs"
            )
        params = request.params
        max_tokens = params.max_tokens or max(self.max_context - len(prompt), 0)
        if max_tokens < 1 or len(prompt) + max_tokens > self.max_context:
            raise ContextLengthError(
                f"a prompt of {len(prompt)} tokens and max_tokens={params.max_tokens} exceed the "
                f"context of {self.max_context} tokens: lower max_tokens, or raise the server's "
                "--max-model-len"
            )
        condition = build_stop_condition(
            params.stop, () if params.ignore_eos else self.eos_token_ids
        )
        check_params(params, condition.token_ids, vocab, max_tokens)
        strings, matcher = condition.strings, self._stop_strings
        if strings and matcher is None:
            raise ValueError(f"stop={params.stop!r} holds strings, which need a tokenizer")
        matches = (
            (lambda tokens: matcher.matches(strings, np.array(tokens)))
            if strings and matcher is not None
            else None
        )
        rules = ReplyRules(
            max_tokens, vocab, condition.token_ids, matches, self._experts, len(prompt)
        )
        request_id, self._next_id = self._next_id, self._next_id + 1
        self._states[request_id] = state = _RequestState(request, rules, strings)
        for samples in _split_samples(request, self.pool.max_samples):
            future = self.pool.executor.submit(self._sample, request_id, samples, state, prompt)
            state.futures.append(future)
        return request_id

    def _sample(
        self, request_id: int, samples: range, state: _RequestState, prompt: list[int]
    ) -> None:
        """Request samples from a server, in a thread, and queue them or their error."""
        params = _make_params(state, samples)
        if self.pool.uses_adapters:
            params.pop("prompt_logprobs", None)
        scores_prompt, topk = "prompt_logprobs" in params, state.request.topk_prompt_logprobs

        def work(server: VllmServer) -> list[SampledSequence]:
            # a sample of an adapter keeps it: the reference keeps its folder
            first_id, decoder = server.last_loaded_id, self.decoder
            reply = server.sample(prompt, params, decoder.adapter)
            newest = self.decoder if decoder.adapter is None else decoder
            versions = self.pool.find_versions(newest.weights_id, first_id)
            sequences = read_samples(
                server.url, reply, len(samples), state.rules, versions, decoder.adapter
            )
            if 0 in samples and state.request.scores_prompt and self.pool.uses_adapters:
                state.prompt_logprobs, _ = server.score(prompt, decoder.adapter)
            elif scores_prompt:
                logprobs, best = read_prompt_logprobs(server.url, reply, prompt, topk)
                state.prompt_logprobs, state.topk_logprobs = logprobs, best
            return sequences

        result: list[SampledSequence] | BaseException
        try:
            with self.pool.reserve_rows(len(samples)):
                if self.pool.is_closed or request_id not in self._states:
                    return
                result = self.pool.send(work, lambda: request_id in self._states, len(samples))
        except BaseException as error:  # noqa: BLE001  (raised by the step that reads the result)
            result = error
        self._results.put((request_id, samples[0], result))

    def step(self) -> list[FinishedRequest]:
        """Wait for samples, and return the completed requests. One that a server refused carries
        its error.

        Raises the error of a sample that no server returned.
        """
        finished: list[FinishedRequest] = []
        timeout = _STEP_SECONDS
        while self._states:
            try:
                request_id, first, result = self._results.get(timeout=timeout)
            except queue.Empty:
                break
            timeout = 0.0
            state = self._states.get(request_id)
            if state is None:  # cancelled
                continue
            if isinstance(result, RejectedRequestError):  # the others continue
                self.cancel(request_id)
                finished.append(FinishedRequest(request_id, result))  # type: ignore[arg-type]
                continue
            if isinstance(result, BaseException):
                self.close()
                raise result
            for sample, sequence in enumerate(result, first):
                sequence.temperature = state.request.params.temperature
                state.sequences[sample] = sequence
                self.counters.emitted_tokens += len(sequence.tokens)
                self.counters.decoded_rows += len(sequence.tokens)
                self.counters.finished_samples += 1
            if len(state.sequences) == state.request.num_samples:
                del self._states[request_id]
                self.counters.prefill_prompts += 1
                self.counters.prefill_tokens += len(state.request.prompt)
                sequences = [state.sequences[i] for i in range(state.request.num_samples)]
                response = SampleResponse(sequences)
                if state.request.include_prompt_logprobs:
                    response.prompt_logprobs = state.prompt_logprobs
                if state.request.topk_prompt_logprobs:
                    response.topk_prompt_logprobs = state.topk_logprobs
                finished.append(FinishedRequest(request_id, response))
        self.counters.steps += 1
        return finished

    def run(
        self, on_finish: Callable[[FinishedRequest], object] = lambda done: None
    ) -> list[SampleResponse]:
        """Step until all requests have finished. Return responses in order of addition, or the
        error of a request that a server refused. `on_finish` is called with each as soon as it has
        finished.
        """
        finished: list[FinishedRequest] = []
        while self.busy:
            for done in self.step():
                on_finish(done)
                finished.append(done)
        return [done.result() for done in sorted(finished, key=lambda done: done.request_id)]

    def change_weights(self, decoder: Decoder, version: int) -> None:
        """Sample from `decoder`, which the servers have loaded or will load before the next step.
        Samples that are being made have tokens of both, or of the adapter that they began with.
        """
        assert isinstance(decoder, VllmDecoder)
        self.decoder, self.version = decoder, version

    def cancel(self, request_id: int) -> None:
        """Discard a request. Does nothing if it is unknown or finished."""
        state = self._states.pop(request_id, None)
        for future in () if state is None else state.futures:
            future.cancel()

    def partial_samples(
        self, request_ids: Collection[int] | None = None
    ) -> dict[int, dict[int, SampledSequence]]:
        """Return {}: a server shows a sample when it is complete."""
        return {}

    def unfinished_requests(self) -> list[tuple[int, SamplingRequest]]:
        """Return every unfinished request, in order of addition. Another engine samples it again
        from its start.
        """
        return [(number, self._states[number].request) for number in sorted(self._states)]

    def close(self) -> None:
        """Discard all requests, and send none of them again."""
        for request_id in list(self._states):
            self.cancel(request_id)


def score_on_servers(
    decoder: VllmDecoder,
    sequences: Sequence[Sequence[int]],
    temperature: float = 1.0,
    images: Sequence[Sequence[PlacedImage]] = (),
) -> list[list[float | None]]:
    """Return the logprob of each token of each sequence; entry 0 is None.

    Raises ValueError for an empty sequence, one that exceeds the server's context, and for another
    temperature than 1, at which vLLM scores prompts.
    """
    if temperature != 1:
        raise ValueError(f"vLLM scores prompts at temperature 1, not {temperature}")
    for tokens, placed in zip(sequences, images, strict=True) if any(images) else ():
        decoder.check_images(tokens, placed)
    for tokens in sequences:
        if not 0 < len(tokens) < decoder.pool.max_context:
            raise ValueError(
                f"a sequence of {len(tokens)} tokens: 1 to {decoder.pool.max_context - 1} can be "
                "scored (--max-model-len of the server)"
            )
    return decoder.pool.score(sequences, decoder.weights_id, decoder.adapter)


def _check_supported(request: SamplingRequest) -> None:
    """Raise ValueError for a request for what servers do not return."""
    params = request.params
    if request.target_prompt_tokens is not None:
        raise ValueError("the sampler vllm returns no logprobs of other tokens of a prompt")
    if request.resume_from is not None:
        raise ValueError("the sampler vllm does not resume partial samples")
    if request.adapter_id is not None:
        raise ValueError("the sampler vllm has the same weights for all requests of a batch")
    if params.untruncated_logprobs and params.changes_distribution:
        raise ValueError(
            "untruncated_logprobs: vLLM returns the logprobs of the distribution that it sampled "
            f"from; leave out {', '.join(DISTRIBUTION_PARAMETERS)}"
        )


def _split_samples(request: SamplingRequest, max_samples: int) -> list[range]:
    """Return the samples of each request to a server. Sample 0 has a request of its own if the
    prompt is scored: vLLM would score it for each sample.
    """
    first = int(request.scores_prompt)
    starts = range(first, request.num_samples, min(_SAMPLES_PER_REQUEST, max_samples))
    rest = [range(i, min(i + starts.step, request.num_samples)) for i in starts]
    return [range(1), *rest] if first else rest


def _make_params(state: _RequestState, samples: range) -> dict[str, Any]:
    """Return vLLM's sampling parameters of samples. All defaults of the server are replaced: a
    number of `SamplingParams` has vLLM's name. vLLM adds the position in the request to the seed.
    """
    params, request = state.request.params, state.request
    fields: dict[str, Any] = {
        **{name: getattr(params, name) for name in PARAMETER_BOUNDS},
        "n": len(samples),
        "max_tokens": state.rules.max_tokens,
        "seed": _derive_stream(request) + request.first_index + samples[0],
        "logprobs": 0,
        "stop_token_ids": sorted(state.rules.stop_ids),
        "ignore_eos": True,  # stop_token_ids holds them
        "detokenize": bool(state.stop_strings),
        "skip_special_tokens": False,
    }
    if params.temperature == _GREEDY_TEMPERATURE:  # its token is the same, its logprob is whole
        fields |= TRUNCATION_DEFAULTS
    if request.scores_prompt and 0 in samples:
        fields["prompt_logprobs"] = request.topk_prompt_logprobs
    if state.stop_strings:
        fields["stop"] = list(state.stop_strings)
    if params.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    return fields


def _derive_stream(request: SamplingRequest) -> int:
    """Return the seed of a problem's first sample, in [0, 2**62)."""
    key = f"{request.seed} {request.problem}"
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 2
