"""Check what the rewards of a run pay for before its first step, in about two seconds.

The check scores right answers of the data and mutants of them (rl.trainer.reward_probe). It changes
nothing in the run: it draws no random numbers, and a user's reward runs in worker processes of its
own, apart from those of the run.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path

from rl.algorithms import METHODS
from rl.jsonl import replace_nonfinite, write_atomically
from rl.reporting import REWARD_CHECK, Console
from rl.rewards import Scorer
from rl.sanitize import describe_error
from rl.trainer.reward_probe import RewardProbeResult, format_probe_table, probe_reward
from rl.trainer.stage_data import PreparedStage

STARTUP_SECONDS = 2.0  # budget of the check of a reward
_SLOW_TRIAL_SECONDS = 1.5  # a reward that took longer to start and to score 8 rows is not checked


def check_rewards_at_start(
    stages: Sequence[PreparedStage], folder: Path, console: Console, command: str
) -> None:
    """Check the reward of each stage that trains on one. Print a line, or a table and warnings if a
    trick pays, and write the results to reward_check.json in the run's `folder`.

    `command`: what checks a skipped reward at length, unless it is a function of this process.
    """
    entries = []
    checked: list[tuple[object, ...]] = []
    for prepared in stages:
        plan, data = prepared.plan, prepared.plan.settings.data
        if not METHODS[plan.method](plan.settings).needs_reward or prepared.environment is not None:
            continue
        if prepared.scorer is None or prepared.rows is None:
            continue
        key = (data.dataset, data.reward, data.rewards)
        if key in checked:
            continue
        checked.append(key)
        try:
            result = probe_prepared(prepared)
        except Exception as error:  # boundary: a check of user code and data never ends a run
            reason = f"the check failed: {describe_error(error)}"
            result = RewardProbeResult(prepared.scorer.reward.name, skipped=reason)
        # another process cannot import a function that was passed to rl.train
        is_importable = prepared.scorer.place != "thread"
        print_startup_result(result, console, command if is_importable else None)
        entry = {"stage": prepared.plan.name, "dataset": data.dataset}
        entries.append({**entry, **dataclasses.asdict(result)})
    if entries:
        text = json.dumps(replace_nonfinite({"rewards": entries}), indent=1, allow_nan=False)
        write_atomically(folder / REWARD_CHECK, text + "\n")


def probe_prepared(prepared: PreparedStage) -> RewardProbeResult:
    """Return the result for the reward of a stage, within about STARTUP_SECONDS.

    A built-in reward has no state, and is checked in the run's workers. A reward that is slow, runs
    programs or runs in this process is skipped.
    """
    scorer = prepared.scorer
    assert scorer is not None and prepared.rows is not None
    reward = scorer.reward
    builtin = all(part.builtin for part in reward.parts())
    reason = None
    if reward.runs_programs:
        reason = "it runs programs"
    elif scorer.place == "thread":
        reason = (
            "it is a function of this process, whose state the check could change (a reward in a "
            "file runs in processes of its own)"
        )
    elif not builtin and prepared.trial_seconds > _SLOW_TRIAL_SECONDS:
        reason = f"starting it and scoring a few rows took {prepared.trial_seconds:.1f} s"
    if reason is not None:
        return RewardProbeResult(reward.name, skipped=reason)
    if builtin:
        result = probe_reward(scorer, prepared.rows, budget=STARTUP_SECONDS, tried=True)
        scorer.take_seconds()  # the run's metrics count its own answers only
        return result
    begin, data = time.monotonic(), prepared.plan.settings.data
    with Scorer(
        reward,
        timeout=data.reward_timeout,
        workers=data.reward_workers,
        environment=data.reward_env,
    ) as isolated:
        budget = max(0.0, STARTUP_SECONDS - (time.monotonic() - begin))
        return probe_reward(isolated, prepared.rows, budget=budget, tried=True)


def print_startup_result(result: RewardProbeResult, console: Console, command: str | None) -> None:
    """Print a line if nothing is wrong, else the table and a warning for each fault."""
    if result.skipped is not None:
        console.note(
            f"reward {result.reward} was not checked for tricks, because {result.skipped}"
            + (f": {command} checks it" if command else "")
        )
        return
    if result.warnings:
        heading = f"what reward {result.reward} pays for, right answers as {result.form}"
        console.warn("\n".join([heading, *format_probe_table(result)]))
        for warning in result.warnings:
            console.warn(f"reward {result.reward}: {warning}")
        return
    line = (
        f"reward {result.reward} pays for no trick on {result.rows} rows ({result.seconds:.1f} s)"
    )
    console.note("; ".join([line, *result.notes]))
