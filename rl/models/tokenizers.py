"""Tokenizers: of folders and hub names, and those of single characters that tiny presets have."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl.errors import UserError
from rl.models.presets import get_preset

EOS, PAD = "<eos>", "<pad>"


def load_tokenizer(name: str, *, required: bool = True) -> Any | None:
    """The tokenizer of a folder or hub name (or of a `tiny:` preset); None where a folder has none
    and none is required.

    Of a model that sees, it knows what reads its images (`rl.images.reader_of`), if the image
    processor lies beside it.
    """
    if name.startswith("tiny:"):
        return tiny_tokenizer(name)
    from rl.models.vision import note_eyes

    found = _loaded(name, required)
    note_eyes(found, name)
    return found


def _loaded(name: str, required: bool) -> Any | None:
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
            return GPT2Tokenizer.from_pretrained(str(folder))  # GPT-2's own files name no class
        return AutoTokenizer.from_pretrained(str(folder) if folder.is_dir() else name)
    except (OSError, ValueError) as error:
        if required:
            raise UserError(f"cannot load the tokenizer {name!r}: {error}") from error
        return None


def _says_plain_fast(folder: Path) -> bool:
    """Whether the folder names the generic class: AutoTokenizer would look for a class of the
    model's type first.
    """
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        return False
    return json.loads(config.read_text()).get("tokenizer_class") in (
        "PreTrainedTokenizerFast",
        "TokenizersBackend",
    )


def tiny_tokenizer(name: str) -> Any | None:
    """That of a `tiny:` preset; None for one that has to be brought. Of one that sees, it knows
    what reads its images.
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
    """A tokenizer of single characters, made on the spot; None without an alphabet. `marks`:
    special tokens beside them.
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
