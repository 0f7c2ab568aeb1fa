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
import operator
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from rl.sandbox.inside import isolation, message_framing, reply_parser, seccomp, value_codec
from rl.sandbox.inside.message_framing import JsonObject
from rl.sandbox.inside.value_display import show

TEST_MODULES = ("math", "cmath", "re", "collections", "itertools", "functools", "random", "datetime", "string", "copy", "heapq", "decimal",
            "fractions", "statistics", "operator", "typing", "json", "sys")  # fmt: skip


class CandidateError(Exception):
    """Represent an exception of the candidate that derives from no known built-in exception."""


@dataclass(eq=False)
class CandidateClient:
    """Hold the tester's end of the connection to the candidate's server. Messages are parsed by
    `reply_parser`; no other content of a message has an effect here.

    `end(by, why)`: called if the candidate breaks the protocol ("forged", "output") or ends ("");
    does not return. It bypasses exceptions, since a test may catch the exceptions that the program
    raises.
    """

    requests: int
    replies: int
    longest: int
    end: Callable[[str, str], NoReturn]

    def __post_init__(self) -> None:
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
        message = {"id": number, "do": verb, "of": of, "arguments": sent, "named": named, **more}
        with self._end_if_broken():
            message_framing.send(self.requests, message)
            while "call" in (message := self._receive()):
                self._call_back(message)
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
            raise _build_exception(error, answer.text.removeprefix(f"{answer.name}: ")[:300])
        if answer.arguments is not None:
            for item, source in zip(arguments, changed, strict=True):
                value_codec.assign(item, source)
        return value

    def read_loaded(self) -> tuple[str, str] | None:
        """Read the server's first message. Return the reason that the program failed to load, None
        if it loaded.
        """
        with self._end_if_broken():
            return reply_parser.read_loaded(self._receive())

    @contextlib.contextmanager
    def _end_if_broken(self) -> Iterator[None]:
        try:
            yield
        except reply_parser.ForgedMessageError as error:
            self.end("forged", str(error))
        except message_framing.TooLong as error:
            self.end("output", str(error))
        except message_framing.ConnectionClosedError:
            self.end("", "the candidate ended")

    def _receive(self) -> JsonObject:
        return reply_parser.parse(message_framing.receive_bytes(self.replies, self.longest))

    def _call_back(self, message: JsonObject) -> None:
        """Answer a call of a function of the tests. The function may send requests too."""
        name, encoded = reply_parser.read_callback(message)
        if name not in self.functions:
            raise reply_parser.ForgedMessageError("a call of a function that no test passed")
        arguments = [value_codec.decode(item, self.referent) for item in encoded]
        try:
            reply = {"returned": value_codec.encode(self.functions[name](*arguments), self.refer)}
        except Exception as error:
            reply = {"raised": f"{type(error).__name__}: {_format_exception(error)}"}
        message_framing.send(self.requests, reply)

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
            else RemoteObject(self, number)
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
    (UnicodeDecodeError: five). The text of a KeyError is the repr of its key.
    """
    if issubclass(of, KeyError):
        with contextlib.suppress(TypeError, ValueError, SyntaxError, MemoryError, RecursionError):
            return of(ast.literal_eval(text))
    try:
        return of(text)
    except TypeError:
        error = of.__new__(of)
        error.args = (text,)
        return error


def _forward(verb: str, convert: Callable[[Any], Any] = lambda result: result) -> Any:
    """Return a method that requests an operation of the candidate and converts its result."""

    def request(self: RemoteObject, *arguments: Any, **named: Any) -> Any:
        link: CandidateClient = object.__getattribute__(self, "_link")
        number = object.__getattribute__(self, "_number")
        return convert(link.request(verb, number, arguments, named=named))

    return request


# Not methods: a test may use attributes of the program's objects by any name.
_get_contents = _forward("contents")
_iterate = _forward("iterate")
_is_same = _forward("eq", bool)
_is_instance = _forward("is a", bool)


def _combine(
    verb: str,
    convert: Callable[[Any], Any] = lambda result: result,
    of_contents: Callable[[Any, Any], Any] | None = None,
) -> Any:
    """Return a method that requests an operation on two objects of the candidate. A candidate that
    received the other operand (an expected value) could make their difference 0. So the operation
    of a container and plain data is computed here, from its contents.
    """

    def request(self: RemoteObject, other: object) -> Any:
        if type(other) is RemoteObject:
            return _forward(verb, convert)(self, other)
        if of_contents is None or type(contents := _get_contents(self)) is RemoteObject:
            return NotImplemented
        return of_contents(contents, other)

    return request


def _get_item(self: RemoteObject, key: Any) -> Any:
    """Return an item of an object, or a slice of the contents of a container."""
    if isinstance(key, slice) and type(contents := _get_contents(self)) is not RemoteObject:
        return contents[key]
    return _forward("getitem")(self, key)


class RemoteObject:
    """Refer to an object of the candidate. Operations return plain data. Only a container equals
    plain data, by the contents that it is encoded as, regardless of the object's __eq__.
    """

    __slots__ = ("_link", "_number")

    def __init__(self, link: CandidateClient, number: int):
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)

    __call__ = _forward("call")
    __getattr__ = _forward("attribute")
    __setattr__ = _forward("set")
    __delattr__ = _forward("delete")
    __getitem__ = _get_item
    __setitem__ = _forward("setitem")
    __delitem__ = _forward("delitem")
    __len__ = _forward("length", int)
    __next__ = _forward("next")
    __str__ = _forward("text", str)
    __repr__ = _forward("repr", str)
    __bool__ = _forward("truth", bool)
    __contains__ = _forward("contains", bool)

    def __iter__(self) -> Iterator[Any]:
        inner = _iterate(self)
        while True:
            try:
                yield RemoteObject.__next__(inner)
            except StopIteration:
                return

    def __eq__(self, other: object) -> bool:
        if type(other) is RemoteObject:
            return _is_same(self, other)
        contents = _get_contents(self)
        return type(contents) is not RemoteObject and bool(contents == other)

    def __ne__(self, other: object) -> bool:
        return not RemoteObject.__eq__(self, other)

    __lt__, __le__ = _combine("lt", bool, operator.lt), _combine("le", bool, operator.le)
    __gt__, __ge__ = _combine("gt", bool, operator.gt), _combine("ge", bool, operator.ge)
    __add__ = _combine("add", of_contents=operator.add)
    __radd__ = _combine("add", of_contents=lambda contents, other: other + contents)
    __sub__, __mul__ = _combine("sub", of_contents=operator.sub), _combine("mul")
    __truediv__, __floordiv__ = _combine("truediv"), _combine("floordiv")
    __mod__, __pow__, __matmul__ = _combine("mod"), _combine("pow"), _combine("matmul")
    __and__ = _combine("and", of_contents=operator.and_)
    __or__ = _combine("or", of_contents=operator.or_)
    __xor__ = _combine("xor", of_contents=operator.xor)
    __neg__, __abs__, __invert__ = _forward("neg"), _forward("abs"), _forward("invert")
    __hash__ = _forward("hash", int)

    def __instancecheck__(self, instance: Any) -> bool:
        return type(instance) is RemoteObject and _is_instance(instance, self)

    def __enter__(self) -> Any:
        return RemoteObject.__getattr__(self, "__enter__")()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        return RemoteObject.__getattr__(self, "__exit__")(None, None, None)


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
            if name in TEST_MODULES:
                return importlib.import_module(name)
        try:
            value = self.link.request("find", name=name)
        except NameError:
            raise KeyError(name) from None
        self[name] = value
        return value


def send_verdict(verdicts: int, ok: bool, reason: str) -> None:
    message_framing.send(verdicts, {"ok": ok, "why": reason})


def serve(
    message: JsonObject, requests: int, answers: int, verdicts: int, layers: set[str], limits: JsonObject,
    run: Callable[[JsonObject, CandidateClient, int], None],
) -> None:  # fmt: skip
    """Call `run`, which sends a verdict for each test; tests of files may write files. Never
    returns.
    """

    def end(by: str, reason: str) -> NoReturn:
        """Exit at once, without an exception that a test could catch. The running test gets no
        verdict.
        """
        if by:
            message_framing.send(verdicts, {"ended_by": by, "why": reason})
        os._exit(0)

    try:
        for target in (0, 1, 2):
            os.dup2(os.open("/dev/null", os.O_RDWR), target)
        isolation.die_with_parent()
        if "limits" in layers:
            file_mb = limits["file_mb"] if "files" in message else 0
            memory_mb = limits["memory_mb"] + 256
            tester_limits = {"file_mb": file_mb, "memory_mb": memory_mb, "cpu_s": limits["total_s"]}
            isolation.set_limits({**limits, **tester_limits})
        if "capabilities" in layers:
            isolation.drop_capabilities()
        if "seccomp" in layers:
            seccomp.install()
        longest = int(limits["output_kb"]) << 10
        run(message, CandidateClient(requests, answers, longest, end), verdicts)
        message_framing.send(verdicts, {"done": True})
    finally:
        os._exit(0)


def run_asserts(message: JsonObject, link: CandidateClient, verdicts: int) -> None:
    """Run the tests from `message["from"]` on; send a verdict for each."""
    failed = link.read_loaded()
    space = TestNamespace(link, message["entries"])
    if not failed:
        try:
            exec(compile(message["setup"], "<setup>", "exec"), space)
            for name in message["program_names"]:
                space.pop(name, None)
        except Exception as error:
            text = f"{type(error).__name__}: {_format_exception(error)}"
            failed = "error", f"the tests' setup: {text}"
    for text in message["tests"][message["from"] :]:
        ok, reason = (
            (False, f"{failed[0]}: {failed[1]}")
            if failed
            else _run_test(text, space, message["entries"])
        )
        send_verdict(verdicts, ok, reason)
        if not ok and message["early_stop"]:
            break


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
