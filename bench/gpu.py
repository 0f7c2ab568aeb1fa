"""Run the GPU campaign: every measurement that needs a GPU, in a single command of about nine
minutes.

    python bench/gpu.py --output results_gpu              # every part
    python bench/gpu.py --output results_gpu --part kernels decode
    python bench/gpu.py --list
    python bench/gpu.py --output /tmp/dry --dry           # without a GPU: each part at tiny sizes

Each part runs in a separate process with a time limit and writes a row as soon as it has a figure.
A part that fails, runs out of memory or time, or cannot run is recorded as a row, and the other
parts continue; so are peers that are not installed. With --dry, each part's code runs as far as it
can without a GPU. No network is needed.

docs/gpu.md explains the three files of the output folder. gpu.csv grows while a part runs, so a
killed run keeps its rows. With --part, the other parts keep what an earlier run wrote to the folder.
"""

from __future__ import annotations

import argparse
import csv
import functools
import importlib
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# Replace this folder on sys.path by the repository: bench/kernels.py would shadow the package
# `kernels`.
sys.path[0] = str(HERE.parent)
from bench.harness import make_parser, read_table  # noqa: E402

COLUMNS = ["part", "case", "provider", "metric", "value", "unit", "floor", "note"]
LIMIT = 540  # seconds for all parts together
WATCH_SECONDS = 5.0  # between two looks at the rows of a running part
ARCHIVE_BYTES = 15 << 20  # of the files in an archive: machines return no file above 16 MiB

# Name: (guaranteed seconds, description), the most important parts first. The seconds add up to at
# most LIMIT. Importing torch and starting CUDA takes up to ten seconds of each part. Time that a
# part does not use passes to the next parts. Each part takes at most twice its seconds, so that a
# part that hangs does not use up all of the time.
PARTS = {
    "floors": (25, "the limits of this GPU: a large product, a large copy, an empty launch"),
    "compile": (35, "the kernels' variants, compiled in parallel for the parts that run them"),
    "tests": (89, "tests marked gpu, the kernels' first"),
    "agreement": (18, "sampler against learner in bf16 and in float32"),
    "step": (68, "a GRPO step, LoRA and full: samples per second, time by part, profile"),
    "decode": (62, "decode tokens per second, full weights and LoRA"),
    "host": (30, "the share of a decode step in which the GPU waits for the host"),
    "kernels": (32, "linear_logprob, token_logprob and policy_loss beside their floors"),
    "learner": (30, "learner tokens per second; peak memory against --plan"),
    "peers": (57, "kernels and decode by torch, Liger, cut-cross-entropy, transformers, vLLM"),
    "branches": (30, "what the device's checks chose; the kernels of both branches, TFLOP/s"),
    "pages": (18, "attention over pages: ours and torch's varlen attention (pytorch#194167)"),
    "group": (14, "a group of 16 on a prompt of 4,096 tokens"),
    "draw": (12, "a token from hidden states, without logits, beside today's path"),
    "sharded": (20, "ZeRO-3 and offload on one GPU"),
}
MODULES = ("gpu_kernels", "gpu_compile", "gpu_decode", "gpu_models", "gpu_runs")
CANNOT = (NotImplementedError, ModuleNotFoundError)  # missing in the device or the installation


class Table:
    """Write the rows of a part to its CSV file, each as soon as it is known."""

    def __init__(self, part: str, path: Path) -> None:
        self.part, self.path = part, path
        if not path.exists():
            with path.open("w", newline="") as file:
                csv.writer(file).writerow(COLUMNS)

    def row(
        self, case: str, provider: str, metric: str, value: Any, unit: str = "", floor: Any = "",
        note: str = "",
    ) -> None:  # fmt: skip
        if floor != floor:  # not a number
            floor, note = "", f"{note}, floor not measured".removeprefix(", ")
        cells = [self.part, case, provider, metric, value, unit, floor, note]
        cells = [f"{cell:.6g}" if isinstance(cell, float) else cell for cell in cells]
        with self.path.open("a", newline="") as file:
            csv.writer(file).writerow(cells)
        print("  " + " ".join(str(cell) for cell in cells[1:] if cell != ""), flush=True)

    def attempt(self, case: str, provider: str, run: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of `run(*arguments)`. If it fails in any way, write a row and return
        None, so that the remaining measurements still run.
        """
        try:
            return run(*arguments)
        except Exception as failure:  # noqa: BLE001
            self.failure(case, provider, failure, isinstance(failure, CANNOT))
            print("".join(traceback.format_exception(failure)[-4:]), file=sys.stderr, flush=True)
            return None

    def failure(self, case: str, provider: str, failure: Exception, absent: bool) -> None:
        """Write the row of a failure. `absent`: the device or the installation lacks something."""
        words = (str(failure).splitlines() or [""])[0][:200]
        metric = "left out" if absent else "failed"
        self.row(case, provider, metric, type(failure).__name__, note=words)


def execute_part(part: str, output: Path, dry: bool) -> None:
    """Run a part in this process."""
    if dry and part in ("branches", "pages", "compile"):
        # Set before Triton is imported: its kernels then run without a GPU.
        os.environ["TRITON_INTERPRET"] = "1"
    function_of(part)(Table(part, output / f"{part}.csv"), dry)


def function_of(part: str) -> Callable[[Table, bool], None]:
    modules = (importlib.import_module(f"bench.{module}") for module in MODULES)
    return next(
        vars(module)[f"part_{part}"] for module in modules if f"part_{part}" in vars(module)
    )


def seconds_for(part: str, after: list[str], remaining: float) -> float:
    """Return the time limit of `part` in seconds: the remaining seconds minus those guaranteed to
    the later parts, at most twice the part's seconds.
    """
    mine, others = PARTS[part][0], sum(PARTS[name][0] for name in after)
    return min(max(remaining - others, min(remaining, mine)), 2.0 * mine)


def command_of(part: str, folder: Path, dry: bool) -> list[str]:
    """Return the command that runs a part in a process of its own."""
    program = [sys.executable, str(Path(__file__).resolve())]
    return [*program, "--child", part, "--output", str(folder), *(["--dry"] if dry else [])]


def run_part(
    part: str, folder: Path, dry: bool, seconds: float, watch: Callable[[], object] = lambda: None
) -> None:
    """Run a part in a process of its own, for at most `seconds`. `watch` is called every few
    seconds meanwhile.
    """
    path = folder / f"{part}.csv"
    path.unlink(missing_ok=True)
    table = Table(part, path)
    began = time.perf_counter()
    env = os.environ | {
        "WHETSTONE_GPU_FLOORS": str((folder / "floors.json").resolve()),
        "WHETSTONE_GPU_END": str(time.time() + seconds),
        "HF_HUB_OFFLINE": "1",  # third-party code would wait for a network
    }
    with (folder / f"{part}.log").open("w") as log:
        # A process group, not a session: one would outlive a campaign that is killed.
        process = subprocess.Popen(
            command_of(part, folder, dry), process_group=0, cwd=HERE.parent, env=env,
            stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        mode = ""
        while not mode:
            remaining = seconds - (time.perf_counter() - began)
            try:
                code = process.wait(timeout=min(max(remaining, 0.0), WATCH_SECONDS))
                mode = "done" if code == 0 else f"exit code {code}"
            except subprocess.TimeoutExpired:
                watch()
                if remaining <= 0:
                    # Kill the part's children too: a hung process would hold GPU memory.
                    os.killpg(process.pid, 9)
                    process.wait()
                    mode = f"stopped after {seconds:.0f} s"
    # A killed process may have written half of a row or of a character.
    path.write_bytes(path.read_bytes()[: path.read_bytes().rfind(b"\n") + 1])
    text = (folder / f"{part}.log").read_text(errors="replace")
    last = ([line for line in text.splitlines() if line.strip()] or [""])[-1][:200]
    table.row("whole part", "", "status", mode, note="" if mode == "done" else last)
    table.row("whole part", "", "seconds", time.perf_counter() - began, "s")


def merge_rows(output: Path, folder: Path) -> list[dict[str, str]]:
    """Merge the rows of all parts into gpu.csv and return them. A row of which only a part has been
    written is left out.
    """
    tables = (read_table(folder / f"{part}.csv") for part in PARTS)
    rows = [row for table in tables for row in table if None not in row.values()]
    with (output / "gpu.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return rows


def collect(output: Path, folder: Path) -> list[dict[str, str]]:
    """Merge the rows of all parts into gpu.csv and return them. Put the parts' files into
    parts.tar, logs and tables before traces, the smallest first, up to ARCHIVE_BYTES. A file that
    does not fit is named in left_out.txt there.
    """
    left_out, remaining = folder / "left_out.txt", ARCHIVE_BYTES
    left_out.unlink(missing_ok=True)

    def order(path: Path) -> tuple[bool, int, str]:
        return path.suffix == ".gz", path.stat().st_size, path.name

    with archive_at(output / "parts.tar") as archive:
        for path in sorted(folder.iterdir(), key=order):
            size = -(-path.stat().st_size // 512) * 512 + 1024  # in the archive
            if size <= remaining:
                archive.add(path, f"parts/{path.name}")
                remaining -= size
            else:
                with left_out.open("a") as file:
                    file.write(f"{path.name}: {size} bytes\n")
        if left_out.exists():
            archive.add(left_out, f"parts/{left_out.name}")
    return merge_rows(output, folder)


@contextmanager
def archive_at(path: Path) -> Iterator[tarfile.TarFile]:
    """Open an archive for writing. It replaces an earlier one at its end: a killed run leaves the
    earlier archive.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    with tarfile.open(temporary, "w") as archive:
        yield archive
    temporary.replace(path)


def unpack_parts(output: Path, working: Path) -> Path:
    """Return the folder in `working` for the parts' files, with those of earlier runs: what the
    archive in `output` holds.
    """
    if (output / "parts.tar").exists():
        with tarfile.open(output / "parts.tar") as archive:
            # `filter=` is missing from the first releases of Python 3.11
            archive.extraction_filter = getattr(tarfile, "data_filter", None)
            archive.extractall(working)
    (working / "parts").mkdir(exist_ok=True)
    return working / "parts"


def main() -> None:
    parser, parts = make_parser(__doc__), list(PARTS)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "gpu", help="folder")
    parser.add_argument("--part", nargs="+", choices=parts, default=parts, metavar="PART")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for all parts together")
    parser.add_argument("--dry", action="store_true", help="on a CPU at tiny sizes: no figures")
    parser.add_argument("--list", action="store_true", help="the parts and their seconds")
    parser.add_argument("--child", choices=parts, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.list:
        for part, (seconds, says) in PARTS.items():
            print(f"{part:10} {seconds:4} s  {says}")
        return
    args.output.mkdir(parents=True, exist_ok=True)
    if args.child:
        return execute_part(args.child, args.output, args.dry)
    import torch

    from bench.gpu_verdict import format_verdict

    if not args.dry and not torch.cuda.is_available():
        sys.exit("bench/gpu.py: no CUDA device is visible; --dry runs every part on a CPU, tiny")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU (dry run)"
    end = time.perf_counter() + args.limit
    # Not in the output folder: a killed run would leave more files there than a machine returns.
    with tempfile.TemporaryDirectory() as working:
        folder = unpack_parts(args.output, Path(working))
        needed = {*args.part, *([] if (folder / "floors.json").exists() else ["floors"])}
        planned = [part for part in PARTS if part in needed]
        for i, part in enumerate(planned):
            remaining = end - time.perf_counter()
            print(f"{part}: {PARTS[part][1]}", flush=True)
            if remaining < 5 and not args.dry:
                (folder / f"{part}.csv").unlink(missing_ok=True)
                note = f"{args.limit:.0f} s were over"
                table = Table(part, folder / f"{part}.csv")
                table.row("whole part", "", "status", "not begun", note=note)
            else:
                limit = 600.0 if args.dry else seconds_for(part, planned[i + 1 :], remaining)
                watch = functools.partial(merge_rows, args.output, folder)
                run_part(part, folder, args.dry, limit, watch)
            rows = collect(args.output, folder)
            (args.output / "verdict.md").write_text(format_verdict(rows, device))
    print((args.output / "verdict.md").read_text())
    print(f"written to {args.output}: verdict.md, gpu.csv, parts.tar")


if __name__ == "__main__":
    main()
