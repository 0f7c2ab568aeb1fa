"""A model whose weights are still in their files."""

from __future__ import annotations

from pathlib import Path

import torch

from rl.errors import remark
from rl.models.adapters import is_adapter
from rl.models.load import (
    LoadedModel,
    _attention,
    _check_vocabulary,
    _prepared,
    check_model_folder,
    eos_token_ids,
)
from rl.models.stored import INDEX, SINGLE, StoredWeights, Unfit, hollow_
from rl.models.tokenizers import load_tokenizer
from rl.models.vision import give_eyes, model_class
from rl.models.whole_weights import readable


def load_unread(base_model: str, *, tokenizer: str | None = None) -> LoadedModel | None:
    """`load_model` but for the weights, which stay in their files (`stored`) until somebody reads
    them one by one.

    None for what cannot be read so: see `may_stay_unread`; files that need more than renaming; a
    hub name that cannot be had.
    """
    if not may_stay_unread(base_model):
        return None
    folder = _folder(base_model)
    if folder is None:
        return None
    from accelerate import init_empty_weights
    from transformers import AutoConfig, GenerationConfig

    check_model_folder(folder)
    config = AutoConfig.from_pretrained(str(folder))
    with init_empty_weights(include_buffers=False):
        model = model_class(config).from_config(config, dtype=torch.float32, **_attention())
    # what was tied inside is not any more: each assignment there made a parameter of its own
    model.tie_weights()
    hollow_(model)
    try:
        with readable(base_model):
            stored = StoredWeights(folder, model)
            stored.fill_buffers()
    except Unfit as reason:
        remark(f"each process reads all of {base_model}: {reason}")
        return None
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(folder))
    source = str(folder) if Path(base_model).expanduser().is_dir() else base_model
    found = load_tokenizer(tokenizer or source, required=tokenizer is not None)
    _check_vocabulary(model, found, base_model)
    give_eyes(model, found, source)
    return LoadedModel(
        _prepared(model), found, base_model, eos_token_ids(model, found), stored=stored
    )


def may_stay_unread(base_model: str) -> bool:
    """Whether a model may be read tensor by tensor: not what is built on the spot, adapters, a
    folder of other files than safetensors.
    """
    folder = Path(base_model).expanduser()
    if base_model.startswith("tiny:") or is_adapter(folder):
        return False
    return not folder.is_dir() or any(folder.glob("*.safetensors")) or not any(folder.glob("*.bin"))


def _folder(base_model: str) -> Path | None:
    """Where a model's files lie, of a hub name in the hub's cache, to which they are brought first.
    None where they cannot be had.
    """
    folder = Path(base_model).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        found = Path(
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
    except (OSError, ValueError):  # load_model says what is wrong with it
        return None
    return (
        found
        if (found / "config.json").is_file()
        and ((found / INDEX).is_file() or (found / SINGLE).is_file())
        else None
    )
