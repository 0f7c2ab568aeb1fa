"""Test the verb table: each row says where a verb runs, which results are returned, and which
weights the verb waits for.
"""

import threading
import weakref
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from helpers import random_datums

from rl import ModelInput, SamplingParams, ServiceClient
from rl.learner import Learner, LearnerSettings
from rl.runtime import SamplerSettings, WorkerSettings, worker_group
from rl.runtime.driver import VerbRouter
from rl.runtime.training_worker import TrainingWorker
from rl.runtime.verb_table import LEARNER, SAMPLER, SERVICE, VERBS, VerbCall, verb
from rl.runtime.weight_sync import SamplerWorker
from rl.sampler import SamplingRequest
from rl.trainer.entry_point import run_guarded


@pytest.fixture
def rows(monkeypatch):
    """Yield the table, and remove the rows of the test afterwards."""
    before = set(VERBS)
    yield VERBS
    for name in set(VERBS) - before:
        del VERBS[name]


def test_a_verb_is_a_row_and_a_method(rows, monkeypatch, tmp_path):
    class Worker(TrainingWorker):
        @verb(SAMPLER, lambda parts: {"ranks": len(parts), "first": parts[0]}, version_arg=0)
        def read_version(self, version_id: int) -> int:
            return self.versions[version_id].version

        @verb(on_refusal="version")
        def add_updates(self, model_id: int, count: int) -> int:
            self.learners[model_id].version += count
            return self.learners[model_id].version

    monkeypatch.setattr(worker_group, "TrainingWorker", Worker)
    monkeypatch.setattr(worker_group.WorkerGroup, "_running", {})
    with ServiceClient(output_dir=tmp_path) as service:
        client = service.create_full_training_client("tiny:addition", seed=2)
        driver = client._driver
        assert driver.submit("add_updates", client.model_id, 3).result() == 3
        sampler = client.save_weights_and_get_sampling_client()
        whole = driver.submit("read_version", sampler._version_id).result()
        assert whole == {"ranks": 1, "first": 3}
        failed = driver.submit("optim_step", 99)
        refused = driver.submit("add_updates", client.model_id, 3, dependencies=[failed])
        with pytest.raises(
            RuntimeError, match="add_updates was not run, because an earlier optim_step failed"
        ):
            refused.result()
        assert driver.submit("version", client.model_id).result() == 3
        with pytest.raises(KeyError, match="no_such_verb"):
            driver.submit("no_such_verb")


def test_samples_of_weights_that_could_not_be_copied_fail_with_that_error(monkeypatch, tmp_path):
    """A full GPU is named, and not the version that is missing because of it."""

    def snapshot(worker, model_id, version_id):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(TrainingWorker, "snapshot", snapshot)
    with ServiceClient(output_dir=tmp_path) as service:
        client = service.create_full_training_client("tiny:addition", seed=2)
        sampler = client.save_weights_and_get_sampling_client()
        prompt, params = ModelInput.from_ints([3, 4]), SamplingParams(max_tokens=1)
        request = SamplingRequest(prompt=[3, 4], params=params)
        for run in (
            lambda: sampler.sample_many([request]),
            lambda: sampler.sample(prompt, 1, params),
            lambda: sampler.compute_logprobs_many([prompt]),
        ):
            with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
                run().result()


def test_a_full_gpu_is_one_error_with_the_settings_to_lower(monkeypatch, tmp_path, capsys):
    held = []

    def fails(*_, **__):
        activations = torch.zeros(3)
        held.append(weakref.ref(activations))
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 GiB. If reserved but unallocated memory is "
            "large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
        )

    settings = WorkerSettings(
        learner=LearnerSettings(token_budget=99), sampler=SamplerSettings(max_rows=7)
    )
    monkeypatch.setattr(worker_group.WorkerGroup, "_running", {})
    with ServiceClient(output_dir=tmp_path, settings=settings) as service:
        client = service.create_full_training_client("tiny:addition", seed=2)
        sampler = client.save_weights_and_get_sampling_client()
        monkeypatch.setattr(Learner, "_forward", fails)
        monkeypatch.setattr("rl.runtime.sampling_worker.make_version_engine", fails)
        learns = client.forward_backward(random_datums(2), "importance_sampling")
        samples = sampler.sample(ModelInput.from_ints([3, 4]), 1, SamplingParams(max_tokens=1))
        for future, remedy in (
            (learns, "lower token_budget (99 positions"),
            (samples, "max_rows (7)"),
        ):
            with pytest.raises(torch.OutOfMemoryError, match="20.00 GiB. To use less") as caught:
                future.result()
            assert remedy in str(caught.value) and "--plan" in str(caught.value)
            assert "fragmentation" not in str(caught.value)
            assert held.pop()() is None, "the error keeps the memory of what failed"

    def work():
        raise caught.value

    with pytest.raises(SystemExit) as ended:
        run_guarded(work, see="train.py --help", outcome="the run stopped", flags={"max_rows"})
    text = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert ended.value.code == 2
    assert "--max-rows (7)" in text and "Traceback" not in text


def test_its_row_says_which_ranks_run_it_and_what_it_waits_for(rows, monkeypatch):
    """With ranks that only sample, a verb of the learners goes to the learners, and a verb of the
    samplers waits until its weights have arrived.
    """

    @verb(SAMPLER, version_arg=1)
    def weigh_version(worker, name, version_id): ...

    @verb(SAMPLER, version_arg=1, is_cleanup=True)
    def drop_version(worker, name, version_id): ...

    @verb(LEARNER)
    def weigh_model(worker, model_id): ...

    near, far = [], []
    group = SimpleNamespace(submit=far.append, alive=True)
    monkeypatch.setattr("rl.runtime.driver.GroupService", lambda settings, role: group)
    learners = SimpleNamespace(submit=near.append)
    router = VerbRouter(WorkerSettings(sampler_ranks=1), learners, threading.RLock())

    def submit(name, *arguments) -> Future:
        call = VerbCall(name, arguments)
        router.submit(call)
        return call.future

    submit("weigh_version", "before", 4)
    assert [call.verb for call in far] == ["weigh_version"]
    submit("snapshot", 0, 5)
    waiting, freed = submit("weigh_version", "on its way", 5), submit("drop_version", "late", 5)
    submit("weigh_model", 0)
    assert [call.verb for call in near] == ["take_snapshot", "weigh_model"] and len(far) == 1
    near[0].future.set_exception(RuntimeError("out of memory"))
    assert "out of memory" in str(waiting.exception())
    assert far[1].verb == "drop_version" and not freed.done(), "memory is freed all the same"


def test_a_verb_of_each_groups_service_is_not_routed(monkeypatch):
    submitted = []
    group = SimpleNamespace(submit=submitted.append, alive=True)
    monkeypatch.setattr("rl.runtime.driver.GroupService", lambda settings, role: group)
    router = VerbRouter(WorkerSettings(sampler_ranks=1), group, threading.RLock())
    with pytest.raises(ValueError, match="close_service"):
        router.submit(VerbCall("close_service", (0,)))
    assert not submitted


def test_an_unknown_version_is_the_error_of_check_sync(tmp_path):
    with ServiceClient(output_dir=tmp_path) as service:
        client = service.create_full_training_client("tiny:addition", seed=2)
        checked = client._driver.submit("check_sync", client.model_id, 99, [], 1.0)
        with pytest.raises(KeyError, match="99") as raised:
            checked.result()
        assert raised.value.__context__ is None, "a second error would hide the first"


def test_a_name_has_one_row(rows):
    with pytest.raises(ValueError, match="sample has a row already"):
        verb(SAMPLER)(TrainingWorker.sample)


def test_rows_name_what_exists():
    for name, row in VERBS.items():
        assert row.group in (LEARNER, SAMPLER, SERVICE), name
        assert row.on_refusal is None or row.on_refusal in VERBS, name
        assert row.router_method is None or hasattr(VerbRouter, row.router_method), name
    splits = {row.split for row in VERBS.values() if row.split is not None}
    assert splits <= set(dir(TrainingWorker))
    for worker in (TrainingWorker, SamplerWorker):
        public = {name for name in dir(worker) if not name.startswith("_")}
        assert public <= {*VERBS, *splits, "free_all"}, (
            f"a method of {worker} that nothing can call"
        )
