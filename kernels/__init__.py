"""Export fused operations on token logprobs, attention and sampling.

Each operation has Triton kernels on CUDA and a plain torch path elsewhere. The operations with a
gradient are torch custom ops.
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
