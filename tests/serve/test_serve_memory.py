"""Test the memory that a server uses for finished requests."""

import gc
import json
import logging
import time
import tracemalloc
from concurrent.futures import Future

import numpy as np
import pytest
from serving import BASE, Wire, hold_requests, open_server, server, until
from test_serve import KEYS, make_text_datums

from rl.serve import scheduler, session_store, tinker_pb2
from rl.serve.request_store import PendingRequest, RequestStore
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


def test_failed_requests_keep_no_body(tmp_path):
    with open_server(tmp_path) as (first, wires):
        model, seq = wires.model(), 0

        def fail(datum, loss, config):
            nonlocal seq
            seq += 1
            answer = wires.wait(wires.ask(model, seq, [datum], loss, config))
            assert answer["category"] == "user", answer

        for fault in FAULTS.values():
            fail(*fault)
        gc.collect()
        tracemalloc.start()
        try:
            for _ in range(2):
                for fault in FAULTS.values():
                    fail(*fault)
            gc.collect()
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        sent = 2 * len(FAULTS) * TOKENS * 12
        assert kept < sent / 5, (
            f"{kept / 1e6:.1f} MB are kept of {sent / 1e6:.1f} MB of requests that failed"
        )


def test_an_error_in_the_server_keeps_nothing_of_its_frames(caplog):
    # pytest keeps log records together with their tracebacks
    caplog.set_level(logging.CRITICAL, "whetstone.serve")
    promises, words = RequestStore(60.0), []

    def fails(body):
        raise RuntimeError("broken") from ValueError("because")

    from rl.serve.serving_engine import _resolve

    gc.collect()
    tracemalloc.start()
    try:
        for i in range(20):
            promise = promises.add(PendingRequest(str(i), "me", "work"))
            try:
                fails(np.zeros(1 << 20, np.uint8))
            except RuntimeError as error:
                _resolve(promise.work_future, error, "work")
            words.append(promise.encoded_result.body)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 1 << 19 and b"its log says why" in words[0]


def test_a_stored_answer_takes_eight_bytes_a_token():
    """Answers are stored in int32 and float32, as on the wire; objects take 67 bytes per number."""
    promises, tokens = RequestStore(3600.0), 20_000

    def drawn(seed):
        rng = np.random.default_rng(seed)
        return rng.integers(300, 50_000, tokens).tolist(), rng.standard_normal(tokens).tolist()

    tracemalloc.start()
    try:
        for i in range(10):
            promise = promises.add(PendingRequest(str(i), "me", "sample", tenant="me"))
            promise.work_future.set_result(SampleResponse([SampledSequence(*drawn(i), "length")]))
        del promise
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept / (10 * tokens) < 10, f"{kept / (10 * tokens):.1f} bytes a token"
    assert promises.total_bytes == pytest.approx(10 * tokens * 8, rel=0.01)
    message = tinker_pb2.SampleResponse.FromString(
        promises.find_request("9", "me").encoded_result.body
    )
    ids, logprobs = drawn(9)
    assert np.frombuffer(message.sequences[0].tokens, "<i4").tolist() == ids
    np.testing.assert_allclose(
        np.frombuffer(message.sequences[0].logprobs, "<f4"), logprobs, rtol=1e-6
    )


def test_a_sent_answer_can_be_asked_for_again_for_a_while_and_an_unsent_one_for_longer(tmp_path):
    with open_server(tmp_path, resend_seconds=1.0) as (item, wires):
        model = wires.model()
        sent = wires.ask(model, 1, make_text_datums(), forward_only=True)
        first = wires.wait(sent)
        unsent = wires.ask(model, 2, make_text_datums(), forward_only=True)
        assert wires.wait(sent) == first, "whose connection broke asks again"
        time.sleep(1.2)
        item.do_upkeep()
        gone = wires.http.post("/api/v1/retrieve_future", json={"request_id": sent["request_id"]})
        assert gone.status_code == 410 and "expired" in gone.text
        assert wires.wait(unsent) == first
    assert item.request_store.resend_seconds == 1.0 and RequestStore(3600.0).resend_seconds == 60.0


def test_bytes_are_bounded_and_shared_like_everything_else(tmp_path):
    with server(tmp_path, keys=KEYS, held_bytes=240_000, resend_seconds=0.5) as first:
        greedy, other = (Wire(first, key) for key in KEYS)
        greedy.open(), other.open()
        model, theirs = greedy.model(), other.model()

        def send(wires, model, seq, tokens=2000):  # a little more than 24 KB
            ids = (np.arange(tokens) % 50 + 4).tolist()
            message = tinker_pb2.ForwardBackwardRequest(
                model_id=model, seq_id=seq, loss_fn="cross_entropy", forward_only=True
            )
            for begin in range(0, tokens, 20):
                datum = message.data.add()
                datum.model_input.add().encoded_text.tokens = np.asarray(
                    ids[begin : begin + 20], "<i4"
                ).tobytes()
                tensor = datum.loss_fn_inputs["target_tokens"]
                tensor.dense = np.asarray(ids[begin : begin + 20], "<i8").tobytes()
                tensor.dtype = tinker_pb2.DTYPE_INT64
                tensor.shape.append(20)
            headers = {"content-type": "application/x-protobuf"}
            return wires.http.post(
                "/api/v1/forward_backward", content=message.SerializeToString(), headers=headers
            )

        with hold_requests(first):
            answers = [send(greedy, model, 1 + i) for i in range(8)]
            taken = [answer for answer in answers if answer.status_code == 200]
            assert [answer.status_code for answer in answers] == [200] * len(taken) + [429] * (
                8 - len(taken)
            )
            assert 2 <= len(taken) <= 4, "about half of the bytes"
            assert "your share" in answers[-1].text and "--held-bytes" in answers[-1].text
            assert send(other, theirs, 1).status_code == 200
        for answer in taken:
            assert len(greedy.output(answer.json())[0]) == 100
        assert send(greedy, model, len(taken) + 1).status_code == 200, (
            "answers are smaller than what was sent for them"
        )
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

    promises = RequestStore(3600.0)
    promise = promises.add(
        PendingRequest("1", "me", "sample", tenant="me", result_future=LateFuture())
    )
    promise.work_future.set_result({"fine": 1})
    assert promises.find_request("1", "me").encoded_result.body == b'{"fine":1}'


def test_kept_answers_are_looked_through_only_where_room_is_short(monkeypatch):
    promises, scans = RequestStore(3600.0, 0.0, held_bytes=100), []
    look = promises._unfetched_requests
    monkeypatch.setattr(promises, "_unfetched_requests", lambda: scans.append(1) or look())
    for number in range(3):
        promises.check_capacity("me", 20)
        # 30 bytes with its quotes
        promises.add(
            PendingRequest(str(number), "me", "sample", tenant="me", size=20)
        ).work_future.set_result("x" * 28)
    assert promises.total_bytes == 90 and not scans
    promises.check_capacity("me", 50)
    assert len(scans) == 1 and promises.total_bytes == 30 and promises.find_request("2", "me"), (
        "the two oldest went"
    )


def test_a_model_is_made_once_even_where_its_answer_has_been_forgotten(tmp_path):
    """A repeated request gets the same answer, from this server and from the next."""
    bodies = [{"base_model": BASE, "lora_config": {"rank": 4, "seed": 7}}, {"optimizer": True}]
    with open_server(tmp_path, resend_seconds=0.05, durable=True) as (first, wires):
        made = wires.model()
        wires.ask(made, 1, make_text_datums())
        wires.wait(wires.step(made, 2))
        bodies[1]["path"] = wires.save(made, 3, "a")
        calls = [(verb, {"session_id": wires.session, "model_seq_id": seq, **bodies[seq]})
                 for seq, verb in enumerate(("create_model", "load_weights"))]  # fmt: skip
        wires.wait(wires.post("load_weights", **calls[1][1]))
        trained = wires.output(wires.ask(made, 4, make_text_datums(), forward_only=True))
        answers = [
            {"model_id": made, "type": "create_model"},
            {"model_id": f"{wires.session}:train:1", "path": bodies[1]["path"],
             "type": "load_weights"},
        ]  # fmt: skip
        first.session_store.models[made].is_written_out = False  # as without --durable

        def again(wires, served):
            for (verb, body), answer in zip(calls, answers, strict=True):
                time.sleep(0.1)
                served.do_upkeep()
                assert f"{answer['model_id']}:0" not in served.request_store._requests
                wires.post(verb, 400, **{**body, "user_metadata": {"other": "words"}})
                assert wires.wait(wires.post(verb, **body)) == answer

        again(wires, first)
        after = wires.output(wires.ask(made, 5, make_text_datums(), forward_only=True))
        np.testing.assert_array_equal(np.concatenate(trained[0]), np.concatenate(after[0]))
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
