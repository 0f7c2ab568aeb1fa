"""Test serve.py as a process: refusals before a model is loaded; TLS, keys, metrics, log."""

import contextlib
import importlib.util
import json
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from accelerate.state import AcceleratorState
from sampler_models import tiny_model
from serving import BASE, Wire, read_command_line, run_server, server
from test_serve import make_text_datums

from rl.errors import UserError
from rl.serve import ModelServer, ServedBaseModel, ServeSettings
from rl.serve.server import (
    allow_port_reuse,
    bind_sockets,
    check_certificate,
)

REPO = Path(__file__).resolve().parents[2]
KEYS = ("tml-of-the-first-tenant", "tml-of-the-second-one")


def at(tmp_path, host="127.0.0.1", port=0):
    return ServeSettings((ServedBaseModel(BASE, BASE),), tmp_path, host=host, port=port, keys=KEYS)


def close_all(sockets):
    for sock in sockets:
        sock.close()


def test_an_address_that_cannot_be_had_is_named(tmp_path):
    (first,) = taken = bind_sockets(at(tmp_path))
    port = first.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):  # before it serves
        socket.create_connection(("127.0.0.1", port), 5)
    # the first server while it loads, once its port may be reused, and once it listens
    for begins in (lambda: None, lambda: allow_port_reuse(taken), first.listen):
        begins()
        if begins is first.listen or not first.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR):
            with pytest.raises(UserError, match=f"--port {port}: the port is in use"):
                bind_sockets(at(tmp_path, port=port))
    # The server closes first, so its side of the connection stays in TIME_WAIT.
    with socket.create_connection(("127.0.0.1", port), 5) as client:
        served, _ = first.accept()
        first.close()
        served.close()
        client.recv(1)
    (again,) = taken = bind_sockets(at(tmp_path, port=port))
    assert again.getsockname()[1] == port
    close_all(taken)


def test_a_name_is_every_address_that_it_has_here(tmp_path, monkeypatch):
    kinds = [(socket.AF_INET6, ("::1", 0, 0, 0)), (socket.AF_INET, ("127.0.0.1", 0))]
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda *_, **__: [(family, socket.SOCK_STREAM, 6, "", where) for family, where in kinds],
    )
    taken = bind_sockets(at(tmp_path, host="localhost"))
    assert taken[0].family == socket.AF_INET and len({item.getsockname()[1] for item in taken}) == 1
    close_all(taken)
    kinds[0] = (socket.AF_INET6, ("2001:db8::1", 0, 0, 0))  # documentation prefix (RFC 3849)
    (only,) = taken = bind_sockets(at(tmp_path, host="localhost"))
    assert only.family == socket.AF_INET
    close_all(taken)


def test_a_name_that_is_none_and_an_address_of_others_are_named(tmp_path):
    with pytest.raises(UserError, match="--host no.such.host.invalid"):
        bind_sockets(at(tmp_path, host="no.such.host.invalid"))
    with pytest.raises(UserError, match="no such address"):
        bind_sockets(at(tmp_path, host="192.0.2.1"))  # documentation address (RFC 5737)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Return a self-signed certificate for loopback, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    for words in (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext "
        "subjectAltName=IP:127.0.0.1 -keyout key -out cert",
        "openssl genrsa -out other 2048",
    ):
        subprocess.run(words.split(), cwd=folder, check=True, capture_output=True)
    return folder


def test_files_of_tls_that_do_not_fit_are_named(certificate, tmp_path):
    cert, key, text = certificate / "cert", certificate / "key", tmp_path / "text"
    check_certificate(cert, key)
    text.write_text("hello")
    for pair in [(cert, certificate / "other"), (key, cert), (text, key), (cert, text)]:
        with pytest.raises(UserError, match="not a certificate and its key"):
            check_certificate(*pair)
    with pytest.raises(UserError, match="--tls-key .*nothing: no such file, or it cannot be read"):
        check_certificate(cert, tmp_path / "nothing")


def start_server(folder, *flags, base=BASE, launcher=()):
    """Start serve.py with its standard error in `folder`/log; return the process and its URL."""
    words = [
        *launcher, "serve.py", "--base-model", base, "--port", "0", "--output-dir",
        str(folder / "out"), *map(str, flags),
    ]  # fmt: skip
    with (folder / "log").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=REPO, stdout=subprocess.PIPE, stderr=log, text=True
        )
    for line in process.stdout:  # DeepSpeed writes to stdout as well
        if line.startswith("serving "):
            return process, line.split(" at ")[1].strip()
    raise AssertionError((folder / "log").read_text()[-2000:])


def stop(process, number, seconds=60):
    """Send a signal, and return the exit code and the seconds until the process ended."""
    begin = time.monotonic()
    process.send_signal(number)
    return process.wait(seconds), time.monotonic() - begin


@pytest.mark.slow
def test_a_server_over_tls_is_stopped_and_resumed_and_its_log_has_no_prompts(certificate, tmp_path):
    """Stop it when idle, as soon as it listens, and while a million tokens are being sampled. No
    saved state is lost.
    """
    keys, cert = tmp_path / "keys", certificate / "cert"
    keys.write_text("# two tenants\n" + "\n".join(KEYS) + "\n")
    flags = ("--tls-cert", cert, "--tls-key", certificate / "key", "--keys-file", keys)
    bearer, secret = {"authorization": f"Bearer {KEYS[0]}"}, "a prompt that nobody else should read"
    body = {"model": BASE, "prompt": secret, "max_tokens": 3, "seed": 1}
    options = {"verify": str(cert), "timeout": 60}
    data = make_text_datums(3, 0)

    process, url = start_server(tmp_path, *flags)
    try:
        with httpx.Client(base_url=url, **options) as http:
            assert http.get("/healthz").json() == {"status": "ok"}
            for headers in ({}, {"x-api-key": KEYS[0] + "x"}):
                reply = http.post("/v1/completions", json=body, headers=headers)
                assert reply.status_code == 401
            first = http.post("/v1/completions", json=body, headers=bearer).json()["choices"]
            wires = [
                Wire.over(httpx.Client(base_url=url, headers={"x-api-key": key}, **options))
                for key in KEYS
            ]
            sessions = [item.open() for item in wires]
            model = wires[0].model()
            expected = wires[0].score(model, 1, data)
            page = http.get("/metrics", headers=bearer).text
            libraries = Path(f"/proc/{process.pid}/maps").read_text()
            for name in ("uvloop", "httptools"):
                assert (name in libraries) == (importlib.util.find_spec(name) is not None)
        with pytest.raises(httpx.ConnectError):  # the certificate is not trusted
            httpx.get(f"{url}/healthz")
        with pytest.raises(httpx.HTTPError):
            httpx.get(url.replace("https", "http") + "/healthz")
        assert stop(process, signal.SIGTERM)[0] == 0
    finally:
        process.kill()
    figures = {}
    for line in page.splitlines():  # Prometheus' text format 0.0.4: a name, labels, a number
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            figures[name] = float(value)
    refused = [name for name in figures if "requests_total{" in name and 'status="401"' in name]
    assert sum(figures[name] for name in refused) == 2, page
    assert any("sessions" in name and value == 2 for name, value in figures.items()), page
    log = (tmp_path / "log").read_text()
    assert sum(json.loads(line).get("status") == 401 for line in log.splitlines()) == 2
    assert "Traceback" not in log

    process, url = start_server(tmp_path, *flags, "--resume", "--stop-grace", "6")
    try:
        code, seconds = stop(process, signal.SIGINT)  # Ctrl-C works too
        # the grace time, and the exit of an interpreter on a busy machine
        assert code == 0 and seconds < 6 + 5
    finally:
        process.kill()
    process, url = start_server(tmp_path, *flags, "--resume", "--stop-grace", "3")
    try:
        with httpx.Client(base_url=url, **options) as http:
            for key, session in zip(KEYS, sessions, strict=True):
                listed = http.get("/api/v1/sessions", headers={"x-api-key": key}).json()
                assert listed["sessions"] == [session]
            again = http.post("/v1/completions", json=body, headers=bearer).json()["choices"]
            assert again == first
        many = {"prompt": ["1+"] * 32, "max_tokens": 500, "n": 64, "ignore_eos": True}
        arguments = (f"{url}/v1/completions",), {"json": many, "headers": bearer, **options}
        asking = threading.Thread(target=post_ignoring_errors, args=arguments, daemon=True)
        asking.start()
        time.sleep(1.0)
        assert asking.is_alive()
        assert stop(process, signal.SIGTERM, 30)[1] < 3 + 5
    finally:
        process.kill()
    log = (tmp_path / "log").read_text()
    assert not any(word in log for word in (secret, *KEYS))
    with server(tmp_path / "out", resume=True, keys=KEYS) as served:
        for row, other in zip(Wire(served, KEYS[0]).score(model, 2, data), expected, strict=True):
            np.testing.assert_allclose(row, other, atol=1e-5)


def learn(wires):
    """Train and sample a new model; return its id and the results."""
    wires.open()
    model = wires.model()
    rows = wires.output(wires.ask(model, 1, make_text_datums(5, 0)))[0]
    norm = wires.wait(wires.step(model, 2))["metrics"]["grad_norm"]
    after = wires.score(model, 3, make_text_datums(5, 1))
    drawn = wires.sample(wires.sampler(model, 4), 0, [4, 5], 3, seed=3)
    return model, [*rows, *after], norm, [item.tokens for item in drawn.sequences]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the results of `learn` with a server in this process."""
    with server(tmp_path_factory.mktemp("alone")) as item:
        return learn(Wire(item))


@pytest.mark.slow
@pytest.mark.parametrize("config", ["ddp", "zero3"])
def test_two_processes_serve_as_one_and_what_they_held_is_kept_when_they_are_told_to_end(
    tmp_path, alone, config
):
    words = f"-m accelerate.commands.launch --config_file accelerate_configs/{config}.yaml"
    launcher = f"{words} --num_processes 2 --main_process_port 0".split()
    process, url = start_server(tmp_path, launcher=launcher)
    try:
        headers = {"x-api-key": "tml-nobody"}
        wires = Wire.over(httpx.Client(base_url=url, headers=headers, timeout=120))
        model, rows, norm, drawn = learn(wires)
        # Signal the launcher, as a cluster does; the exit code is the launcher's.
        stop(process, signal.SIGTERM, 120)
    finally:
        process.kill()
    for row, other in zip(rows, alone[1], strict=True):
        np.testing.assert_allclose(row, other, atol=1e-5)
    assert norm == pytest.approx(alone[2], rel=1e-5) and drawn == alone[3]
    with server(tmp_path / "out", resume=True) as item:  # now in a single process
        after = Wire(item).score(model, 5, make_text_datums(5, 1))
    for row, other in zip(after, rows[5:], strict=True):
        np.testing.assert_allclose(row, other, atol=1e-5)


def post_ignoring_errors(arguments, options):
    with contextlib.suppress(httpx.HTTPError):
        httpx.post(*arguments, **options)


def run_serve_py(monkeypatch, capsys, *words):
    """Run serve.py in this process until it exits; return its exit code and its output."""
    for name in ("rl.startup.reduce_gc", "rl.trainer.entry_point.end_with_launcher",
                 "rl.trainer.entry_point._silence_libraries"):  # fmt: skip
        monkeypatch.setattr(name, lambda: None)
    monkeypatch.setattr(sys, "argv", ["serve.py", "--base-model", BASE, *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(REPO / "serve.py"), run_name="__main__")
    return ended.value.code, " ".join("".join(capsys.readouterr()).replace("│", " ").split())


def test_a_taken_port_or_folder_is_said_in_a_box_and_nothing_is_written(
    tmp_path, monkeypatch, capsys
):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = ("--port", taken.getsockname()[1], "--output-dir", tmp_path / "out")
        code, output = run_serve_py(monkeypatch, capsys, *words)
    assert code == 2 and "nothing is served" in output and "the port is in use" in output
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").touch()
    words = ("--port", 0, "--output-dir", tmp_path / "file" / "out")
    code, output = run_serve_py(monkeypatch, capsys, *words)
    assert code == 2 and "give another folder as --output-dir" in output


def test_a_missing_package_is_named_with_its_remedy(monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "starlette" else find_spec(name)
    )
    code, output = run_serve_py(monkeypatch, capsys)
    assert code == 2 and re.search(r"not installed \((\w+, )*starlette\b", output)
    assert 'pip install -e ".[serve]"' in output


def test_an_architecture_that_sampler_tp_cannot_split_is_refused_before_loading(tmp_path):
    tiny_model("gpt2").config.save_pretrained(tmp_path)  # a configuration without weights
    words = ("--output-dir", tmp_path / "out", "--sampler-tp", "2")
    settings = read_command_line(*words, base=f"m={tmp_path}")
    assert settings.worker.sampler.tp == 2
    with pytest.raises(UserError, match="fast decoder .*is not supported by it"):
        ModelServer.create(settings)


@pytest.fixture
def fresh_accelerator():
    """Reset the state of accelerate, which has another precision in other tests."""
    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()


def test_every_model_of_a_server_has_the_dtype_of_the_base(tmp_path, fresh_accelerator):
    words = ("--precision", "bf16", "--base-dtype", "fp32", "--output-dir", tmp_path)
    with run_server(read_command_line(*words)) as served:
        wires = Wire(served)
        wires.open()
        wires.load(1, wires.save(wires.model(), 1, "saved"))
        models = served.session_store.list_models()
        assert [model.client.info["base_dtype"] for model in models] == ["fp32", "fp32"]
