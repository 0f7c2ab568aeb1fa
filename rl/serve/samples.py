"""Serve the sampling part of Tinker's protocol: sampling sessions and sample requests.

A sampling session has fixed weights. Clients poll for the result of a sample request.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rl.errors import BadRequestError
from rl.serve import convert
from rl.serve.answers import JsonAnswer
from rl.serve.body import Body
from rl.serve.book import Book, Sampler
from rl.serve.desk import Desk
from rl.serve.promises import Promise, Promises, digest_of, settled
from rl.serve.refusals import Refused
from rl.serve.tenants import Tenants
from rl.types import ModelInput, SamplingParams

# largest body whose fields are parsed on the event loop; larger bodies are parsed in a thread
_BYTES_AT_ONCE = 16384


class Samples:
    """Hold the handlers under /api/v1 for sampling."""

    def __init__(self, desk: Desk, book: Book, tenants: Tenants, promises: Promises):
        self.desk = desk
        self.book = book
        self.tenants = tenants
        self.promises = promises
        desk.resolvers.append(tenants.by_name)
        desk.listers.append(tenants.names)

    def routes(self) -> list[Route]:
        """Return the routes for sampling."""
        posts = {
            "create_sampling_session": self.create_sampling_session,
            "join_sampling_session": self.join_sampling_session,
            "asample": self.asample,
        }
        return [
            Route(f"/api/v1/{path}", answer, methods=["POST"]) for path, answer in posts.items()
        ]

    async def create_sampling_session(self, request: Request) -> Response:
        """Create a sampling session of a base model or of saved weights.

        A repeated request returns the same session. Raises Refused (400) if the session exists with
        other weights.
        """
        body = await Body.of(request)
        session = self.book.session(body.text("session_id"), request.state.owner)
        sampler_id = f"{session.session_id}:sample:{body.whole('sampling_session_seq_id')}"
        path = body.maybe("model_path", str)
        if path is None:
            base, folder = self.desk.settings.base(body.text("base_model")), None
        else:
            kinds = ("weights", "sampler_weights")
            model, folder = await asyncio.to_thread(
                lambda: self.book.folder_of(path, session.owner, kinds=kinds)
            )
            base = model.base
        existing = self.book.samplers.get(sampler_id)
        if existing is not None and (existing.base, existing.path) != (base, folder):
            raise Refused(
                400, f"the sampling session {sampler_id} already exists, with other weights"
            )
        if existing is None:
            self.book.add_sampler(
                Sampler(sampler_id, session.owner, session.session_id, base, folder)
            )
        return JsonAnswer({"type": "create_sampling_session", "sampling_session_id": sampler_id})

    async def join_sampling_session(self, request: Request) -> Response:
        """Count another client of a sampling session, and return the count."""
        body = await Body.of(request)
        sampler = self.book.sampler(body.text("sampling_session_id"), request.state.owner)
        sampler.clones += 1
        return JsonAnswer({"type": "join_sampling_session", "client_counter": sampler.clones})

    async def asample(self, request: Request) -> Response:
        """Queue a sample request, and return its id and the ids of its sequences.

        A repeated request returns the same ids. An invalid value becomes the request's result.
        """
        body = await Body.of(request)
        owner, raw = request.state.owner, await request.body()
        if body.maybe("sampling_session_id", str) is None:
            raise Refused(
                400, "asample needs the sampling_session_id that create_sampling_session returned"
            )
        sampler, seq = (
            self.book.sampler(body.text("sampling_session_id"), owner),
            body.whole("seq_id", 0, 2**63 - 1),
        )
        self.book.session(sampler.session, owner)
        count, request_id = (
            body.maybe_whole("num_samples", 1, 1_000_000) or 1,
            f"{sampler.sampler_id}:{seq}",
        )
        digest, parsed = digest_of(raw), None
        if self.promises.known(request_id, digest) is None and len(raw) > _BYTES_AT_ONCE:
            parsed = await asyncio.to_thread(self._read, count, body)
        # check again: the same request may have arrived meanwhile
        pending = self.promises.known(request_id, digest)
        if pending is None:
            ids = [f"{request_id}:{i}" for i in range(count)]
            tenant, size = self.desk.tenant(owner, sampler.session), len(raw)
            self.promises.check_room(tenant, size)
            pending = Promise(
                request_id,
                owner,
                "sample",
                digest,
                session=sampler.session,
                sequence_ids=ids,
                tenant=tenant,
                size=size,
            )
            parsed = parsed or self._read(count, body)
            if isinstance(parsed, Exception):
                settled(pending, error=parsed)
            else:
                prompt, params, options = parsed
                client = functools.partial(self.tenants.sampling_client, sampler)
                pending.done = self.desk.ask_sample(
                    client, owner, prompt, count, params, tenant=tenant, sequence_ids=ids, **options
                )
            self.promises.add(pending)
        return JsonAnswer({"request_id": request_id, "sample_sequence_ids": pending.sequence_ids})

    def _read(
        self, count: int, body: Body
    ) -> tuple[ModelInput, SamplingParams, dict[str, Any]] | Exception:
        """Return the parsed request, or the error that becomes the request's result."""
        try:
            return self._checked(count, body)
        except (ValueError, TypeError) as error:
            return error

    def _checked(self, count: int, body: Body) -> tuple[ModelInput, SamplingParams, dict[str, Any]]:
        """Return prompt, sampling parameters and logprob options of `count` samples.

        Raises BadRequestError if a field is not supported or the request has too many tokens, and
        ValueError or TypeError if a value is wrong.
        """
        for name in ("topk_sample_logprobs", "prompt_alt_tokens_k"):
            if body.fields.get(name):
                raise BadRequestError(
                    f"{name} is not computed here: use topk_prompt_logprobs, or a forward of the "
                    "training client"
                )
        prompt, params = (
            convert.prompt(body.fields.get("prompt")),
            convert.sampling_params(body.fields.get("sampling_params") or {}),
        )
        limit = self.desk.settings.limits.tokens
        if convert.tokens_of(prompt) + count * (params.max_tokens or 1) > limit:
            text = (
                f"{convert.tokens_of(prompt)} prompt tokens and {count} samples of "
                f"{params.max_tokens}"
            )
            raise BadRequestError(f"{text} exceed {limit}, the limit of a request (--tokens)")
        options: dict[str, Any] = {
            "include_prompt_logprobs": body.flag("prompt_logprobs"),
            "topk_prompt_logprobs": body.maybe_whole("topk_prompt_logprobs") or 0,
            "target_prompt_logprobs": convert.targets(body.maybe("target_prompt_logprobs", dict)),
            "prompt_logprobs_last_n": body.maybe_whole("prompt_logprobs_last_n", 1),
        }
        return prompt, params, options
