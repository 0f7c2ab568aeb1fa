"""Score saved weights on held-out problems: `python evaluate.py runs/sorting --samples 8 --output
results.json`.

WEIGHTS is a run's folder (its newest checkpoint, or --checkpoint), a folder of weights, a hub name
or tiny:<preset>. For a run, the defaults are the settings of its held-out evaluation, which
reproduce its metrics. A --dataset by a short name (humaneval, math500, mbpp, gsm8k, ...;
docs/datasets.md) also selects the reward that scores it. A custom reward of a run, if it is outside
of the current folder, is imported only with --trust-run: the author of the run's files chose that
file. All flags of train.py on reading data and building prompts are accepted too (docs/data.md):
--prompt-column, --data-format, --prompt-suffix, --system-prompt, --template.enable_thinking false,
--max-prompt-tokens, --stop, ...
"""

import argparse
import json
import shlex
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument(
    "weights",
    metavar="WEIGHTS",
    help="a run's folder, a folder of weights, a hub name or tiny:<preset>",
)
parser.add_argument(
    "--checkpoint", help="of a run: best, or a name in its checkpoints.jsonl (default: the newest)"
)
parser.add_argument(
    "--dataset",
    help="evaluation problems: a short name, a folder's or hub name's test split, a file "
    "(default: the run's)",
)
parser.add_argument(
    "--reward",
    help="reward that scores an answer: a registered name, module:function or file.py:function",
)
parser.add_argument(
    "--environment",
    metavar="NAME",
    help="environment for multi-turn episodes (default: the run's); its settings: "
    "--environment.KEY VALUE",
)
parser.add_argument(
    "--sandbox",
    help="sandbox of code_tests: bubblewrap, sandlock, a URL, ... (default: the run's, else auto)",
)
parser.add_argument(
    "--limit",
    type=int,
    help="number of problems, from the first (default: the run's eval_limit, else 256)",
)
parser.add_argument(
    "--samples",
    type=int,
    default=1,
    help="samples for each problem; more than 1 also report pass@k",
)
parser.add_argument(
    "--temperature", type=float, help="0 is greedy (default: that of the run's evaluation, else 1)"
)
parser.add_argument(
    "--top-k",
    type=int,
    default=-1,
    help="sample from the k most probable tokens only (default -1: all)",
)
parser.add_argument(
    "--top-p",
    type=float,
    default=1.0,
    help="sample from the smallest set of tokens with this probability (default 1)",
)
parser.add_argument(
    "--max-tokens", type=int, help="maximum tokens of a response (default: the run's, else 256)"
)
parser.add_argument(
    "--seed", type=int, help="sampling seed (default: that of the run's evaluation)"
)
parser.add_argument(
    "--sampler-tp",
    type=int,
    default=1,
    help="tensor parallel size: number of processes that share the weights (default 1)",
)
parser.add_argument(
    "--renderer",
    help="chat_template, role_colon or plain (default: the run's, else by the tokenizer)",
)
parser.add_argument(
    "--trust-run",
    action="store_true",
    help="import the run's custom reward, environment and method from the paths in its config",
)
parser.add_argument(
    "--output", type=Path, help="write the metrics and every answer to this .json file"
)


def split_environment_flags(words: list[str]) -> tuple[tuple[tuple[str, str], ...], list[str]]:
    """Split the unknown arguments into environment settings (--environment.KEY VALUE) and other
    words.
    """
    flags: list[tuple[str, list[str]]] = []
    others: list[str] = []
    in_environment_flag = False
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            in_environment_flag = name.startswith("--environment.") and len(name) > len(
                "--environment."
            )
            if in_environment_flag:
                flags.append(
                    (
                        name.removeprefix("--environment.").replace("-", "_"),
                        [value] if equals else [],
                    )
                )
        elif in_environment_flag:
            flags[-1][1].append(word)
        if not in_environment_flag:
            others.append(word)
    return tuple((name, shlex.join(values or ["True"])) for name, values in flags), others


@dataclass(frozen=True)
class EvaluationRequest:
    """Hold the settings of the evaluation's data and environment."""

    data: Any
    env: Any


def resolve_env_settings(args: argparse.Namespace, stage: Any) -> Any:
    """Return the requested environment, else the run's, updated with the settings in `args`."""
    from rl.config import EnvironmentSettings

    run_env = getattr(stage.settings, "env", None) if stage else None
    settings = run_env or EnvironmentSettings()
    if args.environment is not None and args.environment != settings.environment:
        settings = EnvironmentSettings(environment=args.environment)
    return replace(
        settings, environment_settings=(*settings.environment_settings, *args.environment_settings)
    )


def resolve_settings(args: argparse.Namespace, weights: Any) -> tuple[Any, Any, Any]:
    """Return (data settings, sampling settings, SamplingParams).

    Each value is from the arguments, else from the run, else the default.
    """
    from rl.config import override_settings
    from rl.data import find_default_reward
    from rl.errors import UserError
    from rl.types import SamplingParams

    dataset_reward = find_default_reward(args.dataset) if args.dataset is not None else None
    reward = args.reward or dataset_reward
    if weights.stage is None and not args.environment and not (args.dataset and reward):
        missing = f"{args.weights} is not a run's folder and provides no settings"
        raise UserError(
            f"{missing}: pass --dataset (such as openai/gsm8k) and --reward (such as gsm8k)"
        )
    data, sampling = weights.prompt_settings
    overrides = {
        "eval_dataset": args.dataset,
        "eval_limit": args.limit,
        "renderer": args.renderer,
        "sandbox": args.sandbox,
    }
    data = replace(data, **{name: value for name, value in overrides.items() if value is not None})
    if dataset_reward is not None:  # its rows have a different format than the run's
        data = replace(
            data,
            data_format="auto",
            prompt_column="prompt",
            answer_column="answer",
            response_column=None,
            dataset_config=None,
        )
    if reward is not None:
        data = replace(data, reward=reward, rewards=())
    data, sampling = override_settings((data, sampling), args.others, vars(args))
    run_temperature = (
        sampling.temperature if sampling.eval_temperature is None else sampling.eval_temperature
    )
    temperature = run_temperature if args.temperature is None else args.temperature
    longest = args.max_tokens or sampling.max_tokens
    return (
        data,
        sampling,
        SamplingParams(longest, temperature=temperature, top_k=args.top_k, top_p=args.top_p),
    )


def build_table(counts: dict[str, int], figures: dict[str, float]) -> Any:
    """Return a console table of counts and of metrics with their standard errors."""
    from rich.table import Table

    table = Table(show_header=False)
    for name, count in counts.items():
        table.add_row(name, str(count))
    for name, value in figures.items():
        error = figures.get(f"standard error of {name}")
        if not name.startswith("standard error of "):
            table.add_row(
                name, f"{value:.4f}" + (f" \u00b1 {error:.4f}" if error is not None else "")
            )
    return table


def main(args: argparse.Namespace) -> None:
    from rich.console import Console

    from rl.errors import UserError
    from rl.trainer import find_sandbox_kind, open_weights, resolve_environment

    weights = open_weights(args.weights, args.checkpoint, trusted=args.trust_run)
    data, sampling, params = resolve_settings(args, weights)
    request = EvaluationRequest(data, resolve_env_settings(args, weights.stage))
    console = Console(highlight=False, soft_wrap=True)
    check_trust(args, data, request, console)
    environment = resolve_environment(request)
    problems, reward = load_problems_and_reward(args, data, request, environment)
    kind = None if reward is None else find_sandbox_kind(reward, data)
    reward_name = " + ".join(f"{weight:g} {name}" for name, weight in data.rewards) or data.reward
    if environment is not None:
        reward_name = f"environment {environment.name}" + (
            f" + {reward_name}" if reward is not None else ""
        )
    seed = weights.evaluation_seed if args.seed is None else args.seed
    problems, result = sample_and_score(
        args, weights, request, sampling, params, environment, problems, reward, seed
    )
    if not result.groups:
        raise UserError(
            f"{'the reward' if environment is None else 'the'} {reward_name} failed on every "
            f"answer: {result.errors[0]}"
        )
    summary = {
        "weights": weights.name,
        "problems": problems.name,
        "reward": reward_name,
        "temperature": params.temperature,
    }
    summary |= {"top_k": params.top_k} if params.top_k != -1 else {}
    summary |= {"top_p": params.top_p} if params.top_p != 1 else {}
    write_report(
        args,
        summary | ({"sandbox": kind} if kind is not None else {}),
        problems,
        result,
        seed,
        console,
    )


def check_trust(
    args: argparse.Namespace, data: Any, request: EvaluationRequest, console: Any
) -> None:
    """Print which code of the run's config is imported.

    Raises UserError if that code is outside of the current folder and not trusted.
    """
    from rl.trainer import check_trusted, list_environment_addresses, list_reward_addresses

    candidates = [("reward", list_reward_addresses(data))] if args.reward is None else []
    candidates += (
        [("environment", list_environment_addresses(request))] if args.environment is None else []
    )
    for what, addresses in candidates:
        for notice in check_trusted(
            addresses, f"the config of {args.weights}", args.trust_run, what
        ):
            console.print(notice, markup=False)


def load_problems_and_reward(
    args: argparse.Namespace, data: Any, request: EvaluationRequest, environment: Any
) -> tuple[Any, Any]:
    """Return (held-out problems, reward).

    With an environment, the reward scores whole episodes; None if no reward does.
    """
    from rl.errors import UserError
    from rl.trainer import (
        check_scoring,
        load_held_out_rows,
        resolve_episode_reward,
        resolve_stage_reward,
    )

    problems = load_held_out_rows(environment, request)
    if problems is None:
        raise UserError(
            f"{data.dataset} has too few rows for a held-out split: pass problems with --dataset"
        )
    reward = resolve_stage_reward(data)
    if environment is not None:
        check_scoring(environment, data)
        return problems, resolve_episode_reward(data)
    if reward is None:
        raise UserError(
            f"{args.weights} was trained without a reward: pass --reward (such as gsm8k)"
        )
    return problems, reward


def sample_and_score(
    args: argparse.Namespace,
    weights: Any,
    request: EvaluationRequest,
    sampling: Any,
    params: Any,
    environment: Any,
    problems: Any,
    reward: Any,
    seed: int,
) -> tuple[Any, Any]:
    """Return (the problems that fit, their scored answers)."""
    from rl.client import SampleStream
    from rl.envs import ProblemGroupBuilder
    from rl.judges import add_episode_rewards
    from rl.rewards import Scorer
    from rl.rollout import RolloutSchedule, rollout
    from rl.trainer import (
        build_episode_groups,
        load_evaluation_opponents,
        make_renderer,
        select_fitting_problems,
    )

    data = request.data
    limits: dict[str, Any] = {
        "timeout": data.reward_timeout,
        "workers": data.reward_workers,
        "environment": data.reward_env,
    }
    # each episode continues by itself: a slow one delays no other
    schedule = RolloutSchedule(make_stream=SampleStream)
    with weights.create_service(sampler_tp=args.sampler_tp) as service, ExitStack() as stack:
        sampler = weights.create_sampler(service)
        scorer = stack.enter_context(Scorer(reward, **limits)) if reward is not None else None
        renderer = make_renderer(sampler, data.renderer, data.template, sampling.stop)
        if environment is not None:
            players, renderers = load_evaluation_opponents(
                environment.make(), request.env, weights, service
            )
            builders = build_episode_groups(
                environment, request, list(problems), args.samples, renderer, renderers
            )
            result = rollout(
                builders, sampler, params, seed=seed, players=players, schedule=schedule
            )
            return problems, add_episode_rewards(result, scorer)
        problems = select_fitting_problems(
            problems, data, sampler.info, renderer, params.max_tokens
        )
        assert scorer is not None
        group_builders = [
            ProblemGroupBuilder(problem, args.samples, renderer, scorer) for problem in problems
        ]
        return problems, rollout(group_builders, sampler, params, seed=seed, schedule=schedule)


def write_report(
    args: argparse.Namespace,
    summary: dict[str, Any],
    problems: Any,
    result: Any,
    seed: int,
    console: Any,
) -> None:
    """Print the results and write them to --output."""
    from rl.jsonl import replace_nonfinite, write_atomically
    from rl.trainer import compute_evaluation_metrics, make_response_rows

    rows, metrics = (
        make_response_rows(result.groups, list(problems)),
        compute_evaluation_metrics(result.groups, args.samples),
    )
    counts = {
        "problems": len(problems),
        "answers": len(rows),
        "answers whose reward failed": len(result.errors),
    }
    console.print(
        ", ".join(f"{name} {value}" for name, value in summary.items()),
        build_table(counts, metrics),
        sep="\n",
        markup=False,
    )
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        everything = replace_nonfinite({**summary, "seed": seed, **counts, **metrics, "rows": rows})
        write_atomically(args.output, json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    args, rest = parser.parse_known_args()
    args.environment_settings, args.others = split_environment_flags(rest)
    for name, least in {
        "limit": 1,
        "samples": 1,
        "max_tokens": 1,
        "temperature": 0,
        "seed": 0,
        "sampler_tp": 1,
    }.items():
        value = getattr(args, name)
        if value is not None and not value >= least:
            parser.error(f"{name.replace('_', '-')} is at least {least}, got {value}")
    from rl.startup import reduce_gc

    reduce_gc()
    from rl.trainer import run_guarded

    sys.exit(
        run_guarded(
            lambda: main(args), see="python evaluate.py --help", outcome="nothing was evaluated"
        )
    )
