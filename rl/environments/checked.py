"""What an environment gives where a Turn's fields stand, looked at before anything is made of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rl.environments.environment import Turn
from rl.environments.hosts import BY_SEAT
from rl.episodes import EpisodeFailed
from rl.jsonl import finite
from rl.plain import plain_text, says


class Checked:
    """An episode's part that reads a Turn: whatever is wrong with one costs this episode, and is
    named. `players`: by seat.
    """

    players: Sequence[str | None]

    def failed(self, what: str) -> EpisodeFailed:
        raise NotImplementedError

    def _checked(self, given: Any) -> Turn:
        if not isinstance(given, Turn):
            raise self.failed(
                f"answered with {plain_text(says_of(given), 200)}; a Turn is expected"
            )
        for name in ("metrics", "logs", *BY_SEAT):
            if not isinstance(found := getattr(given, name), Mapping):
                raise self.failed(
                    f"gave the {name} {plain_text(says_of(found), 100)}; names and what they stand for are expected"
                )
        given.done, given.truncated = (
            self._truth(given.done, "done"),
            self._truth(given.truncated, "truncated"),
        )
        given.reward = self._number(given.reward, "reward")
        given.metrics = self._numbers(given.metrics, "metric")
        given.logs = self._json(given.logs)
        given.rewards = {
            self._seat(k): self._number(v, f"reward of seat {k}") for k, v in given.rewards.items()
        }
        given.metrics_of = {
            self._seat(k): self._numbers(v, f"metric of seat {k},")
            for k, v in given.metrics_of.items()
        }
        given.logs_of = {self._seat(k): self._json(v) for k, v in given.logs_of.items()}
        return given

    def _number(self, given: Any, what: str) -> float:
        try:
            found = math.nan if isinstance(given, (str, bytes)) else float(given)
        except (
            Exception
        ):  # boundary: whatever the environment's object does when it is to be a number
            found = math.nan
        if not math.isfinite(found):
            raise self.failed(
                f"gave the {what} {plain_text(says_of(given), 100)}; a finite number is expected"
            )
        return found

    def _truth(self, given: Any, what: str) -> bool:
        """A reason given in words is one."""
        try:
            # as an array is that comes from a process
            if not isinstance(given, (list, tuple, Mapping)):
                return bool(given)
        except Exception:  # boundary: an array of several, say
            pass
        raise self.failed(
            f"gave for {what} {plain_text(says_of(given), 100)}; True or False is expected"
        )

    def _numbers(self, given: Any, what: str) -> dict[str, float]:
        if not isinstance(given, Mapping):
            raise self.failed(
                f"gave the {what} {plain_text(says_of(given), 100)}; numbers by their names are expected"
            )
        return {
            self._name(key, what): self._number(value, f"{what} {says_of(key)}")
            for key, value in given.items()
        }

    def _name(self, given: Any, what: str) -> str:
        try:
            return str(given)
        except Exception as error:  # boundary
            raise self.failed(
                f"gave the {what} a name that is no text: {plain_text(says_of(given), 100)}"
            ) from error

    def _json(self, given: Any) -> Any:
        try:
            return finite(dict(given))
        except Exception as error:  # boundary: whatever its objects do
            raise self.failed(f"gave logs that are no JSON: {says(error, 200)}") from error

    def _seat(self, given: Any) -> int:
        if not isinstance(given, int) or not 0 <= given < len(self.players):
            raise self.failed(
                f"gives something to the seat {plain_text(says_of(given), 100)}; there are {len(self.players)}, from 0"
            )
        return given


def says_of(given: Any) -> str:
    """repr(given), of an object that may refuse to say what it is."""
    try:
        return repr(given)
    except Exception:  # boundary: the environment's own object
        return f"an object of type {type(given).__name__}"
