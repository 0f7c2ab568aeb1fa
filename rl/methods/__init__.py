"""The methods by name: settings, a line of summary, and where the hooks are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rl.methods.grpo import GrpoSettings, PolicyGradient
from rl.methods.reinforce import ReinforceSettings
from rl.methods.sft import Sft, SftSettings


@dataclass(frozen=True)
class MethodSpec:
    """settings: the dataclass the command line reads. summary: one line. hooks: makes the method from its settings."""

    settings: type
    summary: str
    hooks: Callable[[Any], Any]


METHODS: dict[str, MethodSpec] = {
    "grpo": MethodSpec(GrpoSettings, "RL: a group of answers to each problem, each credited against its group", PolicyGradient),
    "reinforce": MethodSpec(ReinforceSettings, "RL: one answer to each problem, credited against a running mean", PolicyGradient),
    "sft": MethodSpec(SftSettings, "supervised fine-tuning on worked responses", Sft),
}
