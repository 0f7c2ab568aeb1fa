"""Fused operations on token logprobs: torch custom ops with Triton kernels on CUDA and plain torch paths elsewhere."""

from kernels.discounted_scan import discounted_scan, gae
from kernels.distill_kl import distill_kl
from kernels.linear_logprob import linear_logprob, linear_logprob_reference
from kernels.policy_loss import policy_loss, policy_loss_reference
from kernels.token_logprob import token_logprob

__all__ = [
    "discounted_scan",
    "distill_kl",
    "gae",
    "linear_logprob",
    "linear_logprob_reference",
    "policy_loss",
    "policy_loss_reference",
    "token_logprob",
]
