"""Test the lock on a run's folder: a single owner, whatever dies, on this host or another."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl.errors import RunFolderError
from rl.processes.run_lock import RunLock

REPO = Path(__file__).resolve().parents[2]
HOLD = f"""
import sys, time
sys.path.insert(0, {str(REPO)!r})
from pathlib import Path
from rl.processes.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]), heartbeat_seconds=0.1, stale_seconds=1.0)
lock.acquire(lambda text: print(text, flush=True))
print("held", flush=True)
time.sleep(float(sys.argv[2]))
lock.check_held()
lock.release()
"""


def start_lock_holder(folder: Path, seconds: float = 60) -> subprocess.Popen:
    command = [sys.executable, "-c", HOLD, str(folder), str(seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def list_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def make_foreign_lock(folder: Path, seconds_ago: float, **more) -> dict:
    """Write the lock of a process on an unreachable machine; return its record."""
    owner = {
        "host": "node17", "boot": "else", "pid": 4242, "began": "1", "slurm": None,
        "nonce": "theirs",
    }  # fmt: skip
    owner |= {"since": time.time() - 3600, **more}
    (folder / "run.lock").write_text(json.dumps(owner))
    then = time.time() - seconds_ago
    os.utime(folder / "run.lock", (then, then))
    return owner


def test_a_second_process_is_refused_and_told_who_has_it(tmp_path):
    process = start_lock_holder(tmp_path)
    message = rf"process {process.pid} on \S+, started \d+ s ago, last heartbeat \d s ago"
    with pytest.raises(RunFolderError, match=f"in use by {message}"):
        RunLock(tmp_path).acquire()
    # On the same host, the state of the owner is known without waiting.
    with pytest.raises(RunFolderError, match="in use by"):
        RunLock(tmp_path, patient=True).acquire()
    process.kill()
    process.wait()
    text: list[str] = []
    with RunLock(tmp_path) as lock:
        lock.acquire(text.append)
        lock.acquire(text.append)  # acquiring a held lock is a no-op
        (said,) = text
        assert said.startswith(f"process {process.pid} on {os.uname().nodename} had {tmp_path}")
        assert "has ended (perhaps it was killed). Its lock is taken over" in said
        assert list_files(tmp_path) == ["run.lock"]
        lock.check_held()
    assert list_files(tmp_path) == []


def test_a_process_that_ended_but_is_not_waited_for_is_dead(tmp_path):
    process = start_lock_holder(tmp_path)
    process.kill()
    stat, deadline = Path(f"/proc/{process.pid}/stat"), time.monotonic() + 20
    while stat.read_text().rpartition(")")[2].split()[0] != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
    with RunLock(tmp_path) as lock:
        lock.acquire()
    process.wait()


def test_a_lock_that_is_acquired_again_has_a_heartbeat(tmp_path):
    lock = RunLock(tmp_path, heartbeat_seconds=0.05)
    lock.acquire()
    lock.release()
    with lock:
        lock.acquire()
        first, deadline = lock.heartbeat_time(), time.monotonic() + 20
        while lock.heartbeat_time() == first and time.monotonic() < deadline:
            time.sleep(0.02)
        assert lock.heartbeat_time() > first


def test_a_repeated_link_request_of_nfs_is_no_other_owner(tmp_path, monkeypatch):
    link = os.link

    def link_twice(*names):
        link(*names)
        link(*names)  # raises FileExistsError

    monkeypatch.setattr("os.link", link_twice)
    with RunLock(tmp_path) as lock:
        lock.acquire()
        with pytest.raises(RunFolderError, match=f"in use by process {os.getpid()}"):
            RunLock(tmp_path).acquire()
    assert list_files(tmp_path) == []


def test_a_process_id_that_was_given_again_is_another_process(tmp_path):
    with RunLock(tmp_path) as lock:
        lock.acquire()
        owner = json.loads((tmp_path / "run.lock").read_text())
    alive = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    owner |= {"pid": alive.pid, "began": "1", "nonce": "theirs"}
    (tmp_path / "run.lock").write_text(json.dumps(owner))
    with RunLock(tmp_path) as lock:
        lock.acquire()
    alive.kill()
    alive.wait()


def test_a_lock_of_another_host_ends_with_its_heartbeat(tmp_path):
    make_foreign_lock(tmp_path, 30)
    message = r"process 4242 on node17, started 60 min ago, last heartbeat (30|31) s ago"
    with pytest.raises(RunFolderError, match=message):
        RunLock(tmp_path).acquire()
    make_foreign_lock(tmp_path, 61)
    with RunLock(tmp_path) as lock:
        lock.acquire()
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()


def test_a_requeued_job_waits_until_it_knows_and_takes_over_its_own_earlier_start(
    tmp_path, monkeypatch
):
    make_foreign_lock(tmp_path, 0)
    begin, text = time.monotonic(), []
    with RunLock(tmp_path, patient=True, heartbeat_seconds=0.1, stale_seconds=1.0) as lock:
        lock.acquire(text.append)
    assert 0.8 < time.monotonic() - begin < 30
    assert "waiting up to 1 s" in text[0]
    assert "taken over" in text[1]
    make_foreign_lock(tmp_path, 0, slurm=["70012", 0])
    monkeypatch.setenv("SLURM_JOB_ID", "70012")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with RunLock(tmp_path) as lock:
        lock.acquire(text.append)
    assert "earlier start of this Slurm job 70012" in text[-1]
    make_foreign_lock(tmp_path, 0, slurm=["70012", 1])  # the same start: two processes of a job
    with pytest.raises(RunFolderError, match="node17"):
        RunLock(tmp_path).acquire()


def test_a_heart_that_beats_again_is_alive(tmp_path):
    make_foreign_lock(tmp_path, 5)
    code = (
        f"import os, time\nfor _ in range(600):\n    time.sleep(0.1)\n    "
        f"os.utime({str(tmp_path / 'run.lock')!r})"
    )
    beating = subprocess.Popen([sys.executable, "-c", code])
    with pytest.raises(RunFolderError, match="last heartbeat 0 s ago"):
        RunLock(tmp_path, patient=True, heartbeat_seconds=0.5, stale_seconds=8.0).acquire()
    beating.kill()
    beating.wait()


def test_who_lost_the_folder_writes_nothing_more_there(tmp_path):
    lock = RunLock(tmp_path, heartbeat_seconds=0.05, stale_seconds=1.0)
    lock.acquire()
    lock.check_held()
    (tmp_path / "new").write_text(json.dumps({"host": "node17", "pid": 4242, "nonce": "theirs"}))
    os.replace(tmp_path / "new", tmp_path / "run.lock")
    deadline = time.monotonic() + 20
    while lock._lost_to is None and time.monotonic() < deadline:
        time.sleep(0.02)
    with pytest.raises(RunFolderError, match="taken over by process 4242 on node17"):
        lock.check_held()
    lock.release()
    assert json.loads((tmp_path / "run.lock").read_text())["nonce"] == "theirs"  # now the owner


def test_who_was_suspended_does_not_take_back_what_its_successor_released(tmp_path):
    process = start_lock_holder(tmp_path, 2.0)
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.2)  # the lock is stale
    (tmp_path / "run.lock").unlink()  # as the release of a process that had taken it over
    process.send_signal(signal.SIGCONT)
    assert "taken over by an unknown process" in process.communicate(timeout=20)[1]
    assert process.returncode == 1 and list_files(tmp_path) == []


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '"x"', '{"pid": "x"}', "\x00\xff", '{"host": 3, "pid": null, "nonce": []}'],
)
def test_a_lock_that_cannot_be_read_ends_with_its_heartbeat(tmp_path, text):
    (tmp_path / "run.lock").write_text(text)
    with pytest.raises(RunFolderError, match="its lock names none"):
        RunLock(tmp_path).acquire()
    os.utime(tmp_path / "run.lock", (0, 0))
    with RunLock(tmp_path) as lock:
        lock.acquire()
    assert list_files(tmp_path) == []


@pytest.mark.slow
def test_of_many_at_once_one_at_a_time_has_it(tmp_path):
    """Processes hold the lock for a moment, take it over from dead owners, and are killed. Two
    never hold it at once.
    """
    code = f"""
import os, random, sys, time
sys.path.insert(0, {str(REPO)!r})
from pathlib import Path
from rl.errors import RunFolderError
from rl.processes.run_lock import RunLock
folder, rng = Path(sys.argv[1]), random.Random(int(sys.argv[2]))
had, end = 0, time.monotonic() + 4
while time.monotonic() < end or had == 0:
    lock = RunLock(folder, heartbeat_seconds=0.05, stale_seconds=2.0)
    try:
        lock.acquire()
    except RunFolderError:
        time.sleep(rng.uniform(0, 0.01))
        continue
    inside = os.open(folder / "inside", os.O_CREAT | os.O_EXCL)  # fails where another is in here
    os.close(inside)
    had += 1
    time.sleep(rng.uniform(0, 0.01))
    os.unlink(folder / "inside")
    lock.release()
    if rng.random() < 0.3 and os.fork() == 0:
        try:
            RunLock(folder).acquire()
        finally:
            os._exit(0)  # and leaves the lock behind
try:
    while True:
        os.wait()
except ChildProcessError:
    print(had)
"""
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), str(i)], stdout=subprocess.PIPE, text=True
        )
        for i in range(4)
    ]
    outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 4
    assert all(int(text) > 0 for text in outputs)
    lock = RunLock(tmp_path)
    lock.acquire()  # taken over if a killed child still holds it
    lock.release()
    assert list_files(tmp_path) == []


def test_who_takes_a_dead_owners_place_looks_again_whether_it_is_still_his(tmp_path):
    """In between, another process has replaced the lock and is running."""
    make_foreign_lock(tmp_path, 61)
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    verdict = first._find_end_reason

    def slow(owner, age):
        if owner.get("nonce") == "theirs":
            second.acquire()
        return verdict(owner, age)

    first._find_end_reason = slow
    with pytest.raises(RunFolderError, match="in use by"):
        first.acquire()
    assert json.loads((tmp_path / "run.lock").read_text())["nonce"] == second._record["nonce"]
    assert list_files(tmp_path) == ["run.lock"]
    second.check_held()
    second.release()
    assert list_files(tmp_path) == []
