"""Share frozen base models between adapters: each base is loaded once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rl.distributed import get_launch_sharding
from rl.models import LoadedModel, load_model
from rl.sampler import Decoder

BaseKey = tuple[str, str | None, int]  # base, tokenizer, seed: what a model is loaded from


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
