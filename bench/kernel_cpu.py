"""Measure time and memory of `linear_logprob` against plain torch on a CPU, each measurement in a
separate process.

    python bench/kernel_cpu.py                # about 4 minutes on two cores, 10 GB
    python bench/kernel_cpu.py --tokens 512   # quicker; the ratios are about the same

The default is 4096 tokens of Qwen2.5-0.5B's head. Columns: wall and CPU seconds of forward and
backward (on a shared machine, compare the CPU seconds), peak memory above weights and gradients,
the largest error of logp against float64 for a few rows, our CPU seconds divided by torch's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path[0] = str(Path(__file__).resolve().parent.parent)
from bench.harness import RESULTS, make_parser, show, write_table  # noqa: E402
from kernels import linear_logprob  # noqa: E402

VARIANTS = ("plain", "fused", "plain_frozen", "fused_frozen", "plain_entropy", "fused_entropy")
SIZES = {"tokens": 4096, "hidden": 896, "vocab": 151_936, "threads": 2}


def status_bytes(field: str) -> int:
    """Return a figure of /proc/self/status in bytes: VmRSS, the memory held now, or VmHWM, the peak
    since the last reset.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure(variant: str, tokens: int, hidden: int, vocab: int) -> dict[str, float]:
    """Run forward and backward of a variant once; called in a fresh process."""
    g = torch.Generator().manual_seed(0)
    frozen, entropy = variant.endswith("frozen"), variant.endswith("entropy")
    x = torch.randn(tokens, hidden, generator=g).requires_grad_()
    w = (torch.randn(vocab, hidden, generator=g) * hidden**-0.5).requires_grad_(not frozen)
    y = torch.randint(0, vocab, (tokens,), generator=g)
    upstream = torch.randn(tokens, generator=g)

    def run(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if variant.startswith("fused"):
            return linear_logprob(x, w, y, entropy=entropy, saved_bytes=0)[:2]
        logp = torch.nn.functional.linear(x, w).log_softmax(-1)
        ent = -(logp.exp() * logp).sum(-1) if entropy else None
        return logp.gather(-1, y[:, None]).squeeze(-1), ent

    run(x[:8], y[:8])[0].sum().backward()  # warm-up: loads libraries and touches the gradients
    x.grad = w.grad = None
    gradients = 4 * (x.numel() + (0 if frozen else w.numel()))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, wall, cpu = status_bytes("VmRSS"), time.perf_counter(), time.process_time()
    logp, ent = run(x, y)
    if ent is None:
        logp.backward(upstream)
    else:
        torch.autograd.backward((logp, ent), (upstream, upstream * 0.01))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    extra = (status_bytes("VmHWM") - before - gradients) / 1e6
    with torch.no_grad():
        exact = (x[:8].double() @ w.double().t()).log_softmax(-1).gather(-1, y[:8, None])[:, 0]
    error = (logp[:8] - exact).abs().max().item()
    return {"wall_s": wall, "cpu_s": cpu, "extra_mb": extra, "error": error}


def main() -> None:
    parser = make_parser(__doc__)
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--csv", type=Path, default=RESULTS / "kernels_cpu.csv")
    parser.add_argument("--one", choices=VARIANTS, help="measure this variant in this process")
    args = parser.parse_args()
    sizes = {name: getattr(args, name) for name in SIZES}
    if args.one:
        torch.set_num_threads(sizes.pop("threads"))
        print(json.dumps(measure(args.one, **sizes)))
        return
    result: dict[str, dict[str, float]] = {}
    rows = []
    for variant in args.variants:
        flags = [f"--{name}={size}" for name, size in sizes.items()]
        command = [sys.executable, __file__, "--one", variant, *flags]
        result[variant] = json.loads(subprocess.check_output(command, text=True))
        twin = result.get(variant.replace("fused", "plain"))
        ratio = result[variant]["cpu_s"] / twin["cpu_s"] if twin else float("nan")
        digits = {"wall_s": ".2f", "cpu_s": ".2f", "extra_mb": ".0f", "error": ".1e"}
        figures = {name: f"{result[variant][name]:{form}}" for name, form in digits.items()}
        rows.append({"variant": variant, **sizes, **figures, "cpu_ratio": f"{ratio:.3f}"})
        show(rows[-1])
        write_table(args.csv, rows)


if __name__ == "__main__":
    main()
