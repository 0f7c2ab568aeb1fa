"""Check that a file of weights holds exactly the model's tensors.

Missing tensors would be random, and additional ones would be ignored.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rl.errors import UserError
from rl.models.lazy_safetensors import get_tensor_shape, open_lazy_tensors
from rl.sanitize import list_some

# Buffers that older versions of transformers wrote and that are now computed from the config.
_COMPUTED_BUFFERS = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|rotary_emb\.(cos|sin)_cached|position_ids|masked_bias|attn\.bias)$"
)
_MAX_LISTED = 4
_RANK_HINT = ". The adapters have different ranks: create the model with the rank of the saved one"


@contextmanager
def convert_read_errors(name: str) -> Iterator[None]:
    """Convert errors from reading damaged or unfitting files of weights into a UserError with their
    name.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (
        SafetensorError,
        json.JSONDecodeError,  # the index of the files
        KeyError,
        TypeError,
        AttributeError,
    ) as error:
        raise UserError(
            f"the weights of {name} cannot be read, since a file is damaged or truncated: "
            f"{type(error).__name__}: {error}"
        ) from error
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise
        # transformers and PEFT: shapes that do not fit, and torch: a damaged .bin file
        raise UserError(f"the weights of {name} do not fit its config: {error}") from error


@contextmanager
def hide_progress_bars() -> Iterator[None]:
    """Hide the progress bars of loading (not of downloads) and the FutureWarnings of libraries."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def load_checked_model(model_class: Any, source: str, name: str, **kwargs: Any) -> Any:
    """Load a model with `model_class.from_pretrained(source)`.

    Raises UserError if a tensor is missing, unexpected or of another shape. Tied tensors, those
    that the model's class names as optional, and computed buffers may be missing.
    """
    with convert_read_errors(name), hide_progress_bars():
        model, loading_info = model_class.from_pretrained(
            source, output_loading_info=True, **kwargs
        )
    check_tensor_names(name, loading_info["missing_keys"], loading_info["unexpected_keys"])
    if kwargs.get("device_map") != "meta":
        _restore_padding_row(model, Path(source))
    return model


def _restore_padding_row(model: Any, folder: Path) -> None:
    """Restore the padding token's row from the files, as Youtu's class zeros it at load.

    A tied head would otherwise write the zeros as well.
    """
    for name, module in model.named_modules():
        row = module.padding_idx if isinstance(module, nn.Embedding) else None
        if row is None or module.weight.is_meta or module.weight[row].any():
            continue
        stored = open_lazy_tensors(folder, [f"{name}.weight"]) if folder.is_dir() else None
        if stored is not None:
            with torch.no_grad():
                module.weight[row] = stored[f"{name}.weight"][row].to(module.weight.dtype)


def check_weight_names_and_shapes(folder: Path) -> None:
    """Check a causal LM's folder as `load_checked_model` does, reading only names and shapes."""
    from rl.models.vision_models import find_auto_class

    load_checked_model(find_auto_class(str(folder)), str(folder), str(folder), device_map="meta")


def load_checked_adapter(model: Any, folder: Path) -> Any:
    """Load the PEFT adapter in `folder` onto a transformers model.

    Raises UserError if the file's tensors differ from those that the config defines.
    """
    from peft import PeftModel

    if not any(
        (folder / name).is_file() for name in ("adapter_model.safetensors", "adapter_model.bin")
    ):
        raise UserError(
            f"{folder} has an adapter_config.json but no adapter_model.safetensors: the "
            "adapter's weights are missing"
        )
    with convert_read_errors(str(folder)), warnings.catch_warnings():
        # raised as an error below
        warnings.filterwarnings("ignore", message="Found missing adapter keys")
        try:
            adapted = PeftModel.from_pretrained(model, str(folder))
        # no such modules; an unknown type; values of wrong types
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"the adapter in {folder} does not fit the model "
                f"({type(error).__name__}: {error}): pass the base model that it was trained on "
                "or correct its adapter_config.json"
            ) from error
        # the first call does not report missing keys
        load_result = adapted.load_adapter(str(folder), "default")
    check_tensor_names(
        str(folder), load_result.missing_keys, load_result.unexpected_keys, "adapter"
    )
    return adapted


def check_tensor_names(
    name: str, missing: Collection[str], unexpected: Collection[str], label: str = "model"
) -> None:
    """Raise UserError naming the missing tensors of a file of weights, and the unexpected ones."""
    lacking = sorted(key for key in missing if not _COMPUTED_BUFFERS.search(key))
    extra = sorted(key for key in unexpected if not _COMPUTED_BUFFERS.search(key))
    if not lacking and not extra:
        return
    problems = []
    if lacking:
        problems.append(f"it lacks {_format_names(lacking)}, which would be random")
    if extra:
        problems.append(f"it has {_format_names(extra)}, which would be ignored")
    raise UserError(
        f"{name} does not hold the weights of its {label}: {'; '.join(problems)}. Pass a complete "
        "folder, saved by the model class that is trained here (a causal language model with its "
        "output head), or correct its config.json"
    )


def check_tensors(
    name: str, shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]
) -> None:
    """Raise UserError unless a file's tensors have exactly these names and shapes."""
    check_tensor_names(name, shapes.keys() - tensors.keys(), tensors.keys() - shapes.keys())
    for key, shape in shapes.items():
        if (actual := get_tensor_shape(tensors, key)) != tuple(shape):
            rank, expected_rank = _get_lora_rank(key, actual), _get_lora_rank(key, tuple(shape))
            hint = _RANK_HINT if rank != expected_rank else ""
            raise UserError(
                f"{key} of {name} has the shape {actual}, the model's is {tuple(shape)}{hint}"
            )


def _get_lora_rank(key: str, shape: tuple[int, ...]) -> int | None:
    """Return the rank of a LoRA matrix, A [rank, in] or B [out, rank]; None for other tensors."""
    part = re.search(r"\.lora_(?:embedding_)?([AB])(?=\.|$)", key)
    return shape["AB".index(part[1])] if part and len(shape) > 1 else None


def _format_names(names: list[str]) -> str:
    """Return the number of the names, and the first 4 of them."""
    return f"{len(names)} tensor{'s' * (len(names) > 1)} ({list_some(names, _MAX_LISTED)})"
