"""Replicate the model on every rank with the frozen base in 4 bit (rl.learner.frozen_base).

Weights are returned in bf16.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor

from rl.learner.backend_common import fill_skeleton
from rl.learner.backend_replicated import ReplicatedBackend
from rl.learner.frozen_base import get_dequantizers


class FourBitBackend(ReplicatedBackend):
    """Implement `rl.learner.backend.Backend` for a 4-bit base; see the module.

    `skeleton`: the model's modules before its matrices were quantized.
    """

    def __init__(
        self,
        model: Any,
        trainable: Mapping[str, Tensor],
        accelerator: Any,
        skeleton: Any,
        optimizer: str = "adamw",
    ):
        super().__init__(model, trainable, accelerator, optimizer)
        self._skeleton, self._dequantizers = skeleton, get_dequantizers(model)

    @property
    def skeleton(self) -> Any:
        return self._skeleton

    def iter_weights(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            if name in self._dequantizers:
                yield name, self._dequantizers[name]()
            else:
                yield from super().iter_weights([name])

    def full_model(self, names: Collection[str]) -> contextlib.AbstractContextManager[Any | None]:
        """Yield the full model on rank 0; the copy lies in CPU memory and is freed afterwards."""
        return fill_skeleton(self._skeleton, self.iter_weights(names))
