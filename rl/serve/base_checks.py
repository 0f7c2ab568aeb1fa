"""What is checked of a base model when the server starts: its config, its tokenizer, and that there are weights."""

from __future__ import annotations

from pathlib import Path

import torch

from rl.clients import max_context
from rl.errors import UserError
from rl.models import is_adapter, load_skeleton, load_tokenizer
from rl.serve.settings import ServedBase

_WEIGHTS = ("*.safetensors", "*.bin")


def checked_context(base: ServedBase) -> int | None:
    """Return how many tokens a base model reads at most, from its config alone. Raises UserError that names what is wrong with it."""
    folder = Path(base.where).expanduser()
    try:
        with torch.device("meta"):
            skeleton = load_skeleton(base.where, tokenizer=base.tokenizer)
        if base.tokenizer is not None:
            load_tokenizer(base.tokenizer)
        if folder.is_dir() and not is_adapter(base.where) and not any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
            raise UserError(f"{folder} has a config and no weights ({' or '.join(_WEIGHTS)})")
    except Exception as error:  # boundary: whatever a config of others raises is a reason not to start
        raise UserError(f"--base-model {base.name} cannot be served: {error}") from error
    return max_context(skeleton)
