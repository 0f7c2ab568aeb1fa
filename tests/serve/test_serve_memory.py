"""Test the memory that a server uses for finished requests."""

import gc
import itertools
import json
import logging
import time
import tracemalloc
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np
import pytest
from serving import (
    BASE,
    PROTOBUF,
    Wire,
    assert_same_rows,
    datum_message,
    hold_requests,
    open_server,
    server,
    unpack_sequences,
    until,
)
from test_serve import KEYS, make_text_datums

from rl.serve import scheduler, session_store, tinker_pb2
from rl.serve.request_store import PendingRequest, RequestStore
from rl.serve.serving_engine import _resolve
from rl.serve.session_store import SamplerRecord
from rl.types import Datum, ModelInput, SampledSequence, SampleResponse

TOKENS = 5_000  # of a large request: 60 KB on the wire


def make_large_datum(**replaced):
    """Return a datum that makes a large request. `replaced`: fields that do not fit."""
    tokens = np.arange(TOKENS) % 50 + 4
    return Datum(ModelInput.from_ints(tokens.tolist()), {"target_tokens": tokens, **replaced})


FAULTS = {
    "a field that is too short": (make_large_datum(target_tokens=np.arange(6)), "cross_entropy", {}),
    "a loss that there is none of": (make_large_datum(), "stable_reinforce", {}),
    "a setting that there is none of": (make_large_datum(), "cross_entropy", {"nothing": 1.0}),
    "a token beyond the vocabulary": (
        make_large_datum(target_tokens=np.full(TOKENS, 10**6)), "cross_entropy", {}),
    "an input beyond the context": (make_large_datum(), "cross_entropy", {}),
}  # fmt: skip


@contextmanager
def traced_memory():
    """Yield a list that holds, in the end, the bytes that the block has allocated and kept."""
    kept = []
    gc.collect()
    tracemalloc.start()
    try:
        yield kept
        gc.collect()
        kept.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()


def test_failed_requests_keep_no_body(tmp_path):
    with open_server(tmp_path) as (first, wires):
        model, numbers = wires.model(), itertools.count(1)

        def fail_all():
            for datum, loss, config in FAULTS.values():
                answer = wires.wait(wires.ask(model, next(numbers), [datum], loss, config))
                assert answer["category"] == "user", answer

        fail_all()
        with traced_memory() as kept:
            for _ in range(2):
                fail_all()
        sent = 2 * len(FAULTS) * TOKENS * 12
        assert kept[0] < sent / 5, f"{kept[0]} bytes are kept of {sent} of requests that failed"


def test_an_error_in_the_server_keeps_nothing_of_its_frames(caplog):
    # pytest keeps log records together with their tracebacks
    caplog.set_level(logging.CRITICAL, "whetstone.serve")
    promises, words = RequestStore(60.0), []

    def fails(body):
        raise RuntimeError("broken") from ValueError("because")

    with traced_memory() as kept:
        for i in range(20):
            promise = promises.add(PendingRequest(str(i), "me", "work"))
            try:
                fails(np.zeros(1 << 20, np.uint8))
            except RuntimeError as error:
                _resolve(promise.work_future, error, "work")
            words.append(promise.encoded_result.body)
        kept.append(tracemalloc.get_traced_memory()[0])  # before a collection: no cycle holds them
    assert kept[0] < 1 << 19 and b"its log says why" in words[0] and b"broken" not in words[0]


def test_a_stored_answer_takes_eight_bytes_a_token():
    """Answers are stored in int32 and float32, as on the wire; objects take 67 bytes per number."""
    promises, tokens = RequestStore(3600.0), 20_000

    def drawn(seed):
        rng = np.random.default_rng(seed)
        return rng.integers(300, 50_000, tokens).tolist(), rng.standard_normal(tokens).tolist()

    with traced_memory() as kept:
        for i in range(10):
            promise = promises.add(PendingRequest(str(i), "me", "sample", tenant="me"))
            promise.work_future.set_result(SampleResponse([SampledSequence(*drawn(i), "length")]))
        del promise
    assert kept[0] / (10 * tokens) < 10, f"{kept[0] / (10 * tokens):.1f} bytes a token"
    assert promises.total_bytes == pytest.approx(10 * tokens * 8, rel=0.01)
    body = promises.find_request("9", "me").encoded_result.body
    ((ids, logprobs, _),) = unpack_sequences(tinker_pb2.SampleResponse.FromString(body))
    assert ids == drawn(9)[0]
    np.testing.assert_allclose(logprobs, drawn(9)[1], rtol=1e-6)


def test_a_sent_answer_can_be_asked_for_again_for_a_while_and_an_unsent_one_for_longer(tmp_path):
    with open_server(tmp_path, resend_seconds=0.5) as (item, wires):
        model = wires.model()
        sent = wires.ask(model, 1, make_text_datums(), forward_only=True)
        first = wires.wait(sent)
        unsent = wires.ask(model, 2, make_text_datums(), forward_only=True)
        assert wires.wait(sent) == first, "whose connection broke asks again"
        time.sleep(0.7)
        item.do_upkeep()
        gone = wires.http.post("/api/v1/retrieve_future", json={"request_id": sent["request_id"]})
        assert gone.status_code == 410 and "expired" in gone.text
        for _ in range(2):  # the time begins when it is sent, not when it was finished
            assert wires.wait(unsent) == first
            time.sleep(0.05)
            item.do_upkeep()
    assert item.request_store.resend_seconds == 0.5 and RequestStore(3600.0).resend_seconds == 60.0


def test_bytes_are_bounded_and_shared_like_everything_else(tmp_path):
    with server(tmp_path, keys=KEYS, held_bytes=240_000, resend_seconds=0.5) as first:
        greedy, other = (Wire(first, key) for key in KEYS)
        greedy.open(), other.open()
        model, theirs = greedy.model(), other.model()

        def send(wires, model, seq):  # a little more than 24 KB
            head = {"model_id": model, "seq_id": seq, "loss_fn": "cross_entropy"}
            message = tinker_pb2.ForwardBackwardRequest(**head, forward_only=True)
            tokens = [ids.tolist() for ids in (np.arange(2000) % 50 + 4).reshape(-1, 20)]
            for ids in tokens:
                datum = Datum(ModelInput.from_ints(ids), {"target_tokens": ids})
                message.data.append(datum_message(datum))
            headers = {"content-type": PROTOBUF}
            body = message.SerializeToString()
            return wires.http.post("/api/v1/forward_backward", content=body, headers=headers)

        with hold_requests(first):
            answers = [send(greedy, model, 1 + i) for i in range(8)]
            taken = [answer for answer in answers if answer.status_code == 200]
            codes = [200] * len(taken) + [429] * (8 - len(taken))
            assert [answer.status_code for answer in answers] == codes
            assert 2 <= len(taken) <= 4, "about half of the bytes"
            assert "your share" in answers[-1].text and "--held-bytes" in answers[-1].text
            assert send(other, theirs, 1).status_code == 200
        for answer in taken:
            assert len(greedy.output(answer.json())[0]) == 100
        # answers are smaller than what was sent for them
        assert send(greedy, model, len(taken) + 1).status_code == 200
        time.sleep(0.7)
        # Nothing polls for these: the oldest make room for the newest.
        for seq in range(len(taken) + 2, 16):
            assert until(lambda seq=seq: send(greedy, model, seq).status_code == 200, 10.0), seq
        assert first.request_store.total_bytes <= 240_000


def test_a_cancel_while_an_answer_is_stored_loses_no_answer():
    """The owner cancels at the worst moment, just before the answer is stored."""

    class LateFuture(Future):
        def set_result(self, result):
            promise.work_future.cancel()
            super().set_result(result)

    promises, late = RequestStore(3600.0), LateFuture()
    promise = promises.add(PendingRequest("1", "me", "sample", tenant="me", result_future=late))
    promise.work_future.set_result({"fine": 1})
    assert promises.find_request("1", "me").encoded_result.body == b'{"fine":1}'


def test_kept_answers_are_looked_through_only_where_room_is_short(monkeypatch):
    promises, scans = RequestStore(3600.0, 0.0, held_bytes=100), []
    look = promises._unfetched_requests
    monkeypatch.setattr(promises, "_unfetched_requests", lambda: scans.append(1) or look())
    for number in range(3):
        promises.check_capacity("me", 20)
        promise = promises.add(PendingRequest(str(number), "me", "sample", tenant="me", size=20))
        promise.work_future.set_result("x" * 28)  # 30 bytes with its quotes
    assert promises.total_bytes == 90 and not scans
    promises.check_capacity("me", 50)
    assert len(scans) == 1 and promises.total_bytes == 30, "the two oldest went"
    assert promises.find_request("2", "me")


def test_a_model_is_made_once_even_where_its_answer_has_been_forgotten(tmp_path):
    """A repeated request gets the same answer, from this server and from the next."""
    with open_server(tmp_path, resend_seconds=0.05, durable=True) as (first, wires):
        made = wires.model()
        wires.train(made, 1, make_text_datums())
        path, loaded = wires.save(made, 3, "a"), f"{wires.session}:train:1"
        creation = {"base_model": BASE, "lora_config": {"rank": 4, "seed": 7}}
        cases = []
        for seq, (verb, body, answer) in enumerate((
            ("create_model", creation, {"model_id": made}),
            ("load_weights", {"optimizer": True, "path": path}, {"model_id": loaded, "path": path}),
        )):  # fmt: skip
            body = {"session_id": wires.session, "model_seq_id": seq, **body}
            cases.append((verb, body, {**answer, "type": verb}))
        verb, body, answer = cases[1]
        assert wires.wait(wires.post(verb, **body)) == answer
        trained = wires.score(made, 4, make_text_datums())
        first.session_store.models[made].is_written_out = False  # as without --durable

        def again(wires, served):
            for verb, body, answer in cases:
                time.sleep(0.1)
                served.do_upkeep()
                assert f"{answer['model_id']}:0" not in served.request_store._requests
                wires.post(verb, 400, **{**body, "user_metadata": {"other": "words"}})
                assert wires.wait(wires.post(verb, **body)) == answer

        again(wires, first)
        assert_same_rows(trained, wires.score(made, 5, make_text_datums()))
    file = tmp_path / wires.session / "train-1" / "model.json"
    fields = json.loads(file.read_text())
    fields["answer"] = fields.pop("create_result")  # as an earlier release wrote it
    file.write_text(json.dumps(fields))
    with server(tmp_path, resend_seconds=0.05, durable=True, resume=True) as first:
        next_one = Wire(first)
        next_one.session = wires.session
        again(next_one, first)


def test_samplers_that_two_threads_forget_at_once_are_no_error(tmp_path, monkeypatch):
    """A thread removes a sampler that another has just selected for eviction."""
    with server(tmp_path, samplers=1, samplers_in_memory=1) as item:
        base, chosen = item.engine.settings.bases[0], []

        def surplus(holders, count):
            samplers = scheduler.choose_evictions(holders, count)
            chosen.extend(sampler.sampler_id for sampler in samplers)
            for sampler in samplers:
                item.session_store.samplers.pop(sampler.sampler_id, None)
            return samplers

        monkeypatch.setattr(session_store, "choose_evictions", surplus)
        first, second = (SamplerRecord(name, "local", "s", base, client=object()) for name in "ab")
        item.session_store.add_sampler(first)
        item.session_store.add_sampler(second)
        assert chosen == ["a"] and list(item.session_store.samplers) == ["b"]
        item.session_store.samplers["a"], first.client = first, object()
        item.model_manager._evict_samplers()
        assert len(chosen) == 2 and sum(sampler.client is None for sampler in (first, second)) == 1
