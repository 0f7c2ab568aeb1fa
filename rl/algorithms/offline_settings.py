"""Define the settings of `offline`. This module imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from rl.config import (
    FINITE,
    DataSettings,
    Inside,
    LoopSettings,
    ModelSettings,
    OptimSettings,
    Range,
    SamplingSettings,
    Share,
    Weight,
    check_ranges,
    check_substeps,
    reject_sampling_settings,
    require,
)


@dataclass(frozen=True, kw_only=True)
class RolloutDataSettings(DataSettings):
    """Configure stored answers with rewards, and the problems for tests."""

    dataset: str = ""
    """Stored answers: a run's folder (its rollouts are read), a folder of .jsonl files, a file, or in a recipe an earlier stage's name (its rollouts). Rows as a run writes them, or a prompt with response and reward, or with lists of both."""
    eval_dataset: str | None = None
    """Problems to which the policy samples answers to measure progress (with reward); None: no evaluation."""
    prompt_column: str = "auto"
    """Column of the prompt; auto: prompt, question, problem or instruction, whichever exists."""
    response_column: str | None = None
    """Column of the answer, or of a list of them; by default response, completion, code, output or solution, or their plurals."""
    reward_column: str | None = None
    """Column of the reward, or of a list of them; by default reward, score, is_correct or correct, or their plurals."""
    reward: str | None = None
    """Scores answers to eval_dataset; training uses the rewards of the stored answers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.on_too_long == "cut":
            raise ValueError("stored answers are learned without changes: set on_too_long to skip")
        require(
            self,
            ("stream", "prompt_template", "prompt_suffix"),
            False,
            "stored answers are read without changes",
            "set dataset",
        )
        for name in ("more_datasets", "curriculum"):
            reason = "stored answers are read from a single dataset, without a curriculum"
            require(self, (name,), False, reason, "set dataset")


@dataclass(frozen=True)
class OfflineLoss:
    """Describe a loss on stored answers.

    name                its entry in `rl.losses.LOSSES`
    options             the settings that only this loss reads
    config              those of them that are also keys of its config
    subtracts_baseline  whether a baseline is subtracted from the rewards
    learns_value        whether it always trains a value head
    selects_answers     whether it learns the best answers, and reads neither rewards nor behavior
                        logprobs of those
    """

    name: str
    options: tuple[str, ...] = ()
    config: tuple[str, ...] = ()
    subtracts_baseline: bool = False
    learns_value: bool = False
    selects_answers: bool = False


OFFLINE_LOSSES: dict[str, OfflineLoss] = {
    "dro": OfflineLoss("dro", ("beta",), ("beta",), subtracts_baseline=True),
    "importance_sampling": OfflineLoss("importance_sampling", subtracts_baseline=True),
    "bc": OfflineLoss("cross_entropy", selects_answers=True),
    "ilql": OfflineLoss(
        "ilql",
        ("gamma", "tau", "cql_coef", "expectile"),
        ("tau", "cql_coef", "expectile"),
        learns_value=True,
    ),
}


@dataclass(frozen=True, kw_only=True)
class OfflineOptions:
    """Configure the way stored rewards become gradients."""

    loss: Literal["dro", "importance_sampling", "bc", "ilql"] = "dro"
    """dro: policy gradient with a quadratic pull to the behavior policy (arXiv 2405.19107). importance_sampling: ratios of the policy to the behavior policy. bc: cross-entropy on the best answers. ilql: the logits as a conservative Q-function with a value head (arXiv 2206.11871, 2006.04779)."""
    baseline: Literal["group", "learned", "none"] = "group"
    """Subtracted from rewards (dro, importance_sampling). group: the mean reward of the problem's answers. learned: a value head, trained together with the policy."""
    beta: Weight = 0.05
    """dro: strength of the pull."""
    top_fraction: Annotated[float | None, Range(0, 1, above=True)] = None
    """bc: learn this share of all answers, the best (including answers tied with the worst of them)."""
    reward_threshold: Annotated[float | None, FINITE] = None
    """bc: learn the answers with at least this reward."""
    gamma: Share = 1.0
    """ilql: discount per token."""
    tau: Annotated[float, Range(1e-6, 1e9)] = 0.1
    """ilql: divisor of an advantage of Q that makes it log (policy / behavior policy), in units of reward; smaller values follow Q more sharply."""
    cql_coef: Weight = 0.3
    """ilql: weight of the conservative term, logsumexp Q - Q(a), in units of reward. If it is too small next to a high expectile, answers that are not in the data win."""
    expectile: Inside = 0.7
    """ilql: the value is this expectile of the outcomes of the data's actions: 0.5 their mean, nearer to 1 their best."""
    value_coef: Weight = 0.5
    """Weight of the value loss (baseline learned, ilql)."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.loss not in OFFLINE_LOSSES:
            raise ValueError(f"unknown loss {self.loss!r}: expected {', '.join(OFFLINE_LOSSES)}")
        filters = [
            name for name in ("top_fraction", "reward_threshold") if getattr(self, name) is not None
        ]
        if self.loss_spec.selects_answers != (len(filters) == 1):
            raise ValueError(
                f"loss bc needs either top_fraction (such as 0.25) or reward_threshold (such as 1), other losses neither; got loss {self.loss} "
                f"with {' and '.join(filters) or 'neither'}"
            )
        self._check_used()

    def _check_used(self) -> None:
        """Raise ValueError if a setting is set that the loss does not use."""
        reason = f"the loss is {self.loss}"
        with_baseline = [name for name, spec in OFFLINE_LOSSES.items() if spec.subtracts_baseline]
        remedy = f"set loss to {' or '.join(with_baseline)}"
        require(self, ("baseline",), self.loss_spec.subtracts_baseline, reason, remedy)
        for name, spec in OFFLINE_LOSSES.items():
            require(self, spec.options, self.loss == name, reason, f"set loss to {name}")
        require(
            self,
            ("value_coef",),
            self.learns_value,
            f"no value is learned ({reason})",
            "set loss to ilql, or baseline to learned",
        )

    @property
    def loss_spec(self) -> OfflineLoss:
        """Return the description of the loss."""
        return OFFLINE_LOSSES[self.loss]

    @property
    def subtracts_value(self) -> bool:
        """Return whether the baseline of the rewards is a value head."""
        return self.baseline == "learned" and self.loss_spec.subtracts_baseline

    @property
    def learns_value(self) -> bool:
        """Return whether a value head is trained."""
        return self.loss_spec.learns_value or self.subtracts_value

    @property
    def needs_behavior_logprobs(self) -> bool:
        """Return whether the loss uses the behavior logprobs of the answers."""
        return not self.loss_spec.selects_answers


@dataclass(frozen=True, kw_only=True)
class OfflineSettings:
    """Offline RL: learn from stored answers and their rewards."""

    model: ModelSettings = field(default_factory=ModelSettings)
    data: RolloutDataSettings = field(default_factory=RolloutDataSettings)
    offline: OfflineOptions = field(default_factory=OfflineOptions)
    sampling: SamplingSettings = field(default_factory=lambda: SamplingSettings(temperature=1.0))
    optim: OptimSettings = field(default_factory=OptimSettings)
    loop: LoopSettings = field(default_factory=LoopSettings)

    def __post_init__(self) -> None:
        check_substeps(self)
        reject_sampling_settings(self, "offline learns from stored answers")

    @property
    def learning_rate(self) -> float:
        """Return the learning rate: as set, else 4e-5 with LoRA, 1e-6 without."""
        rate = self.optim.learning_rate
        return rate if rate is not None else (4e-5 if self.model.lora_rank else 1e-6)
