"""Test the server over its wire protocol."""

import asyncio
import base64
import gc
import math
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from seeing import chunk, encode_parts
from serving import BASE, PROTOBUF, Wire, datum_message, hold_requests, open_server, server

from rl.client import ServiceClient
from rl.images import get_image_reader
from rl.learner import LearnerSettings
from rl.losses import LOSSES
from rl.runtime import WorkerSettings
from rl.serve import tinker_pb2
from rl.serve.request_store import PendingRequest, RequestStore
from rl.types import AdamParams, Datum, ModelInput, SamplingParams, TensorData

KEYS = ("tml-first-tenants-key", "tml-second-tenants-key")


def make_text_datums(count: int = 6, seed: int = 0) -> list[Datum]:
    rng = np.random.default_rng(seed)
    rows = [rng.integers(2, 90, rng.integers(4, 12)) for _ in range(count)]
    fields = [{"target_tokens": row[1:], "weights": np.ones(len(row) - 1)} for row in rows]
    inputs = [ModelInput.from_ints(row[:-1].tolist()) for row in rows]
    return [Datum(*pair) for pair in zip(inputs, fields, strict=True)]


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


@pytest.fixture
def wire_client(model_server):
    first = Wire(model_server)
    first.open()
    return first


@pytest.fixture(scope="module")
def local_service(tmp_path_factory):
    """Yield a service in this process, the reference for the models of `Wire.model`."""
    with ServiceClient(output_dir=tmp_path_factory.mktemp("here")) as service:
        yield service


def test_the_five_steps_are_those_of_the_clients_in_this_process_to_the_bit(
    wire_client, local_service
):
    data = make_text_datums()
    model = wire_client.model()
    # The first chunk arrives last, as the SDK sends it.
    rest, first = wire_client.ask(model, 2, data[3:]), wire_client.ask(model, 1, data[:3])
    stepped = wire_client.step(model, 3, grad_clip_norm=1.0)
    client = local_service.create_lora_training_client(BASE, 4, 7)
    for request, part in ((first, data[:3]), (rest, data[3:])):
        present, mine = (
            wire_client.output(request),
            client.forward_backward(part, "cross_entropy").result(),
        )
        for logprobs, output in zip(present[0], mine.loss_fn_outputs, strict=True):
            assert np.array_equal(logprobs, output["logprobs"].array)
        assert present[1] == mine.metrics
    assert (
        wire_client.wait(stepped)["metrics"]
        == client.optim_step(AdamParams(1e-2, grad_clip_norm=1.0)).result().metrics
    )
    sampler, reference = (
        wire_client.sampler(model, 4),
        client.save_weights_and_get_sampling_client(),
    )
    prompt = [5, 9, 30]
    present = wire_client.sample(
        sampler, 0, prompt, 3, seed=11, prompt_logprobs=True, topk_prompt_logprobs=2
    )
    mine = reference.sample(
        ModelInput.from_ints(prompt), 3, SamplingParams(8, seed=11), True, 2
    ).result()
    for actual, sequence in zip(present.sequences, mine.sequences, strict=True):
        assert np.array_equal(np.frombuffer(actual.tokens, "<i4"), sequence.tokens_np)
        assert np.array_equal(np.frombuffer(actual.logprobs, "<f4"), sequence.logprobs_np)
    prompt_logprobs = np.frombuffer(present.prompt_logprobs, "<f4")
    assert np.isnan(prompt_logprobs[0]) and np.array_equal(
        prompt_logprobs[1:], mine.prompt_logprobs_np[1:]
    )
    ids = np.frombuffer(present.topk_prompt_logprobs.token_ids, "<i4").reshape(-1, 2)
    assert [row.tolist() for row in ids[1:]] == [
        [token for token, _ in row] for row in mine.topk_prompt_logprobs[1:]
    ]


def _for_loss(name):
    rng, data = np.random.default_rng(3), []
    for i in range(4):
        n, spec = 6, LOSSES[name]
        fields = {"target_tokens": rng.integers(2, 90, n)}
        for field in spec.required[1:]:
            fixed = {"labels": np.full(n, float(i % 2)), "mask": np.ones(n)}
            fields[field] = fixed[field] if field in fixed else -4.0 + rng.standard_normal(n)
        if name != "cross_entropy":
            fields.setdefault("mask", np.ones(n))  # some losses take their actions from it
        data.append(Datum(ModelInput.from_ints(rng.integers(2, 90, n).tolist()), fields))
    return data


WITHOUT_VALUES = [name for name, spec in LOSSES.items() if not spec.values]


def test_every_loss_gives_over_the_wire_what_it_gives_here(wire_client, local_service):
    model, client = wire_client.model(), local_service.create_lora_training_client(BASE, 4, 7)
    settings = {
        "ppo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3},
        "dro": {"beta": 0.1},
        "dpo": {"beta": 0.2},
    }
    for seq, name in enumerate(WITHOUT_VALUES, start=1):
        data, config = _for_loss(name), settings.get(name, {})
        rows, metrics = wire_client.output(wire_client.ask(model, seq, data, name, config))
        mine = client.forward_backward(data, name, config).result()
        assert {key: value for key, value in metrics.items()} == {
            k if ":" in k else f"{k}:mean": v for k, v in mine.metrics.items()
        }, name
        assert all(
            np.array_equal(a, b["logprobs"].array)
            for a, b in zip(rows, mine.loss_fn_outputs, strict=True)
        ), name
        assert all(key.count(":") == 1 for key in metrics), (name, list(metrics))
    stepped = wire_client.wait(wire_client.step(model, len(WITHOUT_VALUES) + 1))
    assert stepped["metrics"] == client.optim_step(AdamParams(1e-2)).result().metrics
    for seq, name in enumerate(
        (*(name for name in LOSSES if LOSSES[name].values), "stable_reinforce"),
        start=len(WITHOUT_VALUES) + 2,
    ):
        refused = wire_client.wait(wire_client.ask(model, seq, _for_loss("cross_entropy"), name))
        assert refused["category"] == "user" and name in refused["error"]


@pytest.mark.parametrize("rank", [8, 64])
def test_an_adapter_over_the_wire_is_scaled_by_alpha_32_as_on_tinker(
    wire_client, local_service, rank
):
    data, model, seen = make_text_datums(), wire_client.model(rank=rank), {}
    wire_client.ask(model, 1, data)
    wire_client.wait(wire_client.step(model, 2))
    rows, _ = wire_client.output(wire_client.ask(model, 3, data, forward_only=True))
    for alpha in (32, rank):
        client = local_service.create_lora_training_client(BASE, rank, 7, alpha=alpha)
        client.forward_backward(data, "cross_entropy").result()
        client.optim_step(AdamParams(1e-2)).result()
        seen[alpha] = [
            output["logprobs"].array
            for output in client.forward(data, "cross_entropy").result().loss_fn_outputs
        ]
    assert all(np.array_equal(present, mine) for present, mine in zip(rows, seen[32], strict=True))
    assert not any(
        np.allclose(present, mine, atol=1e-3)
        for present, mine in zip(rows, seen[rank], strict=True)
    )


def test_a_checkpoint_of_alpha_equal_to_the_rank_goes_on_over_the_wire_as_it_was(tmp_path):
    """An older server saved it: its model was created without alpha."""
    data = make_text_datums()
    with server(tmp_path / "served") as first:
        reference, made = first.engine.service, []
        before, wires = reference.create_lora_training_client, Wire(first)
        reference.create_lora_training_client = lambda *inputs, **more: (
            made.append(before(*inputs, alpha=None, **more)) or made[-1]
        )
        wires.open()
        model = wires.model(rank=8)
        del reference.create_lora_training_client
        wires.ask(model, 1, data)
        wires.wait(wires.step(model, 2))
        saved = wires.save(model, 3, "before")
        fresh = wires.model(1, rank=8)
        loaded = wires.load(2, saved)["model_id"]
        wires.wait(wires.post("load_weights", model_id=fresh, seq_id=1, path=saved, optimizer=True))
        rows = []
        for name, seq in ((model, 4), (fresh, 2), (loaded, 1)):
            wires.ask(name, seq, data)
            wires.wait(wires.step(name, seq + 1))
            rows.append(
                np.concatenate(wires.output(wires.ask(name, seq + 2, data, forward_only=True))[0])
            )
    assert np.array_equal(rows[0], rows[1]) and np.array_equal(rows[0], rows[2])


def test_a_request_that_comes_twice_runs_once_and_is_answered_alike(wire_client):
    model = wire_client.model()
    requests = [wire_client.ask(model, 1, make_text_datums()) for _ in range(3)]
    assert len({item["request_id"] for item in requests}) == 1
    steps = [wire_client.wait(wire_client.step(model, 2)) for _ in range(3)]
    assert steps[0] == steps[1] == steps[2] and steps[0]["metrics"]["grad_norm"] > 0
    # If the second request had run, this gradient would still exist.
    skipped = wire_client.wait(wire_client.step(model, 3))
    assert skipped["metrics"] == {"grad_norm": 0.0, "skipped": 1.0}
    assert (
        "something else"
        in wire_client.post(
            "optim_step", 400, model_id=model, seq_id=2, adam_params={"learning_rate": 0.5}
        )["detail"]
    )
    sampler = wire_client.sampler(model, 4)
    tries = [
        wire_client.post(
            "save_weights_for_sampler", model_id=model, seq_id=5, sampling_session_seq_id=7 + i
        )
        for i in range(2)
    ]
    # The SDK numbers its sampling sessions separately for each attempt.
    made = [wire_client.wait(item)["sampling_session_id"] for item in tries]
    assert made[0] == made[1] == f"{wire_client.session}:sample:7"
    first, again = (
        wire_client.ask_sample(sampler, 0, [4, 5]),
        wire_client.ask_sample(sampler, 0, [4, 5]),
    )
    assert first == again and wire_client.wait(first, "SampleResponse") == wire_client.wait(
        again, "SampleResponse"
    )


def test_what_is_wrong_with_its_values_is_an_answer_and_leaves_no_gap(wire_client):
    model = wire_client.model()
    good, bad = (
        make_text_datums(),
        Datum(ModelInput.from_ints([4, 5, 6]), {"target_tokens": [5, 6]}),
    )
    before = wire_client.output(wire_client.ask(model, 1, good, forward_only=True))
    assert "error" not in wire_client.ask(model, 2, good)
    refused = wire_client.wait(wire_client.ask(model, 3, [bad]))
    assert refused["category"] == "user" and "target_tokens" in refused["error"]
    stepped = wire_client.wait(wire_client.step(model, 4))
    assert stepped["category"] == "user" and "not run" in stepped["error"]
    after = wire_client.output(wire_client.ask(model, 5, good, forward_only=True))
    assert all(np.array_equal(a, b) for a, b in zip(before[0], after[0], strict=True)), (
        "the weights are as they were"
    )
    assert wire_client.wait(wire_client.step(model, 6))["metrics"] == {
        "grad_norm": 0.0,
        "skipped": 1.0,
    }, "half of the gradient stayed"
    cases = {
        7: {"adam_params": {"learning_rate": -1}},
        8: {"optimizer_params": {"type": "dimuon"}},
        9: {"adam_params": {"rate": 1}},
    }
    for seq, fields in cases.items():
        assert (
            wire_client.wait(wire_client.post("optim_step", model_id=model, seq_id=seq, **fields))[
                "category"
            ]
            == "user"
        )
    for seq, name in ((10, "../up"), (11, "a/b"), (12, ".hidden"), (13, "")):
        assert (
            "name"
            in wire_client.wait(
                wire_client.post("save_weights", model_id=model, seq_id=seq, path=name)
            )["error"]
        )
    assert wire_client.wait(wire_client.step(model, 14))["metrics"]["skipped"] == 1.0


def test_samples_are_drawn_between_the_micro_batches_of_a_call(tmp_path):
    with open_server(tmp_path / "served", token_budget=32) as (first, wires):
        model = wires.model()
        sampler = wires.sampler(model, 1)
        wires.sample(sampler, 0, [4, 5])
        order, slices = [], []
        plain = first.engine._run_job_slice
        first.engine._run_job_slice = lambda job: (slices.append(job.verb), plain(job))[1]
        trained = wires.ask(model, 2, make_text_datums(300))
        query = wires.ask_sample(sampler, 1, [4, 5], max_tokens=4)
        for name, request in (("sample", query), ("train", trained)):
            promise = first.request_store.find_request(request["request_id"], "local")
            promise.result_future.add_done_callback(
                lambda _, name=name: order.append((name, len(slices)))
            )
        rows, metrics = wires.output(trained)
        assert [name for name, _ in order] == ["sample", "train"], order
        assert order[0][1] + 5 < order[1][1], "it did not wait for the call"
        with ServiceClient(
            output_dir=tmp_path / "here",
            settings=WorkerSettings(learner=LearnerSettings(token_budget=32)),
        ) as service:
            client = service.create_lora_training_client(BASE, 4, 7)
            mine = client.forward_backward(make_text_datums(300), "cross_entropy").result()
            assert metrics == mine.metrics
            assert all(
                np.array_equal(a, b["logprobs"].array)
                for a, b in zip(rows, mine.loss_fn_outputs, strict=True)
            )
            norm = client.optim_step(AdamParams(1e-2)).result().metrics
        assert wires.wait(wires.step(model, 3))["metrics"] == norm


def test_a_model_that_is_written_out_and_read_back_goes_on_to_the_bit(tmp_path):
    """Two tenants take turns on a server with memory for a single model."""

    def lives(first, turns):
        tenants = []
        for seed in (7, 8):
            wires = Wire(first)
            wires.open()
            tenants.append((wires, wires.model(rank=3 + seed, seed=seed), []))
        for turn in range(3):
            for wires, model, seen in tenants if turns else tenants[:1]:
                seq = 2 * turn + 1
                seen.append(wires.output(wires.ask(model, seq, make_text_datums(4, turn)))[1])
                seen.append(wires.wait(wires.step(model, seq + 1)))
        for wires, model, seen in tenants if not turns else ():
            for turn in range(3):
                if model == tenants[0][1]:
                    break
                seen.append(
                    wires.output(wires.ask(model, 2 * turn + 1, make_text_datums(4, turn)))[1]
                )
                seen.append(wires.wait(wires.step(model, 2 * turn + 2)))
        return [seen for _, _, seen in tenants]

    with server(tmp_path / "narrow", models_in_memory=1) as first:
        narrow = lives(first, True)
        assert first.engine.metrics.get_value("written_out_total", which="read_back") >= 4
    with server(tmp_path / "wide") as first:
        assert lives(first, False) == narrow
        assert first.engine.metrics.get_value("written_out_total", which="read_back") == 0


@pytest.mark.parametrize("durable", [False, True])
def test_a_server_that_goes_on_keeps_models_paths_and_what_was_trained(tmp_path, durable):
    def begin(first):
        wires = Wire(first)
        wires.open()
        model = wires.model()
        wires.output(wires.ask(model, 1, make_text_datums(4, 0)))
        wires.wait(wires.step(model, 2))
        path = wires.save(model, 3, "one")
        return wires, model, path

    def go_on(wires, model, path):
        seen = [
            wires.output(wires.ask(model, 4, make_text_datums(4, 1)))[1],
            wires.wait(wires.step(model, 5)),
        ]
        again = wires.load(9, path)
        assert again["path"] == path
        return seen + [wires.output(wires.ask(again["model_id"], 1, make_text_datums(4, 1)))[1]]

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
        wires.output(wires.ask(model, 1, make_text_datums()))
        stepped = wires.wait(wires.step(model, 2))
        wires.output(wires.ask(model, 3, make_text_datums()))
        # the files that a server killed at this point leaves
        shutil.copytree(tmp_path / "a", tmp_path / "b")
    with server(tmp_path / "b", resume=True, durable=True) as first:
        again = Wire(first)
        assert (
            again.wait({"request_id": f"{model}:2"}) == stepped == again.wait(again.step(model, 2))
        ), "applied once, told again"
        request = again.step(model, 4)
        time.sleep(0.2)
        first.model_manager.skip_lost_numbers()
        assert "repeat the forward_backward" in again.wait(request)["error"]
        again.output(again.ask(model, 5, make_text_datums()))
        assert again.wait(again.step(model, 6))["metrics"]["grad_norm"] > 0
    with server(tmp_path / "a", resume=True) as first:  # a server that was stopped regularly
        again = Wire(first)
        assert "repeat the forward_backward" in again.wait(again.step(model, 4))["error"]


def test_what_is_anothers_does_not_exist(tmp_path):
    with server(tmp_path, keys=KEYS) as first:
        mine, theirs = Wire(first, KEYS[0]), Wire(first, KEYS[1])
        mine.open(), theirs.open()
        model = mine.model()
        path = mine.save(model, 1, "a")
        sampler = mine.sampler(model, 2)
        taken = mine.ask_sample(sampler, 0, [4, 5])["request_id"]
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


def test_nothing_leads_out_of_the_folder_and_no_body_breaks_in(wire_client, model_server):
    root = model_server.session_store.root
    model, session = wire_client.model(), wire_client.session
    before = {path for path in root.parent.iterdir()}
    for path in ("tinker://../../etc", "tinker://../../etc/weights/passwd", f"tinker://{model}/weights/..", f"tinker://{model}/../x",
                 f"tinker://{model}/weights/%2e%2e", "/etc/passwd", "file:///etc", f"tinker://{model}/live/live", "tinker://", "",
                 f"tinker://{session}:train:01/weights/a", f"tinker://{model}/weights/a\0b"):  # fmt: skip
        place, reference = path or " ", {"session_id": session}
        wire_client.post(
            "load_weights", 404, **reference, model_seq_id=50, path=place, optimizer=False
        )
        wire_client.post(
            "create_sampling_session",
            404,
            **reference,
            sampling_session_seq_id=50,
            model_path=place,
        )
        wire_client.post("weights_info", 404, tinker_path=place)
    assert {path for path in root.parent.iterdir()} == before
    for path in (
        "/api/v1/files/1/ab/x/weights/y/../../z",
        f"/api/v1/files/9999999999/{'0' * 64}/{model}/weights/a/state.json",
    ):
        assert wire_client.http.get(path).status_code == 404
    good = tinker_pb2.ForwardBackwardRequest(model_id=model, seq_id=1, loss_fn="cross_entropy")
    rng = np.random.default_rng(0)
    for i in range(300):
        raw = bytearray(good.SerializeToString() + rng.bytes(int(rng.integers(0, 60))))
        for at in rng.integers(0, len(raw), int(rng.integers(1, 9))):
            raw[at] = int(rng.integers(0, 256))
        answer = wire_client.http.post(
            "/api/v1/forward_backward", content=bytes(raw), headers={"content-type": PROTOBUF}
        )
        assert answer.status_code in (200, 400, 404), (i, answer.text)
        assert "Traceback" not in answer.text and ".py" not in answer.text
    big = wire_client.http.post(
        "/api/v1/telemetry", content=b"", headers={"content-length": str(2 * 2**30)}
    )
    assert big.status_code == 413

    def endless():
        for _ in range(16):
            yield b"x" * 2**20

    assert wire_client.http.post("/api/v1/optim_step", content=endless()).status_code == 413
    for body in (b"{", b"[]", b"[" * 100_000, b'{"model_id": 3}', b"\xff"):
        assert wire_client.http.post("/api/v1/optim_step", content=body).status_code == 400


def test_a_full_queue_says_so_and_takes_more_later(tmp_path):
    with open_server(tmp_path, queued=2) as (first, wires):
        model = wires.model()
        with hold_requests(first):
            kept = wires.step(model, 1)
            refused = wires.http.post(
                "/api/v1/optim_step", json={"model_id": model, "seq_id": 2, "adam_params": {}}
            )
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        wires.wait(kept)
        assert wires.wait(wires.step(model, 2))["metrics"]["skipped"] == 1.0


def test_two_clients_that_call_everything_the_same_get_each_its_own(tmp_path):
    with server(tmp_path) as first:
        seen = []
        for seed in (1, 2):
            wires = Wire(first)
            wires.session = wires.post(
                "create_session", tags=["me"], user_metadata={"name": "run"}, display_name="run"
            )["session_id"]
            model = wires.model(seed=seed)
            wires.output(wires.ask(model, 1, make_text_datums(4, seed)))
            wires.wait(wires.step(model, 2))
            path = wires.save(model, 3, "one")
            after = wires.output(wires.ask(model, 4, make_text_datums(4, 9), forward_only=True))[0]
            seen.append((wires, model, path, after))
        (a, model, path, _), (_, _, other, _) = seen
        assert path != other
        assert (
            "one" in a.wait(a.post("save_weights", model_id=model, seq_id=5, path="one"))["error"]
        ), "a name is given once"
        for wires, _, path, after in seen:
            again = wires.load(9, path)["model_id"]
            result = wires.output(wires.ask(again, 1, make_text_datums(4, 9), forward_only=True))[0]
            assert all(np.array_equal(x, y) for x, y in zip(after, result, strict=True))
        assert not np.array_equal(seen[0][3][0], seen[1][3][0])


def test_what_was_saved_can_be_listed_taken_along_and_removed(wire_client, tmp_path):
    import io
    import tarfile

    model = wire_client.model()
    kept = wire_client.save(model, 1, "a", user_metadata={"step": "1"})
    brief = wire_client.save(model, 2, "b", "_for_sampler", ttl_seconds=3600)
    whole = wire_client.save(model, 3, "c", "_external")
    run = f"/api/v1/training_runs/{model}"
    listed = wire_client.http.get(run + "/checkpoints").json()["checkpoints"]
    assert [item["tinker_path"] for item in listed] == [kept, brief, whole]
    assert [item["checkpoint_type"] for item in listed] == ["training", "sampler", "external"]
    assert listed[0]["user_metadata"] == {"step": "1"}
    assert listed[0]["expires_at"] is None
    assert listed[1]["expires_at"] is not None
    assert wire_client.post("weights_info", tinker_path=kept)["lora_rank"] == 4
    tar = tarfile.open(
        fileobj=io.BytesIO(wire_client.http.get(run + "/checkpoints/weights/a/archive").content)
    )
    assert {"state.json", "manifest.json", "model/adapter_model.safetensors"} <= set(tar.getnames())
    urls = wire_client.http.get(
        run + "/checkpoints/external_weights/c/external_weights_urls"
    ).json()["urls"]
    assert {"config.json", "model.safetensors"} <= set(urls)
    assert (
        wire_client.http.get(urls["config.json"], headers={"x-api-key": ""}).json()["model_type"]
        == "qwen3"
    )
    assert (
        wire_client.http.get(urls["config.json"][:-11] + "model.safetensors").status_code == 404
    ), "a link is for one file"
    assert (
        wire_client.http.put(
            run + "/checkpoints/weights/a/ttl", json={"ttl_seconds": 1}
        ).status_code
        == 204
    )
    assert wire_client.http.delete(run + "/checkpoints/sampler_weights/b").status_code == 204
    time.sleep(1.1)
    assert [
        item["tinker_path"]
        for item in wire_client.http.get(run + "/checkpoints").json()["checkpoints"]
    ] == [whole]
    wire_client.post(
        "load_weights",
        404,
        session_id=wire_client.session,
        model_seq_id=60,
        path=kept,
        optimizer=True,
    )


def test_a_damaged_checkpoint_hides_no_other(wire_client, model_server):
    model = wire_client.model()
    paths = [wire_client.save(model, 1 + i, name) for i, name in enumerate("ab")]
    file = model_server.session_store.models[model].folder / "weights" / "a" / "state.json"
    file.write_text(file.read_text() + " ")
    listed = wire_client.http.get(f"/api/v1/training_runs/{model}/checkpoints")
    assert listed.status_code == 200, listed.text
    assert [item["tinker_path"] for item in listed.json()["checkpoints"]] == paths[1:]
    run = wire_client.http.get(f"/api/v1/training_runs/{model}").json()
    assert run["last_checkpoint"]["tinker_path"] == paths[1]


def test_one_tenants_failure_touches_no_other(wire_client, model_server):
    other = Wire(model_server)
    other.open()
    models = wire_client.model(), other.model()
    sampler = other.sampler(models[1], 1)
    request = other.ask_sample(sampler, 0, [4, 5], seed=1)
    broken = Datum(
        ModelInput.from_ints([4, 5]),
        {"target_tokens": [5, 6], "logprobs": [-np.inf, -1.0], "advantages": [1.0, 1.0]},
    )
    failed = wire_client.wait(wire_client.ask(models[0], 1, [broken], "importance_sampling"))
    assert failed["category"] == "user"
    cancelled = other.ask_sample(sampler, 1, [4, 5], max_tokens=200)
    other.post("cancel_future", 204, request_id=cancelled["request_id"])
    wire_client.post(f"sessions/{wire_client.session}/finish", 204, reason={"type": "errored"})
    wire_client.post("optim_step", 410, model_id=models[0], seq_id=2, adam_params={})
    assert len(other.wait(request, "SampleResponse").sequences) == 1
    rows, _ = other.output(other.ask(models[1], 2, make_rewarded_datums(), "importance_sampling"))
    assert len(rows) == 4 and other.wait(other.step(models[1], 3))["metrics"]["grad_norm"] > 0


def test_weights_that_are_loaded_after_a_loss_that_is_not_finite_can_be_trained(wire_client):
    model = wire_client.model()
    path = wire_client.save(model, 1, "before")
    fields = {"target_tokens": [5, 6], "logprobs": [-1e4, -1.0], "advantages": [1.0, 1.0]}
    infinite = Datum(ModelInput.from_ints([4, 5]), fields)
    failed = wire_client.wait(wire_client.ask(model, 2, [infinite], "importance_sampling"))
    assert "not finite" in failed["error"]
    load = {"model_id": model, "seq_id": 3, "path": path, "optimizer": True}
    assert wire_client.wait(wire_client.post("load_weights", **load))["path"] == path
    wire_client.output(wire_client.ask(model, 4, make_text_datums()))
    stepped = wire_client.wait(wire_client.step(model, 5))
    assert stepped.get("metrics", stepped)["grad_norm"] > 0, stepped


def test_a_client_that_dies_between_two_chunks_leaves_nothing_behind(tmp_path):
    with server(tmp_path) as first:
        dying, other = Wire(first), Wire(first)
        dying.open()
        other.open()
        model, theirs = dying.model(), other.model()
        dying.output(dying.ask(model, 1, make_text_datums(), forward_only=True))
        rest, step = dying.ask(model, 3, make_text_datums()[3:]), dying.step(model, 4)
        other.output(other.ask(theirs, 1, make_text_datums()))
        assert other.wait(other.step(theirs, 2))["metrics"]["grad_norm"] > 0, (
            "another's requests wait for nothing"
        )
        session = first.session_store.sessions[dying.session]
        first.model_manager.end_session(session, "silent")
        for waited in (rest, step):
            assert "ended (silent)" in dying.wait(waited)["error"]
        dying.post("optim_step", 410, model_id=model, seq_id=2, adam_params={"learning_rate": 1.0})
        held = first.session_store.models[model]
        assert not held.queued_jobs and not held.has_gradient
        assert other.wait(other.step(theirs, 3))["metrics"]["skipped"] == 1.0
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
    base, adam = "tiny:vision", {"learning_rate": 1e-2}
    with ServiceClient(output_dir=tmp_path / "here") as service:
        client = service.create_lora_training_client(base, 4, 7)
        words = client.get_tokenizer()
        ask = "<|user|><|vision_start|>", chunk(1), "<|vision_end|>what?<|end|><|assistant|>"
        head = encode_parts(words, *ask)
        answered = ModelInput([*head.chunks, *encode_parts(words, "3").chunks])
        whole = get_image_reader(words).resolve_tokens(answered)
        fields = {"target_tokens": whole.token_ids()[1:], "weights": np.ones(whole.length - 1)}
        datum = Datum(whole.truncate(whole.length - 1), fields)
        output = client.forward_backward([datum], "cross_entropy").result()
        mine = output.loss_fn_outputs[0]["logprobs"].array
        client.optim_step(AdamParams(**adam)).result()
        params = SamplingParams(max_tokens=6, seed=3)
        expected = client.save_weights_and_get_sampling_client().sample(head, 2, params).result()
    with open_server(tmp_path / "there", base=base) as (_, first):
        model = first.model(base=base)
        (actual,), _ = first.output(first.ask(model, 1, [datum]))
        first.wait(first.step(model, 2))
        sampler = first.sampler(model, 3)

        def picture(data):
            return {"type": "image", "data": base64.b64encode(data).decode(), "format": "png"}

        prompt = [
            picture(part.data)
            if part.type == "image"
            else {"type": "encoded_text", "tokens": list(part.tokens)}
            for part in head.chunks
        ]
        drawn = first.sample(sampler, 1, prompt, 2, max_tokens=6, seed=3)
        broken = first.wait(first.ask_sample(sampler, 2, [picture(b"no image")]))
    assert np.array_equal(actual, mine)
    tokens = [np.frombuffer(s.tokens, "<i4").tolist() for s in drawn.sequences]
    assert tokens == [s.tokens for s in expected.sequences]
    assert broken["category"] == "user" and "image" in broken["error"]


def test_logprobs_of_given_tokens_in_the_place_of_a_prompts(wire_client, model_server):
    """Each logprob equals the score of the prompt prefix followed by that token."""
    prompt, target = [5, 6, 7, 8], np.array([[9, -1], [-1, -1], [3, 90]])
    listed = [(i, j, int(token)) for (i, j), token in np.ndenumerate(target) if token >= 0]
    full = {"data": target.reshape(-1).tolist(), "dtype": "int64", "shape": [3, 2]}
    rows = {"data": [token for *_, token in listed], "dtype": "int64", "shape": [3, 2]}
    rows |= {"sparse_crow_indices": [0, 1, 1, 3], "sparse_col_indices": [j for _, j, _ in listed]}
    sampler = wire_client.sampler(wire_client.model(), 1)
    client = model_server.model_manager.sampling_client(
        model_server.session_store.samplers[sampler]
    )
    here = client.sample(
        ModelInput.from_ints(prompt),
        1,
        SamplingParams(max_tokens=1),
        target_prompt_logprobs=TensorData(target),
    ).result()
    expected = np.zeros((3, 2))
    for i, j, token in listed:
        expected[i, j] = client.compute_logprobs(
            ModelInput.from_ints([*prompt[: i + 1], token])
        ).result()[-1]
    assert np.abs(here.target_prompt_logprobs.array - expected).max() < 1e-5 and expected.min() < -1
    for seq, inputs in enumerate((full, rows)):
        actual = wire_client.sample(
            sampler, seq, prompt, max_tokens=1, target_prompt_logprobs=inputs
        ).target_prompt_logprobs
        assert list(actual.shape) == [3, 2]
        assert np.abs(np.frombuffer(actual.dense, "<f4").reshape(3, 2) - expected).max() < 1e-5
    for wrong in (
        {**full, "shape": [2, 3]},
        {**full, "data": [999] * 6},
        {**rows, "sparse_crow_indices": [0, 9]},
        {**full, "data": "x"},
    ):
        seq += 1
        refused = wire_client.wait(
            wire_client.ask_sample(sampler, seq, prompt, target_prompt_logprobs=wrong)
        )
        assert refused["category"] == "user" and "target_prompt_logprobs" in refused["error"]


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


def test_a_compressed_forward_backward_is_read_and_a_bomb_is_not(tmp_path):
    zstandard = pytest.importorskip("zstandard", reason="needs the extra serve")
    with open_server(tmp_path, body_bytes=1 << 20) as (served, client):
        model, other, data = client.model(0), client.model(1), make_rewarded_datums(3)
        message = tinker_pb2.ForwardBackwardRequest(
            model_id=model, seq_id=1, loss_fn="importance_sampling"
        )
        message.data.extend(datum_message(item) for item in data)

        def send(body: bytes, encoding: str = "zstd"):
            headers = {"content-type": PROTOBUF, "content-encoding": encoding}
            return client.http.post("/api/v1/forward_backward", content=body, headers=headers)

        packed = zstandard.compress(message.SerializeToString())
        result = client.output(send(packed).json())
        assert send(packed).json()["request_id"] == f"{model}:1"  # sent again, run once
        plain = client.output(client.ask(other, 1, data, "importance_sampling"))
        assert result[1] == plain[1] and all(
            (a == b).all() for a, b in zip(result[0], plain[0], strict=True)
        )
        assert send(zstandard.compress(bytes(1 << 28))).status_code == 413  # 256 MiB in 10 KB
        assert [send(body).status_code for body in (b"none", packed[:-9], b"")] == [400] * 3
        assert send(packed, "br").status_code == 415
        assert client.post("client/config")["proto_compress_fwdbwd"] is False  # on loopback
