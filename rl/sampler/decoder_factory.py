"""Build the decoder of a model: the fast decoder or the generic HF decoder."""

from __future__ import annotations

from typing import Any

import torch

from rl.errors import UserError, warn_on_rank_zero
from rl.layers import unwrap_model
from rl.sampler.decoder import Decoder, NamedTensors
from rl.sampler.decoder_fast import FastDecoder
from rl.sampler.decoder_hf import HFDecoder
from rl.sampler.decoder_weights import UnsupportedModel
from rl.sampler.prefix_attention import disable_cudnn_attention
from rl.sampler.tensor_parallel import TensorParallelGroup
from rl.sampler.verify_decoder import matches_model, select_batching
from rl.types.feature_table import check_features

_NO_TENSOR_PARALLEL = (
    "sampler_tp {} requires the fast decoder (docs/models.md lists its families), but {}: leave "
    "sampler_tp at 1"
)
_NOT_FAST = "set sampler to auto or hf (make_decoder: kind)"


def make_decoder(
    model: Any,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    kind: str = "auto",
    weights: NamedTensors | None = None,
    base: Decoder | None = None,
    tp_group: TensorParallelGroup | None = None,
) -> Decoder:
    """Build a decoder over a copy of the weights of a HF causal LM, PEFT-wrapped or not.

    Training the model afterwards does not change the decoder. `kind`: "fast" is the hand-written
    decoder of the families of `layer_specs`, "hf" the model's own forward; "auto" picks the fast
    decoder for the architectures and features that it was verified for.

    `dtype` (default: the model's) is the dtype of the base weights; adapters keep their dtype.
    Adapters are applied unmerged. `weights`: all weights by name, for a model that holds no values
    itself. `base`: a decoder of the bare model under the adapters; buffers with equal values are
    shared with it (`FastDecoder.base`). `tp_group`: the tensor-parallel ranks that hold the decoder
    together, each with its shard (rl.sampler.tensor_parallel); all of them make this call and every
    call of the returned decoder.

    The decoder is checked against the model's plain forward (`verify_decoder.matches_model`,
    `verify_decoder.find_batching`). Raises UserError if the model cannot be sampled from, if `kind`
    is "fast" or `tp_group` is set and only the generic decoder supports the model, or if the ranks
    cannot share it evenly. Raises ValueError if `kind` is unknown.
    """
    disable_cudnn_attention()
    target = torch.device(device) if device is not None else None
    if kind not in ("auto", "fast", "hf"):
        raise ValueError(f"kind must be 'auto', 'fast' or 'hf', got {kind!r}")
    shared = base if isinstance(base, FastDecoder) and weights is None else None
    if tp_group is not None and kind == "hf":
        check_features(("tensor parallelism", "generic decoder"))
    decoder = None
    if kind != "hf":
        try:
            decoder = FastDecoder.from_model(model, dtype, target, shared, tp_group)
        except UnsupportedModel as reason:
            if tp_group is not None:
                message = f"it does not support {reason}"
                raise UserError(_NO_TENSOR_PARALLEL.format(tp_group.size, message)) from reason
            if kind == "fast":
                message = f"the fast decoder does not support {reason}"
                raise UserError(f"{message}: {_NOT_FAST}") from reason
    if decoder is not None:
        if weights is not None:
            decoder.load_(weights)
            return decoder
        if matches_model(decoder, model):
            return decoder
        name = type(unwrap_model(model)).__name__
        message = f"the fast decoder does not reproduce the logits of this {name}'s own forward"
        if tp_group is not None:
            raise UserError(_NO_TENSOR_PARALLEL.format(tp_group.size, message))
        if kind == "fast":
            raise UserError(f"{message}: {_NOT_FAST}")
        decoder = None  # free its memory before the generic decoder copies the model
        warn_on_rank_zero(f"{message}, so sampling uses that forward, which is slower")
    generic = HFDecoder(model, dtype, target)
    if weights is not None:
        generic.load_(weights)
    select_batching(generic, model if weights is None else None)
    return generic


def make_base_decoder(
    model: Any,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    kind: str = "auto",
    tp_group: TensorParallelGroup | None = None,
) -> Decoder | None:
    """Build the decoder of a bare model, for adapters on it to share memory and a batch with.

    It is the `base` of `make_decoder`. Returns None if adapters on it can share neither: the fast
    decoder does not support the model, or `kind` is "hf".
    """
    if kind == "hf":
        return None
    try:
        decoder = FastDecoder.from_model(
            model, dtype, None if device is None else torch.device(device), tp_group=tp_group
        )
    except UnsupportedModel:
        return None
    return decoder if matches_model(decoder, model) else None


def has_experts(decoder: Decoder) -> bool:
    """Return whether a decoder's model is a mixture of experts."""
    if isinstance(decoder, HFDecoder):
        return decoder.layers.experts is not None
    return isinstance(decoder, FastDecoder) and decoder.num_choices > 0


def check_has_experts(has_experts: bool) -> None:
    """Raise UserError if a model whose experts are to be recorded has none."""
    if not has_experts:
        raise UserError(
            "router_replay needs a model with experts, and this model has none: turn it off"
        )


def enable_expert_recording(decoder: Decoder) -> None:
    """Make the decoder record experts from now on. Raises UserError if it cannot."""
    check_has_experts(has_experts(decoder))
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


def find_decoder_features(decoder: Decoder) -> set[str]:
    """Return the features of a decoder, of those in `rl.types.feature_table`."""
    if not isinstance(decoder, FastDecoder):
        return {"generic decoder"}
    features = {"tensor parallelism": decoder.tp_group, "adapters per row": decoder.multi_adapter}
    return {"fast decoder", *(name for name, value in features.items() if value)}
