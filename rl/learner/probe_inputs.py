"""Provide the inputs and results of the probe (rl.learner.layout_probe).

They are sequences, the outputs of a forward, and a recorder of random operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rl.types import Datum, ModelInput


@dataclass(frozen=True)
class ProbeSequences:
    """Hold three answers to the same prompt and an unrelated sequence.

    The judged sequence is short and has neighbors before and after it.
    """

    datums: list[Datum]
    probed: int = 1

    @classmethod
    def make(cls, vocabulary: int, reach: int) -> ProbeSequences:
        """Return sequences of random tokens that are long enough for a window of `reach`."""
        rng = np.random.default_rng(0)

        def draw(n: int) -> list[int]:
            return rng.integers(0, vocabulary, n).tolist()

        prompt, answers, single = (
            draw(4 + reach),
            [draw(n + reach // 2) for n in (4, 3, 6)],
            draw(7 + 2 * reach),
        )
        masks = [[0.0] * (len(prompt) - 1) + [1.0] * (len(answer) + 1) for answer in answers] + [
            [1.0] * len(single)
        ]
        texts = [*([*prompt, *answer] for answer in answers), single]
        fields = [
            {"target_tokens": text, "mask": mask} for text, mask in zip(texts, masks, strict=True)
        ]
        return cls(
            [
                Datum(ModelInput.from_ints(text), field)
                for text, field in zip(texts, fields, strict=True)
            ]
        )


@dataclass(frozen=True)
class ProbeOutputs:
    """Hold the outputs of a forward.

    `hidden`: hidden states of each sequence [T, D]. `gradient`: the judged sequence's gradient at
    its tokens. `other_gradient_norm`: the norm of that gradient at all other tokens.
    """

    hidden: list[Tensor]
    gradient: Tensor | None = None
    other_gradient_norm: float = 0.0


class RandomOpRecorder(TorchDispatchMode):
    """Record the operations that generate random tensors.

    Dropout that changes a token in a thousand would not show in a few tokens. A single number is
    ignored (layer dropout generates it at rate 0 too), and so is attention, which is tagged random
    because of its dropout argument.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and "attention" not in func.name():
            if any(
                isinstance(output, Tensor) and output.numel() > 1
                for output in (out if isinstance(out, tuple) else (out,))
            ):
                self.ops.add(func.name().removeprefix("aten::"))
        return out
