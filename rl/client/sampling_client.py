"""Provide SamplingClient: sample from a fixed version of a model's weights, the version at the
client's creation.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from rl.client.api_future import APIFuture, AwaitableClient, make_async, make_awaited
from rl.client.check_arguments import check_target_logprobs, resolve_images
from rl.client.service_context import ServiceContext, expand_path
from rl.errors import BadRequestError, ContextLengthError, UserError
from rl.rollout import validate_token_ids
from rl.sampler import SamplingRequest
from rl.seed import derive_seed
from rl.types import ModelInput, SampleResponse, SamplingParams, TensorData
from rl.types.number_checks import validate_bool, validate_integer, validate_number

T = TypeVar("T")
MAX_SAMPLES = 1_000_000  # per request: each sample is held in memory until all have ended


class SamplingClient(AwaitableClient):
    """Sample from pinned weights. The weights are freed when their last client is collected."""

    _client_ids = itertools.count()  # for copies and pickles
    _live_clients: weakref.WeakValueDictionary[int, SamplingClient] = weakref.WeakValueDictionary()

    def __init__(
        self, context: ServiceContext, version_id: int, created: Future, info: dict[str, Any] | None
    ):
        super().__init__(context, created, "free_version", version_id)
        self._version_id = version_id
        self._info = info
        self._client_id = next(SamplingClient._client_ids)
        SamplingClient._live_clients[self._client_id] = self

    @classmethod
    def from_weights(
        cls,
        context: ServiceContext,
        model_path: str | None,
        base_model: str | None = None,
        tokenizer: str | None = None,
        seed: int = 0,
        prefers_servers: bool = False,
    ) -> SamplingClient:
        """Return a client of a saved folder or of a base model: see
        `ServiceClient.create_sampling_client`. Raises UserError if neither is set.
        """
        if model_path is None and base_model is None:
            raise UserError(
                "create_sampling_client needs model_path (a saved folder) or base_model (hub "
                "name, folder, tiny:<preset>)"
            )
        version_id = context.next_version_id()
        path = expand_path(model_path) if model_path else None
        saved_by = None if path is None else context.find_saving_model(path)
        created = context.driver.submit(
            "load_sampler", version_id, path, base_model, tokenizer, seed, prefers_servers, saved_by
        )
        return cls(context, version_id, created, None)

    def __reduce__(self) -> tuple[Callable[..., SamplingClient], tuple[int, int]]:
        """Make a copy, or a pickle read in this process, the client itself. In another process it
        has no weights: unpickling raises UserError.
        """
        return _restore_client, (os.getpid(), self._client_id)

    @property
    def info(self) -> dict[str, Any]:
        """Return the model's details: base_model, arch, vocab_size, max_context, tokenizer, ..."""
        return self._info if self._info is not None else self._future.result()

    @property
    def version(self) -> int:
        """Return the number of updates the weights had seen when they were taken. Samples
        carry it.
        """
        return self._future.result()["version"]

    @property
    def ready(self) -> bool:
        """Return whether the weights are ready for sampling, or have failed to load: then `version`
        raises the error (an extension).
        """
        return self._future.done()

    @property
    def failed(self) -> bool:
        """Return whether the weights could not be loaded (an extension)."""
        return self._future.done() and self._future.exception() is not None

    def on_ready(self, callback: Callable[[], object]) -> None:
        """Call `callback` from another thread once the weights are ready or have failed (an
        extension).
        """
        self._future.add_done_callback(lambda _: callback())

    @property
    def mix_group(self) -> int | None:
        """Return an id that is equal for clients which can be sampled in a single batch
        (`SampleStream(mixed=True)`), None for a client that cannot be mixed (an extension).
        """
        return self._future.result().get("mixes")

    @property
    def sync_seconds(self) -> float:
        """Return the seconds that transferring the weights took on rank 0 (0 if they were read from
        a folder).
        """
        return self._future.result().get("seconds", 0.0)

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> APIFuture[SampleResponse]:
        """Sample `num_samples` continuations of `prompt`, which is prefilled once for all of them.

        Consecutive requests run as a single batch when the first of their futures is waited for.
        Without a seed each call uses a new random stream of the service; with a seed, the same
        prompt gives the same samples. `prompt_logprobs_last_n`: logprobs of earlier tokens are
        None. `target_prompt_logprobs` (ids, [prompt tokens - 1, K]): return the logprob of each id
        at the position of the prompt's token i + 1; -1 requests nothing and returns 0.
        `topk_sample_logprobs` and `prompt_alt_tokens_k` are not supported here: requesting them
        raises BadRequestError.
        """
        for name, value in (
            ("topk_sample_logprobs", topk_sample_logprobs),
            ("prompt_alt_tokens_k", prompt_alt_tokens_k),
        ):
            if value:
                raise BadRequestError(
                    f"{name} is not supported here: use topk_prompt_logprobs, or a forward of the "
                    "training client"
                )
        request = self.make_request(
            prompt,
            num_samples,
            sampling_params,
            include_prompt_logprobs,
            topk_prompt_logprobs,
            prompt_logprobs_last_n,
            target_prompt_logprobs,
        )
        future = self._driver.submit_sample(self._version_id, self._future, request)
        return APIFuture(
            future,
            lambda response: self._record_samples(response, prompt_logprobs_last_n),
            before_wait=self._driver.flush,
        )

    def make_request(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        prompt_logprobs_last_n: int | None = None,
        target_prompt_logprobs: TensorData | None = None,
        next_token: int | None = None,
    ) -> SamplingRequest:
        """Return the SamplingRequest that `sample` would submit, with its random stream, for a
        `SampleStream` (an extension).

        `next_token`: a token after the prompt that is scored with the prompt (`SamplingRequest`).
        """
        prompt = resolve_images(prompt, self.info)
        tokens = self._check_request(prompt, num_samples, sampling_params, topk_prompt_logprobs)
        if prompt_logprobs_last_n is not None:
            expected = "a whole number from 1 to the prompt's length"
            validate_integer(
                "prompt_logprobs_last_n",
                prompt_logprobs_last_n,
                expected,
                minimum=1,
                maximum=len(tokens),
            )
        if sampling_params.seed is not None:
            seed, problem = int(sampling_params.seed), derive_seed("prompt", *tokens)
        else:
            # With the version in the seed, a script that resumed from a checkpoint does not repeat
            # its earlier samples.
            seed, problem = (
                self._context.seed,
                derive_seed("call", self.version, self._context.next_stream()),
            )
        return SamplingRequest(
            prompt=tokens,
            images=prompt.images_with_positions(),
            num_samples=int(num_samples),
            params=sampling_params,
            seed=seed,
            problem=problem,
            first_index=0,
            include_prompt_logprobs=validate_bool(
                "include_prompt_logprobs", include_prompt_logprobs
            ),
            topk_prompt_logprobs=int(topk_prompt_logprobs),
            target_prompt_tokens=check_target_logprobs(
                target_prompt_logprobs, len(tokens), self.info["vocab_size"]
            ),
            next_token=next_token,
        )

    def _check_request(
        self,
        prompt: ModelInput,
        num_samples: int,
        params: SamplingParams,
        topk_prompt_logprobs: int = 0,
    ) -> list[int]:
        """Return the prompt's token ids. Raises BadRequestError early, so that a bad request does
        not fail other samples of its batch.
        """
        validate_integer(
            "num_samples",
            num_samples,
            f"a whole number from 1 to {MAX_SAMPLES}",
            minimum=1,
            maximum=MAX_SAMPLES,
        )
        if not isinstance(params, SamplingParams):
            raise BadRequestError(
                f"sampling_params is a types.SamplingParams, got {type(params).__name__}"
            )
        info = self.info
        limit, vocabulary, max_tokens = info["max_context"], info["vocab_size"], params.max_tokens
        tokens = validate_token_ids("the prompt", prompt, vocabulary)
        if limit is not None and len(tokens) + (max_tokens or 1) > limit + 1:
            raise ContextLengthError(
                f"a prompt of {len(tokens)} tokens and max_tokens={max_tokens} exceed the model's "
                f"context of {limit}"
            )
        if limit is None and max_tokens is None:
            raise BadRequestError(
                "max_tokens=None samples up to the context's end, and this model has no limit: "
                "set max_tokens"
            )
        params.check_vocabulary(vocabulary)
        validate_integer(
            "topk_prompt_logprobs",
            topk_prompt_logprobs,
            f"a whole number from 0 to {vocabulary}",
            minimum=0,
            maximum=vocabulary,
        )
        stop = [params.stop] if isinstance(params.stop, (str, int)) else list(params.stop or ())
        if any(isinstance(item, str) for item in stop) and info["tokenizer"] is None:
            raise BadRequestError(
                f"stop strings {stop[:2]} need a tokenizer, which this model does not have: pass "
                "token ids"
            )
        for item in stop:
            if not isinstance(item, str) and item >= vocabulary:
                raise BadRequestError(
                    f"the stop token {item} is outside the model's ids, 0 to {vocabulary - 1}"
                )
        return tokens

    def _record_samples(
        self, response: SampleResponse, last_n: int | None = None
    ) -> SampleResponse:
        """Return the response with its samples named and recorded. The method is bound, so that the
        version lives as long as a future of it.
        """
        for sequence in response.sequences:
            if not sequence.sequence_id:
                sequence.sequence_id = self._context.next_sequence_id()
                self._context.sample_temperatures.record(sequence)
        if last_n is not None and response.prompt_logprobs is not None:
            response.prompt_logprobs = _keep_last(response.prompt_logprobs, last_n)
            if response.topk_prompt_logprobs is not None:
                response.topk_prompt_logprobs = _keep_last(response.topk_prompt_logprobs, last_n)
        return response

    def name_samples(
        self, response: SampleResponse, ids: Sequence[str], last_n: int | None = None
    ) -> None:
        """Name samples by ids that were promised before sampling, and record them under these ids
        as well (an extension).

        `last_n`: `prompt_logprobs_last_n` of the request.
        """
        self._record_samples(response, last_n)
        for sequence, sequence_id in zip(response.sequences, ids, strict=True):
            sequence.sequence_id = sequence_id
            self._context.sample_temperatures.record(sequence)

    def sample_many(
        self, requests: Sequence[SamplingRequest]
    ) -> APIFuture[tuple[list[SampleResponse], dict[str, int]]]:
        """Sample requests that carry the caller's random streams, in a single batch. Return
        responses and engine counters (an extension).
        """
        arguments = self._version_id, list(requests)
        future = self._driver.submit("sample", *arguments, dependencies=[self._future])

        def convert(
            result: tuple[list[Any], dict[str, int]],
        ) -> tuple[list[SampleResponse], dict[str, int]]:
            for response in result[0]:
                if isinstance(response, Exception):
                    raise response
            return [self._record_samples(response) for response in result[0]], result[1]

        return APIFuture(future, convert)

    def compute_logprobs(
        self, prompt: ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> APIFuture[list[float | None]]:
        """Return the logprob of each token of `prompt` conditional on the preceding tokens, at
        temperature 1; entry 0 is None.

        `prompt_logprobs_last_n`: logprobs of earlier tokens are None.
        """
        if prompt_logprobs_last_n is not None:
            validate_integer(
                "prompt_logprobs_last_n",
                prompt_logprobs_last_n,
                "a whole number of at least 1",
                minimum=1,
            )
        future = self.compute_logprobs_many([prompt])._future
        return APIFuture(future, lambda values: _keep_last(values[0], prompt_logprobs_last_n))

    def compute_logprobs_many(
        self, prompts: Sequence[ModelInput], temperature: float = 1.0
    ) -> APIFuture[list[list[float | None]]]:
        """Return the logprobs of several sequences, computed in a single batch, under the
        distribution at `temperature` (an extension).
        """
        validate_number(
            "temperature",
            temperature,
            "a positive number of at least 0.001 (1: the model's distribution)",
            minimum=1e-3,
        )
        vocabulary, limit = self.info["vocab_size"], self.info["max_context"]
        prompts = [resolve_images(prompt, self.info) for prompt in prompts]
        tokens_D = [
            validate_token_ids("the sequence to score", prompt, vocabulary) for prompt in prompts
        ]
        for tokens in tokens_D:
            if limit is not None and len(tokens) - 1 > limit:  # the last token is not fed
                raise ContextLengthError(
                    f"a sequence of {len(tokens)} tokens exceeds the model's context of "
                    f"{limit}: at most {limit + 1} can be scored"
                )
        future = self._driver.submit(
            "compute_logprobs",
            self._version_id,
            tokens_D,
            temperature,
            [prompt.images_with_positions() for prompt in prompts],
            dependencies=[self._future],
        )
        return APIFuture(future, lambda values: (values, self)[0])

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer."""
        return self.info["tokenizer"]

    def get_base_model(self) -> str:
        """Return the name of the base model."""
        return self.info["base_model"]

    def get_telemetry(self) -> None:
        """Return None: no telemetry is sent."""

    def release(self) -> None:
        """Free the weights now, not when the client is collected. Samples requested before still
        run.
        """
        if not self._driver.closed:
            self._driver.flush()
        super().release()

    sample_async = make_awaited(sample)
    compute_logprobs_async = make_awaited(compute_logprobs)
    get_base_model_async = make_async(get_base_model)


def _keep_last(values: Sequence[T | None], last_n: int | None) -> list[T | None]:
    """Return the values with None in place of all but the last `last_n`; None: keep all."""
    first = 0 if last_n is None else len(values) - last_n
    return [None if i < first else value for i, value in enumerate(values)]


def _restore_client(process: int, client_id: int) -> SamplingClient:
    """Return the client of that number in this process. Raises UserError in another process, or if
    the client has been collected.
    """
    client = SamplingClient._live_clients.get(client_id) if process == os.getpid() else None
    if client is None:
        raise UserError(
            "a sampling client's weights live in the process that made it, and it was unpickled "
            "in another process (or has been collected): sample in the script's process, from "
            "threads or coroutines"
        )
    return client
