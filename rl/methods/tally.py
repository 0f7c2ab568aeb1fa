"""What the updates of a batch add up to, where a method takes several of them."""

from __future__ import annotations

from collections.abc import Mapping

from rl.episodes import largest
from rl.methods.steps import expert_metrics


class Tally:
    """What the updates of a batch add up to."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self._sums: dict[str, float] = {}
        self._norms: dict[str, float] = {}
        self._skipped = self._updates = 0.0
        self._tokens = 0

    def add(
        self, who: str, metrics: Mapping[str, float], update: Mapping[str, float], tokens: int
    ) -> None:
        """`who`: "" for the policy, "critic_". `tokens`: the update's action tokens."""
        for name, value in metrics.items():
            if name.endswith(":sum"):
                key = who + name.removesuffix(":sum")
                self._sums[key] = self._sums.get(key, 0.0) + value
        self._norms[who] = largest([self._norms.get(who, 0.0), update["grad_norm"]])
        self._skipped += update.get("skipped_nonfinite", 0.0)
        if not who:
            self._tokens, self._updates = self._tokens + tokens, self._updates + 1

    def summary(self) -> dict[str, float]:
        """Means over the tokens of all updates, the largest gradient norms, the number of updates."""
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
        found = {
            f"optim/{shown}": sums[name] / tokens for name, shown in names.items() if name in sums
        }
        active = max(1.0, sums.get("active_tokens", 0.0))
        found["optim/loss"] = sums["loss"] / tokens
        found["optim/clip_frac"] = (
            sums.get("clipped_low", 0.0) + sums.get("clipped_high", 0.0)
        ) / active
        found |= {f"optim/{who}grad_norm": norm for who, norm in self._norms.items()}
        found |= expert_metrics({f"{name}:sum": value for name, value in self._sums.items()})
        found["optim/substeps"] = self._updates
        if self._skipped:
            found["optim/skipped_nonfinite"] = self._skipped
        return {**self.metrics, **found}
