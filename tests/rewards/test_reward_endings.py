"""Test that processes started by rewards do not outlive the run: ten ways to end a run, and several
ways in which a process hides from its parent.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="looks into /proc; elsewhere a process group is all there is"
)

# Each reward starts processes that hide in different ways, then does what its response says. `MARK`
# is in the command line of each process.
MODULE = """
import os, signal, subprocess, sys, time
SLEEP = "import signal, sys, time; [signal.signal(s, signal.SIG_IGN) for s in (1, 2, 15)]; time.sleep(1000)"
def words(kind): return [sys.executable, "-S", "-c", SLEEP, os.environ["PYTHON_MARK"], kind]
def start():
    subprocess.Popen(words("child"))
    subprocess.Popen(words("session"), start_new_session=True)
    subprocess.Popen(words("nameless"), start_new_session=True, env={})
    if os.fork() == 0:                                   # a daemon: a grandchild whose parent has ended
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 256)
            os.execve(sys.executable, words("daemon"), {})
        os._exit(0)
    os.wait()
def reward(prompt, response, meta=None):
    start()
    open(os.environ["PYTHON_READY"], "a").write("x")
    if response == "hang": time.sleep(1000)
    if response == "raise": raise ValueError("on purpose")
    if response == "die": os._exit(3)
    if response == "crash": os.kill(os.getpid(), signal.SIGSEGV)
    if response == "kill the guard": os.kill(os.getppid(), signal.SIGKILL); time.sleep(1000)
    if response == "stop the guard": os.kill(os.getppid(), signal.SIGSTOP); time.sleep(1000)
    return 1.0
"""

SCRIPT = """
import os, signal, sys, time
sys.path[:0] = [{repo!r}, {here!r}]
from rl.distributed.stop_signals import end_with_launcher
from rl.rewards import Scorer
end_with_launcher()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits it ignored
way = sys.argv[1]
responses = {{"error": "raise", "reward timeout": "hang", "worker crash": "crash", "worker exit": "die"}}
response = responses.get(way, way if "guard" in way else "fine")
scorer = Scorer("starts:reward", timeout=1.0 if "timeout" in way or "guard" in way else 1000, workers=1)
pending = scorer.submit("ask", response, None)
score = pending.result(60)
print("scored", score, flush=True)
if way in responses or "guard" in way:         # the trainer goes on: what that item started must be gone before it ends
    if way != "error": time.sleep(1000)
if way == "pool close":
    scorer.close()
    time.sleep(1000)
if way == "exception":
    raise LookupError("of the script")
if way in ("signal", "launcher"):
    scorer.submit("ask", "hang", None)
    time.sleep(1000)
"""

# way to end -> (argument of the script, signal sent to it, whether the script still runs when the
# processes must be gone)
WAYS = {
    "finish": ("finish", None, False),
    "error of the reward": ("error", None, False),
    "Ctrl-C": ("signal", signal.SIGINT, False),
    "SIGTERM": ("signal", signal.SIGTERM, False),
    "SIGKILL of the trainer": ("signal", signal.SIGKILL, False),
    "reward timeout": ("reward timeout", None, True),
    "worker crash": ("worker crash", None, True),
    "worker exit": ("worker exit", None, True),
    "pool close": ("pool close", None, True),
    "exception in the script": ("exception", None, False),
    "launcher killed": ("launcher", signal.SIGKILL, False),
    "the reward kills its guard": ("kill the guard", None, True),  # see OUT_OF_REACH
    "the reward stops its guard": ("stop the guard", None, True),
}
# This reward kills its guard and removes the mark from the environment of its processes, so they
# cannot be attributed to it.
OUT_OF_REACH = {"the reward kills its guard": {"nameless", "daemon"}}
QUICK = ("SIGKILL of the trainer", "reward timeout", "pool close")
LAUNCHER = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"


def list_processes(mark: str) -> dict[int, str]:
    """Return the pid and kind of each process with the mark in its command line."""
    results = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if mark.encode() in words:
            results[int(folder.name)] = words[words.index(mark.encode()) + 1].decode()
    return results


def workers_of(mark: str) -> list[int]:
    results = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"PYTHON_MARK={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                results.append(int(folder.name))
        except OSError:
            continue
    return results


def wait_until(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(condition())


@pytest.mark.parametrize(
    "way", [way if way in QUICK else pytest.param(way, marks=pytest.mark.slow) for way in WAYS]
)
def test_nothing_that_a_reward_started_is_left(tmp_path, way):
    messages, number, runs_on = WAYS[way]
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    (tmp_path / "starts.py").write_text(MODULE)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(repo=str(REPO), here=str(tmp_path)))
    ready = tmp_path / "ready"
    env = {
        **os.environ,
        "PYTHON_MARK": mark,
        "PYTHON_READY": str(ready),
        "ACCELERATE_MIXED_PRECISION": "no",
    }
    words = [sys.executable, str(script), messages]
    if messages == "launcher":
        words = [sys.executable, "-c", LAUNCHER, *words]
    trainer = subprocess.Popen(
        words,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output = trainer.stdout.readline()
        assert output.startswith("scored"), trainer.stderr.read()
        if number is not None:
            assert wait_until(
                lambda: (
                    ready.read_text() == "xx"
                    and set(list_processes(mark).values()) >= {"child", "daemon", "nameless"}
                ),
                20,
            )
            trainer.send_signal(number)
        if not runs_on:
            trainer.wait(30)
        assert ready.exists()
        assert wait_until(
            lambda: not set(list_processes(mark).values()) - OUT_OF_REACH.get(way, set()), 10
        ), list_processes(mark)
        if runs_on:
            assert trainer.poll() is None
            trainer.kill()
        # neither a worker nor its guard remains
        assert wait_until(lambda: not workers_of(mark), 10), workers_of(mark)
    finally:
        for pid in {*list_processes(mark), *workers_of(mark)}:
            os.kill(pid, signal.SIGKILL)
        trainer.communicate(timeout=30)
