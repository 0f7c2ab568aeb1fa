"""SkyRL-Gym: its text environments, by the names that it registers them under, or by their classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rl.environments.environment import Environment, Turn
from rl.environments.wrappers.packages import options, package, plain_number
from rl.errors import UserError
from rl.settings import nearest
from rl.types import Message


@dataclass
class SkyRLGym(Environment):
    """One of its environments, on the rows of a data set: what init and step return as observations
    is said to the model.
    """

    needs_rows: ClassVar[bool] = True
    env: str = "gsm8k"
    """gsm8k, gsm8k_multi_turn, aime, lcb, search, text2sql, ..., or what your module registered."""
    imports: str = ""
    """A module that registers environments with skyrl_gym, imported first."""
    config: str = "{}"
    """Its env_config as JSON."""

    def __post_init__(self) -> None:
        self.gym = package("skyrl_gym", "skyrl-gym")
        if self.imports:
            package(self.imports, self.imports)
        if self.env not in self.gym.registry:
            near = nearest(self.env, self.gym.registry)
            hint = (
                f"did you mean {near}?"
                if near
                else f"there are {', '.join(sorted(self.gym.registry))}"
            )
            raise UserError(f"skyrl_gym has no environment {self.env!r}: {hint}")
        options(self.config, "config")

    def start(self) -> list[Message]:
        extras = {
            key: value for key, value in self.row.items() if key not in ("messages", "prompt")
        }
        if "reward_spec" not in extras and extras.get("answer") is not None:
            extras["reward_spec"] = {"method": "rule", "ground_truth": extras["answer"]}
        extras.setdefault("extra_info", {})
        prompt = [dict(message) for message in self.row.get("messages", ())]
        self.made = self.gym.make(
            self.env, env_config=options(self.config, "config"), extras=extras
        )
        found, self.info = self.made.init(prompt)
        return _messages(found)

    def step(self, answer: Message) -> Turn:
        came = self.made.step(str(answer["content"]))
        done, logs = bool(came["done"]), came.get("metadata") or came.get("info") or {}
        metrics: dict[str, float] = {}
        if done and hasattr(self.made, "get_metrics"):
            figures = {
                str(key): plain_number(value)
                for key, value in (self.made.get_metrics() or {}).items()
            }
            metrics = {key: value for key, value in figures.items() if value is not None}
        noted = {"info": _plain(logs)} if logs else {}
        return Turn(
            _messages(came["observations"]),
            float(came["reward"]),
            done,
            metrics=metrics,
            logs=noted,
        )

    def close(self) -> None:
        made = getattr(self, "made", None)
        if made is not None:
            made.close()


def _messages(found: Any) -> list[Message]:
    if isinstance(found, str):
        return [{"role": "user", "content": found}]
    if not isinstance(found, Sequence) or not all(
        isinstance(one, Mapping) and "content" in one for one in found
    ):
        raise TypeError(f"skyrl_gym gave the observations {found!r:.100}; messages are expected")
    return [{"role": str(one.get("role", "user")), "content": one["content"]} for one in found]


def _plain(value: Any) -> Any:
    """As JSON can hold it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
