"""The conversation that an episode's last answer ends, as a judge is shown it."""

from __future__ import annotations

from rl.episodes import Trajectory
from rl.types import Message


def conversation_of(trajectory: Trajectory) -> list[Message]:
    """Return every message before the last answer: what the policy was told, and its earlier answers.

    An environment that plays turns logs what it told before each answer (`told`); one of a single question logs `messages`. Of an
    environment that logs neither, the conversation is the last prompt's text.
    """
    logs = trajectory.transitions[-1].logs
    if "messages" in logs:
        return list(logs["messages"])
    if not all("told" in turn.logs for turn in trajectory.transitions):
        return [{"role": "user", "content": str(logs.get("prompt", ""))}]
    messages: list[Message] = []
    for turn in trajectory.transitions[:-1]:
        messages += [*turn.logs["told"], {"role": "assistant", "content": str(turn.logs.get("response", ""))}]
    return [*messages, *logs["told"]]
