"""Run the text environments of SkyRL-Gym, by their registered names or by their classes."""

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
    """Run a SkyRL-Gym environment on the rows of a data set. The observations of its init and step
    become messages for the model.
    """

    needs_rows: ClassVar[bool] = True
    env: str = "gsm8k"
    """gsm8k, gsm8k_multi_turn, aime, lcb, search, text2sql, ..., or a name registered by your
    module.
    """
    imports: str = ""
    """A module that registers environments with skyrl_gym; it is imported first."""
    config: str = "{}"
    """The environment's env_config as JSON."""

    def __post_init__(self) -> None:
        self.gym = package("skyrl_gym", "skyrl-gym")
        if self.imports:
            package(self.imports, self.imports)
        if self.env not in self.gym.registry:
            near = nearest(self.env, self.gym.registry)
            hint = (
                f"did you mean {near}?"
                if near
                else f"it has {', '.join(sorted(self.gym.registry))}"
            )
            raise UserError(f"skyrl_gym has no environment {self.env!r}: {hint}")
        options(self.config, "config")

    def start(self) -> list[Message]:
        """Make the environment and return its first messages."""
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
        observation, self.info = self.made.init(prompt)
        return _messages(observation)

    def step(self, answer: Message) -> Turn:
        """Pass an answer to the environment and return its result."""
        output = self.made.step(str(answer["content"]))
        done, logs = bool(output["done"]), output.get("metadata") or output.get("info") or {}
        metrics: dict[str, float] = {}
        if done and hasattr(self.made, "get_metrics"):
            figures = {
                str(key): plain_number(value)
                for key, value in (self.made.get_metrics() or {}).items()
            }
            metrics = {key: value for key, value in figures.items() if value is not None}
        turn_logs = {"info": _plain(logs)} if logs else {}
        return Turn(
            _messages(output["observations"]),
            float(output["reward"]),
            done,
            metrics=metrics,
            logs=turn_logs,
        )

    def close(self) -> None:
        """Close the environment, if it was made."""
        instance = getattr(self, "made", None)
        if instance is not None:
            instance.close()


def _messages(found: Any) -> list[Message]:
    """Convert observations to messages. Raises TypeError for any other value."""
    if isinstance(found, str):
        return [{"role": "user", "content": found}]
    if not isinstance(found, Sequence) or not all(
        isinstance(message, Mapping) and "content" in message for message in found
    ):
        raise TypeError(f"skyrl_gym gave the observations {found!r:.100}; messages are expected")
    return [
        {"role": str(message.get("role", "user")), "content": message["content"]}
        for message in found
    ]


def _plain(value: Any) -> Any:
    """Convert a value to JSON-serializable data."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
