"""Run recipes of tinker-cookbook as `python -m` does, each in a fork of a process that has imported
the modules that all of them need.

For each recipe, the process reads a line of JSON, {"module", "arguments", "out", "seconds",
"typed"}, and answers with {"code"}. Code 124 means that the recipe exceeded its time limit.
"""

import atexit
import json
import os
import runpy
import signal
import sys
import time
import traceback

import datasets  # noqa: F401
import torch
import transformers  # noqa: F401
from tinker_cookbook import renderers  # noqa: F401
from tinker_cookbook.rl import train  # noqa: F401

torch.set_num_threads(1)


def run_recipe(module: str, arguments: list[str], out: str, typed: str) -> int:
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    ends, begins = os.pipe()
    os.write(begins, typed.encode())
    os.close(begins)
    os.dup2(ends, 0)
    os.setsid()  # so that killpg below also ends its child processes
    sys.argv = [module, *arguments]
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        os._exit(
            run_recipe(request["module"], request["arguments"], request["out"], request["typed"])
        )
    end, status = time.monotonic() + request["seconds"], None
    while status is None and time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if not done:
            status = None
            time.sleep(0.1)
    if status is None:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    print(
        json.dumps({"code": 124 if status is None else os.waitstatus_to_exitcode(status)}),
        flush=True,
    )
