"""Count what the host does for a sampler on a GPU, without a GPU: launches, preempted rows, steps
outside CUDA graphs.

Launches are recorded on fake CUDA tensors: every operation of torch that is not a view, and every
launch of a Triton kernel, counts as one. Schedules run the real engine on the CPU with a model that
computes nothing: every token is equally likely, and one in 512 ends a sample.
test_sampler_host.py checks the counts; bench/sampler_host.py writes them into a table.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sampler_models import multistep_engine, tiny_model
from test_sampler_step_fake import VIEWS, record_launches, two_steps
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels import decode_ops_triton
from rl.models import LoadedModel, add_lora
from rl.sampler import Engine, SamplingRequest, cuda_graphs, make_decoder, paged_state
from rl.sampler.cuda_graphs import CUDAGraphRunner, _record_tokens
from rl.sampler.decode_state import Prompt
from rl.sampler.decoder import batch_prompts
from rl.sampler.device_steps import DeviceSteps
from rl.sampler.forward_fast import _PREFILL_TOKENS
from rl.sampler.kv_cache_pool import KVCachePool
from rl.sampler.paged_state import PagedState
from rl.types import LoraConfig, SamplingParams
from rl.types.feature_table import find_conflict

LAYERS, VOCAB, MOST = 24, 512, 1024
WORDS = 151_936  # the vocabulary of Qwen2.5, for the token selection


# ------------------------------------------------------------------------------------------ launches


def count_launches(recorder: Any) -> int:
    """Return the operations recorded that start a kernel or a copy, Triton's launches included."""
    # `lift_fresh` wraps an array of the host
    host = ("prim", "aten.lift_fresh")
    names = [name for name, *_ in recorder.done if not name.startswith(host)]
    return sum(name.split(".")[1] not in VIEWS for name in names) + sum(recorder.launched.values())


def decode_launches(lora: bool, of_rows: bool = False) -> int:
    """Return the launches of a decode step of 24 layers. `of_rows`: with two adapters in the
    batch.
    """
    with pytest.MonkeyPatch.context() as patch:
        recorder = record_launches(patch)
        model: Any = tiny_model("llama", num_hidden_layers=LAYERS)
        adapters = ()
        if lora:
            adapted = add_lora(
                LoadedModel(copy.deepcopy(model), None, "tiny", ()), LoraConfig(32, 0)
            )
            if of_rows:
                adapter = make_decoder(adapted.model, dtype=torch.bfloat16, kind="fast")
                adapters = (adapter, adapter.fork())
            else:
                model = adapted.model
        two_steps(recorder, model, 64, False, adapters=adapters)
        launched = sum(recorder.launched.values()) // 2  # of one of the two steps
        recorder.launched.clear()
        return count_launches(recorder) + launched


def count_prefill_launches() -> tuple[int, int]:
    """Return the launches of a prefill of 64 prompts that write the cache, and its layers times its
    batches. The operations are those of the CPU, because Python's indexing queries the device even
    of fake tensors; the kernels of a GPU stand still.
    """
    lengths = np.sort(np.random.default_rng(0).integers(60, 501, 64)).tolist()
    counts = []
    for cached in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            recorder = record_launches(patch)
            patch.setattr(paged_state, "append_to_cache", decode_ops_triton.append_to_cache)
            model = tiny_model("llama", num_hidden_layers=LAYERS, max_position_embeddings=512)
            decoder = make_decoder(model, dtype=torch.bfloat16, kind="fast")
            state = PagedState(decoder, KVCachePool(decoder, 256, 256).kv)
            prompts = [Prompt([1] * length) for length in lengths]
            with torch.inference_mode(), recorder:
                if cached:
                    state.prefill(prompts)
                else:
                    logits = torch.empty(64, decoder.vocab_size)
                    decoder.forward_prompts(prompts, range(64), None, logits)
            counts.append(count_launches(recorder))
    batches = sum(1 for _ in batch_prompts(lengths, _PREFILL_TOKENS))
    return counts[0] - counts[1], LAYERS * batches


def selection_launch(rows: int) -> tuple[float, int]:
    """Return the rows per program of the launch that chooses a slice of the vocabulary, and its
    dependent iterations: three passes over the sums of the slices.
    """
    from kernels import sample_tokens

    with pytest.MonkeyPatch.context() as patch, FakeTensorMode():
        recorder = record_launches(patch)
        half = dict(dtype=torch.bfloat16, device="cuda")
        numbers = torch.empty(rows, device="cuda")
        sample_tokens(
            torch.empty(rows, 896, **half), torch.empty(WORDS, 896, **half), numbers,
            numbers.double(), numbers > 0,
        )  # fmt: skip
        grid, options = recorder.grids["pick"]
        slices = -(-WORDS // 64)
        return rows / grid[0], 3 * -(-slices // options["BS"])


def graph_captures() -> tuple[int, str]:
    """Return the graphs captured after the first chunk of a call in whose small cache the batch
    grows when samples end early, and the capture mode.
    """
    modes: list[str] = []
    blank_decoder()  # imports modules that read what is replaced here

    def graph(graph: Any, **options: Any) -> Any:
        modes.append(options.get("capture_error_mode", "global"))
        return nullcontext()

    stream = SimpleNamespace(wait_stream=lambda other: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CUDAGraphRunner, "uses_graphs", True)
        cuda = {"device": lambda device: nullcontext(), "stream": lambda stream: nullcontext()}
        cuda |= {"Stream": lambda: stream, "current_stream": lambda: stream, "graph": graph}
        for name, value in cuda.items():
            patch.setattr(torch.cuda, name, value)
        # a torch for the CPU lacks it
        patch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
        blank = SimpleNamespace(pool=lambda: None, replay=lambda: None)
        patch.setattr(torch.cuda, "CUDAGraph", lambda: blank)
        with scripted_device():
            engine = make_engine(64, kv_cache_tokens=256 * 48)
            for problem in range(64):
                engine.add(make_request(problem, 60, 4))
            captured: list[int] = []
            run = CUDAGraphRunner.run

            def look(runner: Any, rows: int, *more: Any) -> None:
                run(runner, rows, *more)
                captured.append(len(modes))
                # a graph that is replayed does nothing here: ends some rows instead
                runner.buffers.tokens[:, : rows // 4] = 0

            patch.setattr(CUDAGraphRunner, "run", look)
            while engine.busy and len(captured) < 60:
                engine.step()
    return captured[-1] - captured[0], modes[0]


# ----------------------------------------------------------------------------------------- schedules


@contextmanager
def scripted_device() -> Iterator[None]:
    """Replace the model's computation: every token is equally likely, whatever the prompt is."""
    blank_decoder()  # is compared with its model when it is made

    def step(model: Any, kv: Any, rope: Any, buffers: Any, rows: int, *more: Any):
        b = buffers.first_rows(rows)
        uniform = b.uniform.index_select(0, b.at).squeeze(0)
        _record_tokens(b, (uniform * VOCAB).long(), torch.full((rows,), -1.0), None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graphs, "decode_step", step)
        patch.setattr(
            "rl.sampler.forward_fast.FastForward.forward_prompts",
            lambda model, prompts, indices, store, logits, records: logits.zero_(),
        )
        patch.setattr(
            "rl.sampler.forward_fast.FastForward.forward",
            lambda model, ids, *args: torch.zeros(len(ids), 8),
        )
        yield


@cache
def blank_decoder() -> Any:
    """Return a decoder of a model that is too small to matter."""
    model = tiny_model(
        "llama", hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8,
        num_key_value_heads=1, head_dim=8, vocab_size=VOCAB, max_position_embeddings=32_768,
    )  # fmt: skip
    return make_decoder(model, kind="fast")


def make_engine(max_rows: int = 1024, **settings: Any) -> Engine:
    """Return an engine over the blank decoder; token 0 ends a sample."""
    return multistep_engine(blank_decoder(), (0,), max_rows=max_rows, **settings)


def make_request(problem: int, length: int, samples: int, most: int = MOST) -> SamplingRequest:
    """Return a request of `samples` samples of up to `most` tokens for a prompt of its own."""
    prompt = np.random.default_rng(problem).integers(1, VOCAB, length).tolist()
    params = SamplingParams(max_tokens=most, temperature=1.0)
    return SamplingRequest(prompt=prompt, num_samples=samples, problem=problem, params=params)


def run_schedule(groups: int, **settings: Any) -> dict[str, int]:
    """Run groups of 16 samples to the end. Return the preemptions, the tokens computed again, all
    tokens fed, the steps, those outside chunks that fed running rows, the largest batch, the
    chunks, and those that were launched before the chunk before them was read.
    """
    lengths = np.random.default_rng(0).integers(60, 501, groups).tolist()
    counts = dict(recomputed=0, outside=0, ahead=0)
    resume, decode = PagedState.resume_row, PagedState.decode
    launch_next = DeviceSteps.launch_next

    def resumes(state: Any, slot: int, fed: Any, *more: Any) -> None:
        counts["recomputed"] += len(fed)
        resume(state, slot, fed, *more)

    def decodes(state: Any, tokens: Any) -> torch.Tensor:
        counts["outside"] += 1
        return decode(state, tokens)

    def launches(device: DeviceSteps, *args: Any) -> Any:
        chunk = launch_next(device, *args)
        counts["ahead"] += chunk is not None
        return chunk

    with pytest.MonkeyPatch.context() as patch, scripted_device():
        patch.setattr(PagedState, "resume_row", resumes)
        patch.setattr(PagedState, "decode", decodes)
        patch.setattr(DeviceSteps, "launch_next", launches)
        engine = make_engine(**settings)
        engine.runs_ahead = True
        for problem, length in enumerate(lengths):
            engine.add(make_request(problem, length, 16))
        engine.run()
    counters = engine.counters
    fed = counters.fed_tokens + counters.prefill_tokens + counts["recomputed"]
    assert engine._device_steps is not None
    return counts | dict(
        preempted=engine.preemptions, fed=fed, steps=counters.steps, rows=counters.peak_rows,
        chunks=engine._device_steps.num_syncs,
    )  # fmt: skip


def measure_idle_seconds(rows: int, ahead: bool, chunks: int = 40) -> float:
    """Return the median of the seconds in which the device has nothing to do between two chunks of
    `rows` rows, of which about one in sixty ends in each chunk. `ahead`: in a call of `run` with no
    request waiting; otherwise step by step.
    """
    marks: list[tuple[str, float]] = []
    run, process = CUDAGraphRunner.run, Engine._process_steps

    def launch(*args: Any) -> None:
        marks.append(("launch", time.perf_counter()))
        run(*args)

    def read(*args: Any) -> Any:
        marks.append(("read", time.perf_counter()))
        return process(*args)

    with pytest.MonkeyPatch.context() as patch, scripted_device():
        patch.setattr(CUDAGraphRunner, "run", launch)
        patch.setattr(Engine, "_process_steps", read)
        engine = make_engine(kv_cache_tokens=rows * 2048)
        engine._runs_to_end = engine.runs_ahead = ahead
        for problem in range(rows // 16):
            engine.add(make_request(problem, 300, 16))
        while len(marks) < 2 * chunks:
            engine.step()
    # the device works from a launch on until as many chunks have been read
    in_flight = np.cumsum([1 if name == "launch" else -1 for name, _ in marks])
    gaps = [
        after - at if in_flight[i] == 0 else 0.0
        for i, ((name, at), (_, after)) in enumerate(pairwise(marks))
        if name == "read"
    ]
    return float(np.median(gaps[2:]))


# --------------------------------------------------------------------------------------------- table


def measure() -> Iterator[dict[str, Any]]:
    """Yield the rows of the table, computed on one thread."""
    torch.set_num_threads(1)
    for row, case, unit, today, target in compare_with_targets():
        result = {"row": row, "case": case, "unit": unit, "today": today, "target": target}
        yield result | {"command": "python bench/sampler_host.py"}


def compare_with_targets(repeats: int = 7) -> Iterator[tuple[str, str, str, Any, Any]]:
    """Yield (row, case, unit, value, target) of each row of the table. Times are the least of
    `repeats` measurements.
    """
    for lora, target in ((False, 295), (True, 500)):
        case = "LoRA on all matrices, 24 layers" if lora else "full weights, 24 layers"
        yield "decode step", case, "launches", decode_launches(lora), target
    schedule, case = run_schedule(64), f"64 x 16 samples of up to {MOST} tokens"
    yield "default KV budget", case, "preempted rows", schedule["preempted"], 0
    yield "default KV budget", case, "tokens computed again", schedule["recomputed"], 0
    schedule = run_schedule(128, kv_cache_tokens=1024 * 2048)
    case = "128 x 16, at most 1024 rows"
    yield "waiting requests", case, "steps outside graphs", schedule["outside"], 0
    for rows, target in ((256, 0.5), (1024, 1.5)):
        for case, ahead in ((f"{rows} rows", False), (f"{rows} rows of a call, none waits", True)):
            seconds = min(measure_idle_seconds(rows, ahead) for _ in range(repeats))
            yield "between two chunks", case, "idle ms", round(seconds * 1e3, 2), target
    writes, layers_of_batches = count_prefill_launches()
    case = f"64 prompts, 24 layers, {layers_of_batches // LAYERS} batches"
    yield "prefill cache writes", case, "launches", writes, layers_of_batches
    for rows in (64, 1024):
        programs, iterations = selection_launch(rows)
        case = f"{rows} rows, {WORDS} words"
        yield "token selection", case, "rows of a program", programs, 1
        yield "token selection", case, "dependent iterations", iterations, 3
    eager = find_conflict(("device steps", "tensor parallelism")) is not None
    yield "tensor parallelism", "decode step", "", "eager" if eager else "graphs", "graphs"
    captures, mode = graph_captures()
    yield "graph capture", "after the first chunk", "graphs", captures, 0
    yield "graph capture", "mode", "", mode, "thread_local"
