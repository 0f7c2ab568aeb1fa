"""Test that a run killed between two turns of a batch resumes bit for bit."""

import json
from pathlib import Path

import pytest
from whole_runs import copy_killed_run, same_weights, train

from rl.client import SamplingClient
from rl.trainer.batch_log import BatchLog

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
    whole_run, cut = tmp_path / "whole", tmp_path / "cut"
    done, requests = [], []
    write_row, ask = BatchLog.write_row, SamplingClient.sample_many

    def write(self, step, metrics):
        write_row(self, step, metrics)
        done.append(step)
        requests.clear()

    def copy_in_last_batch(self, batch, /):
        requests.append(batch)
        if len(done) == 4 and len(requests) == 3:  # after the answers of both players
            copy_killed_run(whole_run, cut)
        return ask(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(BatchLog, "write_row", write)
        patch.setattr(SamplingClient, "sample_many", copy_in_last_batch)
        whole = train(words, whole_run)
    assert names(cut / "checkpoints") == ["grpo-000002", "grpo-000004"]
    assert train(f"{words} --resume", cut) == whole
    assert same_weights(whole_run, cut)
    for folder in ("rollouts", "sampler_weights"):
        assert names(whole_run / folder) == names(cut / folder)
    for file in sorted((whole_run / "rollouts").glob("*.jsonl")):
        assert file.read_text() == (cut / "rollouts" / file.name).read_text()
    kept = [state(folder) for folder in (whole_run, cut)]
    assert kept[0] == kept[1] and sum(item["games"] for item in kept[0]["opponents"]) > 0
    # The run covered the difficult state: levels that moved, several turns, an opponent that is not
    # the first of its line.
    turns = [row["env/all/turns_per_episode"] for row in whole if "progress/batch" in row]
    assert len(set(turns)) > 1 and turns[-1] > 2 and kept[0]["opponents"][0]["step"] > 0


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".html")


def state(folder: Path) -> dict:
    path = folder / "checkpoints" / "grpo-final" / "state.json"
    return json.loads(path.read_text())["metadata"]["opponents"]
