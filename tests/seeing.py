"""Images and tiny vision-language models for tests, generated locally: no hub, no files."""

import importlib
import io
from functools import partial

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
    shape, rng = (height // 8, width // 8, 3), np.random.default_rng(seed)
    blocks = rng.integers(0, 255, shape, dtype=np.uint8)
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
    order = np.random.default_rng(seed).permutation(pixels.shape[0] * pixels.shape[1])
    flat = pixels.reshape(-1, 3)[order]
    return make_image_chunk(Image.fromarray(flat.reshape(pixels.shape)))


def encode_parts(tokenizer, *parts):
    """Return text and images as an input in Tinker's format, without `expected_tokens`."""

    def encode(text):
        return EncodedTextChunk(tokenizer.encode(text, add_special_tokens=False))

    return ModelInput([encode(part) if isinstance(part, str) else part for part in parts])


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
        found = reader.family.image_processor([images] if tiles else images, return_tensors="pt")
        names = ("pixel_values", "image_grid_thw", "pixel_attention_mask")
        inputs = {name: value for name, value in found.items() if name in names}
        if not tiles:
            inputs[reader.family.token_types_name] = (ids == reader.image_token_id).long()
    with torch.no_grad():
        return model(input_ids=ids, **inputs).logits[0]


def _marks(*words):
    tokenizer = build_character_tokenizer(LETTERS, words, words[0])
    return tokenizer, {word: tokenizer.convert_tokens_to_ids(word) for word in words}


def _text(tokenizer, **more):
    sizes = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    sizes |= dict(vocab_size=len(tokenizer), intermediate_size=96, max_position_embeddings=1024)
    ends = dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return sizes | ends | dict(bos_token_id=None) | more


def _template(start, end, image, prompt):
    """Return a chat template: the text around a message, that of an image, and the last line."""
    return (
        f"{{%- for m in messages -%}}{start}{{%- if m.content is string -%}}{{{{ m.content }}}}"
        "{%- else -%}{%- for p in m.content -%}{%- if p.type == 'image' -%}"
        f"{image}{{%- else -%}}{{{{ p.text }}}}{{%- endif -%}}{{%- endfor -%}}{{%- endif -%}}{end}"
        f"\n{{%- endfor -%}}{{%- if add_generation_prompt -%}}{prompt}{{%- endif -%}}"
    )


_VISION = dict(num_heads=2, patch_size=4, temporal_patch_size=1, spatial_merge_size=2, depth=2)
_TOWER = _VISION | dict(hidden_size=32, intermediate_size=64, out_hidden_size=48)
_DEEP = _TOWER | dict(deepstack_visual_indexes=[0], num_position_embeddings=64)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
# family: (the beginning of its classes' names, configuration of the tower, more of the text's)
_QWEN = {
    "qwen2_vl": ("Qwen2VL", _VISION | dict(embed_dim=32, hidden_size=48, mlp_ratio=2), {}),
    "qwen2_5_vl": ("Qwen2_5_VL", _TOWER | dict(window_size=16, fullatt_block_indexes=[1]), {}),
    "qwen3_vl": ("Qwen3VL", _DEEP, {}),
    "qwen3_vl_moe": ("Qwen3VLMoe", _DEEP, _EXPERTS),
}


def _make_qwen(family):
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    name, vision, more = _QWEN[family]
    words = ("im_end", "im_start", "vision_start", "image_pad", "vision_end", "video_pad")
    tokenizer, ids = _marks(*(f"<|{word}|>" for word in words))
    rope = {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 1e4}
    text = _text(tokenizer, rope_parameters=rope, head_dim=12, tie_word_embeddings=True, **more)
    config = getattr(transformers, f"{name}Config")(
        text_config=text,
        vision_config=dict(vision),
        tie_word_embeddings=True,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    size = dict(shortest_edge=64, longest_edge=4096)
    processor = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=1, size=size
    )
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    start, prompt = "<|im_start|>{{ m.role }}\n", "<|im_start|>assistant\n"
    tokenizer.chat_template = _template(start, "<|im_end|>", image, prompt)
    model_class = getattr(transformers, f"{name}ForConditionalGeneration")
    return model_class, config, tokenizer, processor, ("<|vision_start|>", "<|vision_end|>")


_SIGLIP = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
_SIGLIP |= dict(image_size=32, patch_size=8)


def _gemma3():
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    words = ("end_of_turn", "start_of_turn", "start_of_image", "image_soft_token", "end_of_image")
    tokenizer, ids = _marks(*(f"<{word}>" for word in words))
    layers = dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"])
    config = Gemma3Config(
        text_config=_text(tokenizer, head_dim=12, query_pre_attn_scalar=12, **layers),
        vision_config=dict(_SIGLIP),
        mm_tokens_per_image=4,
        boi_token_index=ids["<start_of_image>"],
        eoi_token_index=ids["<end_of_image>"],
        image_token_id=ids["<image_soft_token>"],
        image_token_index=ids["<image_soft_token>"],
    )
    start, prompt = "<start_of_turn>{{ m.role }}\n", "<start_of_turn>assistant\n"
    tokenizer.chat_template = _template(start, "<end_of_turn>", "<start_of_image>", prompt)
    processor = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    return Gemma3ForConditionalGeneration, config, tokenizer, processor, ("", "")


def _make_tiles(name):
    """Return a model whose images are split in tiles. `name`: how its classes' names begin."""
    import transformers

    kind = name.lower()
    processors = importlib.import_module(f"transformers.models.{kind}.image_processing_pil_{kind}")
    tiles = [f"<row_{r}_col_{c}>" for r in (1, 2, 3, 4) for c in (1, 2, 3, 4)]
    tokenizer, ids = _marks(
        "<end_of_utterance>", "<image>", "<fake_token_around_image>", "<global-img>", *tiles
    )
    config = getattr(transformers, f"{name}Config")(
        text_config=_text(tokenizer, model_type="llama", head_dim=12),
        vision_config=dict(_SIGLIP),
        image_token_id=ids["<image>"],
        scale_factor=2,
        tie_word_embeddings=False,
    )
    processor = getattr(processors, f"{name}ImageProcessorPil")(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}, do_image_splitting=True
    )
    tokenizer.chat_template = (
        "{%- for m in messages -%}{{ m.role }}{%- for p in m.content -%}{%- if p.type == 'image' "
        "-%}<image>{%- elif p.type == 'text' -%}{{ p.text }}{%- endif -%}{%- endfor -%}"
        "<end_of_utterance>\n{%- endfor -%}"
        "{%- if add_generation_prompt -%}assistant:{%- endif -%}"
    )
    model_class = getattr(transformers, f"{name}ForConditionalGeneration")
    return model_class, config, tokenizer, processor, ("", "")


FAMILIES = {
    **{family: partial(_make_qwen, family) for family in _QWEN},
    "gemma3": _gemma3,
    "smolvlm": partial(_make_tiles, "SmolVLM"),
    "idefics3": partial(_make_tiles, "Idefics3"),
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
    "FAMILIES", "compute_plain_logits", "chunk", "permute_pixels", "make_image", "make_png",
    "get_image_reader", "encode_parts", "make_tiny_model",
]  # fmt: skip
