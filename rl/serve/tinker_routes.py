"""Serve the training and sampling parts of Tinker's protocol, as its SDK (0.38) uses it.

They have sessions, models, numbered requests, sampling sessions with fixed weights, and results for
which clients poll.
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from rl.client import TrainingClient
from rl.errors import BadRequestError
from rl.serve import conversion, schemas, tinker_pb2
from rl.serve.api_routes import RouteHandler, TypedRoute, make_unsupported
from rl.serve.http_errors import HttpError, SafeJSONResponse, ShutdownError
from rl.serve.request_store import PROTOBUF_TYPE, PendingRequest, compute_digest
from rl.serve.scheduler import EngineJob, SamplingJob, VerbSteps
from rl.serve.schemas import (
    decompress,
    read_body,
    read_fields,
)
from rl.serve.serve_settings import LOOPBACK_HOSTS
from rl.serve.served_models import ServerParts
from rl.serve.serving_engine import locate_tokenizer
from rl.serve.session_store import ModelRecord, SamplerRecord, SessionRecord
from rl.types import GetInfoResponse, ModelData, ModelInput, SamplingParams

# largest body of a sample that is parsed, and largest result that is converted to JSON, on the
# event loop; for larger ones a thread is used
_MAX_INLINE_BYTES = 16384


class TinkerRoutes(ServerParts):
    """Hold the handlers under /api/v1 for training and sampling."""

    def routes(self) -> list[TypedRoute]:
        """Return the routes for training and sampling, including the unsupported ones."""
        table: dict[str, RouteHandler] = {
            "client/config": self.get_client_config,
            "client/dynamic_config": self.get_dynamic_config,
            "telemetry": self.accept_telemetry,
            "session_heartbeat": self.record_heartbeat,
            "sessions/{session_id}/finish": self.finish_session,
            "create_session": self.create_session,
            "create_model": self.create_model,
            "unload_model": self.unload_model,
            "get_info": self.get_info,
            "forward_backward": self.forward_backward,
            "load_weights": self.load_weights,
            "retrieve_future": self.retrieve_future,
            "cancel_future": self.cancel_future,
            "create_sampling_session": self.create_sampling_session,
            "join_sampling_session": self.join_sampling_session,
            "asample": self.asample,
        }
        # of the handlers that read the body themselves
        body_types: dict[str, Any] = {
            "forward_backward": PROTOBUF_TYPE,
            "asample": schemas.SampleBody,
        }
        numbered: dict[str, type[schemas.JsonBody]] = {
            "optim_step": schemas.OptimStepBody,
            "save_weights": schemas.SaveWeightsBody,
            "save_weights_for_sampler": schemas.SaveWeightsForSamplerBody,
            "save_weights_external": schemas.SaveWeightsExternalBody,
        }
        for verb, body_type in numbered.items():
            table[verb] = self._make_numbered_handler(verb, body_type)
        unsupported = {
            "create_custom_loss": "custom losses on the server: forward_backward_custom runs them "
            "in your script",
            "copy_weights": "copying weights: every session of the same key can load the saved "
            "weights",
            "retrieve_futures": "retrieving many results at once: use retrieve_future",
            "auth/token": "exchanging a key for a token: send the key itself",
        }
        table |= {path: make_unsupported(feature) for path, feature in unsupported.items()}
        body_types |= numbered
        return [
            TypedRoute(f"/api/v1/{path}", handler, body_type=body_types.get(path))
            for path, handler in table.items()
        ]

    # ------------------------------------------------------------------------------------- sessions

    async def get_client_config(self) -> Any:
        """Return the SDK's feature flags.

        Chunks are sent in parallel, keys are sent directly, and bodies from other machines are
        compressed.
        """
        return {
            "pjwt_auth_enabled": False,
            "proto_compress_fwdbwd": self.engine.settings.host not in LOOPBACK_HOSTS,
            "parallel_fwdbwd_chunks": True,
            "sample_use_retrieve_futures": False,
            "custom_loss_server_side": False,
        }

    async def get_dynamic_config(self) -> Any:
        """Return the SDK's settings that may change while it runs."""
        return {"refresh_interval_sec": 300, "sample_cancel_enabled": True}

    async def accept_telemetry(self, request: Request) -> Any:
        """Accept telemetry and discard it."""
        await request.body()
        return {"status": "accepted"}

    async def create_session(self, owner: str, body: schemas.CreateSessionBody) -> Any:
        """Create a session."""
        fields = owner, body.user_metadata, body.display_name
        session = await asyncio.to_thread(self.session_store.open_session, *fields)
        return {"type": "create_session", "session_id": session.session_id}

    async def record_heartbeat(self, owner: str, body: schemas.SessionBody) -> Any:
        """Record a heartbeat of a session."""
        self.session_store.get_session(body.session_id, owner)
        return {"type": "session_heartbeat"}

    async def finish_session(
        self, owner: str, session_id: str, body: schemas.FinishSessionBody
    ) -> Response:
        """End a session, with the client's reason."""
        session = self.session_store.get_session(session_id, owner, alive=False)
        reason = (body.reason or {}).get("type", "success")
        self.model_manager.end_session(session, str(reason)[:40])
        return Response(status_code=204)

    # --------------------------------------------------------------------------------------- models

    async def create_model(
        self, request: Request, owner: str, body: schemas.CreateModelBody
    ) -> Any:
        """Queue the creation of a LoRA training client.

        Raises HttpError (400) if the request lacks a LoRA or names another optimizer than AdamW.
        """
        session = self.session_store.get_session(body.session_id, owner)
        base = self.engine.settings.find_base(body.base_model)
        make = functools.partial(
            self.engine.service.create_lora_training_client,
            base.source,
            **body.lora_config.model_dump(),
            tokenizer=base.tokenizer,
            base_dtype=self.engine.settings.base_dtype,
        )
        result = {"type": "create_model"}
        return self._create_once(session, body, base, make, await request.body(), result)

    def _create_once(
        self,
        session: SessionRecord,
        body: schemas.NewModelBody,
        base: Any,
        make: Callable[[], TrainingClient],
        raw: bytes,
        result: dict[str, str],
    ) -> dict[str, Any]:
        """Create the model of a number in its session, once, even if the request is repeated.

        Raises HttpError (400) if the number was used for another request, and HttpError (429) if
        the queue is full.
        """
        optimizer = (body.optimizer_config or {}).get("type", "adamw")
        if optimizer != "adamw":
            text = f"only AdamW is supported here, got the optimizer {str(optimizer)[:40]!r}"
            raise HttpError(400, text)
        model_id = f"{session.session_id}:train:{body.model_seq_id}"
        request_id, digest = f"{model_id}:0", compute_digest(raw)
        response = {"request_id": request_id, "model_id": model_id}
        if self.request_store.find_duplicate(request_id, digest) is not None:
            return response
        self.engine.queue.check_capacity(session.tenant)
        existing = self.session_store.models.get(model_id)
        if existing is not None and existing.request_digest not in ("", digest.hex()):
            raise HttpError(
                400,
                f"{model_id} was created by another request: use a new model_seq_id for each model "
                "of a session",
            )
        pending = PendingRequest(
            request_id, session.owner, "create_model", digest, tenant=session.tenant
        )
        # a model that was only in memory when an earlier server ended no longer exists: it is
        # created again
        if existing is not None and (existing.is_written_out or not existing.resumed):
            self.request_store.add(pending, existing.create_result)
            return response
        model = self.session_store.add_model(session, body.model_seq_id, base, body.user_metadata)
        model.request_digest = digest.hex()
        model.create_result = {"model_id": model_id, **result}
        self.request_store.add(pending)
        work = functools.partial(self.model_manager.create_model, model, make)
        self.engine.submit(
            EngineJob(session.tenant, model_id, "create_model", work, pending.work_future)
        )
        return response

    async def unload_model(self, owner: str, body: schemas.ModelBody) -> Any:
        """Drop a model's accumulated gradient, write the model to disk, and free its memory."""
        model = self.session_store.get_model(body.model_id, owner)

        def unload() -> None:
            self.model_manager.drop_gradient(model, "the model was unloaded")
            self.model_manager.write_model(model)
            self.model_manager.free_model(model)

        await self.engine.run_function(model.tenant, "unload_model", unload, lane=model.model_id)
        request_id = f"{model.model_id}:unload:{time.monotonic_ns()}"
        result = {"model_id": model.model_id, "type": "unload_model"}
        pending = PendingRequest(request_id, model.owner, "unload_model", tenant=model.tenant)
        self.request_store.add(pending, result)
        return {"request_id": request_id, "model_id": model.model_id}

    async def get_info(self, owner: str, body: schemas.ModelBody) -> Any:
        """Return architecture, tokenizer and LoRA rank of a model."""
        model = self.session_store.get_model(body.model_id, owner)
        info = await self.engine.run_function(
            model.tenant, "get_info", lambda: self.model_manager.load_client(model).info
        )
        place = await asyncio.to_thread(
            locate_tokenizer, model.base, info["tokenizer"], self.session_store.root
        )
        name, rank = model.base.name, info["lora_rank"]
        data = ModelData(info["arch"], name, place)
        return asdict(GetInfoResponse(data, model.model_id, rank is not None, rank, name))

    # --------------------------------------------------------------------------- numbered requests

    def _enqueue_once(
        self,
        model: ModelRecord,
        seq: int,
        verb: str,
        body_digest: bytes,
        size: int,
        work: Callable[[], VerbSteps],
    ) -> dict[str, Any]:
        """Queue a model's request once, even if it is repeated. Return its id.

        A wrong value in the request becomes its result.

        size    bytes of the body, until the request has run

        Raises HttpError: 503 if the server is shutting down, 429 if a limit is reached, 400 if the
        number was used for another request.
        """
        request_id, digest = f"{model.model_id}:{seq}", compute_digest(verb.encode(), body_digest)
        if self.engine.is_shutting_down:
            raise ShutdownError()
        if self.request_store.find_duplicate(request_id, digest) is None:
            self.request_store.check_capacity(model.tenant, size)
            pending = PendingRequest(
                request_id, model.owner, verb, digest, tenant=model.tenant, size=size
            )
            self.model_manager.enqueue_request(model, seq, pending, work)
            self.request_store.add(pending)
        return {"request_id": request_id, "model_id": model.model_id}

    async def forward_backward(self, request: Request, owner: str) -> Any:
        """Queue a forward, or a forward and backward pass, from a protobuf body.

        Raises HttpError (415) for another content type, and HttpError (400) for a `seq_id` below 1.
        """
        raw = await request.body()
        if not request.headers.get("content-type", "").startswith(PROTOBUF_TYPE):
            raise HttpError(
                415,
                f"forward_backward takes {PROTOBUF_TYPE}, which the SDK sends since 0.30: upgrade "
                "tinker",
            )
        limits, encoding = self.engine.settings.limits, request.headers.get("content-encoding", "")

        def parse() -> tuple[Any, bytes, int]:
            body = decompress(raw, encoding, limits.body_bytes)
            message = conversion.parse_message(tinker_pb2.ForwardBackwardRequest, body)
            return message, compute_digest(raw), len(body)

        message, digest, size = await asyncio.to_thread(parse)
        model = self.session_store.get_model(message.model_id, owner)
        if message.seq_id < 1:
            raise HttpError(400, f"seq_id must be at least 1, got {message.seq_id}")
        backward = not message.forward_only

        def read() -> tuple[list[Any], str, dict[str, Any]]:
            tokens = sum(
                len(chunk.encoded_text.tokens) // 4
                for datum in message.data
                for chunk in datum.model_input
            )
            if tokens > limits.tokens:
                raise BadRequestError(
                    f"the request has {tokens} tokens, and this server takes {limits.tokens}: send "
                    "less"
                )
            conversion.check_cells(message.data)
            data = [conversion.parse_datum(datum) for datum in message.data]
            return data, message.loss_fn, conversion.parse_loss_config(message)

        verb = "forward_backward" if backward else "forward"
        work = functools.partial(self.model_manager.forward_backward, model, read, backward)
        return self._enqueue_once(model, message.seq_id, verb, digest, size, work)

    def _make_numbered_handler(self, verb: str, body_type: type[schemas.JsonBody]) -> RouteHandler:
        """Return the handler of a verb whose requests run in the order of their numbers.

        `ModelManager` has a method for each verb, which returns its work. Model and number are read
        at once, the other fields when the request runs: a wrong value then becomes its result, and
        leaves no gap in the numbers.
        """
        run: Callable[[ModelRecord, Any], VerbSteps] = getattr(self.model_manager, verb)

        async def handle(request: Request, owner: str) -> Any:
            fields = await read_fields(request)
            numbered = read_body(schemas.NumberedBody, fields)
            model = self.session_store.get_model(numbered.model_id, owner)

            def work() -> VerbSteps:
                result = yield from run(model, read_body(body_type, fields))
                return {**result, "type": verb}

            # the SDK increments the number of its sampling session for each try: if a response was
            # lost, the repeated request has another number
            payload = {
                name: value for name, value in fields.items() if name != "sampling_session_seq_id"
            }
            raw = json.dumps(payload, sort_keys=True).encode()
            return self._enqueue_once(
                model, numbered.seq_id, verb, compute_digest(raw), len(raw), work
            )

        handle.__name__, handle.__doc__ = verb, run.__doc__
        return handle

    async def load_weights(
        self, request: Request, owner: str, body: schemas.LoadWeightsBody
    ) -> Any:
        """Queue loading saved weights into a model, or into a new model if none is named."""
        if body.model_id is not None:
            return await self._make_numbered_handler("load_weights", type(body))(request, owner)
        new = read_body(schemas.LoadNewModelBody, await read_fields(request))
        session = self.session_store.get_session(new.session_id, owner)
        saved, folder = await asyncio.to_thread(self.model_manager.find_weights, body, owner)
        base, service = saved.base, self.engine.service
        if new.base_model is not None:
            base = self.engine.settings.find_base(new.base_model)
        load = (
            service.create_training_client_from_state_with_optimizer
            if body.optimizer
            else service.create_training_client_from_state
        )
        base_dtype = self.engine.settings.saved_base_dtype
        make = functools.partial(load, str(folder), base.source, base_dtype=base_dtype)
        result = {"path": body.path, "type": "load_weights"}
        return self._create_once(session, new, base, make, await request.body(), result)

    # -------------------------------------------------------------------------------------- results

    async def retrieve_future(
        self, request: Request, owner: str, body: schemas.FutureBody
    ) -> Response:
        """Return the result of a request, or 408 after `poll_seconds`; the SDK then polls again."""
        pending = self.request_store.find_request(body.request_id, owner)
        if not await pending.wait(self.engine.settings.limits.poll_seconds):
            state = {"type": "try_again", "request_id": pending.request_id, "queue_state": "active"}
            return SafeJSONResponse(state, status_code=408)
        pending.sent_at = time.monotonic()
        answer = pending.encoded_result
        protobuf = PROTOBUF_TYPE in request.headers.get("accept", "")
        if protobuf or len(answer.body) < _MAX_INLINE_BYTES:
            return answer.to_response(protobuf)
        return await asyncio.to_thread(answer.to_response, protobuf)

    async def cancel_future(self, owner: str, body: schemas.FutureBody) -> Response:
        """Cancel a sample request. A request that trains is not cancelled."""
        pending = self.request_store.find_request(body.request_id, owner)
        if pending.verb == "sample":
            pending.work_future.cancel()
        return Response(status_code=204)

    # ------------------------------------------------------------------------------------- sampling

    async def create_sampling_session(
        self, owner: str, body: schemas.CreateSamplingSessionBody
    ) -> Any:
        """Create a sampling session of a base model or of saved weights.

        A repeated request returns the same session. Raises HttpError (400) if the session exists
        with other weights.
        """
        session = self.session_store.get_session(body.session_id, owner)
        sampler_id = f"{session.session_id}:sample:{body.sampling_session_seq_id}"
        path = body.model_path
        if path is None:
            if body.base_model is None:
                raise HttpError(400, "the body lacks a model: pass model_path or base_model")
            base, folder = self.engine.settings.find_base(body.base_model), None
        else:
            kinds = ("weights", "sampler_weights")
            model, folder = await asyncio.to_thread(
                lambda: self.session_store.find_folder(path, session.owner, kinds=kinds)
            )
            base = model.base
        existing = self.session_store.samplers.get(sampler_id)
        if existing is None:
            self.session_store.add_sampler(
                SamplerRecord(sampler_id, session.owner, session.session_id, base, folder)
            )
        elif (existing.base, existing.path) != (base, folder):
            text = f"the sampling session {sampler_id} already exists, with other weights"
            raise HttpError(400, text)
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    async def join_sampling_session(self, owner: str, body: schemas.JoinSamplingSessionBody) -> Any:
        """Count another client of a sampling session, and return the count."""
        sampler = self.session_store.get_sampler(body.sampling_session_id, owner)
        sampler.clones += 1
        return {"type": "join_sampling_session", "client_counter": sampler.clones}

    async def asample(self, request: Request, owner: str) -> Any:
        """Queue a sample request, and return its id and the ids of its sequences.

        A repeated request returns the same ids. An invalid value becomes the request's result.
        """
        fields, raw = await read_fields(request), await request.body()
        body = read_body(schemas.AcceptedSampleBody, fields)
        if body.sampling_session_id is None:
            raise HttpError(
                400, "asample needs the sampling_session_id that create_sampling_session returned"
            )
        sampler = self.session_store.get_sampler(body.sampling_session_id, owner)
        self.session_store.get_session(sampler.session, owner)
        request_id, digest = f"{sampler.sampler_id}:{body.seq_id}", compute_digest(raw)
        parsed: Any = None
        if self.request_store.find_duplicate(request_id, digest) is None:
            if len(raw) > _MAX_INLINE_BYTES:
                parsed = await asyncio.to_thread(_parse_sample, fields)
            else:
                parsed = _parse_sample(fields)
        # check again: the same request may have arrived meanwhile
        pending = self.request_store.find_duplicate(request_id, digest)
        if pending is None:
            ids = [f"{request_id}:{i}" for i in range(body.num_samples or 1)]
            tenant, size = sampler.tenant, len(raw)
            self.request_store.check_capacity(tenant, size)
            pending = PendingRequest(
                request_id, owner, "sample", digest, sequence_ids=ids, tenant=tenant, size=size
            )
            if isinstance(parsed, Exception):
                pending.work_future.set_exception(parsed)
            else:
                client = functools.partial(self.model_manager.sampling_client, sampler)
                job = SamplingJob(tenant, client, parsed, sequence_ids=ids)
                pending.work_future = self.engine.submit_sample(job)
            self.request_store.add(pending)
        return {"request_id": request_id, "sample_sequence_ids": pending.sequence_ids}


def _parse_sample(fields: Any) -> dict[str, Any] | Exception:
    """Return the arguments of `SamplingClient.make_request`, or the error that becomes the
    request's result.
    """
    try:
        body = read_body(schemas.SampleBody, fields)
        for name in ("topk_sample_logprobs", "prompt_alt_tokens_k"):
            if getattr(body, name):
                raise BadRequestError(
                    f"{name} is not computed here: use topk_prompt_logprobs, or a forward of the "
                    "training client"
                )
        params = body.sampling_params.model_dump(exclude_unset=True)
        return {
            "prompt": ModelInput([chunk.to_chunk() for chunk in body.prompt.chunks]),
            "num_samples": body.num_samples or 1,
            "sampling_params": SamplingParams(**params),
            "include_prompt_logprobs": body.prompt_logprobs,
            "topk_prompt_logprobs": body.topk_prompt_logprobs or 0,
            "target_prompt_logprobs": conversion.parse_targets(body.target_prompt_logprobs),
            "prompt_logprobs_last_n": body.prompt_logprobs_last_n,
        }
    except (HttpError, ValueError, TypeError) as error:
        return error
