"""Decode models of the Llama family (Llama, Mistral, Qwen2, Qwen3) with a hand-written forward.

The KV cache is allocated in advance. Tests prove that the results equal those of `decoder_hf`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from rl.layers import describe
from rl.sampler.cache import LogitsReader
from rl.sampler.cache_fast import FastState
from rl.sampler.decoder import Decoder, NamedTensors
from rl.sampler.forward_fast import Architecture, FastForward, LayerSpec
from rl.sampler.projections import Embedding, Projection
from rl.sampler.split import Team, check_splits
from rl.sampler.weights import Builder, Unsupported, unwrap
from rl.types import PlacedImage

_MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# rope types whose frequencies do not depend on the length of the sequence
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")


class FastDecoder(FastForward, Decoder):
    """Decode with the hand-written forward; built by `from_model`, or by `fork` from another
    version.
    """

    @classmethod
    def from_model(
        cls,
        model: Any,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        base: FastDecoder | None = None,
        team: Team | None = None,
    ) -> FastDecoder:
        """Copy the weights of a HF model.

        `base`: a decoder of the model without adapters; its memory is shared for equal weights
        instead of copied. `team`: the ranks that split the decoder, all of which call this
        function. Raises `Unsupported` with the reason if the tests of this decoder do not cover the
        model, UserError if the ranks cannot split the model evenly.
        """
        plain = model.get_base_model() if type(model).__module__.startswith("peft.") else model
        check_supported(plain)
        if team is not None:
            check_splits(plain.config, team)
        embedding = unwrap(plain.model.embed_tokens).base.weight
        base_weights = None if base is None else base.weights
        builder = Builder(
            model, dtype or embedding.dtype, device or embedding.device, base_weights, team
        )
        with torch.no_grad():
            decoder = cls(_read_architecture(plain, builder), builder.weights)
        if base is not None and base.weights.buffers.keys() <= decoder.weights.shared:
            decoder.base = base
            base.weights.shared = set(base.weights.buffers)
        return decoder

    def load_(self, named_tensors: NamedTensors) -> None:
        with torch.no_grad():
            self.weights.load_(named_tensors)

    def held_in(self, name: str) -> torch.dtype | None:
        return self.weights.view(name).dtype if name in self.weights.pieces else None

    def fork(self) -> FastDecoder:
        with torch.no_grad():
            other = FastDecoder(self.architecture, self.weights.fork())
        other.base = self.base
        return other

    def parts(self) -> Iterator[Projection | Embedding]:
        """Yield every module that an adapter may modify, in a fixed order for all decoders of an
        architecture.
        """
        yield self.embed
        for layer in self.layers:
            yield from (layer.qkv, layer.out, layer.gate_up, layer.down)
        yield self.head

    def few(self, layers: int, words: int) -> FastDecoder:
        """Return a truncated copy for a trial: the first layers and the first outputs of the head.

        The copy shares the weights.
        """
        other = copy.copy(self)
        other.architecture = replace(
            self.architecture, layers=self.architecture.layers[:layers], vocab_size=words
        )
        other.layers, other.head, other.vocab_size = (
            self.layers[:layers],
            self.head.first(words),
            words,
        )
        return other

    def new_state(self, kv_cache_tokens: int) -> FastState:
        return FastState(self, kv_cache_tokens)

    def read_prompts(
        self,
        prompts: Sequence[Sequence[int]],
        readers: Sequence[LogitsReader],
        images: Sequence[Sequence[PlacedImage]] = (),
    ) -> None:
        self.forward_prompts(prompts, readers, keep=None)


# ---------------------------------------------------------------------------------- reading a model


def check_supported(base: Any) -> None:
    """Raise `Unsupported` unless the tests cover the architecture and the features of the model."""
    name, config = type(base).__name__, base.config
    if name not in _MODELS or not type(base).__module__.startswith("transformers."):
        raise Unsupported(f"the architecture {name} (known: {', '.join(_MODELS)})")
    if (others := describe(base).others) is not None:
        raise Unsupported(others)
    if config.hidden_act != "silu":
        raise Unsupported(f"the activation {config.hidden_act}")
    rope = base.model.rotary_emb
    if rope.rope_type not in _STATIC_ROPE:
        raise Unsupported(f"rope of type {rope.rope_type}, its frequencies change with the length")
    head_width = base.model.layers[0].self_attn.head_dim
    if len(rope.inv_freq) * 2 != head_width:
        raise Unsupported(f"rope over {len(rope.inv_freq) * 2} of {head_width} channels")


def held_whole(model: Any) -> tuple[int, int]:
    """Return (numbers of the base weights, numbers of the adapters) that every rank holds
    completely.

    The model passes `check_supported`. No weight is read.
    """
    plain = model.get_base_model() if type(model).__module__.startswith("peft.") else model
    builder = Builder(model, torch.float32, torch.device("meta"), team=_Planned())
    _read_weights(plain, builder)
    whole = {
        (piece.buffer, piece.start): (name, piece)
        for name, piece in builder.weights.pieces.items()
        if piece.cut.stop is None
    }
    sizes = {name: math.prod(piece.whole) for name, piece in whole.values()}
    adapters = sum(size for name, size in sizes.items() if "lora_" in name)
    return sum(sizes.values()) - adapters, adapters


class _Planned:
    """Stand in for a `Team`, to compute what its ranks would hold. Communication is not
    implemented.
    """

    rank, size = 0, 2

    def sum_(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        raise NotImplementedError

    first_ = sum_


def _read_architecture(base: Any, builder: Builder) -> Architecture:
    """Copy every weight into the builder's buffers and record its buffer key."""
    config = base.config
    ranks = 1 if builder.team is None else builder.team.size
    return Architecture(
        **_read_weights(base, builder),
        heads=config.num_attention_heads // ranks,
        key_heads=config.num_key_value_heads // ranks,
        head_width=base.model.layers[0].self_attn.head_dim,
        eps=config.rms_norm_eps,
        inv_freq=base.model.rotary_emb.inv_freq.detach().float().cpu(),
        rope_scale=float(base.model.rotary_emb.attention_scaling),
        vocab_size=unwrap(base.model.embed_tokens).base.weight.shape[0],
        max_positions=config.max_position_embeddings,
    )


def _read_weights(base: Any, builder: Builder) -> dict[str, Any]:
    """Return the fields of an `Architecture` that hold buffer keys."""
    embedding = unwrap(base.model.embed_tokens)
    embed = builder.tensor("embed", embedding.base.weight, 0)
    adapter = None
    if embedding.lora_a is not None and embedding.lora_b is not None:
        a_key, b_key = (
            builder.adapter("embed.lora_a", embedding.lora_a, 1),
            builder.adapter("embed.lora_b", embedding.lora_b),
        )
        adapter = (a_key, b_key, embedding.scale)
    tied = unwrap(base.lm_head).base.weight is embedding.base.weight
    return {
        "layers": tuple(
            _read_layer(f"layers.{i}", layer, builder) for i, layer in enumerate(base.model.layers)
        ),
        "embed": embed,
        "embed_adapter": adapter,
        "norm": builder.tensor("norm", base.model.norm.weight),
        "head": builder.projection("head", [base.lm_head], tied_to=embed if tied else None),
    }


def _read_layer(key: str, layer: Any, builder: Builder) -> LayerSpec:
    """Copy the weights of a layer and return their buffer keys."""
    attention, mlp = layer.self_attn, layer.mlp
    normed = type(layer).__name__ == "Qwen3DecoderLayer"
    return LayerSpec(
        qkv=builder.projection(
            f"{key}.qkv", [attention.q_proj, attention.k_proj, attention.v_proj]
        ),
        out=builder.projection(f"{key}.out", [attention.o_proj], inputs=True),
        gate_up=builder.projection(f"{key}.gate_up", [mlp.gate_proj, mlp.up_proj]),
        down=builder.projection(f"{key}.down", [mlp.down_proj], inputs=True),
        norm_in=builder.tensor(f"{key}.norm_in", layer.input_layernorm.weight),
        norm_mlp=builder.tensor(f"{key}.norm_mlp", layer.post_attention_layernorm.weight),
        norm_qk=builder.tensors(
            f"{key}.norm_qk", [attention.q_norm.weight, attention.k_norm.weight]
        )
        if normed
        else None,
    )
