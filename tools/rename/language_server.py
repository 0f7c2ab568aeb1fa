"""Ask basedpyright's language server for the references of a name."""

import itertools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path


class LSP:
    def __init__(s, root, venv):
        s.root = Path(root)
        s.p = subprocess.Popen(
            [str(Path(sys.executable).parent / "basedpyright-langserver"), "--stdio"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=root,
        )
        s.n = itertools.count(1)
        s.wait = {}
        s.lock = threading.Lock()
        s.log = []
        threading.Thread(target=s._read, daemon=True).start()
        s.venv = venv
        s.settings = {
            "python": {"pythonPath": f"{venv}/bin/python"},
            "basedpyright": {
                "analysis": {
                    "diagnosticMode": "openFilesOnly",
                    "typeCheckingMode": "off",
                    "indexing": False,
                    "useLibraryCodeForTypes": True,
                }
            },
        }
        s.req(
            "initialize",
            {
                "processId": os.getpid(),
                "rootUri": f"file://{root}",
                "workspaceFolders": [{"uri": f"file://{root}", "name": "w"}],
                "capabilities": {
                    "workspace": {"configuration": True, "workspaceFolders": True},
                    "textDocument": {"references": {}, "rename": {"prepareSupport": True}},
                },
            },
        )
        s.note("initialized", {})
        s.note("workspace/didChangeConfiguration", {"settings": s.settings})

    def send(s, m):
        b = json.dumps({"jsonrpc": "2.0", **m}).encode()
        with s.lock:
            s.p.stdin.write(b"Content-Length: %d\r\n\r\n" % len(b) + b)
            s.p.stdin.flush()

    def note(s, method, params):
        s.send({"method": method, "params": params})

    def req(s, method, params, timeout=600):
        i = next(s.n)
        e = threading.Event()
        s.wait[i] = [e, None]
        s.send({"id": i, "method": method, "params": params})
        if not e.wait(timeout):
            raise TimeoutError(method)
        r = s.wait.pop(i)[1]
        if "error" in r:
            raise RuntimeError(r["error"])
        return r.get("result")

    def _read(s):
        f = s.p.stdout
        while True:
            n = None
            while True:
                l = f.readline()
                if not l:
                    return
                l = l.strip()
                if not l:
                    break
                if l.lower().startswith(b"content-length:"):
                    n = int(l.split(b":")[1])
            m = json.loads(f.read(n))
            if "id" in m and "method" in m:
                if m["method"] == "workspace/configuration":
                    out = []
                    for it in m["params"]["items"]:
                        cur = s.settings
                        for k in (it.get("section") or "").split("."):
                            cur = cur.get(k, {}) if isinstance(cur, dict) else {}
                        out.append(cur)
                    s.send({"id": m["id"], "result": out})
                else:
                    s.send({"id": m["id"], "result": None})
            elif "id" in m:
                w = s.wait.get(m["id"])
                if w:
                    w[1] = m
                    w[0].set()

    def open(s, path):
        p = s.root / path
        s.note(
            "textDocument/didOpen",
            {
                "textDocument": {
                    "uri": f"file://{p}",
                    "languageId": "python",
                    "version": 1,
                    "text": p.read_text(),
                }
            },
        )

    def refs(s, path, line, col):
        return s.req(
            "textDocument/references",
            {
                "textDocument": {"uri": f"file://{s.root / path}"},
                "position": {"line": line, "character": col},
                "context": {"includeDeclaration": True},
            },
        )

    def rename(s, path, line, col, new):
        return s.req(
            "textDocument/rename",
            {
                "textDocument": {"uri": f"file://{s.root / path}"},
                "position": {"line": line, "character": col},
                "newName": new,
            },
        )
