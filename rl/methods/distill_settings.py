"""What `distill` may be told, and what it says of teachers and answers. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from rl.errors import UserError
from rl.settings import (
    DataSettings,
    EpisodeFlowSettings,
    LoopSettings,
    ModelSettings,
    OptimSettings,
    Range,
    SamplingSettings,
    Share,
    check_ranges,
    check_substeps,
    only_with,
    without_samples,
)


@dataclass(frozen=True, kw_only=True)
class DistillationSettings:
    """Whom to learn from, and how."""

    teacher: tuple[str, ...] = ()
    """A run's folder, a folder of weights, a hub name, or the name of an earlier stage of the recipe. With several data sets (more_datasets) either one for all, or DATASET=TEACHER for each."""
    learn_from: Literal["student", "teacher", "data"] = "student"
    """Whose answers are learnt on. student: its own, by reverse KL (on-policy). teacher: the teacher's samples. data: the responses in the data."""
    group_size: Annotated[int, Range(1, 10**6)] = 4
    """Answers sampled for each prompt (student, teacher)."""
    kl_discount: Share = 0.0
    """On-policy: a token is also credited with later tokens' divergence, this much less for each. 0: each with its own alone; 1: the gradient of the whole answer's KL, of more variance."""
    alpha: Share = 0.5
    """Off-policy: weight of the KL to the teacher; the rest is cross-entropy on the answer's tokens."""
    distill_temperature: Annotated[float, Range(1e-3, 100)] = 2.0
    """Off-policy: both distributions are softened by it in the KL, which is scaled by its square."""
    teacher_top_k: Annotated[int, Range(1, 10**6)] = 64
    """Off-policy: the teacher's likeliest tokens at each position, renormalised, stand for its distribution."""

    def __post_init__(self) -> None:
        check_ranges(self)
        on_policy, why = self.learn_from == "student", f"learn_from is {self.learn_from}"
        only_with(self, ("kl_discount",), on_policy, why, "set learn_from to student")
        only_with(
            self,
            ("alpha", "distill_temperature", "teacher_top_k"),
            not on_policy,
            why,
            "set learn_from to teacher or data",
        )
        only_with(
            self,
            ("group_size",),
            self.learn_from != "data",
            why,
            "set learn_from to student or teacher",
        )


def _data() -> DataSettings:
    return DataSettings(reward=None)


def _sampling() -> SamplingSettings:
    return SamplingSettings(temperature=1.0)


@dataclass(frozen=True, kw_only=True)
class DistillSettings:
    """Distillation: learn to answer as a teacher does, from one's own answers or the teacher's."""

    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=_data)
    distillation: DistillationSettings = field(default_factory=DistillationSettings)
    sampling: SamplingSettings = field(default_factory=_sampling)
    optim: OptimSettings = field(default_factory=OptimSettings)
    flow: EpisodeFlowSettings = field(default_factory=EpisodeFlowSettings)
    loop: LoopSettings = field(default_factory=LoopSettings)

    def __post_init__(self) -> None:
        check_substeps(self)
        why = "it looks for groups whose answers differ in reward, and distill learns from every answer"
        only_with(self.sampling, ("dynamic_sampling",), False, why, "use grpo")
        if self.distillation.learn_from != "student":
            why = f"learn_from is {self.distillation.learn_from}, and the student plays no episodes"
            only_with(self.flow, ("episodes",), False, why, "set learn_from to student")
            without_samples(
                self, f"with learn_from {self.distillation.learn_from} the student answers nothing"
            )
        elif self.data.reward is None and not self.data.rewards:
            without_samples(self, "without a reward nothing scores them")

    @property
    def learning_rate(self) -> float:
        given = self.optim.learning_rate
        return given if given is not None else (2e-4 if self.model.lora_rank else 2e-5)


def named_teachers(settings: DistillSettings) -> dict[str, str]:
    """Data set ("" : all others) to teacher. Raises UserError where none is named, or one data set
    has two.
    """
    found: dict[str, str] = {}
    for word in settings.distillation.teacher:
        tag, equals, where = word.partition("=")
        tag, where = (tag, where) if equals else ("", word)
        if tag in found:
            raise UserError(
                f"two teachers for {tag or 'all data sets'}: {found[tag]} and {where}; with several data sets write DATASET=TEACHER"
            )
        found[tag] = where
    if not found:
        raise UserError(
            "distill needs a teacher: --teacher with a run's folder, a folder of weights or a hub name"
        )
    return found


def reads(settings: DistillSettings) -> tuple[str, ...]:
    return ("response",) if settings.distillation.learn_from == "data" else ()
