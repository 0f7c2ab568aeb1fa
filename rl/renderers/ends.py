"""Which tokens end a text: those of the model's generation config as well as the tokenizer's own
EOS.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_NOTED = "model_ends"  # on a tokenizer that came with a model


def note_ends(tokenizer: Any | None, eos_token_ids: Iterable[int]) -> Any | None:
    """`tokenizer`, which from now on knows every token at which its model's samples end."""
    if tokenizer is not None:
        setattr(tokenizer, _NOTED, tuple(eos_token_ids))
    return tokenizer


def ends_of(tokenizer: Any) -> set[int]:
    """Every token that ends a sample: the tokenizer's EOS, and the model's, as noted or as the
    files beside the tokenizer say.
    """
    own = getattr(tokenizer, "eos_token_id", None)
    noted = vars(tokenizer).get(_NOTED)
    return ({own} if own is not None else set()) | set(
        _beside(tokenizer) if noted is None else noted
    )


def _beside(tokenizer: Any) -> set[int]:
    """The EOS ids in the model's config and generation config in the tokenizer's folder, or in the
    hub's cache.
    """
    name = str(getattr(tokenizer, "name_or_path", "") or "")
    found: set[int] = set()
    for file in ("config.json", "generation_config.json") if name else ():
        path = Path(name) / file if Path(name).is_dir() else _cached(name, file)
        if path is None or not path.is_file():
            continue
        config = json.loads(path.read_text(encoding="utf-8"))
        ids = (config.get("text_config") or config).get("eos_token_id")
        found |= set(ids) if isinstance(ids, list) else {ids} if isinstance(ids, int) else set()
    return found


def _cached(name: str, file: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(name, file)
    except HFValidationError:  # a name that no hub repository can have
        return None
    return Path(path) if isinstance(path, str) else None
