"""Score saved weights on held-out problems: `python evaluate.py runs/addition --samples 8 --output
results.json`.

WEIGHTS is a run's folder (its newest checkpoint, or --checkpoint), a folder of weights, a hub name
or tiny:<preset>. For a run, whatever is not given is as in its own held-out evaluation, and then so
are the figures. A --dataset by a short name (humaneval, math500, mbpp, gsm8k, ...;
docs/datasets.md) brings the reward that scores it. A reward of the run's own that lies outside of
the current folder is imported with --trust-run alone: whoever wrote the run's files chose that
file. Besides those below it takes every flag that says how data is read and asked, as train.py does
(docs/data.md): --prompt-column,
--data-format, --prompt-suffix, --system-prompt, --template.enable_thinking false,
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
    help="problems to ask: a short name, a folder's or hub name's test split, a file (default: the run's)",
)
parser.add_argument(
    "--reward", help="what scores an answer: a registered name, module:function or file.py:function"
)
parser.add_argument(
    "--environment",
    metavar="NAME",
    help="what answers over several turns (default: the run's); its settings: --environment.KEY VALUE",
)
parser.add_argument(
    "--sandbox",
    help="where code_tests runs programs: bubblewrap, sandlock, a URL, ... (default: the run's, else auto)",
)
parser.add_argument(
    "--limit",
    type=int,
    help="ask the first so many problems (default: the run's eval_limit, else 256)",
)
parser.add_argument(
    "--samples",
    type=int,
    default=1,
    help="answers to each problem; more than 1 give pass@k as well",
)
parser.add_argument(
    "--temperature", type=float, help="0 is greedy (default: that of the run's evaluation, else 1)"
)
parser.add_argument(
    "--top-k",
    type=int,
    default=-1,
    help="sample from the k most probable tokens alone (default -1: all)",
)
parser.add_argument(
    "--top-p",
    type=float,
    default=1.0,
    help="sample from the fewest tokens that hold this probability (default 1)",
)
parser.add_argument("--max-tokens", type=int, help="longest answer (default: the run's, else 256)")
parser.add_argument(
    "--seed", type=int, help="of the samples (default: that of the run's evaluation)"
)
parser.add_argument(
    "--sampler-tp",
    type=int,
    default=1,
    help="so many processes of a machine hold the weights together (default 1)",
)
parser.add_argument(
    "--renderer",
    help="chat_template, role_colon or plain (default: the run's, else by the tokenizer)",
)
parser.add_argument(
    "--trust-run",
    action="store_true",
    help="import the run's own reward from wherever its config says it lies",
)
parser.add_argument(
    "--output", type=Path, help="write the figures and every answer to this .json file"
)


def apart(words: list[str]) -> tuple[tuple[tuple[str, str], ...], list[str]]:
    """(settings of an environment, --environment.KEY VALUE, among the words that are no others';
    the rest of the words).
    """
    found: list[tuple[str, list[str]]] = []
    others: list[str] = []
    own = False
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            own = name.startswith("--environment.") and len(name) > len("--environment.")
            if own:
                found.append(
                    (
                        name.removeprefix("--environment.").replace("-", "_"),
                        [value] if equals else [],
                    )
                )
        elif own:
            found[-1][1].append(word)
        if not own:
            others.append(word)
    return tuple((name, shlex.join(values or ["True"])) for name, values in found), others


@dataclass(frozen=True)
class Asked:
    """What to ask: settings of data and of an environment."""

    data: Any
    env: Any


def environment_settings(args: argparse.Namespace, stage: Any) -> Any:
    """The environment asked for, else the run's, with the settings given over it."""
    from rl.settings import EnvironmentSettings

    own = getattr(stage.settings, "env", None) if stage else None
    env = own or EnvironmentSettings()
    if args.environment is not None and args.environment != env.environment:
        env = EnvironmentSettings(environment=args.environment)
    return replace(
        env, environment_settings=(*env.environment_settings, *args.environment_settings)
    )


def settings(args: argparse.Namespace, stage: Any) -> tuple[Any, Any, Any]:
    """What to ask (data settings, sampling settings) and how (SamplingParams): as given, else as in
    the run, else the defaults.
    """
    from rl.data import scored_by
    from rl.errors import UserError
    from rl.settings import DataSettings, SamplingSettings, override
    from rl.types import SamplingParams

    own_reward = scored_by(args.dataset) if args.dataset is not None else None
    reward = args.reward or own_reward
    if stage is None and not args.environment and not (args.dataset and reward):
        missing = f"{args.weights} is no run's folder, so no settings can be taken from it"
        raise UserError(
            f"{missing}: give --dataset (such as openai/gsm8k) and --reward (such as gsm8k)"
        )
    data = stage.settings.data if stage else DataSettings()
    sampling = stage.settings.sampling if stage else SamplingSettings(temperature=1.0)
    given = {
        "eval_dataset": args.dataset,
        "eval_limit": args.limit,
        "renderer": args.renderer,
        "sandbox": args.sandbox,
    }
    data = replace(data, **{name: value for name, value in given.items() if value is not None})
    if own_reward is not None:  # its rows have their own shape, not that of the run's
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
    data, sampling = override((data, sampling), args.others, vars(args))
    own = sampling.temperature if sampling.eval_temperature is None else sampling.eval_temperature
    temperature = own if args.temperature is None else args.temperature
    longest = args.max_tokens or sampling.max_tokens
    return (
        data,
        sampling,
        SamplingParams(longest, temperature=temperature, top_k=args.top_k, top_p=args.top_p),
    )


def table_of(counts: dict[str, int], figures: dict[str, float]) -> Any:
    """Counts, then figures with their standard errors, for the console."""
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
    from rl.run import environment_of, open_weights, sandbox_kind

    weights = open_weights(args.weights, args.checkpoint)
    data, sampling, params = settings(args, weights.stage)
    asked = Asked(data, environment_settings(args, weights.stage))
    console = Console(highlight=False, soft_wrap=True)
    say_what_is_trusted(args, data, asked, console)
    environment = environment_of(asked)
    problems, reward = what_to_ask(args, data, asked, environment)
    kind = None if reward is None else sandbox_kind(reward, data)
    shown = " + ".join(f"{weight:g} {name}" for name, weight in data.rewards) or data.reward
    if environment is not None:
        shown = f"environment {environment.name}" + (f" + {shown}" if reward is not None else "")
    seed = weights.evaluation_seed if args.seed is None else args.seed
    problems, result = played(
        args, weights, asked, sampling, params, environment, problems, reward, seed
    )
    if not result.groups:
        raise UserError(
            f"{'the reward' if environment is None else 'the'} {shown} failed on every answer: {result.errors[0]}"
        )
    what = {
        "weights": weights.name,
        "problems": problems.name,
        "reward": shown,
        "temperature": params.temperature,
    }
    what |= {"top_k": params.top_k} if params.top_k != -1 else {}
    what |= {"top_p": params.top_p} if params.top_p != 1 else {}
    report(
        args,
        what | ({"sandbox": kind} if kind is not None else {}),
        problems,
        result,
        seed,
        console,
    )


def say_what_is_trusted(args: argparse.Namespace, data: Any, asked: Asked, console: Any) -> None:
    """What of the folder's config would be imported; UserError where it is from elsewhere and
    nobody trusts it.
    """
    from rl.run import check_trusted, environment_address, rewards_of

    theirs = [("reward", rewards_of(data))] if args.reward is None else []
    theirs += [("environment", environment_address(asked))] if args.environment is None else []
    for what, named in theirs:
        for said in check_trusted(named, f"the config of {args.weights}", args.trust_run, what):
            console.print(said, markup=False)


def what_to_ask(
    args: argparse.Namespace, data: Any, asked: Asked, environment: Any
) -> tuple[Any, Any]:
    """(held-out problems, what scores answers to them, or whole episodes beside an environment;
    None where nothing does)
    """
    from rl.errors import UserError
    from rl.run import check_scoring, episode_reward, held_out_rows, reward_of

    problems = held_out_rows(environment, asked)
    if problems is None:
        raise UserError(
            f"{data.dataset} has too few rows to hold any out: name problems with --dataset"
        )
    reward = reward_of(data)
    if environment is not None:
        check_scoring(environment, data)
        return problems, episode_reward(data)
    if reward is None:
        raise UserError(
            f"{args.weights} was trained without a reward: give --reward (such as gsm8k)"
        )
    return problems, reward


def played(
    args: argparse.Namespace,
    weights: Any,
    asked: Asked,
    sampling: Any,
    params: Any,
    environment: Any,
    problems: Any,
    reward: Any,
    seed: int,
) -> tuple[Any, Any]:
    """(the problems that fit, the scored answers to them)"""
    from rl.environments import ProblemGroupBuilder
    from rl.episodes import rollout
    from rl.judges import with_episode_rewards
    from rl.rewards import Scorer
    from rl.run import episode_groups, make_renderer, seated, that_fit

    data = asked.data
    limits: dict[str, Any] = {
        "timeout": data.reward_timeout,
        "workers": data.reward_workers,
        "environment": data.reward_env,
    }
    with weights.service(sampler_tp=args.sampler_tp) as service, ExitStack() as stack:
        sampler = weights.sampler(service)
        scorer = stack.enter_context(Scorer(reward, **limits)) if reward is not None else None
        renderer = make_renderer(sampler, data.renderer, data.template, sampling.stop)
        if environment is not None:
            players, renderers = seated(environment.make(), asked.env, weights, service)
            builders = episode_groups(
                environment, asked, list(problems), args.samples, renderer, renderers
            )
            found = rollout(builders, sampler, params, seed=seed, players=players)
            return problems, with_episode_rewards(found, scorer)
        problems = that_fit(problems, data, sampler.info, renderer, params.max_tokens)
        assert scorer is not None
        alone = [
            ProblemGroupBuilder(problem, args.samples, renderer, scorer) for problem in problems
        ]
        return problems, rollout(alone, sampler, params, seed=seed, players={})


def report(
    args: argparse.Namespace,
    what: dict[str, Any],
    problems: Any,
    result: Any,
    seed: int,
    console: Any,
) -> None:
    """On the console, and in --output."""
    from rl.jsonl import finite, write_atomically
    from rl.run import answer_rows, figures

    rows, found = answer_rows(result.groups, list(problems)), figures(result.groups, args.samples)
    counts = {
        "problems": len(problems),
        "answers": len(rows),
        "answers whose reward failed": len(result.errors),
    }
    console.print(
        ", ".join(f"{name} {value}" for name, value in what.items()),
        table_of(counts, found),
        sep="\n",
        markup=False,
    )
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        everything = finite({**what, "seed": seed, **counts, **found, "rows": rows})
        write_atomically(args.output, json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    args, rest = parser.parse_known_args()
    args.environment_settings, args.others = apart(rest)
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
    from rl.quick import quick

    quick()
    from rl.run import guarded

    sys.exit(
        guarded(
            lambda: main(args), see="python evaluate.py --help", outcome="nothing was evaluated"
        )
    )
