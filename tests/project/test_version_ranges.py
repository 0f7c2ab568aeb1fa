"""Test tools/version_ranges.py: if the packages of an end do not install, it records that and tries
the other end.
"""

import csv
import subprocess
import sys
from types import SimpleNamespace

from tools import version_ranges


def test_an_install_that_fails_is_a_row_and_the_other_end_is_tried(tmp_path, monkeypatch):
    outputs = {
        "-c": "{}\n",
        "train.py": "",
        "-m": "===== 119 passed, 2 skipped in 3.21s =====\n",
    }

    def run(words, *, check=False, **_):
        if "lowest-direct" in words:
            raise subprocess.CalledProcessError(2, words)
        return SimpleNamespace(
            returncode=0, stdout=outputs.get(words[1], ""), stderr="a warning at exit\n"
        )

    monkeypatch.setattr(version_ranges.subprocess, "run", run)
    monkeypatch.setattr(version_ranges.venv, "create", lambda *_, **__: None)
    monkeypatch.setattr(version_ranges, "RESULTS", tmp_path)
    words = ["tools/version_ranges.py", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    assert version_ranges.main() == 1
    with (tmp_path / "version_ranges.csv").open(newline="") as file:
        lowest, newest = csv.DictReader(file)
    assert (lowest["end"], lowest["install"], lowest["tests"]) == ("lowest", "exit code 2", "")
    assert (newest["install"], newest["train"]) == ("ok", "ok")
    assert newest["tests"] == "119 passed, 2 skipped"
    assert newest["command"].split()[1:] == words and "python" in newest["command"]
