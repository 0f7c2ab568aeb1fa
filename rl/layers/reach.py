"""How far a model's layers look, as its config tells: windows and chunks. `rl.layers.describe`
tells it to others.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

# Numbers of tokens that a layer looks back, or that it takes together, whatever the architecture
# calls them.
_LOCAL = re.compile(
    r"(?:^|_)(?:window|chunk_size|chunk_length|block_size|index_topk|local_radius|compress)(?:_|$|s$|ion|or)"
)
_NOT_LOCAL = re.compile(r"feed_forward|layers|conv|vision|audio|image|patch|^use_")
PLAIN = "full_attention"  # the kind of layer that sees everything before it
# Kinds that mix neighbours or carry a state, which shows over a few tokens, and kinds without
# attention.
_NEAR = {"linear_attention", "conv", "hybrid", "moe", "dense", "sparse"}
# A word in the name of the number that says how far a kind of layer looks.
_SAID_BY = {"sliding_attention": "window", "hybrid_sliding": "window", "chunked_attention": "chunk"}
SHRUNK = 4


def inner_model(model: Any) -> Any:
    """The transformers model inside a PEFT model (FSDP2 makes a class of its own of that), or the
    model itself.
    """
    return (
        model.get_base_model()
        if any(kind.__module__.startswith("peft.") for kind in type(model).__mro__)
        else model
    )


def text_config(model: Any) -> Any:
    return inner_model(model).config.get_text_config()


def config_number(model: Any, *names: str) -> int | None:
    """A positive number of the config, by the first of its names that it has (an architecture's
    `attribute_map` included).

    Where each layer has its own (Gemma 4's heads), the largest.
    """
    config = text_config(model)
    return next(
        (value for name in names if isinstance(value := _number(config, name), int) and value > 0),
        None,
    )


def _number(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers gives no number for what differs between layers
        found = [
            getattr(config.per_layer_config[i], name, None) for i in range(config.num_hidden_layers)
        ]
        return max((value for value in found if isinstance(value, int)), default=None)


def width(model: Any) -> int:
    """Of the model's hidden states; of its embeddings where the config has no name for it."""
    found = config_number(model, "hidden_size", "n_embd", "d_model")
    return (
        found
        if found is not None
        else int(inner_model(model).get_input_embeddings().weight.shape[-1])
    )


def local_reach(model: Any) -> dict[str, int]:
    """The config's numbers by name: the farthest that a window, chunk or block reaches; empty for
    plain full attention.
    """
    config = text_config(model).to_dict()
    if set(config.get("layer_types") or ["unsaid"]) == {PLAIN}:
        return {}
    found = {}
    for name, value in config.items():
        if not _LOCAL.search(name) or _NOT_LOCAL.search(name):
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
            found[name] = max(whole)
    return found


def unnamed_kinds(model: Any) -> str | None:
    """Kinds of layers that reach no one knows how far: they are not plain, and no number of the
    config says.
    """
    kinds = (
        {str(kind) for kind in text_config(model).to_dict().get("layer_types") or []}
        - {PLAIN}
        - _NEAR
    )
    said = " ".join(local_reach(model))
    return ", ".join(sorted(kind for kind in kinds if _SAID_BY.get(kind, kind) not in said)) or None


@contextlib.contextmanager
def shrunk(model: Any, name: str) -> Iterator[None]:
    """The config's number `name`, and the copies of it that modules keep, as SHRUNK inside."""
    config = text_config(model)
    value = getattr(config, name)
    owners = [
        vars(m)
        for m in model.modules()
        if vars(m).get(name) == value and isinstance(vars(m).get(name), int)
    ]
    setattr(config, name, SHRUNK)
    for owner in owners:
        owner[name] = SHRUNK
    try:
        yield
    finally:
        setattr(config, name, value)
        for owner in owners:
            owner[name] = value
