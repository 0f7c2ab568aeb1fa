"""Test requests that are cancelled or abandoned."""

import asyncio
import gc
import json
import threading
import time
import weakref

import httpx
import numpy as np
from serving import (
    BASE,
    Wire,
    get_metric,
    hold_requests,
    open_server,
    server,
    unpack_sequences,
    until,
)
from test_serve import KEYS, make_text_datums

from rl.serve.scheduler import SamplingJob

LONG = 200  # tokens of an abandoned request


def test_a_cancelled_sample_leaves_its_batch_and_whoever_was_in_it_is_drawn_as_alone(
    tmp_path, monkeypatch
):
    """Samples are cancelled before and during sampling, in a batch with samples of another key."""
    with server(tmp_path, keys=KEYS) as first:
        going, staying = (Wire(first, key) for key in KEYS)
        going.open(), staying.open()
        theirs = going.sampler(going.model(seed=1), 1)
        mine = staying.sampler(staying.model(seed=2), 1)
        asks = [(i, [4, 5 + i], {"seed": i, "max_tokens": 40, "stop": []}) for i in range(3)]
        single = [
            unpack_sequences(staying.sample(mine, i, prompt, 2, **fields))
            for i, prompt, fields in asks
        ]
        draw = first.engine._run_batch_slice
        before = get_metric(first, "sampled_tokens_total")
        kept, slices, begun, go = weakref.WeakSet(), [], threading.Event(), threading.Event()

        def watched(drawing):
            tickets = first.engine._streams[drawing][1]
            draw(drawing)
            slices.append(len(tickets))
            if len(slices) == 1:  # all requests are being sampled
                begun.set()
                assert go.wait(60)

        made = SamplingJob.__init__

        def make(job, *inputs, **named):
            made(job, *inputs, **named)
            kept.add(job)

        monkeypatch.setattr(SamplingJob, "__init__", make)
        monkeypatch.setattr(SamplingJob, "__hash__", object.__hash__)
        monkeypatch.setattr(first.engine, "_run_batch_slice", watched)
        with hold_requests(first):
            tickets = [
                staying.ask_sample(mine, 10 + i, prompt, 2, **fields) for i, prompt, fields in asks
            ]
            gone = [
                going.ask_sample(theirs, i, [4, 5], 2, max_tokens=LONG, stop=[]) for i in range(4)
            ]
            # cancelled before it starts
            going.post("cancel_future", 204, request_id=gone[0]["request_id"])
            # a request of another key cannot be cancelled
            staying.post("cancel_future", 410, request_id=gone[1]["request_id"])
        assert begun.wait(60) and slices == [6]
        for ticket in 2 * gone[1:]:
            going.post("cancel_future", 204, request_id=ticket["request_id"])
        go.set()
        results = [unpack_sequences(staying.wait(ticket, "SampleResponse")) for ticket in tickets]
        for rows, expected in zip(results, single, strict=True):
            for (tokens, got, reason), target in zip(rows, expected, strict=True):
                assert (tokens, reason) == (target[0], target[2])
                np.testing.assert_allclose(got, target[1], atol=1e-5)
        assert until(lambda: not first.engine._has_samples), "something is drawn still"
        assert set(slices[1:]) <= {3, 2, 1, 0}, f"requests of slices after they had gone: {slices}"
        assert len(slices) <= 6, f"{len(slices)} slices of 16 tokens for 40"
        drawn = sum(len(tokens) for rows in results for tokens, _, _ in rows)
        assert get_metric(first, "sampled_tokens_total") - before == drawn
        for ticket in gone:
            assert going.wait(ticket)["category"] == "user"
        gc.collect()
        assert not first.engine.queue._tenant_counts and not kept, "what was asked for is kept"
        again = [going.sample(theirs, 50 + i, [4, 5], 1, seed=1).sequences[0] for i in range(2)]
        assert again[0] == again[1]


def test_what_trains_is_not_cancelled_and_the_update_after_it_is_whole(tmp_path):
    with server(tmp_path, token_budget=32) as first:
        a, b = Wire(first), Wire(first)
        a.open(), b.open()
        steps = []
        for wires, cancels in ((a, True), (b, False)):
            model = wires.model()
            request, step = wires.ask(model, 1, make_text_datums(60)), wires.step(model, 2)
            for ticket in (request, step) if cancels else ():
                wires.post("cancel_future", 204, request_id=ticket["request_id"])
            steps.append((wires.output(request)[1], wires.wait(step)))
        assert steps[0] == steps[1]


def test_cancelled_samples_give_their_places_in_the_queue_back(tmp_path):
    with open_server(tmp_path, queued=5) as (item, wires):
        sampler = wires.sampler(wires.model(), 1)
        body = {"sampling_session_id": sampler, "num_samples": 1}
        body["prompt"] = {"chunks": [{"type": "encoded_text", "tokens": [4]}]}

        def ask(first):
            """Send six samples; return the ids of those that were taken."""
            asks = [{**body, "seq_id": first + i} for i in range(6)]
            answers = [wires.http.post("/api/v1/asample", json=ask) for ask in asks]
            return [item.json()["request_id"] for item in answers if item.status_code == 200]

        with hold_requests(item):
            taken = ask(0)
            # half of the four free places; the job that holds the desk takes the fifth
            assert len(taken) == 2 and not ask(10)
            for request_id in taken:
                wires.post("cancel_future", 204, request_id=request_id)
            assert len(ask(20)) == 2
        assert until(lambda: len(item.engine.queue) == 0)


def test_a_request_of_many_prompts_of_which_one_fails_draws_none_of_the_others(tmp_path):
    with server(tmp_path, keys=KEYS) as first:
        slices, draw = [], first.engine._run_batch_slice

        def slowly(drawing):
            slices.append(drawing)
            time.sleep(0.1)  # lets the event loop run between two slices
            draw(drawing)

        first.engine._run_batch_slice = slowly

        def ask(*prompts, max_tokens=LONG):
            """Return the answer of /v1/completions, and the slices that were drawn for it."""
            many = {"model": BASE, "prompt": prompts, "max_tokens": max_tokens, "seed": 1}
            options = {"transport": httpx.ASGITransport(first.app), "base_url": "http://server"}
            before = len(slices)

            # The event loop keeps running as in a server, so an abandoned request would be sampled
            # to its end.
            async def request():
                async with httpx.AsyncClient(**options, headers={"x-api-key": KEYS[0]}) as http:
                    answer = await http.post("/v1/completions", json=many)
                    assert await asyncio.to_thread(until, lambda: not first.engine._has_samples)
                    return answer

            return asyncio.run(request()), len(slices) - before

        prompts = [[5, 6 + i] for i in range(30)]
        answer, few = ask(*prompts, [5, 500])
        assert answer.status_code == 400 and "500" in answer.text
        answer, many = ask(*prompts)
        assert answer.status_code == 200 and few <= 3 and many >= 8, (few, many)
        assert ask([5, 6], max_tokens=2)[0].status_code == 200


def test_whoever_hangs_up_is_drawn_for_no_longer(tmp_path):
    with server(tmp_path, keys=KEYS) as first:
        began, draw, sent = threading.Event(), first.engine._run_batch_slice, []

        def slowly(drawing):
            began.set()
            time.sleep(0.15)
            draw(drawing)

        first.engine._run_batch_slice = slowly
        body = {"model": BASE, "prompt": [5, 6], "n": 4, "max_tokens": 240, "stop": []}
        messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        path = "/v1/completions"
        scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(),
            "query_string": b"", "http_version": "1.1",
            "headers": [(b"x-api-key", KEYS[0].encode())], "scheme": "http", "server": ("s", 1),
            "root_path": "",
        }  # fmt: skip

        async def hang_up():
            gone = asyncio.Event()

            async def receive():
                if messages:
                    return messages.pop()
                await gone.wait()
                return {"type": "http.disconnect"}

            async def send(message):
                sent.append(message)

            answering = asyncio.create_task(first.app(scope, receive, send))
            await asyncio.to_thread(began.wait, 60)
            gone.set()
            await answering

        asyncio.run(hang_up())
        assert sent[0]["status"] == 499
        assert until(lambda: not first.engine._has_samples), "it is drawn still"
        assert get_metric(first, "sampled_tokens_total") == 0
        assert not first.engine.queue._tenant_counts


def test_a_client_that_never_asks_after_its_answers_holds_nothing_up(tmp_path):
    with server(tmp_path, keys=KEYS, result_seconds=0.3) as first:
        careless, other = (Wire(first, key) for key in KEYS)
        careless.open(), other.open()
        model, theirs, data = careless.model(), other.model(), make_text_datums()
        sampler = careless.sampler(model, 1)
        early = careless.step(model, 90)  # its sequence number is never due
        for i in range(6):
            careless.ask_sample(sampler, i, [4, 5])
            careless.ask(model, 2 + i, data, forward_only=True)
        assert until(lambda: len(first.engine.queue) == 0 and not first.engine._has_samples)
        for seq in (1, 2):
            other.score(theirs, seq, data)
            time.sleep(0.4)
        other.ask(theirs, 3, data, forward_only=True)
        kept = {promise.request_id for promise in first.request_store._requests.values()}
        assert early["request_id"] in kept and len(kept) <= 4, kept
        assert not any(":sample:" in name for name in kept), kept
