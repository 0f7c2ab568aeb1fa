"""Tinker's protocol, its sampling: sessions of fixed weights, and samples that are asked after."""

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

# of a body whose fields are read on the event loop; those of larger ones in a thread
_BYTES_AT_ONCE = 16384


class Samples:
    """What is answered under /api/v1 to those who sample."""

    def __init__(self, desk: Desk, book: Book, tenants: Tenants, promises: Promises):
        self.desk = desk
        self.book = book
        self.tenants = tenants
        self.promises = promises
        desk.resolvers.append(tenants.by_name)
        desk.listers.append(tenants.names)

    def routes(self) -> list[Route]:
        posts = {
            "create_sampling_session": self.create_sampling_session,
            "join_sampling_session": self.join_sampling_session,
            "asample": self.asample,
        }
        return [
            Route(f"/api/v1/{path}", answer, methods=["POST"]) for path, answer in posts.items()
        ]

    async def create_sampling_session(self, request: Request) -> Response:
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
        known = self.book.samplers.get(sampler_id)
        if known is not None and (known.base, known.path) != (base, folder):
            raise Refused(
                400, f"there is a sampling session {sampler_id} already, of other weights"
            )
        if known is None:
            self.book.add_sampler(
                Sampler(sampler_id, session.owner, session.session_id, base, folder)
            )
        return JsonAnswer({"type": "create_sampling_session", "sampling_session_id": sampler_id})

    async def join_sampling_session(self, request: Request) -> Response:
        body = await Body.of(request)
        sampler = self.book.sampler(body.text("sampling_session_id"), request.state.owner)
        sampler.clones += 1
        return JsonAnswer({"type": "join_sampling_session", "client_counter": sampler.clones})

    async def asample(self, request: Request) -> Response:
        body = await Body.of(request)
        owner, raw = request.state.owner, await request.body()
        if body.maybe("sampling_session_id", str) is None:
            raise Refused(
                400, "asample takes a sampling_session_id, as create_sampling_session gave it"
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
        digest, read = digest_of(raw), None
        if self.promises.known(request_id, digest) is None and len(raw) > _BYTES_AT_ONCE:
            read = await asyncio.to_thread(self._read, count, body)
        # once more: the same may have come meanwhile
        promise = self.promises.known(request_id, digest)
        if promise is None:
            ids = [f"{request_id}:{i}" for i in range(count)]
            tenant, size = self.desk.tenant(owner, sampler.session), len(raw)
            self.promises.check_room(tenant, size)
            promise = Promise(
                request_id,
                owner,
                "sample",
                digest,
                session=sampler.session,
                sequence_ids=ids,
                tenant=tenant,
                size=size,
            )
            read = read or self._read(count, body)
            if isinstance(read, Exception):
                settled(promise, error=read)
            else:
                prompt, params, what = read
                client = functools.partial(self.tenants.sampling_client, sampler)
                promise.done = self.desk.ask_sample(
                    client, owner, prompt, count, params, tenant=tenant, sequence_ids=ids, **what
                )
            self.promises.add(promise)
        return JsonAnswer({"request_id": request_id, "sample_sequence_ids": promise.sequence_ids})

    def _read(
        self, count: int, body: Body
    ) -> tuple[ModelInput, SamplingParams, dict[str, Any]] | Exception:
        """Return what is asked for, or why it cannot be drawn, which is the request's answer."""
        try:
            return self._checked(count, body)
        except (ValueError, TypeError) as error:
            return error

    def _checked(self, count: int, body: Body) -> tuple[ModelInput, SamplingParams, dict[str, Any]]:
        for name in ("topk_sample_logprobs", "prompt_alt_tokens_k"):
            if body.fields.get(name):
                raise BadRequestError(
                    f"{name} is not computed here: topk_prompt_logprobs, or a forward of the training client, may serve"
                )
        prompt, params = (
            convert.prompt(body.fields.get("prompt")),
            convert.sampling_params(body.fields.get("sampling_params") or {}),
        )
        limit = self.desk.settings.limits.tokens
        if convert.tokens_of(prompt) + count * (params.max_tokens or 1) > limit:
            text = f"{convert.tokens_of(prompt)} tokens and {count} answers of {params.max_tokens}"
            raise BadRequestError(f"{text} exceed {limit}, the most of one request")
        what: dict[str, Any] = {
            "include_prompt_logprobs": body.flag("prompt_logprobs"),
            "topk_prompt_logprobs": body.maybe_whole("topk_prompt_logprobs") or 0,
            "target_prompt_logprobs": convert.targets(body.maybe("target_prompt_logprobs", dict)),
            "prompt_logprobs_last_n": body.maybe_whole("prompt_logprobs_last_n", 1),
        }
        return prompt, params, what
