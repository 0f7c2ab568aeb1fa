"""Load or build a Hugging Face causal LM and its tokenizer."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rl.errors import UserError, check_hub_access, suggest_hub_name, warn_on_rank_zero
from rl.images import attach_image_reader, get_image_reader
from rl.layers import unwrap_model
from rl.models.adapter_folders import (
    find_adapter_base,
    is_adapter,
    mark_head_untied,
    merge_adapter,
    resolve_adapter_chain,
)
from rl.models.check_weights import (
    convert_read_errors,
    load_checked_adapter,
    load_checked_model,
)
from rl.models.info import KNOWN_MODELS
from rl.models.lazy_safetensors import (
    INDEX,
    SINGLE,
    CannotReadLazily,
    SafetensorsWeights,
    replace_meta_parameters_,
)
from rl.models.tiny_models import ModelPreset, get_model_preset
from rl.models.tokenizer_loading import build_tiny_tokenizer, load_tokenizer
from rl.models.vision_models import (
    attach_image_processor,
    describe_tiny_text_model,
    initialize_vision_tower,
    make_tiny_vision_config,
    select_auto_class,
)


@dataclass
class LoadedModel:
    """Hold a model, its tokenizer, its name and its EOS ids.

    `name` is the name that the user passed; `tokenizer` is None if the model has none.
    """

    model: Any  # a transformers PreTrainedModel, or a PEFT model around one
    tokenizer: Any | None
    name: str
    eos_token_ids: tuple[int, ...]
    # fraction of the base's parameters that its LoRA should train and cannot (experts, say)
    unadapted_share: float = 0.0
    # files of the base's weights, for a model without values
    lazy_weights: SafetensorsWeights | None = None

    @property
    def vocab_size(self) -> int:
        """Return the number of rows of the input embedding."""
        return get_vocab_size(self.model)


def get_vocab_size(model: Any) -> int:
    """Return the number of rows of the input embedding."""
    return model.get_input_embeddings().weight.shape[0]


@contextlib.contextmanager
def seeded_torch(seed: int) -> Iterator[None]:
    """Seed torch's generators within the context, and restore them afterwards."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


def load_model(base_model: str, *, tokenizer: str | None = None, seed: int = 0) -> LoadedModel:
    """Load a causal LM in fp32 from `tiny:<preset>` (random weights from `seed`), a folder, or a
    hub name.

    The folder of an adapter is merged into its base. `tokenizer`: a folder or hub name that
    replaces the model's tokenizer; a folder without a tokenizer results in None. Raises UserError
    for an unknown preset, a folder that holds no model or lacks some of its tensors, or a hub name
    that cannot be loaded.
    """
    if base_model.startswith("tiny:"):
        return _build_tiny(base_model, tokenizer, seed)
    source = _find_source(base_model)
    folder = Path(source)
    if is_adapter(folder):
        return _load_merged(folder, tokenizer)
    if folder.is_dir():
        check_model_folder(folder)
    from transformers import AutoConfig

    try:
        with convert_config_errors(base_model):
            config = AutoConfig.from_pretrained(source)
            settings = {**_attention_kwargs(), **_dequantization_kwargs(config, base_model)}
            auto_class = select_auto_class(config)
        try:
            model = load_checked_model(
                auto_class, source, base_model, dtype=torch.float32, **settings
            )
        except (UserError, ArithmeticError):
            # a wrong value in the config is named, instead of the files
            with convert_config_errors(base_model), torch.device("meta"):
                auto_class.from_config(config)
            raise
    except OSError as error:
        hint = (
            f"; no local folder {base_model} exists either"
            if "/" in base_model and not folder.is_dir()
            else ""
        )
        raise UserError(
            f"cannot load the model {base_model!r}{_offline_note()}{hint}"
            f"{suggest_hub_name(base_model, KNOWN_MODELS, 'model')}: {error}"
        ) from error
    return _add_tokenizer(model, base_model, source, tokenizer)


def load_model_lazily(base_model: str, *, tokenizer: str | None = None) -> LoadedModel | None:
    """Load a model as `load_model` does, but leave its weights in their files.

    `LoadedModel.lazy_weights` reads them tensor by tensor. Returns None if that is not possible:
    see `supports_lazy_loading`; files that need more than renaming; a hub name that cannot be
    loaded.
    """
    if not supports_lazy_loading(base_model):
        return None
    folder = _locate_folder(base_model)
    if folder is None:
        return None
    from accelerate import init_empty_weights
    from transformers import AutoConfig, GenerationConfig

    check_model_folder(folder)
    with convert_config_errors(base_model), init_empty_weights(include_buffers=False):
        config = AutoConfig.from_pretrained(str(folder))
        model = select_auto_class(config).from_config(
            config, dtype=torch.float32, **_attention_kwargs()
        )
    # the context untied parameters: each assignment in it made a new parameter
    model.tie_weights()
    replace_meta_parameters_(model)
    try:
        with convert_read_errors(base_model):
            stored = SafetensorsWeights(folder, model)
            stored.fill_buffers()
    except CannotReadLazily as reason:
        warn_on_rank_zero(f"each process reads all of {base_model}: {reason}")
        return None
    if model.can_generate() and (folder / "generation_config.json").is_file():
        # an unreadable file is ignored, as by `load_model`
        with contextlib.suppress(OSError), convert_read_errors(base_model):
            model.generation_config = GenerationConfig.from_pretrained(str(folder))
    source = str(folder) if Path(base_model).expanduser().is_dir() else base_model
    return _add_tokenizer(model, base_model, source, tokenizer, stored)


def supports_lazy_loading(base_model: str) -> bool:
    """Return whether a model may be read tensor by tensor.

    False for tiny models, adapters, and a folder with files other than safetensors.
    """
    folder = Path(base_model).expanduser()
    if base_model.startswith("tiny:") or is_adapter(folder):
        return False
    return not folder.is_dir() or any(folder.glob("*.safetensors")) or not any(folder.glob("*.bin"))


def _locate_folder(base_model: str) -> Path | None:
    """Return the folder of a model's files, downloading a hub name to the hub's cache; None if
    unavailable.
    """
    folder = Path(base_model).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        check_hub_access(base_model, "model")
        snapshot = Path(
            snapshot_download(
                base_model,
                allow_patterns=[
                    "config.json",
                    "generation_config.json",
                    INDEX,
                    "model*.safetensors",
                ],
            )
        )
    except (OSError, ValueError):  # load_model reports the error
        return None
    return (
        snapshot
        if (snapshot / "config.json").is_file()
        and ((snapshot / INDEX).is_file() or (snapshot / SINGLE).is_file())
        else None
    )


def _find_source(base_model: str) -> str:
    """Return the folder or the hub name of a model.

    Raises UserError for a path without a folder, and for a hub name if the hub cannot be reached.
    """
    folder = Path(base_model).expanduser()
    if folder.is_dir():
        return str(folder)
    if base_model.startswith((".", "/", "~")) or base_model.count("/") > 1:
        raise UserError(
            f"no model folder at {folder}: give an existing folder, a hub name (owner/model) "
            "or tiny:<preset>"
        )
    check_hub_access(base_model, "model", KNOWN_MODELS)
    return base_model


def _add_tokenizer(
    model: Any,
    name: str,
    source: str,
    tokenizer: str | None,
    lazy_weights: SafetensorsWeights | None = None,
) -> LoadedModel:
    """Load the tokenizer (by default that of `source`) and the image processor of a model."""
    loaded_tokenizer = load_tokenizer(tokenizer or source, required=tokenizer is not None)
    loaded = _make_loaded_model(model, loaded_tokenizer, name)
    attach_image_processor(model, loaded_tokenizer, source)
    return replace(loaded, lazy_weights=lazy_weights)


def _make_loaded_model(model: Any, tokenizer: Any | None, name: str) -> LoadedModel:
    """Return a model without randomness, with its tokenizer.

    Raises UserError if the tokenizer has more tokens than the embedding has rows.
    """
    rows = get_vocab_size(model)
    if tokenizer is not None and len(tokenizer) > rows:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens, the model {name!r} only {rows} rows: "
            "pass the tokenizer of this model"
        )
    return LoadedModel(
        _disable_randomness(model), tokenizer, name, collect_eos_token_ids(model, tokenizer)
    )


def _offline_note() -> str:
    """Return a note for error messages if the hub is offline; otherwise an empty string."""
    return (
        " (HF_HUB_OFFLINE=1 is set: only cached models are available)"
        if os.environ.get("HF_HUB_OFFLINE") == "1"
        else ""
    )


def _load_merged(folder: Path, tokenizer: str | None) -> LoadedModel:
    """Load an adapter merged into its base in fp32 (rl.models.adapter_folders); the base may be an
    adapter.
    """
    resolve_adapter_chain(str(folder))  # raises UserError for a circular chain
    base = find_adapter_base(folder)
    loaded = load_model(base.name, tokenizer=tokenizer or base.tokenizer, seed=base.seed)
    with ignore_tied_head_warnings():
        model = merge_adapter(load_checked_adapter(loaded.model, folder))
    merged_tokenizer = (
        loaded.tokenizer
        if tokenizer is not None
        else load_tokenizer(str(folder), required=False) or loaded.tokenizer
    )
    merged = _make_loaded_model(model, merged_tokenizer, str(folder))
    attach_image_reader(merged_tokenizer, get_image_reader(model))
    return merged


def load_skeleton(base_model: str, *, tokenizer: str | None = None) -> LoadedModel:
    """Build the model of `load_model` without its weights: only the config is read.

    Call it under torch.device("meta"). Raises UserError as `load_model` does.
    """
    from transformers import AutoConfig

    if is_adapter(base_model):
        base, adapted = resolve_adapter_chain(base_model)
        return _untie_skeleton(
            load_skeleton(base.name, tokenizer=tokenizer or base.tokenizer), adapted
        )
    if base_model.startswith("tiny:"):
        return _build_tiny(base_model, tokenizer, 0)
    source = _find_source(base_model)
    try:
        with convert_config_errors(base_model):
            config = AutoConfig.from_pretrained(source)
            model = select_auto_class(config).from_config(config, dtype=torch.float32)
    except OSError as error:
        raise UserError(
            f"cannot read the config of the model {base_model!r}{_offline_note()}"
            f"{suggest_hub_name(base_model, KNOWN_MODELS, 'model')}: {error}"
        ) from error
    return LoadedModel(_disable_randomness(model), None, base_model, ())


@contextlib.contextmanager
def convert_config_errors(base_model: str) -> Iterator[None]:
    """Raise UserError for a config.json from which no model can be built."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except UserError:
        raise
    except (
        StrictDataclassError,
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        reason = " ".join(str(error).split())
        if not isinstance(error, (StrictDataclassError, ValueError)):
            reason = f"{type(error).__name__}: {reason}"
        raise UserError(
            f"cannot build a model from the config.json of {base_model}: {reason}"
        ) from error


def _untie_skeleton(loaded: LoadedModel, adapted: Collection[str]) -> LoadedModel:
    """Untie the head of a skeleton if one of the adapted modules is the head, as merging would."""
    head, embedding = loaded.model.get_output_embeddings(), loaded.model.get_input_embeddings()
    name = next((name for name, module in loaded.model.named_modules() if module is head), None)
    if (
        name is not None
        and head.weight is embedding.weight
        and any(name == module_name or name.endswith(f".{module_name}") for module_name in adapted)
    ):
        head.weight = nn.Parameter(torch.empty_like(head.weight))
        mark_head_untied(loaded.model)
    return loaded


def _attention_kwargs() -> dict[str, str]:
    """Return the attention setting: flash attention on CUDA if flash_attn is installed.

    Otherwise it is empty, which selects transformers' default.
    """
    from transformers.utils import is_flash_attn_2_available

    return (
        {"attn_implementation": "flash_attention_2"}
        if torch.cuda.is_available() and is_flash_attn_2_available()
        else {}
    )


def _dequantization_kwargs(config: Any, name: str) -> dict[str, Any]:
    """Return the setting that dequantizes a model's weights at load; {} for a plain model.

    Without it transformers would dequantize FP8 on a CPU, and train nothing of it on a GPU. Raises
    UserError for weights that cannot be dequantized.
    """
    quantization = getattr(config, "quantization_config", None)
    if not quantization:
        return {}
    from transformers.quantizers.auto import AutoQuantizationConfig

    method = quantization.get("quant_method", "an unnamed method")
    if method not in ("fp8", "mxfp4"):
        raise UserError(
            f"the weights of {name} are quantized ({method}) and cannot be trained: pass the model "
            "that they were made from"
        )
    settings = AutoQuantizationConfig.from_dict({**quantization, "dequantize": True})
    return {"quantization_config": settings}


def uses_flash_attention(model: Any) -> bool:
    """Return whether the model runs flash attention."""
    return unwrap_model(model).config._attn_implementation == "flash_attention_2"


def make_attention_mask(model: Any, attends: torch.Tensor) -> torch.Tensor:
    """Return a mask in the format of the model's attention.

    That is `attends` itself (True: may attend), or 0 and -max for eager attention, which adds it.
    """
    inner = unwrap_model(model)
    if inner.config._attn_implementation != "eager":
        return attends
    dtype = inner.get_input_embeddings().weight.dtype
    return torch.zeros(attends.shape, dtype=dtype, device=attends.device).masked_fill_(
        ~attends, torch.finfo(dtype).min
    )


@contextlib.contextmanager
def skip_packing_search(sequences: torch.Tensor | None = None) -> Iterator[None]:
    """Do not let transformers look for concatenated sequences in rows.

    It compares position ids in each forward and reads the result on the host, which waits until the
    GPU has done all earlier work. `sequences`: int64 [rows, L], the index of each position's
    sequence in its row; None if each row is a single sequence.
    """
    from transformers import masking_utils

    search = masking_utils.find_packed_sequence_indices

    def find(position_ids: torch.Tensor) -> torch.Tensor | None:
        if sequences is not None and position_ids.shape != sequences.shape:
            return search(position_ids)  # of another model, such as a reward in a thread
        return sequences

    masking_utils.find_packed_sequence_indices = find
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = search


def check_model_folder(folder: Path) -> None:
    """Raise UserError unless a folder has a model's config and weights."""
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{folder} has no config.json, so it is not a Hugging Face model folder (it "
            f"has {_list_files(folder)})"
        )
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise UserError(
            f"{folder} has a config.json but no weights (*.safetensors): nothing to train (it "
            f"has {_list_files(folder)})"
        )


def _list_files(folder: Path) -> str:
    """Return the names of up to 8 files of the folder."""
    return ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "no files"


def collect_eos_token_ids(model: Any, tokenizer: Any | None) -> tuple[int, ...]:
    """Return the union of the EOS ids of tokenizer, model config and generation config."""
    ids: set[int] = set()
    # some configs have no EOS id (CPM-Ant's)
    sources = [getattr(model.config.get_text_config(), "eos_token_id", None)]
    if getattr(model, "generation_config", None) is not None:
        sources.append(model.generation_config.eos_token_id)
    if tokenizer is not None:
        sources.append(tokenizer.eos_token_id)
    for source in sources:
        if source is not None:
            ids.update(source if isinstance(source, list | tuple) else [source])
    return tuple(sorted(ids))


def _build_tiny(base_model: str, tokenizer_name: str | None, seed: int) -> LoadedModel:
    """Build the model of a tiny preset with random weights from `seed`."""
    preset = get_model_preset(base_model)
    tokenizer = (
        load_tokenizer(tokenizer_name) if tokenizer_name else build_tiny_tokenizer(base_model)
    )
    if tokenizer is None:
        raise UserError(
            f"{base_model} has no built-in alphabet: set a tokenizer with --tokenizer (a "
            "folder or hub name)"
        )
    if preset.vision is not None:
        return _build_tiny_vision(base_model, preset, tokenizer, seed)
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**describe_tiny_text_model(preset, tokenizer))
    with seeded_torch(seed):
        model: Any = Qwen3ForCausalLM(config)
    return _make_loaded_model(model, tokenizer, base_model)


def _build_tiny_vision(
    base_model: str, preset: ModelPreset, tokenizer: Any, seed: int
) -> LoadedModel:
    """Build the tiny vision-language model of a preset."""
    from transformers import Qwen3VLForConditionalGeneration

    reader = get_image_reader(tokenizer)
    if reader is None:
        raise UserError(f"{base_model} needs its built-in tokenizer for images: omit --tokenizer")
    with seeded_torch(seed):
        model: Any = Qwen3VLForConditionalGeneration(make_tiny_vision_config(preset, tokenizer))
        initialize_vision_tower(model)
    attach_image_reader(model, reader)
    return _make_loaded_model(model, tokenizer, base_model)


def _disable_randomness(model: Any) -> Any:
    """Disable everything random in a policy or its reference; logprobs must depend only on the
    weights.

    That is dropout of values and of layers, and the noise on a router's input: rates in modules, in
    their attributes, in the config. The learner's probe detects randomness under other names
    (rl.learner.layout_probe).
    """
    for module in model.modules():
        for name, value in vars(module).items():
            if _is_rate(name, value) or (name == "p" and isinstance(module, _DROPOUTS)):
                setattr(module, name, 0.0)
    _zero_config_rates(model.config)
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
    """Return whether an attribute is a dropout or noise rate.

    Phi-MoE's `router_jitter_noise` is not a noise rate: it is a threshold between experts, in
    evaluation too.
    """
    return isinstance(value, float) and (
        "drop" in name or name in ("jitter_noise", "input_jitter_noise")
    )


def _zero_config_rates(config: Any) -> None:
    """Set the dropout and noise rates of a config, and of its parts, to 0."""
    from transformers import PreTrainedConfig

    for name, value in list(vars(config).items()):
        if _is_rate(name, value):
            setattr(config, name, 0.0)
        elif isinstance(value, PreTrainedConfig):
            _zero_config_rates(value)


@contextlib.contextmanager
def ignore_tied_head_warnings() -> Iterator[None]:
    """Silence PEFT's warnings about merging an adapter on a tied head, which is untied first
    (rl.models.adapter_folders).
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        warnings.filterwarnings("ignore", message=".*fan_in_fan_out.*")
        # deprecation warnings between PEFT and transformers
        warnings.simplefilter("ignore", FutureWarning)
        yield


def is_lora(model: Any) -> bool:
    """Return whether the model is a PEFT model."""
    from peft import PeftModel

    return isinstance(model, PeftModel)


class ValueHead(nn.Linear):
    """Compute a scalar value for each position from the output head's input, always in fp32.

    Initially zero: every value is 0, and the first gradient changes only the head, not yet the
    trunk.
    """

    def __init__(self, hidden_size: int):
        super().__init__(hidden_size, 1)

    def reset_parameters(self) -> None:  # nn.Linear's method would sample from the global generator
        """Zero the parameters."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """Return the values [T] of hidden states [T, D]."""
        with torch.autocast(hidden_TD.device.type, enabled=False):
            return nn.functional.linear(hidden_TD.float(), self.weight.float(), self.bias.float())[
                :, 0
            ]


# name of the head in the transformers model, so that its parameters' names contain "value_head."
VALUE_HEAD = "value_head"


def add_value_head(loaded: LoadedModel) -> LoadedModel:
    """Add a value head, which is trained in full even if everything else has a LoRA adapter.

    Raises UserError if the model has no output head.
    """
    inner = unwrap_model(loaded.model)
    head = inner.get_output_embeddings()
    if head is None:
        raise UserError(
            f"{loaded.name} has no output head, so the input of a value head is unknown: use "
            "a causal language model"
        )
    inner.add_module(VALUE_HEAD, ValueHead(head.weight.shape[1]))
    return loaded


def get_value_head(model: Any) -> ValueHead | None:
    """Return the model's value head; None if it has none."""
    return dict(unwrap_model(model).named_children()).get(VALUE_HEAD)


def is_value_head_parameter(parameter_name: str) -> bool:
    """Return whether a parameter belongs to the value head."""
    return f".{VALUE_HEAD}." in f".{parameter_name}"
