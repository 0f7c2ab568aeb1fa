"""Test the default recipe as a new user runs it."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch

from rl.trainer.evaluator import HeldOutMetrics

REPO = Path(__file__).resolve().parents[2]
RECIPE = REPO / "recipes" / "addition.yaml"
HELD_OUT, GREEDY = "test/env/all/correct", "test/greedy/all/correct"


def train(*words: str | Path) -> str:
    """Run `python train.py` with these words; return its output."""
    command = [sys.executable, str(REPO / "train.py"), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@cache
def default_run(base: Path) -> tuple[Path, str]:
    """Run the default recipe; return its folder and console output."""
    folder = base / "default_recipe"
    return folder, train("--output-dir", folder)


def accuracy_by_generate(model: Path, answers: Mapping[str, str], *, sample: bool) -> float:
    """Return the share of prompts that transformers' `generate` answers correctly and ends. All
    prompts have the same length.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    net = AutoModelForCausalLM.from_pretrained(model)
    prompts = torch.tensor([tokenizer.encode(text, add_special_tokens=False) for text in answers])
    choice = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {}
    choice |= {"do_sample": sample, "max_new_tokens": 6}
    torch.manual_seed(0)
    out = net.generate(prompts, attention_mask=torch.ones_like(prompts), **choice)
    right = 0
    for answer, tokens in zip(answers.values(), out[:, prompts.shape[1] :].tolist(), strict=True):
        expected = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        right += tokens[: len(expected)] == expected
    return right / len(answers)


def sorted_rows() -> dict[str, str]:
    """Return {row of five digits: the digits sorted by Python}; no answer occurs in training."""
    from rl.data import load_problems

    trained = {"".join(sorted(problem.meta["answer"])) for problem in load_problems("sorting")}
    generator = np.random.default_rng(0)
    rows = ["".join(map(str, generator.integers(0, 10, 5))) for _ in range(8000)]
    return {f"{row}=": answer for row in rows if (answer := "".join(sorted(row))) not in trained}


def list_sums() -> dict[str, str]:
    """Return the held-out sums of two-digit addition."""
    from rl.data.synthetic.addition_dataset import is_test

    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100) if is_test(a, b)]
    return {f"{a}+{b}=": str(a + b) for a, b in pairs}


def read_rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("figures", "remark"), [
    ((0.4, 1.0, 1.0, 1.0), "Most of this gain (100%) is sharpening, not new knowledge"),
    ((0.2, 0.7, 0.45, 0.9), "Most of this gain (50%) is sharpening"),
    ((0.1, 0.9, 0.3, 1.0), "25% of this gain is sharpening: before the first step"),
    ((0.02, 1.0, 0.01, 1.0), "for 1.0% of the problems. All of it is new."),
    ((0.02, 1.0, 0.01, 1.0), "None of this gain is sharpening: before the first step"),
    ((0.5, 0.4, 0.9, 0.9), None),
    ((0.1, 0.9, None, 0.9), None),
])  # fmt: skip
def test_the_remark_on_sharpening(figures, remark):
    text = HeldOutMetrics(*figures).describe_sharpening()
    assert text is None if remark is None else remark in text


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_default_recipe_learns_what_it_was_never_shown(tmp_path_factory):
    folder, printed = default_run(tmp_path_factory.getbasetemp())
    rows = read_rows(folder)
    held_out = [row[HELD_OUT] for row in rows if HELD_OUT in row]
    before, after = held_out[0], held_out[-1]
    greedy_before, greedy_after = (row[GREEDY] for row in rows if GREEDY in row)
    assert greedy_before <= 0.5 and greedy_after >= 0.95, f"{greedy_before} -> {greedy_after}"
    warm_up = sum(row["time/step"] for row in rows if row["stage"] == "sft")
    assert warm_up < sum(row.get("time/step", 0.0) for row in rows) / 3

    # The console explains the figures, and which part of the gain is new.
    assert re.search(rf"held-out accuracy.*{before:.3f} -> {after:.3f}", printed), printed
    assert re.search(rf"greedy accuracy.*{greedy_before:.3f} -> {greedy_after:.3f}", printed)
    assert "of this gain is sharpening: before the first step" in printed
    assert "Most of this gain" not in printed
    taught, final = (folder / f"checkpoints/{stage}-final/model" for stage in ("sft", "grpo"))
    unseen = sorted_rows()
    assert len(unseen) > 500
    assert accuracy_by_generate(taught, unseen, sample=False) <= 0.5
    assert accuracy_by_generate(final, unseen, sample=False) >= 0.95
    # The two draw different rows: 0.05 is more than four standard errors of either accuracy.
    assert abs(accuracy_by_generate(final, unseen, sample=True) - after) < 0.05
    difference = "optim/max_logprob_difference"
    assert max(row[difference] for row in rows if difference in row) < 1e-4

    alarms = [item for row in rows for item in row.items() if item[0].startswith("alarm/")]
    assert len(dict(alarms)) >= 10 and not any(value for _, value in alarms)
    assert "warning" not in printed


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_addition_is_mostly_sharpened(tmp_path):
    printed = train(RECIPE, "--output-dir", tmp_path / "run")
    held_out = [row[HELD_OUT] for row in read_rows(tmp_path / "run") if HELD_OUT in row]
    before, after = held_out[0], held_out[-1]
    # Seeds 0, 1, 2: 0.42 -> 0.998, 0.37 -> 0.996, 0.28 -> 0.959, with standard errors of 0.02
    # before and at most 0.01 after.
    assert before <= 0.5 and after >= 0.93, f"held-out accuracy {before} -> {after}"
    assert "Most of this gain" in printed and "sharpening, not new knowledge" in printed
    taught, final = (tmp_path / f"run/checkpoints/{stage}-final/model" for stage in ("sft", "grpo"))
    assert accuracy_by_generate(taught, list_sums(), sample=False) > before + 0.3
    # All 800 sums here; the evaluation uses the first 512.
    assert abs(accuracy_by_generate(final, list_sums(), sample=True) - after) < 0.05


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_its_curves_are_a_picture_of_something(tmp_path_factory):
    folder, _ = default_run(tmp_path_factory.getbasetemp())
    pixels = (255 * matplotlib.image.imread(folder / "curves.png")[..., :3]).astype(np.uint8)
    height, width, _ = pixels.shape
    assert height >= 300 and width >= 500
    colours, counts = np.unique(pixels.reshape(-1, 3), axis=0, return_counts=True)
    coloured = counts[colours.max(axis=1) - colours.min(axis=1) > 40].sum() / counts.sum()
    assert len(colours) > 100 and 0.001 < coloured < 0.5, (
        f"{len(colours)} colours, {coloured:.4f} of the picture not grey"
    )
