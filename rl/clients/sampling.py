"""SamplingClient: draws from one version of a model's weights, which stays as it was when the
client was made.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from rl.clients.async_spellings import AsyncSampling
from rl.clients.call_checks import checked_targets, settled
from rl.clients.context import ServiceContext
from rl.clients.driver import Driver
from rl.clients.futures import APIFuture, IsItsOwnFuture
from rl.episodes import checked_ids
from rl.errors import BadRequestError, UserError
from rl.sampler import Request
from rl.seeds import derive_seed
from rl.types import ModelInput, SampleResponse, SamplingParams, TensorData
from rl.types.checked import number, switch, whole

MAX_SAMPLES = 1_000_000  # of one request: each is held in memory until all have ended


class SamplingClient(AsyncSampling, IsItsOwnFuture):
    """Samples from pinned weights; they are freed when the last client of theirs is gone."""

    _numbers = itertools.count()  # for copies and pickles
    _alive: weakref.WeakValueDictionary[int, SamplingClient] = weakref.WeakValueDictionary()

    def __init__(
        self, context: ServiceContext, version_id: int, created: Future, info: dict[str, Any] | None
    ):
        self._context = context
        self._driver = context.driver
        self._version_id = version_id
        self._created = created
        self._info = info
        self._finalizer = weakref.finalize(self, _forget, context.driver, version_id)
        self._finalizer.atexit = False
        self._number = next(SamplingClient._numbers)
        SamplingClient._alive[self._number] = self

    @classmethod
    def of_weights(
        cls,
        context: ServiceContext,
        model_path: str | None,
        base_model: str | None = None,
        tokenizer: str | None = None,
        seed: int = 0,
    ) -> SamplingClient:
        """Of a saved folder, or of a base model: see `ServiceClient.create_sampling_client`."""
        if model_path is None and base_model is None:
            raise UserError(
                "create_sampling_client needs model_path (a saved folder) or base_model (hub name, folder, tiny:<preset>)"
            )
        version_id = context.next_version_id()
        path = str(model_path) if model_path else None
        created = context.driver.submit(
            "load_sampler", version_id, path, base_model, tokenizer, seed
        )
        return cls(context, version_id, created, None)

    def __reduce__(self) -> tuple[Callable[..., SamplingClient], tuple[int, int]]:
        """A copy, or a pickle that is read in this process, is the client itself. In another
        process it has no weights: UserError.
        """
        return _the_same, (os.getpid(), self._number)

    @property
    def info(self) -> dict[str, Any]:
        return self._info if self._info is not None else self._created.result()

    @property
    def version(self) -> int:
        """How many updates the weights had seen when they were taken; samples carry it."""
        return self._created.result()["version"]

    @property
    def there(self) -> bool:
        """An extension: whether the weights are where they are drawn from (or will never be:
        `version` raises why).
        """
        return self._created.done()

    @property
    def failed(self) -> bool:
        """An extension: whether the weights could not be loaded."""
        return self._created.done() and self._created.exception() is not None

    def when_there(self, call: Callable[[], object]) -> None:
        """An extension: calls `call` once they are, from another thread."""
        self._created.add_done_callback(lambda _: call())

    @property
    def mixes(self) -> int | None:
        """An extension: clients of one number can be drawn from in one batch
        (`SampleStream(mixed=True)`); None: by itself alone.
        """
        return self._created.result().get("mixes")

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
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> APIFuture[SampleResponse]:
        """`num_samples` continuations of `prompt`, which is prefilled once for all of them.

        Samples asked for one after another run as one batch when the first of them is waited for.
        Without a seed each call draws anew from the service's own stream; with one, the same prompt
        gives the same samples. `prompt_logprobs_last_n`: those of earlier tokens are None.
        `target_prompt_logprobs` (ids, [prompt tokens - 1, K]): the logprob of each in the place of
        the prompt's token i + 1; -1 asks for nothing, and is answered with 0.
        `topk_sample_logprobs` and `prompt_alt_tokens_k` are not computed here: asking for them is
        an error.
        """
        asked = {
            "topk_sample_logprobs": topk_sample_logprobs,
            "prompt_alt_tokens_k": prompt_alt_tokens_k,
        }
        wanted = (include_prompt_logprobs, topk_prompt_logprobs, prompt_logprobs_last_n)
        request = self.request(
            prompt, num_samples, sampling_params, *wanted, asked, target_prompt_logprobs
        )
        future = self._driver.submit_sample(self._version_id, request)
        return APIFuture(
            future,
            lambda response: self._noted(response, prompt_logprobs_last_n),
            before_wait=self._driver.flush,
        )

    def request(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        prompt_logprobs_last_n: int | None = None,
        asked: Mapping[str, int] | None = None,
        target_prompt_logprobs: TensorData | None = None,
    ) -> Request:
        """An extension: what `sample` asks for, with its random stream, for a `SampleStream`.
        `asked`: what is not computed, if wanted.
        """
        prompt = settled(prompt, self.info)
        tokens = self._check_request(prompt, num_samples, sampling_params, topk_prompt_logprobs)
        for name, wanted in (asked or {}).items():
            if wanted:
                raise BadRequestError(
                    f"{name} is not computed here: topk_prompt_logprobs, or a forward of the training client, may serve"
                )
        if prompt_logprobs_last_n is not None:
            what = "a whole number from 1 to the prompt's length"
            whole("prompt_logprobs_last_n", prompt_logprobs_last_n, what, least=1, most=len(tokens))
        if sampling_params.seed is not None:
            seed, problem = int(sampling_params.seed), derive_seed("prompt", *tokens)
        else:
            # With the version, a script that resumed from a checkpoint does not repeat the draws it
            # made before.
            seed, problem = (
                self._context.seed,
                derive_seed("call", self.version, self._context.next_stream()),
            )
        return Request(
            prompt=tokens,
            images=prompt.placed(),
            num_samples=int(num_samples),
            params=sampling_params,
            seed=seed,
            problem=problem,
            first_index=0,
            include_prompt_logprobs=switch("include_prompt_logprobs", include_prompt_logprobs),
            topk_prompt_logprobs=int(topk_prompt_logprobs),
            target_prompt_tokens=checked_targets(
                target_prompt_logprobs, len(tokens), self.info["vocab_size"]
            ),
        )

    def _check_request(
        self,
        prompt: ModelInput,
        num_samples: int,
        params: SamplingParams,
        topk_prompt_logprobs: int = 0,
    ) -> list[int]:
        """The prompt's ids. What can be known now is refused now, so that it does not fail the
        samples it would run beside.
        """
        whole(
            "num_samples",
            num_samples,
            f"a whole number from 1 to {MAX_SAMPLES}",
            least=1,
            most=MAX_SAMPLES,
        )
        if not isinstance(params, SamplingParams):
            raise BadRequestError(
                f"sampling_params is a types.SamplingParams, got {type(params).__name__}"
            )
        info = self.info
        limit, vocabulary, wanted = info["max_context"], info["vocab_size"], params.max_tokens
        tokens = checked_ids("the prompt", prompt, vocabulary)
        if limit is not None and len(tokens) + (wanted or 1) > limit + 1:
            raise BadRequestError(
                f"a prompt of {len(tokens)} tokens and max_tokens={wanted} exceed the model's context of {limit}"
            )
        if limit is None and wanted is None:
            raise BadRequestError(
                "max_tokens=None goes up to the context's end, and this model has no limit: give max_tokens"
            )
        outside = [token for token in params.logit_bias or () if token >= vocabulary]
        if outside:
            raise BadRequestError(
                f"logit_bias names the token {outside[0]}, and the model's ids are 0 to {vocabulary - 1}"
            )
        whole(
            "topk_prompt_logprobs",
            topk_prompt_logprobs,
            f"a whole number from 0 to {vocabulary}",
            least=0,
            most=vocabulary,
        )
        stop = [params.stop] if isinstance(params.stop, (str, int)) else list(params.stop or ())
        if any(isinstance(one, str) for one in stop) and info["tokenizer"] is None:
            raise BadRequestError(
                f"stop strings {stop[:2]} need a tokenizer, which this model has not: give token ids"
            )
        for one in stop:
            if not isinstance(one, str) and one >= vocabulary:
                raise BadRequestError(
                    f"the stop token {one} is none of the model's, whose ids are 0 to {vocabulary - 1}"
                )
        return tokens

    def _noted(self, response: SampleResponse, last_n: int | None = None) -> SampleResponse:
        """The response, its samples named and remembered. (Bound to the client: the version lives
        as long as a future of it.)
        """
        for sequence in response.sequences:
            if not sequence.sequence_id:
                sequence.sequence_id = self._context.next_sequence_id()
                self._context.drawn.note(sequence)
        if last_n is not None and response.prompt_logprobs is not None:
            first = len(response.prompt_logprobs) - last_n
            response.prompt_logprobs = [
                None if i < first else logp for i, logp in enumerate(response.prompt_logprobs)
            ]
            if response.topk_prompt_logprobs is not None:
                response.topk_prompt_logprobs = [
                    None if i < first else row
                    for i, row in enumerate(response.topk_prompt_logprobs)
                ]
        return response

    def name_samples(
        self, response: SampleResponse, ids: Sequence[str], last_n: int | None = None
    ) -> None:
        """An extension: gives samples ids that were promised before they were drawn, and remembers
        them under these as well.

        `last_n`: `prompt_logprobs_last_n` of the request.
        """
        self._noted(response, last_n)
        for sequence, sequence_id in zip(response.sequences, ids, strict=True):
            sequence.sequence_id = sequence_id
            self._context.drawn.note(sequence)

    def sample_many(
        self, requests: Sequence[Request]
    ) -> APIFuture[tuple[list[SampleResponse], dict[str, int]]]:
        """An extension: requests with random streams of the caller's own, in one batch; responses
        and engine counters.
        """
        future = self._driver.submit("sample", self._version_id, list(requests))

        def convert(
            result: tuple[list[Any], dict[str, int]],
        ) -> tuple[list[SampleResponse], dict[str, int]]:
            for response in result[0]:
                if isinstance(response, Exception):
                    raise response
            return [self._noted(response) for response in result[0]], result[1]

        return APIFuture(future, convert)

    def compute_logprobs(
        self, prompt: ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> APIFuture[list[float | None]]:
        """The logprob of each token of `prompt` given those before it, at temperature 1; entry 0 is
        None.

        `prompt_logprobs_last_n`: those of earlier tokens are None.
        """
        if prompt_logprobs_last_n is not None:
            whole(
                "prompt_logprobs_last_n",
                prompt_logprobs_last_n,
                "a whole number of at least 1",
                least=1,
            )
        future = self.compute_logprobs_many([prompt])

        def convert(values: list[list[float | None]]) -> list[float | None]:
            skipped = (
                0 if prompt_logprobs_last_n is None else len(values[0]) - prompt_logprobs_last_n
            )
            return [None if i < skipped else value for i, value in enumerate(values[0])]

        return APIFuture(future._future, convert)

    def compute_logprobs_many(
        self, prompts: Sequence[ModelInput], temperature: float = 1.0
    ) -> APIFuture[list[list[float | None]]]:
        """An extension: the same for several sequences in one batch, of the distribution at
        `temperature`.
        """
        number(
            "temperature",
            temperature,
            "a positive number of at least 0.001 (1: as the model says)",
            least=1e-3,
        )
        vocabulary, limit = self.info["vocab_size"], self.info["max_context"]
        prompts = [settled(prompt, self.info) for prompt in prompts]
        tokens_D = [checked_ids("the sequence to score", prompt, vocabulary) for prompt in prompts]
        for tokens in tokens_D:
            if limit is not None and len(tokens) > limit:
                raise BadRequestError(
                    f"a sequence of {len(tokens)} tokens exceeds the model's context of {limit}: shorten it"
                )
        future = self._driver.submit(
            "compute_logprobs",
            self._version_id,
            tokens_D,
            temperature,
            [prompt.placed() for prompt in prompts],
        )
        return APIFuture(future, lambda values: (values, self)[0])

    def get_tokenizer(self) -> Any:
        return self.info["tokenizer"]

    def get_base_model(self) -> str:
        return self.info["base_model"]

    def get_telemetry(self) -> None:
        """Nothing is sent anywhere."""

    def release(self) -> None:
        """Gives the weights back now rather than when the client is collected; samples asked for
        before still run.
        """
        if not self._driver.closed:
            self._driver.flush()
        self._finalizer()


def _the_same(process: int, which: int) -> SamplingClient:
    client = SamplingClient._alive.get(which) if process == os.getpid() else None
    if client is None:
        raise UserError(
            "a sampling client's weights live in the process that made it, and it was unpickled in another one (or is gone there): "
            "sample in the script's own process, from threads or coroutines"
        )
    return client


def _forget(driver: Driver, version_id: int) -> None:
    if not driver.closed:
        driver.submit("forget_version", version_id)
