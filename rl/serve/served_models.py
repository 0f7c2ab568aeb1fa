"""Manage the models and samplers of tenants, and run their requests in order.

Models are in memory or written to disk. The work runs on the thread of `ServingEngine`.
"""

from __future__ import annotations

import functools
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.client import SamplingClient, TrainingClient, drop_gradients, forward_backward_microbatches
from rl.distributed import checkpoint_folder
from rl.errors import UserError
from rl.serve.http_errors import HttpError, ShutdownError
from rl.serve.request_store import PendingRequest, RequestStore
from rl.serve.scheduler import EngineJob
from rl.serve.serve_settings import ServedBaseModel
from rl.serve.serving_engine import ServingEngine, log_write_failure
from rl.serve.session_store import (
    LIVE_FOLDER,
    ModelRecord,
    SamplerRecord,
    SessionRecord,
    SessionStore,
    get_tenant,
)
from rl.serve.tenant_limit import choose_evictions
from rl.types import AdamParams, Datum

VerbSteps = Generator[None, None, Any]
SAMPLER_KIND = "sampler_weights"
# snapshots of weights saved for samplers that stay in memory, so that the next sampler need not
# read them
_MAX_SNAPSHOTS = 8
_GAP_SECONDS = 10.0  # wait for a sequence number that an earlier server may have used


class ModelManager:
    """Execute verbs on models.

    A method that returns a generator runs on the thread of `ServingEngine`, a slice at a time.
    """

    def __init__(self, engine: ServingEngine, session_store: SessionStore):
        self.engine = engine
        self.session_store = session_store
        self._snapshots: OrderedDict[Path, SamplingClient] = OrderedDict()
        engine.resolvers.append(self.resolve_name)
        engine.name_listers.append(self.list_names)
        engine.queue.has_others = session_store.has_other_tenants = self.has_other_tenants
        for state, loaded in (("in_memory", True), ("written_out", False)):
            count = functools.partial(self._count_models, loaded)
            engine.metrics.set_gauge("models", count, state=state)
        engine.metrics.set_gauge("samplers", lambda: len(session_store.samplers))
        engine.metrics.set_gauge("sessions", lambda: len(session_store.list_live_sessions()))

    def has_other_tenants(self, tenant: str) -> bool:
        """Return whether another tenant exists: another key, or another live session."""
        if self.engine.settings.keys:
            return len(self.engine.settings.keys) > 1
        sessions = self.session_store.list_live_sessions()
        return any(session.session_id != tenant for session in sessions)

    def _count_models(self, loaded: bool) -> int:
        """Return the number of models in memory, or else of models written to disk."""
        models = self.session_store.list_models()
        return sum((model.client is not None) == loaded for model in models)

    # --------------------------------------------------------------------------- requests, in order

    def enqueue_request(
        self, model: ModelRecord, seq: int, request: PendingRequest, work: Callable[[], VerbSteps]
    ) -> None:
        """Queue a request of a model, in the order of `seq`.

        A request that arrives before its predecessors waits for them. A number that was used before
        gives an error as the result. Raises HttpError (429) if the queue is full.
        """
        if seq < model.next_seq:
            message = (
                f"{model.model_id} has already run its request {seq}, and the result has expired; "
                f"the next seq_id is {model.next_seq}"
            )
            request.work_future.set_exception(HttpError(400, message))
            return
        tenant = get_tenant(model)
        self.engine.queue.check_capacity(
            tenant, in_order=seq == model.next_seq and bool(model.queued_jobs)
        )
        job = EngineJob(
            model.owner,
            model.model_id,
            request.verb,
            lambda: self._run_work(model, seq, work),
            request.work_future,
            tenant=tenant,
        )
        model.queued_jobs[seq] = job
        self.engine.queue.add_early(tenant, 1)
        self.submit_ready(model)

    def submit_ready(self, model: ModelRecord) -> None:
        """Submit the requests that no longer wait for an earlier number."""
        while model.next_seq in model.queued_jobs:
            model.gap_since = None
            job = model.queued_jobs.pop(model.next_seq)
            self.engine.queue.add_early(job.tenant, -1)
            model.next_seq += 1
            self.engine.submit(job.owner, job.lane, job.verb, job.work, job.done, job.tenant)
        if model.queued_jobs and model.resumed:
            model.gap_since = model.gap_since or time.monotonic()

    def skip_lost_numbers(self) -> None:
        """Skip numbers that an earlier server used and whose effect was lost.

        Their requests never arrive again. After 10 s the model's next update fails with an error
        that says so, instead of waiting forever.
        """
        for model in self.session_store.list_models():
            if model.gap_since is not None and time.monotonic() - model.gap_since > _GAP_SECONDS:
                model.batch_error = model.batch_error or (
                    "the server was restarted, and the gradients accumulated before are lost: "
                    "repeat the forward_backward of this step"
                )
                model.next_seq, model.gap_since = min(model.queued_jobs), None
                self.submit_ready(model)

    def interrupt_waiting(self) -> None:
        """Answer the requests that wait for an earlier number with "try again": the server ends."""
        for model in self.session_store.list_models():
            for job in self.remove_waiting(model):
                if job.done.set_running_or_notify_cancel():
                    job.done.set_exception(ShutdownError())

    def remove_waiting(self, model: ModelRecord) -> list[EngineJob]:
        """Remove the requests that wait for an earlier number, and return them."""
        waiting, model.queued_jobs = list(model.queued_jobs.values()), {}
        for job in waiting:
            self.engine.queue.add_early(job.tenant, -1)
        return waiting

    @staticmethod
    def _run_work(model: ModelRecord, seq: int, work: Callable[[], VerbSteps]) -> VerbSteps:
        """Run the work of request `seq`, and mark the model as busy meanwhile."""
        model.is_running, model.last_started_seq = True, seq
        try:
            return (yield from work())
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
            self.session_store.remove_model(model, fresh)
            for job in self.remove_waiting(model):  # the model is no longer known
                if job.done.set_running_or_notify_cancel():
                    job.done.set_exception(
                        UserError(f"{model.model_id} could not be made: {error}")
                    )
            raise
        return model.create_result

    def load_client(self, model: ModelRecord) -> TrainingClient:
        """Return the model's client, and read the model from disk if it was written out.

        Raises UserError if the model was only in memory when an earlier server ended.
        """
        if model.client is None:
            if not model.is_written_out:
                raise UserError(
                    f"{model.model_id} was only in memory when the server ended: create a training "
                    "client from one of its checkpoints (rest_client.list_checkpoints), and start "
                    "the server with --durable to keep models across restarts"
                )
            self._evict_models()
            model.client = self.engine.service.create_training_client_from_state_with_optimizer(
                str(model.live_folder)
            ).result()
            self.engine.metrics.increment("written_out_total", which="read_back")
        return model.client

    def _evict_models(self) -> None:
        """Write models to disk until another model fits into memory.

        Each time, the least recently used model of the tenant that holds most is written. A model
        with a gradient or with running work stays in memory.
        """
        loaded = [model for model in self.session_store.list_models() if model.client is not None]
        idle = sorted(
            (model for model in loaded if not model.has_gradient and not model.is_running),
            key=lambda model: model.last_used,
        )
        tenants = {model.model_id: get_tenant(model) for model in idle}
        count = len(loaded) + 1 - self.engine.settings.limits.models_in_memory
        for model in [
            self.session_store.models[name]
            for name in choose_evictions(tenants, list(tenants), count)
        ]:
            self.write_model(model)
            self.free_model(model)
            self.engine.metrics.increment("written_out_total", which="written_out")

    def write_model(self, model: ModelRecord) -> None:
        """Write the model into `live/`, unless its current state is already there.

        The metadata holds the next number and the result of the last update, which the next server
        may have to send again.
        """
        if model.client is None or model.is_written_out:
            return
        state = {
            "next_seq": model.last_started_seq + 1,
            "failed": model.batch_error,
            "last": model.last_update,
        }
        model.client.save_state(
            LIVE_FOLDER, overwrite=True, metadata=state, folder=model.folder
        ).result()
        model.is_written_out = True

    def commit_change(self, model: ModelRecord, verb: str, uses_gradient: bool = False) -> None:
        """Write a change of the model to disk before its result is sent. Only with --durable.

        `uses_gradient`: the change consumed a gradient.

        Raises HttpError (507) if writing failed. The change is then undone: the model is read from
        `live/`, which holds the state before the change.
        """
        if not self.engine.settings.durable:
            return
        try:
            self.write_model(model)
        except Exception as error:
            log_write_failure(model.model_id, error)
            saved = self.session_store.read_live_metadata(model)
            if saved is not None and saved["next_seq"] == model.last_started_seq + 1:
                model.is_written_out = True  # the new folder is complete: a later step failed
                return
            if saved is None:
                raise HttpError(
                    507,
                    f"{verb} was done, but the model could not be written ({type(error).__name__})",
                ) from error
            self.free_model(model)
            model.is_written_out, model.last_update = True, saved["last"]
            if uses_gradient:
                model.gradient_error = (
                    f"{verb} was undone, and its gradient is lost: repeat the forward_backward of "
                    "that step"
                )
            text = (
                f"the server could not write the model ({type(error).__name__}: its disk may be "
                f"full), so {verb} was undone"
            )
            raise HttpError(507, f"{text}: the weights and the optimizer are as before") from error

    @staticmethod
    def free_model(model: ModelRecord) -> None:
        """Free the memory of a model."""
        if model.client is not None:
            model.client.release()
            model.client = None

    def free_session(self, session_id: str) -> VerbSteps:
        """Free the memory of a session: drop gradients, write models to disk, remove samplers."""
        yield
        for model in self.session_store.list_models(session_id=session_id):
            self._drop_gradient(model, "its session ended")
            if model.client is not None:
                self.write_model(model)
                self.free_model(model)
        for sampler in self.session_store.list_samplers(session_id):
            sampler.client = None
            self.session_store.samplers.pop(sampler.sampler_id, None)

    def _drop_gradient(self, model: ModelRecord, reason: str) -> None:
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
            if model.client is not None:
                try:
                    self._drop_gradient(model, "the server ended")
                    self.write_model(model)
                except Exception as error:  # boundary: the other models are still written
                    log_write_failure(model.model_id, error)

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
        self.engine.metrics.increment(
            "trained_tokens_total",
            sum(
                len(tensor.array)
                for row in output.loss_fn_outputs
                for tensor in list(row.values())[:1]
            ),
        )
        return output

    def optim_step(self, model: ModelRecord, params: AdamParams) -> VerbSteps:
        """Update the weights. Raises UserError if a forward_backward of the step failed."""
        yield
        failed, model.batch_error = model.batch_error, None
        client = self.load_client(model)
        if failed is not None:
            drop_gradients(client)
            model.has_gradient = False
            raise UserError(f"optim_step was not run, the weights are unchanged: {failed}")
        if model.gradient_error is not None:
            raise UserError(
                f"optim_step was not run, the weights are unchanged: {model.gradient_error}"
            )
        model.has_gradient, model.is_written_out = False, False
        result = {"metrics": client.optim_step(params).result().metrics, "type": "optim_step"}
        model.last_update = {"seq": model.last_started_seq, "result": result}
        self.commit_change(model, "optim_step", uses_gradient=True)
        return result

    def save_state(
        self,
        model: ModelRecord,
        name: str,
        ttl: int | None,
        overwrite: bool,
        metadata: dict[str, str],
    ) -> VerbSteps:
        """Save weights and optimizer state. `ttl`: time to live in seconds."""
        yield
        client = self.load_client(model)
        client.save_state(
            name,
            ttl,
            overwrite,
            {**model.user_metadata, **metadata},
            folder=model.folder / "weights",
        ).result()
        return {
            "path": self.session_store.format_path(model, "weights", name),
            "type": "save_weights",
        }

    def save_for_sampler(
        self, model: ModelRecord, name: str, ttl: int | None, metadata: dict[str, str]
    ) -> VerbSteps:
        """Save weights for sampling, and keep a snapshot in memory. `ttl`: seconds."""
        yield
        client, folder = self.load_client(model), model.folder / "sampler_weights"
        client.save_weights_for_sampler(
            name, ttl, {**model.user_metadata, **metadata}, folder=folder
        ).result()
        self._snapshots[folder / name] = client.save_weights_and_get_sampling_client().result()
        while len(self._snapshots) > _MAX_SNAPSHOTS:
            self._snapshots.popitem(last=False)
        return {
            "path": self.session_store.format_path(model, "sampler_weights", name),
            "type": "save_weights_for_sampler",
        }

    def save_external(self, model: ModelRecord, name: str, ttl: int | None) -> VerbSteps:
        """Save the full weights as a Hugging Face folder, with the adapter merged into its base."""
        yield
        client = self.load_client(model)
        folder = model.folder / "external_weights"
        client.save_weights_for_sampler(
            name, ttl, model.user_metadata, merged=model.lora_rank is not None, folder=folder
        ).result()
        return {
            "path": self.session_store.format_path(model, "external_weights", name),
            "type": "save_weights_external",
        }

    def snapshot_weights(self, model: ModelRecord, sampler: SamplerRecord) -> VerbSteps:
        """Give a sampling session the current weights. Nothing is written to disk."""
        yield
        sampler.client = self.load_client(model).save_weights_and_get_sampling_client().result()
        self.session_store.add_sampler(sampler)
        self._evict_samplers()
        return {"sampling_session_id": sampler.sampler_id, "type": "save_weights_for_sampler"}

    def load_weights(
        self, model: ModelRecord, folder: Path, with_optimizer: bool, path: str
    ) -> VerbSteps:
        """Load saved weights into a model, and drop its gradient and its errors."""
        yield
        client = self.load_client(model)
        model.is_written_out = False
        (client.load_state_with_optimizer if with_optimizer else client.load_state)(
            str(folder)
        ).result()
        gradient = model.has_gradient or bool(model.batch_error or model.gradient_error)
        model.has_gradient, model.batch_error, model.gradient_error = False, None, None
        self.commit_change(model, "load_weights", gradient)
        return {"path": path, "model_id": model.model_id, "type": "load_weights"}

    # ------------------------------------------------------------------------------------- samplers

    def sampling_client(self, sampler: SamplerRecord) -> SamplingClient:
        """Return the client of a sampling session, and create it from its weights if needed.

        Runs on the thread of `ServingEngine`. Raises HttpError (404) if the session's snapshot was
        freed.
        """
        if sampler.client is None:
            if sampler.is_in_memory:
                raise HttpError(
                    404,
                    f"the weights of {sampler.sampler_id} were freed because memory was full: "
                    "create a new sampling client",
                )
            saved_client = self._snapshots.get(sampler.path) if sampler.path is not None else None
            if saved_client is not None:
                sampler.client = saved_client
            elif sampler.path is not None:
                checkpoint_folder.verify_checkpoint(sampler.path)
                sampler.client = self.engine.service.create_sampling_client(
                    model_path=str(sampler.path)
                )
            else:
                sampler.client = self.engine.get_base_client(sampler.base)
            self._evict_samplers()
        return sampler.client

    def _evict_samplers(self) -> None:
        """Free samplers beyond `samplers_in_memory`, by tenant and least recent use."""
        loaded = sorted(
            (
                sampler
                for sampler in self.session_store.list_samplers()
                if sampler.client is not None
            ),
            key=lambda sampler: sampler.last_used,
        )
        by_id, tenants = (
            {sampler.sampler_id: sampler for sampler in loaded},
            {sampler.sampler_id: get_tenant(sampler) for sampler in loaded},
        )
        for name in choose_evictions(
            tenants, list(tenants), len(loaded) - self.engine.settings.limits.samplers_in_memory
        ):
            by_id[name].client = None

    def resolve_name(self, model: str, owner: str) -> Callable[[], SamplingClient] | None:
        """Resolve a model name of a request: a sampling session's id, or a tinker:// path.

        Return a function that creates the client, or None for any other name. `ServingEngine` calls
        this resolver.
        """
        if model in self.session_store.samplers:
            sampler = self.session_store.get_sampler(model, owner)
            return lambda: self.sampling_client(sampler)
        if not model.startswith("tinker://"):
            return None
        source, folder = self.session_store.find_folder(model, owner)
        ids: Sequence[str] = [
            candidate.sampler_id
            for candidate in self.session_store.list_samplers()
            if candidate.path == folder and candidate.owner == owner
        ]
        sampler_id = ids[0] if ids else f"{source.model_id}:{folder.parent.name}:{folder.name}"
        existing = self.session_store.samplers.get(sampler_id)
        path_sampler = existing or self.session_store.add_sampler(
            SamplerRecord(sampler_id, owner, source.session, source.base, folder)
        )
        return lambda: self.sampling_client(path_sampler)

    def list_names(self, owner: str) -> list[tuple[str, ServedBaseModel]]:
        """Return the names that `resolve_name` resolves for this owner: weights saved for samplers.

        Each entry is the tinker:// path and the base model.
        """
        saved = [
            (model, folder)
            for model in self.session_store.list_models(owner)
            for kind, folder in self.session_store.iter_checkpoints(model)
            if kind == SAMPLER_KIND
        ]
        return [
            (self.session_store.format_path(model, SAMPLER_KIND, folder.name), model.base)
            for model, folder in saved
        ]


@dataclass
class ServerParts:
    """Hold the parts of a server that handlers of requests use."""

    engine: ServingEngine
    session_store: SessionStore
    model_manager: ModelManager
    request_store: RequestStore


def end_session(
    engine: ServingEngine, model_manager: ModelManager, session: SessionRecord, reason: str
) -> None:
    """End a session: fail its waiting requests and free its memory.

    Do nothing if the session has ended before; its first reason stays.
    """
    if session.finished is not None:
        return
    session.finished = reason
    model_manager.session_store.save_session(session)
    for model in model_manager.session_store.list_models(session_id=session.session_id):
        for job in model_manager.remove_waiting(model):
            job.done.set_exception(
                HttpError(410, f"the session of this request has ended ({reason})")
            )
    engine.submit(
        session.owner,
        f"{session.session_id}:end",
        "end_session",
        lambda: model_manager.free_session(session.session_id),
    )
