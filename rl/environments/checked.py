"""Validate the fields of a Turn that an environment returned, before they are used."""

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
    """Validate Turns for an episode: an invalid Turn fails this episode only, with an error that
    names the field. `players`: player of each seat.
    """

    players: Sequence[str | None]

    def failed(self, what: str) -> EpisodeFailed:
        """Return the error of this episode with `what` as its message."""
        raise NotImplementedError

    def _checked(self, given: Any) -> Turn:
        """Return the Turn with all fields checked and converted. Raises EpisodeFailed if any field
        is invalid.
        """
        if not isinstance(given, Turn):
            raise self.failed(
                f"answered with {plain_text(says_of(given), 200)}; a Turn is expected"
            )
        for name in ("metrics", "logs", *BY_SEAT):
            if not isinstance(mapping := getattr(given, name), Mapping):
                raise self.failed(
                    f"gave the {name} {plain_text(says_of(mapping), 100)}; a mapping is expected"
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
        """Return a finite float. Raises EpisodeFailed for any other value."""
        try:
            number = math.nan if isinstance(given, (str, bytes)) else float(given)
        except Exception:  # boundary: float() of an environment's object may raise anything
            number = math.nan
        if not math.isfinite(number):
            raise self.failed(
                f"gave the {what} {plain_text(says_of(given), 100)}; a finite number is expected"
            )
        return number

    def _truth(self, given: Any, what: str) -> bool:
        """Return a flag as a bool. A non-empty text, such as a reason, counts as True."""
        try:
            # an array arrives as a list if the environment runs in another process
            if not isinstance(given, (list, tuple, Mapping)):
                return bool(given)
        except Exception:  # boundary: such as an array with several elements
            pass
        raise self.failed(
            f"gave for {what} {plain_text(says_of(given), 100)}; True or False is expected"
        )

    def _numbers(self, given: Any, what: str) -> dict[str, float]:
        """Return a dict of finite floats by name. Raises EpisodeFailed for any other value."""
        if not isinstance(given, Mapping):
            raise self.failed(
                f"gave the {what} {plain_text(says_of(given), 100)}; a mapping of names to numbers"
                " is expected"
            )
        return {
            self._name(key, what): self._number(value, f"{what} {says_of(key)}")
            for key, value in given.items()
        }

    def _name(self, given: Any, what: str) -> str:
        """Return a metric's name as a str. Raises EpisodeFailed if it cannot be converted."""
        try:
            return str(given)
        except Exception as error:  # boundary
            raise self.failed(
                f"gave the {what} a name that is not a text: {plain_text(says_of(given), 100)}"
            ) from error

    def _json(self, given: Any) -> Any:
        """Return logs as a JSON-serializable dict. Raises EpisodeFailed if they cannot be
        serialized.
        """
        try:
            return finite(dict(given))
        except Exception as error:  # boundary: the environment's objects may raise anything
            raise self.failed(f"gave logs that are not JSON: {says(error, 200)}") from error

    def _seat(self, given: Any) -> int:
        """Return a seat index. Raises EpisodeFailed if it is out of range."""
        if not isinstance(given, int) or not 0 <= given < len(self.players):
            raise self.failed(
                f"gives results for the seat {plain_text(says_of(given), 100)}; seats are numbered"
                f" from 0 and their count is {len(self.players)}"
            )
        return given


def says_of(given: Any) -> str:
    """Return repr(given), or a description of its type if repr raises."""
    try:
        return repr(given)
    except Exception:  # boundary: an object of the environment
        return f"an object of type {type(given).__name__}"
