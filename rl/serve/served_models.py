"""Manage the models and samplers of tenants, and run their requests in order.

Models are in memory or written to disk. The work runs on the thread of `ServingEngine`.
"""

from __future__ import annotations

import asyncio
import functools
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from rl.client import SamplingClient, TrainingClient, drop_gradients, forward_backward_microbatches
from rl.distributed import checkpoint_folder
from rl.errors import BadRequestError, UserError
from rl.renderers import Renderer, get_renderer
from rl.serve.http_errors import HttpError, ShutdownError, make_tokenizer_error
from rl.serve.request_store import PendingRequest, RequestStore
from rl.serve.scheduler import EngineJob, SamplingJob, VerbSteps
from rl.serve.schemas import (
    LoadWeightsBody,
    OptimStepBody,
    SaveWeightsBody,
    SaveWeightsExternalBody,
    SaveWeightsForSamplerBody,
)
from rl.serve.serve_settings import LOCAL_OWNER
from rl.serve.serving_engine import ServingEngine, check_base_model, log
from rl.serve.session_store import (
    LIVE_FOLDER,
    ModelRecord,
    SamplerRecord,
    SessionRecord,
    SessionStore,
    choose_oldest,
    format_path,
)
from rl.types import AdamParams, Datum, ModelInput, SampleResponse, SamplingParams

SAMPLER_KIND = "sampler_weights"
# snapshots of weights saved for samplers that stay in memory, so that the next sampler need not
# read them
_MAX_SNAPSHOTS = 8
_GAP_SECONDS = 10.0  # wait for a sequence number that an earlier server may have used
_LOST_SECONDS = 600.0  # wait for any other number, whose body may arrive slowly
# threads that wait until a model is loaded; other requests use those of `asyncio.to_thread`
_LOADING_EXECUTOR = ThreadPoolExecutor(32, "whetstone-load")


@dataclass(frozen=True)
class ServedModel:
    """Hold an entry of `/v1/models` and of Tinker's capabilities."""

    name: str
    max_context: int | None
    created: int


class ModelManager:
    """Execute verbs on models, and sample from them: a `SamplingBackend`.

    A method that returns a generator runs on the thread of `ServingEngine`, a slice at a time.
    """

    def __init__(self, engine: ServingEngine, session_store: SessionStore):
        self.engine = engine
        self.session_store = session_store
        bases, renderer = engine.settings.bases, engine.settings.renderer
        created = int(time.time())
        # the base models, as checked at the start: weights that cannot be loaded do not affect the
        # others
        self.bases = {
            base.name: ServedModel(base.name, check_base_model(base, renderer), created)
            for base in bases
        }
        self.base_samplers = {
            base.name: SamplerRecord(base.name, LOCAL_OWNER, "", base) for base in bases
        }
        self._renderers: WeakKeyDictionary[SamplingClient, Renderer] = WeakKeyDictionary()
        self._snapshots: OrderedDict[Path, SamplingClient] = OrderedDict()
        models, set_gauge = session_store.list_models, engine.metrics.set_gauge
        set_gauge("models", lambda: sum(m.client is not None for m in models()), state="in_memory")
        set_gauge("models", lambda: sum(m.client is None for m in models()), state="written_out")
        set_gauge("samplers", lambda: len(session_store.samplers))
        set_gauge("sessions", lambda: len(session_store.list_live_sessions()))

    # --------------------------------------------------------------------------- requests, in order

    def enqueue_request(
        self, model: ModelRecord, seq: int, request: PendingRequest, work: Callable[[], VerbSteps]
    ) -> None:
        """Queue a request of a model, in the order of `seq`.

        A request that arrives before its predecessors waits for them. A number that was used or
        skipped before gives an error as the result. Raises HttpError (429) if the queue is full.
        """
        if seq < model.next_seq:
            message = (
                f"request {seq} of {model.model_id} has run and its result has expired, or it did "
                f"not arrive in time and was skipped; the next seq_id is {model.next_seq}"
            )
            request.work_future.set_exception(HttpError(400, message))
            return
        tenant = model.tenant
        self.engine.queue.check_capacity(
            tenant, in_order=seq == model.next_seq and bool(model.queued_jobs)
        )
        run = functools.partial(self._run_work, model, seq, work)
        model.queued_jobs[seq] = EngineJob(
            tenant, model.model_id, request.verb, run, request.work_future
        )
        self.engine.queue.add_early(tenant, 1)
        self.submit_ready(model)

    def submit_ready(self, model: ModelRecord) -> None:
        """Submit the requests that no longer wait for an earlier number."""
        while model.next_seq in model.queued_jobs:
            model.gap_since = None
            job = model.queued_jobs.pop(model.next_seq)
            self.engine.queue.add_early(job.tenant, -1)
            model.next_seq += 1
            exists = model.client is not None or model.is_written_out
            if job.verb == "optim_step" and exists:  # later numbers are not of the earlier server
                model.resumed = False
            self.engine.submit(job)
        if model.queued_jobs:
            model.gap_since = model.gap_since or time.monotonic()

    def skip_lost_numbers(self) -> None:
        """Skip numbers whose requests do not arrive. The model's next update then fails with an
        error that says so, instead of waiting forever.

        A number that an earlier server used, whose effect was lost, is skipped after 10 s. Any
        other number, such as that of a request that was refused, is skipped after 10 minutes. A
        number is skipped only once the requests before it have run, so that no earlier update
        fails.
        """
        for model in self.session_store.list_models():
            # in this order: a request is marked as running before its number is set
            if model.last_started_seq < model.next_seq - 1 or model.is_running:
                continue
            seconds = _GAP_SECONDS if model.resumed else _LOST_SECONDS
            if model.gap_since is None or time.monotonic() - model.gap_since <= seconds:
                continue
            first, last = model.next_seq, min(model.queued_jobs) - 1
            lost = f"request {first}" if first == last else f"requests {first} to {last}"
            reason = f"the server was restarted, and what {lost} changed is lost"
            if not model.resumed:
                reason = f"{lost} did not arrive within {seconds:.0f} s"
            model.batch_error = model.batch_error or (
                f"{reason}: repeat the forward_backward of this step"
            )
            model.next_seq, model.gap_since = last + 1, None
            self.submit_ready(model)

    def interrupt_waiting(self) -> None:
        """Answer the requests that wait for an earlier number with "try again": the server ends."""
        for model in self.session_store.list_models():
            self._fail_waiting(model, ShutdownError())

    def _fail_waiting(self, model: ModelRecord, error: Exception) -> None:
        """Remove the requests that wait for an earlier number; `error` becomes their result."""
        waiting, model.queued_jobs, model.gap_since = model.queued_jobs, {}, None
        for job in waiting.values():
            self.engine.queue.add_early(job.tenant, -1)
            if job.done.set_running_or_notify_cancel():
                job.done.set_exception(error)

    def end_session(self, session: SessionRecord, reason: str) -> None:
        """End a session: fail its waiting requests, and free its memory after the queued ones.

        Do nothing if the session has ended before; its first reason stays.
        """
        if session.finished is not None:
            return
        session.finished = reason
        session_id = session.session_id
        error = HttpError(410, f"the session of this request has ended ({reason})")
        # in the lanes of the models, so that no queued request reads a freed model back
        lanes = {f"{session_id}:end": functools.partial(self._free_samplers, session_id)}
        for model in self.session_store.list_models(session_id=session_id):
            self._fail_waiting(model, error)
            lanes[model.model_id] = functools.partial(self._free_ended_model, model)
        for lane, work in lanes.items():
            self.engine.submit(EngineJob(session.tenant, lane, "end_session", work))
        self.session_store.save_session(session)  # last: on a full disk the memory is freed too

    @staticmethod
    def _run_work(model: ModelRecord, seq: int, work: Callable[[], VerbSteps]) -> VerbSteps:
        """Run the work of request `seq`, and mark the model as busy meanwhile.

        If the server ends before the work has, the next server runs the request when it is sent
        again.
        """
        model.is_running, model.last_started_seq = True, seq
        try:
            return (yield from work())
        except GeneratorExit:
            model.last_started_seq = seq - 1
            raise
        finally:
            model.is_running = False
            model.last_used = time.monotonic()

    # ----------------------------------------------------------------------------- models in memory

    def create_model(self, model: ModelRecord, make: Callable[[], TrainingClient]) -> VerbSteps:
        """Create a model with `make`, after writing other models to disk if memory is full.

        If it cannot be created, its waiting requests fail. Its folder is removed unless the folder
        existed before.
        """
        yield
        fresh = not model.folder.exists()
        self._evict_models()
        try:
            model.client = make()
            model.lora_rank = model.client.result().info["lora_rank"]
            self.session_store.save_model_record(model)
            self.commit_change(model, "create_model")
        except BaseException as error:
            self.free_model(model)
            self.session_store.models.pop(model.model_id, None)
            if fresh:
                shutil.rmtree(model.folder, ignore_errors=True)
            # the model is no longer known
            text = f"{model.model_id} could not be created: {error}"
            self._fail_waiting(model, UserError(text))
            raise
        return model.create_result

    def load_client(self, model: ModelRecord) -> TrainingClient:
        """Return the model's client, and read the model from disk if it was written out.

        Raises UserError if the model was only in memory when an earlier server ended, or if its
        files are damaged.
        """
        if model.client is None:
            if not model.is_written_out:
                raise UserError(
                    f"{model.model_id} was only in memory when the server ended, or its files are "
                    "damaged: create a training client from one of its checkpoints "
                    "(rest_client.list_checkpoints), and start the server with --durable to keep "
                    "models across restarts"
                )
            self._evict_models()
            model.client = self.engine.service.create_training_client_from_state_with_optimizer(
                str(model.live_folder), base_dtype=self.engine.settings.saved_base_dtype
            ).result()
            self.engine.metrics.increment("written_out_total", which="read_back")
        return model.client

    def _evict_models(self) -> None:
        """Write models to disk until another model fits into memory.

        Each time, the least recently used model of the tenant that holds most is written. A model
        with a gradient or with running work stays in memory, and so does a model that cannot be
        written, on a full disk for example.
        """
        loaded = [model for model in self.session_store.list_models() if model.client is not None]
        idle = [model for model in loaded if not model.has_gradient and not model.is_running]
        excess = len(loaded) + 1 - self.engine.settings.limits.models_in_memory
        while idle and excess > 0:
            (model,) = choose_oldest(idle, 1)
            idle.remove(model)
            if self._try_write(model) is None:
                self.free_model(model)
                excess -= 1
                self.engine.metrics.increment("written_out_total", which="written_out")

    def write_model(self, model: ModelRecord) -> None:
        """Write the model into `live/`, unless its current state and number are already there.

        The metadata holds the next number and the result of the last update, which the next server
        may have to send again.
        """
        is_current = model.is_written_out and model.written_seq == model.last_started_seq
        if model.client is None or is_current:
            return
        state = {
            "next_seq": model.last_started_seq + 1,
            "failed": model.batch_error,
            "last": model.last_update,
        }
        model.client.save_state(
            LIVE_FOLDER, overwrite=True, metadata=state, folder=model.folder
        ).result()
        model.is_written_out, model.written_seq = True, model.last_started_seq

    def _try_write(self, model: ModelRecord, end_reason: str | None = None) -> str | None:
        """Write the model into `live/`. An error is logged, and its type returned.

        `end_reason`: the reason to drop the model's gradient before.
        """
        try:
            if end_reason is not None:
                self.drop_gradient(model, end_reason)
            self.write_model(model)
        except Exception as error:  # boundary: for example a full disk; other models are written
            fields = {"model": model.model_id}
            log.error("a model could not be written", extra=fields, exc_info=error)
            return type(error).__name__
        return None

    def commit_change(self, model: ModelRecord, verb: str, uses_gradient: bool = False) -> None:
        """Write a change of the model to disk before its result is sent. Only with --durable.

        `uses_gradient`: the change consumed a gradient.

        Raises HttpError (507) if writing failed. The change is then undone: the model is read from
        `live/`, which holds the state before the change.
        """
        if not self.engine.settings.durable:
            return
        if (failure := self._try_write(model)) is None:
            return
        saved = self.session_store.read_live_metadata(model)
        if saved is not None and saved["next_seq"] == model.last_started_seq + 1:
            model.is_written_out = True  # the new folder is complete: a later step failed
            return
        if saved is None:
            text = f"{verb} was done, but the model could not be written ({failure})"
            raise HttpError(507, text)
        self.free_model(model)
        model.is_written_out, model.last_update = True, saved["last"]
        if uses_gradient:
            model.gradient_error = (
                f"{verb} was undone, and its gradient is lost: repeat the forward_backward of that "
                "step"
            )
        raise HttpError(
            507,
            f"the server could not write the model ({failure}: its disk may be full), so {verb} "
            "was undone: the weights and the optimizer are as before",
        )

    @staticmethod
    def free_model(model: ModelRecord) -> None:
        """Free the memory of a model."""
        if model.client is not None:
            model.client.release()
            model.client = None

    def _free_samplers(self, session_id: str) -> VerbSteps:
        """Remove the samplers of a session that has ended."""
        yield
        for sampler in self.session_store.list_samplers(session_id):
            sampler.client = None
            self.session_store.samplers.pop(sampler.sampler_id, None)

    def _free_ended_model(self, model: ModelRecord) -> VerbSteps:
        """Drop the gradient of a model whose session has ended, write the model, and free it.

        Also remove the samplers that its last requests have created.
        """
        yield from self._free_samplers(model.session)
        self._try_write(model, "its session ended")
        self.free_model(model)

    def drop_gradient(self, model: ModelRecord, reason: str) -> None:
        """Drop the gradient of a step that was not finished. The step's update will fail."""
        if model.client is not None and model.has_gradient:
            drop_gradients(model.client)
            model.has_gradient, model.is_written_out = False, False
            model.batch_error = (
                f"the accumulated gradients are lost, because {reason}: repeat the "
                "forward_backward of this step"
            )

    def write_all_models(self) -> None:
        """Write all models before the server ends, after the engine's thread has ended."""
        for model in self.session_store.list_models():
            self._try_write(model, "the server ended")

    # ---------------------------------------------------------------------------------------- verbs

    def forward_backward(
        self,
        model: ModelRecord,
        read: Callable[[], tuple[list[Datum], str, dict[str, Any]]],
        backward: bool,
    ) -> VerbSteps:
        """Run a forward, or a forward and backward pass. A slice is a micro-batch.

        If reading the data or the pass fails, the next update fails too.
        """
        try:
            data, loss_fn, config = read()
            client = self.load_client(model)
            if backward:
                model.has_gradient, model.is_written_out, model.gradient_error = True, False, None
            output = yield from forward_backward_microbatches(
                client, data, loss_fn, config, backward=backward
            )
        except BaseException as error:
            if backward:
                model.batch_error = (
                    model.batch_error or f"a forward_backward before it failed: {str(error)[:500]}"
                )
            raise
        tokens = sum(len(next(iter(row.values())).array) for row in output.loss_fn_outputs if row)
        self.engine.metrics.increment("trained_tokens_total", tokens)
        return output

    def optim_step(self, model: ModelRecord, body: OptimStepBody) -> VerbSteps:
        """Queue an update of the weights."""
        yield
        if body.optimizer_params is not None:
            raise BadRequestError("only AdamW is supported here: optim_step takes types.AdamParams")
        if body.adam_params is None:
            raise BadRequestError("the body lacks 'adam_params'")
        params = AdamParams(**body.adam_params.model_dump(exclude_unset=True))
        batch_error, model.batch_error = model.batch_error, None
        client = self.load_client(model)
        if batch_error is not None:
            drop_gradients(client)
            model.has_gradient = False
        if failed := batch_error or model.gradient_error:
            raise UserError(f"optim_step was not run, the weights are unchanged: {failed}")
        model.has_gradient, model.is_written_out = False, False
        result = {"metrics": client.optim_step(params).result().metrics, "type": "optim_step"}
        model.last_update = {"seq": model.last_started_seq, "result": result}
        self.commit_change(model, "optim_step", uses_gradient=True)
        return result

    def save_weights(self, model: ModelRecord, body: SaveWeightsBody) -> VerbSteps:
        """Queue saving weights and optimizer state."""
        return self._save(model, body, "weights", overwrite=body.overwrite)

    def save_weights_external(self, model: ModelRecord, body: SaveWeightsExternalBody) -> VerbSteps:
        """Queue saving the merged weights as a Hugging Face folder."""
        if body.age_encryption_recipients:
            raise BadRequestError(
                "encryption of weights is not supported here: omit age_encryption_recipients"
            )
        return self._save(model, body, "external_weights", merged=model.lora_rank is not None)

    def save_weights_for_sampler(
        self, model: ModelRecord, body: SaveWeightsForSamplerBody
    ) -> VerbSteps:
        """Queue saving weights for sampling, or a new sampling session of the current weights.

        Saved weights stay in memory as a snapshot. Without a `path`, the weights become a sampling
        session and are not saved.
        """
        if body.kind != "snapshot":
            raise BadRequestError(
                f"kind must be 'snapshot', got {body.kind!r:.40}: create a new sampling client "
                "after each update"
            )
        if body.path is not None:
            result = yield from self._save(model, body, SAMPLER_KIND)
            folder = model.folder / SAMPLER_KIND / body.path
            self._snapshots[folder] = self._take_snapshot(model)
            while len(self._snapshots) > _MAX_SNAPSHOTS:
                self._snapshots.popitem(last=False)
            return result
        if body.sampling_session_seq_id is None:
            raise BadRequestError("the body lacks 'sampling_session_seq_id'")
        sampler_id = f"{model.session}:sample:{body.sampling_session_seq_id}"
        if sampler_id in self.session_store.samplers:
            raise BadRequestError(f"the sampling session {sampler_id} already exists")
        yield
        sampler = SamplerRecord(
            sampler_id, model.owner, model.session, model.base, is_in_memory=True
        )
        sampler.client = self._take_snapshot(model)
        self.session_store.add_sampler(sampler)
        self._evict_samplers()
        return {"sampling_session_id": sampler_id}

    def _take_snapshot(self, model: ModelRecord) -> SamplingClient:
        """Return a sampling client of the current weights."""
        return self.load_client(model).save_weights_and_get_sampling_client().result()

    def _save(
        self, model: ModelRecord, body: SaveWeightsBody, kind: str, **options: Any
    ) -> VerbSteps:
        """Save the weights, by default as `step-<seq>`.

        kind       folder of the model for checkpoints of this kind
        options    further arguments of the TrainingClient's method

        Raises BadRequestError for an invalid name.
        """
        name = f"step-{body.seq_id:06d}" if body.path is None else body.path
        yield
        folder, metadata = model.folder / kind, {**model.user_metadata, **body.user_metadata}
        client = self.load_client(model)
        self._snapshots.pop(folder / name, None)  # of an earlier checkpoint of this name
        save = client.save_state if kind == "weights" else client.save_weights_for_sampler
        save(name, body.ttl_seconds, user_metadata=metadata, folder=folder, **options).result()
        for sampler in self.session_store.list_samplers():
            if sampler.path == folder / name:  # likewise
                sampler.path, sampler.is_in_memory = None, True
        return {"path": format_path(folder / name)}

    def find_weights(self, body: LoadWeightsBody, owner: str) -> tuple[ModelRecord, Path]:
        """Return the model and the folder of the weights to load."""
        kinds = ("weights",) if body.optimizer else ("weights", SAMPLER_KIND)
        return self.session_store.find_folder(body.path, owner, kinds=kinds)

    def load_weights(self, model: ModelRecord, body: LoadWeightsBody) -> VerbSteps:
        """Queue loading saved weights into a model, and drop its gradient and its errors."""
        _, folder = self.find_weights(body, model.owner)
        yield
        client = self.load_client(model)
        model.is_written_out = False
        load = client.load_state_with_optimizer if body.optimizer else client.load_state
        load(str(folder)).result()
        drop_gradients(client)  # also what it knows of failed calls
        gradient = model.has_gradient or bool(model.batch_error or model.gradient_error)
        model.has_gradient, model.batch_error, model.gradient_error = False, None, None
        self.commit_change(model, "load_weights", gradient)
        return {"path": body.path, "model_id": model.model_id}

    # ------------------------------------------------------------------------------------- samplers

    def sampling_client(self, sampler: SamplerRecord) -> SamplingClient:
        """Return the client of a sampling session or of a base model, and create it if needed.

        Several threads may call it, and only the first reads the weights. Weights that could not be
        read are read again. Raises HttpError (404) if the session's snapshot was freed.
        """
        with sampler.loading_lock:
            client = sampler.client  # another thread may evict it meanwhile
            if client is not None and not client.failed:
                return client
            if sampler.is_in_memory:
                raise HttpError(
                    404,
                    f"the weights of {sampler.sampler_id} are gone, because memory was full or "
                    "another checkpoint has its name: create a new sampling client",
                )
            base, create = sampler.base, self.engine.service.create_sampling_client
            if sampler.path is not None:
                client = self._snapshots.get(sampler.path)
                if client is None:
                    checkpoint_folder.verify_checkpoint(sampler.path)
                    client = create(model_path=str(sampler.path))
            elif sampler is self.base_samplers[base.name]:
                client = create(base_model=base.source, tokenizer=base.tokenizer)
            else:
                client = self.sampling_client(self.base_samplers[base.name])
            # requests that were accepted later may run earlier: loading is the last use
            sampler.client, sampler.last_used = client, time.monotonic()
            self._evict_samplers()
            return client

    def _evict_samplers(self) -> None:
        """Free samplers beyond `samplers_in_memory`, by tenant and least recent use."""
        samplers = self.session_store.list_samplers()
        loaded = [sampler for sampler in samplers if sampler.client is not None]
        count = len(loaded) - self.engine.settings.limits.samplers_in_memory
        for sampler in choose_oldest(loaded, count):
            sampler.client = None

    # ---------------------------------------------------------------------------- sampling by name

    def find_sampler(self, model: str | None, owner: str) -> SamplerRecord:
        """Return the sampler of a model name: of a base model (None: the first), a sampling
        session's id or a tinker:// path.

        Raises HttpError (404) if the owner has no model of that name.
        """
        if model is not None and model in self.session_store.samplers:
            return self.session_store.get_sampler(model, owner)
        if model is not None and model.startswith("tinker://"):
            return self.session_store.find_path_sampler(model, owner)
        try:
            return self.base_samplers[self.engine.settings.find_base(model).name]
        except UserError as error:
            raise HttpError(404, str(error), "model", code="model_not_found") from None

    async def _load_client(self, model: str | None, owner: str) -> SamplingClient:
        """Return the client of a model name once it is loaded. A loaded model takes none of the
        threads in which others are waited for.

        Raises HttpError: 404 for an unknown name, 429 if the queue is full and the model is not
        loaded.
        """
        sampler = await asyncio.to_thread(self.find_sampler, model, owner)  # may read the disk
        client = sampler.client
        if client is not None and client.ready and not client.failed:
            return client
        self.engine.queue.check_capacity(owner)
        return await asyncio.get_running_loop().run_in_executor(
            _LOADING_EXECUTOR, lambda: self.sampling_client(sampler).result()
        )

    async def sample(
        self,
        model: str | None,
        prompt_ids: Sequence[int],
        num_samples: int,
        sampling_params: SamplingParams,
        *,
        owner: str = LOCAL_OWNER,
        show: Callable[[dict[int, Any]], None] | None = None,
        **options: Any,
    ) -> SampleResponse:
        """Return `num_samples` samples of a model by its name.

        `options`: of `SamplingClient.make_request`. `show`: called on the engine's thread every few
        tokens with the samples so far, by index. Raises HttpError (404) for an unknown name.
        """
        client = functools.partial(self.sampling_client, self.find_sampler(model, owner))
        options |= {
            "prompt": ModelInput.from_ints(list(prompt_ids)),
            "num_samples": num_samples,
            "sampling_params": sampling_params,
        }
        job = SamplingJob(owner, client, options, on_progress=show)
        return await asyncio.wrap_future(self.engine.submit_sample(job))

    def models(self, owner: str = LOCAL_OWNER) -> list[ServedModel]:
        """Return the base models, and the weights that an owner saved for samplers by their paths.

        Clients check this list before they send a request.
        """
        return list(self.bases.values()) + [
            replace(self.bases[model.base.name], name=format_path(folder))
            for model in self.session_store.list_models(owner)
            for kind, folder in self.session_store.iter_checkpoints(model)
            if kind == SAMPLER_KIND
        ]

    async def tokenizer(self, model: str | None = None, owner: str = LOCAL_OWNER) -> Any:
        """Return the tokenizer of a model by its name, once it is loaded; None if the model has
        none.

        Raises HttpError: 404 for an unknown name, 429 if the queue is full and the model is not
        loaded.
        """
        return (await self._load_client(model, owner)).get_tokenizer()

    async def renderer(self, model: str | None = None, owner: str = LOCAL_OWNER) -> Renderer:
        """Return the renderer of a model, once it is loaded: the configured renderer, else the chat
        template of its tokenizer, else role_colon.

        Raises HttpError: 400 if the model has no tokenizer, and as `tokenizer`.
        """
        client = await self._load_client(model, owner)
        renderer = self._renderers.get(client)
        if renderer is None:
            tokenizer = client.get_tokenizer()
            if tokenizer is None:
                raise make_tokenizer_error(model)
            default = "chat_template" if getattr(tokenizer, "chat_template", None) else "role_colon"
            name = self.engine.settings.renderer or default
            renderer = await asyncio.to_thread(get_renderer, name, tokenizer)
            self._renderers[client] = renderer
        return renderer


@dataclass
class ServerParts:
    """Hold the parts of a server that handlers of requests use."""

    engine: ServingEngine
    session_store: SessionStore
    model_manager: ModelManager
    request_store: RequestStore
