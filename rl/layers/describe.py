"""What a model's layers are, read once from the model as it was built: learner, sampler, memory
plan and table ask here.

Kinds of layers: `full`, `sliding` and `chunked` attention, which keep keys and values; `linear`
attention, `state space` and `convolution`, which keep a state of one size a sequence; several in
one layer with "+" between; `other` where neither config nor modules say, `none` for a layer of
experts or an MLP alone. What follows from them is tried out all the same (`rl.learner.probe`,
`rl.sampler.probe`).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from rl.layers.reach import config_number, inner_model, local_reach, text_config, unnamed_kinds

STATES = ("linear", "state space", "convolution")
KEEPS_KEYS = ("full", "sliding", "chunked", "other")
_KINDS = {"full_attention": "full", "attention": "full", "sliding_attention": "sliding", "chunked_attention": "chunked",
          "linear_attention": "linear", "conv": "convolution", "mamba": "state space", "recurrent": "state space",
          "hybrid": "state space+full", "hybrid_sliding": "state space+sliding", "moe": "none", "mlp": "none", "global": "full",
          "local": "sliding"}  # fmt: skip
_WORDS = {"full": "full attention", "sliding": "sliding-window attention", "chunked": "chunked attention", "linear": "linear attention",
          "convolution": "convolutions", "state space": "state-space layers", "other": "layers of an unknown kind"}  # fmt: skip
# in the names of the classes of their modules
_STATE_SPACE = ("mamba", "rwkv", "xlstm", "mlstm", "rglru", "recurrentblock")


@dataclass(frozen=True)
class Experts:
    """`blocks`: the modules that route tokens to their experts, by name, in the order in which they
    run.
    """

    count: int
    per_token: int
    blocks: tuple[str, ...]
    parameters: int  # numbers in all experts together, without adapters


@dataclass(frozen=True)
class Layers:
    """`reach`: see `rl.layers.reach.local_reach`. `strange`: kinds of layers that reach no one
    knows how far, None where there are none.
    """

    kinds: tuple[str, ...]
    reach: Mapping[str, int]
    strange: str | None
    takes_positions: bool
    positions: str  # "rotary", "learned", "alibi" or "none"
    experts: Experts | None
    images: bool
    # positions that a layer reads, which it chooses by scores of its own (DeepSeek's sparse
    # attention)
    chosen: int | None = None

    @cached_property
    def states(self) -> bool:
        """Whether a layer carries a state from token to token."""
        return any(part in STATES for kind in self.kinds for part in kind.split("+"))

    @cached_property
    def keeping_keys(self) -> int:
        """How many layers keep keys and values of every token."""
        return sum(any(part in KEEPS_KEYS for part in kind.split("+")) for kind in self.kinds)

    @property
    def others(self) -> str | None:
        """The kinds that are not plain full attention, in words; None where all are."""
        kinds = [kind for kind in dict.fromkeys(self.kinds) if kind not in ("full", "none")]
        return (
            ", ".join(
                " + ".join(_WORDS.get(part, part) for part in kind.split("+")) for kind in kinds
            )
            or None
        )

    def __str__(self) -> str:
        counts = [f"{self.kinds.count(kind)} {kind}" for kind in dict.fromkeys(self.kinds)]
        experts = (
            [f"{self.experts.per_token} of {self.experts.count} experts"] if self.experts else []
        )
        chosen = [f"{self.chosen} chosen positions"] if self.chosen else []
        return ", ".join(
            [
                *counts,
                *experts,
                *chosen,
                f"{self.positions} positions",
                *(["images"] if self.images else []),
            ]
        )


def describe(model: Any) -> Layers:
    """Of a transformers model, PEFT-wrapped or not, with or without weights."""
    inner = inner_model(model)
    config = inner.config
    blocks = layer_list(inner)
    return Layers(
        kinds=_kinds(inner, blocks[1] if blocks else None),
        reach=local_reach(inner),
        strange=unnamed_kinds(inner),
        takes_positions="position_ids" in inspect.signature(inner.forward).parameters,
        positions=_positions(inner),
        experts=_experts(inner),
        images=any(
            getattr(config, name, None) is not None
            for name in ("vision_config", "image_token_id", "vq_config")
        ),
        chosen=config_number(inner, "index_topk", "indexer_budget"),
    )


def layer_list(model: Any) -> tuple[str, nn.ModuleList] | None:
    """The decoder's layers and their name; None where they are not one list (or where it is not
    known which).
    """
    config = text_config(model)
    sizes = (
        getattr(config, name, None)
        for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    )
    count = next((size for size in sizes if isinstance(size, int)), None)
    found = [
        (name, m)
        for name, m in inner_model(model).named_modules()
        if isinstance(m, nn.ModuleList) and len(m) == count
    ]
    found = [
        (name, m)
        for name, m in found
        if not any(part in name for part in ("vision", "visual", "audio", "encoder"))
    ]
    outermost = [
        one for one in found if not any(one[0].startswith(f"{other[0]}.") for other in found)
    ]
    return outermost[0] if len(outermost) == 1 else None


@contextlib.contextmanager
def shallow(model: Any) -> Iterator[None]:
    """The model with its first layers alone: as many as hold one of every make, and two at least.

    For a trial of what the code of its layers does: a layer that is made like one before it runs
    the same code.
    """
    found = layer_list(model)
    cut_(model)
    try:
        yield
    finally:
        if found is not None:
            _set(model, found[0], found[1])


def first_layers_(model: Any, layers: tuple[str, nn.ModuleList], depth: int) -> None:
    """Leaves the first `depth` of `layers` (`layer_list`, found before any were taken away) alone,
    in place; all are put back so too.
    """
    _set(model, layers[0], nn.ModuleList(layers[1][i] for i in range(depth)))


def share_weights(layers: nn.ModuleList) -> bool:
    """Whether a tensor stands in several of the layers."""
    seen = [id(parameter) for layer in layers for parameter in layer.parameters()]
    return len(set(seen)) < len(seen)


def rhythm(model: Any) -> tuple[int, int, int] | None:
    """(how many layers, after how many their makes repeat, how many stand before that begins). None
    where they are not one list.

    Layers of one make are (n, 1, 0); one with attention to all after five with a window, six in
    turn, are (n, 6, 0).
    """
    found = layer_list(model)
    if found is None:
        return None
    makes = [_make(layer) for layer in found[1]]
    count = len(makes)

    def begins(period: int) -> int:
        return next(
            (i + 1 for i in reversed(range(count - period)) if makes[i] != makes[i + period]), 0
        )

    period = min(range(1, count + 1), key=lambda period: (period + begins(period), period))
    return count, period, begins(period)


def cut_(model: Any) -> int | None:
    """Leaves the first layers alone, in place; see `shallow`. How many are left, None where they
    are not one list.
    """
    found = layer_list(model)
    if found is None:
        return None
    makes = [_make(layer) for layer in found[1]]
    depth = min(max([2, *(makes.index(make) + 1 for make in makes)]), len(makes))
    _set(model, found[0], nn.ModuleList(found[1][i] for i in range(depth)))
    return depth


def _set(model: Any, name: str, layers: nn.ModuleList) -> None:
    place, _, last = name.rpartition(".")
    inner_model(model).get_submodule(place)._modules[last] = layers


_OF_ONE_LAYER = {"layer_idx", "layer_id", "layer_number", "idx", "layer_index"}


def _make(layer: nn.Module) -> tuple:
    """Equal for layers that run the same code on tensors of the same shapes: classes, settings,
    shapes, and what was patched.
    """
    made: list[Any] = []
    for name, module in layer.named_modules():
        own = {
            key: value
            for key, value in vars(module).items()
            if key not in _OF_ONE_LAYER and not key.startswith("_")
        }
        plain = sorted(
            (key, str(value))
            for key, value in own.items()
            if isinstance(value, bool | int | float | str | None)
        )
        others = sorted(
            key
            for key, value in own.items()
            if not isinstance(value, bool | int | float | str | None)
        )
        hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
        shapes = [
            (key, tuple(p.shape), p.requires_grad)
            for key, p in module.named_parameters(recurse=False)
        ]
        kept = [(key, tuple(b.shape)) for key, b in module.named_buffers(recurse=False)]
        made.append(
            (name, type(module), tuple(plain), tuple(others), hooks, tuple(shapes), tuple(kept))
        )
    return tuple(made)


def _kinds(model: Any, layers: nn.ModuleList | None) -> tuple[str, ...]:
    config = text_config(model)
    said = (
        getattr(config, "layer_types", None)
        or getattr(config, "layers_block_type", None)
        or getattr(config, "attention_layers", None)
    )
    data = config.to_dict()
    count = (
        len(said)
        if said
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
        own = (
            {name.rpartition(".")[2] for name, _ in layers[i].named_parameters()}
            if layers is not None and modules
            else set()
        )
        spaces = (
            any(part in name for name in modules for part in _STATE_SPACE) or {"A_log", "D"} <= own
        )
        kind = _KINDS.get(said[i], "other") if said else _unsaid(data, modules, spaces)
        if spaces and "state space" not in kind:
            kind = (
                "state space"
                if kind in ("linear", "other", "convolution")
                else f"state space+{kind}"
            )
        elif not spaces and kind.startswith("state space+"):
            kind = kind.replace("state space", "linear")
        kinds.append(kind)
    return tuple(kinds)


def _unsaid(config: Mapping[str, Any], modules: list[str], spaces: bool) -> str:
    """The kind of a layer of which the config says nothing."""
    attends = any(
        ("attention" in name or "attn" in name) and "rwkv" not in name for name in modules
    )
    if spaces:
        return "state space" if not attends else "state space+full"
    if config.get("attention_chunk_size"):
        return "chunked"
    slides = config.get("sliding_window") and config.get("use_sliding_window", True)
    return "sliding" if slides else "full" if attends else "other"


def _positions(model: Any) -> str:
    data = text_config(model).to_dict()
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


def _experts(model: Any) -> Experts | None:
    """Blocks with an `experts` of several, and how many of them a token goes to."""
    data = text_config(model).to_dict()
    data |= {k: v for k, v in (data.get("ffn_config") or {}).items() if k.startswith("moe")}
    names = (
        "num_experts_per_tok",
        "num_experts_per_token",
        "moe_topk",
        "moe_top_k",
        "top_k_experts",
        "moe_k",
        "top_k",
    )
    per_token = next(
        (n for n in (data.get(name) for name in names) if isinstance(n, int) and n > 0), 0
    )
    sizes = (
        "num_local_experts",
        "num_experts",
        "n_routed_experts",
        "moe_num_experts",
        "num_routed_experts",
    )
    count = next((n for n in (data.get(name) for name in sizes) if isinstance(n, int) and n > 1), 0)
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
    return Experts(count, per_token, tuple(name for name, _ in blocks), numbers)
