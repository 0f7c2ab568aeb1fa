"""Compare the engine with and without `num_speculative_tokens`, in pairs, on a CPU.

A constructed model emits tokens of a cycle of 16 classes: the next token is any of the 1, 2 or 8
tokens of the next class, with equal probability. With 1 token in a class the text is a copy of the
prompt, and nearly each draft is accepted; with 8 tokens a draft is accepted once in eight. The last
cases are long answers, in which drafting has paused.

`gain` is the median over the pairs of the plain engine's CPU seconds divided by those of
speculative decoding (1 thread).
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

# Import from the repository root: kernels.py of this folder would shadow the package.
sys.path[0] = str(Path(__file__).resolve().parent.parent)
import torch  # noqa: E402

from bench.harness import RESULTS, make_model, make_parser, write_rows  # noqa: E402
from rl.sampler import Engine, SamplingRequest, make_decoder  # noqa: E402
from rl.types import SamplingParams  # noqa: E402

MODELS = ("0.85M", "34M")
CLASSES, PROMPT, PAIRS, DRAFTS = 16, 64, 5, 4  # DRAFTS: num_speculative_tokens


class Case(NamedTuple):
    """Hold a model, the tokens of a class, rows and new tokens of each."""

    model: str
    tokens: int
    rows: int
    new_tokens: int = 64


CASES = [Case(*case) for case in itertools.product(MODELS, (1, 2, 8), (1, 8, 32))]
CASES += [Case("0.85M", 8, rows, 900) for rows in (1, 16)]


def make_cyclic_model(size: str, tokens: int) -> Any:
    """Return a model that continues a token of class c (its id modulo `CLASSES`) with one of the
    first `tokens` tokens of class c + 1.
    """
    changes = {"tie_word_embeddings": False, "pad_token_id": None}
    model = make_model(size, dtype=torch.float32, **changes)
    with torch.no_grad():
        for layer in model.model.layers:  # the layers cost time, and hardly change the stream
            layer.self_attn.o_proj.weight.mul_(1e-3)
            layer.mlp.down_proj.weight.mul_(1e-3)
        vectors = torch.linalg.qr(torch.randn(model.config.hidden_size, CLASSES))[0].T
        ids = torch.arange(model.config.vocab_size)
        model.model.embed_tokens.weight.copy_(vectors[ids % CLASSES])
        head = vectors[(ids - 1) % CLASSES] * 3.0
        model.lm_head.weight.copy_(torch.where((ids < CLASSES * tokens)[:, None], head, 0.0))
    return model


def sample(decoder: Any, case: Case, drafts: int) -> tuple[float, Any]:
    """Return the CPU seconds of sampling and the engine's counters."""
    room = {"kv_cache_tokens": case.rows * (PROMPT + case.new_tokens), "max_rows": 1024}
    engine = Engine(decoder, **room, num_speculative_tokens=drafts)
    generator, params = torch.Generator().manual_seed(1), SamplingParams(max_tokens=case.new_tokens)
    for problem in range(case.rows):
        members = torch.randint(case.tokens, (PROMPT,), generator=generator) * CLASSES
        prompt = ((torch.arange(PROMPT) + problem) % CLASSES + members).tolist()
        engine.add(SamplingRequest(prompt=prompt, problem=problem, params=params))
    start = time.process_time()
    engine.run()
    return time.process_time() - start, engine.counters


def measure(case: Case) -> dict[str, Any]:
    decoder = make_decoder(make_cyclic_model(case.model, case.tokens), kind="fast")
    pairs = []
    for repeat in range(PAIRS + 1):
        order = (0, DRAFTS) if repeat % 2 else (DRAFTS, 0)
        results = {drafts: sample(decoder, case, drafts) for drafts in order}
        if repeat:  # the first pair is a warm-up
            pairs.append((results[0][0], results[DRAFTS][0]))
    _, counters = results[DRAFTS]
    return {
        "parameters": case.model,
        "rows": case.rows,
        "tokens_of_a_class": case.tokens,
        "new_tokens": case.new_tokens,
        "plain_ms": round(1e3 * statistics.median(plain for plain, _ in pairs), 1),
        "speculative_ms": round(1e3 * statistics.median(other for _, other in pairs), 1),
        "gain": round(statistics.median(plain / other for plain, other in pairs), 3),
        "drafted": counters.drafted_tokens,
        "accepted": counters.accepted_tokens,
        "sampled": counters.emitted_tokens,
        "load_average": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    output = make_parser(__doc__, output=RESULTS / "speculative_cpu.csv").parse_args().output
    torch.set_num_threads(1)
    write_rows(output, map(measure, CASES))


if __name__ == "__main__":
    main()
