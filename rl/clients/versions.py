"""Weights that can be sampled from, as one rank holds them, and the engines that draw from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.clients.settings import SamplerSettings
from rl.clients.slices import Stream
from rl.layers import config_number
from rl.learner import Learner
from rl.models import LoadedModel
from rl.sampler import Decoder, Engine, MixedEngine, Request, RoutedEngine, make_engine, note_experts


@dataclass
class SamplerVersion:
    """Weights that can be sampled from: a decoder, and which learner (if it lives here) at which version they are from.

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
    return config_number(loaded.model, "max_position_embeddings", "n_positions", "max_target_positions")


def engine_of(source: SamplerVersion, limits: SamplerSettings, mixed: bool = False) -> Engine:
    """An engine of these weights; `mixed`: of all that stand on their base, each to be put into it (`let_in`)."""
    settings: dict[str, Any] = {
        "eos_token_ids": source.loaded.eos_token_ids,
        "tokenizer": source.loaded.tokenizer,
        "max_context": max_context(source.loaded),
        "kv_cache_tokens": limits.kv_cache_tokens,
        "max_rows": limits.max_rows,
        "version": source.version,
    }
    if mixed:
        return MixedEngine.beside(source.decoder, **settings)
    replays = limits.router_replay and source.learned
    if replays:
        note_experts(source.decoder)
        return RoutedEngine(source.decoder, **settings)
    return make_engine(source.decoder, limits.cache, **settings)


def let_in(stream: Stream, versions: Mapping[int, SamplerVersion], arrived: Sequence[Request]) -> None:
    """The weights of requests that come to a mixed stream; those that nobody has any more are forgotten.

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
