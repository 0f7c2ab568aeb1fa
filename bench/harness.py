"""Share what the scripts of this folder have in common: the description of the machine, tables, and
runs of train.py.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """Return a parser whose help is a script's docstring, with --seeds and --output as requested."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=text, formatter_class=layout)
    if seeds:
        parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    if output is not None:
        parser.add_argument("--output", type=Path, default=output, help="default: %(default)s")
    return parser


def describe_machine() -> str:
    """Return the CPU's model name, the usable cores, memory, and versions of Python and torch."""
    cpu, memory = platform.processor() or platform.machine(), ""
    if Path("/proc/cpuinfo").is_file():
        name = re.search("^model name.*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
        cpu = name[1].strip() if name else cpu
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
    with path.open(newline="", errors="replace") as file:  # may end within a character
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


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Show each row as soon as it is measured, and write it and those before it into a table."""
    table = list[Row]()
    for row in rows:
        table.append(row)
        show(row)
        write_table(path, table)


@dataclass(frozen=True)
class Run:
    """Hold the rows of metrics.jsonl of a run, and the wall-clock and CPU seconds of the whole
    command.
    """

    rows: list[dict[str, Any]]
    seconds: float
    cpu_seconds: float

    def values(self, metric: str, stage: str | None = None) -> list[float]:
        """Return a metric's values in order. Raises KeyError if the stage has none."""
        rows = [row for row in self.rows if stage is None or row["stage"] == stage]
        values = [float(row[metric]) for row in rows if metric in row]
        if not values:
            raise KeyError(f"stage {stage} measured no {metric}")
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
    content["stages"] = content["stages"][first:last]
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


# Models with random weights: name -> (family, sizes).
_COLUMNS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size", "tie_word_embeddings")  # fmt: skip
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    name: (family, dict(zip(_COLUMNS, sizes, strict=True)) | more)
    for name, family, sizes, more in (
        ("0.5B", "Qwen2", (896, 4864, 24, 14, 2, 151_936, True), {}),
        ("0.6B", "Qwen3", (1024, 3072, 28, 16, 8, 151_936, True), {"head_dim": 128}),
        ("8B", "Llama", (4096, 14_336, 32, 32, 8, 128_256, False), {}),
        ("20M", "Llama", (448, 1216, 8, 7, 7, 94, True), {}),
        ("tiny", "Qwen3", (64, 128, 2, 4, 2, 600, True), {"head_dim": 16}),
        ("recipe", "Qwen3", (128, 384, 2, 4, 4, 16, True), {"head_dim": 32}),
        ("0.85M", "Qwen3", (128, 384, 4, 4, 2, 512, True), {"head_dim": 32}),
        ("34M", "Qwen3", (512, 1536, 8, 8, 4, 16_384, True), {"head_dim": 64}),
        ("40M", "Qwen3", (512, 1536, 8, 8, 4, 32_000, True), {"head_dim": 64}),
    )
}
COMMON = dict(max_position_embeddings=32_768, eos_token_id=None, bos_token_id=None, pad_token_id=0)


def config_of(size: str, **changes: Any) -> Any:
    """Return the config of a model, with other values of some of its fields."""
    import transformers

    family, sizes = SIZES[size]
    make = getattr(transformers, f"{family}Config")
    return make(**{**COMMON, **sizes, **changes}, architectures=[f"{family}ForCausalLM"])


def make_model(size: str, device: str = "cpu", dtype: Any = None, **changes: Any) -> Any:
    """Make a model with random weights on the device. `dtype`: bfloat16 by default."""
    import torch
    import transformers

    config = config_of(size, **changes)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or torch.bfloat16)
    try:
        with torch.device(device):
            return getattr(transformers, config.architectures[0])(config).eval()
    finally:
        torch.set_default_dtype(before)


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
