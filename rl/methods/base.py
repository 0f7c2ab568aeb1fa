"""What a method is: settings, and three hooks (what these share is in rl.methods.steps). No torch
here.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rl.episodes import TrajectoryGroup
from rl.errors import UserError
from rl.settings import LearnedRewardSettings
from rl.types import Datum, Problem

if TYPE_CHECKING:
    from rl.clients import SamplingClient, TrainingClient
    from rl.judges import LearnedRewards, TokenScorer


@dataclass
class Models:
    """The clients a method has at hand. `policy` is always there; `others` are what the method
    asked its `Hosts` for.
    """

    policy: TrainingClient
    others: dict[str, Any] = field(default_factory=dict)

    @property
    def reference(self) -> TokenScorer:
        """Return the reference. Raises UserError where the method's class did not declare that it
        needs one.
        """
        if "reference" not in self.others:
            raise UserError(
                "the method scores with a reference model, and its class made none: give it a static method clients(settings, hosts) "
                'that returns {"reference": hosts.beginning()} (rl/methods/grpo.py has one), or leave out kl_coef'
            )
        return self.others["reference"]

    @property
    def critic(self) -> TrainingClient | None:
        return self.others.get("critic")

    @property
    def rewards(self) -> LearnedRewards | None:
        """What rewards answers beside (or instead of) the environments, where the method asked for
        it.
        """
        return self.others.get("rewards")

    @property
    def opponents(self) -> Any:
        """Who plays seats that are not the policy's (rl.run.opponents), where the stage has an
        environment.
        """
        return self.others.get("opponents")

    @property
    def learning(self) -> dict[str, TrainingClient]:
        """Those beside the policy that learn, and are saved with it: the critic, where there is
        one.
        """
        return {name: self.others[name] for name in ("critic",) if name in self.others}


class Hosts(Protocol):
    """What a method's other models are made with, at the beginning of its stage and again after a
    resume.

    `tags`: the names of the stage's data sets.
    """

    policy: TrainingClient
    tags: Sequence[str]

    def beginning(self) -> TokenScorer:
        """The policy as it was before the stage's first step: the base under a fresh adapter, else
        frozen weights.
        """
        ...

    def load(self, target: str) -> SamplingClient:
        """The final weights of an earlier stage (by its name), of a run's folder, or those of a
        model folder or hub name.

        The base model under the policy's own adapter is not loaded once more.
        """
        ...

    def rewards(self, learned: LearnedRewardSettings) -> dict[str, LearnedRewards]:
        """The model whose judgement is the reward, as `rewards` in `Models.others`; nothing where
        none is named.
        """
        ...

    def critic(self, base_model: str) -> TrainingClient:
        """A model of its own with a value head, as `critic` in `Models.others`: saved with the
        policy, and resumed with it.

        `base_model`: a hub name, a model folder or tiny:<preset>; "policy": the weights that the
        stage begins from.
        """
        ...


@dataclass(frozen=True)
class Progress:
    """Where a stage is: batch `batch` of `steps`. `seed`: the stage's, for what `learn` draws at
    random.
    """

    batch: int
    steps: int
    seed: int = 0


class Method(Protocol):
    """`online`: whether it samples (credit) or reads (datums)."""

    online: bool

    def state(self) -> dict[str, Any]:
        """What must survive a resume, as readable JSON."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...

    def learn(
        self, models: Models, datums: Sequence[Datum], progress: Progress
    ) -> dict[str, float]: ...


class OnlineMethod(Method, Protocol):
    group_size: int

    def credit(self, groups: Sequence[TrajectoryGroup], models: Models) -> list[Datum]: ...


class OfflineMethod(Method, Protocol):
    def datums(
        self, rows: Sequence[Problem], renderer: Any, models: Models, seed: int
    ) -> list[Datum]:
        """`seed`: of the batch, for what is drawn at random."""
        ...


class EvaluatesRows(abc.ABC):
    """A method that measures held-out rows itself, besides (or instead of) sampling answers to
    them.

    `headline`: the metric that sums a run up. `keeps_value_head`: whether its best weights are
    nothing without the value head.
    """

    headline: str
    keeps_value_head = False

    def begin(self, rows: Iterable[Problem], renderer: Any, models: Models) -> None:  # noqa: B027  (nothing, by default)
        """Called before the first step, and after a resume, with every row that the stage trains on
        or evaluates.
        """

    def longest(self, row: Problem, renderer: Any) -> int:
        """Tokens of the longest sequence that a row makes, where that is more than its prompt and
        one answer; else 0.
        """
        return 0

    def remark(self, rows: Sequence[Problem], renderer: Any) -> str | None:
        """What is to be said of the rows to train on before the first step."""
        return None

    @abc.abstractmethod
    def evaluate(self, rows: Sequence[Problem], renderer: Any, models: Models) -> dict[str, float]:
        """`test/...` metrics."""
