"""Run all training and sampling of a server on the thread that owns the service.

The thread alternates between slices of training jobs and slices of the sampling batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rl.clients import SampleStream, SamplingClient, ServiceClient
from rl.errors import UserError
from rl.renderers import Renderer, get_renderer
from rl.sampler import Request
from rl.serve.base_checks import checked_context
from rl.serve.refusals import Interrupted, Refused, drop_traceback, told
from rl.serve.settings import LOCAL, ServedBase, ServeSettings
from rl.serve.tally import Tally
from rl.serve.turns import Job, SampleJob, Turns, Work
from rl.types import ModelInput, SampledSequence, SampleResponse, SamplingParams

log = logging.getLogger("whetstone.serve")

_STEPS_SHOWN = 4  # tokens per slice if a request of the batch streams
# samples that arrive within this time share a batch from the start
_GATHER_SECONDS, _MOST_GATHER_SECONDS = 0.002, 0.02

Show = Callable[[dict[int, SampledSequence]], None]
# key of a batch: the number of a base model (`mixes`), whose clients share a batch, or a client
Drawing = SamplingClient | int


@dataclass(frozen=True)
class ServedModel:
    """Hold an entry of `/v1/models` and of Tinker's capabilities."""

    name: str
    max_context: int | None
    created: int


class Desk:
    """Accept work from any thread and execute it on the engine's thread.

    Call `start` before the first request, and `end` and `join` at the end.
    """

    def __init__(self, service: ServiceClient, settings: ServeSettings):
        self.service = service
        self.settings = settings
        self.tally = Tally()
        self.turns = Turns(settings.limits.queued)
        self.contexts = {base.name: checked_context(base) for base in settings.bases}
        self.ending = False
        self._leave_at = 0.0
        # (model, owner) -> a function that returns the client, or None for an unknown name
        self.resolvers: list[Callable[[str, str], Callable[[], SamplingClient] | None]] = []
        # owner -> names that the resolvers know, each with its base model
        self.listers: list[Callable[[str], list[tuple[str, ServedBase]]]] = []
        self._bases: dict[str, SamplingClient] = {}
        self._loading = threading.Lock()
        self._renderers: dict[str, Renderer] = {}
        self._created = int(time.time())
        # the active batches
        self._streams: dict[Drawing, tuple[SampleStream, dict[int, SampleJob]]] = {}
        self._thread = threading.Thread(target=self._loop, name="whetstone-desk", daemon=True)
        self.tally.gauges["queued"] = lambda: float(len(self.turns))

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread.start()

    # ------------------------------------------------------------------------------------- requests

    def submit(
        self,
        owner: str,
        lane: str,
        what: str,
        work: Work,
        done: Future | None = None,
        tenant: str = "",
    ) -> Future:
        """Queue work and return a future with its result or error.

        `tenant`: the tenant whose share of the queue it counts for; by default the owner.
        """
        job = Job(owner, lane, what, work, done or Future(), tenant=tenant)
        if self.ending:
            job.done.set_exception(Interrupted())
        else:
            self.turns.add(job)
        return job.done

    def tenant(self, owner: str, session: str) -> str:
        """Return the tenant for which a request of the session counts: the owner, or the session if
        the server has no keys.
        """
        return owner if self.settings.keys else session

    async def run(self, owner: str, what: str, work: Callable[[], Any], tenant: str = "") -> Any:
        """Run a function on the engine's thread, in the lane `what`. Raises Refused (429) if the
        queue is full.
        """

        def once() -> Any:
            yield
            return work()

        self.turns.check_room(tenant or owner)
        return await asyncio.wrap_future(self.submit(owner, what, what, once, tenant=tenant))

    def ask_sample(
        self,
        client: Callable[[], SamplingClient],
        owner: str,
        prompt: Sequence[int] | ModelInput,
        num_samples: int,
        params: SamplingParams,
        show: Show | None = None,
        tenant: str = "",
        **what: Any,
    ) -> Future:
        """Queue a sampling request and return its future.

        `what`: include_prompt_logprobs, topk_prompt_logprobs, prompt_logprobs_last_n, sequence_ids.
        `show`: called on the engine's thread every few tokens with the samples so far, by index.
        Raises Refused: 503 if the server is shutting down, 429 if the queue is full.
        """
        if self.ending:
            raise Refused(503, "the server is shutting down: try again", retry_after=5.0)
        model_input = (
            prompt if isinstance(prompt, ModelInput) else ModelInput.from_ints(list(prompt))
        )
        arguments = {
            "prompt": model_input,
            "num_samples": num_samples,
            "sampling_params": params,
            **what,
        }
        job = SampleJob(owner, client, arguments, show=show, tenant=tenant)
        self.turns.add_sample(job)
        return job.done

    async def sample(
        self,
        model: str | None,
        prompt_ids: Sequence[int],
        num_samples: int,
        sampling_params: SamplingParams,
        *,
        owner: str = LOCAL,
        show: Show | None = None,
        **what: Any,
    ) -> SampleResponse:
        """Return `num_samples` samples of a model by its name: a base model, a tinker:// path or a
        sampling session. Raises Refused (404) for an unknown name.
        """
        done = self.ask_sample(
            self.find(model, owner), owner, prompt_ids, num_samples, sampling_params, show, **what
        )
        return await asyncio.wrap_future(done)

    def bases(self) -> list[ServedModel]:
        """Return the base models, as checked at the start of the server.

        A base model whose weights cannot be loaded does not affect the others.
        """
        return [
            ServedModel(base.name, self.contexts[base.name], self._created)
            for base in self.settings.bases
        ]

    def models(self, owner: str = LOCAL) -> list[ServedModel]:
        """Return the base models and the other models of an owner.

        Clients check this list before they send a request.
        """
        bases = self.bases()
        max_contexts = {base.name: base.max_context for base in bases}
        named_models = [entry for names in self.listers for entry in names(owner)]
        return bases + [
            ServedModel(name, max_contexts[base.name], self._created) for name, base in named_models
        ]

    def tokenizer(self, model: str | None = None, owner: str = LOCAL) -> Any:
        """Return the tokenizer of a model by its name. May wait until the model is loaded.

        Raises Refused: 404 for an unknown name, 400 if the model has no tokenizer.
        """
        tokenizer = self.find(model, owner)().get_tokenizer()
        if tokenizer is None:
            raise Refused(
                400,
                f"the model {model or self.settings.bases[0].name!r} has no tokenizer on this "
                "server: send token ids",
            )
        return tokenizer

    def renderer(self, model: str | None = None, owner: str = LOCAL) -> Renderer:
        """Return the renderer of a model: the configured renderer, else the chat template of its
        tokenizer, else role_colon.
        """
        name = model or self.settings.bases[0].name
        if name not in self._renderers:
            tokenizer = self.tokenizer(model, owner)
            kind = self.settings.renderer or (
                "chat_template" if getattr(tokenizer, "chat_template", None) else "role_colon"
            )
            self._renderers[name] = get_renderer(kind, tokenizer)
        return self._renderers[name]

    def find(self, model: str | None, owner: str) -> Callable[[], SamplingClient]:
        """Return a function that returns the sampling client of a model name.

        Raises Refused (404) if the owner has no model of that name.
        """
        for resolve in self.resolvers:
            get_client = resolve(model, owner) if model is not None else None
            if get_client is not None:
                return get_client
        try:
            base = self.settings.base(model)
        except UserError as error:
            raise Refused(404, str(error)) from None
        return lambda: self.base_client(base)

    def base_client(self, base: ServedBase) -> SamplingClient:
        """Return the sampling client of a base model, which all threads share.

        The client is created on first use, and again after a failure.
        """
        with self._loading:
            client = self._bases.get(base.name)
            if client is None or client.failed:
                client = self.service.create_sampling_client(
                    base_model=base.where, tokenizer=base.tokenizer
                )
                self._bases[base.name] = client
            return client

    # ------------------------------------------------------------------------------- engine thread

    def _loop(self) -> None:
        """Run slices of jobs and of batches until the server ends."""
        while True:
            with self.turns.changed:
                while not len(self.turns) and not self._streams and not self.ending:
                    self.turns.changed.wait()
            if self.ending and not len(self.turns) and not self._streams:
                return
            job = self.turns.next()
            if job is not None and self.ending and time.monotonic() > self._leave_at:
                self._leave(job)
            elif job is not None:
                self._slice(job)
            if not self._streams and self.turns.only_samples():
                self._gather()
            self._let_in(self.turns.samples())
            if self.ending and time.monotonic() > self._leave_at:
                self._abandon()
            for drawing in list(self._streams):
                self._draw(drawing)

    def _leave(self, job: Job) -> None:
        """Interrupt a job that did not finish before the deadline, between two of its slices."""
        if job.begun is not None:
            job.begun.close()
        self.turns.finish(job)
        _settle(job.done, None, Interrupted(), job.what)

    def _gather(self) -> None:
        """Wait briefly for more samples, so that a burst of requests starts as a common batch."""
        end, before = time.monotonic() + _MOST_GATHER_SECONDS, -1
        while (now := len(self.turns)) != before and time.monotonic() < end:
            before = now
            time.sleep(_GATHER_SECONDS)

    def _slice(self, job: Job) -> None:
        """Run a job up to its next yield; if it ends, set its result or error."""
        begin = time.perf_counter()
        try:
            job.begun = job.begun or job.work()
            next(job.begun)
            return
        except StopIteration as done:
            result, error = done.value, None
        except BaseException as exception:  # goes to the job's future; other jobs continue
            result, error = None, exception
        finally:
            self.tally.add("work_seconds_total", time.perf_counter() - begin, verb=job.what)
        self.turns.finish(job)
        self.tally.add(
            "work_total",
            verb=job.what,
            outcome="done" if error is None else told(error, job.what)[1],
        )
        _settle(job.done, result, error, job.what)

    def _let_in(self, samples: Sequence[SampleJob]) -> None:
        """Add samples to the batches of their weights or base model.

        A sample that cannot run fails without effect on the others.
        """
        for job in samples:
            options = {
                name: value
                for name, value in job.arguments.items()
                if name not in ("prompt", "sequence_ids")
            }
            try:
                client = job.drawn_by = job.client()
                request = client.request(job.arguments["prompt"], **options)
                job.prompt_tokens = len(request.prompt)
                self._check_tokens(request, client.info["max_context"])
                drawing: Drawing = client if client.mixes is None else client.mixes
                stream, tickets = self._streams.get(drawing) or (
                    SampleStream(client, mixed=client.mixes is not None),
                    {},
                )
                ticket = stream.add(request, client)
                self._streams[drawing] = (stream, tickets)
                tickets[ticket] = job
            except BaseException as error:
                _settle(job.done, None, error, "sample")

    def _check_tokens(self, request: Request, longest: int | None) -> None:
        """Raise Refused (400) if a request may sample more tokens than the limit per request."""
        max_answer = request.params.max_tokens or (longest or 0) + 1 - len(request.prompt)
        max_total, limit = (
            len(request.prompt) + request.num_samples * max_answer,
            self.settings.limits.tokens,
        )
        if max_total > limit:
            raise Refused(
                400,
                f"{request.num_samples} samples may have {max_total} tokens with the prompt, the "
                f"limit of a request is {limit}: request fewer samples or a smaller max_tokens",
            )

    def _draw(self, drawing: Drawing) -> None:
        """Run a slice of a batch, remove cancelled samples and answer finished ones."""
        begin, (stream, tickets) = time.perf_counter(), self._streams[drawing]
        for ticket in [ticket for ticket, job in tickets.items() if job.done.cancelled()]:
            stream.drop(ticket)
            del tickets[ticket]
        try:
            callbacks = {
                ticket: job.show for ticket, job in tickets.items() if job.show is not None
            }
            part = (
                stream.slice(_STEPS_SHOWN, shows=frozenset(callbacks))
                if callbacks
                else stream.slice()
            )
            finished = part.finished
            for ticket, samples in part.drawn.items():
                # a client that streams may have disconnected; the other samples continue
                with contextlib.suppress(Exception):
                    callbacks[ticket](samples)
        except BaseException as error:
            for job in tickets.values():
                _settle(job.done, None, error, "sample")
            tickets.clear()
            finished = {}
        for ticket, response in finished.items():
            self._answer(tickets.pop(ticket), response)
        if not tickets:
            stream.close()
            del self._streams[drawing]
        self.tally.add("work_seconds_total", time.perf_counter() - begin, verb="sample")

    def _abandon(self) -> None:
        """Interrupt the samples that did not finish before the deadline."""
        for stream, tickets in self._streams.values():
            for job in tickets.values():
                _settle(job.done, None, Interrupted(), "sample")
            stream.close()
        self._streams.clear()

    def _answer(self, job: SampleJob, response: SampleResponse | Exception) -> None:
        """Set the result of a sampling request, and count its tokens in the metrics."""
        if isinstance(response, Exception):
            _settle(job.done, None, response, "sample")
            return
        ids = job.arguments.get("sequence_ids") or [
            sequence.sequence_id for sequence in response.sequences
        ]
        job.drawn_by.name_samples(response, ids, job.arguments.get("prompt_logprobs_last_n"))
        self.tally.add(
            "sampled_tokens_total", sum(len(sequence.tokens) for sequence in response.sequences)
        )
        self.tally.add("prompt_tokens_total", job.prompt_tokens)
        _settle(job.done, response, None, "sample")

    # ------------------------------------------------------------------------------------- shutdown

    def end(self, seconds: float = 30.0) -> None:
        """Shut down: let running jobs and samples finish for up to `seconds`, and interrupt queued
        work, whose clients get "try again".
        """
        self._leave_at = time.monotonic() + seconds
        self.ending = True
        jobs, samples = self.turns.drain()
        for done in [*(job.done for job in jobs), *(job.done for job in samples)]:
            _settle(done, None, Interrupted(), "")
        with self.turns.changed:
            self.turns.changed.notify()

    def join(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds for the thread, and return whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()


def _settle(done: Future, result: Any, error: BaseException | None, what: str) -> None:
    """Set the result or error of a future, unless it was cancelled. Log errors of the server."""
    if not done.set_running_or_notify_cancel():
        return
    if error is None:
        done.set_result(result)
        return
    if told(error, what)[1] == "server" and not isinstance(error, (Refused, Interrupted)):
        log.error(
            "work failed", extra={"what": what, "error": type(error).__name__}, exc_info=error
        )
    drop_traceback(error)
    done.set_exception(error)


def log_unwritten(model_id: str, error: Exception) -> None:
    """Log that a model could not be written to disk."""
    log.error(
        "a model could not be written",
        extra={"model": model_id, "error": type(error).__name__},
        exc_info=error,
    )
