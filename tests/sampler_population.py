"""Tiny random models of many architectures of transformers for tests of the generic decoder, and
how that decodes the rows of each.
"""

from __future__ import annotations

from typing import Any

from tiny_models import VOCAB, tiny_model

__all__ = ["POPULATION", "VOCAB", "build"]

_LONGROPE = dict(
    rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4, long_factor=[4.0] * 4,
    factor=32.0, original_max_position_embeddings=32, partial_rotary_factor=1.0,
)  # fmt: skip
# Settings of model types; a suffix after a space distinguishes two models of a type.
_CHANGES: dict[str, dict[str, Any]] = {
    "falcon alibi": {"alibi": True},
    "phi3 longrope": {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 32},
    "llama4_text": {"num_local_experts": 2, "interleave_moe_layer_step": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
}
# the model types by the decoding plan of their rows
_PLANS = {
    "padded": "gpt2 llama mistral gemma2 gemma3_text cohere2 gpt_oss gpt_neo llama4_text gptj "
    "codegen gpt_neox gpt_bigcode starcoder2 opt biogpt xglm bloom mpt phi qwen3_moe mixtral "
    "deepseek_v3",
    "slots": "lfm2 qwen3_next falcon_h1 granitemoehybrid mamba mamba2",
    "equal": "bart",
    "recompute": "minimax recurrent_gemma rwkv openai-gpt",
}
POPULATION = {kind: plan for plan, kinds in _PLANS.items() for kind in kinds.split()}
POPULATION |= {"falcon alibi": "padded", "phi3 longrope": "equal"}


def build(kind: str, **changes: Any) -> Any:
    """Return a random model in eval mode; the windows are shorter than the sequences of tests."""
    settings = {"window": 8, "longest": 1024, **_CHANGES.get(kind, {}), **changes}
    return tiny_model(kind.split()[0], **settings)
