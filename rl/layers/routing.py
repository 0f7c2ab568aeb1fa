"""Which experts a model's routers choose: noted as it runs, or given to it.

A router scores all experts and takes the best few; what it takes is its `topk` over them, the one
place that all architectures share. Inside `noted` these choices are kept; inside `given` they are
replaced, and the router's own scores of the experts given weigh them, so that gradients reach it as
ever. Two forwards of the same weights that round apart then go the same way (router replay).
Shapes: T tokens of a forward (rows times positions), B blocks with experts, K experts a token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rl.layers.describe import Experts
from rl.layers.reach import inner_model

# (scores [T, experts], what the router takes [T, K]) to what is taken instead
Choose = Callable[[Tensor, Tensor], Tensor]


class _Choices(TorchFunctionMode):
    """Sees every choice of experts made inside; `choose` says what is taken."""

    def __init__(self, experts: Experts, choose: Choose):
        super().__init__()
        self.experts, self.choose = experts, choose

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return out
        scores = args[0] if args else (kwargs or {})["input"]
        # groups of experts (DeepSeek) are chosen from scores of three dimensions, or of as many
        # columns as there are groups
        if (
            scores.ndim != 2
            or scores.shape[1] != self.experts.count
            or out.indices.shape[1] != self.experts.per_token
        ):
            return out
        taken = self.choose(scores, out.indices)
        return (
            out
            if taken is out.indices
            else torch.return_types.topk((scores.gather(1, taken), taken))
        )


@contextlib.contextmanager
def _watched(
    model: Any, experts: Experts, choose: Callable[[int, Tensor, Tensor], Tensor]
) -> Iterator[None]:
    """Each block's own choices go through `choose(block, scores, taken)`, in a recomputed forward
    too.
    """
    blocks = [inner_model(model).get_submodule(name) for name in experts.blocks]

    def forward(block: int, own: Any, *args: Any, **kwargs: Any) -> Any:
        with _Choices(experts, partial(choose, block)):
            return own(*args, **kwargs)

    before = [vars(block).get("forward") for block in blocks]
    for number, block in enumerate(blocks):
        block.forward = partial(forward, number, block.forward)
    try:
        yield
    finally:
        for block, own in zip(blocks, before, strict=True):
            if own is None:
                del block.forward
            else:
                block.forward = own


@contextlib.contextmanager
def noted(model: Any, experts: Experts) -> Iterator[Callable[[], Tensor]]:
    """What the routers choose inside: a function that gives the choices of the one forward that was
    made, int16 [T, B, K].
    """
    found: dict[int, Tensor] = {}

    def choose(block: int, scores: Tensor, taken: Tensor) -> Tensor:
        found[block] = taken
        return taken

    def choices() -> Tensor:
        if len(found) != len(experts.blocks):
            unseen = len(experts.blocks) - len(found)
            raise NotImplementedError(
                f"{unseen} of {len(experts.blocks)} routers choose in a way that is not seen"
            )
        return torch.stack([found[block] for block in range(len(found))], dim=1).to(torch.int16)

    with _watched(model, experts, choose):
        yield choices


@dataclass
class Replay:
    """What replay did: of the tokens whose experts were given, those that would have gone elsewhere
    in one block or more.
    """

    elsewhere: dict[int, Tensor] = field(default_factory=dict)  # block: bool [T]
    known: Tensor | None = None

    def counts(self) -> tuple[Tensor, Tensor]:
        """(tokens that would have gone elsewhere, tokens)."""
        assert self.known is not None and self.elsewhere
        return torch.stack(list(self.elsewhere.values())).any(0).sum(), self.known.sum()


@contextlib.contextmanager
def given(model: Any, experts: Experts, choices_TBK: Tensor) -> Iterator[Replay]:
    """The experts that were noted, in place of those that the routers would choose; -1 leaves a
    token to them.

    Stays for the backward as well, where checkpointed layers run again.
    """
    replay = Replay(known=(choices_TBK >= 0).all(-1).all(-1))
    known_T1 = (choices_TBK >= 0).all(-1).all(-1)[:, None]

    def choose(block: int, scores: Tensor, taken: Tensor) -> Tensor:
        wanted = torch.where(known_T1, choices_TBK[:, block].to(taken.dtype), taken)
        if block not in replay.elsewhere:
            replay.elsewhere[block] = (wanted.sort(-1).values != taken.sort(-1).values).any(-1)
        return wanted

    with _watched(model, experts, choose):
        yield replay
