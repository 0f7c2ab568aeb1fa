"""Run test files of pytest in the tester's process.

The program's module is a reference to the candidate's module.
"""

from __future__ import annotations

import ast
import builtins
import os
import symtable
import sys
import types
from collections.abc import Callable
from typing import Any

from rl.sandbox.inside import message_framing
from rl.sandbox.inside.tester import _MODULES, CandidateClient

FOLDER = "/tmp/tests"


class RemoteModule(types.ModuleType):
    """Resolve `from solution import name` by a request to the candidate."""

    def __init__(self, name: str, link: CandidateClient):
        super().__init__(name)
        self.__dict__["_link"] = link
        self.__dict__["__path__"] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        try:
            return self.__dict__["_link"].request("find", name=name)
        except NameError as error:
            raise AttributeError(str(error)) from None


class VerdictPlugin:
    """Report the outcome of each test, setup and teardown included, as a pytest plugin."""

    def __init__(self, say: Callable[[bool, str], None], tell: Callable[[int], None]):
        """Store the callbacks: `say` takes each verdict, `tell` the number of verdicts to expect,
        before the first test runs.
        """
        self.say, self.tell, self.failed, self.count = say, tell, dict[str, str](), 0

    def pytest_collection_finish(self, session: Any) -> None:
        self.tell(self.count + len(session.items))

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.setdefault(report.nodeid, f"{report.when}: {str(report.longrepr)[-300:]}")
        elif report.skipped:
            self.failed.setdefault(report.nodeid, "skipped")
        if report.when == "teardown":
            reason = self.failed.get(report.nodeid)
            self.count += 1
            name = report.nodeid.rsplit("/", 1)[-1]
            self.say(reason is None, "ok" if reason is None else f"wrong: {name}: {reason}")

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.count += 1
            self.say(False, f"error: {report.nodeid}: {str(report.longrepr)[-300:]}")


def name_star_imports(files: dict[str, str], module: str, link: CandidateClient) -> dict[str, str]:
    """Return test files with `from module import *` replaced by the names that the files use and
    that neither the files nor Python define.

    A program therefore cannot replace names that a file imports from elsewhere, nor add tests or
    pytest hooks.
    """
    texts = {
        name: text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
        for name, text in files.items()
    }
    trees = {
        name: tree for name, text in texts.items() if (tree := _parse_file(name, text)) is not None
    }
    if not any(_find_star_imports(tree, module) for tree in trees.values()):
        return files
    used, bound = set[str](), dict[str, set[str]]()
    for name in trees:
        free, bound[name] = _global_names(texts[name])
        used |= {item for item in free if not hasattr(builtins, item) and not item.startswith("_")}
    modules = {
        item
        for item in used
        if item in _MODULES and all(_is_module(item, tree) for tree in trees.values())
    }
    names = {item for item in used - modules if _exists(item, link)}
    return {name: _replace_star_imports(texts[name], trees[name], module, names - bound[name], modules - bound[name]) if name in trees else text
            for name, text in files.items()}  # fmt: skip


def _replace_star_imports(
    text: str, tree: ast.Module, module: str, names: set[str], modules: set[str]
) -> str:
    """Replace the star imports of a file. Other `import *` of the file are repeated last, which
    prevents the program from replacing their names.
    """
    outer = [
        node for node in _find_star_imports(tree) if node in tree.body and node.module != module
    ]
    others = {"." * node.level + (node.module or "") for node in outer}
    parts = [f"import {', '.join(sorted(modules))}"] * bool(modules) + [
        f"from {module} import {', '.join(sorted(names))}"
    ] * bool(names)
    parts += [f"from {other} import *" for other in sorted(others)]
    lines = [line.encode() for line in text.split("\n")]
    for node in reversed(_find_star_imports(tree, module)):
        end = node.end_lineno or node.lineno
        tail = lines[end - 1][node.end_col_offset :]
        lines[node.lineno - 1 : end] = [
            lines[node.lineno - 1][: node.col_offset] + ("; ".join(parts) or "pass").encode() + tail
        ]
    return b"\n".join(lines).decode()


def _parse_file(name: str, text: str) -> ast.Module | None:
    """Parse a file. Return None if it is not valid Python: pytest reports the error."""
    try:
        return ast.parse(text) if name.endswith(".py") else None
    except (SyntaxError, ValueError, RecursionError):
        return None


def _find_star_imports(tree: ast.Module, module: str | None = None) -> list[ast.ImportFrom]:
    imports = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"
    ]
    return sorted(
        (node for node in imports if module in (None, node.module)),
        key=lambda node: (node.lineno, node.col_offset),
    )


def _global_names(text: str) -> tuple[set[str], set[str]]:
    """Return the global names that a file uses without binding them, and the global names that it
    binds.
    """
    table = symtable.symtable(text, "tests", "exec")
    used, tables = set(), [table]
    bound = {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_assigned() or symbol.is_imported()
    }
    while tables:
        inner = tables.pop()
        tables += inner.get_children()
        for symbol in inner.get_symbols():
            if symbol.is_global() or (inner is table and symbol.is_referenced()):
                used.add(symbol.get_name())
    return used - bound, bound


def _is_module(name: str, tree: ast.AST) -> bool:
    """Return whether a file uses `name` only for its attributes."""
    uses = sum(isinstance(node, ast.Name) and node.id == name for node in ast.walk(tree))
    return uses == sum(
        isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == name
        for n in ast.walk(tree)
    )


def _exists(name: str, link: CandidateClient) -> bool:
    try:
        link.request("find", name=name)
    except NameError:
        return False
    return True


def run(message: dict[str, Any], link: CandidateClient, verdicts: int) -> None:
    """Send a verdict for each test; a single failed verdict if no test exists or the program does
    not load.
    """

    def say(ok: bool, reason: str) -> None:
        message_framing.send(verdicts, {"ok": ok, "why": reason})

    failed = link.read_loaded()
    if failed:
        say(False, f"{failed[0]}: {failed[1]}")
    else:
        sys.path.insert(0, message["packages"])
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        sys.dont_write_bytecode = True
        sys.modules[message["module"]] = RemoteModule(message["module"], link)
        os.makedirs(FOLDER)
        os.chdir(FOLDER)
        for name, text in name_star_imports(message["files"], message["module"], link).items():
            place = os.path.join(FOLDER, os.path.normpath(name))
            os.makedirs(os.path.dirname(place), exist_ok=True)
            with open(place, "w", encoding="utf-8") as file:
                file.write(text)
        import pytest

        plugin = VerdictPlugin(
            say, lambda count: message_framing.send(verdicts, {"collected": count})
        )
        options = [
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            FOLDER,
            "-c",
            "/dev/null",
            *(["-x"] if message["early_stop"] else []),
        ]
        pytest.main([*options, FOLDER], plugins=[plugin])
        if plugin.count == 0:
            say(False, "error: pytest found no tests")
    message_framing.send(verdicts, {"done": True})
