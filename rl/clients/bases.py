"""Frozen bases that several adapters stand on, each held once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rl.models import LoadedModel, load_model
from rl.ranks import asks_for_fsdp
from rl.sampler import Decoder

Key = tuple[str, str | None, int]  # base, tokenizer, seed: what a model is loaded from


class Bases:
    """Base models by what they were loaded from. They stay until the worker that holds them goes."""

    def __init__(self, shares: bool, accelerator: Any):
        """`shares`: whether to. Where ranks cut a model into shares, or DeepSpeed owns it, each
        learner loads its own.
        """
        self.shares = (
            shares and accelerator.distributed_type.value != "DEEPSPEED" and not asks_for_fsdp()
        )
        self._held: dict[Key, LoadedModel] = {}
        self._samplers: dict[Key, Decoder | None] = {}

    def load(self, base: str, tokenizer: str | None, seed: int, adapted: bool) -> LoadedModel:
        """A model to put an adapter on (`adapted`) or to train in full. Of the first kind all have
        the same tensors, which are frozen.
        """
        if not (self.shares and adapted):
            return load_model(base, tokenizer=tokenizer, seed=seed)
        key = (base, tokenizer, seed)
        if key not in self._held:
            self._held[key] = load_model(base, tokenizer=tokenizer, seed=seed)
        return _twin(self._held[key])

    def sampler(self, key: Key, make: Callable[[Any], Decoder | None]) -> Decoder | None:
        """What samplers on a base that is held share, made when it is first asked for; None where
        there is nothing to share.
        """
        if key not in self._held:
            return None
        if key not in self._samplers:
            self._samplers[key] = make(self._held[key].model)
        return self._samplers[key]

    def number(self, decoder: Decoder) -> int | None:
        """Of the sampler that this one shares, None where it stands alone."""
        found = [
            i
            for i, base in enumerate(self._samplers.values())
            if base is not None and base is decoder.base
        ]
        return found[0] if found else None


def _twin(loaded: LoadedModel) -> LoadedModel:
    """Modules of its own around the same parameters and buffers: an adapter put on one is on no
    other.
    """
    for parameter in loaded.model.parameters():
        parameter.requires_grad_(False)
    shared = [*loaded.model.parameters(), *loaded.model.buffers()]
    return replace(
        loaded, model=copy.deepcopy(loaded.model, {id(tensor): tensor for tensor in shared})
    )
