"""Read the receptive fields of a model's layers from its config: windows and chunks.

Other modules read them from `rl.layers.layer_kinds`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

# Config names, in any architecture, of the number of tokens that a layer looks back, or that it
# processes together.
_LOCAL_NAMES = re.compile(
    r"(?:^|_)(?:window|chunk_size|chunk_length|block_size|index_topk|local_radius|compress)(?:_|$|s$|ion|or)"
)
_NON_LOCAL_NAMES = re.compile(r"feed_forward|layers|conv|vision|audio|image|patch|^use_")
FULL_ATTENTION = "full_attention"  # the kind of layer that attends to all earlier positions
# Kinds that mix neighboring tokens or carry a state, which a few tokens reveal, and kinds without
# attention.
_LOCAL_KINDS = {"linear_attention", "conv", "hybrid", "moe", "dense", "sparse"}
# A word in the config name that holds the receptive field of a kind of layer.
_CONFIG_WORDS = {
    "sliding_attention": "window",
    "hybrid_sliding": "window",
    "chunked_attention": "chunk",
}
SHRUNK_WINDOW = 4


def unwrap_model(model: Any) -> Any:
    """Return the transformers model inside a PEFT model, or the model itself.

    FSDP2 replaces the class of a PEFT model by a subclass.
    """
    return (
        model.get_base_model()
        if any(kind.__module__.startswith("peft.") for kind in type(model).__mro__)
        else model
    )


def get_text_config(model: Any) -> Any:
    """Return the text config of a model."""
    return unwrap_model(model).config.get_text_config()


def get_config_number(model: Any, *names: str) -> int | None:
    """Return a positive number of the config, by the first of its names that is set.

    Names in the architecture's `attribute_map` count. If the number differs between layers (Gemma
    4's heads), returns the largest.
    """
    config = get_text_config(model)
    return next(
        (
            value
            for name in names
            if isinstance(value := _get_config_value(config, name), int) and value > 0
        ),
        None,
    )


def find_max_context(model: Any) -> int | None:
    """Return a model's longest sequence in tokens, None if it has no limit."""
    return get_config_number(
        model, "max_position_embeddings", "n_positions", "max_target_positions"
    )


def _get_config_value(config: Any, name: str) -> Any:
    """Return an attribute of the config; the largest if it differs between layers."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers raises if the number differs between layers
        values = [
            getattr(config.per_layer_config[i], name, None) for i in range(config.num_hidden_layers)
        ]
        return max((value for value in values if isinstance(value, int)), default=None)


def get_hidden_size(model: Any) -> int:
    """Return the width of the hidden states; of the embeddings if the config has no name for it."""
    size = get_config_number(model, "hidden_size", "n_embd", "d_model")
    return (
        size
        if size is not None
        else int(unwrap_model(model).get_input_embeddings().weight.shape[-1])
    )


def find_receptive_fields(model: Any) -> dict[str, int]:
    """Return the config's receptive fields by name: the largest window, chunk or block of each.

    Empty for plain full attention.
    """
    config = get_text_config(model).to_dict()
    if set(config.get("layer_types") or ["unsaid"]) == {FULL_ATTENTION}:
        return {}
    reach = {}
    for name, value in config.items():
        if not _LOCAL_NAMES.search(name) or _NON_LOCAL_NAMES.search(name):
            continue
        numbers = (
            value
            if isinstance(value, list | tuple)
            else list(value.values())
            if isinstance(value, dict)
            else [value]
        )
        whole = [n for n in numbers if isinstance(n, int) and not isinstance(n, bool)]
        if whole and max(whole) > 1:
            reach[name] = max(whole)
    return reach


def find_unknown_kinds(model: Any) -> str | None:
    """Return the kinds of layers with an unknown receptive field, or None.

    They are not plain full attention, and the config has no number for them.
    """
    kinds = (
        {str(kind) for kind in get_text_config(model).to_dict().get("layer_types") or []}
        - {FULL_ATTENTION}
        - _LOCAL_KINDS
    )
    config_names = " ".join(find_receptive_fields(model))
    return (
        ", ".join(
            sorted(kind for kind in kinds if _CONFIG_WORDS.get(kind, kind) not in config_names)
        )
        or None
    )


@contextlib.contextmanager
def shrink_window(model: Any, name: str) -> Iterator[None]:
    """Set the config's number `name`, and its copies in modules, to SHRUNK_WINDOW inside the
    context.
    """
    config = get_text_config(model)
    value = getattr(config, name)
    owners = [
        vars(m)
        for m in model.modules()
        if vars(m).get(name) == value and isinstance(vars(m).get(name), int)
    ]
    setattr(config, name, SHRUNK_WINDOW)
    for owner in owners:
        owner[name] = SHRUNK_WINDOW
    try:
        yield
    finally:
        setattr(config, name, value)
        for owner in owners:
            owner[name] = value
