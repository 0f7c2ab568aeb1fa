"""What a model is tried out with (rl.learner.probe): sequences, what is seen of a forward, what
draws random numbers.
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
class Sequences:
    """Three answers to one prompt and a sequence by itself; the judged one has neighbours before
    and behind, and is short.
    """

    datums: list[Datum]
    judged: int = 1

    @classmethod
    def make(cls, vocabulary: int, reach: int) -> Sequences:
        rng = np.random.default_rng(0)

        def draw(n: int) -> list[int]:
            return rng.integers(0, vocabulary, n).tolist()

        prompt, answers, alone = (
            draw(4 + reach),
            [draw(n + reach // 2) for n in (4, 3, 6)],
            draw(7 + 2 * reach),
        )
        masks = [[0.0] * (len(prompt) - 1) + [1.0] * (len(answer) + 1) for answer in answers] + [
            [1.0] * len(alone)
        ]
        texts = [*([*prompt, *answer] for answer in answers), alone]
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
class Seen:
    """Of one forward: hidden states of each sequence [T, D]; the judged one's gradient at its own
    tokens, and at all others.
    """

    hidden: list[Tensor]
    own: Tensor | None = None
    others: float = 0.0


class Draws(TorchDispatchMode):
    """Notes what draws random tensors: one that changes a token in a thousand would not show in a
    few.

    A single number is let be (a layer's dropout draws it at a rate of 0 too), and attention, which
    is marked for its own dropout.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and "attention" not in func.name():
            if any(
                isinstance(one, Tensor) and one.numel() > 1
                for one in (out if isinstance(out, tuple) else (out,))
            ):
                self.by.add(func.name().removeprefix("aten::"))
        return out
