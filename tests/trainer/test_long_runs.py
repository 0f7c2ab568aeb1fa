"""Test that the state of a run besides its model does not grow with its steps."""

from __future__ import annotations

import gc
import os
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl.algorithms import METHODS, Models
from rl.config import DataSettings, LoopSettings
from rl.data import Curriculum, ProblemSet
from rl.distributed.stop_signals import StopRequest
from rl.reporting import Console, Logbook
from rl.trainer.checkpoint_manager import CheckpointManager
from rl.trainer.trainer import Trainer, TrainingBatch
from rl.types import Problem


class StubPolicy:
    """A policy that saves by creating folders, as a client does."""

    def __init__(self, folder: Path):
        self.save_state = self.make_folders_in(folder / "checkpoints")
        self.save_weights_for_sampler = self.make_folders_in(folder / "sampler_weights")

    def make_folders_in(self, parent: Path) -> Any:
        def save(name: str, **_: Any) -> Any:
            (parent / name).mkdir(parents=True)
            return SimpleNamespace(result=lambda: SimpleNamespace(path=str(parent / name)))

        return save


def stage_of(folder: Path, console: Console, logbook: Logbook, steps: int) -> Trainer:
    settings = METHODS["grpo"].Settings()
    data = DataSettings(curriculum="success")
    loop = LoopSettings(
        steps=steps, save_every=50, keep_best="optim/loss", keep_best_mode="min", batch_size=4
    )
    settings = replace(settings, loop=loop, data=data)
    ask = [{"role": "user", "content": "?"}]
    problems = [Problem(ask, {"level": i % 3}, tag="p", index=i) for i in range(30)]
    return Trainer(
        name="grpo", index=0, method=METHODS["grpo"](settings),
        models=Models(StubPolicy(folder), {}),  # type: ignore[arg-type]
        problems=Curriculum(ProblemSet(problems, name="p"), data), test_problems=None,
        renderer=None, scorer=SimpleNamespace(),  # type: ignore[arg-type]
        run_seed=0, first_step=0, logbook=logbook, console=console,
        checkpoints=CheckpointManager(logbook), stop_request=StopRequest(),
    )  # fmt: skip


def batch_metrics(step: int) -> dict[str, float]:
    names = (
        "optim/kl_sample_train_v1", "optim/kl_sample_train_v2", "optim/grad_norm", "optim/entropy",
        "optim/frac_credited", "env/all/reward/total", "env/all/reward/std",
        "env/all/by_group/frac_mixed", "env/all/correct", "env/all/format",
        "env/all/distinct_beginnings", "env/all/ac_tokens_per_turn", "env/all/frac_truncated",
    )  # fmt: skip
    row = {name: 0.5 + 0.001 * ((step * 7 + i) % 13) for i, name in enumerate(names)}
    return row | {
        "env/all/reward/min": 0.0, "env/all/reward/max": 1.0, "env/all/total_groups": 4,
        "env/all/total_episodes": 16, "optim/loss": 1.0 / (1 + step % 100),
        "sampler/temperature": 0.8, "env/all/correct": float(step % 40 < 20),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [False, True])
def test_a_stages_loop_keeps_nothing_by_the_step(tmp_path: Path, terminal: bool) -> None:
    steps, marks = 1700, (1100, 1400, 1699)  # rich's bar keeps its last thousand times
    held, seconds, since = [], [], time.process_time()
    with (
        open(os.devnull, "w") as sink,
        Logbook(tmp_path) as logbook,
        Console(stream=sink, terminal=terminal, width=120) as console,
    ):
        stage = stage_of(tmp_path, console, logbook, steps)
        console.stage("grpo", steps)
        tracemalloc.start()
        try:
            for step in range(steps):
                stage.end_batch(TrainingBatch(step), batch_metrics(step), None)
                if step in marks:
                    gc.collect()
                    held.append(tracemalloc.get_traced_memory()[0])
                    seconds.append(time.process_time() - since)
                    since = time.process_time()
        finally:
            tracemalloc.stop()
        assert len(stage.checkpoints.rows) <= 4, "checkpoints are pruned"
        logbook._metrics.flush()
    # the old alarms took 3.2 kB per step
    assert held[2] - held[1] < 40_000, f"300 steps more hold {held[2] - held[1]} bytes more"
    assert seconds[2] < 3 * seconds[0], "300 steps take as long as the first"


def test_errors_that_differ_at_every_step_are_not_kept_nor_said_without_end(tmp_path: Path) -> None:
    with (
        open(os.devnull, "w") as sink,
        Logbook(tmp_path) as logbook,
        Console(stream=sink, terminal=False) as console,
    ):
        stage = stage_of(tmp_path, console, logbook, 10)
        warned: list[str] = []
        console.warn = warned.append  # type: ignore[method-assign]
        groups = [SimpleNamespace(trajectories_G=[])]
        for step in range(200):
            rollouts: Any = SimpleNamespace(errors=[f"KeyError: {step} (prompt x)"], groups=groups)
            stage.stage_sampler.check_rollouts(rollouts, learner_version=1)
    assert len(warned) == 20 and len(stage.stage_sampler._warn_once.printed_kinds) == 20
