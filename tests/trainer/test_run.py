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
from whole_runs import RECIPE as ADDITION
from whole_runs import read_metrics as rows

from rl.algorithms import METHODS
from rl.config import RunSettings, parse_run
from rl.jsonl import read_jsonl
from rl.trainer import main

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
    batch_size: 16
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


def run(*words: str | Path, cwd: Path, code: int = 0, **options: str) -> str:
    """Run train.py to its end, check its exit code, and return the output of both streams."""
    launch = start(*words, cwd=cwd, **options)
    assert launch.wait(300) == [code], launch.output(0)
    return launch.output(0)


def flat(text: str) -> str:
    """Return the text of boxes as a single line."""
    return " ".join(text.replace("│", " ").split())


def final_weights(folder: Path, stage: str) -> dict[str, torch.Tensor]:
    (file,) = (folder / "checkpoints" / f"{stage}-final" / "model").glob("*model.safetensors")
    return load_file(str(file))


def assert_same(resumed: Path, reference_run: Path, stage: str, *, names: bool = True) -> None:
    """Check that metrics, weights and the optimizer are equal, and the names of checkpoints unless
    a stop has saved one more.
    """
    assert rows(resumed) == rows(reference_run)
    a, b = final_weights(resumed, stage), final_weights(reference_run, stage)
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    folders = [folder / "checkpoints" for folder in (resumed, reference_run)]
    c, d = (load_file(str(f / f"{stage}-final" / "optimizer.safetensors")) for f in folders)
    assert c.keys() == d.keys() and all(torch.equal(c[k], d[k]) for k in c)
    saved = [sorted(path.name for path in folder.iterdir()) for folder in folders]
    assert saved[0] == saved[1] or not names


def kill_at(
    process: Launch, folder: Path, stage: str, batch: int, number: int = signal.SIGKILL
) -> None:
    """Send a signal once the metrics have this batch of a stage. Raises AssertionError if the run
    ends first.
    """
    deadline = time.monotonic() + 240
    while True:
        text = path.read_text() if (path := folder / "metrics.jsonl").exists() else ""
        seen = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        if any(r["stage"] == stage and r.get("progress/batch", -1) >= batch for r in seen):
            process.kill(0, number)
            process.wait(60)
            return
        assert not process.poll(), "the run ended before it could be disturbed"
        assert time.monotonic() < deadline, "the run never came that far"
        time.sleep(0.002)


@pytest.fixture(scope="module")
def reference_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    run(write(folder), "--output-dir", "out", cwd=folder)
    return folder / "out"


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "batch", "begins"), [
    ("sft", 1, "no complete checkpoint yet"),
    ("sft", 4, "resuming from"),
    ("grpo", 3, "resuming from"),
])  # fmt: skip
def test_a_killed_run_resumes_to_the_same_bits(reference_run, tmp_path, stage, batch, begins):
    recipe = write(tmp_path)
    kill_at(start(recipe, "--output-dir", "out", cwd=tmp_path), tmp_path / "out", stage, batch)
    assert not (tmp_path / "out" / "checkpoints" / "grpo-final").exists()
    assert begins in run(recipe, "--output-dir", "out", "--resume", cwd=tmp_path)
    assert_same(tmp_path / "out", reference_run, "grpo")


@pytest.mark.slow
def test_a_run_stopped_by_sigterm_resumes_to_the_same_bits(tmp_path):
    extra = "\n    ".join(("group_size: 4", "lora_rank: 4", "num_substeps: 2", "loss: cispo"))
    recipe = write(tmp_path, "grpo", extra)
    run(recipe, "--output-dir", "whole", cwd=tmp_path)
    process = start(recipe, "--output-dir", "out", cwd=tmp_path)
    kill_at(process, tmp_path / "out", "grpo", 3, signal.SIGTERM)
    assert process.codes == [75]  # "run me again"
    run(recipe, "--output-dir", "out", "--resume", cwd=tmp_path)
    assert_same(tmp_path / "out", tmp_path / "whole", "grpo", names=False)


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
    run(cwd=tmp_path, code=75, script=str(tmp_path / "script.py"))
    run(recipe, "--output-dir", "out", "--resume", cwd=tmp_path)
    assert_same(tmp_path / "out", reference_run, "grpo", names=False)


@pytest.mark.slow
def test_resume_falls_back_to_an_older_checkpoint_and_says_so(reference_run, tmp_path):
    recipe = write(tmp_path)
    kill_at(start(recipe, "--output-dir", "out", cwd=tmp_path), tmp_path / "out", "grpo", 6)
    newest = max((tmp_path / "out" / "checkpoints").glob("grpo-*"))
    file = newest / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    text = flat(run(recipe, "--output-dir", "out", "--resume", cwd=tmp_path))
    assert f"checkpoint {newest.name} cannot be used" in text
    assert_same(tmp_path / "out", reference_run, "grpo")


@pytest.mark.slow
def test_a_runs_folder_holds_what_it_promises(reference_run):
    names = {path.name for path in reference_run.iterdir()}
    assert names >= {
        "config.json", "metrics.jsonl", "checkpoints.jsonl", "curves.png", "rollouts",
        "checkpoints",
    }  # fmt: skip
    last = read_jsonl(reference_run / "metrics.jsonl")[-1]
    expected = """reward/total env/all/reward/total progress/batch progress/done_frac optim/lr optim/kl_sample_train_v1
        optim/kl_sample_train_v2 optim/entropy optim/grad_norm env/all/ac_tokens_per_turn env/all/ob_tokens_per_turn
        env/all/turns_per_episode env/all/total_episodes env/all/by_group/frac_mixed env/all/by_group/frac_all_good
        env/all/by_group/frac_all_bad test/env/all/reward/total time/step""".split()
    assert [name for name in expected if name not in last] == []
    assert last["reward/total"] == last["env/all/reward/total"]
    assert last["progress/done_frac"] == 1.0 and last["optim/max_logprob_difference"] < 1e-4
    checkpoints = read_jsonl(reference_run / "checkpoints.jsonl")
    assert all({"name", "batch", "state_path", "sampler_path"} <= row.keys() for row in checkpoints)
    assert all((reference_run.parent / row["sampler_path"]).is_dir() for row in checkpoints)
    samples = read_jsonl(next((reference_run / "rollouts").glob("step_*.jsonl")))
    assert len(samples) == 32
    assert all(len(row["response_tokens"]) == len(row["logprobs"]) for row in samples)


@pytest.mark.slow
def test_a_finished_run_says_that_it_is_done_and_changes_nothing(reference_run):
    folder, recipe = reference_run.parent, reference_run.parent / "recipe.yaml"
    text = run(recipe, "--output-dir", "out", cwd=folder, code=2)
    assert "--resume" in text and "--overwrite" in text and "Traceback" not in text
    before = {p: p.stat().st_mtime_ns for p in (reference_run / "checkpoints").rglob("*")}
    metrics = (reference_run / "metrics.jsonl").read_text()
    assert "done" in run(recipe, "--output-dir", "out", "--resume", cwd=folder)
    assert (reference_run / "metrics.jsonl").read_text() == metrics
    assert before == {p: p.stat().st_mtime_ns for p in (reference_run / "checkpoints").rglob("*")}


LONG_PROMPT = [{"prompt": "1" * 600 if i == 300 else "1+1=", "answer": "2"} for i in range(400)]
LONG_ANSWER = [{"prompt": "1+1=", "response": "9" * 600 if i == 17 else "2"} for i in range(400)]


@pytest.mark.parametrize(("words", "message"), [
    ("sft --base-model ./no/such", "no model folder"),
    ("sft --base-model tiny:adition", "tiny:addition"),
    ("sft --base-model owner/unheard-of", "HF_HUB_OFFLINE"),
    ("grpo --reward exact_matsch", "exact_match"),
    ("grpo --reward no_such_module:f", "no_such_module"),
    ("sft --dataset ./rows.jsonl", "rows.jsonl"),
    ("grpo --renderer chatml", "chat_template"),
    ("grpo --base-model tiny:chat", "--tokenizer"),
    ("grpo --max-tokens 5000", "5000"),
    ("grpo --max-tokens 4 --dataset long.jsonl", "line 301"),
    ("sft --max-tokens 4 --dataset answer.jsonl --response-column response", "line 18"),
    ("sft --dataset addition:noise=0.5 --lora-rank 2 --lora-alpha -1", "--lora-alpha is positive"),
])  # fmt: skip
def test_mistakes_are_one_box_without_a_traceback(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    for name, data in (("long", LONG_PROMPT), ("answer", LONG_ANSWER)):
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, data)))
    with pytest.raises(SystemExit) as ended:
        main(parse_run([*words.split(), "--steps", "3"], METHODS, ADDITION, options=RunSettings))
    text = flat(capsys.readouterr().err)
    assert ended.value.code == 2 and message in text and "Traceback" not in text, text
    assert "1 problem: nothing was started" in text and not Path("runs").exists()


@pytest.mark.slow
def test_a_reward_that_fails_costs_its_sample_and_one_that_always_fails_ends_the_run(tmp_path):
    recipe = write(tmp_path)

    def run_with(body: str, *words: str, code: int = 0) -> str:
        text = f"def digits(prompt, response, meta):\n    {body}\n"
        (tmp_path / "tests_rewards.py").write_text(text)
        return flat(run(recipe, *words, "--steps", "2", cwd=tmp_path, code=code))

    failing = "return float(len(response)) if response[:1] not in '1234' else {}['colour']"
    text = run_with(failing, "--output-dir", "some")
    assert "KeyError" in text and "colour" in text
    assert any(row.get("reward/failed", 0) > 0 for row in rows(tmp_path / "some"))
    # the reward is tried on the data's answers
    text = run_with("return float('nan')", "--output-dir", "all", code=2)
    assert "returned nan" in text and "1 problem: nothing was started" in text
    only_right = "return 1.0 if response == meta['answer'] else 1 / 0"
    words = ("--output-dir", "most", "--temperature", "50", "--max-tokens", "8")
    text = run_with(only_right, *words, code=2)
    assert "failed on every sample" in text and "1 problem: the run stopped" in text


@pytest.mark.slow
@pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0,
    reason="taking the network away needs root (unshare -n)",
)
def test_a_run_with_the_network_off_works(tmp_path):
    words = ["unshare", "-n", *command(write(tmp_path), "--output-dir", "out", "--steps", "2")]
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    if "unshare failed" in done.stderr:
        pytest.skip(f"this machine does not allow it: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    names = {path.name for path in tmp_path.iterdir()}
    assert names <= {"out", "recipe.yaml", "tests_rewards.py", "__pycache__"}
