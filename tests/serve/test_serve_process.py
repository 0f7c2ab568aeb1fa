"""Test serve.py as a process: refusals before a model is loaded; TLS, keys, metrics, log."""

import argparse
import contextlib
import importlib.util
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn", reason="needs the extra serve")
from rank_server import run_script  # noqa: E402
from sampler_models import tiny_model  # noqa: E402
from serving import BASE, Wire, server  # noqa: E402
from test_serve import make_text_datums  # noqa: E402

from rl.errors import UserError  # noqa: E402
from rl.serve import (  # noqa: E402
    ModelServer,  # noqa: E402
    ServedBaseModel,
    ServeSettings,
)
from rl.serve.http_connection import (  # noqa: E402
    allow_port_reuse,
    bind_sockets,
    check_certificate,
    close_sockets,
)
from rl.serve.server import read_serve_settings  # noqa: E402

REPO = Path(__file__).resolve().parents[2]
KEYS = ("tml-of-the-first-tenant", "tml-of-the-second-one")


def at(tmp_path, host="127.0.0.1", port=0):
    return ServeSettings((ServedBaseModel(BASE, BASE),), tmp_path, host=host, port=port, keys=KEYS)


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
        close_sockets(taken)
        served.close()
        client.recv(1)
    (again,) = taken = bind_sockets(at(tmp_path, port=port))
    assert again.getsockname()[1] == port
    close_sockets(taken)


def test_a_name_is_every_address_that_it_has_here(tmp_path, monkeypatch):
    kinds = [(socket.AF_INET6, ("::1", 0, 0, 0)), (socket.AF_INET, ("127.0.0.1", 0))]
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda *_, **__: [(family, socket.SOCK_STREAM, 6, "", where) for family, where in kinds],
    )
    taken = bind_sockets(at(tmp_path, host="localhost"))
    assert taken[0].family == socket.AF_INET and len({item.getsockname()[1] for item in taken}) == 1
    close_sockets(taken)
    kinds[0] = (socket.AF_INET6, ("2001:db8::1", 0, 0, 0))  # documentation prefix (RFC 3849)
    (only,) = taken = bind_sockets(at(tmp_path, host="localhost"))
    assert only.family == socket.AF_INET
    close_sockets(taken)


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
    made = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext "
        "subjectAltName=IP:127.0.0.1 -keyout key -out cert"
    )
    subprocess.run(made.split(), cwd=folder, check=True, capture_output=True)
    subprocess.run(
        "openssl genrsa -out other 2048".split(), cwd=folder, check=True, capture_output=True
    )
    return folder


def test_files_of_tls_that_do_not_fit_are_named(certificate, tmp_path):
    cert, key = certificate / "cert", certificate / "key"
    check_certificate(cert, key)
    (tmp_path / "text").write_text("hello")
    wrong = [
        (cert, certificate / "other"),
        (key, cert),
        (tmp_path / "text", key),
        (cert, tmp_path / "text"),
    ]
    for pair in wrong:
        with pytest.raises(UserError, match="not a certificate and its key"):
            check_certificate(*pair)
    with pytest.raises(UserError, match="--tls-key .*nothing: no such file, or it cannot be read"):
        check_certificate(cert, tmp_path / "nothing")


def start_server(folder, *flags, launcher=()):
    """Start serve.py with its standard error in `folder`/log; return the process and its URL."""
    words = [
        *launcher, "serve.py", "--base-model", BASE, "--port", "0", "--output-dir",
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


@pytest.mark.slow
def test_over_tls_with_keys_figures_and_a_log_without_prompts(certificate, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# two tenants\n" + "\n".join(KEYS) + "\n")
    flags = (
        "--tls-cert",
        certificate / "cert",
        "--tls-key",
        certificate / "key",
        "--keys-file",
        keys,
    )
    process, url = start_server(tmp_path, *flags)
    secret = "a prompt that nobody else should read"
    try:
        with httpx.Client(base_url=url, verify=str(certificate / "cert"), timeout=60) as http:
            assert http.get("/healthz").json() == {"status": "ok"}
            requests = {"model": BASE, "prompt": secret, "max_tokens": 3, "seed": 1}
            assert http.post("/v1/completions", json=requests).status_code == 401
            assert (
                http.post(
                    "/v1/completions", json=requests, headers={"x-api-key": KEYS[0] + "x"}
                ).status_code
                == 401
            )
            bearer = {"authorization": f"Bearer {KEYS[0]}"}
            first = http.post("/v1/completions", json=requests, headers=bearer).json()["choices"][
                0
            ]["text"]
            sessions = {
                key: http.post(
                    "/api/v1/create_session", json={"tags": []}, headers={"x-api-key": key}
                ).json()
                for key in KEYS
            }
            page = http.get("/metrics", headers=bearer).text
            libraries = Path(f"/proc/{process.pid}/maps").read_text()
            for name in ("uvloop", "httptools"):
                assert (name in libraries) == (importlib.util.find_spec(name) is not None)
        with pytest.raises(httpx.ConnectError):  # the certificate is not trusted
            httpx.get(f"{url}/healthz")
        with pytest.raises(httpx.HTTPError):
            httpx.get(url.replace("https", "http") + "/healthz")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
    figures = {}
    for line in page.splitlines():  # Prometheus' text format 0.0.4: a name, labels, a number
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            figures[name] = float(value)
    refused = [
        value
        for name, value in figures.items()
        if name.partition("{")[0].endswith("requests_total") and 'status="401"' in name
    ]
    assert sum(refused) == 2 and any(
        "sessions" in name and value == 2 for name, value in figures.items()
    ), page
    log = (tmp_path / "log").read_text()
    rows = [json.loads(line) for line in log.splitlines()]
    assert sum(row.get("status") == 401 for row in rows) == 2
    assert not any(word in log for word in (secret, *KEYS, "Traceback"))
    process, url = start_server(tmp_path, *flags, "--resume")
    try:
        with httpx.Client(base_url=url, verify=str(certificate / "cert"), timeout=60) as http:
            for key, session in sessions.items():
                present = http.get("/api/v1/sessions", headers={"x-api-key": key}).json()[
                    "sessions"
                ]
                assert present == [session["session_id"]]
            again = http.post("/v1/completions", json=requests, headers=bearer).json()["choices"][
                0
            ]["text"]
        assert again == first
        process.send_signal(signal.SIGINT)  # Ctrl-C works too
        assert process.wait(60) == 0
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("config", ["ddp", "zero3"])
def test_two_processes_serve_as_one_and_what_they_held_is_kept_when_they_are_told_to_end(
    tmp_path, config
):
    def learns(wires):
        wires.open()
        model = wires.model()
        seen = [wires.output(wires.ask(model, 1, make_text_datums(5, 0)))[0]]
        norm = wires.wait(wires.step(model, 2))["metrics"]["grad_norm"]
        seen.append(wires.output(wires.ask(model, 3, make_text_datums(5, 1), forward_only=True))[0])
        drawn = [
            item.tokens
            for item in wires.sample(wires.sampler(model, 4), 0, [4, 5], 3, seed=3).sequences
        ]
        return model, seen, norm, drawn

    with server(tmp_path / "alone") as item:
        _, seen, norm, drawn = learns(Wire(item))
    launcher = [
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        f"accelerate_configs/{config}.yaml",
        "--num_processes",
        "2",
    ]
    process, url = start_server(tmp_path, launcher=[*launcher, "--main_process_port", "0"])
    try:
        wires = Wire.over(
            httpx.Client(base_url=url, headers={"x-api-key": "tml-nobody"}, timeout=120)
        )
        model, *result = learns(wires)
        # Signal the launcher, as a cluster does; the exit code is the launcher's.
        process.send_signal(signal.SIGTERM)
        process.wait(120)
    finally:
        process.kill()
    for mine, theirs in zip(result[0], seen, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
    assert result[1] == pytest.approx(norm, rel=1e-5) and result[2] == drawn
    with server(tmp_path / "out", resume=True) as item:  # now in a single process
        again = Wire(item)
        after = again.output(again.ask(model, 5, make_text_datums(5, 1), forward_only=True))[0]
    for a, b in zip(after, result[0][1], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.slow
def test_a_stop_right_after_a_restart_ends_within_its_grace(tmp_path):
    """Stop it twice: as soon as it listens, and while a million tokens are being sampled. No saved
    state is lost.
    """
    process, url = start_server(tmp_path)
    try:
        wires = Wire.over(
            httpx.Client(base_url=url, headers={"x-api-key": "tml-nobody"}, timeout=60)
        )
        wires.open()
        model = wires.model()
        expected = wires.output(wires.ask(model, 1, make_text_datums(3, 0), forward_only=True))[0]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
    for busy in (False, True):
        process, url = start_server(tmp_path, "--resume", "--stop-grace", "6")
        try:
            if busy:
                body = {
                    "model": BASE,
                    "prompt": ["1+"] * 32,
                    "max_tokens": 500,
                    "n": 64,
                    "ignore_eos": True,
                }
                asking = threading.Thread(
                    target=post_ignoring_errors, args=(f"{url}/v1/completions", body), daemon=True
                )
                asking.start()
                time.sleep(2.0)
                assert asking.is_alive()
            begin = time.monotonic()
            process.send_signal(signal.SIGTERM)
            process.wait(30)
            # the grace time, and the exit of an interpreter on a busy machine
            assert time.monotonic() - begin < 6 + 5
        finally:
            process.kill()
    with server(tmp_path / "out", resume=True) as first:
        after = Wire(first)
        result = after.output(after.ask(model, 2, make_text_datums(3, 0), forward_only=True))[0]
    for mine, theirs in zip(result, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


def post_ignoring_errors(url, body):
    with contextlib.suppress(httpx.HTTPError):
        httpx.post(url, json=body, timeout=60)


@pytest.mark.slow
def test_a_taken_port_is_said_in_a_box_and_nothing_is_written(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = ["--base-model", BASE, "--port", taken.getsockname()[1]]
        done = run_script("serve.py", *words, "--output-dir", tmp_path / "out", cwd=REPO)
    assert (
        done.returncode == 2
        and "nothing is served" in done.stderr + done.stdout
        and "Traceback" not in done.stderr
    )
    assert not (tmp_path / "out").exists()


def test_an_architecture_that_sampler_tp_cannot_split_is_refused_before_loading(tmp_path):
    tiny_model("gpt2").config.save_pretrained(tmp_path)  # a configuration without weights
    names = ("keys_file", "tls_cert", "tls_key", "renderer", "body_bytes", "sampler_url")
    unset = dict.fromkeys((*names, "sampler_folder"))
    args = argparse.Namespace(
        **unset, base_model=[f"m={tmp_path}"], output_dir=str(tmp_path / "out"), host="127.0.0.1",
        port=0, seed=0, resume=False, durable=False, sampler="auto", sampler_tp=2, stop_grace=60.0,
    )  # fmt: skip
    settings = read_serve_settings(args)
    assert settings.worker.sampler.tp == 2
    with pytest.raises(UserError, match="fast decoder .*is not supported by it"):
        ModelServer.create(settings)
