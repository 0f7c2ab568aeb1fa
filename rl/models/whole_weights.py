"""Weights that are read must be the model's own, all of them: what a file lacks would be random,
what it has beside would be dropped.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rl.errors import UserError
from rl.models.stored import in_folder, shape_of

# Buffers that older versions of transformers wrote and that are computed now: they say nothing that
# the config does not.
_BUFFERS = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|rotary_emb\.(cos|sin)_cached|position_ids|masked_bias|attn\.bias)$"
)
_SHOWN = 4


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Around the reading of weights: what a library raises for a damaged or unfitting file becomes
    a UserError that names it.
    """
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise UserError(
            f"the weights of {name} cannot be read, a file of theirs is damaged or cut off: {error}"
        ) from error
    except (
        RuntimeError
    ) as error:  # transformers and PEFT: shapes that do not fit, and torch: a damaged .bin file
        raise UserError(f"the weights of {name} do not fit its config: {error}") from error


@contextmanager
def without_bars() -> Iterator[None]:
    """No bar for each model that is read (downloads keep theirs), and none of a library's words
    about its own future.
    """
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        if shown:
            logging.enable_progress_bar()


def load_whole(model_class: Any, source: str, name: str, **how: Any) -> Any:
    """`model_class.from_pretrained(source)`. UserError where a tensor is missing, unexpected or of
    another shape.

    Tied tensors, those that the model's class names as optional, and buffers that are computed
    count as there.
    """
    with readable(name), without_bars():
        model, found = model_class.from_pretrained(source, output_loading_info=True, **how)
    check_names(name, found["missing_keys"], found["unexpected_keys"])
    if how.get("device_map") != "meta":
        _keep_padding(model, Path(source))
    return model


def _keep_padding(model: Any, folder: Path) -> None:
    """The row of a padding token as the files have it: Youtu's class puts zeros there as it reads,
    which a tied head writes as well.
    """
    for name, module in model.named_modules():
        row = module.padding_idx if isinstance(module, nn.Embedding) else None
        if row is None or module.weight.is_meta or module.weight[row].any():
            continue
        stored = in_folder(folder, [f"{name}.weight"]) if folder.is_dir() else None
        if stored is not None:
            with torch.no_grad():
                module.weight[row] = stored[f"{name}.weight"][row].to(module.weight.dtype)


def check_whole_folder(folder: Path) -> None:
    """`load_whole` of a causal language model, but for the weights themselves: their names and
    shapes alone are read.
    """
    from rl.models.vision import class_of

    load_whole(class_of(str(folder)), str(folder), str(folder), device_map="meta")


def load_whole_adapter(model: Any, folder: Path) -> Any:
    """The PEFT adapter in `folder` on a transformers model. UserError where its file lacks or has
    other tensors than its config says.
    """
    from peft import PeftModel

    if not any(
        (folder / name).is_file() for name in ("adapter_model.safetensors", "adapter_model.bin")
    ):
        raise UserError(
            f"{folder} has an adapter_config.json but no adapter_model.safetensors: the adapter's weights are missing"
        )
    with readable(str(folder)), warnings.catch_warnings():
        # they are an error below
        warnings.filterwarnings("ignore", message="Found missing adapter keys")
        adapted = PeftModel.from_pretrained(model, str(folder))
        # the first call keeps to itself what was missing
        found = adapted.load_adapter(str(folder), "default")
    check_names(str(folder), found.missing_keys, found.unexpected_keys, "adapter")
    return adapted


def check_names(
    name: str, missing: Collection[str], unexpected: Collection[str], what: str = "model"
) -> None:
    """UserError naming tensors that a file of weights lacks, and those that it has beside the
    model's own.
    """
    lacking = sorted(key for key in missing if not _BUFFERS.search(key))
    beside = sorted(key for key in unexpected if not _BUFFERS.search(key))
    if not lacking and not beside:
        return
    said = []
    if lacking:
        said.append(f"it lacks {_listed(lacking)}, which would be random")
    if beside:
        said.append(f"it has {_listed(beside)}, which would be left out")
    raise UserError(
        f"{name} does not hold the weights of its {what}: {'; '.join(said)}. Give a folder that was saved whole, by the class of model "
        "that is trained here (a causal language model with its output head), or mend its config.json"
    )


def check_tensors(
    name: str, shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]
) -> None:
    """UserError unless a file's tensors have just these names and shapes."""
    check_names(name, shapes.keys() - tensors.keys(), tensors.keys() - shapes.keys())
    for key, shape in shapes.items():
        if (there := shape_of(tensors, key)) != tuple(shape):
            raise UserError(f"{key} of {name} has the shape {there}, the model's is {tuple(shape)}")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} tensor{'s' * (len(names) > 1)} ({', '.join(names[:_SHOWN])}{more})"


def weights_to_write(model: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the `weights` of a model that a file holds: of tensors that are one, only the one that
    reading ties the others to.

    Where its head and embedding were untied, nothing that they shared is tied any more: each name
    gets its numbers.
    """
    tied = set(getattr(model, "all_tied_weights_keys", None) or model._tied_weights_keys or [])
    if not tied or getattr(model.config.get_text_config(), "tie_word_embeddings", True):
        return _without_shared(weights, tied)
    written: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in weights.items():
        written[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return written


def _without_shared(weights: Mapping[str, Tensor], tied: Collection[str]) -> dict[str, Tensor]:
    """Return the weights without names of a tensor that is kept under another: one that is not
    `tied`, the first of these by name.

    `save_torch_state_dict` would leave them out too, and list them in the header, in an order that
    differs from file to file.
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
