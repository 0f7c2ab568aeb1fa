"""SamplingClient: draws from one version of a model's weights, which stays as it was when the client was made."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from rl.driver import Driver
from rl.futures import APIFuture, IsItsOwnFuture
from rl.sampler import Request
from rl.seeds import derive_seed
from rl.types import ModelInput, SampleResponse, SamplingParams

if TYPE_CHECKING:
    from rl.service import ServiceClient


class SamplingClient(IsItsOwnFuture):
    """Samples from pinned weights; they are freed when the last client of theirs is gone."""

    def __init__(self, service: ServiceClient, driver: Driver, version_id: int, created: Future, info: dict[str, Any] | None):
        self._service = service
        self._driver = driver
        self._version_id = version_id
        self._created = created
        self._info = info
        self._finalizer = weakref.finalize(self, _forget, driver, version_id)
        self._finalizer.atexit = False

    @property
    def info(self) -> dict[str, Any]:
        return self._info if self._info is not None else self._created.result()

    @property
    def version(self) -> int:
        """How many updates the weights had seen when they were taken; samples carry it."""
        return self._created.result()["version"]

    @property
    def sync_seconds(self) -> float:
        """What it took to bring the weights here, on rank 0 (0 where they were read from a folder)."""
        return self._created.result().get("seconds", 0.0)

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> APIFuture[SampleResponse]:
        """`num_samples` continuations of `prompt`, which is prefilled once for all of them.

        Samples asked for one after another run as one batch when the first of them is waited for. Without a seed each
        call draws anew from the service's own stream; with one, the same prompt gives the same samples.
        """
        if num_samples < 1:
            raise ValueError(f"num_samples is at least 1, got {num_samples}")
        tokens = prompt.to_ints()
        if not tokens:
            raise ValueError("the prompt is empty: sampling starts from at least one token (a BOS token, say)")
        vocabulary = self.info["vocab_size"]
        if min(tokens) < 0 or max(tokens) >= vocabulary:
            wrong = [t for t in tokens if not 0 <= t < vocabulary][:3]
            raise ValueError(f"the prompt holds ids outside 0 to {vocabulary - 1}: {wrong}")
        self._check_params(len(tokens), sampling_params)
        if sampling_params.seed is not None:
            seed, problem = sampling_params.seed, derive_seed("prompt", *tokens)
        else:
            # With the version, a script that resumed from a checkpoint does not repeat the draws it made before.
            seed, problem = self._service.seed, derive_seed("call", self.version, self._service._next_stream())
        request = Request(
            prompt=tokens,
            num_samples=num_samples,
            params=sampling_params,
            seed=seed,
            problem=problem,
            first_index=0,
            include_prompt_logprobs=include_prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs,
        )
        future = self._driver.submit_sample(self._version_id, request)
        return APIFuture(future, lambda response: self._keep(response), before_wait=self._driver.flush)

    def _check_params(self, prompt: int, params: SamplingParams) -> None:
        """What can be known now is refused now, so that it does not fail the samples it would run beside."""
        limit, wanted = self.info["max_context"], params.max_tokens
        if limit is not None and prompt + (wanted or 1) > limit + 1:
            raise ValueError(f"a prompt of {prompt} tokens and max_tokens={wanted} exceed the model's context of {limit}")
        stop = [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
        if any(isinstance(one, str) for one in stop) and self.info["tokenizer"] is None:
            raise ValueError(f"stop strings {stop[:2]} need a tokenizer, which this model has not: give token ids")

    def _keep(self, response: SampleResponse) -> SampleResponse:
        """Bound to the client, so that the version lives as long as a future of it does."""
        return response

    def sample_many(self, requests: Sequence[Request]) -> APIFuture[tuple[list[SampleResponse], dict[str, int]]]:
        """An extension: requests with random streams of the caller's own, in one batch; responses and engine counters."""
        future = self._driver.submit("sample", self._version_id, list(requests))
        return APIFuture(future, lambda result: (result, self)[0])

    def compute_logprobs(self, prompt: ModelInput) -> APIFuture[list[float | None]]:
        """The logprob of each token of `prompt` given those before it, at temperature 1; entry 0 is None."""
        future = self.compute_logprobs_many([prompt])
        return APIFuture(future._future, lambda values: values[0])

    def compute_logprobs_many(
        self, prompts: Sequence[ModelInput], temperature: float = 1.0
    ) -> APIFuture[list[list[float | None]]]:
        """An extension: the same for several sequences in one batch, of the distribution at `temperature`."""
        tokens_D, vocabulary = [prompt.to_ints() for prompt in prompts], self.info["vocab_size"]
        for tokens in tokens_D:
            if not tokens or min(tokens) < 0 or max(tokens) >= vocabulary:
                raise ValueError(f"compute_logprobs takes at least one token and ids from 0 to {vocabulary - 1}, got {tokens[:8]}")
        future = self._driver.submit("compute_logprobs", self._version_id, tokens_D, temperature)
        return APIFuture(future, lambda values: (values, self)[0])

    async def sample_async(self, *args: Any, **kwargs: Any) -> SampleResponse:
        return await self.sample(*args, **kwargs)

    async def compute_logprobs_async(self, prompt: ModelInput) -> list[float | None]:
        return await self.compute_logprobs(prompt)

    def get_tokenizer(self) -> Any:
        return self.info["tokenizer"]

    def release(self) -> None:
        """Gives the weights back now rather than when the client is collected; samples asked for before still run."""
        if not self._driver.closed:
            self._driver.flush()
        self._finalizer()


def _forget(driver: Driver, version_id: int) -> None:
    if not driver.closed:
        driver.submit("forget_version", version_id)
