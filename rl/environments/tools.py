"""Tools: plain functions that a model may call. Their calls are run side by side, each within its
limits, and answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rl.environments.schema import schema_of
from rl.errors import UserError
from rl.plain import plain_text, says
from rl.types import Message

SECONDS = 10.0  # that a call may take, unless the tool says otherwise
CHARACTERS = 4000  # of an answer that the model is shown: of longer ones the beginning and the end


@dataclass(frozen=True)
class Tool:
    """A function with what the model is told of it. `seconds`: that a call may take. `characters`:
    of an answer that are shown.
    """

    function: Callable[..., Any]
    seconds: float = SECONDS
    characters: int = CHARACTERS
    name: str = ""
    schema: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        schema = self.schema or schema_of(self.function)
        object.__setattr__(self, "schema", schema)
        object.__setattr__(self, "name", self.name or schema["function"]["name"])


def tool(
    function: Callable[..., Any] | None = None,
    *,
    seconds: float = SECONDS,
    characters: int = CHARACTERS,
) -> Any:
    """A function as a `Tool`, or a decorator that makes it one: @tool, @tool(seconds=2).

    Its type hints and docstring (a summary, and "Args:" with a line for each argument) are what the
    model is told.
    """
    if function is None:
        return lambda f: Tool(f, seconds, characters)
    return Tool(function, seconds, characters)


def as_tool(given: Any) -> Tool:
    """A Tool as it is; a function made one."""
    if isinstance(given, Tool):
        return given
    if not callable(given):
        raise UserError(f"a tool is a function, got {given!r}")
    return Tool(given)


@dataclass(slots=True)
class Call:
    """A call that a model made, and what came of it. `error`: why it was not answered. `malformed`:
    it was none that could be run.
    """

    name: str
    arguments: Mapping[str, Any]
    answer: str = ""
    error: str | None = None
    malformed: bool = False
    seconds: float = 0.0

    @property
    def message(self) -> Message:
        """What the model is told."""
        return {
            "role": "tool",
            "name": self.name,
            "content": self.answer if self.error is None else f"Error: {self.error}",
        }

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "name": self.name,
            "arguments": dict(self.arguments),
            "seconds": round(self.seconds, 4),
        }
        return (
            {**found, "answer": self.answer}
            if self.error is None
            else {**found, "error": self.error, "malformed": self.malformed}
        )


def run_calls(
    answer: Message, tools: Mapping[str, Tool], most: int = 16, *, forks: bool = False
) -> list[Call]:
    """The calls of an answer, run side by side, in the order that they were made in; those that are
    none say why.

    Each has a thread: one that hangs is abandoned when its time is over. `forks`: plain functions
    (not methods, which may change what they belong to) have a process, which is killed then, and
    may die. More than `most` calls in an answer are not run.
    """
    calls = [
        Call(call["function"]["name"], call["function"]["arguments"])
        for call in answer.get("tool_calls") or ()
    ]
    for call in calls[most:]:
        call.error, call.malformed = f"at most {most} calls are answered at once", True
    running = [(call, _begin(call, tools, forks)) for call in calls[:most]]
    for call, thread in running:
        if thread is not None:
            thread.settle(call)
    for bad in answer.get("unparsed_tool_calls") or ():
        calls.append(
            Call(
                "",
                {},
                error=f"the call {plain_text(bad['raw_text'], 200)} {_readable(bad['error'])}",
                malformed=True,
            )
        )
    return calls


def _readable(error: str) -> str:
    return error if error.startswith("was ") else f"is no call: {error}"


def _begin(call: Call, tools: Mapping[str, Tool], forks: bool) -> _Running | None:
    """Starts a call in a thread; None where there is nothing to run, and the call then says why."""
    found = tools.get(call.name)
    if found is None:
        from rl.settings import nearest

        near = nearest(call.name, tools)
        call.error = f"there is no tool {call.name!r}" + (
            f", did you mean {near!r}?" if near else f": there are {', '.join(tools)}"
        )
        call.malformed = True
        return None
    try:
        inspect.signature(found.function).bind(**call.arguments)
    except TypeError as error:
        call.error, call.malformed = f"{call.name}: {error}", True
        return None
    return _Running(found, call.arguments, forks and inspect.isfunction(found.function))


class _Running:
    """A call under way in a thread of its own, which is abandoned where it does not end; or in a
    process, which is killed.
    """

    def __init__(self, made: Tool, arguments: Mapping[str, Any], forks: bool):
        self.tool, self.arguments, self.forks = made, arguments, forks
        self.pid: int | None = None
        self.begun = time.monotonic()
        self.answer, self.error, self.ended = "", "", self.begun
        self._done = threading.Event()
        threading.Thread(target=self._run, name=f"tool {made.name}", daemon=True).start()

    def _run(self) -> None:
        self.answer, self.error = self._in_process() if self.forks else self._here()
        self.ended = time.monotonic()
        self._done.set()

    def _here(self) -> tuple[str, str]:
        """(answer, error)."""
        try:
            found = self.tool.function(**self.arguments)
            if inspect.isawaitable(found):
                found = asyncio.run(_awaited(found))
            return _as_text(found, self.tool.characters), ""
        except BaseException as error:  # boundary: the user's function, SystemExit included
            return "", says(error, 500) or "it failed"

    def _in_process(self) -> tuple[str, str]:
        reads, writes = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                payload = json.dumps(self._here()).encode("utf-8", "backslashreplace")
                with open(writes, "wb") as file:
                    file.write(payload)
            finally:
                os._exit(0)
        os.close(writes)
        with open(reads, "rb") as file:
            payload = file.read(1 << 20)
        os.waitpid(self.pid, 0)
        try:
            answer, error = json.loads(payload)
        except (ValueError, TypeError):
            return "", f"{self.tool.name} died"
        return str(answer), str(error)

    def settle(self, call: Call) -> None:
        """Waits for the end of the call, or of its time."""
        if self._done.wait(max(0.0, self.begun + self.tool.seconds - time.monotonic())):
            call.answer, call.error, call.seconds = (
                self.answer,
                self.error or None,
                self.ended - self.begun,
            )
        else:
            call.error, call.seconds = (
                f"{call.name} took longer than {self.tool.seconds:g} s",
                time.monotonic() - self.begun,
            )
            if self.pid:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)


async def _awaited(found: Any) -> Any:
    return await found


def _as_text(found: Any, characters: int) -> str:
    """What a tool returned, as the text that a model reads: texts as they are, everything else as
    JSON.
    """
    if not isinstance(found, str):
        try:
            found = json.dumps(found, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            found = str(found)
    return plain_text(found, characters)
