"""Compute the value, the metrics and d/dlogp of a policy-gradient loss in a single pass over flat
tokens.

With lp the learner's logprob, q the behavior logprob, d = lp - q, r = exp(d), A the advantage, each
loss is a SUM over active tokens:
    importance_sampling  -r A
    ppo                  -min(r A, clip(r, lo, hi) A)    arXiv 1707.06347, equation 7
    cispo                -sg(clip(r, lo, hi)) lp A       arXiv 2506.13585, equation 4
    dro                  -(lp A - beta/2 d^2)            arXiv 2405.19107
    gspo                 ppo with r_t = sg(s) p / sg(p), s = exp(mean of d over the sequence's
                         active tokens)                  arXiv 2507.18071
lo and hi are absolute ratios (0.8 and 1.2, not 0.2).

Inactive tokens are selected away before any exp: their values, NaN included, change nothing. A
ratio at an advantage of 0, which may overflow, changes the counts of METRICS only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common import (
    can_run_triton,
    check_same_device,
    check_sequences,
    check_tokens,
    device_context,
)
from kernels.policy_loss_kinds import KINDS, METRICS

NAME = "policy_loss"
Bound = float | Tensor

# --------------------------------------------------------------------------------------- torch path


def compute_sequence_means(d_T: Tensor, active_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the mean of d over the active tokens of each token's sequence, [T]; 0 if a sequence
    has none.
    """
    lengths = cu_seqlens.diff().long()
    owner_T = torch.repeat_interleave(
        torch.arange(len(lengths), device=d_T.device), lengths, output_size=len(d_T)
    )
    zero = d_T.new_zeros(len(lengths))
    count = zero.index_add(0, owner_T, active_T.to(d_T.dtype)).clamp_(min=1.0)
    return (zero.index_add(0, owner_T, d_T.where(active_T, 0.0)) / count)[owner_T]


def _policy_loss_torch(
    lp: Tensor,
    old: Tensor,
    advantage: Tensor,
    mask: Tensor | None,
    low: Bound,
    high: Bound,
    cu_seqlens: Tensor | None,
    kind: str,
    beta: float,
) -> tuple[Tensor, Tensor]:
    """Return the sums of METRICS (float32) and d loss / d lp [T]."""
    active = torch.ones_like(lp, dtype=torch.bool) if mask is None else mask != 0
    lp, advantage = lp.where(active, 0.0), advantage.where(active, 0.0)
    d = lp - old.where(active, 0.0)
    r = torch.exp(
        compute_sequence_means(d, active, cu_seqlens)
        if kind == "gspo" and cu_seqlens is not None
        else d
    )
    below, above = r < low, r > high
    r = r.where(advantage != 0, 1.0)
    clipped = torch.clamp(r, low, high)  # type: ignore[arg-type]
    if kind == "dro":
        loss, grad = 0.5 * beta * d * d - lp * advantage, beta * d - advantage
    elif kind == "cispo":
        grad = -clipped * advantage
        loss = grad * lp
    elif kind == "importance_sampling":
        loss = grad = -r * advantage
    else:
        loss = -torch.minimum(r * advantage, clipped * advantage)
        # written so that a NaN stays a NaN
        grad = torch.where(r * advantage > clipped * advantage, 0.0, -r * advantage)
    columns = (loss, torch.ones_like(lp), below.float(), above.float())
    return torch.stack(columns).where(active, 0.0).sum(1), grad.where(active, 0.0)


# ---------------------------------------------------------------------------------------- custom op


@torch.library.custom_op("whetstone::policy_loss", mutates_args=())
def forward_op(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    mask: Tensor | None,
    low_T: Tensor | None,
    high_T: Tensor | None,
    cu_seqlens: Tensor | None,
    kind: str,
    low: float,
    high: float,
    beta: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss (float32 scalar), the sums of METRICS and d loss / d logp [T]."""
    if can_run_triton(logp):
        from kernels.policy_loss_triton import launch_policy_loss

        with device_context(logp):
            sums, grad = launch_policy_loss(
                logp, old, advantage, mask, low_T, high_T, cu_seqlens, kind, low, high, beta
            )
    else:
        lower = low if low_T is None else low_T.float()
        upper = high if high_T is None else high_T.float()
        # torch.clamp needs two tensors or two numbers
        if isinstance(lower, Tensor) != isinstance(upper, Tensor):
            lower, upper = (
                torch.as_tensor(b, dtype=torch.float32, device=logp.device) for b in (lower, upper)
            )
        sums, grad = _policy_loss_torch(
            logp.float(),
            old.float(),
            advantage.float(),
            mask,
            lower,
            upper,
            cu_seqlens,
            kind,
            beta,
        )
    return sums[0].clone(), sums, grad.to(logp.dtype)


@forward_op.register_fake
def _(logp, *_):
    scalar = logp.new_empty((), dtype=torch.float32)
    return scalar, logp.new_empty(len(METRICS), dtype=torch.float32), torch.empty_like(logp)


# ----------------------------------------------------------------------------------------- autograd


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(output[2])
    ctx.mark_non_differentiable(output[1], output[2])


def _backward(ctx, g_loss, *_):
    (grad,) = ctx.saved_tensors
    return (g_loss * grad).to(grad.dtype), *[None] * 10


forward_op.register_autograd(_backward, setup_context=_setup_context)

# ---------------------------------------------------------------------------------- public function


def policy_loss(
    logp_T: Tensor,
    old_T: Tensor,
    advantage_T: Tensor,
    *,
    kind: str = "ppo",
    mask_T: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    clip_low: Bound = 0.8,
    clip_high: Bound = 1.2,
    beta: float = 0.05,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a loss of the module's table as a sum over active tokens, and the sums of its metrics.

    Gradients reach only logp_T.

    Args:
        logp_T, old_T, advantage_T: [T], all sequences concatenated.
        mask_T: [T], nonzero (or True) where a token is an action. None means all tokens; dro and
            gspo reject None, because they would train the prompt.
        clip_low, clip_high: absolute ratios, numbers or a value per token [T].
        beta: coefficient of dro.
        cu_seqlens: [S + 1], boundaries of the sequences; gspo needs it.
    Returns:
        loss (float32 scalar) and a dict of float32 scalars on the device, without a wait: the names
        of METRICS, all sums over active tokens. `clipped_low` and `clipped_high` count the tokens
        whose ratio (for gspo s) is below and above the range.
    Raises:
        ValueError: an unknown kind, a missing argument, or shapes and devices that do not fit.
    """
    if kind not in KINDS:
        raise ValueError(f"{NAME}: kind is {kind!r}; expected {', '.join(KINDS)}")
    if mask_T is None and kind in ("dro", "gspo"):
        raise ValueError(
            f"{NAME}: {kind} needs mask_T, which marks the action tokens; to train all tokens "
            "pass torch.ones_like(logp_T)"
        )
    if kind == "gspo" and cu_seqlens is None:
        raise ValueError(
            f"{NAME}: gspo needs cu_seqlens; for sequences of 3 and 2 tokens pass "
            "torch.tensor([0, 3, 5])"
        )
    low_T, high_T = (b if isinstance(b, Tensor) else None for b in (clip_low, clip_high))
    tokens: dict[str, Tensor | None] = {
        "old_T": old_T,
        "advantage_T": advantage_T,
        "mask_T": mask_T,
        "clip_low": low_T,
        "clip_high": high_T,
    }
    check_tokens(NAME, logp_T.numel(), logp_T=logp_T, **tokens)
    check_same_device(NAME, logp_T=logp_T, **tokens, cu_seqlens=cu_seqlens)
    if cu_seqlens is not None:
        check_sequences(NAME, cu_seqlens, logp_T.numel())
    low, high = (0.0 if isinstance(b, Tensor) else float(b) for b in (clip_low, clip_high))
    loss, sums, _ = forward_op(
        logp_T,
        old_T,
        advantage_T,
        mask_T,
        low_T,
        high_T,
        cu_seqlens,
        kind,
        low,
        high,
        beta,
    )
    return loss, dict(zip(METRICS, sums.unbind(), strict=True))
