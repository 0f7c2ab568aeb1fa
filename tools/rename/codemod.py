"""codemod.py ROOT plan|apply  MAPS...  : renames modules, symbols, members and params over a whole project, at once."""

import ast
import collections
import io
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
import tokenize
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from language_server import LSP  # noqa: E402

ROOT = Path(sys.argv[1]).resolve()
MODE = sys.argv[2]
MAPS = sys.argv[3:]
PACK = {
    "environments": "envs",
    "episodes": "rollout",
    "methods": "algorithms",
    "credit": "algorithms",
    "run": "trainer",
    "settings": "config",
    "report": "reporting",
    "ranks": "distributed",
    "memory": "memory_plan",
}
SKIP = ("/.venv",)
pys = [
    p
    for p in subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
]
src = {p: (ROOT / p).read_text() for p in pys}
trees = {p: ast.parse(s) for p, s in src.items()}
lines = {p: s.split("\n") for p, s in src.items()}
# ------------------------------------------------------------------ maps
mods, entries = {}, []
problems = []
for m in MAPS:
    for n, l in enumerate(open(m), 1):
        l = l.rstrip("\n")
        if not l.strip() or l.lstrip().startswith("#"):
            continue
        c = [x.strip() for x in l.split("\t") if x.strip()]
        if len(c) < 3:
            c = l.split()
        c[2] = c[2].split()[0]
        c = c[:3]
        kind, old, new = c
        if kind == "module":
            mods[old] = new
        elif kind in ("symbol", "member", "param"):
            if "." in new:
                problems.append(f"{m}:{n}: bad new name {new}")
                continue
            f, q = old.split("::")
            if q.split(".")[-1] == new:
                continue
            if f not in src:
                problems.append(f"{m}:{n}: no file {f}")
                continue
            entries.append((kind, f, q, new, f"{Path(m).name}:{n}"))
        else:
            problems.append(f"{m}:{n}: kind {kind}")


def new_path(p):
    parts = p.split("/")
    if parts[0] == "rl" and len(parts) > 2:
        pkg = PACK.get(parts[1], parts[1])
        if parts[1] == "clients":
            pkg = "client"
        stem = mods.get(p)
        if stem:
            stem = stem.removesuffix(".py")
            if "/" in stem:
                if stem.startswith("rl/"):
                    stem = stem[3:]
                return f"rl/{stem}.py"
            return "/".join(["rl", pkg, *parts[2:-1], stem + ".py"])
        return "/".join(["rl", pkg, *parts[2:]])
    stem = mods.get(p)
    return "/".join([*parts[:-1], stem.removesuffix(".py") + ".py"]) if stem else p


DROP = {"rl/credit/__init__.py"}
moves = {p: new_path(p) for p in pys if new_path(p) != p and p not in DROP}
rev = collections.Counter(new_path(p) for p in pys if p not in DROP)
for k, v in rev.items():
    if v > 1:
        problems.append(f"{v} files become {k}: {[p for p in pys if new_path(p) == k]}")


def dotted(p):
    return ".".join(Path(p).with_suffix("").parts).removesuffix(".__init__")


modmap = {dotted(p): dotted(new_path(p)) for p in pys if p.startswith(("rl/", "kernels/"))}


# ------------------------------------------------------------------ where things are defined
def u16(p, row, bcol):  # ast gives utf8 offsets
    l = lines[p][row - 1]
    s = l.encode()[:bcol].decode()
    return len(s.encode("utf-16-le")) // 2


def name_at(p, row, bcol, name):
    l = lines[p][row - 1].encode()
    i = re.compile(rb"\b" + name.encode() + rb"\b").search(l, bcol)
    return None if i is None else (row - 1, u16(p, row, i.start()))


classes = collections.defaultdict(list)
for p, t in trees.items():
    for n in ast.walk(t):
        if isinstance(n, ast.ClassDef):
            classes[n.name].append((p, n))


def find_in(p, body, name):
    out = []
    for n in body:
        if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and n.name == name:
            out.append(name_at(p, n.lineno, n.col_offset + 3, name))
        elif isinstance(n, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            ts = n.targets if isinstance(n, ast.Assign) else [n.target]
            for t in ts:
                for x in ast.walk(t):
                    if isinstance(x, ast.Name) and x.id == name:
                        out.append((x.lineno - 1, u16(p, x.lineno, x.col_offset)))
        elif isinstance(n, (ast.If, ast.Try, ast.With)):
            out += find_in(p, n.body, name) + find_in(p, getattr(n, "orelse", []), name)
            for h in getattr(n, "handlers", []):
                out += find_in(p, h.body, name)
        elif hasattr(ast, "TypeAlias") and isinstance(n, ast.TypeAlias):
            pass
    return [o for o in out if o]


def members(p, c, name):
    out = find_in(p, c.body, name)
    for n in ast.walk(c):
        if (
            isinstance(n, ast.Attribute)
            and isinstance(n.ctx, ast.Store)
            and n.attr == name
            and isinstance(n.value, ast.Name)
            and n.value.id in ("self", "cls")
        ):
            out.append((n.end_lineno - 1, u16(p, n.end_lineno, n.end_col_offset) - len(name)))
    return out


def func(p, q):
    body = trees[p].body
    node = None
    for part in q.split("."):
        node = None
        for n in ast.walk(ast.Module(body, [])):
            if (
                isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
                and n.name == part
            ):
                node = n
                break
        if node is None:
            return None
        body = node.body
    return node


def klass(p, q):
    n = func(p, q)
    return n if isinstance(n, ast.ClassDef) else None


subs = collections.defaultdict(set)
bases = collections.defaultdict(set)
for name, ds in classes.items():
    for p, c in ds:
        for b in c.bases:
            bn = b.value if isinstance(b, ast.Subscript) else b
            bn = bn.attr if isinstance(bn, ast.Attribute) else getattr(bn, "id", None)
            if bn in classes:
                subs[bn].add(name)
                bases[name].add(bn)


def family(name):
    seen = {name}
    todo = [name]
    up = [name]
    while up:
        x = up.pop()
        for b in bases[x]:
            if b not in seen:
                seen.add(b)
                up.append(b)
    todo = list(seen)
    while todo:
        x = todo.pop()
        for b in subs[x]:
            if b not in seen:
                seen.add(b)
                todo.append(b)
    return seen


starts = []  # (file,row,col,old,new,where)
for kind, f, q, new, where in entries:
    *pre, name = q.split(".")
    pos = []
    if kind == "symbol":
        if pre:
            problems.append(f"{where}: symbol {q} is nested")
            continue
        pos = [(f, *x) for x in find_in(f, trees[f].body, name)]
    elif kind == "member":
        c = klass(f, ".".join(pre))
        if c is None:
            problems.append(f"{where}: no class {q}")
            continue
        pos = [(f, *x) for x in members(f, c, name)]
        if not pos:
            problems.append(f"{where}: no member {f} {q}")
            continue
        for other in family(c.name) - {c.name}:
            for p2, c2 in classes[other]:
                pos += [(p2, *x) for x in members(p2, c2, name)]
    else:
        n = func(f, ".".join(pre))
        if isinstance(n, ast.ClassDef):
            pos = [(f, *x) for x in members(f, n, name)]
        elif n is not None:

            def args(n):
                return [a for a in ast.walk(n.args) if isinstance(a, ast.arg) and a.arg == name]

            pos = [(f, a.lineno - 1, u16(f, a.lineno, a.col_offset)) for a in args(n)]
            if len(pre) > 1 and n.name != "__init__":
                for other in family(pre[-2]) - {pre[-2]}:
                    for p2, c2 in classes[other]:
                        for m2 in c2.body:
                            if (
                                isinstance(m2, (ast.FunctionDef, ast.AsyncFunctionDef))
                                and m2.name == n.name
                            ):
                                pos += [
                                    (p2, a.lineno - 1, u16(p2, a.lineno, a.col_offset))
                                    for a in args(m2)
                                ]
    if not pos:
        problems.append(f"{where}: {kind} {f}::{q} not found")
        continue
    starts += [(*x, name, new, where, kind) for x in dict.fromkeys(pos)]
print(
    f"{len(mods)} modules, {len(moves)} moves, {len(entries)} entries, {len(starts)} definitions, {len(problems)} problems"
)
for x in problems:
    print("PROBLEM", x)
if MODE == "check":
    sys.exit()
# ------------------------------------------------------------------ references
edits = collections.defaultdict(dict)  # file -> (row,col,len) -> (new, where)
conf = []
lock = threading.Lock()
OUT = Path(tempfile.gettempdir()) / "rename_edits.json"


def work(queue):
    l = LSP(str(ROOT), str(ROOT / ".venv"))
    opened = set()
    while True:
        with lock:
            if not queue:
                break
            item = queue.pop(0)
            left = len(queue)
        p, row, col, old, new, where, kind = item
        if p not in opened:
            l.open(p)
            opened.add(p)
        t = time.time()
        try:
            refs = l.refs(p, row, col) or []
        except Exception as e:
            print("LSP", item, e, flush=True)
            refs = []
        with lock:
            if time.time() - t > 20:
                print("slow", round(time.time() - t), old, flush=True)
            if left % 100 == 0:
                print(left, "left", flush=True)
            got = [(p, row, col)]
            for r in refs:
                u = r["uri"]
                if not u.startswith(f"file://{ROOT}/"):
                    continue
                q = u.removeprefix(f"file://{ROOT}/")
                if q not in src:
                    continue
                s, e = r["range"]["start"], r["range"]["end"]
                got.append((q, s["line"], s["character"]))
            for q, r_, c_ in got:
                text = (
                    lines[q][r_]
                    .encode("utf-16-le")[2 * c_ : 2 * (c_ + len(old))]
                    .decode("utf-16-le")
                )
                if text != old:
                    if (
                        lines[q][r_].encode("utf-16-le")[2 * c_ : 2 * c_ + 2].decode("utf-16-le")
                        in "\"'"
                        and old in lines[q][r_]
                    ):
                        continue
                    print("ODD", q, r_ + 1, c_, repr(text), "for", old, where)
                    continue
                k = (r_, c_, len(old))
                have = edits[q].get(k)
                if have and have[0] != new:
                    conf.append(f"CONFLICT {q}:{r_ + 1}: {old} -> {have} and {new, where}")
                edits[q][k] = (new, where, kind)


if MODE == "plan":
    starts = sorted(set(starts), key=lambda s: (s[3], s[0]))
    queue = list(starts)
    ts = [threading.Thread(target=work, args=(queue,)) for _ in range(2)]
    for t in ts:
        t.start()
    for t in ts:
        t.join()
    OUT.write_text(json.dumps([[q, *k, *v] for q, d in edits.items() for k, v in d.items()]))
    for c in conf:
        print(c)
    print(sum(map(len, edits.values())), "edits in", len(edits), "files")
    sys.exit()
# ------------------------------------------------------------------ apply
for q, r_, c_, n, new, where, kind in json.loads(OUT.read_text()):
    edits[q][(r_, c_, n)] = (new, where, kind)
newsrc = {}
symnames = collections.defaultdict(set)
for kind, f, q, new, where in entries:
    if kind == "symbol":
        symnames[q].add(new)
# __all__ strings: symbols by module origin: rename strings in __all__ when that file had a Name edit of the same text
for p in pys:
    ls = [x for x in lines[p]]
    d = dict(edits.get(p, {}))
    renamed = {}
    for (r_, c_, n), (new, where, kind) in d.items():
        old = ls[r_].encode("utf-16-le")[2 * c_ : 2 * (c_ + n)].decode("utf-16-le")
        if kind == "symbol":
            renamed[old] = new
    for n in trees[p].body:
        if isinstance(n, (ast.Assign, ast.AugAssign)) and any(
            isinstance(t, ast.Name) and t.id == "__all__"
            for t in (n.targets if isinstance(n, ast.Assign) else [n.target])
        ):
            for x in ast.walk(n.value):
                if isinstance(x, ast.Constant) and x.value in renamed:
                    d[(x.lineno - 1, u16(p, x.lineno, x.col_offset) + 1, len(x.value))] = (
                        renamed[x.value],
                        "all",
                        "all",
                    )
    for (r_, c_, n), (new, *_) in sorted(d.items(), reverse=True):
        b = ls[r_].encode("utf-16-le")
        ls[r_] = (b[: 2 * c_] + new.encode("utf-16-le") + b[2 * (c_ + n) :]).decode("utf-16-le")
    newsrc[p] = "\n".join(ls)
# modules: imports, dotted names and paths in every text file
texts = [
    p
    for p in subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    if p.endswith(
        (
            ".py",
            ".md",
            ".toml",
            ".yaml",
            ".yml",
            ".sh",
            ".sbatch",
            ".txt",
            "Makefile",
            "run",
            ".cpp",
            ".c",
        )
    )
    and not p.startswith("bench/results")
]
stems = {}  # (package dotted, old stem) -> (new package, new stem)
for o, n in modmap.items():
    if o != n and "." in o:
        stems[o] = n
DOT = re.compile(r"(?<![\w./])((?:rl|kernels)(?:\.[A-Za-z_]\w*)+)")
PATH = re.compile(r"(?<![\w.-])((?:rl|kernels)/[\w./-]+?\.py)(::[\w.]+)?")
FOLD = re.compile(r"(?<![\w./-])rl/(\w+)(?=/)")
memb = {}
for kind, f, q, new, where in entries:
    memb[(f, q)] = new


def qual(f, q):
    parts = q.split(".")
    out = []
    for i in range(len(parts)):
        out.append(memb.get((f, ".".join(parts[: i + 1])), parts[i]))
    return ".".join(out)


path_of = {dotted(p): p for p in pys}


def dot(m):
    full = m.group(1).split(".")
    for i in range(len(full), 0, -1):
        k = ".".join(full[:i])
        if k in modmap and (i < len(full) or True):
            rest = full[i:]
            newmod = modmap[k]
            if rest and k in path_of:
                rest = qual(path_of[k], ".".join(rest)).split(".")
            if rest and path_of.get(k, "").endswith("__init__.py"):
                # a package's name: what it hands on
                cands = symnames.get(rest[0], set())
                if len(cands) == 1:
                    rest = [next(iter(cands)), *rest[1:]]
                if k == "rl.clients" and rest:
                    newmod = "rl.client"
            return ".".join([newmod, *rest])
    return m.group(1)


def pth(m):
    f, q = m.group(1), m.group(2)
    n = new_path(f) if f in src else f
    if q:
        n += "::" + qual(f, q[2:])
    return n


IMP = re.compile(r"^(\s*)from (rl(?:\.\w+)*|kernels) import (\(?[^()#\n]*(?:\([^)]*\))?)", re.M)
report = []
for p in texts:
    s = newsrc.get(p) or (ROOT / p).read_text()
    if p.endswith(".py"):
        # `from pkg import stem` of renamed modules: rewritten by the tree of the edited text
        t = ast.parse(s)
        ls = s.split("\n")
        ed = []
        bound = {}
        for n in ast.walk(t):
            if (
                isinstance(n, ast.ImportFrom)
                and n.module
                and (
                    n.module == "rl"
                    or n.module.startswith(("rl.", "kernels"))
                    or n.module == "kernels"
                )
            ):
                for a in n.names:
                    k = f"{n.module}.{a.name}"
                    if k in modmap and modmap[k].rsplit(".", 1)[1] != a.name and k in path_of:
                        ed.append(
                            (a.lineno - 1, a.col_offset, len(a.name), modmap[k].rsplit(".", 1)[1])
                        )
                        if not a.asname:
                            bound[a.name] = modmap[k].rsplit(".", 1)[1]
                    if k in modmap and modmap[k].rsplit(".", 1)[0] != modmap.get(
                        n.module, n.module
                    ):
                        report.append(f"{p}:{n.lineno} module {k} leaves its package: {modmap[k]}")
        if bound:
            ids = {n.id for n in ast.walk(t) if isinstance(n, ast.Name)} | {
                a.arg for a in ast.walk(t) if isinstance(a, ast.arg)
            }
            for o, nw in bound.items():
                if nw in ids:
                    report.append(f"{p}: module name {nw} (was {o}) is used as a variable already")
            for n in ast.walk(t):
                if isinstance(n, ast.Name) and n.id in bound:
                    ed.append((n.lineno - 1, n.col_offset, len(n.id), bound[n.id]))
        for r_, c_, n, new in sorted(set(ed), reverse=True):
            b = ls[r_].encode()
            ls[r_] = (b[:c_] + new.encode() + b[c_ + n :]).decode()
        s = "\n".join(ls)
    s = PATH.sub(pth, s)
    s = DOT.sub(dot, s)
    s = FOLD.sub(lambda m: "rl/" + ({"clients": "client"} | PACK).get(m.group(1), m.group(1)), s)
    newsrc[p] = s
# prose: CamelCase names and backticked words
prose = {}
amb = set()
for kind, f, q, new, where in entries:
    if kind == "symbol":
        if q in prose and prose[q] != new:
            amb.add(q)
        prose[q] = new
camel = {
    o: n
    for o, n in prose.items()
    if o not in amb and re.match(r"^[A-Z][a-z0-9]+(?:[A-Z][A-Za-z0-9]*)+$", o)
}
tick = {o: n for o, n in prose.items() if o not in amb and not o.startswith("_")}
still = {n.name for p in pys for n in ast.walk(trees[p]) if isinstance(n, (ast.ClassDef,))}
CAM = (
    re.compile(r"\b(" + "|".join(sorted(camel, key=len, reverse=True)) + r")\b") if camel else None
)
TICK = re.compile(
    r"`(" + "|".join(sorted(map(re.escape, tick), key=len, reverse=True)) + r")(?=[`.(])"
)


def in_prose(text):
    if CAM:
        text = CAM.sub(lambda m: camel[m.group(1)], text)
    return TICK.sub(lambda m: "`" + tick[m.group(1)], text)


for p in texts:
    s = newsrc[p]
    if p.endswith(".py"):
        out = []
        last = (1, 0)
        ls = s.split("\n")
        t = ast.parse(s)
        docs = set()
        for n in ast.walk(t):
            b = getattr(n, "body", None)
            if (
                isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
                and b
                and isinstance(b[0], ast.Expr)
                and isinstance(b[0].value, ast.Constant)
                and isinstance(b[0].value.value, str)
            ):
                docs.update(range(b[0].lineno, b[0].end_lineno + 1))
        for tok in tokenize.generate_tokens(io.StringIO(s).readline):
            if tok.type == tokenize.COMMENT:
                r_, c_ = tok.start
                ls[r_ - 1] = ls[r_ - 1][:c_] + in_prose(ls[r_ - 1][c_:])
        for i in docs:
            ls[i - 1] = in_prose(ls[i - 1])
        s = "\n".join(ls)
    elif p.endswith(".md"):
        s = in_prose(s)
    newsrc[p] = s
for p, s in newsrc.items():
    (ROOT / p).write_text(s)
for o, n in sorted(moves.items()):
    (ROOT / n).parent.mkdir(parents=True, exist_ok=True)
    if Path(ROOT / n).exists() and n not in moves:
        report.append(f"{n} exists already (from {o})")
# two phases, since names may swap
for o, n in moves.items():
    subprocess.run(["git", "mv", "-f", o, n + ".moving"], cwd=ROOT, check=True)
for o, n in moves.items():
    subprocess.run(["git", "mv", "-f", n + ".moving", n], cwd=ROOT, check=True)
HERE = Path(__file__).parent
(HERE / "moves.json").write_text(json.dumps(moves))
(HERE / "names.json").write_text(
    json.dumps({f"{f}::{q}": new for kind, f, q, new, where in entries if kind != "param"})
)
for r in report:
    print("REPORT", r)
# left-overs
olds = collections.defaultdict(set)
for kind, f, q, new, where in entries:
    olds[q.split(".")[-1]].add((kind, new))
calls = {"getattr", "setattr", "hasattr", "attrgetter", "delattr", "object", "patch"}
for p in pys:
    q = moves.get(p, p)
    t = ast.parse((ROOT / q).read_text())
    for n in ast.walk(t):
        if isinstance(n, ast.Call):
            fn = n.func.attr if isinstance(n.func, ast.Attribute) else getattr(n.func, "id", "")
            if fn in calls:
                for a in n.args:
                    if (
                        isinstance(a, ast.Constant)
                        and isinstance(a.value, str)
                        and a.value.split(".")[-1] in olds
                    ):
                        print(
                            f"STRING {q}:{n.lineno}: {ast.unparse(n)[:120]} ({olds[a.value.split('.')[-1]]})"
                        )
            if fn == "replace":
                for k in n.keywords:
                    if k.arg in olds:
                        print(
                            f"REPLACE {q}:{n.lineno}: {ast.unparse(n)[:120]} {k.arg} {olds[k.arg]}"
                        )
