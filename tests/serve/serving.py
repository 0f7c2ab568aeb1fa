"""Helpers shared by the server's tests."""

from __future__ import annotations

import runpy
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

TestClient = pytest.importorskip("starlette.testclient", reason="needs the extra serve").TestClient
for package in ("uvicorn", "google.protobuf", "prometheus_client"):
    pytest.importorskip(package, reason="needs the extra serve")

from rl.learner import LearnerSettings  # noqa: E402
from rl.runtime import SamplerSettings, WorkerSettings  # noqa: E402
from rl.serve import ModelServer, ServedBaseModel, ServeLimits, ServeSettings, tinker_pb2  # noqa: E402
from rl.serve.scheduler import EngineJob  # noqa: E402
from rl.serve.server import read_serve_settings  # noqa: E402
from rl.types import Datum  # noqa: E402

BASE = "tiny:ascii-small"
PROTOBUF = "application/x-protobuf"


@contextmanager
def hold_requests(served: ModelServer, tenant: str = "local") -> Iterator[None]:
    """Hold the engine with a job of `tenant`: requests made within wait, and are queued together
    when it continues.
    """
    begun, gate = threading.Event(), threading.Event()

    def hold() -> Iterator[None]:
        begun.set()
        gate.wait(60)
        yield

    served.engine.submit(EngineJob(tenant, "hold", "hold", hold))
    assert begun.wait(60)
    try:
        yield
    finally:
        gate.set()


@contextmanager
def server(folder: Path, *, keys: Sequence[str] = (), token_budget: int = 16384, resume: bool = False, durable: bool = False,
           base: str = BASE, max_rows: int = 1024, allowed_hosts: Sequence[str] = (), name: str | None = None, **limits: Any) -> Iterator[ModelServer]:  # fmt: skip
    worker = WorkerSettings(
        learner=LearnerSettings(token_budget=token_budget),
        sampler=SamplerSettings(max_rows=max_rows),
    )
    bounds = ServeLimits(**{"poll_seconds": 5.0, **limits})
    settings = ServeSettings(
        (ServedBaseModel(name or base, base),), folder, keys=tuple(keys), resume=resume, durable=durable,
        limits=bounds, worker=worker, allowed_hosts=allowed_hosts,
    )  # fmt: skip
    with run_server(settings) as served:
        yield served


@contextmanager
def run_server(settings: ServeSettings) -> Iterator[ModelServer]:
    served = ModelServer.create(settings)
    served.engine.start()
    try:
        yield served
    finally:
        served.shut_down()


@contextmanager
def open_server(folder: Path, **settings: Any) -> Iterator[tuple[ModelServer, Wire]]:
    """Open a server, and a client with a session."""
    with server(folder, **settings) as served:
        wires = Wire(served)
        wires.open()
        yield served, wires


def read_command_line(*words: Any, base: str = BASE) -> ServeSettings:
    """Return the settings of `python serve.py --base-model BASE WORDS`."""
    parser = runpy.run_path(str(Path(__file__).parents[2] / "serve.py"))["parser"]
    return read_serve_settings(parser.parse_args(["--base-model", base, *map(str, words)]))


def datum_message(datum: Datum) -> Any:
    message = tinker_pb2.Datum()
    for chunk in datum.model_input.chunks:
        part = message.model_input.add()
        if chunk.type == "image":
            part.image.data, part.image.format = chunk.data, chunk.format
        else:
            part.encoded_text.tokens = np.asarray(chunk.tokens, "<i4").tobytes()
    for name, data in datum.loss_fn_inputs.items():
        tensor, is_float = message.loss_fn_inputs[name], data.dtype == "float32"
        tensor.dense = data.array.tobytes()
        tensor.dtype = tinker_pb2.DTYPE_FLOAT32 if is_float else tinker_pb2.DTYPE_INT64
        tensor.shape.extend(data.array.shape)
    return message


def get_metric(served: ModelServer, name: str, **labels: str) -> float:
    """Return the value of a counter, 0 if it was never increased."""
    return served.engine.metrics.registry.get_sample_value(f"whetstone_{name}", labels) or 0.0


class Wire:
    """A client of a server: a session, and the requests that the SDK would send."""

    def __init__(self, served: ModelServer, key: str = "tml-nobody"):
        self.http: Any = TestClient(
            served.app, headers={"x-api-key": key}, raise_server_exceptions=False
        )

    @classmethod
    def over(cls, http: Any) -> Wire:
        """Return a client of a server in another process. `http`: httpx.Client with its address."""
        result = cls.__new__(cls)
        result.http = http
        return result

    def post(self, path: str, status: int = 200, /, **fields: Any) -> dict[str, Any]:
        answer = self.http.post(f"/api/v1/{path}", json=fields)
        assert answer.status_code == status, (answer.status_code, answer.text)
        return answer.json() if answer.content else {}

    def open(self) -> str:
        fields = {"type": "create_session", "tags": [], "sdk_version": "0.38.0"}
        self.session = self.post("create_session", **fields)["session_id"]
        return self.session

    def model_body(self, seq: int = 0, rank: int = 4, seed: int = 7, base: str = BASE) -> dict:
        config = {"base_model": base, "lora_config": {"rank": rank, "seed": seed}}
        return {"session_id": self.session, "model_seq_id": seq, **config}

    def model(self, seq: int = 0, rank: int = 4, seed: int = 7, base: str = BASE) -> str:
        body = self.model_body(seq, rank, seed, base)
        return self.wait(self.post("create_model", **body))["model_id"]

    def save(self, model: str, seq: int, name: str, kind: str = "", **more: Any) -> str:
        """Save weights, and return their path. `kind`: "", "_for_sampler" or "_external"."""
        request = self.post(f"save_weights{kind}", model_id=model, seq_id=seq, path=name, **more)
        return self.wait(request)["path"]

    def load(self, seq: int, path: str) -> dict[str, Any]:
        """Load saved weights and optimizer state into a new model, and return the answer."""
        fields = {"session_id": self.session, "model_seq_id": seq, "path": path}
        return self.wait(self.post("load_weights", **fields, optimizer=True))

    def ask(self, model: str, seq: int, data: Sequence[Datum], loss: str = "cross_entropy", config: Mapping[str, float] | None = None,
            *, forward_only: bool = False, status: int = 200) -> dict[str, Any]:  # fmt: skip
        head = {"model_id": model, "seq_id": seq, "loss_fn": loss, "forward_only": forward_only}
        message = tinker_pb2.ForwardBackwardRequest(**head)
        message.data.extend(datum_message(item) for item in data)
        for name, value in (config or {}).items():
            message.loss_fn_config_v2[name].number = value
        return self.send(message.SerializeToString(), status)

    def send(self, body: bytes, status: int = 200) -> dict[str, Any]:
        headers = {"content-type": PROTOBUF}
        answer = self.http.post("/api/v1/forward_backward", content=body, headers=headers)
        assert answer.status_code == status, (answer.status_code, answer.text)
        return answer.json()

    def step(self, model: str, seq: int, **params: float) -> dict[str, Any]:
        return self.post(
            "optim_step", model_id=model, seq_id=seq, adam_params={"learning_rate": 1e-2, **params}
        )

    def score(self, model: str, seq: int, data: Sequence[Datum]) -> list[np.ndarray]:
        """Return the logprobs of a forward pass, by datum."""
        return self.output(self.ask(model, seq, data, forward_only=True))[0]

    def train(self, model: str, seq: int, data: Sequence[Datum], **params: float) -> tuple:
        """Update a model; return the metrics of its forward-backward and the answer of its step."""
        metrics = self.output(self.ask(model, seq, data))[1]
        return metrics, self.wait(self.step(model, seq + 1, **params))

    def complete(self, status: int = 200, /, **fields: Any) -> dict[str, Any]:
        """Return the answer of /v1/completions. `status`: the expected one."""
        body = {"prompt": [4, 5], "max_tokens": 2, **fields}
        answer = self.http.post("/v1/completions", json=body)
        assert answer.status_code == status, (answer.status_code, answer.text)
        return answer.json()

    def wait(self, request: Mapping[str, Any], kind: str | None = None) -> Any:
        """Wait for the answer: a message of type `kind`, or JSON."""
        headers, end = {"accept": PROTOBUF} if kind else {}, time.monotonic() + 240
        body = {"request_id": request["request_id"]}
        while True:
            answer = self.http.post("/api/v1/retrieve_future", json=body, headers=headers)
            if answer.status_code != 408 or time.monotonic() > end:
                break
        assert answer.status_code == 200, (answer.status_code, answer.text)
        if kind and PROTOBUF in answer.headers["content-type"]:
            return getattr(tinker_pb2, kind).FromString(answer.content)
        return answer.json()

    def output(self, request: Mapping[str, Any]) -> tuple[list[np.ndarray], dict[str, float]]:
        """Return logprobs by datum, and metrics."""
        message = self.wait(request, "ForwardBackwardOutput")
        assert not isinstance(message, dict), message
        rows = []
        for record in message.loss_fn_outputs:
            field = record.fields["logprobs"]
            offsets = np.frombuffer(field.offsets, "<i8") // 4
            data = np.frombuffer(field.data, "<f4")
            rows += [data[a:b] for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
        return rows, dict(message.metrics)

    def sampler(self, model: str, seq: int, number: int = 0) -> str:
        fields = {"model_id": model, "seq_id": seq, "sampling_session_seq_id": number}
        return self.wait(self.post("save_weights_for_sampler", **fields))["sampling_session_id"]

    def ask_sample(
        self, sampler: str, seq: int, prompt: Sequence[Any], count: int = 1, **fields: Any
    ) -> dict[str, Any]:
        names = ("max_tokens", "seed", "temperature", "stop", "top_k", "top_p")
        params = {name: fields.pop(name) for name in names if name in fields}
        text = {"type": "encoded_text", "tokens": list(prompt)}
        chunks = prompt if isinstance(prompt[0], dict) else [text]
        body = {
            "sampling_session_id": sampler, "seq_id": seq, "num_samples": count,
            "prompt": {"chunks": chunks},
        }  # fmt: skip
        return self.post("asample", **body, sampling_params={"max_tokens": 8, **params}, **fields)

    def sample(self, *arguments: Any, **fields: Any) -> Any:
        return self.wait(self.ask_sample(*arguments, **fields), "SampleResponse")


def assert_same_rows(rows: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    """Check that the logprobs of each datum are the same to the bit."""
    for i, (row, other) in enumerate(zip(rows, expected, strict=True)):
        np.testing.assert_array_equal(row, other, f"datum {i}")


def unpack_sequences(message: Any) -> list[tuple[list[int], np.ndarray, int]]:
    """Return the tokens, logprobs and stop reason of each sequence of a SampleResponse."""
    return [
        (np.frombuffer(s.tokens, "<i4").tolist(), np.frombuffer(s.logprobs, "<f4"), s.stop_reason)
        for s in message.sequences
    ]


def until(holds: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Poll `holds` until its result is true or the time is over, and return the result."""
    end = time.monotonic() + seconds
    while not (result := holds()) and time.monotonic() < end:
        time.sleep(0.005)
    return result
