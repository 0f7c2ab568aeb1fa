"""Run whole runs in this process, for tests of methods."""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import learning
import pytest
import torch
from safetensors.torch import load_file

from rl.algorithms import METHODS
from rl.config import RunSettings, parse_run
from rl.rollout import RolloutEngine
from rl.trainer.batch_log import BatchLog
from rl.trainer.execute import execute

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "addition.yaml"


def train(words: str, folder: Path) -> list[dict]:
    """Run `train.py WORDS`; return its metrics without fields that depend on the clock."""
    others = ["--seed", str(learning.seed())] if learning.seed() and "--seed" not in words else []
    line = [*words.split(), *others, "--output-dir", str(folder), "--quiet"]
    execute(parse_run(line, METHODS, RECIPE, options=RunSettings))
    return read_metrics(folder)


def read_metrics(folder: Path) -> list[dict]:
    """Return the metrics of a run without fields that depend on the clock."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    (model,) = (folder / "checkpoints").glob("*-final/model")
    weights: dict[str, torch.Tensor] = {}
    for file in model.glob("*.safetensors"):  # one for each layer of a model with experts
        weights |= load_file(str(file))
    assert weights
    return weights


@contextmanager
def updates_end_while_answers_are_drawn() -> Iterator[None]:
    """Order updates and sampling independently of the machine's speed. While an answer is half
    sampled, sampling waits for the update. An update counts as ended only once an answer is half
    sampled, or when no sampling remains.
    """

    def tick(flow: RolloutEngine):
        def half_drawn() -> bool:
            return any(
                request.resume_from is not None and request.resume_from.tokens
                for request in flow.player_streams[None].stream.unfinished().values()
            )

        def ended() -> bool:
            return learned() and (
                half_drawn() or not (flow.player_streams[None].stream.busy or len(flow.executor))
            )

        learned = flow.update_ended
        while (
            flow.is_updating() and not learned() and flow.weights_arrived() is None and half_drawn()
        ):
            time.sleep(0.001)
        flow.update_ended = ended
        try:
            return ticked(flow)
        finally:
            flow.update_ended = learned

    ticked = RolloutEngine.tick
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RolloutEngine, "tick", tick)
        yield


def copy_killed_run(run: Path, to: Path) -> None:
    """Copy the folder of a run as it would be left if the run were killed now."""
    shutil.copytree(run, to, ignore=shutil.ignore_patterns("run.lock"))


def two_and_two(words: str, folder: Path, self_test: bool = False) -> list[dict]:
    """Check that four steps at once, and four steps that are killed in the third and resumed from
    the second, give the same metrics and weights.

    `words`: of a run with a single stage, without steps and saving. `self_test`: whether the
    learner and the sampler are compared before the first step. Returns the metrics.
    """
    words += " --steps 4 --save-every 2 --no-reward-check"
    words += "" if self_test else " --no-self-test"
    write_row = BatchLog.write_row

    def copy_in_third(self, done, metrics):
        if done == 3:
            copy_killed_run(folder / "whole", folder / "cut")
        write_row(self, done, metrics)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchLog, "write_row", copy_in_third)
        whole = train(words, folder / "whole")
    saved = [path.name for path in (folder / "cut" / "checkpoints").iterdir()]
    assert [name.rsplit("-", 1)[1] for name in saved] == ["000002"]
    assert train(f"{words} --resume", folder / "cut") == whole
    assert same_weights(folder / "whole", folder / "cut")
    return whole


def same_weights(first: Path, other: Path) -> bool:
    a, b = final_weights(first), final_weights(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
