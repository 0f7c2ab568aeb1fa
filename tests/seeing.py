"""Images and tiny vision-language models for tests, generated locally: no hub, no files."""

import io

import numpy as np
import torch
from PIL import Image

from rl.images import ImageReader, attach_image_reader, get_image_reader, make_image_chunk
from rl.models import LoadedModel
from rl.models.model_loading import _disable_randomness
from rl.models.tokenizer_loading import build_character_tokenizer
from rl.types import EncodedTextChunk, ModelInput

LETTERS = "\n " + "".join(chr(c) for c in range(33, 127))


def make_image(seed, width=32, height=32):
    """Return a PIL image of coloured blocks."""
    blocks = np.random.default_rng(seed).integers(
        0, 255, (height // 8, width // 8, 3), dtype=np.uint8
    )
    return Image.fromarray(blocks.repeat(8, 0).repeat(8, 1))


def make_png(seed, width=32, height=32, form="PNG"):
    buffer = io.BytesIO()
    make_image(seed, width, height).save(buffer, form)
    return buffer.getvalue()


def chunk(seed, width=32, height=32):
    return make_image_chunk(make_image(seed, width, height))


def permute_pixels(inputs, seed=0):
    """Return the same image with its pixels permuted."""
    pixels = np.asarray(Image.open(io.BytesIO(inputs.data)).convert("RGB"))
    flat = pixels.reshape(-1, 3)[
        np.random.default_rng(seed).permutation(pixels.shape[0] * pixels.shape[1])
    ]
    return make_image_chunk(Image.fromarray(flat.reshape(pixels.shape)))


def encode_parts(tokenizer, *parts):
    """Return text and images as an input in Tinker's format, without `expected_tokens`."""
    return ModelInput(
        [
            EncodedTextChunk(tokenizer.encode(p, add_special_tokens=False))
            if isinstance(p, str)
            else p
            for p in parts
        ]
    )


def compute_plain_logits(model, reader, arguments):
    """Return logits [T, V] of a sequence by the transformers model, with its images through a
    single call of its image processor.
    """
    ids = torch.tensor([arguments.token_ids()])
    images = [
        Image.open(io.BytesIO(image.data)).convert("RGB")
        for _, image in arguments.images_with_positions()
    ]
    inputs = {}
    if images:
        tiles = reader.family.token_types_name == ""
        inputs = dict(
            reader.family.image_processor(images=[images] if tiles else images, return_tensors="pt")
        )
        inputs = {
            name: value
            for name, value in inputs.items()
            if name in ("pixel_values", "image_grid_thw", "pixel_attention_mask")
        }
        if not tiles:
            inputs[reader.family.token_types_name] = (ids == reader.image_token_id).long()
    with torch.no_grad():
        return model(input_ids=ids, **inputs).logits[0]


def _marks(*words):
    tokenizer = build_character_tokenizer(LETTERS, words, words[0])
    return tokenizer, {word: tokenizer.convert_tokens_to_ids(word) for word in words}


def _text(tokenizer, **more):
    sizes = dict(
        vocab_size=len(tokenizer),
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    ends = dict(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None
    )
    return sizes | dict(intermediate_size=96, max_position_embeddings=1024) | ends | more


def _qwen(config_class, model_class, vision, **more):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer, ids = _marks(
        "<|im_end|>",
        "<|im_start|>",
        "<|vision_start|>",
        "<|image_pad|>",
        "<|vision_end|>",
        "<|video_pad|>",
    )
    rope = {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 1e4}
    special = {
        "image_token_id": ids["<|image_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
    }
    special |= {
        "vision_end_token_id": ids["<|vision_end|>"],
        "video_token_id": ids["<|video_pad|>"],
    }
    text = _text(tokenizer, rope_parameters=rope, head_dim=12, tie_word_embeddings=True, **more)
    config = config_class(
        text_config=text, vision_config=vision, tie_word_embeddings=True, **special
    )
    processor = Qwen2VLImageProcessorPil(
        patch_size=4,
        merge_size=2,
        temporal_patch_size=1,
        size=dict(shortest_edge=64, longest_edge=4096),
    )
    tokenizer.chat_template = (
        "{%- for m in messages -%}<|im_start|>{{ m.role }}\n{%- if m.content is string -%}{{ "
        "m.content }}{%- else -%}"
        "{%- for p in m.content -%}{%- if p.type == 'image' "
        "-%}<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{ p.text }}"
        "{%- endif -%}{%- endfor -%}{%- endif -%}<|im_end|>\n{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
    )
    return model_class, config, tokenizer, processor, ("<|vision_start|>", "<|vision_end|>")


def _qwen2_vl():
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    vision = dict(
        depth=2,
        embed_dim=32,
        hidden_size=48,
        num_heads=2,
        mlp_ratio=2,
        patch_size=4,
        temporal_patch_size=1,
    )
    return _qwen(
        Qwen2VLConfig, Qwen2VLForConditionalGeneration, vision | dict(spatial_merge_size=2)
    )


def _qwen2_5_vl():
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = dict(
        depth=2,
        hidden_size=32,
        num_heads=2,
        intermediate_size=64,
        patch_size=4,
        temporal_patch_size=1,
        spatial_merge_size=2,
    )
    vision |= dict(out_hidden_size=48, window_size=16, fullatt_block_indexes=[1])
    return _qwen(Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, vision)


def _qwen3_vl():
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    vision = dict(
        depth=2,
        hidden_size=32,
        num_heads=2,
        intermediate_size=64,
        patch_size=4,
        temporal_patch_size=1,
        spatial_merge_size=2,
    )
    vision |= dict(out_hidden_size=48, deepstack_visual_indexes=[0], num_position_embeddings=64)
    return _qwen(Qwen3VLConfig, Qwen3VLForConditionalGeneration, vision)


def _qwen3_vl_moe():
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    vision = dict(
        depth=2,
        hidden_size=32,
        num_heads=2,
        intermediate_size=64,
        patch_size=4,
        temporal_patch_size=1,
        spatial_merge_size=2,
    )
    vision |= dict(out_hidden_size=48, deepstack_visual_indexes=[0], num_position_embeddings=64)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    return _qwen(Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration, vision, **experts)


def _gemma3():
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    tokenizer, ids = _marks(
        "<end_of_turn>",
        "<start_of_turn>",
        "<start_of_image>",
        "<image_soft_token>",
        "<end_of_image>",
    )
    text = _text(
        tokenizer,
        head_dim=12,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=12,
    )
    vision = dict(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
    )
    special = dict(boi_token_index=ids["<start_of_image>"], eoi_token_index=ids["<end_of_image>"])
    special |= dict(
        image_token_id=ids["<image_soft_token>"], image_token_index=ids["<image_soft_token>"]
    )
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **special)
    tokenizer.chat_template = (
        "{%- for m in messages -%}<start_of_turn>{{ m.role }}\n{%- if m.content is string -%}{{ "
        "m.content }}{%- else -%}"
        "{%- for p in m.content -%}{%- if p.type == 'image' -%}<start_of_image>{%- else -%}{{ "
        "p.text }}{%- endif -%}{%- endfor -%}"
        "{%- endif -%}<end_of_turn>\n{%- endfor -%}"
        "{%- if add_generation_prompt -%}<start_of_turn>assistant\n{%- endif -%}"
    )
    processor = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    return Gemma3ForConditionalGeneration, config, tokenizer, processor, ("", "")


def _smolvlm():
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    return _tiles(SmolVLMConfig, SmolVLMForConditionalGeneration, SmolVLMImageProcessorPil)


def _idefics3():
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    return _tiles(Idefics3Config, Idefics3ForConditionalGeneration, Idefics3ImageProcessorPil)


def _tiles(config_class, model_class, processor_class):
    tiles = [f"<row_{r}_col_{c}>" for r in (1, 2, 3, 4) for c in (1, 2, 3, 4)]
    tokenizer, ids = _marks(
        "<end_of_utterance>", "<image>", "<fake_token_around_image>", "<global-img>", *tiles
    )
    text = _text(tokenizer, model_type="llama", head_dim=12)
    vision = dict(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
    )
    config = config_class(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<image>"],
        scale_factor=2,
        tie_word_embeddings=False,
    )
    processor = processor_class(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}, do_image_splitting=True
    )
    tokenizer.chat_template = (
        "{%- for m in messages -%}{{ m.role }}{%- for p in m.content -%}{%- if p.type == 'image' "
        "-%}<image>"
        "{%- elif p.type == 'text' -%}{{ p.text }}{%- endif -%}{%- endfor -%}<end_of_utterance>\n"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}assistant:{%- endif -%}"
    )
    return model_class, config, tokenizer, processor, ("", "")


FAMILIES = {
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "gemma3": _gemma3,
    "smolvlm": _smolvlm,
    "idefics3": _idefics3,
}


def make_tiny_model(family, seed=0):
    """Return (a tiny model of the family with its reader, the marks around an image)."""
    model_class, config, tokenizer, processor, marks = FAMILIES[family]()
    torch.manual_seed(seed)
    model = _disable_randomness(model_class(config))
    with torch.no_grad():  # fresh weights give nearly the same logits for any image
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(4.0)
                # Gemma 3's projection is all zeros: a fresh projection ignores the image
                if not parameter.any():
                    parameter.normal_(std=0.1)
    reader = ImageReader(config, tokenizer, processor)
    attach_image_reader(model, reader)
    attach_image_reader(tokenizer, reader)
    return LoadedModel(model, tokenizer, family, (tokenizer.eos_token_id,)), marks


__all__ = [
    "FAMILIES",
    "compute_plain_logits",
    "chunk",
    "permute_pixels",
    "make_image",
    "make_png",
    "get_image_reader",
    "encode_parts",
    "make_tiny_model",
]
