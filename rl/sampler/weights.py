"""A decoder's own weights: fused buffers of which every model parameter is a slice, found by the
model's own names.

Matrices that read the same input (q, k and v; gate and up; the A matrices of their adapters) lie
one below the other in one buffer, so that one matmul serves them. Where ranks hold a decoder
together, each has its part of a parameter (rl.sampler.split) and takes it from the whole one, which
is given one at a time. Shapes: I inputs, O outputs, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rl.sampler.decoder import NamedTensors
from rl.sampler.projections import Adapter, ProjectionSpec
from rl.sampler.split import WHOLE, Cut, Team, cut, once


@dataclass(frozen=True, slots=True)
class Piece:
    """A parameter's rows in a buffer: what `cut` leaves of the `whole` shape."""

    buffer: str
    start: int
    length: int
    trainable: bool
    whole: torch.Size
    cut: Cut = WHOLE


@dataclass(frozen=True, slots=True)
class Part:
    """A parameter with all its names, and what of it goes into a buffer."""

    names: Sequence[str]
    parameter: Tensor
    cut: Cut = WHOLE


class Weights:
    """Buffers by key, parameters by name. Buffers with a trainable piece are copied by a fork, the
    others shared.

    `team`: the ranks that hold them together, each its part; None: all are here.
    """

    def __init__(self, team: Team | None = None) -> None:
        self.team = team
        self.buffers: dict[str, Tensor] = {}
        self.pieces: dict[str, Piece] = {}
        self.shared: set[str] = set()

    def add(
        self,
        key: str,
        parts: Sequence[Part],
        dtype: torch.dtype,
        device: torch.device,
        base: Weights | None = None,
    ) -> None:
        """Stack what is held of parameters along their first dimension into the buffer `key`.

        It is the buffer of `base`, shared, where that holds the same numbers under this key and
        none of them is trained.
        """
        start, trained = 0, any(part.parameter.requires_grad for part in parts)
        for part in parts:
            whole, length = part.parameter, part.cut.rows(part.parameter)
            for name in part.names:
                self.pieces[name] = Piece(
                    key, start, length, whole.requires_grad, whole.shape, part.cut
                )
            start += length
        own = [part.cut.of(part.parameter.detach()) for part in parts]
        shared = None if base is None or trained else base.buffers.get(key)
        if (
            shared is not None
            and len(shared) == start
            and all(
                same(self._of(shared, part.names[0]), one)
                for part, one in zip(parts, own, strict=True)
            )
        ):
            self.buffers[key] = shared
            self.shared.add(key)
            return
        self.buffers[key] = torch.empty(start, *own[0].shape[1:], dtype=dtype, device=device)
        for part, one in zip(parts, own, strict=True):
            self.view(part.names[0]).copy_(one)

    def _of(self, buffer: Tensor, name: str) -> Tensor:
        piece = self.pieces[name]
        return buffer[piece.start : piece.start + piece.length]

    def view(self, name: str) -> Tensor:
        """What is held of the parameter of this name, a view of its buffer."""
        return self._of(self.buffers[self.pieces[name].buffer], name)

    def load_(self, named_tensors: NamedTensors) -> None:
        """See `Decoder.load_`."""
        for name, tensor in named_tensors:
            if name not in self.pieces:
                known = sorted(self.pieces)
                raise ValueError(
                    f"no parameter {name!r} among the decoder's {len(known)}, such as {known[0]!r}, {known[-1]!r}"
                )
            own, piece = self.view(name), self.pieces[name]
            if piece.whole != tensor.shape:
                raise ValueError(
                    f"{name} has shape {tuple(piece.whole)} in the decoder, got {tuple(tensor.shape)}"
                )
            given = piece.cut.of(tensor.detach())
            if piece.buffer in self.shared:
                refuse_change_of_shared(name, own, given)
            else:
                own.copy_(given)

    def fork(self) -> Weights:
        """A second set: buffers with a trainable piece copied, the others shared by both from now
        on.
        """
        trained = {piece.buffer for piece in self.pieces.values() if piece.trainable}
        other = Weights(self.team)
        other.pieces = self.pieces
        other.buffers = {
            key: buffer.clone() if key in trained else buffer
            for key, buffer in self.buffers.items()
        }
        self.shared = other.shared = set(self.buffers) - trained
        return other


def same(own: Tensor, new: Tensor) -> bool:
    """Whether `new` comes to the same numbers in the dtype, and on the device, of `own`."""
    return own.shape == new.shape and torch.equal(own, new.detach().to(own))


def refuse_change_of_shared(name: str, own: Tensor, new: Tensor) -> None:
    """A frozen weight that forks share may be given again but not changed: it would change the
    other versions too.
    """
    if not same(own, new):
        raise ValueError(
            f"{name} is frozen and shared by forked decoders, so it cannot take another value: "
            "pass trainable parameters alone, or build a new decoder with make_decoder"
        )


# ---------------------------------------------------------------------------------- reading a model


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A linear or embedding module, with its PEFT adapter if it has one: A [R, I], B [O, R]."""

    base: Any
    lora_a: Tensor | None = None
    lora_b: Tensor | None = None
    scale: float = 0.0


def unwrap(module: nn.Module) -> Wrapped:
    """A plain nn.Linear / nn.Embedding, or PEFT's LoRA around one. Raises `Unsupported` for
    everything else.
    """
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
        raise Unsupported(
            f"an adapter that is merged, or one of several active ({active}), or around a {type(base).__name__}"
        )
    if not adapters or module.disable_adapters:
        raise Unsupported("adapters that are disabled")
    name = adapters[0]
    if module.use_dora.get(name) or module.lora_bias.get(name):
        raise Unsupported("an adapter with DoRA or a bias")
    if isinstance(module, lora.Embedding):
        return Wrapped(
            base, module.lora_embedding_A[name], module.lora_embedding_B[name], module.scaling[name]
        )
    a, b = module.lora_A[name].get_parameter("weight"), module.lora_B[name].get_parameter("weight")
    return Wrapped(base, a, b, module.scaling[name])


class Unsupported(Exception):
    """The model has something that the fast decoder was not proved for."""


class Builder:
    """Adds a model's modules to `Weights` under the names that its parameters have."""

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        device: torch.device,
        base: Weights | None = None,
        team: Team | None = None,
    ):
        """`base`: whose buffers are taken rather than filled, where they hold what the model's do.
        `team`: see `Weights`.
        """
        self.weights, self.base, self.team = Weights(team), base, team
        self.dtype, self.device = dtype, device
        self.names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.names.setdefault(id(parameter), []).append(name)

    def _named(self, parameters: Iterable[Tensor], dim: int | None = None) -> list[Part]:
        """With all their names; `dim`: along which they are cut."""
        cuts = (
            (p, WHOLE if dim is None else cut(p.shape[dim], dim, self.team)) for p in parameters
        )
        return [Part(self.names[id(parameter)], parameter, own) for parameter, own in cuts]

    def tensor(self, key: str, parameter: Tensor, dim: int | None = None) -> str:
        """One parameter by itself (a norm's weight, an embedding). `dim`: along which a team cuts
        it (None: whole on every rank).
        """
        self.weights.add(key, self._named([parameter], dim), self.dtype, self.device, self.base)
        return key

    def tensors(self, key: str, parameters: Sequence[Tensor]) -> str:
        """Several parameters, one below the other."""
        self.weights.add(key, self._named(parameters), self.dtype, self.device, self.base)
        return key

    def adapter(self, key: str, parameter: Tensor, dim: int | None = None) -> str:
        """An adapter's matrix, in its own dtype. `dim`: see `tensor`."""
        self.weights.add(key, self._named([parameter], dim), parameter.dtype, self.device)
        return key

    def projection(
        self,
        key: str,
        modules: Sequence[nn.Module],
        tied_to: str | None = None,
        *,
        inputs: bool = False,
    ) -> ProjectionSpec:
        """Linear layers that read the same input, fused; `tied_to` names the buffer of a weight
        that is already there.

        A team cuts their outputs; `inputs`: their inputs, and what each rank computes is its part
        of a sum.
        """
        parts = [unwrap(module) for module in modules]
        weight, bias, lora_a = tied_to or f"{key}.weight", None, None
        if tied_to is None:
            self.weights.add(
                weight,
                self._named((part.base.weight for part in parts), int(inputs)),
                self.dtype,
                self.device,
                self.base,
            )
        biased = [part.base.bias for part in parts if part.base.bias is not None]
        if biased:
            if len(biased) < len(parts):
                raise Unsupported(f"a bias on some of {key} alone")
            bias = f"{key}.bias"
            named = self._named(biased, None if inputs else 0)
            own = [replace(part, cut=once(self.team)) for part in named] if inputs else named
            self.weights.add(bias, own, self.dtype, self.device, self.base)
        adapters, first_rank, first_column = [], 0, 0
        for i, part in enumerate(parts):
            outputs = WHOLE if inputs else cut(part.base.out_features, 0, self.team)
            columns = slice(first_column, first_column + outputs.rows(part.base.weight))
            first_column = columns.stop
            if part.lora_a is None or part.lora_b is None:
                continue
            ranks = slice(first_rank, first_rank + len(part.lora_a))
            first_rank = ranks.stop
            b_key = f"{key}.lora_b.{i}"
            adapters.append(
                Adapter(
                    self.adapter(b_key, part.lora_b, None if inputs else 0),
                    part.scale,
                    columns,
                    ranks,
                )
            )
        matrices = [part.lora_a for part in parts if part.lora_a is not None]
        if matrices:
            lora_a = f"{key}.lora_a"
            self.weights.add(
                lora_a, self._named(matrices, 1 if inputs else None), matrices[0].dtype, self.device
            )
        return ProjectionSpec(weight, bias, lora_a, tuple(adapters))
