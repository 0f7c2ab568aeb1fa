"""Load or build models and tokenizers, add adapters to models, recommend settings for them."""

from rl.models import info
from rl.models.adapter_folders import (
    find_adapter_base,
    is_adapter,
    locate_base,
    merge_adapter,
    read_adapter_config,
    read_base_name,
    resolve_adapter_chain,
)
from rl.models.check_weights import (
    check_tensors,
    check_weight_names_and_shapes,
    convert_read_errors,
    load_checked_adapter,
)
from rl.models.lazy_safetensors import (
    LazyTensors,
    SafetensorsWeights,
    get_tensor_shape,
    open_lazy_tensors,
)
from rl.models.lora_adapters import add_lora, compute_unadapted_share, set_lora_alpha
from rl.models.lora_targets import (
    is_head_tied,
    is_vision_parameter,
    resolve_head,
)
from rl.models.model_loading import (
    LoadedModel,
    add_value_head,
    check_model_folder,
    collect_eos_token_ids,
    get_value_head,
    get_vocab_size,
    ignore_tied_head_warnings,
    is_lora,
    is_value_head_parameter,
    load_model,
    load_model_lazily,
    load_skeleton,
    make_attention_mask,
    seeded_torch,
    skip_packing_search,
    supports_lazy_loading,
    unwrap_model,
    uses_flash_attention,
)
from rl.models.reward_classifiers import (
    LoadedClassifier,
    count_classifier_parameters,
    load_classifier,
    load_classifier_config,
    load_classifier_tokenizer,
    score_inputs,
)
from rl.models.tiny_models import MODEL_PRESETS
from rl.models.tokenizer_loading import load_tokenizer
from rl.models.weight_files import write_weights

__all__ = [
    "LoadedClassifier",
    "load_classifier_config",
    "count_classifier_parameters",
    "load_classifier_tokenizer",
    "score_inputs",
    "load_classifier",
    "read_base_name",
    "locate_base",
    "find_adapter_base",
    "merge_adapter",
    "read_adapter_config",
    "resolve_adapter_chain",
    "set_lora_alpha",
    "LazyTensors",
    "LoadedModel",
    "MODEL_PRESETS",
    "SafetensorsWeights",
    "add_lora",
    "add_value_head",
    "make_attention_mask",
    "skip_packing_search",
    "is_vision_parameter",
    "check_model_folder",
    "check_tensors",
    "check_weight_names_and_shapes",
    "collect_eos_token_ids",
    "open_lazy_tensors",
    "info",
    "unwrap_model",
    "is_adapter",
    "is_head_tied",
    "is_lora",
    "resolve_head",
    "is_value_head_parameter",
    "load_model",
    "load_skeleton",
    "load_tokenizer",
    "load_model_lazily",
    "supports_lazy_loading",
    "load_checked_adapter",
    "ignore_tied_head_warnings",
    "convert_read_errors",
    "seeded_torch",
    "get_tensor_shape",
    "compute_unadapted_share",
    "uses_flash_attention",
    "get_value_head",
    "write_weights",
    "get_vocab_size",
]
