"""Test the limits of a server and the errors that report them."""

import asyncio
import threading
import time

import pytest
from serving import Wire, hold_requests, open_server, server
from test_serve import KEYS, make_text_datums

from rl.serve import serving_engine

httpx = pytest.importorskip("httpx", reason="needs the extra dev")


def test_the_model_that_was_used_longest_ago_is_written_out(tmp_path):
    with open_server(tmp_path, models_in_memory=2) as (first, wires):
        a, b = wires.model(0), wires.model(1)
        # b becomes the least recently used model
        wires.output(wires.ask(a, 1, make_text_datums(), forward_only=True))
        c = wires.model(2)
        assert [first.session_store.models[model].client is not None for model in (a, b, c)] == [
            True, False, True,
        ]  # fmt: skip
        wires.output(wires.ask(b, 1, make_text_datums(), forward_only=True))
        assert [first.session_store.models[model].client is not None for model in (a, b, c)] == [
            False, True, True,
        ]  # fmt: skip


def test_a_sampler_that_was_given_back_is_read_again(tmp_path):
    with open_server(tmp_path, samplers_in_memory=1) as (item, wires):
        samplers = []
        for seed in (1, 2):
            model = wires.model(seed, seed=seed)
            wires.output(wires.ask(model, 1, make_text_datums(4, seed)))
            wires.wait(wires.step(model, 2, learning_rate=0.3))
            path = wires.save(model, 3, "kept", "_for_sampler")
            numbers = {"session_id": wires.session, "sampling_session_seq_id": seed}
            made = wires.post("create_sampling_session", **numbers, model_path=path)
            samplers.append(made["sampling_session_id"])

        def draw(seq):
            options = {"seed": 3, "max_tokens": 12}
            drawn = [wires.sample(s, seq, [4, 5], 4, **options) for s in samplers]
            return [[item.tokens for item in message.sequences] for message in drawn]

        first = draw(0)
        assert first[0] != first[1]
        assert sum(item.session_store.samplers[s].client is not None for s in samplers) == 1
        assert draw(1) == first


def test_sessions_models_tokens_and_open_requests_are_bounded(tmp_path):
    with server(tmp_path, sessions=1, models=1, tokens=40, open_requests=3) as first:
        wires, other = Wire(first), Wire(first)
        wires.open()
        full = other.http.post("/api/v1/create_session", json={"tags": []})
        assert full.status_code == 429
        assert "--sessions" in full.text
        assert float(full.headers["retry-after"]) > 0
        model = wires.model()
        full = wires.http.post("/api/v1/create_model", json=wires.model_body(1))
        assert full.status_code == 429 and "--models" in full.text
        refused = wires.wait(wires.ask(model, 1, make_text_datums(12)))
        assert refused["category"] == "user" and "takes 40: send less" in refused["error"]
        for path, prompt in (
            ("completions", {"prompt": [4, 5]}),
            ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            for most, status in (
                ({"n": 2, "max_tokens": 4}, 200),
                ({"n": 2, "max_tokens": 60}, 400),
                ({"n": 4}, 400),
            ):
                answer = wires.http.post(f"/v1/{path}", json={**prompt, **most})
                assert answer.status_code == status, (path, most, answer.text)
                assert (
                    status == 200
                    or "the limit of a request is 40" in answer.json()["error"]["message"]
                )
        first.app._open_by_owner["another"] = 3
        assert wires.http.get("/api/v1/sessions").status_code == 503
        assert wires.http.get("/healthz").status_code == 200
        first.app._open_by_owner["another"] = 0
        assert wires.http.get("/api/v1/sessions").status_code == 200
        first.model_manager.end_session(first.session_store.sessions[wires.session], "done")
        other.open()  # the store has room again


def test_what_a_server_that_ends_has_not_begun_is_told_to_come_again(tmp_path):
    with open_server(tmp_path) as (first, wires):
        model, sampler = wires.model(0), None
        sampler = wires.sampler(model, 1)
        with hold_requests(first):
            waiting = [
                wires.ask(model, 2, make_text_datums()), wires.step(model, 3), wires.ask(model, 9, make_text_datums()),
            ]  # fmt: skip
            drawn = wires.ask_sample(sampler, 0, [4, 5])
            first.engine.shut_down()
            first.model_manager.interrupt_waiting()
        for request in (*waiting, drawn):
            answer = wires.http.post(
                "/api/v1/retrieve_future", json={"request_id": request["request_id"]}
            )
            text = answer.json()
            assert answer.status_code == 503 or text["category"] == "server", (
                answer.status_code,
                text,
            )
            assert "try" in str(text) or "again" in str(text)
        assert wires.http.get("/healthz").status_code == 503
        body = {"sampling_session_id": sampler, "seq_id": 5, "num_samples": 1}
        body["prompt"] = {"chunks": [{"type": "encoded_text", "tokens": [4]}]}
        assert wires.http.post("/api/v1/asample", json=body).status_code == 503


def test_sessions_that_fall_silent_are_ended_though_a_look_failed(tmp_path, monkeypatch):
    with server(tmp_path, session_seconds=0.5) as first:
        wires = Wire(first)
        session, looks, keep = wires.open(), [], first.session_store.save_session

        def fails_once(what):
            looks.append(what)
            if len(looks) == 1:
                raise OSError("no space left on device")
            keep(what)

        second = Wire(first).open()
        monkeypatch.setattr(first.session_store, "save_session", fails_once)
        for name in (session, second):
            first.session_store.sessions[name].last_used -= 60

        async def looked_after():
            task = asyncio.create_task(first.run_upkeep())
            await asyncio.sleep(2.5)
            assert not task.done()
            task.cancel()

        asyncio.run(looked_after())
        assert first.session_store.sessions[second].finished == "silent"


def test_models_of_one_key_are_none_to_another_on_the_openai_routes(tmp_path):
    with server(tmp_path, keys=KEYS) as first:
        mine, theirs = Wire(first, KEYS[0]), Wire(first, KEYS[1])
        mine.open(), theirs.open()
        model = mine.model()
        path = mine.save(model, 1, "a", "_for_sampler")
        sampler = mine.sampler(model, 2)
        for name in (path, sampler):
            body = {"model": name, "prompt": [4, 5], "max_tokens": 2, "seed": 1}
            assert theirs.http.post("/v1/completions", json=body).status_code == 404, name
            chat = {"model": name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
            assert theirs.http.post("/v1/chat/completions", json=chat).status_code == 404
            assert mine.http.post("/v1/completions", json=body).status_code == 200, name


def test_a_wave_of_coroutines_is_one_batch(tmp_path, monkeypatch):
    """Sixteen concurrent samples are drawn in a single stream, including the first."""
    monkeypatch.setattr(serving_engine, "_BATCH_WAIT_SECONDS", 0.8)  # enough on a busy machine
    monkeypatch.setattr(serving_engine, "_MAX_BATCH_WAIT_SECONDS", 20.0)
    with open_server(tmp_path) as (item, wires):
        sampler = wires.sampler(wires.model(), 1)
        rounds, let_in = [], item.engine._admit_samples
        monkeypatch.setattr(
            item.engine,
            "_admit_samples",
            lambda samples: (rounds.append(len(samples)), let_in(samples)),
        )

        async def wave(first=0, count=16):
            options = {"transport": httpx.ASGITransport(item.app), "base_url": "http://server"}
            async with httpx.AsyncClient(**options, headers={"x-api-key": "tml-nobody"}) as http:
                fixed = {"sampling_session_id": sampler, "num_samples": 1}
                bodies = [
                    fixed
                    | {"seq_id": first + i, "sampling_params": {"max_tokens": 4}}
                    | {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [4, 5 + i]}]}}
                    for i in range(count)
                ]
                requests = (http.post("/api/v1/asample", json=body) for body in bodies)
                return [reply.json() for reply in await asyncio.gather(*requests)]

        requests = asyncio.run(wave())
        assert all(len(wires.wait(item, "SampleResponse").sequences) == 1 for item in requests)
        assert [count for count in rounds if count] == [16], rounds
        del rounds[:]
        finish, ended, requests = item.engine.queue.finish_job, threading.Event(), []

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

        monkeypatch.setattr(item.engine.queue, "finish_job", slowly)
        asking = threading.Thread(target=halves)
        asking.start()
        with hold_requests(item):
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
        wires.output(wires.ask(model, 1, make_text_datums(2), forward_only=True))
        sampler = wires.wait(
            wires.post(
                "save_weights_for_sampler", model_id=model, seq_id=2, sampling_session_seq_id=0
            )
        )["sampling_session_id"]
        wires.sample(sampler, 0, [4, 5, 6], 2, max_tokens=5, stop=[])
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
