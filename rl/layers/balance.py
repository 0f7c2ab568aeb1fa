"""How evenly routers spread tokens over experts, and the loss that keeps them at it.

The auxiliary loss of the Switch Transformer (arXiv 2101.03961, equations 4 to 6) in the form that
transformers gives it: over the tokens of all layers together, E sum_e f_e P_e, where f_e is how
many of the K choices a token go to expert e and P_e its mean probability under a softmax of the
router's scores. Even routing gives K; all tokens at one expert, with all the probability, E.
Shapes: T tokens, E experts, K experts a token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rl.layers.reach import inner_model


def routers(model: Any) -> list[tuple[nn.Module, int]]:
    """The modules whose outputs hold a router's scores, and at which index, as the architecture
    itself says; [] where it does not.
    """
    inner = inner_model(model)
    told = next(
        (
            found
            for m in inner.modules()
            if (found := (getattr(m, "_can_record_outputs", None) or {}).get("router_logits"))
        ),
        None,
    )
    if told is None:
        return []
    found = []
    for recorder in told if isinstance(told, list) else [told]:
        kind: Any = getattr(recorder, "target_class", recorder)
        index = getattr(recorder, "index", 0)
        part = getattr(recorder, "layer_name", None)
        found += [
            (m, index)
            for name, m in inner.named_modules()
            if isinstance(m, kind) and (part is None or part in name)
        ]
    return found


@contextlib.contextmanager
def router_scores(model: Any) -> Iterator[Callable[[], list[Tensor]]]:
    """What the routers score inside: a function that gives them of the one forward that was made,
    each [positions, E], before any softmax.

    They belong to the graph. A recomputed forward (checkpointing) is not looked at.
    """
    found: dict[int, Tensor] = {}

    def note(number: int, index: int, module: nn.Module, args: Any, out: Any) -> None:
        scores = out[index] if isinstance(out, tuple | list) else out
        found.setdefault(number, scores.reshape(-1, scores.shape[-1]))

    hooks = [
        m.register_forward_hook(partial(note, i, index))
        for i, (m, index) in enumerate(routers(model))
    ]
    try:
        yield lambda: list(found.values())
    finally:
        for hook in hooks:
            hook.remove()


def balance_loss(scores: Sequence[Tensor], per_token: int, counted_T: Tensor) -> Tensor:
    """The loss over the tokens that count. `scores`: of each router [T, E]; `counted_T`: bool. 0
    where no token counts.
    """
    weight_T = counted_T.float()
    experts = scores[0].shape[1]
    chosen_E = torch.zeros(experts, device=weight_T.device)
    probability_E = torch.zeros_like(chosen_E)
    for scores_TE in scores:
        share_TE = scores_TE.float().softmax(-1)
        choices_TK = share_TE.topk(per_token, dim=-1).indices
        chosen_E = chosen_E.scatter_add(
            0, choices_TK.flatten(), weight_T.repeat_interleave(per_token)
        )
        probability_E = probability_E + (share_TE * weight_T[:, None]).sum(0)
    rows = (weight_T.sum() * len(scores)).clamp_min(1.0)
    return experts * (chosen_E / rows * (probability_E / rows)).sum()
