"""Record the sampling settings of a learner's samples.

The record holds the temperatures and whether the full distribution was sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl.types import DISTRIBUTION_PARAMETERS, SamplingParams


class SamplingRecord:
    """Record the sampling settings of the newest sampled weight version."""

    def __init__(self) -> None:
        """Start without a record."""
        self.clear()

    def clear(self) -> None:
        """Clear the record: nothing is known about samples of these weights."""
        self._version: int | None = None
        self.temperatures: list[float] = []
        self._truncated = self._untruncated = False

    def record(self, version: int, params: Sequence[SamplingParams]) -> None:
        """Record the sampling settings of this version; they are kept until a newer version is
        sampled.

        Several updates on the same samples are all scored with the samples' settings. Greedy
        samples are ignored: they are for inspection.
        """
        for sampling in params:
            if sampling.temperature > 0:
                if self._version != version:
                    self.clear()
                    self._version = version
                if sampling.temperature not in self.temperatures:
                    self.temperatures.append(sampling.temperature)
                self._truncated, self._untruncated = (
                    self._truncated or sampling.changes_distribution,
                    self._untruncated or not sampling.changes_distribution,
                )

    def to_state(self) -> dict[str, Any]:
        """Return the record for a checkpoint, so that a resumed run scores identically."""
        ways = {"truncated": self._truncated, "untruncated": self._untruncated}
        return {"temperatures": self.temperatures, "sampled_version": self._version, **ways}

    def load_state(self, state: Mapping[str, Any], version: int) -> None:
        """Restore the record from a `state`.

        Older checkpoints hold only the temperatures, which are assumed to belong to `version`.
        """
        self.temperatures = list(state["temperatures"])
        self._version = state.get("sampled_version", version if self.temperatures else None)
        self._truncated, self._untruncated = (
            bool(state.get("truncated", False)),
            bool(state.get("untruncated", False)),
        )

    def scoring_temperature(self) -> float:
        """Return the temperature for scoring datums without an explicit temperature.

        It is that of the samples, 1 without samples. Raises ValueError if these weights were
        sampled at several temperatures, because the datum's temperature is then unknown.
        """
        if len(self.temperatures) > 1:
            raise ValueError(
                f"these weights were sampled at the temperatures {self.temperatures}, and a datum "
                "is not a sample of this process: set the temperature of its sample with "
                "Datum(..., temperature=...) or "
                'loss_fn_config={"temperature": ...}'
            )
        return self.temperatures[0] if self.temperatures else 1.0

    def check_untruncated(self) -> None:
        """Raise ValueError if every sample of this version used a reshaped distribution.

        Such samples use one of `DISTRIBUTION_PARAMETERS`. Their logprobs belong to the
        renormalized, truncated or biased distribution, the learner's to the full one: ratios would
        be wrong at every token, by a factor that clipping does not address.
        """
        if self._truncated and not self._untruncated:
            *names, last = DISTRIBUTION_PARAMETERS
            raise ValueError(
                f"all samples of these weights used {', '.join(names)} or {last}, so their "
                "logprobs are not those of the trained distribution: sample training data with "
                "top_k=-1 and top_p=1, and without the others"
            )
