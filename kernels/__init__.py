"""Export fused operations on token logprobs, attention and sampling.

Each operation has Triton kernels on CUDA and a plain torch path elsewhere. The operations with a
gradient are torch custom ops.
"""

from kernels.attention_inputs import UNBOUNDED, AttentionBounds, SharedPages
from kernels.device_checks import check_kernels_agree
from kernels.linear_logprob import linear_logprob
from kernels.paged_attention import compute_paged_attention
from kernels.policy_loss import policy_loss
from kernels.sample_tokens import sample_tokens
from kernels.token_logprob import token_logprob
from kernels.topk_target_logprob import topk_target_logprob
from kernels.vocab_chunks import estimate_saved_bytes, estimate_workspace_bytes
from kernels.vocab_shard import VocabShard

__all__ = [
    "UNBOUNDED",
    "AttentionBounds",
    "SharedPages",
    "VocabShard",
    "check_kernels_agree",
    "compute_paged_attention",
    "sample_tokens",
    "estimate_workspace_bytes",
    "estimate_saved_bytes",
    "linear_logprob",
    "policy_loss",
    "topk_target_logprob",
    "token_logprob",
]
