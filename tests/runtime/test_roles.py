"""Test ranks that only sample next to ranks that learn: samples, weights and replays equal those of
a single process that does both, and the plan counts both sides.
"""

import json
import pickle
import queue
import shutil
import signal
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import pytest
import test_memory_plan
import torch
from helpers import make_worker
from rank_server import REPO, shared_ranks
from test_asynchronous import ENVIRONMENT, metrics, same
from torch.overrides import TorchFunctionMode

from rl.algorithms import METHODS
from rl.algorithms.grpo import variant_settings
from rl.config import RunSettings, parse_run
from rl.distributed import check_roles, rank_roles
from rl.errors import UserError
from rl.learner import ModelSpec
from rl.memory_plan import LaunchShape, MicroBatch, StepWork, plan_sampler_memory
from rl.runtime import WorkerSettings, weight_sync
from rl.runtime.driver import VerbRouter
from rl.runtime.verb_table import VerbCall
from rl.runtime.weight_sync import WeightChunk, WeightSnapshot, WeightTransfer, view_bytes
from rl.runtime.worker_group import ClosedService, WorkerGroup
from rl.trainer import run_summary
from rl.trainer.memory_report import report_memory
from rl.trainer.saved_weights import collect_worker_settings
from rl.types import SamplingParams

CASE = str(REPO / "tests" / "roles_case.py")
LINE = (
    "grpo --base-model tiny:addition --lora-rank 0 --steps 4 --batch-size 4 --group-size 2 "
    "--max-tokens 5 --eval-every 0 --save-every 2 --keep-last 9 --rollouts-every 1 --quiet "
    "--environment-isolation thread --renderer plain --learning-rate 1e-3"
)
LATE = "--max-steps-off-policy 2 --slice-steps 2"


# ------------------------------------------------------------------------------------------- chunks


class FakeDecoder:
    """Stands in for a decoder: it keeps the weights it loads."""

    def __init__(self):
        self.loaded = {}

    def load_(self, named):
        self.loaded |= {name: tensor.clone() for name, tensor in named}


def staged() -> WeightSnapshot:
    torch.manual_seed(0)
    tensors = {
        "large": torch.randn(37, 11),
        "half": torch.randn(9, 3).bfloat16(),
        "transposed": torch.randn(4, 6).T,
        "number": torch.tensor(2.5),
        "last": torch.randn(5).double(),
    }
    return WeightSnapshot(
        0, ModelSpec("tiny:addition", None, None, 0, False), ("tiny:addition", None, 0), 7, tensors
    )


def make_weight_transfer(sent: WeightSnapshot) -> WeightTransfer:
    return WeightTransfer(sent.make_manifest(), FakeDecoder(), None, 0.0)


@pytest.mark.parametrize("size", [1, 7, 64, 1628, 10**6])
def test_weights_in_pieces_of_any_size_are_the_weights(size):
    sent = staged()
    here, pieces = make_weight_transfer(sent), list(sent.iter_chunks(size))
    assert all(len(piece.payload) == size for piece in pieces[:-1])
    for piece in pieces:
        here.receive(piece)
    here.check_complete()
    assert here.decoder.loaded.keys() == sent.tensors.keys()
    for name, tensor in sent.tensors.items():
        assert here.decoder.loaded[name].dtype == tensor.dtype and torch.equal(
            here.decoder.loaded[name], tensor
        )


@pytest.mark.parametrize("size", [1, 64, 10**6])
def test_weights_cross_in_the_dtype_that_they_are_kept_in(size):
    """Float32 weights cross in half the bytes if the sampler keeps bfloat16. Weights that samplers
    do not round are not rounded in transfer.
    """
    sent = staged()
    kept = {
        "large": torch.bfloat16,
        "half": torch.bfloat16,
        "transposed": torch.float32,
        "number": torch.bfloat16,
    }
    dtypes = sent.make_manifest().find_narrower_dtypes(SimpleNamespace(dtype_of=kept.get))
    assert dtypes == {"large": torch.bfloat16, "number": torch.bfloat16}
    manifest = sent.make_manifest().with_dtypes(dtypes)
    here, pieces = (
        WeightTransfer(manifest, FakeDecoder(), None, 0.0),
        list(sent.iter_chunks(size, dtypes)),
    )
    assert (
        sum(len(piece.payload) for piece in pieces)
        == 2 * 37 * 11 + 2 * 9 * 3 + 4 * 4 * 6 + 2 + 8 * 5
    )
    for piece in pieces:
        here.receive(piece)
    here.check_complete()
    for name, tensor in sent.tensors.items():
        assert torch.equal(here.decoder.loaded[name], tensor.to(dtypes.get(name, tensor.dtype))), (
            name
        )


@pytest.mark.parametrize("lost", [0, 3, -1])
def test_a_piece_that_does_not_come_is_named_and_a_damaged_one_refused(monkeypatch, lost):
    monkeypatch.setattr(weight_sync, "CHECKSUM_ROWS", 1024)
    sent = staged()
    here, pieces = make_weight_transfer(sent), list(sent.iter_chunks(100))
    del pieces[lost]
    for piece in pieces:
        here.receive(piece)
    with pytest.raises(
        RuntimeError,
        match="transfer of version 7 is incomplete: . tensors are missing, .'(large|last|half)",
    ):
        here.check_complete()
    # of a large chunk every third row of 4 KiB is read
    large = replace(sent, tensors={"large": torch.randn(3, 10**6)})
    for weights, size in ((sent, 100), (large, 9 * 10**6)):
        good = next(weights.iter_chunks(size))
        name, at, length = good.parts[0]
        changed, swapped = good.payload.clone(), good.payload.roll(length // 2)
        changed[length // 2 :][:12288] += 1
        damaged = [changed, swapped]
        # two words of 8 bytes, of rows that are read: neighbours, and mirrored at the diagonal
        step = 4096 * -(-(size // 4096) // weight_sync.CHECKSUM_ROWS)
        for first, second in ((0, 8), (8, step)) if weights is large else ((0, 8),):
            words = good.payload.clone()
            words[first : first + 8] = good.payload[second : second + 8]
            words[second : second + 8] = good.payload[first : first + 8]
            damaged.append(words)
        for parts, payload in (
            *(([(name, at, length)], payload) for payload in damaged),
            ([(name, at + 1, length)], good.payload),
            ([("half", at, length)], good.payload),
        ):
            with pytest.raises(RuntimeError, match="were corrupted in transfer"):
                make_weight_transfer(weights).receive(WeightChunk(parts, good.checksum, payload))


def test_chunks_that_are_cut_at_the_snapshot_are_the_weights(monkeypatch):
    """They cross as they are cut, even if the sampler keeps fewer bytes."""
    monkeypatch.setattr(weight_sync, "_get_chunk_bytes", lambda: 64)
    sent = staged()
    cut = replace(sent, tensors={}).cut(iter(sent.tensors.items()))
    narrow = SimpleNamespace(dtype_of=lambda name: torch.bfloat16)
    assert sent.make_manifest().find_narrower_dtypes(narrow)
    assert not cut.make_manifest().find_narrower_dtypes(narrow)
    assert not cut.make_manifest().payloads
    here, chunks = make_weight_transfer(cut), list(cut.iter_chunks())
    assert all(chunk.payload is cut.payloads[i][1] for i, chunk in enumerate(chunks))
    for chunk in chunks:
        here.receive(chunk)
    here.check_complete()
    assert here.decoder.loaded.keys() == sent.tensors.keys()
    for name, tensor in sent.tensors.items():
        assert torch.equal(here.decoder.loaded[name], tensor), name


class PinnedBlocks(TorchFunctionMode):
    """Record the sizes of the blocks that torch would pin: powers of two. Nothing is pinned."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        pinned = kwargs.pop("pin_memory", False)
        result = func(*args, **kwargs)
        if pinned:
            self.sizes.append(1 << (result.nbytes - 1).bit_length())
        return result


def test_pinned_memory_holds_the_weights_once(monkeypatch):
    """Torch keeps pinned blocks, so all are of the size of a chunk, which the next snapshot uses
    again. The first snapshot, in the learner's dtype, is not pinned.
    """
    learner = make_worker()
    weights = dict(learner.learners[0].iter_weights())
    narrow = dict.fromkeys(list(weights)[::2], torch.bfloat16)
    num_bytes = sum(t.numel() * narrow.get(name, t.dtype).itemsize for name, t in weights.items())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(weight_sync, "GPU_CHUNK_BYTES", 4096)
    with PinnedBlocks() as pinned:
        first = learner.take_snapshot(0, True, None)
        assert not pinned.sizes
        for _ in first.iter_chunks(dtypes=narrow):
            assert set(pinned.sizes) == {4096}, "a chunk is in memory that a GPU copies fast"
        pinned.sizes.clear()
        later = learner.take_snapshot(0, False, narrow)
        sent = sum(chunk.num_bytes for chunk in later.iter_chunks())
    assert sent == num_bytes > 10 * 4096
    assert set(pinned.sizes) == {4096} and sum(pinned.sizes) < num_bytes + 4096
    with torch.no_grad():
        before = {name: t.clone() for name, t in weights.items()}
        for tensor in weights.values():
            tensor.zero_()  # the learner goes on while the snapshot is sent
    here = make_weight_transfer(later)
    for chunk in later.iter_chunks():
        here.receive(chunk)
    here.check_complete()
    for name, tensor in before.items():
        rounded = tensor.to(narrow.get(name, tensor.dtype))
        assert torch.equal(here.decoder.loaded[name], rounded), name


def test_the_verb_of_a_chunk_holds_no_weights():
    chunk = next(staged().iter_chunks())
    assert pickle.loads(pickle.dumps(chunk)) == WeightChunk(chunk.parts, chunk.checksum)


def test_bytes_of_a_tensor_are_its_own():
    tensor = torch.zeros(3)
    view_bytes(tensor)[4:8] = view_bytes(torch.ones(1))
    assert tensor.tolist() == [0.0, 1.0, 0.0]


# ------------------------------------------------------------------------------- routing and timing


class Counter(queue.Queue):
    """The queue of the samplers' group. The test completes each verb; open_service completes at
    once.
    """

    def put(self, item):
        if item[1].verb == "open_service":
            item[1].future.set_result("cpu")
        else:
            super().put(item)

    def next(self, result=None) -> str:
        _, call = self.get(timeout=10)
        call.future.set_result(result)
        return f"{call.verb} {call.arguments[0]}"


@pytest.fixture
def router_parts(monkeypatch):
    """Return (the router, the samplers' queue, the learners' verbs in order)."""
    counter, near = Counter(), []
    crew = SimpleNamespace(queue=counter, thread=SimpleNamespace(is_alive=lambda: True))
    crew.close_service = lambda number: counter.put((number, VerbCall("close", (number,))))
    monkeypatch.setattr(WorkerGroup, "join", classmethod(lambda cls, settings, group: (crew, 0)))
    settings = WorkerSettings(sampler_ranks=1)
    learners = SimpleNamespace(
        submit=lambda call: near.append((call.verb, call.arguments, call.future))
    )
    return VerbRouter(settings, learners, threading.RLock()), counter, near


def submit_call(far, verb, *arguments) -> Future:
    call = VerbCall(verb, arguments)
    far.submit(call)
    return call.future


def test_what_names_weights_on_their_way_waits_for_them_and_other_work_does_not(router_parts):
    far, counter, near = router_parts
    fresh = submit_call(far, "snapshot", 0, 5)
    (verb, arguments, present) = near.pop()
    assert (verb, arguments) == ("take_snapshot", (0, True, None))
    waiting = [submit_call(far, "compute_logprobs", 5, []), submit_call(far, "free_version", 5)]
    older = submit_call(far, "run_steps", 1, 4, SimpleNamespace(new_requests=[]))
    assert (
        counter.next("of the old weights") == "run_steps 1"
        and older.result() == "of the old weights"
    )
    present.set_result(staged())
    narrow = {"large": torch.bfloat16}
    assert counter.next(narrow) == "begin_transfer 5"
    submit_call(far, "run_steps", 1, 4, SimpleNamespace(new_requests=[]))
    results = [counter.next() for _ in range(2)]
    assert sorted(results) == ["receive_chunk 5", "run_steps 1"]
    assert not any(future.done() for future in (fresh, *waiting))
    assert counter.next({"version": 7}) == "end_transfer 5" and fresh.result() == {"version": 7}
    assert [counter.next(), counter.next()] == ["compute_logprobs 5", "free_version 5"]
    submit_call(far, "snapshot", 0, 6)
    # the samplers have frozen weights, and the learners round the others before they copy them
    assert near.pop()[:2] == ("take_snapshot", (0, False, narrow))


class SmallChunks(WeightSnapshot):
    """Weights that are sent in chunks of 4 bytes."""

    def iter_chunks(self, size=4, dtypes=None):
        return super().iter_chunks(4, dtypes)


def test_a_round_ends_when_its_arrivals_are_recorded():
    """Futures have results before their callbacks have run."""
    schedule = weight_sync.TransferSchedule()

    def record():
        for _ in range(2):
            time.sleep(0.05)
            schedule.record_arrival()

    schedule.start_round(2)
    threading.Thread(target=record).start()
    schedule.end_round()
    assert schedule.num_chunks == 2  # no time passed without an arrival


@pytest.mark.parametrize(
    ("step_seconds", "chunk_seconds", "share", "is_cut"),
    [
        (0.05, 0.002, 0.5, False),
        (0.05, 0.0005, 0.24, False),
        (0.05, 0.0005, 0.5, True),
        (0.001, 0.004, 0.87, False),
        (None, 0.002, 1.0, False),
    ],
)
def test_a_transfer_takes_half_of_the_time_of_samplers_that_sample(
    router_parts, monkeypatch, step_seconds, chunk_seconds, share, is_cut
):
    """A stream requests its next steps while chunks arrive. At least two chunks are sent between two
    requests, and at most 32 unless all are in host memory already; without sampling all are sent at
    once.
    """
    far, counter, near = router_parts
    clock, steps, chunks, longest = 0.0, 0, 0, 0
    monkeypatch.setattr(weight_sync, "time", SimpleNamespace(perf_counter=lambda: clock))
    sizes, start_round = [], weight_sync.TransferSchedule.start_round

    def record_size(schedule, size):
        start_round(schedule, size)
        sizes.append(size)

    monkeypatch.setattr(weight_sync.TransferSchedule, "start_round", record_size)
    tensors = {"all": torch.randn(2000)}
    spec = ModelSpec("tiny:addition", None, None, 0, False)
    fresh = submit_call(far, "snapshot", 0, 5)
    sent = SmallChunks(0, spec, ("tiny:addition", None, 0), 7, tensors)
    if is_cut:
        sent = replace(sent, payloads=list(weight_sync.cut_payloads(tensors.items(), 4)))
    near.pop()[2].set_result(sent)
    assert counter.next() == "begin_transfer 5"
    if step_seconds:
        submit_call(far, "run_steps", 1, 4, SimpleNamespace(new_requests=[]))
    between_steps = 0
    while not fresh.done():
        while True:  # the next round is queued during the previous steps, as a whole
            verbs = [call.verb for _, call in list(counter.queue)]
            is_queued = chunks + verbs.count("receive_chunk") == sum(sizes)
            if is_queued and any(verb != "run_steps" for verb in verbs):
                break
            time.sleep(1e-5)
        _, call = counter.get_nowait()
        verb = call.verb
        if verb == "run_steps":
            clock, steps, between_steps = clock + step_seconds, steps + 1, 0
        elif verb == "receive_chunk":
            clock, chunks, between_steps = clock + chunk_seconds, chunks + 1, between_steps + 1
            longest = max(longest, between_steps)
        if verb == "run_steps":  # while queued chunks arrive
            submit_call(far, "run_steps", 1, 4, SimpleNamespace(new_requests=[]))
        call.future.set_result({"version": 7})
    assert chunks == 2000
    assert chunks * chunk_seconds / clock == pytest.approx(share, abs=0.05)
    assert longest <= 32 or is_cut or not step_seconds


def test_weights_that_cannot_be_staged_fail_what_waits_for_them(router_parts):
    far, counter, near = router_parts
    fresh, waits = submit_call(far, "snapshot", 0, 5), submit_call(far, "sample", 5, [])
    near.pop()[2].set_exception(RuntimeError("out of memory"))
    for future in (fresh, waits):
        assert "out of memory" in str(future.exception())
    assert counter.empty()


def test_what_is_on_its_way_arrives_before_the_service_is_left(router_parts):
    far, counter, near = router_parts
    fresh = submit_call(far, "snapshot", 0, 5)
    leaving = threading.Thread(target=far.close)
    leaving.start()
    near.pop()[2].set_result(staged())
    assert [counter.next() for _ in range(3)] == [
        "begin_transfer 5",
        "receive_chunk 5",
        "end_transfer 5",
    ] and fresh.done()
    leaving.join(10)
    assert counter.next() == "close 0"


def test_a_hand_over_that_failed_leaves_nothing_and_the_next_is_whole(router_parts):
    far, counter, near = router_parts
    fresh = submit_call(far, "snapshot", 0, 5)
    near.pop()[2].set_result(staged())
    counter.get_nowait()[1].future.set_exception(RuntimeError("were corrupted in transfer"))
    assert "corrupted in transfer" in str(fresh.exception()) and counter.next() == "free_version 5"
    submit_call(far, "snapshot", 0, 6)
    assert near.pop()[:2] == ("take_snapshot", (0, True, None)), "what is frozen never came"


def test_a_model_is_forgotten_after_what_was_staged_of_it(router_parts):
    far, counter, near = router_parts
    submit_call(far, "snapshot", 0, 5)
    present = near.pop()[2]
    submit_call(far, "free_model", 0)
    assert near[-1][:2] == ("free_model", (0,)), "the learners forget it as well"
    present.set_result(staged())
    near.pop()[2].set_result(None)
    assert [counter.next(), counter.next()] == ["begin_transfer 5", "free_model 0"]


def test_a_verb_of_a_service_that_was_left_is_an_error_and_no_dead_rank():
    gone = ClosedService(None, 3)
    with pytest.raises(RuntimeError, match="begin_transfer was called after its service"):
        gone.begin_transfer(1, None)


def test_learners_are_told_once_how_is_drawn_from_their_weights(router_parts):
    far, counter, near = router_parts
    fresh = submit_call(far, "snapshot", 3, 5)
    near.pop()[2].set_result(replace(staged(), model_id=3))
    while not fresh.done():
        counter.next()
    request = SimpleNamespace(params=SamplingParams(temperature=0.7))
    for _ in range(3):
        submit_call(far, "sample", 5, [request, request])
    assert [(verb, arguments[:2]) for verb, arguments, _ in near] == [("record_params", (3, 7))]


def test_learners_are_told_of_samples_that_waited_for_weights_they_had_saved(router_parts):
    far, counter, near = router_parts
    submit_call(far, "load_sampler", 5, "saved", None, None, 0, False, 3)
    submit_call(far, "sample", 5, [SimpleNamespace(params=SamplingParams(temperature=0.7))])
    assert near[-1][0] == "wait_for_verbs"
    near.pop()[2].set_result(None)
    assert counter.next({"version": 7}) == "load_sampler 5" and counter.next() == "sample 5"
    assert [(verb, arguments[:2]) for verb, arguments, _ in near] == [("record_params", (3, 7))]


def test_an_error_is_set_without_the_lock_that_other_threads_wait_for(router_parts):
    far, _, near = router_parts
    submit_call(far, "snapshot", 0, 5)
    waits, unblocked = submit_call(far, "sample", 5, []), []

    def submit_elsewhere(_):
        thread = threading.Thread(target=submit_call, args=(far, "sample", 4, []), daemon=True)
        thread.start()
        thread.join(5)
        unblocked.append(not thread.is_alive())

    waits.add_done_callback(submit_elsewhere)
    near.pop()[2].set_exception(RuntimeError("out of memory"))
    assert unblocked == [True]


# ------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("ranks", "started", "says"),
    [
        (1, None, "one was started: start at least 2"),
        (2, 2, "leaves none to learn: use at most 1 here"),
        (5, 4, "start 6 processes"),
    ],
)
def test_launches_that_cannot_spare_ranks_are_refused_with_what_to_type(
    ranks, started, says, monkeypatch
):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if started is not None:
        monkeypatch.setenv("WORLD_SIZE", str(started))
    with pytest.raises(UserError, match=says):
        check_roles(ranks)
    check_roles(0)


def test_a_later_service_cannot_ask_for_other_roles(monkeypatch):
    monkeypatch.setattr(rank_roles, "_current_role", rank_roles.RankRole(1, False, None))
    check_roles(1)
    with pytest.raises(UserError, match="comes too late.* which is 1 here"):
        check_roles(2)
    with pytest.raises(ValueError, match="sampler_ranks is a whole number"):
        check_roles(-1)


def test_roles_hold_for_the_whole_run():
    def stage(ranks: int) -> SimpleNamespace:
        return SimpleNamespace(settings=variant_settings("dr_grpo", sampler_ranks=ranks))

    assert collect_worker_settings([stage(2), stage(2)]).sampler_ranks == 2
    with pytest.raises(UserError, match="sampler_ranks applies to the whole run"):
        collect_worker_settings([stage(2), stage(0)])


# ---------------------------------------------------------------------------- worked out in advance

SHAPE = replace(test_memory_plan.SHAPE, layers=4, head_width=16)


def test_what_a_sampler_holds_by_hand():
    """All weights trained in bf16: two bytes per number, three times. With LoRA, further versions
    are only the adapters in fp32.
    """
    work = StepWork(batch=MicroBatch(1, 8, 8), samples=True, prompts=2, prompt=10, rows=6, answer=5)
    launch = LaunchShape(cuda=True, bf16=True)
    arriving, copy = "pending weight versions (at most two)", "sampler's copy of the weights"

    def sizes(*arguments):
        return {item.name: item.sample for item in plan_sampler_memory(*arguments).items}

    full = sizes(SHAPE, launch, work)
    assert (full[copy], full[arriving]) == (2e6, 4e6)
    assert full["KV cache"] == (2 * 10 + 6 * 4) * 2 * 4 * 2 * 16 * 2
    lora = replace(SHAPE, parameters=1_010_000, trainable=10_000, adapters=10_000)
    adapted = sizes(lora, launch, work, [SHAPE])
    assert (adapted[copy], adapted[arriving]) == (2e6 + 4e4, 8e4)
    assert adapted["models that only score"] == 2e6


def test_a_plan_tells_both_sides_and_refuses_a_side_without_ranks(capsys):
    words = (
        "grpo --base-model tiny:addition --lora-rank 0 --max-tokens 4 --batch-size 8 --group-size "
        "2 --plan --plan-gpus 4"
    ).split()

    def plan(ranks: int) -> str:
        line = [*words, "--sampler-ranks", str(ranks)]
        recipe = REPO / "recipes" / "addition.yaml"
        report_memory(parse_run(line, METHODS, recipe, options=RunSettings))
        return " ".join(capsys.readouterr().out.split())

    text = plan(1)
    assert "grpo, ranks that learn: tiny:addition, 3 processes, DDP" in text
    assert "grpo, ranks that sample: tiny:addition, one process" in text
    learns, samples = text.split("ranks that sample:")
    assert "optimizer" in learns and "KV cache" not in learns
    assert "optimizer" not in samples and "KV cache" in samples
    with pytest.raises(UserError, match="sampler_ranks 4 of 4 processes leaves no rank to learn"):
        plan(4)


# ------------------------------------------------------------------------------------ two processes


@pytest.fixture(scope="module")
def ranks():
    return shared_ranks()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lora", "kind", "dtype"),
    [
        (0, "auto", "fp32"),
        (4, "auto", "fp32"),
        (0, "hf", "fp32"),
        (4, "hf", "fp32"),
        (0, "auto", "bf16"),
        (4, "hf", "bf16"),
    ],
)
def test_a_plain_loop_draws_and_learns_the_same_bits(ranks, tmp_path, lora, kind, dtype):
    results = []
    for world, samplers in ((1, 0), (2, 1)):
        out = tmp_path / str(world)
        out.mkdir()
        words = out, samplers, lora, kind, dtype
        launch = ranks.start(*words, cwd=tmp_path, world=world, script=CASE)
        assert launch.wait(120) == [0] * world, launch.output()
        results.append(json.loads((out / "found.json").read_text()))
    first, second = results
    assert first == second
    last = first["drawn by the last weights"]
    assert first["drawn by the first weights"] != last == first["of the folder"]
    assert first["versions"] == [0, 3, 3, 3]


@pytest.fixture(scope="module")
def trained(ranks, tmp_path_factory):
    """Return a function that trains with an argument line on a number of processes and returns the
    run folder.
    """
    home = tmp_path_factory.mktemp("roles")
    (home / "uneven.py").write_text(ENVIRONMENT)

    def go(name: str, world: int, words: str = "", **env: str):
        line = f"{LINE} --environment {home}/uneven.py:Uneven --output-dir {home / name} {words}"
        launch = ranks.start(*line.split(), cwd=home, world=world, **env)
        assert launch.wait(200) == [0] * world, launch.output()
        return home / name

    return go


@pytest.mark.slow
def test_without_staleness_samplers_wait_and_the_run_is_the_synchronous_one(trained):
    first = trained("one", 1, "--no-self-test")
    second = trained("two", 2, "--no-self-test --sampler-ranks 1")
    assert same(first, second) and metrics(first) == metrics(second)


@pytest.mark.slow
def test_a_run_on_two_sides_repeats_bit_for_bit_on_two_and_on_one_and_goes_on_where_it_was(trained):
    late = f"{LATE} --no-self-test"
    first = trained("first", 2, f"{late} --sampler-ranks 1")
    rows = metrics(first)
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and 1 <= max(
        row["async/age/max"] for row in rows
    ) <= 2
    for name, world, words in (("again", 2, "--sampler-ranks 1"), ("alone", 1, "")):
        result = trained(name, world, f"{late} {words} --replay {first}")
        assert same(first, result) and metrics(result) == metrics(first)
        assert (result / "decisions.jsonl").read_text() == (first / "decisions.jsonl").read_text()
    again = first.parent / "again"
    for path in (again / "checkpoints").iterdir():
        if path.name != "grpo-000002":
            shutil.rmtree(path)
    gone_on = trained("again", 2, f"{late} --sampler-ranks 1 --resume --replay {first}")
    assert same(first, gone_on) and metrics(gone_on) == metrics(first)


@pytest.mark.slow
@pytest.mark.parametrize("sides", ["two_samplers", "two_learners", "fsdp2", "zero2", "zero3"])
def test_each_side_is_a_world_of_its_own(trained, sides):
    """The run includes the self-test, which sends changed weights to the samplers and reads
    gradients of every shard.
    """
    env = {}
    if sides == "fsdp2":
        env = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
        env["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    elif sides.startswith("zero"):
        env["ACCELERATE_USE_DEEPSPEED"] = "true"
        env["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = f"ds_configs/{sides}.json"
    samplers = 2 if sides == "two_samplers" else 1
    words = f"{LATE} --steps 3 --timeout 60 --sampler-ranks {samplers}"
    rows = metrics(trained(sides, 3, words, **env))
    assert [row["step"] for row in rows] == [1, 2, 3] and max(
        row["async/age/max"] for row in rows
    ) <= 2
    fresh = [row for row in rows if row["async/age/max"] == 0]
    # the learner has the weights that sampled
    assert fresh and all(abs(row["optim/kl_sample_train_v1"]) < 1e-5 for row in fresh)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "says"),
    [(signal.SIGKILL, "is lost"), (signal.SIGSTOP, "did not answer within 6 s")],
)
def test_a_sampler_that_dies_or_hangs_ends_the_run_by_name(ranks, tmp_path, options, says):
    (tmp_path / "uneven.py").write_text(ENVIRONMENT)
    words = (
        f"{LINE} {LATE} --no-self-test --steps 500 --timeout 6 --sampler-ranks 1 "
        f"--output-dir {tmp_path}/run --environment {tmp_path}/uneven.py:Uneven"
    )
    launch = ranks.start(*words.split(), cwd=tmp_path, world=2)
    deadline = time.monotonic() + 90
    while not (tmp_path / "run" / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    launch.kill(1, options)
    begun = time.monotonic()
    while launch.codes[0] is None and time.monotonic() < begun + 60:
        launch.poll()
        time.sleep(0.05)
    launch.kill(1)
    assert launch.codes[0] not in (None, 0), launch.output()
    text = " ".join(launch.output(0).replace("│", " ").split())
    assert "sampler rank 0 (rank 1 of the launch) (process" in text and says in text


FAULTY = """
import runpy, sys
sys.path.insert(0, {repo!r})
from types import SimpleNamespace
import torch
from rl.runtime import weight_sync
real = weight_sync.WeightTransfer.receive
def receive(self, chunk):
    if {fault!r} == "nothing arrives":
        self.decoder = SimpleNamespace(load_=lambda named: None)
    elif {fault!r} == "a tensor is left out":
        raws = chunk.payload.split([length for *_, length in chunk.parts])
        pairs = [pair for pair in zip(chunk.parts, raws) if "layers.1.mlp.down_proj" not in pair[0][0]]
        parts, payload = [part for part, _ in pairs], torch.cat([raw for _, raw in pairs])
        chunk = weight_sync.WeightChunk(parts, weight_sync._compute_checksum(parts, payload), payload)
    real(self, chunk)
def end_transfer(self, version_id):
    self.transfers[version_id].decoder = self.models[self.transfers[version_id].manifest.model_id].decoders[0]
    return ended(self, version_id)
ended = weight_sync.SamplerWorker.end_transfer
weight_sync.WeightTransfer.receive = receive
if {fault!r} == "nothing arrives":
    weight_sync.SamplerWorker.end_transfer = end_transfer
sys.argv[0] = {train!r}
runpy.run_path({train!r}, run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("nothing arrives", "the weight sync delivers nothing"),
        ("a tensor is left out", "transfer of version 0 is incomplete: 1 tens"),
    ],
)
def test_a_hand_over_that_loses_something_is_caught_by_name_before_the_first_step(
    ranks, tmp_path, fault, says
):
    (tmp_path / "uneven.py").write_text(ENVIRONMENT)
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY.format(repo=str(REPO), train=str(REPO / "train.py"), fault=fault))
    words = (
        f"{LINE} {LATE} --sampler-ranks 1 --output-dir {tmp_path}/run --environment "
        f"{tmp_path}/uneven.py:Uneven"
    )
    launch = ranks.start(*words.split(), cwd=tmp_path, world=2, script=str(script))
    assert launch.wait(120)[0] not in (None, 0)
    assert says in " ".join(launch.output(0).replace("│", " ").split()), launch.output()
    assert (
        not (tmp_path / "run" / "metrics.jsonl").exists()
        or not (tmp_path / "run" / "metrics.jsonl").read_text()
    )


def test_the_console_says_who_does_what():
    for processes, text in {
        (1, 0): "1 process",
        (3, 0): "3 processes",
        (1, 1): "1 process that learns, 1 that samples",
        (3, 2): "3 processes that learn, 2 that sample",
        (8, 0, 4): "8 processes, every 4 of which share a sampler",
    }.items():
        assert run_summary._describe_processes(*processes) == text
