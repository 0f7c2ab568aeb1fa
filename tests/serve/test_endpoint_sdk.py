"""Test the endpoint with OpenAI's client and OpenEnv's conformance checker."""

import json
import os
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="needs the extra serve")

from endpoints import Endpoint, ScriptedBackend, TinyBackend  # noqa: E402

from rl.types import ModelInput, SamplingParams  # noqa: E402

pytestmark = [pytest.mark.sdk, pytest.mark.slow]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def sdk_results(shared_data):
    """Return the results of sdk_openai.py for a tiny and a scripted model, and the tiny model."""
    python = os.environ.get("WHETSTONE_TEST_SDK")
    if not python:
        pytest.skip("WHETSTONE_TEST_SDK names no Python with openai and openenv (the extra sdk)")
    tiny = Endpoint(TinyBackend(renderer="role_colon"))
    output = iter([CALL, "It is 3.", CALL])
    scripted = Endpoint(
        ScriptedBackend(
            lambda *_: next(output), "chat_template", str(shared_data / "tokenizers" / "qwen3")
        )
    )
    script = Path(__file__).with_name("sdk_openai.py")
    try:
        command = [python, str(script), tiny.url, "tiny:ascii", scripted.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-3000:]
        yield json.loads(done.stdout.splitlines()[-1]), tiny.engine, tiny.sessions
    finally:
        tiny.close()
        scripted.close()


def test_answers_and_streams(sdk_results):
    actual, desk, sessions = sdk_results
    prompt = desk.renderer(None, "").build_generation_prompt(
        [{"role": "user", "content": "Hello?"}]
    )
    stops = desk.renderer(None, "").get_stop_sequences()
    reference = (
        desk.client.sample(prompt, 2, SamplingParams(max_tokens=6, seed=4, stop=stops))
        .result()
        .sequences
    )
    assert [[tokens, logprobs] for _, tokens, logprobs in actual["whole"]] == [
        [item.tokens, item.logprobs] for item in reference
    ]
    assert actual["stream"] == [text for text, _, _ in actual["whole"]]
    assert actual["stream_usage"] == actual["usage"]
    assert actual["stream_final"] == actual["whole"][0][0]
    assert (
        actual["scored"] == desk.client.compute_logprobs(ModelInput.from_ints([5, 6, 7])).result()
    )
    assert actual["models"] == ["tiny:ascii"] and actual["wave"] == 16 == len(
        sessions.find("", "wave").turns
    )
    assert actual["refused"] == ["BadRequestError", "frequency_penalty", 400] and actual["unknown"][
        ::2
    ] == ["NotFoundError", 404]


def test_tools(sdk_results):
    name, arguments, answer, streamed = sdk_results[0]["tools"]
    assert name == "add" and json.loads(arguments) == {"a": 1} and answer == "It is 3."
    assert streamed == {"name": "add", "arguments": arguments}


def test_openenvs_checker(sdk_results):
    result = sdk_results[0]["openenv"]
    if isinstance(result, str):
        pytest.skip(result)
    assert result["response"] == [] and result["turns"] == [] and result["spelt"]
    assert result["level"] == "tokens" and result["trainable"] and result["fixes"] == []
    # unknown: the two most likely tokens of an untrained model are too close to distinguish
    assert result["mode"] in ("processed", "unknown")
    assert result["tools"] in ("no-tool-call", "unknown")
