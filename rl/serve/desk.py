"""The one thread that owns the service: it takes turns among those who train, and draws everybody's
samples in between.
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

_STEPS_SHOWN = 4  # tokens in a slice, where somebody reads along
# samples that come within so short a time are drawn together
_GATHER_SECONDS, _MOST_GATHER_SECONDS = 0.002, 0.02

Show = Callable[[dict[int, SampledSequence]], None]
# what shares a batch: those on one base, by its number (`mixes`), or one client's alone
Drawing = SamplingClient | int


@dataclass(frozen=True)
class ServedModel:
    """What `/v1/models` and Tinker's capabilities list."""

    name: str
    max_context: int | None
    created: int


class Desk:
    """Takes work from any thread, executes it on its own. `start` before, `close` after."""

    def __init__(self, service: ServiceClient, settings: ServeSettings):
        self.service = service
        self.settings = settings
        self.tally = Tally()
        self.turns = Turns(settings.limits.queued)
        self.contexts = {base.name: checked_context(base) for base in settings.bases}
        self.ending = False
        self._leave_at = 0.0
        # (model, owner) -> where to get it
        self.resolvers: list[Callable[[str, str], Callable[[], SamplingClient] | None]] = []
        # of an owner: names that resolvers know, their bases
        self.listers: list[Callable[[str], list[tuple[str, ServedBase]]]] = []
        self._bases: dict[str, SamplingClient] = {}
        self._loading = threading.Lock()
        self._renderers: dict[str, Renderer] = {}
        self._created = int(time.time())
        # what is being drawn
        self._streams: dict[Drawing, tuple[SampleStream, dict[int, SampleJob]]] = {}
        self._thread = threading.Thread(target=self._loop, name="whetstone-desk", daemon=True)
        self.tally.gauges["queued"] = lambda: float(len(self.turns))

    def start(self) -> None:
        self._thread.start()

    # -------------------------------------------------------------------------- what is asked of it

    def submit(
        self,
        owner: str,
        lane: str,
        what: str,
        work: Work,
        done: Future | None = None,
        tenant: str = "",
    ) -> Future:
        """Queues work. Its result or error comes in the future. `tenant`: in whose part of the
        queue, the owner's where none is said.
        """
        job = Job(owner, lane, what, work, done or Future(), tenant=tenant)
        if self.ending:
            job.done.set_exception(Interrupted())
        else:
            self.turns.add(job)
        return job.done

    def tenant(self, owner: str, session: str) -> str:
        """Whose part of the queue a request of that session is counted in: its key's, or its own
        where nobody has one.
        """
        return owner if self.settings.keys else session

    async def run(self, owner: str, what: str, work: Callable[[], Any], tenant: str = "") -> Any:
        """A plain function on the desk's thread, in a lane of its own kind."""

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
        """Queues a sample. `what`: include_prompt_logprobs, topk_prompt_logprobs,
        prompt_logprobs_last_n, sequence_ids.

        `show`: called from the desk's thread with what has been drawn so far, by sample, every few
        tokens.
        """
        if self.ending:
            raise Refused(503, "the server is shutting down: try again", retry_after=5.0)
        given = prompt if isinstance(prompt, ModelInput) else ModelInput.from_ints(list(prompt))
        arguments = {"prompt": given, "num_samples": num_samples, "sampling_params": params, **what}
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
        """`num_samples` answers of a model by its name: a base, a tinker:// path, a sampling
        session. Refused (404) for no such one.
        """
        done = self.ask_sample(
            self.find(model, owner), owner, prompt_ids, num_samples, sampling_params, show, **what
        )
        return await asyncio.wrap_future(done)

    def bases(self) -> list[ServedModel]:
        """The base models, as they were checked at the start: one whose weights cannot be loaded
        keeps the others from nobody.
        """
        return [
            ServedModel(base.name, self.contexts[base.name], self._created)
            for base in self.settings.bases
        ]

    def models(self, owner: str = LOCAL) -> list[ServedModel]:
        """The bases, and what this owner can ask for by another name: clients look there before
        they ask.
        """
        bases = self.bases()
        longest = {base.name: base.max_context for base in bases}
        own = [found for names in self.listers for found in names(owner)]
        return bases + [ServedModel(name, longest[base.name], self._created) for name, base in own]

    def tokenizer(self, model: str | None = None, owner: str = LOCAL) -> Any:
        """The tokenizer of a model that is asked for by its name. May wait for the model to be
        loaded.
        """
        tokenizer = self.find(model, owner)().get_tokenizer()
        if tokenizer is None:
            raise Refused(
                400,
                f"the model {model or self.settings.bases[0].name!r} has no tokenizer here: it takes token ids alone",
            )
        return tokenizer

    def renderer(self, model: str | None = None, owner: str = LOCAL) -> Renderer:
        """What turns messages into tokens for that model: the model's own chat template, else
        role_colon, or what was set.
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
        """Where to get a sampling client of that name from. Refused (404) where there is none for
        this owner.
        """
        for resolve in self.resolvers:
            found = resolve(model, owner) if model is not None else None
            if found is not None:
                return found
        try:
            base = self.settings.base(model)
        except UserError as error:
            raise Refused(404, str(error)) from None
        return lambda: self.base_client(base)

    def base_client(self, base: ServedBase) -> SamplingClient:
        """Return a sampler of a base model: one for all threads, made when it is first asked for,
        and again after a failure.
        """
        with self._loading:
            client = self._bases.get(base.name)
            if client is None or client.failed:
                client = self.service.create_sampling_client(
                    base_model=base.where, tokenizer=base.tokenizer
                )
                self._bases[base.name] = client
            return client

    # ----------------------------------------------------------------------------------- its thread

    def _loop(self) -> None:
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
        """A job that did not end in the time that was left: it ends between two of its slices."""
        if job.begun is not None:
            job.begun.close()
        self.turns.finish(job)
        _settle(job.done, None, Interrupted(), job.what)

    def _gather(self) -> None:
        """Waits a moment for the rest of a wave, so that its first sample is not drawn alone."""
        end, before = time.monotonic() + _MOST_GATHER_SECONDS, -1
        while (now := len(self.turns)) != before and time.monotonic() < end:
            before = now
            time.sleep(_GATHER_SECONDS)

    def _slice(self, job: Job) -> None:
        begin = time.perf_counter()
        try:
            job.begun = job.begun or job.work()
            next(job.begun)
            return
        except StopIteration as done:
            result, error = done.value, None
        except BaseException as caught:  # told to whoever asked; others go on
            result, error = None, caught
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
        """Samples join what is being drawn from the same weights, or on the same base. One that
        cannot run fails alone.
        """
        for job in samples:
            what = {
                name: value
                for name, value in job.arguments.items()
                if name not in ("prompt", "sequence_ids")
            }
            try:
                client = job.drawn_by = job.client()
                request = client.request(job.arguments["prompt"], **what)
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
        """Refused (400) where the answers may come to more tokens than one request may have here."""
        each = request.params.max_tokens or (longest or 0) + 1 - len(request.prompt)
        most, limit = len(request.prompt) + request.num_samples * each, self.settings.limits.tokens
        if most > limit:
            raise Refused(
                400,
                f"{request.num_samples} answers may come to {most} tokens, and {limit} are the most of one request",
            )

    def _draw(self, drawing: Drawing) -> None:
        """A slice of what shares a batch; who has ended is answered, who has gone leaves."""
        begin, (stream, tickets) = time.perf_counter(), self._streams[drawing]
        for ticket in [ticket for ticket, job in tickets.items() if job.done.cancelled()]:
            stream.drop(ticket)
            del tickets[ticket]
        try:
            shown = {ticket: job.show for ticket, job in tickets.items() if job.show is not None}
            part = stream.slice(_STEPS_SHOWN, shows=frozenset(shown)) if shown else stream.slice()
            finished = part.finished
            for ticket, samples in part.drawn.items():
                # whoever reads along may be gone: others are drawn beside
                with contextlib.suppress(Exception):
                    shown[ticket](samples)
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
        """Samples that did not end in the time that was left."""
        for stream, tickets in self._streams.values():
            for job in tickets.values():
                _settle(job.done, None, Interrupted(), "sample")
            stream.close()
        self._streams.clear()

    def _answer(self, job: SampleJob, response: SampleResponse | Exception) -> None:
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

    # --------------------------------------------------------------------------------------- ending

    def end(self, seconds: float = 30.0) -> None:
        """Finishes what runs, samples for so many `seconds`; what has not begun is answered with
        "try again".
        """
        self._leave_at = time.monotonic() + seconds
        self.ending = True
        jobs, samples = self.turns.drain()
        for done in [*(job.done for job in jobs), *(job.done for job in samples)]:
            _settle(done, None, Interrupted(), "")
        with self.turns.changed:
            self.turns.changed.notify()

    def join(self, timeout: float | None = None) -> bool:
        """Whether the thread has ended within `timeout` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()


def _settle(done: Future, result: Any, error: BaseException | None, what: str) -> None:
    """Gives a future what came of it, unless whoever asked has gone."""
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
    log.error(
        "a model could not be written",
        extra={"model": model_id, "error": type(error).__name__},
        exc_info=error,
    )
