"""Write a model's weights as the files that are published for its architecture."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from rl.models.lazy_safetensors import INDEX

# the first number in a tensor's name, which is that of its layer
_LAYER = re.compile(r".*?\.\d+\.")


def write_weights(model: Any, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write the `weights` of a transformers model to safetensors files, with a single tensor of
    each tied group.

    Names and tensors are those of the folders that are published for the architecture, which other
    engines read: transformers joins the experts of a layer, for example, when it loads them.
    """
    from huggingface_hub import save_torch_state_dict
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, revert_weight_conversion

    weights = _select_weights(model, weights)
    # the rules that the files of this model needed at load: an older checkpoint of ours needs none
    vars(model).pop("_weight_conversions", None)
    rules = get_model_conversion_mapping(model, add_legacy=False)
    if not any(isinstance(rule, WeightConverter) for rule in rules):
        save_torch_state_dict(revert_weight_conversion(model, weights), str(folder))
        return
    # A file for each layer: the converted tensors are copies, and only one layer has them at a time
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights.items():
        match = _LAYER.match(name)
        layers.setdefault(match[0] if match else "", {})[name] = tensor
    size, file_of = 0, dict[str, str]()
    for number, layer in enumerate(layers.values(), 1):
        file = f"model-{number:05}-of-{len(layers):05}.safetensors"
        tensors = {
            name: tensor.contiguous()
            for name, tensor in revert_weight_conversion(model, layer).items()
        }
        save_file(tensors, str(folder / file), metadata={"format": "pt"})
        file_of |= dict.fromkeys(tensors, file)
        size += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": file_of}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _select_weights(model: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the `weights` to write to a file, with a single tensor of each tied group.

    It is the tensor that the others are tied to at load. If the model's head and embedding were
    untied, nothing shared is tied any more: each name gets a copy.
    """
    tied = set(getattr(model, "all_tied_weights_keys", None) or model._tied_weights_keys or [])
    if not tied or getattr(model.config.get_text_config(), "tie_word_embeddings", True):
        return _drop_shared_duplicates(weights, tied)
    written: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in weights.items():
        written[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return written


def _drop_shared_duplicates(
    weights: Mapping[str, Tensor], tied: Collection[str]
) -> dict[str, Tensor]:
    """Return the weights with a single name for each shared tensor: the first by name that is not
    `tied`.

    `save_torch_state_dict` would drop the other names too, and list them in the header, in an order
    that differs from file to file.
    """
    names: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in weights.items():
        place = (
            (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            if tensor.numel()
            else (name,)
        )
        names.setdefault(place, []).append(name)
    kept = {min(group, key=lambda name: (name in tied, name)) for group in names.values()}
    return {name: tensor for name, tensor in weights.items() if name in kept}
