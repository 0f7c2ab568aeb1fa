"""Test GSM8K's real problems with a real tokenizer and chat template, and a tiny model."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from rank_server import Launch, run_script, shared_ranks
from safetensors.numpy import load_file
from whole_runs import read_metrics

from rl.algorithms import METHODS
from rl.config import RunSettings, cli
from rl.jsonl import read_jsonl
from rl.trainer.initial_weights import find_previous_stage

REPO = Path(__file__).resolve().parents[2]
GSM8K = REPO / "recipes" / "gsm8k.yaml"
SFT_STEPS, GRPO_STEPS = 45, 5
PROBLEMS, GROUP = 2, 8
# The model learns two problems of the data set until its answers at temperature 1 are often, but
# not always, complete.
RECIPE = f"""
base_model: tiny:chat
tokenizer: {{tokenizer}}
dataset: {{gsm8k}}
train_limit: {PROBLEMS}
eval_limit: 2
reward: gsm8k
max_tokens: 64
temperature: 1.0
stages:
  - method: sft
    steps: {SFT_STEPS}
    batch_size: {PROBLEMS}
    learning_rate: 1e-2
    eval_every: 0
    save_every: 0
  - method: grpo
    steps: {GRPO_STEPS}
    batch_size: {PROBLEMS}
    group_size: {GROUP}
    learning_rate: 3e-4
    eval_every: 0
    save_every: 2
    rollouts_every: 1
"""


def test_a_model_for_all_stages_is_where_the_first_begins(tmp_path: Path):
    """A later stage starts from the previous stage, unless it names a model itself."""

    def begins(top: str, *stages: str, words: tuple[str, ...] = ()) -> list[bool]:
        text = f"{top}\nstages:\n" + "".join(
            f"  - method: sft\n{f'    base_model: {s}' if s else ''}\n" for s in stages
        )
        (tmp_path / "r.yaml").write_text(text)
        run = cli.read_run([str(tmp_path / "r.yaml"), *words], METHODS, GSM8K, RunSettings)
        return [find_previous_stage(run.stages, i) is None for i in range(len(run.stages))]

    assert begins("base_model: tiny:chat", "", "", "") == [True, False, False]
    assert begins("seed: 1", "tiny:addition", "") == [True, False]
    assert begins("seed: 1", "tiny:ascii", "", words=("--base-model", "tiny:chat")) == [True, False]
    assert begins("seed: 1", "tiny:ascii", "", "tiny:ascii") == [True, False, False]
    assert begins("seed: 1", "tiny:ascii", "tiny:chat", "") == [True, True, False]


@pytest.mark.slow
def test_the_recipe_runs_on_a_cpu_as_it_says(shared_data: Path, tmp_path: Path):
    words = "--base-model tiny:chat --steps 1 --batch-size 2 --group-size 2 --max-tokens 8".split()
    words += ["--tokenizer", shared_data / "tokenizers" / "qwen2.5"]
    words += ["--dataset", shared_data / "gsm8k", "--eval-limit", 2, "--output-dir", "run"]
    done = run_script("train.py", GSM8K, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1] and rows[1]["env/all/total_episodes"] == 4
    adapter = tmp_path / "run" / "checkpoints" / "grpo-final" / "model" / "adapter_config.json"
    assert json.loads(adapter.read_text())["r"] == 32


# --------------------------------------------------------------------------- two stages, three runs


def train(recipe: Path, run: Path, *words: str) -> Launch:
    return shared_ranks().start(recipe, "--output-dir", run, *words, cwd=recipe.parent)


def finish(launch: Launch) -> str:
    """Wait for the end of a run; return its output."""
    assert launch.wait(300) == [0], launch.output()[-3000:]
    return launch.output()


@pytest.fixture(scope="module")
def recipe(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gsm8k") / "recipe.yaml"
    tokenizer, gsm8k = shared_data / "tokenizers" / "qwen2.5", shared_data / "gsm8k"
    path.write_text(RECIPE.format(tokenizer=tokenizer, gsm8k=gsm8k))
    return path


@pytest.fixture(scope="module")
def run(recipe: Path) -> Path:
    finish(train(recipe, recipe.parent / "whole"))
    return recipe.parent / "whole"


@pytest.fixture(scope="module")
def rollouts(run: Path) -> list[list[dict]]:
    """Return the samples of each GRPO step."""
    files = sorted((run / "rollouts").glob("step_*.jsonl"))
    assert len(files) == GRPO_STEPS
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


@pytest.mark.slow
def test_it_learns_the_format_and_then_from_mixed_groups(run: Path):
    rows = read_metrics(run)
    taught = [row["optim/loss"] for row in rows if row["stage"] == "sft"]
    # the first loss is that of a uniform distribution over the real vocabulary
    assert taught[0] == pytest.approx(np.log(151_665), abs=0.3) and taught[-1] < 0.3
    trained = [row for row in rows if row["stage"] == "grpo"]
    assert len(trained) == GRPO_STEPS
    mixed = [row for row in trained if row["env/all/by_group/frac_mixed"] > 0]
    assert len(mixed) >= 2, [row["env/all/reward/total"] for row in trained]
    assert all(row["optim/grad_norm"] > 1e-3 for row in mixed)
    assert all(row["optim/max_logprob_difference"] < 1e-4 for row in trained)
    assert any(0 < row["env/all/format"] < 1 for row in trained)


@pytest.mark.slow
def test_the_weights_change_in_every_stage(run: Path):
    taught, trained = (
        load_file(run / "checkpoints" / name / "model" / "model.safetensors")
        for name in ("sft-final", "grpo-final")
    )
    assert taught.keys() == trained.keys()
    assert all(np.abs(taught[name] - trained[name]).max() > 0 for name in taught)
    steps = load_file(run / "checkpoints" / "grpo-final" / "optimizer.safetensors")
    updates = {float(value) for name, value in steps.items() if name.endswith("/step")}
    assert updates == {float(GRPO_STEPS)}  # the stage has a new optimizer


@pytest.mark.slow
def test_rewards_are_those_counted_from_the_answers(
    run: Path, rollouts: list[list[dict]], shared_data: Path
):
    lines = (shared_data / "gsm8k" / "train.jsonl").read_text().splitlines()[:PROBLEMS]
    expected = [json.loads(line)["answer"].rpartition("####")[2].strip() for line in lines]
    trained = [row for row in read_metrics(run) if row["stage"] == "grpo"]
    plain = 0
    for row, samples in zip(trained, rollouts, strict=True):
        assert len(samples) == PROBLEMS * GROUP
        for sample in samples:
            boxed = re.findall(r"\\boxed\{([^{}]*)\}", sample["response"])[-1:]
            if not boxed[0].isdecimal() if boxed else "\\boxed" in sample["response"]:
                # The reward decides whether "\boxed 10", "$ 10" and "1 = 10" hold a number; its
                # tests cover it.
                continue
            plain += 1
            reward = float(boxed == [expected[sample["problem"]]]) - (0.0 if boxed else 0.1)
            assert sample["reward"] == pytest.approx(reward, abs=1e-12), sample["response"]
        rewards_P_G = [[s["reward"] for s in samples if s["group"] == g] for g in range(PROBLEMS)]
        assert row["reward/total"] == pytest.approx(np.mean(rewards_P_G))
        assert row["env/all/correct"] == pytest.approx(np.mean(np.array(rewards_P_G) > 0.95))
        assert row["env/all/by_group/frac_mixed"] == np.mean(
            [len(set(rewards_G)) > 1 for rewards_G in rewards_P_G]
        )
    assert plain > 0.7 * GRPO_STEPS * PROBLEMS * GROUP


@pytest.mark.slow
def test_the_sampler_drew_from_what_transformers_sees(
    run: Path, rollouts: list[list[dict]], shared_data: Path
):
    """Prompts equal the template's tokens. At the first step, each logprob equals that of the SFT
    weights in transformers.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(shared_data / "tokenizers" / "qwen2.5"))
    model = AutoModelForCausalLM.from_pretrained(
        str(run / "checkpoints" / "sft-final" / "model")
    ).eval()
    for sample in rollouts[0][:: GROUP // 2]:
        messages = [{"role": "user", "content": sample["prompt"]}]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert sample["prompt_tokens"] == list(prompt)
        tokens = sample["response_tokens"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        # In float64: over 151,665 tokens, torch's fp32 log_softmax is off by up to 4e-4 on a CPU.
        logprobs = logits.double().log_softmax(-1)[range(len(tokens)), tokens].numpy()
        np.testing.assert_allclose(sample["logprobs"], logprobs, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_a_run_killed_in_the_middle_of_grpo_ends_as_if_it_had_not_been(run: Path, recipe: Path):
    # The killed launch begins after SFT, whose steps take most of the time.
    broken = recipe.parent / "killed"
    shutil.copytree(run, broken)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (broken / "metrics.jsonl").write_text("".join(lines[:SFT_STEPS]))
    for path in (*(broken / "checkpoints").glob("grpo-*"), broken / "rollouts"):
        shutil.rmtree(path)
    launch, deadline = train(recipe, broken, "--resume"), time.monotonic() + 300
    # One step after the first checkpoint of GRPO, so that resuming must undo this step.
    past = f'"step": {SFT_STEPS + 1 + 3},'
    while not launch.poll() and time.monotonic() < deadline:
        if past in (broken / "metrics.jsonl").read_text():
            break
        time.sleep(0.02)
    launch.kill(0)
    assert launch.wait(60) == [-signal.SIGKILL], launch.output()[-3000:]
    names = [row["name"] for row in read_jsonl(broken / "checkpoints.jsonl")]
    assert names[0] == "sft-final" and "grpo-final" not in names
    assert any(name.startswith("grpo-") for name in names)

    assert "resuming from grpo-" in finish(train(recipe, broken, "--resume"))
    assert read_metrics(broken) == read_metrics(run)
    for file in ("model/model.safetensors", "optimizer.safetensors"):
        ours, theirs = (
            load_file(folder / "checkpoints" / "grpo-final" / file) for folder in (broken, run)
        )
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    for path in (run / "rollouts").glob("*.jsonl"):
        assert (broken / "rollouts" / path.name).read_text() == path.read_text()
