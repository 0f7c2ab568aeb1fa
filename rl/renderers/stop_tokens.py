"""Determine the tokens that end a sample: those of the model's generation config and the
tokenizer's EOS.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_END_TOKENS_ATTRIBUTE = "model_ends"  # attribute of a tokenizer that came with a model


def set_end_tokens(tokenizer: Any | None, eos_token_ids: Iterable[int]) -> Any | None:
    """Store on `tokenizer` the tokens that end the model's samples, and return the tokenizer."""
    if tokenizer is not None:
        setattr(tokenizer, _END_TOKENS_ATTRIBUTE, tuple(eos_token_ids))
    return tokenizer


def get_end_tokens(tokenizer: Any) -> set[int]:
    """Return every token that ends a sample: the tokenizer's EOS, and the model's end tokens as
    stored by `set_end_tokens` or in the files next to the tokenizer.
    """
    tokenizer_eos = getattr(tokenizer, "eos_token_id", None)
    noted = vars(tokenizer).get(_END_TOKENS_ATTRIBUTE)
    return ({tokenizer_eos} if tokenizer_eos is not None else set()) | set(
        _read_config_eos(tokenizer) if noted is None else noted
    )


def _read_config_eos(tokenizer: Any) -> set[int]:
    """Return the EOS ids in the model's config and generation config, from the tokenizer's folder
    or the hub's cache.
    """
    name = str(getattr(tokenizer, "name_or_path", "") or "")
    eos_ids: set[int] = set()
    for file in ("config.json", "generation_config.json") if name else ():
        path = Path(name) / file if Path(name).is_dir() else _find_cached_file(name, file)
        if path is None or not path.is_file():
            continue
        config = json.loads(path.read_text(encoding="utf-8"))
        for part in (config, config.get("text_config") or {}):
            ids = part.get("eos_token_id")
            eos_ids |= set(ids if isinstance(ids, list) else [ids] if isinstance(ids, int) else [])
    return eos_ids


def _find_cached_file(name: str, file: str) -> Path | None:
    """Return the path of a file of a hub repository in the local cache, or None."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(name, file)
    except HFValidationError:  # not a valid name of a hub repository
        return None
    return Path(path) if isinstance(path, str) else None
