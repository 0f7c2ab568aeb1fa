"""Build a tiny random model of every causal LM in transformers.

The models have a few dozen tokens and channels.
Configs shrink by the names of their numeric fields, for all architectures. SPECIAL holds the
exceptions. Windows are 40 tokens: too long for cheap trials, but shorter than the sequences that
the table compares.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB, WINDOW, LONGEST = 64, 40, 256

# Names of size fields in the architectures' configs.
_NAMES: dict[int, str] = {
    VOCAB: "vocab_size n_vocab vocab_size_per_layer_input",
    WINDOW: "sliding_window sliding_window_size attention_chunk_size window_size "
    "attention_window_size local_attention",
    LONGEST: "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length "
    "max_target_positions",
    48: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim dim_ff d_ff "
    "shared_expert_intermediate_size shared_intermediate_size mlp_intermediate_size "
    "feed_forward_size block_ff_dim expert_ffn_hidden_size ffn_hidden_size "
    "intermediate_size_mlp moe_shared_expert_intermediate_size",
    32: "hidden_size d_model n_embd word_embed_proj_dim embedding_size lru_width dim_model",
    24: "moe_intermediate_size n_inner expert_intermediate_size",
    16: "mamba_chunk_size index_topk",
    8: "head_dim attention_head_dim d_kv kv_channels global_head_dim swa_head_dim swa_v_head_dim "
    "v_head_dim qk_nope_head_dim linear_key_head_dim linear_value_head_dim mamba_d_head "
    "mamba_head_dim dim_head index_head_dim attention_hidden_size kv_lora_rank q_lora_rank "
    "index_n_heads o_lora_rank state_size mamba_d_state ssm_state_size d_state mamba_n_heads "
    "mamba_num_heads n_mamba_heads hidden_size_per_layer_input laurel_rank",
    4: "num_hidden_layers n_layer n_layers num_layers decoder_layers num_attention_heads n_head "
    "n_heads decoder_attention_heads encoder_attention_heads num_heads qk_rope_head_dim "
    "rotary_dim linear_num_value_heads num_experts_per_tok_total num_experts num_local_experts "
    "n_routed_experts moe_num_experts",
    2: "num_key_value_heads num_global_key_value_heads n_head_kv num_kv_heads "
    "swa_num_key_value_heads linear_num_key_heads num_experts_per_tok moe_k moe_topk moe_top_k "
    "top_k_experts num_experts_per_token eos_token_id sep_token_id "
    "eod_token_id",
    1: "encoder_layers n_group topk_group n_shared_experts num_shared_experts "
    "moe_num_shared_experts first_k_dense_replace num_dense_layers moe_layer_start_index "
    "mamba_n_groups n_groups mamba_ngroups bos_token_id decoder_start_token_id",
    0: "pad_token_id",
}
SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}
SIZES |= dict.fromkeys(("mamba_d_ssm", "mamba_dt_rank", "time_step_rank"), 64)
_EVEN_UNSET = {
    "head_dim", "num_key_value_heads", "n_routed_experts", "num_experts_per_tok",
    "n_shared_experts", "pad_token_id", "intermediate_size",
}  # fmt: skip
# The rotary embedding uses head_dim, which is the size of the rotary part.
_MLA = {"head_dim": 4, "num_key_value_heads": 4}
_MLA_TYPES = (
    "axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa longcat_flash "
    "minicpm3 youtu"
)
_ENCODERS = (
    "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert "
    "roberta roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl"
)
SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(_MLA_TYPES.split(), _MLA),
    "bailing_hybrid": {"head_dim": 4, "linear_head_dim": 8, "linear_num_heads": 4,
        "layer_group_size": 4, "num_key_value_heads": 4, "num_expert_group": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    "cohere_compass_text": {"rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dots3_note_text": {"num_key_value_heads": 4},
    "dots3_note": {"num_key_value_heads": 4},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "num_key_value_heads": 2,
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2}},
    "gemma3n_text": {"num_kv_shared_layers": 1, "num_hidden_layers": 5,
        "intermediate_size": [48] * 5, "activation_sparsity_pattern": [0.0] * 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8},
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    **dict.fromkeys(("lfm2", "lfm2_moe"), {"layer_types": ["conv", "full_attention"] * 2}),
    "mamba": {},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 16},
    "kimi_linear": {"head_dim": 4, "linear_head_dim": 8, "linear_num_heads": 4},
    "modernbert-decoder": {"cls_token_id": 1, "global_attn_every_n_layers": 2},
    "nemotron": {"num_key_value_heads": 2},
    "phi4_multimodal": {"vision_config": {"hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4},
        "audio_config": {"hidden_size": 32, "intermediate_size": 48, "num_blocks": 2,
        "num_attention_heads": 4, "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32,
        "nemo_conv_channels": 32}},
    "prophetnet": {"num_decoder_layers": 2, "num_encoder_layers": 1,
        "num_decoder_attention_heads": 4, "num_encoder_attention_heads": 4, "is_decoder": True,
        "add_cross_attention": False},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8,
        "indexer_budget": 16, "indexer_compress_ratio": 2, "hc_lowrank": 8, "ple_embed_dim": 8,
        "ngram_vocab_size_base": 97, "split_ngram_parts": 2,
        "make_ngram_vocab_size_divisible_by": 1},
    "reformer": {"is_decoder": True, "attn_layers": ["local", "lsh"] * 2,
        "axial_pos_shape": [16, 16], "axial_pos_embds_dim": [16, 16]},
    "xglm": {"num_layers": 2, "attention_heads": 4},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "attention_hidden_size": 64,
        "attention_head_dim": 16, "num_key_value_heads": 4, "mamba_dt_rank": 4, "n_mamba_heads": 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "hybrid_layer_ids": [1, 3],
        "attention_hidden_size": 64, "attention_head_dim": 16, "num_key_value_heads": 4,
        "mamba_headdim": 8, "n_mamba_heads": 8, "kv_channels": 16, "num_query_groups": 4,
        "chunk_size": 16, "adapter_rank": 8},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
    **dict.fromkeys(_ENCODERS.split(), {"is_decoder": True}),
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "xlm": {"emb_dim": 32, "causal": True, "n_langs": 1},
    "ctrl": {"dff": 48},
    "xlnet": {"d_inner": 48, "n_head": 4, "d_head": 8},
    "roc_bert": {"is_decoder": True, "pronunciation_vocab_size": 16, "shape_vocab_size": 16,
        "pronunciation_embed_dim": 8, "shape_embed_dim": 8},
}  # fmt: skip
# Gates, decays and steps of recurrences, which must keep their initial scale.
_AS_BUILT = (
    "A_log", "dt_", "time_", "decay", "a_param", "recurrent", ".D", "learnable_skip", "inv_freq",
)  # fmt: skip


def model_types() -> list[str]:
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """Return the architecture's text config at a small size; `changes` take precedence."""
    kind: Any = CONFIG_MAPPING[model_type]
    parts = getattr(kind, "sub_configs", {})
    text = next((name for name in ("text_config", "decoder") if name in parts), None)
    if (
        text is not None
        and hasattr(parts[text], "model_type")
        and parts[text].model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    ):
        return tiny_config(parts[text].model_type, **changes)
    known = kind().to_dict()
    names = {*known, *getattr(kind, "attribute_map", {}).values()} & SIZES.keys()
    settings: dict[str, Any] = {
        name: SIZES[name] for name in names if known.get(name) is not None or name in _EVEN_UNSET
    }
    settings.update(SPECIAL.get(model_type, {}))
    return kind(**{**settings, **changes})


def tiny_model(model_type: str, seed: int = 0, large: bool = True, **changes: Any) -> Any:
    """Return a random model in evaluation mode.

    With `large`, the weights are so large that every layer matters; otherwise they keep the
    architecture's initialization.
    """
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(tiny_config(model_type, **changes))
    if large:
        enlarge(model)
    return model.eval()


@torch.no_grad()
def enlarge(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if any(part in name for part in _AS_BUILT):
            continue
        if parameter.ndim >= 2:
            parameter.normal_(0, 0.15)
        else:
            parameter.add_(0.2 * torch.randn_like(parameter))
