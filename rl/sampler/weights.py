"""A decoder's own weights: fused buffers of which every model parameter is a slice, found by the model's own names.

Matrices that read the same input (q, k and v; gate and up; the A matrices of their adapters) lie one below the other in one
buffer, so that one matmul serves them. Shapes: I inputs, O outputs, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rl.sampler.decoder import NamedTensors
from rl.sampler.projections import Adapter, ProjectionSpec


@dataclass(frozen=True, slots=True)
class Piece:
    """A parameter's rows in a buffer."""

    buffer: str
    start: int
    length: int
    trainable: bool


class Weights:
    """Buffers by key, parameters by name. Buffers with a trainable piece are copied by a fork, the others shared."""

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}
        self.pieces: dict[str, Piece] = {}
        self.shared: set[str] = set()

    def add(
        self,
        key: str,
        parts: Sequence[tuple[Sequence[str], Tensor]],
        dtype: torch.dtype,
        device: torch.device,
        base: Weights | None = None,
    ) -> None:
        """Stack parameters, each given with all its names, along their first dimension into the buffer `key`.

        It is the buffer of `base`, shared, where that holds the same numbers under this key and none of them is trained.
        """
        rows, start, trained = sum(len(parameter) for _, parameter in parts), 0, any(parameter.requires_grad for _, parameter in parts)
        for names, parameter in parts:
            for name in names:
                self.pieces[name] = Piece(key, start, len(parameter), parameter.requires_grad)
            start += len(parameter)
        shared = None if base is None or trained else base.buffers.get(key)
        if shared is not None and len(shared) == rows and all(same(self._of(shared, names[0]), parameter) for names, parameter in parts):
            self.buffers[key] = shared
            self.shared.add(key)
            return
        self.buffers[key] = torch.empty(rows, *parts[0][1].shape[1:], dtype=dtype, device=device)
        for names, parameter in parts:
            self.view(names[0]).copy_(parameter.detach())

    def _of(self, buffer: Tensor, name: str) -> Tensor:
        piece = self.pieces[name]
        return buffer[piece.start : piece.start + piece.length]

    def view(self, name: str) -> Tensor:
        """The parameter of this name, a view of its buffer."""
        return self._of(self.buffers[self.pieces[name].buffer], name)

    def load_(self, named_tensors: NamedTensors) -> None:
        """See `Decoder.load_`."""
        for name, tensor in named_tensors:
            if name not in self.pieces:
                known = sorted(self.pieces)
                raise ValueError(f"no parameter {name!r} among the decoder's {len(known)}, such as {known[0]!r}, {known[-1]!r}")
            own = self.view(name)
            if own.shape != tensor.shape:
                raise ValueError(f"{name} has shape {tuple(own.shape)} in the decoder, got {tuple(tensor.shape)}")
            if self.pieces[name].buffer in self.shared:
                refuse_change_of_shared(name, own, tensor)
            else:
                own.copy_(tensor.detach())

    def fork(self) -> Weights:
        """A second set: buffers with a trainable piece copied, the others shared by both from now on."""
        trained = {piece.buffer for piece in self.pieces.values() if piece.trainable}
        other = Weights()
        other.pieces = self.pieces
        other.buffers = {key: buffer.clone() if key in trained else buffer for key, buffer in self.buffers.items()}
        self.shared = other.shared = set(self.buffers) - trained
        return other


def same(own: Tensor, new: Tensor) -> bool:
    """Whether `new` comes to the same numbers in the dtype, and on the device, of `own`."""
    return own.shape == new.shape and torch.equal(own, new.detach().to(own))


def refuse_change_of_shared(name: str, own: Tensor, new: Tensor) -> None:
    """A frozen weight that forks share may be given again but not changed: it would change the other versions too."""
    if not same(own, new):
        raise ValueError(
            f"{name} is frozen and shared by forked decoders, so it cannot take another value: "
            "pass trainable parameters alone, or build a new decoder with make_decoder"
        )


# ----------------------------------------------------------------------------------------------------- reading a model


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A linear or embedding module, with its PEFT adapter if it has one: A [R, I], B [O, R]."""

    base: Any
    lora_a: Tensor | None = None
    lora_b: Tensor | None = None
    scale: float = 0.0


def unwrap(module: nn.Module) -> Wrapped:
    """A plain nn.Linear / nn.Embedding, or PEFT's LoRA around one. Raises `Unsupported` for everything else."""
    if type(module) in (nn.Linear, nn.Embedding):
        return Wrapped(module)
    if not type(module).__module__.startswith("peft."):
        raise Unsupported(f"a layer of type {type(module).__name__}")
    from peft.tuners import lora

    if not isinstance(module, (lora.Linear, lora.Embedding)):
        raise Unsupported(f"a PEFT layer of type {type(module).__name__}")
    base, active = module.get_base_layer(), list(module.active_adapters)
    adapters = [name for name in active if name in module.scaling]
    if type(base) not in (nn.Linear, nn.Embedding) or module.merged or len(adapters) > 1:
        raise Unsupported(f"an adapter that is merged, or one of several active ({active}), or around a {type(base).__name__}")
    if not adapters or module.disable_adapters:
        raise Unsupported("adapters that are disabled")
    name = adapters[0]
    if module.use_dora.get(name) or module.lora_bias.get(name):
        raise Unsupported("an adapter with DoRA or a bias")
    if isinstance(module, lora.Embedding):
        return Wrapped(base, module.lora_embedding_A[name], module.lora_embedding_B[name], module.scaling[name])
    a, b = module.lora_A[name].get_parameter("weight"), module.lora_B[name].get_parameter("weight")
    return Wrapped(base, a, b, module.scaling[name])


class Unsupported(Exception):
    """The model has something that the fast decoder was not proved for."""


class Builder:
    """Adds a model's modules to `Weights` under the names that its parameters have."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: torch.device, base: Weights | None = None):
        """`base`: whose buffers are taken rather than filled, where they hold what the model's do."""
        self.weights, self.base = Weights(), base
        self.dtype, self.device = dtype, device
        self.names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.names.setdefault(id(parameter), []).append(name)

    def _named(self, parameters: Iterable[Tensor]) -> list[tuple[list[str], Tensor]]:
        return [(self.names[id(parameter)], parameter) for parameter in parameters]

    def tensor(self, key: str, parameter: Tensor) -> str:
        """One parameter by itself (a norm's weight, an embedding)."""
        return self.tensors(key, [parameter])

    def tensors(self, key: str, parameters: Sequence[Tensor]) -> str:
        """Several parameters, one below the other."""
        self.weights.add(key, self._named(parameters), self.dtype, self.device, self.base)
        return key

    def adapter(self, key: str, parameter: Tensor) -> str:
        """An adapter's matrix, in its own dtype."""
        self.weights.add(key, self._named([parameter]), parameter.dtype, self.device)
        return key

    def projection(self, key: str, modules: Sequence[nn.Module], tied_to: str | None = None) -> ProjectionSpec:
        """Linear layers that read the same input, fused; `tied_to` names the buffer of a weight that is already there."""
        parts = [unwrap(module) for module in modules]
        weight, bias, lora_a = tied_to or f"{key}.weight", None, None
        if tied_to is None:
            self.weights.add(weight, self._named(part.base.weight for part in parts), self.dtype, self.device, self.base)
        biased = [part.base.bias for part in parts if part.base.bias is not None]
        if biased:
            if len(biased) < len(parts):
                raise Unsupported(f"a bias on some of {key} alone")
            bias = f"{key}.bias"
            self.weights.add(bias, self._named(biased), self.dtype, self.device, self.base)
        adapters, first_rank, first_column = [], 0, 0
        for i, part in enumerate(parts):
            columns = slice(first_column, first_column + part.base.out_features)
            first_column = columns.stop
            if part.lora_a is None or part.lora_b is None:
                continue
            ranks = slice(first_rank, first_rank + len(part.lora_a))
            first_rank = ranks.stop
            b_key = f"{key}.lora_b.{i}"
            adapters.append(Adapter(self.adapter(b_key, part.lora_b), part.scale, columns, ranks))
        matrices = [part.lora_a for part in parts if part.lora_a is not None]
        if matrices:
            lora_a = f"{key}.lora_a"
            self.weights.add(lora_a, self._named(matrices), matrices[0].dtype, self.device)
        return ProjectionSpec(weight, bias, lora_a, tuple(adapters))
