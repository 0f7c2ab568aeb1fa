"""Base models: what is checked of one when the server starts, and where clients find its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rl.clients import max_context
from rl.errors import UserError
from rl.models import is_adapter, load_skeleton, load_tokenizer
from rl.serve.settings import ServedBase

_WEIGHTS = ("*.safetensors", "*.bin")


def checked_context(base: ServedBase) -> int | None:
    """Return how many tokens a base model reads at most, from its config alone. Raises UserError
    that names what is wrong with it.
    """
    folder = Path(base.where).expanduser()
    try:
        with torch.device("meta"):
            skeleton = load_skeleton(base.where, tokenizer=base.tokenizer)
        if base.tokenizer is not None:
            load_tokenizer(base.tokenizer)
        if (
            folder.is_dir()
            and not is_adapter(base.where)
            and not any(any(folder.glob(pattern)) for pattern in _WEIGHTS)
        ):
            raise UserError(f"{folder} has a config and no weights ({' or '.join(_WEIGHTS)})")
    except (
        Exception
    ) as error:  # boundary: whatever a config of others raises is a reason not to start
        raise UserError(f"--base-model {base.name} cannot be served: {error}") from error
    return max_context(skeleton)


def tokenizer_place(base: ServedBase, tokenizer: Any, root: Path) -> str | None:
    """Return where a client on this machine loads a tokenizer from, which it does by itself: a hub
    name or a folder.

    The tokenizer of a tiny:<preset> is written below `root`.
    """
    where = base.tokenizer or base.where
    if tokenizer is None:
        return None
    if not where.startswith("tiny:"):
        folder = Path(where).expanduser()
        return str(folder.resolve()) if folder.is_dir() else where
    folder = (root / "tokenizers" / where.removeprefix("tiny:")).resolve()
    if not folder.is_dir():
        tokenizer.save_pretrained(str(folder))
    return str(folder)
