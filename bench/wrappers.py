"""Test the wrappers against the packages that they wrap.

The script installs each package, as its extra in pyproject.toml says, into a separate environment.

    # create the environments; needs a package index
    python bench/wrappers.py --out bench/results/wrappers.csv
    # use existing environments DIR/<name>
    python bench/wrappers.py --venvs DIR ...
    # use this environment, where the package is installed
    python bench/wrappers.py --check textarena

A row holds the check, the number of cases that held, the number of cases, and the seconds. It names
the cases that did not hold.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
import venv
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
PACKAGES = ("reasoning-gym", "textarena", "skyrl-gym", "openenv", "mcp", "tinker-cookbook")
FIELDS = ("package", "version", "what", "hold", "of", "seconds", "not")


def make(folder: Path, name: str) -> Path:
    """Create a virtual environment with the package.

    All other packages come from this environment.
    """
    venv.create(folder, with_pip=False, clear=True)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "base.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    requirements = project["optional-dependencies"][name.removeprefix("tinker-")]
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]
    subprocess.run([*install, "-c", str(REPO / "constraints.txt"), *requirements], check=True)
    # It requires a tml-renderers version that the package index may not have.
    if name == "tinker-cookbook":
        subprocess.run(
            [*install, "--no-deps", "tinker-cookbook==0.6.1", "tml-renderers==0.2.1"], check=True
        )
    return python


def check(name: str) -> list[dict]:
    """Return the rows of a package, from its checks in bench.wrapper_checks."""
    from importlib.metadata import version

    sys.path[:0] = [str(REPO), str(REPO / "bench")]
    import wrapper_checks

    rows = []
    for what, function in wrapper_checks.CHECKS[name]:
        begin = time.perf_counter()
        held, of, bad = function()
        seconds = round(time.perf_counter() - begin, 2)
        print(name, what, held, of, seconds, *bad[:20], sep=" | ", file=sys.stderr, flush=True)
        rows.append(
            dict(
                zip(
                    FIELDS,
                    (name, version(name), what, held, of, seconds, "; ".join(bad)[:1500]),
                    strict=True,
                )
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", choices=PACKAGES, help="run the checks of one package here")
    parser.add_argument("--only", nargs="+", choices=PACKAGES, default=PACKAGES)
    parser.add_argument("--venvs", type=Path, help="a folder with an environment for each package")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.check:
        print("\n" + json.dumps(check(args.check)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.only:
            python = (
                args.venvs / name / "bin" / "python"
                if args.venvs
                else make(Path(scratch) / name, name)
            )
            run = subprocess.run(
                [str(python), __file__, "--check", name], capture_output=True, text=True, cwd=REPO
            )
            if run.returncode:
                sys.exit(f"{name}: {run.stderr[-3000:]}")
            rows += json.loads(run.stdout.splitlines()[-1])
            for row in rows[-20:]:
                if row["package"] == name:
                    print(*(row[field] for field in FIELDS[:6]), row["not"][:300], flush=True)
    if args.out is not None:
        with args.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
