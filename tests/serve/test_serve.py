"""Test the server over its wire protocol."""

import asyncio
import base64
import gc
import math
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from seeing import chunk, encode_parts
from serving import (
    BASE,
    PROTOBUF,
    Wire,
    assert_same_rows,
    datum_message,
    get_metric,
    hold_requests,
    open_server,
    server,
    unpack_sequences,
)

from rl.client import ServiceClient
from rl.images import get_image_reader
from rl.learner import LearnerSettings
from rl.runtime import WorkerSettings
from rl.serve import tinker_pb2
from rl.serve.request_store import PendingRequest, RequestStore
from rl.serve.schemas import parse_json
from rl.types import AdamParams, Datum, ModelInput, SamplingParams, TensorData

SKIPPED = {"grad_norm": 0.0, "skipped": 1.0}  # the metrics of a step without a gradient
KEYS = ("tml-first-tenants-key", "tml-second-tenants-key")


def make_text_datums(count: int = 6, seed: int = 0) -> list[Datum]:
    rng = np.random.default_rng(seed)
    rows = [rng.integers(2, 90, rng.integers(4, 12)) for _ in range(count)]
    return [
        Datum(
            ModelInput.from_ints(row[:-1].tolist()),
            {"target_tokens": row[1:], "weights": np.ones(len(row) - 1)},
        )
        for row in rows
    ]


def make_rewarded_datums(count: int = 4, seed: int = 1) -> list[Datum]:
    rng, data = np.random.default_rng(seed), []
    for _ in range(count):
        n = int(rng.integers(4, 10))
        fields = {"logprobs": -4.5 + 0.2 * rng.standard_normal(n)}
        fields |= {"advantages": rng.standard_normal(n), "mask": np.ones(n)}
        read = ModelInput.from_ints(rng.integers(2, 90, n).tolist())
        data.append(Datum(read, {"target_tokens": rng.integers(2, 90, n), **fields}))
    return data


@pytest.fixture(scope="module")
def model_server(tmp_path_factory):
    with server(tmp_path_factory.mktemp("served"), body_bytes=8 * 2**20) as first:
        yield first


@pytest.fixture(scope="module")
def local_service(tmp_path_factory):
    """Yield a service in this process, the reference for the models of `Wire.model`."""
    with ServiceClient(output_dir=tmp_path_factory.mktemp("here")) as service:
        yield service


def list_logprobs(output) -> list[np.ndarray]:
    return [item["logprobs"].array for item in output.loss_fn_outputs]


def test_the_five_steps_are_those_of_the_clients_in_this_process_to_the_bit(wires, local_service):
    data = make_text_datums()
    model = wires.model()
    # The first chunk arrives last, as the SDK sends it.
    rest, first = wires.ask(model, 2, data[3:]), wires.ask(model, 1, data[:3])
    stepped = wires.step(model, 3, grad_clip_norm=1.0)
    client = local_service.create_lora_training_client(BASE, 4, 7)
    for request, part in ((first, data[:3]), (rest, data[3:])):
        rows, metrics = wires.output(request)
        mine = client.forward_backward(part, "cross_entropy").result()
        assert_same_rows(rows, list_logprobs(mine))
        assert metrics == mine.metrics
    update = client.optim_step(AdamParams(1e-2, grad_clip_norm=1.0)).result()
    assert wires.wait(stepped)["metrics"] == update.metrics
    sampler, reference = wires.sampler(model, 4), client.save_weights_and_get_sampling_client()
    prompt, params = [5, 9, 30], SamplingParams(8, seed=11)
    asks = {"seed": 11, "prompt_logprobs": True, "topk_prompt_logprobs": 2}
    present = wires.sample(sampler, 0, prompt, 3, **asks)
    mine = reference.sample(ModelInput.from_ints(prompt), 3, params, True, 2).result()
    sequences = unpack_sequences(present)
    assert [tokens for tokens, *_ in sequences] == [item.tokens for item in mine.sequences]
    assert_same_rows([row for _, row, _ in sequences], [s.logprobs_np for s in mine.sequences])
    prompt_logprobs = np.frombuffer(present.prompt_logprobs, "<f4")
    np.testing.assert_array_equal(prompt_logprobs[1:], mine.prompt_logprobs_np[1:])
    assert np.isnan(prompt_logprobs[0])
    ids = np.frombuffer(present.topk_prompt_logprobs.token_ids, "<i4").reshape(-1, 2)
    expected = [[token for token, _ in row] for row in mine.topk_prompt_logprobs[1:]]
    assert ids[1:].tolist() == expected


def test_an_adapter_over_the_wire_is_scaled_by_alpha_32_as_on_tinker(wires, local_service):
    rank, data, seen = 64, make_text_datums(), {}
    model = wires.model(rank=rank)
    wires.train(model, 1, data)
    rows = wires.score(model, 3, data)
    for alpha in (32, rank):
        client = local_service.create_lora_training_client(BASE, rank, 7, alpha=alpha)
        client.forward_backward(data, "cross_entropy").result()
        client.optim_step(AdamParams(1e-2)).result()
        seen[alpha] = list_logprobs(client.forward(data, "cross_entropy").result())
    assert_same_rows(rows, seen[32])
    assert not any(np.allclose(*pair, atol=1e-3) for pair in zip(rows, seen[rank], strict=True))


def test_a_checkpoint_of_alpha_equal_to_the_rank_goes_on_over_the_wire_as_it_was(
    model_server, wires, monkeypatch
):
    """An older server saved it: its model was created without alpha."""
    data, service = make_text_datums(), model_server.engine.service
    create = service.create_lora_training_client
    with monkeypatch.context() as patch:
        name = "create_lora_training_client"
        patch.setattr(service, name, lambda *inputs, **more: create(*inputs, alpha=None, **more))
        model = wires.model(rank=8)
    wires.train(model, 1, data)
    saved = wires.save(model, 3, "before")
    fresh = wires.model(1, rank=8)
    loaded = wires.load(2, saved)["model_id"]
    wires.wait(wires.post("load_weights", model_id=fresh, seq_id=1, path=saved, optimizer=True))
    rows = []
    for name, seq in ((model, 4), (fresh, 2), (loaded, 1)):
        wires.train(name, seq, data)
        rows.append(wires.score(name, seq + 2, data))
    assert_same_rows(rows[0], rows[1])
    assert_same_rows(rows[0], rows[2])


def test_a_request_that_comes_twice_runs_once_and_is_answered_alike(wires):
    model = wires.model()
    requests = [wires.ask(model, 1, make_text_datums()) for _ in range(3)]
    assert len({item["request_id"] for item in requests}) == 1
    steps = [wires.wait(wires.step(model, 2)) for _ in range(3)]
    assert steps[0] == steps[1] == steps[2] and steps[0]["metrics"]["grad_norm"] > 0
    # If the second request had run, this gradient would still exist.
    assert wires.wait(wires.step(model, 3))["metrics"] == SKIPPED
    other = {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 0.5}}
    assert "something else" in wires.post("optim_step", 400, **other)["detail"]
    sampler = wires.sampler(model, 4)
    # The SDK numbers its sampling sessions separately for each attempt.
    assert wires.sampler(model, 5, 7) == wires.sampler(model, 5, 8) == f"{wires.session}:sample:7"
    first, again = (wires.ask_sample(sampler, 0, [4, 5]) for _ in range(2))
    assert first == again
    assert wires.wait(first, "SampleResponse") == wires.wait(again, "SampleResponse")


def test_what_is_wrong_with_its_values_is_an_answer_and_leaves_no_gap(wires):
    model, good = wires.model(), make_text_datums()
    bad = Datum(ModelInput.from_ints([4, 5, 6]), {"target_tokens": [5, 6]})
    before = wires.score(model, 1, good)
    assert "error" not in wires.ask(model, 2, good)
    refused = wires.wait(wires.ask(model, 3, [bad]))
    assert refused["category"] == "user" and "target_tokens" in refused["error"]
    stepped = wires.wait(wires.step(model, 4))
    assert stepped["category"] == "user" and "not run" in stepped["error"]
    assert_same_rows(before, wires.score(model, 5, good))
    stepped = wires.wait(wires.step(model, 6))
    assert stepped["metrics"] == SKIPPED, "half of the gradient stayed"
    cases = [
        ("optim_step", {"adam_params": {"learning_rate": -1}}, "learning_rate"),
        ("optim_step", {"optimizer_params": {"type": "dimuon"}}, ""),
        ("optim_step", {"adam_params": {"rate": 1}}, "rate"),
        *[("save_weights", {"path": name}, "name") for name in ("../up", "a/b", ".hidden", "")],
    ]
    for seq, (verb, fields, text) in enumerate(cases, start=7):
        answer = wires.wait(wires.post(verb, model_id=model, seq_id=seq, **fields))
        assert answer["category"] == "user" and text in answer["error"], (fields, answer)
    assert wires.wait(wires.step(model, 14))["metrics"] == SKIPPED


def test_samples_are_drawn_between_the_micro_batches_of_a_call(tmp_path):
    data = make_text_datums(120)
    with open_server(tmp_path / "served", token_budget=32) as (first, wires):
        model = wires.model()
        sampler = wires.sampler(model, 1)
        wires.sample(sampler, 0, [4, 5])
        order, slices = [], []
        plain = first.engine._run_job_slice
        first.engine._run_job_slice = lambda job: (slices.append(job.verb), plain(job))[1]
        trained = wires.ask(model, 2, data)
        query = wires.ask_sample(sampler, 1, [4, 5], max_tokens=4)
        for name, request in (("sample", query), ("train", trained)):
            promise = first.request_store.find_request(request["request_id"], "local")
            promise.result_future.add_done_callback(
                lambda _, name=name: order.append((name, len(slices)))
            )
        rows, metrics = wires.output(trained)
        stepped = wires.wait(wires.step(model, 3))
    assert [name for name, _ in order] == ["sample", "train"], order
    assert order[0][1] + 5 < order[1][1], "it did not wait for the call"
    settings = WorkerSettings(learner=LearnerSettings(token_budget=32))
    with ServiceClient(output_dir=tmp_path / "here", settings=settings) as service:
        client = service.create_lora_training_client(BASE, 4, 7)
        mine = client.forward_backward(data, "cross_entropy").result()
        norm = client.optim_step(AdamParams(1e-2)).result().metrics
    assert metrics == mine.metrics and stepped["metrics"] == norm
    assert_same_rows(rows, list_logprobs(mine))


def test_a_model_that_is_written_out_and_read_back_goes_on_to_the_bit(tmp_path):
    """Two tenants take turns on a server with memory for a single model."""

    def train_both(first, in_turns):
        tenants = []
        for seed in (7, 8):
            wires = Wire(first)
            wires.open()
            tenants.append((wires, wires.model(rank=3 + seed, seed=seed), []))
        order = [(turn, tenant) for tenant in tenants for turn in range(3)]
        for turn, (wires, model, seen) in (
            sorted(order, key=lambda item: item[0]) if in_turns else order
        ):
            seen.append(wires.train(model, 2 * turn + 1, make_text_datums(4, turn)))
        return [seen for _, _, seen in tenants]

    with server(tmp_path / "narrow", models_in_memory=1) as first:
        narrow = train_both(first, True)
        assert get_metric(first, "written_out_total", which="read_back") >= 4
    with server(tmp_path / "wide") as first:
        assert train_both(first, False) == narrow
        assert get_metric(first, "written_out_total", which="read_back") == 0


@pytest.mark.parametrize("durable", [False, True])
def test_a_server_that_goes_on_keeps_models_paths_and_what_was_trained(tmp_path, durable):
    def begin(first):
        wires = Wire(first)
        wires.open()
        model = wires.model()
        wires.train(model, 1, make_text_datums(4, 0))
        return wires, model, wires.save(model, 3, "one")

    def go_on(wires, model, path):
        seen = [wires.train(model, 4, make_text_datums(4, 1))]
        again = wires.load(9, path)
        assert again["path"] == path
        return [*seen, wires.train(again["model_id"], 1, make_text_datums(4, 1))]

    with server(tmp_path / "through", durable=durable) as first:
        through = go_on(*begin(first))
    with server(tmp_path / "broken", durable=durable) as first:
        wires, model, path = begin(first)
    with pytest.raises(ValueError, match="--resume"), server(tmp_path / "broken"):
        pass
    with server(tmp_path / "broken", durable=durable, resume=True) as first:
        again = Wire(first)
        again.session = wires.session
        assert go_on(again, model, path) == through


def test_a_gradient_that_a_restart_lost_is_told_and_no_number_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr("rl.serve.served_models._GAP_SECONDS", 0.1)
    with open_server(tmp_path / "a", durable=True) as (first, wires):
        model = wires.model()
        _, stepped = wires.train(model, 1, make_text_datums())
        wires.output(wires.ask(model, 3, make_text_datums()))
        # the files that a server killed at this point leaves
        shutil.copytree(tmp_path / "a", tmp_path / "b")
    with server(tmp_path / "b", resume=True, durable=True) as first:
        again = Wire(first)
        repeated = [{"request_id": f"{model}:2"}, again.step(model, 2)]
        assert [again.wait(item) for item in repeated] == [stepped] * 2, "applied once, told again"
        request = again.step(model, 4)
        time.sleep(0.2)
        first.model_manager.skip_lost_numbers()
        error = again.wait(request)["error"]
        assert "what request 3 changed is lost: repeat the forward_backward" in error
        assert again.train(model, 5, make_text_datums())[1]["metrics"]["grad_norm"] > 0
        late = again.step(model, 8)  # the body of number 7 arrives slowly
        time.sleep(0.2)
        first.do_upkeep()
        again.output(again.ask(model, 7, make_text_datums()))
        assert again.wait(late)["metrics"]["grad_norm"] > 0
    with server(tmp_path / "a", resume=True) as first:  # a server that was stopped regularly
        again = Wire(first)
        assert "repeat the forward_backward" in again.wait(again.step(model, 4))["error"]


def test_a_restart_without_a_model_lets_it_be_created_again_and_keeps_those_of_others(tmp_path):
    limits = {"models": 2, "session_seconds": 1e6}
    with open_server(tmp_path / "a", **limits) as (first, wires):
        models = wires.model(0), wires.model(1)
        shutil.copytree(tmp_path / "a", tmp_path / "b")  # as after SIGKILL
    with server(tmp_path / "b", resume=True, **limits) as second:
        again = Wire(second)
        again.session = wires.session
        assert again.model(0) == models[0]
    weights = next((tmp_path / "a" / wires.session / "train-0" / "live").rglob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    with server(tmp_path / "a", resume=True, **limits) as second:
        again = Wire(second)
        assert "are damaged" in again.wait(again.step(models[0], 1))["error"]
        assert again.train(models[1], 1, make_text_datums())[1]["metrics"]["grad_norm"] > 0


@pytest.mark.parametrize("content", ["", "[]", "{}"])
def test_a_restart_with_damaged_records_keeps_those_of_others(tmp_path, content):
    with open_server(tmp_path) as (first, wires):
        models, session = [wires.model(0), wires.model(1)], wires.session
        wires.open()
        damaged = (
            tmp_path / session / "train-0" / "model.json",
            tmp_path / wires.session / "session.json",
        )
    for file in damaged:
        file.write_text(content)
    with server(tmp_path, resume=True) as second:
        assert list(second.session_store.models) == [models[1]]
        assert list(second.session_store.sessions) == [session]
        again = Wire(second)
        assert again.train(models[1], 1, make_text_datums())[1]["metrics"]["grad_norm"] > 0


def test_a_number_that_never_arrives_is_skipped(wires, model_server, monkeypatch):
    monkeypatch.setattr("rl.serve.served_models._LOST_SECONDS", 0.1)
    model = wires.model()
    request = wires.step(model, 2)
    time.sleep(0.2)
    model_server.do_upkeep()
    assert "request 1 did not arrive within 0 s" in wires.wait(request)["error"]
    assert wires.train(model, 3, make_text_datums())[1]["metrics"]["grad_norm"] > 0
    with hold_requests(model_server):  # number 7 is lost while the update before it waits
        wires.ask(model, 5, make_text_datums())
        update = wires.step(model, 6)
        wires.ask(model, 8, make_text_datums())
        late = wires.step(model, 9)
        time.sleep(0.2)
        model_server.do_upkeep()
    assert wires.wait(update)["metrics"]["grad_norm"] > 0
    model_server.do_upkeep()
    assert "request 7 did not arrive" in wires.wait(late)["error"]
    skipped = wires.wait(wires.ask(model, 7, make_text_datums()))
    assert "was skipped" in skipped["error"] and "next seq_id is 10" in skipped["error"]
    wires.step(model, 11)
    wires.post(f"sessions/{wires.session}/finish", 204)
    time.sleep(0.2)
    model_server.do_upkeep()  # no number of an ended session is waited for


def test_what_is_anothers_does_not_exist(tmp_path):
    with server(tmp_path, keys=KEYS) as first:
        mine, theirs = Wire(first, KEYS[0]), Wire(first, KEYS[1])
        mine.open(), theirs.open()
        model = mine.model()
        path = mine.save(model, 1, "a")
        sampler = mine.sampler(model, 2)
        taken = mine.ask_sample(sampler, 0, [4, 5])["request_id"]
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        for name in (mine.save(model, 3, "s", "_for_sampler"), sampler):
            mine.complete(model=name)
            theirs.complete(404, model=name)
            reply = theirs.http.post("/v1/chat/completions", json={"model": name, **chat})
            assert reply.status_code == 404, name
        error = mine.complete(404, model="none")["error"]
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        theirs.ask(model, 3, make_text_datums(), status=404)
        number, reference = {"model_id": model, "seq_id": 3}, {"session_id": theirs.session}
        for verb, status, fields in [
            ("get_info", 404, {"model_id": model}),
            ("optim_step", 404, {**number, "adam_params": {}}),
            ("save_weights", 404, {**number, "path": "b"}),
            ("load_weights", 404, {**reference, "model_seq_id": 0, "path": path, "optimizer": False}),
            ("create_sampling_session", 404,
             {**reference, "sampling_session_seq_id": 0, "model_path": path}),
            ("create_sampling_session", 404,
             {"session_id": mine.session, "sampling_session_seq_id": 5, "base_model": BASE}),
            ("asample", 404, {"sampling_session_id": sampler, "seq_id": 9, "prompt": {"chunks": []}}),
            ("retrieve_future", 410, {"request_id": taken}),
            ("cancel_future", 410, {"request_id": taken}),
            ("session_heartbeat", 404, {"session_id": mine.session}),
            (f"sessions/{mine.session}/finish", 404, {}),
            ("weights_info", 404, {"tinker_path": path}),
        ]:  # fmt: skip
            theirs.post(verb, status, **fields)
        run, one_of = f"/api/v1/training_runs/{model}", "/checkpoints/weights/a"
        requests = [
            ("GET", ""), ("GET", "/checkpoints"), ("GET", one_of + "/archive"),
            ("PUT", one_of + "/ttl"), ("DELETE", one_of),
        ]  # fmt: skip
        for method, where in requests:
            assert theirs.http.request(method, run + where).status_code == 404, where
            body = {} if method == "PUT" else None
            assert mine.http.request(method, run + where, json=body).status_code < 300, where
        assert theirs.http.get("/api/v1/checkpoints").json()["checkpoints"] == []
        assert theirs.http.get("/api/v1/sessions").json()["sessions"] == [theirs.session]
        for where, headers, status in [
            ("/api/v1/sessions", {"x-api-key": ""}, 401),
            ("/api/v1/sessions", {"x-api-key": "tml-first-tenants-ke"}, 401),
            ("/api/v1/sessions", {"x-api-key": "tml-first-tenants-key2"}, 401),
            ("/api/v1/sessions", {"x-api-key": "é".encode()}, 401),
            ("/api/v1/sessions", {"x-api-key": "", "authorization": f"Bearer {KEYS[0]}"}, 200),
            ("/healthz", {"x-api-key": "x"}, 200),
            ("/metrics", {"x-api-key": "x"}, 401),
        ]:
            assert mine.http.get(where, headers=headers).status_code == status, (where, headers)


def test_nothing_leads_out_of_the_folder(wires, model_server):
    root = model_server.session_store.root
    model, session = wires.model(), wires.session
    before = {path for path in root.parent.iterdir()}
    for path in ("tinker://../../etc", "tinker://../../etc/weights/passwd", f"tinker://{model}/weights/..", f"tinker://{model}/../x",
                 f"tinker://{model}/weights/%2e%2e", "/etc/passwd", "file:///etc", f"tinker://{model}/live/live", "tinker://", " ",
                 f"tinker://{session}:train:01/weights/a", f"tinker://{model}/weights/a\0b"):  # fmt: skip
        load = {"session_id": session, "model_seq_id": 50, "path": path, "optimizer": False}
        wires.post("load_weights", 404, **load)
        sampling = {"session_id": session, "sampling_session_seq_id": 50, "model_path": path}
        wires.post("create_sampling_session", 404, **sampling)
        wires.post("weights_info", 404, tinker_path=path)
    for path in ("1/ab/x/weights/y/../../z", f"9999999999/{'0' * 64}/{model}/weights/a/state.json"):
        assert wires.http.get(f"/api/v1/files/{path}").status_code == 404
    assert {path for path in root.parent.iterdir()} == before


def test_no_body_breaks_in(wires):
    model = wires.model()
    good = tinker_pb2.ForwardBackwardRequest(model_id=model, seq_id=1, loss_fn="cross_entropy")
    rng, headers = np.random.default_rng(0), {"content-type": PROTOBUF}
    for i in range(150):
        raw = bytearray(good.SerializeToString() + rng.bytes(int(rng.integers(0, 60))))
        for at in rng.integers(0, len(raw), int(rng.integers(1, 9))):
            raw[at] = int(rng.integers(0, 256))
        answer = wires.http.post("/api/v1/forward_backward", content=bytes(raw), headers=headers)
        assert answer.status_code in (200, 400, 404), (i, answer.text)
        assert "Traceback" not in answer.text and ".py" not in answer.text

    def endless():
        for _ in range(16):
            yield b"x" * 2**20

    assert wires.http.post("/api/v1/optim_step", content=endless()).status_code == 413
    length = {"content-length": str(2 * 2**30)}
    assert wires.http.post("/api/v1/telemetry", content=b"", headers=length).status_code == 413


NO_JSON = {  # among them half of a surrogate pair, as bytes and as an escape, and another encoding
    "surrogate": b'{"a": "\xed\xa0\x80"}', "utf-16": '{"a": 1}'.encode("utf-16"),
    "escape": b'{"a": "\\ud800"}', "byte": b'{"a": "\xff"}', "open": b"{", "deep": b"[" * 100_000,
    "empty": b"", "list": b"[]", "number": b"3", "null": b"null", "text": b'"\xff"',
    "other": b'{"model_id": 3}',
}  # fmt: skip


@pytest.mark.parametrize("name", NO_JSON)
def test_bytes_that_are_no_body_are_refused(wires, name):
    raw, headers = NO_JSON[name], {"content-type": "application/json"}
    if name in ("surrogate", "utf-16", "escape", "byte"):
        with pytest.raises(ValueError):
            parse_json(raw)
    routes = ("/api/v1/optim_step", "/v1/chat/completions", "/v1/completions",
              "/inference/v1/generate")  # fmt: skip
    for path in routes:
        reply = wires.http.post(path, content=raw, headers=headers)
        assert reply.status_code == 400 and reply.json()["error"]["message"], (path, reply.text)
        assert name in ("other", "empty") or "JSON" in reply.text, (path, reply.text)


def test_a_pair_of_surrogates_and_a_byte_order_mark_are_json():
    raw = b'\xef\xbb\xbf{"a": "\\ud83d\\ude00 \xe2\x82\xac"}'
    assert parse_json(raw) == {"a": "\U0001f600 \u20ac"}


def test_two_clients_that_call_everything_the_same_get_each_its_own(model_server):
    seen, data = [], make_text_datums(4, 9)
    for seed in (1, 2):
        wires = Wire(model_server)
        names = {"tags": ["me"], "user_metadata": {"name": "run"}, "display_name": "run"}
        wires.session = wires.post("create_session", **names)["session_id"]
        model = wires.model(seed=seed)
        wires.train(model, 1, make_text_datums(4, seed))
        path = wires.save(model, 3, "one")
        seen.append((wires, model, path, wires.score(model, 4, data)))
    (a, model, path, _), (_, _, other, _) = seen
    assert path != other
    again = a.wait(a.post("save_weights", model_id=model, seq_id=5, path="one"))
    assert "one" in again["error"], "a name is given once"
    for wires, _, path, after in seen:
        assert_same_rows(after, wires.score(wires.load(9, path)["model_id"], 1, data))
    assert not np.array_equal(seen[0][3][0], seen[1][3][0])


def test_what_was_saved_can_be_listed_and_removed(wires, monkeypatch):
    model = wires.model()
    kept = wires.save(model, 1, "a", user_metadata={"step": "1"})
    brief = wires.save(model, 2, "b", "_for_sampler", ttl_seconds=3600)
    whole = wires.save(model, 3, "c", "_external")
    checkpoints = f"/api/v1/training_runs/{model}/checkpoints"

    def list_checkpoints():
        return wires.http.get(checkpoints).json()["checkpoints"]

    listed = list_checkpoints()
    assert [item["tinker_path"] for item in listed] == [kept, brief, whole]
    assert [item["checkpoint_type"] for item in listed] == ["training", "sampler", "external"]
    assert listed[0]["user_metadata"] == {"step": "1"}
    assert listed[0]["expires_at"] is None
    assert listed[1]["expires_at"] is not None
    assert wires.post("weights_info", tinker_path=kept)["lora_rank"] == 4
    limited = wires.http.put(f"{checkpoints}/weights/a/ttl", json={"ttl_seconds": 1})
    assert limited.status_code == 204
    assert wires.http.delete(f"{checkpoints}/sampler_weights/b").status_code == 204
    assert [item["tinker_path"] for item in list_checkpoints()] == [kept, whole]
    load = {"session_id": wires.session, "model_seq_id": 60, "path": kept, "optimizer": True}
    refusal = wires.post("load_weights", 404, **load | {"path": f"{kept}x"})
    assert refusal["detail"] == f"there is nothing at {kept}x: this model has weights/a"
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + 1.1)
    assert [item["tinker_path"] for item in list_checkpoints()] == [whole]
    refusal = wires.post("load_weights", 404, **load)
    assert refusal["detail"] == f"there is nothing at {kept}: this model has no weights"


def test_a_checkpoint_that_two_requests_remove_at_once_is_no_error(wires, monkeypatch):
    model = wires.model()
    wires.save(model, 1, "a")
    rename, both = os.rename, threading.Barrier(2, timeout=60)
    monkeypatch.setattr(os, "rename", lambda *paths: (both.wait(), rename(*paths)))
    path = f"/api/v1/training_runs/{model}/checkpoints/weights/a"
    with ThreadPoolExecutor(2) as threads:
        answers = threads.map(lambda _: wires.http.delete(path).status_code, range(2))
        assert list(answers) == [204, 204]


def test_a_damaged_checkpoint_hides_no_other(wires, model_server):
    model = wires.model()
    paths = [wires.save(model, 1 + i, name) for i, name in enumerate("ab")]
    file = model_server.session_store.models[model].folder / "weights" / "a" / "state.json"
    file.write_text(file.read_text() + " ")
    listed = wires.http.get(f"/api/v1/training_runs/{model}/checkpoints")
    assert listed.status_code == 200, listed.text
    assert [item["tinker_path"] for item in listed.json()["checkpoints"]] == paths[1:]
    run = wires.http.get(f"/api/v1/training_runs/{model}").json()
    assert run["last_checkpoint"]["tinker_path"] == paths[1]


def test_weights_that_are_loaded_after_a_loss_that_is_not_finite_can_be_trained(wires):
    model = wires.model()
    path = wires.save(model, 1, "before")
    fields = {"target_tokens": [5, 6], "logprobs": [-1e4, -1.0], "advantages": [1.0, 1.0]}
    infinite = Datum(ModelInput.from_ints([4, 5]), fields)
    failed = wires.wait(wires.ask(model, 2, [infinite], "importance_sampling"))
    assert "not finite" in failed["error"]
    load = {"model_id": model, "seq_id": 3, "path": path, "optimizer": True}
    assert wires.wait(wires.post("load_weights", **load))["path"] == path
    stepped = wires.train(model, 4, make_text_datums())[1]
    assert stepped.get("metrics", stepped)["grad_norm"] > 0, stepped


def test_a_client_that_dies_between_two_chunks_leaves_nothing_behind(model_server):
    first = model_server
    dying, other = Wire(first), Wire(first)
    dying.open()
    other.open()
    model, theirs = dying.model(), other.model()
    dying.score(model, 1, make_text_datums())
    rest, step = dying.ask(model, 3, make_text_datums()[3:]), dying.step(model, 4)
    stepped = other.train(theirs, 1, make_text_datums())[1]
    assert stepped["metrics"]["grad_norm"] > 0, "another's requests wait for nothing"
    first.model_manager.end_session(first.session_store.sessions[dying.session], "silent")
    for waited in (rest, step):
        assert "ended (silent)" in dying.wait(waited)["error"]
    dying.post("optim_step", 410, model_id=model, seq_id=2, adam_params={"learning_rate": 1.0})
    held = first.session_store.models[model]
    assert not held.queued_jobs and not held.has_gradient
    assert other.wait(other.step(theirs, 3))["metrics"] == SKIPPED
    assert len(first.engine.queue) == 0


def test_settings_that_would_open_the_door_are_refused():
    from rl.errors import UserError
    from rl.serve import ServedBaseModel, ServeSettings

    bases = (ServedBaseModel.parse("Qwen/Qwen3-0.6B=tiny:chat,/tokenizer"),)
    assert bases[0] == ServedBaseModel("Qwen/Qwen3-0.6B", "tiny:chat", "/tokenizer")
    wrong = (
        ({"host": "0.0.0.0"}, "keys"),
        ({"keys": ("short",)}, "16"),
        ({"tls_cert": "a"}, "--tls-key"),
        ({"bases": ()}, "base-model"),
        ({"stop_grace": math.inf}, "--stop-grace"),
        ({"output_dir": Path(__file__)}, "--output-dir .*test_serve.py is a file"),
    )
    for fields, text in wrong:
        with pytest.raises(UserError, match=text):
            ServeSettings(**{"bases": bases, "output_dir": "x", **fields})


def test_images_travel_and_are_what_they_are_in_this_process(tmp_path):
    """Training and sampling with images match the clients in this process; invalid images are
    refused.
    """
    base = "tiny:vision"
    with ServiceClient(output_dir=tmp_path / "here") as service:
        client = service.create_lora_training_client(base, 4, 7)
        words = client.get_tokenizer()
        ask = "<|user|><|vision_start|>", chunk(1), "<|vision_end|>what?<|end|><|assistant|>"
        head = encode_parts(words, *ask)
        answered = ModelInput([*head.chunks, *encode_parts(words, "3").chunks])
        whole = get_image_reader(words).resolve_tokens(answered)
        fields = {"target_tokens": whole.token_ids()[1:], "weights": np.ones(whole.length - 1)}
        datum = Datum(whole.truncate(whole.length - 1), fields)
        mine = list_logprobs(client.forward_backward([datum], "cross_entropy").result())
        client.optim_step(AdamParams(1e-2)).result()
        params = SamplingParams(max_tokens=6, seed=3)
        expected = client.save_weights_and_get_sampling_client().sample(head, 2, params).result()

    def describe(part):
        if part.type != "image":
            return {"type": "encoded_text", "tokens": list(part.tokens)}
        return {"type": "image", "data": base64.b64encode(part.data).decode(), "format": "png"}

    with open_server(tmp_path / "there", base=base) as (_, first):
        model = first.model(base=base)
        actual, _ = first.output(first.ask(model, 1, [datum]))
        first.wait(first.step(model, 2))
        sampler = first.sampler(model, 3)
        prompt = [describe(part) for part in head.chunks]
        drawn = first.sample(sampler, 1, prompt, 2, max_tokens=6, seed=3)
        no_image = {"type": "image", "data": "AAAA", "format": "png"}
        broken = first.wait(first.ask_sample(sampler, 2, [no_image]))
    assert_same_rows(actual, mine)
    tokens = [tokens for tokens, *_ in unpack_sequences(drawn)]
    assert tokens == [s.tokens for s in expected.sequences]
    assert broken["category"] == "user" and "image" in broken["error"]


def test_logprobs_of_given_tokens_in_the_place_of_a_prompts(wires, model_server):
    """Each logprob equals the score of the prompt prefix followed by that token."""
    prompt, target = [5, 6, 7, 8], np.array([[9, -1], [-1, -1], [3, 90]])
    listed = [(i, j, int(token)) for (i, j), token in np.ndenumerate(target) if token >= 0]
    full = {"data": target.reshape(-1).tolist(), "dtype": "int64", "shape": [3, 2]}
    rows = {"data": [token for *_, token in listed], "dtype": "int64", "shape": [3, 2]}
    rows |= {"sparse_crow_indices": [0, 1, 1, 3], "sparse_col_indices": [j for _, j, _ in listed]}
    name = wires.sampler(wires.model(), 1)
    client = model_server.model_manager.sampling_client(model_server.session_store.samplers[name])
    targets = {"target_prompt_logprobs": TensorData(target)}
    params = SamplingParams(max_tokens=1)
    here = client.sample(ModelInput.from_ints(prompt), 1, params, **targets).result()
    expected = np.zeros((3, 2))
    for i, j, token in listed:
        whole = ModelInput.from_ints([*prompt[: i + 1], token])
        expected[i, j] = client.compute_logprobs(whole).result()[-1]
    assert np.abs(here.target_prompt_logprobs.array - expected).max() < 1e-5 and expected.min() < -1
    for seq, inputs in enumerate((full, rows)):
        asks = {"max_tokens": 1, "target_prompt_logprobs": inputs}
        actual = wires.sample(name, seq, prompt, **asks).target_prompt_logprobs
        assert list(actual.shape) == [3, 2]
        assert np.abs(np.frombuffer(actual.dense, "<f4").reshape(3, 2) - expected).max() < 1e-5
    wrongs = (
        {**full, "shape": [2, 3]}, {**full, "data": [999] * 6}, {**full, "data": "x"},
        {**rows, "sparse_crow_indices": [0, 9]},
    )  # fmt: skip
    for seq, wrong in enumerate(wrongs, start=2):
        refused = wires.wait(wires.ask_sample(name, seq, prompt, target_prompt_logprobs=wrong))
        assert refused["category"] == "user" and "target_prompt_logprobs" in refused["error"], wrong


def test_an_error_that_a_client_was_told_is_no_complaint_in_the_log():
    complaints = []

    async def asked_twice():
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: complaints.append(context["message"])
        )
        promise = RequestStore(60.0).add(PendingRequest("one", "owner", "sample"))
        requests = [asyncio.create_task(promise.wait(30.0)) for _ in range(2)]
        await asyncio.sleep(0)
        promise.work_future.set_exception(ValueError("told"))
        assert await asyncio.gather(*requests) == [True, True]
        del promise, requests
        gc.collect()

    asyncio.run(asked_twice())
    gc.collect()
    assert complaints == []


def test_a_compressed_forward_backward_is_read_and_a_bomb_is_not(wires):
    zstandard = pytest.importorskip("zstandard", reason="needs the extra serve")
    model, other, data = wires.model(0), wires.model(1), make_rewarded_datums(3)
    head = {"model_id": model, "seq_id": 1, "loss_fn": "importance_sampling"}
    message = tinker_pb2.ForwardBackwardRequest(**head)
    message.data.extend(datum_message(item) for item in data)

    def send(body: bytes, encoding: str = "zstd"):
        headers = {"content-type": PROTOBUF, "content-encoding": encoding}
        return wires.http.post("/api/v1/forward_backward", content=body, headers=headers)

    packed = zstandard.compress(message.SerializeToString())
    rows, metrics = wires.output(send(packed).json())
    assert send(packed).json()["request_id"] == f"{model}:1"  # sent again, run once
    plain, plain_metrics = wires.output(wires.ask(other, 1, data, "importance_sampling"))
    assert metrics == plain_metrics
    assert_same_rows(rows, plain)
    assert send(zstandard.compress(bytes(1 << 28))).status_code == 413  # 256 MiB in 10 KB
    assert [send(body).status_code for body in (b"none", packed[:-9], b"")] == [400] * 3
    assert send(packed, "br").status_code == 415
    assert wires.post("client/config")["proto_compress_fwdbwd"] is False  # on loopback
