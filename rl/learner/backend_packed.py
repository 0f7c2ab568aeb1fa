"""Replicate the model on every rank with the frozen base in 4 bit (rl.learner.base).

Weights are returned in bf16.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor

from rl.learner.backend_replicated import ReplicatedBackend
from rl.learner.backend_shared import filled
from rl.learner.base import unpacked


class PackedBackend(ReplicatedBackend):
    """Implement `rl.learner.backend.Backend` for a 4-bit base; see the module.

    `shell`: the model's modules before its matrices were quantized.
    """

    def __init__(
        self,
        model: Any,
        trainable: Mapping[str, Tensor],
        accelerator: Any,
        shell: Any,
        optimizer: str = "adamw",
    ):
        super().__init__(model, trainable, accelerator, optimizer)
        self._shell, self._packed = shell, unpacked(model)

    @property
    def shell(self) -> Any:
        return self._shell

    def pieces(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            if name in self._packed:
                yield name, self._packed[name]()
            else:
                yield from super().pieces([name])

    def whole_model(self, names: Collection[str]) -> contextlib.AbstractContextManager[Any | None]:
        """Yield the full model on rank 0; the copy lies in CPU memory and is freed afterwards."""
        return filled(self._shell, self.pieces(names))
