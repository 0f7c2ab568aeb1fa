"""Run test texts in a process that holds the expected values and no code of the program.

Names of the program are references that query the candidate and return plain data. Values are
therefore compared in this process, by Python's built-in types.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from rl.sandbox.inside import isolation, message_framing, reply_parser, seccomp, value_codec
from rl.sandbox.inside.value_display import show

_MODULES = ("math", "cmath", "re", "collections", "itertools", "functools", "random", "datetime", "string", "copy", "heapq", "decimal",
            "fractions", "statistics", "operator", "typing", "json", "sys")  # fmt: skip


class CandidateError(Exception):
    """Represent an exception of the candidate that derives from no known built-in exception."""


class CandidateClient:
    """Hold the tester's end of the connection to the candidate's server. Messages are parsed by
    `replies`; no other content of a message has an effect here.

    `end(by, why)`: called if the candidate breaks the protocol ("forged", "output") or ends ("");
    does not return. It bypasses exceptions, since a test may catch the exceptions that the program
    raises.
    """

    def __init__(
        self, requests: int, replies: int, longest: int, end: Callable[[str, str], NoReturn]
    ):
        self.requests, self.replies, self.longest, self.end = (
            requests,
            replies,
            longest,
            end,
        )
        self.count = itertools.count(1)
        self.functions: dict[str, Callable[..., Any]] = {}
        self.exceptions: dict[str, type[BaseException]] = {}

    def request(
        self, verb: str, of: int | None = None, arguments: tuple[Any, ...] = (), **more: Any
    ) -> Any:
        number = next(self.count)
        named = {
            key: value_codec.encode(item, self.refer) for key, item in more.pop("named", {}).items()
        }
        sent = [value_codec.encode(item, self.refer) for item in arguments]
        self._send({"id": number, "do": verb, "of": of, "arguments": sent, "named": named, **more})
        while "call" in (message := self._receive()):
            self._call_back(message)
        with self._end_if_forged():
            answer = reply_parser.read_answer(
                message, number, len(arguments) if verb == "call" else None
            )
            if isinstance(answer, reply_parser.ErrorReply):
                error = self.exception(answer.name, answer.family)
            else:
                changed = [
                    value_codec.decode(item, self.referent) for item in answer.arguments or []
                ]
                value = value_codec.decode(answer.value, self.referent)
        if isinstance(answer, reply_parser.ErrorReply):
            raise _build_exception(error, answer.text[:300])
        if answer.arguments is not None:
            for item, source in zip(arguments, changed, strict=True):
                value_codec.assign(item, source)
        return value

    def read_loaded(self) -> tuple[str, str] | None:
        """Read the server's first message. Return the reason that the program failed to load, None
        if it loaded.
        """
        with self._end_if_forged():
            return reply_parser.read_loaded(self._receive())

    @contextlib.contextmanager
    def _end_if_forged(self) -> Iterator[None]:
        try:
            yield
        except reply_parser.ForgedMessageError as error:
            self.end("forged", str(error))

    def _receive(self) -> dict[str, Any]:
        try:
            return reply_parser.parse(message_framing.receive_bytes(self.replies, self.longest))
        except reply_parser.ForgedMessageError as error:
            self.end("forged", str(error))
        except message_framing.TooLong as error:
            self.end("output", str(error))
        except message_framing.ConnectionClosedError:
            self.end("", "the candidate ended")

    def _send(self, message: dict[str, Any]) -> None:
        try:
            message_framing.send(self.requests, message)
        except message_framing.ConnectionClosedError:
            self.end("", "the candidate ended")

    def _call_back(self, message: dict[str, Any]) -> None:
        with self._end_if_forged():
            name, encoded = reply_parser.read_callback(message)
            if name not in self.functions:
                raise reply_parser.ForgedMessageError("a call of a function that no test passed")
            arguments = [value_codec.decode(item, self.referent) for item in encoded]
        try:
            reply = {"returned": value_codec.encode(self.functions[name](*arguments), self.refer)}
        except Exception as error:
            reply = {"raised": f"{type(error).__name__}: {_format_exception(error)}"}
        self._send(reply)

    def refer(self, value: Any) -> list[Any]:
        if type(value) is RemoteObject:
            return [object.__getattribute__(value, "_number")]
        if callable(value):
            name = f"f{len(self.functions)}"
            self.functions[name] = value
            return [name]
        raise value_codec.NotPlain(
            f"a {type(value).__name__} of a test cannot be passed to the program"
        )

    def referent(self, rest: list[Any]) -> Any:
        number, kind, name, family, _ = value_codec.read_reference(rest)
        return (
            self.exception(name, family)
            if kind == "class" and family
            else RemoteObject(self, number, name)
        )

    def exception(self, name: str, family: list[str]) -> type[BaseException]:
        """Return the built-in exception of that name, or a new exception class that derives from
        the first built-in exception of its family.
        """
        known = _builtin_exception(name)
        if known is not None:
            return known
        if name not in self.exceptions:
            base = next(
                (of for of in map(_builtin_exception, family) if of is not None), CandidateError
            )
            called = name if name.isidentifier() else "CandidateError"
            self.exceptions[name] = type(
                called, (base,), {"__init__": lambda self, *text: Exception.__init__(self, *text)}
            )
        return self.exceptions[name]


def _builtin_exception(name: str) -> type[Exception] | None:
    known = getattr(builtins, name, None)
    is_known = (
        isinstance(known, type)
        and issubclass(known, Exception)
        and not issubclass(known, BaseExceptionGroup)
    )
    return known if is_known else None


def _build_exception(of: type[BaseException], text: str) -> BaseException:
    """Build an exception of this class with this text, whatever arguments its constructor takes
    (UnicodeDecodeError: five).
    """
    try:
        return of(text)
    except TypeError:
        error = of.__new__(of)
        error.args = (text,)
        return error


class RemoteObject:
    """Refer to an object of the candidate. Operations return plain data. A reference never equals
    plain data, regardless of the object's __eq__.
    """

    __slots__ = ("_link", "_number", "_name")

    def __init__(self, link: CandidateClient, number: int, name: str):
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_name", name)

    def _ask(self, verb: str, *arguments: Any, **named: Any) -> Any:
        link: CandidateClient = object.__getattribute__(self, "_link")
        return link.request(verb, object.__getattribute__(self, "_number"), arguments, named=named)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return RemoteObject._ask(self, "call", *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return RemoteObject._ask(self, "attribute", name)

    def __setattr__(self, name: str, value: Any) -> None:
        RemoteObject._ask(self, "set", name, value)

    def __delattr__(self, name: str) -> None:
        RemoteObject._ask(self, "delete", name)

    def __getitem__(self, key: Any) -> Any:
        return RemoteObject._ask(self, "item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        RemoteObject._ask(self, "put", key, value)

    def __delitem__(self, key: Any) -> None:
        RemoteObject._ask(self, "remove", key)

    def __len__(self) -> int:
        return int(RemoteObject._ask(self, "length"))

    def __iter__(self) -> Iterator[Any]:
        inner = RemoteObject._ask(self, "iterate")
        while True:
            try:
                yield RemoteObject._ask(inner, "next")
            except StopIteration:
                return

    def __next__(self) -> Any:
        return RemoteObject._ask(self, "next")

    def __str__(self) -> str:
        return str(RemoteObject._ask(self, "text"))

    def __repr__(self) -> str:
        return str(RemoteObject._ask(self, "repr"))

    def __bool__(self) -> bool:
        return bool(RemoteObject._ask(self, "truth"))

    def __eq__(self, other: object) -> bool:
        return type(other) is RemoteObject and bool(RemoteObject._ask(self, "same", other))

    def __ne__(self, other: object) -> bool:
        return not RemoteObject.__eq__(self, other)

    def __lt__(self, other: object) -> bool:
        if type(other) is not RemoteObject:
            return NotImplemented
        return bool(RemoteObject._ask(self, "less", other))

    def __contains__(self, item: Any) -> bool:
        return bool(RemoteObject._ask(self, "contains", item))

    def __hash__(self) -> int:
        return hash(object.__getattribute__(self, "_number"))

    def __instancecheck__(self, instance: Any) -> bool:
        return type(instance) is RemoteObject and bool(RemoteObject._ask(instance, "is a", self))

    def __enter__(self) -> Any:
        return RemoteObject._ask(self, "attribute", "__enter__")()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        return RemoteObject._ask(self, "attribute", "__exit__")(None, None, None)


class TestNamespace(dict[str, Any]):
    """Hold a test's global names. Lookup order: the test's names, `entries` of the candidate,
    built-ins, modules that tests use, other names of the candidate.
    """

    def __init__(self, link: CandidateClient, entries: list[str]):
        super().__init__()
        self.link, self.entries = link, set(entries)
        self["__builtins__"] = builtins
        self["__name__"] = "tests"

    def __missing__(self, name: str) -> Any:
        if name not in self.entries:
            if hasattr(builtins, name):
                return getattr(builtins, name)
            if name in _MODULES:
                return importlib.import_module(name)
        try:
            value = self.link.request("find", name=name)
        except NameError:
            raise KeyError(name) from None
        self[name] = value
        return value


def serve(
    message: dict[str, Any], requests: int, answers: int, verdicts: int, up: set[str], limits: dict[str, Any],
    run: Callable[[dict[str, Any], CandidateClient, int], None] | None = None,
) -> None:  # fmt: skip
    """Run the tests from `message["from"]` on, or call `run`; send a verdict for each test. `run`
    may write files. Never returns.
    """

    def end(by: str, reason: str) -> NoReturn:
        """Exit at once, without an exception that a test could catch. The running test gets no
        verdict.
        """
        if by:
            message_framing.send(verdicts, {"by": by, "why": reason})
        os._exit(0)

    try:
        for target in (0, 1, 2):
            os.dup2(os.open("/dev/null", os.O_RDWR), target)
        isolation.die_with_parent()
        if "limits" in up:
            files = limits["file_mb"] if run is not None else 0
            isolation.set_limits(
                {**limits, "file_mb": files, "memory_mb": limits["memory_mb"] + 256}
            )
        if "capabilities" in up:
            isolation.drop_capabilities()
        if "seccomp" in up:
            seccomp.install(isolation.libc)
        (run or run_asserts)(
            message,
            CandidateClient(requests, answers, int(limits["output_kb"]) << 10, end),
            verdicts,
        )
    finally:
        os._exit(0)


def run_asserts(message: dict[str, Any], link: CandidateClient, verdicts: int) -> None:
    def say(ok: bool, reason: str) -> None:
        message_framing.send(verdicts, {"ok": ok, "why": reason})

    tests, first = message["tests"], message["from"]
    failed = link.read_loaded()
    space = TestNamespace(link, message["entries"])
    if not failed:
        try:
            exec(compile(message["setup"], "<setup>", "exec"), space)
            for name in message["owned"]:
                space.pop(name, None)
        except Exception as error:
            failed = (
                "error",
                f"the tests' setup: {type(error).__name__}: {_format_exception(error)}",
            )
    for text in tests[first:]:
        ok, reason = (
            (False, f"{failed[0]}: {failed[1]}")
            if failed
            else _run_test(text, space, message["entries"])
        )
        say(ok, reason)
        if not ok and message["early_stop"]:
            break
    message_framing.send(verdicts, {"done": True})


def _run_test(text: str, space: TestNamespace, entries: list[str]) -> tuple[bool, str]:
    try:
        exec(compile(text, "<test>", "exec"), space)
        if _only_defines_check(text):
            space["check"](space[entries[0]])
        return True, "ok"
    except AssertionError as error:
        message = _format_exception(error)
        return False, f"wrong: {text.strip()[:200]}{f' ({message[:200]})' if message else ''}"
    except Exception as error:
        return False, f"error: {type(error).__name__}: {_format_exception(error)}"


def _format_exception(error: BaseException) -> str:
    """Return the text of an exception.

    The argument may be an int too long to print, or an object of the program, which may raise as
    well.
    """
    try:
        return str(error)[:300]
    except Exception:
        return (
            show(error.args[0], 300)
            if len(error.args) == 1 and type(error.args[0]) is not RemoteObject
            else "the message cannot be printed"
        )


def _only_defines_check(text: str) -> bool:
    """Return whether a text has HumanEval's form: it defines a function `check(candidate)` and does
    not call it.
    """
    body = ast.parse(text).body
    defines = any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in body)
    return defines and not any(
        isinstance(n, ast.Expr) and isinstance(n.value, ast.Call) for n in body
    )
