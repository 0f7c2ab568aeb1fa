"""The section of settings that says what answers the policy over several turns, and its words on
the line. No torch here.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from rl.settings.checks import only_with
from rl.settings.fields import Given
from rl.settings.ranges import Range, Seconds, Size, check_ranges

PREFIX = "environment."


@dataclass(frozen=True, kw_only=True)
class EnvironmentSettings:
    """Episodes of several turns: tools, conversations, games."""

    environment: str | None = None
    """What answers the model: a registered name (calculator, ...), module:Class or file.py:Class; None: each problem is one question. --environment NAME --help shows its settings."""
    environment_settings: tuple[tuple[str, str], ...] = ()
    """Its settings, written --environment.NAME VALUE; in a recipe environment is a mapping, {name: calculator, digits: 4}."""
    environment_rows: Size = 1000
    """Different episodes of an environment that is not of a data set: so many seeds; held out are eval_limit others."""
    max_turns: Size = 16
    """Answers in an episode; one that has not ended by then is truncated."""
    episode_tokens: Annotated[int | None, Range(1, 10**9)] = None
    """Tokens of an episode, all turns together; where the next answer of max_tokens could exceed them it is truncated. By default the model's context."""
    environment_isolation: Literal["auto", "thread", "process"] = "auto"
    """Where episodes run. process: each in a process of its own, so that what hangs or dies there costs that episode; thread: in this one. auto: process for module:Class and file.py:Class."""
    episode_seconds: Seconds = 60.0
    """Seconds that the environment and its tools may take in an episode, sampling not counted; a longer one is left out and named."""
    opponents: Size = 5
    """Older versions of the policy that are kept to play against, where an environment gives one a seat (pool)."""
    opponents_every: Size = 20
    """Steps after which the policy joins its older versions; before the first step it does so too."""
    opponents_by: Literal["elo", "age", "any"] = "elo"
    """Which of them a batch plays against. elo: likelier one about as strong as the policy; age: likelier a newer one; any: all alike."""
    players_temperature: Annotated[float, Range(0, 100)] = 0.0
    """Temperature of other models that have a seat (a judge, an answerer, an opponent); older versions draw at the policy's."""

    def __post_init__(self) -> None:
        check_ranges(self)
        settings: tuple[str, ...] = (
            "environment_settings",
            "environment_rows",
            "environment_isolation",
            "max_turns",
            "episode_tokens",
        )
        settings += (
            "episode_seconds",
            "opponents",
            "opponents_every",
            "opponents_by",
            "players_temperature",
        )
        only_with(
            self, settings, self.environment is not None, "no environment is named", "give environment"
        )


def folded(given: Mapping[str, Given]) -> dict[str, Given]:
    """`given` with its "environment.x" as one `environment_settings`, and `environment: {name:
    ...}` of a recipe as these.
    """
    remaining = {key: value for key, value in given.items() if not key.startswith(PREFIX)}
    environment_settings = {
        key.removeprefix(PREFIX): value for key, value in given.items() if key.startswith(PREFIX)
    }
    if environment_settings:
        words = [
            word
            for key, value in environment_settings.items()
            for word in (key, shlex.join(value.words or ("True",)))
        ]
        before = remaining["environment_settings"].words if "environment_settings" in remaining else ()
        remaining["environment_settings"] = Given(
            (*before, *words), ", ".join(value.place for value in environment_settings.values())
        )
    return remaining
