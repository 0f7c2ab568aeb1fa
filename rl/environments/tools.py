"""Define tools: plain functions that a model may call. The calls of an answer run concurrently,
each within its limits.
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

SECONDS = 10.0  # default time limit of a call
# Default length of a result in the prompt. Of a longer result the beginning and the end are shown.
CHARACTERS = 4000


@dataclass(frozen=True)
class Tool:
    """Hold a function and the schema that describes it to the model. `seconds`: time limit of a
    call. `characters`: length of a result that is shown to the model.
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
    """Return a function as a `Tool`, or a decorator that makes a Tool: @tool, @tool(seconds=2).

    The function's type hints and docstring (a summary, and "Args:" with a line for each argument)
    describe it to the model. `seconds`: time limit of a call. `characters`: maximum length of a
    result in the prompt; of a longer result the beginning and the end are shown.
    """
    if function is None:
        return lambda f: Tool(f, seconds, characters)
    return Tool(function, seconds, characters)


def as_tool(given: Any) -> Tool:
    """Return a Tool unchanged, and a function as a Tool. Raises UserError for any other value."""
    if isinstance(given, Tool):
        return given
    if not callable(given):
        raise UserError(f"a tool is a function, got {given!r}")
    return Tool(given)


@dataclass(slots=True)
class Call:
    """Hold a call made by a model, and its result. `error`: reason why it has no result.
    `malformed`: the call could not be run at all.
    """

    name: str
    arguments: Mapping[str, Any]
    answer: str = ""
    error: str | None = None
    malformed: bool = False
    seconds: float = 0.0

    @property
    def message(self) -> Message:
        """Return the result as the message that the model receives."""
        return {
            "role": "tool",
            "name": self.name,
            "content": self.answer if self.error is None else f"Error: {self.error}",
        }

    def as_json(self) -> dict[str, Any]:
        """Return the call as JSON-serializable data for logs."""
        fields: dict[str, Any] = {
            "name": self.name,
            "arguments": dict(self.arguments),
            "seconds": round(self.seconds, 4),
        }
        return (
            {**fields, "answer": self.answer}
            if self.error is None
            else {**fields, "error": self.error, "malformed": self.malformed}
        )


def run_calls(
    answer: Message, tools: Mapping[str, Tool], most: int = 16, *, forks: bool = False
) -> list[Call]:
    """Run the calls of an answer concurrently, and return them in their order. Malformed calls
    carry the reason as their error.

    Each call has a thread, which is abandoned if it exceeds its time limit. `forks`: a plain
    function (not a method, which may change its object) runs in a separate process, which is killed
    at the time limit and may crash. Calls beyond `most` in an answer are not run.
    """
    calls = [
        Call(call["function"]["name"], call["function"]["arguments"])
        for call in answer.get("tool_calls") or ()
    ]
    for call in calls[most:]:
        call.error, call.malformed = f"at most {most} calls are run for each answer", True
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
    """Return a parser's error as the end of a sentence about the call."""
    return error if error.startswith("was ") else f"is not a valid call: {error}"


def _begin(call: Call, tools: Mapping[str, Tool], forks: bool) -> _Running | None:
    """Start a call in a thread. Return None, and set the call's error, if it cannot be run."""
    requested = tools.get(call.name)
    if requested is None:
        from rl.settings import nearest

        near = nearest(call.name, tools)
        call.error = f"no tool is named {call.name!r}" + (
            f", did you mean {near!r}?" if near else f": the tools are {', '.join(tools)}"
        )
        call.malformed = True
        return None
    try:
        inspect.signature(requested.function).bind(**call.arguments)
    except TypeError as error:
        call.error, call.malformed = f"{call.name}: {error}", True
        return None
    return _Running(requested, call.arguments, forks and inspect.isfunction(requested.function))


class _Running:
    """Run a call in a separate thread, which is abandoned if it does not end, or in a process,
    which is killed.
    """

    def __init__(self, made: Tool, arguments: Mapping[str, Any], forks: bool):
        self.tool, self.arguments, self.forks = made, arguments, forks
        self.pid: int | None = None
        self.begun = time.monotonic()
        self.answer, self.error, self.ended = "", "", self.begun
        self._done = threading.Event()
        threading.Thread(target=self._run, name=f"tool {made.name}", daemon=True).start()

    def _run(self) -> None:
        """Run the call and store its result."""
        self.answer, self.error = self._in_process() if self.forks else self._here()
        self.ended = time.monotonic()
        self._done.set()

    def _here(self) -> tuple[str, str]:
        """Run the function in this thread and return (answer, error)."""
        try:
            result = self.tool.function(**self.arguments)
            if inspect.isawaitable(result):
                result = asyncio.run(_awaited(result))
            return _as_text(result, self.tool.characters), ""
        except BaseException as error:  # boundary: the user's function, SystemExit included
            return "", says(error, 500) or "it failed"

    def _in_process(self) -> tuple[str, str]:
        """Run the function in a forked process and return (answer, error)."""
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
        """Wait for the call until its time limit, and store the result or an error in `call`."""
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
    """Await any awaitable, as the coroutine that an event loop requires."""
    return await found


def _as_text(found: Any, characters: int) -> str:
    """Return a tool's result as the text that the model reads: a text unchanged, any other value as
    JSON.
    """
    if not isinstance(found, str):
        try:
            found = json.dumps(found, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            found = str(found)
    return plain_text(found, characters)
