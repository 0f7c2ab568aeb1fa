"""Test whole runs on images: they resume bit for bit, learn from pairs and teachers, and change the
vision tower only under train_vision.
"""

import json

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from helpers import gather_targets
from seeing import chunk, encode_parts, make_image
from test_images import compute_logprobs, datum
from whole_runs import train, two_and_two

from rl.images import get_image_reader
from rl.learner import Learner, LearnerSettings, learner_checkpoint
from rl.losses import get_loss
from rl.models import add_lora, load_model
from rl.types import LoraConfig

SMALL = (
    "--base-model tiny:vision --dataset shapes:rows=24 --eval-dataset shapes:rows=4 --batch-size "
    "4 --seed 0 --eval-every 0"
)


def example(tokenizer):
    parts = "<|user|><|vision_start|>", chunk(1), "<|vision_end|>what?<|end|><|assistant|>3"
    return datum(get_image_reader(tokenizer).resolve_tokens(encode_parts(tokenizer, *parts)))


@pytest.mark.slow
@pytest.mark.parametrize("train_vision", [False, True])
def test_lora_leaves_the_vision_tower_alone_unless_asked(train_vision):
    loaded = add_lora(load_model("tiny:vision"), LoraConfig(rank=4, train_vision=train_vision))
    learner = Learner(loaded, Accelerator(cpu=True), LearnerSettings())
    assert any(".visual." in name for name in learner.trainable) == train_vision
    assert any(".language_model." in name for name in learner.trainable)
    options = {"temperature": 1.0, "divisor": 1.0, "backward": True}
    learner.run([example(loaded.tokenizer)], get_loss("cross_entropy"), {}, **options)
    moved = {name for name, size in learner.backend.max_gradient_magnitudes().items() if size > 0}
    assert {name for name in learner.trainable if ".lora_B." in name} <= moved


@pytest.mark.slow
def test_what_is_saved_sees_again_here_and_in_plain_transformers(tmp_path):
    loaded = load_model("tiny:vision", seed=3)
    learner_checkpoint.write_model(loaded.model, loaded.tokenizer, tmp_path / "m")
    again = load_model(str(tmp_path / "m"))
    first = example(loaded.tokenizer)
    learners = [Learner(m, Accelerator(cpu=True), LearnerSettings()) for m in (loaded, again)]
    results = [compute_logprobs(learner, [first])[0] for learner in learners]
    assert np.array_equal(*results)
    from transformers import AutoImageProcessor, AutoModelForImageTextToText

    plain = AutoModelForImageTextToText.from_pretrained(str(tmp_path / "m"))
    processor = AutoImageProcessor.from_pretrained(str(tmp_path / "m"))
    ids = torch.tensor([first.model_input.token_ids()])
    inputs = dict(processor(images=[make_image(1)], return_tensors="pt"))
    inputs["mm_token_type_ids"] = (ids == plain.config.image_token_id).long()
    logits = plain(input_ids=ids, **inputs).logits[0].double()
    expected = gather_targets(logits.log_softmax(-1), first)
    assert np.abs(expected.detach().numpy() - results[0]).max() < 2e-5


@pytest.mark.slow
def test_grpo_on_pictures_resumes_bit_for_bit_and_shows_them(tmp_path):
    words = (
        f"grpo {SMALL} --group-size 2 --max-tokens 3 --temperature 1.0 --lora-rank 4 "
        f"--rollouts-every 1 --learning-rate 1e-2"
    )
    rows = two_and_two(words, tmp_path, self_test=True)
    apart = [
        row["optim/max_logprob_difference"] for row in rows if "optim/max_logprob_difference" in row
    ]
    # compares sampler and learner on every sampled token
    assert len(apart) == 4 and max(apart) < 1e-4
    rollouts = tmp_path / "whole" / "rollouts"
    stored = map(json.loads, next(rollouts.glob("step_*.jsonl")).read_text().splitlines())
    assert all(row["image_count"] == 1 and row["prompt"] == "[image]how many?" for row in stored)
    page = next(rollouts.glob("*.html")).read_text()
    assert page.count('<img alt="image 1" src="data:image/png;base64,') == 4


@pytest.mark.slow
def test_pairs_and_a_teacher_are_learnt_from_with_images(tmp_path):
    words = f"dpo {SMALL} --steps 2 --learning-rate 1e-3"
    losses, before = (
        [row["optim/loss"] for row in train(words + more, tmp_path / name) if "optim/loss" in row]
        for name, more in (("each", ""), ("before", " --precompute-reference"))
    )
    # the policy equals the reference, and both see the same images
    assert abs(losses[0] - np.log(2)) < 1e-5
    assert losses == pytest.approx(before, abs=1e-6)
    train(f"sft {SMALL} --steps 2", tmp_path / "sft")
    options = f"--learn-from teacher --teacher {tmp_path / 'sft'}"
    rows = train(
        f"distill {SMALL} --steps 2 --group-size 2 --max-tokens 3 {options}", tmp_path / "distill"
    )
    assert rows[-1]["optim/tokens"] > 0


@pytest.mark.slow
def test_a_critic_and_a_reward_model_see(tmp_path):
    rows = train(f"reward_model {SMALL} --steps 1", tmp_path / "judge")
    assert abs(rows[-1]["optim/loss"] - np.log(2)) < 1e-3  # zero-initialized head: equal scores
    rows = train(
        f"ppo {SMALL} --steps 2 --max-tokens 3 --reward-model {tmp_path / 'judge'}",
        tmp_path / "ppo",
    )
    assert np.isfinite(
        [row["optim/policy_loss"] for row in rows if "optim/policy_loss" in row]
    ).all()
