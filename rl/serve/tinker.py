"""Serve the training part of Tinker's protocol, as its SDK (0.38) uses it.

It has sessions, models, numbered requests, and results for which clients poll.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Generator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rl.clients import TrainingClient
from rl.errors import BadRequestError
from rl.ranks import checkpoint
from rl.serve import convert, wire
from rl.serve.answers import JsonAnswer
from rl.serve.base_checks import tokenizer_place
from rl.serve.body import Body
from rl.serve.book import Book, Model, Sampler, Session
from rl.serve.compressed import expanded, reads_zstd
from rl.serve.desk import Desk
from rl.serve.promises import Promise, Promises, digest_of, settled
from rl.serve.refusals import Refused
from rl.serve.settings import LOOPBACK
from rl.serve.stored import PROTOBUF
from rl.serve.tenants import Tenants, end_session

_SECONDS = 10 * 366 * 86400  # longest time to live of a checkpoint, in seconds
# largest result that is converted to JSON on the event loop; larger results use a thread
_BYTES_AT_ONCE = 16384
Answer = Callable[[Request], Awaitable[Response]]


class Tinker:
    """Hold the handlers under /api/v1 for training."""

    def __init__(self, desk: Desk, book: Book, tenants: Tenants, promises: Promises):
        self.desk = desk
        self.book = book
        self.tenants = tenants
        self.promises = promises

    def routes(self) -> list[Route]:
        """Return the routes for training, including the unsupported ones."""
        posts: dict[str, Answer] = {
            "client/config": self.config,
            "client/dynamic_config": self.dynamic_config,
            "telemetry": self.telemetry,
            "create_session": self.create_session,
            "session_heartbeat": self.heartbeat,
            "sessions/{session_id}/finish": self.finish,
            "create_model": self.create_model,
            "unload_model": self.unload_model,
            "get_info": self.get_info,
            "forward_backward": self.forward_backward,
            "optim_step": self.optim_step,
            "save_weights": self.save_weights,
            "save_weights_for_sampler": self.save_weights_for_sampler,
            "save_weights_external": self.save_weights_external,
            "load_weights": self.load_weights,
            "retrieve_future": self.retrieve_future,
            "cancel_future": self.cancel_future,
            "create_custom_loss": _not_done(
                "custom losses on the server: forward_backward_custom runs them in your script"
            ),
            "copy_weights": _not_done(
                "copying weights: every session of the same key can load the saved weights"
            ),
            "retrieve_futures": _not_done("retrieving many results at once: use retrieve_future"),
            "auth/token": _not_done("exchanging a key for a token: send the key itself"),
        }
        return [
            Route(f"/api/v1/{path}", answer, methods=["POST"]) for path, answer in posts.items()
        ]

    # ------------------------------------------------------------------------------------- sessions

    async def config(self, request: Request) -> Response:
        """Return the SDK's feature flags.

        Chunks are sent in parallel, keys are sent directly, and bodies from other machines are
        compressed.
        """
        compress = self.desk.settings.host not in LOOPBACK and reads_zstd()
        flags = {
            "pjwt_auth_enabled": False,
            "proto_compress_fwdbwd": compress,
            "parallel_fwdbwd_chunks": True,
        }
        return JsonAnswer(
            {**flags, "sample_use_retrieve_futures": False, "custom_loss_server_side": False}
        )

    async def dynamic_config(self, request: Request) -> Response:
        """Return the SDK's settings that may change while it runs."""
        return JsonAnswer({"refresh_interval_sec": 300, "sample_cancel_enabled": True})

    async def telemetry(self, request: Request) -> Response:
        """Accept telemetry and discard it."""
        await request.body()
        return JsonAnswer({"status": "accepted"})

    async def create_session(self, request: Request) -> Response:
        """Create a session."""
        body = await Body.of(request)
        owner, words, name = (
            request.state.owner,
            body.words("user_metadata"),
            body.maybe("display_name", str),
        )
        session = await asyncio.to_thread(self.book.open_session, owner, words, name)
        return JsonAnswer({"type": "create_session", "session_id": session.session_id})

    async def heartbeat(self, request: Request) -> Response:
        """Record a heartbeat of a session."""
        body = await Body.of(request)
        self.book.session(body.text("session_id"), request.state.owner)
        return JsonAnswer({"type": "session_heartbeat"})

    async def finish(self, request: Request) -> Response:
        """End a session, with the client's reason."""
        body = await Body.of(request)
        session = self.book.session(
            request.path_params["session_id"], request.state.owner, alive=False
        )
        reason = (body.maybe("reason", dict) or {}).get("type", "success")
        end_session(self.desk, self.tenants, session, str(reason)[:40])
        return Response(status_code=204)

    # --------------------------------------------------------------------------------------- models

    async def create_model(self, request: Request) -> Response:
        """Queue the creation of a LoRA training client.

        Raises Refused (400) if the request lacks a LoRA or names another optimizer than AdamW.
        """
        body = await Body.of(request)
        lora = Body(
            _need(
                body.maybe("lora_config", dict),
                "lora_config: only LoRA training is supported over the network, not full "
                "fine-tuning",
            )
        )
        session = self.book.session(body.text("session_id"), request.state.owner)
        base = self.desk.settings.base(body.text("base_model"))
        optimizer = (body.maybe("optimizer_config", dict) or {}).get("type", "adamw")
        if optimizer != "adamw":
            raise Refused(
                400, f"only AdamW is supported here, got the optimizer {str(optimizer)[:40]!r}"
            )
        lora_flags = {
            name: lora.fields.get(name, True)
            for name in ("train_mlp", "train_attn", "train_unembed")
        }
        rank, seed = lora.whole("rank", 1, 4096), lora.maybe_whole("seed", 0, 2**63 - 1)

        def make() -> TrainingClient:
            service = self.desk.service
            return service.create_lora_training_client(
                base.where, rank, seed, **lora_flags, tokenizer=base.tokenizer
            )

        return self._created(
            session, body, base, make, await request.body(), {"type": "create_model"}
        )

    def _created(
        self,
        session: Session,
        body: Body,
        base: Any,
        make: Callable[[], TrainingClient],
        raw: bytes,
        answer: dict[str, str],
    ) -> Response:
        """Create the model of a number in its session, once, even if the request is repeated.

        Raises Refused (400) if the number was used for another request, and Refused (429) if the
        queue is full.
        """
        seq = body.whole("model_seq_id")
        request_id, digest = f"{session.session_id}:train:{seq}:0", digest_of(raw)
        pending = self.promises.known(request_id, digest)
        if pending is None:
            tenant, model_id = (
                self.desk.tenant(session.owner, session.session_id),
                f"{session.session_id}:train:{seq}",
            )
            self.desk.turns.check_room(tenant)
            existing = self.book.models.get(model_id)
            if existing is not None and existing.digest and existing.digest != digest.hex():
                raise Refused(
                    400,
                    f"{model_id} was created by another request: use a new model_seq_id for each "
                    "model of a session",
                )
            # a model that was only in memory when an earlier server ended no longer exists: it is
            # created again
            if existing is not None and (existing.written or not existing.resumed):
                pending = Promise(
                    request_id,
                    session.owner,
                    "create_model",
                    digest,
                    session=session.session_id,
                    tenant=tenant,
                )
                self.promises.add(settled(pending, existing.answer))
                return JsonAnswer({"request_id": request_id, "model_id": model_id})
            model = self.book.add_model(session, seq, base, body.words("user_metadata"))
            model.digest, model.answer = digest.hex(), {"model_id": model_id, **answer}
            pending = Promise(
                request_id,
                session.owner,
                "create_model",
                digest,
                session=session.session_id,
                tenant=tenant,
            )
            self.promises.add(pending)
            self.desk.submit(
                session.owner,
                model.model_id,
                "create_model",
                lambda: self.tenants.create(model, make),
                pending.done,
                tenant,
            )
        return JsonAnswer(
            {"request_id": request_id, "model_id": f"{session.session_id}:train:{seq}"}
        )

    async def unload_model(self, request: Request) -> Response:
        """Write a model to disk and free its memory."""
        body = await Body.of(request)
        model = self.book.model(body.text("model_id"), request.state.owner)

        def unload() -> None:
            self.tenants.write_out(model)
            self.tenants.let_go(model)

        await self.desk.run(
            model.owner, "unload_model", unload, self.desk.tenant(model.owner, model.session)
        )
        pending = Promise(
            f"{model.model_id}:unload:{time.monotonic_ns()}", model.owner, "unload_model"
        )
        self.promises.add(settled(pending, {"model_id": model.model_id, "type": "unload_model"}))
        return JsonAnswer({"request_id": pending.request_id, "model_id": model.model_id})

    async def get_info(self, request: Request) -> Response:
        """Return architecture, tokenizer and LoRA rank of a model."""
        body = await Body.of(request)
        model = self.book.model(body.text("model_id"), request.state.owner)
        tenant = self.desk.tenant(model.owner, model.session)
        info = await self.desk.run(
            model.owner, "get_info", lambda: self.tenants.client_of(model).info, tenant
        )
        place = await asyncio.to_thread(
            tokenizer_place, model.base, info["tokenizer"], self.book.root
        )
        data = {"arch": info["arch"], "model_name": model.base.name, "tokenizer_id": place}
        fields = {
            "type": "get_info",
            "model_id": model.model_id,
            "model_data": data,
            "model_name": model.base.name,
        }
        return JsonAnswer(
            {**fields, "is_lora": info["lora_rank"] is not None, "lora_rank": info["lora_rank"]}
        )

    # --------------------------------------------------------------------------- numbered requests

    def _ask(
        self,
        model: Model,
        seq: int,
        what: str,
        raw: bytes,
        work: Callable[[], Generator[None, None, Any]],
        size: int | None = None,
    ) -> Response:
        """Queue a model's request once, even if it is repeated. Return its id.

        A wrong value in the request becomes its result.

        raw     the body, or a digest of the body
        size    bytes of the body, if `raw` is a digest

        Raises Refused: 503 if the server is shutting down, 429 if a limit is reached, 400 if the
        number was used for another request.
        """
        request_id, digest = f"{model.model_id}:{seq}", digest_of(what.encode(), raw)
        size = len(raw) if size is None else size
        if self.desk.ending:
            raise Refused(503, "the server is shutting down: try again", retry_after=5.0)
        if self.promises.known(request_id, digest) is None:
            tenant = self.desk.tenant(model.owner, model.session)
            self.promises.check_room(tenant, size)
            pending = Promise(
                request_id,
                model.owner,
                what,
                digest,
                session=model.session,
                tenant=tenant,
                size=size,
            )
            self.tenants.ask(model, seq, pending, work)
            self.promises.add(pending)
        return JsonAnswer({"request_id": request_id, "model_id": model.model_id})

    async def forward_backward(self, request: Request) -> Response:
        """Queue a forward, or a forward and backward pass, from a protobuf body.

        Raises Refused (415) for another content type, and Refused (400) for a `seq_id` below 1.
        """
        raw = await request.body()
        if not request.headers.get("content-type", "").startswith(PROTOBUF):
            raise Refused(
                415,
                f"forward_backward takes {PROTOBUF}, which the SDK sends since 0.30: upgrade "
                "tinker",
            )
        encoding, max_bytes = (
            request.headers.get("content-encoding", ""),
            self.desk.settings.limits.body_bytes,
        )

        def parse() -> tuple[Any, bytes, int]:
            body = expanded(raw, encoding, max_bytes)
            return wire.parse("ForwardBackwardRequest", body), digest_of(raw), len(body)

        message, digest, size = await asyncio.to_thread(parse)
        model = self.book.model(message.model_id, request.state.owner)
        if message.seq_id < 1:
            raise Refused(400, f"seq_id must be at least 1, got {message.seq_id}")
        backward = not message.forward_only

        def read() -> tuple[list[Any], str, dict[str, Any]]:
            tokens = sum(
                len(chunk.encoded_text.tokens) // 4
                for datum in message.data
                for chunk in datum.model_input
            )
            if tokens > self.desk.settings.limits.tokens:
                raise BadRequestError(
                    f"the request has {tokens} tokens, and this server takes "
                    f"{self.desk.settings.limits.tokens}: send less"
                )
            convert.check_cells(message.data)
            return (
                [convert.datum(datum) for datum in message.data],
                message.loss_fn,
                convert.loss_config(message),
            )

        verb = "forward_backward" if backward else "forward"
        return self._ask(
            model,
            message.seq_id,
            verb,
            digest,
            lambda: self.tenants.forward_backward(model, read, backward),
            size,
        )

    async def optim_step(self, request: Request) -> Response:
        """Queue an update of the weights."""
        body = await Body.of(request)
        model, seq = self._numbered(body, request)

        def work() -> Generator[None, None, Any]:
            if body.fields.get("optimizer_params") is not None:
                raise BadRequestError(
                    "only AdamW is supported here: optim_step takes types.AdamParams"
                )
            return self.tenants.optim_step(
                model, convert.adam_params(body.fields.get("adam_params"))
            )

        return self._ask(model, seq, "optim_step", await request.body(), lambda: _late(work))

    def _numbered(self, body: Body, request: Request) -> tuple[Model, int]:
        """Return the model and the sequence number of a request."""
        return self.book.model(body.text("model_id"), request.state.owner), body.whole("seq_id", 1)

    async def save_weights(self, request: Request) -> Response:
        """Queue saving weights and optimizer state."""
        body = await Body.of(request)
        model, seq = self._numbered(body, request)

        def work() -> Generator[None, None, Any]:
            words, overwrite = body.words("user_metadata"), body.flag("overwrite")
            return self.tenants.save_state(model, _name(body, seq), _ttl(body), overwrite, words)

        return self._ask(model, seq, "save_weights", await request.body(), lambda: _late(work))

    async def save_weights_for_sampler(self, request: Request) -> Response:
        """Queue saving weights for sampling, or a new sampling session of the current weights.

        Without a `path`, the weights become a sampling session and are not saved.
        """
        body = await Body.of(request)
        model, seq = self._numbered(body, request)

        def work() -> Generator[None, None, Any]:
            if body.fields.get("kind", "snapshot") != "snapshot":
                raise BadRequestError(
                    "kind is 'snapshot' here: create a new sampling client after each update"
                )
            if body.fields.get("path") is not None:
                return self.tenants.save_for_sampler(
                    model, _name(body, seq), _ttl(body), body.words("user_metadata")
                )
            sampler_id = f"{model.session}:sample:{body.whole('sampling_session_seq_id')}"
            if sampler_id in self.book.samplers:
                raise BadRequestError(f"the sampling session {sampler_id} already exists")
            return self.tenants.snapshot(
                model, Sampler(sampler_id, model.owner, model.session, model.base, snapshot=True)
            )

        # the SDK increments the number of its sampling session for each try: if a response was
        # lost, the repeated request has another number
        payload = {
            name: value for name, value in body.fields.items() if name != "sampling_session_seq_id"
        }
        return self._ask(
            model,
            seq,
            "save_weights_for_sampler",
            json.dumps(payload, sort_keys=True).encode(),
            lambda: _late(work),
        )

    async def save_weights_external(self, request: Request) -> Response:
        """Queue saving the merged weights as a Hugging Face folder."""
        body = await Body.of(request)
        model, seq = self._numbered(body, request)

        def work() -> Generator[None, None, Any]:
            if body.fields.get("age_encryption_recipients"):
                raise BadRequestError(
                    "encryption of weights is not supported here: omit age_encryption_recipients"
                )
            return self.tenants.save_external(model, _name(body, seq), _ttl(body))

        return self._ask(
            model, seq, "save_weights_external", await request.body(), lambda: _late(work)
        )

    async def load_weights(self, request: Request) -> Response:
        """Queue loading saved weights into a model, or into a new model if none is named."""
        body = await Body.of(request)
        owner, path, with_optimizer = request.state.owner, body.text("path"), body.flag("optimizer")
        kinds = ("weights",) if with_optimizer else ("weights", "sampler_weights")
        if body.fields.get("model_id") is not None:
            model, seq = self._numbered(body, request)

            def work() -> Generator[None, None, Any]:
                return self.tenants.load(
                    model, self.book.folder_of(path, owner, kinds=kinds)[1], with_optimizer, path
                )

            return self._ask(model, seq, "load_weights", await request.body(), lambda: _late(work))
        session = self.book.session(body.text("session_id"), owner)
        source, folder = await asyncio.to_thread(
            lambda: self.book.folder_of(path, owner, kinds=kinds)
        )
        base = (
            source.base
            if body.maybe("base_model", str) is None
            else self.desk.settings.base(body.text("base_model"))
        )
        optimizer = (body.maybe("optimizer_config", dict) or {}).get("type", "adamw")
        if optimizer != "adamw":
            raise Refused(
                400, f"only AdamW is supported here, got the optimizer {str(optimizer)[:40]!r}"
            )

        def make() -> TrainingClient:
            service = self.desk.service
            if with_optimizer:
                return service.create_training_client_from_state_with_optimizer(
                    str(folder), base.where
                )
            return service.create_training_client_from_state(str(folder), base.where)

        return self._created(
            session, body, base, make, await request.body(), {"path": path, "type": "load_weights"}
        )

    # -------------------------------------------------------------------------------------- results

    async def retrieve_future(self, request: Request) -> Response:
        """Return the result of a request, or 408 after `poll_seconds`; the SDK then polls again."""
        body = await Body.of(request)
        pending = self.promises.find(body.text("request_id"), request.state.owner)
        if not await pending.wait(self.desk.settings.limits.poll_seconds):
            state = {"type": "try_again", "request_id": pending.request_id, "queue_state": "active"}
            return JsonAnswer(state, status_code=408)
        pending.told = time.monotonic()
        answer, protobuf = pending.answer, PROTOBUF in request.headers.get("accept", "")
        if protobuf or len(answer.body) < _BYTES_AT_ONCE:
            return answer.response(protobuf)
        return await asyncio.to_thread(answer.response, protobuf)

    async def cancel_future(self, request: Request) -> Response:
        """Cancel a sample request. A request that trains is not cancelled."""
        body = await Body.of(request)
        pending = self.promises.find(body.text("request_id"), request.state.owner)
        if pending.what == "sample":
            pending.done.cancel()
        return Response(status_code=204)


def _late(work: Callable[[], Generator[None, None, Any]]) -> Generator[None, None, Any]:
    """Call `work` only when the request is scheduled, and run the generator that it returns.

    A wrong value then becomes the request's result, and leaves no gap in the sequence numbers.
    """
    return (yield from work())


def _not_done(what: str) -> Answer:
    """Return a handler that raises Refused (400): `what` is not supported."""

    async def refuse(request: Request) -> Response:
        raise Refused(400, f"not supported here: {what}")

    return refuse


def _need(found: Any, what: str) -> Any:
    """Return a value. Raises Refused (400), which names the field `what`, if the value is None."""
    if found is None:
        raise Refused(400, f"the body lacks {what}")
    return found


def _name(body: Body, seq: int) -> str:
    """Return the name of a checkpoint, `step-<seq>` by default.

    Raises BadRequestError if the name has other characters than letters, digits, '.', '_' and '-'.
    """
    name = body.maybe("path", str)
    if name is None:
        return f"step-{seq:06d}"
    if not checkpoint.is_name(name):
        raise BadRequestError(
            f"a checkpoint's name consists of letters, digits, '.', '_' and '-', got {name[:80]!r}"
        )
    return name


def _ttl(body: Body) -> int | None:
    """Return the time to live of a checkpoint in seconds, or None."""
    return body.maybe_whole("ttl_seconds", 1, _SECONDS)
