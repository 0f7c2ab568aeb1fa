"""same_program.py --base=REV FILE ...: is a file the same program as before (a revision of git), but for prose and names of locals?

Docstrings and comments may change freely. String constants may change where both sides are prose (hold a space);
others are listed as KEY. A formatted value that a message lost or gained is listed as VALUE. Anything else: CODE."""

import ast
import re
import subprocess
import sys

BASE = sys.argv[1] if sys.argv[1].startswith("--base=") else "--base=HEAD"
files = [a for a in sys.argv[1:] if not a.startswith("--")]
ref = BASE.split("=")[1]


def strip_docs(tree):
    for n in ast.walk(tree):
        b = getattr(n, "body", None)
        if isinstance(
            n, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        ) or isinstance(b, list):
            if isinstance(b, list):
                n.body = [
                    s
                    for s in b
                    if not (
                        isinstance(s, ast.Expr)
                        and isinstance(s.value, ast.Constant)
                        and isinstance(s.value.value, str)
                    )
                ] or [ast.Pass()]
    return tree


class Bound(ast.NodeVisitor):
    def __init__(s):
        s.names = []
        s.seen = set()
        s.inner = set()

    def add(s, n):
        if n not in s.seen:
            s.seen.add(n)
            s.names.append(n)

    def visit_Name(s, n):
        if isinstance(n.ctx, (ast.Store, ast.Del)):
            s.add(n.id)

    def visit_ExceptHandler(s, n):
        if n.name:
            s.add(n.name)
        s.generic_visit(n)

    def visit_MatchAs(s, n):
        if n.name:
            s.add(n.name)
        s.generic_visit(n)

    def visit_MatchStar(s, n):
        if n.name:
            s.add(n.name)

    def visit_FunctionDef(s, n):
        s.inner.add(n.name)
        s.add(n.name)
        s.generic_visit(n)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_arg(s, n):
        s.add(n.arg)
        s.generic_visit(n)

    def visit_alias(s, n):
        if n.asname:
            s.add(n.asname)


class Alpha(ast.NodeTransformer):
    def __init__(s, map, inner):
        s.map, s.inner = map, inner

    def g(s, n):
        return s.map.get(n, n)

    def visit_Name(s, n):
        n.id = s.g(n.id)
        return n

    def visit_ExceptHandler(s, n):
        n.name = s.g(n.name)
        return s.generic_visit(n)

    def visit_MatchAs(s, n):
        n.name = s.g(n.name)
        return s.generic_visit(n)

    def visit_MatchStar(s, n):
        n.name = s.g(n.name)
        return n

    def visit_FunctionDef(s, n):
        n.name = s.g(n.name)
        return s.generic_visit(n)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_arg(s, n):
        n.arg = s.g(n.arg)
        return s.generic_visit(n)

    def visit_alias(s, n):
        n.asname = s.g(n.asname)
        return n

    def visit_Nonlocal(s, n):
        n.names = [s.g(x) for x in n.names]
        return n

    def visit_Call(s, n):
        if isinstance(n.func, ast.Name) and n.func.id in s.inner:
            for k in n.keywords:
                k.arg = s.g(k.arg)
        return s.generic_visit(n)


def params(f):
    a = f.args
    return {
        x.arg
        for x in (
            *a.args,
            *a.kwonlyargs,
            *a.posonlyargs,
            *([a.vararg] if a.vararg else []),
            *([a.kwarg] if a.kwarg else []),
        )
    }


class Outer(ast.NodeTransformer):
    def visit_FunctionDef(s, n):
        b = Bound()
        for st in n.body:
            b.visit(st)
        names = [x for x in b.names if x not in params(n)]
        al = Alpha({x: f"_v{i}" for i, x in enumerate(names)}, b.inner)
        n.body = [al.visit(st) for st in n.body]
        return n

    visit_AsyncFunctionDef = visit_FunctionDef

    def comp(s, n):
        b = Bound()
        for g in n.generators:
            b.visit(g.target)
        return Alpha({x: f"_c{i}" for i, x in enumerate(b.names)}, set()).visit(n)

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = comp

    def visit_Lambda(s, n):
        return Alpha(
            {
                x: f"_l{i}"
                for i, x in enumerate(
                    sorted(
                        params(n),
                        key=lambda a: [
                            y.arg for y in ast.walk(n.args) if isinstance(y, ast.arg)
                        ].index(a),
                    )
                )
            },
            set(),
        ).visit(n)


def is_text(n):
    return (
        (isinstance(n, ast.Constant) and isinstance(n.value, str))
        or isinstance(n, ast.JoinedStr)
        or (
            isinstance(n, ast.BinOp)
            and isinstance(n.op, (ast.Add))
            and is_text(n.left)
            and is_text(n.right)
        )
    )


def text_of(n):
    if isinstance(n, ast.Constant):
        return n.value, []
    if isinstance(n, ast.BinOp):
        a, b = text_of(n.left), text_of(n.right)
        return a[0] + b[0], a[1] + b[1]
    out = ""
    vals = []
    for v in n.values:
        if isinstance(v, ast.Constant):
            out += v.value
        else:
            out += "{}"
            vals.append(ast.dump(v))
    return out, vals


class Mask(ast.NodeTransformer):
    def __init__(s):
        s.texts = []

    def visit(s, n):
        if isinstance(n, ast.AST) and is_text(n):
            t, v = text_of(n)
            s.texts.append((t, sorted(v), getattr(n, "lineno", 0)))
            return ast.Constant("TEXT")
        return s.generic_visit(n)


def load(src):
    t = strip_docs(ast.parse(src))
    t = Outer().visit(t)
    m = Mask()
    t = m.visit(t)
    # __all__ order and such stay
    return t, m.texts


KEY = re.compile(r"^\S*$")
bad = 0
for f in files:
    old = subprocess.run(["git", "show", f"{ref}:{f}"], capture_output=True, text=True)
    if old.returncode:
        print(f"{f}: new file")
        continue
    (a, ta), (b, tb) = load(old.stdout), load(open(f).read())
    da, db = ast.dump(a, indent=1).splitlines(), ast.dump(b, indent=1).splitlines()
    if da != db:
        bad += 1
        print(f"{f}: CODE differs")

        # where: compare statement by statement
        def walk(x, y):
            if (
                type(x) != type(y)
                or not hasattr(x, "body")
                or not isinstance(getattr(x, "body"), list)
                or len(x.body) != len(y.body)
            ):
                print(
                    f"   before: {ast.unparse(x)[:300]!r}\n   now (line {getattr(y, 'lineno', '?')}): {ast.unparse(y)[:300]!r}"
                )
                return
            hit = False
            for i, j in zip(x.body, y.body):
                if ast.dump(i) != ast.dump(j):
                    hit = True
                    walk(i, j)
            if not hit:
                print(
                    f"   before: {ast.unparse(x)[:300]!r}\n   now (line {getattr(y, 'lineno', '?')}): {ast.unparse(y)[:300]!r}"
                )

        walk(a, b)
        continue
    for (x, vx, l), (y, vy, l2) in zip(ta, tb):
        if x != y and (KEY.match(x) or KEY.match(y)):
            print(f"{f}:{l2}: KEY {x!r} -> {y!r}")
            bad += 1
        if vx != vy:
            print(
                f"{f}:{l2}: VALUE in {y[:80]!r}: {[v for v in vx if v not in vy]} -> {[v for v in vy if v not in vx]}"
            )
print("same program" if not bad else f"{bad} to look at")
