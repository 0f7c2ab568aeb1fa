"""Validate the fields of a TurnResult that an environment returned, before they are used."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rl.envs.env_runner import PER_SEAT_FIELDS
from rl.envs.environment import TurnResult
from rl.jsonl import replace_nonfinite
from rl.rollout import EpisodeFailed
from rl.sanitize import describe_error, sanitize_text


class StepValidator:
    """Validate results for an episode: an invalid TurnResult fails this episode only, with an error
    that names the field. `players`: player of each seat.
    """

    players: Sequence[str | None]

    def make_error(self, problem: str) -> EpisodeFailed:
        """Return the error of this episode with `problem` as its message."""
        raise NotImplementedError

    def _validate_step_result(self, result: Any) -> TurnResult:
        """Return the TurnResult with all fields checked and converted. Raises EpisodeFailed if any
        field is invalid.
        """
        if not isinstance(result, TurnResult):
            raise self.make_error(
                f"answered with {sanitize_text(safe_repr(result), 200)}; a Turn is expected"
            )
        for name in ("metrics", "logs", *PER_SEAT_FIELDS):
            if not isinstance(mapping := getattr(result, name), Mapping):
                raise self.make_error(
                    f"gave the {name} {sanitize_text(safe_repr(mapping), 100)}; a mapping is "
                    "expected"
                )
        result.done = self._check_flag(result.done, "done")
        result.truncated = self._check_flag(result.truncated, "truncated")
        result.reward = self._check_number(result.reward, "reward")
        result.metrics = self._check_numbers(result.metrics, "metric")
        result.logs = self._check_json(result.logs)
        result.rewards = {
            self._check_seat(k): self._check_number(v, f"reward of seat {k}")
            for k, v in result.rewards.items()
        }
        result.metrics_of = {
            self._check_seat(k): self._check_numbers(v, f"metric of seat {k},")
            for k, v in result.metrics_of.items()
        }
        result.logs_of = {
            self._check_seat(k): self._check_json(v) for k, v in result.logs_of.items()
        }
        return result

    def _check_number(self, value: Any, field_name: str) -> float:
        """Return a finite float. Raises EpisodeFailed for any other value."""
        try:
            number = math.nan if isinstance(value, (str, bytes)) else float(value)
        except Exception:  # boundary: float() of an environment's object may raise anything
            number = math.nan
        if not math.isfinite(number):
            raise self.make_error(
                f"gave the {field_name} {sanitize_text(safe_repr(value), 100)}; a finite number "
                "is expected"
            )
        return number

    def _check_flag(self, value: Any, field_name: str) -> bool:
        """Return a flag as a bool. A non-empty text, such as a reason, counts as True."""
        try:
            # an array arrives as a list if the environment runs in another process
            if not isinstance(value, (list, tuple, Mapping)):
                return bool(value)
        except Exception:  # boundary: such as an array with several elements
            pass
        raise self.make_error(
            f"gave for {field_name} {sanitize_text(safe_repr(value), 100)}; True or False is "
            "expected"
        )

    def _check_numbers(self, value: Any, field_name: str) -> dict[str, float]:
        """Return a dict of finite floats by name. Raises EpisodeFailed for any other value."""
        if not isinstance(value, Mapping):
            raise self.make_error(
                f"gave the {field_name} {sanitize_text(safe_repr(value), 100)}; a mapping of names "
                "to numbers is expected"
            )
        return {
            self._check_name(key, field_name): self._check_number(
                value, f"{field_name} {safe_repr(key)}"
            )
            for key, value in value.items()
        }

    def _check_name(self, value: Any, field_name: str) -> str:
        """Return a metric's name as a str. Raises EpisodeFailed if it cannot be converted."""
        try:
            return str(value)
        except Exception as error:  # boundary
            raise self.make_error(
                f"gave the {field_name} a name that is not a text: "
                f"{sanitize_text(safe_repr(value), 100)}"
            ) from error

    def _check_json(self, value: Any) -> Any:
        """Return logs as a JSON-serializable dict. Raises EpisodeFailed if they cannot be
        serialized.
        """
        try:
            return replace_nonfinite(dict(value))
        except Exception as error:  # boundary: the environment's objects may raise anything
            raise self.make_error(
                f"gave logs that are not JSON: {describe_error(error, 200)}"
            ) from error

    def _check_seat(self, value: Any) -> int:
        """Return a seat index. Raises EpisodeFailed if it is out of range."""
        if not isinstance(value, int) or not 0 <= value < len(self.players):
            raise self.make_error(
                f"gives results for the seat {sanitize_text(safe_repr(value), 100)}; seats are "
                f"numbered from 0 and their count is {len(self.players)}"
            )
        return value


def safe_repr(value: Any) -> str:
    """Return repr(given), or a description of its type if repr raises."""
    try:
        return repr(value)
    except Exception:  # boundary: an object of the environment
        return f"an object of type {type(value).__name__}"
