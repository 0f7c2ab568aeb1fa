"""Implement the checks that several settings classes share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from rl.errors import UnusedSettingError


def require(settings: Any, names: Sequence[str], condition: bool, reason: str, remedy: str) -> None:
    """Raise UnusedSettingError if a setting in `names` is not at its default although it has no
    effect.

    The settings have an effect if the condition holds, and nothing is checked then. The reason, and
    the remedy besides leaving the setting out, become parts of the error message.
    """
    for item in fields(settings):
        value = getattr(settings, item.name)
        if not condition and item.name in names and value != item.default:
            shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
            raise UnusedSettingError(
                item.name,
                f"{item.name} {shown} has no effect: {reason}; {remedy}, or leave {item.name} out",
            )


def reject_sampling_settings(settings: Any, reason: str) -> None:
    """Raise UnusedSettingError if settings of a method without training samples use rewards of
    training samples. The reason becomes part of the error message.
    """
    require(
        settings.sampling,
        ("dynamic_sampling",),
        False,
        reason,
        "set it for a method that samples, such as grpo",
    )
    if settings.data.curriculum == "success":
        raise UnusedSettingError(
            "curriculum",
            f"curriculum success depends on the success rate of training answers, and {reason}: "
            "set curriculum to steps, with curriculum_steps",
        )


def check_substeps(settings: Any) -> None:
    """Raise ValueError if batch_size is not a multiple of `num_substeps`."""
    if settings.loop.batch_size % settings.optim.num_substeps:
        raise ValueError(
            f"batch_size {settings.loop.batch_size} is not a multiple of num_substeps "
            f"{settings.optim.num_substeps}"
        )


def check_comparison_groups(settings: Any, group_size: int) -> None:
    """Raise ValueError if comparison_model is set and `group_size` is 1, so that no answers can be
    compared.
    """
    if settings.learned.comparison_model is not None and group_size == 1:
        raise ValueError(
            "comparison_model compares the answers of a group with each other: set group_size to 2 "
            "or more"
        )
