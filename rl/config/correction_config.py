"""Define the settings of the importance correction for off-policy tokens. This module imports no
torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from rl.config.check_config import require
from rl.config.fields import check_ranges
from rl.config.number_range import Range


@dataclass(frozen=True, kw_only=True)
class CorrectionSettings:
    """Hold the settings of the importance correction for tokens that were sampled by older weights
    or at another precision.
    """

    correction: Literal["none", "truncate", "icepop", "mask"] = "none"
    """Importance correction by the ratio of learner probability (before the step) to sampler probability. truncate: weight by the ratio, clipped to the bounds (TIS, Yao et al. 2025). icepop: weight by the ratio within the bounds, by 0 outside (arXiv 2510.18855). mask: drop what is outside the bounds, without weights (Liu, Li et al. 2025, "When speed kills stability"). Each needs an extra forward pass."""
    correction_level: Literal["token", "sequence", "geometric"] = "token"
    """Level of the ratio. token: the ratio of each token. sequence: the product over the answer. geometric: the geometric mean over the answer (GSPO's ratio, arXiv 2507.18071), which can mask answers but not weight them."""
    correction_low: Annotated[float, Range(0, 1, why="a ratio, such as 0.5")] = 0.0
    """Lower bound of the ratio, such as 0.5 for tokens or 0.99 for geometric means."""
    correction_high: Annotated[float, Range(1, 1e6, why="a ratio, such as 2")] = 2.0
    """Upper bound of the ratio, such as 2 for tokens or 1.01 for geometric means."""
    proximal: Literal["sampler", "learner", "interpolated"] | None = None
    """Denominator of the ratios in the loss, around which the loss clips. sampler: the sampler's logprobs. learner: the learner's logprobs before the step (decoupled PPO, arXiv 2110.00641; AReaL, 2505.24298). interpolated: an estimate of the learner's logprobs without a forward pass, between the sampler's and the current ones by the age of the token (AReaL's log-linear approximation). Default: learner if the correction weights tokens, interpolated under max_steps_off_policy with the loss ppo and no correction (docs/corrections.md), else sampler."""

    def __post_init__(self) -> None:
        check_ranges(self)
        on = self.correction != "none"
        why, remedy = "correction is none", "set correction to truncate, icepop or mask"
        require(self, ("correction_level", "correction_low", "correction_high"), on, why, remedy)
        if self.weights_tokens and self.correction_level == "geometric":
            raise ValueError(
                "correction_level geometric is not an importance weight: set correction to mask, or correction_level to token or sequence"
            )
        if on and self.proximal == "interpolated":
            raise ValueError(
                f"correction {self.correction} computes the learner's logprobs before the step anyway: set proximal to learner"
            )
        if self.weights_tokens and self.proximal == "sampler":
            raise ValueError(
                f"correction {self.correction} weights by learner / sampler, a factor that ratios against the sampler contain already: "
                "leave proximal out, or set it to learner"
            )

    @property
    def weights_tokens(self) -> bool:
        """Return whether the correction weights tokens."""
        return self.correction in ("truncate", "icepop")

    @property
    def against_learner(self) -> bool:
        """Return whether the ratios of the loss are taken against the learner's logprobs."""
        return self.proximal == "learner" or (self.proximal is None and self.weights_tokens)

    @property
    def active(self) -> bool:
        """Return whether the learner's logprobs before the step are needed."""
        return self.correction != "none" or self.against_learner
