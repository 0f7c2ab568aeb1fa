"""mutants_convert.py BASE NEW : rewrite bench/mutant_list.py of BASE for the tree NEW (renamed, reformatted)."""

import ast
import copy
import json
import re
import runpy
import sys
from pathlib import Path

B, N = Path(sys.argv[1]), Path(sys.argv[2])
# JSON of the codemod: old path to new, "file::name" to the new name, old test to new
HERE = Path(__file__).parent


def table(name):
    return json.loads((HERE / name).read_text()) if (HERE / name).exists() else {}


moves = table("moves.json")
names = table("names.json")
testmoves = table("tests.json")
MUT = runpy.run_path(str(B / "bench/mutant_list.py"))["MUTANTS"]


def strip(body):
    return [
        s
        for s in body
        if not (
            isinstance(s, ast.Expr)
            and isinstance(s.value, ast.Constant)
            and isinstance(s.value.value, str)
        )
    ]


D = lambda n: ast.dump(n)
BODIES = ("body", "orelse", "finalbody", "handlers", "cases")


def key(s):
    if isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return ("def", s.name)
    if isinstance(s, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        t = s.targets[0] if isinstance(s, ast.Assign) else s.target
        return ("set", ast.unparse(t))
    return None


class Fail(Exception):
    pass


def locate(b, m, path):
    """b, m: lists of statements. Returns (path to list, i, j, stmts of m)."""
    i = 0
    while i < min(len(b), len(m)) and D(b[i]) == D(m[i]):
        i += 1
    j, k = len(b), len(m)
    while j > i and k > i and D(b[j - 1]) == D(m[k - 1]):
        j -= 1
        k -= 1
    if j - i == 1 and k - i == 1 and type(b[i]) == type(m[i]):
        x, y = b[i], m[i]
        same = [f for f in BODIES if isinstance(getattr(x, f, None), list)]
        diff = [f for f in same if [D(q) for q in getattr(x, f)] != [D(q) for q in getattr(y, f)]]
        head = lambda n: D(
            type(n)(**{f: ([] if f in BODIES else v) for f, v in ast.iter_fields(n)})
        )
        if same and head(x) == head(y) and len(diff) == 1:
            return locate(getattr(x, diff[0]), getattr(y, diff[0]), path + [(i, diff[0])])
        if same and not diff:
            return path, i, j, m[i:k], "head"
    return path, i, j, m[i:k], "whole"


def align(x, y, map):
    if isinstance(x, list) and isinstance(y, list):
        if len(x) == len(y):
            for p, q in zip(x, y):
                align(p, q, map)
        return
    if not isinstance(x, ast.AST) or type(x) != type(y):
        return
    for kind, f in (
        (ast.Name, "id"),
        (ast.arg, "arg"),
        (ast.Attribute, "attr"),
        (ast.keyword, "arg"),
        (ast.FunctionDef, "name"),
        (ast.AsyncFunctionDef, "name"),
        (ast.ClassDef, "name"),
        (ast.ExceptHandler, "name"),
        (ast.alias, "name"),
    ):
        if isinstance(x, kind) and getattr(x, f) and getattr(y, f):
            map.setdefault((kind.__name__, getattr(x, f)), getattr(y, f))
    for f, v in ast.iter_fields(x):
        align(v, getattr(y, f), map)


class Ren(ast.NodeTransformer):
    def __init__(s, map):
        s.map = map

    def g(s, k, n):
        return s.map.get((k, n)) or (
            s.map.get(("arg", n), n)
            if k == "Name"
            else s.map.get(("Name", n), n)
            if k in ("arg",)
            else n
        )

    def visit_Name(s, n):
        n.id = s.g("Name", n.id)
        return n

    def visit_arg(s, n):
        n.arg = s.g("arg", n.arg)
        return s.generic_visit(n)

    def visit_Attribute(s, n):
        n.attr = s.g("Attribute", n.attr)
        return s.generic_visit(n)

    def visit_keyword(s, n):
        if n.arg:
            n.arg = s.g("keyword", n.arg)
        return s.generic_visit(n)

    def visit_FunctionDef(s, n):
        n.name = s.g("FunctionDef", n.name)
        return s.generic_visit(n)

    def visit_ExceptHandler(s, n):
        if n.name:
            n.name = s.g("ExceptHandler", n.name)
        return s.generic_visit(n)


def convert(mu):
    f = mu.file
    nf = moves.get(f, f)
    src = (N / nf).read_text()
    if not f.endswith(".py"):
        return (nf, mu.old, mu.new) if src.count(mu.old) == 1 else None
    b0 = (B / f).read_text()
    assert b0.count(mu.old) == 1, mu
    if src.count(mu.old) == 1 and "\n" not in mu.old.strip("\n") and nf == f and False:
        return nf, mu.old, mu.new
    bt, mt, nt = ast.parse(b0), ast.parse(b0.replace(mu.old, mu.new)), ast.parse(src)
    for t in (bt, mt, nt):
        for n in ast.walk(t):
            if isinstance(getattr(n, "body", None), list) and isinstance(
                n, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            ):
                n.body = strip(n.body) or [ast.Pass(lineno=1, end_lineno=1)]
    path, i, j, stm, how = locate(bt.body, mt.body, [])
    # walk
    bl, nl = bt.body, nt.body
    map = {}
    qual = []
    for idx, field in path:
        s = bl[idx]
        k = key(s)
        t = None
        if k and k[0] == "def":
            q = ".".join(qual + [s.name])
            new = names.get(f"{f}::{q}", s.name)
            c = [x for x in nl if key(x) == ("def", new)]
            if len(c) == 1:
                t = c[0]
            qual.append(s.name)
            if t is not None:
                align(
                    s.args if hasattr(s, "args") else [], t.args if hasattr(t, "args") else [], map
                )
                align(s.body, t.body, map)
        elif len(bl) == len(nl) and type(nl[idx]) == type(s):
            t = nl[idx]
        if t is None:
            raise Fail(f"{f} {'.'.join(qual)}: statement {type(s).__name__} not located")
        bl, nl = getattr(s, field), getattr(t, field)
    if i < len(bl) and j > i:
        if len(bl) != len(nl) or path == [] or isinstance(bl[i], (ast.FunctionDef, ast.ClassDef)):
            # by key
            def find(s):
                k = key(s)
                if k is None:
                    raise Fail(f"{f}: lengths differ")
                new = names.get(f"{f}::{'.'.join(qual + [k[1]])}", k[1])
                c = [x for x in nl if key(x) and key(x)[0] == k[0] and key(x)[1] == new]
                if len(c) != 1:
                    raise Fail(f"{f}: {k} found {len(c)} times")
                return nl.index(c[0])

            a = find(bl[i])
            z = find(bl[j - 1]) + 1
        else:
            a, z = i, j
        for p, q in zip(bl[i:j], nl[a:z]):
            if type(p) != type(q):
                raise Fail(f"{f}: {type(p).__name__} against {type(q).__name__}")
            align(p, q, map)
        target = nl[a:z]
    else:
        raise Fail("insertion")
    lines = src.split("\n")
    ren = [Ren(map).visit(copy.deepcopy(s)) for s in stm]
    start = target[0].lineno
    if getattr(target[0], "decorator_list", None):
        start = target[0].decorator_list[0].lineno
    ind = re.match(r"\s*", lines[start - 1]).group()

    def un(n):
        return "\n".join(ind + l for l in ast.unparse(ast.fix_missing_locations(n)).split("\n"))

    if how == "head":
        body = target[0].body[0]
        first = body.lineno
        if getattr(body, "decorator_list", None):
            first = body.decorator_list[0].lineno
        end = first - 1
        # docstrings and comments between header and body stay
        k = start
        depth_line = None
        for e in range(start, first):
            try:
                ast.parse(
                    "\n".join(l[len(ind) :] for l in lines[start - 1 : e]) + "\n" + " " * 8 + "pass"
                ) if False else None
            except Exception:
                pass
        hl = start
        while hl < first and not re.sub(r"#.*$", "", lines[hl - 1]).rstrip().endswith(":"):
            hl += 1
        end = hl
        m = ren[0]
        m.body = [ast.Pass()]
        for q in ("orelse", "finalbody", "handlers"):
            if hasattr(m, q):
                setattr(m, q, [])
        text = un(m).rsplit("\n", 1)[0]
    else:
        end = target[-1].end_lineno
        text = "\n".join(un(s) for s in ren)
    old = "\n".join(lines[start - 1 : end]) + "\n"
    new = text + "\n" if text else ""
    while src.count(old) > 1 and start > 1:
        start -= 1
        old = lines[start - 1] + "\n" + old
        new = lines[start - 1] + "\n" + new
    if src.count(old) != 1 or old == new:
        raise Fail(f"{f}: not unique or nothing changed")
    ast.parse(src.replace(old, new))
    if ast.dump(ast.parse(src.replace(old, new))) == ast.dump(ast.parse(src)):
        raise Fail("no change")
    return nf, old, new


if __name__ == "__main__":
    out = []
    bad = []
    for mu in MUT:
        try:
            r = convert(mu)
            if r is None:
                raise Fail("text moved")
            out.append((*r, mu.breaks, " ".join(testmoves.get(t, t) for t in mu.tests.split())))
        except Fail as e:
            bad.append((mu, str(e)))
        except Exception as e:
            bad.append((mu, repr(e)))
    print(len(out), "converted", len(bad), "not")
    for mu, e in bad:
        print("  ", e, "|", mu.breaks)
    print(json.dumps(out))
