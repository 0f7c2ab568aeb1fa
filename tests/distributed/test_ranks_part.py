"""Test ranks that must stop: the driver is stopped, the ranks were started with different settings,
or the launcher is killed. Each case ends within a bound and names its cause.
"""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rank_server import TAG, make_launch_command, make_launch_environment, shared_ranks
from test_run import write

from rl.config import CHANGEABLE_OPTIONS, diff_configs
from rl.distributed import ZeroSharding, get_launch_sharding, heartbeat, launch_agreement
from rl.distributed.heartbeat import HeartbeatMonitor, HeartbeatSender
from rl.distributed.launch_agreement import collect_launch_info, find_differences
from rl.errors import UserError
from rl.runtime import SamplerSettings, WorkerSettings

REPO = Path(__file__).resolve().parents[2]
TIMEOUT = 4  # a heartbeat per second


# --------------------------------------------------------------------------------------- heartbeats

WATCHER = """
import sys, time
sys.path.insert(0, {repo!r})
from rl.distributed.heartbeat import HeartbeatMonitor
HeartbeatMonitor("127.0.0.1", int(sys.argv[1]), sys.argv[2], interval_seconds=0.2, timeout=0.8, lost_message=lambda seconds: f"lost after {{seconds:.1f}}")
print("watching", flush=True)
time.sleep(30)
"""
DRUMMER = """
import sys, time
sys.path.insert(0, {repo!r})
from rl.distributed.heartbeat import HeartbeatSender
drum = HeartbeatSender(0.2)
print(drum.port, drum.token, flush=True)
if sys.argv[1] == "say goodbye":
    sys.stdin.readline()
    drum.close()
    print("closed", flush=True)
time.sleep(60)
"""


def python(code: str, *words: str) -> subprocess.Popen:
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-c", code.format(repo=str(REPO)), *words]
    return subprocess.Popen(command, **pipes, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["stopped", "killed", "says goodbye"])
def test_a_watcher_ends_with_a_stopped_or_killed_drummer_and_not_with_one_that_says_goodbye(mode):
    with python(DRUMMER, "say goodbye" if mode == "says goodbye" else "") as drummer:
        port, word = drummer.stdout.readline().split()
        with python(WATCHER, port, word) as watcher:
            assert watcher.stdout.readline() == "watching\n"
            time.sleep(1.0)  # heartbeats for longer than the timeout
            assert watcher.poll() is None
            begin = time.monotonic()
            if mode == "says goodbye":
                drummer.stdin.write("\n")
                drummer.stdin.flush()
                time.sleep(1.5)
                assert watcher.poll() is None
                watcher.kill()
            else:
                drummer.send_signal(signal.SIGSTOP if mode == "stopped" else signal.SIGKILL)
                assert watcher.wait(20) == 1
                assert "lost after" in watcher.stderr.read()
                assert time.monotonic() - begin < 10
        drummer.kill()


def test_a_watcher_that_was_itself_stopped_for_long_goes_on():
    drum = HeartbeatSender(0.2)
    with python(WATCHER, str(drum.port), drum.token) as watcher:
        assert watcher.stdout.readline() == "watching\n"
        watcher.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        watcher.send_signal(signal.SIGCONT)
        time.sleep(0.8)
        assert watcher.poll() is None, watcher.stderr.read()
        watcher.kill()
    drum.close()


WAITS = WATCHER.replace("print(", "watch.waiting_since = time.monotonic()\nprint(").replace(
    "\nHeartbeatMonitor(", "\nwatch = HeartbeatMonitor("
)


@pytest.mark.parametrize("collecting", [False, True])
def test_a_watcher_left_waiting_by_a_drummer_that_beats_ends_unless_that_waits_for_another(
    collecting,
):
    """A driver that hangs in its code still sends heartbeats, because a separate thread
    sends them.
    """
    drum = HeartbeatSender(0.2)
    drum.waiting_since = time.monotonic() if collecting else None
    with python(WAITS, str(drum.port), drum.token) as watcher:
        assert watcher.stdout.readline() == "watching\n"
        begin = time.monotonic()
        if collecting:
            time.sleep(1.6)  # twice the timeout
            assert watcher.poll() is None
            drum.waiting_since = None
        assert watcher.wait(20) == 1 and "lost after" in watcher.stderr.read()
        assert time.monotonic() - begin > 0.7  # timeout 0.8 s, started just before `begin`
    drum.close()


def test_strangers_get_no_beats_and_keep_nobody_from_them():
    drum = HeartbeatSender(0.1)
    silent = [socket.create_connection(("127.0.0.1", drum.port)) for _ in range(5)]
    wrong = socket.create_connection(("127.0.0.1", drum.port))
    wrong.sendall(b"GET / HTTP/1.1\r\n\r\n")
    wrong.settimeout(5.0)
    try:
        assert wrong.recv(10) == b""  # connection closed
    except ConnectionResetError:
        pass
    right = socket.create_connection(("127.0.0.1", drum.port))
    right.sendall(drum.token[:7].encode())  # in pieces
    time.sleep(0.3)
    right.sendall(drum.token[7:].encode())
    right.settimeout(5.0)
    assert right.recv(1) == b"."
    drum.close()
    for each in silent:
        each.settimeout(5.0)
        assert each.recv(10) == b""
    assert right.recv(1000).endswith(b"!")


def test_many_ranks_may_connect_at_once():
    drum = HeartbeatSender(0.1)
    ranks = []
    for _ in range(150):
        ranks.append(socket.create_connection(("127.0.0.1", drum.port)))
    for each in ranks:  # no rank has sent its token while others connect
        each.sendall(drum.token.encode())
        each.settimeout(5.0)
    assert {each.recv(1) for each in ranks} == {b"."}
    drum.close()
    for each in ranks:
        each.close()


def test_a_stranger_is_disconnected_after_a_time(monkeypatch):
    monkeypatch.setattr("rl.distributed.heartbeat._CONNECT_SECONDS", 0.2)
    drum = HeartbeatSender(0.1)
    with socket.create_connection(("127.0.0.1", drum.port)) as silent:
        silent.settimeout(5.0)
        assert silent.recv(10) == b""
    drum.close()


def test_no_connection_is_said_and_not_waited_for(monkeypatch, capsys):
    monkeypatch.setattr("rl.distributed.heartbeat._CONNECT_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    HeartbeatMonitor("127.0.0.1", port, "word", interval_seconds=1.0, timeout=4.0, lost_message=str)
    assert f"no connection to port {port} of 127.0.0.1" in capsys.readouterr().err


# -------------------------------------------------------------------------------- matching settings


def test_each_setting_that_differs_is_found_and_named():
    """Change each field of the settings in turn, at every depth."""
    base = WorkerSettings()
    names = ["rank 0 (process 1 on a)", "rank 1 (process 2 on b)"]
    changed = 0
    for path, settings in iterate_changes(base):
        (text,) = find_differences(list(map(collect_launch_info, (base, settings))), names)
        assert text.startswith(f"the setting {path} is ") and text.endswith(names[0])
        assert names[1] in text
        changed += 1
    assert changed >= 10
    assert find_differences(list(map(collect_launch_info, (base, WorkerSettings()))), names) == []


def iterate_changes(settings, prefix=""):
    """Yield (path, settings with that field changed) for every leaf field."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            for path, inner in iterate_changes(value, f"{prefix}{field.name}."):
                yield path, dataclasses.replace(settings, **{field.name: inner})
            continue
        other = {
            bool: lambda v: not v,
            int: lambda v: v + 1,
            float: lambda v: v + 1.0,
            str: lambda v: v + "x",
            tuple: lambda v: (*v, "x"),
        }
        new = other[type(value)](value) if value is not None else 1
        copy = dataclasses.replace(settings)  # the field is set below without validation
        object.__setattr__(copy, field.name, new)
        yield prefix + field.name, copy


def test_what_one_side_alone_has_differs():
    """Either side may miss a key: an older version knows fewer settings."""
    less, more, names = {"a": "1"}, {"a": "1", "b": "2"}, ["r0", "r1"]
    assert find_differences([less, more], names) == ["b is 2 on r1 and none on r0"]
    assert find_differences([more, less], names) == ["b is none on r1 and 2 on r0"]


@pytest.mark.parametrize(
    ("heard", "ends"), [("..x..x.", False), ("..x...", True), ("...", True), ("..g", False)]
)
def test_silences_count_only_while_nothing_comes_between(monkeypatch, heard, ends):
    """Three silent intervals (.) in a row are too many. A beat (x) resets the count. After a
    goodbye (g), silence is no error.
    """

    class FakeConnection(contextlib.nullcontext):
        remaining = iter(heard)

        def settimeout(self, seconds):
            pass

        def recv(self, size):
            match next(self.remaining, "g"):
                case ".":
                    raise TimeoutError
                case "g":
                    return heartbeat._GOODBYE
            return heartbeat._BEAT

    watch, exits = HeartbeatMonitor.__new__(HeartbeatMonitor), []
    watch._interval_seconds, watch._max_missed, watch._timeout = 0.001, 3, 60.0
    watch._lost_message, watch._closed = "{} s".format, threading.Event()
    monkeypatch.setattr(heartbeat.os, "_exit", exits.append)
    monkeypatch.setattr(heartbeat.os, "write", lambda *_: None)
    watch._run(FakeConnection())
    assert exits == ([1] if ends else [])


def test_versions_and_code_are_compared():
    first = collect_launch_info(WorkerSettings())
    version, checksum = "the version of torch", "the code of this project (checksum)"
    other = {**first, version: "1.0", checksum: "00000000"}
    result = find_differences([first, other], ["rank 0", "rank 1"])
    assert (
        len(result) == 2 and f"{version} is 1.0 on rank 1 and {first[version]} on rank 0" in result
    )


def test_the_checksum_is_of_every_source_of_the_project(tmp_path, monkeypatch):
    for package in ("rl", "kernels"):
        shutil.copytree(
            REPO / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    here = launch_agreement._source_checksum()
    monkeypatch.setattr(launch_agreement, "_ROOT", tmp_path)
    assert launch_agreement._source_checksum() == here
    for path in sorted(tmp_path.rglob("*.py"))[::29]:
        text = path.read_text()
        path.write_text(text + "\n")
        assert launch_agreement._source_checksum() != here, path
        path.write_text(text)
    assert launch_agreement._source_checksum() == here


def test_a_deepspeed_config_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "ds_configs/zero3.json")
    assert get_launch_sharding() == ZeroSharding(stage=3)
    for text in ("{'zero_optimization': {}}", "[]"):
        (tmp_path / "mine.json").write_text(text)
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "mine.json")
        with pytest.raises(UserError, match="the DeepSpeed config mine.json is "):
            get_launch_sharding()


def sharding_of(monkeypatch, tmp_path, *, local="8", world="16", **zero):
    """Return the sharding of a DeepSpeed config on machines with `local` processes."""
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": zero}))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "zero.json"))
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    return get_launch_sharding()


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_overlap_comm_is_refused_except_at_stage_2(stage, monkeypatch, tmp_path):
    with pytest.raises(UserError, match=f"overlap_comm works only at ZeRO stage 2.* stage {stage}"):
        sharding_of(monkeypatch, tmp_path, stage=stage, overlap_comm=True)
    for value in (False, "auto"):
        sharding = sharding_of(monkeypatch, tmp_path, stage=stage, overlap_comm=value)
        assert sharding == ZeroSharding(stage=stage)
    assert sharding_of(monkeypatch, tmp_path, stage=2, overlap_comm=True) == ZeroSharding(stage=2)


@pytest.mark.parametrize(
    ("world", "local", "size", "rows"),
    [
        ("4", "4", 2, 2),
        ("16", "8", 8, 8),
        ("16", "8", "auto", 8),
        ("8", "4", "auto", 4),
        ("12", "8", "auto", 4),  # the last four of two machines sample
        ("8", "8", "auto", 1),  # a single machine needs no second copy
        ("6", "8", "auto", 1),  # the last two of its processes sample
        ("6", "8", 3, 3),
        ("1", "1", "auto", 1),
    ],
)
def test_rows_of_a_second_copy_lie_inside_machines(world, local, size, rows, monkeypatch, tmp_path):
    zero = {"stage": 3, "zero_hpz_partition_size": size}
    sharding = sharding_of(monkeypatch, tmp_path, local=local, world=world, **zero)
    assert sharding == ZeroSharding(stage=3, hpz=rows)
    # --plan-gpus: "auto" follows the launch that is planned
    planned = [sharding.rescale(world, 8) for world in (16, 8)]
    expected = (8, 1) if size == "auto" else (rows, rows)
    assert planned == [ZeroSharding(stage=3, hpz=hpz) for hpz in expected]


@pytest.mark.parametrize(("world", "local", "stage", "size"), [("8", "4", 3, 8), ("16", "8", 2, 8)])
def test_other_rows_are_refused(world, local, stage, size, monkeypatch, tmp_path):
    zero = {"stage": stage, "zero_hpz_partition_size": size}
    with pytest.raises(UserError, match=f"zero_hpz_partition_size is {size}, "):
        sharding_of(monkeypatch, tmp_path, local=local, world=world, **zero)


def test_the_default_of_several_machines_gathers_inside_them(monkeypatch):
    """The config of slurm/many_nodes.sbatch."""
    script = (REPO / "slurm/many_nodes.sbatch").read_text()
    (name,) = re.findall(r"accelerate_configs/(\w+)\.yaml", script)
    file = REPO / f"accelerate_configs/{name}.yaml"
    options = ("--config_file", str(file), "--machine_rank", "1", "--num_processes", "8")
    for key, value in make_launch_environment(*options).items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert get_launch_sharding() == ZeroSharding(stage=3, hpz=4)


# ------------------------------------------------------------------------------------ two processes


@pytest.fixture(scope="module")
def ranks():
    return shared_ranks()


STOPPED = """
import os, signal, sys, time
sys.path.insert(0, {repo!r})
from rl import ServiceClient
from rl.runtime.rank_settings import WorkerSettings
from rl.runtime.training_worker import TrainingWorker
make = TrainingWorker.create_model
def stops(self, *arguments):
    made = make(self, *arguments)
    if os.environ["RANK"] == "0":
        print("stopping at", time.time(), flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    return made
if {where!r} == "in a verb":
    TrainingWorker.create_model = stops
service = ServiceClient(settings=WorkerSettings(timeout_seconds={timeout}))
service.create_full_training_client("tiny:addition").result()
print("stopping at", time.time(), flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["in a verb", "between verbs"])
def test_a_stopped_driver_is_noticed_within_the_timeout_and_a_beat(ranks, tmp_path, where):
    script = tmp_path / "stops.py"
    script.write_text(STOPPED.format(repo=str(REPO), where=where, timeout=TIMEOUT))
    launch = ranks.start(cwd=tmp_path, world=2, script=str(script))
    deadline = time.monotonic() + 90
    while launch.codes[1] is None and time.monotonic() < deadline:
        launch.poll()
        time.sleep(0.02)
    ended = time.time()
    launch.kill(0)
    assert launch.wait(20) == [-signal.SIGKILL, 1], launch.output()
    stopped = float(launch.output(0).split("stopping at")[1].split()[0])
    # 3 s is the margin for this machine; it is not part of the bound
    assert ended - stopped < TIMEOUT + TIMEOUT / 4 + 3.0, launch.output()
    text = launch.output(1)
    assert f"rank 0 (process {launch.pids[0]} on" in text
    assert f"did not answer within {TIMEOUT} s" in text


UNLIKE = """
import os, sys
sys.path.insert(0, {repo!r})
from rl import ServiceClient
from rl.runtime.rank_settings import SamplerSettings, WorkerSettings
mine = SamplerSettings(max_rows=7 if os.environ["RANK"] == "1" else 1024)
try:
    service = ServiceClient(settings=WorkerSettings(sampler=mine, timeout_seconds=60))
except ValueError as error:
    print("refused:", error)
"""


@pytest.mark.slow
def test_settings_that_differ_between_ranks_are_refused(ranks, tmp_path):
    assert SamplerSettings().max_rows == 1024
    script = tmp_path / "unlike.py"
    script.write_text(UNLIKE.format(repo=str(REPO)))
    launch = ranks.start(cwd=tmp_path, world=2, script=str(script))
    assert launch.wait(60) == [0, 1], launch.output()
    cause = "refused: the ranks do not agree: the setting sampler.max_rows is 7 on rank 1 (process"
    assert cause in launch.output(0) and "and 1024 on rank 0 (process" in launch.output(0)
    assert "the error of rank 0 lists the differences" in launch.output(1)


OWN = """
import os, sys, time
sys.path.insert(0, {repo!r})
from rl import ServiceClient
service = ServiceClient()
service.create_full_training_client("tiny:addition").result()
open("ready", "w").write(str(os.getppid()))
time.sleep(1000)
"""


@pytest.mark.slow
def test_a_users_own_script_ends_with_a_killed_launcher(tmp_path):
    script, tag = tmp_path / "own.py", f"launched-{os.getpid()}"
    script.write_text(OWN.format(repo=str(REPO)))
    env = {**os.environ, "OMP_NUM_THREADS": "1", TAG: tag}
    with (tmp_path / "log").open("w") as log:
        launcher = subprocess.Popen(
            make_launch_command("ddp", script),
            cwd=tmp_path,
            env=env,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 240
        while not (tmp_path / "ready").exists():
            assert launcher.poll() is None and time.monotonic() < deadline, (
                tmp_path / "log"
            ).read_text()
            time.sleep(0.05)
        assert len(find_tagged_processes(tag)) >= 3  # the launcher and two ranks
        launcher.kill()
        launcher.wait()
        deadline = time.monotonic() + 30
        while find_tagged_processes(tag) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert find_tagged_processes(tag) == []
    finally:
        for pid in find_tagged_processes(tag):
            os.kill(pid, signal.SIGKILL)


LAST = """
import os
from pathlib import Path
if Path("spent").exists(): raise MemoryError("as if there were none")
count = [0]
def digits(prompt, response, meta):
    assert os.environ["MY_SETTING"] == "handed over" and "MY_TOKEN" not in os.environ
    count[0] += 1
    if count[0] > 40:
        Path("spent").touch()
        os._exit(1)
    return count[0] % 3
"""


@pytest.mark.slow
def test_a_run_whose_rewards_cannot_be_restored_ends_with_the_cause(ranks, tmp_path):
    recipe = write(tmp_path)
    (tmp_path / "tests_rewards.py").write_text(LAST)
    flags = (
        "--output-dir out --reward-workers 1 --reward-env MY_SETTING --eval-every 0 "
        "--rollouts-every 0"
    ).split()
    launch = ranks.start(
        recipe, *flags, cwd=tmp_path, world=2, MY_SETTING="handed over", MY_TOKEN="secret"
    )
    assert launch.wait(120) == [2, 0], launch.output()
    text = " ".join(launch.output(0).replace("│", " ").split())
    assert "cannot score any more" in text and "Traceback" not in text
    assert "MemoryError: as if there were none" in text
    assert ranks.nothing_left() == []


def test_what_rewards_get_of_the_environment_may_change_when_a_run_is_resumed():
    """A run that predates the setting can be resumed as well."""
    stage = {"name": "grpo", "method": "grpo", "settings": {"learning_rate": 1.0}}
    later = {**stage, "settings": {"learning_rate": 1.0, "reward_env": ["MY_SETTING"]}}
    before, after = ({"options": {}, "stages": [one]} for one in (stage, later))
    assert diff_configs(before, after, ignore=CHANGEABLE_OPTIONS) == []


def find_tagged_processes(tag: str) -> list[int]:
    results = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{TAG}={tag}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                results.append(int(folder.name))
        except OSError:
            continue
    return results
