"""Compute the target's logprob and the entropy of each token from logits that already exist.

The forward makes a single pass over the logits, and so does the backward. The backward can write
the gradient over the logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common import (
    CUDAGRAPH_UNSAFE_TAGS,
    FLOAT_DTYPES,
    LARGE_NEGATIVE,
    LN2,
    HeadConfig,
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


def _scale_logits(logits: Tensor, head: HeadConfig) -> Tensor:
    """Return a float32 copy of the logits / log 2 after softcap and temperature."""
    z = (logits.float() * head.in_scale).clamp_(min=LARGE_NEGATIVE)
    return z if head.softcap is None else z.tanh_().mul_(head.out_scale)


def _select_masked(rows: Tensor, mask: Tensor) -> Tensor:
    """Return rows[mask], without a copy if the mask selects all rows."""
    return rows if bool(mask.all()) else rows[mask]


def _torch_forward(
    logits_TV: Tensor, y_T: Tensor, head: HeadConfig, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logp, entropy and lse, float32 [T], in plain torch."""
    out = torch.zeros((3, len(y_T)), dtype=torch.float32, device=logits_TV.device)
    chunks = _row_chunks(logits_TV)
    for lo in chunks:
        y = y_T[lo : lo + chunks.step]
        used = y != ignore_index
        z = _scale_logits(_select_masked(logits_TV[lo : lo + chunks.step], used), head)
        at_target = z.gather(1, _select_masked(y, used).unsqueeze(1)).squeeze(1)
        m = z.amax(1, keepdim=True)
        e = torch.exp2(z.sub_(m))
        total = e.sum(1)
        spread = z.mul_(e).sum(1)
        lse = m.squeeze(1) + torch.log2(total)
        out[:, lo : lo + chunks.step][:, used] = (
            torch.stack((at_target - lse, torch.log2(total) - spread / total, lse)) * LN2
        )
    return out[0].clone(), out[1].clone(), out[2].clone()


def _torch_backward(
    logits_TV: Tensor,
    y_T: Tensor,
    head: HeadConfig,
    co: GradientCoefficients,
    lse_T: Tensor,
    out_TV: Tensor,
) -> None:
    """Write the gradient to `out_TV`, which may be `logits_TV`. Rows with all-zero coefficients get
    zeros.
    """
    active_T = (
        (co.a != 0) | (co.b != 0) if co.c is None else (co.a != 0) | (co.b != 0) | (co.c != 0)
    )
    chunks = _row_chunks(logits_TV)
    for lo in chunks:
        rows = slice(lo, lo + chunks.step)
        active = active_T[rows]
        a, b, c = (t if t is None else _select_masked(t[rows], active) for t in co)
        z = _scale_logits(_select_masked(logits_TV[rows], active), head)
        slope = None if head.softcap is None else 1.0 - (z / head.out_scale).square_()
        z.sub_((_select_masked(lse_T[rows], active) / LN2).unsqueeze(1))
        coefficients = GradientCoefficients(a, b, c)  # type: ignore[arg-type]
        y = _select_masked(y_T[rows], active)
        dz = compute_logit_gradient(z, y, coefficients, head.grad_scale, torch.empty_like(z))
        dz = dz if slope is None else dz.mul_(slope)
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
    logits: Tensor,
    target: Tensor,
    temperature: float,
    softcap: float | None,
    ignore_index: int,
    inplace: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logp, entropy and lse, float32 [T]. `inplace` is for the backward."""
    check_targets(NAME, target, logits.shape[1], ignore_index)
    head = HeadConfig(temperature, softcap)
    if can_run_triton(logits) and logits.numel():
        from kernels.token_logprob_triton import forward

        with device_context(logits):
            return forward(logits, target, head, ignore_index)
    return _torch_forward(logits, target, head, ignore_index)


@forward_op.register_fake
def _(logits, target, temperature, softcap, ignore_index, inplace):
    logp, entropy, lse = (logits.new_empty(logits.shape[0], dtype=torch.float32) for _ in range(3))
    return logp, entropy, lse


def _write_gradient(
    g_logp: Tensor | None,
    g_entropy: Tensor | None,
    g_lse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    entropy: Tensor,
    lse: Tensor,
    temperature: float,
    softcap: float | None,
    ignore_index: int,
    out: Tensor,
) -> None:
    """Write the gradient of the logits to `out`, which may be `logits`."""
    used = target != ignore_index
    a, b, c = (
        t if t is None else t.where(used, 0.0)
        for t in compute_coefficients(g_logp, g_entropy, g_lse, entropy)
    )
    co = GradientCoefficients(a, b, c)  # type: ignore[arg-type]
    if can_run_triton(logits) and logits.numel():
        from kernels.token_logprob_triton import backward

        with device_context(logits):
            backward(logits, target, HeadConfig(temperature, softcap), co, lse, out)
    else:
        _torch_backward(logits, target, HeadConfig(temperature, softcap), co, lse, out)


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
    softcap: float | None,
    ignore_index: int,
) -> Tensor:
    """Return the gradient of the logits in a new tensor."""
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _write_gradient(
        g_logp,
        g_entropy,
        g_lse,
        logits,
        target,
        entropy,
        lse,
        temperature,
        softcap,
        ignore_index,
        out,
    )
    return out


@backward_op.register_fake
def _(g_logp, g_entropy, g_lse, logits, *_):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


# Declared as changing `logits`: the dispatcher then increments the version of `logits`, which the
# kernel's writes would not do. Autograd then raises an error if another operation still needs the
# old values.
@torch.library.custom_op("whetstone::token_logprob_backward_", mutates_args=("logits",))
def backward_inplace_op(
    g_logp: Tensor | None,
    g_entropy: Tensor | None,
    g_lse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    entropy: Tensor,
    lse: Tensor,
    temperature: float,
    softcap: float | None,
    ignore_index: int,
) -> None:
    """Write the gradient over `logits`."""
    _write_gradient(
        g_logp,
        g_entropy,
        g_lse,
        logits,
        target,
        entropy,
        lse,
        temperature,
        softcap,
        ignore_index,
        logits,
    )


@backward_inplace_op.register_fake
def _(*_):
    return None


# ----------------------------------------------------------------------------------------- autograd


def _setup_context(ctx, inputs, output) -> None:
    logits, target, temperature, softcap, ignore_index, inplace = inputs
    ctx.save_for_backward(logits, target, *output[1:])
    ctx.settings, ctx.inplace = (temperature, softcap, ignore_index), inplace
    ctx.set_materialize_grads(False)


def _backward(ctx, g_logp, g_entropy, g_lse):
    logits, target, entropy, lse = ctx.saved_tensors
    if not ctx.inplace:
        grad = backward_op(g_logp, g_entropy, g_lse, logits, target, entropy, lse, *ctx.settings)
        return grad, None, None, None, None, None
    logits = logits.detach()
    backward_inplace_op(g_logp, g_entropy, g_lse, logits, target, entropy, lse, *ctx.settings)
    return logits, None, None, None, None, None


forward_op.register_autograd(_backward, setup_context=_setup_context)

# ---------------------------------------------------------------------------------- public function


def token_logprob(
    logits: Tensor,
    target: Tensor,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    *,
    inplace_backward: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the target's logprob, the entropy and the log-sum-exp of each token, float32, from
    logits [..., V] (see linear_logprob).

    inplace_backward: the backward writes the gradient over `logits` and returns that memory, so
    that no second [T, V] exists. The logits are lost afterwards; autograd raises an error if
    another operation still needs them. torch.compile ignores this option.

    Raises ValueError or TypeError for shapes, dtypes or devices that do not fit, and ValueError
    naming the first target outside [0, V).
    """
    check_head(NAME, temperature, softcap)
    if logits.dim() < 1 or logits.shape[-1] == 0 or logits.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"{NAME}: logits are {logits.dtype} {tuple(logits.shape)}; expected floating [..., V] "
            "with V > 0"
        )
    check_target(NAME, target, logits.shape[:-1])
    check_same_device(NAME, logits=logits, target=target)
    inplace = inplace_backward and not torch.compiler.is_compiling()
    if inplace and logits.dim() != 2 and not logits.is_contiguous():
        raise ValueError(
            f"{NAME}: inplace_backward needs contiguous logits, not strides {logits.stride()}; use "
            ".contiguous()"
        )
    outputs = forward_op(
        logits.reshape(-1, logits.shape[-1]),
        target.reshape(-1).long(),
        temperature,
        softcap,
        ignore_index,
        inplace,
    )
    logp, entropy, lse = (output.view(target.shape) for output in outputs)
    return logp, entropy, lse
