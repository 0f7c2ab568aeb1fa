"""Tiny random models of many architectures of transformers, by model type, for tests of the generic
decoder.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 41
# Applied where a configuration has the field.
_SMALL: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=1024,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
    n_embd=32,
    n_layer=2,
    n_head=4,
    n_positions=1024,
    d_model=32,
    n_layers=2,
    n_heads=4,
    num_layers=4,
    num_heads=4,
    ffn_dim=48,
    embed_dim=32,
    word_embed_proj_dim=32,
    encoder_layers=2,
    decoder_layers=2,
    decoder_attention_heads=4,
    decoder_ffn_dim=48,
    moe_intermediate_size=24,
    num_local_experts=4,
    num_experts=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    attention_window_size=8,
    sliding_window=8,
    attention_chunk_size=8,
    window_size=8,
    lru_width=32,
    state_size=8,
    mamba_d_state=8,
    mamba_n_heads=4,
    mamba_d_head=16,
    rotary_dim=4,
    n_inner=48,
    n_ctx=1024,
)
_MIXED = ["sliding_attention", "full_attention"] * 2
_LATENT = dict(
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
    num_key_value_heads=4,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
)
_LONGROPE = dict(
    rope_type="longrope",
    rope_theta=1e4,
    short_factor=[1.0] * 4,
    long_factor=[4.0] * 4,
    factor=32.0,
    original_max_position_embeddings=32,
    partial_rotary_factor=1.0,
)

# Maps a model type (a suffix after a space distinguishes two of a type) to (decoding plan of its
# rows, settings).
POPULATION: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("padded", {}),
    "llama": ("padded", {}),
    "mistral": ("padded", {}),
    "gemma2": ("padded", {"layer_types": _MIXED}),
    "gemma3_text": ("padded", {"layer_types": _MIXED}),
    "cohere2": ("padded", {"layer_types": _MIXED}),
    "gpt_oss": ("padded", {"layer_types": _MIXED}),
    "gpt_neo": ("padded", {"attention_types": [[["global", "local"], 1]], "num_layers": 2}),
    "llama4_text": ("padded", {"layer_types": ["chunked_attention"] * 3 + ["full_attention"],
        "no_rope_layers": [1, 1, 1, 0], "num_local_experts": 2, "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 48}),
    "gptj": ("padded", {}),
    "codegen": ("padded", {}),
    "gpt_neox": ("padded", {}),
    "gpt_bigcode": ("padded", {}),
    "starcoder2": ("padded", {}),
    "opt": ("padded", {}),
    "biogpt": ("padded", {}),
    "xglm": ("padded", {}),
    "bloom": ("padded", {}),
    "mpt": ("padded", {}),
    "falcon alibi": ("padded", {"alibi": True}),
    "phi": ("padded", {}),
    "phi3 longrope": ("equal", {"rope_parameters": _LONGROPE,
        "original_max_position_embeddings": 32}),
    "qwen3_moe": ("padded", {}),
    "mixtral": ("padded", {}),
    "deepseek_v3": ("padded", _LATENT),
    "lfm2": ("slots", {"layer_types": ["conv", "full_attention", "conv", "conv"]}),
    "qwen3_next": ("slots", {"linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8}),
    "falcon_h1": ("slots", {"mamba_d_ssm": 64, "mamba_n_groups": 1, "mamba_chunk_size": 8,
        "num_hidden_layers": 2}),
    "granitemoehybrid": ("slots", {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2,
        "shared_intermediate_size": 16, "mamba_n_groups": 1}),
    "mamba": ("slots", {}),
    "mamba2": ("slots", {"head_dim": 16, "expand": 2, "n_groups": 1, "chunk_size": 8}),
    "bart": ("equal", {}),
    "minimax": ("recompute", {}),
    "recurrent_gemma": ("recompute", {}),
    "rwkv": ("recompute", {"attention_hidden_size": 32, "context_length": 1024}),
    "openai-gpt": ("recompute", {}),
}  # fmt: skip


def build(kind: str, **changes: Any) -> Any:
    """Return a random model in eval mode. Its matrices are large enough for errors to show."""
    model_type = kind.split()[0]
    defaults = AutoConfig.for_model(model_type).to_dict()
    settings = {name: value for name, value in _SMALL.items() if name in defaults}
    if defaults.get("layer_types"):
        settings["layer_types"] = (list(dict.fromkeys(defaults["layer_types"])) * 4)[:4]
    settings |= {**POPULATION.get(kind, ("", {}))[1], **changes}
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **settings), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.15)
    return model.eval()
