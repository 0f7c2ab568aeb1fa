"""Check what a reward pays for, before training: `python check_reward.py --dataset rows.jsonl
--reward my_reward.py:correct`.

The reward is asked about right answers of the data and about mutants of them: another number,
another row's answer, all candidates listed, an empty answer, and others. A table shows what each
kind earns. A trick that pays as much as a right answer is named. The words are those of train.py: a
method or a recipe, if any, and its --flags. A run's folder in place of them checks the rewards of
that run; the flags on data and rewards then change its settings.
"""

from __future__ import annotations

import argparse
import os
import sys
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from rl.trainer import RewardProbeResult

parser = argparse.ArgumentParser(
    usage="%(prog)s [RUN | METHOD] [RECIPE.yaml] [the flags below and those of train.py]",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
)
parser.add_argument("--rows", type=int, help="number of rows, spread over the data (default: 50)")
parser.add_argument(
    "--budget",
    type=float,
    default=30.0,
    metavar="SECONDS",
    help="time for the check; of a slower reward fewer rows are checked, or none (default: 30)",
)
parser.add_argument(
    "--answer-format",
    metavar="TEXT",
    help="how a right answer is written, such as 'Answer: {answer}' (default: of several forms the "
    "one that the reward pays best)",
)
parser.add_argument("--strict", action="store_true", help="exit with code 1 if there is a warning")
parser.add_argument(
    "--trust-run",
    action="store_true",
    help="import a run's custom reward and method from the paths in its config",
)


def list_data_settings(args: argparse.Namespace, console: Console) -> list[Any]:
    """Return the data settings of the stages that have a reward, each once.

    Raises UserError if no stage has one.
    """
    from dataclasses import replace

    from rl.algorithms import METHODS
    from rl.config import RunSettings, override_settings, read_run
    from rl.data import find_default_reward
    from rl.errors import UserError
    from rl.reporting import contains_run
    from rl.trainer import (
        check_trusted,
        list_reward_addresses,
        load_run,
        resolve_environment,
    )

    if args.words and contains_run(source := Path(os.path.expanduser(args.words[0]))):
        run = load_run(source, trusted=args.trust_run)
        flags = [*args.words[1:], *args.flags]
        stages = run.stages
        sections = [override_settings((s.settings.data,), flags, vars(args))[0] for s in stages]
        if not {"--reward", "--rewards"} & {flag.partition("=")[0] for flag in flags}:
            for address in sorted({a for data in sections for a in list_reward_addresses(data)}):
                (notice,) = check_trusted([address], f"the config of {source}", args.trust_run)
                console.print(notice, markup=False)
    else:
        words = [*(args.words or ["grpo"]), *args.flags]
        recipe = Path(__file__).parent / "recipes" / "sorting.yaml"
        stages = read_run(words, METHODS, recipe, RunSettings).stages
        sections = [stage.settings.data for stage in stages]
        for stage in stages:
            resolve_environment(stage.settings)  # raises for one that does not exist
    chosen: list[Any] = []
    for stage, data in zip(stages, sections, strict=True):
        env = getattr(stage.settings, "env", None)
        if env is not None and env.environment is not None:
            console.print(f"stage {stage.name}: its environment pays, which is not checked")
            continue
        if data.reward is None and not data.rewards:
            data = replace(data, reward=find_default_reward(data.dataset))
        if (data.reward is not None or data.rewards) and data not in chosen:
            chosen.append(data)
    if not chosen:
        raise UserError("there is no reward to check: pass --dataset and --reward (such as gsm8k)")
    return chosen


def probe_settings(data: Any, args: argparse.Namespace) -> RewardProbeResult:
    """Return the result of checking the reward of some data settings, run as in training."""
    from rl.rewards import Scorer
    from rl.trainer import (
        PROBED_ROWS,
        find_sandbox_kind,
        load_training_problems,
        probe_reward,
        resolve_stage_reward,
    )

    reward = resolve_stage_reward(data)
    assert reward is not None
    find_sandbox_kind(reward, data)
    rows, _ = load_training_problems(data, held_out=False)
    with Scorer(
        reward,
        timeout=data.reward_timeout,
        workers=data.reward_workers,
        environment=data.reward_env,
    ) as scorer:
        return probe_reward(
            scorer,
            rows,
            limit=args.rows or PROBED_ROWS,
            budget=args.budget,
            answer_format=args.answer_format,
        )


def print_result(result: RewardProbeResult, dataset: str, console: Console) -> None:
    """Print the table of a check, its notes and its warnings."""
    from rl.trainer import format_probe_table

    heading = f"reward {result.reward} on {dataset}"
    if result.skipped is not None:
        console.print(f"{heading}: not checked, because {result.skipped}", markup=False)
    else:
        console.print(f"{heading}, right answers as {result.form}", markup=False)
        for line in format_probe_table(result, max(80, console.width)):
            console.print(line, markup=False)
    for note in result.notes:
        console.print(f"note: {note}", markup=False)
    for warning in result.warnings:
        console.print(f"warning: {warning}", markup=False, style="yellow")
    if result.skipped is None:
        count = len(result.warnings)
        outcome = f"{count} warning{'s' * (count > 1)}" if count else "no warning"
        console.print(f"{outcome}: {result.rows} rows in {result.seconds:.1f} s")


def main(args: argparse.Namespace) -> int:
    """Check each reward and return the number of warnings."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    count = 0
    for data in list_data_settings(args, console):
        result = probe_settings(data, args)
        print_result(result, data.dataset, console)
        count += len(result.warnings)
    return count


if __name__ == "__main__":
    args, rest = parser.parse_known_args()
    args.words = list(takewhile(lambda word: not word.startswith("-"), rest))
    args.flags = rest[len(args.words) :]
    if args.rows is not None and args.rows < 1:
        parser.error(f"--rows is at least 1, got {args.rows}")
    if not args.budget > 0:
        parser.error(f"--budget is a positive number of seconds, got {args.budget}")
    if args.answer_format is not None and "{answer}" not in args.answer_format:
        parser.error(f"--answer-format has {{answer}} in it, got {args.answer_format!r}")
    from rl.startup import reduce_gc

    reduce_gc()
    from rl.trainer import run_guarded

    counts: list[int] = []
    code = run_guarded(
        lambda: counts.append(main(args)),
        see="python check_reward.py --help",
        outcome="the reward was not checked",
    )
    sys.exit(code or int(args.strict and sum(counts) > 0))
