"""Test rewards that run on several machines of a launch: their scores, failures and metrics equal
those of one machine. A second machine is another process with its own connection to rank 0.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rank_server import shared_ranks
from safetensors.torch import load_file
from test_rewards_scorer import MODULE, wait_until_dead

from rl.config import data_config
from rl.rewards import Scorer
from rl.rewards.reward_machines import RewardMachines
from rl.trainer import stage_data

REPO = Path(__file__).resolve().parents[2]
MACHINE = """
import json, sys
from rl.rewards import serve_reward_workers
serve_reward_workers("127.0.0.1", *json.loads(sys.argv[1])).join()
"""
# LC_* variables reach a worker, and the second machine has a different one.
REWARDS = (
    MODULE
    + """
from rl.rewards import RewardResult, register_reward
def slow(prompt, response, meta=None):
    time.sleep(0.05)
    is_second = os.environ.get("LC_MACHINE") == "second"
    key = len(os.environ.get("SOME_KEY", ""))
    return RewardResult(len(response), {"is_second": is_second, "key": key, "pid": os.getpid()})
def blocks(prompt, response, meta=None):
    if prompt == "block":
        open(response, "w").close()
        time.sleep(1000)
    return misbehave(prompt, response, meta)
@register_reward("batch_size", batched=True, replace=True)
def batch_size(prompts, responses, metas):
    return [float(len(prompts))] * len(prompts)
"""
)


class Machines:
    """Rank 0's machines, and processes that stand for the other machines."""

    def __init__(self):
        self.machines, self.processes = RewardMachines(), []
        self.machines.listen()

    def add(self, token: str | None = None) -> subprocess.Popen:
        port, secret = self.machines.address
        address = json.dumps([port, token or secret])
        environment = {**os.environ, "LC_MACHINE": "second", "PYTHONPATH": str(REPO)}
        environment.pop("SOME_KEY", None)
        process = subprocess.Popen(
            [sys.executable, "-c", MACHINE, address],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    def wait(self, scorer: Scorer, workers: int) -> None:
        """Wait until a scorer has a number of workers in total."""
        deadline = time.monotonic() + 60
        while len(scorer._threads) < workers:
            assert time.monotonic() < deadline, "no machine has connected"
            time.sleep(0.01)


@pytest.fixture
def launch():
    launch = Machines()
    yield launch
    launch.stop()


@pytest.fixture(scope="module")
def two_machines():
    """Return the machines of a launch with a second one, for the tests that do not end it."""
    launch = Machines()
    launch.add()
    yield launch
    launch.stop()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rewards_of_machines.py"
    path.write_text(REWARDS)
    return path


def test_both_machines_score_and_scores_come_in_the_order_of_the_items(
    two_machines, file, monkeypatch
):
    monkeypatch.setenv("SOME_KEY", "1234")
    options = {"workers": 2, "timeout": 20.0, "environment": ["SOME_KEY"]}
    items = [("ask", "x" * i, None) for i in range(40)]
    with Scorer(f"{file}:slow", machines=two_machines.machines, **options) as scorer:
        two_machines.wait(scorer, 4)
        scorer.score_many(items)  # the second machine's workers have started
        scores = scorer.score_many(items)
        seconds = scorer.take_seconds()
    assert [score.reward for score in scores] == list(range(40))
    second = [score.metrics["is_second"] for score in scores]
    assert 10 <= sum(second) <= 30
    assert len({score.metrics["pid"] for score in scores}) == 4
    # only rank 0 has the variable
    assert {score.metrics["key"] for score in scores} == {4.0}
    assert seconds["slow"] >= 80 * 0.05
    assert scorer.counts["calls"] == 80


def test_an_answer_fails_on_another_machine_as_on_this_one(launch, file, tmp_path):
    """The only worker of this machine is busy, so each item runs on the other one."""
    bad = ["raise", "nan", "text", "die", "hang"]
    responses = [text for index, word in enumerate(bad) for text in (str(index), word)] + ["9"]
    items = [(f"ask {text}", text, None) for text in responses]
    with Scorer(f"{file}:misbehave", timeout=1.0, workers=1) as here:
        expected, counts = here.score_many(items), here.counts
    started = tmp_path / "started"
    with Scorer(f"{file}:blocks", timeout=300.0, workers=1, machines=launch.machines) as there:
        there.submit("block", str(started), None)
        while not started.exists():
            time.sleep(0.01)
        launch.add()
        there.timeout = 1.0
        scores, other_counts = there.score_many(items), dict(there.counts)
    assert [(s.reward, s.metrics, s.failure) for s in scores] == [
        (s.reward, s.metrics, s.failure) for s in expected
    ]
    assert [(s.error or "").replace(":blocks'", ":misbehave'") for s in scores] == [
        s.error or "" for s in expected
    ]
    assert other_counts == counts


def test_a_reward_that_hangs_there_ends_with_the_processes_that_it_started(launch, file, tmp_path):
    started, child = tmp_path / "started", tmp_path / "child"
    with Scorer(f"{file}:blocks", timeout=300.0, workers=1, machines=launch.machines) as scorer:
        scorer.submit("block", str(started), None)
        while not started.exists():
            time.sleep(0.01)
        launch.add()
        scorer.timeout = 2.0
        assert scorer.score_many([("ask", "child", {"file": str(child)})])[0].failure == "timeout"
        assert wait_until_dead(int(child.read_text()))
        pid = scorer.score_many([("ask", "pid", None)])[0].reward
    assert wait_until_dead(int(pid))  # the scorer is closed


def test_a_batch_is_scored_in_one_call_as_on_one_machine(two_machines, file):
    with Scorer(f"{file}:slow", workers=1, machines=two_machines.machines) as other:
        two_machines.wait(other, 2)
    with Scorer(f"{file}:batch_size", machines=two_machines.machines) as scorer:
        scores = scorer.score_many([("ask", str(i), None) for i in range(8)])
    assert [score.reward for score in scores] == [8.0] * 8


def test_a_machine_that_is_lost_costs_no_answer(launch, file, monkeypatch):
    """Its worker holds an answer when the machine ends."""
    machine = launch.add()
    with Scorer(f"{file}:slow", workers=1, timeout=20.0, machines=launch.machines) as scorer:
        launch.wait(scorer, 2)
        items = [("ask", "x" * i, None) for i in range(40)]
        scorer.score_many(items)  # the worker there has started
        pending = [scorer.submit(*item) for item in items]
        time.sleep(0.2)
        monkeypatch.setattr("rl.rewards.reward_machines._REQUEST_SECONDS", 0.5)
        monkeypatch.setattr("rl.rewards.reward_scorer._RESTART_SECONDS", (0.05,))
        machine.kill()
        scores = [score.result(60) for score in pending]
    assert [score.reward for score in scores] == list(range(40))
    assert 1 <= sum(score.metrics["is_second"] for score in scores) <= 20


def test_a_machine_with_another_token_is_refused(launch, file):
    stranger = launch.add(token="0" * 32)
    with Scorer(f"{file}:slow", workers=1, machines=launch.machines) as scorer:
        assert stranger.wait(60) == 0  # rank 0 closes the connection
        assert scorer.score_many([("ask", "x", None)])[0].metrics["is_second"] == 0.0
        assert len(scorer._threads) == 1


def test_a_machine_that_cannot_load_the_reward_leaves_its_work_to_the_others(
    two_machines, file, caplog, monkeypatch
):
    """The reward is a module of rank 0's path only."""
    monkeypatch.setattr("rl.rewards.reward_scorer._RESTART_SECONDS", (0.05,))
    monkeypatch.syspath_prepend(str(file.parent))
    with Scorer("rewards_of_machines:slow", workers=1, machines=two_machines.machines) as scorer:
        two_machines.wait(scorer, 2)
        scores = scorer.score_many([("ask", "x" * i, None) for i in range(60)])
    assert [score.reward for score in scores] == list(range(60))
    assert {score.metrics["is_second"] for score in scores} == {0.0}
    assert "rewards_of_machines" in caplog.text


@pytest.mark.parametrize(("setting", "reward", "spreads"), [
    ("auto", "math_correctness", True),
    ("auto", "code_tests", True),
    ("auto", "FILE", True),
    ("first", "math_correctness", False),
    ("first", "FILE", False),
    ("all", "FILE", True),
    ("all", "code_tests", True),
])  # fmt: skip
def test_the_setting_chooses_the_machines(setting, reward, spreads, file, monkeypatch):
    passed = []
    monkeypatch.setattr(stage_data, "Scorer", lambda reward, **options: passed.append(options))
    reward = f"{file}:slow" if reward == "FILE" else reward
    stage_data.make_scorer(reward, data_config.DataSettings(reward_machines=setting))
    assert (passed[0]["machines"] is not None) == spreads


RECIPE = """
method: grpo
base_model: tiny:addition
dataset: addition
learning_rate: 1e-3
steps: 2
batch_size: 8
group_size: 4
max_tokens: 4
eval_limit: 8
eval_every: 1
save_every: 1
reward_workers: 1
reward_machines: all
reward_timeout: 5
reward: graded.py:digits
"""
GRADED = """
import time
def digits(prompt, response, meta):
    print("scored")
    time.sleep(0.01)
    if response[:1] == "7":
        raise ValueError("a seven")
    return sum(c.isdigit() for c in response) / 4 + (response[:1] == "1")
"""


@pytest.fixture(scope="module", params=["", "sampler_ranks: 1\n"])
def run_pair(request, tmp_path_factory):
    """Return (outputs, folders) of a run on two ranks of one machine and on two machines."""
    outputs, folders = [], []
    for per_machine in (2, 1):
        folder = tmp_path_factory.mktemp(f"ranks{per_machine}")
        (folder / "graded.py").write_text(GRADED)
        (folder / "recipe.yaml").write_text(RECIPE + request.param)
        options = {"LOCAL_WORLD_SIZE": str(per_machine)}
        if per_machine == 1:
            options |= {"LOCAL_RANK": "0"}
        launch = shared_ranks().start(
            "recipe.yaml", "--output-dir", "out", cwd=folder, world=2, **options
        )
        assert launch.wait(300) == [0, 0], launch.output()
        outputs.append([launch.output(rank) for rank in (0, 1)])
        folders.append(folder / "out")
    return outputs, folders


def read_rows(folder: Path, name: str) -> list[dict]:
    """Return the rows of a file without fields that depend on the clock."""
    rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


@pytest.mark.slow
def test_a_run_on_two_machines_equals_a_run_on_one(run_pair):
    outputs, (one, two) = run_pair
    metrics = read_rows(two, "metrics.jsonl")
    assert metrics == read_rows(one, "metrics.jsonl")
    assert any("a seven" in text for text in outputs[1])
    states = [
        load_file(str(f))
        for folder in (one, two)
        for f in folder.glob("checkpoints/*-final/model/model.safetensors")
    ]
    assert len(states) == 2 and all(torch.equal(states[0][k], states[1][k]) for k in states[0])
    # the second rank runs workers only on the second machine
    assert "digits] scored" not in outputs[0][1] and "digits] scored" in outputs[1][1]
    assert "digits] scored" in outputs[1][0]


@pytest.mark.slow
def test_no_process_of_a_reward_outlives_the_ranks(run_pair):
    assert shared_ranks().nothing_left() == []
