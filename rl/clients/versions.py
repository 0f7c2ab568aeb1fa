"""Hold the weight versions of a rank that can be sampled from, and create the engines that sample
from them.
"""

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
    """Hold weights that can be sampled from: a decoder, and the learner (if it lives on this rank)
    and version that they come from.

    `learned`: whether a learner, here or on other ranks, trains on the samples.
    """

    decoder: Decoder
    loaded: LoadedModel
    version: int
    learner: Learner | None
    learned: bool = False

    def note(self, requests: Sequence[Request]) -> None:
        """Report to the learner the way its weights are sampled, if it is still at this version."""
        if self.learner is not None and self.learner.version == self.version:
            self.learner.sampled.note(self.version, [request.params for request in requests])


def max_context(loaded: LoadedModel) -> int | None:
    """Return the model's longest sequence in tokens, None if it has no limit."""
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
    """Return an engine that samples from the weights of `source`.

    `mixed`: the engine serves all versions on the base model of `source`, and `let_in` adds the
    weights of each version. `kept`: idle pool of a paged KV cache to reuse; `done_with` gives the
    pool back. `asked`: all requests that the engine will get; a paged cache is no larger than they
    need. Raises UserError for router_replay with a paged cache.
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
                "sampler_cache paged: batches of several adapters on the same base use a "
                "contiguous cache instead"
            )
        return MixedEngine.beside(source.decoder, **settings)
    replays_routing = limits.router_replay and source.learned
    if replays_routing:
        if limits.cache == "paged":
            raise UserError(
                "router_replay records experts, which the paged cache does not support: leave "
                "sampler_cache at auto"
            )
        note_experts(source.decoder)
        return RoutedEngine(source.decoder, **settings)
    sizes = None if asked is None else _sizes(source, asked)
    return make_engine(source.decoder, limits.cache, kept=kept, sizes=sizes, **settings)


def _sizes(source: SamplerVersion, asked: Sequence[Request]) -> Iterator[tuple[int, int, int]]:
    """Yield (prompt tokens, samples, most tokens) of each request. A request without a limit may
    fill the model's context, if that is limited.
    """
    longest = max_context(source.loaded) or 0
    for request in asked:
        prompt = len(request.prompt)
        yield prompt, request.num_samples, max(request.params.max_tokens or longest + 1 - prompt, 1)


def done_with(engine: Engine) -> None:
    """Close an engine that gets no further requests.

    A paged engine gives its KV cache pool back for reuse. Other engines hold nothing to give back.
    """
    if isinstance(engine, PagedEngine):
        engine.close()


def let_in(
    stream: Stream, versions: Mapping[int, SamplerVersion], arrived: Sequence[Request]
) -> None:
    """Add the weights of new requests to a mixed stream, and drop weights that have been freed.

    The engine refuses a request with freed weights; other requests are unaffected.
    """
    engine = stream.engine
    assert isinstance(engine, MixedEngine)
    engine.keep_weights(versions)
    for number in {request.weights for request in arrived if request.weights in versions}:
        assert number is not None
        source = versions[number]
        engine.decoder.put(number, source.decoder, source.version)
        source.note([request for request in arrived if request.weights == number])
