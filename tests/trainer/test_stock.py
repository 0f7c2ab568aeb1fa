"""Test the list of checkpoints and the fingerprint of a run's folder."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from rl.data import ProblemSet
from rl.jsonl import read_jsonl
from rl.reporting import CHECKPOINTS
from rl.trainer.checkpoint_manager import (
    CheckpointManager,
    StageSteps,
    make_checkpoint_row,
    scan_checkpoints,
)
from rl.trainer.resume import compute_data_fingerprint
from rl.types import Problem


def test_checkpoints_are_listed_in_the_order_of_their_steps(tmp_path):
    stages = [StageSteps("z", 0, 4), StageSteps("a", 5, 1_200_000)]
    names = ["z-000002", "z-000004", "z-final", "a-000006", "a-999999", "a-1000000", "a-final"]
    for name in names:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "sampler_weights" / "z-best-000004").mkdir(parents=True)
    results = [row["name"] for row in scan_checkpoints(tmp_path, stages)]
    assert results == ["z-000002", "z-best-000004", "z-000004", "z-final", *names[3:]]


def test_everything_that_is_asked_or_answered_counts_in_the_fingerprint():
    rows = [
        Problem(
            [{"role": "user", "content": f"{i}+1="}],
            response=str(i + 1),
            rejected="7",
            meta={"answer": i + 1},
        )
        for i in range(5)
    ]
    known = compute_data_fingerprint(ProblemSet(rows))
    assert compute_data_fingerprint(ProblemSet(list(rows))) == known
    changes = {
        "messages": [{"role": "user", "content": "3+1=?"}],
        "response": "5",
        "rejected": "8",
        "meta": {"answer": 9},
    }
    for name, value in changes.items():
        changed = [*rows[:3], replace(rows[3], **{name: value}), rows[4]]
        assert compute_data_fingerprint(ProblemSet(changed)) != known, name
    assert compute_data_fingerprint(ProblemSet(rows[:4])) != known
    assert compute_data_fingerprint(ProblemSet(rows[::-1])) != known


def test_a_run_killed_at_a_checkpoint_leaves_no_best_weights_of_an_abandoned_part(tmp_path):
    """A run resumed from the new checkpoint would take the weights of an earlier step for its
    own.
    """

    def save_and_die(name, **_):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        raise KeyboardInterrupt

    stale = tmp_path / "sampler_weights" / "b-best-000003"
    stale.mkdir(parents=True)
    logbook = SimpleNamespace(folder=tmp_path, guard=lambda: None, sync=lambda: None)
    keeper = CheckpointManager(logbook, stale=[make_checkpoint_row(stale, "best", "b", 3)])
    with pytest.raises(KeyboardInterrupt):
        keeper.save(SimpleNamespace(save_state=save_and_die), 4, "b", {}, keep_last=2)
    rows = scan_checkpoints(tmp_path, [StageSteps("b", 0, 9)])
    assert [row["name"] for row in rows] == ["b-000004"]


def test_each_stage_keeps_the_best_weights_of_its_own(tmp_path):
    """Superseded best weights go at the next checkpoint, and so do those that a resumed run has not
    found again; those of earlier stages stay.
    """

    def written(kind):
        def write(name, **_):
            (tmp_path / kind / name).mkdir(parents=True)
            return SimpleNamespace(result=lambda: SimpleNamespace(path=str(tmp_path / kind / name)))

        return write

    logbook = SimpleNamespace(folder=tmp_path, guard=lambda: None, sync=lambda: None)
    stale = tmp_path / "sampler_weights" / "b-best-000007"
    stale.mkdir(parents=True)
    keeper = CheckpointManager(logbook, stale=[make_checkpoint_row(stale, "best", "b", 7)])
    policy = SimpleNamespace(
        save_state=written("checkpoints"), save_weights_for_sampler=written("sampler_weights")
    )
    for stage, first in (("a", 1), ("b", 3)):
        for step, value in ((first, 0.5), (first + 1, 0.6)):
            keeper.save_best(policy, step, stage, "test/env/all/correct", value)
        keeper.save(policy, first + 1, stage, {}, keep_last=2, final=True)
    kept = ["a-best-000002", "b-best-000004"]
    assert sorted(path.name for path in (tmp_path / "sampler_weights").iterdir()) == kept
    rows = read_jsonl(tmp_path / CHECKPOINTS)
    assert [row["name"] for row in rows if row["kind"] == "best"] == kept and keeper.rows == rows
