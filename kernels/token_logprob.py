"""Compute the target's logprob and the entropy of each token from logits that already exist.

The forward makes a single pass over the logits, and so does the backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common import (
    CUDAGRAPH_UNSAFE_TAGS,
    FLOAT_DTYPES,
    LARGE_NEGATIVE,
    LN2,
    LOG2E,
    can_run_triton,
    check_head,
    check_same_device,
    check_target,
    check_targets,
    device_context,
    scatter_rows,
)
from kernels.linear_logprob_torch import (
    BLOCK,
    GradientCoefficients,
    compute_coefficients,
    compute_logit_gradient,
)

NAME = "token_logprob"

# --------------------------------------------------------------------------------------- torch path


def _row_chunks(logits_TV: Tensor) -> range:
    """Return the row offsets of chunks that hold at most BLOCK logits."""
    return range(0, logits_TV.shape[0], max(1, BLOCK // logits_TV.shape[1]))


def _scale_logits(logits: Tensor, temperature: float) -> Tensor:
    """Return a float32 copy of the logits / (temperature * log 2)."""
    return (logits.float() * (LOG2E / temperature)).clamp_(min=LARGE_NEGATIVE)


def _select_masked(rows: Tensor, mask: Tensor) -> Tensor:
    """Return rows[mask], without a copy if the mask selects all rows."""
    return rows if bool(mask.all()) else rows[mask]


def _torch_forward(
    logits_TV: Tensor, y_T: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logp, entropy and lse, float32 [T], in plain torch."""
    out = torch.empty((3, len(y_T)), dtype=torch.float32, device=logits_TV.device)
    chunks = _row_chunks(logits_TV)
    for lo in chunks:
        rows = slice(lo, lo + chunks.step)
        z = _scale_logits(logits_TV[rows], temperature)
        at_target = z.gather(1, y_T[rows].unsqueeze(1)).squeeze(1)
        m = z.amax(1, keepdim=True)
        e = torch.exp2(z.sub_(m))
        total = e.sum(1)
        spread = z.mul_(e).sum(1)
        lse = m.squeeze(1) + torch.log2(total)
        out[:, rows] = torch.stack((at_target - lse, torch.log2(total) - spread / total, lse)) * LN2
    return out[0].clone(), out[1].clone(), out[2].clone()


def _torch_backward(
    logits_TV: Tensor,
    y_T: Tensor,
    temperature: float,
    co: GradientCoefficients,
    lse_T: Tensor,
    out_TV: Tensor,
) -> None:
    """Write the gradient to `out_TV`. Rows with all-zero coefficients get zeros."""
    active_T = (
        (co.a != 0) | (co.b != 0) if co.c is None else (co.a != 0) | (co.b != 0) | (co.c != 0)
    )
    chunks = _row_chunks(logits_TV)
    for lo in chunks:
        rows = slice(lo, lo + chunks.step)
        active = active_T[rows]
        a, b, c = (t if t is None else _select_masked(t[rows], active) for t in co)
        z = _scale_logits(_select_masked(logits_TV[rows], active), temperature)
        z.sub_((_select_masked(lse_T[rows], active) / LN2).unsqueeze(1))
        coefficients = GradientCoefficients(a, b, c)  # type: ignore[arg-type]
        y = _select_masked(y_T[rows], active)
        dz = compute_logit_gradient(z, y, coefficients, 1.0 / temperature, torch.empty_like(z))
        if bool(active.all()):
            out_TV[rows] = dz
        else:
            out_TV[rows] = (
                out_TV.new_zeros(())
                if len(dz) == 0
                else scatter_rows(dz, active.nonzero().squeeze(1), len(active))
            )


# --------------------------------------------------------------------------------------- custom ops


@torch.library.custom_op("whetstone::token_logprob", mutates_args=(), tags=CUDAGRAPH_UNSAFE_TAGS)
def forward_op(
    logits: Tensor, target: Tensor, temperature: float, checked: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logp, entropy and lse, float32 [T]."""
    if not checked:
        check_targets(NAME, target, logits.shape[1])
    if can_run_triton(logits) and logits.numel():
        from kernels.token_logprob_triton import forward

        with device_context(logits):
            return forward(logits, target, temperature)
    return _torch_forward(logits, target, temperature)


@forward_op.register_fake
def _(logits, target, temperature, checked=False):
    logp, entropy, lse = (logits.new_empty(logits.shape[0], dtype=torch.float32) for _ in range(3))
    return logp, entropy, lse


@torch.library.custom_op("whetstone::token_logprob_backward", mutates_args=())
def backward_op(
    g_logp: Tensor | None,
    g_entropy: Tensor | None,
    g_lse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    entropy: Tensor,
    lse: Tensor,
    temperature: float,
) -> Tensor:
    """Return the gradient of the logits."""
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    co = compute_coefficients(g_logp, g_entropy, g_lse, entropy)
    if can_run_triton(logits) and logits.numel():
        from kernels.token_logprob_triton import backward

        with device_context(logits):
            backward(logits, target, temperature, co, lse, out)
    else:
        _torch_backward(logits, target, temperature, co, lse, out)
    return out


@backward_op.register_fake
def _(g_logp, g_entropy, g_lse, logits, *_):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


# ----------------------------------------------------------------------------------------- autograd


def _setup_context(ctx, inputs, output) -> None:
    logits, target, ctx.temperature, _ = inputs
    ctx.save_for_backward(logits, target, *output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx, g_logp, g_entropy, g_lse):
    logits, target, entropy, lse = ctx.saved_tensors
    grad = backward_op(g_logp, g_entropy, g_lse, logits, target, entropy, lse, ctx.temperature)
    return grad, None, None, None


forward_op.register_autograd(_backward, setup_context=_setup_context)

# ---------------------------------------------------------------------------------- public function


def token_logprob(
    logits: Tensor, target: Tensor, temperature: float = 1.0, *, checked: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the target's logprob, the entropy and the log-sum-exp of each token, float32, from
    logits [..., V] that are divided by the temperature (see linear_logprob).

    `checked`: every target is known to lie in [0, V), which saves a wait for the GPU. Raises
    ValueError or TypeError for shapes, dtypes or devices that do not fit, and ValueError naming the
    first target outside [0, V).
    """
    check_head(NAME, temperature, None)
    if logits.dim() < 1 or logits.shape[-1] == 0 or logits.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"{NAME}: logits are {logits.dtype} {tuple(logits.shape)}; expected floating [..., V] "
            "with V > 0"
        )
    check_target(NAME, target, logits.shape[:-1])
    check_same_device(NAME, logits=logits, target=target)
    outputs = forward_op(
        logits.reshape(-1, logits.shape[-1]), target.reshape(-1).long(), temperature, checked
    )
    logp, entropy, lse = (output.view(target.shape) for output in outputs)
    return logp, entropy, lse
