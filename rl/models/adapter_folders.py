"""Read a LoRA adapter's folder: find its base model, and merge the adapter into the base.

Merging is done in fp32 (in bf16 the small updates of a barely trained adapter would be rounded
away). A head that is tied to the embedding and has an adapter is untied first: the adapter changed
the output of the head but not the embedding, and a single matrix cannot be both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rl.errors import UserError

ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class AdapterBase:
    """Describe what an adapter was trained on.

    A base model, its tokenizer if another one was set, and the seed of a tiny model's weights.
    """

    name: str
    tokenizer: str | None = None
    seed: int = 0


def is_adapter(folder: str | Path) -> bool:
    """Return whether a folder holds an adapter instead of a whole model."""
    return (Path(folder).expanduser() / ADAPTER_CONFIG).is_file()


def read_base_name(folder: Path) -> str:
    """Return the base model that a PEFT folder names. Raises UserError if it names none."""
    base = read_adapter_config(folder).get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        raise UserError(f"{folder}/{ADAPTER_CONFIG} names no base model: pass base_model")
    return base


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return the content of adapter_config.json. Raises UserError if it is not JSON."""
    config = _read_json(folder / ADAPTER_CONFIG, "pass a complete adapter folder")
    return config if isinstance(config, dict) else {}


def find_adapter_base(folder: Path) -> AdapterBase:
    """Return the base of the adapter in `folder`.

    It comes from the state.json of the adapter's checkpoint, else from the adapter's config. Raises
    UserError if either is not JSON or no base is named.
    """
    folder = folder.expanduser()
    checkpoint = folder.parent if folder.name == "model" else folder
    if not (checkpoint / "state.json").is_file():
        return AdapterBase(read_base_name(folder))
    state = _read_json(checkpoint / "state.json", "pass a complete checkpoint")
    spec = state.get("spec") if isinstance(state, dict) else None
    if not isinstance(spec, dict) or not isinstance(spec.get("base_model"), str):
        return AdapterBase(read_base_name(folder))
    return AdapterBase(locate_base(spec, checkpoint), spec.get("tokenizer"), spec.get("seed") or 0)


def locate_base(spec: Mapping[str, Any], checkpoint: Path) -> str:
    """Return the current location of the base of a checkpoint's adapter.

    A base of the same run (the end of an earlier stage) is first searched next to the checkpoint,
    whatever path was recorded: a run that was moved or copied is complete by itself, and a path in
    its files is not followed out of it. A base recorded as `elsewhere` is not searched: another run
    may have a checkpoint of the same name.
    """
    base = Path(spec["base_model"])
    if base.name == "model" and len(base.parts) > 1 and not spec.get("elsewhere"):
        for parent in list(checkpoint.parents)[:3]:  # a critic's checkpoint is inside the policy's
            # best weights are in a sibling folder
            for moved in (parent.joinpath(*base.parts[-2:]), parent.joinpath(*base.parts[-3:])):
                if moved.is_dir() and moved != checkpoint / "model":
                    return str(moved)
    return spec["base_model"]


def resolve_adapter_chain(name: str) -> tuple[AdapterBase, set[str]]:
    """Return the base model below a chain of adapters, and the names of the modules that they
    adapt.

    Raises UserError if the chain is longer than 32 or circular.
    """
    root, adapted = AdapterBase(name), set[str]()
    for _ in range(_MAX_CHAIN):
        if not is_adapter(root.name):
            return root, adapted
        folder = Path(root.name).expanduser()
        modules = read_adapter_config(folder).get("target_modules") or []
        adapted |= set(modules) if isinstance(modules, list) else {str(modules)}
        root = find_adapter_base(folder)
    raise UserError(
        f"{name}: its adapter is based on more than {_MAX_CHAIN} others, or on itself: pass "
        "merged weights"
    )


_MAX_CHAIN = 32


def merge_adapter(model: Any) -> Any:
    """Merge the adapter of a PEFT model into its base and return the transformers model.

    The base is changed in place. On the CPU, pass a model in fp32. Raises UserError if layers that
    share a matrix (Zamba's blocks) have separate adapters: no single matrix is right for all of
    them.
    """
    base = model.get_base_model()
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    layer = head.get_base_layer() if hasattr(head, "get_base_layer") else head
    if layer is not head and layer.weight is embedding.weight:
        # BERT and its relatives: the bias as well
        for name, shared in list(layer.named_parameters(recurse=False)):
            setattr(layer, name, torch.nn.Parameter(shared.detach().clone()))
        mark_head_untied(base)
    _check_no_shared_layers(model)
    return model.merge_and_unload()


def _check_no_shared_layers(model: Any) -> None:
    """Raise UserError if an adapted layer shares its matrix with another layer."""
    adapted = {
        f"{name}.base_layer.weight"
        for name, module in model.named_modules()
        if hasattr(module, "get_base_layer")
    }
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if other != name and adapted & {name, other}:
            first_name, second_name = (
                text.removeprefix("base_model.model.").replace(".base_layer", "")
                for text in (other, name)
            )
            raise UserError(
                f"this adapter cannot be merged: {first_name} and {second_name} are the same "
                "matrix, and its layers have separate adapters, so that no matrix "
                "is right for all of them. Continue with the adapter, or export without --merge"
            )


def mark_head_untied(model: Any) -> None:
    """Mark head and embedding as separate matrices in the model's config."""
    model.config.get_text_config().tie_word_embeddings = False
    model.config.tie_word_embeddings = False


def _read_json(path: Path, remedy: str) -> Any:
    """Parse a JSON file. Raises UserError, with `remedy`, if it is not JSON."""
    try:
        return json.loads(path.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error}): {remedy}") from error
