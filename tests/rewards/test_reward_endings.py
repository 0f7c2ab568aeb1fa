"""Test that processes started by rewards do not outlive the run: ways to end a run or an item, and
several ways in which a process hides from its parent.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
ways, mark, scorers = sys.argv[1:], os.environ["PYTHON_MARK"], []
responses = {{"error": "raise", "reward timeout": "hang", "worker crash": "crash", "worker exit": "die"}}
for number, way in enumerate(ways):
    os.environ["PYTHON_MARK"] = f"{{mark}}-{{number}}"
    response = responses.get(way, way if "guard" in way else "fine")
    limit = 1.0 if "timeout" in way or "guard" in way else 1000
    scorers.append(Scorer("starts:reward", timeout=limit, workers=1))
    score = scorers[-1].submit("ask", response, None).result(60)
    print("scored", score, flush=True)
    if way == "pool close":
        scorers[-1].close()
    if way in ("signal", "launcher"):
        scorers[-1].submit("ask", "hang", None)
        time.sleep(1000)
    if way == "exception":
        raise LookupError("of the script")
    if way not in ("finish", "error"):      # the trainer goes on: what that item started must be gone before it ends
        sys.stdin.readline()
"""

# way in which the trainer ends -> (argument of the script, signal sent to it)
ENDS = {
    "finish": ("finish", None),
    "error of the reward": ("error", None),
    "Ctrl-C": ("signal", signal.SIGINT),
    "SIGTERM": ("signal", signal.SIGTERM),
    "SIGKILL of the trainer": ("signal", signal.SIGKILL),
    "exception in the script": ("exception", None),
    "launcher killed": ("launcher", signal.SIGKILL),
}
# Ways after which the trainer goes on, in turn. The first kills its guard and removes the mark from
# the environment of its processes, so some of them cannot be attributed to it.
OUT_OF_REACH = {"kill the guard": {"nameless", "daemon"}}
GOES_ON = [
    ("reward timeout", "pool close"),
    pytest.param(
        ("kill the guard", "stop the guard", "worker crash", "worker exit"), marks=pytest.mark.slow
    ),
]
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
    """Return the processes whose mark begins with `mark`."""
    results = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(entry.startswith(f"PYTHON_MARK={mark}".encode()) for entry in variables):
            results.append(int(folder.name))
    return results


def wait_until(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(condition())


@contextmanager
def run_script(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """Start the script; yield its process and mark. Nothing remains of it, whatever happens."""
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    (folder / "starts.py").write_text(MODULE)
    script = folder / "script.py"
    script.write_text(SCRIPT.format(repo=str(REPO), here=str(folder)))
    words = [sys.executable, str(script), *arguments]
    if arguments == ("launcher",):
        words = [sys.executable, "-c", LAUNCHER, *words]
    variables = {"PYTHON_MARK": mark, "PYTHON_READY": str(folder / "ready")}
    trainer = subprocess.Popen(
        words,
        env={**os.environ, **variables, "ACCELERATE_MIXED_PRECISION": "no"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield trainer, mark
    finally:
        marks = [f"{mark}-{number}" for number in range(len(arguments))]
        for pid in {*workers_of(mark), *(pid for each in marks for pid in list_processes(each))}:
            os.kill(pid, signal.SIGKILL)
        trainer.kill()
        trainer.communicate(timeout=30)


def check_scored(trainer: subprocess.Popen) -> None:
    assert trainer.stdout.readline().startswith("scored"), trainer.stderr.read()


def check_gone(mark: str, way: str) -> None:
    kinds = OUT_OF_REACH.get(way, set())
    gone = wait_until(lambda: not set(list_processes(mark).values()) - kinds, 10)
    assert gone, (way, list_processes(mark))


QUICK = "SIGKILL of the trainer"


@pytest.mark.parametrize(
    "way", [way if way == QUICK else pytest.param(way, marks=pytest.mark.slow) for way in ENDS]
)
def test_nothing_that_a_reward_started_outlives_the_trainer(tmp_path, way):
    argument, number = ENDS[way]
    ready = tmp_path / "ready"
    with run_script(tmp_path, argument) as (trainer, mark):
        check_scored(trainer)
        if number is not None:
            assert wait_until(lambda: ready.read_text() == "xx", 20)
            kinds = {"child", "daemon", "nameless"}
            assert wait_until(lambda: set(list_processes(f"{mark}-0").values()) >= kinds, 20)
            trainer.send_signal(number)
        trainer.wait(30)
        assert ready.exists()
        check_gone(f"{mark}-0", way)
        # neither a worker nor its guard remains
        assert wait_until(lambda: not workers_of(mark), 10), workers_of(mark)


@pytest.mark.parametrize("ways", GOES_ON, ids=" and ".join)
def test_what_an_item_started_is_gone_while_the_trainer_goes_on(tmp_path, ways):
    with run_script(tmp_path, *ways) as (trainer, mark):
        for number, way in enumerate(ways):
            check_scored(trainer)
            check_gone(f"{mark}-{number}", way)
            assert (tmp_path / "ready").exists() and trainer.poll() is None
            if number < len(ways) - 1:
                trainer.stdin.write("\n")
                trainer.stdin.flush()
        trainer.kill()
        assert wait_until(lambda: not workers_of(mark), 10), workers_of(mark)
