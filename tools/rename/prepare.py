"""Before the codemod: credit joins methods; imports of one's own package's __init__ become imports of files."""

import ast
import sys
from pathlib import Path

R = Path(sys.argv[1])


def origins(pkg):
    out = {}
    for n in ast.parse((R / f"rl/{pkg}/__init__.py").read_text()).body:
        if isinstance(n, ast.ImportFrom):
            for a in n.names:
                out[a.asname or a.name] = (n.module, a.name)
    return out


credit = origins("credit")
for f in sorted((R / "rl/methods").glob("*.py")):
    s = f.read_text()
    t = ast.parse(s)
    ls = s.split("\n")
    for n in sorted(
        (n for n in ast.walk(t) if isinstance(n, ast.ImportFrom) and n.module == "rl.credit"),
        key=lambda n: -n.lineno,
    ):
        by = {}
        for a in n.names:
            m, o = credit[a.name]
            by.setdefault(m, []).append(o + (f" as {a.asname}" if a.asname else ""))
        ind = " " * n.col_offset
        ls[n.lineno - 1 : n.end_lineno] = [
            f"{ind}from {m} import {', '.join(v)}" for m, v in sorted(by.items())
        ]
    s2 = "\n".join(ls)
    if s2 != s:
        f.write_text(s2)
# methods' __init__ hands on credit's names, too
f = R / "rl/methods/__init__.py"
s = f.read_text()
imports = "\n".join(
    f"from {m} import {', '.join(v)}"
    for m, v in sorted(
        {m: [o for o in credit if credit[o][0] == m] for m, _ in credit.values()}.items()
    )
)
i = s.index("from rl.methods.base")
s = s[:i] + imports + "\n" + s[i:]
j = s.index("__all__ = [") + len("__all__ = [")
s = s[:j] + "\n" + "".join(f'    "{n}",\n' for n in credit) + s[j:].lstrip("\n")
f.write_text(s)
