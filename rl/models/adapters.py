"""A LoRA adapter as a folder: what it stands on, and how it is merged into that.

Merging is done in fp32 (in bf16 a young adapter would be rounded away). A head that is tied to the
embedding and has an adapter of its own is untied first: the adapter changed what the head says, not
what the embedding reads, and one matrix cannot be both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rl.errors import UserError

ADAPTER = "adapter_config.json"


@dataclass(frozen=True)
class Base:
    """What an adapter was trained on: a base model, its tokenizer where another one was named, the
    seed of a tiny model's weights.
    """

    name: str
    tokenizer: str | None = None
    seed: int = 0


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder holds an adapter, and so no weights of a model."""
    return (Path(folder).expanduser() / ADAPTER).is_file()


def adapter_base(folder: Path) -> str:
    """The base model that a PEFT folder names. UserError where it names none."""
    base = read_adapter(folder).get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        raise UserError(f"{folder}/{ADAPTER} names no base model: pass base_model")
    return base


def read_adapter(folder: Path) -> dict[str, Any]:
    """adapter_config.json. UserError where it is none."""
    config = _json_of(folder / ADAPTER, "give an adapter that is whole")
    return config if isinstance(config, dict) else {}


def made_from(folder: Path) -> Base:
    """What the adapter in `folder` stands on: by the state.json of the checkpoint that it lies in,
    else by its own config.
    """
    folder = folder.expanduser()
    checkpoint = folder.parent if folder.name == "model" else folder
    if not (checkpoint / "state.json").is_file():
        return Base(adapter_base(folder))
    state = _json_of(checkpoint / "state.json", "give a checkpoint that is whole")
    spec = state.get("spec") if isinstance(state, dict) else None
    if not isinstance(spec, dict) or not isinstance(spec.get("base_model"), str):
        return Base(adapter_base(folder))
    return Base(found_base(spec, checkpoint), spec.get("tokenizer"), spec.get("seed") or 0)


def found_base(spec: Mapping[str, Any], checkpoint: Path) -> str:
    """The base that a checkpoint's adapter stands on, as it is to be found now.

    A base of the same run (an earlier stage's end) is looked for beside the checkpoint first,
    wherever the path noted leads: a run that was moved or copied is whole by itself, and a path in
    its files is not followed out of it. One that was noted as `elsewhere` is never: another run may
    have a checkpoint of the same name.
    """
    base = Path(spec["base_model"])
    if base.name == "model" and len(base.parts) > 1 and not spec.get("elsewhere"):
        for parent in list(checkpoint.parents)[:3]:  # a critic's checkpoint lies in the policy's
            # best weights lie in a folder beside
            for moved in (parent.joinpath(*base.parts[-2:]), parent.joinpath(*base.parts[-3:])):
                if moved.is_dir() and moved != checkpoint / "model":
                    return str(moved)
    return spec["base_model"]


def root_of(name: str) -> tuple[Base, set[str]]:
    """(what weights come down to through adapters that stand on adapters, the names of the modules
    that these adapt).
    """
    root, adapted = Base(name), set[str]()
    for _ in range(_DEEPEST):
        if not is_adapter(root.name):
            return root, adapted
        folder = Path(root.name).expanduser()
        modules = read_adapter(folder).get("target_modules") or ()
        adapted |= {modules} if isinstance(modules, str) else set(modules)
        root = made_from(folder)
    raise UserError(
        f"{name}: its adapter stands on more than {_DEEPEST} others, or on itself; give weights that are merged"
    )


_DEEPEST = 32


def merge(model: Any) -> Any:
    """The adapter of a PEFT model merged into its base, which it changes: a transformers model. On
    the CPU, give one in fp32.

    Raises UserError where layers that share a matrix (Zamba's blocks) have adapters of their own:
    no one matrix is right for all.
    """
    base = model.get_base_model()
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    layer = head.get_base_layer() if hasattr(head, "get_base_layer") else head
    if layer is not head and layer.weight is embedding.weight:
        # BERT's kin: the bias as well
        for name, shared in list(layer.named_parameters(recurse=False)):
            setattr(layer, name, torch.nn.Parameter(shared.detach().clone()))
        untie(base)
    _refuse_shared(model)
    return model.merge_and_unload()


def _refuse_shared(model: Any) -> None:
    adapted = {
        f"{name}.base_layer.weight"
        for name, module in model.named_modules()
        if hasattr(module, "get_base_layer")
    }
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if other != name and adapted & {name, other}:
            one, two = (
                text.removeprefix("base_model.model.").replace(".base_layer", "")
                for text in (other, name)
            )
            raise UserError(
                f"this adapter cannot be merged: {one} and {two} are one matrix, and its layers have an adapter each, so that no matrix "
                "is right for all of them. Go on with the adapter, or export without --merge"
            )


def untie(model: Any) -> None:
    """Says in the config that head and embedding are two matrices."""
    model.config.get_text_config().tie_word_embeddings = False
    model.config.tie_word_embeddings = False


def _json_of(path: Path, remedy: str) -> Any:
    try:
        return json.loads(path.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error}): {remedy}") from error
