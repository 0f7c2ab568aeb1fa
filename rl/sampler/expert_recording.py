"""Record the experts that each sampled token was routed to, so that a learner can replay the
routing.
"""

from __future__ import annotations

from rl.errors import UserError
from rl.sampler.decoder import Decoder
from rl.sampler.decoder_fast import FastDecoder
from rl.sampler.decoder_hf import HFDecoder


def has_experts(decoder: Decoder) -> bool:
    """Return whether a decoder's model is a mixture of experts."""
    if isinstance(decoder, HFDecoder):
        return decoder.layers.experts is not None
    return isinstance(decoder, FastDecoder) and decoder.num_choices > 0


def enable_expert_recording(decoder: Decoder) -> None:
    """Make the decoder record experts from now on. Raises UserError if it cannot."""
    if not has_experts(decoder):
        raise UserError(
            "router_replay needs a model with experts, and this model has none: turn it off"
        )
    if not isinstance(decoder, HFDecoder) or decoder.records_experts:
        return
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
