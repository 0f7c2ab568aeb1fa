"""Describe the layers of a model, read once from the built model.

Learner, sampler, memory plan and the table of architectures use this description. Kinds of layers:
`full`, `sliding` and `chunked` attention, which cache keys and values; `linear` attention, `state
space` and `convolution`, which carry a state of fixed size per sequence; several kinds in a layer
are joined with "+"; `other` if neither config nor modules tell, `none` for a layer with only
experts or an MLP. Probes verify the consequences (`rl.learner.layout_probe`,
`rl.sampler.verify_decoder`).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from rl.layers.receptive_field import (
    find_receptive_fields,
    find_unknown_kinds,
    get_config_number,
    get_text_config,
    unwrap_model,
)

STATE_KINDS = ("linear", "state space", "convolution")
KV_CACHE_KINDS = ("full", "sliding", "chunked", "other")
_KINDS = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "linear",
    "conv": "convolution",
    "mamba": "state space",
    "recurrent": "state space",
    "hybrid": "state space+full",
    "hybrid_sliding": "state space+sliding",
    "moe": "none",
    "mlp": "none",
    "global": "full",
    "local": "sliding",
}
_KIND_LABELS = {
    "full": "full attention",
    "sliding": "sliding-window attention",
    "chunked": "chunked attention",
    "linear": "linear attention",
    "convolution": "convolutions",
    "state space": "state-space layers",
    "other": "layers of an unknown kind",
}
# parts of the class names of state-space modules
_STATE_SPACE_CLASSES = ("mamba", "rwkv", "xlstm", "mlstm", "rglru", "recurrentblock")


@dataclass(frozen=True)
class ExpertLayout:
    """Describe the experts of a model.

    `blocks`: names of the modules that route tokens to their experts, in execution order.
    """

    count: int
    per_token: int
    blocks: tuple[str, ...]
    num_parameters: int  # number of parameters of all experts together, without adapters


@dataclass(frozen=True)
class ModelLayers:
    """Describe the layers of a model.

    `receptive_fields`: see `rl.layers.receptive_field.find_receptive_fields`. `unknown_kinds`:
    kinds of layers with an unknown receptive field; None if the model has no such layers.
    """

    kinds: tuple[str, ...]
    receptive_fields: Mapping[str, int]
    unknown_kinds: str | None
    takes_positions: bool
    positions: str  # "rotary", "learned", "alibi" or "none"
    experts: ExpertLayout | None
    images: bool
    # number of positions that a sparse attention layer selects by its scores (DeepSeek)
    selected_positions: int | None = None

    @cached_property
    def has_state(self) -> bool:
        """Return whether a layer carries a state from token to token."""
        return any(part in STATE_KINDS for kind in self.kinds for part in kind.split("+"))

    @cached_property
    def num_kv_layers(self) -> int:
        """Return the number of layers that cache keys and values of every token."""
        return sum(any(part in KV_CACHE_KINDS for part in kind.split("+")) for kind in self.kinds)

    @property
    def special_kinds(self) -> str | None:
        """Return the kinds other than plain full attention, in words; None if no layer is of
        another kind.
        """
        kinds = [kind for kind in dict.fromkeys(self.kinds) if kind not in ("full", "none")]
        return (
            ", ".join(
                " + ".join(_KIND_LABELS.get(part, part) for part in kind.split("+"))
                for kind in kinds
            )
            or None
        )

    def __str__(self) -> str:
        counts = [f"{self.kinds.count(kind)} {kind}" for kind in dict.fromkeys(self.kinds)]
        experts = (
            [f"{self.experts.per_token} of {self.experts.count} experts"] if self.experts else []
        )
        chosen = [f"{self.selected_positions} chosen positions"] if self.selected_positions else []
        return ", ".join(
            [
                *counts,
                *experts,
                *chosen,
                f"{self.positions} positions",
                *(["images"] if self.images else []),
            ]
        )


def describe_layers(model: Any) -> ModelLayers:
    """Return the description of a transformers model (PEFT-wrapped or not, with or without
    weights).
    """
    inner = unwrap_model(model)
    config = inner.config
    blocks = find_layer_list(inner)
    return ModelLayers(
        kinds=_find_kinds(inner, blocks[1] if blocks else None),
        receptive_fields=find_receptive_fields(inner),
        unknown_kinds=find_unknown_kinds(inner),
        takes_positions="position_ids" in inspect.signature(inner.forward).parameters,
        positions=_find_position_encoding(inner),
        experts=_find_experts(inner),
        images=any(
            getattr(config, name, None) is not None
            for name in ("vision_config", "image_token_id", "vq_config")
        ),
        selected_positions=get_config_number(inner, "index_topk", "indexer_budget"),
    )


def find_layer_list(model: Any) -> tuple[str, nn.ModuleList] | None:
    """Return the name and the list of the decoder's layers.

    Returns None if they are not in a single list, or if the list is ambiguous.
    """
    config = get_text_config(model)
    sizes = (
        getattr(config, name, None)
        for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    )
    count = next((size for size in sizes if isinstance(size, int)), None)
    candidates = [
        (name, m)
        for name, m in unwrap_model(model).named_modules()
        if isinstance(m, nn.ModuleList)
        and len(m) == count
        and not any(part in name for part in ("vision", "visual", "audio", "encoder"))
    ]
    outermost = [
        candidate
        for candidate in candidates
        if not any(candidate[0].startswith(f"{other[0]}.") for other in candidates)
    ]
    return outermost[0] if len(outermost) == 1 else None


@contextlib.contextmanager
def truncated_layers(model: Any) -> Iterator[None]:
    """Truncate the model to its first layers inside the context.

    It keeps as many layers as contain every signature, and at least two. This is for a trial of the
    layers' code: a layer with the signature of an earlier layer runs the same code.
    """
    layers = find_layer_list(model)
    truncate_layers_(model)
    try:
        yield
    finally:
        if layers is not None:
            _replace_layers(model, layers[0], layers[1])


@contextlib.contextmanager
def replace_forward(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the inner forward of `module`; its hooks stay."""
    original = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if original is None:
            del module.forward
        else:
            module.forward = original


def keep_first_layers_(model: Any, layers: tuple[str, nn.ModuleList], depth: int) -> None:
    """Keep only the first `depth` of `layers`, in place.

    `layers` is the result of `find_layer_list` before any truncation. The full depth restores all
    layers.
    """
    _replace_layers(model, layers[0], nn.ModuleList(layers[1][i] for i in range(depth)))


def layers_share_tensors(layers: nn.ModuleList) -> bool:
    """Return whether several of the layers share a tensor."""
    seen = [id(parameter) for layer in layers for parameter in layer.parameters()]
    return len(set(seen)) < len(seen)


def find_layer_period(model: Any) -> tuple[int, int, int] | None:
    """Return (number of layers, period of their signatures, number of layers before the periodic
    part).

    Returns None if the layers are not in a single list. Layers with equal signatures are (n, 1, 0).
    Repeated groups of five layers with a window and a layer with full attention are (n, 6, 0).
    """
    layers = find_layer_list(model)
    if layers is None:
        return None
    signatures = [_layer_signature(layer) for layer in layers[1]]
    count = len(signatures)

    def prefix_length(period: int) -> int:
        return next(
            (
                i + 1
                for i in reversed(range(count - period))
                if signatures[i] != signatures[i + period]
            ),
            0,
        )

    period = min(range(1, count + 1), key=lambda period: (period + prefix_length(period), period))
    return count, period, prefix_length(period)


def truncate_layers_(model: Any) -> int | None:
    """Truncate the model to its first layers in place, as `truncated_layers`.

    Returns the number of remaining layers, or None if the layers are not in a single list.
    """
    layers = find_layer_list(model)
    if layers is None:
        return None
    signatures = [_layer_signature(layer) for layer in layers[1]]
    depth = min(max([2, *(signatures.index(make) + 1 for make in signatures)]), len(signatures))
    keep_first_layers_(model, layers, depth)
    return depth


def _replace_layers(model: Any, name: str, layers: nn.ModuleList) -> None:
    """Replace the layer list of that name."""
    place, _, last = name.rpartition(".")
    unwrap_model(model).get_submodule(place)._modules[last] = layers


_INDEX_ATTRIBUTES = {"layer_idx", "layer_id", "layer_number", "idx", "layer_index"}


def _layer_signature(layer: nn.Module) -> tuple:
    """Return the signature of a layer: classes, settings, shapes, and patched attributes.

    Layers with equal signatures run the same code on tensors of the same shapes.
    """
    parts: list[Any] = []
    for name, module in layer.named_modules():
        attributes = sorted(
            (key, str(value) if isinstance(value, bool | int | float | str | None) else "<object>")
            for key, value in vars(module).items()
            if key not in _INDEX_ATTRIBUTES and not key.startswith("_")
        )
        hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
        shapes = [
            (key, tuple(p.shape), p.requires_grad)
            for key, p in module.named_parameters(recurse=False)
        ]
        buffers = [(key, tuple(b.shape)) for key, b in module.named_buffers(recurse=False)]
        parts.append((name, type(module), tuple(attributes), hooks, tuple(shapes), tuple(buffers)))
    return tuple(parts)


def _find_kinds(model: Any, layers: nn.ModuleList | None) -> tuple[str, ...]:
    """Return the kind of each layer, from the config and the modules."""
    config = get_text_config(model)
    declared = (
        getattr(config, "layer_types", None)
        or getattr(config, "layers_block_type", None)
        or getattr(config, "attention_layers", None)
    )
    data = config.to_dict()
    count = (
        len(declared)
        if declared
        else len(layers)
        if layers is not None
        else data.get("num_hidden_layers") or data.get("n_layer") or 0
    )
    kinds = []
    for i in range(count):
        modules = (
            [type(m).__name__.lower() for m in layers[i].modules()]
            if layers is not None and i < len(layers)
            else []
        )
        parameter_names = (
            {name.rpartition(".")[2] for name, _ in layers[i].named_parameters()}
            if layers is not None and modules
            else set()
        )
        has_state_space = (
            any(part in name for name in modules for part in _STATE_SPACE_CLASSES)
            or {"A_log", "D"} <= parameter_names
        )
        kind = (
            _KINDS.get(declared[i], "other")
            if declared
            else _undeclared_kind(data, modules, has_state_space)
        )
        if has_state_space and "state space" not in kind:
            kind = (
                "state space"
                if kind in ("linear", "other", "convolution")
                else f"state space+{kind}"
            )
        elif not has_state_space and kind.startswith("state space+"):
            kind = kind.replace("state space", "linear")
        kinds.append(kind)
    return tuple(kinds)


def _undeclared_kind(config: Mapping[str, Any], modules: list[str], has_state_space: bool) -> str:
    """Return the kind of a layer that the config does not declare."""
    attends = any(
        ("attention" in name or "attn" in name) and "rwkv" not in name for name in modules
    )
    if has_state_space:
        return "state space" if not attends else "state space+full"
    if config.get("attention_chunk_size"):
        return "chunked"
    slides = config.get("sliding_window") and config.get("use_sliding_window", True)
    return "sliding" if slides else "full" if attends else "other"


def _find_position_encoding(model: Any) -> str:
    """Return the kind of position encoding: "rotary", "learned", "alibi" or "none"."""
    data = get_text_config(model).to_dict()
    if (
        data.get("alibi")
        or data.get("position_embedding_type") == "alibi"
        or model.config.model_type in ("bloom", "mpt")
    ):
        return "alibi"
    names = [
        (name.rpartition(".")[2], type(module).__name__.lower())
        for name, module in model.named_modules()
    ]
    if (
        any("rotary" in kind for _, kind in names)
        or data.get("rope_parameters")
        or data.get("rotary_dim")
    ):
        return "rotary"
    learned = ("wpe", "embed_positions", "position_embeddings", "position_embedding")
    return "learned" if any(name in learned for name, _ in names) else "none"


def _find_experts(model: Any) -> ExpertLayout | None:
    """Return the description of the experts, or None.

    A block with an `experts` module routes tokens. The config holds the number of experts per
    token.
    """
    data = get_text_config(model).to_dict()
    data |= {k: v for k, v in (data.get("ffn_config") or {}).items() if k.startswith("moe")}

    def find_number(least: int, *names: str) -> int:
        numbers = (data.get(name) for name in names)
        return next((n for n in numbers if isinstance(n, int) and n >= least), 0)

    per_token = find_number(
        1,
        "num_experts_per_tok",
        "num_experts_per_token",
        "moe_topk",
        "moe_top_k",
        "top_k_experts",
        "moe_k",
        "top_k",
    )
    count = find_number(
        2,
        "num_local_experts",
        "num_experts",
        "n_routed_experts",
        "moe_num_experts",
        "num_routed_experts",
    )
    blocks = [
        (name, module.experts)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "experts", None), nn.Module)
    ]
    if not blocks or not count or not per_token:
        return None
    numbers = sum(
        p.numel()
        for _, experts in blocks
        for key, p in experts.named_parameters()
        if "lora_" not in key
    )
    return ExpertLayout(count, per_token, tuple(name for name, _ in blocks), numbers)
