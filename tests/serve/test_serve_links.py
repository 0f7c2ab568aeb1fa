"""Test links to saved checkpoints."""

import io
import logging
import tarfile
import time
from email.utils import parsedate_to_datetime

import pytest
from serving import Wire, server
from starlette.testclient import TestClient
from test_serve import KEYS

from rl.distributed import checkpoint_folder
from rl.serve.app import JsonLineFormatter


@pytest.fixture(scope="module")
def saved_export(tmp_path_factory):
    """Return a server with keys, a client with a key, and its model with an export."""
    with server(tmp_path_factory.mktemp("served"), keys=KEYS) as first:
        wires = Wire(first, KEYS[0])
        wires.open()
        model = wires.model()
        wires.save(model, 1, "a")
        wires.save(model, 2, "b", "_external")
        yield first, wires, model


def get_archive(wires, model, kind="weights/a"):
    """Return the response to the SDK's request for a download, without following redirects."""
    return wires.http.get(
        f"/api/v1/training_runs/{model}/checkpoints/{kind}/archive", follow_redirects=False
    )


def test_a_download_goes_to_a_link_that_needs_no_key(saved_export):
    first, wires, model = saved_export
    answer = get_archive(wires, model)
    assert answer.status_code == 302
    remaining = parsedate_to_datetime(answer.headers["expires"]).timestamp() - time.time()
    assert 3500 < remaining <= 3600
    stranger, folder = TestClient(first.app), first.session_store.models[model].folder
    content = stranger.get(answer.headers["location"]).content
    tar, saved = tarfile.open(fileobj=io.BytesIO(content)), folder / "weights" / "a"
    files = [path for path in saved.rglob("*") if path.is_file()]
    expected = {path.relative_to(saved).as_posix(): path.read_bytes() for path in files}
    assert {name: tar.extractfile(name).read() for name in tar.getnames()} == expected
    assert {"state.json", "manifest.json", "model/adapter_model.safetensors"} <= set(expected)
    export = f"/api/v1/training_runs/{model}/checkpoints/external_weights/b"
    urls = wires.http.get(f"{export}/external_weights_urls").json()["urls"]
    assert {"config.json", "model.safetensors"} <= set(urls)
    for name, url in urls.items():
        assert stranger.get(url).content == (folder / "external_weights" / "b" / name).read_bytes()


def test_a_link_is_for_one_thing_and_one_hour(saved_export, monkeypatch):
    first, wires, model = saved_export
    stranger, other = TestClient(first.app), Wire(first, KEYS[1])
    link = get_archive(wires, model).headers["location"]
    expires, sign = link.split("/files/")[1].split("/")[:2]
    changed = [
        link.replace("archive.tar", "state.json"),
        link.replace("weights/a", "external_weights/b"),
        link.replace(expires, str(int(expires) + 1)),
        link.replace(sign, "0" * 64),
        link.replace(sign, "\u00e9" * 64),
        link.replace(expires, "\u0661" * 10),
        link.replace(expires, "9" * 400),
    ]
    assert [stranger.get(url).status_code for url in changed] == [404] * len(changed)
    assert get_archive(other, model).status_code == 404, "another key's"
    assert stranger.get("/api/v1/training_runs").status_code == 401, "nothing else is open"
    assert stranger.get(link).status_code == 200
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + 3601)
    assert stranger.get(link).status_code == 404


def test_no_link_stands_in_the_log(saved_export, caplog):
    first, wires, model = saved_export
    caplog.set_level(logging.INFO, "whetstone.serve")
    link = get_archive(wires, model).headers["location"]
    sign = link.split("/files/")[1].split("/")[1]
    for url in (link, link.replace("/a/", "/none/"), link + "/..", link.replace("/weights/", "//")):
        TestClient(first.app, raise_server_exceptions=False).get(url)
    lines = [JsonLineFormatter().format(record) for record in caplog.records]
    assert sum("/api/v1/files/" in line for line in lines) >= 3, lines
    assert not [line for line in lines if sign in line or sign[:16] in line]


def test_an_archive_that_is_removed_before_its_files_are_open_is_not_there(
    saved_export, monkeypatch
):
    first, wires, model = saved_export
    path = wires.save(model, 3, "soon-gone")
    link = get_archive(wires, model, "weights/soon-gone").headers["location"]
    look = first.session_store.find_folder

    def then_gone(*arguments, **named):
        result = look(*arguments, **named)
        checkpoint_folder.remove_checkpoint(result[1])
        return result

    monkeypatch.setattr(first.session_store, "find_folder", then_gone)
    answer = wires.http.get(link)
    assert answer.status_code == 404 and path in answer.text


def test_a_link_counts_for_the_tenant_who_created_it(tmp_path):
    with server(tmp_path, keys=KEYS, open_requests=6) as first:
        links = []
        for key in KEYS:
            wires = Wire(first, key)
            wires.open()
            model = wires.model()
            wires.save(model, 1, "a")
            links.append(get_archive(wires, model).headers["location"])
        owners, stranger = [owner for _, owner in first.app._keys], TestClient(first.app)
        forged = links[0].replace(links[0].split("/files/")[1].split("/")[1], "0" * 64)
        for index, owner in enumerate(owners):
            assert not any(word in link for word in (*KEYS, owner) for link in links)
            first.app._open_by_owner[owner] = 3  # as many requests are open
            statuses = [stranger.get(link).status_code for link in (*links, forged)]
            expected = [200, 200, 404]
            expected[index] = 429
            assert statuses == expected, "the tenant's own links are refused, and no others"
            first.app._open_by_owner[owner] = 0
        assert [stranger.get(link).status_code for link in links] == [200, 200]
