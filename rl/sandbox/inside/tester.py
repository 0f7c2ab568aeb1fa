"""The process that runs test texts. It holds what is expected and none of the program: names of the program are references that ask
the candidate and get plain data back, so that comparing is done here, by Python's own types.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

from rl.sandbox.inside import frames, seccomp, values, walls

_MODULES = ("math", "cmath", "re", "collections", "itertools", "functools", "random", "datetime", "string", "copy", "heapq", "decimal",
            "fractions", "statistics", "operator", "typing", "json", "sys")  # fmt: skip


class CandidateError(Exception):
    """The candidate raised what no built-in exception stands for."""


class Link:
    """The tester's end of the candidate's server."""

    def __init__(self, requests: int, replies: int, longest: int):
        self.requests, self.replies, self.longest = requests, replies, longest
        self.count = itertools.count(1)
        self.functions: dict[str, Callable[..., Any]] = {}
        self.exceptions: dict[str, type[BaseException]] = {}

    def ask(self, verb: str, of: int | None = None, arguments: tuple[Any, ...] = (), **more: Any) -> Any:
        number = next(self.count)
        named = {key: values.encode(item, self.refer) for key, item in more.pop("named", {}).items()}
        sent = [values.encode(item, self.refer) for item in arguments]
        frames.send(self.requests, {"id": number, "do": verb, "of": of, "arguments": sent, "named": named, **more})
        while True:
            reply = frames.receive(self.replies, self.longest)
            if "call" not in reply:
                break
            self._call_back(reply)
        if reply.get("id") != number:
            raise frames.BadMessage("a reply to another request")
        if "raised" in reply:
            name, family, text = reply["raised"]
            raise self.exception(str(name), [str(item) for item in family])(str(text))
        if isinstance(reply.get("arguments"), list) and len(reply["arguments"]) == len(arguments):
            for item, changed in zip(arguments, reply["arguments"], strict=True):
                values.assign(item, values.decode(changed, self.referent))
        return values.decode(reply.get("value"), self.referent)

    def _call_back(self, message: dict[str, Any]) -> None:
        try:
            arguments = [values.decode(item, self.referent) for item in message["arguments"]]
            result = self.functions[message["call"]](*arguments)
            frames.send(self.requests, {"returned": values.encode(result, self.refer)})
        except (frames.Ended, frames.BadMessage):
            raise
        except Exception as error:
            frames.send(self.requests, {"raised": f"{type(error).__name__}: {error}"[:300]})

    def refer(self, value: Any) -> list[Any]:
        if type(value) is Remote:
            return [object.__getattribute__(value, "_number")]
        if callable(value):
            name = f"f{len(self.functions)}"
            self.functions[name] = value
            return [name]
        raise values.NotPlain(f"a {type(value).__name__} of a test cannot be given to the program")

    def referent(self, number: int, kind: str = "object", name: str = "", family: Any = (), can_call: bool = False) -> Any:
        if kind == "class" and family:
            return self.exception(str(name), [str(item) for item in family])
        return Remote(self, int(number), str(name))

    def exception(self, name: str, family: list[str]) -> type[BaseException]:
        """The built-in exception of that name, or one made here that descends from the first built-in one of its family."""
        known = getattr(builtins, name, None)
        if isinstance(known, type) and issubclass(known, Exception):
            return known
        if name not in self.exceptions:
            found = [getattr(builtins, item, None) for item in family]
            base = next((of for of in found if isinstance(of, type) and issubclass(of, Exception)), CandidateError)
            self.exceptions[name] = type(name, (base,), {"__init__": lambda self, *text: Exception.__init__(self, *text)})
        return self.exceptions[name]


class Remote:
    """An object of the candidate. What is asked of it gives plain data; it equals no plain data, whatever its own __eq__ says."""

    __slots__ = ("_link", "_number", "_name")

    def __init__(self, link: Link, number: int, name: str):
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_name", name)

    def _ask(self, verb: str, *arguments: Any, **named: Any) -> Any:
        link: Link = object.__getattribute__(self, "_link")
        return link.ask(verb, object.__getattribute__(self, "_number"), arguments, named=named)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return Remote._ask(self, "call", *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return Remote._ask(self, "attribute", name)

    def __setattr__(self, name: str, value: Any) -> None:
        Remote._ask(self, "set", name, value)

    def __delattr__(self, name: str) -> None:
        Remote._ask(self, "delete", name)

    def __getitem__(self, key: Any) -> Any:
        return Remote._ask(self, "item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        Remote._ask(self, "put", key, value)

    def __delitem__(self, key: Any) -> None:
        Remote._ask(self, "remove", key)

    def __len__(self) -> int:
        return int(Remote._ask(self, "length"))

    def __iter__(self) -> Iterator[Any]:
        inner = Remote._ask(self, "iterate")
        while True:
            try:
                yield Remote._ask(inner, "next")
            except StopIteration:
                return

    def __next__(self) -> Any:
        return Remote._ask(self, "next")

    def __str__(self) -> str:
        return str(Remote._ask(self, "text"))

    def __repr__(self) -> str:
        return str(Remote._ask(self, "repr"))

    def __bool__(self) -> bool:
        return bool(Remote._ask(self, "truth"))

    def __eq__(self, other: object) -> bool:
        return type(other) is Remote and bool(Remote._ask(self, "same", other))

    def __ne__(self, other: object) -> bool:
        return not Remote.__eq__(self, other)

    def __lt__(self, other: object) -> bool:
        if type(other) is not Remote:
            return NotImplemented
        return bool(Remote._ask(self, "less", other))

    def __contains__(self, item: Any) -> bool:
        return bool(Remote._ask(self, "contains", item))

    def __hash__(self) -> int:
        return hash(object.__getattribute__(self, "_number"))

    def __instancecheck__(self, instance: Any) -> bool:
        return type(instance) is Remote and bool(Remote._ask(instance, "is a", self))

    def __enter__(self) -> Any:
        return Remote._ask(self, "attribute", "__enter__")()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        return Remote._ask(self, "attribute", "__exit__")(None, None, None)


class Space(dict[str, Any]):
    """A test's global names: its own, then `entries` of the candidate, Python's own, modules that tests use, the candidate's others."""

    def __init__(self, link: Link, entries: list[str]):
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
            found = self.link.ask("find", name=name)
        except NameError:
            raise KeyError(name) from None
        self[name] = found
        return found


def serve(
    message: dict[str, Any], requests: int, replies: int, verdicts: int, up: set[str], limits: dict[str, Any],
    run: Callable[[dict[str, Any], Link, int], None] | None = None,
) -> None:  # fmt: skip
    """Runs the tests from `message["from"]` on, or as `run` does, a verdict each. `run` may write files. Never returns."""
    try:
        for target in (0, 1, 2):
            os.dup2(os.open("/dev/null", os.O_RDWR), target)
        walls.die_with_parent()
        if "limits" in up:
            files = limits["file_mb"] if run is not None else 0
            walls.set_limits({**limits, "file_mb": files, "memory_mb": limits["memory_mb"] + 256})
        if "capabilities" in up:
            walls.drop_capabilities()
        if "seccomp" in up:
            seccomp.install(walls.libc)
        (run or run_asserts)(message, Link(requests, replies, int(limits["output_kb"]) << 10), verdicts)
    finally:
        os._exit(0)


def run_asserts(message: dict[str, Any], link: Link, verdicts: int) -> None:
    def say(ok: bool, why: str) -> None:
        frames.send(verdicts, {"ok": ok, "why": why})

    tests, first = message["tests"], message["from"]
    loaded = frames.receive(link.replies, link.longest)
    failed = loaded.get("failed")
    space = Space(link, message["entries"])
    if not failed:
        try:
            exec(compile(message["setup"], "<setup>", "exec"), space)
            for name in message["owned"]:
                space.pop(name, None)
        except (frames.Ended, frames.BadMessage):
            raise
        except Exception as error:
            failed = ["error", f"the tests' setup: {type(error).__name__}: {error}"]
    for text in tests[first:]:
        ok, why = (False, f"{failed[0]}: {failed[1]}") if failed else _one(text, space, message["entries"])
        say(ok, why)
        if not ok and message["early_stop"]:
            break
    frames.send(verdicts, {"done": True})


def _one(text: str, space: Space, entries: list[str]) -> tuple[bool, str]:
    try:
        exec(compile(text, "<test>", "exec"), space)
        if _only_defines_check(text):
            space["check"](space[entries[0]])
        return True, "ok"
    except (frames.Ended, frames.BadMessage):
        raise
    except AssertionError as error:
        said = f" ({error})" if str(error) else ""
        return False, f"wrong: {text.strip()[:200]}{said[:200]}"
    except Exception as error:
        return False, f"error: {type(error).__name__}: {str(error)[:300]}"


def _only_defines_check(text: str) -> bool:
    """HumanEval's form: a function `check(candidate)` that nobody calls yet."""
    body = ast.parse(text).body
    defines = any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in body)
    return defines and not any(isinstance(n, ast.Expr) and isinstance(n.value, ast.Call) for n in body)
