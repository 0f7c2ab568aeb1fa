"""Test the limits of a server and the errors that report them."""

import asyncio
import errno
import gc
import runpy
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from serving import (
    BASE,
    Wire,
    assert_same_rows,
    hold_requests,
    open_server,
    read_command_line,
    run_server,
    server,
    until,
)
from test_serve import KEYS, make_text_datums

from rl.distributed import checkpoint_folder
from rl.errors import UserError
from rl.learner import LearnerSettings
from rl.models import load_model
from rl.runtime import SamplerSettings, WorkerSettings
from rl.serve import served_models, serving_engine
from rl.serve.scheduler import EngineJob
from rl.serve.served_models import ModelManager


def are_in_memory(served, models):
    return [served.session_store.models[model].client is not None for model in models]


def test_the_model_that_was_used_longest_ago_is_written_out(tmp_path):
    with open_server(tmp_path, models_in_memory=2) as (first, wires):
        a, b = wires.model(0), wires.model(1)
        wires.score(a, 1, make_text_datums())  # b becomes the least recently used model
        c = wires.model(2)
        assert are_in_memory(first, (a, b, c)) == [True, False, True]
        wires.score(b, 1, make_text_datums())
        assert are_in_memory(first, (a, b, c)) == [False, True, True]


def test_a_model_that_cannot_be_written_out_fails_no_other(tmp_path, monkeypatch):
    """The disk is full while another model needs the memory."""
    with open_server(tmp_path, models_in_memory=2) as (first, wires):
        a, b = wires.model(0), wires.model(1)
        write = ModelManager.write_model

        def full(manager, model):
            if model.model_id == a:
                raise OSError(errno.ENOSPC, "No space left on device")
            write(manager, model)

        with monkeypatch.context() as patch:
            patch.setattr(ModelManager, "write_model", full)
            wires.model(2)
            assert are_in_memory(first, (a, b)) == [True, False], "the next one is written instead"
            wires.score(b, 1, make_text_datums())
            assert are_in_memory(first, (a, b)) == [True, True]
        assert "skipped" not in wires.train(a, 1, make_text_datums())[1]["metrics"]


def test_weights_are_read_once_for_many_and_again_after_a_failure(model_server, wires, monkeypatch):
    path = wires.save(wires.model(), 1, "a", "_for_sampler")
    model_server.model_manager._snapshots.clear()
    driver, loads = model_server.engine.service._driver, []
    submit = driver.submit

    def failing(verb, *arguments, **named):
        future = submit(verb, *arguments, **named)
        if verb != "load_sampler":
            return future
        loads.append(verb)
        time.sleep(0.2)  # the others ask meanwhile
        if len(loads) > 1:
            return future
        failed = Future()
        failed.set_exception(MemoryError("for a moment"))
        return failed

    monkeypatch.setattr(driver, "submit", failing)
    error = wires.complete(500, model=path)["error"]
    assert error["type"] == "server_error" and "for a moment" not in error["message"]
    assert len(loads) == 1
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda _: wires.complete(model=path), range(4)))
    assert len(loads) == 2


def test_renderers_are_freed_with_the_weights_that_they_read_for(model_server, wires, monkeypatch):
    made, make = [], served_models.get_renderer

    def watched(*arguments):
        renderer = make(*arguments)
        made.append(weakref.ref(renderer))
        return renderer

    monkeypatch.setattr(served_models, "get_renderer", watched)
    model = wires.model()
    for i in range(3):
        body = {"model": wires.sampler(model, 1 + i, i), "max_tokens": 2}
        body["messages"] = [{"role": "user", "content": "hi"}]
        for _ in range(2):
            reply = wires.http.post("/v1/chat/completions", json=body)
            assert reply.status_code == 200, reply.text
    assert len(made) == 3 and all(renderer() is not None for renderer in made)
    wires.post(f"sessions/{wires.session}/finish", 204)
    assert until(lambda: not gc.collect() and not any(renderer() for renderer in made))


def test_a_server_whose_ranks_are_gone_is_not_healthy(tmp_path):
    with server(tmp_path) as item:
        http = Wire(item).http
        assert http.get("/healthz").json() == {"status": "ok"}
        item.engine.service.close()
        reply = http.get("/healthz")
        assert reply.status_code == 503 and reply.json() == {"status": "failed"}


def test_values_of_a_model_and_of_a_sample_that_mean_nothing_are_refused(model_server, wires):
    body = wires.model_body()
    for value, got in (("false", "str"), (0, "int")):
        body["lora_config"]["train_mlp"] = value
        reply = wires.post("create_model", 400, **body)
        assert reply["detail"] == f"lora_config.train_mlp must be of type bool, got {got}"
    body["lora_config"]["train_mlp"] = None  # as if it were absent
    models = wires.wait(wires.post("create_model", **body))["model_id"], wires.model(1)
    clients = [model_server.session_store.models[name].client for name in models]
    assert len({client.info["trainable_parameters"] for client in clients}) == 1
    body = {"sampling_session_id": "x", "seq_id": 0, "num_samples": 2**16 + 1}
    assert str(2**16) in wires.post("asample", 400, **body)["detail"]


def open_sampler(wires, path, number):
    """Return the name of a sampling session with saved weights."""
    fields = {"session_id": wires.session, "sampling_session_seq_id": number, "model_path": path}
    return wires.post("create_sampling_session", **fields)["sampling_session_id"]


def test_a_sampler_that_was_given_back_is_read_again(tmp_path):
    with open_server(tmp_path, samplers_in_memory=1) as (item, wires):
        samplers = []
        for seed in (1, 2):
            model = wires.model(seed, seed=seed)
            wires.train(model, 1, make_text_datums(4, seed), learning_rate=0.3)
            path = wires.save(model, 3, "kept", "_for_sampler")
            samplers.append(open_sampler(wires, path, seed))

        def draw(seq):
            options = {"seed": 3, "max_tokens": 12}
            drawn = [wires.sample(s, seq, [4, 5], 4, **options) for s in samplers]
            return [[item.tokens for item in message.sequences] for message in drawn]

        first = draw(0)
        assert first[0] != first[1]
        assert sum(item.session_store.samplers[s].client is not None for s in samplers) == 1
        assert draw(1) == first


def test_a_later_request_reuses_the_beginning_of_an_earlier_one(wires):
    """The prompts share 40 tokens, two full chunks of 16. Another model shares nothing."""
    paths = [wires.save(wires.model(i, seed=i), 1, "kept", "_for_sampler") for i in range(2)]
    cached = []
    for path, ends in ((paths[0], (3, 4, 5)), (paths[1], (3, 4))):
        for end in ends:
            prompt = [*range(4, 24), *range(4, 24), end]
            usage = wires.complete(model=path, prompt=prompt, max_tokens=4)["usage"]
            assert usage["prompt_tokens"] == 41
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 32, 32, 0, 32]


def test_the_sampler_that_a_request_loads_is_not_the_one_that_is_evicted(tmp_path):
    with open_server(tmp_path, samplers_in_memory=1) as (item, wires):
        model = wires.model()
        paths = [wires.save(model, 1 + i, name, "_for_sampler") for i, name in enumerate("ab")]
        for path in paths * 2:
            wires.complete(model=path)
        samplers = [open_sampler(wires, path, number) for number, path in enumerate(paths)]
        with hold_requests(item):  # the first sampler is used by the last request too
            requests = [
                wires.ask_sample(samplers[i], seq, [4, 5]) for seq, i in enumerate((0, 1, 0))
            ]
        for request in requests:
            assert wires.wait(request, "SampleResponse").sequences


def test_a_path_is_found_without_a_look_at_other_checkpoints(wires, monkeypatch):
    model, looked = wires.model(), []
    paths = [wires.save(model, seq, f"s{seq}", "_for_sampler") for seq in (1, 2)]
    look = checkpoint_folder.remove_if_expired
    monkeypatch.setattr(
        checkpoint_folder, "remove_if_expired", lambda folder: (looked.append(folder), look(folder))
    )
    wires.complete(model=paths[1])
    assert {folder.name for folder in looked} == {"s2"}


def test_a_name_that_is_saved_again_has_the_new_weights(wires):
    """On the OpenAI-style routes. A sampling session keeps the weights that it was created with."""
    model = wires.model()

    def save_and_complete(seq, name):
        path = wires.save(model, seq, name, "_for_sampler")
        options = {"max_tokens": 12, "seed": 3, "n": 4, "return_token_ids": True}
        choices = wires.complete(model=path, **options)["choices"]
        return path, [choice["token_ids"] for choice in choices]

    path, old_tokens = save_and_complete(1, "kept")
    sampler = open_sampler(wires, path, 1)
    old_samples = wires.sample(sampler, 1, [4, 5], 4, seed=3)
    run, _, place = path.removeprefix("tinker://").partition("/")
    deleted = wires.http.delete(f"/api/v1/training_runs/{run}/checkpoints/{place}")
    assert deleted.status_code == 204
    wires.train(model, 2, make_text_datums(4), learning_rate=0.3)
    new_path, new_tokens = save_and_complete(4, "kept")
    assert new_path == path and new_tokens == save_and_complete(5, "other")[1] != old_tokens
    samples = wires.sample(sampler, 2, [4, 5], 4, seed=3)
    for row, old_row in zip(samples.sequences, old_samples.sequences, strict=True):
        assert row.tokens == old_row.tokens


def test_a_snapshot_that_fails_leaves_no_older_one_under_its_name(wires, monkeypatch):
    model = wires.model()
    path = wires.save(model, 1, "again", "_for_sampler")
    options = {"model": path, "max_tokens": 12, "seed": 3, "return_token_ids": True}
    old_tokens = wires.complete(**options)["choices"][0]["token_ids"]
    run, _, place = path.removeprefix("tinker://").partition("/")
    wires.http.delete(f"/api/v1/training_runs/{run}/checkpoints/{place}")
    wires.train(model, 2, make_text_datums(4), learning_rate=0.3)

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(ModelManager, "_take_snapshot", fail)
    save = {"model_id": model, "seq_id": 4, "path": "again"}
    assert "MemoryError" in wires.wait(wires.post("save_weights_for_sampler", **save))["error"]
    assert wires.complete(**options)["choices"][0]["token_ids"] != old_tokens


def test_comments_of_a_keys_file_are_no_keys(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# two tenants\n  # of the laboratory\n" + "\n".join(KEYS) + "\n\n")
    assert read_command_line("--keys-file", str(file)).keys == KEYS
    file.write_text("# tml-a-key-that-is-out-of-use\n\n")
    with pytest.raises(UserError, match="has no key"):
        read_command_line("--keys-file", str(file))
    words = ("--allowed-hosts", "gpu.lab", "gpu2.lab")
    assert tuple(read_command_line(*words).allowed_hosts) == ("gpu.lab", "gpu2.lab")


def test_a_part_of_a_shared_package_is_missing_by_itself():
    is_installed = runpy.run_path(str(Path(__file__).parents[2] / "serve.py"))["is_installed"]
    assert is_installed("google.protobuf") and is_installed("fastapi")
    assert not is_installed("google.no_such_part") and not is_installed("no_such_package.part")


def test_settings_of_memory_reach_the_workers(tmp_path):
    words = (
        "--precision fp32 --base-dtype fp32 --gradient-checkpointing --offload-activations "
        "--kept-logits-gib 0.5 --fused-logprobs false --kv-cache-tokens 256 --max-rows 8 "
        "--sampler-cache plain --token-budget 32 --layout padded"
    )
    settings = read_command_line(*words.split(), "--output-dir", tmp_path)
    learner = LearnerSettings(
        token_budget=32, layout="padded", fused=False, gradient_checkpointing=True,
        offload_activations=True, kept_bytes=2**29,
    )  # fmt: skip
    sampler = SamplerSettings(kv_cache_tokens=256, max_rows=8, cache="plain")
    assert settings.worker == WorkerSettings("fp32", learner=learner, sampler=sampler)
    assert settings.base_dtype == "fp32"
    assert read_command_line().worker == WorkerSettings()
    with run_server(settings) as served:
        wires = Wire(served)
        wires.open()
        slices, run_slice = [], served.engine._run_job_slice
        served.engine._run_job_slice = lambda job: (slices.append(job.verb), run_slice(job))[1]
        wires.output(wires.ask(wires.model(), 1, make_text_datums(40)))
        assert slices.count("forward_backward") > 5, "a micro-batch has 32 tokens"
        error = wires.complete(400, max_tokens=300)["error"]
        assert "kv_cache_tokens is 256" in error["message"] and error["code"] is None


@pytest.mark.parametrize("words, message", [
    ("--token-budget 0", "--token-budget is at least 1"),
    ("--kv-cache-tokens many", "--kv-cache-tokens: many is not"),
    ("--base-dtype 8bit", "--base-dtype: 8bit is not one of"),
    ("--precision fp32 --base-dtype 4bit", "requires bf16 arithmetic"),
    ("--offload-activations", "set --gradient-checkpointing too"),
    ("--sampler-tp 0", "--sampler-tp is at least 1"),
    ("--resume", "give its --output-dir"),
    ("--sampler vllm", "needs --sampler-url"),
    ("--sampler-url http://a:1", "are of --sampler vllm"),
    ("--sampler vllm --sampler-url http://a:1 --base-model b=tiny:ascii",
     "hold the weights of one model"),
    ("--sampler vllm --sampler-url http://a:1 --sampler-tp 2", "leave sampler_tp at 1"),
])  # fmt: skip
def test_settings_that_do_not_combine_are_refused(words, message):
    with pytest.raises(UserError, match=message):
        read_command_line(*words.split())


@pytest.mark.parametrize("verb", ["unload_model", "finish"])
def test_a_model_is_not_freed_between_two_micro_batches(tmp_path, verb):
    data = make_text_datums(100)
    with open_server(tmp_path, token_budget=32) as (item, wires):
        model = wires.model()
        expected = wires.score(model, 1, data)
        running = wires.ask(model, 2, data, forward_only=True)
        if verb == "unload_model":
            wires.post(verb, model_id=model)
        else:
            wires.post(f"sessions/{wires.session}/finish", 204)
        assert_same_rows(wires.output(running)[0], expected)
        assert until(lambda: item.session_store.models[model].client is None)


def test_capabilities_do_not_wait_for_the_engine(model_server, wires):
    with hold_requests(model_server):
        begin = time.monotonic()
        reply = wires.http.get("/api/v1/get_server_capabilities").json()
        assert [model["model_name"] for model in reply["supported_models"]] == [BASE]
        assert time.monotonic() - begin < 30, "the engine is held for 60 s"


def test_every_stored_result_counts_for_its_tenant(tmp_path):
    with open_server(tmp_path, durable=True) as (item, wires):
        model = wires.model()
        wires.wait(wires.step(model, 1))
        wires.wait(wires.post("unload_model", model_id=model))
        assert set(item.request_store._tenant_bytes) == {wires.session}
        wires.output(wires.ask(model, 2, make_text_datums(2)))
        wires.wait(wires.post("unload_model", model_id=model))  # drops the gradient
        refused = wires.wait(wires.step(model, 3))
        assert "gradients are lost, because the model was unloaded" in refused["error"], refused
    with server(tmp_path, durable=True, resume=True) as item:
        assert set(item.request_store._tenant_bytes) == {wires.session}


def test_sessions_models_tokens_and_open_requests_are_bounded(tmp_path):
    with server(tmp_path, sessions=1, models=1, tokens=40, open_requests=3) as first:
        wires, other = Wire(first), Wire(first)
        wires.open()
        full = other.http.post("/api/v1/create_session", json={"tags": []})
        assert full.status_code == 429 and "--sessions" in full.text
        assert float(full.headers["retry-after"]) > 0
        large = {"user_metadata": {"notes": "a" * 2**16}}
        refused = wires.http.post("/api/v1/create_session", json=large)
        assert refused.status_code == 400 and "user_metadata has 65541 characters" in refused.text
        model = wires.model()
        full = wires.http.post("/api/v1/create_model", json=wires.model_body(1))
        assert full.status_code == 429 and "--models" in full.text
        refused = wires.wait(wires.ask(model, 1, make_text_datums(12)))
        assert refused["category"] == "user" and "takes 40: send less" in refused["error"]
        for path, prompt in (
            ("completions", {"prompt": [4, 5]}),
            ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            answer = wires.http.post(f"/v1/{path}", json={**prompt, "n": 2, "max_tokens": 4})
            assert answer.status_code == 200, (path, answer.text)
            for most in ({"n": 2, "max_tokens": 60}, {"n": 4}):
                answer = wires.http.post(f"/v1/{path}", json={**prompt, **most})
                assert answer.status_code == 400, (path, most, answer.text)
                assert "the limit of a request is 40" in answer.json()["error"]["message"]
        first.app._open_by_owner["another"] = 3
        assert wires.http.get("/api/v1/sessions").status_code == 503
        assert wires.http.get("/healthz").status_code == 200
        first.app._open_by_owner["another"] = 0
        assert wires.http.get("/api/v1/sessions").status_code == 200
        first.model_manager.end_session(first.session_store.sessions[wires.session], "done")
        other.open()  # the store has room again


def test_what_a_server_that_ends_has_not_begun_is_told_to_come_again(tmp_path):
    with open_server(tmp_path) as (first, wires):
        model, data = wires.model(0), make_text_datums()
        sampler = wires.sampler(model, 1)
        with hold_requests(first):
            waiting = [wires.ask(model, 2, data), wires.step(model, 3), wires.ask(model, 9, data)]
            waiting.append(wires.ask_sample(sampler, 0, [4, 5]))
            first.engine.shut_down()
            first.model_manager.interrupt_waiting()
        for request in waiting:
            body = {"request_id": request["request_id"]}
            answer = wires.http.post("/api/v1/retrieve_future", json=body)
            assert answer.status_code == 503 or answer.json()["category"] == "server", answer.text
            assert "try" in answer.text or "again" in answer.text
        assert wires.http.get("/healthz").status_code == 503
        body = {"sampling_session_id": sampler, "seq_id": 5, "num_samples": 1}
        body["prompt"] = {"chunks": [{"type": "encoded_text", "tokens": [4]}]}
        for path, fields in (("api/v1/asample", body), ("v1/completions", {"prompt": [4, 5]})):
            refused = wires.http.post(f"/{path}", json=fields)
            assert refused.status_code == 503 and float(refused.headers["retry-after"]) > 0, path


def test_a_request_that_a_server_interrupts_as_it_ends_is_run_by_the_next(tmp_path):
    with open_server(tmp_path) as (first, wires):
        save = {"model_id": wires.model(), "seq_id": 1, "path": "a"}

        def end():
            first.engine.shut_down(0.0)
            yield

        with hold_requests(first):
            request = wires.post("save_weights", **save)
            first.engine.submit(EngineJob("other", "end", "end", end))
        assert first.engine.join(60)
        body = {"request_id": request["request_id"]}
        assert wires.http.post("/api/v1/retrieve_future", json=body).status_code == 503
    with server(tmp_path, resume=True) as second:
        answer = Wire(second).wait(Wire(second).post("save_weights", **save))
        assert answer["path"].endswith("/weights/a")


def test_sessions_that_fall_silent_are_ended_though_a_look_failed(tmp_path, monkeypatch):
    with server(tmp_path, session_seconds=0.5) as first:
        sessions, looks, keep = first.session_store.sessions, [], first.session_store.save_session

        def fails_once(what):
            looks.append(what)
            if len(looks) == 1:
                raise OSError("no space left on device")
            keep(what)

        names = [Wire(first).open() for _ in range(2)]
        monkeypatch.setattr(first.session_store, "save_session", fails_once)
        for name in names:
            sessions[name].last_used -= 60

        first.run_upkeep()
        first.run_upkeep()
        assert sessions[names[1]].finished == "silent" and len(looks) > 1


def test_the_memory_of_a_session_that_ends_is_freed_though_its_file_cannot_be_written(
    model_server, wires, monkeypatch
):
    record = model_server.session_store.models[wires.model()]

    def fail(session):
        raise OSError("no space left on device")

    monkeypatch.setattr(model_server.session_store, "save_session", fail)
    with pytest.raises(OSError):
        session = model_server.session_store.sessions[wires.session]
        model_server.model_manager.end_session(session, "silent")
    assert until(lambda: record.client is None)


def test_samplers_that_the_last_requests_of_an_ended_session_create_are_freed(tmp_path):
    with open_server(tmp_path) as (first, wires):
        model, store = wires.model(), first.session_store
        with hold_requests(first):
            # the lane of the session's end is over before these requests have run
            wires.ask(model, 1, make_text_datums())
            wires.step(model, 2)
            fields = {"model_id": model, "seq_id": 3, "sampling_session_seq_id": 0}
            last = wires.post("save_weights_for_sampler", **fields)
            first.model_manager.end_session(store.sessions[wires.session], "silent")
        assert wires.wait(last)["sampling_session_id"]
        assert until(lambda: not len(first.engine.queue))
        assert store.models[model].client is None and not store.samplers


def test_a_model_without_a_tokenizer_samples_from_token_ids(tmp_path):
    bare = str(tmp_path / "bare")
    load_model(BASE).model.save_pretrained(bare)
    with server(tmp_path / "out", base=bare) as item:
        http, params = Wire(item).http, {"max_tokens": 3, "logprobs": 1, "ignore_eos": True}
        body = {"token_ids": [4, 5], "sampling_params": params}
        reply = http.post("/inference/v1/generate", json=body)
        assert reply.status_code == 200, reply.text
        (choice,) = reply.json()["choices"]
        assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == 3
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        for path, body in (("completions", {"prompt": [4, 5]}), ("chat/completions", chat)):
            reply = http.post(f"/v1/{path}", json={**body, "max_tokens": 3})
            assert reply.status_code == 400 and "/inference/v1/generate" in reply.text, path


def test_requests_that_were_queued_when_their_session_ended_leave_no_model_in_memory(
    model_server, wires
):
    record = model_server.session_store.models[wires.model()]
    with hold_requests(model_server):
        requests = [wires.ask(record.model_id, 1 + i, make_text_datums(4, i)) for i in range(6)]
        wires.post(f"sessions/{wires.session}/finish", 204)
    for request in requests:
        wires.output(request)
    assert until(lambda: not len(model_server.engine.queue))
    assert until(lambda: record.client is None) and not record.has_gradient


def test_sessions_are_listed_newest_first_after_a_restart(tmp_path):
    with server(tmp_path) as item:
        wires = Wire(item)
        sessions = [wires.open() for _ in range(6)]
    with server(tmp_path, resume=True) as item:
        listed = Wire(item).http.get("/api/v1/sessions").json()["sessions"]
        assert listed == sessions[::-1]


def test_a_wave_of_coroutines_is_one_batch(model_server, wires, monkeypatch):
    """Sixteen concurrent samples are drawn in a single stream, including the first."""
    monkeypatch.setattr(serving_engine, "_BATCH_WAIT_SECONDS", 0.8)  # enough on a busy machine
    monkeypatch.setattr(serving_engine, "_MAX_BATCH_WAIT_SECONDS", 20.0)
    sampler, engine = wires.sampler(wires.model(), 1), model_server.engine
    rounds, admit = [], engine._admit_samples
    monkeypatch.setattr(
        engine, "_admit_samples", lambda samples: (rounds.append(len(samples)), admit(samples))
    )

    async def wave(first=0, count=16):
        options = {"transport": httpx.ASGITransport(model_server.app), "base_url": "http://server"}
        async with httpx.AsyncClient(**options, headers={"x-api-key": "tml-nobody"}) as http:
            fixed = {"sampling_session_id": sampler, "num_samples": 1}
            fixed |= {"sampling_params": {"max_tokens": 4}}
            chunks = [[{"type": "encoded_text", "tokens": [4, 5 + i]}] for i in range(count)]
            bodies = [
                fixed | {"seq_id": first + i, "prompt": {"chunks": chunk}}
                for i, chunk in enumerate(chunks)
            ]
            requests = (http.post("/api/v1/asample", json=body) for body in bodies)
            return [reply.json() for reply in await asyncio.gather(*requests)]

    requests = asyncio.run(wave())
    assert all(len(wires.wait(item, "SampleResponse").sequences) == 1 for item in requests)
    assert [count for count in rounds if count] == [16], rounds
    del rounds[:]
    finish, ended, requests = engine.queue.finish_job, threading.Event(), []

    # The first half arrives just before the desk checks for more samples, the other half just
    # after.
    def slowly(job):
        finish(job)
        ended.set()
        time.sleep(0.3)

    def halves():
        ended.wait(60)
        requests.extend(asyncio.run(wave(16, 8)))
        time.sleep(0.4)
        requests.extend(asyncio.run(wave(24, 8)))

    monkeypatch.setattr(engine.queue, "finish_job", slowly)
    asking = threading.Thread(target=halves)
    asking.start()
    with hold_requests(model_server):
        pass
    asking.join(60)
    assert len([len(wires.wait(item, "SampleResponse").sequences) for item in requests]) == 16
    assert [count for count in rounds if count] == [16], rounds


@pytest.mark.parametrize("limits", [{"sessions": 0}, {"models": -1}, {"tokens": 0}])
def test_limits_of_nothing_are_refused(tmp_path, limits):
    with pytest.raises(ValueError), server(tmp_path, **limits):
        pass


def read_metrics(http):
    """Return {(name, label names): sum of its values}, read by prometheus_client's parser."""
    from prometheus_client.parser import text_string_to_metric_families

    answer, sums = http.get("/metrics"), {}
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            key = (sample.name.removeprefix("whetstone_"), *sorted(sample.labels))
            sums[key] = sums.get(key, 0.0) + sample.value
    return sums


def test_metrics_have_the_documented_names_and_each_server_counts_for_itself(tmp_path):
    with server(tmp_path / "a", models_in_memory=1) as first, server(tmp_path / "b") as other:
        wires = Wire(first)
        wires.open()
        model = wires.model()
        wires.score(model, 1, make_text_datums(2))
        wires.sample(wires.sampler(model, 2), 0, [4, 5, 6], 2, max_tokens=5, stop=[])
        wires.model(1)  # the first model is written to disk
        sums = read_metrics(wires.http)
        assert set(sums) == {
            ("requests_total", "route", "status"), ("request_seconds_total", "route"),
            ("sampled_tokens_total",), ("prompt_tokens_total",), ("trained_tokens_total",),
            ("work_total", "outcome", "verb"), ("work_seconds_total", "verb"),
            ("written_out_total", "which"), ("open_requests",), ("queued",), ("held_bytes",),
            ("sessions",), ("models", "state"), ("samplers",),
        }  # fmt: skip
        assert sums["sampled_tokens_total",] == 10 and sums["prompt_tokens_total",] == 3
        assert sums["open_requests",] == 1 and sums["sessions",] == sums["samplers",] == 1
        assert sums["written_out_total", "which"] == 1 and sums["models", "state"] == 2
        idle = read_metrics(Wire(other).http)
        assert idle["sessions",] == idle["models", "state"] == 0
        assert not idle.get(("sampled_tokens_total",))
        assert ("requests_total", "route", "status") not in idle
