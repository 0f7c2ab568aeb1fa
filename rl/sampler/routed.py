"""An engine that also says which experts the tokens of each sample went to, for a learner that
sends them there again.
"""

from __future__ import annotations

from rl.errors import UserError
from rl.sampler.decoder import Decoder
from rl.sampler.decoder_hf import HFDecoder
from rl.sampler.engine import Engine
from rl.types import SampledSequence


def note_experts(decoder: Decoder) -> None:
    """From now on the decoder notes them. UserError for one that cannot."""
    if isinstance(decoder, HFDecoder) and decoder.notes_experts:
        return
    if not isinstance(decoder, HFDecoder) or decoder.layers.experts is None:
        raise UserError(
            "router_replay is for models with experts, and this model has none: turn it off"
        )
    if decoder.plan.rows not in ("padded", "slots"):
        raise UserError(
            f"router_replay: {decoder.name} decodes by {decoder.plan.rows!r}, which notes no experts: turn it off"
        )
    decoder.notes_experts = True
    try:
        decoder.plain_forward([[0, 0]], last_only=True)
    except NotImplementedError as error:
        decoder.notes_experts = False
        raise UserError(
            f"router_replay: {decoder.name} cannot be told which experts to take ({error}): turn it off"
        ) from error


class RoutedEngine(Engine):
    """See the module; `note_experts` was called on its decoder."""

    def change_weights(self, decoder: Decoder, version: int) -> None:
        note_experts(decoder)
        super().change_weights(decoder, version)

    def _labelled(self, row: int, sequence: SampledSequence) -> SampledSequence:
        """With the experts as well. A token that was drawn elsewhere, and is read again here, keeps
        those that it had there.
        """
        sequence, begun = (
            super()._labelled(row, sequence),
            self._jobs[int(self._rows["job"][row])].request.begun,
        )
        sequence.experts = self._state.experts(row)
        if begun is not None and begun.experts is not None and sequence.experts is not None:
            sequence.experts[: len(begun.experts)] = begun.experts
        return sequence
