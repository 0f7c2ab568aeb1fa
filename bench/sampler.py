"""Compare tokens per second of the sampler and `model.generate`, logprobs included on both sides.

Three shapes run on a Qwen3-architecture model with random weights and no EOS, so that both peers
sample the same number of tokens:
  batch    64 prompts of 16 tokens, 64 new tokens
  group    1 prompt of 512 tokens, 16 samples, 16 new tokens
  recipe   64 prompts of 6 tokens, 8 samples, 4 new tokens (recipes/addition.yaml and its model)
Two shapes run on hybrids (qwen3_next: linear attention and experts; falcon_h1: state space and
attention) and on a mixture of experts (qwen3_moe). These decode with transformers' forward:
  NAME batch   32 prompts of 16 tokens, 32 new tokens
  NAME group   1 prompt of 256 tokens, 16 samples, 16 new tokens
Each repeat runs every peer once, in turn; the script compares the medians. `generate` returns the
logits of each step. The benchmark gathers the logprobs from them at the end, which is the cheapest
way that `generate` offers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Import from the repository root: kernels.py of this folder would shadow the package.
sys.path[0] = str(Path(__file__).resolve().parent.parent)
sys.path.append(f"{sys.path[0]}/tests")
import torch  # noqa: E402
from tiny_models import tiny_model  # noqa: E402
from transformers import CONFIG_MAPPING, Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from bench.harness import RESULTS, describe_times, take_turns, write_table  # noqa: E402
from rl.sampler import Engine, SamplingRequest, make_decoder  # noqa: E402
from rl.types import SamplingParams  # noqa: E402

BASE = dict(
    tie_word_embeddings=True,
    max_position_embeddings=1024,
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=0,
)
MODEL_085M = dict(vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
                  num_key_value_heads=2, head_dim=32)  # fmt: skip
MODEL_RECIPE = dict(vocab_size=16, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=4, head_dim=32)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    name: str
    model: dict
    prompts: int
    prompt_tokens: int
    samples: int
    new_tokens: int
    # transformers' model_type; only "qwen3" has a hand-written decoder
    kind: str = "qwen3"


OTHERS = ("qwen3_next", "falcon_h1", "qwen3_moe")
MODEL_OTHER = dict(vocab_size=512, hidden_size=128, intermediate_size=384, head_dim=32, max_position_embeddings=1024,
                   moe_intermediate_size=64, sliding_window=None, mamba_d_ssm=256, mamba_d_head=32)  # fmt: skip
SHAPES = (
    Shape("batch", MODEL_085M, 64, 16, 1, 64),
    Shape("group", MODEL_085M, 1, 512, 16, 16),
    Shape("recipe", MODEL_RECIPE, 64, 6, 8, 4),
    *(Shape(f"{kind} batch", MODEL_OTHER, 32, 16, 1, 32, kind) for kind in OTHERS),
    *(Shape(f"{kind} group", MODEL_OTHER, 1, 256, 16, 16, kind) for kind in OTHERS),
)


def model_of(shape: Shape) -> Any:
    if shape.kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**BASE, **shape.model)).eval()
    known = CONFIG_MAPPING[shape.kind]().to_dict()
    return tiny_model(
        shape.kind, **{key: value for key, value in shape.model.items() if key in known}
    ).eval()


def with_generate(model: Any, ids: torch.Tensor, shape: Shape) -> int:
    """Sample with `generate` and return the number of tokens."""
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            num_return_sequences=shape.samples, min_new_tokens=shape.new_tokens, max_new_tokens=shape.new_tokens,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        tokens = out.sequences[:, ids.shape[1] :]
        logprobs = torch.stack(out.logits, dim=1).log_softmax(-1).gather(2, tokens[..., None])
    return logprobs.numel()


def with_engine(decoder, prompts: list[list[int]], shape: Shape) -> int:
    """Sample with the engine and return the number of tokens."""
    rows = shape.prompts * shape.samples
    engine = Engine(
        decoder, kv_cache_tokens=rows * (shape.prompt_tokens + shape.new_tokens) * 2, max_rows=rows
    )
    params = SamplingParams(max_tokens=shape.new_tokens)
    for i, prompt in enumerate(prompts):
        engine.add(
            SamplingRequest(prompt=prompt, num_samples=shape.samples, params=params, problem=i)
        )
    responses = engine.run()
    return sum(len(s.logprobs or []) for response in responses for s in response.sequences)


def measure(shape: Shape, repeats: int, device: str) -> list[dict]:
    """Return the median seconds of every peer, measured in interleaved repeats."""
    torch.manual_seed(0)
    model = model_of(shape).to(device)
    ids = torch.randint(1, shape.model["vocab_size"], (shape.prompts, shape.prompt_tokens)).to(
        device
    )
    generic = make_decoder(model, kind="hf")
    fast = make_decoder(model, kind="fast") if shape.kind == "qwen3" else None

    def timed(run: Callable[[], int]) -> Callable[[], tuple[float, int]]:
        def measured() -> tuple[float, int]:
            start = time.perf_counter()
            tokens = run()
            if device == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - start, tokens

        return measured

    peers = {
        "generate": timed(lambda: with_generate(model, ids, shape)),
        "engine, hf decoder": timed(lambda: with_engine(generic, ids.tolist(), shape)),
    }
    if fast is not None:
        peers["engine, fast decoder"] = timed(lambda: with_engine(fast, ids.tolist(), shape))
    expected = shape.prompts * shape.samples * shape.new_tokens
    seconds = take_turns(peers, expected, repeats)
    base = statistics.median(seconds["generate"])
    parameters = sum(p.numel() for p in model.parameters())
    return [
        {
            "shape": shape.name,
            "parameters": parameters,
            "peer": name,
            **describe_times(times, expected),
            "ratio_to_generate": round(base / statistics.median(times), 2),
            "load_average": round(os.getloadavg()[0], 1),
        }
        for name, times in seconds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shapes", nargs="+", choices=[s.name for s in SHAPES], default=[s.name for s in SHAPES]
    )
    parser.add_argument("--repeats", type=int, default=7, help="timed runs of each peer (median)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--output", type=Path, default=None, help="default: bench/results/sampler_<device>.csv"
    )
    args = parser.parse_args()
    args.output = args.output or RESULTS / f"sampler_{args.device}.csv"
    torch.set_num_threads(args.threads)
    rows = [
        row
        for shape in SHAPES
        if shape.name in args.shapes
        for row in measure(shape, args.repeats, args.device)
    ]
    print(
        f"torch {torch.__version__}, {args.threads} threads, fp32, median of {args.repeats} interleaved repeats"
    )
    print(
        f"load average {rows[-1]['load_average']}: above {args.threads} or so, others share the cores and the ratios shrink"
    )
    print(
        f"{'shape':8} {'parameters':>10} {'peer':22} {'median ms':>10} {'fastest':>9} {'tokens/s':>9} {'ratio':>6}"
    )
    for row in rows:
        print(f"{row['shape']:8} {row['parameters']:>10,} {row['peer']:22} {row['median_ms']:>10} {row['fastest_ms']:>9} "
              f"{row['tokens_per_s']:>9,} {row['ratio_to_generate']:>6}")  # fmt: skip
    write_table(args.output, rows)
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
