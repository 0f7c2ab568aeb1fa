"""What `offline` may be told. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from rl.settings import (
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
    only_with,
    without_samples,
)


@dataclass(frozen=True, kw_only=True)
class RolloutDataSettings(DataSettings):
    """Stored answers with rewards, and problems to be tested on."""

    dataset: str = ""
    """Stored answers: a run's folder (its rollouts are read), a folder of .jsonl files, one file, or in a recipe an earlier stage's name (its rollouts). Rows as a run writes them, or a prompt with response and reward, or with lists of both."""
    eval_dataset: str | None = None
    """Problems whose answers are sampled to measure what was learnt (with reward); None: nothing is."""
    prompt_column: str = "auto"
    """Column of the prompt; auto: prompt, question, problem or instruction, whichever is there."""
    response_column: str | None = None
    """Column of the answer, or of a list of them; by default response, completion, code, output or solution, or their plurals."""
    reward_column: str | None = None
    """Column of the reward, or of a list of them; by default reward, score, is_correct or correct, or their plurals."""
    reward: str | None = None
    """Scores answers to eval_dataset; the stored answers' own rewards are what is learnt from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.on_too_long == "cut":
            raise ValueError(
                "stored answers are learnt as they were given: set on_too_long to skip"
            )
        only_with(
            self,
            ("stream", "prompt_template", "prompt_suffix"),
            False,
            "stored answers are read as they were given",
            "give dataset",
        )
        for name in ("more_datasets", "curriculum"):
            why = "stored answers are read from one dataset, without a curriculum"
            only_with(self, (name,), False, why, "give dataset")


@dataclass(frozen=True, kw_only=True)
class OfflineOptions:
    """How stored rewards become gradients."""

    loss: Literal["dro", "importance_sampling", "bc", "ilql"] = "dro"
    """dro: policy gradient with a quadratic pull to what drew the answers (arXiv 2405.19107). importance_sampling: ratios of the policy to that. bc: cross-entropy on the best answers. ilql: the logits as a conservative Q-function beside a value head (arXiv 2206.11871, 2006.04779)."""
    baseline: Literal["group", "learned", "none"] = "group"
    """Subtracted from rewards (dro, importance_sampling). group: the mean reward of the problem's answers. learned: a value head, trained along with the policy."""
    beta: Weight = 0.05
    """dro: strength of the pull."""
    top_fraction: Annotated[float | None, Range(0, 1, above=True)] = None
    """bc: learn the best such share of all answers (ties with the worst of them included)."""
    reward_threshold: Annotated[float | None, FINITE] = None
    """bc: learn the answers with at least this reward."""
    gamma: Share = 1.0
    """ilql: discount a token."""
    tau: Annotated[float, Range(1e-6, 1e9)] = 0.1
    """ilql: what an advantage of Q is divided by to become log (policy / what drew the answers), in units of reward; smaller follows Q more sharply."""
    cql_coef: Weight = 0.3
    """ilql: weight of the conservative term, logsumexp Q - Q(a), in units of reward. Too small beside a high expectile, and answers that are not in the data win."""
    expectile: Inside = 0.7
    """ilql: the value is this expectile of what the data's actions lead to: 0.5 their mean, nearer to 1 their best."""
    value_coef: Weight = 0.5
    """Weight of the value's loss (baseline learned, ilql)."""

    def __post_init__(self) -> None:
        check_ranges(self)
        filters = [
            name for name in ("top_fraction", "reward_threshold") if getattr(self, name) is not None
        ]
        if (self.loss == "bc") != (len(filters) == 1):
            raise ValueError(
                f"loss bc needs one of top_fraction (such as 0.25) and reward_threshold (such as 1), other losses neither; got loss {self.loss} "
                f"with {' and '.join(filters) or 'neither'}"
            )
        self._check_used()

    def _check_used(self) -> None:
        learns_value = self.loss == "ilql" or (self.baseline == "learned" and self.loss != "bc")
        why = f"the loss is {self.loss}"
        only_with(
            self,
            ("baseline",),
            self.loss in ("dro", "importance_sampling"),
            why,
            "set loss to dro or importance_sampling",
        )
        only_with(self, ("beta",), self.loss == "dro", why, "set loss to dro")
        only_with(
            self,
            ("gamma", "tau", "cql_coef", "expectile"),
            self.loss == "ilql",
            why,
            "set loss to ilql",
        )
        only_with(
            self,
            ("value_coef",),
            learns_value,
            f"no value is learnt ({why})",
            "set loss to ilql, or baseline to learned",
        )

    @property
    def needs_behaviour(self) -> bool:
        """Whether it matters how likely the answers were to whoever gave them."""
        return self.loss != "bc"


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
        without_samples(self, "offline learns from stored answers")

    @property
    def learning_rate(self) -> float:
        given = self.optim.learning_rate
        return given if given is not None else (4e-5 if self.model.lora_rank else 1e-6)
