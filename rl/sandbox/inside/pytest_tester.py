"""Run test files of pytest in the tester's process.

The program's module is a reference to the candidate's module.
"""

from __future__ import annotations

import ast
import builtins
import collections
import importlib
import os
import symtable
import sys
import types
from pathlib import Path
from typing import Any

from rl.sandbox.inside import message_framing
from rl.sandbox.inside.tester import TEST_MODULES, CandidateClient, send_verdict

PACKAGES_NAME = "packages"  # in the folder of the inner code: the packages of pytest


class RemoteModule(types.ModuleType):
    """Resolve `from solution import name` by a request to the candidate.

    `from solution import *` imports the names that the test files use and that neither the
    importing file nor Python define. A program therefore cannot replace names that a file imports
    from elsewhere, nor add tests or pytest hooks. A module of the standard library that the files
    use only for its attributes is imported itself, even if the program imports it too.
    """

    def __init__(self, name: str, link: CandidateClient, files: dict[str, str]):
        super().__init__(name)
        used: set[str] = set()
        bound: dict[str, set[str]] = {}  # by the path of a file
        plain_uses = collections.Counter[str]()  # of names, other than for an attribute
        for path, text in files.items():
            try:
                free, bound[path] = _list_global_names(text)
                for node in ast.walk(ast.parse(text)):
                    if isinstance(node, ast.Name):
                        plain_uses[node.id] += 1
                    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                        plain_uses[node.value.id] -= 1
            except (SyntaxError, ValueError, RecursionError):
                continue  # pytest reports the error
            used |= {item for item in free if not hasattr(builtins, item) and item[0] != "_"}
        modules = {item for item in used if item in TEST_MODULES and not plain_uses[item]}
        self.__dict__.update(
            __whetstone_link__=link,
            __whetstone_used__=used,
            __whetstone_bound__=bound,
            __whetstone_modules__=modules,
            __path__=list[str](),
        )

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return self._list_star_names(sys._getframe(1))
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        try:
            return self.__dict__["__whetstone_link__"].request("find", name=name)
        except NameError as error:
            raise AttributeError(str(error)) from None

    def _list_star_names(self, frame: types.FrameType) -> list[str]:
        """Return the names that `import *` binds in the file that runs in `frame`. Bind modules in
        the file.
        """
        while frame.f_code.co_filename.startswith("<frozen importlib") and frame.f_back:
            frame = frame.f_back
        bound = self.__whetstone_bound__.get(frame.f_code.co_filename, set())
        names = self.__whetstone_used__ - bound - frame.f_globals.keys()
        for name in names & self.__whetstone_modules__:
            frame.f_globals[name] = importlib.import_module(name)
        return [name for name in names - self.__whetstone_modules__ if hasattr(self, name)]


def _list_global_names(text: str) -> tuple[set[str], set[str]]:
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


class VerdictPlugin:
    """Report the outcome of each test, setup and teardown included, as a pytest plugin.

    Before the first test runs, it reports the number of verdicts to expect.
    """

    def __init__(self, verdicts: int):
        self.verdicts, self.failed, self.count = verdicts, dict[str, str](), 0

    def pytest_collection_finish(self, session: Any) -> None:
        message_framing.send(self.verdicts, {"collected": self.count + len(session.items)})

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.setdefault(report.nodeid, f"{report.when}: {str(report.longrepr)[-300:]}")
        elif report.skipped and not hasattr(report, "wasxfail"):  # xfail: it failed as expected
            self.failed.setdefault(report.nodeid, "skipped")
        if report.when == "teardown":
            reason = self.failed.get(report.nodeid)
            name = report.nodeid.rsplit("/", 1)[-1]
            self._say(reason is None, "ok" if reason is None else f"wrong: {name}: {reason}")

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._say(False, f"error: {report.nodeid}: {str(report.longrepr)[-300:]}")

    def _say(self, ok: bool, reason: str) -> None:
        self.count += 1
        send_verdict(self.verdicts, ok, reason)


def run_pytest(message: dict[str, Any], link: CandidateClient, verdicts: int) -> None:
    """Send a verdict for each test; a single failed verdict if no test exists or the program does
    not load. The test files and their temporary files are in `message["folder"]`.
    """
    failed = link.read_loaded()
    if failed:
        return send_verdict(verdicts, False, f"{failed[0]}: {failed[1]}")
    sys.path.insert(0, str(Path(__file__).parents[3] / PACKAGES_NAME))
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.dont_write_bytecode = True
    folder = os.path.join(message["folder"], "tests")
    os.makedirs(folder)
    os.chdir(folder)
    texts = {}
    for name, text in message["files"].items():
        path = os.path.join(folder, os.path.normpath(name))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        if name.endswith(".py"):
            texts[path] = text.removeprefix("\ufeff")
    sys.modules[message["module"]] = RemoteModule(message["module"], link, texts)
    import pytest

    plugin = VerdictPlugin(verdicts)
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", folder, "-c", "/dev/null", folder]
    options += ["--basetemp", os.path.join(message["folder"], "temporary")]
    pytest.main(options + ["-x"] * message["early_stop"], plugins=[plugin])
    if plugin.count == 0:
        send_verdict(verdicts, False, "error: pytest found no tests")
