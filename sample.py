"""Ask saved weights: `python sample.py runs/addition --prompt "12+34=" -n 4`.

WEIGHTS is a run's folder (its newest checkpoint, or --checkpoint), a folder of weights, a hub name or tiny:<preset>.
Without --prompt, prompts are read line by line: from a pipe, or as you type them (Ctrl-D ends).
"""

import argparse
import sys
from collections.abc import Iterator

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("weights", metavar="WEIGHTS", help="a run's folder, a folder of weights, a hub name or tiny:<preset>")
parser.add_argument("--checkpoint", help="of a run: best, or a name in its checkpoints.jsonl (default: the newest)")
parser.add_argument("--prompt", nargs="+", help="what to ask, one or several")
parser.add_argument("-n", type=int, default=1, help="answers to each prompt (default 1)")
parser.add_argument("--temperature", type=float, help="0 is greedy (default: the run's, else 1)")
parser.add_argument("--max-tokens", type=int, help="longest answer (default: the run's, else 256)")
parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same answers (default 0)")
parser.add_argument("--renderer", help="chat_template, role_colon or plain (default: the run's, else by the tokenizer)")
parser.add_argument("--system-prompt", help="put before every prompt (default: the run's, else none)")


def prompts(given: list[str] | None) -> Iterator[str]:
    """Those of the command line, else lines of the input until it ends; empty ones are passed over."""
    shown = "> " if sys.stdin.isatty() else ""
    while given is None:
        try:
            line = input(shown)
        except EOFError:
            return
        if line.strip():
            yield line
    yield from given


def main(args: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.text import Text

    from rl.hosts import make_renderer
    from rl.reopen import open_weights
    from rl.settings import DataSettings, SamplingSettings
    from rl.types import SamplingParams

    weights = open_weights(args.weights, args.checkpoint)
    data = weights.stage.settings.data if weights.stage else DataSettings()
    sampling = weights.stage.settings.sampling if weights.stage else SamplingSettings(temperature=1.0)
    temperature = sampling.temperature if args.temperature is None else args.temperature
    system_prompt = data.system_prompt if args.system_prompt is None else args.system_prompt
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    console = Console(highlight=False, soft_wrap=True)
    with weights.service(args.seed) as service:
        sampler = weights.sampler(service)
        renderer = make_renderer(sampler, args.renderer or data.renderer)
        params = SamplingParams(args.max_tokens or sampling.max_tokens, None, renderer.get_stop_sequences(), temperature)
        console.print(Text(f"{weights.name}, temperature {temperature:g}, at most {params.max_tokens} tokens", style="dim"))
        for prompt in prompts(args.prompt):
            tokens = renderer.build_generation_prompt([*system, {"role": "user", "content": prompt}])
            console.print(Text(f"\n{prompt}", style="bold cyan"))
            for sequence in sampler.sample(tokens, args.n, params).result().sequences:
                message, ended = renderer.parse_response(sequence.tokens)
                mean = sum(sequence.logprobs or []) / max(1, len(sequence.tokens))
                note = f"  [mean logprob {mean:.4f}, {len(sequence.tokens)} tokens{'' if ended else ', cut off'}]"
                console.print(Text(str(message["content"])).append(note, style="dim"))


if __name__ == "__main__":
    args = parser.parse_args()
    for name, least in {"n": 1, "max_tokens": 1, "temperature": 0, "seed": 0}.items():
        value = getattr(args, name)
        if value is not None and not value >= least:
            parser.error(f"{name.replace('_', '-')} is at least {least}, got {value}")
    from rl.entry import guarded

    sys.exit(guarded(lambda: main(args), see="python sample.py --help", outcome="nothing more is asked"))
