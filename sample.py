"""Sample from saved weights: `python sample.py runs/sorting --prompt "50412=" -n 4`.

WEIGHTS is a run's folder (its newest checkpoint, or --checkpoint), a folder of weights, a hub name
or tiny:<preset>. Without --prompt, prompts are read line by line from standard input: a pipe or the
terminal (Ctrl-D ends). With --dataset, the prompts are its rows. With --chat, the lines are the
messages of a conversation, with one model or several side by side. All flags of train.py on reading
data and building prompts are accepted too (docs/data.md): --prompt-column, --prompt-suffix,
--template.enable_thinking false, --stop, ... --sampler vllm samples with vLLM (docs/vllm.md).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from rl.trainer import SampledModel

parser = argparse.ArgumentParser(
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,  # otherwise --sampler would be read as --sampler-tp
)
parser.add_argument(
    "weights",
    metavar="WEIGHTS",
    nargs="+",
    help="a run's folder, a folder of weights, a hub name or tiny:<preset>; several with --chat",
)
parser.add_argument(
    "--chat",
    action="store_true",
    help="hold a conversation; several WEIGHTS answer side by side, /help lists the commands",
)
parser.add_argument(
    "--checkpoint",
    help="of each run: best, or a name in its checkpoints.jsonl (default: the newest)",
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
parser.add_argument(
    "-n", "--samples", dest="n", type=int, default=1, help="samples for each prompt (default 1)"
)
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
    "--trust-run",
    action="store_true",
    help="import the custom methods of all WEIGHTS from the paths in their configs",
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
    "--system",
    "--system-prompt",
    dest="system_prompt",
    metavar="TEXT",
    help="system prompt before every prompt or conversation (default: the run's, else none)",
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


def open_models(
    args: argparse.Namespace, resources: contextlib.ExitStack
) -> Iterator[SampledModel]:
    """Load all WEIGHTS, each with the settings of its run and the flags over them.

    --checkpoint applies to runs alone. `resources` closes the services that sample.
    """
    from rl.config import override_settings
    from rl.reporting import contains_run
    from rl.trainer import load_sampled_model, open_weights
    from rl.types.feature_table import check_features

    runs = [target for target in args.weights if contains_run(Path(os.path.expanduser(target)))]
    for target in args.weights:
        # without a run, open_weights refuses a checkpoint
        checkpoint = args.checkpoint if target in runs or not runs else None
        saved = open_weights(target, checkpoint, trusted=args.trust_run)
        data, sampling = saved.prompt_settings
        sections = (data.make_prompt_settings(), sampling)
        data, sampling = override_settings(sections, args.others, vars(args))
        if len(args.weights) > 1:
            check_features((sampling.sampler, "several models"))
        service = saved.create_service(args.seed, args.sampler_tp, sampling)
        resources.enter_context(service)
        yield load_sampled_model(
            saved,
            service,
            data,
            sampling,
            system_prompt=args.system_prompt,
            renderer_name=args.renderer,
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
        )


def main(args: argparse.Namespace, models: list[SampledModel]) -> None:
    """Sample from the models of `open_models`, which `models` receives."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    with contextlib.ExitStack() as resources:
        models += list(open_models(args, resources))
        for model in models:
            params = model.params
            line = (
                f"{model.name}, temperature {params.temperature:g}, at most {params.max_tokens} "
                "tokens"
            )
            console.print(Text(line, style="dim"))
        if args.chat:
            chat(models, console, resources)
        else:
            sample_prompts(models[0], args, console)


def sample_prompts(model: SampledModel, args: argparse.Namespace, console: Console) -> None:
    """Print `args.n` samples of each prompt."""
    from rich.text import Text

    from rl.chat import describe_sample
    from rl.images import content_to_text
    from rl.sanitize import sanitize_message
    from rl.trainer import iterate_prompts

    def sanitize(text: str) -> str:
        return sanitize_message(text, len(text), console.encoding)

    for messages in iterate_prompts(
        model.data, read_prompts(args.prompt), args.dataset, args.limit
    ):
        if args.image:
            content = messages[-1]["content"]
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            images = [{"type": "image", "image": path} for path in args.image]
            messages = [*messages[:-1], {**messages[-1], "content": [*images, *parts]}]
        tokens = model.renderer.build_generation_prompt(messages)
        prompt = content_to_text(messages[-1]["content"])
        console.print(Text(f"\n{sanitize(prompt)}", style="bold cyan"))
        for sequence in model.sampler.sample(tokens, args.n, model.params).result().sequences:
            message, ended = model.renderer.parse_response(sequence.tokens)
            note = describe_sample(sequence, "" if ended else "cut off")
            answer = sanitize(str(message["content"]))
            console.print(Text(answer).append(note, style="dim"))


def chat(models: list[SampledModel], console: Console, resources: contextlib.ExitStack) -> None:
    """Hold a conversation with all models at once."""
    from rl.chat import ChatConsole, ChatSession
    from rl.data import PromptTemplate

    sessions = []
    for model in models:
        template = PromptTemplate.from_settings(model.data)
        session = ChatSession(model.name, model.sampler, model.renderer, model.params, template)
        sessions.append(resources.enter_context(contextlib.closing(session)))
    ChatConsole(sessions, console).run()


if __name__ == "__main__":
    args, args.others = parser.parse_known_args()
    from rl.config import find_ambiguous_flag

    if flag := find_ambiguous_flag(sys.argv, args.others, args.weights[0]):
        parser.error(f"put WEIGHTS before {flag}, whose value could otherwise be taken for it")
    for name, minimum in {
        "limit": 1,
        "n": 1,
        "max_tokens": 1,
        "temperature": 0,
        "seed": 0,
        "sampler_tp": 1,
    }.items():
        value = getattr(args, name)
        if value is not None and not value >= minimum:
            parser.error(f"{name.replace('_', '-')} is at least {minimum}, got {value}")
    if len(args.weights) > 1 and not args.chat:
        parser.error(f"several WEIGHTS need --chat, got {' '.join(args.weights)}")
    if args.chat and (args.prompt or args.dataset or args.image or args.n != 1):
        parser.error(
            "--chat reads messages from the terminal or a pipe: leave out --prompt, --dataset, "
            "--image and -n"
        )
    if args.prompt and args.dataset:
        parser.error("--prompt and --dataset both name prompts: leave out one of them")
    num_launched = int(os.environ.get("WORLD_SIZE", "1"))
    if args.chat and max(args.sampler_tp, num_launched) > 1:
        wrong = f"--sampler-tp {args.sampler_tp}" if args.sampler_tp > 1 else "a launcher"
        parser.error(
            f"--chat needs a single process, got {wrong}: Ctrl-C would end the other processes; "
            "leave out --sampler-tp and the launcher, or use the chat page of serve.py"
        )
    from rl.startup import reduce_gc

    reduce_gc()
    from rl.trainer import run_guarded

    models: list[SampledModel] = []
    sys.exit(
        run_guarded(
            lambda: main(args, models),
            see="python sample.py --help",
            outcome=lambda: "no further sampling" if models else "nothing was sampled",
        )
    )
