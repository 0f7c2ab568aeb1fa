"""Compute the router auxiliary loss, which keeps the tokens spread evenly over the experts.

The auxiliary loss of the Switch Transformer (arXiv 2101.03961, equations 4 to 6) in the form of
transformers: over the tokens of all layers together, E sum_e f_e P_e, where f_e is the number of
choices of expert e per token (of K) and P_e its mean probability under a softmax of the router's
scores. Even routing gives K. All tokens at a single expert, with all the probability, give E.
Shapes: T tokens, E experts, K experts per token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rl.layers.receptive_field import unwrap_model


def find_routers(model: Any) -> list[tuple[nn.Module, int]]:
    """Return the modules whose outputs contain router scores, with the index of the scores in the
    output.

    The architecture declares them (`_can_record_outputs`). Returns [] if it does not.
    """
    inner = unwrap_model(model)
    recorders = next(
        (
            matches
            for m in inner.modules()
            if (matches := (getattr(m, "_can_record_outputs", None) or {}).get("router_logits"))
        ),
        None,
    )
    if recorders is None:
        return []
    matches = []
    for recorder in recorders if isinstance(recorders, list) else [recorders]:
        kind: Any = getattr(recorder, "target_class", recorder)
        index = getattr(recorder, "index", 0)
        part = getattr(recorder, "layer_name", None)
        matches += [
            (m, index)
            for name, m in inner.named_modules()
            if isinstance(m, kind) and (part is None or part in name)
        ]
    return matches


@contextlib.contextmanager
def record_router_scores(model: Any) -> Iterator[Callable[[], list[Tensor]]]:
    """Record the router scores of a forward; yields a function that returns them.

    The scores [positions, E] of each router are taken before any softmax and belong to the autograd
    graph. Only the first forward is recorded, not a recomputed forward (activation checkpointing).
    """
    scores_by_router: dict[int, Tensor] = {}

    def note(number: int, index: int, module: nn.Module, args: Any, out: Any) -> None:
        scores = out[index] if isinstance(out, tuple | list) else out
        scores_by_router.setdefault(number, scores.reshape(-1, scores.shape[-1]))

    hooks = [
        m.register_forward_hook(partial(note, i, index))
        for i, (m, index) in enumerate(find_routers(model))
    ]
    try:
        yield lambda: list(scores_by_router.values())
    finally:
        for hook in hooks:
            hook.remove()


def compute_router_aux_loss(
    scores: Sequence[Tensor], experts_per_token: int, counted_T: Tensor
) -> Tensor:
    """Return the loss over the counted tokens; 0 if no token is counted.

    `scores`: the scores of each router [T, E]. `counted_T`: bool.
    """
    weight_T = counted_T.float()
    experts = scores[0].shape[1]
    chosen_E = torch.zeros(experts, device=weight_T.device)
    probability_E = torch.zeros_like(chosen_E)
    for scores_TE in scores:
        share_TE = scores_TE.float().softmax(-1)
        choices_TK = share_TE.topk(experts_per_token, dim=-1).indices
        chosen_E = chosen_E.scatter_add(
            0, choices_TK.flatten(), weight_T.repeat_interleave(experts_per_token)
        )
        probability_E = probability_E + (share_TE * weight_T[:, None]).sum(0)
    rows = (weight_T.sum() * len(scores)).clamp_min(1.0)
    return experts * (chosen_E / rows * (probability_E / rows)).sum()
