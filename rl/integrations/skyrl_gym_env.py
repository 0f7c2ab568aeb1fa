"""Run the text environments of SkyRL-Gym, by their registered names or by their classes."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rl.config import nearest_name
from rl.envs import Environment, TurnResult
from rl.errors import UserError
from rl.integrations.optional_packages import import_package, parse_json_options, to_float
from rl.types import Message


class _EnvConfig(dict[str, Any]):
    """Hold settings that an environment reads as keys or as attributes, as of OmegaConf's
    DictConfig.
    """

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(
                f"the environment reads {name!r} of its config: set it in environment.config"
            )
        value = self[name]
        return _EnvConfig(value) if isinstance(value, dict) else value


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
    """The environment's env_config as JSON; search needs search_url, topk, timeout and
    log_requests, text2sql db_path.
    """

    def __post_init__(self) -> None:
        self.gym = import_package("skyrl_gym", "skyrl-gym")
        if self.imports:
            try:
                importlib.import_module(self.imports)
            except ModuleNotFoundError as error:
                raise UserError(
                    f"environment.imports {self.imports!r} cannot be imported ({error}): it "
                    "must be importable from the working directory (PYTHONPATH)"
                ) from error
        if self.env not in self.gym.registry:
            near = nearest_name(self.env, self.gym.registry)
            hint = (
                f"did you mean {near}?"
                if near
                else f"it has {', '.join(sorted(self.gym.registry))}"
            )
            raise UserError(f"skyrl_gym has no environment {self.env!r}: {hint}")
        parse_json_options(self.config, "config")

    def start(self) -> list[Message]:
        """Make the environment and return its first messages."""
        extras = {
            key: value for key, value in self.row.items() if key not in ("messages", "prompt")
        }
        if "reward_spec" not in extras and extras.get("answer") is not None:
            extras["reward_spec"] = {"method": "rule", "ground_truth": extras["answer"]}
        extras.setdefault("extra_info", {})
        prompt = [dict(message) for message in self.row.get("messages", ())]
        config = _EnvConfig(parse_json_options(self.config, "config"))
        self.wrapped_env = self.gym.make(self.env, env_config=config, extras=extras)
        observation, self.info = self.wrapped_env.init(prompt)
        return _to_messages(observation)

    def step(self, answer: Message) -> TurnResult:
        """Pass an answer to the environment and return its result."""
        output = self.wrapped_env.step(str(answer["content"]))
        done, logs = bool(output["done"]), output.get("metadata") or output.get("info") or {}
        metrics: dict[str, float] = {}
        if done and hasattr(self.wrapped_env, "get_metrics"):
            figures = {
                str(key): to_float(value)
                for key, value in (self.wrapped_env.get_metrics() or {}).items()
            }
            metrics = {key: value for key, value in figures.items() if value is not None}
        turn_logs = {"info": _to_json_value(logs)} if logs else {}
        return TurnResult(
            _to_messages(output["observations"]),
            float(output["reward"]),
            done,
            metrics=metrics,
            logs=turn_logs,
        )

    def close(self) -> None:
        """Close the environment, if it was made."""
        instance = getattr(self, "wrapped_env", None)
        if instance is not None:
            instance.close()


def _to_messages(observations: Any) -> list[Message]:
    """Convert observations to messages. Raises TypeError for any other value."""
    if isinstance(observations, str):
        return [{"role": "user", "content": observations}]
    if not isinstance(observations, Sequence) or not all(
        isinstance(message, Mapping) and "content" in message for message in observations
    ):
        raise TypeError(
            f"skyrl_gym gave the observations {observations!r:.100}; messages are expected"
        )
    return [
        {"role": str(message.get("role", "user")), "content": message["content"]}
        for message in observations
    ]


def _to_json_value(value: Any) -> Any:
    """Convert a value to JSON-serializable data."""
    if isinstance(value, Mapping):
        return {str(key): _to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json_value(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
