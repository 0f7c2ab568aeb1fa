"""Which decoder for which model."""

from __future__ import annotations

from typing import Any

import torch

from rl.errors import UserError, remark
from rl.sampler.attention import without_cudnn
from rl.sampler.decoder import Decoder, NamedTensors
from rl.sampler.decoder_fast import FastDecoder
from rl.sampler.decoder_hf import HFDecoder
from rl.sampler.forward_hf import unwrapped
from rl.sampler.probe import agrees_with, settle
from rl.sampler.split import Team
from rl.sampler.weights import Unsupported

_ONE_RANK = "sampler_tp {} splits what the fast decoder samples (the Llama and Qwen families), and {}: leave sampler_tp at 1"


def make_decoder(
    model: Any,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    kind: str = "auto",
    weights: NamedTensors | None = None,
    base: Decoder | None = None,
    team: Team | None = None,
) -> Decoder:
    """A decoder over a copy of the weights of a HF causal LM, which may be PEFT-wrapped: training
    the model does not change it.

    "fast" is the hand-written decoder of the Llama family, "hf" the model's own forward; "auto"
    takes the fast one for the architectures and features it was proved for. `dtype` (default: the
    model's) is that of the base weights; adapters keep theirs. Adapters are applied unmerged.
    `weights`: all of them, where the model given is a shell whose own mean nothing. `base`: a
    decoder of the bare model under the adapters, whose memory is shared where it holds the same
    (`FastDecoder.base`). `team`: ranks that hold the decoder together, each its part
    (rl.sampler.split), all of which call this and what it returns alike; UserError for a model that
    only the generic decoder samples, or that they cannot share evenly. The decoder is tried out
    against the model's plain forward (see `probe`); UserError for a model that cannot be sampled.
    """
    without_cudnn()
    where = torch.device(device) if device is not None else None
    if kind not in ("auto", "fast", "hf"):
        raise ValueError(f"kind is 'auto', 'fast' or 'hf', got {kind!r}")
    shared = base if isinstance(base, FastDecoder) and weights is None else None
    if team is not None and kind == "hf":
        raise UserError(_ONE_RANK.format(team.size, "the sampler is 'hf'"))
    decoder = None if kind == "hf" else _fast(model, dtype, where, kind, shared, team)
    hollow = weights is not None
    if isinstance(decoder, FastDecoder):
        if weights is not None:
            decoder.load_(weights)
        if hollow or agrees_with(decoder, model):
            return decoder
        name = type(unwrapped(model)).__name__
        said = f"the fast decoder does not give the logits of this {name}'s own forward"
        if team is not None:
            raise UserError(_ONE_RANK.format(team.size, said))
        if kind == "fast":
            raise ValueError(f"{said}: use kind='auto' or kind='hf'")
        remark(f"{said}, so sampling goes through that forward, slower")
    generic = HFDecoder(model, dtype, where)
    if weights is not None:
        generic.load_(weights)
    settle(generic, None if hollow else model)
    return generic


def make_base(
    model: Any,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    kind: str = "auto",
    team: Team | None = None,
) -> Decoder | None:
    """A decoder of a bare model whose memory those of adapters on it share (`make_decoder`'s
    `base`), and a batch with them.

    None where adapters on it can share neither: the hand-written decoder does not know it, or "hf"
    is asked for.
    """
    if kind == "hf":
        return None
    try:
        decoder = FastDecoder.from_model(
            model, dtype, None if device is None else torch.device(device), team=team
        )
    except Unsupported:
        return None
    return decoder if agrees_with(decoder, model) else None


def _fast(
    model: Any,
    dtype: torch.dtype | None,
    device: torch.device | None,
    kind: str,
    base: FastDecoder | None,
    team: Team | None,
) -> FastDecoder | None:
    """The fast decoder; None for a model that it does not know, an error where no other was asked
    for or could do it.
    """
    try:
        return FastDecoder.from_model(model, dtype, device, base, team)
    except Unsupported as reason:
        if team is not None:
            raise UserError(_ONE_RANK.format(team.size, f"it does not know {reason}")) from reason
        if kind == "fast":
            raise ValueError(
                f"the fast decoder does not know {reason}; use kind='auto' or kind='hf'"
            ) from reason
        return None
