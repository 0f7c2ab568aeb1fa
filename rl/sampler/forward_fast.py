"""Compute the hand-written forward of the fast decoder, for `decoder_fast` and its KV caches.

`layer_specs` describes how the layers of a family differ from Llama's. The forward has fused qkv
and gate-up matrices, rotary tables computed once, and no module calls. Shapes: N rows (or B prompts
of T positions), E hidden width, H heads, D head width, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels import AttentionBounds
from kernels.decode_ops import rms_norm, rotate_heads
from rl.sampler import cpu_kernels
from rl.sampler.adapter_slots import AdapterSlots
from rl.sampler.cpu_kernels import CpuKernels
from rl.sampler.decode_state import LogitsReader, Prompt, pad_right, send_to_device, store_experts
from rl.sampler.decoder import MAX_LOGITS_PER_SLICE, batch_prompts
from rl.sampler.decoder_weights import DecoderWeights
from rl.sampler.expert_layers import ExpertLayer, copy_choices
from rl.sampler.linear_layers import (
    AdapterSpecs,
    HeadProjection,
    Projection,
    RowAdapters,
    TokenEmbedding,
    fits_budget,
    group_rows_by_adapter,
)
from rl.sampler.prefix_attention import causal_attention

_PREFILL_TOKENS = 8192  # padded prompt tokens per forward

# Takes (layer, queries, keys and values [.., (H + 2 K) D] before the norms of heads and the
# rotation), stores keys and values; attention output [.., H * D].
Attend = Callable[[int, Tensor], Tensor]
# Takes (part to add or None, sum, weight of the norm or None, epsilon); the sum with the part, and
# its norm (the sum itself without weight). It may use the memory of the part and of the sum.
AddAndNorm = Callable[[Tensor | None, Tensor, Tensor | None, float], tuple[Tensor, Tensor]]
StoreKeyValues = Callable[[int, list[Prompt], Tensor, Tensor], None]
# Cosines and signed sines of each of `DecoderArchitecture.ropes`.
RotaryTables = Sequence[tuple[Tensor, Tensor]]


# norms before and after the attention, before and after the MLP
LAYER_NORMS = ("norm_in", "norm_attention_out", "norm_mlp", "norm_mlp_out")


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Hold what a layer's buffers do not show. `key`: the beginning of their names. `rope`: index
    in `DecoderArchitecture.ropes`.
    """

    key: str
    rope: int
    bounds: AttentionBounds


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """Hold the frequencies of a rotary table, [D / 2] (zeros: no rotation), and its scale."""

    inv_freq: Tensor
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class DecoderArchitecture:
    """Hold what does not change between versions of the weights.

    `heads` and `key_heads` are those of this rank if a tensor-parallel group splits the decoder.
    """

    layers: tuple[LayerConfig, ...]
    adapters: AdapterSpecs
    heads: int
    key_heads: int
    head_width: int
    eps: float
    ropes: tuple[RotarySpec, ...]
    vocab_size: int
    max_positions: int | None
    experts_per_token: int = 0
    normalizes_experts: bool = False
    activation: str = "silu"
    query_scale: float = 1.0  # of the queries, before scores are scaled by D^-0.5
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0  # of the last hidden states
    logit_softcap: float = 0.0


@dataclass(frozen=True, slots=True)
class ForwardOps:
    """Hold the operations between the matrix products: torch, C++ or Triton.

    `fixed_shapes`: no operation on a GPU may wait for the host.
    """

    add_and_norm: AddAndNorm
    silu_mul: Callable[[Tensor], Tensor]
    fixed_shapes: bool = False


class LayerWeights:
    """Hold the tensors and modules of a layer, looked up once; None for those that it lacks.

    `gate_up` and `down`: of the MLP; of the shared expert in a layer of experts. `norm_qk`: weights
    of the query norm and the key norm of each head, stacked. `norm_qk_all`: weights of the norms
    over all query heads and all key heads, stacked.
    """

    qkv: Projection
    out: Projection
    gate_up: Projection | None
    down: Projection | None
    norm_in: Tensor | None
    norm_attention_out: Tensor | None
    norm_mlp: Tensor | None
    norm_mlp_out: Tensor | None
    norm_qk: Tensor | None
    norm_qk_all: Tensor | None

    def __init__(
        self, config: LayerConfig, architecture: DecoderArchitecture, buffers: Mapping[str, Tensor]
    ):
        def project(name: str) -> Any:
            key = f"{config.key}.{name}"
            if f"{key}.weight" not in buffers:
                return None
            return Projection(key, buffers, architecture.adapters)

        self.qkv, self.out = project("qkv"), project("out")
        self.gate_up, self.down = project("gate_up"), project("down")
        self.rope, self.bounds = config.rope, config.bounds
        for name in (*LAYER_NORMS, "norm_qk", "norm_qk_all"):
            setattr(self, name, buffers.get(f"{config.key}.{name}"))
        experts = f"{config.key}.experts"
        self.experts: ExpertLayer | None = None
        if f"{experts}.router" in buffers:
            self.experts = ExpertLayer(
                experts,
                buffers,
                architecture.experts_per_token,
                architecture.normalizes_experts,
                project("experts.shared_gate"),
            )

    def projections(self) -> list[Projection]:
        """Return the linear layers that an adapter may modify, in a fixed order."""
        gate = None if self.experts is None else self.experts.shared_gate
        layers = (self.qkv, self.out, self.gate_up, self.down, gate)
        return [layer for layer in layers if layer is not None]

    def with_max_window(self, window: int) -> LayerWeights:
        """Return the layer with a window of at most `window` positions, if it has a window."""
        other = copy.copy(self)
        other.bounds = replace(self.bounds, window=min(self.bounds.window, window))
        return other


class FastForward:
    """Compute the forward of a version of the weights.

    The numbers and shapes of `architecture` describe the family.

    Only rotary tables are cached between calls.
    """

    multi_adapter: bool
    # places of the adapters of rows, of a decoder that mixes them
    adapter_slots: AdapterSlots | None = None

    def __init__(self, architecture: DecoderArchitecture, weights: DecoderWeights):
        self.architecture, self.weights = architecture, weights
        self.vocab_size, self.max_positions = architecture.vocab_size, architecture.max_positions
        buffers, adapters = weights.buffers, architecture.adapters
        embed_VE, self.tp_group = buffers["embed"], weights.tp_group
        lora = [
            (buffers["embed.lora_a"], buffers[a.b_key], a.scale) for a in adapters.get("embed", ())
        ]
        self.embed = TokenEmbedding(
            embed_VE, lora[0] if lora else None, architecture.vocab_size, self.tp_group
        )
        self.device, self.dtype = embed_VE.device, embed_VE.dtype
        self.layers = [LayerWeights(layer, architecture, buffers) for layer in architecture.layers]
        self.norm_E = buffers["norm"]
        self.head = HeadProjection(
            "head",
            {"head.weight": embed_VE, **buffers},  # a tied head has no weight of its own
            adapters,
            architecture.vocab_size,
            self.tp_group,
            architecture.logit_softcap,
        )
        self._ropes = torch.empty(len(architecture.ropes), 2, 0, architecture.head_width)
        on_cpu = self.device.type == "cpu" and self.dtype == torch.float32
        self.cpu_kernels = cpu_kernels.load_cpu_kernels() if on_cpu else None
        products = [self.head, *(p for layer in self.layers for p in layer.projections())]
        if on_cpu and fits_budget(projection.weight for projection in products):
            for projection in products:
                projection.may_pack = True

    @property
    def num_choices(self) -> int:
        """Return the number of experts that a token uses in all layers together."""
        return sum(layer.experts.per_token for layer in self.layers if layer.experts is not None)

    @property
    def experts_per_token(self) -> int:
        """Return the number of experts that a layer routes a token to; 0 without experts."""
        return max((x.experts.per_token for x in self.layers if x.experts is not None), default=0)

    def rope(self, positions: Tensor, length: int) -> RotaryTables:
        """Return cosines and signed sines [.., 1, D] at `positions`, which are below `length`, of
        each of `architecture.ropes`; see
        `kernels.decode_ops.rotate_heads`.
        """
        return [
            (cos[positions].unsqueeze(-2), signed_sin[positions].unsqueeze(-2))
            for cos, signed_sin in self.rope_tables(length)
        ]

    def rope_tables(self, length: int) -> Tensor:
        """Return cosines and signed sines of at least `length` positions, for each of
        `architecture.ropes`: [ropes, 2, positions, D].
        """
        if length > self._ropes.shape[2]:
            positions = torch.arange(max(length, 2 * self._ropes.shape[2], 256)).float()
            tables = []
            for rope in self.architecture.ropes:
                angles = torch.outer(positions, rope.inv_freq)
                cos, sin = angles.cos() * rope.scale, angles.sin() * rope.scale
                tables.append(torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)]))
            self._ropes = torch.stack(tables).to(self.device, self.dtype)
        return self._ropes

    def forward(
        self,
        ids: Tensor,
        attend: Attend,
        row_adapters: RowAdapters | None = None,
        last_B: Tensor | None = None,
        choices: list[Tensor] | None = None,
        ops: ForwardOps | None = None,
    ) -> Tensor:
        """Return the last hidden states [.., E], after the final norm.

        `last_B`: for ids [B, T], return only these positions, [B, E]. Every position needs keys and
        values in each layer, but in the last layer the output of the other positions is not used.
        `choices` receives the experts of each layer, [.., K], of all positions. `ops`: by default
        those of torch.
        """
        ops, eps = ops or make_ops(None, self.cpu_kernels), self.architecture.eps
        last_layer = self.layers[-1] if choices is None else None
        last = None if last_B is None else (torch.arange(len(ids), device=ids.device), last_B)
        x, part = self.embed_tokens(ids, row_adapters), None
        for i, layer in enumerate(self.layers):
            x, normed = ops.add_and_norm(part, x, layer.norm_in, eps)
            attended = attend(i, self.project_qkv(layer, normed, row_adapters))
            if last is not None and layer is last_layer:
                attended, x = attended[last], x[last]
            part = self._finish_part(layer.out(attended, row_adapters), layer.norm_attention_out)
            x, normed = ops.add_and_norm(part, x, layer.norm_mlp, eps)
            part = self._apply_mlp(layer, normed, ops, row_adapters, choices)
            part = self._finish_part(part, layer.norm_mlp_out)
        if last is not None and last_layer is None:
            assert part is not None
            part, x = part[last], x[last]
        return self._scale(
            ops.add_and_norm(part, x, self.norm_E, eps)[1], self.architecture.logit_scale
        )

    def split_qkv(
        self, index: int, qkv: Tensor, rope: RotaryTables
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [.., H, D], keys and values [.., K, D] of a layer, after the norms of
        heads and the rotation.
        """
        a, layer = self.architecture, self.layers[index]
        qkv = qkv.unflatten(-1, (a.heads + 2 * a.key_heads, a.head_width))
        return rotate_heads(qkv, layer.norm_qk, a.eps, *rope[layer.rope], a.heads)

    def _apply_mlp(
        self,
        layer: LayerWeights,
        x: Tensor,
        ops: ForwardOps,
        row_adapters: RowAdapters | None,
        choices: list[Tensor] | None,
    ) -> Tensor:
        """Return the output of a layer's MLP or experts, [.., E].

        `choices` receives the experts of each token.
        """
        y, activation = None, self.architecture.activation
        activate = ops.silu_mul if activation == "silu" else partial(activate_gate, activation)
        if layer.gate_up is not None and layer.down is not None:
            y = layer.down(activate(layer.gate_up(x, row_adapters)), row_adapters)
        if layer.experts is None:
            assert y is not None
            return y
        sums, chosen = layer.experts(x, activate, ops.fixed_shapes)
        if choices is not None:
            choices.append(chosen)
        gate = layer.experts.shared_gate
        return (
            sums
            if y is None or gate is None
            else sums.addcmul_(gate(x, row_adapters).sigmoid_(), y)
        )

    def embed_tokens(self, ids: Tensor, row_adapters: RowAdapters | None = None) -> Tensor:
        """Return the vectors of tokens [.., E] that enter the first layer, in new memory."""
        return self._scale(self.embed(ids, row_adapters), self.architecture.embedding_scale)

    def project_qkv(
        self, layer: LayerWeights, x: Tensor, row_adapters: RowAdapters | None = None
    ) -> Tensor:
        """Return queries, keys and values [.., (H + 2 K) D], before the norms of heads and the
        rotation.
        """
        qkv, a = layer.qkv(x, row_adapters), self.architecture
        if layer.norm_qk_all is not None:
            widths = [heads * a.head_width for heads in (a.heads, a.key_heads)]
            parts = qkv.split([*widths, widths[1]], dim=-1)
            for part, weight in zip(parts, layer.norm_qk_all.split(widths), strict=False):
                part.copy_(self._tp_rms_norm(part, weight))
        if a.query_scale != 1.0:
            qkv.narrow(-1, 0, a.heads * a.head_width).mul_(a.query_scale)
        return qkv

    @staticmethod
    def _scale(x: Tensor, factor: float) -> Tensor:
        """Scale a tensor in place."""
        return x if factor == 1.0 else x.mul_(factor)

    def _finish_part(self, part: Tensor, norm: Tensor | None) -> Tensor:
        """Return the sum of all ranks' outputs of attention or MLP, normalized and scaled; this may
        use the memory of `part`.
        """
        part = self.rms(self._all_reduce(part), norm)
        return self._scale(part, self.architecture.residual_scale)

    def _all_reduce(self, part: Tensor) -> Tensor:
        """Sum the partial results of all ranks that split the decoder."""
        return part if self.tp_group is None else self.tp_group.all_reduce_(part)

    def broadcast_tokens(self, sampled: Tensor) -> Tensor:
        """Implement `Decoder.broadcast_tokens`."""
        return sampled if self.tp_group is None else self.tp_group.broadcast_(sampled)

    def _tp_rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Compute the RMS norm of vectors of which each rank holds an equal part `x`."""
        if self.tp_group is None:
            return self.rms(x, weight)
        squares = self._all_reduce(x.float().square().mean(-1, keepdim=True))
        scale = torch.rsqrt(squares / self.tp_group.size + self.architecture.eps)
        return (x.float() * scale * weight).to(x.dtype)

    def rms(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Compute the RMS norm of `x`; without weight, return `x`."""
        return x if weight is None else rms_norm(x, weight, self.architecture.eps)

    def forward_prompts(
        self,
        prompts: Sequence[Prompt],
        indices: Sequence[int],
        store_kv: StoreKeyValues | None,
        logits_PV: Tensor | None,
        records_experts: bool = False,
    ) -> None:
        """Prefill the prompts of these indices; write the logits of their last positions to their
        rows of `logits_PV`, unless it is None.

        Prompts are padded on the right if their lengths differ (causal attention does not see the
        padding). `store_kv` receives (layer, prompts, keys [B, K, T, D], values) to store.
        """
        device = self.device
        for places in batch_prompts([len(prompts[i].tokens) for i in indices], _PREFILL_TOKENS):
            members = [prompts[indices[place]] for place in places]
            lengths = [len(prompt.tokens) for prompt in members]
            ids = send_to_device(pad_right([prompt.tokens for prompt in members]), device)
            longest = ids.shape[1]
            rope = self.rope(torch.arange(longest, device=device), longest)
            row_adapters = self.group_rows([prompt.adapter_id for prompt in members])
            last_B = torch.tensor([length - 1 for length in lengths], device=device)
            all_read = any(prompt.reader is not None for prompt in members)
            choices: list[Tensor] | None = [] if records_experts else None
            attend = self._prompt_attention(members, rope, store_kv)
            hidden = self.forward(ids, attend, row_adapters, None if all_read else last_B, choices)
            store_experts(members, copy_choices(choices))
            if logits_PV is not None:
                rows = torch.arange(len(members), device=device)
                last = hidden[rows, last_B] if all_read else hidden
                logits = self.head(last, row_adapters).float()
                logits_PV[torch.tensor([indices[i] for i in places], device=device)] = logits
            for row, prompt in enumerate(members):
                if prompt.reader is not None:
                    adapters = self.group_rows([prompt.adapter_id])
                    self._pass_logits(prompt.reader, hidden[row, : lengths[row]], adapters)

    def group_rows(self, adapter_ids: Sequence[int]) -> RowAdapters | None:
        """Group rows by their adapters; None if the decoder does not mix any."""
        return group_rows_by_adapter(adapter_ids, self.device) if self.multi_adapter else None

    def _pass_logits(
        self, reader: LogitsReader, hidden_TE: Tensor, row_adapters: RowAdapters | None
    ) -> None:
        """Pass the logits of a prompt to its reader, in slices of bounded size."""
        step = max(MAX_LOGITS_PER_SLICE // self.vocab_size, 1)
        for start in range(0, len(hidden_TE), step):
            reader(start, self.head(hidden_TE[start : start + step], row_adapters))

    def _prompt_attention(
        self, members: list[Prompt], rope: RotaryTables, store_kv: StoreKeyValues | None
    ) -> Attend:
        """Return the causal attention function of a prefill batch, which stores keys and values
        with `store_kv`.
        """
        repeat = self.architecture.heads // self.architecture.key_heads

        def attend(layer: int, qkv: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in self.split_qkv(layer, qkv, rope))  # [B, H, T, D]
            if store_kv is not None:
                store_kv(layer, members, k, v)
            if repeat > 1:
                k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
            return causal_attention(q, k, v, self.layers[layer].bounds).transpose(1, 2).flatten(2)

        return attend


# Activations of a gate, by `hidden_act`.
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


def activate_gate(activation: str, gate_up: Tensor) -> Tensor:
    """Compute act(gate) * up in torch, from [.., 2 I] to [.., I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate).mul_(up)


@cache
def make_ops(norm_kernels: CpuKernels | None, silu_kernels: CpuKernels | None) -> ForwardOps:
    """Return the operations of a CPU's kernels, or of torch where they are None."""
    norm = rms_norm if norm_kernels is None else norm_kernels.rms_norm
    silu_mul = partial(activate_gate, "silu") if silu_kernels is None else silu_kernels.silu_mul

    def add_and_norm(
        part: Tensor | None, x: Tensor, weight: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        x = x if part is None else part.add_(x)
        return x, x if weight is None else norm(x, weight, eps)

    return ForwardOps(add_and_norm, silu_mul)
