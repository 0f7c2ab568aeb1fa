"""Select the weights that get a LoRA adapter, and list selected weights that cannot get an
adapter.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from rl.errors import UserError
from rl.layers import describe_layers
from rl.models.lazy_safetensors import get_conversion_rules
from rl.types import LoraConfig

_NO_MATRIX = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.GroupNorm)


def is_head_tied(model: Any) -> bool:
    """Return whether the output head of a transformers model is the matrix of its embedding."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and getattr(head, "weight", None) is embedding.weight


def resolve_head(model: Any, lora: LoraConfig) -> LoraConfig:
    """Return `lora` with `train_unembed` decided: None becomes whether the head is a separate
    matrix.

    An adapter on a head that is tied to the embedding fits no engine that keeps the two tied.
    """
    if lora.train_unembed is not None:
        return lora
    return replace(lora, train_unembed=not is_head_tied(model))


def find_lora_targets(model: Any, lora: LoraConfig) -> list[str]:
    """Return the full names of the linear layers of attention and MLP, and of the head, that get an
    adapter.

    Raises UserError if no module is selected and experts are not trained: all parts are off, or no
    adapter fits those selected.
    """
    lora = resolve_head(model, lora)
    names = [
        name
        for name, module in _iter_linear_layers(model)
        if _is_selected(model, name, module, lora)
    ]
    if names or lora.train_experts:
        return names
    missed = find_unadaptable(model, lora)
    if missed:
        raise UserError(
            "LoRA on linear layers has no adapter for experts stored as a single tensor "
            f"({next(iter(missed))}, ...), and nothing else is selected: turn train_experts, "
            "train_attn or train_unembed on, or train all weights (--lora-rank 0)"
        )
    raise UserError(
        "LoRA with train_mlp, train_attn and train_unembed all off trains nothing: turn at "
        "least 1 on"
    )


def find_expert_targets(model: Any, lora: LoraConfig) -> list[str]:
    """Return the full names of the expert tensors that get an adapter, PEFT's `target_parameters`.

    [] unless `train_experts` is set. Raises UserError if it is set and PEFT can adapt none.
    """
    if not lora.train_experts:
        return []
    if expert_names := list(iter_stacked_experts(model)):
        return expert_names
    experts = describe_layers(model).experts
    if experts is None:
        raise UserError(
            "train_experts is for models with experts, and this model has none: turn it off"
        )
    names = {name for name, _ in _iter_linear_layers(model)}
    if any(name.startswith(f"{block}.experts.") for block in experts.blocks for name in names):
        raise UserError(
            "the experts of this model are linear layers, which train_mlp adapts with the "
            "others: turn train_experts off"
        )
    raise UserError(
        f"PEFT has no adapter for these experts ({experts.blocks[0]}.experts holds them in no "
        "tensor [experts, .., ..]): turn train_experts off, or train all weights (--lora-rank 0)"
    )


def iter_stacked_experts(model: Any) -> Iterator[str]:
    """Yield the names of the tensors [experts, .., ..] that hold a matrix of every expert."""
    for name, module in model.named_modules():
        if "expert" not in f"{name}.{type(module).__name__}".lower() or isinstance(
            module, _NO_MATRIX
        ):
            continue
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 3 and min(parameter.shape) > 1:
                yield f"{name}.{key}"


def find_unadaptable(model: Any, lora: LoraConfig) -> dict[str, int]:
    """Return the size of each selected matrix that cannot get an adapter, as no linear layer holds
    it.

    Sizes are numbers of elements, by name. Mostly experts in a three-dimensional tensor (unless
    `train_experts` is set), and their routers; layers with weights that are read bypassing the
    layer (see `_iter_directly_read`); layers of groups (see `_maps_rows`); layers that PEFT could
    not find again (see `_iter_renamed_at_load`).
    """
    linear, adapted = (
        {name for name, _ in _iter_linear_layers(model)},
        set(iter_stacked_experts(model)) if lora.train_experts else set(),
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
            if matrix and _is_selected(model, name, module, lora):
                missed[f"{name}.{key}"] = parameter.numel()
    return missed


def _iter_linear_layers(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of each linear layer that an adapter can be added to."""
    from transformers.pytorch_utils import Conv1D

    none = {*_iter_directly_read(model), *_iter_renamed_at_load(model)}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and name not in none and _maps_rows(module):
            yield name, module


def _maps_rows(module: nn.Module) -> bool:
    """Return whether a layer with a custom forward maps rows [1, in] to rows [1, out].

    Otherwise an adapter's output cannot be added. Llama 4's router returns a pair; DeepSeek V4's
    `o_a_proj` reads groups of rows, each with a separate part of the weight. A layer that takes
    several arguments is left to PEFT.
    """
    if (
        not type(module).__module__.startswith("transformers.models.")
        or type(module).forward is nn.Linear.forward
    ):
        return True
    weight: Tensor = module.weight  # type: ignore[assignment]
    try:
        with torch.no_grad():
            output = module(
                torch.zeros(1, weight.shape[-1], dtype=weight.dtype, device=weight.device)
            )
    except TypeError:
        return True
    except (RuntimeError, ValueError, IndexError):
        return False
    return isinstance(output, Tensor) and output.shape == (1, weight.shape[0])


def _iter_directly_read(model: Any) -> Iterator[str]:
    """Yield the linear layers with weights that other code reads directly.

    An adapter would have no effect on such reads until it is merged. These are the layers that
    fused kernels of state spaces read; routers that score in fp32 (LongCat's `classifier`); Gemma
    3n's `correction_coefs`, which are clamped in training.
    """
    for name, module in model.named_modules():
        unadaptable = (
            {"out_proj", "dt_proj"}
            if {"A_log", "D"} <= {key for key, _ in module.named_parameters(recurse=False)}
            else set()
        )
        unadaptable |= {
            key
            for key in ("x_proj", "classifier", "correction_coefs")
            if _reads_weight(module.__class__, key)
        }
        yield from (
            f"{name}.{key}"
            for key in sorted(unadaptable)
            if isinstance(getattr(module, key, None), nn.Linear)
        )


@cache
def _reads_weight(kind: type, layer_name: str) -> bool:
    """Return whether a transformers class reads the weight of its layer `layer_name` directly."""
    if not kind.__module__.startswith("transformers.models."):
        return False
    try:
        return f"self.{layer_name}.weight" in inspect.getsource(kind)
    except (OSError, TypeError):
        return False


def _iter_renamed_at_load(model: Any) -> Iterator[str]:
    """Yield the linear layers with adapters that PEFT could not load again.

    transformers renames them at load (Laguna's shared experts).
    """
    from transformers.core_model_loading import rename_source_key

    renamings, converters = get_conversion_rules(model)
    for name, module in model.named_modules() if renamings else ():
        if (
            isinstance(module, nn.Linear)
            and rename_source_key(f"{name}.weight", renamings, converters)[0] != f"{name}.weight"
        ):
            yield name


# Parts of a vision-language model outside its text model, by the names that architectures use.
_VISION_PARTS = {
    "visual",
    "vision_tower",
    "vision_model",
    "multi_modal_projector",
    "connector",
    "embed_vision",
    "vision_embed_tokens",
}


def is_vision_parameter(name: str) -> bool:
    """Return whether a module or parameter belongs to the vision tower or its projector."""
    return bool(_VISION_PARTS & set(name.split(".")))


def _is_selected(model: Any, name: str, module: nn.Module, lora: LoraConfig) -> bool:
    """Return whether `lora` selects this module."""
    if module is model.get_output_embeddings():
        return bool(lora.train_unembed)
    if not lora.train_vision and is_vision_parameter(name):
        return False
    if "attn" in name or "attention" in name:
        return lora.train_attn
    return lora.train_mlp
