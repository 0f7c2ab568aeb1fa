"""Which weights of a model get a LoRA adapter, and which are left without one though they were
asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from rl.errors import UserError
from rl.layers import describe
from rl.types import LoraConfig

# of LoraConfig: what an adapter is put on
PARTS = ("train_mlp", "train_attn", "train_unembed", "train_vision", "train_experts")
# those that older checkpoints do not name, as these were made
LATER_PARTS = {"train_vision": False, "train_experts": False}
_NO_MATRIX = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.GroupNorm)


def targets(model: Any, lora: LoraConfig) -> list[str]:
    """Full names of the modules that get an adapter: linear layers of attention, of the MLP, and
    the output head.

    Raises UserError where there are none and no experts are trained: nothing was asked for, or only
    what no adapter fits.
    """
    found = [name for name, module in _linear(model) if _wanted(model, name, module, lora)]
    if found or lora.train_experts:
        return found
    missed = left_out(model, lora)
    if missed:
        raise UserError(
            f"LoRA on linear layers has no adapter for experts whose weights are one tensor ({next(iter(missed))}, ...), and nothing else "
            "was asked for: turn train_experts, train_attn or train_unembed on, or train all weights (--lora-rank 0)"
        )
    raise UserError(
        "LoRA with train_mlp, train_attn and train_unembed all off trains nothing: turn one on"
    )


def expert_targets(model: Any, lora: LoraConfig) -> list[str]:
    """Full names of the tensors of experts that get an adapter, PEFT's `target_parameters`: []
    unless `train_experts` asks for them.

    Raises UserError where they are asked for and there are none that PEFT can adapt.
    """
    if not lora.train_experts:
        return []
    if found := list(stacked_experts(model)):
        return found
    experts = describe(model).experts
    if experts is None:
        raise UserError(
            "train_experts is for models with experts, and this model has none: turn it off"
        )
    names = {name for name, _ in _linear(model)}
    if any(name.startswith(f"{block}.experts.") for block in experts.blocks for name in names):
        raise UserError(
            "the experts of this model are linear layers, which train_mlp adapts with the others: turn train_experts off"
        )
    raise UserError(
        f"PEFT has no adapter for these experts ({experts.blocks[0]}.experts holds them in no tensor [experts, .., ..]): turn "
        "train_experts off, or train all weights (--lora-rank 0)"
    )


def stacked_experts(model: Any) -> Iterator[str]:
    """Names of the tensors [experts, .., ..] that hold a matrix of every expert."""
    for name, module in model.named_modules():
        if "expert" not in f"{name}.{type(module).__name__}".lower() or isinstance(
            module, _NO_MATRIX
        ):
            continue
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 3 and min(parameter.shape) > 1:
                yield f"{name}.{key}"


def left_out(model: Any, lora: LoraConfig) -> dict[str, int]:
    """Matrices that were asked for and get no adapter, since no linear layer holds them: how many
    numbers, by name.

    Experts in one tensor of three dimensions above all (unless `train_experts` asks for them), and
    their routers; layers whose weights are read past them (see `_read_as_numbers`); layers of
    groups (see `_gives_rows`); what PEFT would not find again (see `_read_under_other_names`).
    """
    linear, adapted = (
        {name for name, _ in _linear(model)},
        set(stacked_experts(model)) if lora.train_experts else set(),
    )
    missed = {}
    for name, module in model.named_modules():
        if (
            name in linear
            or isinstance(module, _NO_MATRIX)
            or module is model.get_output_embeddings()
        ):
            continue
        for key, parameter in module.named_parameters(recurse=False):
            matrix = (
                parameter.ndim >= 2
                and min(parameter.shape[-2:]) > 1
                and f"{name}.{key}" not in adapted
            )
            if matrix and _wanted(model, name, module, lora):
                missed[f"{name}.{key}"] = parameter.numel()
    return missed


def _linear(model: Any) -> Iterator[tuple[str, nn.Module]]:
    from transformers.pytorch_utils import Conv1D

    none = {*_read_as_numbers(model), *_read_under_other_names(model)}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and name not in none and _gives_rows(module):
            yield name, module


def _gives_rows(module: nn.Module) -> bool:
    """Whether a layer with a forward of its own makes rows [1, out] of rows [1, in], so that an
    adapter's can be added to them.

    Llama 4's router gives a pair; DeepSeek V4's `o_a_proj` reads groups of rows, each with its own
    part of the weight. A layer that takes more than one argument is left to PEFT.
    """
    if (
        not type(module).__module__.startswith("transformers.models.")
        or type(module).forward is nn.Linear.forward
    ):
        return True
    weight: Tensor = module.weight  # type: ignore[assignment]
    try:
        with torch.no_grad():
            given = module(
                torch.zeros(1, weight.shape[-1], dtype=weight.dtype, device=weight.device)
            )
    except TypeError:
        return True
    except (RuntimeError, ValueError, IndexError):
        return False
    return isinstance(given, Tensor) and given.shape == (1, weight.shape[0])


def _read_as_numbers(model: Any) -> Iterator[str]:
    """Linear layers whose weights are read past the layer, so that an adapter would not be seen
    there and would be by a merge.

    Those that fused kernels of state spaces read; routers that score in fp32 (LongCat's
    `classifier`); Gemma 3n's `correction_coefs`, which are clamped while it trains.
    """
    for name, module in model.named_modules():
        own = (
            {"out_proj", "dt_proj"}
            if {"A_log", "D"} <= {key for key, _ in module.named_parameters(recurse=False)}
            else set()
        )
        own |= {
            key
            for key in ("x_proj", "classifier", "correction_coefs")
            if _reads(module.__class__, key)
        }
        yield from (
            f"{name}.{key}"
            for key in sorted(own)
            if isinstance(getattr(module, key, None), nn.Linear)
        )


@cache
def _reads(kind: type, own: str) -> bool:
    """Whether a class of transformers reads the weight of its layer `own` itself."""
    if not kind.__module__.startswith("transformers.models."):
        return False
    try:
        return f"self.{own}.weight" in inspect.getsource(kind)
    except (OSError, TypeError):
        return False


def _read_under_other_names(model: Any) -> Iterator[str]:
    """Linear layers whose adapters PEFT would not find again, since transformers renames what it
    reads (Laguna's shared experts).
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            rename_source_key,
        )
    except ImportError:  # a transformers that renames nothing, or by other means
        return
    changes = get_model_conversion_mapping(model)
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    for name, module in model.named_modules() if renamings else ():
        if (
            isinstance(module, nn.Linear)
            and rename_source_key(f"{name}.weight", renamings, converters)[0] != f"{name}.weight"
        ):
            yield name


# Parts of a vision-language model that are no part of its text model, by the names that
# architectures give them.
_SEES = {
    "visual",
    "vision_tower",
    "vision_model",
    "multi_modal_projector",
    "connector",
    "embed_vision",
    "vision_embed_tokens",
}


def belongs_to_eyes(name: str) -> bool:
    """Whether a module or a parameter is of the vision tower, or of what joins it to the text."""
    return bool(_SEES & set(name.split(".")))


def _wanted(model: Any, name: str, module: nn.Module, lora: LoraConfig) -> bool:
    if module is model.get_output_embeddings():
        return lora.train_unembed
    if not lora.train_vision and belongs_to_eyes(name):
        return False
    if "attn" in name or "attention" in name:
        return lora.train_attn
    return lora.train_mlp
