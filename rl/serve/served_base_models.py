"""Check base models at the start of a server, and locate their tokenizers for clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rl.errors import UserError
from rl.models import is_adapter, load_skeleton, load_tokenizer
from rl.runtime import find_max_context
from rl.serve.serve_settings import ServedBaseModel

_WEIGHTS = ("*.safetensors", "*.bin")


def check_base_model(base: ServedBaseModel) -> int | None:
    """Return the context length of a base model in tokens, from its config alone; None if the
    config states no limit.

    Raises UserError, which names the cause, if the model cannot be served.
    """
    folder = Path(base.source).expanduser()
    try:
        with torch.device("meta"):
            skeleton = load_skeleton(base.source, tokenizer=base.tokenizer)
        if base.tokenizer is not None:
            load_tokenizer(base.tokenizer)
        if (
            folder.is_dir()
            and not is_adapter(base.source)
            and not any(any(folder.glob(pattern)) for pattern in _WEIGHTS)
        ):
            raise UserError(f"{folder} has a config and no weights ({' or '.join(_WEIGHTS)})")
    # boundary: any error that a user's config raises is a reason not to start
    except Exception as error:
        raise UserError(f"--base-model {base.name} cannot be served: {error}") from error
    return find_max_context(skeleton)


def locate_tokenizer(base: ServedBaseModel, tokenizer: Any, root: Path) -> str | None:
    """Return the hub name or folder from which a client on this machine loads the tokenizer; None
    if the base model has no tokenizer.

    The tokenizer of a tiny:<preset> is written to a folder below `root`.
    """
    where = base.tokenizer or base.source
    if tokenizer is None:
        return None
    if not where.startswith("tiny:"):
        folder = Path(where).expanduser()
        return str(folder.resolve()) if folder.is_dir() else where
    folder = (root / "tokenizers" / where.removeprefix("tiny:")).resolve()
    if not folder.is_dir():
        tokenizer.save_pretrained(str(folder))
    return str(folder)
