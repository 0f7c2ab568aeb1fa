"""Compute token logprobs from hidden states with our kernels and other implementations, each as a
function from a problem to logprobs [T].

A provider that cannot run raises CannotRun with the reason. `memory` is its class: "flat" holds no
[T, V], "logits" does; compare only providers of the same class. `products` counts the N D V
products of its algorithm, forward and backward (Liger's Triton path and torch's chunks recompute if
a loss for each token is requested).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from bench.kernel_harness import Shape
from kernels import linear_logprob


class CannotRun(Exception):
    """Signal that a provider cannot run, with the reason."""


@dataclass(frozen=True)
class Problem:
    """Hold a head and a batch; `upstream` [T] is the seeded gradient of each token's logprob."""

    shape: Shape
    x: Tensor
    w: Tensor
    y: Tensor
    upstream: Tensor

    @staticmethod
    def make(
        shape: Shape, tokens: int, device: str, dtype: torch.dtype, frozen: bool = False
    ) -> Problem:
        g = torch.Generator(device).manual_seed(0)
        x = (
            torch.randn(tokens, shape.D, generator=g, device=device, dtype=torch.float32)
            .to(dtype)
            .requires_grad_()
        )
        w = (
            (torch.randn(shape.V, shape.D, generator=g, device=device) * shape.D**-0.5)
            .to(dtype)
            .requires_grad_(not frozen)
        )
        y = torch.randint(0, shape.V, (tokens,), generator=g, device=device)
        return Problem(shape, x, w, y, torch.randn(tokens, generator=g, device=device))


@dataclass(frozen=True)
class Provider:
    name: str
    memory: str
    products: float
    logprobs: Callable[[Problem], Tensor]
    frozen: bool = False


def _need(package: str) -> None:
    if find_spec(package) is None:
        raise CannotRun(f"{package} is not installed")


def _need_cuda(p: Problem, what: str) -> None:
    if not p.x.is_cuda:
        raise CannotRun(f"{what} needs CUDA, this is {p.x.device}")


def plain(x: Tensor, w: Tensor, y: Tensor, softcap: float | None) -> Tensor:
    logits = torch.nn.functional.linear(x, w)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return logits.float().log_softmax(-1).gather(-1, y[:, None]).squeeze(-1)


def _ours(p: Problem) -> Tensor:
    return linear_logprob(p.x, p.w, p.y, softcap=p.shape.softcap, entropy=False, saved_bytes=0)[0]


def _ours_entropy(p: Problem) -> Tensor:
    return linear_logprob(p.x, p.w, p.y, softcap=p.shape.softcap, saved_bytes=0)[0]


def _ours_saved(p: Problem) -> Tensor:
    return linear_logprob(
        p.x, p.w, p.y, softcap=p.shape.softcap, entropy=False, saved_bytes=1 << 40
    )[0]


def _torch(p: Problem) -> Tensor:
    return plain(p.x, p.w, p.y, p.shape.softcap)


_compiled = torch.compile(plain, dynamic=False)


def _torch_compile(p: Problem) -> Tensor:
    """Run the compiled function. The caller resets dynamo between shapes: after eight shapes dynamo
    runs the function uncompiled, under the name of the compiled function.
    """
    return _compiled(p.x, p.w, p.y, p.shape.softcap)


def _torch_linear_cross_entropy(p: Problem) -> Tensor:
    function = getattr(torch.nn.functional, "linear_cross_entropy", None)
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if function is None or options is None:
        raise CannotRun(f"torch {torch.__version__} has no chunked linear_cross_entropy")
    if p.shape.softcap is not None:
        raise CannotRun("no softcap")
    return -function(p.x, p.w, p.y, reduction="none", options=options())


def _liger_triton(p: Problem) -> Tensor:
    _need("liger_kernel")
    _need_cuda(p, "Liger's Triton path")
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    out = LigerFusedLinearCrossEntropyFunction.apply(
        p.x, p.w, p.y, None, None, -100, 0.0, 0.0, "none", p.shape.softcap
    )
    loss = out[0] if isinstance(out, tuple) else out
    if loss.shape != p.y.shape:
        raise CannotRun("no loss for each token")
    return -loss


def _liger_scaled(p: Problem) -> Tensor:
    """Run the CuTe kernel on Hopper, a chunked torch path elsewhere."""
    _need("liger_kernel")
    if p.shape.softcap is not None:
        raise CannotRun("no softcap")
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import (
        LigerFusedLinearScaledCrossEntropyFunction,
    )

    out = LigerFusedLinearScaledCrossEntropyFunction.apply(p.x, p.w, p.y)
    return -(out[0] if isinstance(out, tuple) else out)


def _cut_cross_entropy(p: Problem) -> Tensor:
    _need("cut_cross_entropy")
    _need_cuda(p, "cut-cross-entropy's Triton path")
    from cut_cross_entropy import linear_cross_entropy

    return -linear_cross_entropy(
        p.x, p.w, p.y, softcap=p.shape.softcap, reduction="none", filter_eps=None
    )


PROVIDERS = (
    Provider("ours", "flat", 8, _ours),
    Provider("ours_entropy", "flat", 8, _ours_entropy),
    Provider("ours_saved", "logits", 6, _ours_saved),
    Provider("ours_frozen", "flat", 4, _ours, frozen=True),
    Provider("torch", "logits", 6, _torch),
    Provider("torch_frozen", "logits", 4, _torch, frozen=True),
    Provider("torch_compile", "logits", 6, _torch_compile),
    Provider("torch_linear_cross_entropy", "flat", 8, _torch_linear_cross_entropy),
    Provider("liger_triton", "flat", 8, _liger_triton),
    Provider("liger_scaled", "flat", 8, _liger_scaled),
    Provider("cut_cross_entropy", "flat", 8, _cut_cross_entropy),
)
