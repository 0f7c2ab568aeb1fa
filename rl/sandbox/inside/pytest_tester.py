"""Test files of pytest in the tester's process: the program's module is a reference to the candidate's."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from typing import Any

from rl.sandbox.inside import frames
from rl.sandbox.inside.tester import Link

FOLDER = "/tmp/tests"


class RemoteModule(types.ModuleType):
    """`from solution import name` asks the candidate for it."""

    def __init__(self, name: str, link: Link):
        super().__init__(name)
        self.__dict__["_link"] = link
        self.__dict__["__path__"] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        try:
            return self.__dict__["_link"].ask("find", name=name)
        except NameError as error:
            raise AttributeError(str(error)) from None


class Verdicts:
    """A plugin that hands on what became of each test, setup and teardown included."""

    def __init__(self, say: Callable[[bool, str], None]):
        self.say, self.failed, self.count = say, dict[str, str](), 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.setdefault(report.nodeid, f"{report.when}: {str(report.longrepr)[-300:]}")
        elif report.skipped:
            self.failed.setdefault(report.nodeid, "skipped")
        if report.when == "teardown":
            why = self.failed.get(report.nodeid)
            self.count += 1
            name = report.nodeid.rsplit("/", 1)[-1]
            self.say(why is None, "ok" if why is None else f"wrong: {name}: {why}")

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.count += 1
            self.say(False, f"error: {report.nodeid}: {str(report.longrepr)[-300:]}")


def run(message: dict[str, Any], link: Link, verdicts: int) -> None:
    """A verdict a test; one failed one where there is no test or the program does not load."""

    def say(ok: bool, why: str) -> None:
        frames.send(verdicts, {"ok": ok, "why": why})

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
        for name, text in message["files"].items():
            place = os.path.join(FOLDER, os.path.normpath(name))
            os.makedirs(os.path.dirname(place), exist_ok=True)
            with open(place, "w", encoding="utf-8") as file:
                file.write(text)
        import pytest

        plugin = Verdicts(say)
        options = ["-q", "-p", "no:cacheprovider", "--rootdir", FOLDER, "-c", "/dev/null", *(["-x"] if message["early_stop"] else [])]
        pytest.main([*options, FOLDER], plugins=[plugin])
        if plugin.count == 0:
            say(False, "error: pytest found no tests")
    frames.send(verdicts, {"done": True})
