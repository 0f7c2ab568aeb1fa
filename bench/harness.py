"""Share what the scripts of this folder have in common: the description of the machine, tables, and
runs of train.py.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import os
import platform
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
REPO = HERE.parent
RESULTS = HERE / "results"
DATA = Path(os.environ.get("WHETSTONE_DATA", REPO.parent / "shared" / "data"))
SEEDS = (0, 1, 2)
HELD_OUT, GREEDY = "test/env/all/correct", "test/greedy/all/correct"
REWARD = "test/env/all/reward/total"
Row = Mapping[str, Any]


def make_parser(
    text: str | None, seeds: bool = False, output: Path | None = None
) -> argparse.ArgumentParser:
    """Return a parser whose help begins with a script's docstring, as it is laid out. `seeds`: with
    --seeds; `output`: with --output, the table, which has this default.
    """
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=text, formatter_class=layout)
    if seeds:
        parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    if output is not None:
        parser.add_argument("--output", type=Path, default=output, help="default: %(default)s")
    return parser


def describe_machine() -> str:
    """Return a description of the machine: the CPU's model name, the cores this process may use,
    memory, versions of Python and torch.
    """
    cpu, memory = platform.processor() or platform.machine(), ""
    if Path("/proc/cpuinfo").is_file():
        names = [
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
        memory = f", {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    return (
        f"{cpu}, {cores} cores{memory}, Python {platform.python_version()}, torch "
        f"{version('torch')}"
    )


def format_command(words: Sequence[str]) -> str:
    """Return a command line, with paths inside the repository relative to it."""
    return shlex.join(
        str(Path(w).relative_to(REPO)) if w.startswith(f"{REPO}/") else w for w in words
    )


def command_line() -> str:
    """Return the command line of this script."""
    return format_command([sys.executable, *sys.argv])


def read_table(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a table; none if the file does not exist."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file that holds an object of JSON on each line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_table(path: Path, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def replace_rows(
    path: Path, rows: Sequence[Row], keys: Sequence[str], order: Callable[[Row], Any]
) -> list[Row]:
    """Write `rows` into a table in place of the rows with the same values of `keys`, sort the table
    by `order`, and return its rows.
    """

    def key(row: Row) -> tuple[str, ...]:
        return tuple(str(row[name]) for name in keys)

    replaced = {key(row) for row in rows}
    merged = sorted([*rows, *(r for r in read_table(path) if key(r) not in replaced)], key=order)
    write_table(path, [{column: row[column] for column in rows[0]} for row in merged])
    return merged


def show(row: Row) -> None:
    """Print a row without its long cells."""
    cells = (f"{key} {row[key]}" for key in row if key not in ("machine", "command"))
    print(", ".join(cells), flush=True)


@dataclass(frozen=True)
class Run:
    """Hold the rows of metrics.jsonl of a run, and the wall-clock and CPU seconds of the whole
    command.
    """

    rows: list[dict[str, Any]]
    seconds: float
    cpu_seconds: float

    def values(self, metric: str, stage: str | None = None) -> list[float]:
        """Return a metric's values in order. Raises KeyError, with the held-out metrics of the
        stage, if it has none.
        """
        rows = [row for row in self.rows if stage is None or row["stage"] == stage]
        values = [float(row[metric]) for row in rows if metric in row]
        if not values:
            known = sorted({name for row in rows for name in row if name.startswith("test/")})
            raise KeyError(f"stage {stage} measured no {metric}; it has {', '.join(known)}")
        return values


def timed_run(command: Sequence[str]) -> tuple[float, float]:
    """Run a command in the repository and return its wall-clock and CPU seconds. Raises RuntimeError
    with the end of its output if it fails.
    """
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    if done.returncode:
        end = (done.stderr or done.stdout)[-2000:]
        raise RuntimeError(f"{shlex.join(command)} ended with {done.returncode}:\n{end}")
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def train(words: Sequence[str], folder: Path, launcher: Sequence[str] = (sys.executable,)) -> Run:
    """Run train.py into `folder`, overwriting a run there. Raises RuntimeError with the end of its
    output if it fails.
    """
    command = [*launcher, "train.py", *words, "--output-dir", str(folder), "--overwrite"]
    seconds, cpu = timed_run([*command, "--quiet"])
    return Run(read_jsonl(folder / "metrics.jsonl"), seconds, cpu)


def select_stages(recipe: str, first: int, last: int | None, folder: Path) -> Path:
    """Write a recipe with only stages[first:last] of a recipe and its shared settings; return its
    path.
    """
    content = yaml.safe_load((REPO / "recipes" / f"{recipe}.yaml").read_text())
    return write_recipe(folder, {**content, "stages": content["stages"][first:last]})


def write_recipe(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / f"recipe-{len(list(folder.glob('recipe-*')))}.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def taught_model(seed: int, work: Path) -> Path:
    """Return the weights of the first stage of recipes/addition.yaml, which answers sums, but
    badly. The model is trained once per seed.
    """
    folder = work / f"taught-{seed}"
    model = folder / "checkpoints" / "sft-final" / "model"
    if not model.is_dir():
        train([str(select_stages("addition", 0, 1, work)), "--seed", str(seed)], folder)
    return model


def evaluate_sums(model: Path, samples: int = 1) -> float:
    """Return the sampled accuracy of weights on 512 held-out sums."""
    # Evaluate a copy outside the run's folder; otherwise evaluate.py uses the run's environment.
    with tempfile.TemporaryDirectory() as folder:
        weights, result = Path(folder, "model"), Path(folder, "result.json")
        shutil.copytree(model, weights)
        words = (
            f"evaluate.py {weights} --dataset addition --reward exact_match --limit 512 --samples "
            f"{samples} --renderer plain --temperature 1 --max-tokens 4 --output {result}"
        )
        timed_run([sys.executable, *words.split()])
        return float(json.loads(result.read_text())["correct"])


def silence_libraries(threads: int) -> None:
    """Set the number of torch threads, and silence transformers and accelerate."""
    import torch
    from transformers.utils import logging as transformers_logging

    torch.set_num_threads(threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)


class JsonProcess:
    """Run a peer in a process of its own that answers a line of JSON with a line of JSON."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], **options: Any) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, text=True, env=env, **pipes, **options)

    def read(self) -> Any:
        """Return the next answer. Raises RuntimeError if the process ended instead (its message is
        on standard error).
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            command = shlex.join(map(str, self.process.args))  # type: ignore[arg-type]
            raise RuntimeError(f"{command} ended with exit code {self.process.wait()}")
        return json.loads(line)

    def ask(self, **request: Any) -> Any:
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return self.read()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)
