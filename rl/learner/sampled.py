"""What is remembered of sampling from a model that learns: at which temperatures, and whether the
whole distribution was drawn from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl.types import SamplingParams


class Sampled:
    """How the newest version of the weights that was sampled from was sampled."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Nothing is known of samples of these weights."""
        self._version: int | None = None
        self.temperatures: list[float] = []
        self._truncated = self._untruncated = False

    def note(self, version: int, params: Sequence[SamplingParams]) -> None:
        """Remembers how this version was sampled from: it stands until a newer one is.

        (Several updates on the same samples are all scored as these were drawn.) Greedy samples are
        for looking at.
        """
        for one in params:
            if one.temperature > 0:
                if self._version != version:
                    self.forget()
                    self._version = version
                if one.temperature not in self.temperatures:
                    self.temperatures.append(one.temperature)
                self._truncated, self._untruncated = (
                    self._truncated or one.reshapes,
                    self._untruncated or not one.reshapes,
                )

    def state(self) -> dict[str, Any]:
        """What is known of the samples, for a checkpoint: who goes on from it scores as if nothing
        had come between.
        """
        ways = {"truncated": self._truncated, "untruncated": self._untruncated}
        return {"temperatures": self.temperatures, "sampled_version": self._version, **ways}

    def restore(self, state: Mapping[str, Any], version: int) -> None:
        """What `state` gave; of older checkpoints the temperatures alone are known, and taken to be
        of `version`.
        """
        self.temperatures = list(state["temperatures"])
        self._version = state.get("sampled_version", version if self.temperatures else None)
        self._truncated, self._untruncated = (
            bool(state.get("truncated", False)),
            bool(state.get("untruncated", False)),
        )

    def temperature(self) -> float:
        """The temperature to score datums at that do not say theirs: that of the samples, 1 if
        there are none.

        Raises ValueError where these weights were sampled at several: which of them the data is of
        cannot be known.
        """
        if len(self.temperatures) > 1:
            raise ValueError(
                f"these weights were sampled at the temperatures {self.temperatures}, and a datum is none of the samples that this "
                "process drew: say which of them it was drawn at, Datum(..., temperature=...) or "
                'loss_fn_config={"temperature": ...}'
            )
        return self.temperatures[0] if self.temperatures else 1.0

    def refuse_truncated(self) -> None:
        """Raises ValueError where every sample of this version was drawn with top-k, top-p, min-p,
        a logit bias or min_tokens.

        Their logprobs are of the renormalised, truncated or biased distribution, the learner's of
        the whole one: ratios would be wrong at every token, by a factor that no clip is meant for.
        """
        if self._truncated and not self._untruncated:
            raise ValueError(
                "all samples of these weights were drawn with top_k, top_p, min_p, logit_bias or min_tokens, whose logprobs are not those "
                "of the distribution that is trained: sample training data with top_k=-1 and top_p=1, and without the others"
            )
