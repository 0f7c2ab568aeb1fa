"""Define the settings of a rank's worker."""

from __future__ import annotations

from dataclasses import dataclass, field

from rl.learner import LearnerSettings
from rl.sampler import DEFAULT_CACHE_TOKENS, check_features


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
    command: that starts it; memory: its share of the device's memory.
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

    @property
    def local_kind(self) -> str:
        """Return the kind of the decoders in this process: of all weights but those of the learner
        if vLLM servers sample from these.
        """
        return "auto" if self.kind == "vllm" else self.kind

    def __post_init__(self) -> None:
        if self.tp > 1 and self.kind == "hf":
            check_features(("tensor parallelism", "generic decoder"))
        if self.kind == "vllm":
            features = {"router replay": self.router_replay, "paged cache": self.cache == "paged"}
            features["tensor parallelism"] = self.tp > 1
            check_features(("vllm", *(name for name, is_used in features.items() if is_used)))


@dataclass(frozen=True)
class WorkerSettings:
    """Configure learning and sampling on all ranks."""

    dtype: str = "auto"
    timeout_seconds: float = 1800.0  # limit of a wait for another rank
    stop_grace_seconds: float = 90.0  # see rl.distributed.stop_signals
    learner: LearnerSettings = field(default_factory=LearnerSettings)
    sampler: SamplerSettings = field(default_factory=SamplerSettings)
    share_bases: bool = False  # see rl.runtime.base_models
    # number of processes, the last ones, that only sample; 0: all learn and sample in turn
    sampler_ranks: int = 0

    def __post_init__(self) -> None:
        if self.sampler_ranks and self.sampler.kind == "vllm":
            check_features(("vllm", "sampler ranks"))
