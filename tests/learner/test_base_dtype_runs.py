"""Test runs with a frozen base in bf16 or 4 bit: training on pairs and on samples, resume, export,
two ranks, and the self-test at start.
"""

import json
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from rank_server import shared_ranks
from test_export import assert_same_logits, compute_run_logits, logits
from transformers import AutoModelForCausalLM
from whole_runs import two_and_two

from rl.learner import learner_checkpoint
from rl.models import load_model
from rl.trainer import export_weights

LOW = ["bf16", "4bit"]
PAIRS = (
    "dpo --precision bf16 --lora-rank 4 --learning-rate 1e-2 --batch-size 8 --eval-every 2 "
    "--eval-limit 16"
)
SAMPLES = (
    "grpo --precision bf16 --lora-rank 4 --learning-rate 1e-2 --batch-size 4 --group-size 2 "
    "--max-tokens 4 --eval-every 0 --kl-coef 1"
)
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}


@pytest.fixture(autouse=True)
def any_precision():
    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    made = load_model("tiny:addition", seed=3)
    learner_checkpoint.write_model(made.model, made.tokenizer, folder / "base")
    return folder / "base"


def needed(held_in: str) -> None:
    if held_in == "4bit":
        pytest.importorskip("bitsandbytes")


@pytest.mark.parametrize("held_in", LOW)
def test_dpo_resumes_to_the_bit_and_leaves_as_its_own_weights(held_in, base, tmp_path):
    """The LoRA of a 4-bit base merges into the base as published, like any other adapter
    (docs/memory.md).
    """
    needed(held_in)
    rows = two_and_two(f"{PAIRS} --base-dtype {held_in} --base-model {base}", tmp_path)
    assert rows[-1]["rewards/margins"] != 0
    run = tmp_path / "whole"
    config = json.loads((run / "config.json").read_text())
    assert held_in in json.dumps(config)
    expected = compute_run_logits(run / "checkpoints" / "dpo-final")
    assert (expected - logits(load_model(str(base)).model)).abs().max() > 1e-2
    export_weights(str(run), tmp_path / "merged", merged=True)
    assert_same_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), expected)
    export_weights(str(run), tmp_path / "adapter")
    from peft import AutoPeftModelForCausalLM

    assert_same_logits(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter"), expected)


@pytest.mark.slow
@pytest.mark.parametrize("held_in", LOW)
def test_what_is_sampled_is_what_is_trained_and_the_run_proves_it(held_in, base, tmp_path):
    """The self-test at start is on. The KL is to the base with the adapter off."""
    needed(held_in)
    words = f"{SAMPLES} --base-dtype {held_in} --base-model {base}"
    rows = two_and_two(words, tmp_path, self_test=True)
    name = "optim/max_logprob_difference"
    differences = [row[name] for row in rows if name in row]
    assert len(differences) == 4 and max(differences) < 0.1
    assert any(row.get("optim/kl_ref_k3", 0) > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("held_in", "launch"), [("bf16", "ddp"), ("bf16", "fsdp2"), ("4bit", "ddp")]
)
def test_two_ranks_learn_what_one_does(held_in, launch, base, tmp_path):
    """Loss, margins and weights of three steps agree to bf16's rounding (sums in another order).
    The two ranks resume after the second step.
    """
    needed(held_in)
    rows, weights = {}, {}
    for world in (1, 2):
        folder = tmp_path / str(world)
        folder.mkdir()
        words = f"{PAIRS} --schedule constant --base-dtype {held_in} --base-model {base} --quiet"
        words += f" --output-dir {folder}/run --save-every 2"
        env = FSDP if launch == "fsdp2" and world == 2 else {}
        for more in ["--steps 3"] if world == 1 else ["--steps 2", "--steps 3 --resume"]:
            line = f"{words} {more}".split()
            started = shared_ranks().start(*line, cwd=folder, world=world, **env)
            assert started.wait(120) == [0] * world, started.output()
        rows[world] = [
            json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
        ]
        weights[world] = compute_run_logits(folder / "run" / "checkpoints" / "dpo-final")
    for first, second in zip(rows[1], rows[2], strict=True):
        for name in ("optim/loss", "rewards/margins", "test/loss"):
            assert (name in first) == (name in second)
            expected = pytest.approx(first.get(name, 0.0), rel=0.02, abs=2e-3)
            assert second.get(name, 0.0) == expected, name
    moved = (weights[1] - logits(load_model(str(base)).model)).abs().max()
    assert (weights[2] - weights[1]).abs().max() < 0.1 * moved
