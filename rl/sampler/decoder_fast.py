"""Decode models of the families of `layer_specs` with a hand-written forward.

The KV cache is allocated in advance. Tests prove that the results equal those of `decoder_hf`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from kernels import AttentionBounds
from rl.errors import UserError
from rl.layers import describe_layers, unwrap_model
from rl.models import is_value_head_parameter
from rl.sampler.adapter_slots import AdapterSlots
from rl.sampler.contiguous_state import ContiguousState
from rl.sampler.decode_state import Prompt
from rl.sampler.decoder import Decoder, NamedTensors
from rl.sampler.decoder_weights import UnsupportedModel, WeightsBuilder, unwrap_lora_layer
from rl.sampler.forward_fast import (
    LAYER_NORMS,
    DecoderArchitecture,
    FastForward,
    LayerConfig,
    RotarySpec,
)
from rl.sampler.layer_specs import LAYER_SPECS, ExpertSpec, LayerSpec
from rl.sampler.linear_layers import LoraSpec, Projection, TokenEmbedding
from rl.sampler.tensor_parallel import TensorParallelGroup, check_shard_counts, find_mlp_divisor

# rope types whose frequencies do not depend on the length of the sequence
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
# settings of configs that change a forward, with the field of `LayerSpec` that reads each (None:
# this decoder does not support the setting)
_SETTINGS = {
    "attention_multiplier": "attention_scale",
    "query_pre_attn_scalar": "attention_scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "attn_logit_softcapping": "attention_softcap",
    "final_logit_softcapping": "logit_softcap",
    "attention_chunk_size": None,
    "clip_qkv": None,
    "use_bidirectional_attention": None,
}


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
        tp_group: TensorParallelGroup | None = None,
    ) -> FastDecoder:
        """Copy the weights of a HF model.

        `base`: a decoder of the model without adapters; its memory is shared for equal weights
        instead of copied. `tp_group`: the ranks that split the decoder, all of which call this
        function. Raises `UnsupportedModel` with the reason if the tests of this decoder do not
        cover the model, UserError if the ranks cannot split the model evenly.
        """
        plain = unwrap_model(model)
        _check_supported(plain)
        if tp_group is not None:
            if len(LAYER_SPECS[type(plain).__name__].qkv) == 1:
                raise UnsupportedModel("fused projections that several ranks split")
            heads, key_heads = plain.config.num_attention_heads, plain.config.num_key_value_heads
            check_shard_counts(tp_group.size, heads, key_heads, find_mlp_divisor(plain.config))
        embedding = unwrap_lora_layer(plain.model.embed_tokens).base.weight
        base_weights = None if base is None else base.weights
        builder = WeightsBuilder(
            model, dtype or embedding.dtype, device or embedding.device, base_weights, tp_group
        )
        with torch.no_grad():
            decoder = cls(_ModelReader(plain, builder).read_architecture(), builder.weights)
        for name in sum(builder.names.values(), []):
            if name not in builder.weights.slices and not is_value_head_parameter(name):
                raise UnsupportedModel(f"the parameter {name}")
        if base is not None and base.weights.buffers.keys() <= decoder.weights.shared:
            decoder.base = base
            base.weights.shared = set(base.weights.buffers)
        return decoder

    def load_(self, named_tensors: NamedTensors) -> None:
        with torch.no_grad():
            self.weights.load_(named_tensors)

    def dtype_of(self, name: str) -> torch.dtype | None:
        return self.weights.view(name).dtype if name in self.weights.slices else None

    def fork(self) -> FastDecoder:
        with torch.no_grad():
            other = FastDecoder(self.architecture, self.weights.fork())
        other.base = self.base
        return other

    def iter_adaptable_modules(self) -> Iterator[Projection | TokenEmbedding]:
        """Yield every module that an adapter may modify, in a fixed order for all decoders of an
        architecture.
        """
        yield self.embed
        for layer in self.layers:
            yield from layer.projections()
        yield self.head

    def truncated_copy(
        self, layers: int, vocab_size: int, max_window: int | None = None
    ) -> FastDecoder:
        """Return a truncated copy for a trial: the first layers and the first outputs of the head,
        with attention windows of at most `max_window`.

        The copy shares the weights.
        """
        other = copy.copy(self)
        other.architecture = replace(
            self.architecture, layers=self.architecture.layers[:layers], vocab_size=vocab_size
        )
        other.layers, other.head, other.vocab_size = (
            self.layers[:layers],
            self.head.truncate(vocab_size),
            vocab_size,
        )
        if max_window is not None:
            other.layers = [layer.with_max_window(max_window) for layer in other.layers]
        return other

    def new_state(self, kv_cache_tokens: int) -> ContiguousState:
        return ContiguousState(self, kv_cache_tokens)

    def read_prompts(self, prompts: Sequence[Prompt]) -> None:
        self.forward_prompts(prompts, range(len(prompts)), None, None)


class MultiAdapterDecoder(FastDecoder):
    """Decode with a frozen base and any number of LoRA adapters on it, each under a number, and the
    bare base: rows of several models share a batch.

    Adapters may have any ranks and targets. Each matrix of the base is read once for all rows, and
    each row adds the output of its adapter (rl.sampler.linear_layers), so each sample equals a
    sample of its model in a separate batch. Nothing is copied: the adapters' own decoders keep
    their memory.
    """

    multi_adapter = True
    adapter_slots: AdapterSlots

    def __init__(self, base: FastDecoder):
        super().__init__(base.architecture, base.weights)
        self.base_decoder = base
        self.decoders: dict[int, FastDecoder] = {}
        self.versions: dict[int, int] = {}
        self.names: dict[int, str] = {}  # of the weights, by their number
        self.adapter_slots = AdapterSlots([*self.iter_adaptable_modules()], self.weights)
        self._num_added = 0

    def check_adapter(self, adapter_id: int | None) -> None:
        """Raise ValueError if the weights are unknown."""
        if adapter_id not in self.decoders:
            raise ValueError(
                f"unknown weights {adapter_id}: this batch samples from {sorted(self.decoders)}"
            )

    def add_adapter(self, adapter_id: int, decoder: Decoder, version: int) -> None:
        """Map `adapter_id` to the weights of `decoder`. Raises UserError if they belong to another
        base.
        """
        if not isinstance(decoder, FastDecoder) or self.base_decoder not in (decoder, decoder.base):
            raise UserError(
                "weights on another base cannot be sampled in this batch: sample them in a "
                "separate batch"
            )
        if self.decoders.get(adapter_id) is not decoder:
            self._num_added += 1
            self.names[adapter_id] = str(self._num_added)
        self.decoders[adapter_id], self.versions[adapter_id] = decoder, version
        for projection, other in zip(
            self.iter_adaptable_modules(), decoder.iter_adaptable_modules(), strict=True
        ):
            projection.row_lora.pop(adapter_id, None)  # of the weights that had this id before
            if other.adapter is not None and decoder is not self.base_decoder:
                # Both adapters are of the same kind.
                projection.row_lora[adapter_id] = other.adapter  # type: ignore[assignment]

    def weights_name(self, adapter_id: int | None) -> str:
        return self.names[adapter_id or 0]

    def remove_adapter(self, adapter_id: int) -> None:
        """Remove the weights of `adapter_id`."""
        self.decoders.pop(adapter_id)
        self.versions.pop(adapter_id)
        self.names.pop(adapter_id)
        self.adapter_slots.remove(adapter_id)
        for projection in self.iter_adaptable_modules():
            projection.row_lora.pop(adapter_id, None)


# ---------------------------------------------------------------------------------- reading a model


def is_supported(model: Any) -> bool:
    """Return whether this decoder supports the model, as far as its architecture tells."""
    try:
        _check_supported(unwrap_model(model))
    except UnsupportedModel:
        return False
    return True


def _check_supported(base: Any) -> None:
    """Raise `UnsupportedModel` unless the tests cover the architecture and the features of the
    model.
    """
    name, config = type(base).__name__, base.config
    if name not in LAYER_SPECS or not type(base).__module__.startswith("transformers."):
        raise UnsupportedModel(f"the architecture {name} (known: {', '.join(LAYER_SPECS)})")
    spec, layers = LAYER_SPECS[name], describe_layers(base)
    if not set(layers.kinds) <= ({"full", "sliding"} if spec.windows else {"full"}):
        raise UnsupportedModel(layers.special_kinds or "layers without attention")
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if activation != spec.activation:
        raise UnsupportedModel(f"the activation {activation}")
    for setting, field in _SETTINGS.items():
        value = getattr(config, setting, None)
        if value not in (None, False, 1.0) and (
            field is None or getattr(spec, field) == getattr(LayerSpec(), field)
        ):
            raise UnsupportedModel(f"the setting {setting} = {value}")
    rotary = base.model.rotary_emb
    kinds = rotary.rope_type.values() if isinstance(rotary.rope_type, dict) else [rotary.rope_type]
    if changing := [kind for kind in kinds if kind not in _STATIC_ROPE]:
        raise UnsupportedModel(
            f"rope of type {changing[0]}, its frequencies change with the length"
        )
    head_width = base.model.layers[0].self_attn.head_dim
    for width in {2 * len(_find_inv_freq(rotary, name)) for name in _name_ropes(base)}:
        if width != head_width:
            raise UnsupportedModel(f"rope over {width} of {head_width} channels")


def count_unsharded_parameters(model: Any) -> tuple[int, int]:
    """Return (numbers of the base weights, numbers of the adapters) that every rank holds
    completely.

    The model passes `is_supported`. No weight is read.
    """
    plain = unwrap_model(model)
    planned: Any = SimpleNamespace(rank=0, size=2)  # a group without communication
    builder = WeightsBuilder(model, torch.float32, torch.device("meta"), tp_group=planned)
    _ModelReader(plain, builder).read_weights()
    whole = {
        (piece.buffer, piece.start): (name, piece)
        for name, piece in builder.weights.slices.items()
        if piece.shard.stop is None
    }
    sizes = {name: math.prod(piece.full_shape) for name, piece in whole.values()}
    adapters = sum(size for name, size in sizes.items() if "lora_" in name)
    return sum(sizes.values()) - adapters, adapters


def _name_ropes(base: Any) -> list[str | None]:
    """Return the name of the rotary table of each layer.

    Models with rotary tables for each type of layer name them by the type; other models have the
    name "". The name of layers without rotation is None.
    """
    spec, kinds = LAYER_SPECS[type(base).__name__], base.model.rotary_emb.rope_type
    return [
        None
        if not spec.rotates(layer.self_attn)
        else f"{base.config.layer_types[i]}_"
        if isinstance(kinds, dict)
        else ""
        for i, layer in enumerate(base.model.layers)
    ]


def _find_inv_freq(rotary: Any, name: str | None) -> torch.Tensor:
    """Return the frequencies of that name (see `_name_ropes`); any of the module's without name."""
    if name is None:
        return next(buffer for key, buffer in rotary.named_buffers() if "inv_freq" in key)
    return getattr(rotary, f"{name}inv_freq")


class _ModelReader:
    """Copy the weights of the bare model `base` into the buffers of a builder, and describe it."""

    def __init__(self, base: Any, builder: WeightsBuilder):
        self.base, self.builder, self.config = base, builder, base.config
        self.spec = LAYER_SPECS[type(base).__name__]
        self.head_width = base.model.layers[0].self_attn.head_dim
        self.rope_names = list(dict.fromkeys(_name_ropes(base)))
        scale = self.spec.attention_scale
        # the factor of the queries that leaves D^-0.5 of the attention scale
        self.query_scale = 1.0 if scale is None else scale(self.config) * self.head_width**0.5

    def read_architecture(self) -> DecoderArchitecture:
        """Copy every weight and return the architecture."""
        config, spec = self.config, self.spec
        ranks = 1 if self.builder.tp_group is None else self.builder.tp_group.size
        experts = spec.experts
        return DecoderArchitecture(
            layers=self.read_weights(),
            adapters=self.builder.adapters,
            heads=config.num_attention_heads // ranks,
            key_heads=config.num_key_value_heads // ranks,
            head_width=self.head_width,
            eps=config.rms_norm_eps,
            ropes=tuple(self._read_rope(name) for name in self.rope_names),
            vocab_size=unwrap_lora_layer(self.base.model.embed_tokens).base.weight.shape[0],
            max_positions=config.max_position_embeddings,
            experts_per_token=0 if experts is None else config.num_experts_per_tok,
            normalizes_experts=experts is not None and experts.normalizes(config),
            activation=spec.activation,
            query_scale=1.0 if spec.qk_norm == "head" else self.query_scale,
            embedding_scale=spec.embedding_scale(config),
            residual_scale=spec.residual_scale(config),
            logit_scale=spec.logit_scale(config),
            logit_softcap=spec.logit_softcap(config),
        )

    def _read_rope(self, name: str | None) -> RotarySpec:
        """Return the frequencies of the rotary table of that name, zeros without name."""
        rotary = self.base.model.rotary_emb
        inv_freq = _find_inv_freq(rotary, name)
        if name is None:
            return RotarySpec(torch.zeros(inv_freq.shape))
        scale = float(getattr(rotary, f"{name}attention_scaling"))
        return RotarySpec(inv_freq.detach().float().cpu(), scale)

    def read_weights(self) -> tuple[LayerConfig, ...]:
        """Copy every weight; return what the buffers of the layers do not show."""
        base, builder = self.base, self.builder
        embedding = unwrap_lora_layer(base.model.embed_tokens)
        builder.add("embed", [embedding.base.weight], 0)
        if embedding.lora_a is not None and embedding.lora_b is not None:
            builder.add("embed.lora_a", [embedding.lora_a], 1, dtype=embedding.lora_a.dtype)
            builder.add("embed.lora_b", [embedding.lora_b], dtype=embedding.lora_b.dtype)
            every = slice(None)
            builder.adapters["embed"] = [LoraSpec("embed.lora_b", embedding.scale, every, every)]
        is_tied = unwrap_lora_layer(base.lm_head).base.weight is embedding.base.weight
        # the model may hold the first layers only
        kinds, ropes = describe_layers(base).kinds, _name_ropes(base)
        layers = tuple(
            self._read_layer(f"layers.{i}", layer, kinds[i], self.rope_names.index(ropes[i]))
            for i, layer in enumerate(base.model.layers)
        )
        builder.add("norm", [base.model.norm.weight], offset=self.spec.norm_offset)
        builder.add_projection("head", [base.lm_head], is_tied=is_tied)
        return layers

    def _read_layer(self, key: str, layer: Any, kind: str, rope: int) -> LayerConfig:
        """Copy the weights of a layer of that kind. `rope`: index of its table."""
        spec, add, project = self.spec, self.builder.add, self.builder.add_projection
        attention, mlp = layer.self_attn, getattr(layer, spec.mlp)
        dense = mlp
        if spec.experts is not None and hasattr(mlp, "experts"):
            self._read_experts(f"{key}.experts", mlp, spec.experts)
            dense = None if spec.experts.shared is None else getattr(mlp, spec.experts.shared[0])
        if dense is not None:
            project(f"{key}.gate_up", [getattr(dense, name) for name in spec.gate_up])
            project(f"{key}.down", [dense.down_proj], shard_inputs=True)
        project(f"{key}.qkv", [getattr(attention, name) for name in spec.qkv])
        project(f"{key}.out", [attention.o_proj], shard_inputs=True)
        for name, module in zip(LAYER_NORMS, spec.norms, strict=True):
            norm = nn.Identity() if module is None else getattr(layer, module)
            if not isinstance(norm, nn.Identity):
                add(f"{key}.{name}", [norm.weight], offset=spec.norm_offset)
        if spec.qk_norm is not None:
            weights, offset = [attention.q_norm.weight, attention.k_norm.weight], spec.norm_offset
            if spec.qk_norm == "head":
                add(f"{key}.norm_qk", weights, offset=offset, scale=self.query_scale)
            else:
                add(f"{key}.norm_qk_all", weights, 0, offset=offset)
        window = self.config.sliding_window if kind == "sliding" else 0
        return LayerConfig(key, rope, AttentionBounds(window, spec.attention_softcap(self.config)))

    def _read_experts(self, key: str, block: Any, spec: ExpertSpec) -> None:
        """Copy the weights of a layer's experts."""
        router, experts, builder = getattr(block, spec.router), block.experts, self.builder
        for module in (block, router, experts):
            if not type(module).__module__.startswith("transformers."):
                raise UnsupportedModel(f"experts of type {type(module).__name__}")
        builder.add(f"{key}.router", [router.weight])
        builder.add(f"{key}.gate_up", [experts.gate_up_proj], 1, parts=2)
        builder.add(f"{key}.down", [experts.down_proj], 2)
        if spec.shared is not None:
            gate = getattr(block, spec.shared[1])
            builder.without_shards().add_projection(f"{key}.shared_gate", [gate])
