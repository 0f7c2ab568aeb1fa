"""List the features that do not combine, in one table that settings, programs and engines check."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rl.errors import UserError

_VLLM_CACHE = (
    "sampler_cache is a setting of the sampler in this process, and sampler is vllm: leave "
    "sampler_cache at auto"
)

# Pairs of features that do not combine, and why. Features of a decoder: "fast decoder", "generic
# decoder", "tensor parallelism". Features of an engine: "paged cache", "plain cache" (contiguous),
# "adapters per row", "router replay", "speculative decoding", and "device steps": several steps
# without the host between them (`Engine`).
# "vllm": servers decode (rl.vllm); of a run, "sampler ranks" (processes that only sample),
# "cache recomputation" and "replay"; of a program, "several models"; of a learner, "context
# parallelism" and "router aux loss".
# Every other pair combines, also with images, conversations, prompt logprobs, all of
# `SamplingParams`, new weights, cancelled and resumed requests.
EXCLUDED_PAIRS: Mapping[tuple[str, str], str] = {
    ("tensor parallelism", "generic decoder"): (
        "sampler_tp requires the fast decoder (docs/models.md lists its families), and the sampler "
        "is hf, the model's original forward: leave sampler_tp at 1, or sampler at auto or fast"
    ),
    ("paged cache", "generic decoder"): (
        "sampler_cache paged requires the fast decoder (docs/models.md lists its families), not "
        "the model's original forward (sampler hf): leave sampler_cache at auto, or sampler at "
        "auto or fast"
    ),
    ("adapters per row", "generic decoder"): (
        "the generic decoder has the same weights for all rows: sample each model in a separate "
        "batch"
    ),
    ("device steps", "generic decoder"): (
        "the steps of a device call the kernels of the fast decoder: leave steps_per_sync at None"
    ),
    ("device steps", "plain cache"): "the steps of a device read a paged cache: set block_size",
    ("device steps", "speculative decoding"): (
        "the steps of a device feed one token of each row: leave num_speculative_tokens at 0, or "
        "steps_per_sync at None"
    ),
    ("speculative decoding", "generic decoder"): (
        "num_speculative_tokens requires the fast decoder (docs/models.md lists its families), not "
        "the model's original forward (sampler hf): leave num_speculative_tokens at 0, or sampler "
        "at auto or fast"
    ),
    ("tensor parallelism", "sampler ranks"): (
        "sampler_tp and sampler_ranks cannot be combined: each rank that only samples holds all "
        "weights; leave sampler_tp at 1, or sampler_ranks at 0"
    ),
    ("vllm", "speculative decoding"): (
        "num_speculative_tokens is a setting of the sampler in this process, and sampler is vllm: "
        "leave it at 0, and start the server with --speculative-config"
    ),
    ("vllm", "paged cache"): _VLLM_CACHE,
    ("vllm", "plain cache"): _VLLM_CACHE,
    ("vllm", "tensor parallelism"): (
        "sampler_tp is a setting of the sampler in this process, and sampler is vllm: leave "
        "sampler_tp at 1, and start the server with --tensor-parallel-size"
    ),
    ("vllm", "sampler ranks"): (
        "sampler_ranks are processes that sample, and with sampler vllm its servers do: leave "
        "sampler_ranks at 0"
    ),
    ("vllm", "cache recomputation"): (
        "recompute_cache computes the KV cache of the sampler in this process again, and sampler "
        "is vllm: leave recompute_cache out"
    ),
    ("vllm", "replay"): (
        "a replay repeats a run bit for bit, and with sampler vllm the samples depend on rounding "
        "and on the order of requests in its servers: leave replay out, or the sampler at auto"
    ),
    ("context parallelism", "router replay"): (
        "context_parallel_size divides a micro-batch among ranks, and router_replay counts the "
        "experts of a whole micro-batch: set context_parallel_size to 1, or turn router_replay off"
    ),
    ("context parallelism", "router aux loss"): (
        "context_parallel_size divides a micro-batch among ranks, and router_aux_loss_coef "
        "balances the experts of a whole micro-batch: set context_parallel_size to 1, or "
        "router_aux_loss_coef to 0"
    ),
    ("vllm", "several models"): (
        "vLLM servers hold the weights of one model: sample from one model at a time, or leave the "
        "sampler at auto"
    ),
    ("vllm", "adapters per row"): (
        "the sampler vllm has the same weights for all rows: sample each model in a separate batch"
    ),
}


def find_conflict(features: Collection[str]) -> str | None:
    """Return why features do not combine (`EXCLUDED_PAIRS`); None if they do."""
    return next((reason for pair, reason in EXCLUDED_PAIRS.items() if {*pair} <= {*features}), None)


def check_features(features: Collection[str], received: str = "") -> None:
    """Raise UserError if features do not combine. `received`: the settings that select them."""
    if (reason := find_conflict(features)) is not None:
        raise UserError(f"{reason} (got {received})" if received else reason)


def find_sampler_features(
    sampler: str, cache: str, tp: int, num_speculative_tokens: int
) -> dict[str, str]:
    """Return the features that a sampler's settings select, by the setting. `sampler`, `cache`,
    `tp`: values of the settings sampler, sampler_cache and sampler_tp.
    """
    features = {"sampler": {"hf": "generic decoder", "fast": "fast decoder"}.get(sampler, sampler)}
    if cache != "auto":
        features["sampler_cache"] = f"{cache} cache"
    if tp > 1:
        features["sampler_tp"] = "tensor parallelism"
    if num_speculative_tokens:
        features["num_speculative_tokens"] = "speculative decoding"
    return features
