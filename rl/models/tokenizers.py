"""Load the tokenizer of a folder or hub name, or build the character tokenizer of a tiny preset."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl.errors import UserError
from rl.models.presets import get_preset

EOS, PAD = "<eos>", "<pad>"


def load_tokenizer(name: str, *, required: bool = True) -> Any | None:
    """Load the tokenizer of a folder or hub name (or of a `tiny:` preset).

    Returns None if it cannot be loaded and is not required. For a vision-language model, the image
    reader is attached to it (`rl.images.reader_of`), if the image processor is next to it. Raises
    UserError if a required tokenizer cannot be loaded.
    """
    if name.startswith("tiny:"):
        return tiny_tokenizer(name)
    from rl.models.vision import note_eyes

    tokenizer = _loaded(name, required)
    note_eyes(tokenizer, name)
    return tokenizer


def _loaded(name: str, required: bool) -> Any | None:
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
        if folder.is_dir() and _says_plain_fast(folder):
            return PreTrainedTokenizerFast.from_pretrained(str(folder))
        if (
            folder.is_dir()
            and not (folder / "tokenizer_config.json").is_file()
            and (folder / "merges.txt").is_file()
        ):
            # GPT-2's original files name no class
            return GPT2Tokenizer.from_pretrained(str(folder))
        return AutoTokenizer.from_pretrained(str(folder) if folder.is_dir() else name)
    except (OSError, ValueError) as error:
        if required:
            raise UserError(f"cannot load the tokenizer {name!r}: {error}") from error
        return None


def _says_plain_fast(folder: Path) -> bool:
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


def tiny_tokenizer(name: str) -> Any | None:
    """Return the tokenizer of a `tiny:` preset; None if the preset needs a user's tokenizer.

    For a preset with a vision tower, the image reader is attached to it.
    """
    preset = get_preset(name)
    if preset.eyes is None:
        return character_tokenizer(preset.alphabet)
    from rl.images import note_reader
    from rl.models.vision import END, MARKS, TEMPLATE, tiny_reader

    tokenizer = character_tokenizer(preset.alphabet, MARKS, END)
    assert tokenizer is not None
    tokenizer.chat_template = TEMPLATE
    note_reader(tokenizer, tiny_reader(preset, tokenizer))
    return tokenizer


def character_tokenizer(
    alphabet: str | None, marks: Sequence[str] = (), end: str = EOS
) -> Any | None:
    """Build a tokenizer of single characters; None without an alphabet. `marks`: additional special
    tokens.
    """
    if alphabet is None:
        return None
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate([PAD, EOS, *alphabet, *marks])}
    core = Tokenizer(models.WordLevel(vocab, unk_token=None))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(list(marks))
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=end,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=10**6,
    )
