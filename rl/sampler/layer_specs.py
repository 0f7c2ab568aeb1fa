"""Describe how the layers of each family of models differ from Llama's, for the fast decoder.

A family of the same structure (attention with rotary embeddings, then a gated MLP, each after an
RMS norm) is one entry of `LAYER_SPECS`; the forward reads the entry and knows no family.
`rl.sampler.verify_decoder` compares every model with its original forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

ConfigNumber = Callable[[Any], float]
# Names of the norms before and after the attention, before and after the MLP; None: no norm. A norm
# after a part normalizes the part's output before the residual sum.
NormNames = tuple[str | None, str | None, str | None, str | None]
_POST_NORMS: NormNames = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")


def _read_one(config: Any) -> float:
    return 1.0


def _read_zero(config: Any) -> float:
    return 0.0


def _always(module: Any) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """Describe the mixture-of-experts block of a family, in the layers whose MLP has `experts`.

    `router`: name of the module with the router's weight. `normalizes`: whether the weights of a
    token's experts are scaled to the sum 1. `shared`: names of the expert that every token uses and
    of the layer that scores it.
    """

    router: str = "gate"
    normalizes: Callable[[Any], bool] = lambda config: config.norm_topk_prob
    shared: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Describe the layers of a family; the defaults are Llama's. Functions read the model's config.

    `mlp`: name of the MLP. `experts`: of a mixture of experts.
    `qkv` and `gate_up`: names of the projections, in this order; a single name is a fused
    matrix. `norms`: see `NormNames`. `qk_norm`: an RMS norm of queries and keys before the
    rotation, of each "head" or over the whole "projection". `rotates`: whether an attention
    module rotates queries and keys. `norm_offset`: the norms multiply by the sum of this number
    and their weight. `activation`: of the MLP's gate, as in `hidden_act`. `attention_scale`:
    factor of the attention scores (None: D^-0.5 for a head width D). `attention_softcap`,
    `logit_softcap`: limits of scores and logits (0: none), see `kernels.AttentionBounds`.
    `windows`: sliding windows are read. `embedding_scale`: factor of the token embeddings.
    `residual_scale`: factor of the outputs of attention and MLP before the residual sum.
    `logit_scale`: factor of the logits.
    """

    mlp: str = "mlp"
    experts: ExpertSpec | None = None
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    norms: NormNames = ("input_layernorm", None, "post_attention_layernorm", None)
    qk_norm: Literal["head", "projection"] | None = None
    rotates: Callable[[Any], bool] = _always
    norm_offset: float = 0.0
    activation: str = "silu"
    attention_scale: ConfigNumber | None = None
    attention_softcap: ConfigNumber = _read_zero
    windows: bool = False
    embedding_scale: ConfigNumber = _read_one
    residual_scale: ConfigNumber = _read_one
    logit_scale: ConfigNumber = _read_one
    logit_softcap: ConfigNumber = _read_zero


_GEMMA = LayerSpec(
    norm_offset=1.0,
    activation="gelu_pytorch_tanh",
    embedding_scale=lambda config: config.hidden_size**0.5,
)
_LATER_GEMMA = replace(
    _GEMMA,
    attention_scale=lambda config: config.query_pre_attn_scalar**-0.5,
    logit_softcap=lambda config: config.final_logit_softcapping or 0.0,
    windows=True,
    norms=(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
)
_GEMMA2 = replace(
    _LATER_GEMMA, attention_softcap=lambda config: config.attn_logit_softcapping or 0.0
)
_WINDOWS = LayerSpec(windows=True)
_GRANITE = LayerSpec(
    attention_scale=lambda config: config.attention_multiplier,
    embedding_scale=lambda config: config.embedding_multiplier,
    residual_scale=lambda config: config.residual_multiplier,
    logit_scale=lambda config: 1 / config.logits_scaling,
)
_NORMALIZED = ExpertSpec(normalizes=_always)
# By the class of the model in transformers.
LAYER_SPECS: Mapping[str, LayerSpec] = {
    "LlamaForCausalLM": LayerSpec(),
    "CwmForCausalLM": _WINDOWS,
    "MinistralForCausalLM": _WINDOWS,
    "MistralForCausalLM": _WINDOWS,
    "Qwen2ForCausalLM": _WINDOWS,
    "Qwen3ForCausalLM": LayerSpec(qk_norm="head", windows=True),
    "GraniteForCausalLM": _GRANITE,
    "GemmaForCausalLM": _GEMMA,
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": replace(_LATER_GEMMA, qk_norm="head"),
    "VaultGemmaForCausalLM": replace(
        _GEMMA2, norms=("input_layernorm", None, "pre_feedforward_layernorm", None)
    ),
    "SeedOssForCausalLM": LayerSpec(),
    "HyperCLOVAXForCausalLM": replace(
        _GRANITE,
        norms=("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2"),
        logit_scale=lambda config: config.logits_scaling,
    ),
    "Exaone4ForCausalLM": LayerSpec(
        norms=_POST_NORMS,
        qk_norm="head",
        windows=True,
        rotates=lambda attention: attention.sliding_window is None or attention.is_sliding,
    ),
    "Olmo2ForCausalLM": LayerSpec(norms=_POST_NORMS, qk_norm="projection"),
    "Olmo3ForCausalLM": LayerSpec(norms=_POST_NORMS, qk_norm="projection", windows=True),
    "Phi3ForCausalLM": LayerSpec(qkv=("qkv_proj",), gate_up=("gate_up_proj",), windows=True),
    "SmolLM3ForCausalLM": LayerSpec(
        windows=True, rotates=lambda attention: bool(attention.use_rope)
    ),
    "Qwen3MoeForCausalLM": LayerSpec(qk_norm="head", windows=True, experts=ExpertSpec()),
    "Qwen2MoeForCausalLM": LayerSpec(
        windows=True, experts=ExpertSpec(shared=("shared_expert", "shared_expert_gate"))
    ),
    "MixtralForCausalLM": LayerSpec(windows=True, experts=_NORMALIZED),
    "OlmoeForCausalLM": LayerSpec(qk_norm="projection", experts=ExpertSpec()),
    "FlexOlmoForCausalLM": LayerSpec(norms=_POST_NORMS, qk_norm="projection", experts=ExpertSpec()),
    "GraniteMoeForCausalLM": replace(
        _GRANITE,
        mlp="block_sparse_moe",
        experts=replace(_NORMALIZED, router="router"),
    ),
}
