"""Test that a game is learned from its reward only: guess_number, after a warm-up on games in which
half of the guesses are any remaining number.
"""

import json

import pytest
from learning import check_figure, seed
from whole_runs import train

from rl.envs import generate_demonstrations, resolve_environment

HIGH = 4  # numbers; the environment's limit is floor(log2 4) + 1 guesses


@pytest.mark.slow
@pytest.mark.campaign
def test_guess_number_is_learnt(tmp_path):
    """tests/trainer/test_recipes_learn.py has the longer proofs for the other games."""
    base, data = "tiny:ascii-small", tmp_path / "games.jsonl"
    rows = generate_demonstrations(
        resolve_environment("guess_number", high=HIGH), "careless", 1500, seed()
    )
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    form = (
        "--batch-size 32 --learning-rate 3e-3 --schedule cosine --warmup-steps 10 --beta2 0.99 "
        "--eval-every 0 --save-every 0"
    )
    train(f"sft --base-model {base} --dataset {data} --steps 250 {form}", tmp_path / "sft")
    game = (
        f"--environment guess_number --environment.high {HIGH} --environment-rows 400 "
        f"--max-tokens 3 --temperature 1.0"
    )
    held_out = "--eval-limit 128 --no-eval-greedy --save-every 0 --rollouts-every 0"
    words = (
        "--batch-size 8 --group-size 16 --advantage mean_std --learning-rate 1e-3 --schedule "
        "linear --warmup-steps 5"
    )
    result = train(
        f"grpo --base-model {tmp_path}/sft {game} {held_out} {words} --steps 60 --eval-every 60",
        tmp_path / "grpo",
    )
    won = [row["test/env/all/correct"] for row in result if "test/env/all/correct" in row]
    check_figure("games won, which the warm-up misses", won[0], below=0.8)
    check_figure("games won within floor(log2 n) + 1 guesses", won[-1], above=0.8)
