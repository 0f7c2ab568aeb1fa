"""Test whole runs through the entry point."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rank_server import Launch, shared_ranks
from safetensors.torch import load_file

REPO = Path(__file__).resolve().parents[2]

RECIPE = """
stages:
  - method: sft
    base_model: tiny:addition
    dataset: addition:noise=0.5
    learning_rate: 2e-3
    schedule: linear
    warmup_steps: 2
    steps: 6
    batch_size: 64
    save_every: 4
    eval_every: 0
  - method: {method}
    learning_rate: 1e-3
    steps: 8
    batch_size: 8
    {extra}
    save_every: 3
    eval_every: 4
    rollouts_every: 4
dataset: addition
max_tokens: 4
temperature: 0.9
eval_limit: 16
reward: tests_rewards.py:digits
"""

REWARD = """
def digits(prompt, response, meta):
    # graded, so that even an untaught model has groups with signal
    return sum(c.isdigit() for c in response) / 4 + (response[:1] == "1")
"""


def write(folder: Path, method: str = "grpo", extra: str = "group_size: 4") -> Path:
    (folder / "tests_rewards.py").write_text(REWARD)
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(method=method, extra=extra))
    return path


def command(*words: str | Path) -> list[str]:
    return [sys.executable, str(REPO / "train.py"), *map(str, words)]


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **extra}


def start(*words: str | Path, cwd: Path, **options: str) -> Launch:
    """Start train.py as a separate process."""
    return shared_ranks().start(*words, cwd=cwd, **options)


def run(
    *words: str | Path, cwd: Path, ok: bool = True, **options: str
) -> subprocess.CompletedProcess:
    """Run train.py to its end. `stdout` and `stderr` both hold the output of both streams."""
    launch = start(*words, cwd=cwd, **options)
    (code,) = launch.wait(300)
    text = launch.output(0)
    assert not ok or code == 0, text
    return subprocess.CompletedProcess([], code or 0, text, text)


def rows(folder: Path) -> list[dict]:
    """Return the metrics without fields that depend on the clock."""
    parsed = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in parsed]


def final_weights(folder: Path, stage: str) -> dict[str, torch.Tensor]:
    model = folder / "checkpoints" / f"{stage}-final" / "model"
    return load_file(
        str(
            model
            / (
                "adapter_model.safetensors"
                if (model / "adapter_config.json").exists()
                else "model.safetensors"
            )
        )
    )


def assert_same(resumed: Path, reference_run: Path, stage: str) -> None:
    assert rows(resumed) == rows(reference_run)
    a, b = final_weights(resumed, stage), final_weights(reference_run, stage)
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    optimizer = [
        load_file(str(f / "checkpoints" / f"{stage}-final" / "optimizer.safetensors"))
        for f in (resumed, reference_run)
    ]
    assert all(torch.equal(optimizer[0][k], optimizer[1][k]) for k in optimizer[1])
    names = [
        sorted(p.name for p in (f / "checkpoints").iterdir()) for f in (resumed, reference_run)
    ]
    assert names[0] == names[1]


def kill_when(process: Launch, folder: Path, ready, options: int = signal.SIGKILL) -> None:
    """Send a signal once `ready(rows)` holds. Raises AssertionError if the run ends first."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        if (folder / "metrics.jsonl").exists():
            text = (folder / "metrics.jsonl").read_text()
            if ready([json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]):
                process.kill(0, options)
                process.wait(60)
                return
        assert not process.poll(), "the run ended before it could be disturbed"
        time.sleep(0.002)
    process.kill(0)
    raise AssertionError("the run never came that far")


@pytest.fixture(scope="module")
def reference_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    words = command(write(folder), "--output-dir", "out")
    done = subprocess.run(
        words, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return folder / "out"


@pytest.mark.slow
@pytest.mark.parametrize(
    "where",
    ["first stage before any checkpoint", "first stage", "second stage", "second stage late"],
)
def test_a_killed_run_resumes_to_the_same_bits(reference_run, tmp_path, where):
    stage, batch = {
        "first stage before any checkpoint": ("sft", 1),
        "first stage": ("sft", 4),
        "second stage": ("grpo", 3),
        "second stage late": ("grpo", 6),
    }[where]
    recipe = write(tmp_path)
    process = start(recipe, "--output-dir", "out", cwd=tmp_path)
    kill_when(
        process,
        tmp_path / "out",
        lambda seen: any(
            r["stage"] == stage and r.get("progress/batch", -1) >= batch for r in seen
        ),
    )
    assert not (tmp_path / "out" / "checkpoints" / "grpo-final").exists()
    done = run(recipe, "--output-dir", "out", "--resume", cwd=tmp_path)
    assert (
        "no complete checkpoint yet" if "before any" in where else "resuming from"
    ) in done.stdout
    assert_same(tmp_path / "out", reference_run, "grpo")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "extra"),
    [
        ("reinforce", "loss: ppo"),
        ("sft", "lora_rank: 2"),
        ("grpo", "{group_size: 4, lora_rank: 4, num_substeps: 2, loss: cispo}"),
    ],
)
def test_every_method_stopped_by_sigterm_resumes_to_the_same_bits(tmp_path, method, extra):
    extra = "\n    ".join(extra.strip("{}").split(", "))
    recipe = write(tmp_path, method, extra)
    name = "sft-2" if method == "sft" else method
    run(recipe, "--output-dir", "whole", cwd=tmp_path)
    process = start(recipe, "--output-dir", "out", cwd=tmp_path)
    ready = lambda seen: any(r["stage"] == name and r.get("progress/batch", -1) >= 3 for r in seen)  # noqa: E731
    kill_when(process, tmp_path / "out", ready, signal.SIGTERM)
    assert process.codes == [75]  # "run me again"
    run(recipe, "--output-dir", "out", "--resume", cwd=tmp_path)
    whole, resumed = tmp_path / "whole", tmp_path / "out"
    assert rows(resumed) == rows(whole)
    a, b = final_weights(resumed, name), final_weights(whole, name)
    assert all(torch.equal(a[k], b[k]) for k in b)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "grpo"])
def test_a_run_stopped_in_the_last_step_of_a_stage_ends_as_if_it_had_not_been(
    reference_run, tmp_path, stage
):
    """The signal arrives between the last update and the stage's final checkpoint: from a reward,
    or while rows are read.
    """
    recipe = write(tmp_path)
    code = f"""
import os, signal, sys
sys.argv = ["train.py", {str(recipe)!r}, "--output-dir", "out"]
sys.path.insert(0, {str(REPO)!r})
from rl.trainer.batch_log import BatchLog
original = BatchLog.write_row
def log(self, done, metrics):
    original(self, done, metrics)
    if self.context.name == {stage!r} and done == self.context.loop.steps:
        os.kill(os.getpid(), signal.SIGTERM)
BatchLog.write_row = log
import runpy
runpy.run_path({str(REPO / "train.py")!r}, run_name="__main__")
"""
    (tmp_path / "script.py").write_text(code)
    done = run(cwd=tmp_path, ok=False, script=str(tmp_path / "script.py"))
    assert done.returncode == 75, done.stderr
    run(recipe, "--output-dir", "out", "--resume", cwd=tmp_path)
    assert rows(tmp_path / "out") == rows(reference_run)
    a, b = final_weights(tmp_path / "out", "grpo"), final_weights(reference_run, "grpo")
    assert all(torch.equal(a[k], b[k]) for k in b)


@pytest.mark.slow
def test_rows_that_do_not_fit_are_named_before_anything_is_done(tmp_path):
    data = [{"prompt": "1+1=", "answer": "2", "response": "2"} for _ in range(400)]
    data[300]["prompt"] = "1" * 600
    (tmp_path / "long.jsonl").write_text("\n".join(json.dumps(row) for row in data))
    data[300]["prompt"], data[17]["response"] = "1+1=", "9" * 600
    (tmp_path / "answer.jsonl").write_text("\n".join(json.dumps(row) for row in data))
    for words, message in (
        (["grpo", "--dataset", "long.jsonl"], "line 301"),
        (["sft", "--dataset", "answer.jsonl", "--response-column", "response"], "line 18"),
        (
            ["sft", "--dataset", "addition:noise=0.5", "--lora-rank", "2", "--lora-alpha", "-1"],
            "--lora-alpha is positive",
        ),
    ):
        done = run(*words, "--max-tokens", "4", "--steps", "3", cwd=tmp_path, ok=False)
        assert (
            done.returncode == 2 and message in done.stderr and not (tmp_path / "runs").exists()
        ), done.stderr


@pytest.mark.slow
def test_resume_falls_back_to_an_older_checkpoint_and_says_so(reference_run, tmp_path):
    recipe = write(tmp_path)
    process = start(recipe, "--output-dir", "out", cwd=tmp_path)
    kill_when(
        process,
        tmp_path / "out",
        lambda seen: any(r["stage"] == "grpo" and r.get("progress/batch", -1) >= 6 for r in seen),
    )
    newest = max((tmp_path / "out" / "checkpoints").glob("grpo-*"))
    file = newest / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    done = run(recipe, "--output-dir", "out", "--resume", cwd=tmp_path)
    assert f"checkpoint {newest.name} cannot be used" in " ".join(done.stdout.split())
    assert_same(tmp_path / "out", reference_run, "grpo")


@pytest.mark.slow
def test_a_runs_folder_holds_what_it_promises(reference_run):
    names = {p.name for p in reference_run.iterdir()}
    assert names >= {
        "config.json",
        "metrics.jsonl",
        "checkpoints.jsonl",
        "curves.png",
        "rollouts",
        "checkpoints",
    }
    last = [
        json.loads(line) for line in (reference_run / "metrics.jsonl").read_text().splitlines()
    ][-1]
    expected = """reward/total env/all/reward/total progress/batch progress/done_frac optim/lr optim/kl_sample_train_v1
        optim/kl_sample_train_v2 optim/entropy optim/grad_norm env/all/ac_tokens_per_turn env/all/ob_tokens_per_turn
        env/all/turns_per_episode env/all/total_episodes env/all/by_group/frac_mixed env/all/by_group/frac_all_good
        env/all/by_group/frac_all_bad test/env/all/reward/total time/step""".split()
    assert [name for name in expected if name not in last] == []
    assert (
        last["reward/total"] == last["env/all/reward/total"] and last["progress/done_frac"] == 1.0
    )
    assert last["optim/max_logprob_difference"] < 1e-4
    checkpoints = [
        json.loads(line) for line in (reference_run / "checkpoints.jsonl").read_text().splitlines()
    ]
    assert all({"name", "batch", "state_path", "sampler_path"} <= row.keys() for row in checkpoints)
    assert all((reference_run.parent / row["sampler_path"]).is_dir() for row in checkpoints)
    sampled = [
        json.loads(line)
        for line in next(iter((reference_run / "rollouts").glob("step_*.jsonl")))
        .read_text()
        .splitlines()
    ]
    assert len(sampled) == 32 and all(
        len(r["response_tokens"]) == len(r["logprobs"]) for r in sampled
    )


@pytest.mark.slow
def test_a_folder_with_a_run_is_not_written_to(reference_run):
    recipe = reference_run.parent / "recipe.yaml"
    done = run(recipe, "--output-dir", "out", cwd=reference_run.parent, ok=False)
    assert (
        done.returncode == 2
        and "--resume" in done.stderr
        and "--overwrite" in done.stderr
        and "Traceback" not in done.stderr
    )
    done = run(
        recipe,
        "--output-dir",
        "out",
        "--resume",
        "--learning-rate",
        "0.5",
        cwd=reference_run.parent,
        ok=False,
    )
    assert (
        done.returncode == 2 and "learning_rate" in done.stderr and "Traceback" not in done.stderr
    )
    assert "nothing was started" in done.stderr
    # A finished run reports that it is done and changes nothing.
    done = run(recipe, "--output-dir", "out", "--resume", cwd=reference_run.parent)
    assert "done" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sft", "--base-model", "./no/such"], "no model folder"),
        (["sft", "--base-model", "tiny:adition"], "tiny:addition"),
        (["sft", "--base-model", "owner/unheard-of"], "HF_HUB_OFFLINE"),
        (["grpo", "--reward", "exact_matsch"], "exact_match"),
        (["grpo", "--reward", "no_such_module:f"], "no_such_module"),
        (["sft", "--dataset", "./rows.jsonl"], "rows.jsonl"),
        (["grpo", "--renderer", "chatml"], "chat_template"),
        (["grpo", "--base-model", "tiny:chat"], "--tokenizer"),
        (["grpo", "--max-tokens", "5000"], "5000"),
    ],
)
def test_mistakes_are_one_box_without_a_traceback(tmp_path, words, message):
    done = run(*words, cwd=tmp_path, ok=False)
    flat = " ".join(done.stderr.replace("│", " ").split())
    assert done.returncode == 2 and message in flat and "Traceback" not in done.stderr, done.stderr
    assert "1 problem: nothing was started" in flat
    assert not list(tmp_path.glob("runs/*/metrics.jsonl")) or "5000" in message


@pytest.mark.slow
def test_a_reward_that_fails_costs_its_sample_and_one_that_always_fails_ends_the_run(tmp_path):
    recipe = write(tmp_path)
    (tmp_path / "tests_rewards.py").write_text(
        "def digits(prompt, response, meta):\n"
        "    if response[:1] in '1234':\n"
        "        raise KeyError('colour')\n"
        "    return float(len(response))\n"
    )
    done = run(recipe, "--output-dir", "some", cwd=tmp_path)
    assert "KeyError" in done.stdout and "colour" in done.stdout
    assert any(row.get("reward/failed", 0) > 0 for row in rows(tmp_path / "some"))
    (tmp_path / "tests_rewards.py").write_text(
        "def digits(prompt, response, meta):\n    return float('nan')\n"
    )
    done = run(recipe, "--output-dir", "all", cwd=tmp_path, ok=False)
    flat = " ".join(done.stderr.replace("│", " ").split())
    # the reward is tried on the data's answers
    assert (
        done.returncode == 2 and "returned nan" in flat and "1 problem: nothing was started" in flat
    )
    only_right = (
        "def digits(prompt, response, meta):\n    return 1.0 if response == meta['answer'] else 1 "
        "/ 0\n"
    )
    (tmp_path / "tests_rewards.py").write_text(only_right)
    done = run(
        recipe,
        "--output-dir",
        "most",
        "--temperature",
        "50",
        "--max-tokens",
        "8",
        cwd=tmp_path,
        ok=False,
    )
    assert done.returncode == 2 and "failed on every sample" in " ".join(
        done.stderr.replace("│", " ").split()
    )
    assert "1 problem: the run stopped" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0,
    reason="taking the network away needs root (unshare -n)",
)
def test_a_run_with_the_network_off_works(tmp_path):
    recipe = write(tmp_path)
    words = ["unshare", "-n", *command(recipe, "--output-dir", "out")]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300
    )
    if "unshare failed" in done.stderr:
        pytest.skip(f"this machine does not allow it: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert {p.name for p in tmp_path.iterdir()} <= {
        "out",
        "recipe.yaml",
        "tests_rewards.py",
        "__pycache__",
    }
