"""Run environments of OpenEnv, which are servers, through its generic client of dictionaries."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from rl.envs import Environment, TurnResult
from rl.errors import UserError
from rl.integrations.client_session import ClientSession
from rl.integrations.optional_packages import import_package, parse_json_options
from rl.rollout import await_value
from rl.types import Message


@dataclass
class OpenEnv(Environment):
    """Run an episode on an OpenEnv server: `reset` begins it with the episode's seed, and each
    answer is a `step`.
    """

    url: str = ""
    """URL of the server, such as http://localhost:8000."""
    action: str = "message"
    """Field of the action that holds the answer; json: the answer is the action, as a JSON object.
    """
    show: str = ""
    """Fields of the observation to show, separated by spaces; default: all text fields, else all as
    JSON.
    """
    begin: str = "Begin."
    """First message to the model if the first observation is empty."""
    config: str = "{}"
    """Further arguments of reset as JSON."""
    wait_seconds: float = 30.0
    """Time limit in seconds of a step on the server."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://", "ws://", "wss://")):
            raise UserError(
                f"an OpenEnv server has a URL such as http://localhost:8000, got {self.url!r}"
            )
        self.core = import_package("openenv.core.generic_client", "openenv")
        parse_json_options(self.config, "config")

    def start(self) -> str:
        """Reset the environment on the server and return its first observation."""
        # the client's own limits, by default 10 and 60 s, end no wait before `wait_seconds`
        later = self.wait_seconds + 1.0
        client = partial(
            self.core.GenericEnvClient,
            base_url=self.url,
            connect_timeout_s=later,
            message_timeout_s=later,
        )
        self.session = ClientSession(client, self.wait_seconds)
        arguments = {
            "seed": self.seed % 2**31,
            **parse_json_options(self.config, "config"),
        }
        # the client's methods are coroutines only in some versions
        result = self.session.call(lambda client: await_value(client.reset(**arguments)))
        return self._observation_text(result.observation) or self.begin

    def step(self, answer: Message) -> TurnResult:
        """Send an action and return the observation."""
        text = str(answer["content"])
        action: Any = {self.action: text}
        metrics = {}
        if self.action == "json":
            metrics, reason = {"malformed_action": 0.0}, ""
            try:
                action = json.loads(text)
            except (ValueError, RecursionError) as error:
                action, reason = None, f" ({error})"
            if not isinstance(action, dict):
                return TurnResult(
                    f"Error: an action is a JSON object{reason}", metrics={"malformed_action": 1.0}
                )
        result = self.session.call(lambda client: await_value(client.step(action)))
        text_shown, done = self._observation_text(result.observation), bool(result.done)
        return TurnResult(
            text_shown or "(nothing)",
            float(result.reward or 0.0),
            done,
            metrics=metrics,
            logs={"observation": result.observation} if done else {},
        )

    def _observation_text(self, observation: Any) -> str:
        """Return an observation as a text. Raises KeyError if a field of `show` is missing."""
        if not isinstance(observation, Mapping):
            return str(observation)
        names = self.show.split()
        if names:
            missing = [name for name in names if name not in observation]
            if missing:
                raise KeyError(
                    f"the observation has no {', '.join(missing)}; it has"
                    f" {', '.join(map(str, observation))}"
                )
            values = [observation[name] for name in names]
            return "\n".join(
                v if isinstance(v, str) else json.dumps(v, default=str) for v in values
            )
        texts = [v for v in observation.values() if isinstance(v, str) and v.strip()]
        if observation and not texts:
            return json.dumps(dict(observation), default=str)
        return "\n".join(texts)

    def close(self) -> None:
        """Close the connection, if it was opened."""
        session = getattr(self, "session", None)
        if session is not None:
            session.close()
