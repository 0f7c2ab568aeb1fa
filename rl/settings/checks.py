"""Checks that settings classes share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from rl.errors import UnusedSetting


def only_with(settings: Any, names: Sequence[str], used: bool, why: str, instead: str) -> None:
    """Raises UnusedSetting where one of `names` differs from its default although it is not `used`:
    what is given has an effect.

    `why` it has none, and what to do `instead` of leaving it out, as the error says them.
    """
    for item in fields(settings):
        value = getattr(settings, item.name)
        if not used and item.name in names and value != item.default:
            shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
            raise UnusedSetting(
                item.name,
                f"{item.name} {shown} has no effect: {why}; {instead}, or leave {item.name} out",
            )


def without_samples(settings: Any, why: str) -> None:
    """Raises UnusedSetting for what looks at the rewards of training samples, in the settings of a
    method without (`why`).
    """
    only_with(
        settings.sampling,
        ("dynamic_sampling",),
        False,
        why,
        "set it for a method that samples, such as grpo",
    )
    if settings.data.curriculum == "success":
        raise UnusedSetting(
            "curriculum",
            f"curriculum success goes by how often training answers succeed, and {why}: set curriculum to steps, with curriculum_steps",
        )


def check_substeps(settings: Any) -> None:
    """ValueError where a batch cannot be cut into `num_substeps` parts of one size."""
    if settings.loop.batch_size % settings.optim.num_substeps:
        raise ValueError(
            f"batch_size {settings.loop.batch_size} is no multiple of num_substeps {settings.optim.num_substeps}"
        )


def check_compared(settings: Any, group_size: int) -> None:
    """ValueError where a model is to compare the answers of a group, and a group has one."""
    if settings.learned.comparison_model is not None and group_size == 1:
        raise ValueError(
            "comparison_model compares the answers of a group with each other: set group_size to 2 or more"
        )
