"""How a rank's worker learns and samples."""

from __future__ import annotations

from dataclasses import dataclass, field

from rl.errors import UserError
from rl.learner import LearnerSettings


@dataclass(frozen=True)
class SamplerSettings:
    """kv_cache_tokens: the KV cache of one rank, in tokens; max_rows: sequences decoded at once;
    router_replay: samples say experts.

    kind: of the decoder; cache: of the engine (`rl.sampler.make_engine`).
    tp: so many consecutive ranks hold the weights together, each its part, and sample together;
    cache and rows are then of all of them.
    """

    kv_cache_tokens: int = 262_144
    max_rows: int = 1024
    kind: str = "auto"
    router_replay: bool = False
    cache: str = "auto"
    tp: int = 1

    def __post_init__(self) -> None:
        if self.tp > 1 and self.kind == "hf":
            raise UserError(
                f"sampler_tp {self.tp} splits what the fast decoder samples (the Llama and Qwen families), and the sampler is hf, the "
                "model's own forward: leave sampler_tp at 1, or the sampler at auto"
            )
        if self.tp > 1 and self.cache == "paged":
            raise UserError(
                f"sampler_cache paged goes by itself, and the processes of sampler_tp {self.tp} wait for each other at every step: leave "
                "sampler_cache at auto, or sampler_tp at 1"
            )


@dataclass(frozen=True)
class WorkerSettings:
    dtype: str = "auto"
    timeout_seconds: float = 1800.0  # of one wait for another rank
    stop_grace_seconds: float = 90.0  # see rl.ranks.interrupts
    learner: LearnerSettings = field(default_factory=LearnerSettings)
    sampler: SamplerSettings = field(default_factory=SamplerSettings)
    share_bases: bool = False  # see rl.clients.bases
    # so many of the processes, the last, sample and do not learn; 0: all do both, in turn
    sampler_ranks: int = 0
