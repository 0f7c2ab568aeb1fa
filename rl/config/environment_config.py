"""Define the settings of environments. This module imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from rl.config.check_config import require
from rl.config.fields import check_ranges
from rl.config.number_range import Range, Seconds, Size


@dataclass(frozen=True, kw_only=True)
class EnvironmentSettings:
    """Hold the settings of multi-turn episodes: tools, conversations, games."""

    environment: str | None = None
    """Environment: a registered name (calculator, ...), module:Class or file.py:Class; None: each problem is a single question. --environment NAME --help shows its settings."""
    environment_settings: tuple[tuple[str, str], ...] = ()
    """Settings of the environment, written --environment.NAME VALUE; in a recipe environment is a mapping, {name: calculator, digits: 4}."""
    environment_rows: Size = 1000
    """Number of different episodes (seeds) of an environment without a data set; held-out evaluation uses eval_limit other seeds."""
    max_turns: Size = 16
    """Maximum number of answers in an episode; an episode that has not ended by then is truncated."""
    episode_tokens: Annotated[int | None, Range(1, 10**9)] = None
    """Maximum number of tokens in an episode, over all turns; the episode is truncated if the next answer of max_tokens could exceed it. Default: the model's context length."""
    environment_isolation: Literal["auto", "thread", "process"] = "auto"
    """Isolation of episodes. process: each episode runs in a separate process, so that a hang or crash costs only that episode. thread: episodes run in this process. auto: process for module:Class and file.py:Class."""
    episode_seconds: Seconds = 60.0
    """Seconds that the environment and its tools may take in an episode, without the time of sampling; a slower episode is dropped and named."""
    opponents: Size = 5
    """Number of older versions of the policy to keep as opponents, for environments with an opponent player (pool)."""
    opponents_every: Size = 20
    """Steps between additions of the current policy to the opponents; the first addition is before the first step."""
    opponents_by: Literal["elo", "age", "any"] = "elo"
    """Selection of the opponent of a batch. elo: prefer an opponent of about the policy's strength. age: prefer a newer version. any: choose uniformly."""
    players_temperature: Annotated[float, Range(0, 100)] = 0.0
    """Temperature of other models that play (a judge, an answerer, an opponent); older versions of the policy sample at the policy's temperature."""

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
        require(
            self, settings, self.environment is not None, "no environment is set", "set environment"
        )
