"""Install the lowest or the newest versions that the ranges permit, and run a short selection of tests.

    python tools/version_ranges.py                   # both ends, one after the other
    python tools/version_ranges.py --end lowest      # one end; the row of the other is kept

uv resolves requirements.txt and the extras `dev` and `serve`: to the lowest version of each package
that they name, or to the newest versions of all. Each end has an environment of its own, which the
script creates and removes; `--folder` keeps it.
uv comes from pip. An end is a download of 3 GB, unless uv's cache has it; `--torch-backend cpu` makes
it 0.6 GB.

Writes bench/results/version_ranges.csv, a row for each end. The exit code is 1 if an end fails, also
if its packages do not install; the other end is tried nevertheless.
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPO = HERE.parent
if __name__ == "__main__":
    sys.path[0] = str(REPO)
from bench.harness import RESULTS, write_table  # noqa: E402

RESOLUTIONS = {"lowest": "lowest-direct", "newest": "highest"}
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "datasets", "numpy")
TESTS = (
    "tests/sampler/test_sampler_decoders.py",  # the decoders against transformers
    "tests/sampler/test_sampler_engine.py",
    "tests/models/test_models.py",
    "tests/serve/test_serve_forms.py",
)
CHECKS = ("install", "import", "train", "tests")
VERSIONS = """
import json, sys
from importlib.metadata import version
print(json.dumps({name: version(name) for name in sys.argv[1:]}))
"""


def install(end: str, folder: Path, torch_backend: str) -> Path:
    """Create an environment with the packages of one end of the ranges, and return its Python."""
    tools, environment = folder / "uv", folder / end
    venv.create(tools, with_pip=True)
    pip = [str(tools / "bin" / "python"), "-m", "pip", "install", "--quiet", "uv"]
    subprocess.run([*pip, "--disable-pip-version-check"], check=True)
    venv.create(environment, clear=True)
    python = environment / "bin" / "python"
    words = ["--python", str(python), "--resolution", RESOLUTIONS[end]]
    words += ["-r", "pyproject.toml", "--extra", "dev", "--extra", "serve"]
    words += ["--torch-backend", torch_backend] if torch_backend else []
    subprocess.run([str(tools / "bin" / "uv"), "pip", "install", *words], cwd=REPO, check=True)
    return python


def check(python: Path, folder: Path) -> dict[str, str]:
    """Return the outcome of each check by name: ok, or the last line of its output."""
    train = ["train.py", "grpo", "--dataset", "addition", "--steps", "2", "--batch-size", "2"]
    checks = {
        "import": ["-c", "import rl, kernels, deepspeed"],
        "train": [*train, "--output-dir", str(folder / "run"), "--quiet"],
        "tests": ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *TESTS],
    }
    outcomes = {}
    for name, words in checks.items():
        run = subprocess.run([str(python), *words], cwd=REPO, capture_output=True, text=True)
        lines = [line for line in run.stdout.splitlines() if line.strip()]
        if run.returncode:
            print(run.stdout[-3000:], run.stderr[-3000:], sep="\n", flush=True)
            errors = run.stderr.strip().splitlines() or [""]
            outcomes[name] = f"exit code {run.returncode}: {lines[-1] if lines else errors[-1]}"
        else:  # warnings go to stderr, the summary of pytest to stdout
            outcomes[name] = lines[-1].strip("= ").split(" in ")[0] if name == "tests" else "ok"
    return outcomes


def measure(end: str, folder: Path, torch_backend: str) -> dict[str, Any]:
    """Return the row of one end; without versions and outcomes if its packages do not install."""
    start = time.perf_counter()
    outcomes = dict.fromkeys(CHECKS, "")
    versions: dict[str, str] = dict.fromkeys(PACKAGES, "")
    try:
        python = install(end, folder, torch_backend)
    except subprocess.CalledProcessError as error:
        outcomes["install"] = f"exit code {error.returncode}"
    else:
        words = [str(python), "-c", VERSIONS, *PACKAGES]
        reply = subprocess.run(words, check=True, capture_output=True, text=True)
        versions = json.loads(reply.stdout)
        outcomes = {"install": "ok", **check(python, folder)}
    return {
        "end": end,
        **outcomes,
        "python": sys.version.split()[0],
        **versions,
        "seconds": round(time.perf_counter() - start),
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--end", choices=RESOLUTIONS, help="the other end keeps its row")
    parser.add_argument("--folder", type=Path, help="keep the environments in this folder")
    parser.add_argument("--torch-backend", default="", help="cpu, cu130, ...: as uv names it")
    args = parser.parse_args()
    path = RESULTS / "version_ranges.csv"
    rows: dict[str, dict[str, Any]] = {}
    if path.is_file():
        with path.open(newline="") as file:
            rows = {row["end"]: row for row in csv.DictReader(file)}
    ends = [args.end] if args.end else list(RESOLUTIONS)
    with tempfile.TemporaryDirectory() as scratch:
        for end in ends:
            rows[end] = measure(end, args.folder or Path(scratch), args.torch_backend)
            write_table(path, [rows[name] for name in RESOLUTIONS if name in rows])
    failed = [
        f"{end}: {name}: {rows[end][name]}"
        for end in ends
        for name in CHECKS
        if rows[end][name].startswith("exit code")
    ]
    print(*failed, sep="\n", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
