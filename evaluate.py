"""Score saved weights on held-out problems: `python evaluate.py runs/math --dataset math500 aime
gpqa --samples 8 --seeds 0 1 2`.

WEIGHTS is a run's folder (its newest checkpoint, or --checkpoint), a folder of weights, a hub name
or tiny:<preset>. For a run, the defaults are the settings of its held-out evaluation, which
reproduce its metrics. A --dataset by a short name (humaneval, math500, aime, gpqa, ifeval, ...;
docs/datasets.md) also selects the reward that scores it; aime:FILE reads a local file as that data
set. The table of all metrics with their standard errors, and every answer, are written to --output,
by default into the run's folder evaluations/. A custom reward of a run, if it is outside
of the current folder, is imported only with --trust-run: the author of the run's files chose that
file. All flags of train.py on reading data and building prompts are accepted too (docs/data.md):
--prompt-column, --data-format, --prompt-suffix, --system-prompt, --template.enable_thinking false,
--max-prompt-tokens, --stop, ... --sampler vllm samples with vLLM (docs/vllm.md).
"""

import argparse
import hashlib
import json
import os
import re
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

parser = argparse.ArgumentParser(
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,  # otherwise --sampler would be read as --sampler-tp
)
parser.add_argument(
    "weights",
    metavar="WEIGHTS",
    nargs="?",
    help="a run's folder, a folder of weights, a hub name or tiny:<preset>",
)
parser.add_argument(
    "--checkpoint", help="of a run: best, or a name in its checkpoints.jsonl (default: the newest)"
)
parser.add_argument(
    "--dataset",
    "--datasets",
    nargs="+",
    default=[],
    help="evaluation problems, one or several: a short name, a short name and a file as "
    "aime:FILE, a folder's or hub name's test split, a file (default: the run's)",
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
    "--seed",
    "--seeds",
    dest="seeds",
    type=int,
    nargs="+",
    help="sampling seeds, one or several; each draws --samples answers to every problem "
    "(default: that of the run's evaluation)",
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
    "--output",
    type=Path,
    help="write the table and every answer to this .json file, and the table to a .md file beside "
    "it (default: a file in the run's folder evaluations/)",
)
parser.add_argument(
    "--baseline",
    type=Path,
    metavar="FILE",
    help="compare with an earlier evaluation's .json file, problem by problem",
)


@dataclass(frozen=True)
class EvaluationRequest:
    """Hold the settings of the evaluation's data and environment."""

    data: Any
    env: Any


@dataclass(frozen=True)
class DatasetEvaluation:
    """Hold what the evaluation of a data set needs.

    dataset: the requested name; None for the run's data set
    sandbox: the kind that programs run in; None if the reward runs none
    """

    dataset: str | None
    request: EvaluationRequest
    sampling: Any
    params: Any
    environment: Any
    problems: Any
    reward: Any
    sandbox: str | None

    @property
    def label(self) -> str:
        """Return the name of the data set."""
        return self.dataset or self.problems.name

    @property
    def reward_name(self) -> str:
        """Return the name of what scores the answers."""
        data = self.request.data
        name = " + ".join(f"{weight:g} {part}" for part, weight in data.rewards) or data.reward
        if self.environment is None:
            return name
        return f"environment {self.environment.name}" + (
            f" + {name}" if self.reward is not None else ""
        )

    @property
    def source(self) -> str:
        """Return which problems are evaluated, as words."""
        data, environment = self.request.data, self.environment
        if environment is not None and not environment.needs_rows:
            return f"held-out episodes of {environment.name}"
        sets = [data.eval_dataset, *data.more_eval_datasets]
        if data.eval_dataset is not None:
            return f"problems of {' + '.join(sets)}"
        return f"held-out problems of {' + '.join([data.dataset, *data.more_datasets, *sets[1:]])}"

    def summarize(self, weights: Any) -> dict[str, Any]:
        """Return the settings that the console and the file name."""
        params = self.params
        summary = {
            "weights": weights.name,
            "problems": self.problems.name,
            "reward": self.reward_name,
            "temperature": params.temperature,
        }
        summary |= {"top_k": params.top_k} if params.top_k != -1 else {}
        summary |= {"top_p": params.top_p} if params.top_p != 1 else {}
        return summary | ({"sandbox": self.sandbox} if self.sandbox is not None else {})


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


def resolve_settings(
    args: argparse.Namespace, weights: Any, dataset: str | None
) -> tuple[Any, Any, Any]:
    """Return (data settings, sampling settings, SamplingParams) of a data set; None: the run's.

    Each value is from the arguments, else from the run, else the default.
    """
    from rl.config import override_settings
    from rl.data import find_default_reward
    from rl.errors import UserError
    from rl.types import SamplingParams

    data, sampling = weights.prompt_settings
    dataset_reward = find_default_reward(dataset) if dataset is not None else None
    if dataset_reward is not None and Path(dataset).expanduser().is_file():
        # A reward by the columns of a file is a guess: one that was chosen counts.
        chosen = args.reward or (weights.stage is not None and (data.reward or data.rewards))
        if chosen and args.reward != dataset_reward:
            dataset_reward = None
    reward = args.reward or dataset_reward
    if weights.stage is None and not args.environment and not (dataset and reward):
        missing = f"{args.weights} is not a run's folder and provides no settings"
        raise UserError(
            f"{missing}: pass --dataset (such as openai/gsm8k) and --reward (such as gsm8k)"
        )
    requested = {
        "eval_dataset": dataset,
        "eval_limit": args.limit,
        "renderer": args.renderer,
        "sandbox": args.sandbox,
        "reward": reward,
    }
    overrides: dict[str, Any] = {
        name: value for name, value in requested.items() if value is not None
    }
    if dataset is not None:  # it alone, without the further sets of the run
        overrides |= {"more_datasets": (), "dataset_weights": (), "more_eval_datasets": ()}
        data = data.make_prompt_settings()
    if dataset_reward is not None:  # its rows have a different format than the run's
        overrides |= {
            "data_format": "auto",
            "prompt_column": "prompt",
            "answer_column": "answer",
            "response_column": None,
            "dataset_config": None,
        }
    data, sampling = override_settings((data, sampling), args.others, vars(args), overrides)
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


def main(args: argparse.Namespace, parts: list[dict[str, Any]]) -> None:
    """Evaluate the data sets. `parts` receives the evaluation of each, which is written at once."""
    from rich.console import Console

    from rl.reporting import format_markdown, read_evaluation
    from rl.trainer import open_weights

    baseline = read_evaluation(args.baseline) if args.baseline is not None else None
    weights = open_weights(args.weights, args.checkpoint, trusted=args.trust_run)
    console = Console(highlight=False, soft_wrap=True)
    evaluations = [
        prepare_evaluation(args, weights, dataset, console) for dataset in args.dataset or [None]
    ]
    seeds = args.seeds or [weights.evaluation_seed]
    labels = [evaluation.label for evaluation in evaluations]
    output = args.output or choose_output(args, weights, labels)
    sampling = evaluations[0].sampling  # the same for all data sets
    with weights.create_service(sampler_tp=args.sampler_tp, sampling=sampling) as service:
        sampler = weights.create_sampler(service, prefers_servers=True)
        for evaluation in evaluations:
            parts.append(
                evaluate_dataset(args, weights, service, sampler, evaluation, seeds, console)
            )
            if len(parts) < len(labels):
                result = join_parts(parts, seeds, labels)
                write_files(args, output, result, format_markdown(result["table"]), console)
    write_results(args, output, join_parts(parts, seeds, labels), baseline, console)


def prepare_evaluation(
    args: argparse.Namespace, weights: Any, dataset: str | None, console: Any
) -> DatasetEvaluation:
    """Resolve the settings of a data set and load its problems, before any weights are loaded.

    With an environment, the reward scores whole episodes; None if no reward does.
    """
    from rl.errors import UserError
    from rl.trainer import (
        find_sandbox_kind,
        load_held_out_rows,
        resolve_environment,
        resolve_episode_reward,
        resolve_stage_reward,
    )

    data, sampling, params = resolve_settings(args, weights, dataset)
    request = EvaluationRequest(data, resolve_env_settings(args, weights.stage))
    check_trust(args, request, console)
    environment = resolve_environment(request)
    problems = load_held_out_rows(environment, request)
    if problems is None:
        raise UserError(
            f"{data.dataset} has too few rows for a held-out split: pass problems with --dataset"
        )
    reward = resolve_stage_reward(data)
    if environment is not None:
        reward = resolve_episode_reward(environment, data)
    elif reward is None:
        raise UserError(
            f"{args.weights} was trained without a reward: pass --reward (such as gsm8k)"
        )
    kind = None if reward is None else find_sandbox_kind(reward, data)
    return DatasetEvaluation(
        dataset, request, sampling, params, environment, problems, reward, kind
    )


def check_trust(args: argparse.Namespace, request: EvaluationRequest, console: Any) -> None:
    """Print which code of the run's config is imported.

    Raises UserError if that code is outside of the current folder and not trusted.
    """
    from rl.trainer import check_trusted, list_environment_addresses, list_reward_addresses

    addresses = {
        "reward": list_reward_addresses(request.data) if args.reward is None else [],
        "environment": list_environment_addresses(request) if args.environment is None else [],
    }
    source = f"the config of {args.weights}"
    for kind, names in addresses.items():
        for notice in check_trusted(names, source, args.trust_run, kind):
            console.print(notice, markup=False)


def sample_and_score(
    args: argparse.Namespace,
    weights: Any,
    service: Any,
    sampler: Any,
    evaluation: DatasetEvaluation,
    seeds: list[int],
) -> tuple[Any, list[Any]]:
    """Return (the problems that fit, their scored answers for each seed)."""
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

    request, environment, params = evaluation.request, evaluation.environment, evaluation.params
    data, problems, reward = request.data, evaluation.problems, evaluation.reward
    limits: dict[str, Any] = {
        "timeout": data.reward_timeout,
        "workers": data.reward_workers,
        "environment": data.reward_env,
    }
    # each episode continues by itself: a slow one delays no other
    schedule = RolloutSchedule(make_stream=SampleStream)
    with ExitStack() as stack:
        scorer = stack.enter_context(Scorer(reward, **limits)) if reward is not None else None
        renderer = make_renderer(sampler, data.renderer, data.template, evaluation.sampling.stop)
        players: Any = {}
        if environment is not None:
            players, renderers = load_evaluation_opponents(
                environment.make(), request.env, weights, service
            )
        else:
            problems = select_fitting_problems(
                problems, data, sampler.info, renderer, params.max_tokens
            )
        results = []
        for seed in seeds:
            if environment is not None:
                builders: Any = build_episode_groups(
                    environment, request, list(problems), args.samples, renderer, renderers
                )
            else:
                assert scorer is not None
                builders = [
                    ProblemGroupBuilder(problem, args.samples, renderer, scorer)
                    for problem in problems
                ]
            result = rollout(
                builders, sampler, params, seed=seed, players=players, schedule=schedule
            )
            results.append(result if environment is None else add_episode_rewards(result, scorer))
        return problems, results


def evaluate_dataset(
    args: argparse.Namespace,
    weights: Any,
    service: Any,
    sampler: Any,
    evaluation: DatasetEvaluation,
    seeds: list[int],
    console: Any,
) -> dict[str, Any]:
    """Evaluate a data set with all seeds, print its metrics, and return them with every answer."""
    from rl.errors import UserError
    from rl.reporting import make_table_rows
    from rl.trainer import compute_evaluation_metrics, make_response_rows

    problems, results = sample_and_score(args, weights, service, sampler, evaluation, seeds)
    groups = [group for result in results for group in result.groups]
    errors = [error for result in results for error in result.errors]
    if not groups:
        raise UserError(
            f"{'the reward' if evaluation.environment is None else 'the'} "
            f"{evaluation.reward_name} failed on every answer: {errors[0]}"
        )
    rows = []
    for seed, result in zip(seeds, results, strict=True):
        answers = make_response_rows(result.groups, list(problems))
        rows += [{**row, "seed": seed} for row in answers] if len(seeds) > 1 else answers
    metrics = compute_evaluation_metrics(groups, args.samples * len(seeds))
    counts = {
        "problems": len(problems),
        "answers": len(rows),
        "answers whose reward failed": len(errors),
    }
    summary = evaluation.summarize(weights)
    settings = ", ".join(
        f"{name.replace('_', '-')} {value}"
        for name, value in summary.items()
        if name not in ("weights", "problems")
    )
    console.print(
        f"{weights.name} on {len(problems)} {evaluation.source} ({settings})",
        build_table(counts, metrics),
        sep="\n",
        markup=False,
    )
    return {
        **summary,
        "dataset": evaluation.label,
        "source": evaluation.problems.name,
        "seed": seeds[0],
        "seeds": seeds,
        "samples": args.samples,
        **counts,
        **metrics,
        "table": make_table_rows(evaluation.label, metrics, len(problems), len(rows)),
        "rows": rows,
    }


def join_parts(parts: list[dict[str, Any]], seeds: list[int], labels: list[str]) -> dict[str, Any]:
    """Return the evaluation of the data sets `labels`, of which `parts` are finished."""
    if len(labels) == 1:
        return dict(parts[0])
    table = [row for part in parts for row in part["table"]]
    common = {key: parts[0][key] for key in ("weights", "temperature", "samples")}
    if unfinished := labels[len(parts) :]:
        common["unfinished"] = unfinished
    datasets = [{name: value for name, value in part.items() if name != "table"} for part in parts]
    return {**common, "seeds": seeds, "table": table, "datasets": datasets}


def write_results(
    args: argparse.Namespace,
    output: Path | None,
    evaluation: dict[str, Any],
    baseline: dict[str, Any] | None,
    console: Any,
) -> None:
    """Print the table of all data sets and the comparison with --baseline, and write the files."""
    from rl.reporting import compare_evaluations, format_markdown

    text = format_markdown(evaluation["table"])
    console.print(text.rstrip(), markup=False)
    if baseline is not None:
        evaluation["comparison"] = [
            {"dataset": name, "problems": paired.problems, "difference": paired.difference,
             "standard_error": paired.standard_error, "sentence": f"{name}: {paired.describe()}"}
            for name, paired in compare_evaluations(baseline, evaluation)
        ]  # fmt: skip
        sentences = [row["sentence"] for row in evaluation["comparison"]] or [
            f"{args.baseline} shares no problem with this evaluation"
        ]
        console.print(*sentences, sep="\n", markup=False)
        text += "".join(f"\n{sentence}\n" for sentence in sentences)
    write_files(args, output, evaluation, text, console)


def write_files(
    args: argparse.Namespace,
    output: Path | None,
    evaluation: dict[str, Any],
    text: str,
    console: Any,
) -> None:
    """Write an evaluation and its table `text`; nothing if `output` is None.

    A file in the run's folder that cannot be written is only reported.
    """
    from rl.jsonl import replace_nonfinite, write_atomically

    if output is None:
        return
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(output, json.dumps(replace_nonfinite(evaluation), indent=1) + "\n")
        write_atomically(output.with_suffix(".md"), text)
    except OSError as error:
        if args.output is not None:
            raise
        console.print(f"nothing was written into the run's folder: {error}", markup=False)
        return
    rest = evaluation.get("unfinished")
    state = f" (unfinished: {', '.join(rest)})" if rest else ""
    console.print(f"written to {output} and {output.with_suffix('.md').name}{state}", markup=False)


def choose_output(args: argparse.Namespace, weights: Any, labels: list[str]) -> Path | None:
    """Return the file of an evaluation in the run's folder; None if the weights are of no run.

    Its name has the checkpoint, the data sets and a hash of the settings: the same evaluation
    writes the same file again.
    """
    from rl.reporting import EVALUATIONS

    if weights.run_folder is None:
        return None
    others = ("weights", "checkpoint", "output", "baseline", "trust_run")
    settings = [[name, value] for name, value in sorted(vars(args).items()) if name not in others]
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]
    names = [re.sub(r"[^A-Za-z0-9.]+", "_", Path(label).name)[:40] for label in labels]
    stem = "-".join([weights.path.name, *names])[:150]
    return weights.run_folder / EVALUATIONS / f"{stem}-{digest}.json"


def check_output(output: Path) -> None:
    """Create the folder of --output. The program ends if the files cannot be written."""
    for path in (output, output.with_suffix(".md")):
        if path.is_dir():
            parser.error(f"output is a .json file, and {path} is a folder")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"the folder of output cannot be created: {error}")
    if not os.access(output.parent, os.W_OK | os.X_OK):
        parser.error(f"output cannot be written: {output.parent} is not writable")


def read_arguments() -> argparse.Namespace:
    """Return the arguments of the command line. The program ends if one is invalid."""
    args, rest = parser.parse_known_args()
    from rl.config import find_ambiguous_flag

    if flag := args.weights and find_ambiguous_flag(sys.argv, rest, args.weights):
        parser.error(f"put WEIGHTS before {flag}, whose value could otherwise be taken for it")
    if args.weights is None and len(args.dataset) > 1:
        args.weights = args.dataset.pop()  # --dataset NAME WEIGHTS
    if args.weights is None:
        parser.error("the following arguments are required: WEIGHTS")
    from rl.config import split_environment_flags

    args.environment_settings, args.others = split_environment_flags(rest)
    for name, least in {
        "limit": 1,
        "samples": 1,
        "max_tokens": 1,
        "temperature": 0,
        "sampler_tp": 1,
    }.items():
        value = getattr(args, name)
        if value is not None and not value >= least:
            parser.error(f"{name.replace('_', '-')} is at least {least}, got {value}")
    seeds = args.seeds or []
    if any(seed < 0 for seed in seeds):
        parser.error(f"seed is at least 0, got {min(seeds)}")
    for name, values in (("seeds", seeds), ("dataset", args.dataset)):
        if len(set(values)) < len(values):
            parser.error(f"{name} has a value twice: {' '.join(map(str, values))}")
    if args.output is not None and args.output.suffix == ".md":
        parser.error(f"output is a .json file (the .md file is written beside it): {args.output}")
    if args.output is not None:
        check_output(args.output)
    return args


if __name__ == "__main__":
    args = read_arguments()
    from rl.startup import reduce_gc

    reduce_gc()
    from rl.trainer import run_guarded

    finished: list[dict[str, Any]] = []
    sys.exit(
        run_guarded(
            lambda: main(args, finished),
            see="python evaluate.py --help",
            outcome=lambda: (
                f"{len(finished)} of {len(args.dataset)} data sets were evaluated"
                if finished
                else "nothing was evaluated"
            ),
        )
    )
