"""Count what the host does for a sampler on a GPU, without a GPU: launches, calls, preempted rows,
steps outside CUDA graphs, and the seconds between two chunks of device steps.

    python bench/sampler_host.py          # a minute; into bench/results/sampler_host.csv

Launches are recorded on fake CUDA tensors: every operation of torch that is not a view, and every
launch of a Triton kernel, counts as one. Schedules run the real engine on the CPU with a model that
computes nothing: every token is equally likely, and one in 512 ends a sample. `ratio` is `now`
divided by `target`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Replace this folder on sys.path: its kernels.py would shadow the package `kernels`.
sys.path[0] = str(Path(__file__).resolve().parent.parent)
sys.path += [f"{sys.path[0]}/tests", f"{sys.path[0]}/tests/sampler"]
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from sampler_models import multistep_engine, tiny_model  # noqa: E402
from test_sampler_step_fake import VIEWS, record_launches, two_steps  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from bench.harness import RESULTS, make_parser, show, write_table  # noqa: E402
from kernels import decode_ops_triton  # noqa: E402
from rl.models import LoadedModel, add_lora  # noqa: E402
from rl.sampler import (  # noqa: E402
    Engine,
    SamplingRequest,
    cuda_graphs,
    make_decoder,
    paged_state,
)
from rl.sampler.cuda_graphs import CUDAGraphRunner, _record_tokens  # noqa: E402
from rl.sampler.decode_state import Prompt  # noqa: E402
from rl.sampler.decoder import batch_prompts  # noqa: E402
from rl.sampler.device_steps import DeviceSteps  # noqa: E402
from rl.sampler.forward_fast import _PREFILL_TOKENS  # noqa: E402
from rl.sampler.kv_cache_pool import KVCachePool  # noqa: E402
from rl.sampler.paged_state import PagedState  # noqa: E402
from rl.types import LoraConfig, SamplingParams  # noqa: E402

LAYERS, VOCAB, MOST = 24, 512, 1024
# a vocabulary of Qwen2.5, of which the token selection is counted
WORDS = 151_936


# ------------------------------------------------------------------------------------------ launches


def count_launches(recorder: Any) -> int:
    """Return the operations recorded that start a kernel or a copy, Triton's launches included."""
    names = [name for name, *_ in recorder.done if not name.startswith("prim")]
    return sum(name.split(".")[1] not in VIEWS for name in names) + sum(recorder.launched.values())


def decode_launches(lora: bool) -> int:
    """Return the launches of a decode step of 24 layers."""
    with pytest.MonkeyPatch.context() as patch:
        recorder = record_launches(patch)
        model: Any = tiny_model("llama", num_hidden_layers=LAYERS)
        if lora:
            model = add_lora(LoadedModel(model, None, "tiny", ()), LoraConfig(32, 0)).model
        two_steps(recorder, model, 64, False)
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
    tokens fed, the steps, those outside chunks that fed running rows, the largest batch, the chunks,
    and those that were launched before the chunk before them was read.
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


def count_idle(schedule: dict[str, int]) -> tuple[int, int]:
    """Return the chunks that were launched after the one before them was read, and the target."""
    return schedule["chunks"] - schedule["ahead"], 0


class _EnoughChunks(Exception):
    """Signal that enough chunks have been measured."""


def host_seconds(rows: int, ahead: bool, chunks: int = 10, repeats: int = 3) -> float:
    """Return the least seconds in which the device has nothing to do between two of the first
    chunks of `rows` rows, of which about one in sixty ends in each chunk. `ahead`: in a call of
    `run` with no request waiting; otherwise step by step.
    """
    marks: list[tuple[str, float]] = []
    run, process = CUDAGraphRunner.run, Engine._process_steps

    def launch(*args: Any) -> None:
        marks.append(("launch", time.perf_counter()))
        run(*args)

    def read(*args: Any) -> Any:
        marks.append(("read", time.perf_counter()))
        if sum(name == "read" for name, _ in marks) > chunks:
            raise _EnoughChunks
        return process(*args)

    gaps: list[float] = []
    with pytest.MonkeyPatch.context() as patch, scripted_device():
        patch.setattr(CUDAGraphRunner, "run", launch)
        patch.setattr(Engine, "_process_steps", read)
        for _ in range(repeats):
            marks.clear()
            engine = make_engine(kv_cache_tokens=rows * 2048)
            engine.runs_ahead = ahead
            for problem in range(rows // 16):
                engine.add(make_request(problem, 300, 16))
            with suppress(_EnoughChunks):
                if ahead:
                    engine.run()
                while True:
                    engine.step()
            # A chunk that is launched before the one before it is read leaves no gap.
            in_flight, of_run = 0, []
            for (name, at), (_, after) in pairwise(marks):
                in_flight += 1 if name == "launch" else -1
                if name == "read":
                    of_run.append(after - at if in_flight == 0 else 0.0)
            gaps += of_run[2:]
    return min(gaps)


# --------------------------------------------------------------------------------------------- table


def measure() -> Iterator[tuple[str, str, str, float | str, float | str]]:
    """Yield (row, case, unit, value, target) of each row of the table."""
    launches = decode_launches(False), decode_launches(True)
    yield "decode_launches", "full weights, 24 layers", "launches", launches[0], 295
    yield "decode_launches", "LoRA on all matrices, 24 layers", "launches", launches[1], 500
    case = "64 prompts, 24 layers"
    yield "prefill_cache_writes", case, "launches", *count_prefill_launches()
    for rows in (64, 1024):
        per_program, iterations = selection_launch(rows)
        yield "selection", f"{rows} rows, {WORDS} words", "rows per program", per_program, 1
        yield "selection", f"{rows} rows, {WORDS} words", "iterations", iterations, 6
    schedule = run_schedule(64)
    case = f"64 x 16 samples of up to {MOST} tokens"
    yield "default_kv_budget", case, "preempted rows", schedule["preempted"], 0
    share = round(schedule["recomputed"] / schedule["fed"], 3)
    yield "default_kv_budget", case, "share computed again", share, 0
    yield "default_kv_budget", case, "steps", schedule["steps"], MOST
    yield "default_kv_budget", case, "chunks", schedule["chunks"], schedule["chunks"]
    yield "default_kv_budget", case, "chunks after an idle device", *count_idle(schedule)
    schedule = run_schedule(128, kv_cache_tokens=1024 * 2048)
    case = "128 x 16, at most 1024 rows"
    yield "waiting_requests", case, "steps outside graphs", schedule["outside"], 0
    yield "waiting_requests", case, "steps", schedule["steps"], schedule["steps"]
    yield "waiting_requests", case, "chunks", schedule["chunks"], schedule["chunks"]
    yield "waiting_requests", case, "chunks after an idle device", *count_idle(schedule)
    for rows, target in ((256, 0.5), (1024, 1.5)):
        for case, ahead in ((f"{rows} rows", False), (f"{rows} rows of a call, none waits", True)):
            milliseconds = round(host_seconds(rows, ahead) * 1e3, 2)
            yield "between_chunks", case, "idle ms", milliseconds, target
    captures, mode = graph_captures()
    yield "graph_capture", "after the first chunk", "graphs", captures, 0
    yield "graph_capture", "mode", "", mode, "thread_local"


def main() -> None:
    output = make_parser(__doc__, output=RESULTS / "sampler_host.csv").parse_args().output
    torch.set_num_threads(1)
    rows = []
    for name, case, unit, now, target in measure():
        numbers = not isinstance(now, str) and not isinstance(target, str) and target
        ratio = f"{now / target:.2f}" if numbers else ""
        row = {"row": name, "case": case, "unit": unit, "now": now, "target": target}
        rows.append({**row, "ratio": ratio})
        show(rows[-1])
    write_table(output, rows)


if __name__ == "__main__":
    main()
