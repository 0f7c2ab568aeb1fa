"""Measure decoding for the GPU campaign (see gpu.py): both engines with full weights and with LoRA,
the result of the device's trial, and the peers at the same number of rows.

Every provider answers the same prompts in groups of eight. Timing starts after the prefill.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

from bench.gpu_kernels import device_of, measure_kernels
from bench.gpu_models import (
    PEERS,
    SIZES,
    Peer,
    busy_seconds,
    engine_of,
    free_gpu_memory,
    make_model,
    random_prompts,
    seconds_of,
    split_rows,
)
from bench.kernels import floor_ms

SIZES_TIMED = ("0.5B", "8B")
ROWS_TIMED = (1, 64, 256, 1024)
LORA_RANK = 16


def prompts_for(rows: int, vocab: int, dry: bool) -> list[list[int]]:
    return random_prompts(max(rows // 8, 1), 16 if dry else 256, vocab)


def measure_speed(table: Any, case: str, name: str, decoder: Any, rows: int, dry: bool) -> None:
    """Record the decode tokens per second after the prefill and the first graph capture, and the
    seconds that prefill and capture took. Raises RuntimeError if a step did not decode all rows.
    """
    device, looks = device_of(dry), 2 if dry else 6
    prompts = prompts_for(rows, decoder.vocab_size, dry)
    engine = engine_of(decoder, name, rows, prompts, 8 * (looks + 4))
    first, _ = seconds_of(lambda: (engine.step(), engine.step()), device)
    table.row(case, name, "first_two_calls", first, "s", note="prompts, compiling, capturing")
    # A call of the paged engine runs up to eight steps.
    counters, calls = engine.counters, looks if name == "paged" else 8 * looks
    tokens, steps = counters.decoded_rows, counters.steps
    seconds, _ = seconds_of(lambda: [engine.step() for _ in range(calls)], device)
    tokens, steps = counters.decoded_rows - tokens, counters.steps - steps
    if tokens != rows * steps:
        raise RuntimeError(f"{tokens} tokens in {steps} steps, not {rows} in each")
    step, floor = 1e3 * seconds / steps, step_floor_ms(decoder, engine._state, rows)
    note = f"{step:.2f} ms a step, {steps} of them"
    table.row(case, name, "tokens_per_s", tokens / seconds, "", 1e3 * rows / floor, note)
    table.row(case, name, "step", step, "ms", floor)


def step_floor_ms(decoder: Any, state: Any, rows: int) -> float:
    """Return the least milliseconds of a decode step: of the bytes that it has to read, which are the
    weights, and the KV cache, in which the prompt of a group stands once; or of its products with
    the weights, two operations for each weight and row.
    """
    a, buffers = decoder.architecture, decoder.weights.buffers
    # untied: a step reads one row of the embedding for each row it decodes
    skipped = ("embed",) if "head.weight" in buffers else ()
    read = [buffer for name, buffer in buffers.items() if name not in skipped]
    per_token = 2 * buffers["embed"].element_size() * len(decoder.layers)
    per_token *= a.key_heads * a.head_width
    cached = per_token * int(state.prompt_lengths.sum() + state.response_lengths.sum())
    operations = 2.0 * rows * sum(b.numel() for b in read if b.ndim > 1)
    return floor_ms(operations, sum(b.nbytes for b in read) + cached)


def peer_speed(
    table: Any, case: str, name: str, peer: Peer, rows: int, vocab: int, dry: bool
) -> None:
    """Record a peer's speed by the difference of two calls, which excludes the prefill; also record
    the longer call as it is. Raises RuntimeError if tokens are missing or the longer call is not
    slower.
    """
    device, short, long = device_of(dry), 2 if dry else 4, 34 if dry else 52
    prompts = prompts_for(rows, vocab, dry)
    counts = split_rows(rows, len(prompts))
    each = [prompt for prompt, n in zip(prompts, counts, strict=True) for _ in range(n)]
    peer(each, long)  # warm-up: setup at the first call of this size
    took = {}
    for new in (short, long):
        took[new], tokens = seconds_of(lambda new=new: peer(each, new), device)
        if tokens != rows * new:
            raise RuntimeError(f"{tokens} tokens, not {rows} x {new}")
    note = f"{took[long]:.3f} s for prompts and {long} tokens"
    table.row(case, name, "tokens_per_s_with_prompts", rows * long / took[long], note=note)
    seconds = took[long] - took[short]
    if seconds <= 0:
        times = f"{long} tokens took {took[long]:.3f} s and {short} took {took[short]:.3f} s"
        raise RuntimeError(times)
    note = f"{seconds / (long - short) * 1e3:.2f} ms a step, from {short} tokens to {long}"
    table.row(case, name, "tokens_per_s", rows * (long - short) / seconds, note=note)


def make_decoders(table: Any, size: str, device: str) -> dict[str, Any]:
    """Return the decoders of a model that can be made, by the name of their rows: the model's and,
    over the same weights, one with a LoRA adapter.
    """
    from rl.models import LoadedModel, add_lora
    from rl.sampler import make_decoder
    from rl.types import LoraConfig

    model = table.attempt(size, "ours", make_model, size, device)
    if model is None:
        return {}
    full = table.attempt(size, "ours", lambda: make_decoder(model, kind="fast"))

    def adapted() -> Any:
        loaded = add_lora(LoadedModel(model, None, size, ()), LoraConfig(LORA_RANK, 0))
        return make_decoder(loaded.model, kind="fast", base=full)

    lora = None if full is None else table.attempt(f"{size} LoRA", "ours", adapted)
    decoders = {size: full, f"{size} LoRA": lora}
    return {name: decoder for name, decoder in decoders.items() if decoder is not None}


def measure_host_share(
    table: Any, case: str, name: str, decoder: Any, rows: int, dry: bool
) -> None:
    """Record the share of a decode step's time in which the device has nothing to do, because it
    waits for the host. The device's time is the profiler's, the step's is measured without it.
    """
    device, calls = device_of(dry), 2 if name == "paged" else 16
    prompts = prompts_for(rows, decoder.vocab_size, dry)
    engine = engine_of(decoder, name, rows, prompts, 64)
    counters = engine.counters
    for _ in range(2):  # prompts, compilation, graphs
        engine.step()
    steps = counters.steps
    seconds, _ = seconds_of(lambda: [engine.step() for _ in range(calls)], device)
    step, steps = seconds / (counters.steps - steps), counters.steps
    busy = busy_seconds(engine.step, device) / (counters.steps - steps)
    note = f"{step * 1e3:.2f} ms a step, of which the device works {busy * 1e3:.2f} ms"
    table.row(case, name, "host_share", max(1 - busy / step, 0.0), note=note)


def measure_engines(
    table: Any, size: str, counts: tuple[int, ...], measure: Callable[..., None], dry: bool
) -> None:
    """Measure both engines of each decoder of a model, with each number of rows."""
    device = device_of(dry)
    decoders = make_decoders(table, size, device)
    for kind, decoder in decoders.items():
        if measure is measure_speed:
            table.attempt(kind, "trial", record_trial, table, kind, decoder)
        for rows, name in itertools.product(counts, ("paged", "plain")):
            if rows == 1 and kind != size:
                continue  # one row is measured with full weights alone
            case = f"{kind}, {rows} rows"
            table.attempt(case, name, measure, table, case, name, decoder, rows, dry)
            free_gpu_memory(device)


def record_trial(table: Any, kind: str, decoder: Any) -> None:
    """Record what the device's comparison of both engines says."""
    from rl.sampler.engine_selection import compare_engines

    table.row(kind, "trial", "says", compare_engines(decoder) or "the same samples")


def part_host(table: Any, dry: bool) -> None:
    """Record the host's share of a decode step. The part has a process to itself: a profiler that
    fails or slows down what follows costs no speed of `decode`.
    """
    for size in ("tiny",) if dry else SIZES_TIMED:
        measure_engines(table, size, (4,) if dry else (64, 256, 1024), measure_host_share, dry)
        free_gpu_memory(device_of(dry))


def part_decode(table: Any, dry: bool) -> None:
    for size in ("tiny",) if dry else SIZES_TIMED:
        measure_engines(table, size, (4,) if dry else ROWS_TIMED, measure_speed, dry)
        free_gpu_memory(device_of(dry))


def part_peers(table: Any, dry: bool) -> None:
    """Run the peers of the parts `kernels` and `decode` at the same cases."""
    measure_kernels(table, dry, ours=False)
    device, counts = device_of(dry), (4,) if dry else ROWS_TIMED
    for name, make in PEERS.items():
        for size in ("tiny",) if dry else SIZES_TIMED:
            peer = table.attempt(size, name, make, size, device)
            for rows in () if peer is None else counts:
                case, vocab = f"{size}, {rows} rows", SIZES[size][1]["vocab_size"]
                table.attempt(case, name, peer_speed, table, case, name, peer, rows, vocab, dry)
                free_gpu_memory(device)
            del peer
            gc.collect()  # third-party objects may form reference cycles
            free_gpu_memory(device)
