"""Compute the target's logprob and the entropy of each token from hidden states and an LM head,
without logits.

The function chooses a plan from the inputs that need a gradient and from the byte budget
`saved_bytes`:
    none       forward only
    saved      [T, V] fits the budget: the forward saves a tensor of that size and nothing is
               computed twice (6NDV in all). Exception: under a gradient of the entropy the
               kernels recompute, as their saved values are too coarse for it
    expected   the head needs no gradient: the forward also accumulates E_p[W], the backward is g
               (W[y] - E_p[W]) (4NDV)
    whole      as saved, if the budget has space for two: the scores' gradient is also a single [T,
               V] tensor, used by two products
    recompute  the backward computes the scores again, slab by slab (8NDV); no [T, V] tensor at any
               time
linear_logprob_launch.py (kernels in linear_logprob_triton.py) implements this for CUDA,
linear_logprob_torch.py elsewhere. Both modules have the same functions.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kernels import linear_logprob_torch
from kernels.common import (
    CUDAGRAPH_UNSAFE_TAGS,
    DEFAULT_SAVED_BYTES,
    LARGE_NEGATIVE,
    SMALL_PROBLEM_BYTES,
    HeadConfig,
    can_run_triton,
    cast_for_autocast,
    check_head,
    check_matmul,
    check_same_device,
    check_target,
    device_context,
    disable_autocast,
    find_target_rows,
    find_true_rows,
    scatter_rows,
    select_rows,
)
from kernels.linear_logprob_torch import GradientCoefficients, HeadGradients, compute_coefficients
from kernels.tile_config import get_gpu_info, select_tile_sizes
from kernels.vocab_chunks import align_columns

NAME = "linear_logprob"
SAVING_PLANS = ("saved", "whole")  # plans that save a [T, V] tensor

# ------------------------------------------------------------------------------------------- launch


def _backend(tensor: Tensor) -> ModuleType:
    """Return the module that implements the passes for this tensor's device."""
    if not can_run_triton(tensor):
        return linear_logprob_torch
    from kernels import linear_logprob_launch

    return linear_logprob_launch


def _empty_saved_tensors(hidden_TD: Tensor, vocab: int, plan: str) -> tuple[Tensor, Tensor]:
    """Return empty tensors for what a plan saves: (payload, exponents), both of size 0 if the plan
    saves nothing.
    """
    tokens, empty = hidden_TD.shape[0], hidden_TD.new_empty(0, dtype=torch.float32)
    if plan == "expected":
        return hidden_TD.new_empty(hidden_TD.shape, dtype=torch.float32), empty
    if plan not in SAVING_PLANS:
        return hidden_TD.new_empty(0, dtype=torch.float32), empty
    if not can_run_triton(hidden_TD):
        return hidden_TD.new_empty((tokens, vocab), dtype=torch.float32), empty
    tiles = -(
        -vocab
        // select_tile_sizes(hidden_TD.shape[1], hidden_TD.dtype, get_gpu_info(hidden_TD)).columns
    )
    exponents = hidden_TD.new_empty((tiles, tokens), dtype=torch.float32)
    return hidden_TD.new_empty((tokens, align_columns(vocab))).narrow(1, 0, vocab), exponents


# --------------------------------------------------------------------------------------- custom ops


def _forward(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    temperature: float,
    softcap: float | None,
    ignore_index: int,
    entropy: bool,
    plan: str,
    checked: bool = False,
    frozen_columns: int = 0,
    active_rows: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return logp, entropy, lse (float32 [T]) and the tensors that the plan saves.

    Rows with a target of ignore_index are excluded from the work. `active_rows` is only for the
    backward.
    """
    head, tokens = HeadConfig(temperature, softcap), hidden.shape[0]
    rows = None if checked else find_target_rows(NAME, target, weight.shape[0], ignore_index)
    kept, exponents = _empty_saved_tensors(hidden, weight.shape[0], plan)
    x, y = select_rows(hidden, rows), select_rows(target, rows)
    if len(x) == 0:
        logp, entropies, lse = hidden.new_zeros((3, tokens), dtype=torch.float32).clone().unbind(0)
        return logp.clone(), entropies.clone(), lse.clone(), kept.zero_(), exponents
    backend = _backend(hidden)
    with device_context(hidden):
        if plan in SAVING_PLANS:
            saved = (
                (kept[: len(x)], exponents[:, : len(x)]) if exponents.numel() else (kept[: len(x)],)
            )
            out = backend.saved_forward(x, weight, y, bias, head, *saved, entropy=entropy)
        else:
            out = backend.forward(
                x, weight, y, bias, head, entropy=entropy, expected=plan == "expected"
            )
    kept = scatter_rows(out.expected, rows, tokens) if plan == "expected" else kept
    return (
        scatter_rows(out.logp, rows, tokens),
        scatter_rows(out.entropy, rows, tokens),
        scatter_rows(out.lse, rows, tokens),
        kept,
        exponents,
    )


forward_op = torch.library.custom_op(
    "whetstone::linear_logprob", _forward, mutates_args=(), tags=CUDAGRAPH_UNSAFE_TAGS
)


@forward_op.register_fake
def _(
    hidden,
    weight,
    target,
    bias,
    temperature,
    softcap,
    ignore_index,
    entropy,
    plan,
    checked=False,
    frozen_columns=0,
    active_rows=None,
):
    logp, ent, lse = (hidden.new_empty(hidden.shape[0], dtype=torch.float32) for _ in range(3))
    return logp, ent, lse, *_empty_saved_tensors(hidden, weight.shape[0], plan)


def _find_active_rows(
    co: GradientCoefficients, used: Tensor, only_logp: bool, active_rows: Tensor | None
) -> tuple[Tensor | None, int, bool]:
    """Return the used rows with an upstream gradient (None: all), their number, and whether the
    entropy may have a gradient in any of them. Waits for the device once without `active_rows`.

    `only_logp`: no gradient comes from the entropy and the log-sum-exp.
    """
    if active_rows is not None:
        count = len(active_rows)
        return None if count == len(used) else active_rows, count, co.c is not None
    active = co.a != 0 if only_logp else (co.a != 0) | (co.b != 0)
    if co.c is None:
        count, curved = int(active.logical_and_(used).sum()), 0
    else:
        has_curvature = used & (co.c != 0)
        active = has_curvature.logical_or(active & used)
        count, curved = torch.stack((active.sum(), has_curvature.sum())).tolist()
    return find_true_rows(active, count), count, curved > 0


def _select_coefficients(
    co: GradientCoefficients, rows: Tensor | None, curved: bool
) -> GradientCoefficients:
    """Return the coefficients of the rows `rows`; c is None unless `curved`."""
    return GradientCoefficients(
        select_rows(co.a, rows),
        select_rows(co.b, rows),
        select_rows(co.c, rows) if co.c is not None and curved else None,
    )


def _zero_gradients(inputs: tuple[Tensor | None, ...], need: list[bool]) -> HeadGradients:
    """Return zeros for each input that needs a gradient."""
    pairs = zip(inputs, need, strict=True)
    return HeadGradients(
        *(torch.zeros_like(t) if t is not None and needed else None for t, needed in pairs)
    )


def _compute_frozen_gradients(
    hidden: Tensor,
    weight: Tensor,
    y: Tensor,
    head: HeadConfig,
    co: GradientCoefficients,
    rows: Tensor | None,
    logp: Tensor,
    lse: Tensor,
    expected: Tensor,
) -> HeadGradients:
    """Return the gradient of the rows `rows` of `hidden` under the plan "expected"; y, lse and the
    coefficients are those of these rows.
    """
    slope = (
        None
        if head.softcap is None
        else 1.0 - ((select_rows(logp, rows) + lse) * (head.temperature / head.softcap)).square_()
    )
    dx = linear_logprob_torch.backward_frozen(
        weight, y, head, co, slope, select_rows(expected, rows)
    )
    return HeadGradients(dx.to(hidden.dtype), None, None)


def _gradients(
    g_logp: Tensor | None,
    g_entropy: Tensor | None,
    g_lse: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    logp: Tensor,
    entropy: Tensor,
    lse: Tensor,
    kept: Tensor,
    exponents: Tensor,
    temperature: float,
    softcap: float | None,
    ignore_index: int,
    plan: str,
    need: list[bool],
    frozen_columns: int = 0,
    active_rows: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of hidden, weight and bias (size 0 if `need` is False).

    Rows without upstream gradient cost nothing; with `active_rows`, rows outside them.
    """
    head, used = HeadConfig(temperature, softcap), target != ignore_index
    co = compute_coefficients(g_logp, g_entropy, g_lse, entropy)
    only_logp = g_entropy is None and g_lse is None
    rows, count, curved = _find_active_rows(co, used, only_logp, active_rows)
    if count == 0:
        return _replace_none(hidden, _zero_gradients((hidden, weight, bias), need))
    co = _select_coefficients(co, rows, curved)
    x, y, lse = select_rows(hidden, rows), select_rows(target, rows), select_rows(lse, rows)
    needed: dict[str, Any] = dict(zip(("need_x", "need_w", "need_bias"), need, strict=True)) | {
        "frozen_columns": frozen_columns
    }
    backend = _backend(hidden)
    if plan == "expected" and co.c is None:
        grads = _compute_frozen_gradients(hidden, weight, y, head, co, rows, logp, lse, kept)
    elif plan in SAVING_PLANS and (co.c is None or not exponents.numel()):
        # Saved rows are the rows that took part in the forward, without gaps: the k-th used row is
        # row k of the saved tensor.
        at = None if rows is None else (used.cumsum(0) - 1)[rows]
        keep = (kept, exponents, select_rows(logp, rows)) if exponents.numel() else (kept,)
        needed |= {"whole": True} if plan == "whole" else {}
        with device_context(hidden):
            grads = backend.saved_backward(x, weight, y, bias, head, co, lse, *keep, at, **needed)
    else:
        with device_context(hidden):
            grads = backend.backward(x, weight, y, bias, head, co, lse, **needed)
    return _replace_none(
        hidden,
        HeadGradients(
            None if grads.x is None else scatter_rows(grads.x, rows, hidden.shape[0]),
            grads.w,
            grads.bias,
        ),
    )


def _replace_none(like: Tensor, grads: HeadGradients) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients with tensors of size 0 in place of None, as a custom op must return
    tensors.
    """
    dx, dw, db = (like.new_empty(0) if grad is None else grad for grad in grads)
    return dx, dw, db


backward_op = torch.library.custom_op(
    "whetstone::linear_logprob_backward", _gradients, mutates_args=(), tags=CUDAGRAPH_UNSAFE_TAGS
)


@backward_op.register_fake
def _(
    g_logp,
    g_entropy,
    g_lse,
    hidden,
    weight,
    target,
    bias,
    logp,
    entropy,
    lse,
    kept,
    exponents,
    temperature,
    softcap,
    ignore_index,
    plan,
    need,
    frozen_columns=0,
    active_rows=None,
):
    shapes = zip((hidden, weight, bias), need, strict=True)
    return tuple(
        tensor.new_empty(tensor.shape) if needed else hidden.new_empty(0)
        for tensor, needed in shapes
    )


# ----------------------------------------------------------------------------------------- autograd


def _setup_context(ctx, inputs, output) -> None:
    """Save the inputs and outputs that the backward needs."""
    hidden, weight, target, bias, temperature, softcap, ignore_index, _, plan, *rest = inputs
    _, ctx.frozen_columns, active_rows = rest
    ctx.save_for_backward(hidden, weight, target, bias, *output, active_rows)
    ctx.settings = (temperature, softcap, ignore_index, plan)
    ctx.mark_non_differentiable(*output[3:])
    # The gradient of an unused output is None in the backward instead of zeros, and its terms are
    # skipped.
    ctx.set_materialize_grads(False)


def _backward(ctx, g_logp, g_entropy, g_lse, *_):
    """Call the backward op and return a gradient for each input of the forward op."""
    need = [ctx.needs_input_grad[i] for i in (0, 1, 3)]
    *saved, active_rows = ctx.saved_tensors
    upstream = (g_logp, g_entropy, g_lse)
    with disable_autocast(saved[0]):
        grads = backward_op(*upstream, *saved, *ctx.settings, need, ctx.frozen_columns, active_rows)
    dx, dw, db = (grad if needed else None for grad, needed in zip(grads, need, strict=True))
    return dx, dw, None, db, *[None] * 8


forward_op.register_autograd(_backward, setup_context=_setup_context)


# ---------------------------------------------------------------------------------- public function


def _select_plan(hidden: Tensor, weight: Tensor, bias: Tensor | None, saved_bytes: int) -> str:
    """Choose the plan (see the module's table) from the needed gradients and the byte budget."""
    head_learns = weight.requires_grad or (bias is not None and bias.requires_grad)
    if not torch.is_grad_enabled() or not (hidden.requires_grad or head_learns):
        return "none"
    fused = can_run_triton(hidden)
    kept = hidden.shape[0] * weight.shape[0] * (hidden.element_size() if fused else 4)
    if kept <= saved_bytes:
        return "whole" if fused and 2 * kept <= saved_bytes else "saved"
    return "recompute" if head_learns else "expected"


def _is_small_problem(x: Tensor, weight: Tensor, saved_bytes: int) -> bool:
    """Return whether torch's operations should handle the problem: a small plain tensor without
    CUDA, outside of torch.compile.
    """
    if x.is_cuda or torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter):
        return False
    return x.shape[0] * weight.shape[0] * 4 <= min(SMALL_PROBLEM_BYTES, saved_bytes)


def _compute_small_problem(
    x: Tensor,
    w: Tensor,
    y: Tensor,
    bias: Tensor | None,
    head: HeadConfig,
    ignore_index: int,
    entropy: bool,
) -> tuple[Tensor, ...]:
    """Compute logp, entropy and lse with torch's operations and autograd, in float32.

    For small problems the dispatch of a custom op would cost more than the work.
    """
    total, rows = x.shape[0], find_target_rows(NAME, y, w.shape[0], ignore_index)
    x, y = select_rows(x, rows), select_rows(y, rows)
    z = torch.nn.functional.linear(
        x.float(), w.float(), None if bias is None else bias.float().clamp(min=LARGE_NEGATIVE)
    )
    z = z if head.softcap is None else torch.tanh(z / head.softcap) * head.softcap
    z = z if head.temperature == 1.0 else z / head.temperature
    all_logp, column = z.log_softmax(1), y.unsqueeze(1)
    logp = all_logp.gather(1, column)
    ent = -(all_logp.exp() * all_logp).sum(1) if entropy else logp.new_zeros(len(x))
    outputs = (logp.squeeze(1), ent, (z.gather(1, column) - logp).squeeze(1))
    return (
        outputs if rows is None else tuple(scatter_rows(output, rows, total) for output in outputs)
    )


def _check_active_rows(active_rows: Tensor | None, checked: bool) -> None:
    """Check the rows that may have a gradient.

    Raises ValueError for another shape or dtype than int64 [N], or if targets may be ignored.
    """
    if active_rows is None:
        return
    if active_rows.dim() != 1 or active_rows.dtype != torch.int64:
        raise ValueError(
            f"{NAME}: active_rows is {active_rows.dtype} {tuple(active_rows.shape)}; expected "
            "int64 [N], the positions of tokens that may have a gradient"
        )
    if not checked:
        raise ValueError(
            f"{NAME}: active_rows needs checked=True, as a target that is ignored has no gradient"
        )


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    *,
    entropy: bool = True,
    saved_bytes: int | None = None,
    checked: bool = False,
    frozen_columns: int = 0,
    active_rows: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the target's logprob, the entropy and the log-sum-exp of each token under
    softmax(logits), as float32.

    logits = softcap * tanh((hidden @ weight.T + bias) / softcap) / temperature; the tanh is skipped
    if softcap is None.

    Args:
        hidden: [..., D] in float32, bfloat16 or float16; products and sums are float32 for all
            three.
        weight: [V, D], of the same dtype (under autocast both are cast first). bias: [V] or None.
        target: [...] token ids. Positions with `ignore_index` take no part: all outputs are 0 at
            them, without gradient.
        entropy: False skips the entropy (its result is None) and saves a pass over the scores.
        saved_bytes: a tensor of T x V up to this many bytes is saved for the backward, and the
            backward creates a second tensor if both fit; 0 never saves a tensor. None:
            DEFAULT_SAVED_BYTES, as only the caller knows what a GPU can spare: an optimizer's state
            may still have to fit. (Without CUDA, up to SMALL_PROBLEM_BYTES, torch's operations are
            used, which save two or three such tensors.) The values do not depend on it beyond
            rounding.
        checked: every target is known to lie in [0, V). On a GPU this saves the forward its wait
            for the device; then nothing is checked and no position is ignored.
        frozen_columns: this many first columns of `weight` need no gradient and get zeros (the base
            of a head with LoRA), unless T x V is so small that torch's operations are used.
        active_rows: int64 [N], ascending, the only tokens (of the flattened ones) that may have an
            upstream gradient other than 0: every other token is excluded from the backward's work.
            Only with `checked`. None: the backward finds the tokens, for which it waits for a GPU.
    Returns:
        logp, entropy (both in nats) and lse (of the logits), each [...]. Gradients flow through all
        three, for any upstream gradient; tokens with an upstream gradient of exactly 0 are excluded
        from the backward's work.
    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit. The first target outside
            [0, V) is named. ValueError for `active_rows` without `checked`.
    """
    if type(weight).__name__ == "DTensor":
        raise TypeError(
            f"{NAME}: weight is a DTensor; call this function inside the head's forward, or pass "
            "weight.full_tensor()"
        )
    check_head(NAME, temperature, softcap)
    cast = cast_for_autocast(hidden, weight)
    hidden, weight = cast[0], cast[1]  # type: ignore[assignment]
    check_matmul(NAME, hidden, weight, bias)
    check_target(NAME, target, hidden.shape[:-1])
    check_same_device(
        NAME, hidden=hidden, weight=weight, target=target, bias=bias, active_rows=active_rows
    )
    _check_active_rows(active_rows, checked)
    if saved_bytes is None:
        saved_bytes = DEFAULT_SAVED_BYTES
    flat = hidden.dim() == 2  # views add autograd nodes, which slow small problems
    x = hidden if flat else hidden.reshape(-1, hidden.shape[-1])
    y = (target if flat else target.reshape(-1)).long()
    with disable_autocast(x):
        if checked:
            ignore_index = -1  # no target equals it
        if _is_small_problem(x, weight, saved_bytes):
            logp, ent, lse = _compute_small_problem(
                x, weight, y, bias, HeadConfig(temperature, softcap), ignore_index, entropy
            )
        else:
            plan = _select_plan(x, weight, bias, saved_bytes)
            logp, ent, lse, *_ = forward_op(
                x,
                weight,
                y,
                bias,
                temperature,
                softcap,
                ignore_index,
                entropy,
                plan,
                checked,
                frozen_columns,
                active_rows,
            )
    if flat:
        return logp, ent if entropy else None, lse
    return (
        logp.view(target.shape),
        ent.view(target.shape) if entropy else None,
        lse.view(target.shape),
    )
