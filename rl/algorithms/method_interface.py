"""Define the interface of a method: settings and three hooks. rl.algorithms.update holds their
shared parts. This module imports no torch.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rl.config import LearnedRewardSettings
from rl.errors import UserError
from rl.rollout import TrajectoryGroup
from rl.types import Datum, Problem

if TYPE_CHECKING:
    from rl.client import SamplingClient, TrainingClient
    from rl.judges import LearnedRewards, TokenScorer


@dataclass
class Models:
    """Hold the clients that a method uses.

    `policy` is always set. `others` holds the models that the method requested from its
    `ModelFactory`.
    """

    policy: TrainingClient
    others: dict[str, Any] = field(default_factory=dict)

    @property
    def reference(self) -> TokenScorer:
        """Return the reference model.

        Raises UserError if the method's class did not declare that it needs a reference model.
        """
        if "reference" not in self.others:
            raise UserError(
                "the method scores with a reference model, but its class created none: add a "
                "static method clients(settings, factory) "
                'that returns {"reference": factory.initial_policy()} (see '
                "rl/algorithms/grpo.py), or leave "
                "out kl_coef"
            )
        return self.others["reference"]

    @property
    def critic(self) -> TrainingClient | None:
        """Return the critic, or None if the method has none."""
        return self.others.get("critic")

    @property
    def rewards(self) -> LearnedRewards | None:
        """Return the model that scores answers in addition to (or instead of) the environments, or
        None.
        """
        return self.others.get("rewards")

    @property
    def opponents(self) -> Any:
        """Return the players of the seats that the policy does not take
        (rl.trainer.opponent_models), or None if the stage has no environment.
        """
        return self.others.get("opponents")

    @property
    def trainable(self) -> dict[str, TrainingClient]:
        """Return the models that train together with the policy and are saved with it: the critic,
        if any.
        """
        return {name: self.others[name] for name in ("critic",) if name in self.others}


class ModelFactory(Protocol):
    """Create the other models of a method when its stage begins, and again after a resume.

    `tags` are the names of the stage's data sets.
    """

    policy: TrainingClient
    tags: Sequence[str]

    def initial_policy(self) -> TokenScorer:
        """Return the policy as it was before the stage's first step.

        This is the base model under a fresh adapter, else a frozen copy of the weights.
        """
        ...

    def load(self, target: str) -> SamplingClient:
        """Load the final weights of an earlier stage (by name) or of a run's folder, or the weights
        of a model folder or hub name.

        The base model under the policy's adapter is not loaded a second time.
        """
        ...

    def rewards(self, learned: LearnedRewardSettings) -> dict[str, LearnedRewards]:
        """Return the model that judges answers under the key `rewards` of `Models.others`; {} if
        the settings name none.
        """
        ...

    def critic(self, base_model: str) -> TrainingClient:
        """Return a separate model with a value head, the `critic` of `Models.others`. It is saved
        and resumed together with the policy.

        `base_model` is a hub name, a model folder or tiny:<preset>; "policy" selects the weights
        from which the stage begins.
        """
        ...


@dataclass(frozen=True)
class Progress:
    """Hold the position in a stage: batch `batch` of `steps`.

    `seed` is the stage's seed for the random choices of `update`.
    """

    batch: int
    steps: int
    seed: int = 0


class Method(Protocol):
    """Define the hooks of every method.

    `online` is True for a method that samples (and has `compute_advantages`), False for a method
    that reads rows (and has `datums`).
    """

    online: bool

    def state(self) -> dict[str, Any]:
        """Return the state that must survive a resume, as readable JSON."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...

    def update(
        self, models: Models, datums: Sequence[Datum], progress: Progress
    ) -> dict[str, float]: ...


class OnlineMethod(Method, Protocol):
    group_size: int

    def compute_advantages(
        self, groups: Sequence[TrajectoryGroup], models: Models
    ) -> list[Datum]: ...


class OfflineMethod(Method, Protocol):
    def datums(
        self, rows: Sequence[Problem], renderer: Any, models: Models, seed: int
    ) -> list[Datum]:
        """Return the datums of a batch of rows. `seed` is the batch's seed for random choices."""
        ...


class RowEvaluator(abc.ABC):
    """Base class of methods that measure held-out rows themselves, in addition to (or instead of)
    sampling answers to them.

    `headline` is the metric that summarizes a run. `keeps_value_head` tells whether the best
    weights are useless without the value head.
    """

    headline: str
    keeps_value_head = False

    def begin(self, rows: Iterable[Problem], renderer: Any, models: Models) -> None:  # noqa: B027  (nothing, by default)
        """Prepare for all rows on which the stage trains or evaluates. Called before the first step
        and after a resume.
        """

    def longest(self, row: Problem, renderer: Any) -> int:
        """Return the number of tokens of the longest sequence that a row makes, if that can exceed
        its prompt plus a single answer; else 0.
        """
        return 0

    def remark(self, rows: Sequence[Problem], renderer: Any) -> str | None:
        """Return a message about the training rows, printed before the first step, or None."""
        return None

    @abc.abstractmethod
    def evaluate(self, rows: Sequence[Problem], renderer: Any, models: Models) -> dict[str, float]:
        """Return the `test/...` metrics of held-out rows."""
