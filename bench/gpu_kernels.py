"""Run the tests and measure the kernels for the GPU campaign (see gpu.py). Each part is a function
part_NAME(table, dry).
"""

from __future__ import annotations

import importlib.util
import json
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.shapes import SHAPES, TINY, Shape, copy_floor_ms, floor_ms

REPO = Path(__file__).resolve().parent.parent
CHOSEN = ("Qwen2.5-0.5B", "Qwen3-1.7B", "Llama-3.1-8B")


def shapes(dry: bool) -> list[Shape]:
    return [TINY] if dry else [shape for shape in SHAPES if shape.model in CHOSEN]


def device_of(dry: bool) -> str:
    return "cpu" if dry else "cuda"


def milliseconds(run: Callable[[], object], device: str, repeats: int = 10) -> float:
    """Return the median time of `run` in milliseconds: CUDA events on a GPU, the wall clock
    elsewhere.
    """
    run()
    times = []
    for _ in range(repeats if device == "cuda" else 2):
        if device == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


# ------------------------------------------------------------------------------------------- floors


def part_floors(table: Any, dry: bool) -> None:
    """Measure the limits of this device that other parts compare with: a large square product in
    bf16, a large copy, and an empty launch. They are written to floors.json too.
    """
    device, dtype = device_of(dry), torch.float32 if dry else torch.bfloat16
    size, count = (256, 1 << 16) if dry else (8192, 1 << 29)
    a = torch.randn(size, size, device=device, dtype=dtype)
    ms = milliseconds(lambda: torch.mm(a, a), device)
    tflops = 2e-9 * size**3 / ms
    table.row(f"{size}^3", "torch.mm", "TFLOP/s", tflops, note=f"{dtype}, {ms:.3f} ms")
    source = torch.zeros(count, device=device, dtype=torch.int32)
    target = torch.empty_like(source)
    ms = milliseconds(lambda: target.copy_(source), device)
    tb_per_s = 8e-9 * count / ms  # read and written
    table.row(f"{4 * count >> 20} MiB", "copy", "TB/s", tb_per_s, note=f"{ms:.3f} ms")
    small = torch.zeros(1, device=device)

    def launch() -> None:
        for _ in range(100):
            small.add_(1.0)

    table.row("100 in a row", "torch add_", "launch", 10 * milliseconds(launch, device), "us")
    floors = {"tflops": tflops, "tb_per_s": tb_per_s}
    Path(table.path).with_name("floors.json").write_text(json.dumps(floors))


# -------------------------------------------------------------------------------------------- tests

_OUTCOME = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
_TEST_ID = re.compile(r"tests/\S+::.*?(?= (?:PASSED|FAILED|ERROR|SKIPPED)|$)")


def read_outcome(line: str) -> tuple[str, str] | None:
    """Return (test, outcome) of a line of `pytest -v`, with or without pytest-xdist; None for any
    other line.
    """
    test, outcome = _TEST_ID.search(line), _OUTCOME.search(line)
    if test is None or outcome is None:
        return None
    return test[0].strip(), outcome[0].lower()


def pytest_command(dry: bool) -> list[str]:
    """Return the command of the tests, as the installed plugins allow: twelve processes, and a
    minute for a test, so that one that hangs does not take the time of all others.
    """
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider"]
    command += ["--tb=short", "-rfE", "--no-header", "--continue-on-collection-errors"]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", "2" if dry else "12", "--dist", "load"]
    if importlib.util.find_spec("pytest_timeout") is not None:
        command += ["--timeout", "60"]
    return command


def part_tests(table: Any, dry: bool) -> None:
    """Run the tests marked gpu. Record each test as soon as it ends, the counts, and each file that
    pytest cannot collect. The kernel tests run first, because the other tests depend on them. With
    pytest-xdist installed, twelve processes share the tests.
    """
    files = sorted(
        path.relative_to(REPO).as_posix()
        for path in (REPO / "tests").glob("test_*.py")
        if "mark.gpu" in path.read_text()
    )
    first = "tests/kernels/test_kernel_gpu.py"
    for some in [[first]] if dry else [[first], [file for file in files if file != first]]:
        process = subprocess.Popen(
            [*pytest_command(dry), *some],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=REPO,
        )
        assert process.stdout is not None
        counts: Counter[str] = Counter()
        for line in process.stdout:
            print(line, end="", flush=True)
            if (result := read_outcome(line)) is not None and not line.startswith(
                ("FAILED", "ERROR")
            ):
                counts[result[1]] += 1
                table.row(result[0], "pytest", result[1], 1)
            elif line.startswith(("FAILED", "ERROR")):  # the summary, with the reason
                table.row(line.split()[1], "pytest", "reason", 1, note=line.strip()[:200])
        process.wait()
        for outcome, count in counts.items():
            table.row(" ".join(Path(file).stem for file in some), "pytest", f"all {outcome}", count)


# ---------------------------------------------------------------------------------- the two kernels


def part_kernels(table: Any, dry: bool) -> None:
    """Record the rows of bench/kernels.py at 8,192 tokens, then at 1,024 with fewer providers. Our
    kernels run first.
    """
    from bench import kernels as bench
    from bench.kernel_providers import PROVIDERS, CannotRun

    device, dtype = device_of(dry), torch.float32 if dry else torch.bfloat16

    def head_rows(shape: Shape, tokens: int) -> None:
        case = f"{shape.model} {tokens} tokens"
        names = [p.name for p in PROVIDERS] if tokens != 1024 else ["ours", "torch", "liger_scaled"]

        def failed(name: str, failure: Exception) -> None:
            metric = "left out" if isinstance(failure, CannotRun) else "failed"
            table.row(
                case,
                name,
                metric,
                type(failure).__name__,
                note=(str(failure).splitlines() or [""])[0][:200],
            )

        for row in bench.bench_head(shape, tokens, device, dtype, names, 5, failed):
            errors = f"errors {row['error']} {row['error_dx']} {row['error_dw']}"
            put(case, row, f"{row['memory']}, {row['peak_mb']} MB, {errors}")

    def token_rows(shape: Shape, tokens: int) -> None:
        for row in bench.bench_logits(shape, tokens, device, dtype, 5):
            put(f"{shape.model} {tokens} tokens, token_logprob", row)

    def loss_rows() -> None:
        for row in bench.bench_tokens(1024 if dry else 32_768, device, 5):
            put(str(row["operation"]), row)

    def put(case: str, row: dict[str, object], note: str = "") -> None:
        took, floor = (float(str(row[name])) for name in ("median_ms", "floor_ms"))
        table.row(case, str(row["provider"]), str(row["phase"]), took, "ms", floor, note)

    for tokens in (64,) if dry else (8192, 1024):
        for shape in shapes(dry):
            case = f"{shape.model} {tokens} tokens"
            table.attempt(case, "all", lambda s=shape, t=tokens: head_rows(s, t))
            table.attempt(
                f"{case}, token_logprob", "ours", lambda s=shape, t=tokens: token_rows(s, t)
            )
    table.attempt("policy_loss", "ours", loss_rows)


def part_draw(table: Any, dry: bool) -> None:
    """Compare `kernels.sample_tokens`, from hidden states to a token, with logits, softmax and inverse CDF.
    Record the largest logprob error, the share of equal tokens and the times.
    """
    from kernels import sample_tokens
    from rl.sampler.token_sampling import RowSamplingSettings
    from rl.sampler.token_sampling import sample_tokens as from_logits

    device = device_of(dry)
    for shape in shapes(dry):
        for rows in (32,) if dry else (1, 64, 256, 1024):

            def run(shape: Shape = shape, rows: int = rows) -> None:
                g = torch.Generator(device).manual_seed(0)
                x = torch.randn(rows, shape.D, generator=g, device=device).bfloat16()
                w = (
                    torch.randn(shape.V, shape.D, generator=g, device=device) * shape.D**-0.5 * 4
                ).bfloat16()
                u = torch.rand(rows, generator=g, device=device, dtype=torch.float64)
                one = torch.ones(rows, device=device)
                ways: dict[str, Callable[[], Any]] = {
                    "ours": lambda: sample_tokens(x, w, one, u),
                    "logits": lambda: from_logits(
                        torch.nn.functional.linear(x, w), u, RowSamplingSettings()
                    ),
                }
                token, logp = ways["ours"]()
                exact = torch.mm(x.double(), w.double().t()).log_softmax(-1)
                case, size = f"{shape.model}, {rows} rows", w.numel() * 2.0
                table.row(
                    case,
                    "ours",
                    "largest_error",
                    float((logp.double() - exact.gather(1, token[:, None])[:, 0]).abs().max()),
                )
                table.row(
                    case,
                    "ours",
                    "equal_tokens",
                    float((token == ways["logits"]()[0]).double().mean()),
                    note="bf16 logits round",
                )
                for name, way in ways.items():
                    floor = max(copy_floor_ms(size), floor_ms(2, rows, shape))
                    table.row(case, name, "time", milliseconds(way, device), "ms", floor)

            table.attempt(f"{shape.model}, {rows} rows", "ours", run)
