"""Strings of tests (docs, bench) that were in the sources' messages before and are not now."""

import ast
import re
import sys
from pathlib import Path

B, R = Path(sys.argv[1]), Path(".")


def texts(root, globs):
    out = []
    for g in globs:
        for p in root.glob(g):
            if ".venv" in str(p):
                continue
            t = ast.parse(p.read_text())
            seen = set()
            for n in ast.walk(t):
                if isinstance(n, ast.JoinedStr):
                    out.append(
                        "".join(
                            v.value if isinstance(v, ast.Constant) else "\x00" for v in n.values
                        )
                    )
                    seen.update(id(v) for v in n.values)
                elif isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in seen:
                    out.append(n.value)
    return out


G = ["rl/**/*.py", "kernels/*.py", "*.py"]
old = "\x01".join(texts(B, G))
new = "\x01".join(texts(R, G))


# placeholders match anything short: compare by the longest literal piece
def pieces(s):
    return [
        x
        for x in re.split(r"\x00|\d+(?:\.\d+)?|'[^']*'|\.\*|\.\+|\\d\+|\(\?|\|", s)
        if len(x.strip()) >= 6 and " " in x.strip()
    ]


for p in sorted([*R.glob("tests/*.py"), *R.glob("bench/*.py")]):
    if p.name in ("mutant_list.py",):
        continue
    t = ast.parse(p.read_text())
    seen = set()
    docs = set()
    for n in ast.walk(t):
        b = getattr(n, "body", None)
        if (
            isinstance(b, list)
            and b
            and isinstance(b[0], ast.Expr)
            and isinstance(b[0].value, ast.Constant)
        ):
            docs.add(id(b[0].value))
    for n in ast.walk(t):
        if isinstance(n, ast.JoinedStr):
            s = "".join(v.value if isinstance(v, ast.Constant) else "\x00" for v in n.values)
            seen.update(id(v) for v in n.values)
        elif (
            isinstance(n, ast.Constant)
            and isinstance(n.value, str)
            and id(n) not in seen
            and id(n) not in docs
        ):
            s = n.value
        else:
            continue
        for x in pieces(re.sub(r"\\(.)", r"\1", s) if "\\" in s else s):
            if x in old and x not in new:
                print(f"{p.relative_to(R)}:{n.lineno}: {x!r}")
