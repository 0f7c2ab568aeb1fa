"""Run the GPU campaign: every measurement that needs a GPU, in a single command of under nine
minutes.

    python bench/gpu.py --output results_gpu              # every part
    python bench/gpu.py --output results_gpu --part kernels decode
    python bench/gpu.py --list
    python bench/gpu.py --output /tmp/dry --dry           # without a GPU: each part at tiny sizes

Each part runs in a separate process with a time limit and writes a row as soon as it has a figure.
A part that fails, runs out of memory or time, or cannot run is recorded as a row, and the other
parts continue. With --dry, each part's code runs as far as it can without a GPU. No network is
needed. Peers that are not installed are recorded as rows.

The output folder holds verdict.md (what is right, what is slow), gpu.csv, gpu.png, and parts.tar.gz
with the logs, traces and tables of the parts. With --part, the other parts keep what an earlier run
wrote to the folder. Columns of gpu.csv: part, case, provider, metric, value, unit, floor (the best
possible value on this GPU, where known), note.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import os
import shutil
import subprocess
import sys
import tarfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# Replace this folder on sys.path by the repository: bench/kernels.py would shadow the package
# `kernels`.
sys.path[0] = str(HERE.parent)

COLUMNS = ["part", "case", "provider", "metric", "value", "unit", "floor", "note"]
LIMIT = 530  # seconds for all parts together

# Name: (guaranteed seconds, description), the most important parts first. The seconds add up to at
# most LIMIT. Time that a part does not use passes to the next parts. Each part takes at most twice
# its seconds, so that a part that hangs does not use up all of the time.
PARTS = {
    "floors": (6, "the limits of this GPU: a large product, a large copy, an empty launch"),
    "tests": (95, "tests marked gpu, the kernels' first"),
    "agreement": (18, "sampler against learner in bf16 and in float32"),
    "step": (60, "a GRPO step, LoRA and full: samples per second, time by part, profile"),
    "decode": (
        112,
        "decode tokens per second over pages and plain, full weights and LoRA, beside generate, "
        "continuous batching, vLLM; what the trial says",
    ),
    "host": (30, "the share of a decode step in which the GPU waits for the host"),
    "kernels": (65, "linear_logprob beside torch, torch.compile, Liger, cut-cross-entropy"),
    "learner": (30, "learner tokens per second; peak memory against --plan"),
    "branches": (
        40,
        "what the device's checks chose; score kernels of both branches and products by "
        "themselves, TFLOP/s",
    ),
    "pages": (
        18,
        "attention over pages: ours, torch's varlen attention with one split and with its own "
        "choice (pytorch#194167)",
    ),
    "group": (14, "a group of 16 on a prompt of 4,096 tokens"),
    "draw": (12, "a token from hidden states, without logits, beside today's path"),
    "sharded": (20, "ZeRO-3 and offload on one GPU"),
    "trace": (10, "profiles of a call of each engine and of a learner step"),
}
MODULES = ("gpu_kernels", "gpu_pages", "gpu_branches", "gpu_decode", "gpu_models", "gpu_runs")
CANNOT = (NotImplementedError, ModuleNotFoundError)  # missing in the device or the installation


class Table:
    """Write the rows of a part to its CSV file, each as soon as it is known."""

    def __init__(self, part: str, path: Path) -> None:
        self.part, self.path = part, path
        if not path.exists():
            with path.open("w", newline="") as file:
                csv.writer(file).writerow(COLUMNS)

    def row(
        self,
        case: str,
        provider: str,
        metric: str,
        value: Any,
        unit: str = "",
        floor: Any = "",
        note: str = "",
    ) -> None:
        shown = f"{value:.6g}" if isinstance(value, float) else value
        cells = [
            self.part,
            case,
            provider,
            metric,
            shown,
            unit,
            f"{floor:.6g}" if isinstance(floor, float) else floor,
            note,
        ]
        with self.path.open("a", newline="") as file:
            csv.writer(file).writerow(cells)
        print("  " + " ".join(str(cell) for cell in cells[1:] if cell != ""), flush=True)

    def attempt(self, case: str, provider: str, run: Callable[[], Any]) -> Any:
        """Return the result of `run`. If it fails in any way, write a row and return None, so that
        the remaining measurements still run.
        """
        try:
            return run()
        except Exception as failure:  # noqa: BLE001
            words = (str(failure).splitlines() or [""])[0][:200]
            self.row(
                case,
                provider,
                "left out" if isinstance(failure, CANNOT) else "failed",
                type(failure).__name__,
                note=words,
            )
            print("".join(traceback.format_exception(failure)[-4:]), file=sys.stderr, flush=True)
            return None


def child(part: str, output: Path, dry: bool) -> None:
    """Run a part in this process."""
    if dry and part in ("branches", "pages"):
        # Set before Triton is imported: its kernels then run without a GPU.
        os.environ["TRITON_INTERPRET"] = "1"
    function_of(part)(Table(part, output / f"{part}.csv"), dry)


def function_of(part: str) -> Callable[[Table, bool], None]:
    modules = (importlib.import_module(f"bench.{name}") for name in MODULES)
    return next(
        getattr(module, f"part_{part}") for module in modules if hasattr(module, f"part_{part}")
    )


def seconds_for(part: str, after: list[str], left: float) -> float:
    """Return the time limit of `part` in seconds: the remaining seconds minus those guaranteed to
    the later parts, at most twice the part's seconds.
    """
    return min(
        max(left - sum(PARTS[name][0] for name in after), min(left, PARTS[part][0])),
        2.0 * PARTS[part][0],
    )


def run_part(part: str, output: Path, dry: bool, seconds: float) -> None:
    path = output / f"{part}.csv"
    path.unlink(missing_ok=True)
    table = Table(part, path)
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--child",
        part,
        "--output",
        str(output),
        *(["--dry"] if dry else []),
    ]
    began = time.perf_counter()
    with (output / f"{part}.log").open("w") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=HERE.parent,
            env=os.environ | {"WHETSTONE_GPU_FLOORS": str((output / "floors.json").resolve())},
        )
        try:
            code = process.wait(timeout=seconds)
            how = "done" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            # Kill the part's children too: a hung process would hold GPU memory.
            os.killpg(process.pid, 9)
            process.wait()
            how = f"stopped after {seconds:.0f} s"
    last = (
        [line for line in (output / f"{part}.log").read_text().splitlines() if line.strip()] or [""]
    )[-1][:200]
    table.row("whole part", "", "status", how, note="" if how == "done" else last)
    table.row("whole part", "", "seconds", time.perf_counter() - began, "s")


def collect(output: Path, parts_folder: Path) -> list[dict[str, str]]:
    """Merge the rows of all parts into gpu.csv and return them. Put the parts' files into
    parts.tar.gz.
    """
    rows: list[dict[str, str]] = []
    for part in PARTS:
        if (parts_folder / f"{part}.csv").exists():
            with (parts_folder / f"{part}.csv").open(newline="") as file:
                rows += list(csv.DictReader(file))
    with (output / "gpu.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    temporary = output / "parts.tar.gz.tmp"  # a killed run leaves the earlier archive
    with tarfile.open(temporary, "w:gz") as archive:
        archive.add(parts_folder, "parts")
    temporary.replace(output / "parts.tar.gz")
    return rows


def unpack_parts(output: Path) -> Path:
    """Return the folder of the parts' files, with those of earlier runs: what parts.tar.gz holds.
    A folder that a killed run left behind is removed.
    """
    parts_folder = output / "parts"
    if parts_folder.exists():
        shutil.rmtree(parts_folder)
    if (output / "parts.tar.gz").exists():
        with tarfile.open(output / "parts.tar.gz") as archive:
            archive.extractall(output, filter="data")
    parts_folder.mkdir(exist_ok=True)
    return parts_folder


def plot(rows: list[dict[str, str]], path: Path) -> None:
    """Plot time over floor of each provider's forward and backward next to decode tokens per second
    by number of rows.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 5))
    ratios = [
        r
        for r in rows
        if r["part"] == "kernels" and r["metric"] == "both" and float(r["floor"] or 0) > 0
    ]
    names = [f"{r['provider']}\n{r['case']}" for r in ratios]
    left.barh(names, [float(r["value"]) / float(r["floor"]) for r in ratios])
    left.axvline(1.0, color="black", linewidth=0.8)
    left.set_xlabel("forward and backward: time / floor of its own algorithm")
    left.tick_params(axis="y", labelsize=6)
    speeds = [r for r in rows if r["part"] == "decode" and r["metric"] == "tokens_per_s"]
    for key in dict.fromkeys((r["provider"], r["case"].split(",")[0]) for r in speeds):
        mine = [r for r in speeds if (r["provider"], r["case"].split(",")[0]) == key]
        points = sorted((int(r["case"].split(",")[1].split()[0]), float(r["value"])) for r in mine)
        right.plot(*zip(*points, strict=True), marker="o", label=" ".join(key))
    right.set(xscale="log", yscale="log", xlabel="rows", ylabel="decode tokens per second")
    if speeds:
        right.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=HERE / "results" / "gpu",
        help="folder for tables, logs, the plot, the trace",
    )
    parser.add_argument(
        "--part",
        nargs="+",
        choices=list(PARTS),
        default=list(PARTS),
        metavar="PART",
        help="some parts alone (see --list)",
    )
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for all parts together")
    parser.add_argument(
        "--dry",
        action="store_true",
        help="on a CPU at tiny sizes: shows that everything runs, measures nothing",
    )
    parser.add_argument("--list", action="store_true", help="the parts and their seconds")
    parser.add_argument("--child", choices=list(PARTS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.list:
        for part, (seconds, says) in PARTS.items():
            print(f"{part:10} {seconds:4} s  {says}")
        return
    args.output.mkdir(parents=True, exist_ok=True)
    if args.child:
        child(args.child, args.output, args.dry)
        return
    import torch

    from bench.gpu_verdict import format_verdict

    if not args.dry and not torch.cuda.is_available():
        sys.exit(
            "bench/gpu.py: no CUDA device is visible; --dry runs every part's code on a CPU, at "
            "tiny sizes"
        )
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU (dry run)"
    end = time.perf_counter() + args.limit
    parts_folder = unpack_parts(args.output)
    for i, part in enumerate(args.part):
        left = end - time.perf_counter()
        print(f"{part}: {PARTS[part][1]}", flush=True)
        if left < 5 and not args.dry:
            (parts_folder / f"{part}.csv").unlink(missing_ok=True)
            Table(part, parts_folder / f"{part}.csv").row(
                "whole part", "", "status", "not begun", note=f"{args.limit:.0f} s were over"
            )
        else:
            run_part(
                part,
                parts_folder,
                args.dry,
                600.0 if args.dry else seconds_for(part, args.part[i + 1 :], left),
            )
        rows = collect(args.output, parts_folder)
        (args.output / "verdict.md").write_text(format_verdict(rows, device))
    plot(rows, args.output / "gpu.png")
    shutil.rmtree(parts_folder)  # parts.tar.gz holds it
    print((args.output / "verdict.md").read_text())
    print(f"written to {args.output}: verdict.md, gpu.csv, gpu.png, parts.tar.gz")


if __name__ == "__main__":
    main()
