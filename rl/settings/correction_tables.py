"""The section of methods' settings about tokens that other weights drew. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from rl.settings.checks import only_with
from rl.settings.ranges import Range, check_ranges


@dataclass(frozen=True, kw_only=True)
class CorrectionSettings:
    """Tokens drawn by other weights, or by a sampler of another precision: how much they count, and
    what ratios are taken against.
    """

    correction: Literal["none", "truncate", "icepop", "mask"] = "none"
    """By the ratio of learner to sampler before the step. truncate: weigh by it, held within the bounds (TIS, Yao et al. 2025). icepop: weigh by it within the bounds, by 0 outside (arXiv 2510.18855). mask: leave out what lies outside and weigh nothing (Liu, Li et al. 2025, "When speed kills stability"). One more forward."""
    correction_level: Literal["token", "sequence", "geometric"] = "token"
    """The ratio of each token; of its whole answer (their product); or the answer's geometric mean (GSPO's, arXiv 2507.18071), by which answers can be left out, not weighed."""
    correction_low: Annotated[float, Range(0, 1, why="a ratio, such as 0.5")] = 0.0
    """Ratios below this are outside, such as 0.5 for tokens, 0.99 for geometric means."""
    correction_high: Annotated[float, Range(1, 1e6, why="a ratio, such as 2")] = 2.0
    """Ratios above this are outside, such as 2 for tokens, 1.01 for geometric means."""
    proximal: Literal["sampler", "learner", "interpolated"] | None = None
    """What the loss takes its ratios against, and clips around: the sampler's logprobs, or the learner's before the step (decoupled PPO, arXiv 2110.00641; AReaL, 2505.24298); interpolated: that, approximated between the sampler's and the learner's as it is by the token's age, without a forward (AReaL's log-linear approximation). By default the learner's where tokens are weighed, interpolated under max_steps_off_policy with the loss ppo and no correction (docs/corrections.md), else the sampler's."""

    def __post_init__(self) -> None:
        check_ranges(self)
        on = self.correction != "none"
        why, remedy = "correction is none", "set correction to truncate, icepop or mask"
        only_with(self, ("correction_level", "correction_low", "correction_high"), on, why, remedy)
        if self.weighs and self.correction_level == "geometric":
            raise ValueError(
                "correction_level geometric is no importance weight: set correction to mask, or correction_level to token or sequence"
            )
        if on and self.proximal == "interpolated":
            raise ValueError(
                f"correction {self.correction} takes the learner's logprobs before the step anyway: set proximal to learner"
            )
        if self.weighs and self.proximal == "sampler":
            raise ValueError(
                f"correction {self.correction} weighs by learner / sampler, which ratios against the sampler hold already: "
                "leave proximal out, or set it to learner"
            )

    @property
    def weighs(self) -> bool:
        return self.correction in ("truncate", "icepop")

    @property
    def against_learner(self) -> bool:
        return self.proximal == "learner" or (self.proximal is None and self.weighs)

    @property
    def active(self) -> bool:
        """Whether the learner's logprobs before the step are needed."""
        return self.correction != "none" or self.against_learner
