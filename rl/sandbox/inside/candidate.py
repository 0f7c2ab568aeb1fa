"""Run the program.

The program may read all memory of this process, and each message is an unverified claim: values,
never a verdict.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import io
import linecache
import operator
import os
import site
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any

from rl.sandbox.inside import message_framing, value_codec
from rl.sandbox.inside.message_framing import JsonObject

FILE = "main.py"
_BYTE_ORDER_MARK = "\ufeff"  # ignored by Python at the beginning of a file
_LOAD_FAILED, _EXITED = "load", "exit"


def fresh_streams() -> None:
    """Open streams for the descriptors 0, 1 and 2 with the settings of a new interpreter."""
    source = io.BufferedReader(io.FileIO(0, closefd=False))
    streams = {
        "stdin": io.TextIOWrapper(source, encoding="utf-8", errors="surrogateescape"),
        "stdout": _writer(1, "surrogateescape"),
        "stderr": _writer(2, "backslashreplace", line_buffering=True),
    }
    for name, stream in streams.items():
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _writer(descriptor: int, errors: str, line_buffering: bool = False) -> io.TextIOWrapper:
    raw = io.BufferedWriter(io.FileIO(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors=errors, line_buffering=line_buffering)


def replace_main_module(name: str, source: str) -> types.ModuleType:
    """Return an empty module `name` that replaces this project's modules in the interpreter."""
    for key in list(sys.modules):
        if key in ("__main__", "rl") or key.startswith("rl."):
            del sys.modules[key]
    sys.path.insert(0, os.getcwd())
    sys.argv = [FILE]
    sys.set_int_max_str_digits(0)
    site.setquit()  # exit() and quit(): meant for interactive use, but programs call them
    site.sethelper()
    module = types.ModuleType(name)
    module.__file__ = os.path.join(os.getcwd(), FILE)
    module.__dict__["__builtins__"] = builtins
    # doctest and multiprocessing look up these modules
    sys.modules[name] = sys.modules["__main__"] = module
    linecache.cache[module.__file__] = (len(source), None, source.splitlines(True), module.__file__)
    return module


def run_script(source: str) -> int:
    """Run a program as `python main.py` does. Return its exit code."""
    source = source.removeprefix(_BYTE_ORDER_MARK)
    space = replace_main_module("__main__", source).__dict__
    code = 0
    try:
        _execute(source, space)
    except SystemExit as exit:
        code = _exit_code(exit)
    except BaseException:
        code = 1
        _print_traceback()
    return shut_down(code)


def _execute(source: str, space: JsonObject) -> None:
    exec(compile(source, space["__file__"], "exec", dont_inherit=True), space)


def shut_down(code: int) -> int:
    """Run the shutdown steps of an interpreter. Return the exit code."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
        atexit._run_exitfuncs()
        if sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.flush()
    except BaseException:
        code = code or 1
        _print_traceback()
    return code


def _exit_code(exit: SystemExit) -> int:
    if exit.code is None or isinstance(exit.code, int):
        return (exit.code or 0) & 0xFF
    print(exit.code, file=sys.stderr)
    return 1


def _print_traceback() -> None:
    """Print the current exception, without the frames of this file that called the program."""
    kind, error, trace = sys.exc_info()
    here = _print_traceback.__code__.co_filename
    while trace is not None and trace.tb_frame.f_code.co_filename == here:
        trace = trace.tb_next
    try:
        traceback.print_exception(kind, error, trace)
        sys.stderr.flush()
    except BaseException:
        pass


class Server:
    """Serve requests on the objects of a program: calls, attributes, items, iteration. References
    are indices into its table of objects.
    """

    def __init__(self, source: str, requests: int, replies: int):
        self.source = source.removeprefix(_BYTE_ORDER_MARK)
        self.requests, self.replies = requests, replies
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.space: JsonObject = {}

    def serve(self) -> int:
        """Load the program, report the outcome, and serve requests until the other end closes."""
        failed = self._load()
        message_framing.send(self.replies, {"failed": failed} if failed else {"loaded": True})
        try:
            while not failed:
                message_framing.send(
                    self.replies, self._answer(message_framing.receive(self.requests))
                )
        except message_framing.ConnectionClosedError:
            pass
        return 0

    def _load(self) -> list[str] | None:
        self.space = replace_main_module("solution", self.source).__dict__
        try:
            _execute(self.source, self.space)
        except SystemExit:
            return [_EXITED, "the program exited while it was loaded"]
        except BaseException as error:
            return [_LOAD_FAILED, _describe(error)]
        return None

    def _answer(self, request: JsonObject) -> JsonObject:
        try:
            result, arguments = self._do(request)
            value = (
                ["ref", *self.refer(result)]
                if self._is_construction(request) and value_codec.adds_names(type(result))
                else value_codec.encode(result, self.refer)
            )
            reply = {"id": request.get("id"), "value": value}
            # a function that returns None may have changed its arguments
            if result is None and arguments is not None:
                reply["arguments"] = [value_codec.encode(item, self.refer) for item in arguments]
            return reply
        except SystemExit:
            return {"id": request.get("id"), "raised": ["SystemExit", [], _EXITED]}
        except BaseException as error:
            name, *family = map(_name, _MRO(type(error)))
            return {"id": request.get("id"), "raised": [name, family, _describe(error)]}

    def _is_construction(self, request: JsonObject) -> bool:
        """Return whether a request of the tester calls a class."""
        of = request.get("of")
        return request["do"] == "call" and of is not None and isinstance(self.objects[of], type)

    def _do(self, request: JsonObject) -> tuple[Any, list[Any] | None]:
        verb = request["do"]
        if verb == "find":
            return self._find(request["name"]), None
        if verb == "session":
            return run_cell(request["code"], self.space), None
        target = self.objects[request["of"]] if request.get("of") is not None else None
        arguments = [
            value_codec.decode(item, self.referent) for item in request.get("arguments", [])
        ]
        named = {
            key: value_codec.decode(item, self.referent)
            for key, item in request.get("named", {}).items()
        }
        if verb == "call":
            function = target if target is not None else self._function(request["name"])
            return function(*arguments, **named), arguments
        return _VERBS[verb](target, *arguments), None

    def _find(self, name: str) -> Any:
        if name not in self.space:
            raise NameError(f"name {name!r} is not defined")
        return self.space[name]

    def _function(self, name: str) -> Callable[..., Any]:
        """Return a function by its name, with dots for attributes. A name that only a class
        Solution has refers to its method.
        """
        first, *rest = name.split(".")
        if first not in self.space and "Solution" in self.space:
            result = getattr(self.space["Solution"](), first)
        else:
            result = self._find(first)
        for part in rest:
            result = getattr(result() if isinstance(result, type) else result, part)
        return result

    def refer(self, value: Any) -> list[Any]:
        number = self.numbers.get(id(value))
        if number is None:
            number = self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        is_class = issubclass(type(value), type)
        kind, name = ("class", _name(value)) if is_class else ("object", _name(type(value)))
        return [number, kind, name, _family_of(value) if is_class else [], callable(value)]

    def referent(self, rest: list[Any]) -> Any:
        """Return an object by its number, or a function of the tester by its name."""
        return self.objects[rest[0]] if isinstance(rest[0], int) else self._callback(str(rest[0]))

    def _callback(self, name: str) -> Callable[..., Any]:
        """Return a function that calls a function of the tester in the tester."""

        def call(*arguments: Any) -> Any:
            message_framing.send(
                self.replies,
                {
                    "call": name,
                    "arguments": [value_codec.encode(item, self.refer) for item in arguments],
                },
            )
            while True:
                message = message_framing.receive(self.requests)
                if "returned" in message:
                    return value_codec.decode(message["returned"], self.referent)
                if "raised" in message:
                    raise RuntimeError(message["raised"])
                message_framing.send(self.replies, self._answer(message))

        return call


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:300]
    except BaseException:
        return type(error).__name__[:100]


def _family_of(of: type) -> list[str]:
    """Return the names of the base classes of an exception class; empty for other classes."""
    return [_name(base) for base in _MRO(of)[1:]] if BaseException in _MRO(of) else []


_MRO: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
_NAME: Callable[[type], str] = type.__dict__["__name__"].__get__


def _name(of: type) -> str:
    """Return the real name of a class, independent of its metaclass."""
    return _NAME(of)[:200]


def run_cell(code: str, space: JsonObject) -> str | None:
    """Run a turn of a session in `space`. Return the repr of its last expression. Tracebacks go to
    stderr.
    """
    space["__name__"] = "__main__"
    try:
        source = code.removeprefix(_BYTE_ORDER_MARK)
        tree: Any = compile(source, "<turn>", "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
        exec(compile(tree, "<turn>", "exec", dont_inherit=True), space)
        if not isinstance(last, ast.Expr):
            return None
        last_value = ast.Expression(last.value)
        value = eval(compile(last_value, "<turn>", "eval", dont_inherit=True), space)
        return None if value is None else repr(value)
    except SystemExit:
        raise
    except BaseException:
        _print_traceback()
        return None
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _return_bool(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], bool]:
    return lambda target, other: bool(compare(target, other))


_OPERATORS = (
    "getitem setitem delitem contains add sub mul truediv floordiv mod pow matmul and or xor neg abs "
    "invert"
)
_VERBS: dict[str, Callable[..., Any]] = {
    "attribute": getattr,
    "set": setattr,
    "delete": delattr,
    "contents": lambda target: target,
    "length": len,
    "list": list,
    "iterate": iter,
    "next": next,
    "text": str,
    "repr": repr,
    "hash": hash,
    "truth": bool,
    "is a": isinstance,
    **{verb: getattr(operator, f"__{verb}__") for verb in _OPERATORS.split()},
    **{verb: _return_bool(getattr(operator, verb)) for verb in ("eq", "lt", "le", "gt", "ge")},
}
