"""Record the experts that each sampled token was routed to, so that a learner can replay the
routing.
"""

from __future__ import annotations

from rl.errors import UserError
from rl.sampler.decoder import Decoder
from rl.sampler.decoder_hf import HFDecoder
from rl.sampler.engine import Engine
from rl.types import SampledSequence


def note_experts(decoder: Decoder) -> None:
    """Make the decoder record experts from now on. Raises UserError if it cannot."""
    if isinstance(decoder, HFDecoder) and decoder.notes_experts:
        return
    if not isinstance(decoder, HFDecoder) or decoder.layers.experts is None:
        raise UserError(
            "router_replay needs a model with experts, and this model has none: turn it off"
        )
    if decoder.plan.rows not in ("padded", "slots"):
        raise UserError(
            f"router_replay: {decoder.name} decodes by {decoder.plan.rows!r}, which records "
            "no experts: turn it off"
        )
    decoder.notes_experts = True
    try:
        decoder.plain_forward([[0, 0]], last_only=True)
    except NotImplementedError as error:
        decoder.notes_experts = False
        raise UserError(
            f"router_replay: {decoder.name} cannot replay the choice of experts ({error}): "
            "turn it off"
        ) from error


class RoutedEngine(Engine):
    """Add the experts to each sample (see the module). Call `note_experts` on its decoder first."""

    def change_weights(self, decoder: Decoder, version: int) -> None:
        """Switch to the weights of `decoder`, after making it record experts."""
        note_experts(decoder)
        super().change_weights(decoder, version)

    def _labelled(self, row: int, sequence: SampledSequence) -> SampledSequence:
        """Add the experts to the sequence.

        Tokens that were sampled elsewhere, and are only prefilled here, keep the experts of their
        sampling.
        """
        sequence, begun = (
            super()._labelled(row, sequence),
            self._jobs[int(self._rows["job"][row])].request.begun,
        )
        sequence.experts = self._state.experts(row)
        if begun is not None and begun.experts is not None and sequence.experts is not None:
            sequence.experts[: len(begun.experts)] = begun.experts
        return sequence
