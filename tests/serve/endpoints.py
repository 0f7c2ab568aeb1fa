"""A small OpenAI-style endpoint for tests: a tiny model served on loopback."""

from __future__ import annotations

import asyncio

import serving  # noqa: F401  (skips the tests without the extra serve)
from starlette.applications import Starlette

from rl import ServiceClient
from rl.client import SampleStream
from rl.models import load_tokenizer
from rl.programs.program_rollout import LoopServer
from rl.renderers import get_renderer
from rl.serve import AgentSessions, HttpError, ServedModel, make_openai_routes
from rl.types import ModelInput, SampledSequence, SampleResponse


class TinyBackend:
    """A sampling client with the interface of the server's desk."""

    def __init__(self, base: str = "tiny:ascii"):
        self.base, self.requests_seen, self.service = base, [], ServiceClient()
        self.client = self.service.create_sampling_client(base_model=base)
        self._renderer = get_renderer("plain", self.client.get_tokenizer())

    async def sample(self, model, prompt_ids, num_samples, sampling_params, *, owner, **what):
        if model not in (None, self.base):
            raise HttpError(404, f"there is no model {model!r}")
        show = what.pop("show", None)
        self.requests_seen.append((list(prompt_ids), num_samples, sampling_params, what))
        arguments = ModelInput.from_ints(list(prompt_ids)), num_samples, sampling_params
        if show is not None or "next_token" in what:
            request = self.client.make_request(*arguments, **what)
            return await asyncio.to_thread(self._shown, request, show)
        return await asyncio.to_thread(self.client.sample(*arguments, **what).result)

    def _shown(self, request, show):
        """Sample a step at a time, and pass the partial output to `show` after each step."""
        with SampleStream(self.client) as stream:
            ticket = stream.add(request)
            while ticket not in (part := stream.run_steps(1, partial_tickets=True)).finished:
                if show is not None:
                    show(part.partial_output.get(ticket, {}))
        if isinstance(part.finished[ticket], ValueError):
            raise part.finished[ticket]
        return part.finished[ticket]

    def models(self, owner):
        return [ServedModel(self.base, self.client.info["max_context"], 0)]

    async def tokenizer(self, model, owner):
        return self.client.get_tokenizer()

    async def renderer(self, model, owner):
        return self._renderer


class ScriptedBackend:
    """Sample scripted answers: `say(prompt text, turn)`."""

    def __init__(self, say, renderer, tokenizer):
        self._tokenizer = load_tokenizer(tokenizer or "tiny:ascii")
        self._renderer = get_renderer(renderer, self._tokenizer)
        self.say, self.drawn, self.by_character, self.reason = say, [], False, "length"

    async def sample(
        self, model, prompt_ids, num_samples, sampling_params, *, owner, show=None, **what
    ):
        sequences = []
        for _ in range(num_samples):
            text = self.say(self._tokenizer.decode(prompt_ids), len(self.drawn))
            cut = text.endswith("...")
            text = text.removesuffix("...")
            pieces = list(text) if self.by_character else [text]
            encode = self._tokenizer.encode
            tokens = [t for piece in pieces for t in encode(piece, add_special_tokens=False)]
            tokens += [] if cut else self._end()
            self.drawn.append((list(prompt_ids), tokens))
            logprobs = [-0.5 - 0.001 * k for k in range(len(tokens))]
            same = {"version": 0, "temperature": 1.0}
            for k in range(len(tokens) if show else 0):
                part = SampledSequence(tokens[:k], logprobs[:k], "length", **same)
                show({len(sequences): part})
                await self.pace(k)
            reason = self.reason if cut else "stop"
            sequences.append(SampledSequence(tokens, logprobs, reason, **same))
        return SampleResponse(sequences)

    async def pace(self, drawn):
        """Called between tokens that are shown separately."""

    def _end(self):
        stop = self._renderer.get_stop_sequences()[0]
        is_text = isinstance(stop, str)
        return self._tokenizer.encode(stop, add_special_tokens=False) if is_text else [stop]

    def models(self, owner):
        return [ServedModel("scripted", None, 0)]

    async def tokenizer(self, model, owner):
        return self._tokenizer

    async def renderer(self, model, owner):
        return self._renderer


class Endpoint:
    """The desk, its sessions and the server."""

    def __init__(self, desk):
        self.engine, self.sessions = desk, AgentSessions()
        self.server = LoopServer(
            lambda: Starlette(routes=make_openai_routes(desk, self.sessions)), "the test's endpoint"
        )
        self.url = self.server.url

    def close(self):
        self.server.close()
