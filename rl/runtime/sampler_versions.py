"""Hold the weight versions of a rank that can be sampled from, and create the engines that sample
from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.layers import describe_layers, find_max_context
from rl.learner import Learner
from rl.models import LoadedModel
from rl.runtime.rank_settings import SamplerSettings
from rl.sampler import (
    Decoder,
    Engine,
    IdleKVCachePool,
    MultiAdapterDecoder,
    SamplingRequest,
    check_features,
    check_has_experts,
    has_experts,
    make_engine,
)
from rl.vllm import VllmDecoder, VllmEngine

RankEngine = Engine | VllmEngine  # an engine of this process, or of vLLM servers


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

    def report_params(self, requests: Sequence[SamplingRequest]) -> None:
        """Report to the learner the way its weights are sampled, if it is still at this version."""
        if self.learner is not None and self.learner.version == self.version:
            self.learner.sampling_record.record(
                self.version, [request.params for request in requests]
            )


def make_version_engine(
    source: SamplerVersion,
    sampler_settings: SamplerSettings,
    mixed: bool = False,
    kv_cache_pool: IdleKVCachePool | None = None,
    requests: Sequence[SamplingRequest] | None = None,
) -> RankEngine:
    """Return an engine that samples from the weights of `source`.

    `mixed`: the engine serves all versions on the base model of `source`, and `add_versions` adds
    the weights of each version. `kv_cache_pool`: idle pool of a paged KV cache to reuse;
    `RankEngine.close` gives it back. `requests`: all requests that the engine will get; a paged
    cache is no larger than they need. Raises UserError for settings that do not combine
    (`rl.sampler.engine_selection`).
    """
    settings: dict[str, Any] = {
        "eos_token_ids": source.loaded.eos_token_ids,
        "tokenizer": source.loaded.tokenizer,
        "max_context": find_max_context(source.loaded.model),
        "version": source.version,
    }
    if isinstance(source.decoder, VllmDecoder):
        check_features(("vllm", *(("adapters per row",) if mixed else ())))
        if sampler_settings.router_replay and source.learned:
            settings["experts"] = describe_layers(source.loaded.model).experts
            check_has_experts(settings["experts"] is not None)
        return VllmEngine(source.decoder, **settings)
    settings["kv_cache_tokens"] = sampler_settings.kv_cache_tokens
    settings["max_rows"] = sampler_settings.max_rows
    settings["num_speculative_tokens"] = sampler_settings.num_speculative_tokens
    features = []
    if mixed:
        features.append("adapters per row")
    if sampler_settings.router_replay and (
        source.learned or (mixed and has_experts(source.decoder))
    ):
        features.append("router replay")
    sizes = None if requests is None else _iter_request_sizes(source, requests)
    cache = sampler_settings.cache
    return make_engine(source.decoder, cache, kv_cache_pool, sizes, features, **settings)


def _iter_request_sizes(
    source: SamplerVersion, requests: Sequence[SamplingRequest]
) -> Iterator[tuple[int, int, int]]:
    """Yield (prompt tokens, samples, most tokens) of each request. A request without a limit may
    fill the model's context, if that is limited.
    """
    longest = find_max_context(source.loaded.model) or 0
    for request in requests:
        prompt = len(request.prompt)
        yield prompt, request.num_samples, max(request.params.max_tokens or longest + 1 - prompt, 1)


def add_versions(
    engine: RankEngine,
    versions: Mapping[int, SamplerVersion],
    new_requests: Sequence[SamplingRequest],
) -> None:
    """Add the weights of new requests to the engine of a mixed stream, and drop weights that have
    been freed.

    The engine refuses a request with freed weights; other requests are unaffected.
    """
    assert isinstance(engine, Engine) and isinstance(engine.decoder, MultiAdapterDecoder)
    engine.keep_weights(versions)
    for number in {
        request.adapter_id for request in new_requests if request.adapter_id in versions
    }:
        assert number is not None
        source = versions[number]
        engine.decoder.add_adapter(number, source.decoder, source.version)
        source.report_params([request for request in new_requests if request.adapter_id == number])
