"""Time the kernels against their floors and against other implementations: on a GPU as a part of
bench/gpu.py, on a CPU as a script.

    python bench/kernels.py                # about 4 minutes on two cores, 10 GB
    python bench/kernels.py --tokens 512   # quicker; the ratios are about the same

Every provider gets the same seeded gradient for each token's logprob and is compared with float64.
"floor" is the least time that the provider's algorithm can take by the limits of this GPU, which
`bench/gpu.py` measured (the file named by WHETSTONE_GPU_FLOORS); without them it is not a number.
Compare within a memory class: "flat" keeps no [T, V] tensor, "logits" does.

On a CPU each provider runs once, in a process of its own: wall and CPU seconds of forward and
backward (on a shared machine, compare the CPU seconds), peak memory above weights and gradients,
the largest error of logp against float64 for a few rows, our CPU seconds divided by torch's.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.harness import RESULTS, make_parser, show, write_table  # noqa: E402
from kernels import linear_logprob, policy_loss, token_logprob  # noqa: E402

NAN = float("nan")


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """Describe an LM head: hidden size D and vocabulary V."""

    model: str
    D: int
    V: int


SHAPES = (
    HeadShape(model="Qwen2.5-0.5B", D=896, V=151_936),
    HeadShape(model="Qwen3-1.7B", D=2048, V=151_936),
    HeadShape(model="Llama-3.1-8B", D=4096, V=128_256),
)
TINY = HeadShape(model="tiny", D=64, V=4_096)


def seeded(device: str) -> dict[str, Any]:
    """Return the options with which torch draws the same numbers on a device in every run."""
    return {"generator": torch.Generator(device).manual_seed(0), "device": device}


def read_limits() -> dict[str, float]:
    """Return what part `floors` measured on this GPU, or NaN: "tflops" of a large product in
    bfloat16, "tb_per_s" of a large copy, "launch_ms" of an empty launch.
    """
    path = Path(os.environ.get("WHETSTONE_GPU_FLOORS", "") or "missing")
    limits = json.loads(path.read_text()) if path.is_file() else {}
    return {name: limits.get(name, NAN) for name in ("tflops", "tb_per_s", "launch_ms")}


def floor_ms(operations: float = 0.0, num_bytes: float = 0.0) -> float:
    """Return the least milliseconds of a launch that does this many operations in matrix products
    and moves this many bytes; NaN if the limits of this GPU were not measured.
    """
    limits = read_limits()
    times = operations / limits["tflops"] / 1e9, num_bytes / limits["tb_per_s"] / 1e9
    return NAN if any(x != x for x in limits.values()) else max(*times, limits["launch_ms"])


def head_floor_ms(products: float, tokens: int, shape: HeadShape) -> float:
    """Return the least milliseconds of `products` x N D V operations."""
    return floor_ms(products * tokens * shape.D * shape.V)


# -------------------------------------------------------------------------------------------- timing


class Timing(NamedTuple):
    """Hold the median milliseconds and the peak of allocated bytes above those held before (CUDA;
    else 0).
    """

    median: float
    peak_bytes: int


@dataclass(frozen=True)
class Step:
    """Hold a timed call: `run`, on the result of `prepare`, which is called just before and is not
    timed. `clear` frees what the last call kept.
    """

    run: Callable[[Any], object]
    prepare: Callable[[], Any] = lambda: None
    clear: Callable[[], None] = lambda: None

    def __call__(self) -> object:
        return self.run(self.prepare())


def once(step: Step, device: str, flush: Tensor | None) -> float:
    """Return the milliseconds of a single call: device time on CUDA, after `flush` was written over
    the L2 cache, wall time elsewhere.
    """
    state = step.prepare()
    if device != "cuda":
        start = time.perf_counter()
        step.run(state)
        return (time.perf_counter() - start) * 1e3
    if flush is not None:
        flush.zero_()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    step.run(state)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def measure(steps: dict[str, Step], device: str, repeats: int) -> dict[str, Timing]:
    """Time each step `repeats` times after a warm-up. The order is reversed every round, so that no
    step always runs first.
    """
    flush = torch.empty(64 << 20, dtype=torch.int32, device=device) if device == "cuda" else None
    samples: dict[str, list[float]] = {name: [] for name in steps}
    peaks = dict.fromkeys(steps, 0)
    for name, step in steps.items():
        step()
        if device == "cuda":
            torch.cuda.synchronize()
            # Otherwise the last call's gradients, freed inside the next call, would hide as many
            # bytes of its peak.
            step.clear()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step()
            torch.cuda.synchronize()
            peaks[name] = torch.cuda.max_memory_allocated() - before
    for round_ in range(repeats):
        for name in list(steps) if round_ % 2 == 0 else list(steps)[::-1]:
            samples[name].append(once(steps[name], device, flush))
    return {name: Timing(statistics.median(samples[name]), peaks[name]) for name in steps}


def captured(run: Callable[[], object]) -> Step:
    """Return a step that replays `run` from a CUDA graph: its device time, where the host would
    take longer to launch it.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return Step(lambda _: graph.replay())


# ----------------------------------------------------------------------------------------- providers


class CannotRun(Exception):
    """Signal that a provider cannot run, with the reason."""


@dataclass(frozen=True)
class LogprobBatch:
    """Hold a head and a batch; `upstream` [T] is the seeded gradient of each token's logprob."""

    shape: HeadShape
    x: Tensor
    w: Tensor
    y: Tensor
    upstream: Tensor

    @staticmethod
    def make(
        shape: HeadShape, tokens: int, device: str, dtype: torch.dtype, frozen: bool = False
    ) -> LogprobBatch:
        options = seeded(device)
        x = torch.randn(tokens, shape.D, **options).to(dtype).requires_grad_()
        w = (torch.randn(shape.V, shape.D, **options) * shape.D**-0.5).to(dtype)
        y = torch.randint(0, shape.V, (tokens,), **options)
        return LogprobBatch(
            shape, x, w.requires_grad_(not frozen), y, torch.randn(tokens, **options)
        )


@dataclass(frozen=True)
class Provider:
    """Hold an implementation: logprobs [T] of a problem. `memory`: its class, "flat" or "logits".
    `products`: the N D V products of its algorithm, forward and backward (Liger's Triton path and
    torch's chunks recompute if a loss for each token is requested).
    """

    name: str
    memory: str
    products: float
    logprobs: Callable[[LogprobBatch], Tensor]
    frozen: bool = False


def _need(package: str, p: LogprobBatch | None = None) -> None:
    if find_spec(package) is None:
        raise CannotRun(f"{package} is not installed")
    if p is not None and not p.x.is_cuda:
        raise CannotRun(f"{package}'s Triton path needs CUDA, this is {p.x.device}")


def compute_plain_logprobs(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    logits = torch.nn.functional.linear(x, w)
    return logits.float().log_softmax(-1).gather(-1, y[:, None]).squeeze(-1)


def _ours(p: LogprobBatch, entropy: bool = False, saved_bytes: int = 0) -> Tensor:
    return linear_logprob(p.x, p.w, p.y, entropy=entropy, saved_bytes=saved_bytes)[0]


def _torch(p: LogprobBatch) -> Tensor:
    return compute_plain_logprobs(p.x, p.w, p.y)


_compiled = torch.compile(compute_plain_logprobs, dynamic=False)


def _torch_compile(p: LogprobBatch) -> Tensor:
    """Run the compiled function. The caller resets dynamo between shapes: after eight shapes dynamo
    runs the function uncompiled, under the name of the compiled function.
    """
    return _compiled(p.x, p.w, p.y)


def _torch_linear_cross_entropy(p: LogprobBatch) -> Tensor:
    function = getattr(torch.nn.functional, "linear_cross_entropy", None)
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if function is None or options is None:
        raise CannotRun(f"torch {torch.__version__} has no chunked linear_cross_entropy")
    return -function(p.x, p.w, p.y, reduction="none", options=options())


def _liger_triton(p: LogprobBatch) -> Tensor:
    _need("liger_kernel", p)
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    out = LigerFusedLinearCrossEntropyFunction.apply(
        p.x, p.w, p.y, None, None, -100, 0.0, 0.0, "none"
    )
    loss = out[0] if isinstance(out, tuple) else out
    if loss.shape != p.y.shape:
        raise CannotRun("no loss for each token")
    return -loss


def _liger_scaled(p: LogprobBatch) -> Tensor:
    """Run the CuTe kernel on Hopper, a chunked torch path elsewhere."""
    _need("liger_kernel")
    from liger_kernel.ops import fused_linear_scaled_cross_entropy as liger

    out = liger.LigerFusedLinearScaledCrossEntropyFunction.apply(p.x, p.w, p.y)
    return -(out[0] if isinstance(out, tuple) else out)


def _cut_cross_entropy(p: LogprobBatch) -> Tensor:
    _need("cut_cross_entropy", p)
    from cut_cross_entropy import linear_cross_entropy

    options: dict[str, Any] = {"reduction": "none", "filter_eps": None}
    return -linear_cross_entropy(p.x, p.w, p.y, **options)


PROVIDERS = (
    Provider("ours", "flat", 8, _ours),
    Provider("ours_entropy", "flat", 8, lambda p: _ours(p, entropy=True)),
    Provider("ours_saved", "logits", 6, lambda p: _ours(p, saved_bytes=1 << 40)),
    Provider("ours_frozen", "flat", 4, _ours, frozen=True),
    Provider("torch", "logits", 6, _torch),
    Provider("torch_frozen", "logits", 4, _torch, frozen=True),
    Provider("torch_compile", "logits", 6, _torch_compile),
    Provider("torch_linear_cross_entropy", "flat", 8, _torch_linear_cross_entropy),
    Provider("liger_triton", "flat", 8, _liger_triton),
    Provider("liger_scaled", "flat", 8, _liger_scaled),
    Provider("cut_cross_entropy", "flat", 8, _cut_cross_entropy),
)


# ---------------------------------------------------------------------------------------------- rows

Errors = tuple[float, float, float]  # logp, dX, dW
Row = dict[str, Any]


def row(
    labels: tuple[str, str, str, str], timing: Timing, floor: float, errors: Errors = (NAN,) * 3
) -> Row:
    """Return a row of the table. `labels`: operation, provider, memory class, phase."""
    result = dict(zip(("operation", "provider", "memory", "phase"), labels, strict=True))
    figures = {"median_ms": timing.median, "floor_ms": floor, "peak_mb": timing.peak_bytes / 1e6}
    return {**result, **figures, "errors": " ".join(f"{error:.1e}" for error in errors)}


@torch.no_grad()
def errors_of(logp: Tensor, p: LogprobBatch, rows: int = 16) -> Errors:
    """Return the largest errors against float64: of the logprobs and dX of the first `rows` tokens,
    and of dW of `rows` rows of the vocabulary. Gradients are divided by the largest exact gradient.
    """

    def apart(gradient: Tensor | None, chosen: Any, exact: Tensor) -> float:
        if gradient is None:
            return NAN
        return ((gradient[chosen].double() - exact).abs().max() / exact.abs().max()).item()

    some = torch.linspace(0, p.shape.V - 1, rows, device=p.x.device).long()
    dw = torch.zeros(rows, p.shape.D, dtype=torch.float64, device=p.x.device)
    error, error_dx, wide = 0.0, 0.0, p.w.double()
    for at in range(0, len(p.y), 512):
        x, y, g = (tensor[at : at + 512] for tensor in (p.x.double(), p.y, p.upstream.double()))
        z = x @ wide.t()
        exact = z.log_softmax(-1)
        dz = torch.nn.functional.one_hot(y, p.shape.V) - exact.exp()
        dz.mul_(g[:, None])
        dw += dz[:, some].t() @ x
        if at == 0:
            right = exact[:rows].gather(-1, y[:rows, None])[:, 0]
            error = (logp[:rows].double() - right).abs().max().item()
            error_dx = apart(p.x.grad, slice(rows), dz[:rows] @ wide)
    return error, error_dx, apart(p.w.grad, some, dw)


def head_steps(provider: Provider, p: LogprobBatch) -> dict[str, Step]:
    """Return the timed steps of a provider: forward, backward (after a forward that is not timed)
    and both.
    """

    def fresh() -> None:
        p.x.grad = p.w.grad = None

    def prepared() -> Tensor:
        fresh()
        return provider.logprobs(p)

    forward = Step(lambda _: provider.logprobs(p), clear=fresh)
    backward = Step(lambda logp: logp.backward(p.upstream), prepared, fresh)
    both = Step(lambda _: provider.logprobs(p).backward(p.upstream), fresh, fresh)
    return {"forward": forward, "backward": backward, "both": both}


def bench_head(
    shape: HeadShape, tokens: int, device: str, dtype: torch.dtype, names: list[str], repeats: int,
    left_out: Callable[[str, Exception], None],
) -> Iterator[Row]:  # fmt: skip
    """Yield the rows of each provider in turn. Each has a separate problem, which is freed before
    the next: the largest take most of a GPU.

    `left_out` is called with each provider that cannot run or fails, and the reason.
    """
    for provider in (provider for provider in PROVIDERS if provider.name in names):
        torch._dynamo.reset()
        try:
            yield from one_provider(provider, shape, tokens, device, dtype, repeats)
        except Exception as failure:  # noqa: BLE001  (third-party code raises anything)
            left_out(provider.name, failure)
        if device == "cuda":
            torch.cuda.empty_cache()


def one_provider(
    provider: Provider, shape: HeadShape, tokens: int, device: str, dtype: torch.dtype, repeats: int
) -> Iterator[Row]:
    p = LogprobBatch.make(shape, tokens, device, dtype, provider.frozen)
    logp = provider.logprobs(p)
    logp.backward(p.upstream)
    errors = errors_of(logp.detach(), p)
    del logp
    forward = 4 if provider.name == "ours_frozen" else 2
    backward = max(provider.products - forward, 0.01)
    products = {"forward": forward, "backward": backward, "both": provider.products}
    for phase, step in head_steps(provider, p).items():
        timing = measure({phase: step}, device, repeats)[phase]
        labels = "linear_logprob", provider.name, provider.memory, phase
        yield row(labels, timing, head_floor_ms(products[phase], tokens, shape), errors)


def bench_logits(
    shape: HeadShape, tokens: int, device: str, dtype: torch.dtype, provider: str, repeats: int
) -> Iterator[Row]:
    """Yield the rows of token_logprob, by "ours" or "torch". The floor is a read forward, a read and
    a write backward.
    """
    p = LogprobBatch.make(shape, tokens, device, dtype)
    with torch.no_grad():
        logits = torch.nn.functional.linear(p.x, p.w)
        exact = logits[:16].double().log_softmax(-1).gather(-1, p.y[:16, None]).squeeze(-1)
    error = (token_logprob(logits, p.y)[0][:16].double() - exact).abs().max().item()

    def ours(_: None) -> None:
        token_logprob(logits.detach().requires_grad_(), p.y)[0].backward(p.upstream)

    def torch_plain(_: None) -> None:
        leaf = logits.detach().requires_grad_()
        leaf.float().log_softmax(-1).gather(-1, p.y[:, None]).squeeze(-1).backward(p.upstream)

    forward = Step(lambda _: token_logprob(logits, p.y))
    ways = {"ours": {"both": Step(ours), "forward": forward}, "torch": {"both": Step(torch_plain)}}
    size = logits.numel() * logits.element_size()
    for phase, timing in measure(ways[provider], device, repeats).items():
        copies = 1 if phase == "forward" else 3
        labels = "token_logprob", provider, "logits", phase
        floor = floor_ms(num_bytes=copies * size)
        yield row(labels, timing, floor, (error, NAN, NAN))


def bench_tokens(tokens: int, device: str, repeats: int) -> Iterator[Row]:
    """Yield the rows of policy_loss, which is bound by its launch: it moves 32 bytes per token, the
    goal is 0.010 ms for 32k tokens. "graph" is replayed from a CUDA graph, so that it excludes the
    host's 0.1 ms.
    """
    logp, old, advantage = (torch.randn(tokens, device=device) * 0.1 for _ in range(3))

    def call() -> object:
        return policy_loss(logp, old, advantage, kind="ppo")

    steps = {"forward": Step(lambda _: call())}
    if device == "cuda":
        steps["graph"] = captured(call)
    for phase, timing in measure(steps, device, repeats).items():
        labels = "policy_loss", "ours", "flat", phase
        yield row(labels, timing, floor_ms(num_bytes=32 * tokens))


# --------------------------------------------------------------------------------------------- a CPU


def status_bytes(field: str) -> int:
    """Return a figure of /proc/self/status in bytes: VmRSS, the memory held now, or VmHWM, the peak
    since the last reset.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure_once(provider: Provider, shape: HeadShape, tokens: int) -> dict[str, float]:
    """Run forward and backward of a provider once; called in a fresh process."""
    p = LogprobBatch.make(shape, tokens, "cpu", torch.float32, provider.frozen)
    # A warm-up: loads libraries and touches the gradients.
    provider.logprobs(replace(p, x=p.x[:8], y=p.y[:8])).sum().backward()
    p.x.grad = p.w.grad = None
    gradients = 4 * (p.x.numel() + (0 if provider.frozen else p.w.numel()))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, wall, cpu = status_bytes("VmRSS"), time.perf_counter(), time.process_time()
    logp = provider.logprobs(p)
    logp.backward(p.upstream)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    extra = (status_bytes("VmHWM") - before - gradients) / 1e6
    with torch.no_grad():
        exact = (p.x[:8].double() @ p.w.double().t()).log_softmax(-1)
        error = (logp[:8] - exact.gather(-1, p.y[:8, None])[:, 0]).abs().max().item()
    return {"wall_s": wall, "cpu_s": cpu, "extra_mb": extra, "error": error}


def main() -> None:
    parser = make_parser(__doc__, output=RESULTS / "kernels_cpu.csv")
    providers = {provider.name: provider for provider in PROVIDERS}
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--one", choices=providers, help="measure this provider in this process")
    args = parser.parse_args()
    shape = SHAPES[0]
    if args.one:
        torch.set_num_threads(args.threads)
        return print(json.dumps(measure_once(providers[args.one], shape, args.tokens)))
    sizes = {"tokens": args.tokens, "threads": args.threads}
    flags = [f"--{name}={size}" for name, size in sizes.items()]
    results: dict[str, dict[str, float]] = {}
    rows = []
    for name in ("torch", "ours", "torch_frozen", "ours_frozen"):
        command = [sys.executable, __file__, "--one", name, *flags]
        results[name] = json.loads(subprocess.check_output(command, text=True))
        twin = results.get(name.replace("ours", "torch"))
        ratio = results[name]["cpu_s"] / twin["cpu_s"] if twin else NAN
        digits = {"wall_s": ".2f", "cpu_s": ".2f", "extra_mb": ".0f", "error": ".1e"}
        figures = {key: f"{results[name][key]:{form}}" for key, form in digits.items()}
        head = {"hidden": shape.D, "vocab": shape.V}
        rows.append({"provider": name, **sizes, **head, **figures, "cpu_ratio": f"{ratio:.3f}"})
        show(rows[-1])
        write_table(args.output, rows)


if __name__ == "__main__":
    main()
