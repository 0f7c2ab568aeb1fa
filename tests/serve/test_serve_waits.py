"""Test that slow operations do not block other requests."""

import asyncio
import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from serving import (
    BASE,
    PROTOBUF,
    Wire,
    hold_requests,
    open_server,
    run_server,
    server,
    until,
)
from test_serve import make_text_datums
from transformers import PreTrainedTokenizerFast

from rl.client import ServiceClient
from rl.distributed import checkpoint_folder
from rl.errors import UserError
from rl.serve import AgentSession, ModelServer, ServedBaseModel, ServeSettings, tinker_pb2
from rl.serve.scheduler import EngineJob
from rl.serve.server import make_timeout_protocol

uvicorn = pytest.importorskip("uvicorn", reason="needs the extra serve")


class LoopWatch:
    """Check that the event loop answers /healthz while a function runs in another thread."""

    def __init__(self, app):
        self.app, self.answered, self.results = app, threading.Event(), []

    def slowly(self, call):
        """Return `call` after a wait for an answer of /healthz."""

        def wait_and_call(*arguments, **named):
            self.answered.clear()
            self.results.append(self.answered.wait(10.0))
            return call(*arguments, **named)

        return wait_and_call

    def request(self, work):
        """Return a coroutine function's result, and whether /healthz was answered meanwhile."""
        self.results.clear()

        async def both():
            options = {"transport": httpx.ASGITransport(self.app), "base_url": "http://server"}
            async with httpx.AsyncClient(**options, headers={"x-api-key": "tml-nobody"}) as http:
                request = asyncio.create_task(work(http))
                while not request.done():
                    await asyncio.sleep(0.02)
                    assert (await http.get("/healthz")).status_code == 200
                    self.answered.set()
                return await request

        answer = asyncio.run(both())
        assert answer.status_code < 400, answer.text
        return bool(self.results) and all(self.results)


def test_long_work_on_the_disk_runs_beside_the_event_loop(tmp_path, monkeypatch):
    with open_server(tmp_path) as (first, wires):
        model = wires.model()
        path, watch = wires.save(model, 1, "a"), LoopWatch(first.app)
        run = f"/api/v1/training_runs/{model}"
        sampling = {"session_id": wires.session, "sampling_session_seq_id": 3, "model_path": path}
        calls = {
            "archive": lambda http: http.get(run + "/checkpoints/weights/a/archive"),
            "run": lambda http: http.get(run),
            "checkpoints": lambda http: http.get("/api/v1/checkpoints"),
            "sampler": lambda http: http.post("/api/v1/create_sampling_session", json=sampling),
            "delete": lambda http: http.delete(run + "/checkpoints/weights/a"),
        }
        with monkeypatch.context() as patch:
            for name in ("verify_checkpoint", "remove_if_expired"):
                slow = watch.slowly(getattr(checkpoint_folder, name))
                patch.setattr(checkpoint_folder, name, slow)
            for name, call in calls.items():
                assert watch.request(call), name


def test_checkpoints_that_are_read_slowly_hold_up_no_samples(tmp_path, monkeypatch):
    with open_server(tmp_path) as (first, wires):
        model = wires.model()
        wires.save(model, 1, "a")
        gate = threading.Event()
        monkeypatch.setattr(checkpoint_folder, "verify_checkpoint", lambda folder: gate.wait(60))

        async def both():
            options = {"transport": httpx.ASGITransport(first.app), "base_url": "http://server"}
            async with httpx.AsyncClient(**options, timeout=None) as http:
                run = f"/api/v1/training_runs/{model}"
                runs = [asyncio.create_task(http.get(run)) for _ in range(40)]
                await asyncio.sleep(0.2)
                body = {"prompt": [4, 5], "max_tokens": 2}
                sample = asyncio.create_task(http.post("/v1/completions", json=body))
                await asyncio.wait([sample], timeout=20)
                begun = sample.done(), any(run.done() for run in runs)
                gate.set()
                statuses = [answer.status_code for answer in await asyncio.gather(sample, *runs)]
                return begun, set(statuses)

        assert asyncio.run(both()) == ((True, False), {200})


def test_long_texts_and_sessions_are_handled_beside_the_event_loop(tmp_path, monkeypatch):
    calls = {
        "/session/x/v1/chat/completions": {"messages": [{"role": "user", "content": "1+1="}]},
        "/v1/completions": {"prompt": "1+1="},
    }
    with server(tmp_path) as first:
        watch, name = LoopWatch(first.app), "_encode_plus"
        slow = watch.slowly(PreTrainedTokenizerFast._encode_plus)
        monkeypatch.setattr(
            PreTrainedTokenizerFast, name, lambda *inputs, **named: slow(*inputs, **named)
        )
        for path, fields in calls.items():
            body = {"model": BASE, "max_tokens": 2, **fields}
            assert watch.request(lambda http, path=path, body=body: http.post(path, json=body)), (
                path
            )
        monkeypatch.setattr(AgentSession, "to_json", watch.slowly(AgentSession.to_json))
        assert watch.request(lambda http: http.get("/session/x"))


def test_a_short_request_cannot_ask_for_much_memory_or_time(tmp_path):
    with open_server(tmp_path) as (first, wires):
        model = wires.model()
        sampler = wires.sampler(model, 1)
        head = {"model_id": model, "loss_fn": "cross_entropy"}
        begin = time.perf_counter()
        for seq, shape in enumerate(([2, 2**27], [2**62] * 60_000), 2):
            empty = {
                "data": [], "dtype": "int64", "shape": shape, "sparse_crow_indices": [0, 0, 0],
                "sparse_col_indices": [],
            }  # fmt: skip
            message = tinker_pb2.ForwardBackwardRequest(**head, seq_id=seq)
            datum = message.data.add()
            datum.model_input.add().encoded_text.tokens = np.asarray([4, 5], "<i4").tobytes()
            tensor = datum.loss_fn_inputs["target_tokens"]
            tensor.dtype = tinker_pb2.DTYPE_INT64
            tensor.shape.extend(shape)
            tensor.sparse_csr.crow_indices = np.zeros(3, "<i8").tobytes()
            for request in (
                wires.ask_sample(sampler, seq, [4, 5, 6], target_prompt_logprobs=empty),
                wires.send(message.SerializeToString()),
            ):
                answer = wires.wait(request)
                assert answer["category"] == "user" and "cells" in answer["error"]
        assert time.perf_counter() - begin < 2.0


def served_by_uvicorn(app, header_seconds, work):
    """Run `work(port)`, a coroutine function, against a uvicorn server of `app`."""

    async def both():
        config = uvicorn.Config(
            app, http=make_timeout_protocol(header_seconds), port=0, log_config=None, lifespan="off"
        )
        running = uvicorn.Server(config)
        serving = asyncio.create_task(running.serve())
        while not running.started:
            await asyncio.sleep(0.01)
        try:
            return await work(running.servers[0].sockets[0].getsockname()[1])
        finally:
            running.should_exit = True
            await serving

    return asyncio.run(both())


def test_half_sent_requests_are_closed_and_slow_answers_are_not(tmp_path):
    head = b"POST /api/v1/create_session HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    starts = {
        "nothing": b"",
        "half a line": b"POST /api",
        "half a head": head,
        "half a body": head + b"content-length: 100\r\n\r\n{",
        "chunks that stop": head + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n",
        "half of a second head": b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n" + b"GET /heal",
    }

    async def until_closed(port, first, trickle):
        """Return the seconds until the server closes. `trickle`: sent next, a byte at a time."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        begin, received = time.perf_counter(), b""
        writer.write(first)
        try:
            while not reader.at_eof() and time.perf_counter() - begin < 8:
                try:
                    received += await asyncio.wait_for(reader.read(4096), 0.1)
                except TimeoutError:
                    if trickle:
                        writer.write(b"a")
        except ConnectionError:
            pass
        writer.close()
        return time.perf_counter() - begin, received

    with open_server(tmp_path, body_seconds=0.7, poll_seconds=2.0) as (item, wires):
        # Its sequence number is never due: a poll for it is held for 2 s.
        waiting = {"request_id": wires.step(wires.model(), 9)["request_id"]}
        cases = [(first, trickle) for first in starts.values() for trickle in (False, True)] * 3

        async def work(port):
            tasks = [until_closed(port, *case) for case in cases]
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as http:
                poll = http.post("/api/v1/retrieve_future", json=waiting)
                *closed, answer = await asyncio.gather(*tasks, poll)
            return closed, answer

        closed, answer = served_by_uvicorn(item.app, 0.7, work)
    # a poll is held for as long as it may be
    assert answer.status_code == 408 and answer.json()["type"] == "try_again"
    assert max(seconds for seconds, _ in closed) < 7.9, "connections stay open"
    assert sum(b" 408 " in received for _, received in closed) == 12, "bodies that do not come"


def test_a_body_that_comes_slowly_but_comes_is_read(tmp_path):
    """64 KiB a second are enough, whatever the size of the body."""
    with server(tmp_path, body_seconds=0.5) as first:

        async def slowly():
            for _ in range(4):
                await asyncio.sleep(0.2)
                yield b" " * 65536
            yield b'{"tags": []}'

        async def work(port):
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as http:
                return await http.post("/api/v1/create_session", content=slowly())

        assert served_by_uvicorn(first.app, 1.0, work).status_code == 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a saved model."""
    place = tmp_path_factory.mktemp("model")
    with ServiceClient(output_dir=place) as service:
        client = service.create_full_training_client(BASE)
        return Path(client.save_weights_for_sampler("base").result().path)


def test_a_base_that_cannot_be_served_is_named_before_anything_is(folder, tmp_path):
    bare, odd = tmp_path / "bare", tmp_path / "odd"
    bare.mkdir()
    shutil.copy(folder / "config.json", bare)
    odd.mkdir()
    (odd / "config.json").write_text(json.dumps({"model_type": "no such type"}))
    good = ServedBaseModel("good", BASE)
    for where in ("/no/such/folder", "tiny:nothing", str(bare), str(odd), str(tmp_path)):
        settings = ServeSettings((good, ServedBaseModel("bad", where)), tmp_path / "out")
        with pytest.raises(UserError, match="--base-model bad cannot be served"):
            ModelServer.create(settings)
    weights = tmp_path / "run" / "checkpoints" / "sft-final" / "model"
    shutil.copytree(folder, weights)
    (tmp_path / "run" / "config.json").write_text("{}")  # of a run
    for where in (tmp_path / "run", weights.parent):
        settings = ServeSettings((ServedBaseModel("mine", str(where)),), tmp_path / "out")
        with pytest.raises(UserError, match=f"pass mine={weights}$"):
            ModelServer.create(settings)
    settings = ServeSettings((good,), tmp_path / "out", renderer="plian")
    with pytest.raises(UserError, match="unknown renderer 'plian': did you mean 'plain'"):
        ModelServer.create(settings)
    assert not (tmp_path / "out").exists()


def test_a_base_whose_weights_are_damaged_keeps_no_other_from_anybody(folder, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    bases = (ServedBaseModel("bad", str(broken)), ServedBaseModel("good", BASE))
    with run_server(ServeSettings(bases, tmp_path / "out")) as first:
        wires, body = Wire(first), {"prompt": [4, 5], "max_tokens": 2, "model": "bad"}
        listed = wires.http.get("/v1/models").json()["data"]
        assert {row["id"] for row in listed} == {"bad", "good"}
        assert all(row["max_model_len"] > 0 for row in listed)
        wires.complete(model="good")
        assert wires.http.post("/v1/completions", json=body).status_code >= 400
        shutil.copy(folder / "model.safetensors", weights)
        wires.complete(model="bad")  # mended, and read again


def test_a_base_is_loaded_once_however_many_ask_for_it_first(tmp_path, monkeypatch):
    with server(tmp_path) as first:
        plain, made, results = first.engine.service.create_sampling_client, [], []

        def slowly(**named):
            made.append(named)
            time.sleep(0.2)
            return plain(**named)

        def ask():
            results.append(
                first.model_manager.sampling_client(first.model_manager.base_samplers[BASE])
            )

        monkeypatch.setattr(first.engine.service, "create_sampling_client", slowly)
        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(made) == 1 and len({id(client) for client in results}) == 1


def test_chats_with_a_model_that_is_being_loaded_do_not_hold_other_requests(tmp_path, monkeypatch):
    messages = [{"role": "user", "content": "1+1="}]
    with open_server(tmp_path) as (first, wires):
        path = wires.save(wires.model(), 1, "a", "_for_sampler")
        first.model_manager._snapshots.clear()
        wires.complete(model=BASE)  # loaded
        gate, create = threading.Event(), first.engine.service.create_sampling_client

        def wait_and_create(**named):
            assert gate.wait(60)
            return create(**named)

        monkeypatch.setattr(first.engine.service, "create_sampling_client", wait_and_create)

        async def ask():
            options = {"transport": httpx.ASGITransport(first.app), "base_url": "http://server"}
            async with httpx.AsyncClient(**options, timeout=60) as http:

                def chat(model):
                    body = {"model": model, "messages": messages, "max_tokens": 2}
                    return asyncio.create_task(http.post("/v1/chat/completions", json=body))

                chats = [chat(path) for _ in range(40)]
                await asyncio.sleep(0.2)
                others = [http.post("/api/v1/create_session", json={}), chat(BASE)]
                try:
                    answers = [await asyncio.wait_for(other, 20) for other in others]
                    assert not any(chat.done() for chat in chats)
                finally:
                    gate.set()
                return {answer.status_code for answer in answers + [await chat for chat in chats]}

        assert asyncio.run(ask()) == {200}


def test_a_full_queue_refuses_requests_before_their_model_is_loaded(tmp_path, monkeypatch):
    calls = {
        "/inference/v1/generate": {"token_ids": [4, 5]},
        "/v1/completions": {"prompt": [4, 5]},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "1+1="}]},
    }
    loads = []
    with server(tmp_path, queued=1) as first, hold_requests(first):
        monkeypatch.setattr(first.model_manager, "sampling_client", loads.append)
        for path, body in calls.items():
            assert Wire(first).http.post(path, json=body).status_code == 429, path
    assert not loads


def test_token_ids_are_answered_though_their_model_is_freed_meanwhile(tmp_path, monkeypatch):
    with open_server(tmp_path) as (first, wires):
        name, sample = wires.sampler(wires.model(), 1), first.model_manager.sample

        async def sample_and_free(*arguments, **options):
            response = await sample(*arguments, **options)
            first.session_store.samplers[name].client = None
            return response

        monkeypatch.setattr(first.model_manager, "sample", sample_and_free)
        body = {"model": name, "token_ids": [4, 5]}
        statuses = [
            wires.http.post("/inference/v1/generate", json=body).status_code for _ in range(2)
        ]
        assert statuses == [200, 404]


def test_a_server_ends_in_time_and_writes_its_models_though_work_never_ends(tmp_path):
    with open_server(tmp_path) as (first, wires):
        model = wires.model()
        wires.train(model, 1, make_text_datums())

        def endless():
            while True:
                time.sleep(0.02)
                yield

        done = first.engine.submit(EngineJob("local", "endless", "endless", endless))
        assert until(lambda: len(first.engine.queue) == 1)
        begin = time.monotonic()
        first.shut_down(1.5)
        assert time.monotonic() - begin < 4.5
        assert "ShutdownError" in type(done.exception()).__name__
    assert (first.session_store.models[model].live_folder / checkpoint_folder.MANIFEST).is_file()


@pytest.mark.slow
def test_a_process_that_cannot_end_is_ended():
    code = "import time; from rl.serve.server import exit_after; exit_after(0.5); time.sleep(60)"
    words, repo = [sys.executable, "-c", code], Path(__file__).parents[2]
    done = subprocess.run(words, cwd=repo, timeout=50, capture_output=True)
    assert done.returncode == 1


def test_a_protobuf_body_is_not_held_to_the_limit_of_json(tmp_path):
    with open_server(tmp_path) as (first, wires):
        large, headers = b" " * (32 * 2**20 + 1), {"content-type": PROTOBUF}
        assert wires.http.post("/api/v1/create_session", content=large).status_code == 413
        answer = wires.http.post("/api/v1/forward_backward", content=large, headers=headers)
        assert answer.status_code == 400
