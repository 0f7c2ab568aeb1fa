"""A game is learnt in a whole run: from the form of a move, learnt on games that a rule plays, to playing it well."""

import json

import learning
import pytest
from whole_runs import train

from rl.environments import played, resolve_environment

GAME = "--environment guess_number --environment.high 4 --environment-rows 400"


@pytest.mark.slow
def test_guessing_within_as_few_guesses_as_halving_needs_is_learnt(tmp_path):
    """1 to 4 in three guesses. Who hears no answer finds it in 1 - (3/4)^3 = 0.58 of games, and so does the rule that is learnt from."""
    rows = tmp_path / "guesses.jsonl"
    games = played(resolve_environment("guess_number", high=4), "any_number", 1500)
    rows.write_text("".join(json.dumps(row) + "\n" for row in games))
    common = f"--seed {learning.seed(0)} --save-every 0 --rollouts-every 0"
    form = f"sft --base-model tiny:ascii-small --dataset {rows} --learning-rate 3e-3 --steps 100 --batch-size 32 --eval-every 0 {common}"
    train(form, tmp_path / "form")
    words = "--max-tokens 3 --advantage mean_std --batch-size 8 --group-size 16 --learning-rate 2e-3 --schedule linear --warmup-steps 5"
    line = f"grpo --base-model {tmp_path / 'form'} {GAME} {words} --steps 60 --eval-every 60 --eval-limit 128 --no-eval-greedy {common}"
    found = [row["test/env/all/correct"] for row in train(line, tmp_path / "grpo") if "test/env/all/correct" in row]
    learning.clears("numbers found before", found[0], below=0.75)
    learning.clears("numbers found after", found[-1], above=0.9)
