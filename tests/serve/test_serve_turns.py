"""Test the scheduling of requests: turns, queue limits and fairness."""

import threading
from collections import Counter
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from serving import Wire, assert_same_rows, hold_requests, open_server, server, until
from test_serve import KEYS, make_text_datums

from rl.client import SampleStream
from rl.errors import UserError
from rl.serve import HttpError
from rl.serve.scheduler import EngineJob, FairQueue, SamplingJob
from rl.serve.served_models import ModelManager
from rl.serve.session_store import ModelRecord


def make_empty_job():
    yield


def test_a_sample_that_comes_within_a_slice_is_drawn_before_the_next(tmp_path, monkeypatch):
    """However long the slice, no other job begins in between, though two models have work."""
    with server(tmp_path, keys=KEYS, token_budget=32) as first:
        training, sampling = (Wire(first, key) for key in KEYS)
        training.open(), sampling.open()
        models = [training.model(i, seed=i) for i in range(2)]
        sampler = sampling.sampler(sampling.model(), 1)
        alone = sampling.sample(sampler, 0, [4, 5], max_tokens=2, seed=1).sequences[0].tokens
        order, within, go = [], threading.Event(), threading.Event()
        slice_, draw = first.engine._run_job_slice, first.engine._run_batch_slice

        def slow(job):
            order.append("train")
            if len(order) == 3:
                within.set()
                assert go.wait(60)
            slice_(job)

        monkeypatch.setattr(first.engine, "_run_job_slice", slow)
        monkeypatch.setattr(
            first.engine, "_run_batch_slice", lambda drawing: (order.append("draw"), draw(drawing))
        )
        requests = [training.ask(model, 1, make_text_datums(60)) for model in models]
        assert within.wait(60)
        drawn = sampling.ask_sample(sampler, 1, [4, 5], max_tokens=2, seed=1)
        go.set()
        assert sampling.wait(drawn, "SampleResponse").sequences[0].tokens == alone
        assert order[:4] == ["train", "train", "train", "draw"], order[:8]
        for ask in requests:
            training.output(ask)


def test_samples_of_tenants_take_turns_while_they_wait(tmp_path, monkeypatch):
    """A tenant's one sample is not behind the many that another has sent before."""
    with server(tmp_path, keys=KEYS, max_rows=2) as first:
        many, single = (Wire(first, key) for key in KEYS)
        many.open(), single.open()
        theirs, mine = (wires.sampler(wires.model(), 1) for wires in (many, single))
        order, running, add = [], [], SampleStream.add

        def watched(stream, request, client=None):
            order.append(request.params.max_tokens)
            ticket = add(stream, request, client)
            running.append(len(stream))
            return ticket

        monkeypatch.setattr(SampleStream, "add", watched)
        with hold_requests(first):
            requests = [many.ask_sample(theirs, i, [4, 5], max_tokens=30) for i in range(12)]
            last = single.ask_sample(mine, 0, [4, 5], max_tokens=2)
        assert len(single.wait(last, "SampleResponse").sequences) == 1
        for request in requests:
            assert len(many.wait(request, "SampleResponse").sequences) == 1
        assert len(order) == 13 and order.index(2) == 1, order
        assert max(running) == 4, "twice the rows that are decoded at once"


def test_requests_of_several_samples_are_taken_while_there_is_room():
    queue = FairQueue(64)
    for tenant, counts in (("a", (3, 3, 3)), ("b", (2,)), ("c", (5, 1))):
        for count in counts:
            job = SamplingJob(tenant, lambda: None, {"num_samples": count})
            queue.add_sample(job)

    def take(room, busy=("a", "b", "c")):
        return [(job.tenant, job.num_samples) for job in queue.take_samples(room, busy)]

    assert take(0) == [] and take(1) == [("a", 3)]
    assert take(8) == [("b", 2), ("c", 5), ("a", 3)] and len(queue) == 2
    assert take(0, ["a", "b"]) == [("c", 1)], "a tenant without samples waits for no other"
    assert take(100) == [("a", 3)] and len(queue) == 0 and take(1) == []


def test_no_tenant_fills_the_queue_while_there_are_others():
    turns = FairQueue(16)
    turns.has_others = lambda tenant: True

    def fill(tenant, add):
        count = 0
        while True:
            try:
                turns.check_capacity(tenant)
            except HttpError as refused:
                assert refused.status == 429 and refused.retry_after
                return count
            add(tenant)
            count += 1

    def job(tenant):
        turns.add(EngineJob(tenant, f"{tenant}'s", "work", make_empty_job))

    def sample(tenant):
        turns.add_sample(SamplingJob(tenant, lambda: None, {}))

    assert [fill("a", job), fill("b", sample), fill("c", job), fill("d", sample)] == [8, 4, 2, 1], (
        "half of what others leave"
    )
    assert len(turns.take_samples()) == 5 and fill("b", sample) == 3, "what has left makes room"
    for _ in range(8):
        while (taken := turns.next_job()).tenant != "a":
            pass
        turns.finish_job(taken)
    assert fill("a", job) == 5  # of 16 places, others hold 3 and 2
    drained = Counter(type(item) for item in turns.drain())
    # a job of c was taken and has not finished
    assert drained == {EngineJob: 6, SamplingJob: 3} and len(turns) == 1 and fill("d", job) == 7
    turns = FairQueue(16)
    assert fill("a", job) == 16, "nobody else is there"
    turns = FairQueue(16)
    turns.add_early("a", 10)
    assert fill("a", job) == 6, "what waits for its number takes up room as well"


def test_tenants_take_turns_and_not_models():
    """Without keys, a tenant is a session: three models do not get it three turns."""
    turns = FairQueue(64)
    for tenant, lane in (("a", 0), ("a", 1), ("a", 2), ("b", 0)):
        for _ in range(3):
            turns.add(EngineJob(tenant, f"{tenant}:{lane}", "work", make_empty_job))
    order = []
    for _ in range(12):
        job = turns.next_job()
        order.append(job.lane)
        turns.finish_job(job)
    assert order[:6] == ["a:0", "b:0", "a:1", "b:0", "a:2", "b:0"]
    assert order[6:] == ["a:0", "a:1", "a:2"] * 2 and turns.next_job() is None


def test_a_job_that_was_taken_is_not_answered_by_a_server_that_ends():
    queue = FairQueue(64)
    for lane in "ab":
        queue.add(EngineJob("a", lane, "work", make_empty_job))
    taken = queue.next_job()
    assert [job.lane for job in queue.drain()] == ["b"]
    queue.finish_job(taken)
    assert not len(queue)


def test_one_key_that_floods_refuses_itself_alone(tmp_path):
    """Samples, training and early sequence numbers count together, over all models of a key."""
    with server(tmp_path, keys=KEYS, queued=12) as item:
        flood, calm = (Wire(item, key) for key in KEYS)
        flood.open(), calm.open()
        models, mine = [flood.model(i) for i in range(2)], calm.model()
        sampler, data = flood.sampler(models[0], 1), make_text_datums()
        expected, metrics = calm.output(calm.ask(mine, 1, data))
        with hold_requests(item):
            taken, refused = [], []

            def send(path, **body):
                answer = flood.http.post(f"/api/v1/{path}", json=body)
                (taken if answer.status_code == 200 else refused).append(answer)

            for i in range(20):
                adam = {"adam_params": {"learning_rate": 0.0}}
                if i % 4 == 0:
                    prompt = {"chunks": [{"type": "encoded_text", "tokens": [4, 5]}]}
                    numbers = {"sampling_session_id": sampler, "seq_id": i, "num_samples": 1}
                    send("asample", **numbers, sampling_params={"max_tokens": 2}, prompt=prompt)
                elif i % 4 == 1:
                    send("optim_step", model_id=models[0], seq_id=2 + i // 4, **adam)
                else:  # its sequence number is too early
                    send("optim_step", model_id=models[1], seq_id=50 + i, **adam)
            # half of the 11 free places; the job that holds the desk takes the twelfth
            assert len(taken) == 5 and len(refused) == 15
            for answer in refused:
                assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
                assert "your share" in answer.text
            request = calm.ask(mine, 2, data)
            forward = calm.ask(mine, 3, data, forward_only=True)
        rows, again = calm.output(request)
        assert again == metrics
        assert_same_rows(rows, expected)
        calm.output(forward)
        flood.post(f"sessions/{flood.session}/finish", 204)
        calm.wait(calm.step(mine, 4))
        assert not item.engine.queue._tenant_counts
        assert not item.engine.queue._early_counts
        assert len(item.engine.queue) == 0


def send_steps(wires, model, begin, count):
    """Send optimizer steps from the sequence number `begin` on, and return their status codes."""
    steps = [
        {"model_id": model, "seq_id": begin + i, "adam_params": {"learning_rate": 0.0}}
        for i in range(count)
    ]
    return [wires.http.post("/api/v1/optim_step", json=step).status_code for step in steps]


def test_sessions_are_the_tenants_where_there_are_no_keys_and_a_lone_one_has_it_all(tmp_path):
    with open_server(tmp_path, queued=9) as (first, single):
        model = single.model()
        with hold_requests(first, single.session):
            # of nine places, the job that holds the desk takes one
            assert send_steps(single, model, 1, 12) == [200] * 8 + [429] * 4
        assert until(lambda: not len(first.engine.queue))  # otherwise the queue may still be full
        single.wait(single.step(model, 9))
        other = Wire(first)
        other.open()
        second = other.model()
        with hold_requests(first):
            assert send_steps(single, model, 10, 12).count(200) == 4
            assert send_steps(other, second, 1, 12).count(200) == 2


def test_the_number_that_others_wait_for_finds_room(tmp_path):
    """The eighth is refused, since the job that holds the desk also counts."""
    with server(tmp_path, queued=16) as first:
        wires, other = Wire(first), Wire(first)
        wires.open(), other.open()
        model, queue = wires.model(), first.engine.queue
        record = first.session_store.models[model]
        with hold_requests(first):
            assert send_steps(wires, model, 1, 8) == [200] * 7 + [429]
        assert until(lambda: record.last_started_seq == 7 and not len(queue))
        assert send_steps(wires, model, 9, 10) == [200] * 8 + [429] * 2
        assert send_steps(wires, model, 8, 1) == [200]
        assert until(lambda: record.last_started_seq == 16)


def test_what_waits_for_a_model_that_cannot_be_made_is_told_so(tmp_path):
    with open_server(tmp_path) as (first, wires):
        tenants, done = ModelManager(first.engine, first.session_store), Future()
        place, base = tmp_path / "m", first.engine.settings.bases[0]
        model = ModelRecord("m", "local", wires.session, place, base, {})
        first.session_store.models["m"] = model
        request = SimpleNamespace(verb="optim_step", work_future=done)
        tenants.enqueue_request(model, 2, request, make_empty_job)
        assert not done.done() and first.engine.queue._early_counts

        def make():
            raise OSError("no such folder")

        with pytest.raises(OSError, match="no such folder"):
            list(tenants.create_model(model, make))
        with pytest.raises(UserError, match="m could not be created: no such folder"):
            done.result(0)
        assert not first.engine.queue._early_counts and "m" not in first.session_store.models
