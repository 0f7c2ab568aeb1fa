"""Test serve.py with all of OpenEnv's checks."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from serving import Wire, server

pytest.importorskip("starlette", reason="needs the extra serve")

from endpoints import Endpoint, ScriptedBackend  # noqa: E402

from rl.programs.program_rollout import LoopServer  # noqa: E402
from rl.types import Datum, ModelInput, SamplingParams  # noqa: E402

pytestmark = [pytest.mark.sdk, pytest.mark.slow]
KEY = "tml-the-key-of-the-checker"
BASE = "tiny:ascii"  # has room for the 512 tokens that the checker requests with its tools
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls /tmp"}}\n</tool_call>'
# the checker's probe for the effect of temperature on logprobs
PROBE = [{"role": "user", "content": "Reply with exactly: hello"}]


def learn_to_begin(wires, model, prompt, tokens, steps=8):
    """Train the model to follow the prompt with one of these tokens, most often the first."""
    data = [
        Datum(
            ModelInput.from_ints(prompt),
            {"target_tokens": [*prompt[1:], token], "weights": np.eye(len(prompt))[-1]},
        )
        for token in tokens
    ]
    for step in range(steps):
        wires.ask(model, 2 * step + 1, data)
        wires.wait(wires.step(model, 2 * step + 2, learning_rate=0.05))
    return 2 * steps + 1


@pytest.fixture(scope="module")
def sdk_results(tmp_path_factory, shared_data):
    """Return the results of tests/serve/sdk_openenv.py, and a client of the trained model."""
    python = os.environ.get("WHETSTONE_TEST_SDK")
    if not python:
        pytest.skip("WHETSTONE_TEST_SDK names no Python with openenv (the extra sdk)")
    scripted = Endpoint(
        ScriptedBackend(lambda *_: CALL, "chat_template", str(shared_data / "tokenizers" / "qwen3"))
    )
    with server(tmp_path_factory.mktemp("served"), keys=(KEY,), base=BASE) as first:
        wires = Wire(first, KEY)
        wires.open()
        model = wires.model(base=BASE)
        prompt = first.engine.renderer(None).build_generation_prompt(PROBE).to_ints()
        seq = learn_to_begin(wires, model, prompt, [40, 40, 40, 41])
        path = wires.save(model, seq, "trained", "_for_sampler")
        listening = LoopServer(lambda: first.app, "the test's server")
        try:
            command = [
                python,
                str(Path(__file__).with_name("sdk_openenv.py")),
                listening.url,
                KEY,
                BASE,
                path,
                scripted.url,
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=240)
            assert done.returncode == 0, done.stderr[-3000:]
            yield json.loads(done.stdout.splitlines()[-1]), path, first
        finally:
            listening.close()
            scripted.close()


def test_every_way_of_asking_finds_an_endpoint_to_train_from(sdk_results):
    result, path, _ = sdk_results
    for name, report in result["reports"].items():
        assert report["ok"] and report["reachable"] and report["capture_level"] == "tokens", (
            name,
            report,
        )
        assert report["rollout_type"] == "train" and report["param_fixes"] == [], (name, report)
        assert not [item for item in report["findings"] if "FATAL" in item], (name, report)
        assert (
            report["tool_support"] == "ok"
            if name == "tools"
            else report["tool_support"] in ("no-tool-call", "unknown")
        ), (name, report)
        assert report["n_completion_ids"] > 0 and (report["n_prompt_ids"] > 0 or name == "tools"), (
            name,
            report,
        )
    assert result["required"]["ok"]
    assert result["reports"]["root"]["served_models"] == [BASE, path], (
        "a trained model is listed for its key"
    )
    assert result["reports"]["trained"]["logprobs_mode"] == "processed", (
        "logprobs are not those at the temperature"
    )
    assert (
        not result["refused"]["key"]["reachable"]
        and "401" in result["refused"]["key"]["findings"][0]
    )
    assert not result["refused"]["model"]["ok"]
    assert "not served" in result["refused"]["model"]["findings"][0]


def test_a_rollout_through_its_capture_server_is_one_that_a_trainer_takes(sdk_results):
    actual, path, first = sdk_results
    rollout = actual["rollout"]
    assert (
        rollout["trainable"]
        and rollout["turns"] == 3
        and not [text for text in rollout["validation"] if "FATAL" in text]
    ), rollout
    assert rollout["rows"] and all(trainable for trainable, _, _ in rollout["rows"]), rollout[
        "rows"
    ]
    client = first.model_manager.resolve_name(
        path, first.session_store.list_models(first.app._keys[0][1])[0].owner
    )()
    assert len(rollout["records"]) == 3
    for prompt, drawn, logprobs in rollout["records"]:
        scored = client.compute_logprobs(ModelInput.from_ints([*prompt, *drawn])).result()[
            len(prompt) :
        ]
        assert len(drawn) == len(logprobs) > 0 and np.allclose(scored, logprobs, atol=1e-4)


def test_turns_by_ids_pass_the_same_checks_as_one_sequence(sdk_results):
    actual, path, first = sdk_results
    ids = actual["ids"]
    assert ids["fatal"] == [] and ids["stats"]["n_turns"] == 3 and ids["stats"]["n_roots"] == 1
    client = first.model_manager.resolve_name(
        path, first.session_store.list_models(first.app._keys[0][1])[0].owner
    )()
    rows = client.sample(
        ModelInput.from_ints(ids["ids"]),
        1,
        SamplingParams(max_tokens=1),
        True,
        client.info["vocab_size"],
    ).result()
    for i, (token, mask, logprob) in enumerate(
        zip(ids["ids"], ids["mask"], ids["logprobs"], strict=True)
    ):
        if mask:  # at temperature 0.7, over the whole vocabulary
            top = dict(rows.topk_prompt_logprobs[i])
            whole = np.logaddexp.reduce(np.asarray(list(top.values())) / 0.7)
            assert abs(top[token] / 0.7 - whole - logprob) < 1e-2, (i, token)
