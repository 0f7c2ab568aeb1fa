"""Sample from saved weights: `python sample.py runs/sorting --prompt "50412=" -n 4`.

WEIGHTS is a run's folder (its newest checkpoint, or --checkpoint), a folder of weights, a hub name
or tiny:<preset>. Without --prompt, prompts are read line by line from standard input: a pipe or the
terminal (Ctrl-D ends). With --dataset, the prompts are its rows. All flags of train.py on reading
data and building prompts are accepted too (docs/data.md): --prompt-column, --prompt-suffix,
--template.enable_thinking false, --stop, ...
"""

import argparse
import sys
from collections.abc import Iterator

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
parser.add_argument("--prompt", nargs="+", help="prompts to sample from")
parser.add_argument(
    "--dataset",
    help="use the rows of a file, folder or hub data set as prompts (its test split, if it has "
    "one)",
)
parser.add_argument(
    "--image",
    nargs="+",
    default=[],
    help="image files added to every prompt, for vision models",
)
parser.add_argument(
    "--limit", type=int, default=5, help="number of rows of --dataset, from the first (default 5)"
)
parser.add_argument("-n", type=int, default=1, help="samples for each prompt (default 1)")
parser.add_argument("--temperature", type=float, help="0 is greedy (default: the run's, else 1)")
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
    type=int,
    default=0,
    help="sampling seed: the same seed gives the same samples (default 0)",
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
    "--system-prompt", help="system prompt before every prompt (default: the run's, else none)"
)


def read_prompts(requested: list[str] | None) -> Iterator[str]:
    """Iterate over the command line's prompts; without them, over non-empty lines of standard
    input.
    """
    prefix = "> " if sys.stdin.isatty() else ""
    while requested is None:
        try:
            line = input(prefix)
        except EOFError:
            return
        if line.strip():
            yield line
    yield from requested


def main(args: argparse.Namespace) -> None:
    from dataclasses import replace

    from rich.console import Console
    from rich.text import Text

    from rl.config import DataSettings, SamplingSettings, override_settings
    from rl.images import content_to_text
    from rl.trainer import iterate_prompts, make_renderer, open_weights
    from rl.types import SamplingParams

    weights = open_weights(args.weights, args.checkpoint)
    data = weights.stage.settings.data if weights.stage else DataSettings()
    sampling = (
        weights.stage.settings.sampling if weights.stage else SamplingSettings(temperature=1.0)
    )
    data, sampling = override_settings((data, sampling), args.others, vars(args))
    temperature = sampling.temperature if args.temperature is None else args.temperature
    data = replace(
        data,
        system_prompt=(data.system_prompt if args.system_prompt is None else args.system_prompt)
        or None,
    )
    console = Console(highlight=False, soft_wrap=True)
    with weights.create_service(args.seed, args.sampler_tp) as service:
        sampler = weights.create_sampler(service)
        renderer = make_renderer(
            sampler, args.renderer or data.renderer, data.template, sampling.stop
        )
        stop = renderer.get_stop_sequences()
        params = SamplingParams(
            args.max_tokens or sampling.max_tokens,
            None,
            stop,
            temperature,
            top_k=args.top_k,
            top_p=args.top_p,
        )
        console.print(
            Text(
                f"{weights.name}, temperature {temperature:g}, at most {params.max_tokens} tokens",
                style="dim",
            )
        )
        for messages in iterate_prompts(data, read_prompts(args.prompt), args.dataset, args.limit):
            if args.image:
                text = {"type": "text", "text": content_to_text(messages[-1]["content"])}
                shown = [{"type": "image", "image": path} for path in args.image]
                messages = [*messages[:-1], {**messages[-1], "content": [*shown, text]}]
            tokens = renderer.build_generation_prompt(messages)
            console.print(Text(f"\n{content_to_text(messages[-1]['content'])}", style="bold cyan"))
            for sequence in sampler.sample(tokens, args.n, params).result().sequences:
                message, ended = renderer.parse_response(sequence.tokens)
                mean = sum(sequence.logprobs or []) / max(1, len(sequence.tokens))
                note = (
                    f"  [mean logprob {mean:.4f}, {len(sequence.tokens)} "
                    f"tokens{'' if ended else ', cut off'}]"
                )
                console.print(Text(str(message["content"])).append(note, style="dim"))


if __name__ == "__main__":
    args, args.others = parser.parse_known_args()
    for name, least in {
        "limit": 1,
        "n": 1,
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
            lambda: main(args), see="python sample.py --help", outcome="no further sampling"
        )
    )
