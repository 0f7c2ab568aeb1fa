"""Define tools: plain functions that a model may call. The calls of an answer run concurrently,
each within its limits.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rl.envs.tool_schema import make_tool_schema
from rl.errors import UserError
from rl.processes import ForkedCall
from rl.rollout import EnvCall, EnvThread, EpisodeFailed, await_value
from rl.sanitize import describe_error, sanitize_text
from rl.types import Message

DEFAULT_SECONDS = 10.0  # default time limit of a call
# Default length of a result in the prompt. Of a longer result the beginning and the end are shown.
DEFAULT_CHARACTERS = 4000
MAX_CALLS = 16  # of an answer
_JSON_BYTES = 12  # of a character, at most
_OTHER_CHARACTERS = 1000  # at most, of an error or of the note in a shortened result


@dataclass(frozen=True)
class Tool:
    """Hold a function and the schema that describes it to the model. `seconds`: time limit of a
    call. `characters`: length of a result that is shown to the model.
    """

    function: Callable[..., Any]
    seconds: float = DEFAULT_SECONDS
    characters: int = DEFAULT_CHARACTERS
    name: str = ""
    schema: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        schema = dict(self.schema or make_tool_schema(self.function))
        name = self.name or schema["function"]["name"]
        schema["function"] = {**schema["function"], "name": name}  # the name that the model reads
        object.__setattr__(self, "schema", schema)
        object.__setattr__(self, "name", name)


def tool(
    function: Callable[..., Any] | None = None,
    *,
    seconds: float = DEFAULT_SECONDS,
    characters: int = DEFAULT_CHARACTERS,
) -> Any:
    """Return a function as a `Tool`, or a decorator that makes a Tool: @tool, @tool(seconds=2).

    The function's type hints and docstring (a summary, and "Args:" with a line for each argument)
    describe it to the model. `seconds`: time limit of a call. `characters`: maximum length of a
    result in the prompt; of a longer result the beginning and the end are shown.
    """
    if function is None:
        return lambda f: Tool(f, seconds, characters)
    return Tool(function, seconds, characters)


def index_tools(values: Iterable[Any]) -> dict[str, Tool]:
    """Return Tools and functions as tools by their names. Raises UserError for two of the same
    name, and for any other value.
    """
    if not isinstance(values, Iterable):
        raise UserError(f"tools is a tuple of functions, such as (search,), got {values!r}")
    tools: dict[str, Tool] = {}
    for value in values:
        if not (isinstance(value, Tool) or callable(value)):
            raise UserError(f"a tool is a function, got {value!r}")
        item = value if isinstance(value, Tool) else Tool(value)
        if item.name in tools:
            raise UserError(
                f"two tools are named {item.name!r}, and a model calls a tool by its name: define "
                "a function with a name of its own for each"
            )
        tools[item.name] = item
    return tools


@dataclass(slots=True)
class ToolCall:
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


def run_calls(answer: Message, tools: Mapping[str, Tool], *, forks: bool = False) -> list[ToolCall]:
    """Run the calls of an answer concurrently, and return them in their order. Malformed calls
    carry the reason as their error.

    Each call has a thread, which is abandoned if it exceeds its time limit. `forks`: a plain
    function runs in a separate process, which is killed at the time limit and may crash. A method
    and an inner function with captured variables may change the episode's objects: they run in the
    thread. Calls beyond `MAX_CALLS` in an answer are not run.
    """
    calls = [
        ToolCall(call["function"]["name"], call["function"]["arguments"])
        for call in answer.get("tool_calls") or ()
    ]
    for call in calls[MAX_CALLS:]:
        call.error, call.malformed = f"at most {MAX_CALLS} calls are run for each answer", True
    running = [(call, _start_call(call, tools, forks)) for call in calls[:MAX_CALLS]]
    for call, started in running:
        if started is not None:
            _collect_result(call, started)
    for bad in answer.get("unparsed_tool_calls") or ():
        raw_text, why = sanitize_text(bad["raw_text"], 200), bad["error"]
        why = why if why.startswith("was ") else f"is not a valid call: {why}"
        calls.append(ToolCall("", {}, error=f"the call {raw_text} {why}", malformed=True))
    return calls


def _start_call(call: ToolCall, tools: Mapping[str, Tool], forks: bool) -> EnvCall | None:
    """Start a call in a thread. Return None, and set the call's error, if it cannot be run."""
    requested = tools.get(call.name)
    if requested is None:
        from rl.config import nearest_name

        near = nearest_name(call.name, tools)
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
    run = partial(_run_tool, requested, call.arguments)
    limit = _JSON_BYTES * (requested.characters + _OTHER_CHARACTERS)
    process: ForkedCall | None = None

    def run_forked() -> tuple[str, str]:
        nonlocal process
        try:
            process = ForkedCall(lambda: json.dumps(run()).encode(), limit)
            answer, error = json.loads(process.wait())
        except (OSError, ValueError, TypeError):
            return "", f"{call.name} died"
        return str(answer), str(error)

    def run_timed() -> tuple[str, str, float]:
        begin = time.monotonic()
        result = run_forked() if forks and not _may_change_objects(requested.function) else run()
        return *result, time.monotonic() - begin

    def kill() -> None:
        if process is not None:
            process.kill()

    thread = EnvThread(requested.seconds, f"tool {requested.name}", kill)
    running = thread.submit(run_timed)
    thread.finish()
    return running


def _may_change_objects(function: Callable[..., Any]) -> bool:
    """Return whether a call may change the episode, which a separate process would undo."""
    if not inspect.isfunction(function):
        return True
    # a decorated function of a module has captured variables too, but none of the episode
    return function.__closure__ is not None and "<locals>" in function.__qualname__


def _run_tool(tool: Tool, arguments: Mapping[str, Any]) -> tuple[str, str]:
    """Run the function in this thread and return (answer, error)."""
    try:
        result = tool.function(**arguments)
        if inspect.isawaitable(result):
            result = asyncio.run(await_value(result))
        return _result_to_text(result, tool.characters), ""
    except BaseException as error:  # boundary: the user's function, SystemExit included
        return "", describe_error(error, 500) or "it failed"


def _collect_result(call: ToolCall, running: EnvCall) -> None:
    """Wait for the call until its time limit, and store the result or an error in `call`."""
    try:
        call.answer, error, call.seconds = running.result()
        call.error = error or None
    except EpisodeFailed:
        call.error = f"{call.name} took longer than {running.seconds:g} s"
        call.seconds = time.monotonic() - running.start_time


def _result_to_text(result: Any, characters: int) -> str:
    """Return a tool's result as the text that the model reads: a text unchanged, any other value as
    JSON.
    """
    if not isinstance(result, str):
        try:
            result = json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            result = str(result)
    return sanitize_text(result, characters)
