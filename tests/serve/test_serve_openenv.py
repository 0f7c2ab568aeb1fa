"""Test serve.py with OpenAI's client and all of OpenEnv's checks."""

import asyncio
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from endpoints import Endpoint, ScriptedBackend
from serving import Wire, server

from rl.programs.program_rollout import LoopServer
from rl.types import Datum, ModelInput, SamplingParams

pytestmark = [pytest.mark.sdk, pytest.mark.slow]
KEY = "tml-the-key-of-the-checker"
BASE = "tiny:ascii"  # has room for the 512 tokens that the checker requests with its tools
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls /tmp"}}\n</tool_call>'
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
# the checker's probe for the effect of temperature on logprobs
PROBE = [{"role": "user", "content": "Reply with exactly: hello"}]


def say(prompt, turn):
    """Return an answer that calls the tool of the prompt, or its answer after a call."""
    if "<tool_response>" in prompt:
        return "It is 3."
    return ADD if '"add"' in prompt else CALL


def learn_to_begin(wires, model, prompt, tokens, steps=8):
    """Train the model to follow the prompt with one of these tokens, most often the first."""
    weights, data = np.eye(len(prompt))[-1], []
    for token in tokens:
        fields = {"target_tokens": [*prompt[1:], token], "weights": weights}
        data.append(Datum(ModelInput.from_ints(prompt), fields))
    for step in range(steps):
        wires.train(model, 2 * step + 1, data, learning_rate=0.05)
    return 2 * steps + 1


@pytest.fixture(scope="module")
def sdk_results(tmp_path_factory, shared_data):
    """Return the results of tests/serve/sdk_openenv.py, and a client of the trained model."""
    python = os.environ.get("WHETSTONE_TEST_SDK")
    if not python:
        pytest.skip("WHETSTONE_TEST_SDK names no Python with openai and openenv (the extra sdk)")
    folder = str(shared_data / "tokenizers" / "qwen3")
    scripted = Endpoint(ScriptedBackend(say, "chat_template", folder))
    with server(tmp_path_factory.mktemp("served"), keys=(KEY,), base=BASE) as first:
        wires = Wire(first, KEY)
        wires.open()
        model = wires.model(base=BASE)
        renderer = asyncio.run(first.model_manager.renderer(None))
        prompt = renderer.build_generation_prompt(PROBE).to_ints()
        seq = learn_to_begin(wires, model, prompt, [40, 40, 40, 41])
        path = wires.save(model, seq, "trained", "_for_sampler")
        listening = LoopServer(lambda: first.app, "the test's server")
        try:
            script = str(Path(__file__).with_name("sdk_openenv.py"))
            command = [python, script, listening.url, KEY, BASE, path, scripted.url]
            done = subprocess.run(command, capture_output=True, text=True, timeout=240)
            assert done.returncode == 0, done.stderr[-3000:]
            owner = first.session_store.list_models(first.app._keys[0][1])[0].owner
            client = first.model_manager.sampling_client(
                first.model_manager.find_sampler(path, owner)
            )
            yield json.loads(done.stdout.splitlines()[-1]), path, client, first
        finally:
            listening.close()
            scripted.close()


def test_every_way_of_asking_finds_an_endpoint_to_train_from(sdk_results):
    result, path, *_ = sdk_results
    assert result["response"] == []
    for name, report in result["reports"].items():
        assert report["ok"] and report["reachable"], (name, report)
        assert report["capture_level"] == "tokens", (name, report)
        assert report["rollout_type"] == "train" and report["param_fixes"] == [], (name, report)
        assert not [item for item in report["findings"] if "FATAL" in item], (name, report)
        support = ("ok",) if name == "tools" else ("no-tool-call", "unknown")
        assert report["tool_support"] in support, (name, report)
        assert report["n_completion_ids"] > 0, (name, report)
        assert report["n_prompt_ids"] > 0 or name == "tools", (name, report)
    assert result["required"]["ok"]
    # a trained model is listed for its key
    assert result["reports"]["root"]["served_models"] == [BASE, path]
    # logprobs are those at the temperature
    assert result["reports"]["trained"]["logprobs_mode"] == "processed"
    refused = result["refused"]
    assert not refused["key"]["reachable"] and "401" in refused["key"]["findings"][0]
    assert not refused["model"]["ok"] and "not served" in refused["model"]["findings"][0]


def test_a_rollout_through_its_capture_server_is_one_that_a_trainer_takes(sdk_results):
    actual, _, client, _ = sdk_results
    rollout = actual["rollout"]
    assert rollout["trainable"] and rollout["turns"] == 3, rollout
    assert not [text for text in rollout["validation"] if "FATAL" in text], rollout
    assert rollout["rows"] and all(trainable for trainable, _, _ in rollout["rows"]), rollout
    assert len(rollout["records"]) == 3
    for prompt, drawn, logprobs in rollout["records"]:
        scored = client.compute_logprobs(ModelInput.from_ints([*prompt, *drawn])).result()
        assert len(drawn) == len(logprobs) > 0
        np.testing.assert_allclose(scored[len(prompt) :], logprobs, atol=1e-4)


def test_turns_by_ids_pass_the_same_checks_as_one_sequence(sdk_results):
    actual, _, client, _ = sdk_results
    ids = actual["ids"]
    assert ids["fatal"] == [] and ids["stats"]["n_turns"] == 3 and ids["stats"]["n_roots"] == 1
    params, vocabulary = SamplingParams(max_tokens=1), client.info["vocab_size"]
    rows = client.sample(ModelInput.from_ints(ids["ids"]), 1, params, True, vocabulary).result()
    drawn = zip(ids["ids"], ids["mask"], ids["logprobs"], strict=True)
    for i, (token, mask, logprob) in enumerate(drawn):
        if mask:  # at temperature 0.7, over the whole vocabulary
            top = dict(rows.topk_prompt_logprobs[i])
            whole = np.logaddexp.reduce(np.asarray(list(top.values())) / 0.7)
            assert abs(top[token] / 0.7 - whole - logprob) < 1e-2, (i, token)


def test_openais_client_gets_answers_streams_and_refusals(sdk_results):
    actual, path, _, served = sdk_results
    renderer, desk = (
        asyncio.run(served.model_manager.renderer(None)),
        served.model_manager.sampling_client(served.model_manager.base_samplers[BASE]),
    )
    prompt = renderer.build_generation_prompt([{"role": "user", "content": "Hello?"}])
    params = SamplingParams(max_tokens=6, seed=4, stop=renderer.get_stop_sequences())
    reference = desk.sample(prompt, 2, params).result().sequences
    # other requests may share the server's batch: the logprobs agree up to float32's rounding
    for (_, tokens, logprobs), item in zip(actual["whole"], reference, strict=True):
        assert tokens == item.tokens
        np.testing.assert_allclose(logprobs, item.logprobs, rtol=0, atol=2e-6)
    assert actual["stream"] == [text for text, _, _ in actual["whole"]]
    assert actual["stream_usage"] == actual["usage"]
    assert actual["stream_final"] == actual["whole"][0][0]
    assert actual["scored"] == desk.compute_logprobs(ModelInput.from_ints([5, 6, 7])).result()
    assert actual["models"] == [BASE, path] and actual["wave"] == 16
    assert actual["wish"] == ["BadRequestError", "frequency_penalty", 400]
    assert actual["unknown"][::2] == ["NotFoundError", 404]


def test_openais_client_calls_tools(sdk_results):
    name, arguments, answer, streamed = sdk_results[0]["tools"]
    assert name == "add" and json.loads(arguments) == {"a": 1} and answer == "It is 3."
    assert streamed == {"name": "add", "arguments": arguments}
