"""Hold the weight versions of a rank that can be sampled from and the frozen base models that they
share, and create the engines that sample from them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, replace
from typing import Any

from rl.distributed import get_launch_sharding
from rl.layers import describe_layers, find_max_context
from rl.learner import Learner
from rl.models import LoadedModel, load_model
from rl.runtime.rank_settings import SamplerSettings
from rl.sampler import (
    Decoder,
    Engine,
    IdleKVCachePool,
    MultiAdapterDecoder,
    SamplingRequest,
    check_has_experts,
    has_experts,
    make_engine,
)
from rl.types.feature_table import check_features
from rl.vllm import VllmDecoder, VllmEngine

BaseKey = tuple[str, str | None, int]  # base, tokenizer, seed: what a model is loaded from
RankEngine = Engine | VllmEngine  # an engine of this process, or of vLLM servers


class BaseModelCache:
    """Cache base models by what they were loaded from. They stay loaded as long as the worker that
    holds them.
    """

    def __init__(self, enabled: bool):
        """Create an empty cache. `enabled`: whether adapters share a base. If ranks shard a model
        (FSDP), or DeepSpeed owns it, each learner loads its base separately.
        """
        self.enabled = enabled and not get_launch_sharding().divides
        self._models: dict[BaseKey, LoadedModel] = {}
        self._base_decoders: dict[BaseKey, Decoder | None] = {}

    def load(self, base: str, tokenizer: str | None, seed: int, adapted: bool) -> LoadedModel:
        """Return a model to put an adapter on (`adapted`) or to train in full. All adapted models
        of a base have the same frozen tensors.
        """
        if not (self.enabled and adapted):
            return load_model(base, tokenizer=tokenizer, seed=seed)
        key = (base, tokenizer, seed)
        if key not in self._models:
            self._models[key] = load_model(base, tokenizer=tokenizer, seed=seed)
        return _share_weights(self._models[key])

    def get_base_decoder(
        self, key: BaseKey, make: Callable[[Any], Decoder | None]
    ) -> Decoder | None:
        """Return the decoder that all samplers on a cached base share, made at the first request.
        Return None if the base is not cached.
        """
        if key not in self._models:
            return None
        if key not in self._base_decoders:
            self._base_decoders[key] = make(self._models[key].model)
        return self._base_decoders[key]

    def find_mix_group(self, decoder: Decoder) -> int | None:
        """Return an id that is equal for decoders that share a base, which can be sampled in a
        single batch. Return None if `decoder` shares no base.
        """
        for i, base in enumerate(self._base_decoders.values()):
            if base is not None and base is decoder.base:
                return i
        return None


def _share_weights(loaded: LoadedModel) -> LoadedModel:
    """Return a copy of the model's modules around the same parameters and buffers, so that an
    adapter put on the copy affects no other model.
    """
    for parameter in loaded.model.parameters():
        parameter.requires_grad_(False)
    shared_tensors = [*loaded.model.parameters(), *loaded.model.buffers()]
    return replace(
        loaded, model=copy.deepcopy(loaded.model, {id(tensor): tensor for tensor in shared_tensors})
    )


@dataclass
class SamplerVersion:
    """Hold weights that can be sampled from: a decoder, and the learner (if it lives on this rank)
    and version that they come from.

    `loaded`: the model of the decoder, which is not kept: it may be freed before the version.
    `learner` is None from then on. `learned`: whether a learner, here or on other ranks, trains on
    the samples.
    """

    decoder: Decoder
    loaded: InitVar[LoadedModel]
    version: int
    learner: Learner | None
    learned: bool = False

    def __post_init__(self, loaded: LoadedModel) -> None:
        self.eos_token_ids, self.tokenizer = loaded.eos_token_ids, loaded.tokenizer
        self.max_context = find_max_context(loaded.model)
        on_servers = isinstance(self.decoder, VllmDecoder)
        self.experts = describe_layers(loaded.model).experts if on_servers else None

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
        "eos_token_ids": source.eos_token_ids,
        "tokenizer": source.tokenizer,
        "max_context": source.max_context,
        "version": source.version,
    }
    if isinstance(source.decoder, VllmDecoder):
        check_features(("vllm", *(("adapters per row",) if mixed else ())))
        if sampler_settings.router_replay and source.learned:
            settings["experts"] = source.experts
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
    longest = source.max_context or 0
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
