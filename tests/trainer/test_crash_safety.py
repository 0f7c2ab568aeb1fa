"""Test runs that are killed, hang, run out of disk space or are damaged."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rank_server import REPO, TAG, Launch, Ranks
from safetensors.torch import load_file, save_file
from test_run import assert_same, command, environment, flat, rows, write

from rl.distributed import StopRequest, checkpoint_folder
from rl.errors import RankLost
from rl.trainer.checkpoint_manager import CheckpointManager

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="looks into /proc, preloads a library"
)
SEEDS = range(20)
QUICK = ("--eval-every", "0", "--rollouts-every", "0", "--no-eval-greedy")


@pytest.fixture(scope="module")
def ranks():
    server = Ranks("deepspeed")
    yield server
    server.close()


# ------------------------------------------------------------------------------------- a save fails


@pytest.fixture(scope="module")
def faulty_disk(tmp_path_factory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build the faulty disk with")
    library = tmp_path_factory.mktemp("disk") / "faulty_disk.so"
    source = REPO / "tests" / "faulty_disk.c"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True
    )
    return library


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "full"])
def test_a_save_that_goes_wrong_at_any_disk_operation_loses_nothing(faulty_disk, tmp_path, fault):
    words = [sys.executable, str(REPO / "tests" / "save_faults.py"), fault, str(tmp_path)]
    env = environment(LD_PRELOAD=str(faulty_disk))
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    # Every file of a checkpoint is written and synced with its folders; the checkpoint, its row,
    # the metrics and the old checkpoint are renamed.
    assert result["writes"] >= 10 and result["fsyncs"] >= 12 and result["renames"] >= 4, result
    assert result["from_step_1"] > 20 and result["from_step_2"] > 5, result


class RecordingConsole:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def warn(self, text: str) -> None:
        self.texts.append(text)


def state_of(value: float) -> dict:
    return {
        "value": value, "spec": {"base_model": "tiny:addition"}, "version": 1, "temperatures": [],
        "metadata": {},
    }  # fmt: skip


def write_checkpoint(folder: Path, value: float) -> None:
    with checkpoint_folder.write_checkpoint(folder) as aside:
        (aside / "model").mkdir()
        save_file({"w": torch.full((40,), value)}, str(aside / "model" / "model.safetensors"))
        (aside / "state.json").write_text(json.dumps(state_of(value)))


@pytest.mark.parametrize("name", ["model/model.safetensors", "state.json", "manifest.json"])
def test_a_damaged_checkpoint_is_refused_and_the_older_one_used(tmp_path, name):
    for step in (1, 2):
        write_checkpoint(tmp_path / "checkpoints" / f"s-{step}", float(step))
    named = [{"name": f"s-{step}", "state_path": "noted elsewhere"} for step in (1, 2)]
    file = tmp_path / "checkpoints" / "s-2" / name
    whole, rng = file.read_bytes(), random.Random(0)
    damages = [whole[:size] for size in (0, 1, len(whole) // 2, len(whole) - 1)]
    damages += [whole + b"x"] * (name != "manifest.json")
    for _ in range(60):
        bit = rng.randrange(8 * len(whole))
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        damages.append(bytes(flipped))
    refused = 0
    for damaged in [*damages, whole]:
        file.write_bytes(damaged)
        console = RecordingConsole()
        row, state = CheckpointManager.find_newest_intact(tmp_path, named, console)
        if console.texts:
            refused += 1
            assert (row["name"], state) == ("s-1", state_of(1.0))
            assert "s-2 cannot be used" in console.texts[0]
        else:  # a bit without meaning in the manifest, such as a space turned into a tab
            assert name == "manifest.json" or damaged == whole
            assert (row["name"], state) == ("s-2", state_of(2.0))
    assert refused == len(damages) if name != "manifest.json" else refused > 0.8 * len(damages)


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize(
    "dies_before", ["the first rename", "the second rename", "what was is removed"]
)
def test_a_replaced_checkpoint_is_there_under_its_name_whenever_its_writer_dies(
    tmp_path, monkeypatch, dies_before, exchanges
):
    """The path always holds the complete old or new checkpoint, even without an atomic exchange."""
    folder, remaining = tmp_path / "mine", []

    def save(text):
        with checkpoint_folder.write_checkpoint(folder, replace=True) as aside:
            (aside / "state.json").write_text(text)

    save('{"is": "old"}')
    if (child := os.fork()) == 0:
        rename = os.rename
        if not exchanges:
            checkpoint_folder._swap_folders = lambda first, other: False
        calls = {"the first rename": 0, "the second rename": 1}.get(dies_before)
        exchange = checkpoint_folder._swap_folders

        def dying(*folders):
            remaining.append(folders)
            return os._exit(9) if len(remaining) - 1 == calls else rename(*folders)

        if calls == 0 and exchanges:
            checkpoint_folder._swap_folders = lambda first, other: os._exit(9)
        elif calls is None:
            removed = shutil.rmtree
            shutil.rmtree = lambda path, **options: (
                os._exit(9) if Path(path).exists() and exchange else removed(path, **options)
            )
        os.rename = dying
        save('{"is": "new"}')
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    # an atomic exchange has no second rename
    assert code == (0 if exchanges and dies_before == "the second rename" else 9)
    new = dies_before == "what was is removed" or code == 0
    assert checkpoint_folder.read_verified_state(folder) == {"is": "new" if new else "old"}
    save('{"is": "newer"}')
    assert checkpoint_folder.read_verified_state(folder) == {"is": "newer"}
    assert not list(tmp_path.glob("*.partial-*"))  # of the writer that died, too
    checkpoint_folder.remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_an_unchanged_checkpoint_is_read_once(tmp_path, monkeypatch):
    with checkpoint_folder.write_checkpoint(tmp_path / "c") as aside:
        (aside / "state.json").write_text("{}")
    path, read = tmp_path / "c" / "state.json", []
    checksum = checkpoint_folder._read_checksum
    monkeypatch.setattr(
        checkpoint_folder, "_read_checksum", lambda file: (read.append(file), checksum(file))[1]
    )
    checkpoint_folder.verify_checkpoint(tmp_path / "c")
    checkpoint_folder.verify_checkpoint(tmp_path / "c")
    assert len(read) == 2  # just written: verified again each time
    monkeypatch.setattr(checkpoint_folder, "_SETTLED_SECONDS", -1.0)
    for _ in range(3):
        checkpoint_folder.verify_checkpoint(tmp_path / "c")
    assert len(read) == 3
    time.sleep(0.05)
    was = path.stat()
    path.write_text("[]")
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))  # like a copy that preserves timestamps
    with pytest.raises(checkpoint_folder.DamagedCheckpoint, match="does not match the checksum"):
        checkpoint_folder.verify_checkpoint(tmp_path / "c")


def test_no_room_is_known_before_anything_is_written(tmp_path):
    write_checkpoint(tmp_path / "first", 1.0)
    with pytest.raises(checkpoint_folder.DiskFull, match="MiB free.*free disk space"):
        with checkpoint_folder.write_checkpoint(tmp_path / "second", expected_bytes=2**60):
            raise AssertionError("nothing is to be written")
    assert [p.name for p in tmp_path.iterdir()] == ["first"]


# ------------------------------------------------------------------------------------------ signals

FORK = multiprocessing.get_context("fork")  # a new interpreter would import torch for each test


def listen(ready, grace: float, delay: float | None = None, has_started: bool = True) -> None:
    """Wait for a stop signal. With `delay`, end that many seconds after it."""
    with StopRequest(grace, ends_process=True) as request:
        request.has_started = has_started
        ready.set()
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            time.sleep(0.02)
            if request.exit_code is not None and delay is not None:
                time.sleep(delay)
                sys.exit(request.exit_code)


@pytest.fixture
def fork(tmp_path):
    """Return a function that forks a process for a call. Its output goes to the file `log`."""
    log, processes = tmp_path / "log", []

    def redirect(function, *arguments):
        sys.stdout = sys.stderr = log.open("w", buffering=1)
        for descriptor in (1, 2):
            os.dup2(sys.stderr.fileno(), descriptor)
        function(*arguments)

    def start(function, *arguments):
        processes.append(FORK.Process(target=redirect, args=(function, *arguments), daemon=True))
        processes[-1].start()
        return processes[-1]

    def wait(process, seconds: float = 15) -> tuple[int | None, str]:
        process.join(seconds)
        return process.exitcode, log.read_text()

    yield start, wait
    for process in processes:
        process.kill()
        process.join()


@pytest.fixture
def start_listener(fork):
    def start(*arguments):
        ready = FORK.Event()
        process = fork[0](listen, ready, *arguments)
        assert ready.wait(15)
        return process

    return start


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)]
)
def test_one_request_may_come_several_times(fork, start_listener, number, code):
    process = start_listener(30.0, 0.3)
    for _ in range(3):  # from the launcher, from the scheduler, ...
        os.kill(process.pid, number)
        time.sleep(0.02)
    assert fork[1](process) == (code, "")


@pytest.mark.parametrize(
    ("arguments", "signals", "reason"),
    [
        ((30.0, 5.0, False), [signal.SIGTERM], "SIGTERM before the first step"),
        ((30.0,), [signal.SIGUSR1, signal.SIGTERM], "a second signal, SIGTERM"),
        ((0.3,), [signal.SIGTERM], "the 0.3 s to stop in (the setting stop_grace) are over"),
    ],
)
def test_the_process_ends_at_once(fork, start_listener, arguments, signals, reason):
    """It ends without `delay` before the first step, at a second signal that is not the first one
    again, and after the grace time.
    """
    process, begin = start_listener(*arguments), time.monotonic()
    for i, number in enumerate(signals):
        time.sleep(1.2 * i)
        os.kill(process.pid, number)
    code, text = fork[1](process)
    assert code == 75 and reason in text
    assert time.monotonic() - begin < 4


def end_with(error: Exception) -> None:
    try:
        with StopRequest(30.0, ends_process=True):
            raise error
    except Exception as raised:
        signal.raise_signal(signal.SIGTERM)
        print("printed", raised)


@pytest.mark.parametrize(
    ("error", "expected"),
    [(RankLost("rank 1"), (0, "printed rank 1\n")), (ValueError(), (-signal.SIGTERM, ""))],
)
def test_after_the_loss_of_a_rank_the_error_is_printed_before_sigterm_ends_the_process(
    fork, error, expected
):
    """The launcher sends SIGTERM to the other ranks as soon as one is lost."""
    start, wait = fork
    assert wait(start(end_with, error)) == expected


def test_without_a_process_of_its_own_ctrl_c_raises_instead_of_ending_it():
    """A notebook's kernel survives, before the first step and at a second press."""
    with StopRequest(0.05) as request:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert request.exit_code is None
        request.has_started = True
        signal.raise_signal(signal.SIGINT)
        assert request.exit_code == 130
        time.sleep(1.2)  # longer than the grace time, and than presses that count as one
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


# -------------------------------------------------------------------- two processes, loss of a rank


def wait_for(launch: Launch, folder: Path, ready, seconds: float = 120) -> None:
    """Wait until the metrics satisfy `ready`. Raises AssertionError if the run ends first."""
    deadline = time.monotonic() + seconds
    while not (folder / "metrics.jsonl").exists() or not ready(rows(folder)):
        assert not launch.poll(), launch.output()
        assert time.monotonic() < deadline, launch.output()
        time.sleep(0.005)


def at_step(stage: str, batch: int):
    return lambda seen: any(
        row["stage"] == stage and row.get("progress/batch", -1) >= batch for row in seen
    )


def launch_run(ranks: Ranks, cwd: Path, *words: str, world: int = 2, out: str = "out") -> Launch:
    """Start the recipe of test_run.py in `cwd`, without evaluations."""
    return ranks.start(write(cwd), "--output-dir", out, *words, *QUICK, cwd=cwd, world=world)


@pytest.fixture(scope="module")
def reference_run(ranks, tmp_path_factory) -> tuple[Path, float]:
    """Return (folder, seconds) of an undisturbed run on two processes."""
    begin, cwd = time.monotonic(), tmp_path_factory.mktemp("undisturbed")
    launch = launch_run(ranks, cwd)
    assert launch.wait(240) == [0, 0], launch.output()
    assert "2 processes" in launch.output(0)
    return cwd / "out", time.monotonic() - begin


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[pytest.mark.campaign] * (n > 1)) for n in SEEDS]
)
def test_kill_9_of_a_random_rank_at_a_random_point(ranks, reference_run, tmp_path, seed):
    rng, (whole, seconds), out = random.Random(seed), reference_run, tmp_path / "out"
    victim, moment = rng.randrange(2), rng.uniform(0.02, 0.95) * seconds
    launch = launch_run(ranks, tmp_path)
    time.sleep(moment)
    launch.kill(victim)
    training = (out / "metrics.jsonl").exists()
    # The ranks may still be connecting; in that case a launcher ends the surviving rank.
    if not training:
        time.sleep(2.0)
        launch.kill(1 - victim, signal.SIGTERM)
    codes = list(launch.wait(60))  # the surviving rank ends by itself
    # killed while the processes were shutting down
    over = (out / "checkpoints" / "grpo-final").exists()
    if training and not over and codes[victim] == -signal.SIGKILL:
        text = launch.output(1 - victim)
        assert codes[1 - victim] == 1, launch.output()
        assert f"rank {victim} (process {launch.pids[victim]} on " in flat(text), launch.output()
    resumed = launch_run(ranks, tmp_path, "--auto-resume")
    assert resumed.wait(240) == [0, 0], resumed.output()
    assert_same(out, whole, "grpo")
    assert ranks.nothing_left() == []


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_within_the_bound(ranks, tmp_path):
    launch = launch_run(ranks, tmp_path, "--timeout", "3")
    wait_for(launch, tmp_path / "out", at_step("sft", 1))
    launch.kill(1, signal.SIGSTOP)
    begin = time.monotonic()
    while launch.codes[0] is None and time.monotonic() < begin + 60:
        launch.poll()
        time.sleep(0.05)
    seconds = time.monotonic() - begin
    launch.kill(1)  # as a launcher does after a process has failed
    assert launch.wait(20) == [1, -signal.SIGKILL], launch.output()
    text = flat(launch.output(0))
    assert f"rank 1 (process {launch.pids[1]} on" in text
    assert "did not answer within 3 s" in text and "Traceback" not in text
    assert 2.5 < seconds < 30 and ranks.nothing_left() == []


@pytest.mark.slow
def test_told_to_stop_two_processes_save_and_ask_to_be_requeued(ranks, reference_run, tmp_path):
    launch = launch_run(ranks, tmp_path)
    wait_for(launch, tmp_path / "out", at_step("grpo", 1))
    for rank in (1, 0):  # a scheduler signals all processes
        launch.kill(rank, signal.SIGUSR1)
    assert launch.wait(60) == [75, 0], launch.output()
    done = len(rows(tmp_path / "out"))
    resumed = launch_run(ranks, tmp_path, "--resume")
    assert resumed.wait(240) == [0, 0], resumed.output()
    assert "resuming from grpo-" in resumed.output(0)
    assert 0 < done < len(rows(reference_run[0]))
    assert_same(tmp_path / "out", reference_run[0], "grpo")
    assert ranks.nothing_left() == []


@pytest.mark.slow
def test_a_step_that_does_not_fit_into_the_grace_time_is_left_out(ranks, tmp_path):
    """Each update takes four seconds, and the grace time is three. The signal arrives while the
    step samples, so the state before the step is saved, in time.
    """
    recipe = write(tmp_path)
    script = tmp_path / "slow.py"
    script.write_text(f"""
import runpy, sys, time
sys.path.insert(0, {str(REPO)!r})
from rl.algorithms import grpo
from rl.trainer.trainer import Trainer
update, stop_if_late = grpo.GRPO.update, Trainer.stop_if_late
def slow(self, models, datums, progress):
    if progress.batch >= 1:
        time.sleep(4.0)
    return update(self, models, datums, progress)
def late(self):
    while self.name == "grpo" and self.done >= 2 and self.stop_request.exit_code is None:
        time.sleep(0.01)
    return stop_if_late(self)
grpo.GRPO.update, Trainer.stop_if_late = slow, late
runpy.run_path({str(REPO / "train.py")!r}, run_name="__main__")
""")
    words = (recipe, "--output-dir", "out", "--stop-grace", "3", *QUICK)
    launch = ranks.start(*words, cwd=tmp_path, script=str(script))
    wait_for(launch, tmp_path / "out", at_step("grpo", 1))

    def batches():
        seen = rows(tmp_path / "out")
        return sum(row["stage"] == "grpo" and "progress/batch" in row for row in seen)

    before = batches()
    launch.kill(0, signal.SIGTERM)
    assert launch.wait(60) == [75], launch.output()
    assert "ended immediately" not in launch.output() and before == batches()
    resumed = launch_run(ranks, tmp_path, "--resume", world=1)
    assert resumed.wait(240) == [0], resumed.output()
    assert f"{before} steps done" in flat(resumed.output(0))
    assert launch_run(ranks, tmp_path, world=1, out="alone").wait(240) == [0]
    assert rows(tmp_path / "out") == rows(tmp_path / "alone")


@pytest.mark.slow
def test_a_reward_that_hangs_ends_the_run_and_is_named(ranks, tmp_path):
    recipe = write(tmp_path)
    (tmp_path / "tests_rewards.py").write_text(
        "import subprocess, time\ndef digits(prompt, response, meta):\n    "
        "subprocess.run(['sleep', '600'])\n"
    )
    flags = "--output-dir out --reward-timeout 0.4 --batch-size 1 --reward-workers 2".split()
    launch = ranks.start(recipe, *flags, *QUICK, cwd=tmp_path, world=2)
    assert launch.wait(120) == [2, 0], launch.output()
    text = flat(launch.output(0))
    assert "digits" in text and "did not end within 0.4 s" in text
    assert "failed on every sample" in text
    assert ranks.nothing_left() == []  # neither workers nor processes of the reward


@pytest.mark.slow
def test_a_model_that_is_missing_on_another_machine_keeps_nobody_waiting(ranks, tmp_path):
    """A rank that cannot read a model reports one line at once, and the ranks stay in step."""
    script = tmp_path / "missing.py"
    script.write_text(f"""
import os, sys
sys.path.insert(0, {str(REPO)!r})
from rl import ServiceClient
from rl.learner import learner_checkpoint
from rl.errors import UserError
if os.environ["RANK"] == "1":
    right, wrong = learner_checkpoint.resolve_base_model, lambda spec, state: ("./not-here", None)
    answers = [wrong, right]
    learner_checkpoint.resolve_base_model = lambda spec, state: answers.pop(0)(spec, state)
service = ServiceClient()  # which would wait for half an hour
try:
    service.create_full_training_client("tiny:addition").result()
except UserError as error:
    print("said:", error)
service.create_full_training_client("tiny:addition").result()
print("went on")
""")
    launch = ranks.start(cwd=tmp_path, world=2, script=str(script))
    assert launch.wait(60) == [0, 0], launch.output()
    text = flat(launch.output(0))
    assert "said: no model folder at not-here" in text and "went on" in text
    assert "(on rank 1 (process" in text


@pytest.mark.slow
def test_a_driver_that_raises_releases_the_others(ranks, tmp_path):
    script = tmp_path / "raises.py"
    script.write_text(f"""
import sys
sys.path.insert(0, {str(REPO)!r})
from rl import ServiceClient
service = ServiceClient()
client = service.create_full_training_client("tiny:addition")
client.result()
raise LookupError("of the script itself")
""")
    launch = ranks.start(cwd=tmp_path, world=2, script=str(script))
    assert launch.wait(60) == [1, 0], launch.output()
    assert "LookupError: of the script itself" in launch.output(0)
    assert launch.output(1).strip() == "[1]"


@pytest.mark.slow
def test_under_the_launcher_a_killed_rank_ends_all_of_them(tmp_path):
    """accelerate's launcher ends with the ranks, reports the failure in its exit code, and leaves
    no process of its session.
    """
    words = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"]
    words += ["--config_file", str(REPO / "accelerate_configs/ddp.yaml"), *command()[1:]]
    words += [str(write(tmp_path)), "--output-dir", "out", *QUICK]
    process = subprocess.Popen(
        words,
        cwd=tmp_path,
        env=environment(**{TAG: str(tmp_path)}),
        stdout=(tmp_path / "log").open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    deadline, metrics = time.monotonic() + 240, tmp_path / "out" / "metrics.jsonl"
    while not metrics.exists() or not at_step("sft", 1)(rows(tmp_path / "out")):
        assert process.poll() is None, (tmp_path / "log").read_text()
        assert time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.01)

    def find_processes(variable: str) -> list[int]:
        """Return the ids of the launch's processes that have a variable."""
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        needed = {f"{TAG}={tmp_path}".encode(), variable.encode()}
        return [pid for pid in pids if needed <= environ_of(pid)]

    (victim,) = find_processes("RANK=1")
    os.kill(victim, signal.SIGKILL)
    assert process.wait(60) == 1
    text = (tmp_path / "log").read_text()
    assert f"rank 1 (process {victim} on" in flat(text), text
    deadline = time.monotonic() + 5
    while find_processes(f"{TAG}={tmp_path}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert find_processes(f"{TAG}={tmp_path}") == []


def environ_of(pid: int) -> set[bytes]:
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return set()


# ----------------------------------------------------------- another world size, another ZeRO stage

LAUNCHES = {
    "one": (1, None, ["NO", "Qwen3ForCausalLM", 1]),
    "ddp": (2, None, ["MULTI_CPU", "Qwen3ForCausalLM", 2]),
    "zero1": (2, 1, ["DEEPSPEED", "DeepSpeedEngine", 2]),
    "zero3": (2, 3, ["DEEPSPEED", "DeepSpeedEngine", 2]),
    "zero2": (2, 2, ["DEEPSPEED", "DeepSpeedEngine", 2]),
    "zero3-one": (1, 3, ["DEEPSPEED", "DeepSpeedEngine", 1]),
}
# Each launch loads the state that the previous launch saved after two more updates, so every kind
# of launch is written by and read by another kind.
CHAIN = ["one", "ddp", "zero3", "zero1", "zero2", "zero3-one", "one"]


@pytest.mark.slow
def test_weights_and_optimizer_are_exact_under_another_world_size_and_stage(ranks, tmp_path):
    state, held = None, {}
    for i, name in enumerate(CHAIN):
        world, stage, launch = LAUNCHES[name]
        env = {}
        if stage is not None:
            zero, file = {"stage": stage, "stage3_param_persistence_threshold": 0}, f"{name}.json"
            (tmp_path / file).write_text(json.dumps({"zero_optimization": zero}))
            env = {"ACCELERATE_USE_DEEPSPEED": "true"}
            env["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(tmp_path / file)
        out = tmp_path / f"{i}-{name}"
        out.mkdir()
        words = [str(out)] if state is None else [str(out), str(state)]
        script = str(REPO / "tests" / "portable_cases.py")
        started = ranks.start(*words, cwd=tmp_path, world=world, script=script, **env)
        assert started.wait(120) == [0] * world, started.output()
        result = json.loads((out / "result.json").read_text())
        assert result["launch"] == launch and result["sync"] > 0
        held[name] = result["pieces"]
        if state is not None:
            for file in ("model/model.safetensors", "optimizer.safetensors"):
                saved = load_file(str(state / file))
                again = load_file(str(out / "checkpoints" / "again" / file))
                assert saved.keys() == again.keys() and len(saved) > 10
                changed = [key for key in saved if not torch.equal(saved[key], again[key])]
                assert changed == [], (CHAIN[i - 1], name, file)
            moved = load_file(str(out / "checkpoints" / "end" / "optimizer.safetensors"))
            key = next(key for key in moved if key.endswith("/exp_avg"))
            assert not torch.equal(moved[key], saved[key])
        state = out / "checkpoints" / "end"
    # Weight sync under ZeRO-3 holds at most a single whole parameter in memory at a time.
    assert all(size == elements > 0 for size, elements in held["zero3"]) and len(held["zero3"]) > 10
    assert all(elements > size for size, elements in held["zero1"])
