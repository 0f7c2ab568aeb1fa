"""Load a model with weights that stay in their files."""

from __future__ import annotations

from pathlib import Path

import torch

from rl.errors import check_hub_access, warn_on_rank_zero
from rl.models.adapter_folders import is_adapter
from rl.models.check_weights import convert_read_errors
from rl.models.lazy_safetensors import (
    INDEX,
    SINGLE,
    CannotReadLazily,
    SafetensorsWeights,
    replace_meta_parameters_,
)
from rl.models.model_loading import (
    LoadedModel,
    _attention_kwargs,
    _check_vocabulary,
    _disable_randomness,
    check_model_folder,
    collect_eos_token_ids,
)
from rl.models.tokenizer_loading import load_tokenizer
from rl.models.vision_models import attach_image_processor, select_auto_class


def load_model_lazily(base_model: str, *, tokenizer: str | None = None) -> LoadedModel | None:
    """Load a model as `load_model` does, but leave its weights in their files.

    `LoadedModel.lazy_weights` reads them tensor by tensor. Returns None if that is not possible:
    see `supports_lazy_loading`; files that need more than renaming; a hub name that cannot be
    loaded.
    """
    if not supports_lazy_loading(base_model):
        return None
    folder = _locate_folder(base_model)
    if folder is None:
        return None
    from accelerate import init_empty_weights
    from transformers import AutoConfig, GenerationConfig

    check_model_folder(folder)
    config = AutoConfig.from_pretrained(str(folder))
    with init_empty_weights(include_buffers=False):
        model = select_auto_class(config).from_config(
            config, dtype=torch.float32, **_attention_kwargs()
        )
    # the context untied parameters: each assignment in it made a new parameter
    model.tie_weights()
    replace_meta_parameters_(model)
    try:
        with convert_read_errors(base_model):
            stored = SafetensorsWeights(folder, model)
            stored.fill_buffers()
    except CannotReadLazily as reason:
        warn_on_rank_zero(f"each process reads all of {base_model}: {reason}")
        return None
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(folder))
    source = str(folder) if Path(base_model).expanduser().is_dir() else base_model
    loaded_tokenizer = load_tokenizer(tokenizer or source, required=tokenizer is not None)
    _check_vocabulary(model, loaded_tokenizer, base_model)
    attach_image_processor(model, loaded_tokenizer, source)
    return LoadedModel(
        _disable_randomness(model),
        loaded_tokenizer,
        base_model,
        collect_eos_token_ids(model, loaded_tokenizer),
        lazy_weights=stored,
    )


def supports_lazy_loading(base_model: str) -> bool:
    """Return whether a model may be read tensor by tensor.

    False for tiny models, adapters, and a folder with files other than safetensors.
    """
    folder = Path(base_model).expanduser()
    if base_model.startswith("tiny:") or is_adapter(folder):
        return False
    return not folder.is_dir() or any(folder.glob("*.safetensors")) or not any(folder.glob("*.bin"))


def _locate_folder(base_model: str) -> Path | None:
    """Return the folder of a model's files, downloading a hub name to the hub's cache; None if
    unavailable.
    """
    folder = Path(base_model).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        check_hub_access(base_model, "model")
        snapshot = Path(
            snapshot_download(
                base_model,
                allow_patterns=[
                    "config.json",
                    "generation_config.json",
                    INDEX,
                    "model*.safetensors",
                ],
            )
        )
    except (OSError, ValueError):  # load_model reports the error
        return None
    return (
        snapshot
        if (snapshot / "config.json").is_file()
        and ((snapshot / INDEX).is_file() or (snapshot / SINGLE).is_file())
        else None
    )
