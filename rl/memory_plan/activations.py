"""Track tensor storages by kind while a model runs on tensors without memory, and extrapolate the
peak to more layers.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from rl.memory_plan.shapes import MicroBatchMemory

KINDS = tuple(field.name for field in dataclasses.fields(MicroBatchMemory))
HeldBytes = np.ndarray  # bytes of each kind that are held at a moment: [len(KINDS)]


@dataclass(frozen=True)
class LayerBlock:
    """Describe marked layers in the middle of a model by their allocation indices in the forward
    and in the backward (first, last + 1).

    `kept`: additional bytes after their forward; `remaining`: after their backward, too.
    """

    forward: tuple[int, int]
    backward: tuple[int, int]
    kept: HeldBytes
    remaining: HeldBytes


@dataclass(frozen=True)
class AllocationRecord:
    """Record what is held after each allocation of a forward and of its backward. `block`: marked
    layers (`StorageTracker.mark_layers`).
    """

    forward: list[HeldBytes]
    backward: list[HeldBytes]
    block: LayerBlock | None = None

    @property
    def peak(self) -> MicroBatchMemory:
        return _find_peak((*self.forward, *self.backward))

    def extrapolate_block(self, more: int) -> MicroBatchMemory:
        """Return the peak of a model with `more` additional blocks, each like the marked block and
        directly after it.

        After the additional blocks' forward, all that follows holds what they keep. After their
        backward, all that follows holds what remains of them. While the blocks run, memory changes
        linearly from the first to the last block, so the peak is at the first or the last.
        """
        assert self.block is not None
        kept, remaining = more * self.block.kept, more * self.block.remaining
        moments: list[HeldBytes] = []
        for phase, (first, last), before, after in (
            (self.forward, self.block.forward, 0.0, kept),
            (self.backward, self.block.backward, kept, remaining),
        ):
            moments += [held + before for held in phase[:last]]
            moments += [held + after for held in phase[first:]]
        return _find_peak(moments)


def _find_peak(moments: Iterable[HeldBytes]) -> MicroBatchMemory:
    return MicroBatchMemory(*max(moments, key=np.sum, default=np.zeros(len(KINDS))).tolist())


def _empty_grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return an empty output of torch's grouped_mm, in any dtype. For tensors without memory torch
    supports only bfloat16, though its kernels accept float32.
    """
    if a.ndim == 3:
        size = [a.shape[1], b.shape[1]] if b.ndim == 2 else [a.shape[0], a.shape[1], b.shape[2]]
    else:
        size = [offs.shape[0], a.shape[0], b.shape[1]] if b.ndim == 2 else [a.shape[0], b.shape[2]]
    return a.new_empty(size, dtype=out_dtype or a.dtype)


class StorageTracker(TorchDispatchMode):
    """Record the bytes of live storages by kind, at each allocation."""

    def __init__(self, model: Any):
        super().__init__()
        self._vocabulary = model.get_input_embeddings().weight.shape[0]
        matrices = [tuple(p.shape) for p in model.parameters() if p.ndim == 2]
        self._matrices = {*matrices, *(shape[::-1] for shape in matrices)}
        self._live: dict[int, Any] = {}
        self._weights: set[int] = set()
        self._current_bytes = np.zeros(len(KINDS))
        self._allocations: list[HeldBytes] = []
        self._forward_end = 0
        self._marks: list[tuple[int, HeldBytes]] = []
        for tensor in (*model.parameters(), *model.buffers()):
            self.exclude(tensor)

    def end_forward(self) -> None:
        """Mark the end of the forward."""
        self._forward_end = len(self._allocations)

    def mark_layers(self, layers: Sequence[nn.Module]) -> None:
        """Mark the block from the first of two layers up to the second, when they run."""
        for layer in layers:
            layer.register_forward_pre_hook(self._note_layer_start, with_kwargs=True)

    def _note_layer_start(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        """Record the start of a layer. The layer's backward ends when the gradient of its input is
        computed.

        Do nothing when a backward runs the layer again.
        """
        if self._forward_end:
            return
        self._note_current_bytes()
        inputs = (
            tensor
            for tensor in tree_iter((args, kwargs))
            if isinstance(tensor, Tensor) and tensor.requires_grad
        )
        if (hidden := next(inputs, None)) is not None:
            hidden.register_hook(lambda _: self._note_current_bytes())

    def _note_current_bytes(self) -> None:
        self._marks.append((len(self._allocations), self._current_bytes.copy()))

    def get_record(self) -> AllocationRecord:
        return AllocationRecord(
            self._allocations[: self._forward_end],
            self._allocations[self._forward_end :],
            self._marked_block(),
        )

    def _marked_block(self) -> LayerBlock | None:
        """Return the marked block. None unless each layer ran once forwards and backwards."""
        if len(self._marks) != 4 or not self._marks[1][0] <= self._forward_end <= self._marks[2][0]:
            return None
        (begin, at_begin), (end, at_end), (back, at_back), (done, at_done) = self._marks
        kept = at_end - at_begin
        backward = (back - self._forward_end, done - self._forward_end)
        return LayerBlock((begin, end), backward, kept, at_done - at_back + kept)

    def exclude(self, tensor: Tensor) -> None:
        """Exclude a tensor from the count: a weight, an accumulated gradient."""
        storage = tensor.untyped_storage()
        self._live[storage._cdata] = storage
        self._weights.add(storage._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # the most frequent call, which creates no tensor
            return getattr(args[0], "fake_device", None) or func(*args)
        product = _empty_grouped_mm if func is torch.ops.aten._grouped_mm.default else func
        out = product(*args, **(kwargs or {}))
        is_cast = (
            func is torch.ops.aten._to_copy.default
            and args[0].untyped_storage()._cdata in self._weights
        )
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self._add(tensor, is_cast)
        return out

    def _add(self, tensor: Tensor, is_cast: bool) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._live:
            return
        kind = KINDS.index("casts" if is_cast else self._classify(tensor))
        self._current_bytes[kind] += size
        self._live[key] = weakref.ref(storage, lambda _: self._drop(key, kind, size))
        self._allocations.append(self._current_bytes.copy())

    def _drop(self, key: int, kind: int, size: int) -> None:
        if self._live.pop(key, None) is not None:
            self._current_bytes[kind] -= size

    def _classify(self, tensor: Tensor) -> str:
        if tuple(tensor.shape) in self._matrices:
            return "weight_sized"
        return "logits" if tensor.ndim and tensor.shape[-1] == self._vocabulary else "activations"
