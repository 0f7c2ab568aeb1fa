"""Test the reward check at startup: it reports what a bad reward pays for before the first step,
and does not change the run.
"""

import contextlib
import io
import json
from pathlib import Path

import pytest

import rl
from rl.errors import UserError
from rl.jsonl import read_jsonl
from rl.reporting import Console
from rl.rewards import Scorer
from rl.trainer import preflight
from rl.trainer.preflight import check_rewards_at_start, prepare_stages
from rl.trainer.run_summary import format_check_command

SMALL = {
    "base_model": "tiny:addition",
    "dataset": "addition",
    "steps": 2,
    "batch_size": 4,
    "group_size": 4,
    "max_tokens": 4,
    "eval_every": 0,
    "save_every": 0,
    "self_test": False,
    "quiet": True,
}
# The reward of an answer depends on the number of previous calls.
COUNTING = """
calls = 0


def counts_calls(prompt, response, meta):
    global calls
    calls += 1
    return float(calls % 3) + float(str(meta["answer"]) in response)


def slow(prompt, response, meta):
    import time

    time.sleep(0.5)
    return 0.0
"""


def read(*words: str):
    return rl.config.read_run(
        list(words), rl.algorithms.METHODS, Path("unused.yaml"), rl.config.RunSettings
    )


def check(tmp_path, *words: str, place: str | None = None) -> tuple[str, dict]:
    """Return the printed text about the reward of a run with these settings, and the saved entry."""
    stream = io.StringIO()
    with contextlib.ExitStack() as stack:
        stages = prepare_stages(read("grpo", "--dataset", "addition", *words).stages, stack)
        if place is not None:
            stages[0].scorer.place = place
        check_rewards_at_start(stages, tmp_path, Console(stream=stream), "CHECK")
    (entry,) = json.loads((tmp_path / "reward_check.json").read_text())["rewards"]
    return stream.getvalue(), entry


@pytest.fixture
def rewards(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(COUNTING)
    return path


def test_a_good_reward_takes_one_line(tmp_path):
    shown, entry = check(tmp_path, "--reward", "exact_match")
    (line,) = shown.splitlines()
    assert line.startswith("note: reward exact_match passed the mutant check on 50 rows")
    assert entry["rows"] == 50 and entry["warnings"] == [] and entry["skipped"] is None
    assert entry["results"][0]["name"] == "the right answer" and entry["results"][0]["mean"] == 1.0


def test_a_bad_reward_is_shown_as_a_table_with_warnings(tmp_path, monkeypatch):
    # on a loaded machine the worker may need more than two seconds to start
    monkeypatch.setattr(preflight, "STARTUP_SECONDS", 120.0)
    monkeypatch.setattr(preflight, "_SLOW_TRIAL_SECONDS", 120.0)
    path = tmp_path / "bad.py"
    path.write_text(
        "def contains(prompt, response, meta):\n    return float(str(meta['answer']) in response)\n"
    )
    shown, entry = check(tmp_path, "--reward", f"{path}:contains")
    table, *warnings = shown.split("warning: ")[1:]
    assert "contains pays for, right answers as" in table
    (row,) = [line for line in table.splitlines() if line.startswith("all candidates listed")]
    assert "50 of 50" in row
    assert [text for text in warnings if "all candidates listed pays as much" in text]
    assert [text for text in entry["warnings"] if text.startswith("all candidates listed")]


def test_a_check_that_fails_does_not_end_the_run(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise OSError("no process is available")

    monkeypatch.setattr(preflight, "probe_reward", fail)
    shown, entry = check(tmp_path, "--reward", "exact_match")
    assert shown.startswith("note: ") and "no process is available" in entry["skipped"]


def test_rewards_that_cannot_be_checked_quickly_are_skipped_with_a_line(tmp_path, rewards):
    shown, entry = check(tmp_path, "--reward", f"{rewards}:slow", "--reward-workers", "2")
    (line,) = shown.splitlines()
    assert "scoring a few rows took" in entry["skipped"] and entry["rows"] == 0
    assert line.endswith(f"{entry['skipped']}: CHECK checks it")


def test_the_command_trusts_a_reward_outside_the_folder_and_is_not_of_a_function(
    tmp_path, rewards, monkeypatch
):
    words = ["--reward", f"{rewards}:slow"]
    stages = read("grpo", "--dataset", "addition", *words).stages
    assert format_check_command(tmp_path / "run", stages).endswith(" --trust-run")
    monkeypatch.chdir(tmp_path)
    assert "--trust-run" not in format_check_command(tmp_path / "run", stages)
    shown, _ = check(tmp_path, *words, place="thread")
    assert "function of this process" in shown and "CHECK" not in shown


def test_a_stage_that_cannot_be_prepared_leaves_no_workers_of_earlier_ones(tmp_path, monkeypatch):
    stages = "stages: [{method: grpo, dataset: addition}, {method: sft, dataset: nowhere.jsonl}]"
    (tmp_path / "two.yaml").write_text(f"base_model: tiny:addition\n{stages}\n")
    run = read(str(tmp_path / "two.yaml"))
    closed, close = [], Scorer.close
    monkeypatch.setattr(Scorer, "close", lambda self: closed.append(self) or close(self))
    with pytest.raises(UserError, match="nowhere.jsonl"), contextlib.ExitStack() as stack:
        prepare_stages(run.stages, stack)
    assert len(closed) == 1


@pytest.mark.slow
def test_the_check_does_not_change_a_run_even_of_a_reward_with_state(tmp_path, rewards):
    values, settings = [], {"reward": f"{rewards}:counts_calls", "reward_workers": 1}
    for reward_check in (True, False):
        folder = tmp_path / str(reward_check)
        rl.train("grpo", **SMALL, **settings, output_dir=folder, reward_check=reward_check)
        rows = read_jsonl(folder / "metrics.jsonl")
        values.append([{k: v for k, v in row.items() if "time" not in k} for row in rows])
        assert (folder / "reward_check.json").exists() is reward_check
    assert values[0] == values[1] and len({row["reward/total"] for row in values[0]}) == 2


def test_a_reward_of_this_process_is_not_called(tmp_path):
    requests = []

    def closure(prompt, response, meta):
        requests.append(response)
        return float(len(response))

    counts = []
    for reward_check in (True, False):
        folder = tmp_path / str(reward_check)
        small = SMALL | {"steps": 1, "reward": closure}
        rl.train("grpo", **small, output_dir=folder, reward_check=reward_check)
        counts.append(len(requests))
        requests.clear()
    assert counts[0] == counts[1] > 0
    (entry,) = json.loads((tmp_path / "True" / "reward_check.json").read_text())["rewards"]
    assert "function of this process" in entry["skipped"]
    pytest.importorskip("plotly")
    page = rl.trainer.write_report([tmp_path / "True"]).read_text()
    assert "What the reward pays for" in page and "was skipped, because <bdi>it is a" in page
    assert "What the reward pays for" not in rl.trainer.write_report([folder]).read_text()
