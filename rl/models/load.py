"""Load or build a Hugging Face causal LM and its tokenizer."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rl.errors import UserError
from rl.images import note_reader, reader_of
from rl.layers import inner_model
from rl.models.adapters import is_adapter, made_from, merge, root_of, untie
from rl.models.presets import Preset, get_preset
from rl.models.stored import StoredWeights
from rl.models.tokenizers import load_tokenizer, tiny_tokenizer
from rl.models.vision import class_of, give_eyes, model_class, open_eyes, tiny_config
from rl.models.whole_weights import load_whole, load_whole_adapter


@dataclass
class LoadedModel:
    """A model with what goes with it. `name` is what the user asked for; `tokenizer` is None where
    there is none.
    """

    model: Any  # a transformers PreTrainedModel, or a PEFT model around one
    tokenizer: Any | None
    name: str
    eos_token_ids: tuple[int, ...]
    # the share of the base's numbers that its LoRA was to train and cannot (experts, say)
    unadapted: float = 0.0
    # where the base's weights still lie, of a model without values
    stored: StoredWeights | None = None

    @property
    def vocab_size(self) -> int:
        return vocabulary_of(self.model)


def vocabulary_of(model: Any) -> int:
    """Rows of the input embedding."""
    return model.get_input_embeddings().weight.shape[0]


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch's generators from `seed` inside, as they were outside."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


def load_model(
    base_model: str,
    *,
    tokenizer: str | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> LoadedModel:
    """A causal LM from `tiny:<preset>` (random weights from `seed`), a folder, or a hub name. An
    adapter's folder: merged into its base.

    `tokenizer`: a folder or hub name that replaces the model's own. A folder without a tokenizer
    gives None. Raises UserError for an unknown preset, a folder that holds no model or not all of
    its tensors, a hub name that cannot be had.
    """
    if base_model.startswith("tiny:"):
        return _build_tiny(base_model, tokenizer, seed, dtype)
    folder = Path(base_model).expanduser()
    local = folder.is_dir()
    if not local and (base_model.startswith((".", "/", "~")) or base_model.count("/") > 1):
        raise UserError(
            f"no model folder at {folder}: give an existing folder, a hub name (owner/model) or tiny:<preset>"
        )
    if is_adapter(folder):
        return _merged(folder, tokenizer)
    if local:
        check_model_folder(folder)
    source = str(folder) if local else base_model
    try:
        model = load_whole(class_of(source), source, base_model, dtype=dtype, **_attention())
    except OSError as error:
        here = (
            f"; there is no folder {base_model} here either"
            if "/" in base_model and not local
            else ""
        )
        raise UserError(
            f"cannot load the model {base_model!r}{_offline()}{here}: {error}"
        ) from error
    found = load_tokenizer(tokenizer or source, required=tokenizer is not None)
    _check_vocabulary(model, found, base_model)
    give_eyes(model, found, source)
    return LoadedModel(_prepared(model), found, base_model, eos_token_ids(model, found))


def _offline() -> str:
    return (
        " (HF_HUB_OFFLINE=1 is set: only cached models can be had)"
        if os.environ.get("HF_HUB_OFFLINE") == "1"
        else ""
    )


def _merged(folder: Path, tokenizer: str | None) -> LoadedModel:
    """An adapter merged into its base in fp32 (rl.models.adapters); the base may be such a folder
    again.
    """
    root_of(str(folder))  # ends, or is an error
    base = made_from(folder)
    loaded = load_model(base.name, tokenizer=tokenizer or base.tokenizer, seed=base.seed)
    with quiet_about_tied_heads():
        model = merge(load_whole_adapter(loaded.model, folder))
    found = (
        loaded.tokenizer
        if tokenizer is not None
        else load_tokenizer(str(folder), required=False) or loaded.tokenizer
    )
    _check_vocabulary(model, found, str(folder))
    note_reader(found, reader_of(model))
    return LoadedModel(model, found, str(folder), eos_token_ids(model, found))


def load_skeleton(base_model: str, *, tokenizer: str | None = None) -> LoadedModel:
    """`load_model` without reading weights: of a folder or hub name the config alone. Call it under
    torch.device("meta").

    Raises UserError as `load_model` does.
    """
    from transformers import AutoConfig

    if is_adapter(base_model):
        base, adapted = root_of(base_model)
        return _untied(load_skeleton(base.name, tokenizer=tokenizer or base.tokenizer), adapted)
    if base_model.startswith("tiny:"):
        return _build_tiny(base_model, tokenizer, 0, torch.float32)
    folder = Path(base_model).expanduser()
    if not folder.is_dir() and (
        base_model.startswith((".", "/", "~")) or base_model.count("/") > 1
    ):
        raise UserError(
            f"no model folder at {folder}: give an existing folder, a hub name (owner/model) or tiny:<preset>"
        )
    try:
        config = AutoConfig.from_pretrained(str(folder) if folder.is_dir() else base_model)
    except OSError as error:
        raise UserError(
            f"cannot read the config of the model {base_model!r}{_offline()}: {error}"
        ) from error
    return LoadedModel(
        _prepared(model_class(config).from_config(config, dtype=torch.float32)),
        None,
        base_model,
        (),
    )


def _untied(loaded: LoadedModel, adapted: Collection[str]) -> LoadedModel:
    """A skeleton as merging adapters on these modules leaves it: with a head of its own where one
    of them is on the head.
    """
    head, embedding = loaded.model.get_output_embeddings(), loaded.model.get_input_embeddings()
    name = next((name for name, module in loaded.model.named_modules() if module is head), None)
    if (
        name is not None
        and head.weight is embedding.weight
        and any(name == one or name.endswith(f".{one}") for one in adapted)
    ):
        head.weight = nn.Parameter(torch.empty_like(head.weight))
        untie(loaded.model)
    return loaded


def _attention() -> dict[str, str]:
    """Flash attention on a CUDA device where the package flash_attn is installed; else what
    transformers takes by itself.
    """
    from transformers.utils import is_flash_attn_2_available

    return (
        {"attn_implementation": "flash_attention_2"}
        if torch.cuda.is_available() and is_flash_attn_2_available()
        else {}
    )


def uses_flash_attention(model: Any) -> bool:
    return inner_model(model).config._attn_implementation == "flash_attention_2"


def attention_mask_for(model: Any, sees: torch.Tensor) -> torch.Tensor:
    """A mask as the model's attention takes it: `sees` itself (True: is seen), or for eager
    attention, which adds it, 0 and -max.
    """
    inner = inner_model(model)
    if inner.config._attn_implementation != "eager":
        return sees
    dtype = inner.get_input_embeddings().weight.dtype
    return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill_(
        ~sees, torch.finfo(dtype).min
    )


def check_model_folder(folder: Path) -> None:
    """UserError unless a folder has a model's config and weights."""
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{folder} holds no config.json: it is not a Hugging Face model folder (it has {_listing(folder)})"
        )
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise UserError(
            f"{folder} has a config.json but no weights (*.safetensors): nothing to train (it has {_listing(folder)})"
        )


def _listing(folder: Path) -> str:
    return ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "no files"


def _check_vocabulary(model: Any, tokenizer: Any | None, name: str) -> None:
    if tokenizer is None:
        return
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens, the model {name!r} only {rows} rows: they do not belong together"
        )


def eos_token_ids(model: Any, tokenizer: Any | None) -> tuple[int, ...]:
    """The union of every end-of-sequence id that tokenizer, model config and generation config
    name.
    """
    ids: set[int] = set()
    # some configs have none (CPM-Ant's)
    sources = [getattr(model.config.get_text_config(), "eos_token_id", None)]
    if getattr(model, "generation_config", None) is not None:
        sources.append(model.generation_config.eos_token_id)
    if tokenizer is not None:
        sources.append(tokenizer.eos_token_id)
    for source in sources:
        if source is not None:
            ids.update(source if isinstance(source, list | tuple) else [source])
    return tuple(sorted(ids))


def _build_tiny(
    base_model: str, tokenizer_name: str | None, seed: int, dtype: torch.dtype
) -> LoadedModel:
    preset = get_preset(base_model)
    tokenizer = load_tokenizer(tokenizer_name) if tokenizer_name else tiny_tokenizer(base_model)
    if tokenizer is None:
        raise UserError(
            f"{base_model} has no alphabet of its own: name a tokenizer with --tokenizer (a folder or hub name)"
        )
    if preset.eyes is not None:
        return _build_seeing(base_model, preset, tokenizer, seed, dtype)
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


def _build_seeing(
    base_model: str, preset: Preset, tokenizer: Any, seed: int, dtype: torch.dtype
) -> LoadedModel:
    from transformers import Qwen3VLForConditionalGeneration

    reader = reader_of(tokenizer)
    if reader is None:
        raise UserError(
            f"{base_model} comes with the tokenizer that its images need: leave out --tokenizer"
        )
    with seeded(seed):
        model: Any = Qwen3VLForConditionalGeneration(tiny_config(preset, tokenizer))
        open_eyes(model)
    note_reader(model, reader)
    return LoadedModel(
        _prepared(model.to(dtype)), tokenizer, base_model, eos_token_ids(model, tokenizer)
    )


def _prepared(model: Any) -> Any:
    """Nothing random in a policy or its reference (their logprobs must be functions of the
    weights), all else as loaded.

    Dropout of values and of layers, and the noise on a router's input: rates in modules, in their
    attributes, in the config. What is random under another name is found when the learner tries the
    model out (rl.learner.probe).
    """
    for module in model.modules():
        for name, value in vars(module).items():
            if _is_rate(name, value) or (name == "p" and isinstance(module, _DROPOUTS)):
                setattr(module, name, 0.0)
    _no_rates(model.config)
    model.eval()
    return model


_DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


def _is_rate(name: str, value: Any) -> bool:
    """Phi-MoE's `router_jitter_noise` is none: it is a threshold between experts, in evaluation
    too.
    """
    return isinstance(value, float) and (
        "drop" in name or name in ("jitter_noise", "input_jitter_noise")
    )


def _no_rates(config: Any) -> None:
    from transformers import PreTrainedConfig

    for name, value in list(vars(config).items()):
        if _is_rate(name, value):
            setattr(config, name, 0.0)
        elif isinstance(value, PreTrainedConfig):
            _no_rates(value)


@contextlib.contextmanager
def quiet_about_tied_heads() -> Iterator[None]:
    """PEFT warns that merging an adapter on a tied head is delicate; merging here unties first (see
    rl.models.adapters).
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        warnings.filterwarnings("ignore", message=".*fan_in_fan_out.*")
        # PEFT's and transformers' words to each other
        warnings.simplefilter("ignore", FutureWarning)
        yield


def is_lora(model: Any) -> bool:
    from peft import PeftModel

    return isinstance(model, PeftModel)


class ValueHead(nn.Linear):
    """A scalar for each position, from the hidden state that the output head reads. Computed in
    fp32, whatever is around it.

    All zeros at first: every value is 0, and the first gradient moves the head alone, not yet the
    trunk.
    """

    def __init__(self, hidden_size: int):
        super().__init__(hidden_size, 1)

    def reset_parameters(self) -> None:  # nn.Linear's own would draw from the process's generator
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        with torch.autocast(hidden_TD.device.type, enabled=False):
            return nn.functional.linear(hidden_TD.float(), self.weight.float(), self.bias.float())[
                :, 0
            ]


# the child of the transformers model that holds it; so its parameters' names contain "value_head."
VALUE_HEAD = "value_head"


def add_value_head(loaded: LoadedModel) -> LoadedModel:
    """The same model with a value head, trained in full even where everything else is under a LoRA
    adapter.
    """
    inner = inner_model(loaded.model)
    head = inner.get_output_embeddings()
    if head is None:
        raise UserError(
            f"{loaded.name} has no output head, so it is not known what a value head should read"
        )
    inner.add_module(VALUE_HEAD, ValueHead(head.weight.shape[1]))
    return loaded


def value_head_of(model: Any) -> ValueHead | None:
    return dict(inner_model(model).named_children()).get(VALUE_HEAD)


def is_value_head(parameter_name: str) -> bool:
    return f".{VALUE_HEAD}." in f".{parameter_name}"
