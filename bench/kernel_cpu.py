"""Measure time and memory of `linear_logprob` against plain torch on a CPU, each measurement in a
separate process.

    python bench/kernel_cpu.py                # about 4 minutes on two cores, 10 GB
    python bench/kernel_cpu.py --tokens 512   # quicker; the ratios are about the same

The default is 4096 tokens of Qwen2.5-0.5B's head. Columns: wall and CPU seconds of forward and
backward (on a shared machine, compare the CPU seconds), peak memory above weights and gradients,
the largest error of logp against float64 for a few rows. Variants take turns, `--repeats` times;
the minimum of each figure is reported.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
VARIANTS = ("plain", "fused", "plain_frozen", "fused_frozen", "plain_entropy", "fused_entropy")


def status_bytes(field: str) -> int:
    """Return a figure of /proc/self/status in bytes: VmRSS, the memory held now, or VmHWM, the peak
    since the last reset.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def one(variant: str, tokens: int, hidden: int, vocab: int, threads: int) -> dict[str, float]:
    """Run forward and backward of a variant once; called in a fresh process."""
    import torch

    sys.path.insert(0, str(HERE.parent))
    from kernels import linear_logprob

    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    frozen, entropy = variant.endswith("frozen"), variant.endswith("entropy")
    x = torch.randn(tokens, hidden, generator=generator).requires_grad_()
    w = (torch.randn(vocab, hidden, generator=generator) * hidden**-0.5).requires_grad_(not frozen)
    y = torch.randint(0, vocab, (tokens,), generator=generator)
    g = torch.randn(tokens, generator=generator)

    def run(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if variant.startswith("fused"):
            logp, ent, _ = linear_logprob(x, w, y, entropy=entropy, saved_bytes=0)
            return logp, ent
        all_logp = torch.nn.functional.linear(x, w).log_softmax(-1)
        ent = -(all_logp.exp() * all_logp).sum(-1) if entropy else None
        return all_logp.gather(-1, y[:, None]).squeeze(-1), ent

    run(x[:8], y[:8])[0].sum().backward()  # warm-up: loads libraries and touches the gradients
    x.grad = w.grad = None
    gradients = 4 * (x.numel() + (0 if frozen else w.numel()))
    reset_peak()
    before, wall, cpu = status_bytes("VmRSS"), time.perf_counter(), time.process_time()
    logp, ent = run(x, y)
    if ent is None:
        logp.backward(g)
    else:
        torch.autograd.backward((logp, ent), (g, g * 0.01))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = status_bytes("VmHWM")
    with torch.no_grad():
        rows = (x[:8].double() @ w.double().t()).log_softmax(-1).gather(-1, y[:8, None]).squeeze(-1)
    error = (logp[:8] - rows).abs().max().item()
    return {
        "wall_s": wall,
        "cpu_s": cpu,
        "extra_mb": (peak - before - gradients) / 1e6,
        "error": error,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--csv", type=Path, default=HERE / "results" / "kernels_cpu.csv")
    parser.add_argument("--one", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args.one, args.tokens, args.hidden, args.vocab, args.threads)))
        return
    runs: dict[str, list[dict[str, float]]] = {variant: [] for variant in args.variants}
    for repeat in range(args.repeats):
        for variant in args.variants if repeat % 2 == 0 else reversed(args.variants):
            sizes = [
                f"--{name}={getattr(args, name)}"
                for name in ("tokens", "hidden", "vocab", "threads")
            ]
            command = [sys.executable, __file__, "--one", variant, *sizes]
            runs[variant].append(
                json.loads(
                    subprocess.run(command, check=True, capture_output=True, text=True).stdout
                )
            )
    args.csv.parent.mkdir(parents=True, exist_ok=True)
    with args.csv.open("w", newline="") as file:
        writer = csv.writer(file)
        sizes = [args.tokens, args.hidden, args.vocab, args.threads]
        writer.writerow(
            "variant tokens hidden vocab threads wall_s cpu_s extra_mb error cpu_ratio".split()
        )
        for variant, results in runs.items():
            mid = {key: min(result[key] for result in results) for key in results[0]}
            twin = runs.get(variant.replace("fused", "plain"))
            ratio = mid["cpu_s"] / min(result["cpu_s"] for result in twin) if twin else float("nan")
            wall, cpu, extra = (
                f"{mid['wall_s']:.2f}",
                f"{mid['cpu_s']:.2f}",
                f"{mid['extra_mb']:.0f}",
            )
            error = f"{mid['error']:.1e}"
            writer.writerow([variant, *sizes, wall, cpu, extra, error, f"{ratio:.3f}"])
            print(
                f"{variant:14s} wall {wall:>7} s  cpu {cpu:>7} s  extra {extra:>6} MB  error "
                f"{error}  cpu ratio {ratio:.3f}"
            )


if __name__ == "__main__":
    main()
