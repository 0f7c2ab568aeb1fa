"""Run the client examples of docs/serving.md against a server and the clients of this process."""

import json
import math
import shlex
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from doc_blocks import REPO, blocks_of
from serving import BASE, Wire, server

from rl.client import ServiceClient
from rl.types import ModelInput

MODEL_NAME = "Qwen/Qwen3-8B"  # the name of the page's model; here it is a tiny one


def find_block(start):
    blocks = blocks_of(REPO / "docs" / "serving.md")
    (block,) = [block for block in blocks if block.text.startswith(start)]
    return block.text


def test_the_curl_example_gets_an_answer(tmp_path):
    command, url, *words = shlex.split(find_block("curl ").replace("\\\n", " "))
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert command == "curl" and set(options) == {"-H", "-d"}
    header, _, value = options["-H"].partition(": ")
    path, request = urlsplit(url).path, {"content": options["-d"], "headers": {header: value}}
    with server(tmp_path, name=MODEL_NAME) as served:
        reply = Wire(served).http.post(path, **request)
        assert reply.status_code == 200, reply.text
        (choice,) = reply.json()["choices"]
        assert choice["message"]["role"] == "assistant"
        assert reply.json()["usage"]["completion_tokens"] <= json.loads(options["-d"])["max_tokens"]


def test_the_sdk_example_runs_with_the_clients_of_this_process(tmp_path, monkeypatch, capsys):
    """As docs/tinker.md says: after its imports are changed. Compare with the base's logprobs."""
    text = find_block("import tinker\n")
    for before, after in (
        ("import tinker\n", "import rl as tinker\n"),
        ("from tinker import", "from rl import"),
        (MODEL_NAME, BASE),
    ):
        assert before in text
        text = text.replace(before, after)
    monkeypatch.setenv("WHETSTONE_OUTPUT_DIR", str(tmp_path))
    names: dict = {}
    exec(compile(text, "docs/serving.md", "exec"), names)
    metrics, path = capsys.readouterr().out.strip().splitlines()[-2:]
    assert Path(path.split()[0]).is_dir() and Path(path).is_relative_to(tmp_path)
    with ServiceClient(output_dir=tmp_path) as service:
        base = service.create_sampling_client(base_model=BASE)
        scored = base.compute_logprobs(ModelInput.from_ints(names["tokens"])).result()
    loss = eval(metrics, {"nan": math.nan})["loss:sum"]
    assert loss == pytest.approx(-sum(scored[1:]), rel=1e-4), "a new adapter changes no logprob"
