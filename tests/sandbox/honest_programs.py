"""Honest programs for the task of hostile_programs.py, f(n) = n * n + 1. Each gets its reward. With
BENIGN of hostile_programs.py they are more than a hundred.

A text may contain {f}, which stands for `def f(n): return n * n + 1`.
"""

from typing import NamedTuple


class HonestProgram(NamedTuple):
    name: str
    text: str
    style: str  # asserts, calls, dialogue, pytest
    language: str = "python"
    package: str = ""  # has to be installed


_F = "def f(n): return n * n + 1"
_READ = "n = int(input())\n"
_PRINT = "print(n * n + 1)"


def _of(
    style: str, programs: dict[str, str], language: str = "python", package: str = ""
) -> list[HonestProgram]:
    return [
        HonestProgram(name, text.replace("{f}", _F), style, language, package)
        for name, text in programs.items()
    ]


# ----------------------------------------------------------------------------- from stdin to stdout

STDIN = {
    "exit()": _READ + _PRINT + "\nexit()",
    "quit()": _READ + _PRINT + "\nquit()",
    "exit(0) in a function": "def main():\n    n = int(input())\n    print(n * n + 1)\n    exit(0)\nmain()\nprint('never')",
    "exit in a branch": _READ + "if n >= 0:\n    print(n * n + 1)\n    exit()\nprint(0)",
    "raise SystemExit": _READ + _PRINT + "\nraise SystemExit",
    "os._exit after a flush": "import os, sys\n" + _READ + _PRINT + "\nsys.stdout.flush()\nos._exit(0)",
    "/dev/stdin": "n = int(open('/dev/stdin').read())\n" + _PRINT,
    "/dev/fd/0": "import sys\nwith open('/dev/fd/0') as file: n = int(file.readline())\n" + _PRINT,
    "/proc/self/fd/0": "n = int(open('/proc/self/fd/0').read())\n" + _PRINT,
    "/dev/stdout": _READ + "with open('/dev/stdout', 'w') as out: print(n * n + 1, file=out)",
    "/dev/stderr": _READ + "open('/dev/stderr', 'w').write('log')\n" + _PRINT,
    "pathlib of /dev/stdin": "from pathlib import Path\nn = int(Path('/dev/stdin').read_text())\n" + _PRINT,
    "a byte order mark": "\ufeff" + _READ + _PRINT,
    "a byte order mark and a coding line": "\ufeff# -*- coding: utf-8 -*-\n" + _READ + _PRINT,
    "line ends of Windows": (_READ + _PRINT + "\n").replace("\n", "\r\n"),
    "tabs": "def main():\n\tn = int(input())\n\tprint(n * n + 1)\nmain()",
    "a docstring and __name__": '"""Square."""\nif __name__ == "__main__":\n    ' + _READ + "    " + _PRINT,
    "sys.stdin.readline": "import sys\ninput = sys.stdin.readline\n" + _READ + _PRINT,
    "read().split()": "import sys\ndata = iter(sys.stdin.read().split())\nn = int(next(data))\n" + _PRINT,
    "io.BytesIO of all input": "import io, os\ninput = io.BytesIO(os.read(0, os.fstat(0).st_size)).readline\n" + _READ + _PRINT,
    "until EOFError": "try:\n    while True:\n        n = int(input())\n        print(n * n + 1)\nexcept EOFError:\n    pass",
    "stdin reconfigured": "import sys\nsys.stdin.reconfigure(encoding='utf-8')\nsys.stdout.reconfigure(line_buffering=True)\n" + _READ + _PRINT,
    "a list joined": "import sys\nout = []\n" + _READ + "out.append(str(n * n + 1))\nsys.stdout.write('\\n'.join(out))",
    "print with sep and flush": _READ + "print(n * n + 1, sep='', end='\\n', flush=True)",
    "logging": "import logging\nlogging.basicConfig(level=logging.DEBUG)\n" + _READ + "logging.info('n %d', n)\n" + _PRINT,
    "argparse without arguments": "import argparse\nargparse.ArgumentParser().parse_args()\n" + _READ + _PRINT,
    "dynamic programming": _READ + "table = [1]\nfor k in range(n): table.append(table[-1] + 2 * k + 1)\nprint(table[n])",
    "a heap": "import heapq\n" + _READ + "h = []\nfor k in range(n + 1): heapq.heappush(h, -k * k)\nprint(1 - heapq.heappop(h))",
    "a graph search": "from collections import deque\n" + _READ + "goal, queue, seen = n * n, deque([(0, 1)]), {0}\nwhile queue:\n"
                      "    x, d = queue.popleft()\n    if x == goal: print(d)\n    if x < goal: queue.append((x + 1, d + 1))",
    "memoised recursion": "import sys\nfrom functools import cache\nsys.setrecursionlimit(10**6)\n@cache\ndef g(k): return 1 if k == 0 else g(k - 1) + 2 * k - 1\n"
                          + _READ + "print(g(n))",
    "recursion in a big thread": "import sys, threading\nsys.setrecursionlimit(1 << 20)\nthreading.stack_size(1 << 27)\ndef g(k): return 0 if k == 0 else 1 + g(k - 1)\n"
                                 "def main(): print(g(int(input()) ** 2) + 1)\nt = threading.Thread(target=main); t.start(); t.join()",
    "16 threads": "import threading\n" + _READ + "r = []\nt = [threading.Thread(target=r.append, args=(n,)) for _ in range(16)]\n"
                  "[x.start() for x in t]; [x.join() for x in t]\nprint(sum(r) * n // 16 + 1)",
    "48 threads at a time": "import threading\n" + _READ + "b = threading.Barrier(48)\nr = []\ndef work():\n    b.wait()\n    r.append([n] * 1000)\n"
                            "t = [threading.Thread(target=work) for _ in range(48)]\n[x.start() for x in t]; [x.join() for x in t]\nprint(len(r) - 48 + n * n + 1)",
    "a pool of 32 threads": "from concurrent.futures import ThreadPoolExecutor\nimport time\n" + _READ +
                            "with ThreadPoolExecutor(32) as p: r = list(p.map(lambda k: time.sleep(0.01) or n, range(64)))\nprint(sum(r) // 64 * n + 1)",
    "a pool of processes": "from concurrent.futures import ProcessPoolExecutor\ndef g(n): return n * n + 1\nif __name__ == '__main__':\n"
                           "    with ProcessPoolExecutor(2) as p: print(p.submit(g, int(input())).result())",
    "multiprocessing.Pool": "import multiprocessing\ndef g(n): return n * n + 1\nif __name__ == '__main__':\n"
                            "    with multiprocessing.Pool(2) as p: print(p.map(g, [int(input())])[0])",
    "a queue between threads": "import queue, threading\nq = queue.Queue()\ndef work():\n    n = q.get()\n    print(n * n + 1)\n    q.task_done()\n"
                               "threading.Thread(target=work, daemon=True).start()\nq.put(int(input()))\nq.join()",
    "asyncio and a subprocess": "import asyncio, sys\nasync def main(n):\n    p = await asyncio.create_subprocess_exec(sys.executable, '-c', f'print({n}**2+1)')\n"
                                "    await p.wait()\nasyncio.run(main(int(input())))",
    "a local server": "import socket, threading\n" + _READ + "s = socket.create_server(('127.0.0.1', 0))\ndef serve():\n    c, _ = s.accept()\n"
                      "    c.sendall(str(int(c.recv(99)) ** 2 + 1).encode()); c.close()\nthreading.Thread(target=serve).start()\n"
                      "with socket.create_connection(s.getsockname()) as c:\n    c.sendall(str(n).encode()); print(c.recv(99).decode())",
    "a file of its own": _READ + "with open('notes.txt', 'w') as out: out.write(str(n))\nprint(int(open('notes.txt').read()) ** 2 + 1)",
    "a module of its own": "open('helper.py', 'w').write('def g(n): return n * n + 1')\nimport helper\nprint(helper.g(int(input())))",
    "a signal handler": "import signal\ndef late(*a): raise TimeoutError\nsignal.signal(signal.SIGALRM, late)\nsignal.alarm(10)\n" + _READ + _PRINT + "\nsignal.alarm(0)",
    "resource and recursion": "import resource, sys\nsoft, hard = resource.getrlimit(resource.RLIMIT_STACK)\nresource.setrlimit(resource.RLIMIT_STACK, (hard, hard))\n"
                              "sys.setrecursionlimit(10**5)\n" + _READ + _PRINT,
    "a large number on the way": _READ + "x = (n ** 4000) ** 2\nprint(len(str(x)) * 0 + n * n + 1)",
    "exec of a text": "exec('n = int(input())')\nprint(eval('n * n + 1'))",
    "sqlite": "import sqlite3\nprint(sqlite3.connect(':memory:').execute('select ? * ? + 1', (n := int(input()), n)).fetchone()[0])",
    "many imports": "import argparse, array, base64, bisect, calendar, cmath, contextlib, copy, csv, ctypes, datetime, difflib, email, enum, fnmatch, gzip, hashlib, html\n"
                    "import inspect, io, ipaddress, json, locale, lzma, pathlib, pickle, platform, pprint, queue, random, re, secrets, select, shutil, socket, statistics\n"
                    "import string, struct, subprocess, tempfile, textwrap, time, timeit, traceback, typing, unittest, urllib.parse, uuid, xml.etree.ElementTree, zipfile, zlib\n"
                    + _READ + _PRINT,
    "fractions and decimals": "from decimal import Decimal, getcontext\nfrom fractions import Fraction\ngetcontext().prec = 50\n" + _READ + "print(int(Decimal(n) ** 2) + int(3 * Fraction(1, 3)))",
    "closes stdout itself": "import sys\n" + _READ + _PRINT + "\nsys.stdout.close()",
    "ends by an error on purpose that it catches": _READ + "try: n / 0\nexcept ZeroDivisionError: print(n * n + 1)",
    "help is there": _READ + "assert callable(help)\n" + _PRINT,
}  # fmt: skip

# ---------------------------------------------------------------------------------------- functions

FUNCTIONS = {
    "nothing else": "{f}",
    "a method": "class Solution:\n    def __init__(self): self.one = 1\n    def f(self, n: int) -> int:\n        return n * n + self.one",
    "typed": "from __future__ import annotations\nfrom typing import List, Optional\ndef f(n: Optional[int] = None) -> int:\n    r: List[int] = [n]\n    return r[0] ** 2 + 1",
    "a byte order mark": "\ufeff{f}",
    "a lambda": "f = lambda n: n * n + 1",
    "a partial": "import functools\ndef g(a, n): return n * n + a\nf = functools.partial(g, 1)",
    "a callable object": "class F:\n    def __call__(self, n): return n * n + 1\nf = F()",
    "a closure": "def make(a):\n    def f(n): return n * n + a\n    return f\nf = make(1)",
    "a decorator": "import functools\ndef log(g):\n    @functools.wraps(g)\n    def inner(*a, **k): return g(*a, **k)\n    return inner\n@log\n{f}",
    "a generator inside": "def squares():\n    k = 0\n    while True:\n        yield k * k + 1\n        k += 1\ndef f(n):\n    return next(v for k, v in enumerate(squares()) if k == n)",
    "a coroutine": "import asyncio\nasync def g(n): return n * n + 1\ndef f(n): return asyncio.new_event_loop().run_until_complete(g(n))",
    "match": "def f(n):\n    match n:\n        case 0: return 1\n        case k if k > 0: return k * k + 1\n        case _: return n * n + 1",
    "walrus and comprehension": "def f(n): return [y for x in [n] if (y := x * x + 1)][0]",
    "a metaclass": "class M(type):\n    def __call__(c, n): return n * n + 1\nclass f(metaclass=M): pass",
    "global state": "calls = 0\ndef f(n):\n    global calls\n    calls += 1\n    return n * n + 1",
    "recursion of 5000": "import sys\nsys.setrecursionlimit(20000)\ndef g(k): return 0 if k == 0 else 1 + g(k - 1)\ndef f(n): return n * n + 1 + g(5000) - 5000",
    "24 threads in each call": "import threading\ndef f(n):\n    b, r = threading.Barrier(24), []\n    def work():\n        b.wait(); r.append(n)\n"
                               "    t = [threading.Thread(target=work) for _ in range(24)]\n    [x.start() for x in t]; [x.join() for x in t]\n    return sum(r) // 24 * n + 1",
    "a helper named like Python's": "def sum(xs): return xs[0] * xs[0] + 1\ndef f(n): return sum([n])",
    "prints and warns": "import warnings, sys\ndef f(n):\n    warnings.warn('slow'); print('x' * 1000, file=sys.stderr)\n    return n * n + 1",
    "random with a seed": "import random\ndef f(n):\n    random.seed(n)\n    x = random.random()\n    return int(n * n + 1 + 0 * x)",
    "unused exit()": "def f(n):\n    if n is None: exit()\n    return n * n + 1",
    "exit below the main guard": "{f}\nif __name__ == '__main__':\n    print(f(3))\n    exit()",
    "catches its own exit": "def g(): quit(3)\ndef f(n):\n    try: g()\n    except SystemExit as e: return n * n + e.code - 2",
    "asserts of its own": "{f}\nassert f(2) == 5\nassert f(0) == 1",
    "unittest": "import unittest\n{f}\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(2), 5)\nunittest.main(exit=False)",
    "doctest": "import doctest\ndef f(n):\n    '''\n    >>> f(2)\n    5\n    '''\n    return n * n + 1\ndoctest.testmod()",
    "an enum and a dataclass": "import enum\nfrom dataclasses import dataclass, field\nclass Op(enum.Enum):\n    SQUARE = 2\n@dataclass(frozen=True)\nclass P:\n    n: int\n"
                               "    power: Op = field(default=Op.SQUARE)\n    def value(self): return self.n ** self.power.value + 1\ndef f(n): return P(n).value()",
    "a cached function": "import functools\n@functools.lru_cache(None)\n{f}",
    "prints on the way": "def f(n):\n    print('working', n)\n    return n * n + 1",
}  # fmt: skip
PYTESTED = {
    "plain": "{f}",
    "with all its names": "import math\n__all__ = ['f']\n{f}\ndef other(): return math.pi",
    "a byte order mark": "\ufeff{f}",
    "with a main guard": "{f}\nif __name__ == '__main__':\n    exit(f(1))",
}
NUMPY = {
    "numpy": "import numpy as np\ndef f(n): return np.int64(n) ** 2 + 1",
    "numpy arrays": "import numpy as np\ndef f(n): return int((np.arange(n + 1) ** 2).max() + 1)",
    "numpy linear algebra": "import numpy as np\ndef f(n): return round(float(np.linalg.det(np.array([[n, -1.0], [1.0, n]]))))",
    "numpy random": "import numpy as np\ndef f(n): return int(np.random.default_rng(0).integers(0, 1) + n * n + 1)",
}
NUMPY_STDIN = {
    "numpy from stdin": "import sys\nimport numpy as np\nx = np.array(sys.stdin.read().split(), dtype=np.int64)\nprint(*(x ** 2 + 1))"
}

# ---------------------------------------------------------------------------------- other languages

BASH = {
    "read": "read n; echo $((n * n + 1))",
    "cat /dev/stdin": "n=$(cat /dev/stdin); echo $((n * n + 1))",
    "a loop over /dev/stdin": "while read -r n; do echo $((n * n + 1)); done < /dev/stdin",
    "process substitution": "while read -r n; do echo $((n * n + 1)); done < <(cat)",
    "two of them": "paste -d+ <(cat /dev/fd/0) <(echo 1) > x; IFS=+ read -r n one < x; echo $((n * n + one))",
    "a here document": "read n\ncat <<END\n$((n * n + 1))\nEND",
    "a pipe into /dev/stdin": "read n; echo $((n * n)) | { read m < /dev/stdin; echo $((m + 1)); }",
    "errors to /dev/stderr": "read n; echo log > /dev/stderr; echo $((n * n + 1)) > /dev/stdout",
    "mapfile and arrays": "mapfile -t lines; n=${lines[0]}; echo $((n * n + 1)); exit 0",
    "awk": "awk '{ print $1 * $1 + 1 }'",
    "a function and local": 'square() { local k=$1; echo $((k * k + 1)); }\nread n && square "$n"',
}
JAVASCRIPT = {
    "readFileSync('/dev/stdin')": "const n = parseInt(require('fs').readFileSync('/dev/stdin', 'utf8')); console.log(n * n + 1)",
    "readFileSync(0)": "const n = Number(require('fs').readFileSync(0)); console.log(n * n + 1)",
    "readline": "const r = require('readline').createInterface({input: process.stdin}); r.on('line', l => console.log(l * l + 1))",
    "a stream": "let s = ''; process.stdin.on('data', d => s += d).on('end', () => console.log(s * s + 1))",
    "async iteration": "(async () => { for await (const l of require('readline').createInterface({input: process.stdin})) console.log(l * l + 1) })()",
    "process.exit": "const n = +require('fs').readFileSync('/dev/fd/0', 'utf8'); console.log(n * n + 1); process.exit(0)",
    "big integers": "const n = BigInt(require('fs').readFileSync('/dev/stdin', 'utf8').trim()); console.log(String(n * n + 1n))",
}
CPP = {
    "iostream": "#include <iostream>\nint main() { long long n; std::cin >> n; std::cout << n * n + 1 << '\\n'; }",
    "scanf": "#include <cstdio>\nint main() { int n; scanf(\"%d\", &n); printf(\"%d\\n\", n * n + 1); return 0; }",
    "threads": "#include <cstdio>\n#include <thread>\n#include <vector>\nint main() { int n; scanf(\"%d\", &n); std::vector<std::thread> t; int r[16];\n"
               "for (int i = 0; i < 16; i++) t.emplace_back([&, i] { r[i] = n; }); for (auto& x : t) x.join(); printf(\"%d\\n\", r[15] * r[0] + 1); }",
    "freopen of /dev/stdin": "#include <cstdio>\nint main() { FILE* in = freopen(\"/dev/stdin\", \"r\", stdin); int n; if (in && scanf(\"%d\", &n)) printf(\"%d\", n * n + 1); }",
}  # fmt: skip

HONEST = [
    *_of("dialogue", STDIN),
    *_of("asserts", dict(list(FUNCTIONS.items())[::2])),
    *_of("calls", dict(list(FUNCTIONS.items())[1::2])),
    *_of("pytest", PYTESTED),
    *_of("asserts", NUMPY, package="numpy"),
    *_of("dialogue", NUMPY_STDIN, package="numpy"),
    *_of("dialogue", BASH, "bash"),
    *_of("dialogue", JAVASCRIPT, "javascript"),
    *_of("dialogue", CPP, "c++"),
]
