"""Fused operations on token logprobs: torch custom ops with Triton kernels on CUDA and plain torch paths elsewhere."""

from kernels.discounted_scan import discounted_scan, gae
from kernels.linear_logprob import linear_logprob, linear_logprob_reference
from kernels.policy_loss import policy_loss, policy_loss_reference

__all__ = ["discounted_scan", "gae", "linear_logprob", "linear_logprob_reference", "policy_loss", "policy_loss_reference"]
