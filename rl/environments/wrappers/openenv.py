"""OpenEnv: environments behind a server, over its generic client, which speaks dictionaries."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl.environments.environment import Environment, Turn
from rl.environments.wrappers.packages import options, package
from rl.environments.wrappers.sessions import Session
from rl.errors import UserError
from rl.types import Message


@dataclass
class OpenEnv(Environment):
    """An episode on a server of OpenEnv: `reset` begins it with this episode's seed, each answer is
    a `step`.
    """

    url: str = ""
    """Of the server: http://localhost:8000."""
    action: str = "message"
    """The field of the action that holds the answer; with json the answer itself is the action, as a JSON object."""
    show: str = ""
    """Fields of the observation that the model is shown, with spaces between; by default all that hold text, else the whole as JSON."""
    begin: str = "Begin."
    """What the model is told where the first observation says nothing."""
    config: str = "{}"
    """More arguments of reset as JSON."""
    wait_seconds: float = 30.0
    """Seconds that the server may take for one step."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://", "ws://", "wss://")):
            raise UserError(
                f"an OpenEnv server has a URL such as http://localhost:8000, got {self.url!r}"
            )
        self.core = package("openenv.core.generic_client", "openenv")
        options(self.config, "config")

    def start(self) -> str:
        self.session = Session(
            lambda: self.core.GenericEnvClient(base_url=self.url), self.wait_seconds
        )
        given = {"seed": self.seed % 2**31, **options(self.config, "config")}
        came = self.session.call(lambda client: _maybe(client.reset(**given)))
        return self._text(came.observation) or self.begin

    def step(self, answer: Message) -> Turn:
        text = str(answer["content"])
        action: Any = {self.action: text}
        if self.action == "json":
            try:
                action = json.loads(text)
            except ValueError as error:
                return Turn(
                    f"Error: an action is a JSON object ({error})",
                    metrics={"malformed_action": 1.0},
                )
            if not isinstance(action, dict):
                return Turn("Error: an action is a JSON object", metrics={"malformed_action": 1.0})
        came = self.session.call(lambda client: _maybe(client.step(action)))
        shown, done = self._text(came.observation), bool(came.done)
        return Turn(
            shown or "(nothing)",
            float(came.reward or 0.0),
            done,
            logs={"observation": came.observation} if done else {},
        )

    def _text(self, observation: Any) -> str:
        if not isinstance(observation, Mapping):
            return str(observation)
        names = self.show.split()
        if names:
            missing = [name for name in names if name not in observation]
            if missing:
                raise KeyError(
                    f"the observation has no {', '.join(missing)}; it has {', '.join(map(str, observation))}"
                )
            return "\n".join(_shown(observation[name]) for name in names)
        texts = [
            value for value in observation.values() if isinstance(value, str) and value.strip()
        ]
        return (
            "\n".join(texts)
            if texts
            else (json.dumps(dict(observation), default=str) if observation else "")
        )

    def close(self) -> None:
        session = getattr(self, "session", None)
        if session is not None:
            session.close()


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


async def _maybe(found: Any) -> Any:
    """Awaited where it is to be: the client's methods are coroutines in some versions only."""
    return await found if inspect.isawaitable(found) else found
