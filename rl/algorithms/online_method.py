"""Provide the base classes of methods that sample: shaped rewards, KL to a reference, state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl.algorithms.kl_penalty import AdaptiveKL, compute_kl_metrics, compute_logprob_gaps
from rl.algorithms.method_interface import Method, ModelFactory, Models
from rl.algorithms.reward_shaping import RewardShaper
from rl.rollout import TrajectoryGroup
from rl.types import Datum


class OnlineMethod(Method):
    """Base class of methods that sample answers and learn from their rewards.

    `shaper` shapes the rewards of a batch by the section `shaping`. `learns_by_step`: whether the
    method learns from the rewards of steps, or else from those of whole episodes.
    """

    online = True
    needs_reward = True
    reads: tuple[str, ...] = ()
    reads_held_out_answers = False
    learns_by_step: bool = False

    def __init__(self, settings: Any):
        super().__init__(settings)
        self.shaper = RewardShaper(settings.shaping, settings.sampling.max_tokens)

    def shape_rewards(self, groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
        """Return the groups with rewards shaped by the section `shaping`."""
        return self.shaper.shape_groups(groups, by_step=self.learns_by_step)

    @property
    def shaping_metrics(self) -> dict[str, float]:
        return self.shaper.metrics

    def state(self) -> dict[str, Any]:
        return {"reward_statistics": self.shaper.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.shaper.load_state(state["reward_statistics"])


class ReferenceMethod(OnlineMethod):
    """Base class of online methods with a KL to a reference model, by the section `kl`.

    Without `kl_coef` the coefficient is 0.1 if a reference model is named, else 0.
    """

    def __init__(self, settings: Any):
        super().__init__(settings)
        kl, default = settings.kl, 0.0 if settings.kl.reference_model is None else 0.1
        coefficient = default if kl.kl_coef is None else kl.kl_coef
        self.kl = AdaptiveKL(coefficient, kl.kl_target, kl.kl_rate)
        self._kl_metrics: dict[str, float] = {}  # of the last batch

    def required_models(self, factory: ModelFactory) -> dict[str, Any]:
        """Create the reference model, if the KL to it has a coefficient."""
        if not self.kl.needs_reference:
            return {}
        return {"reference": factory.reference(self.settings.kl.reference_model)}

    @property
    def kl_config(self) -> dict[str, Any]:
        """Return the config of the loss's KL term; {} if the KL is part of the reward."""
        if not self.kl.needs_reference or self.settings.kl.kl_placement == "reward":
            return {}
        return {"kl_coef": self.kl.coefficient, "kl_kind": self.settings.kl.kl_kind}

    def score_reference(
        self, datums: Sequence[Datum], models: Models
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the reference's logprobs of each datum and their gaps to the sampler's."""
        ref_D = models.reference.logprobs(datums, self.settings.sampling.temperature)
        gaps_D = compute_logprob_gaps(datums, ref_D)
        self._kl_metrics = {
            **compute_kl_metrics(datums, gaps_D),
            "optim/kl_coef": self.kl.coefficient,
        }
        return ref_D, gaps_D

    def adapt_kl(self) -> None:
        """Adapt the coefficient to the KL of the last batch."""
        if "optim/kl_ref_k3" in self._kl_metrics:
            self.kl.update(self._kl_metrics["optim/kl_ref_k3"])

    def state(self) -> dict[str, Any]:
        return {**super().state(), "kl_coef": self.kl.coefficient}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self.kl.coefficient = state["kl_coef"]
