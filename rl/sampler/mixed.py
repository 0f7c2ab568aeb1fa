"""Rows of several models in one batch: LoRA adapters of any ranks and targets on one frozen base,
and the bare base itself.

Each matrix of the base is read once for all rows, and each row adds its own adapter's part
(rl.sampler.projections), so a sample is what its model alone would have drawn. Which model a
request is for is its `weights`: a number under which the decoder knows an adapter.
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
    """A base and the adapters that were put beside it, by number. It copies nothing: adapters stay
    where their own decoders have them.
    """

    mixes = True

    def __init__(self, base: FastDecoder):
        super().__init__(base.architecture, base.weights)
        self.own = base
        self.decoders: dict[int, FastDecoder] = {}
        self.versions: dict[int, int] = {}

    def put(self, number: int, decoder: Decoder, version: int) -> None:
        """From now on `number` stands for that decoder's weights. UserError where it stands on
        another base.
        """
        if not isinstance(decoder, FastDecoder) or self.own not in (decoder, decoder.base):
            raise UserError(
                "weights that stand on another base cannot be drawn from in this batch: sample them by themselves"
            )
        self.decoders[number], self.versions[number] = decoder, version
        for mine, its in zip(self.parts(), decoder.parts(), strict=True):
            if its.adapter is not None and decoder is not self.own:
                mine.others[number] = its.adapter  # type: ignore[assignment]  # both are of one kind

    def take(self, number: int) -> None:
        """It stands for nothing any more."""
        self.decoders.pop(number)
        self.versions.pop(number)
        for mine in self.parts():
            mine.others.pop(number, None)


class MixedEngine(Engine):
    """An engine over such a decoder. Each request says whose it is; one whose weights give no
    number is alone in failing.
    """

    decoder: MixedDecoder
    _state: FastState

    @classmethod
    def beside(cls, decoder: Decoder, **settings: Any) -> MixedEngine:
        """An engine for all that stand on the base of `decoder`, none of them put in yet."""
        assert isinstance(decoder.base, FastDecoder), "there is a base where `Decoder.base` says so"
        return cls(MixedDecoder(decoder.base), **settings)

    def __init__(self, decoder: MixedDecoder, *args: Any, **settings: Any):
        super().__init__(decoder, *args, **settings)
        self._broken: dict[int, FloatingPointError] = {}

    def add(self, request: Request) -> int:
        if request.weights not in self.decoder.decoders:
            raise ValueError(
                f"this batch knows no weights {request.weights}: it draws for {sorted(self.decoder.decoders)}"
            )
        return super().add(request)

    @torch.inference_mode()
    def keep_weights(self, numbers: Iterable[int]) -> None:
        """Forgets all others, but for those that somebody still draws from, and what is in the
        cache of their conversations.
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
        done = super().step()
        broken, self._broken = self._broken, {}
        for request_id in broken:
            self.drop(request_id)
        if broken:
            self._state.scrub()
        return [one for one in done if one.request_id not in broken] + [
            Finished(number, error) for number, error in broken.items()
        ]

    def _no_numbers(self, tokens: np.ndarray, bad: np.ndarray) -> None:
        for number in sorted(set(self._rows["job"][bad].tolist())):
            self._broken[number] = diverged([number])
        tokens[bad] = 0  # of rows that leave at the end of this step

    def _labelled(self, row: int, sequence: SampledSequence) -> SampledSequence:
        weights = self._jobs[int(self._rows["job"][row])].request.weights
        sequence.version = self.decoder.versions[weights or 0]
        return sequence

    def _keep(self, row: int, job: Job, tokens: list[int]) -> None:
        if job.request_id not in self._broken:
            super()._keep(row, job, tokens)
