"""Score saved weights on held-out problems: `python evaluate.py runs/addition --samples 8 --output results.json`.

WEIGHTS is a run's folder (its newest checkpoint, or --checkpoint), a folder of weights, a hub name or tiny:<preset>.
For a run, whatever is not given is as in its own held-out evaluation, and then so are the figures.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("weights", metavar="WEIGHTS", help="a run's folder, a folder of weights, a hub name or tiny:<preset>")
parser.add_argument("--checkpoint", help="of a run: best, or a name in its checkpoints.jsonl (default: the newest)")
parser.add_argument("--dataset", help="problems to ask: the test split of a folder or hub name, or a file (default: the run's)")
parser.add_argument("--reward", help="what scores an answer: a registered name, module:function or file.py:function")
parser.add_argument("--limit", type=int, help="ask the first so many problems (default: the run's eval_limit, else 256)")
parser.add_argument("--samples", type=int, default=1, help="answers to each problem; more than 1 give pass@k as well")
parser.add_argument("--temperature", type=float, help="0 is greedy (default: that of the run's evaluation, else 1)")
parser.add_argument("--max-tokens", type=int, help="longest answer (default: the run's, else 256)")
parser.add_argument("--seed", type=int, help="of the samples (default: that of the run's evaluation)")
parser.add_argument("--renderer", help="chat_template, role_colon or plain (default: the run's, else by the tokenizer)")
parser.add_argument("--output", type=Path, help="write the figures and every answer to this .json file")


def settings(args: argparse.Namespace, stage: Any) -> tuple[Any, Any]:
    """What to ask (data settings) and how (SamplingParams): as given, else as in the run, else the defaults."""
    from dataclasses import replace

    from rl.errors import UserError
    from rl.settings import DataSettings, SamplingSettings
    from rl.types import SamplingParams

    if stage is None and not (args.dataset and args.reward):
        missing = f"{args.weights} is no run's folder, so no settings can be taken from it"
        raise UserError(f"{missing}: give --dataset (such as openai/gsm8k) and --reward (such as gsm8k)")
    data = stage.settings.data if stage else DataSettings()
    sampling = stage.settings.sampling if stage else SamplingSettings(temperature=1.0)
    given = {"eval_dataset": args.dataset, "reward": args.reward, "eval_limit": args.limit, "renderer": args.renderer}
    data = replace(data, **{name: value for name, value in given.items() if value is not None})
    if args.reward is not None:
        data = replace(data, rewards=())
    own = sampling.temperature if sampling.eval_temperature is None else sampling.eval_temperature
    temperature = own if args.temperature is None else args.temperature
    return data, SamplingParams(args.max_tokens or sampling.max_tokens, temperature=temperature)


def main(args: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    from rl.environments import ProblemGroupBuilder
    from rl.errors import UserError
    from rl.evaluation import answer_rows, figures
    from rl.hosts import make_renderer
    from rl.jsonl import finite, write_atomically
    from rl.prepare import held_out_problems, reward_of
    from rl.reopen import open_weights
    from rl.rewards import Scorer
    from rl.rollout import rollout

    weights = open_weights(args.weights, args.checkpoint)
    data, params = settings(args, weights.stage)
    problems = held_out_problems(data)
    if problems is None:
        raise UserError(f"{data.dataset} has too few rows to hold any out: name problems with --dataset")
    reward = reward_of(data)
    if reward is None:
        raise UserError(f"{args.weights} was trained without a reward: give --reward (such as gsm8k)")
    shown = " + ".join(f"{weight:g} {name}" for name, weight in data.rewards) or data.reward
    seed = weights.evaluation_seed if args.seed is None else args.seed
    with weights.service() as service, Scorer(reward, timeout=data.reward_timeout, workers=data.reward_workers) as scorer:
        sampler = weights.sampler(service)
        renderer = make_renderer(sampler, data.renderer)
        builders = [ProblemGroupBuilder(problem, args.samples, renderer, scorer) for problem in problems]
        result = rollout(builders, sampler, params, seed=seed)
    if not result.groups:
        raise UserError(f"the reward {shown} failed on every answer: {result.errors[0]}")
    rows, found = answer_rows(result.groups, list(problems)), figures(result.groups, args.samples)
    counts = {"problems": len(problems), "answers": len(rows), "answers whose reward failed": len(result.errors)}
    what = {"weights": weights.name, "problems": problems.name, "reward": shown, "temperature": params.temperature}

    table = Table(show_header=False)
    for name, count in counts.items():
        table.add_row(name, str(count))
    for name, value in found.items():
        table.add_row(name, f"{value:.4f}")
    console = Console(highlight=False, soft_wrap=True)
    console.print(", ".join(f"{name} {value}" for name, value in what.items()), table, sep="\n", markup=False)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        everything = finite({**what, "seed": seed, **counts, **found, "rows": rows})
        write_atomically(args.output, json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    args = parser.parse_args()
    for name, least in {"limit": 1, "samples": 1, "max_tokens": 1, "temperature": 0, "seed": 0}.items():
        value = getattr(args, name)
        if value is not None and not value >= least:
            parser.error(f"{name.replace('_', '-')} is at least {least}, got {value}")
    from rl.entry import guarded

    sys.exit(guarded(lambda: main(args), see="python evaluate.py --help", outcome="nothing was evaluated"))
