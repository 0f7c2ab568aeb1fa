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
way that `generate` offers. Above a load of about --threads, others share the cores and ratios shrink.
"""

from __future__ import annotations

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

from bench.harness import (  # noqa: E402
    RESULTS,
    describe_times,
    make_parser,
    show,
    take_turns,
    write_table,
)
from rl.sampler import Engine, SamplingRequest, make_decoder  # noqa: E402
from rl.types import SamplingParams  # noqa: E402

BASE = dict(tie_word_embeddings=True, max_position_embeddings=1024, eos_token_id=None, bos_token_id=None, pad_token_id=0)  # fmt: skip
MODEL_085M = dict(vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
                  num_key_value_heads=2, head_dim=32)  # fmt: skip
MODEL_RECIPE = dict(vocab_size=16, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=4, head_dim=32)  # fmt: skip


@dataclass(frozen=True)
class SamplerWorkload:
    """Hold a model and the work on it. `kind`: transformers' model_type; only "qwen3" has a
    hand-written decoder.
    """

    name: str
    model: dict
    prompts: int
    prompt_tokens: int
    samples: int
    new_tokens: int
    kind: str = "qwen3"

    @property
    def tokens(self) -> int:
        return self.prompts * self.samples * self.new_tokens


OTHERS = ("qwen3_next", "falcon_h1", "qwen3_moe")
MODEL_OTHER = dict(vocab_size=512, hidden_size=128, intermediate_size=384, head_dim=32, max_position_embeddings=1024,
                   moe_intermediate_size=64, sliding_window=None, mamba_d_ssm=256, mamba_d_head=32)  # fmt: skip
SHAPES = (
    SamplerWorkload("batch", MODEL_085M, 64, 16, 1, 64),
    SamplerWorkload("group", MODEL_085M, 1, 512, 16, 16),
    SamplerWorkload("recipe", MODEL_RECIPE, 64, 6, 8, 4),
    *(SamplerWorkload(f"{kind} batch", MODEL_OTHER, 32, 16, 1, 32, kind) for kind in OTHERS),
    *(SamplerWorkload(f"{kind} group", MODEL_OTHER, 1, 256, 16, 16, kind) for kind in OTHERS),
)


def model_of(shape: SamplerWorkload) -> Any:
    if shape.kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**BASE, **shape.model)).eval()
    known = CONFIG_MAPPING[shape.kind]().to_dict()
    sizes = {key: value for key, value in shape.model.items() if key in known}
    return tiny_model(shape.kind, **sizes).eval()


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


def with_engine(decoder, prompts: list[list[int]], shape: SamplerWorkload) -> int:
    """Sample with the engine and return the number of tokens."""
    rows = shape.prompts * shape.samples
    room = rows * (shape.prompt_tokens + shape.new_tokens) * 2
    engine = Engine(decoder, kv_cache_tokens=room, max_rows=rows)
    options = {"num_samples": shape.samples, "params": SamplingParams(max_tokens=shape.new_tokens)}
    for i, prompt in enumerate(prompts):
        engine.add(SamplingRequest(prompt=prompt, problem=i, **options))
    return sum(len(s.logprobs or []) for response in engine.run() for s in response.sequences)


def measure(shape: SamplerWorkload, repeats: int, device: str) -> list[dict]:
    """Return the median seconds of every peer, measured in interleaved repeats."""
    torch.manual_seed(0)
    model = model_of(shape).to(device)
    size = shape.prompts, shape.prompt_tokens
    ids = torch.randint(1, shape.model["vocab_size"], size).to(device)
    peers: dict[str, Callable[[], int]] = {"generate": lambda: with_generate(model, ids, shape)}
    for kind in ("hf", "fast") if shape.kind == "qwen3" else ("hf",):
        decoder = make_decoder(model, kind=kind)
        peers[f"engine, {kind} decoder"] = lambda d=decoder: with_engine(d, ids.tolist(), shape)

    def timed(run: Callable[[], int]) -> tuple[float, int]:
        start = time.perf_counter()
        tokens = run()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start, tokens

    turns = {name: (lambda run=run: timed(run)) for name, run in peers.items()}
    seconds = take_turns(turns, shape.tokens, repeats)
    base = statistics.median(seconds["generate"])
    return [
        {
            "shape": shape.name,
            "parameters": sum(p.numel() for p in model.parameters()),
            "peer": name,
            **describe_times(times, shape.tokens),
            "ratio_to_generate": round(base / statistics.median(times), 2),
            "load_average": round(os.getloadavg()[0], 1),
        }
        for name, times in seconds.items()
    ]


def main() -> None:
    parser, shapes = make_parser(__doc__), {shape.name: shape for shape in SHAPES}
    parser.add_argument("--shapes", nargs="+", choices=shapes, default=list(shapes))
    parser.add_argument("--repeats", type=int, default=7, help="timed runs of each peer (median)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--output", type=Path, help="default: bench/results/sampler_<device>.csv")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows: list[dict] = []
    for name in args.shapes:
        for row in measure(shapes[name], args.repeats, args.device):
            show(row)
            rows.append(row)
    write_table(args.output or RESULTS / f"sampler_{args.device}.csv", rows)


if __name__ == "__main__":
    main()
