"""Measure decoding for the GPU campaign (see gpu.py): both engines and their peers at the same
number of rows, and the result of the device's trial.

Every provider answers the same prompts in groups of eight. Timing starts after the prefill.
"""

from __future__ import annotations

import gc
from typing import Any

from bench.gpu_kernels import device_of
from bench.gpu_models import (
    BANDWIDTH,
    SIZES,
    engine_of,
    give_back,
    make_model,
    random_prompts,
    seconds_of,
    shares,
)
from bench.gpu_peers import PEERS, Peer


def prompts_for(rows: int, vocab: int, dry: bool) -> list[list[int]]:
    return random_prompts(max(rows // 8, 1), 16 if dry else 256, vocab)


def speed(table: Any, case: str, name: str, decoder: Any, rows: int, dry: bool) -> None:
    """Record the decode tokens per second after the prefill and the first graph capture, and the
    seconds that prefill and capture took. Raises RuntimeError if a step did not decode all rows.
    """
    device, looks = device_of(dry), 2 if dry else 6
    engine = engine_of(
        decoder, name, rows, prompts_for(rows, decoder.vocab_size, dry), 8 * (looks + 4)
    )
    first, _ = seconds_of(lambda: (engine.step(), engine.step()), device)
    table.row(case, name, "first_two_calls", first, "s", note="prompts, compiling, capturing")
    # A call of the paged engine runs up to eight steps.
    counters, calls = engine.counters, looks if name == "paged" else 8 * looks
    tokens, steps = counters.decoded_rows, counters.steps
    seconds, _ = seconds_of(lambda: [engine.step() for _ in range(calls)], device)
    tokens, steps = counters.decoded_rows - tokens, counters.steps - steps
    if tokens != rows * steps:
        raise RuntimeError(f"{tokens} tokens in {steps} steps, not {rows} in each")
    a, state = decoder.architecture, engine._state
    cached = (
        2
        * decoder.weights.buffers[a.embed].element_size()
        * len(decoder.layers)
        * a.key_heads
        * a.head_width
    )
    weights = sum(b.numel() * b.element_size() for b in decoder.weights.buffers.values())
    # The KV cache of each prompt is read once.
    floor = (
        weights + cached * int(state.prompt_lengths.sum() + state.response_lengths.sum())
    ) / BANDWIDTH
    note = (
        f"{seconds / steps * 1e3:.2f} ms a step, {steps} of them, {floor * steps / seconds:.0%} "
        f"of bandwidth"
    )
    table.row(case, name, "tokens_per_s", tokens / seconds, "", rows / floor, note)


def peer_speed(
    table: Any, case: str, name: str, peer: Peer, rows: int, vocab: int, dry: bool
) -> None:
    """Record a peer's speed by the difference of two calls, which excludes the prefill; also record
    the longer call as it is. Raises RuntimeError if tokens are missing or the longer call is not
    slower.
    """
    device, short, long = device_of(dry), 2 if dry else 4, 34 if dry else 52
    prompts = prompts_for(rows, vocab, dry)
    each = [
        prompt
        for prompt, count in zip(prompts, shares(rows, len(prompts)), strict=True)
        for _ in range(count)
    ]
    peer(each, long)  # warm-up: setup at the first call of this size
    took = {}
    for new in (short, long):
        took[new], tokens = seconds_of(lambda new=new: peer(each, new), device)
        if tokens != rows * new:
            raise RuntimeError(f"{tokens} tokens, not {rows} x {new}")
    table.row(
        case,
        name,
        "tokens_per_s_with_prompts",
        rows * long / took[long],
        note=f"{took[long]:.3f} s for prompts and {long} tokens",
    )
    seconds = took[long] - took[short]
    if seconds <= 0:
        raise RuntimeError(
            f"{long} tokens took {took[long]:.3f} s and {short} took {took[short]:.3f} s"
        )
    note = f"{seconds / (long - short) * 1e3:.2f} ms a step, from {short} tokens to {long}"
    table.row(case, name, "tokens_per_s", rows * (long - short) / seconds, note=note)


def part_decode(table: Any, dry: bool) -> None:
    from rl.sampler import make_decoder
    from rl.sampler.engine_selection import compare_engines

    device, sizes, counts = (
        device_of(dry),
        ("tiny",) if dry else ("0.5B", "1.7B", "8B"),
        (4,) if dry else (1, 64, 256, 1024),
    )
    # Our engines run first: a peer that hangs uses up the remaining time of the part.
    for size in sizes:
        decoder = table.attempt(
            size, "ours", lambda s=size: make_decoder(make_model(s, device), kind="fast")
        )
        if decoder is not None:
            table.attempt(
                size,
                "trial",
                lambda d=decoder, s=size: table.row(
                    s, "trial", "says", compare_engines(d) or "the same samples"
                ),
            )
        for rows in () if decoder is None else counts:
            for name in ("paged", "plain"):
                case = f"{size}, {rows} rows"
                table.attempt(
                    case,
                    name,
                    lambda c=case, n=name, d=decoder, r=rows: speed(table, c, n, d, r, dry),
                )
                give_back(device)
        del decoder
        give_back(device)
    for name, make in PEERS.items():
        for size in sizes:
            peer = table.attempt(size, name, lambda s=size, m=make: m(s, device))
            for rows in () if peer is None else counts:
                given = (
                    table,
                    f"{size}, {rows} rows",
                    name,
                    peer,
                    rows,
                    SIZES[size][1]["vocab_size"],
                    dry,
                )
                table.attempt(f"{size}, {rows} rows", name, lambda given=given: peer_speed(*given))
                give_back(device)
            del peer
            gc.collect()  # third-party objects may form reference cycles
            give_back(device)
