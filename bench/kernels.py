"""Time the kernels against their floors and against other implementations, in a single process and
table.

    python bench/kernels.py --help
    python bench/kernels.py --quick          # Qwen3-1.7B, 4096 tokens; two minutes on a GPU
    python bench/kernels.py --models Qwen3-1.7B Llama-3.1-8B --tokens 8192 --csv runs/kernels.csv
    python bench/kernels.py --device cpu     # a tiny head; shows that everything runs, no speeds

Operations: linear_logprob (forward, backward, both), token_logprob, policy_loss. Every provider
gets the same seeded gradient for each token's logprob and is compared with float64: logprobs and dX
of 16 tokens, dW of 16 vocabulary rows. Only a single provider is on the device at a time, each row
is written as it is measured, and a provider that cannot run reports the reason. "floor" is the
least time that the provider's algorithm can take on an H100 (790 TFLOP/s, 3.0 TB/s); on other
devices no ratio is reported. Compare within a memory class: "flat" keeps no [T, V] tensor, "logits"
does.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.kernel_harness import (  # noqa: E402  # noqa: E402
    SHAPES,
    TINY,
    TOKENS,
    Shape,
    Step,
    Timing,
    captured,
    copy_floor_ms,
    floor_ms,
    measure,
)
from bench.kernel_providers import PROVIDERS, CannotRun, Problem, Provider  # noqa: E402
from kernels import policy_loss, token_logprob  # noqa: E402

Errors = tuple[float, float, float]  # logp, dX, dW

COLUMNS = (
    "operation provider memory phase model tokens D V dtype device median_ms low_ms high_ms "
    "floor_ms ratio peak_mb"
).split()
COLUMNS += ["error", "error_dx", "error_dw"]
Row = dict[str, object]


def row(
    operation: str,
    name: str,
    memory: str,
    phase: str,
    p: Problem,
    timing: Timing,
    floor: float,
    errors: Errors,
) -> Row:
    shape, device = p.shape, torch.cuda.get_device_name() if p.x.is_cuda else "cpu"
    sizes = [shape.model, len(p.y), shape.D, shape.V, str(p.x.dtype).removeprefix("torch."), device]
    times = [f"{t:.4f}" for t in (timing.median, timing.low, timing.high, floor)]
    ratio = f"{timing.median / floor:.2f}" if p.x.is_cuda else "nan"  # the floors are an H100's
    figures = [
        *times,
        ratio,
        f"{timing.peak_bytes / 1e6:.0f}",
        *(f"{error:.1e}" for error in errors),
    ]
    return dict(zip(COLUMNS, [operation, name, memory, phase, *sizes, *figures], strict=True))


def errors_of(logp: torch.Tensor, p: Problem, rows: int = 16) -> Errors:
    """Return the largest errors against float64: of the logprobs and dX of the first `rows` tokens,
    and of dW of `rows` rows of the vocabulary.

    Gradients are divided by the largest exact gradient.
    """
    with torch.no_grad():
        some = torch.linspace(0, p.shape.V - 1, rows, device=p.x.device).long()
        error, error_dx, dw = (
            0.0,
            0.0,
            torch.zeros(rows, p.shape.D, dtype=torch.float64, device=p.x.device),
        )
        wide = p.w.double()
        for at in range(0, len(p.y), 512):
            x, y, g = (
                p.x[at : at + 512].double(),
                p.y[at : at + 512],
                p.upstream[at : at + 512].double(),
            )
            z = x @ wide.t()
            slope = torch.ones_like(z)
            if p.shape.softcap is not None:
                z = p.shape.softcap * torch.tanh(z / p.shape.softcap)
                slope = 1 - (z / p.shape.softcap) ** 2
            exact = z.log_softmax(-1)
            dz = (
                (torch.nn.functional.one_hot(y, p.shape.V) - exact.exp())
                .mul_(g[:, None])
                .mul_(slope)
            )
            dw += dz[:, some].t() @ x
            if at == 0:
                error = (
                    (logp[:rows].double() - exact[:rows].gather(-1, y[:rows, None])[:, 0])
                    .abs()
                    .max()
                    .item()
                )
                dx = dz[:rows] @ wide
                error_dx = (
                    ((p.x.grad[:rows].double() - dx).abs().max() / dx.abs().max()).item()
                    if p.x.grad is not None
                    else float("nan")
                )
        error_dw = (
            ((p.w.grad[some].double() - dw).abs().max() / dw.abs().max()).item()
            if p.w.grad is not None
            else float("nan")
        )
        return error, error_dx, error_dw


def head_steps(provider: Provider, p: Problem) -> dict[str, Step]:
    """Return the timed steps of a provider: forward, backward (after a forward that is not timed)
    and both.
    """

    def fresh() -> None:
        p.x.grad = p.w.grad = None

    def prepared() -> torch.Tensor:
        fresh()
        return provider.logprobs(p)

    forward = Step(lambda _: provider.logprobs(p), clear=fresh)
    backward = Step(lambda logp: logp.backward(p.upstream), prepared, fresh)
    both = Step(lambda _: provider.logprobs(p).backward(p.upstream), fresh, fresh)
    return {"forward": forward, "backward": backward, "both": both}


def say_left_out(name: str, failure: Exception) -> None:
    kind = "" if isinstance(failure, CannotRun) else f"{type(failure).__name__}: "
    print(f"  {name}: left out: {kind}{(str(failure).splitlines() or [''])[0][:120]}")


def bench_head(
    shape: Shape, tokens: int, device: str, dtype: torch.dtype, names: list[str], repeats: int,
    left_out: Callable[[str, Exception], None] = say_left_out,
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
    provider: Provider, shape: Shape, tokens: int, device: str, dtype: torch.dtype, repeats: int
) -> Iterator[Row]:
    p = Problem.make(shape, tokens, device, dtype, provider.frozen)
    logp = provider.logprobs(p)
    logp.backward(p.upstream)
    errors = errors_of(logp.detach(), p)
    del logp
    for phase, step in head_steps(provider, p).items():
        timing = measure({phase: step}, device, repeats)[phase]
        forward = 2 if provider.name != "ours_frozen" else 4
        products = {
            "forward": forward,
            "backward": max(provider.products - forward, 0.01),
            "both": provider.products,
        }[phase]
        yield row(
            "linear_logprob",
            provider.name,
            provider.memory,
            phase,
            p,
            timing,
            floor_ms(products, tokens, shape),
            errors,
        )


def bench_logits(
    shape: Shape, tokens: int, device: str, dtype: torch.dtype, repeats: int
) -> Iterator[Row]:
    """Yield the rows of token_logprob. The floor is a read forward, a read and a write backward."""
    p = Problem.make(shape, tokens, device, dtype)
    with torch.no_grad():
        logits = torch.nn.functional.linear(p.x, p.w)
        exact = logits[:16].double().log_softmax(-1).gather(-1, p.y[:16, None]).squeeze(-1)
    error = (token_logprob(logits, p.y)[0][:16].double() - exact).abs().max().item()

    def ours(_: None) -> None:
        token_logprob(logits.detach().requires_grad_(), p.y)[0].backward(p.upstream)

    def torch_plain(_: None) -> None:
        leaf = logits.detach().requires_grad_()
        leaf.float().log_softmax(-1).gather(-1, p.y[:, None]).squeeze(-1).backward(p.upstream)

    steps = {
        "ours": Step(ours),
        "torch": Step(torch_plain),
        "ours forward": Step(lambda _: token_logprob(logits, p.y)),
    }
    size = logits.numel() * logits.element_size()
    for name, timing in measure(steps, device, repeats).items():
        phase, copies = ("forward", 1) if name.endswith("forward") else ("both", 3)
        errors = (error, float("nan"), float("nan"))
        yield row(
            "token_logprob",
            name.split()[0],
            "logits",
            phase,
            p,
            timing,
            copy_floor_ms(copies * size),
            errors,
        )


def bench_tokens(tokens: int, device: str, repeats: int) -> Iterator[Row]:
    """Yield the rows of policy_loss, which is bound by launches: the floor of 32 bytes per token is
    reported, the goal is 0.010 ms for 32k tokens.

    "graph" is replayed from a CUDA graph, so that it excludes the host's 0.1 ms.
    """
    p = Problem.make(Shape(model="tokens", D=1, V=2), tokens, device, torch.float32)
    logp, old, advantage = (torch.randn(tokens, device=device) * 0.1 for _ in range(3))

    def call() -> object:
        return policy_loss(logp, old, advantage, kind="ppo")

    steps = {"forward": Step(lambda _: call())} | (
        {"graph": captured(call)} if device == "cuda" else {}
    )
    for phase, timing in measure(steps, device, repeats).items():
        yield row(
            "policy_loss",
            "ours",
            "flat",
            phase,
            p,
            timing,
            copy_floor_ms(32 * tokens),
            (0.0, 0.0, 0.0),
        )


def show(r: Row) -> None:
    label = (
        f"{r['operation']:15s} {r['provider']:27s} {r['memory']:6s} {r['phase']:8s} "
        f"{r['model']:13s} {r['tokens']:>6}"
    )
    times = f"{r['median_ms']:>11} ms [{r['low_ms']}, {r['high_ms']}]"
    errors = f"{r['error']} {r['error_dx']} {r['error_dw']}"
    print(
        f"{label} {times}  floor {r['floor_ms']}  ratio {r['ratio']:>8}  {r['peak_mb']:>6} MB  "
        f"errors {errors}",
        flush=True,
    )


def every_row(
    shapes: list[Shape],
    tokens_list: list[int],
    device: str,
    dtype: torch.dtype,
    names: list[str],
    repeats: int,
) -> Iterator[Row]:
    for shape in shapes:
        for tokens in tokens_list:
            yield from bench_head(shape, tokens, device, dtype, names, repeats)
            yield from bench_logits(shape, tokens, device, dtype, repeats)
    yield from bench_tokens(32_768, device, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [shape.model for shape in (*SHAPES, TINY)]
    parser.add_argument(
        "--models", nargs="+", choices=names, help="default: all on CUDA, the tiny head elsewhere"
    )
    parser.add_argument(
        "--tokens", nargs="+", type=int, help=f"default: {TOKENS} on CUDA, 256 elsewhere"
    )
    parser.add_argument(
        "--providers",
        nargs="+",
        default=[p.name for p in PROVIDERS],
        choices=[p.name for p in PROVIDERS],
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"]
    )
    parser.add_argument(
        "--dtype",
        default=None,
        choices=["bfloat16", "float16", "float32"],
        help="default: bfloat16 on CUDA",
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="Qwen3-1.7B (off CUDA the tiny head), 4096 (256) tokens, 10 repeats",
    )
    parser.add_argument(
        "--csv", type=Path, default=None, help="default: bench/results/kernels_<device>.csv"
    )
    args = parser.parse_args()
    cuda = args.device == "cuda"
    models = args.models or ((["Qwen3-1.7B"] if args.quick else names[:-1]) if cuda else ["tiny"])
    tokens_list = args.tokens or (([4096] if args.quick else list(TOKENS)) if cuda else [256])
    dtype = getattr(torch, args.dtype or ("bfloat16" if cuda else "float32"))
    repeats = min(args.repeats, 10) if args.quick else args.repeats
    print(
        f"device {torch.cuda.get_device_name() if cuda else 'cpu'}, torch {torch.__version__}, "
        f"{dtype}, {repeats} repeats"
    )
    path = (
        args.csv or Path(__file__).resolve().parent / "results" / f"kernels_{args.device}_table.csv"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for r in every_row(
            [s for s in (*SHAPES, TINY) if s.model in models],
            tokens_list,
            args.device,
            dtype,
            args.providers,
            repeats,
        ):
            rows.append(r)
            writer.writerow(r)
            file.flush()
            show(r)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
