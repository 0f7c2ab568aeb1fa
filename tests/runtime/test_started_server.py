"""Test vLLM servers that a run starts: restarts, and what remains after the run."""

import dataclasses
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from rank_server import shared_ranks
from test_vllm import BASE, check_logprobs, drain, make_policy, sample, update
from vllm_stub import StubServer, vllm_server
from whole_runs import RECIPE, train

from rl import ServiceClient
from rl.algorithms import METHODS
from rl.client import SampleStream
from rl.config import RunSettings
from rl.config.cli import parse_run
from rl.errors import UserError
from rl.memory_plan import GIB, LaunchShape
from rl.processes import find_descendants
from rl.runtime import sampling_worker
from rl.runtime.rank_settings import SamplerSettings, WorkerSettings
from rl.sampler import SamplingRequest
from rl.trainer.memory_requirements import compute_stage_needs
from rl.types import SamplingParams
from rl.vllm import ServerPool, server_pool, started_server
from rl.vllm.transfer_validation import ServerWeights

REPO = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("vllm_stub_program.py")
VLLM = "WHETSTONE_VLLM"  # variable with the command of a real vLLM
WORDS = (
    f"grpo --base-model {BASE} --dataset addition --reward exact_match --batch-size 4 --group-size "
    "2 --max-tokens 5 --eval-every 0 --sampler vllm"
)


def make_command(state, url, fault="none", first=1, last=99, options=()):
    words = [sys.executable, str(PROGRAM), state, fault, first, last, url, *options]
    return shlex.join(map(str, words))


def list_processes(text):
    """Return the pids of live processes with `text` in their command line."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if text.encode() in (folder / "cmdline").read_bytes() and folder.name != str(
                os.getpid()
            ):
                pids.append(int(folder.name))
        except OSError:
            pass
    return pids


def wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(started_server, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(server_pool, "_RETRY_SECONDS", 0.05)


@pytest.fixture
def state(tmp_path, monkeypatch):
    """Yield the file of the stub's starts, and check that no process of the stub remains."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield tmp_path / "starts"
    assert not list_processes(str(tmp_path / "starts"))


@pytest.fixture(scope="module")
def url():
    """Yield the address of the stub that answers for every started server."""
    with vllm_server(StubServer(), lambda fault, reply: (200, reply)) as address:
        yield address


@pytest.fixture
def connect(tmp_path, state, url):
    """Yield a function that creates a service with a faulty server."""
    with ExitStack() as stack:

        def make(*fault, seconds=60.0):
            command = make_command(state, url, *fault)
            sampler = SamplerSettings(kind="vllm", command=command, request_seconds=seconds)
            settings = WorkerSettings(dtype="fp32", sampler=sampler)
            return stack.enter_context(
                ServiceClient(output_dir=tmp_path / "out", seed=3, settings=settings)
            )

        yield make


def check_samples(policy, num_prompts=6, num_samples=2):
    """Check that every requested sample arrives, with the logprobs of the learner's weights."""
    samples = sample(policy.save_weights_and_get_sampling_client(), num_prompts, num_samples)
    assert len(samples) == num_prompts * num_samples
    check_logprobs(policy, samples)


def test_a_server_starts_with_the_weights_and_ends_with_the_service(
    connect, state, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as train.py sets it
    service = connect()
    policy = make_policy(service, "lora")
    assert not state.is_file()  # nothing to sample yet
    for _ in range(2):
        check_samples(policy)
        update(policy)
    (server,) = tmp_path.glob("whetstone-server-*")
    processes = list_processes(str(state))
    assert processes and (server / "server.log").is_file()
    # vLLM on several GPUs fails under it
    environments = [Path(f"/proc/{pid}/environ").read_text() for pid in processes]
    assert not any("PYTORCH_ALLOC_CONF" in text for text in environments)
    service.close()
    assert state.read_text() == "1" and not server.exists()
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)


def make_adapter_policy(state, url, stack, rank=4):
    """Return a policy whose adapters a started server gets, and which dies at its fourth request of samples."""
    command = make_command(state, url, "dies", 1, 1, ("--enable-lora",))
    sampler = SamplerSettings(kind="vllm", command=command, request_seconds=60.0)
    settings = WorkerSettings(dtype="fp32", sampler=sampler)
    folder = state.parent / "out"
    service = stack.enter_context(ServiceClient(output_dir=folder, seed=3, settings=settings))
    return service.create_lora_training_client(BASE, rank, seed=2, train_unembed=False)


def test_a_restarted_server_gets_model_and_adapters(state):
    stub = StubServer()
    stub.lora_rank = 8
    with vllm_server(stub, lambda fault, reply: (200, reply)) as url, ExitStack() as stack:
        policy = make_adapter_policy(state, url, stack)
        with pytest.warns(UserWarning, match="killed by SIGKILL.*is restarted"):
            check_samples(policy)
        update(policy)
        check_samples(policy)
        assert len(stub.adapters) == 2 and len(set(stub.folders)) == 1
        assert state.read_text() == "2"


def test_a_rank_above_that_of_the_command_is_refused_at_the_start_of_the_server(state):
    stub = StubServer()
    stub.lora_rank = 8
    with vllm_server(stub, lambda fault, reply: (200, reply)) as url, ExitStack() as stack:
        policy = make_adapter_policy(state, url, stack, rank=16)
        with pytest.raises(UserError, match="rank 8 at most, and this adapter has rank 16"):
            check_samples(policy)
        assert state.read_text() == "1" and not stub.adapters


def test_a_server_that_dies_costs_its_own_samples(connect, state):
    """The server dies at its fourth request of samples, and again after the first restart."""
    policy = make_policy(connect("dies", 1, 2))
    with pytest.warns(UserWarning, match="killed by SIGKILL.*is restarted") as warned:
        check_samples(policy)
    texts = [text for item in warned if "is restarted" in (text := str(item.message))]
    assert [re.findall(r"\((\d) of at most 3", text) for text in texts] == [["1"], ["2"]]
    update(policy)
    check_samples(policy)
    assert state.read_text() == "3"


@pytest.mark.parametrize("by", ["health", "sample"])
def test_a_server_that_hangs_is_restarted(by, connect, state, monkeypatch):
    """The hang is detected by a health request, or by a sample that exceeds its time limit."""
    monkeypatch.setattr(started_server, "_HEALTH_LIMIT", 0.5 if by == "health" else 60.0)
    monkeypatch.setattr(started_server, "_HEALTH_SECONDS", 0.5 if by == "health" else 60.0)
    policy = make_policy(connect("hangs", 1, 1, seconds=60.0 if by == "health" else 5.0))
    with pytest.warns(UserWarning, match="is restarted"):
        check_samples(policy)
    assert state.read_text() == "2"


def test_a_server_that_dies_while_nobody_samples_is_restarted(connect, state):
    """It restarts with its previous weights, although no client needs them any more."""
    policy = make_policy(connect())
    check_samples(policy)
    update(policy)
    client = policy.save_weights_and_get_sampling_client()
    with pytest.warns(UserWarning, match="has ended.*is restarted"):
        for pid in list_processes(str(state)):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: state.read_text() == "2")
        samples = sample(client)
    check_logprobs(policy, samples)


def test_a_server_that_cannot_start_ends_the_run_at_once(connect, state, tmp_path):
    policy = make_policy(connect("ends"))
    with pytest.raises(UserError, match="exit code 3.*CUDA error: no such device") as caught:
        sample(policy.save_weights_and_get_sampling_client())
    (log,) = tmp_path.glob("whetstone-server-*/server.log")
    assert str(log) in str(caught.value) and state.read_text() == "1"
    assert "Loading the model" in log.read_text()


def test_a_server_that_never_answers_ends_the_run_after_the_time_limit(connect):
    policy = make_policy(connect("silent", seconds=2.0))
    with pytest.raises(UserError, match=r"did not start within 2 s \(sampler_timeout\)"):
        sample(policy.save_weights_and_get_sampling_client())


def test_the_number_of_restarts_is_bounded(connect, state):
    """The server dies after the first start, and then does not start again."""
    service = connect("ends", 2, 99)
    policy = make_policy(service)
    check_samples(policy)
    with pytest.warns(UserWarning, match="is restarted"):
        for pid in list_processes(str(state)):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(UserError, match="failed again after 3 restarts.*exit code 3"):
            check_samples(policy)
            check_samples(policy)
    assert int(state.read_text()) >= 4


# --------------------------------------------------------------------------------------- sleep


@pytest.fixture
def sleeping(state):
    """Yield a function that returns a policy with a server that sleeps, and the stub behind it."""
    with ExitStack() as stack:

        def make(kind="full", fault="none"):
            stub = StubServer()
            stub.lora_rank = 8 if kind == "adapter" else 0
            url = stack.enter_context(vllm_server(stub, lambda fault, reply: (200, reply)))
            options = ("--enable-sleep-mode", *["--enable-lora"] * (kind == "adapter"))
            command = make_command(state, url, fault, 1, 1, options)
            sampler = SamplerSettings(kind="vllm", command=command, request_seconds=60.0)
            settings = WorkerSettings(dtype="fp32", sampler=sampler)
            folder = state.parent / "out"
            service = ServiceClient(output_dir=folder, seed=3, settings=settings)
            stack.enter_context(service)
            if kind == "adapter":
                return service.create_lora_training_client(
                    BASE, 4, seed=2, train_unembed=False
                ), stub
            return make_policy(service, kind), stub

        yield make


def list_calls(stub):
    """Return the calls that sample, load, sleep and wake, equal neighbours once."""
    shown = {
        "/inference/v1/generate": "sample",
        "/collective_rpc": "load",
        "/sleep": "sleep",
        "/wake_up": "wake",
    }
    calls = [shown[path] for path in stub.calls if path in shown]
    return [call for i, call in enumerate(calls) if i == 0 or call != calls[i - 1]]


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_server_sleeps_while_the_learner_works(kind, sleeping, state):
    """It wakes up to load weights: the new ones, or those that it had before."""
    policy, stub = sleeping(kind)
    update(policy)  # nothing sleeps yet
    client = policy.save_weights_and_get_sampling_client()
    check_logprobs(policy, sample(client))
    again = sample(client)  # the check of the logprobs is work of the learner
    check_logprobs(policy, again)
    update(policy)
    check_samples(policy)
    turn = ["wake", "load", "sample", "sleep"]
    assert list_calls(stub) == ["sample", "load", "sample", "sleep", *turn, *turn]
    assert stub.sleep_level == 2 and state.read_text() == "1"


def test_a_server_with_adapters_keeps_its_model_while_it_sleeps(sleeping):
    policy, stub = sleeping("adapter")
    for _ in range(2):
        check_samples(policy)
        update(policy)
    assert stub.calls.count("/sleep") == 2 and stub.sleep_level == 1
    assert len(stub.folders) == 1 and len(stub.adapters) == 2


def test_a_server_does_not_sleep_while_a_stream_is_open(sleeping):
    policy, stub = sleeping()
    stream = SampleStream(policy.save_weights_and_get_sampling_client())
    stub.token_seconds = 0.03
    params = SamplingParams(max_tokens=20, temperature=0.7, stop=[])
    stream.add(SamplingRequest(prompt=[3, 4], params=params))
    assert not stream.run_steps(2).finished
    update(policy)
    drain(stream)
    assert "/sleep" not in stub.calls
    update(policy)
    assert stub.sleep_level == 2


@pytest.mark.parametrize(
    ("path", "message"), [("/wake_up", "is restarted"), ("/sleep", "is ended, and started again")]
)
def test_a_server_that_fails_to_sleep_or_wake_up_is_started_again(path, message, sleeping, state):
    policy, stub = sleeping()
    sample(policy.save_weights_and_get_sampling_client())
    stub.failing_path = path
    with pytest.warns(UserWarning, match=f"answered {path}.*HTTP 500.*{message}"):
        update(policy)
        samples = sample(policy.save_weights_and_get_sampling_client())
    stub.failing_path = None
    assert state.read_text() == "2"
    check_logprobs(policy, samples)


def test_a_server_that_dies_asleep_is_restarted_when_it_has_to_sample(sleeping, state):
    """Earlier its memory would be missing while the learner works."""
    policy, stub = sleeping()
    check_samples(policy)
    assert stub.sleep_level == 2
    for pid in list_processes(str(state)):
        os.kill(pid, signal.SIGKILL)
    time.sleep(1)
    assert state.read_text() == "1"
    with pytest.warns(UserWarning, match="is restarted"):
        check_samples(policy)
    assert state.read_text() == "2"


@pytest.mark.parametrize(
    ("option", "cuda", "sleeps"),
    [
        ("", True, True),
        ("", False, False),
        ("--no-enable-sleep-mode", True, False),
        ("--enable_sleep_mode", False, True),
    ],
)
def test_sleep_is_for_a_server_on_a_gpu(option, cuda, sleeps, tmp_path):
    command = f"vllm serve {option}"
    assert started_server.enables_sleep(command, cuda) == sleeps
    words = tuple(command.split())
    launch = started_server.ServerLaunch(words, "float32", 8, 0.3, cuda=cuda, sleeps=sleeps)
    line = launch.build_command(tmp_path, 81)
    assert ("--enable-sleep-mode" in line) == (sleeps and not option)


def test_options_of_the_user_replace_those_of_the_run(tmp_path):
    command = ("vllm", "serve", "--max-model-len", "512", "--dtype=float16")
    launch = started_server.ServerLaunch(command, "float32", 8, 0.3, cuda=True)
    line = launch.build_command(tmp_path, 81)
    assert line[:6] == [*command, str(tmp_path)]
    assert line.count("--max-model-len") == 1 and "--dtype" not in line
    assert line[line.index("--max-num-seqs") + 1] == "8" and "--enforce-eager" not in line
    assert "--no-enable-chunked-prefill" not in line
    line = dataclasses.replace(launch, cuda=False).build_command(tmp_path, 81)
    assert {"--enforce-eager", "--no-enable-chunked-prefill"} <= set(line)


@pytest.mark.parametrize("option", ["--max_model_len", "--max-model-len"])
def test_options_with_underscores_are_those_with_dashes(option, tmp_path):
    command = ("vllm", "serve", option, "512", "--enable_lora")
    launch = started_server.ServerLaunch(command, "float32", 8, 0.3, cuda=True)
    line = launch.build_command(tmp_path, 81)
    assert [word for word in line if word.replace("_", "-") == "--max-model-len"] == [option]
    assert started_server.enables_adapters(" ".join(command))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("sh --config=f.yaml", "has --config"),
        ("sh 'a", "is no command line: No closing quotation"),
        (
            "sh -n serve x serve Qwen/Qwen3-4B --dtype half",
            "names the model Qwen/Qwen3-4B: leave it out",
        ),
        ("A=1 no-such-program serve", "there is no program no-such-program"),
    ],
)
def test_a_command_that_cannot_be_read_is_refused(command, message):
    with pytest.raises(UserError, match=message):
        started_server.find_command(command)


def test_a_command_may_set_variables_and_name_a_program_of_the_home_folder(tmp_path, monkeypatch):
    program = tmp_path / "vllm"
    program.write_text("")
    program.chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    found = started_server.find_command("CUDA_VISIBLE_DEVICES=1 ~/vllm serve --max-model-len=9")
    assert found == ("env", "CUDA_VISIBLE_DEVICES=1", str(program), "serve", "--max-model-len=9")
    assert started_server.find_command("sh serve") == ("sh", "serve")


def test_a_command_for_adapters_has_room_for_their_rank(tmp_path):
    launch = started_server.ServerLaunch(
        ("vllm", "serve", "--enable-lora"), "float32", 8, 0.3, cuda=True
    )
    line = launch.build_command(tmp_path, 81, lora_rank=9)
    assert line[line.index("--max-lora-rank") + 1] == "16" and "--max-loras" in line
    assert "--max-lora-rank" not in launch.build_command(tmp_path, 81)


def test_weights_that_a_restart_needs_are_removed_with_the_next(tmp_path):
    pool = ServerPool((), "nonce", folder=str(tmp_path), started_server=FakeServer())
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    pool.load_weights(ServerWeights("nonce-1", folders[0]))
    pool.release_folder(folders[0])
    assert folders[0].is_dir()
    pool.load_weights(ServerWeights("nonce-2", folders[1]))
    assert not folders[0].is_dir() and folders[1].is_dir()


class FakeServer(started_server.StartedServer):
    def __init__(self):
        super().__init__(9, 1.0, None)

    def load_weights(self, weights):
        assert weights.folder.is_dir()


# ----------------------------------------------------------------------------------- whole runs


def start_run(words, folder, world=1):
    """Start `train.py WORDS` in forks of the shared server, so that a test may kill it."""
    words = [*words, "--output-dir", str(folder)]
    return shared_ranks().start(*words, cwd=folder.parent, world=world, launched=world > 1)


def read_rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()]


def all_samples_are_of_the_learners_weights(rows):
    return all(abs(row["optim/kl_sample_train_v2"]) < 1e-8 for row in rows)


def count_rows(folder):
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.is_file() else 0


@pytest.mark.slow
def test_a_killed_run_leaves_no_server_and_resumes_with_another(tmp_path, state, url):
    words = [*WORDS.split(), "--save-every", "1", "--sampler-command", make_command(state, url)]
    run = start_run([*words, "--steps", "500"], tmp_path / "run")
    try:
        wait_until(lambda: count_rows(tmp_path / "run") > 2, 120)
        servers = list_processes(str(state))
        assert servers
    finally:
        run.kill(0)
        run.wait(10)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in servers), 20)
    steps = count_rows(tmp_path / "run") + 2
    run = start_run([*words, "--steps", str(steps), "--resume"], tmp_path / "run")
    assert run.wait(120) == [0], run.output()
    rows = read_rows(tmp_path / "run")
    assert state.read_text() == "2" and len(rows) == steps
    assert all_samples_are_of_the_learners_weights(rows)


@pytest.mark.slow
@pytest.mark.parametrize("options, wanted", [(("--enable-lora",), {"16"}), ((), set())])
def test_a_server_has_room_for_the_adapters_of_later_stages(tmp_path, state, options, wanted):
    """Adapters are merged by a server that is started without --enable-lora, which needs none."""
    stages = [{"method": "grpo", "lora_rank": rank, "steps": 1} for rank in (4, 16)]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"stages": stages}))
    stub = StubServer()
    stub.lora_rank = 16 if options else 0
    with vllm_server(stub, lambda fault, reply: (200, reply)) as url:
        command = make_command(state, url, options=options)
        words = [str(recipe), *WORDS.split()[1:], "--sampler-command", command]
        run = start_run(words, tmp_path / "run")
        try:
            wait_until(state.is_file, 240)  # by the server's start
            pids = list_processes(str(state))  # the server and its supervisor
            commands = [read_command(pid).decode().split("\0") for pid in pids]
            assert run.wait(240) == [0], run.output()
        finally:
            run.kill(0)
    option = "--max-lora-rank"
    assert {line[line.index(option) + 1] for line in commands if option in line} == wanted
    assert state.read_text() == "1"


@pytest.mark.slow
def test_both_processes_of_a_launch_sample_again_after_a_restart(tmp_path, state, url):
    command = make_command(state, url, "dies", 1, 2)
    words = [*WORDS.split(), "--steps", "4", "--sampler-command", command]
    run = start_run(words, tmp_path / "run", world=2)
    assert run.wait(240) == [0, 0], run.output()
    rows = read_rows(tmp_path / "run")
    assert [row["sampler/finished_samples"] for row in rows] == [8] * 4
    assert all_samples_are_of_the_learners_weights(rows)
    assert state.read_text() == "3"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--sampler-command x --sampler vllm --sampler-url http://a:1", "that the run starts"),
        ("--sampler-memory 0.5", "sampler is auto"),
        ("--sampler vllm --sampler-memory 1", "between 0 and 1"),
        ("--sampler vllm --sampler-command no-such-program", "there is no program no-such-program"),
        ("--sampler vllm", "there is no program vllm: set sampler_command"),
    ],
)
def test_settings_are_checked_before_the_start(words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/bin")
    with pytest.raises((UserError, SystemExit)) as caught:
        train(f"grpo --base-model {BASE} --dataset addition {words}", tmp_path / "run")
    shown = re.sub(r"[\s│]+", " ", f"{caught.value} {capsys.readouterr().err}")
    assert message in shown and not (tmp_path / "run").exists()


def test_a_launch_on_several_machines_is_refused(connect, monkeypatch):
    monkeypatch.setattr(sampling_worker, "spans_machines", lambda: True)
    with pytest.raises(UserError, match="processes on several: start servers and set sampler_url"):
        connect()


def test_a_plan_counts_the_servers_share_of_the_memory():
    launch, peaks = LaunchShape(cuda=True, bf16=True, memory=80 * GIB), []
    for words in ("--sampler-url http://127.0.0.1:9", "", "--sampler-memory 0.5"):
        line = [*WORDS.split(), *words.split()]
        run = parse_run(line, METHODS, RECIPE, options=RunSettings)
        (needs,) = compute_stage_needs(run, launch, 16, traced=False)
        peaks.append(needs.plan.sums["sample"] / GIB)
    assert np.allclose(np.diff(peaks), [24, 16])


@pytest.mark.parametrize(
    ("words", "size"),
    [
        (["--max-steps-off-policy", "0"], 2),
        (["--max-steps-off-policy", "2"], 24),
        (["--stream-minibatches", "2"], 24),
        (["--sampler-command", "sh serve --no-enable-sleep-mode"], 24),
    ],
)
def test_a_plan_counts_the_server_while_the_learner_works_unless_it_sleeps(words, size):
    launch = LaunchShape(cuda=True, bf16=True, memory=80 * GIB)
    run = parse_run([*WORDS.split(), *words], METHODS, RECIPE, options=RunSettings)
    (needs,) = compute_stage_needs(run, launch, 16, traced=False)
    (item,) = [item for item in needs.plan.items if item.name.startswith("vLLM server")]
    assert [item.sample / GIB, item.train / GIB, item.update / GIB] == [24, size, size]


def read_command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def list_server_processes(pid, weights):
    """Return the reaper, the API server, the engine and its worker, which change their process
    titles.
    """
    commands = {child: read_command(child) for child in find_descendants(pid)}
    return [
        child
        for child, command in commands.items()
        if weights.encode() in command or command.startswith(b"VLLM::")
    ]


@pytest.mark.timeout(7200)
@pytest.mark.skipif(VLLM not in os.environ, reason=f"{VLLM} names no command of a real vLLM")
@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize(
    "kills, steps",
    [
        pytest.param(1, 12, marks=[pytest.mark.slow, pytest.mark.extras]),
        pytest.param(20, 100, marks=pytest.mark.campaign),
    ],
)
def test_kills_of_a_real_engine_cost_its_own_samples(kind, kills, steps, tmp_path):
    """Train with SFT, then GRPO, and kill the server at a random time after each step."""
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    words = ["recipes/addition.yaml", "--sft.steps", "60", "--grpo.steps", str(steps)]
    words += "--eval-limit 64 --grpo.eval-every 10 --grpo.save-every 10 --sampler vllm".split()
    words += ["--sampler-command", os.environ[VLLM], "--sampler-folder", str(tmp_path)]
    words += ["--grpo.lora-rank", "8"] if kind == "lora" else []
    run = subprocess.Popen(
        [sys.executable, "train.py", *words, "--output-dir", str(tmp_path / "run")],
        cwd=REPO,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    generator = random.Random(kind)
    weights, rows = str(tmp_path / "whetstone-vllm-"), 61  # of SFT and the evaluation before step 1
    seen: set[int] = set()
    try:
        for _ in range(kills):
            wait_until(
                lambda n=rows: count_rows(tmp_path / "run") > n or run.poll() is not None, 600
            )
            rows = count_rows(tmp_path / "run")
            time.sleep(generator.uniform(0, 8))
            wait_until(lambda: list_server_processes(run.pid, weights) or run.poll() is not None)
            assert run.poll() is None
            pids = list_server_processes(run.pid, weights)
            seen |= set(pids)
            os.kill(generator.choice(pids), signal.SIGKILL)
        assert run.wait(1800) == 0
    finally:
        run.kill()
    trained = [row for row in read_rows(tmp_path / "run") if "optim/kl_sample_train_v2" in row]
    assert len(trained) == steps
    assert all(abs(row["optim/kl_sample_train_v2"]) < 1e-10 for row in trained)
    assert {row["sampler/finished_samples"] for row in trained} == {512}
    assert not list_processes(weights)
    assert not [pid for pid in seen if read_command(pid).startswith(b"VLLM::")]
