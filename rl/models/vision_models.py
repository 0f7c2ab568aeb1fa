"""Load vision-language models: the class, the image reader, and the tiny model built locally."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl.errors import UserError
from rl.images import VISION_FAMILIES, ImageReader, attach_image_reader, get_image_reader
from rl.models.tiny_models import ModelPreset

# Special tokens of the tiny vision tokenizer. The image tokens are spelled as in Qwen's models.
USER, ASSISTANT, SYSTEM, END = "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"
IMAGE_BEGIN, IMAGE, IMAGE_END, VIDEO = (
    "<|vision_start|>",
    "<|image_pad|>",
    "<|vision_end|>",
    "<|video_pad|>",
)
VISION_TOKENS = (USER, ASSISTANT, SYSTEM, END, IMAGE_BEGIN, IMAGE, IMAGE_END, VIDEO)
TINY_CHAT_TEMPLATE = (
    "{%- for message in messages -%}<|{{ message.role }}|>{%- if message.content is string -%}{{ "
    "message.content }}{%- else -%}{%- for part in message.content -%}{%- if part.type == 'image' "
    "-%}<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{ part.text }}{%- endif -%}{%- "
    "endfor -%}{%- endif -%}<|end|>{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- "
    "endif -%}"
)


def select_auto_class(config: Any) -> Any:
    """Return the auto class that loads a model of this config.

    It loads the vision tower if the family's images are supported, else a causal language model.
    Raises UserError for an architecture with unsupported images and no separate class for its text
    model.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    kind = config.model_type
    if kind in VISION_FAMILIES and getattr(config, "vision_config", None) is not None:
        return AutoModelForImageTextToText
    if (
        kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    ):
        raise UserError(
            f"images are not supported for the architecture {kind!r}; "
            f"supported: {', '.join(VISION_FAMILIES)}"
        )
    return AutoModelForCausalLM


def find_auto_class(name: str) -> Any:
    """Return the auto class of a folder or hub name.

    Raises OSError or ValueError if its config cannot be loaded.
    """
    from transformers import AutoConfig

    return select_auto_class(AutoConfig.from_pretrained(name))


def attach_image_processor(model: Any, tokenizer: Any | None, source: str) -> None:
    """Attach the image reader to a model and its tokenizer, if the model has a vision tower and an
    image processor.

    The image processor is loaded from `source`.
    """
    if tokenizer is not None and model.config.model_type in VISION_FAMILIES:
        reader = get_image_reader(tokenizer) or _make_image_reader(model.config, tokenizer, source)
        attach_image_reader(model, reader)
        attach_image_reader(tokenizer, reader)


def load_image_processor(tokenizer: Any | None, source: str) -> None:
    """Attach the image reader to a tokenizer that belongs to a vision-language model."""
    from transformers import AutoConfig

    folder = Path(source).expanduser()
    if tokenizer is None or (folder.is_dir() and not _has_image_processor(folder)):
        return
    try:
        config = AutoConfig.from_pretrained(str(folder) if folder.is_dir() else source)
    except (OSError, ValueError):  # a tokenizer without a model next to it
        return
    if config.model_type in VISION_FAMILIES:
        attach_image_reader(tokenizer, _make_image_reader(config, tokenizer, source))


def _make_image_reader(config: Any, tokenizer: Any, source: str) -> ImageReader | None:
    """Return the image reader; None if `source` has no image processor.

    Without it the model is trained on text only, and images in its input are an error.
    """
    from transformers import AutoImageProcessor

    folder = Path(source).expanduser()
    if folder.is_dir() and not _has_image_processor(folder):
        return None
    try:
        name = str(folder) if folder.is_dir() else source
        processor = AutoImageProcessor.from_pretrained(name)
    except (OSError, ValueError, ImportError):
        return None
    return ImageReader(config, tokenizer, processor)


def _has_image_processor(folder: Path) -> bool:
    """Return whether a folder has an image processor."""
    return any(
        (folder / name).is_file() for name in ("preprocessor_config.json", "processor_config.json")
    )


def describe_tiny_text_model(preset: ModelPreset, tokenizer: Any) -> dict[str, Any]:
    """Return the fields of a Qwen3 config of the preset's size."""
    return dict(
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


def make_tiny_vision_config(preset: ModelPreset, tokenizer: Any) -> Any:
    """Return the config of a Qwen3-VL of the preset's size."""
    from transformers import Qwen3VLConfig

    assert preset.vision is not None
    tower, width = preset.vision, preset.hidden // preset.heads
    # the shares of time, height and width in the rotary frequencies, as equal as possible
    side = width // 2 // 3
    text = describe_tiny_text_model(preset, tokenizer) | {
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [width // 2 - 2 * side, side, side],
            "mrope_interleaved": True,
            "rope_theta": 1e4,
        }
    }
    vision = dict(
        depth=tower.layers,
        hidden_size=tower.hidden,
        num_heads=tower.heads,
        intermediate_size=2 * tower.hidden,
        patch_size=tower.patch,
        temporal_patch_size=1,
        spatial_merge_size=tower.merge,
        out_hidden_size=preset.hidden,
        deepstack_visual_indexes=[0],
        num_position_embeddings=(tower.pixels // tower.patch) ** 2,
    )
    ids = dict(
        zip(
            ("vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id"),
            VISION_TOKENS[4:],
            strict=True,
        )
    )
    special = {name: tokenizer.convert_tokens_to_ids(word) for name, word in ids.items()}
    return Qwen3VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=True, **special
    )


def initialize_vision_tower(model: Any) -> None:
    """Reinitialize the tower's matrices with a standard deviation of 1 / sqrt(inputs), from torch's
    generator.

    transformers uses a standard deviation of 0.02, which suits widths of about a thousand. At a
    width of 64, the tower's output then hardly affects the text model, and training spends its
    first hundreds of steps on scaling it up.
    """
    import torch

    with torch.no_grad():
        for name, parameter in model.model.visual.named_parameters():
            if parameter.ndim >= 2 and "pos_embed" not in name:
                parameter.normal_(std=(parameter.numel() // parameter.shape[0]) ** -0.5)


def make_tiny_image_processor(preset: ModelPreset) -> Any:
    """Return Qwen's image processor with patches of the preset's size.

    Images keep their shape, and are scaled down above `pixels` x `pixels`.
    """
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tower = preset.vision
    assert tower is not None
    least = tower.patch * tower.merge
    return Qwen2VLImageProcessorPil(
        patch_size=tower.patch,
        merge_size=tower.merge,
        temporal_patch_size=1,
        size={"shortest_edge": least * least, "longest_edge": tower.pixels * tower.pixels},
    )


def make_tiny_image_reader(preset: ModelPreset, tokenizer: Any) -> ImageReader:
    """Return the image reader of a tiny preset."""
    return ImageReader(
        make_tiny_vision_config(preset, tokenizer), tokenizer, make_tiny_image_processor(preset)
    )
