"""Serve the sampling part of Tinker's protocol: sampling sessions and sample requests.

A sampling session has fixed weights. Clients poll for the result of a sample request.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

from starlette.requests import Request

from rl.errors import BadRequestError
from rl.serve import conversion
from rl.serve.api_routes import TypedRoute
from rl.serve.http_errors import HttpError
from rl.serve.request_store import PendingRequest, compute_digest
from rl.serve.schemas import (
    AcceptedSampleBody,
    CreateSamplingSessionBody,
    JoinSamplingSessionBody,
    SampleBody,
    read_body,
    read_fields,
)
from rl.serve.served_models import ServerParts
from rl.serve.session_store import SamplerRecord
from rl.types import ModelInput, SamplingParams

# largest body whose fields are parsed on the event loop; larger bodies are parsed in a thread
_MAX_INLINE_BODY_BYTES = 16384


class TinkerSamplingRoutes(ServerParts):
    """Hold the handlers under /api/v1 for sampling."""

    def routes(self) -> list[TypedRoute]:
        """Return the routes for sampling."""
        return [
            TypedRoute("/api/v1/create_sampling_session", self.create_sampling_session),
            TypedRoute("/api/v1/join_sampling_session", self.join_sampling_session),
            TypedRoute("/api/v1/asample", self.asample, body_type=SampleBody),
        ]

    async def create_sampling_session(
        self, request: Request, body: CreateSamplingSessionBody
    ) -> Any:
        """Create a sampling session of a base model or of saved weights.

        A repeated request returns the same session. Raises HttpError (400) if the session exists
        with other weights.
        """
        session = self.session_store.get_session(body.session_id, request.state.owner)
        sampler_id = f"{session.session_id}:sample:{body.sampling_session_seq_id}"
        path = body.model_path
        if path is None:
            if body.base_model is None:
                raise HttpError(400, "the body lacks 'base_model'")
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

    async def join_sampling_session(self, request: Request, body: JoinSamplingSessionBody) -> Any:
        """Count another client of a sampling session, and return the count."""
        sampler = self.session_store.get_sampler(body.sampling_session_id, request.state.owner)
        sampler.clones += 1
        return {"type": "join_sampling_session", "client_counter": sampler.clones}

    async def asample(self, request: Request) -> Any:
        """Queue a sample request, and return its id and the ids of its sequences.

        A repeated request returns the same ids. An invalid value becomes the request's result.
        """
        fields, owner, raw = await read_fields(request), request.state.owner, await request.body()
        body = read_body(AcceptedSampleBody, fields)
        if body.sampling_session_id is None:
            raise HttpError(
                400, "asample needs the sampling_session_id that create_sampling_session returned"
            )
        sampler = self.session_store.get_sampler(body.sampling_session_id, owner)
        self.session_store.get_session(sampler.session, owner)
        count, request_id = body.num_samples or 1, f"{sampler.sampler_id}:{body.seq_id}"
        digest, parsed = compute_digest(raw), None
        if (
            self.request_store.find_duplicate(request_id, digest) is None
            and len(raw) > _MAX_INLINE_BODY_BYTES
        ):
            parsed = await asyncio.to_thread(self._try_parse, fields)
        # check again: the same request may have arrived meanwhile
        pending = self.request_store.find_duplicate(request_id, digest)
        if pending is None:
            ids = [f"{request_id}:{i}" for i in range(count)]
            tenant, size = sampler.tenant, len(raw)
            self.request_store.check_capacity(tenant, size)
            pending = PendingRequest(
                request_id, owner, "sample", digest, sequence_ids=ids, tenant=tenant, size=size
            )
            parsed = parsed or self._try_parse(fields)
            if isinstance(parsed, Exception):
                pending.work_future.set_exception(parsed)
            else:
                prompt, params, options = parsed
                client = functools.partial(self.model_manager.sampling_client, sampler)
                pending.work_future = self.engine.submit_sample(
                    client, owner, prompt, count, params, tenant=tenant, sequence_ids=ids, **options
                )
            self.request_store.add(pending)
        return {"request_id": request_id, "sample_sequence_ids": pending.sequence_ids}

    def _try_parse(
        self, fields: Any
    ) -> tuple[ModelInput, SamplingParams, dict[str, Any]] | Exception:
        """Return the parsed request, or the error that becomes the request's result."""
        try:
            return self._parse_request(read_body(SampleBody, fields))
        except (HttpError, ValueError, TypeError) as error:
            return error

    def _parse_request(self, body: SampleBody) -> tuple[ModelInput, SamplingParams, dict[str, Any]]:
        """Return prompt, sampling parameters and logprob options of a request.

        Raises BadRequestError if a field is not supported or the request has too many tokens, and
        ValueError or TypeError if a value is wrong.
        """
        for name in ("topk_sample_logprobs", "prompt_alt_tokens_k"):
            if getattr(body, name):
                raise BadRequestError(
                    f"{name} is not computed here: use topk_prompt_logprobs, or a forward of the "
                    "training client"
                )
        prompt = ModelInput([chunk.to_chunk() for chunk in body.prompt.chunks])
        params = SamplingParams(**body.sampling_params.model_dump(exclude_unset=True))
        limit, count = self.engine.settings.limits.tokens, body.num_samples or 1
        prompt_tokens = conversion.count_tokens(prompt)
        if prompt_tokens + count * (params.max_tokens or 1) > limit:
            raise BadRequestError(
                f"{prompt_tokens} prompt tokens and {count} samples of {params.max_tokens} exceed "
                f"{limit}, the limit of a request (--tokens)"
            )
        options: dict[str, Any] = {
            "include_prompt_logprobs": body.prompt_logprobs,
            "topk_prompt_logprobs": body.topk_prompt_logprobs or 0,
            "target_prompt_logprobs": conversion.parse_targets(body.target_prompt_logprobs),
            "prompt_logprobs_last_n": body.prompt_logprobs_last_n,
        }
        return prompt, params, options
