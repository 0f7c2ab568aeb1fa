"""Rename local variables, scope by scope.

    rename_locals.py FILE <<'X'
    Class.method old new
    function old new
    function.inner old new
    X

Within the named function (and everything nested in it) every variable `old` that is bound there becomes `new`:
locals, loop and comprehension variables, lambda parameters, parameters of nested functions (with keywords of calls
to these by name), `except .. as`, `with .. as`, imports `as`. Parameters of the function itself are refused
(put them into the rename map instead), as is a `new` that the function already uses. `*` as the function: every
function of the file in which `old` is bound (as a local) and `new` is not used.
"""

import sys

import libcst as cst
import libcst.matchers as m


class Names(cst.CSTVisitor):
    """All Name tokens used as variables in a subtree, and what is bound in it."""

    def __init__(self):
        self.used = set()
        self.bound = set()
        self.inner_params = {}
        self.depth = 0
        self.globals = set()

    def visit_Attribute(self, node):
        node.value.visit(self)
        return False

    def visit_Arg(self, node):
        node.value.visit(self)
        return False

    def visit_Name(self, node):
        self.used.add(node.value)

    def _target(self, node):
        for n in m.findall(node, m.Name()):
            self.bound.add(n.value)

    def _bind(self, node):
        if isinstance(node, cst.Name):
            self.bound.add(node.value)
        elif isinstance(node, (cst.Tuple, cst.List)):
            for e in node.elements:
                self._bind(e.value)

    def visit_AssignTarget(self, node):
        self._bind(node.target)

    def visit_AnnAssign(self, node):
        self._bind(node.target)

    def visit_AugAssign(self, node):
        self._bind(node.target)

    def visit_NamedExpr(self, node):
        self._bind(node.target)

    def visit_For(self, node):
        self._bind(node.target)

    def visit_CompFor(self, node):
        self._bind(node.target)

    def visit_AsName(self, node):
        self._bind(node.name)

    def visit_ImportAlias(self, node):
        if node.asname is None:
            n = node.name
            while isinstance(n, cst.Attribute):
                n = n.value
            self.bound.add(n.value)
            self.used.add(n.value)
        else:
            self._bind(node.asname.name)
        return False

    def visit_MatchAs(self, node):
        if node.name:
            self.bound.add(node.name.value)

    def visit_MatchStar(self, node):
        if node.name:
            self.bound.add(node.name.value)

    def visit_FunctionDef(self, node):
        self.bound.add(node.name.value)
        self.used.add(node.name.value)

    def visit_ClassDef(self, node):
        self.bound.add(node.name.value)

    def visit_Param(self, node):
        self.bound.add(node.name.value)
        self.used.add(node.name.value)

    def visit_Global(self, node):
        for n in node.names:
            self.globals.add(n.name.value)


def own_params(f):
    p = f.params
    out = {x.name.value for x in (*p.params, *p.kwonly_params, *p.posonly_params)}
    if isinstance(p.star_arg, cst.Param):
        out.add(p.star_arg.name.value)
    if p.star_kwarg:
        out.add(p.star_kwarg.name.value)
    return out


class Renamer(cst.CSTTransformer):
    def __init__(self, old, new, inner):
        self.old, self.new, self.inner = old, new, inner

    def visit_Attribute_attr(self, node):
        self.skip = True

    def leave_Attribute(self, orig, upd):
        if orig.attr.value == self.old:
            return upd.with_changes(attr=orig.attr)
        return upd

    def leave_Arg(self, orig, upd):
        return upd.with_changes(keyword=orig.keyword) if orig.keyword is not None else upd

    def leave_Call(self, orig, upd):
        if isinstance(orig.func, cst.Name) and orig.func.value in self.inner:
            return upd.with_changes(
                args=[
                    a.with_changes(keyword=cst.Name(self.new))
                    if a.keyword is not None and a.keyword.value == self.old
                    else a
                    for a in upd.args
                ]
            )
        return upd

    def leave_ImportAlias(self, orig, upd):
        if orig.asname is None:
            return orig
        return upd.with_changes(name=orig.name)

    def leave_ImportFrom(self, orig, upd):
        return upd.with_changes(module=orig.module)

    def leave_MatchKeywordElement(self, orig, upd):
        return upd.with_changes(key=orig.key)

    def leave_Name(self, orig, upd):
        return upd.with_changes(value=self.new) if orig.value == self.old else upd


class InFunctions(cst.CSTTransformer):
    def __init__(self, jobs):
        self.jobs = jobs
        self.stack = []
        self.done = set()
        self.notes = []

    def visit_ClassDef(self, node):
        self.stack.append(node.name.value)

    def leave_ClassDef(self, o, u):
        self.stack.pop()
        return u

    def visit_FunctionDef(self, node):
        self.stack.append(node.name.value)

    def leave_FunctionDef(self, orig, upd):
        qual = ".".join(self.stack)
        self.stack.pop()
        for where, old, new in self.jobs:
            if where != qual and where != "*":
                continue
            names = Names()
            upd.body.visit(names)
            for d in ():
                pass
            if old not in names.bound or old in own_params(upd):
                if where != "*":
                    self.notes.append(
                        f"{qual}: `{old}` is "
                        + (
                            "a parameter: put it into the rename map"
                            if old in own_params(upd)
                            else "not bound here"
                        )
                    )
                continue
            if old in names.globals:
                self.notes.append(f"{qual}: {old} is global")
                continue
            if new in names.used or new in own_params(upd):
                self.notes.append(f"{qual}: `{new}` is used already; `{old}` kept")
                continue
            inner = {
                n.name.value for n in m.findall(upd.body, m.FunctionDef()) if old in own_params(n)
            }
            upd = upd.with_changes(body=upd.body.visit(Renamer(old, new, inner)))
            self.done.add((where, old, new))
        return upd


def main():
    path = sys.argv[1]
    jobs = [tuple(l.split()) for l in sys.stdin if l.strip() and not l.startswith("#")]
    bad = [j for j in jobs if len(j) != 3]
    if bad:
        sys.exit(f"lines of three words, please: {bad}")
    src = open(path).read()
    worker = InFunctions(jobs)
    out = cst.parse_module(src).visit(worker)
    for j in jobs:
        if j not in worker.done and not any(j[0] in n for n in worker.notes):
            worker.notes.append(f"{j}: nothing renamed")
    if open(path).read() != src:
        sys.exit("the file changed meanwhile; run again")
    open(path, "w").write(out.code)
    for n in worker.notes:
        print("note:", n)
    print(f"{len(worker.done)} of {len(jobs)} lines applied to {path}")


main()
