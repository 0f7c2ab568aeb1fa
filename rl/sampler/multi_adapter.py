"""Sample rows of several models in a single batch: LoRA adapters on a frozen base, and the bare
base.

Adapters may have any ranks and targets. Each matrix of the base is read once for all rows, and each
row adds the output of its adapter (rl.sampler.linear_layers), so each sample equals a sample of its
model in a separate batch. `SamplingRequest.adapter_id` selects the model: the number under which
the decoder knows an adapter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import numpy as np
import torch

from rl.errors import UserError
from rl.sampler.contiguous_state import ContiguousState
from rl.sampler.decoder import Decoder
from rl.sampler.decoder_fast import FastDecoder
from rl.sampler.paged_engine import PagedEngine
from rl.sampler.paged_state import PagedState
from rl.sampler.sampling_engine import Engine
from rl.sampler.sampling_requests import (
    FinishedRequest,
    SamplingRequest,
    SequenceGroup,
    make_divergence_error,
)
from rl.types import SampledSequence


class MultiAdapterDecoder(FastDecoder):
    """Decode with a base and any number of adapters on it, each under a number.

    Nothing is copied: the adapters' own decoders keep their memory.
    """

    multi_adapter = True

    def __init__(self, base: FastDecoder):
        super().__init__(base.architecture, base.weights)
        self.base_decoder = base
        self.decoders: dict[int, FastDecoder] = {}
        self.versions: dict[int, int] = {}

    def add_adapter(self, adapter_id: int, decoder: Decoder, version: int) -> None:
        """Map `adapter_id` to the weights of `decoder`. Raises UserError if they belong to another
        base.
        """
        if not isinstance(decoder, FastDecoder) or self.base_decoder not in (decoder, decoder.base):
            raise UserError(
                "weights on another base cannot be sampled in this batch: sample them in a "
                "separate batch"
            )
        self.decoders[adapter_id], self.versions[adapter_id] = decoder, version
        for projection, other in zip(
            self.iter_adaptable_modules(), decoder.iter_adaptable_modules(), strict=True
        ):
            if other.adapter is not None and decoder is not self.base_decoder:
                # Both adapters are of the same kind.
                projection.row_lora[adapter_id] = other.adapter  # type: ignore[assignment]

    def remove_adapter(self, adapter_id: int) -> None:
        """Remove the weights of `adapter_id`."""
        self.decoders.pop(adapter_id)
        self.versions.pop(adapter_id)
        for projection in self.iter_adaptable_modules():
            projection.row_lora.pop(adapter_id, None)


class MultiAdapterEngine(Engine):
    """Run an engine over a `MultiAdapterDecoder`; `SamplingRequest.adapter_id` selects the model of
    each request.

    If the weights of a request produce no numbers (NaN), only the requests of these weights fail.
    """

    decoder: MultiAdapterDecoder
    _state: ContiguousState | PagedState

    @classmethod
    def on_base_of(cls, decoder: Decoder, **settings: Any) -> Self:
        """Build an engine for all models on the base of `decoder`, without any adapter yet."""
        assert isinstance(decoder.base, FastDecoder), (
            "`Decoder.base` of this decoder must be a FastDecoder"
        )
        return cls(MultiAdapterDecoder(decoder.base), **settings)

    def __init__(self, decoder: MultiAdapterDecoder, *args: Any, **settings: Any):
        super().__init__(decoder, *args, **settings)
        self._errors: dict[int, FloatingPointError] = {}

    def add(self, request: SamplingRequest) -> int:
        """Queue a request and return its id. Raises ValueError if its weights are unknown."""
        if request.adapter_id not in self.decoder.decoders:
            raise ValueError(
                f"unknown weights {request.adapter_id}: this batch samples from "
                f"{sorted(self.decoder.decoders)}"
            )
        return super().add(request)

    @torch.inference_mode()
    def keep_weights(self, adapter_ids: Iterable[int]) -> None:
        """Remove all weights except `adapter_ids` and those of running or waiting requests.

        The cached conversations of removed weights are dropped too.
        """
        keep = {
            *adapter_ids,
            *(job.request.adapter_id for job in (*self._running.values(), *self._waiting)),
        }
        for number in self.decoder.decoders.keys() - keep:
            for prompt in [
                p for p in self._prompts if p.adapter_id == number and p.conversation is not None
            ]:
                self._evict_conversations(prompt.conversation)
            self.decoder.remove_adapter(number)

    @torch.inference_mode()
    def step(self) -> list[FinishedRequest]:
        """Run a step; return its finished requests, and an error for each request that diverged."""
        done = super().step()
        broken, self._errors = self._errors, {}
        for request_id in broken:
            self.cancel(request_id)
        if broken:
            self._state.replace_non_finite()
        return [item for item in done if item.request_id not in broken] + [
            FinishedRequest(number, error) for number, error in broken.items()
        ]

    def _handle_non_finite(self, tokens: np.ndarray, non_finite: np.ndarray) -> None:
        """Record a divergence error for each request with a bad row; set its token to 0."""
        for number in sorted(set(self._rows["job"][non_finite].tolist())):
            self._errors[number] = make_divergence_error([number])
        tokens[non_finite] = 0  # these rows are removed at the end of this step

    def _set_version(self, row: int, sequence: SampledSequence) -> SampledSequence:
        """Set the sequence's version to that of the weights that sampled it."""
        weights = self._running[int(self._rows["job"][row])].request.adapter_id
        sequence.version = self.decoder.versions[weights or 0]
        return sequence

    def _cache_conversation(self, row: int, group: SequenceGroup, tokens: list[int]) -> None:
        """Keep the row's cache for its conversation unless its request diverged."""
        if group.request_id not in self._errors:
            super()._cache_conversation(row, group, tokens)


class PagedMultiAdapterEngine(MultiAdapterEngine, PagedEngine):
    """Run `MultiAdapterEngine` over a paged KV cache (`PagedEngine`)."""

    _state: PagedState
