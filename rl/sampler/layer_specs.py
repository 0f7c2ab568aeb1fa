"""Describe how the layers of each family of models differ from Llama's, for the fast decoder.

A family of the same structure (attention with rotary embeddings, then a gated MLP, each after an
RMS norm) is one entry of `LAYER_SPECS`; the forward reads the entry and knows no family.
`rl.sampler.verify_decoder` compares every model with its original forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

ConfigNumber = Callable[[Any], float]
# Names of the norms before and after the attention, before and after the MLP; None: no norm. A norm
# after a part normalizes the part's output before the residual sum.
NormNames = tuple[str | None, str | None, str | None, str | None]
_POST_NORMS: NormNames = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")


def _read_one(config: Any) -> float:
    return 1.0


def _always(attention: Any) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Describe the layers of a family; the defaults are Llama's. Functions read the model's config.

    `qkv` and `gate_up`: names of the projections, in this order; a single name is a fused
    matrix. `norms`: see `NormNames`. `qk_norm`: an RMS norm of queries and keys before the
    rotation, of each "head" or over the whole "projection". `rotates`: whether an attention
    module rotates queries and keys. `norm_offset`: the norms multiply by the sum of this number
    and their weight. `activation`: of the MLP's gate, as in `hidden_act`. `attention_scale`:
    factor of the attention scores (None: D^-0.5 for a head width D); it cannot be combined with
    `qk_norm`. `embedding_scale`: factor of the token embeddings. `residual_scale`: factor of
    the outputs of attention and MLP before the residual sum. `logit_scale`: factor of the
    logits.
    """

    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    norms: NormNames = ("input_layernorm", None, "post_attention_layernorm", None)
    qk_norm: Literal["head", "projection"] | None = None
    rotates: Callable[[Any], bool] = _always
    norm_offset: float = 0.0
    activation: str = "silu"
    attention_scale: ConfigNumber | None = None
    embedding_scale: ConfigNumber = _read_one
    residual_scale: ConfigNumber = _read_one
    logit_scale: ConfigNumber = _read_one


# By the class of the model in transformers.
LAYER_SPECS: Mapping[str, LayerSpec] = {
    "LlamaForCausalLM": LayerSpec(),
    "MistralForCausalLM": LayerSpec(),
    "Qwen2ForCausalLM": LayerSpec(),
    "Qwen3ForCausalLM": LayerSpec(qk_norm="head"),
    "GraniteForCausalLM": LayerSpec(
        attention_scale=lambda config: config.attention_multiplier,
        embedding_scale=lambda config: config.embedding_multiplier,
        residual_scale=lambda config: config.residual_multiplier,
        logit_scale=lambda config: 1 / config.logits_scaling,
    ),
    "GemmaForCausalLM": LayerSpec(
        norm_offset=1.0,
        activation="gelu_pytorch_tanh",
        embedding_scale=lambda config: config.hidden_size**0.5,
    ),
    "SeedOssForCausalLM": LayerSpec(),
    "HyperCLOVAXForCausalLM": LayerSpec(
        norms=("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2"),
        attention_scale=lambda config: config.attention_multiplier,
        embedding_scale=lambda config: config.embedding_multiplier,
        residual_scale=lambda config: config.residual_multiplier,
        logit_scale=lambda config: config.logits_scaling,
    ),
    "Olmo2ForCausalLM": LayerSpec(norms=_POST_NORMS, qk_norm="projection"),
    "Phi3ForCausalLM": LayerSpec(qkv=("qkv_proj",), gate_up=("gate_up_proj",)),
    "SmolLM3ForCausalLM": LayerSpec(rotates=lambda attention: bool(attention.use_rope)),
}
