"""An engine that also says which experts the tokens of each sample went to, for a learner that sends them there again."""

from __future__ import annotations

from typing import Any

import numpy as np

from rl.errors import UserError
from rl.sampler.decoder import Decoder
from rl.sampler.decoder_hf import HFDecoder
from rl.sampler.engine import Engine
from rl.sampler.requests import Finished


def note_experts(decoder: Decoder) -> None:
    """From now on the decoder notes them. UserError for one that cannot."""
    if not isinstance(decoder, HFDecoder) or decoder.layers.experts is None:
        raise UserError("router_replay is for models with experts, and this model has none: turn it off")
    if decoder.plan.rows not in ("padded", "slots"):
        raise UserError(f"router_replay: {decoder.name} decodes by {decoder.plan.rows!r}, which notes no experts: turn it off")
    decoder.notes_experts = True
    try:
        decoder.plain_forward([[0, 0]], last_only=True)
    except NotImplementedError as error:
        decoder.notes_experts = False
        raise UserError(f"router_replay: {decoder.name} cannot be told which experts to take ({error}): turn it off") from error


class RoutedEngine(Engine):
    """See the module; `note_experts` was called on its decoder."""

    def _retire(self, ended: np.ndarray, stopped: np.ndarray) -> list[Finished]:
        gone = np.flatnonzero(ended).tolist()
        owners: list[Any] = [self._jobs[int(self._rows["job"][row])] for row in gone]
        samples = [int(self._rows["sample"][row]) for row in gone]
        found = [self._state.experts(row) for row in gone]
        finished = super()._retire(ended, stopped)
        for job, sample, experts in zip(owners, samples, found, strict=True):
            job.sequences[sample].experts = experts
        return finished
