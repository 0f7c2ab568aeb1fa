"""Record the experts that each sampled token was routed to, so that a learner can replay the
routing.
"""

from __future__ import annotations

from rl.errors import UserError
from rl.sampler.decoder import Decoder
from rl.sampler.decoder_hf import HFDecoder
from rl.sampler.sampling_engine import Engine
from rl.types import SampledSequence


def enable_expert_recording(decoder: Decoder) -> None:
    """Make the decoder record experts from now on. Raises UserError if it cannot."""
    if isinstance(decoder, HFDecoder) and decoder.records_experts:
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
    decoder.records_experts = True
    try:
        decoder.plain_forward([[0, 0]], last_only=True)
    except NotImplementedError as error:
        decoder.records_experts = False
        raise UserError(
            f"router_replay: {decoder.name} cannot replay the choice of experts ({error}): "
            "turn it off"
        ) from error


class ExpertRecordingEngine(Engine):
    """Add the experts to each sample (see the module). Call `enable_expert_recording` on its
    decoder first.
    """

    def change_weights(self, decoder: Decoder, version: int) -> None:
        """Switch to the weights of `decoder`, after making it record experts."""
        enable_expert_recording(decoder)
        super().change_weights(decoder, version)

    def _set_version(self, row: int, sequence: SampledSequence) -> SampledSequence:
        """Add the experts to the sequence.

        Tokens that were sampled elsewhere, and are only prefilled here, keep the experts of their
        sampling.
        """
        sequence, begun = (
            super()._set_version(row, sequence),
            self._running[int(self._rows["job"][row])].request.resume_from,
        )
        sequence.experts = self._state.experts_of_row(row)
        if begun is not None and begun.experts is not None and sequence.experts is not None:
            sequence.experts[: len(begun.experts)] = begun.experts
        return sequence
