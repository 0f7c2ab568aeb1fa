"""Fused operations on token logprobs: torch custom ops with Triton kernels on CUDA and plain torch
paths elsewhere.
"""

from kernels.draw import draw
from kernels.linear_logprob import linear_logprob, linear_logprob_reference
from kernels.paged_attention import attend_pages
from kernels.policy_loss import policy_loss, policy_loss_reference
from kernels.shared_pages import SharedPages
from kernels.slabs import head_bytes, kept_bytes
from kernels.soft_logprob import soft_logprob
from kernels.token_logprob import token_logprob

__all__ = [
    "SharedPages",
    "attend_pages",
    "draw",
    "head_bytes",
    "kept_bytes",
    "linear_logprob",
    "linear_logprob_reference",
    "policy_loss",
    "policy_loss_reference",
    "soft_logprob",
    "token_logprob",
]
