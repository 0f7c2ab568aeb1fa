"""Load or build models and tokenizers, add adapters to models, recommend settings for them."""

from rl.models import info
from rl.models.adapters import (
    adapter_base,
    found_base,
    is_adapter,
    made_from,
    merge,
    read_adapter,
    root_of,
)
from rl.models.classifiers import (
    Classifier,
    classifier_config,
    classifier_size,
    classifier_tokenizer,
    classify,
    load_classifier,
)
from rl.models.load import (
    LoadedModel,
    add_value_head,
    attention_mask_for,
    check_model_folder,
    eos_token_ids,
    inner_model,
    is_lora,
    is_value_head,
    load_model,
    load_skeleton,
    quiet_about_tied_heads,
    seeded,
    uses_flash_attention,
    value_head_of,
    vocabulary_of,
)
from rl.models.lora import add_lora, set_alpha, unadapted_share
from rl.models.lora_targets import LATER_PARTS, PARTS, belongs_to_eyes
from rl.models.presets import PRESETS
from rl.models.stored import Lazy, Unread, in_folder, shape_of
from rl.models.tokenizers import load_tokenizer
from rl.models.unread import load_unread, may_stay_unread
from rl.models.whole_weights import (
    check_tensors,
    check_whole_folder,
    load_whole_adapter,
    readable,
    weights_to_write,
)

__all__ = [
    "Classifier",
    "classifier_config",
    "classifier_size",
    "classifier_tokenizer",
    "classify",
    "load_classifier",
    "adapter_base",
    "found_base",
    "made_from",
    "merge",
    "read_adapter",
    "root_of",
    "set_alpha",
    "LATER_PARTS",
    "Lazy",
    "LoadedModel",
    "PARTS",
    "PRESETS",
    "Unread",
    "add_lora",
    "add_value_head",
    "attention_mask_for",
    "belongs_to_eyes",
    "check_model_folder",
    "check_tensors",
    "check_whole_folder",
    "eos_token_ids",
    "in_folder",
    "info",
    "inner_model",
    "is_adapter",
    "is_lora",
    "is_value_head",
    "load_model",
    "load_skeleton",
    "load_tokenizer",
    "load_unread",
    "may_stay_unread",
    "load_whole_adapter",
    "quiet_about_tied_heads",
    "readable",
    "seeded",
    "shape_of",
    "unadapted_share",
    "uses_flash_attention",
    "value_head_of",
    "weights_to_write",
    "vocabulary_of",
]
