"""Load or build a Hugging Face causal LM and its tokenizer, and put LoRA adapters on it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rl.errors import UserError
from rl.model_presets import get_preset
from rl.types import LoraConfig

EOS, PAD = "<eos>", "<pad>"


@dataclass
class LoadedModel:
    """A model with what goes with it. `name` is what the user asked for; `tokenizer` is None where there is none."""

    model: Any  # a transformers PreTrainedModel, or a PEFT model around one
    tokenizer: Any | None
    name: str
    eos_token_ids: tuple[int, ...]

    @property
    def vocab_size(self) -> int:
        return self.model.get_input_embeddings().weight.shape[0]


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch's generators from `seed` inside, as they were outside."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


def load_model(base_model: str, *, tokenizer: str | None = None, seed: int = 0, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """A causal LM from `tiny:<preset>` (random weights from `seed`), a folder, or a hub name.

    `tokenizer`: a folder or hub name that replaces the model's own. A folder without a tokenizer gives None.
    Raises UserError for an unknown preset, a folder that holds no model, a hub name that cannot be had.
    """
    if base_model.startswith("tiny:"):
        return _build_tiny(base_model, tokenizer, seed, dtype)
    folder = Path(base_model).expanduser()
    local = folder.is_dir()
    if not local and (base_model.startswith((".", "/", "~")) or base_model.count("/") > 1):
        raise UserError(f"no model folder at {folder}: give an existing folder, a hub name (owner/model) or tiny:<preset>")
    from transformers import AutoModelForCausalLM

    if local:
        _check_folder(folder)
    try:
        model = AutoModelForCausalLM.from_pretrained(str(folder) if local else base_model, dtype=dtype, **_attention())
    except OSError as error:
        offline = " (HF_HUB_OFFLINE=1 is set: only cached models can be had)" if os.environ.get("HF_HUB_OFFLINE") == "1" else ""
        raise UserError(f"cannot load the model {base_model!r}{offline}: {error}") from error
    found = load_tokenizer(tokenizer or (str(folder) if local else base_model), required=tokenizer is not None)
    _check_vocabulary(model, found, base_model)
    return LoadedModel(_prepared(model), found, base_model, eos_token_ids(model, found))


def load_skeleton(base_model: str, *, tokenizer: str | None = None) -> LoadedModel:
    """`load_model` without reading weights: of a folder or hub name the config alone. Call it under torch.device("meta").

    Raises UserError as `load_model` does.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if base_model.startswith("tiny:"):
        return _build_tiny(base_model, tokenizer, 0, torch.float32)
    folder = Path(base_model).expanduser()
    if not folder.is_dir() and (base_model.startswith((".", "/", "~")) or base_model.count("/") > 1):
        raise UserError(f"no model folder at {folder}: give an existing folder, a hub name (owner/model) or tiny:<preset>")
    try:
        config = AutoConfig.from_pretrained(str(folder) if folder.is_dir() else base_model)
    except OSError as error:
        raise UserError(f"cannot read the config of the model {base_model!r}: {error}") from error
    return LoadedModel(_prepared(AutoModelForCausalLM.from_config(config, dtype=torch.float32)), None, base_model, ())


def _attention() -> dict[str, str]:
    """Flash attention on a CUDA device where the package flash_attn is installed; else what transformers takes by itself."""
    from transformers.utils import is_flash_attn_2_available

    return {"attn_implementation": "flash_attention_2"} if torch.cuda.is_available() and is_flash_attn_2_available() else {}


def uses_flash_attention(model: Any) -> bool:
    return inner_model(model).config._attn_implementation == "flash_attention_2"


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no config.json: it is not a Hugging Face model folder (it has {_listing(folder)})")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise UserError(f"{folder} has a config.json but no weights (*.safetensors): nothing to train (it has {_listing(folder)})")


def _listing(folder: Path) -> str:
    return ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "no files"


def _check_vocabulary(model: Any, tokenizer: Any | None, name: str) -> None:
    if tokenizer is None:
        return
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise UserError(f"the tokenizer has {len(tokenizer)} tokens, the model {name!r} only {rows} rows: they do not belong together")


def load_tokenizer(name: str, *, required: bool = True) -> Any | None:
    """The tokenizer of a folder or hub name (or of a `tiny:` preset); None where a folder has none and none is required."""
    if name.startswith("tiny:"):
        return _character_tokenizer(get_preset(name).alphabet)
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.gpt2.tokenization_gpt2 import GPT2Tokenizer

    folder = Path(name).expanduser()
    has_files = folder.is_dir() and any((folder / f).is_file() for f in ("tokenizer.json", "tokenizer_config.json", "vocab.json"))
    if folder.is_dir() and not has_files:
        if required:
            raise UserError(f"{folder} holds no tokenizer (tokenizer.json, tokenizer_config.json or vocab.json)")
        return None
    try:
        if folder.is_dir() and _says_plain_fast(folder):
            return PreTrainedTokenizerFast.from_pretrained(str(folder))
        if folder.is_dir() and not (folder / "tokenizer_config.json").is_file() and (folder / "merges.txt").is_file():
            return GPT2Tokenizer.from_pretrained(str(folder))  # GPT-2's own files name no class
        return AutoTokenizer.from_pretrained(str(folder) if folder.is_dir() else name)
    except (OSError, ValueError) as error:
        if required:
            raise UserError(f"cannot load the tokenizer {name!r}: {error}") from error
        return None


def _says_plain_fast(folder: Path) -> bool:
    """Whether the folder names the generic class: AutoTokenizer would look for a class of the model's type first."""
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        return False
    return json.loads(config.read_text()).get("tokenizer_class") in ("PreTrainedTokenizerFast", "TokenizersBackend")


def eos_token_ids(model: Any, tokenizer: Any | None) -> tuple[int, ...]:
    """The union of every end-of-sequence id that tokenizer, model config and generation config name."""
    ids: set[int] = set()
    sources = [model.config.get_text_config().eos_token_id]
    if getattr(model, "generation_config", None) is not None:
        sources.append(model.generation_config.eos_token_id)
    if tokenizer is not None:
        sources.append(tokenizer.eos_token_id)
    for source in sources:
        if source is not None:
            ids.update(source if isinstance(source, list | tuple) else [source])
    return tuple(sorted(ids))


def _character_tokenizer(alphabet: str | None) -> Any | None:
    if alphabet is None:
        return None
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate([PAD, EOS, *alphabet])}
    core = Tokenizer(models.WordLevel(vocab, unk_token=None))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False, model_max_length=10**6
    )


def _build_tiny(base_model: str, tokenizer_name: str | None, seed: int, dtype: torch.dtype) -> LoadedModel:
    preset = get_preset(base_model)
    tokenizer = load_tokenizer(tokenizer_name) if tokenizer_name else _character_tokenizer(preset.alphabet)
    if tokenizer is None:
        raise UserError(f"{base_model} has no alphabet of its own: name a tokenizer with --tokenizer (a folder or hub name)")
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=preset.hidden,
        num_hidden_layers=preset.layers,
        num_attention_heads=preset.heads,
        num_key_value_heads=preset.kv_heads,
        head_dim=preset.hidden // preset.heads,
        intermediate_size=preset.mlp,
        max_position_embeddings=preset.max_position,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with seeded(seed):
        model: Any = Qwen3ForCausalLM(config)
    model = model.to(dtype)
    return LoadedModel(_prepared(model), tokenizer, base_model, eos_token_ids(model, tokenizer))


def _prepared(model: Any) -> Any:
    """No dropout in a policy or its reference (their logprobs must be functions of the weights), all else as loaded."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):  # attention modules keep a number of their own
            if isinstance(vars(module).get(name), float):
                setattr(module, name, 0.0)
    config = model.config.get_text_config()
    for name in ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout"):
        if name in config.to_dict():
            setattr(config, name, 0.0)
    model.eval()
    return model


def lora_targets(model: Any, lora: LoraConfig) -> list[str]:
    """Full names of the modules that get an adapter: linear layers of attention, of the MLP, and the output head."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    targets = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | Conv1D):
            continue
        if module is head:
            wanted = lora.train_unembed
        elif "attn" in name or "attention" in name:
            wanted = lora.train_attn
        else:
            wanted = lora.train_mlp
        if wanted:
            targets.append(name)
    if not targets:
        raise UserError("LoRA with train_mlp, train_attn and train_unembed all off trains nothing: turn one on")
    return targets


def add_lora(loaded: LoadedModel, lora: LoraConfig) -> LoadedModel:
    """The same model with fresh LoRA adapters (PEFT): A random from lora.seed, B zero, the base frozen."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    if lora.rank < 1:
        raise UserError(f"the LoRA rank is at least 1, got {lora.rank} (full weights: create_full_training_client)")
    if lora.alpha is not None and not lora.alpha > 0:
        raise UserError(f"LoRA's alpha is positive (the adapter is scaled by alpha / rank), got {lora.alpha}")
    config = PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha if lora.alpha is not None else lora.rank,  # type: ignore[arg-type]  # a float works
        target_modules=lora_targets(loaded.model, lora),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    loaded.model.name_or_path = loaded.name  # PEFT writes it into adapter_config.json
    with seeded(lora.seed if lora.seed is not None else 0), quiet_about_tied_heads():
        model = get_peft_model(loaded.model, config)
    return LoadedModel(model, loaded.tokenizer, loaded.name, loaded.eos_token_ids)


@contextlib.contextmanager
def quiet_about_tied_heads() -> Iterator[None]:
    """PEFT warns that merging an adapter on a tied head is delicate; merging here unties first (see rl.saving)."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        warnings.filterwarnings("ignore", message=".*fan_in_fan_out.*")
        yield


def inner_model(model: Any) -> Any:
    """The transformers model inside a PEFT model, or the model itself."""
    from peft import PeftModel

    return model.get_base_model() if isinstance(model, PeftModel) else model


def is_lora(model: Any) -> bool:
    from peft import PeftModel

    return isinstance(model, PeftModel)


class ValueHead(nn.Linear):
    """A scalar for each position, from the hidden state that the output head reads. Computed in fp32, whatever is around it.

    All zeros at first: every value is 0, and the first gradient moves the head alone, not yet the trunk.
    """

    def __init__(self, hidden_size: int):
        super().__init__(hidden_size, 1)

    def reset_parameters(self) -> None:  # nn.Linear's own would draw from the process's generator
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        with torch.autocast(hidden_TD.device.type, enabled=False):
            return nn.functional.linear(hidden_TD.float(), self.weight.float(), self.bias.float())[:, 0]


VALUE_HEAD = "value_head"  # the child of the transformers model that holds it; so its parameters' names contain "value_head."


def add_value_head(loaded: LoadedModel) -> LoadedModel:
    """The same model with a value head, trained in full even where everything else is under a LoRA adapter."""
    inner = inner_model(loaded.model)
    head = inner.get_output_embeddings()
    if head is None:
        raise UserError(f"{loaded.name} has no output head, so it is not known what a value head should read")
    inner.add_module(VALUE_HEAD, ValueHead(head.weight.shape[1]))
    return loaded


def value_head_of(model: Any) -> ValueHead | None:
    return dict(inner_model(model).named_children()).get(VALUE_HEAD)


def is_value_head(parameter_name: str) -> bool:
    return f".{VALUE_HEAD}." in f".{parameter_name}"
