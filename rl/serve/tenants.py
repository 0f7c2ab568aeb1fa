"""Manage the models and samplers of tenants, and run their requests in order.

Models are in memory or written to disk. The work runs on the thread of `Desk`.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from rl.clients import SamplingClient, TrainingClient, drop_gradients, in_parts
from rl.errors import UserError
from rl.ranks import checkpoint
from rl.serve.book import LIVE, Book, Model, Sampler, Session, tenant_of
from rl.serve.desk import Desk, log_unwritten
from rl.serve.promises import Promise
from rl.serve.refusals import Interrupted, Refused
from rl.serve.settings import ServedBase
from rl.serve.shares import surplus
from rl.serve.turns import Job
from rl.types import AdamParams, Datum

Steps = Generator[None, None, Any]
SAVED = "sampler_weights"
# snapshots of weights saved for samplers that stay in memory, so that the next sampler need not
# read them
_KEPT_SNAPSHOTS = 8
_GAP_SECONDS = 10.0  # wait for a sequence number that an earlier server may have used


class Tenants:
    """Execute verbs on models.

    A method that returns a generator runs on the thread of `Desk`, a slice at a time.
    """

    def __init__(self, desk: Desk, book: Book):
        self.desk = desk
        self.book = book
        self._saved: OrderedDict[Path, SamplingClient] = OrderedDict()
        desk.turns.others = book.others = self.others
        desk.tally.gauges["models"] = self._where
        desk.tally.gauges["samplers"] = lambda: float(len(book.samplers))
        desk.tally.gauges["sessions"] = lambda: float(
            sum(session.finished is None for session in book.sessions.values())
        )

    def others(self, tenant: str) -> bool:
        """Return whether another tenant exists: another key, or another live session."""
        if self.desk.settings.keys:
            return len(self.desk.settings.keys) > 1
        return any(
            session.finished is None and session.session_id != tenant
            for session in list(self.book.sessions.values())
        )

    def _where(self) -> dict[str, float]:
        """Return the number of models in memory and of models written to disk."""
        loaded = sum(model.client is not None for model in list(self.book.models.values()))
        return {"in_memory": float(loaded), "written_out": float(len(self.book.models) - loaded)}

    # --------------------------------------------------------------------------- requests, in order

    def ask(self, model: Model, seq: int, promise: Promise, work: Callable[[], Steps]) -> None:
        """Queue a request of a model, in the order of `seq`.

        A request that arrives before its predecessors waits for them. A number that was used before
        gives an error as the result. Raises Refused (429) if the queue is full.
        """
        if seq < model.next_seq:
            message = (
                f"{model.model_id} has already run its request {seq}, and the result has expired; "
                f"the next seq_id is {model.next_seq}"
            )
            promise.done.set_exception(Refused(400, message))
            return
        tenant = self.desk.tenant(model.owner, model.session)
        self.desk.turns.check_room(tenant, next_one=seq == model.next_seq and bool(model.waiting))
        job = Job(
            model.owner,
            model.model_id,
            promise.what,
            lambda: self._run(model, seq, work),
            promise.done,
            tenant=tenant,
        )
        model.waiting[seq] = job
        self.desk.turns.early(tenant, 1)
        self.release(model)

    def release(self, model: Model) -> None:
        """Submit the requests that no longer wait for an earlier number."""
        while model.next_seq in model.waiting:
            model.gap_since = None
            job = model.waiting.pop(model.next_seq)
            self.desk.turns.early(job.tenant, -1)
            model.next_seq += 1
            self.desk.submit(job.owner, job.lane, job.what, job.work, job.done, job.tenant)
        if model.waiting and model.resumed:
            model.gap_since = model.gap_since or time.monotonic()

    def pass_gaps(self) -> None:
        """Skip numbers that an earlier server used and whose effect was lost.

        Their requests never arrive again. After 10 s the model's next update fails with an error
        that says so, instead of waiting forever.
        """
        for model in list(self.book.models.values()):
            if model.gap_since is not None and time.monotonic() - model.gap_since > _GAP_SECONDS:
                model.failed = model.failed or (
                    "the server was restarted, and the gradients accumulated before are lost: "
                    "repeat the forward_backward of this step"
                )
                model.next_seq, model.gap_since = min(model.waiting), None
                self.release(model)

    def give_up_waiting(self) -> None:
        """Answer the requests that wait for an earlier number with "try again": the server ends."""
        for model in list(self.book.models.values()):
            for job in self.taken_back(model):
                if job.done.set_running_or_notify_cancel():
                    job.done.set_exception(Interrupted())

    def taken_back(self, model: Model) -> list[Job]:
        """Remove the requests that wait for an earlier number, and return them."""
        waiting, model.waiting = list(model.waiting.values()), {}
        for job in waiting:
            self.desk.turns.early(job.tenant, -1)
        return waiting

    @staticmethod
    def _run(model: Model, seq: int, work: Callable[[], Steps]) -> Steps:
        """Run the work of request `seq`, and mark the model as busy meanwhile."""
        model.busy, model.ran = True, seq
        try:
            return (yield from work())
        finally:
            model.busy = False
            model.used = time.monotonic()

    # ----------------------------------------------------------------------------- models in memory

    def create(self, model: Model, make: Callable[[], TrainingClient]) -> Steps:
        """Create a model with `make`, after writing other models to disk if memory is full.

        If it cannot be created, its waiting requests fail. Its folder is removed unless the folder
        existed before.
        """
        yield
        fresh = not model.folder.exists()
        self._make_room()
        try:
            model.client = make()
            model.lora_rank = model.client.result().info["lora_rank"]
            self.book.keep_model(model)
            self.commit(model, "create_model")
        except BaseException as error:
            self.let_go(model)
            self.book.forget_model(model, fresh)
            for job in self.taken_back(model):  # the model is no longer known
                if job.done.set_running_or_notify_cancel():
                    job.done.set_exception(
                        UserError(f"{model.model_id} could not be made: {error}")
                    )
            raise
        return model.answer

    def client_of(self, model: Model) -> TrainingClient:
        """Return the model's client, and read the model from disk if it was written out.

        Raises UserError if the model was only in memory when an earlier server ended.
        """
        if model.client is None:
            if not model.written:
                raise UserError(
                    f"{model.model_id} was only in memory when the server ended: create a "
                    "training client from one of its checkpoints "
                    "(rest_client.list_checkpoints), and start the server with --durable to keep "
                    "models across restarts"
                )
            self._make_room()
            model.client = self.desk.service.create_training_client_from_state_with_optimizer(
                str(model.live)
            ).result()
            self.desk.tally.add("written_out_total", which="read_back")
        return model.client

    def _make_room(self) -> None:
        """Write models to disk until another model fits into memory.

        Each time, the least recently used model of the tenant that holds most is written. A model
        with a gradient or with running work stays in memory.
        """
        loaded = [model for model in list(self.book.models.values()) if model.client is not None]
        idle = sorted(
            (model for model in loaded if not model.gradient and not model.busy),
            key=lambda model: model.used,
        )
        tenants = {model.model_id: tenant_of(model) for model in idle}
        count = len(loaded) + 1 - self.desk.settings.limits.models_in_memory
        for model in [self.book.models[name] for name in surplus(tenants, list(tenants), count)]:
            self.write_out(model)
            self.let_go(model)
            self.desk.tally.add("written_out_total", which="written_out")

    def write_out(self, model: Model) -> None:
        """Write the model into `live/`, unless its current state is already there.

        The metadata holds the next number and the result of the last update, which the next server
        may have to send again.
        """
        if model.client is None or model.written:
            return
        state = {"next_seq": model.ran + 1, "failed": model.failed, "last": model.last}
        model.client.save_state(LIVE, overwrite=True, metadata=state, folder=model.folder).result()
        model.written = True

    def commit(self, model: Model, what: str, gradient: bool = False) -> None:
        """Write a change of the model to disk before its result is sent. Only with --durable.

        `gradient`: the change consumed a gradient.

        Raises Refused (507) if writing failed. The change is then undone: the model is read from
        `live/`, which holds the state before the change.
        """
        if not self.desk.settings.durable:
            return
        try:
            self.write_out(model)
        except Exception as error:
            log_unwritten(model.model_id, error)
            saved = self.book.live_state(model)
            if saved is not None and saved["next_seq"] == model.ran + 1:
                model.written = True  # the new folder is complete: a later step failed
                return
            if saved is None:
                raise Refused(
                    507,
                    f"{what} was done, but the model could not be written ({type(error).__name__})",
                ) from error
            self.let_go(model)
            model.written, model.last = True, saved["last"]
            if gradient:
                model.lost = (
                    f"{what} was undone, and its gradient is lost: repeat the forward_backward of "
                    "that step"
                )
            text = (
                f"the server could not write the model ({type(error).__name__}: its disk may be "
                f"full), so {what} was undone"
            )
            raise Refused(507, f"{text}: the weights and the optimizer are as before") from error

    @staticmethod
    def let_go(model: Model) -> None:
        """Free the memory of a model."""
        if model.client is not None:
            model.client.release()
            model.client = None

    def end_session(self, session_id: str) -> Steps:
        """Free the memory of a session: drop gradients, write models to disk, remove samplers."""
        yield
        for model in [
            model for model in list(self.book.models.values()) if model.session == session_id
        ]:
            self._drop_half(model, "its session ended")
            if model.client is not None:
                self.write_out(model)
                self.let_go(model)
        for sampler in [
            candidate
            for candidate in list(self.book.samplers.values())
            if candidate.session == session_id
        ]:
            sampler.client = None
            self.book.samplers.pop(sampler.sampler_id, None)

    def _drop_half(self, model: Model, why: str) -> None:
        """Drop the gradient of a step that was not finished. The step's update will fail."""
        if model.client is not None and model.gradient:
            drop_gradients(model.client)
            model.gradient, model.written = False, False
            model.failed = (
                f"the accumulated gradients are lost, because {why}: repeat the forward_backward "
                "of this step"
            )

    def write_all(self) -> None:
        """Write all models before the server ends. The thread of `Desk` must have ended."""
        for model in list(self.book.models.values()):
            if model.client is not None:
                try:
                    self._drop_half(model, "the server ended")
                    self.write_out(model)
                except Exception as error:  # boundary: the other models are still written
                    log_unwritten(model.model_id, error)

    # ---------------------------------------------------------------------------------------- verbs

    def forward_backward(
        self,
        model: Model,
        read: Callable[[], tuple[list[Datum], str, dict[str, Any]]],
        backward: bool,
    ) -> Steps:
        """Run a forward, or a forward and backward pass. A slice is a micro-batch.

        If reading the data or the pass fails, the next update fails too.
        """
        try:
            data, loss_fn, config = read()
            client = self.client_of(model)
            if backward:
                model.gradient, model.written, model.lost = True, False, None
            output = yield from in_parts(client, data, loss_fn, config, backward=backward)
        except BaseException as error:
            if backward:
                model.failed = (
                    model.failed or f"a forward_backward before it failed: {str(error)[:500]}"
                )
            raise
        self.desk.tally.add(
            "trained_tokens_total",
            sum(
                len(tensor.array)
                for row in output.loss_fn_outputs
                for tensor in list(row.values())[:1]
            ),
        )
        return output

    def optim_step(self, model: Model, params: AdamParams) -> Steps:
        """Update the weights. Raises UserError if a forward_backward of the step failed."""
        yield
        failed, model.failed = model.failed, None
        client = self.client_of(model)
        if failed is not None:
            drop_gradients(client)
            model.gradient = False
            raise UserError(f"optim_step was not run, the weights are unchanged: {failed}")
        if model.lost is not None:
            raise UserError(f"optim_step was not run, the weights are unchanged: {model.lost}")
        model.gradient, model.written = False, False
        result = {"metrics": client.optim_step(params).result().metrics, "type": "optim_step"}
        model.last = {"seq": model.ran, "result": result}
        self.commit(model, "optim_step", gradient=True)
        return result

    def save_state(
        self, model: Model, name: str, ttl: int | None, overwrite: bool, words: dict[str, str]
    ) -> Steps:
        """Save weights and optimizer state. `ttl`: time to live in seconds."""
        yield
        client = self.client_of(model)
        client.save_state(
            name, ttl, overwrite, {**model.user_metadata, **words}, folder=model.folder / "weights"
        ).result()
        return {"path": self.book.path_of(model, "weights", name), "type": "save_weights"}

    def save_for_sampler(
        self, model: Model, name: str, ttl: int | None, words: dict[str, str]
    ) -> Steps:
        """Save weights for sampling, and keep a snapshot in memory. `ttl`: seconds."""
        yield
        client, folder = self.client_of(model), model.folder / "sampler_weights"
        client.save_weights_for_sampler(
            name, ttl, {**model.user_metadata, **words}, folder=folder
        ).result()
        self._saved[folder / name] = client.save_weights_and_get_sampling_client().result()
        while len(self._saved) > _KEPT_SNAPSHOTS:
            self._saved.popitem(last=False)
        return {
            "path": self.book.path_of(model, "sampler_weights", name),
            "type": "save_weights_for_sampler",
        }

    def save_external(self, model: Model, name: str, ttl: int | None) -> Steps:
        """Save the full weights as a Hugging Face folder, with the adapter merged into its base."""
        yield
        client = self.client_of(model)
        folder = model.folder / "external_weights"
        client.save_weights_for_sampler(
            name, ttl, model.user_metadata, merged=model.lora_rank is not None, folder=folder
        ).result()
        return {
            "path": self.book.path_of(model, "external_weights", name),
            "type": "save_weights_external",
        }

    def snapshot(self, model: Model, sampler: Sampler) -> Steps:
        """Give a sampling session the current weights. Nothing is written to disk."""
        yield
        sampler.client = self.client_of(model).save_weights_and_get_sampling_client().result()
        self.book.add_sampler(sampler)
        self._forget_samplers()
        return {"sampling_session_id": sampler.sampler_id, "type": "save_weights_for_sampler"}

    def load(self, model: Model, folder: Path, with_optimizer: bool, path: str) -> Steps:
        """Load saved weights into a model, and drop its gradient and its errors."""
        yield
        client = self.client_of(model)
        model.written = False
        (client.load_state_with_optimizer if with_optimizer else client.load_state)(
            str(folder)
        ).result()
        gradient = model.gradient or bool(model.failed or model.lost)
        model.gradient, model.failed, model.lost = False, None, None
        self.commit(model, "load_weights", gradient)
        return {"path": path, "model_id": model.model_id, "type": "load_weights"}

    # ------------------------------------------------------------------------------------- samplers

    def sampling_client(self, sampler: Sampler) -> SamplingClient:
        """Return the client of a sampling session, and create it from its weights if needed.

        Runs on the thread of `Desk`. Raises Refused (404) if the session's snapshot was freed.
        """
        if sampler.client is None:
            if sampler.snapshot:
                raise Refused(
                    404,
                    f"the weights of {sampler.sampler_id} were freed because memory was full: "
                    "create a new sampling client",
                )
            saved_client = self._saved.get(sampler.path) if sampler.path is not None else None
            if saved_client is not None:
                sampler.client = saved_client
            elif sampler.path is not None:
                checkpoint.verify(sampler.path)
                sampler.client = self.desk.service.create_sampling_client(
                    model_path=str(sampler.path)
                )
            else:
                sampler.client = self.desk.base_client(sampler.base)
            self._forget_samplers()
        return sampler.client

    def _forget_samplers(self) -> None:
        """Free samplers beyond `samplers_in_memory`, by tenant and least recent use."""
        loaded = sorted(
            (
                sampler
                for sampler in list(self.book.samplers.values())
                if sampler.client is not None
            ),
            key=lambda sampler: sampler.used,
        )
        by_id, tenants = (
            {sampler.sampler_id: sampler for sampler in loaded},
            {sampler.sampler_id: tenant_of(sampler) for sampler in loaded},
        )
        for name in surplus(
            tenants, list(tenants), len(loaded) - self.desk.settings.limits.samplers_in_memory
        ):
            by_id[name].client = None

    def by_name(self, model: str, owner: str) -> Callable[[], SamplingClient] | None:
        """Resolve a model name of a request: a sampling session's id, or a tinker:// path.

        Return a function that creates the client, or None for any other name. `Desk` calls this
        resolver.
        """
        if model in self.book.samplers:
            sampler = self.book.sampler(model, owner)
            return lambda: self.sampling_client(sampler)
        if not model.startswith("tinker://"):
            return None
        source, folder = self.book.folder_of(model, owner)
        ids: Sequence[str] = [
            candidate.sampler_id
            for candidate in list(self.book.samplers.values())
            if candidate.path == folder and candidate.owner == owner
        ]
        sampler_id = ids[0] if ids else f"{source.model_id}:{folder.parent.name}:{folder.name}"
        existing = self.book.samplers.get(sampler_id)
        path_sampler = existing or self.book.add_sampler(
            Sampler(sampler_id, owner, source.session, source.base, folder)
        )
        return lambda: self.sampling_client(path_sampler)

    def names(self, owner: str) -> list[tuple[str, ServedBase]]:
        """Return the names that `by_name` resolves for this owner: weights saved for samplers.

        Each entry is the tinker:// path and the base model.
        """
        saved = [
            (model, folder)
            for model in self.book.models_of(owner)
            for kind, folder in self.book.checkpoints(model)
            if kind == SAVED
        ]
        return [
            (self.book.path_of(model, SAVED, folder.name), model.base) for model, folder in saved
        ]


def end_session(desk: Desk, tenants: Tenants, session: Session, reason: str) -> None:
    """End a session: fail its waiting requests and free its memory.

    Do nothing if the session has ended before; its first reason stays.
    """
    if session.finished is not None:
        return
    session.finished = reason
    tenants.book.keep(session)
    for model in [
        model for model in list(tenants.book.models.values()) if model.session == session.session_id
    ]:
        for job in tenants.taken_back(model):
            job.done.set_exception(
                Refused(410, f"the session of this request has ended ({reason})")
            )
    desk.submit(
        session.owner,
        f"{session.session_id}:end",
        "end_session",
        lambda: tenants.end_session(session.session_id),
    )
