"""The auxiliary load-balancing loss as a part of any loss: a coefficient, off by default.

It is taken over the trained tokens of one micro-batch on one rank, as transformers does, and weighs
as much as the loss of those tokens (of those answers or pairs, where it is a sum over these): a
mean over tokens gets the coefficient times the mean of the micro-batches' losses. Being no sum over
tokens, it is the one thing here that depends on how a batch is cut. It stands beside the loss that
is reported, not in it. A loss of the caller's own gets none: its scale is not known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rl.errors import UserError
from rl.layers import Experts, balance_loss, router_scores, routers
from rl.learner.packing import PackedBatch
from rl.losses import LossSpec

Term = Callable[[PackedBatch, LossSpec], tuple[Tensor | float, dict[str, Tensor]]]


class Balancing:
    """For one model. `coefficient` 0: nothing. Raises UserError for a model without experts, or
    whose routers cannot be read.
    """

    def __init__(self, model: Any, experts: Experts | None, coefficient: float, name: str):
        self.model, self.coefficient, self.experts = model, coefficient, experts
        if coefficient and experts is None:
            raise UserError(
                f"router_aux_loss_coef is for models with experts, and {name} has none: set it to 0"
            )
        if coefficient and not routers(model):
            raise UserError(
                f"router_aux_loss_coef: {name} does not say where the scores of its routers are: set it to 0"
            )

    @contextlib.contextmanager
    def watching(self) -> Iterator[Term | None]:
        """Around a forward: what gives (the term to add to its summed loss, metrics) afterwards.
        None where nothing is learnt or added.
        """
        if not self.coefficient or not torch.is_grad_enabled():
            yield None
            return
        with router_scores(self.model) as scores:
            yield lambda batch, loss: self._term(scores(), batch, loss)

    def _term(
        self, scores: list[Tensor], batch: PackedBatch, loss: LossSpec
    ) -> tuple[Tensor | float, dict[str, Tensor]]:
        assert self.experts is not None
        if loss.unit == "own":
            return 0.0, {}
        weights = next(
            (
                batch.inputs[key]
                for key in ("mask", "sequence_ratio_mask", "weights")
                if key in batch.inputs
            ),
            None,
        )
        own = scores if batch.token_index is None else [one[batch.token_index] for one in scores]
        if weights is None:
            weights = torch.ones(batch.tokens, device=own[0].device)
        counted = weights != 0 if weights.ndim == 1 else (weights != 0).any(-1)
        value = balance_loss(own, self.experts.per_token, counted)
        units = (
            weights.abs().sum()
            if loss.unit == "token"
            else weights.new_tensor(len(batch.datum_index) / loss.group)
        )
        return self.coefficient * units * value, {
            "router_aux_loss:sum": (units * value).detach(),
            "balanced:sum": units.detach(),
        }
