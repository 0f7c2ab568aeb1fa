"""Test --profile: its trace and table hold every part of a step, and it changes no result."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from whole_runs import RECIPE, read_metrics, same_weights

from bench import gpu_runs
from rl.algorithms import METHODS
from rl.config import RunSettings, parse_run
from rl.trainer.execute import execute
from rl.trainer.step_profile import TracedEvent, format_parts, measure_parts

SMALL = "--base-model tiny:addition --batch-size 4 --group-size 4 --max-tokens 4 --eval-limit 4"


def train(folder: Path, words: str) -> None:
    words = [*words.split(), "--output-dir", str(folder)]
    execute(parse_run(words, METHODS, RECIPE, options=RunSettings))


def read_figures(folder: Path) -> dict[str, float]:
    """Return the milliseconds on the host by part, of the table in a profile's folder."""
    table = next(folder.glob("*.txt")).read_text().split("\n\n")[0]
    return {line[:34].strip(): float(line[34:44]) for line in table.splitlines()[1:]}


@pytest.mark.parametrize("mode", ["lockstep", "async"])
def test_a_profile_holds_the_parts_of_a_step_and_changes_no_result(tmp_path, capsys, mode):
    words = f"grpo {SMALL} --steps 4 --rollout-mode {mode}"
    plain, profiled = tmp_path / "plain", tmp_path / "profiled"
    train(plain, words)
    capsys.readouterr()
    train(profiled, f"{words} --profile 2")
    printed = capsys.readouterr().out
    assert read_metrics(plain) == read_metrics(profiled) and same_weights(plain, profiled)

    folder = profiled / "profile"
    assert not (plain / "profile").exists()
    table = (folder / "grpo.txt").read_text()
    assert "aten::mm" in table  # the operators, below the parts
    parts = table.split("\n\n")[0].splitlines()
    assert all(f"  {line}" in printed for line in parts)
    figures = read_figures(folder)
    for part in ("sample", "score", "collate", "forward", "backward", "update", "weight transfer"):
        assert figures[part] > 0, part
    updates = [event for event in read_events(folder) if event["name"] == "whetstone/update"]
    assert len(updates) == 2  # a single update in each of the two steps
    seconds = sum(event["dur"] for event in updates) / 1e3
    assert figures["update"] == pytest.approx(seconds / 2, abs=0.06)

    # bench/gpu.py reads the same table
    rows = {}
    table = SimpleNamespace(
        path=tmp_path / "step.csv", row=lambda case, *cells: rows.update({cells[:2]: cells[2:]})
    )
    gpu_runs._record_profile(table, "LoRA, tiny", profiled)
    assert rows == {(part, "host_ms"): (value, "ms") for part, value in figures.items()}
    assert (tmp_path / "profile_LoRA_grpo.json.gz").is_file()


def read_events(folder: Path, name: str = "grpo") -> list[dict]:
    """Return the events of a trace that have a name."""
    with gzip.open(folder / f"{name}.json.gz") as file:
        return [event for event in json.load(file)["traceEvents"] if "name" in event]


MODES = {
    "sync": "",
    "continuous": "--rollout-mode async",
    "streamed": "--stream-minibatches 2",
    "async": "--max-steps-off-policy 1",
}


@pytest.mark.parametrize(
    "mode",
    [
        "sync",
        "streamed",
        pytest.param("continuous", marks=pytest.mark.slow),
        pytest.param("async", marks=pytest.mark.slow),
    ],
)
def test_the_rows_add_up_to_the_steps_with_evaluations_between_them(tmp_path, mode):
    """A reward in a worker process is waited for. An evaluation samples too, but is not part of a
    step: the profiler continues after it.
    """
    (tmp_path / "slow_reward.py").write_text(SLOW_REWARD)
    reward = f"--reward {tmp_path}/slow_reward.py:score --reward-workers 1"
    words = f"grpo {SMALL} {MODES[mode]} {reward} --steps 5 --eval-every 3 --profile 3"
    train(tmp_path / "run", words)
    folder = tmp_path / "run" / "profile"
    assert sorted(path.name for path in folder.iterdir()) == [
        "grpo+2.json.gz", "grpo.json.gz", "grpo.txt"
    ]  # fmt: skip
    traces = [[e for e in read_events(folder, name) if "dur" in e] for name in ("grpo", "grpo+2")]
    names = [[event["name"] for event in events] for events in traces]
    assert [trace.count("whetstone/step") for trace in names] == [2, 1]  # the steps 2, 3, and 4
    assert [trace.count("whetstone/update") for trace in names] == [2, 1]
    sampling = {"whetstone/sample", "whetstone/run_steps"}
    assert all(sampling & set(trace) for trace in names)

    figures = read_figures(folder)
    parts = ["sample", "wait", "score", "collate", "forward", "backward", "update"]
    parts += ["weight transfer"]
    others = ["parts at the same time", "rest of the step", "wall time of the step"]
    assert list(figures) == parts + others
    assert all(figures[part] > 0 for part in parts)
    assert figures["wait"] >= 4 * 4  # milliseconds: four prompts by a single worker
    assert figures["rest of the step"] >= 0 >= figures["parts at the same time"]
    total = figures.pop("wall time of the step")
    assert sum(figures.values()) == pytest.approx(total, abs=0.05 * (len(figures) + 1))
    steps = [e["dur"] for events in traces for e in events if e["name"] == "whetstone/step"]
    assert total == pytest.approx(sum(steps) / 3e3, abs=0.06)
    if mode == "sync":  # learner and sampler take turns
        assert figures["parts at the same time"] == pytest.approx(0.0, abs=0.06)


SLOW_REWARD = """import time

def score(prompt, response, meta):
    time.sleep(0.004)
    return float(len(response) % 2)
"""


def region(name: str, start: float, end: float, device: float = 0.0) -> TracedEvent:
    """Return a region with its times in milliseconds."""
    return TracedEvent(name, (1e3 * start, 1e3 * end), 1e3 * device)


def test_the_table_against_hand_made_regions():
    """Two steps with an evaluation between them, in which a judge samples."""
    regions = [
        region("step", 0, 500),
        region("sample", 0, 200, 150),
        region("run_steps", 150, 300, 50),  # 50 ms of it beside the region before
        region("wait", 300, 400),
        region("forward", 350, 380, 60),  # of another thread
        region("sample", 600, 900, 999),  # the evaluation
        region("step", 1000, 1500),
        region("judge", 1000, 1150),
        region("sample", 1010, 1050, 7),  # by the judge: part of the score
        region("update", 1450, 1600),  # ends after the step
    ]
    text = format_parts([measure_parts(regions)], 2, cuda=True)
    rows = {line[:34].strip(): line[34:].split() for line in text.splitlines()}
    assert rows == {
        "part of a step": ["host", "ms", "device", "ms", "share"],
        "sample": ["150.0", "100.0", "30.0%"],
        "wait": ["50.0", "0.0", "10.0%"],
        "score": ["75.0", "0.0", "15.0%"],
        "collate": ["0.0", "0.0", "0.0%"],
        "forward": ["15.0", "30.0", "3.0%"],
        "backward": ["0.0", "0.0", "0.0%"],
        "update": ["25.0", "0.0", "5.0%"],
        "weight transfer": ["0.0", "0.0", "0.0%"],
        "parts at the same time": ["-15.0", "0.0", "-3.0%"],
        "rest of the step": ["200.0", "0.0", "40.0%"],
        "wall time of the step": ["500.0", "130.0", "100.0%"],
    }
    # a second trace, of as many steps
    twice = format_parts([measure_parts(regions)] * 2, 4, cuda=True)
    assert twice == text


def test_an_update_beside_a_slow_reward_keeps_its_rows():
    """The reward runs in the loop's thread, and the update of asynchronous training in another."""
    regions = [
        region("step", 0, 500),
        region("score", 0, 300),
        region("forward", 100, 120, 60),
        region("backward", 120, 180, 100),
        region("judge", 300, 400),
        region("backward", 310, 330, 50),  # no judge model has a backward
    ]
    figures = measure_parts(regions)
    assert figures["score"] == (0.4, 0.0)
    assert figures["forward"] == pytest.approx((0.02, 0.06))
    assert figures["backward"] == pytest.approx((0.08, 0.15))
    assert figures["parts at the same time"] == pytest.approx((-0.1, 0.0))
    assert figures["wall time of the step"] == pytest.approx((0.5, 0.21))


def test_a_run_of_a_single_step_is_profiled(tmp_path, capsys):
    words = SMALL.replace("--group-size 4 --max-tokens 4", "")
    train(tmp_path / "run", f"sft {words} --steps 1 --profile 3")
    assert "backward" in capsys.readouterr().out
    assert (tmp_path / "run" / "profile" / "sft.json.gz").is_file()
