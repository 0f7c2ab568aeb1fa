"""Which decoder for which model."""

from __future__ import annotations

from typing import Any

import torch

from rl.sampler.decoder import Decoder
from rl.sampler.decoder_fast import FastDecoder
from rl.sampler.decoder_hf import HFDecoder
from rl.sampler.weights import Unsupported


def make_decoder(
    model: Any,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    kind: str = "auto",
) -> Decoder:
    """A decoder over a copy of the weights of a HF causal LM, which may be PEFT-wrapped: training the model does not change it.

    "fast" is the hand-written decoder of the Llama family, "hf" the model's own forward; "auto" takes the fast one for the
    architectures and features it was proved for. `dtype` (default: the model's) is that of the base weights; adapters keep
    theirs. Adapters are applied unmerged.
    """
    where = torch.device(device) if device is not None else None
    if kind not in ("auto", "fast", "hf"):
        raise ValueError(f"kind is 'auto', 'fast' or 'hf', got {kind!r}")
    if kind == "hf":
        return HFDecoder(model, dtype, where)
    try:
        return FastDecoder.from_model(model, dtype, where)
    except Unsupported as reason:
        if kind == "fast":
            raise ValueError(f"the fast decoder does not know {reason}; use kind='auto' or kind='hf'") from reason
        return HFDecoder(model, dtype, where)
