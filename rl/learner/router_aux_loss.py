"""Add the auxiliary load-balancing loss of the routers to any loss: a coefficient, off by default.

It is computed over the trained tokens of a micro-batch on a single rank, as transformers does.
It has the weight of the loss of those tokens (of those answers or pairs, if the loss is a sum over
these).
A mean over tokens gets the coefficient times the mean of the micro-batches' auxiliary losses. It is
not a sum over tokens, so it is the only term that depends on the split of a batch. The reported
loss does not include it. A caller's custom loss gets no such term, because its scale is unknown.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rl.errors import UserError
from rl.layers import ExpertLayout, compute_router_aux_loss, find_routers, record_router_scores
from rl.learner.packing import PackedBatch
from rl.losses import MASK_FIELDS, LossSpec

AuxLossTerm = Callable[[PackedBatch, LossSpec], tuple[Tensor | float, dict[str, Tensor]]]


class RouterAuxLoss:
    """Compute the auxiliary loss of a model; `coefficient` 0 disables it.

    Raises UserError for a model without experts, or a model with routers that cannot be read.
    """

    def __init__(self, model: Any, experts: ExpertLayout | None, coefficient: float, name: str):
        self.model, self.coefficient, self.experts = model, coefficient, experts
        if coefficient and experts is None:
            raise UserError(
                f"router_aux_loss_coef is for models with experts, but {name} has none: set it to 0"
            )
        if coefficient and not find_routers(model):
            raise UserError(
                f"router_aux_loss_coef: the router scores of {name} cannot be located: set it to 0"
            )

    @contextlib.contextmanager
    def record(self) -> Iterator[AuxLossTerm | None]:
        """Record router scores during a forward.

        Yield a function of (batch, loss) that returns (the term to add to the summed loss, metrics)
        after the forward. Yield None if no gradient or no term is needed.
        """
        if not self.coefficient or not torch.is_grad_enabled():
            yield None
            return
        with record_router_scores(self.model) as scores:
            yield lambda batch, loss: self._compute_term(scores(), batch, loss)

    def _compute_term(
        self, scores: list[Tensor], batch: PackedBatch, loss: LossSpec
    ) -> tuple[Tensor | float, dict[str, Tensor]]:
        """Return (the weighted auxiliary loss, metric sums) of a micro-batch."""
        assert self.experts is not None
        if loss.unit == "own":
            return 0.0, {}
        fields = batch.inputs
        weights = next((fields[key] for key in (*MASK_FIELDS, "weights") if key in fields), None)
        if weights is None and "advantages" in fields:  # a policy loss without a mask
            weights = (fields["advantages"] != 0).float()
        token_scores = (
            scores
            if batch.token_index is None
            else [layer_scores[batch.token_index] for layer_scores in scores]
        )
        if weights is None:
            weights = torch.ones(batch.tokens, device=token_scores[0].device)
        counted = weights != 0 if weights.ndim == 1 else (weights != 0).any(-1)
        value = compute_router_aux_loss(token_scores, self.experts.per_token, counted)
        units = (
            weights.abs().sum()
            if loss.unit == "token"
            else weights.new_tensor(len(batch.datum_index) / loss.group)
        )
        return self.coefficient * units * value, {
            "router_aux_loss:sum": (units * value).detach(),
            "balanced:sum": units.detach(),
        }
