"""Weights that can be sampled from, as one rank holds them, and the engines that draw from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.clients.settings import SamplerSettings
from rl.clients.slices import Stream
from rl.errors import UserError, remark
from rl.layers import config_number
from rl.learner import Learner
from rl.models import LoadedModel
from rl.sampler import (
    Decoder,
    Engine,
    Kept,
    MixedEngine,
    PagedEngine,
    Request,
    RoutedEngine,
    make_engine,
    note_experts,
)


@dataclass
class SamplerVersion:
    """Weights that can be sampled from: a decoder, and which learner (if it lives here) at which
    version they are from.

    `learned`: a learner, here or on other ranks, trains on what is drawn from them.
    """

    decoder: Decoder
    loaded: LoadedModel
    version: int
    learner: Learner | None
    learned: bool = False

    def note(self, requests: Sequence[Request]) -> None:
        """Tells the learner, while its weights are these, how is drawn from them."""
        if self.learner is not None and self.learner.version == self.version:
            self.learner.sampled.note(self.version, [request.params for request in requests])


def max_context(loaded: LoadedModel) -> int | None:
    return config_number(
        loaded.model, "max_position_embeddings", "n_positions", "max_target_positions"
    )


def engine_of(
    source: SamplerVersion,
    limits: SamplerSettings,
    mixed: bool = False,
    kept: Kept | None = None,
    asked: Sequence[Request] | None = None,
) -> Engine:
    """An engine of these weights; `mixed`: of all that stand on their base, each to be put into it
    (`let_in`).

    `kept`: what an engine before it left; `done_with` it, this one leaves it to the next. `asked`:
    all that will be asked of it.
    """
    settings: dict[str, Any] = {
        "eos_token_ids": source.loaded.eos_token_ids,
        "tokenizer": source.loaded.tokenizer,
        "max_context": max_context(source.loaded),
        "kv_cache_tokens": limits.kv_cache_tokens,
        "max_rows": limits.max_rows,
        "version": source.version,
    }
    if mixed:
        if limits.cache == "paged":
            remark(
                "sampler_cache paged: batches of several adapters on one base keep a plain cache all the same"
            )
        return MixedEngine.beside(source.decoder, **settings)
    replays = limits.router_replay and source.learned
    if replays:
        if limits.cache == "paged":
            raise UserError(
                "router_replay notes experts, which no cache in pages does: leave sampler_cache at auto"
            )
        note_experts(source.decoder)
        return RoutedEngine(source.decoder, **settings)
    sizes = None if asked is None else _sizes(source, asked)
    return make_engine(source.decoder, limits.cache, kept=kept, sizes=sizes, **settings)


def _sizes(source: SamplerVersion, asked: Sequence[Request]) -> Iterator[tuple[int, int, int]]:
    """(prompt, samples, most tokens) of each; without a limit of its own one goes up to the
    model's, if that has one.
    """
    longest = max_context(source.loaded) or 0
    for request in asked:
        prompt = len(request.prompt)
        yield prompt, request.num_samples, max(request.params.max_tokens or longest + 1 - prompt, 1)


def done_with(engine: Engine) -> None:
    """Nothing is asked of it any more."""
    if isinstance(engine, PagedEngine):
        engine.close()


def let_in(
    stream: Stream, versions: Mapping[int, SamplerVersion], arrived: Sequence[Request]
) -> None:
    """The weights of requests that come to a mixed stream; those that nobody has any more are
    forgotten.

    A request whose weights are gone is refused by the engine, alone.
    """
    engine = stream.engine
    assert isinstance(engine, MixedEngine)
    engine.keep_weights(versions)
    for number in {request.weights for request in arrived if request.weights in versions}:
        assert number is not None
        source = versions[number]
        engine.decoder.put(number, source.decoder, source.version)
        source.note([request for request in arrived if request.weights == number])
