"""Compute the experts of a mixture-of-experts layer for the fast decoder.

The router's scores select K of X experts for each token. The pairs (token, expert) are sorted by
expert, so that each expert multiplies its tokens at once. On a GPU with grouped products no step
waits for the host, and shapes do not depend on the choices, so a CUDA graph can contain them.
Shapes: N tokens, E hidden width, X experts, K experts per token, I intermediate size of an expert,
S = N K.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from rl.sampler.linear_layers import Projection

Activate = Callable[[Tensor], Tensor]  # act(gate) * up, from [.., 2 I] to [.., I]
_ALIGNMENT = 16  # bytes that the rows of the matrices of a grouped product are a multiple of


class ExpertLayer:
    """Map hidden states [.., E] to the weighted sum of the outputs of each token's experts, with
    the buffers of the names "key.router" [X, E], "key.gate_up" [X, 2 I, E] and "key.down"
    [X, E, I].

    `normalizes`: the weights of a token's experts are scaled to the sum 1. `shared_gate`: the
    projection whose sigmoid scales the output of the expert that every token uses.
    """

    __slots__ = (
        "down_XEI", "expert_X", "gate_up_XIE", "normalizes", "per_token", "router_XE",
        "shared_gate", "uses_grouped_products",
    )  # fmt: skip

    def __init__(
        self,
        key: str,
        buffers: Mapping[str, Tensor],
        per_token: int,
        normalizes: bool,
        shared_gate: Projection | None = None,
    ):
        self.router_XE = buffers[f"{key}.router"]
        self.gate_up_XIE, self.down_XEI = buffers[f"{key}.gate_up"], buffers[f"{key}.down"]
        self.per_token, self.normalizes, self.shared_gate = per_token, normalizes, shared_gate
        self.expert_X = torch.arange(len(self.router_XE), device=self.router_XE.device)
        self.uses_grouped_products = all(
            has_grouped_products(weight) for weight in (self.gate_up_XIE, self.down_XEI)
        )

    def __call__(
        self, x: Tensor, activate: Activate, fixed_shapes: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return outputs [.., E] and the experts of each token [.., K].

        `fixed_shapes`: no operation on a GPU may wait for the host.
        """
        x_NE = x.flatten(0, -2)
        weight_NK, chosen_NK = self.route(x_NE)
        if fixed_shapes and x.is_cuda and not self.uses_grouped_products:
            y_NE = self.compute_all(x_NE, weight_NK, chosen_NK, activate)
        else:
            y_NE = self.compute_chosen(x_NE, weight_NK, chosen_NK, activate)
        return y_NE.view(x.shape), chosen_NK.unflatten(0, x.shape[:-1])

    def route(self, x_NE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the indices of the experts of each token, both [N, K]."""
        scores_NX = F.linear(x_NE, self.router_XE).float().softmax(-1)
        weight_NK, chosen_NK = scores_NX.topk(self.per_token, dim=-1)
        if self.normalizes:
            weight_NK = weight_NK / weight_NK.sum(-1, keepdim=True)
        return weight_NK.to(x_NE.dtype), chosen_NK

    def compute_chosen(
        self, x_NE: Tensor, weight_NK: Tensor, chosen_NK: Tensor, activate: Activate
    ) -> Tensor:
        """Return the weighted sums [N, E] with the products of the chosen experts only."""
        expert_S, order_S = chosen_NK.flatten().sort(stable=True)
        x_SE = x_NE.index_select(0, order_S // self.per_token)
        end_X = torch.searchsorted(expert_S, self.expert_X, right=True, out_int32=True)
        if self.uses_grouped_products:
            hidden_SI = activate(F.grouped_mm(x_SE, self.gate_up_XIE.mT, offs=end_X))
            y_SE = F.grouped_mm(hidden_SI, self.down_XEI.mT, offs=end_X)
        else:
            y_SE, start = torch.empty_like(x_SE), 0
            for expert, end in enumerate(end_X.tolist()):
                if end > start:
                    hidden = activate(F.linear(x_SE[start:end], self.gate_up_XIE[expert]))
                    y_SE[start:end] = F.linear(hidden, self.down_XEI[expert])
                start = end
        y_SE = torch.empty_like(y_SE).index_copy_(0, order_S, y_SE)
        y_NKE = y_SE.view(-1, self.per_token, x_NE.shape[1])
        return torch.bmm(weight_NK.unsqueeze(1), y_NKE).squeeze(1)

    def compute_all(
        self, x_NE: Tensor, weight_NK: Tensor, chosen_NK: Tensor, activate: Activate
    ) -> Tensor:
        """Return the weighted sums [N, E] with the products of all experts for all tokens."""
        x_XNE = x_NE.expand(len(self.expert_X), *x_NE.shape)
        y_XNE = torch.bmm(activate(torch.bmm(x_XNE, self.gate_up_XIE.mT)), self.down_XEI.mT)
        chosen_XNK = chosen_NK == self.expert_X.view(-1, 1, 1)
        weight_XN = (weight_NK * chosen_XNK).sum(-1, dtype=weight_NK.dtype)
        # an unused expert may overflow, and 0 times infinity is NaN
        y_XNE = y_XNE.masked_fill_((weight_XN == 0).unsqueeze(-1), 0)
        return torch.bmm(weight_XN.T.unsqueeze(1), y_XNE.transpose(0, 1)).squeeze(1)


def has_grouped_products(weight: Tensor) -> bool:
    """Return whether torch multiplies groups of rows by the matrices `weight` [X, O, I] without
    waiting for the host.

    The kernels are for bfloat16 on Hopper and Blackwell; other devices loop over the groups.
    """
    if weight.dtype != torch.bfloat16 or not weight.is_cuda or torch.version.hip is not None:
        return False
    if not torch.cuda.is_available():
        return False
    aligned = all(size * weight.element_size() % _ALIGNMENT == 0 for size in weight.shape[1:])
    return aligned and torch.cuda.get_device_capability(weight.device)[0] in (9, 10)


def stack_choices(choices: list[Tensor]) -> Tensor:
    """Return the experts [.., B K] of tokens, int16, from those of each of B layers, [.., K]."""
    return torch.stack(choices, dim=-2).flatten(-2).to(torch.int16)


def copy_choices(choices: list[Tensor] | None) -> np.ndarray | None:
    """Return `stack_choices` on the host; None if no experts are recorded."""
    return None if choices is None else stack_choices(choices).cpu().numpy()
