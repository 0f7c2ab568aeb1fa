"""Load the tokenizer of a folder or hub name, or build the character tokenizer of a tiny preset."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl.errors import UserError, check_hub_access, warn_on_rank_zero
from rl.models.tiny_models import get_model_preset

EOS, PAD = "<eos>", "<pad>"


def load_tokenizer(name: str, *, required: bool = True) -> Any | None:
    """Load the tokenizer of a folder or hub name (or of a `tiny:` preset).

    Returns None if it cannot be loaded and is not required. For a vision-language model, the image
    reader is attached to it (`rl.images.get_image_reader`), if the image processor is next to it.
    Raises UserError if a required tokenizer cannot be loaded.
    """
    if name.startswith("tiny:"):
        return build_tiny_tokenizer(name)
    from rl.models.vision_models import load_image_processor

    tokenizer = _load_with_transformers(name, required)
    load_image_processor(tokenizer, name)
    return tokenizer


def _load_with_transformers(name: str, required: bool) -> Any | None:
    """Load a tokenizer with transformers; None if it cannot be loaded and is not required."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.gpt2.tokenization_gpt2 import GPT2Tokenizer

    folder = Path(name).expanduser()
    has_files = folder.is_dir() and any(
        (folder / f).is_file() for f in ("tokenizer.json", "tokenizer_config.json", "vocab.json")
    )
    if folder.is_dir() and not has_files:
        if required:
            raise UserError(
                f"{folder} holds no tokenizer (tokenizer.json, tokenizer_config.json or vocab.json)"
            )
        return None
    try:
        check_hub_access(name, "model")
        if folder.is_dir() and _names_generic_class(folder):
            return PreTrainedTokenizerFast.from_pretrained(str(folder))
        if (
            folder.is_dir()
            and not (folder / "tokenizer_config.json").is_file()
            and (folder / "merges.txt").is_file()
        ):
            # GPT-2's original files name no class
            return GPT2Tokenizer.from_pretrained(str(folder))
        return AutoTokenizer.from_pretrained(str(folder) if folder.is_dir() else name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if required:
            raise UserError(f"cannot load the tokenizer {name!r}: {error}") from error
        if has_files:
            warn_on_rank_zero(f"the tokenizer of {name} is ignored, it cannot be read: {error}")
        return None


def _names_generic_class(folder: Path) -> bool:
    """Return whether the folder names the generic class: AutoTokenizer would try the model type's
    class first.
    """
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        return False
    return json.loads(config.read_text()).get("tokenizer_class") in (
        "PreTrainedTokenizerFast",
        "TokenizersBackend",
    )


def build_tiny_tokenizer(name: str) -> Any | None:
    """Return the tokenizer of a `tiny:` preset; None if the preset needs a user's tokenizer.

    For a preset with a vision tower, the image reader is attached to it.
    """
    preset = get_model_preset(name)
    if preset.vision is None:
        return build_character_tokenizer(preset.alphabet)
    from rl.images import attach_image_reader
    from rl.models.vision_models import (
        END,
        TINY_CHAT_TEMPLATE,
        VISION_TOKENS,
        make_tiny_image_reader,
    )

    tokenizer = build_character_tokenizer(preset.alphabet, VISION_TOKENS, END)
    assert tokenizer is not None
    tokenizer.chat_template = TINY_CHAT_TEMPLATE
    attach_image_reader(tokenizer, make_tiny_image_reader(preset, tokenizer))
    return tokenizer


def build_character_tokenizer(
    alphabet: str | None, special_tokens: Sequence[str] = (), eos_token: str = EOS
) -> Any | None:
    """Build a tokenizer of single characters; None without an alphabet. `special_tokens`:
    additional special tokens.
    """
    if alphabet is None:
        return None
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate([PAD, EOS, *alphabet, *special_tokens])}
    core = Tokenizer(models.WordLevel(vocab, unk_token=None))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(list(special_tokens))
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=eos_token,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=10**6,
    )
