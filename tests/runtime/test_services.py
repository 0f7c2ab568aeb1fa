"""Test several services in a single script, on a single process and on two ranks."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import two_services
from rank_server import make_launch_command
from test_distributed import run_launch

from rl import ServiceClient
from rl.errors import UserError
from rl.runtime import Driver, SamplerSettings, WorkerSettings
from rl.runtime.training_worker import TrainingWorker
from rl.runtime.worker_group import WorkerGroup

REPO = Path(__file__).resolve().parents[2]


def test_services_live_side_by_side_and_after_one_another(tmp_path):
    two_services.main(tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["first"] == result["again"] == result["again, with another beside it"]
    assert result["beside"] == result["beside, alone"] != result["first"]


def test_a_closed_service_says_so_and_closing_twice_does_nothing(tmp_path):
    with ServiceClient(output_dir=tmp_path) as open_one:
        service = ServiceClient(output_dir=tmp_path)
        client = service.create_full_training_client("tiny:addition").result()
        service.close("errored", "on purpose").result()
        service.close()
        with pytest.raises(RuntimeError, match="the service is closed"):
            client.forward_backward([], "ppo")
        # the other service still works
        open_one.create_full_training_client("tiny:addition").result()
        with pytest.raises(UserError, match="'success', 'errored' or 'interrupted', got 'fine'"):
            open_one.close("fine")


def test_a_service_that_fails_to_open_does_not_keep_the_thread(monkeypatch):
    monkeypatch.setattr(WorkerGroup, "_running", {})
    first = Driver(WorkerSettings())
    sampler = SamplerSettings(kind="vllm", command="no-such-program")
    with pytest.raises(UserError, match="no-such-program"):
        Driver(WorkerSettings(sampler=sampler))
    assert not first.closed
    first.close()
    assert not WorkerGroup._running


@pytest.mark.slow
@pytest.mark.parametrize("config", ["ddp", "zero3"])
def test_two_ranks_serve_every_service_of_a_script(config, tmp_path):
    """Before, the second ServiceClient waited forever for ranks that served the first. Under
    DeepSpeed, accelerate takes no second plugin.
    """
    (tmp_path / "two").mkdir()
    run_launch(config, tmp_path, tmp_path / "two", script="tests/two_services.py")
    second = json.loads((tmp_path / "two" / "result.json").read_text())
    (tmp_path / "one").mkdir()
    two_services.main(tmp_path / "one")
    first = json.loads((tmp_path / "one" / "result.json").read_text())
    refusal = second.pop("another dtype", "")
    assert ("an earlier service of this script computes in fp32" in refusal) is (config == "zero3")
    for name, (norm, world, tokens) in second.items():
        assert world == 2 and tokens == first[name][2], name
        np.testing.assert_allclose(norm, first[name][0], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["raises"]])
def test_a_rank_that_has_served_does_what_it_has_to_and_leaves(words, tmp_path):
    """The process skips interpreter teardown because torch's threads still run. An error in its
    script is still raised.
    """
    command = make_launch_command("ddp", REPO / "tests" / "leaving_case.py", tmp_path, *words)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    driver, other = ((tmp_path / rank).read_text().splitlines() for rank in "01")
    assert driver[:2] == ["0", "finally"]
    assert other[:3] == ["finally", "registered after", "registered before"]
    assert (done.returncode != 0) is bool(words) and ("taken apart" in other) is bool(words)
    if words:
        assert "ValueError: of the script's own" in done.stderr
    else:
        assert driver[2:] == ["registered after", "registered before", "taken apart"]


def test_a_service_made_while_the_last_one_closes_works(monkeypatch):
    """Another thread creates it after the last service has left and before their shared thread
    ends.
    """
    made: list[Driver] = []
    newcomer = threading.Thread(target=lambda: made.append(Driver(WorkerSettings())))
    end = WorkerGroup.shut_down

    def interrupted(self, timeout=None):
        if newcomer.ident is None:
            newcomer.start()
            newcomer.join(1.0)  # runs until it blocks
        end(self, timeout)

    monkeypatch.setattr(WorkerGroup, "_running", {})
    first = Driver(WorkerSettings())
    monkeypatch.setattr(WorkerGroup, "shut_down", interrupted)
    first.close()
    newcomer.join(60.0)
    monkeypatch.setattr(WorkerGroup, "shut_down", end)
    assert made and not made[0].closed
    made[0].close()


def test_closing_waits_for_verbs_without_a_limit(monkeypatch):
    """A wait with a limit is replaced by one whose limit has passed."""
    join = threading.Thread.join
    monkeypatch.setattr(
        threading.Thread, "join", lambda self, timeout=None: None if timeout else join(self)
    )
    monkeypatch.setattr(TrainingWorker, "set_cache_size", lambda *_: time.sleep(0.3))
    driver = Driver(WorkerSettings())
    future = driver.submit("set_cache_size", 1)
    driver.close()
    assert future.done()


UNDER_WAY = """
import sys, time
import torch
from rl import ServiceClient
from rl.runtime import worker_group
from rl.runtime.training_worker import TrainingWorker
from rl.runtime.verb_table import verb

class Busy(TrainingWorker):
    @verb()
    def work(self, seconds):
        a, end = torch.randn(300, 300), time.monotonic() + seconds
        while time.monotonic() < end:
            torch.mm(a, a)

worker_group.TrainingWorker, worker_group.WorkerGroup.exit_timeout = Busy, 0.5
service = ServiceClient(output_dir=sys.argv[1])
service._driver.submit("work", float(sys.argv[2]))
print("the script's last line")
"""


@pytest.mark.parametrize(("seconds", "code"), [(0.1, 0), (60.0, 1)])
def test_a_script_that_ends_before_its_work_is_no_abort(seconds, code, tmp_path):
    """Before, interpreter exit unwound the thread inside torch: "terminate called without an active
    exception", signal 6, every time.
    """
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-c", UNDER_WAY, str(tmp_path), str(seconds)]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == code, done.stderr[-2000:]
    assert done.stdout == "the script's last line\n" and "terminate called" not in done.stderr
    assert ("still running 0.5 s later" in done.stderr) is bool(code)
