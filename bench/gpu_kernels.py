"""Run the tests and measure the kernels for the GPU campaign (see gpu.py). Each part is a function
part_NAME(table, dry): the limits of the device, the tests, the kernels, the branches that the device
checks chose, and attention over KV cache pages.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import statistics
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bench.harness import REPO
from bench.kernels import SHAPES, TINY, HeadShape, Step, floor_ms, once, read_limits, seeded


def shapes(dry: bool) -> list[HeadShape]:
    return [TINY] if dry else list(SHAPES)


def device_of(dry: bool) -> str:
    return "cpu" if dry else "cuda"


def measure_milliseconds(run: Callable[[], object], device: str, repeats: int = 10) -> float:
    """Return the median time of `run` in milliseconds, with what the last call left in the caches."""
    run()
    step, count = Step(lambda _: run()), repeats if device == "cuda" else 2
    return statistics.median([once(step, device, None) for _ in range(count)])


# ------------------------------------------------------------------------------------------- floors


def part_floors(table: Any, dry: bool) -> None:
    """Measure the limits of this device that other parts compare with: a large square product in
    bf16, a large copy, and an empty launch. They are written to floors.json too.
    """
    device, dtype = device_of(dry), torch.float32 if dry else torch.bfloat16
    size, count = (256, 1 << 16) if dry else (8192, 1 << 29)
    a = torch.randn(size, size, device=device, dtype=dtype)
    ms = measure_milliseconds(lambda: torch.mm(a, a), device)
    tflops = 2e-9 * size**3 / ms
    table.row(f"{size}^3", "torch.mm", "TFLOP/s", tflops, note=f"{dtype}, {ms:.3f} ms")
    source = torch.zeros(count, device=device, dtype=torch.int32)
    target = torch.empty_like(source)
    ms = measure_milliseconds(lambda: target.copy_(source), device)
    tb_per_s = 8e-9 * count / ms  # read and written
    table.row(f"{4 * count >> 20} MiB", "copy", "TB/s", tb_per_s, note=f"{ms:.3f} ms")
    small = torch.zeros(1, device=device)

    def launch() -> None:
        for _ in range(100):
            small.add_(1.0)

    launch_ms = measure_milliseconds(launch, device) / 100
    table.row("100 in a row", "torch add_", "launch", 1e3 * launch_ms, "us")
    floors = {"tflops": tflops, "tb_per_s": tb_per_s, "launch_ms": launch_ms}
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
        for path in (REPO / "tests").rglob("test_*.py")
        if "mark.gpu" in path.read_text()
    )
    first = "tests/kernels/test_kernel_gpu.py"
    for some in [[first]] if dry else [[first], [file for file in files if file != first]]:
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        command = [*pytest_command(dry), *some]
        process = subprocess.Popen(command, text=True, errors="replace", cwd=REPO, **options)
        assert process.stdout is not None
        counts: Counter[str] = Counter()
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith(("FAILED", "ERROR")):  # the summary, with the reason
                table.row(line.split()[1], "pytest", "reason", 1, note=line.strip()[:200])
            elif (result := read_outcome(line)) is not None:
                counts[result[1]] += 1
                table.row(result[0], "pytest", result[1], 1)
        process.wait()
        for outcome, count in counts.items():
            table.row(" ".join(Path(file).stem for file in some), "pytest", f"all {outcome}", count)


# -------------------------------------------------------------------------------------- the kernels


def part_kernels(table: Any, dry: bool) -> None:
    measure_kernels(table, dry, ours=True)


def measure_kernels(table: Any, dry: bool, *, ours: bool) -> None:
    """Record the rows of bench/kernels.py at 8,192 tokens, then at 1,024 with fewer providers: those
    of our kernels, or of the others.
    """
    from bench import kernels as bench

    device, dtype = device_of(dry), torch.float32 if dry else torch.bfloat16

    def head_rows(shape: HeadShape, tokens: int) -> None:
        case = f"{shape.model} {tokens} tokens"
        names = ["ours", "torch", "liger_scaled"]
        names = names if tokens == 1024 else [provider.name for provider in bench.PROVIDERS]
        names = [name for name in names if name.startswith("ours") == ours]

        def failed(name: str, failure: Exception) -> None:
            table.failure(case, name, failure, isinstance(failure, bench.CannotRun))

        for row in bench.bench_head(shape, tokens, device, dtype, names, 5, failed):
            put(case, row, f"{row['memory']}, {row['peak_mb']:.0f} MB, errors {row['errors']}")

    def token_rows(shape: HeadShape, tokens: int) -> None:
        name = "ours" if ours else "torch"
        for row in bench.bench_logits(shape, tokens, device, dtype, name, 5):
            put(f"{shape.model} {tokens} tokens, token_logprob", row)

    def loss_rows() -> None:
        for row in bench.bench_tokens(1024 if dry else 32_768, device, 5):
            put(row["operation"], row)

    def put(case: str, row: dict[str, Any], note: str = "") -> None:
        times = row["median_ms"], "ms", row["floor_ms"]
        table.row(case, row["provider"], row["phase"], *times, note)

    for tokens in (64,) if dry else (8192, 1024):
        for shape in shapes(dry):
            case = f"{shape.model} {tokens} tokens"
            table.attempt(case, "all", head_rows, shape, tokens)
            table.attempt(f"{case}, token_logprob", "all", token_rows, shape, tokens)
    if ours:
        table.attempt("policy_loss", "ours", loss_rows)


def part_draw(table: Any, dry: bool) -> None:
    """Compare `kernels.sample_tokens`, from hidden states to a token, with logits, softmax and inverse CDF.
    Record the largest logprob error, the share of equal tokens and the times.
    """
    for shape in shapes(dry):
        for rows in (32,) if dry else (1, 64, 256, 1024):
            table.attempt(f"{shape.model}, {rows} rows", "ours", _draw, table, shape, rows, dry)


def _draw(table: Any, shape: HeadShape, rows: int, dry: bool) -> None:
    from kernels import sample_tokens
    from rl.sampler.token_sampling import RowSamplingSettings
    from rl.sampler.token_sampling import sample_tokens as from_logits

    device = device_of(dry)
    options = seeded(device)
    x = torch.randn(rows, shape.D, **options).bfloat16()
    w = (torch.randn(shape.V, shape.D, **options) * shape.D**-0.5 * 4).bfloat16()
    u, first = torch.rand(rows, dtype=torch.float64, **options), torch.ones(rows, device=device)
    settings = RowSamplingSettings()
    ways: dict[str, Callable[[], Any]] = {
        "ours": lambda: sample_tokens(x, w, first, u),
        "logits": lambda: from_logits(torch.nn.functional.linear(x, w), u, settings),
    }
    token, logp = ways["ours"]()
    exact = torch.mm(x.double(), w.double().t()).log_softmax(-1).gather(1, token[:, None])[:, 0]
    case, error = f"{shape.model}, {rows} rows", float((logp.double() - exact).abs().max())
    table.row(case, "ours", "largest_error", error)
    equal = float((token == ways["logits"]()[0]).double().mean())
    table.row(case, "ours", "equal_tokens", equal, note="bf16 logits round")
    floor = floor_ms(2.0 * rows * w.numel(), 2.0 * w.numel())
    for name, way in ways.items():
        table.row(case, name, "time", measure_milliseconds(way, device), "ms", floor)


# ---------------------------------------------------------------------------------------- branches


class KernelInputs(NamedTuple):
    """Hold hidden states x [N, D], a head w [V, D], targets y [N] and a buffer dz [N, width] for
    the gradient of a slab of the logits.
    """

    x: Tensor
    w: Tensor
    y: Tensor
    dz: Tensor

    @staticmethod
    def make(shape: HeadShape, dry: bool) -> KernelInputs:
        N, width, options = (64 if dry else 8192), min(16_384, shape.V), seeded(device_of(dry))
        x = torch.randn(N, shape.D, **options).bfloat16()
        w = (torch.randn(shape.V, shape.D, **options) * shape.D**-0.5).bfloat16()
        y = torch.randint(0, shape.V, (N,), **options)
        return KernelInputs(x, w, y, torch.randn(N, width, **options).bfloat16())


def part_branches(table: Any, dry: bool) -> None:
    """Measure the products and both branches of the score kernels, the newest kernels last: a
    kernel that breaks the device context makes every later measurement fail.
    """
    name = "cpu"
    if not dry:
        major, minor = torch.cuda.get_device_capability()
        name = f"{torch.cuda.get_device_name()}, capability {major}.{minor}"
    table.row("device", "torch", "name", name, note=f"torch {torch.__version__}")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        _verdicts(table, dtype, device_of(dry))
    for kind in ("cuBLAS", "older", "warp-specialised"):
        for shape in shapes(dry):
            operands = table.attempt(shape.model, "tensors", KernelInputs.make, shape, dry)
            if operands is None:
                continue
            if kind == "cuBLAS":
                _products(table, shape, operands)
            else:
                _score_kernels(table, shape, operands, kind, kind != "older")
            if kind == "warp-specialised":
                case = f"{shape.model}, both branches"
                table.attempt(case, kind, _compare, table, case, operands)
            del operands


def _verdicts(table: Any, dtype: torch.dtype, device: str) -> None:
    """Record which branch this device takes and the warnings that refused the other branch."""
    name = str(dtype).removeprefix("torch.")

    def special() -> None:
        from kernels.score_launcher import select_hopper_tiles

        with warnings.catch_warnings(record=True) as text:
            warnings.simplefilter("always")
            tiles = select_hopper_tiles(torch.zeros(16, 64, dtype=dtype, device=device))
        words = "; ".join(str(item.message) for item in text)[:200]
        chosen = "older" if tiles is None else f"warp-specialised {tuple(tiles)}"
        table.row(name, "score kernels", "chosen", chosen, note=words)

    def adds() -> None:
        from kernels.device_checks import supports_addmm_in_place

        chosen = "in place" if supports_addmm_in_place(dtype) else "mm and add_"
        table.row(name, "addmm into float32", "chosen", chosen)

    table.attempt(name, "score kernels", special)
    table.attempt(name, "addmm into float32", adds)


def _speed(
    table: Any, case: str, provider: str, run: Callable[[], object], o: KernelInputs, columns: int
) -> None:
    """Record the TFLOP/s of `run` in a separate attempt."""

    def measure() -> None:
        ms = measure_milliseconds(run, o.x.device.type)
        speed = 2e-9 * o.x.numel() * columns / ms
        table.row(case, provider, "TFLOP/s", speed, "", read_limits()["tflops"], f"{ms:.3f} ms")

    table.attempt(case, provider, measure)


def _products(table: Any, shape: HeadShape, o: KernelInputs) -> None:
    """Time cuBLAS: products that the kernels are compared with, and the products between them."""
    x, dz, slab = o.x, o.dz, o.w[: o.dz.shape[1]]
    wide, f32 = torch.zeros(x.shape, device=x.device), torch.float32
    products: dict[str, Callable[[], object]] = {
        "logits of a slab": lambda: torch.mm(x, slab.t()),
        "dW of a slab": lambda: torch.mm(dz.t(), x),
        "dX of a slab, mm and add_": lambda: wide.add_(torch.mm(dz, slab, out_dtype=f32)),
        "dX of a slab, addmm": lambda: torch.addmm(wide, dz, slab, out_dtype=f32, out=wide),
    }
    for name, run in products.items():
        _speed(table, f"{shape.model}, {name}", "cuBLAS", run, o, dz.shape[1])


def scores_of(o: KernelInputs, special: bool) -> Any:
    """Return the launches of a branch. Explicit tiles override the device's choice."""
    from kernels.common import HeadConfig
    from kernels.score_launcher import ScoreLauncher
    from kernels.tile_config import HOPPER_TILES, get_gpu_info, select_tile_sizes

    tiles = select_tile_sizes(o.x.shape[1], o.x.dtype, get_gpu_info(o.x))
    newest = HOPPER_TILES if special else None
    return ScoreLauncher(o.x, o.w, o.y, None, HeadConfig(), tiles, newest)


def _score_kernels(table: Any, shape: HeadShape, o: KernelInputs, name: str, special: bool) -> None:
    """Time a branch's launches: forward, with entropy, with kept logits [T, V], and dlogits of a
    slab.
    """
    from kernels.linear_logprob_torch import GradientCoefficients

    scores = table.attempt(f"{shape.model}, score kernels", name, scores_of, o, special)
    if scores is None:
        return
    row, width = torch.ones(len(o.x), device=o.x.device), o.dz.shape[1]

    def keeps() -> object:
        chunks = -(-shape.V // scores.tiles.columns)
        room = o.x.new_empty(len(o.x), shape.V), row.new_empty(chunks, len(o.x))
        return scores.statistics(False, room)

    gradient = GradientCoefficients(row, row, None)
    runs: dict[str, tuple[Callable[[], object], int]] = {
        "forward": (lambda: scores.statistics(False), shape.V),
        "forward and entropy": (lambda: scores.statistics(True), shape.V),
        "forward that keeps [T, V]": (keeps, shape.V),
        "dlogits of a slab": (lambda: scores.dlogits(o.dz, 0, width, row, gradient), width),
    }
    for what, (run, columns) in runs.items():
        _speed(table, f"{shape.model}, {what}", name, run, o, columns)


def _compare(table: Any, case: str, o: KernelInputs) -> None:
    """Compare the logprobs of both branches on this head; the device check uses a small head."""
    launches = (scores_of(o, special) for special in (True, False))
    mine, older = (scores.combine(scores.statistics(False)).logp for scores in launches)
    apart = float((mine - older).abs().max())
    table.row(case, "warp-specialised", "largest_difference", apart, "nats")


# ------------------------------------------------------------------------------------------- pages

# Rows, query heads, key heads, head width; maximum positions of a row; rows of a group, its shared
# pages.
CASES = [
    (1, 14, 2, 64, 8192, 1, 0),
    (64, 14, 2, 64, 1500, 1, 0),
    (3, 16, 8, 128, 2560, 1, 0),
    (256, 32, 8, 128, 1500, 1, 0),
    (1024, 14, 2, 64, 700, 8, 1),
    (16, 14, 2, 64, 700, 16, 16),
    (256, 32, 8, 128, 700, 16, 4),
]
DRY = [(4, 4, 2, 16, 40, 1, 0), (4, 4, 2, 16, 40, 2, 1)]


def part_pages(table: Any, dry: bool) -> None:
    """Measure every case, and check for pytorch#194167: if torch splits the keys of a sequence over
    programs, it writes only the rows of the first sequence in some shapes.
    """
    for inputs in DRY if dry else CASES:
        rows, heads, key_heads, width, most, group, shared = inputs
        case = f"{rows} rows, {heads} heads over {key_heads}, width {width}, up to {most}"
        case += f", groups of {group} on {shared} pages" if shared else ""
        made = table.attempt(case, "tensors", _make, inputs, dry)
        if made is not None:
            _ways(table, case, made)
        del made


def _make(inputs: tuple[int, ...], dry: bool) -> tuple[Any, ...]:
    """Return (queries, pages, the other arguments of `attend_pages`, bytes that a step has to
    read).
    """
    from rl.sampler.block_tables import make_block_tables

    rows, heads, key_heads, width, most, group, shared = inputs
    device, size, rng = device_of(dry), 16 if dry else 256, np.random.default_rng(0)
    reference = rng.integers(1, most + 1, rows)
    need, first = shared - (-reference // size), shared * (rows // group)
    count = int(need.sum()) - shared * rows + first
    order, columns = rng.permutation(count), np.arange(need.max())
    groups, each = np.arange(rows) // group, np.full(rows, shared)
    tables = np.zeros((rows, len(columns)), np.int64)
    tables[:, :shared] = order[:first].reshape(rows // group, shared)[groups]
    tables[(columns >= shared) & (columns < need[:, None])] = order[first:]
    options = seeded(device)
    kv = torch.randn(2, count, size, key_heads, width, dtype=torch.bfloat16, **options)
    q = torch.randn(rows, heads, width, dtype=torch.bfloat16, **options)
    read = 4.0 * key_heads * width * float(reference.sum() + shared * size * (rows // group))
    lengths, groups = reference + shared * size, groups if shared else each - 1
    block_tables = make_block_tables(tables, lengths, groups, each, size, kv.device)
    return q, kv, *block_tables, read


def _ways(table: Any, case: str, made: tuple[Any, ...]) -> None:
    from kernels import paged_attention as module

    *inputs, read = made

    def choose() -> None:
        chosen = module._select_backend(inputs[0], inputs[1], module.UNBOUNDED)
        table.row(case, "chosen", "way", chosen)

    table.attempt(case, "chosen", choose)
    exact = table.attempt(case, "float64", _exact, *inputs)
    ways: dict[str, Callable[[], Tensor]] = {"ours": lambda: module._run_backend("triton", *inputs)}
    for n in (1, None):
        varlen = functools.partial(module.attend_varlen, splits=n)
        way = functools.partial(module.attend_and_merge, varlen, *inputs)
        ways[f"varlen, num_splits={n}"] = way
    ways["gathered"] = lambda: module.attend_and_merge(module.attend_gathered, *inputs)

    def measure(name: str, way: Callable[[], Tensor]) -> None:
        if "varlen" in name and not module.varlen_supports_pages():
            raise NotImplementedError("this torch has no varlen attention over pages")
        worst = (way().double() - exact).abs().amax((1, 2))
        note = f"{int((~(worst < 0.05)).sum())} rows wrong"
        table.row(case, name, "largest_error", float(worst.max()), note=note)
        ms = measure_milliseconds(way, inputs[0].device.type)
        table.row(case, name, "time", ms, "ms", floor_ms(num_bytes=read))

    for name, way in ways.items():
        table.attempt(case, name, measure, name, way)


def _exact(q: Tensor, kv: Tensor, table: Tensor, length: Tensor, shared: Any) -> Tensor:
    """Compute the attention row by row in float64: [rows, heads, width]."""
    results, size, repeat = [], kv.shape[2], q.shape[1] // kv.shape[3]
    for i in range(len(q)):
        first, positions = q.new_empty(0, dtype=torch.int32), 0
        if shared is not None:
            group = shared.group[shared.place[i]]
            positions = int(shared.length[group])
            first = shared.table[group, : positions // size]
        pages = torch.cat([first, table[i, : -(-int(length[i]) // size)]]).long()
        cached = (t[pages].flatten(0, 1)[: positions + int(length[i])].double() for t in kv)
        keys, values = (t.repeat_interleave(repeat, 1) for t in cached)
        score = torch.einsum("hd,lhd->hl", q[i].double(), keys) * q.shape[2] ** -0.5
        results.append(torch.einsum("hl,lhd->hd", score.softmax(-1), values))
    return torch.stack(results)
