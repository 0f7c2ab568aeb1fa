"""Validate what an environment returned before it is used."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rl.envs.env_runner import MAX_CHARACTERS, PER_SEAT_FIELDS, count_characters
from rl.envs.environment import TurnResult
from rl.jsonl import replace_nonfinite
from rl.sanitize import describe_error, sanitize_text
from rl.types import Message


class InvalidResult(Exception):
    """Report an invalid result of an environment. The message names the field; it fails this
    episode only.
    """


def validate_turn(result: Any, num_seats: int) -> TurnResult:
    """Return the TurnResult with all fields checked and converted. Raises InvalidResult if a field
    is invalid.
    """
    if not isinstance(result, TurnResult):
        raise InvalidResult(f"answered with {describe_value(result, 200)}; expected a TurnResult")
    for name in ("metrics", "logs", *PER_SEAT_FIELDS):
        if not isinstance(mapping := getattr(result, name), Mapping):
            raise InvalidResult(f"gave the {name} {describe_value(mapping)}; a mapping is expected")
    result.done = _check_flag(result.done, "done")
    result.truncated = _check_flag(result.truncated, "truncated")
    result.reward = _check_number(result.reward, "reward")
    result.metrics = _check_numbers(result.metrics, "metric")
    result.logs = _check_json(result.logs)
    for name in PER_SEAT_FIELDS:
        for seat in getattr(result, name):
            if not is_seat(seat, num_seats):
                raise InvalidResult(
                    f"gives results for the seat {describe_value(seat)}; seats are numbered from 0 "
                    f"and their count is {num_seats}"
                )
    result.rewards = {k: _check_number(v, f"reward of seat {k}") for k, v in result.rewards.items()}
    result.metrics_of = {
        k: _check_numbers(v, f"metric of seat {k},") for k, v in result.metrics_of.items()
    }
    result.logs_of = {k: _check_json(v) for k, v in result.logs_of.items()}
    return result


def validate_messages(messages: Any) -> list[Message]:
    """Return messages as a list. Raises InvalidResult if they are invalid or too long."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, Sequence) or not all(
        isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in messages
    ):
        raise InvalidResult(
            f"gave {describe_value(messages, 200)}, which is neither a text nor a list of messages"
        )
    size = count_characters(messages)
    if size > MAX_CHARACTERS:
        raise InvalidResult(
            f"gave {size} characters in a turn; at most {MAX_CHARACTERS} are allowed"
        )
    return [dict(message) for message in messages]


def _check_number(value: Any, field_name: str) -> float:
    """Return a finite float. Raises InvalidResult for any other value."""
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except Exception:  # boundary: float() of an environment's object may raise anything
        number = math.nan
    if not math.isfinite(number):
        raise InvalidResult(
            f"gave the {field_name} {describe_value(value)}; a finite number is expected"
        )
    return number


def _check_flag(value: Any, field_name: str) -> bool:
    """Return a flag as a bool. A non-empty text, such as a reason, counts as True."""
    try:
        # an array arrives as a list if the environment runs in another process
        if not isinstance(value, (list, tuple, Mapping)):
            return bool(value)
    except Exception:  # boundary: such as an array with several elements
        pass
    raise InvalidResult(f"gave for {field_name} {describe_value(value)}; True or False is expected")


def _check_numbers(value: Any, field_name: str) -> dict[str, float]:
    """Return a dict of finite floats by name. Raises InvalidResult for any other value."""
    if not isinstance(value, Mapping):
        raise InvalidResult(
            f"gave the {field_name} {describe_value(value)}; a mapping of names to numbers is "
            "expected"
        )
    numbers = {}
    for key, number in value.items():
        try:
            name = str(key)
        except Exception as error:  # boundary
            raise InvalidResult(
                f"gave the {field_name} a name that is not a text: {describe_value(key)}"
            ) from error
        numbers[name] = _check_number(number, f"{field_name} {_safe_repr(key)}")
    return numbers


def _check_json(value: Any) -> Any:
    """Return logs as a dict of JSON values. Raises InvalidResult if they cannot be serialized."""
    try:
        logs = replace_nonfinite(dict(value))
        json.dumps(logs)  # raises for an integer with more digits than Python prints
        return logs
    except Exception as error:  # boundary: the environment's objects may raise anything
        raise InvalidResult(f"gave logs that are not JSON: {describe_error(error, 200)}") from error


def is_seat(value: Any, num_seats: int) -> bool:
    """Return whether a value is the index of a seat."""
    return isinstance(value, int) and 0 <= value < num_seats


def describe_value(value: Any, limit: int = 100) -> str:
    """Return the repr of an environment's object for a message, of at most `limit` characters."""
    return sanitize_text(_safe_repr(value), limit)


def _safe_repr(value: Any) -> str:
    """Return repr(value), or a description of its type if repr raises."""
    try:
        return repr(value)
    except Exception:  # boundary: an object of the environment
        return f"an object of type {type(value).__name__}"
