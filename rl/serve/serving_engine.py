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
from pathlib import Path
from typing import Any

import torch

from rl.client import SampleStream, SamplingClient, ServiceClient
from rl.errors import UserError
from rl.layers import find_max_context
from rl.models import is_adapter, load_skeleton, load_tokenizer
from rl.renderers import get_renderer
from rl.sampler import SamplingRequest
from rl.serve.http_errors import (
    HttpError,
    ShutdownError,
    clear_tracebacks,
    to_http_error,
)
from rl.serve.scheduler import EngineJob, FairQueue, SamplingJob
from rl.serve.serve_settings import ServedBaseModel, ServeSettings
from rl.serve.serving_metrics import ServingMetrics
from rl.types import SampleResponse

log = logging.getLogger("whetstone.serve")

_WEIGHTS = ("*.safetensors", "*.bin")
_STREAM_STEPS = 4  # tokens per slice if a request of the batch streams
# samples that arrive within this time share a batch from the start
_BATCH_WAIT_SECONDS, _MAX_BATCH_WAIT_SECONDS = 0.002, 0.02

# key of a batch: the number of a base model (`mixes`), whose clients share a batch, or a client
BatchKey = SamplingClient | int


class ServingEngine:
    """Accept work from any thread and execute it on the engine's thread.

    Call `start` before the first request, and `shut_down` and `join` at the end.
    """

    def __init__(
        self, service: ServiceClient, settings: ServeSettings, has_others: Callable[[str], bool]
    ):
        self.service = service
        self.settings = settings
        self.metrics = ServingMetrics()
        self.queue = FairQueue(settings.limits.queued, has_others)
        self.is_shutting_down = False
        self._deadline = 0.0
        # the batches; one without requests keeps its KV cache until other work is done
        self._streams: dict[BatchKey, tuple[SampleStream, dict[int, SamplingJob]]] = {}
        self._thread = threading.Thread(target=self._loop, name="whetstone-engine", daemon=True)
        self.metrics.set_gauge("queued", lambda: len(self.queue))

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Return whether work can still run: no rank is lost, and the thread has not ended."""
        return self._thread.is_alive() and not self.service.closed

    # ------------------------------------------------------------------------------------- requests

    def submit(self, job: EngineJob) -> Future:
        """Queue work and return the future of its result or error."""
        if self.is_shutting_down:
            job.done.set_exception(ShutdownError())
        else:
            self.queue.add(job)
        return job.done

    async def run_function(
        self, tenant: str, label: str, work: Callable[[], Any], lane: str | None = None
    ) -> Any:
        """Run a function on the engine's thread, in `lane` (default: `label`). Raises HttpError
        (429) if the queue is full.
        """

        def once() -> Any:
            yield
            return work()

        self.queue.check_capacity(tenant)
        return await asyncio.wrap_future(self.submit(EngineJob(tenant, lane or label, label, once)))

    def submit_sample(self, job: SamplingJob) -> Future:
        """Queue a sampling request and return its future.

        Raises HttpError: 503 if the server is shutting down, 429 if the queue is full.
        """
        if self.is_shutting_down:
            raise ShutdownError()
        self.queue.add_sample(job)
        return job.done

    # ------------------------------------------------------------------------------- engine thread

    def _loop(self) -> None:
        """Run slices of jobs and of batches until the server ends."""
        while True:
            with self.queue.changed:
                while not len(self.queue) and not self._has_samples and not self.is_shutting_down:
                    self.queue.changed.wait()
            if self.is_shutting_down and not len(self.queue) and not self._has_samples:
                self._close_idle_streams()
                return
            self._run_turn()

    def _run_turn(self) -> None:
        """Run a slice of the next job, then a slice of each batch.

        It is a separate method so that the waiting loop holds no reference to a job or to weights.
        """
        job = self.queue.next_job()
        if job is not None:  # it may need the memory, or free the weights
            self._close_idle_streams()
        is_too_late = self.is_shutting_down and time.monotonic() > self._deadline
        if job is not None and is_too_late:  # interrupted between two of its slices
            assert job.generator is not None  # set by `next_job`
            job.generator.close()
            self.queue.finish_job(job)
            _resolve(job.done, ShutdownError(), job.verb)
        elif job is not None:
            self._run_job_slice(job)
        if not self._has_samples and self.queue.has_only_samples():
            self._wait_for_samples()
        busy_tenants = {
            job.tenant for _, tickets in self._streams.values() for job in tickets.values()
        }
        self._admit_samples(self.queue.take_samples(self._count_room(), busy_tenants))
        if is_too_late:
            self._interrupt_samples()
        for batch_key, (_, tickets) in list(self._streams.items()):
            if tickets:
                self._run_batch_slice(batch_key)

    @property
    def _has_samples(self) -> bool:
        """Return whether any batch has requests."""
        return any(tickets for _, tickets in self._streams.values())

    def _count_room(self) -> int:
        """Return the number of samples that the batches have room for.

        The sampler holds two full batches: one is decoded, one waits, so that no row stays empty.
        All other samples wait in the queue, where tenants take turns.
        """
        streams = [stream for stream, _ in self._streams.values()]
        num_ranks = max((stream.num_ranks for stream in streams), default=1)
        num_unfinished = sum(stream.num_unfinished for stream in streams)
        return 2 * self.settings.worker.sampler.max_rows * num_ranks - num_unfinished

    def _close_idle_streams(self) -> None:
        """Close the batches without requests."""
        for key, (stream, tickets) in list(self._streams.items()):
            if not tickets:
                stream.close()
                del self._streams[key]

    def _wait_for_samples(self) -> None:
        """Wait briefly for more samples, so that a burst of requests starts as a common batch."""
        end, before = time.monotonic() + _MAX_BATCH_WAIT_SECONDS, -1
        while (now := len(self.queue)) != before and time.monotonic() < end:
            before = now
            time.sleep(_BATCH_WAIT_SECONDS)

    def _run_job_slice(self, job: EngineJob) -> None:
        """Run a job up to its next yield; if it ends, set its result or error."""
        begin = time.perf_counter()
        assert job.generator is not None  # set by `next_job`
        try:
            next(job.generator)
            return
        except StopIteration as done:
            result, error = done.value, None
        except BaseException as exception:  # goes to the job's future; other jobs continue
            result, error = None, exception
        finally:
            self.metrics.increment("work_seconds_total", time.perf_counter() - begin, verb=job.verb)
        self.queue.finish_job(job)
        outcome = "done" if error is None else to_http_error(error, job.verb).category
        self.metrics.increment("work_total", verb=job.verb, outcome=outcome)
        _resolve(job.done, result if error is None else error, job.verb)

    def _admit_samples(self, samples: Sequence[SamplingJob]) -> None:
        """Add samples to the batches of their weights or base model.

        A sample that cannot run fails without effect on the others.
        """
        for job in samples:
            try:
                client = job.sampling_client = job.get_client()
                request = client.make_request(**job.arguments)
                job.prompt_tokens = len(request.prompt)
                self._check_tokens(request, client.info["max_context"])
                is_mixed = client.mix_group is not None
                key: BatchKey = client.mix_group if is_mixed else client
                if key not in self._streams:
                    self._close_idle_streams()
                stream, tickets = self._streams.get(key) or (SampleStream(client, is_mixed), {})
                ticket = stream.add(request, client)
                self._streams[key] = (stream, tickets)
                tickets[ticket] = job
            except BaseException as error:
                _resolve(job.done, error)

    def _check_tokens(self, request: SamplingRequest, max_context: int | None) -> None:
        """Raise HttpError (400) if a request may sample more tokens than the limit per request."""
        limit, prompt_tokens = self.settings.limits.tokens, len(request.prompt)
        max_answer = request.params.max_tokens or (max_context or 0) + 1 - prompt_tokens
        max_total = prompt_tokens + request.num_samples * max_answer
        if max_total > limit:
            raise HttpError(
                400,
                f"{request.num_samples} samples may have {max_total} tokens with the prompt, the "
                f"limit of a request is {limit}: request fewer samples or a smaller max_tokens",
            )

    def _run_batch_slice(self, key: BatchKey) -> None:
        """Run a slice of a batch, remove cancelled samples and answer finished ones."""
        begin, (stream, tickets) = time.perf_counter(), self._streams[key]
        finished: dict[int, SampleResponse | BaseException]
        for ticket in [ticket for ticket, job in tickets.items() if job.done.cancelled()]:
            stream.drop(ticket)
            del tickets[ticket]
        try:
            callbacks = {
                ticket: job.on_progress
                for ticket, job in tickets.items()
                if job.on_progress is not None
            }
            steps = {"steps": _STREAM_STEPS} if callbacks else {}
            part = stream.run_steps(**steps, partial_tickets=frozenset(callbacks))
            finished = dict(part.finished)
            for ticket, samples in part.partial_output.items():
                # a client that streams may have disconnected; the other samples continue
                with contextlib.suppress(Exception):
                    callbacks[ticket](samples)
        except BaseException as error:
            finished = dict.fromkeys(tickets, error)
            stream.close()
            del self._streams[key]
        for ticket, response in finished.items():
            self._finish_sample(tickets.pop(ticket), response)
        self.metrics.increment("work_seconds_total", time.perf_counter() - begin, verb="sample")

    def _interrupt_samples(self) -> None:
        """Interrupt the samples that did not finish before the deadline."""
        for stream, tickets in self._streams.values():
            for job in tickets.values():
                _resolve(job.done, ShutdownError())
            stream.close()
        self._streams.clear()

    def _finish_sample(self, job: SamplingJob, response: SampleResponse | BaseException) -> None:
        """Set the result of a sampling request, and count its tokens in the metrics."""
        if not isinstance(response, BaseException):
            sequences, last_n = response.sequences, job.arguments.get("prompt_logprobs_last_n")
            ids = job.sequence_ids or [sequence.sequence_id for sequence in sequences]
            job.sampling_client.name_samples(response, ids, last_n)
            sampled_tokens = sum(len(sequence.tokens) for sequence in sequences)
            self.metrics.increment("sampled_tokens_total", sampled_tokens)
            self.metrics.increment("prompt_tokens_total", job.prompt_tokens)
        _resolve(job.done, response)

    # ------------------------------------------------------------------------------------- shutdown

    def shut_down(self, seconds: float = 30.0) -> None:
        """Shut down: let running jobs and samples finish for up to `seconds`, and interrupt queued
        work, whose clients get "try again".
        """
        self._deadline = time.monotonic() + seconds
        self.is_shutting_down = True
        for job in self.queue.drain():
            _resolve(job.done, ShutdownError())
        with self.queue.changed:
            self.queue.changed.notify()

    def join(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds for the thread, and return whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()


def _resolve(done: Future, result: Any, label: str = "sample") -> None:
    """Set the result of a future, which may be an error, unless it was cancelled.

    Log errors of the server. `label`: the verb that failed.
    """
    if not done.set_running_or_notify_cancel():
        return
    if not isinstance(result, BaseException):
        done.set_result(result)
        return
    if not isinstance(result, HttpError) and to_http_error(result, label).category == "server":
        log.error("work failed", extra={"verb": label}, exc_info=result)
    clear_tracebacks(result)
    done.set_exception(result)


def check_base_model(base: ServedBaseModel, renderer: str | None = None) -> int | None:
    """Return the context length of a base model in tokens, from its config alone; None if the
    config states no limit.

    Raises UserError, which names the cause, if the model cannot be served, or cannot be served with
    the `renderer`.
    """
    folder = Path(base.source).expanduser()
    try:
        saved = [*folder.glob("model"), *folder.glob("checkpoints/*/model")]  # a checkpoint, a run
        if saved and not any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
            newest = max(saved, key=lambda path: path.stat().st_mtime)
            raise UserError(f"its weights are in {newest}: pass {base.name}={newest}")
        with torch.device("meta"):
            skeleton = load_skeleton(base.source, tokenizer=base.tokenizer)
        tokenizer = skeleton.tokenizer if base.tokenizer is None else load_tokenizer(base.tokenizer)
        if renderer is not None and tokenizer is not None:
            get_renderer(renderer, tokenizer)
        if (
            folder.is_dir()
            and not is_adapter(base.source)
            and not any(any(folder.glob(pattern)) for pattern in _WEIGHTS)
        ):
            raise UserError(f"{folder} has a config and no weights ({' or '.join(_WEIGHTS)})")
    # boundary: any error that a user's config raises is a reason not to start
    except Exception as error:
        raise UserError(f"--base-model {base.name} cannot be served: {error}") from error
    return find_max_context(skeleton.model)


def locate_tokenizer(base: ServedBaseModel, tokenizer: Any, root: Path) -> str | None:
    """Return the hub name or folder from which a client on this machine loads the tokenizer; None
    if the base model has no tokenizer.

    The tokenizer of a tiny:<preset> is written to a folder below `root`.
    """
    where = base.tokenizer or base.source
    if tokenizer is None:
        return None
    if not where.startswith("tiny:"):
        folder = Path(where).expanduser()
        return str(folder.resolve()) if folder.is_dir() else where
    folder = (root / "tokenizers" / where.removeprefix("tiny:")).resolve()
    if not folder.is_dir():
        tokenizer.save_pretrained(str(folder))
    return str(folder)
