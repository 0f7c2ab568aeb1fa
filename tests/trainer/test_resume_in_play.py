"""Test that a run killed between two turns of a batch resumes bit for bit."""

import json
from pathlib import Path

import pytest
import torch
from whole_runs import final_weights, train

from rl.client import SamplingClient

# Two seats, several turns, levels. The pool selects the older version, and both players' answers
# determine the length of a game.
DUEL = '''
from rl.envs import Environment, TurnResult

class Duel(Environment):
    """Whose letters are later in the alphabet gets the turn's point."""
    seats = (None, "pool")
    def rows(self, split, count):
        return [{"level": i % 3} for i in range(count)]
    def start(self):
        self.said, self.points, self.rounds = {}, 0, 2 + self.row["level"]
        self.asked = f"{self.row['level']}{self.rng.choice('abc')}"
        return TurnResult(self.asked, seat=0)
    def step(self, answer):
        seat = len(self.said)
        self.said[seat] = sum(map(ord, answer["content"])) % 11
        if seat == 0:
            return TurnResult(self.asked, seat=1)
        won = (self.said[0] > self.said[1]) - (self.said[0] < self.said[1])
        self.points, self.rounds, self.said = self.points + won, self.rounds - 1, {}
        if self.rounds:
            return TurnResult("+" if won > 0 else "-", seat=0, rewards={0: float(won)})
        figures = {"won": float(self.points > 0), "drawn": float(self.points == 0), "correct": float(self.points > 0)}
        return TurnResult(done=True, rewards={0: float(won)}, metrics_of={0: figures})
'''


class SimulatedKill(BaseException):
    """Raised as if by a signal: a BaseException, so no code catches it as an error."""


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_killed_between_two_turns_and_resumed_is_the_run_that_was_not(
    isolation, tmp_path, monkeypatch
):
    (tmp_path / "duel.py").write_text(DUEL)
    words = (
        f"grpo --environment {tmp_path}/duel.py:Duel --environment-isolation {isolation} "
        "--base-model tiny:ascii-small --batch-size 3 --group-size 3 --max-tokens 3 "
        "--learning-rate 1e-2 --environment-rows 12 --opponents 2 --opponents-every 1 "
        "--step-rewards process_supervision --curriculum success --curriculum-up 0.01 "
        "--curriculum-down 0 --curriculum-window 2 --rollouts-every 1 --eval-every 0 --steps 5 "
        "--save-every 2"
    )
    whole = train(words, tmp_path / "whole")
    queries = {"batches": 0}
    ask = SamplingClient.sample_many

    def killed(self, requests, /):
        queries["batches"] += 1
        if queries["batches"] == queries["at"]:
            raise SimulatedKill
        return ask(self, requests)

    # Every batch asks the policy and its opponent in each round of its level: 2 rounds, and more at
    # higher levels.
    monkeypatch.setattr(SamplingClient, "sample_many", killed)
    queries["at"] = 10**9
    train(words, tmp_path / "counted")
    total = queries["batches"]
    queries |= {"batches": 0, "at": total - 3}  # within the last batch, after some of its turns
    with pytest.raises(SimulatedKill):
        train(words, tmp_path / "cut")
    monkeypatch.setattr(SamplingClient, "sample_many", ask)
    remaining = sorted(path.name for path in (tmp_path / "cut" / "checkpoints").iterdir())
    assert remaining == ["grpo-000002", "grpo-000004"]
    assert train(f"{words} --resume", tmp_path / "cut") == whole
    item, other = final_weights(tmp_path / "whole"), final_weights(tmp_path / "cut")
    assert item.keys() == other.keys() and all(
        torch.equal(item[name], other[name]) for name in item
    )
    for folder in ("rollouts", "sampler_weights"):
        assert names(tmp_path / "whole" / folder) == names(tmp_path / "cut" / folder)
    for file in sorted((tmp_path / "whole" / "rollouts").glob("*.jsonl")):
        assert file.read_text() == (tmp_path / "cut" / "rollouts" / file.name).read_text()
    kept = [state(tmp_path / folder) for folder in ("whole", "cut")]
    assert kept[0] == kept[1] and sum(item["games"] for item in kept[0]["opponents"]) > 0
    # The run covered the difficult state: levels that moved, several turns, an opponent that is not
    # the first of its line.
    steps = [row for row in whole if "progress/batch" in row]
    assert (
        len({row["env/all/turns_per_episode"] for row in steps}) > 1
        and steps[-1]["env/all/turns_per_episode"] > 2
    )
    assert kept[0]["opponents"][0]["step"] > 0


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".html")


def state(folder: Path) -> dict:
    return json.loads((folder / "checkpoints" / "grpo-final" / "state.json").read_text())[
        "metadata"
    ]["opponents"]
