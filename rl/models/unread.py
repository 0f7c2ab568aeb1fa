"""A model whose weights are still in their files."""

from __future__ import annotations

from pathlib import Path

import torch

from rl.models.adapters import is_adapter
from rl.models.load import LoadedModel, _attention, _check_vocabulary, _prepared, check_model_folder, eos_token_ids
from rl.models.stored import StoredWeights, Unfit, hollow_
from rl.models.tokenizers import load_tokenizer
from rl.models.whole_weights import readable
from rl.remarks import remark


def load_unread(base_model: str, *, tokenizer: str | None = None) -> LoadedModel | None:
    """`load_model` but for the weights, which stay in their files (`stored`) until somebody reads them one by one.

    None for what cannot be read so: what is built on the spot, adapters, files that are not safetensors or need more than renaming.
    """
    folder = Path(base_model).expanduser()
    if base_model.startswith("tiny:") or not folder.is_dir() or is_adapter(folder):
        return None
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    check_model_folder(folder)
    config = AutoConfig.from_pretrained(str(folder))
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **_attention())
    model.tie_weights()  # what was tied inside is not any more: each assignment there made a parameter of its own
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
    found = load_tokenizer(tokenizer or str(folder), required=tokenizer is not None)
    _check_vocabulary(model, found, base_model)
    return LoadedModel(_prepared(model), found, base_model, eos_token_ids(model, found), stored=stored)
