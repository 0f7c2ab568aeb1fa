"""Record the experts that a model's routers choose, or replay recorded experts (router replay).

A router scores all experts and takes the best few with `topk`, the only step that all architectures
share. Inside `record_experts` these choices are recorded. Inside `replay_experts` they are replaced
by recorded experts, weighted by the router's scores of these experts, so gradients reach the router
as usual. Two forwards of the same weights with different rounding then use the same experts.
Shapes: T tokens of a forward (rows times positions), B blocks with experts, K experts per token.
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

from rl.layers.layer_kinds import ExpertLayout, replace_forward
from rl.layers.receptive_field import unwrap_model

# Maps (scores [T, experts], experts that the router takes [T, K]) to the experts to use.
ChooseExperts = Callable[[Tensor, Tensor], Tensor]


class _TopKInterceptor(TorchFunctionMode):
    """Intercept every choice of experts inside the context; `choose` returns the experts to use."""

    def __init__(self, experts: ExpertLayout, choose: ChooseExperts):
        super().__init__()
        self.experts, self.choose = experts, choose

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, and replace the result of a `topk` over all experts."""
        out = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return out
        scores = args[0] if args else (kwargs or {})["input"]
        # Groups of experts (DeepSeek) are chosen from scores with three dimensions, or with as many
        # columns as groups.
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
def _intercept_choices(
    model: Any, experts: ExpertLayout, choose: Callable[[int, Tensor, Tensor], Tensor]
) -> Iterator[None]:
    """Pass the choices of each block through `choose(block, scores, taken)`, also in recomputed
    forwards.
    """
    blocks = [unwrap_model(model).get_submodule(name) for name in experts.blocks]

    def forward(block: int, original: Any, *args: Any, **kwargs: Any) -> Any:
        with _TopKInterceptor(experts, partial(choose, block)):
            return original(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        for number, block in enumerate(blocks):
            stack.enter_context(replace_forward(block, partial(forward, number, block.forward)))
        yield


@contextlib.contextmanager
def record_experts(model: Any, experts: ExpertLayout) -> Iterator[Callable[[], Tensor]]:
    """Record the experts that the routers choose; yields a function that returns them, int16 [T, B,
    K].

    The context wraps a single forward. The function raises NotImplementedError if some routers do
    not choose with `topk`.
    """
    taken_by_block: dict[int, Tensor] = {}

    def choose(block: int, scores: Tensor, taken: Tensor) -> Tensor:
        taken_by_block[block] = taken
        return taken

    def choices() -> Tensor:
        if len(taken_by_block) != len(experts.blocks):
            unseen = len(experts.blocks) - len(taken_by_block)
            raise NotImplementedError(
                f"{unseen} of {len(experts.blocks)} routers do not choose experts with topk, "
                "so their experts cannot be recorded"
            )
        return torch.stack(
            [taken_by_block[block] for block in range(len(taken_by_block))], dim=1
        ).to(torch.int16)

    with _intercept_choices(model, experts, choose):
        yield choices


@dataclass
class ExpertReplay:
    """Count the effect of a replay: the tokens with recorded experts that would have used other
    experts.

    A token counts if the experts differ in at least one block.
    """

    has_experts: Tensor  # bool [T]
    changed_by_block: dict[int, Tensor] = field(default_factory=dict)  # block: bool [T]

    def counts(self) -> tuple[Tensor, Tensor]:
        """Return (tokens that would have used other experts, tokens with recorded experts)."""
        assert self.changed_by_block
        return torch.stack(list(self.changed_by_block.values())).any(
            0
        ).sum(), self.has_experts.sum()


@contextlib.contextmanager
def replay_experts(
    model: Any, experts: ExpertLayout, choices_TBK: Tensor
) -> Iterator[ExpertReplay]:
    """Replay recorded experts in place of the experts that the routers would choose.

    Experts of -1 leave a token to the router. The context must include the backward, which
    recomputes checkpointed layers.
    """
    known_T = (choices_TBK >= 0).all(-1).all(-1)
    replay = ExpertReplay(known_T)

    def choose(block: int, scores: Tensor, taken: Tensor) -> Tensor:
        replayed = torch.where(known_T[:, None], choices_TBK[:, block].to(taken.dtype), taken)
        if block not in replay.changed_by_block:
            replay.changed_by_block[block] = (
                replayed.sort(-1).values != taken.sort(-1).values
            ).any(-1)
        return replayed

    with _intercept_choices(model, experts, choose):
        yield replay
