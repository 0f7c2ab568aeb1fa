"""The campaign's part about steps that run by themselves: see gpu.py. Both engines at the same rows, and what the device's trial says."""

from __future__ import annotations

import time
from typing import Any

from bench.gpu_kernels import device_of
from bench.gpu_models import BANDWIDTH, give_back, make_model, random_prompts, wait


def _engine(decoder: Any, name: str, rows: int, prompts: list[list[int]], new_tokens: int) -> Any:
    from rl.sampler import Request, make_engine
    from rl.types import SamplingParams

    room = 256 * (rows * -(-new_tokens // 256) + rows + len(prompts) * (len(prompts[0]) // 256 + 2))
    engine = make_engine(decoder, name, kv_cache_tokens=room, max_rows=rows)
    for i, prompt in enumerate(prompts):
        engine.add(Request(prompt=prompt, num_samples=rows // len(prompts), problem=i, params=SamplingParams(max_tokens=new_tokens)))
    return engine


def speed(table: Any, case: str, name: str, decoder: Any, rows: int, dry: bool) -> None:
    """Tokens a second once the prompts are read and the first graph is there; seconds that reading and capturing took."""
    device, steps = device_of(dry), 2 if dry else 6
    prompts = random_prompts(max(rows // 8, 1), 16 if dry else 256, decoder.vocab_size)
    engine = _engine(decoder, name, rows, prompts, 8 * (steps + 4))
    wait(device)
    began = time.perf_counter()
    engine.step()
    engine.step()
    wait(device)
    table.row(case, name, "first_two_calls", time.perf_counter() - began, "s", note="prompts, compiling, capturing")
    before, began = engine.counters.decoded_rows, time.perf_counter()
    for _ in range(steps if name == "paged" else 8 * steps):
        engine.step()
    wait(device)
    seconds, tokens = time.perf_counter() - began, engine.counters.decoded_rows - before
    a, state = decoder.architecture, engine._state
    cached = 2 * decoder.weights.buffers[a.embed].element_size() * len(decoder.layers) * a.key_heads * a.head_width
    weights = sum(b.numel() * b.element_size() for b in decoder.weights.buffers.values())
    floor = (weights + cached * int(state.prompt_lengths.sum() + state.response_lengths.sum())) / BANDWIDTH  # each prompt read once
    each = seconds / (tokens / rows)
    note = f"{each * 1e3:.2f} ms a step, {floor / each:.0%} of bandwidth"
    table.row(case, name, "tokens_per_s", tokens / seconds, "", rows / floor, note)


def part_steps(table: Any, dry: bool) -> None:
    from rl.sampler import make_decoder
    from rl.sampler.choice import difference

    device = device_of(dry)
    for size in ("tiny",) if dry else ("0.5B", "1.7B", "8B"):
        decoder = table.attempt(size, "ours", lambda s=size: make_decoder(make_model(s, device), kind="fast"))
        if decoder is None:
            continue
        table.attempt(size, "trial", lambda d=decoder, s=size: table.row(s, "trial", "says", difference(d) or "the same samples"))
        for rows in (4,) if dry else (1, 64, 256, 1024):
            for name in ("paged", "plain"):
                case = f"{size}, {rows} rows"
                table.attempt(case, name, lambda c=case, n=name, d=decoder, r=rows: speed(table, c, n, d, r, dry))
                give_back(device)
        del decoder
        give_back(device)
