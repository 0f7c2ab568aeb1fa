"""Test `rl.processes`: supervised processes, worker processes and forked calls."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from test_reward_endings import wait_until

from rl.processes import (
    ForkedCall,
    InvalidReply,
    SupervisedProcess,
    WorkerDiedError,
    WorkerProcess,
    encode_frame,
    find_descendants,
    read_message,
    reaper,
)

REPO = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

WORKER = """
import os, signal, socket, subprocess, time
from rl.processes import encode_frame, read_message

def echo(fd):
    channel = socket.socket(fileno=fd)
    while message := read_message(channel, 1 << 20):
        if message == b"die":
            print("ValueError: on purpose", flush=True)
            print("more", flush=True)
            os._exit(3)
        if message == b"close":
            print("shut", flush=True)
            channel.close()
            time.sleep(1000)
        if message == b"hang":
            time.sleep(1000)
        if message == b"print":
            for _ in range(1000):
                os.write(1, b"x" * 10_000)
            os.write(1, b"the end")
        if message == b"signals":
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                os.kill(os.getppid(), number)
                os.kill(os.getpid(), number)
            child = subprocess.Popen(["sleep", "1000"])
            child.terminate()
            message = str(child.wait(10)).encode()
        if message == b"forge":
            channel.sendall(b"no message at all")
        channel.sendall(encode_frame(message * 2))
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start a worker with the function `echo`; it is stopped at the end of the test."""
    (tmp_path / "echoing.py").write_text(WORKER)
    monkeypatch.syspath_prepend(str(tmp_path))
    workers = []

    def start(**options):
        workers.append(WorkerProcess("echoing:echo", {**os.environ}, limit=1 << 16, **options))
        return workers[-1]

    yield start
    for worker in workers:
        worker.stop()


def test_messages_of_any_length_travel_within_the_limit(start):
    worker = start()
    for message in (b"a", b"\0" * 30_000, os.urandom(32_768)):
        worker.send(message, 10)
        assert worker.receive(30) == message * 2
    worker.send(b"b" * 40_000, 10)
    with pytest.raises(InvalidReply, match="80000 bytes long, at most 65536"):
        worker.receive(10)


def test_a_deadline_a_forged_message_and_a_death_are_told_apart(start):
    worker = start()
    worker.send(b"hang", 10)
    with pytest.raises(TimeoutError):
        worker.receive(0.5)
    with pytest.raises(TimeoutError):
        worker.send(b"x" * 10_000_000, 0.5)
    assert not worker.has_ended()
    assert worker.stop() == -9
    worker = start()
    worker.send(b"forge", 10)
    with pytest.raises(InvalidReply, match="it begins with"):
        worker.receive(30)
    worker = start()
    worker.send(b"die", 10)
    with pytest.raises(WorkerDiedError, match=r"^exit code 3, it last printed: ValueError: on"):
        worker.receive(30)
    assert worker.has_ended() and worker.stop() == 3
    with pytest.raises(WorkerDiedError, match="exit code 3"):
        start().send(b"", 10) or worker.receive(1)


def test_signals_that_stop_a_run_end_no_worker_but_its_children(start):
    worker = start()
    worker.send(b"signals", 10)
    assert worker.receive(30) == b"-15-15"


def test_output_is_bounded_and_keeps_its_end(start):
    chunks = []
    worker = start(output=chunks.append)
    worker.send(b"print", 10)
    assert worker.receive(30) == b"printprint"
    worker.send(b"die", 10)
    with pytest.raises(WorkerDiedError):
        worker.receive(30)
    output = b"".join(chunks)
    assert len(output) < 80_000 and b"bytes omitted" in output and b"the end" in output


MISSING = "FileNotFoundError: [Errno 2] No such file or directory"


@pytest.mark.parametrize(("command", "code", "output"), [
    ([sys.executable, "-c", "print('one'); print('two'); raise SystemExit(5)"], 5, "one\ntwo"),
    ([sys.executable, "-c", "import os; os.kill(os.getpid(), 15)"], -15, ""),
    (["/nowhere/program"], 127, MISSING),
], ids=["exit", "signal", "missing"])  # fmt: skip
def test_a_program_ends_with_its_exit_code_and_last_output(command, code, output):
    program = SupervisedProcess(command, {**os.environ})
    assert wait_until(lambda: not program.read_output(), 30)
    assert program.stop() == code and program.last_output == output


def test_a_process_that_still_runs_is_described_with_its_output(start):
    program = SupervisedProcess(["sh", "-c", "echo one; exec sleep 1000"], {**os.environ})
    try:
        assert program.describe_end() == "it is still running, it last printed: one"
    finally:
        program.stop()
    worker = start()
    worker.send(b"close", 10)
    with pytest.raises(WorkerDiedError, match=r"^it closed its pipe but is still running, .*shut$"):
        worker.receive(30)


def test_a_process_outlives_the_thread_that_started_it(start):
    workers = []

    def start_and_ask():
        workers.append(start())
        workers[0].send(b"a", 10)
        assert workers[0].receive(30) == b"aa"

    thread = threading.Thread(target=start_and_ask)
    thread.start()
    thread.join()
    time.sleep(0.5)
    workers[0].send(b"b", 10)
    assert workers[0].receive(30) == b"bb"


KILLED = """
import os, signal, sys, time
from rl.processes import SupervisedProcess
program = SupervisedProcess(["sh", "-c", "echo ready; sleep 1000"], {**os.environ})
while not program._output_tail:
    program.read_output()
if os.fork() == 0:
    time.sleep(1000)
print(program.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_fork_of_a_killed_trainer_keeps_no_process_alive():
    """The fork keeps the socket to the reaper open."""
    trainer = subprocess.Popen(
        [sys.executable, "-c", KILLED],
        cwd=REPO,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        reaper = int(trainer.stdout.readline())
        assert trainer.wait(30) == -9
        assert wait_until(lambda: not Path(f"/proc/{reaper}").exists(), 20)
    finally:
        os.killpg(trainer.pid, 9)
        trainer.communicate()


def test_a_process_without_its_environment_ends_though_its_reaper_was_killed():
    """vLLM's processes overwrite their environment with their title."""
    output = bytearray()
    line = ["sh", "-c", "env -i sh -c 'echo $$; exec sleep 1000' & wait"]
    process = SupervisedProcess(line, dict(os.environ), output=output.extend)
    assert wait_until(lambda: process.read_output() and b"\n" in output, 20)
    sleep = int(output)
    os.kill(process.pid, signal.SIGKILL)
    process.stop()
    assert wait_until(lambda: sleep not in find_running(), 20)


def test_a_forked_call_returns_its_result_or_nothing():
    assert ForkedCall(lambda: b"\0" * 100_000, limit=1 << 20).wait() == b"\0" * 100_000
    assert ForkedCall(lambda: b"\0" * 100_000, limit=1 << 10).wait() == b""
    assert ForkedCall(lambda: os._exit(3), limit=1 << 10).wait() == b""
    assert ForkedCall(lambda: b"%d" % os.getpid(), limit=1 << 10).wait() != b"%d" % os.getpid()
    before = set(find_descendants(os.getpid()))
    call = ForkedCall(lambda: os.system("sleep 1000 & sleep 1000") and b"", limit=1 << 10)
    assert wait_until(lambda: len(set(find_descendants(os.getpid())) - before) >= 4, 20)
    call.kill()
    assert call.wait() == b""
    assert wait_until(lambda: not set(find_descendants(os.getpid())) - before, 20)


def test_what_a_forked_call_started_ends_with_it():
    def start_sleep() -> bytes:
        return str(subprocess.Popen(["sleep", "1000"]).pid).encode()

    sleep = int(ForkedCall(start_sleep, limit=1 << 10).wait())
    assert wait_until(lambda: sleep not in find_running(), 20)


def find_running() -> set[int]:
    """Return the processes that are not zombies. An orphan may have no parent that reaps it."""
    states = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            states[int(path.parent.name)] = path.read_text().rpartition(")")[2].split()[0]
    return {pid for pid, state in states.items() if state != "Z"}


def test_a_call_that_was_waited_for_is_not_killed(monkeypatch):
    """The process id may already belong to another process."""
    call = ForkedCall(lambda: b"a", limit=1 << 10)
    assert call.wait() == b"a"
    killed = []
    monkeypatch.setattr(os, "killpg", lambda *arguments: killed.append(arguments))
    call.kill()
    assert not killed


def test_a_call_is_killed_right_after_its_start(monkeypatch):
    """The child is not the leader of its process group yet."""
    monkeypatch.setattr("rl.processes.forked_call.detach_from", lambda parent: time.sleep(20))
    call = ForkedCall(lambda: b"a", limit=1 << 10)
    start_time = time.monotonic()
    call.kill()
    assert call.wait() == b"" and time.monotonic() - start_time < 10


def test_a_crash_is_noticed_while_a_call_of_another_thread_runs(monkeypatch):
    real_fork, calls, is_over = os.fork, [], threading.Event()
    first_forked = threading.Event()

    def slow_fork() -> int:
        pid = real_fork()
        if pid:  # leaves time for another thread to fork as well
            first_forked.set()
            time.sleep(0.5)
        return pid

    def hang() -> None:
        first_forked.wait(10)
        calls.append(ForkedCall(lambda: time.sleep(1000) or b"", limit=1 << 10))
        is_over.wait(60)  # the call ends with its thread

    monkeypatch.setattr(os, "fork", slow_fork)
    thread = threading.Thread(target=hang)
    thread.start()
    crash = ForkedCall(lambda: os._exit(3), limit=1 << 10)
    try:
        crash._channel.settimeout(10)
        start_time = time.monotonic()
        assert crash.wait() == b"" and time.monotonic() - start_time < 5
    finally:
        while not calls:
            time.sleep(0.01)
        calls[0].kill()
        is_over.set()
        thread.join()
        calls[0].wait()


def test_messages_without_a_limit_are_read():
    receiver, sender = socket.socketpair()
    with receiver, sender:
        sender.sendall(encode_frame(b"a" * 50_000))
        assert read_message(receiver, limit=None) == b"a" * 50_000


def test_a_call_does_not_wait_for_another_that_hangs():
    """Each call ends with its message, not with the end of a stream that a fork may keep open."""
    hanging = [ForkedCall(lambda: os.system("sleep 1000") and b"", limit=1 << 10) for _ in range(2)]
    assert ForkedCall(lambda: b"a", limit=1 << 10).wait() == b"a"
    for call in hanging:
        call.kill()
        assert call.wait() == b""


def test_a_reaper_needs_no_function_that_a_mac_lacks(monkeypatch, tmp_path):
    """macOS has os.waitid only since Python 3.13."""
    script = tmp_path / "reaper.py"
    script.write_text(
        f"import os, runpy\ndel os.waitid\nrunpy.run_path({reaper.__file__!r}, None, '__main__')\n"
    )
    monkeypatch.setattr(reaper, "__file__", str(script))
    program = SupervisedProcess(["sh", "-c", "sleep 1000 & exit 3"], dict(os.environ))
    assert "exit code 3" in program.describe_end() and program.stop() == 3
