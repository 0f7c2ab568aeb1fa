"""Build the models of scaling.py from inline configs, without weights."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

# The dense Qwen2.5 models: hidden size, layers, heads, key heads, MLP size, vocabulary, tied head.
SIZES: dict[str, tuple[int, int, int, int, int, int, bool]] = {
    "0.5B": (896, 24, 14, 2, 4864, 151_936, True),
    "1.5B": (1536, 28, 12, 2, 8960, 151_936, True),
    "3B": (2048, 36, 16, 2, 11_008, 151_936, True),
    "7B": (3584, 28, 28, 4, 18_944, 152_064, False),
    "14B": (5120, 48, 40, 8, 13_824, 152_064, False),
    "32B": (5120, 64, 40, 8, 27_648, 152_064, False),
}
NAMES = (*SIZES, "30B-A3B", "8B-VL")


def config_of(name: str) -> Any:
    """Return the config of a model by name.

    The models are Qwen2.5, Qwen3's mixture of 128 experts that routes each token to 8 of them, and
    Qwen3-VL with its vision tower.
    """
    if name == "30B-A3B":
        from transformers import Qwen3MoeConfig

        return Qwen3MoeConfig(
            hidden_size=2048,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            vocab_size=151_936,
            tie_word_embeddings=False,
            max_position_embeddings=32_768,
        )
    if name == "8B-VL":
        from transformers import Qwen3VLConfig

        text = {
            "hidden_size": 4096,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 12_288,
            "vocab_size": 151_936,
            "max_position_embeddings": 32_768,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [24, 20, 20],
                "rope_theta": 5e6,
            },
        }
        eyes = {
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "out_hidden_size": 4096,
            "deepstack_visual_indexes": [8, 16, 24],
            "num_position_embeddings": 2304,
        }
        return Qwen3VLConfig(text_config=text, vision_config=eyes, tie_word_embeddings=False)
    from transformers import Qwen2Config

    hidden, layers, heads, key_heads, mlp, vocab, tied = SIZES[name]
    return Qwen2Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        intermediate_size=mlp,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        max_position_embeddings=32_768,
    )


def skeletons(names: Sequence[str]) -> dict[str, Any]:
    """Return the models by name, without weights."""
    from rl.memory_plan.tracing import ModelSkeleton

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            config_of(name).save_pretrained(folder)
            found[name] = ModelSkeleton(folder, None, None)
    return found
