"""Sample rows of several models in a single batch: LoRA adapters on a frozen base, and the bare
base.

Adapters may have any ranks and targets. Each matrix of the base is read once for all rows, and each
row adds the output of its adapter (rl.sampler.projections), so each sample equals a sample of its
model in a separate batch. `Request.weights` selects the model: the number under which the decoder
knows an adapter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from rl.errors import UserError
from rl.sampler.cache_fast import FastState
from rl.sampler.decoder import Decoder
from rl.sampler.decoder_fast import FastDecoder
from rl.sampler.engine import Engine
from rl.sampler.jobs import Job, diverged
from rl.sampler.requests import Finished, Request
from rl.types import SampledSequence


class MixedDecoder(FastDecoder):
    """Decode with a base and any number of adapters on it, each under a number.

    Nothing is copied: the adapters' own decoders keep their memory.
    """

    mixes = True

    def __init__(self, base: FastDecoder):
        super().__init__(base.architecture, base.weights)
        self.own = base
        self.decoders: dict[int, FastDecoder] = {}
        self.versions: dict[int, int] = {}

    def put(self, number: int, decoder: Decoder, version: int) -> None:
        """Map `number` to the weights of `decoder`. Raises UserError if they belong to another
        base.
        """
        if not isinstance(decoder, FastDecoder) or self.own not in (decoder, decoder.base):
            raise UserError(
                "weights on another base cannot be sampled in this batch: sample them in a "
                "separate batch"
            )
        self.decoders[number], self.versions[number] = decoder, version
        for projection, other in zip(self.parts(), decoder.parts(), strict=True):
            if other.adapter is not None and decoder is not self.own:
                # Both adapters are of the same kind.
                projection.others[number] = other.adapter  # type: ignore[assignment]

    def take(self, number: int) -> None:
        """Remove the weights of `number`."""
        self.decoders.pop(number)
        self.versions.pop(number)
        for projection in self.parts():
            projection.others.pop(number, None)


class MixedEngine(Engine):
    """Run an engine over a `MixedDecoder`; `Request.weights` selects the model of each request.

    If the weights of a request produce no numbers (NaN), only the requests of these weights fail.
    """

    decoder: MixedDecoder
    _state: FastState

    @classmethod
    def beside(cls, decoder: Decoder, **settings: Any) -> MixedEngine:
        """Build an engine for all models on the base of `decoder`, without any adapter yet."""
        assert isinstance(decoder.base, FastDecoder), (
            "`Decoder.base` of this decoder must be a FastDecoder"
        )
        return cls(MixedDecoder(decoder.base), **settings)

    def __init__(self, decoder: MixedDecoder, *args: Any, **settings: Any):
        super().__init__(decoder, *args, **settings)
        self._broken: dict[int, FloatingPointError] = {}

    def add(self, request: Request) -> int:
        """Queue a request and return its id. Raises ValueError if its weights are unknown."""
        if request.weights not in self.decoder.decoders:
            raise ValueError(
                f"unknown weights {request.weights}: this batch samples from "
                f"{sorted(self.decoder.decoders)}"
            )
        return super().add(request)

    @torch.inference_mode()
    def keep_weights(self, numbers: Iterable[int]) -> None:
        """Remove all weights except `numbers` and those of running or waiting requests.

        The cached conversations of removed weights are dropped too.
        """
        keep = {*numbers, *(job.request.weights for job in (*self._jobs.values(), *self._waiting))}
        for number in self.decoder.decoders.keys() - keep:
            for prompt in [
                p for p in self._prompts if p.weights == number and p.conversation is not None
            ]:
                self._forget_conversations(prompt.conversation)
            self.decoder.take(number)

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Run a step; return its finished requests, and an error for each request that diverged."""
        done = super().step()
        broken, self._broken = self._broken, {}
        for request_id in broken:
            self.drop(request_id)
        if broken:
            self._state.scrub()
        return [item for item in done if item.request_id not in broken] + [
            Finished(number, error) for number, error in broken.items()
        ]

    def _no_numbers(self, tokens: np.ndarray, bad: np.ndarray) -> None:
        """Record a divergence error for each request with a bad row; set its token to 0."""
        for number in sorted(set(self._rows["job"][bad].tolist())):
            self._broken[number] = diverged([number])
        tokens[bad] = 0  # these rows are removed at the end of this step

    def _labelled(self, row: int, sequence: SampledSequence) -> SampledSequence:
        """Set the sequence's version to that of the weights that sampled it."""
        weights = self._jobs[int(self._rows["job"][row])].request.weights
        sequence.version = self.decoder.versions[weights or 0]
        return sequence

    def _keep(self, row: int, job: Job, tokens: list[int]) -> None:
        """Keep the row's cache for its conversation unless its request diverged."""
        if job.request_id not in self._broken:
            super()._keep(row, job, tokens)
