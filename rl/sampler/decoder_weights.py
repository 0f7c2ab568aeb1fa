"""Hold a decoder's weights in fused buffers; every model parameter is a slice of a buffer, by its
name in the model.

Matrices that read the same input (q, k and v; gate and up; the A matrices of their adapters) are
stacked in the same buffer, so that a single matmul serves them. If several ranks hold a decoder
together, each takes its shard (rl.sampler.tensor_parallel) from the whole parameter, which is
passed by itself. Shapes: I inputs, O outputs, R ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rl.sampler.decoder import NamedTensors
from rl.sampler.linear_layers import LoraSpec
from rl.sampler.tensor_parallel import (
    UNSHARDED,
    Shard,
    TensorParallelGroup,
    shard_of,
)


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """Locate a parameter's rows in a buffer: the shard `shard` of the `full_shape` shape.

    The buffer holds `scale` times the sum of the parameter and `offset`.
    """

    buffer: str
    start: int
    length: int
    trainable: bool
    full_shape: torch.Size
    shard: Shard = UNSHARDED
    offset: float = 0.0
    scale: float = 1.0

    def select(self, buffer: Tensor) -> Tensor:
        """Return the rows of the buffer that hold the parameter, as a view."""
        return buffer[self.start : self.start + self.length]

    def convert(self, whole: Tensor) -> Tensor:
        """Return what the buffer holds of the parameter's value `whole`."""
        part = self.shard.apply(whole.detach())
        if self.offset or self.scale != 1.0:
            return (part.float() + self.offset) * self.scale
        return part


class DecoderWeights:
    """Hold buffers by key and parameters by name.

    A fork copies the buffers with a trainable parameter and shares the others. `tp_group`: the
    ranks that hold the weights together, each its shard; None: all weights are local.
    """

    def __init__(self, tp_group: TensorParallelGroup | None = None) -> None:
        self.tp_group = tp_group
        self.buffers: dict[str, Tensor] = {}
        self.slices: dict[str, WeightSlice] = {}
        self.shared: set[str] = set()

    def view(self, name: str) -> Tensor:
        """Return the local shard of the parameter of this name, as a view of its buffer."""
        piece = self.slices[name]
        return piece.select(self.buffers[piece.buffer])

    def load_(self, named_tensors: NamedTensors) -> None:
        """Load values by name (see `Decoder.load_`).

        Raises ValueError for an unknown name, another shape, or a change of a shared parameter.
        """
        for name, tensor in named_tensors:
            if name not in self.slices:
                known = sorted(self.slices)
                raise ValueError(
                    f"unknown parameter {name!r}; the decoder has {len(known)} parameters, "
                    f"such as {known[0]!r}, {known[-1]!r}"
                )
            view, piece = self.view(name), self.slices[name]
            if piece.full_shape != tensor.shape:
                raise ValueError(
                    f"{name} has shape {tuple(piece.full_shape)} in the decoder, got "
                    f"{tuple(tensor.shape)}"
                )
            new_values = piece.convert(tensor)
            if piece.buffer in self.shared:
                check_shared_unchanged(name, view, new_values)
            else:
                view.copy_(new_values)

    def fork(self) -> DecoderWeights:
        """Return a second set of weights: buffers with a trainable parameter are copied, the others
        shared.
        """
        trained = {piece.buffer for piece in self.slices.values() if piece.trainable}
        other = DecoderWeights(self.tp_group)
        other.slices = self.slices
        other.buffers = {
            key: buffer.clone() if key in trained else buffer
            for key, buffer in self.buffers.items()
        }
        self.shared = other.shared = set(self.buffers) - trained
        return other


def have_equal_values(current: Tensor, new: Tensor) -> bool:
    """Return whether `new` equals `current` in the dtype and on the device of `current`."""
    return current.shape == new.shape and torch.equal(current, new.detach().to(current))


def check_shared_unchanged(name: str, current: Tensor, new: Tensor) -> None:
    """Raise ValueError if `new` differs from a frozen weight that forks share.

    Loading equal values is allowed; a change would affect the other versions too.
    """
    if not have_equal_values(current, new):
        raise ValueError(
            f"{name} is frozen and shared by forked decoders, so it cannot take another value: "
            "pass only trainable parameters, or build a new decoder with make_decoder"
        )


# ---------------------------------------------------------------------------------- reading a model


@dataclass(frozen=True, slots=True)
class UnwrappedLayer:
    """Hold a linear or embedding module, with its PEFT adapter if any: A [R, I], B [O, R]."""

    base: Any
    lora_a: Tensor | None = None
    lora_b: Tensor | None = None
    scale: float = 0.0


def unwrap_lora_layer(module: nn.Module) -> UnwrappedLayer:
    """Unwrap a plain nn.Linear / nn.Embedding, or PEFT's LoRA around such a module.

    Raises `UnsupportedModel` for everything else.
    """
    if _is_plain(module):
        return UnwrappedLayer(module)
    if not type(module).__module__.startswith("peft."):
        raise UnsupportedModel(f"a layer of type {type(module).__name__}")
    from peft.tuners import lora

    if not isinstance(module, (lora.Linear, lora.Embedding)):
        raise UnsupportedModel(f"a PEFT layer of type {type(module).__name__}")
    base, active = module.get_base_layer(), list(module.active_adapters)
    adapters = [name for name in active if name in module.scaling]
    if not _is_plain(base) or module.merged or len(adapters) > 1:
        raise UnsupportedModel(
            f"an adapter that is merged, or several active adapters ({active}), or an adapter "
            f"around a {type(base).__name__}"
        )
    if not adapters or module.disable_adapters:
        raise UnsupportedModel("adapters that are disabled")
    name = adapters[0]
    if module.use_dora.get(name) or module.lora_bias.get(name):
        raise UnsupportedModel("an adapter with DoRA or a bias")
    if isinstance(module, lora.Embedding):
        return UnwrappedLayer(
            base, module.lora_embedding_A[name], module.lora_embedding_B[name], module.scaling[name]
        )
    a, b = module.lora_A[name].get_parameter("weight"), module.lora_B[name].get_parameter("weight")
    return UnwrappedLayer(base, a, b, module.scaling[name])


def _is_plain(module: nn.Module) -> bool:
    """Return whether a module is a plain linear layer or embedding, or an embedding that multiplies
    its vectors by `embed_scale`.
    """
    return type(module) in (nn.Linear, nn.Embedding) or (
        isinstance(module, nn.Embedding) and hasattr(module, "embed_scale")
    )


class UnsupportedModel(Exception):
    """Signal that the model has a feature that the fast decoder was not verified for."""


class WeightsBuilder:
    """Add a model's modules to `DecoderWeights` under the names of its parameters."""

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        device: torch.device,
        base: DecoderWeights | None = None,
        tp_group: TensorParallelGroup | None = None,
    ):
        """Prepare empty weights.

        `base`: its buffers are shared where they hold the same values as the model's. `tp_group`:
        see `DecoderWeights`.
        """
        self.weights, self.base, self.tp_group = DecoderWeights(tp_group), base, tp_group
        self.dtype, self.device = dtype, device
        self.adapters: dict[str, list[LoraSpec]] = {}
        self.names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.names.setdefault(id(parameter), []).append(name)

    def without_shards(self) -> WeightsBuilder:
        """Return a builder that adds whole parameters to the same weights on every rank."""
        other = copy.copy(self)
        other.tp_group = None
        return other

    def add(
        self,
        key: str,
        parameters: Iterable[Tensor],
        dim: int | None = None,
        *,
        parts: int = 1,
        dtype: torch.dtype | None = None,
        offset: float = 0.0,
        scale: float = 1.0,
        shard: Shard = UNSHARDED,
    ) -> None:
        """Stack parameters in the buffer `key`.

        `dim`: the dimension along which the tensor-parallel group shards each of them (None: the
        rank holds `shard`), which consists of `parts` equal parts. `dtype`: by default that of the
        weights. The buffer holds the parameters plus `offset`, the first of them times `scale`,
        then in float32, because half precision would round them.

        If `base` has a buffer with the same values under this key, and none of the parameters is
        trained, that buffer is shared instead.
        """
        weights, pieces, start, trained = self.weights, list[tuple[WeightSlice, Tensor]](), 0, False
        for i, whole in enumerate(parameters):
            part = shard if dim is None else shard_of(whole.shape[dim], dim, self.tp_group, parts)
            piece = WeightSlice(
                key, start, part.num_rows(whole), whole.requires_grad, whole.shape, part, offset,
                1.0 if i else scale,
            )  # fmt: skip
            weights.slices |= dict.fromkeys(self.names[id(whole)], piece)
            pieces.append((piece, piece.convert(whole)))
            start, trained = start + piece.length, trained or piece.trainable
        shared = None if self.base is None or trained else self.base.buffers.get(key)
        if (
            shared is not None
            and len(shared) == start
            and all(have_equal_values(piece.select(shared), values) for piece, values in pieces)
        ):
            weights.buffers[key] = shared
            weights.shared.add(key)
            return
        dtype = torch.float32 if offset or scale != 1.0 else dtype or self.dtype
        size = (start, *pieces[0][1].shape[1:])
        weights.buffers[key] = buffer = torch.empty(size, dtype=dtype, device=self.device)
        for piece, values in pieces:
            piece.select(buffer).copy_(values)

    def add_projection(
        self,
        key: str,
        modules: Sequence[nn.Module],
        *,
        is_tied: bool = False,
        shard_inputs: bool = False,
    ) -> None:
        """Add linear layers that read the same input, fused, under the names of a `Projection`.

        `is_tied`: the buffer `embed` holds the weight. The tensor-parallel group shards the outputs
        of the layers, or with `shard_inputs` their inputs; each rank then computes its term of a
        sum. Raises `UnsupportedModel` if only some of the layers have a bias.
        """
        layers = [unwrap_lora_layer(module) for module in modules]
        # of what is sharded by outputs and of what is sharded by inputs
        by_output, by_input = (None, 1) if shard_inputs else (0, None)
        if not is_tied:
            self.add(f"{key}.weight", [layer.base.weight for layer in layers], int(shard_inputs))
        biases = [layer.base.bias for layer in layers if layer.base.bias is not None]
        if biases:
            if len(biases) < len(layers):
                raise UnsupportedModel(f"a bias on only some layers of {key}")
            # the bias of a sum over the group enters it once
            is_first = self.tp_group is None or self.tp_group.rank == 0
            whole = UNSHARDED if is_first else Shard(empty=True)
            self.add(f"{key}.bias", biases, by_output, shard=whole)
        matrices, first_rank, first_column = [], 0, 0
        for i, layer in enumerate(layers):
            outputs = layer.base.out_features
            shard = UNSHARDED if shard_inputs else shard_of(outputs, 0, self.tp_group)
            columns = slice(first_column, first_column + shard.num_rows(layer.base.weight))
            first_column = columns.stop
            if layer.lora_a is None or layer.lora_b is None:
                continue
            ranks = slice(first_rank, first_rank + len(layer.lora_a))
            first_rank = ranks.stop
            matrices.append(layer.lora_a)
            b_key = f"{key}.lora_b.{i}"
            self.add(b_key, [layer.lora_b], by_output, dtype=layer.lora_b.dtype)
            spec = LoraSpec(b_key, layer.scale, columns, ranks)
            self.adapters.setdefault(key, []).append(spec)
        if matrices:
            self.add(f"{key}.lora_a", matrices, by_input, dtype=matrices[0].dtype)
