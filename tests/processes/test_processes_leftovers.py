"""Test that processes started by environments and tools do not outlive their episode or run."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from test_reward_endings import list_processes, wait_until

REPO = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="looks into /proc; elsewhere a process group is all there is"
)

# The environment starts processes that hide from their parent, and a tool that sleeps. `MARK` is a
# word in each of their command lines.
ENVIRONMENT = """
import os, subprocess, sys, time
from rl.envs import Environment, TurnResult

SLEEP = "import time; time.sleep(1000)"
NESTS = "import subprocess, sys; subprocess.run(sys.argv[1:], start_new_session=True)"
def words(kind): return [sys.executable, "-S", "-c", SLEEP, "MARK", kind]

def sleeps() -> str:
    '''Sleep.'''
    subprocess.Popen(words("tool"))
    time.sleep(1000)

class Starts(Environment):
    '''Starts processes.'''
    tools = (sleeps,)
    def start(self):
        subprocess.Popen(words("child"))
        subprocess.Popen([sys.executable, "-S", "-c", NESTS, *words("nested")])
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.closerange(0, 256)
                os.execve(sys.executable, words("daemon"), {})
            os._exit(0)
        os.wait()
        return "go"
    def step(self, answer):
        return TurnResult(reward=1.0, done=True)
"""

SCRIPT = """
import signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits it ignored
sys.path[:0] = [{repo!r}, {here!r}]
from rl.envs import isolate_environment, parse_environment
from rl.envs.env_runner import EpisodeTask
from rl.envs.fork_server import SubprocessRunner

spec = isolate_environment(parse_environment("{here}/starts.py:Starts", []))
spec.fork_server.begin()
runner = SubprocessRunner("episode", EpisodeTask({{}}, 0), spec.fork_server.fork)
runner.start()
call = {{"function": {{"name": "sleeps", "arguments": {{}}}}}}
threading.Thread(target=lambda: runner.process_answer({{"tool_calls": [call]}}), daemon=True).start()
print("started", flush=True)
sys.stdin.readline()
if sys.argv[1] == "episode":
    runner.kill()
if sys.argv[1] == "close":
    spec.fork_server.close()
if sys.argv[1] != "finish":
    time.sleep(1000)
"""

# way to end -> (signal of the trainer, kinds of processes that must end while the trainer runs)
WAYS = {
    "finish": (None, set()),
    "episode": (None, {"child", "nested", "tool"}),
    "close": (None, {"child", "nested", "tool", "daemon"}),
    "Ctrl-C": (signal.SIGINT, set()),
    "SIGKILL": (signal.SIGKILL, set()),
}


@pytest.mark.parametrize("way", WAYS)
def test_nothing_that_an_environment_started_is_left(tmp_path, way):
    number, ends_early = WAYS[way]
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    (tmp_path / "starts.py").write_text(ENVIRONMENT.replace("MARK", mark))
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT.format(repo=str(REPO), here=str(tmp_path))))
    trainer = subprocess.Popen(
        [sys.executable, str(script), way],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert trainer.stdout.readline() == "started\n", trainer.stderr.read()
        all_kinds = {"child", "daemon", "nested", "tool"}
        assert wait_until(lambda: set(list_processes(mark).values()) == all_kinds, 20)
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        if ends_early:
            assert wait_until(lambda: not ends_early & set(list_processes(mark).values()), 10)
            assert trainer.poll() is None
            trainer.kill()
        if number is not None:
            trainer.send_signal(number)
        trainer.wait(30)
        assert wait_until(lambda: not list_processes(mark), 10), list_processes(mark)
    finally:
        for pid in list_processes(mark):
            os.kill(pid, signal.SIGKILL)
        trainer.kill()
        trainer.communicate(timeout=30)
