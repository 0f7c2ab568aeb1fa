"""Define the settings of `distill` and the functions that read its teachers and answers from them.
This module imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from rl.config import (
    DataSettings,
    LoopSettings,
    ModelSettings,
    OptimSettings,
    Range,
    RolloutSettings,
    SamplingSettings,
    Share,
    check_ranges,
    check_substeps,
    is_api_address,
    reject_sampling_settings,
    require,
)
from rl.errors import UserError


@dataclass(frozen=True, kw_only=True)
class DistillationSettings:
    """Configure the teachers and the way to learn from them."""

    teacher: tuple[str, ...] = ()
    """A run's folder, a folder of weights, a hub name, the name of an earlier stage of the recipe, or (learn_from student, temperature 1) the address of an OpenAI-compatible API whose completions echo prompts with logprobs: http://localhost:8000/v1. With several data sets (more_datasets) either a single teacher for all, or DATASET=TEACHER for each."""
    learn_from: Literal["student", "teacher", "data"] = "student"
    """Source of the answers. student: the student's samples, by reverse KL (on-policy). teacher: the teacher's samples. data: the responses in the data."""
    group_size: Annotated[int, Range(1, 10**6)] = 4
    """Answers sampled for each prompt (student, teacher)."""
    kl_discount: Share = 0.0
    """On-policy: a token's advantage also includes later tokens' divergence, multiplied by this per position. 0: only the token's divergence; 1: the gradient of the whole answer's KL, of higher variance."""
    alpha: Share = 0.5
    """Off-policy: weight of the KL to the teacher; the rest is cross-entropy on the answer's tokens."""
    distill_temperature: Annotated[float, Range(1e-3, 100)] = 2.0
    """Off-policy: temperature of both distributions in the KL, which is scaled by its square."""
    teacher_top_k: Annotated[int, Range(1, 10**6)] = 64
    """Off-policy: the teacher's distribution is that of its most likely tokens at each position, this many, renormalized."""

    def __post_init__(self) -> None:
        check_ranges(self)
        on_policy, reason = self.learn_from == "student", f"learn_from is {self.learn_from}"
        require(self, ("kl_discount",), on_policy, reason, "set learn_from to student")
        require(
            self,
            ("alpha", "distill_temperature", "teacher_top_k"),
            not on_policy,
            reason,
            "set learn_from to teacher or data",
        )
        require(
            self,
            ("group_size",),
            self.learn_from != "data",
            reason,
            "set learn_from to student or teacher",
        )

    @property
    def teacher_names(self) -> list[str]:
        """Return the teachers without the data sets, each once."""
        return list(dict.fromkeys(target for _, target in map(split_teacher, self.teacher)))


def _default_data() -> DataSettings:
    """Return data settings without a reward function."""
    return DataSettings(reward=None)


def _default_sampling() -> SamplingSettings:
    """Return sampling settings at temperature 1."""
    return SamplingSettings(temperature=1.0)


@dataclass(frozen=True, kw_only=True)
class DistillSettings:
    """Distillation: learn to answer as a teacher does, from the student's answers or the teacher's."""

    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=_default_data)
    distillation: DistillationSettings = field(default_factory=DistillationSettings)
    sampling: SamplingSettings = field(default_factory=_default_sampling)
    optim: OptimSettings = field(default_factory=OptimSettings)
    flow: RolloutSettings = field(default_factory=RolloutSettings)
    loop: LoopSettings = field(default_factory=LoopSettings)

    def __post_init__(self) -> None:
        check_substeps(self)
        self._check_api_teachers()
        reason = "it selects groups with different rewards, and distill learns from every answer"
        require(self.sampling, ("dynamic_sampling",), False, reason, "use grpo")
        if self.distillation.learn_from != "student":
            reason = (
                f"learn_from is {self.distillation.learn_from}, so the student plays no episodes"
            )
            require(self.flow, ("episodes",), False, reason, "set learn_from to student")
            reject_sampling_settings(
                self, f"with learn_from {self.distillation.learn_from} the student answers nothing"
            )
        elif self.data.reward is None and not self.data.rewards:
            reject_sampling_settings(self, "without a reward nothing scores them")

    def _check_api_teachers(self) -> None:
        """Raise ValueError if a teacher behind an API cannot give what the settings need."""
        for target in self.distillation.teacher_names:
            if not is_api_address(target):
                continue
            if self.distillation.learn_from != "student":
                raise ValueError(
                    f"the teacher {target} only scores the student's answers: set learn_from to student, or name weights"
                )
            if self.sampling.temperature != 1:
                raise ValueError(
                    f"the teacher {target} scores at temperature 1, and temperature is {self.sampling.temperature:g}: set temperature to 1"
                )

    @property
    def learning_rate(self) -> float:
        """Return the learning rate: as set, else 2e-4 with LoRA, 2e-5 without."""
        rate = self.optim.learning_rate
        return rate if rate is not None else (2e-4 if self.model.lora_rank else 2e-5)


def split_teacher(word: str) -> tuple[str, str]:
    """Return (data set, or "" for all, and teacher) of a word of --teacher."""
    tag, equals, target = word.partition("=")
    return (tag, target) if equals and not is_api_address(word) else ("", word)


def parse_teachers(settings: DistillSettings) -> dict[str, str]:
    """Return the teacher of each data set ("": all other data sets). Raises UserError if no teacher
    is named, or if a data set has two.
    """
    teachers: dict[str, str] = {}
    for word in settings.distillation.teacher:
        tag, target = split_teacher(word)
        if tag in teachers:
            raise UserError(
                f"two teachers for {tag or 'all data sets'}: {teachers[tag]} and {target}; with several data sets write DATASET=TEACHER"
            )
        teachers[tag] = target
    if not teachers:
        raise UserError(
            "distill needs a teacher: --teacher with a run's folder, a folder of weights or a hub name"
        )
    return teachers
