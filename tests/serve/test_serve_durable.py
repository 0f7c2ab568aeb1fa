"""Test --durable: an update is on disk before its response is sent, or it has not happened."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from serving import Wire, open_server, server
from test_crash_safety import faulty_disk  # noqa: F401  (a fixture)
from test_run import environment
from test_serve import make_text_datums

REPO = Path(__file__).resolve().parents[2]


def run(library, folder, fault, stride):
    script = REPO / "tests" / "serve" / "serve_faults.py"
    words = [sys.executable, script, fault, folder / fault, stride]
    options = {"env": environment(LD_PRELOAD=str(library)), "timeout": 1800}
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


# 24 operations precede the rename of the new folder. A stride of 8 also hits the 25th: its failure
# undoes nothing.
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="preloads a library")
@pytest.mark.parametrize("stride", [8, pytest.param(1, marks=pytest.mark.campaign)])
def test_an_update_on_a_full_disk_is_undone_and_done_once_when_repeated(
    faulty_disk,  # noqa: F811
    tmp_path,
    stride,
):
    result = run(faulty_disk, tmp_path, "full", stride)
    assert result["undone"] >= 20 // stride and result["done"] == 1, result


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="preloads a library")
@pytest.mark.parametrize("stride", [20, pytest.param(1, marks=pytest.mark.campaign)])
def test_an_update_that_a_server_was_killed_in_has_happened_or_has_not(
    faulty_disk,  # noqa: F811
    tmp_path,
    stride,
):
    result = run(faulty_disk, tmp_path, "kill", stride)
    assert result["not"] >= 1 and result["happened"] >= 1, result


def test_a_session_and_a_model_that_cannot_be_written_leave_nothing_behind(tmp_path, monkeypatch):
    def refuse(call):
        def full(*arguments, **named):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, call, full)

    def files():
        return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))

    with server(tmp_path, durable=True) as first:
        wires = Wire(first)
        for call in ("fsync", "replace"):
            refuse(call)
            answer = wires.http.post("/api/v1/create_session", json={"tags": []})
            assert answer.status_code == 500 and not files() and not first.session_store.sessions
            monkeypatch.undo()
        wires.open()
        before = files()
        for seq, call in enumerate(("fsync", "replace", "rename")):
            with monkeypatch.context():
                refuse(call)
                answer = wires.wait(wires.post("create_model", **wires.model_body(seq)))
                monkeypatch.undo()
            assert answer["category"] == "server" and files() == before, (call, answer, files())
        assert not first.session_store.models
        wires.model(7)


def test_a_load_that_is_undone_names_the_gradient_that_went_with_it(tmp_path, monkeypatch):
    """The disk is full while weights are loaded."""
    with open_server(tmp_path, durable=True) as (first, wires):
        model = wires.model()
        path = wires.save(model, 1, "a")
        wires.output(wires.ask(model, 2, make_text_datums()))

        def full(model):
            raise OSError(errno.ENOSPC, "No space left on device")

        load = {"model_id": model, "seq_id": 3, "path": path, "optimizer": True}
        with monkeypatch.context() as patch:
            patch.setattr(first.model_manager, "write_model", full)
            undone = wires.wait(wires.post("load_weights", **load))
        assert "undone" in undone["error"]
        refused = wires.wait(wires.step(model, 4))
        assert "load_weights was undone" in refused.get("error", ""), refused
        assert "skipped" not in wires.train(model, 5, make_text_datums())[1]["metrics"]
