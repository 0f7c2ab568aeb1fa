"""A hand-written forward for the Llama family: Llama, Mistral, Qwen2 and Qwen3. Proved equal to `decoder_hf` in the tests.

Fused qkv and gate-up matrices, rotary tables computed once, no module calls, and a preallocated cache.
Shapes: N rows (or B prompts of T positions), E hidden width, H heads, D head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rl.sampler import cpu_kernels
from rl.sampler.cache import LogitsReader
from rl.sampler.cache_fast import FastState
from rl.sampler.cpu_kernels import CpuKernels
from rl.sampler.decoder import Decoder, NamedTensors, prompt_batches
from rl.sampler.weights import Builder, Projection, ProjectionSpec, Unsupported, Weights, unwrap

_PREFILL_TOKENS = 8192  # padded prompt tokens in one forward
_LOGITS_AT_ONCE = 1 << 25  # numbers of a slice of prompt logits shown to a reader
_MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # frequencies that do not depend on the length of the sequence

# Takes (layer, queries [.., H, D], keys [.., K, D], values [.., K, D]), stores keys and values; attention output [.., H * D].
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
# Takes (layer, queries, keys and values [N, (H + 2 K) D] before norm and rotation, the norms' weights); the same.
AttendStep = Callable[[int, Tensor, Tensor | None], Tensor]
KeepPrompt = Callable[[int, list[int], Tensor, Tensor], None]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Buffer keys of one layer."""

    qkv: ProjectionSpec
    out: ProjectionSpec
    gate_up: ProjectionSpec
    down: ProjectionSpec
    norm_in: str
    norm_mlp: str
    norm_qk: str | None  # weights of the query norm and the key norm, one below the other


@dataclass(frozen=True, slots=True)
class Architecture:
    """What does not change between versions of the weights."""

    layers: tuple[LayerSpec, ...]
    embed: str
    embed_adapter: tuple[str, str, float] | None  # A [R, V], B [E, R], scale
    norm: str
    head: ProjectionSpec
    heads: int
    key_heads: int
    head_width: int
    eps: float
    inv_freq: Tensor  # [D / 2] float32
    rope_scale: float
    vocab_size: int
    max_positions: int | None


class Layer:
    """A layer's tensors, looked up once."""

    __slots__ = ("down", "gate_up", "norm_in", "norm_mlp", "norm_qk", "out", "qkv")

    def __init__(self, spec: LayerSpec, buffers: dict[str, Tensor]):
        self.qkv, self.out = Projection(spec.qkv, buffers), Projection(spec.out, buffers)
        self.gate_up, self.down = Projection(spec.gate_up, buffers), Projection(spec.down, buffers)
        self.norm_in, self.norm_mlp = buffers[spec.norm_in], buffers[spec.norm_mlp]
        self.norm_qk = buffers[spec.norm_qk] if spec.norm_qk else None


class FastDecoder(Decoder):
    """See the module; built by `from_model`, or by `fork` from another version."""

    def __init__(self, architecture: Architecture, weights: Weights):
        self.architecture, self.weights = architecture, weights
        self.vocab_size, self.max_positions = architecture.vocab_size, architecture.max_positions
        buffers = weights.buffers
        self.embed_VE = buffers[architecture.embed]
        self.device, self.dtype = self.embed_VE.device, self.embed_VE.dtype
        self.layers = [Layer(spec, buffers) for spec in architecture.layers]
        self.norm_E = buffers[architecture.norm]
        self.head = Projection(architecture.head, buffers)
        kinds = [0] * architecture.heads + [1] * architecture.key_heads
        self._head_kind = torch.tensor(kinds, device=self.device)
        self._rope = torch.empty(2, 0, architecture.head_width)
        on_cpu = self.device.type == "cpu" and self.dtype == torch.float32
        self.cpu_kernels = cpu_kernels.load() if on_cpu else None

    @classmethod
    def from_model(cls, model: Any, dtype: torch.dtype | None = None, device: torch.device | None = None) -> FastDecoder:
        """Copy the weights of a HF model. Raises `Unsupported` with the reason if it is not one this decoder was proved for."""
        base = model.get_base_model() if type(model).__module__.startswith("peft.") else model
        check_supported(base)
        embedding = unwrap(base.model.embed_tokens).base.weight
        builder = Builder(model, dtype or embedding.dtype, device or embedding.device)
        with torch.no_grad():
            return cls(_read_architecture(base, builder), builder.weights)

    def load_(self, named_tensors: NamedTensors) -> None:
        with torch.no_grad():
            self.weights.load_(named_tensors)

    def fork(self) -> FastDecoder:
        with torch.no_grad():
            return FastDecoder(self.architecture, self.weights.fork())

    def new_state(self, kv_cache_tokens: int) -> FastState:
        return FastState(self, kv_cache_tokens)

    def read_prompts(self, prompts: Sequence[Sequence[int]], readers: Sequence[LogitsReader]) -> None:
        self.forward_prompts(prompts, readers, keep=None)

    # -------------------------------------------------------------------------------------------------- the model

    def rope(self, positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [.., 1, D] at `positions`, all of which are below `length`; see `rotate`."""
        cos, signed_sin = self.rope_table(length)
        return cos[positions].unsqueeze(-2), signed_sin[positions].unsqueeze(-2)

    def rope_table(self, length: int) -> Tensor:
        """Cosines and signed sines of `length` positions or more, [2, positions, D]."""
        if length > self._rope.shape[1]:
            a = self.architecture
            angles = torch.outer(torch.arange(max(length, 2 * self._rope.shape[1], 256)).float(), a.inv_freq)
            cos, sin = angles.cos() * a.rope_scale, angles.sin() * a.rope_scale
            self._rope = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)]).to(self.device, self.dtype)
        return self._rope

    def forward(self, ids: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Last hidden states [.., E], after the final norm."""
        a = self.architecture
        x = self.embed(ids)
        for i, layer in enumerate(self.layers):
            qkv = layer.qkv(self.rms(x, layer.norm_in)).unflatten(-1, (a.heads + 2 * a.key_heads, a.head_width))
            qk, v = qkv.split([a.heads + a.key_heads, a.key_heads], dim=-2)
            if layer.norm_qk is not None:  # one norm over both kinds of heads, then each kind's weight
                qk = F.rms_norm(qk, (a.head_width,), None, a.eps) * layer.norm_qk.view(2, -1)[self._head_kind]
            q, k = rotate(qk, rope).split([a.heads, a.key_heads], dim=-2)
            x = layer.out(attend(i, q, k, v)).add_(x)
            gate, up = layer.gate_up(self.rms(x, layer.norm_mlp)).chunk(2, dim=-1)
            x = layer.down(F.silu(gate).mul_(up)).add_(x)
        return self.rms(x, self.norm_E)

    def forward_step(self, kernels: CpuKernels, ids_N: Tensor, attend: AttendStep) -> Tensor:
        """`forward` for one token a row on a CPU, with what lies between the matrix products done by `kernels`."""
        eps = self.architecture.eps
        x = self.embed(ids_N)
        for i, layer in enumerate(self.layers):
            qkv = layer.qkv(kernels.rms_norm(x, layer.norm_in, eps))
            x = layer.out(attend(i, qkv, layer.norm_qk)).add_(x)
            gate_up = layer.gate_up(kernels.rms_norm(x, layer.norm_mlp, eps))
            x = layer.down(kernels.silu_mul(gate_up)).add_(x)
        return kernels.rms_norm(x, self.norm_E, eps)

    def rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.architecture.eps)

    def embed(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.embed_VE)
        if self.architecture.embed_adapter is not None:
            a_key, b_key, scale = self.architecture.embed_adapter
            low = F.embedding(ids, self.weights.buffers[a_key].T)
            x = x + (F.linear(low, self.weights.buffers[b_key]) * scale).to(x.dtype)
        return x

    def forward_prompts(
        self, prompts: Sequence[Sequence[int]], readers: Sequence[LogitsReader | None], keep: KeepPrompt | None
    ) -> Tensor:
        """Read prompts, padded on the right where their lengths differ (what comes later is not seen). Last logits [P, V].

        `keep` takes (layer, numbers of the prompts, keys [B, K, T, D], values) to store.
        """
        logits_PV = torch.empty(len(prompts), self.vocab_size, dtype=torch.float32, device=self.device)
        for batch in prompt_batches([len(prompt) for prompt in prompts], _PREFILL_TOKENS):
            longest = len(prompts[batch[0]])
            ids = torch.tensor([[*prompts[i], *[0] * (longest - len(prompts[i]))] for i in batch]).to(self.device)
            rope = self.rope(torch.arange(longest, device=self.device), longest)
            hidden = self.forward(ids, rope, self._prompt_attention(batch, keep))
            last = torch.tensor([len(prompts[i]) - 1 for i in batch], device=self.device)
            rows = torch.arange(len(batch), device=self.device)
            logits_PV[torch.tensor(batch, device=self.device)] = self.head(hidden[rows, last]).float()
            for row, i in enumerate(batch):
                self._show(readers[i], hidden[row, : len(prompts[i])])
        return logits_PV

    def _show(self, reader: LogitsReader | None, hidden_TE: Tensor) -> None:
        """The logits of a prompt to its reader, a bounded slice at a time."""
        if reader is None:
            return
        step = max(_LOGITS_AT_ONCE // self.vocab_size, 1)
        for start in range(0, len(hidden_TE), step):
            reader(start, self.head(hidden_TE[start : start + step]))

    def _prompt_attention(self, batch: list[int], keep: KeepPrompt | None) -> Attend:
        repeat = self.architecture.heads // self.architecture.key_heads

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, T, D]
            if keep is not None:
                keep(layer, batch, k, v)
            if repeat > 1:
                k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

        return attend


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of [.., H, D]: halves (a, b) become (a cos - b sin, b cos + a sin)."""
    cos, signed_sin = rope
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), signed_sin)


# ----------------------------------------------------------------------------------------------------- reading a model


def check_supported(base: Any) -> None:
    """Raises `Unsupported` unless this is one of the architectures, with features, that the tests prove."""
    name, config = type(base).__name__, base.config
    if name not in _MODELS or not type(base).__module__.startswith("transformers."):
        raise Unsupported(f"the architecture {name} (known: {', '.join(_MODELS)})")
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    sliding = getattr(config, "sliding_window", None) and name == "MistralForCausalLM"
    if layer_types != {"full_attention"} or sliding:
        raise Unsupported("sliding-window attention")
    if config.hidden_act != "silu":
        raise Unsupported(f"the activation {config.hidden_act}")
    rope = base.model.rotary_emb
    if rope.rope_type not in _STATIC_ROPE:
        raise Unsupported(f"rope of type {rope.rope_type}, whose frequencies change with the length")
    head_width = base.model.layers[0].self_attn.head_dim
    if len(rope.inv_freq) * 2 != head_width:
        raise Unsupported(f"rope over {len(rope.inv_freq) * 2} of {head_width} channels")


def _read_architecture(base: Any, builder: Builder) -> Architecture:
    """Copy every weight into the builder's buffers and note where it went."""
    config, embedding = base.config, unwrap(base.model.embed_tokens)
    embed = builder.tensor("embed", embedding.base.weight)
    adapter = None
    if embedding.lora_a is not None and embedding.lora_b is not None:
        a_key, b_key = builder.adapter("embed.lora_a", embedding.lora_a), builder.adapter("embed.lora_b", embedding.lora_b)
        adapter = (a_key, b_key, embedding.scale)
    first = base.model.layers[0].self_attn
    tied = unwrap(base.lm_head).base.weight is embedding.base.weight
    return Architecture(
        layers=tuple(_read_layer(f"layers.{i}", layer, builder) for i, layer in enumerate(base.model.layers)),
        embed=embed,
        embed_adapter=adapter,
        norm=builder.tensor("norm", base.model.norm.weight),
        head=builder.projection("head", [base.lm_head], tied_to=embed if tied else None),
        heads=config.num_attention_heads,
        key_heads=config.num_key_value_heads,
        head_width=first.head_dim,
        eps=config.rms_norm_eps,
        inv_freq=base.model.rotary_emb.inv_freq.detach().float().cpu(),
        rope_scale=float(base.model.rotary_emb.attention_scaling),
        vocab_size=embedding.base.weight.shape[0],
        max_positions=config.max_position_embeddings,
    )


def _read_layer(key: str, layer: Any, builder: Builder) -> LayerSpec:
    attention, mlp = layer.self_attn, layer.mlp
    normed = type(layer).__name__ == "Qwen3DecoderLayer"
    return LayerSpec(
        qkv=builder.projection(f"{key}.qkv", [attention.q_proj, attention.k_proj, attention.v_proj]),
        out=builder.projection(f"{key}.out", [attention.o_proj]),
        gate_up=builder.projection(f"{key}.gate_up", [mlp.gate_proj, mlp.up_proj]),
        down=builder.projection(f"{key}.down", [mlp.down_proj]),
        norm_in=builder.tensor(f"{key}.norm_in", layer.input_layernorm.weight),
        norm_mlp=builder.tensor(f"{key}.norm_mlp", layer.post_attention_layernorm.weight),
        norm_qk=builder.tensors(f"{key}.norm_qk", [attention.q_norm.weight, attention.k_norm.weight]) if normed else None,
    )
