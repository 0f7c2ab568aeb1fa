"""Sum the metrics of a batch's updates, for methods that take several updates per batch."""

from __future__ import annotations

from collections.abc import Mapping

from rl.algorithms.update import compute_expert_metrics
from rl.rollout import max_or_nan


class MetricSums:
    """Sum the metrics of a batch's updates."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self._sums: dict[str, float] = {}
        self._norms: dict[str, float] = {}
        self._skipped = self._updates = 0.0
        self._tokens = 0

    def add(
        self, prefix: str, metrics: Mapping[str, float], update: Mapping[str, float], tokens: int
    ) -> None:
        """Add an update. The prefix is "" for the policy, "critic_" for the critic. `tokens` is the
        update's number of action tokens.
        """
        for name, value in metrics.items():
            if name.endswith(":sum"):
                key = prefix + name.removesuffix(":sum")
                self._sums[key] = self._sums.get(key, 0.0) + value
        self._norms[prefix] = max_or_nan([self._norms.get(prefix, 0.0), update["grad_norm"]])
        self._skipped += update.get("skipped_nonfinite", 0.0)
        if not prefix:
            self._tokens, self._updates = self._tokens + tokens, self._updates + 1

    def summarize(self) -> dict[str, float]:
        """Return means over the tokens of all updates, the largest gradient norms and the number of
        updates.
        """
        sums = {
            name.removeprefix("critic_"): value
            for name, value in self._sums.items()
            if name != "critic_loss"
        }
        names = {
            "policy_loss": "policy_loss",
            "value_loss": "value_loss",
            "entropy": "policy_entropy",
            "value_clipped": "value_clip_frac",
        }
        tokens = max(1, self._tokens)
        metrics = {
            f"optim/{metric}": sums[name] / tokens for name, metric in names.items() if name in sums
        }
        active = max(1.0, sums.get("active_tokens", 0.0))
        metrics["optim/loss"] = sums["loss"] / tokens
        metrics["optim/clip_frac"] = (
            sums.get("clipped_low", 0.0) + sums.get("clipped_high", 0.0)
        ) / active
        metrics |= {f"optim/{prefix}grad_norm": norm for prefix, norm in self._norms.items()}
        metrics |= compute_expert_metrics(
            {f"{name}:sum": value for name, value in self._sums.items()}
        )
        metrics["optim/substeps"] = self._updates
        if self._skipped:
            metrics["optim/skipped_nonfinite"] = self._skipped
        return {**self.metrics, **metrics}
