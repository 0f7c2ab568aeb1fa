"""Define the settings of a rank's worker."""

from __future__ import annotations

from dataclasses import dataclass, field

from rl.config import ModelSettings, OptimSettings, SamplingSettings
from rl.learner import LearnerSettings, kept_bytes_from_gib
from rl.sampler import DEFAULT_CACHE_TOKENS
from rl.types.feature_table import check_features, find_sampler_features


@dataclass(frozen=True)
class SamplerSettings:
    """Configure sampling on a rank.

    kv_cache_tokens: size of a rank's KV cache in tokens; max_rows: number of sequences decoded in a
    batch; router_replay: samples record the chosen experts.

    kind: of the decoder; cache: of the engine (`rl.sampler.make_engine`).

    tp: number of consecutive ranks that shard the weights and sample together (tensor parallel);
    cache and rows are then those of the whole group.

    urls: of the vLLM servers that sample if the kind is "vllm"; folder: in which their weights are
    written; request_seconds: time limit of a sample there. Without urls the run starts a server:
    command: that starts it; memory: its share of the device's memory; lora_rank: the largest of the
    adapters that it gets.

    num_speculative_tokens: see `rl.sampler.Engine`.
    """

    kv_cache_tokens: int = DEFAULT_CACHE_TOKENS
    max_rows: int = 1024
    kind: str = "auto"
    router_replay: bool = False
    cache: str = "auto"
    tp: int = 1
    urls: tuple[str, ...] = ()
    folder: str | None = None
    request_seconds: float = 600.0
    command: str | None = None
    memory: float = 0.3
    lora_rank: int = 0
    num_speculative_tokens: int = 0

    @property
    def local_kind(self) -> str:
        """Return the kind of the decoders in this process: of all weights but those of the learner
        if vLLM servers sample from these.
        """
        return "auto" if self.kind == "vllm" else self.kind

    def __post_init__(self) -> None:
        features = find_sampler_features(
            self.kind, self.cache, self.tp, self.num_speculative_tokens
        )
        check_features(features.values())


@dataclass(frozen=True)
class WorkerSettings:
    """Configure learning and sampling on all ranks."""

    dtype: str = "auto"
    timeout_seconds: float = 1800.0  # limit of a wait for another rank
    stop_grace_seconds: float = 90.0  # see rl.distributed.stop_signals
    learner: LearnerSettings = field(default_factory=LearnerSettings)
    sampler: SamplerSettings = field(default_factory=SamplerSettings)
    share_bases: bool = False  # see rl.runtime.sampler_versions
    # number of processes, the last ones, that only sample; 0: all learn and sample in turn
    sampler_ranks: int = 0

    def __post_init__(self) -> None:
        if self.sampler_ranks and self.sampler.kind == "vllm":
            check_features(("vllm", "sampler ranks"))


def make_sampler_settings(sampling: SamplingSettings, router_replay: bool) -> SamplerSettings:
    """Return the settings of a rank's sampler."""
    return SamplerSettings(
        kv_cache_tokens=sampling.kv_cache_tokens or DEFAULT_CACHE_TOKENS,
        max_rows=sampling.max_rows,
        kind=sampling.sampler,
        router_replay=router_replay,
        cache=sampling.sampler_cache,
        tp=sampling.sampler_tp,
        urls=sampling.sampler_url,
        folder=sampling.sampler_folder,
        request_seconds=sampling.sampler_timeout,
        command=sampling.sampler_command,
        memory=sampling.sampler_memory,
        num_speculative_tokens=sampling.num_speculative_tokens,
    )


def make_worker_settings(
    model: ModelSettings, sampling: SamplingSettings, optim: OptimSettings
) -> WorkerSettings:
    """Return the settings of a rank's worker, from the settings of a stage or of a server."""
    learner = LearnerSettings(
        token_budget=optim.token_budget,
        layout=optim.layout,
        fused=model.fused_logprobs,
        kept_bytes=kept_bytes_from_gib(model.kept_logits_gib),
        gradient_checkpointing=model.gradient_checkpointing,
        offload_activations=model.offload_activations,
        optimizer=optim.optimizer,
        router_replay=model.router_replay,
        router_aux_loss_coef=model.router_aux_loss_coef,
        context_parallel_size=optim.context_parallel_size,
        expert_parallel_size=optim.expert_parallel_size,
    )
    sampler = make_sampler_settings(sampling, model.router_replay)
    return WorkerSettings(dtype=model.precision, learner=learner, sampler=sampler)
