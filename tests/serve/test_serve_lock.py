"""Test that a folder has one server at a time."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="needs the extra serve")

from rl.processes.run_lock import LOCK  # noqa: E402

REPO = Path(__file__).resolve().parents[2]


def start(folder: Path) -> subprocess.Popen:
    words = f"serve.py --base-model tiny:addition --port 0 --output-dir {folder} --resume"
    return subprocess.Popen(
        [sys.executable, *words.split()], cwd=REPO, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip


def test_a_folder_has_one_server_at_a_time(tmp_path):
    first = start(tmp_path)
    try:
        assert first.stdout.readline().startswith("serving tiny:addition at ")
        second = start(tmp_path)
        _, error = second.communicate(timeout=120)
        assert second.returncode == 2 and f"process {first.pid} on" in error
        assert "Traceback" not in error
        # as after a suspension in which another server took the folder over
        owner = json.loads((tmp_path / LOCK).read_text())
        (tmp_path / LOCK).write_text(json.dumps({**owner, "pid": 1, "nonce": "another"}))
        assert first.wait(timeout=30) == 1
        assert "taken over by process 1 on" in first.stderr.read()
        assert (tmp_path / LOCK).exists()  # it is the other's
    finally:
        first.kill()


def test_a_server_that_saved_nothing_leaves_no_folder(tmp_path):
    with start(tmp_path / "out") as server:
        assert server.stdout.readline().startswith("serving")
        assert (tmp_path / "out" / LOCK).exists()
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == 0
    assert not (tmp_path / "out").exists()
