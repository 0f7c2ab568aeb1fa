"""After the codemod: rl.client and rl.runtime each get their own __init__, and imports name the right package."""

import ast
import subprocess
import sys
from pathlib import Path

R = Path(sys.argv[1])
cp = R / "rl/client/__init__.py"
t = ast.parse(cp.read_text())
doc = ast.get_docstring(t)
by = {"client": [], "runtime": []}
for n in t.body:
    if isinstance(n, ast.ImportFrom):
        for a in n.names:
            by["runtime" if n.module.startswith("rl.runtime") else "client"].append(
                (n.module, a.name)
            )
DOC = {
    "client": '"""Provide Tinker\'s verbs: service, training and sampling clients."""',
    "runtime": '"""Run the verbs on every rank: driver, worker groups, verb routing and weight sync."""',
}
(R / "rl/runtime").mkdir(exist_ok=True)
for pkg, names in by.items():
    if not names:
        continue
    (R / f"rl/{pkg}/__init__.py").write_text(
        DOC[pkg]
        + "\n\n"
        + "".join(f"from {m} import {n}\n" for m, n in sorted(names))
        + "\n__all__ = [\n"
        + "".join(f'    "{n}",\n' for _, n in sorted(names, key=lambda x: x[1]))
        + "]\n"
    )
rt = {n for _, n in by["runtime"]} | {f.stem for f in (R / "rl/runtime").glob("*.py")} - {
    f.stem for f in (R / "rl/client").glob("*.py")
}
for p in subprocess.run(
    ["git", "ls-files", "*.py"], cwd=R, capture_output=True, text=True
).stdout.split():
    f = R / p
    if not f.exists():
        continue
    s = f.read_text()
    if "rl.client import" not in s:
        continue
    ls = s.split("\n")
    for n in sorted(
        (
            n
            for n in ast.walk(ast.parse(s))
            if isinstance(n, ast.ImportFrom) and n.module == "rl.client"
        ),
        key=lambda n: -n.lineno,
    ):
        a = [x for x in n.names if x.name not in rt]
        b = [x for x in n.names if x.name in rt]
        if not b:
            continue
        ind = " " * n.col_offset
        fmt = lambda xs: ", ".join(x.name + (f" as {x.asname}" if x.asname else "") for x in xs)
        ls[n.lineno - 1 : n.end_lineno] = (
            [f"{ind}from rl.client import {fmt(a)}"] if a else []
        ) + [f"{ind}from rl.runtime import {fmt(b)}"]
    f.write_text("\n".join(ls))
