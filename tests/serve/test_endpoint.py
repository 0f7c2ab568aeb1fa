"""Test the OpenAI-style routes over plain HTTP."""

import asyncio
import json
import math
import time
from dataclasses import replace

import pytest

httpx = pytest.importorskip("httpx", reason="needs the extra dev")
pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")

from endpoints import Endpoint, ScriptedBackend, TinyBackend  # noqa: E402

from rl.envs import resolve_environment  # noqa: E402
from rl.errors import BadRequestError, ContextLengthError  # noqa: E402
from rl.programs import program_env  # noqa: E402
from rl.rollout import trajectory_to_datums  # noqa: E402
from rl.serve import HttpError, SampledTurn  # noqa: E402
from rl.serve.http_errors import to_http_error  # noqa: E402
from rl.types import ModelInput, SampledSequence, SamplingParams  # noqa: E402

ASK = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello?"}]
TOOLS = [
    {"type": "function",
     "function": {"name": "add", "description": "Adds.",
                  "parameters": {"type": "object", "properties": {}}}},
]  # fmt: skip


@pytest.fixture(scope="module")
def tiny_endpoint():
    endpoint = Endpoint(TinyBackend())
    with httpx.Client(base_url=endpoint.url, timeout=60) as client:
        endpoint.http = client
        yield endpoint
    endpoint.close()


@pytest.fixture
def make_scripted_endpoint(shared_data):
    """Return `make(say, renderer, tokenizer)`, which builds an endpoint with scripted answers."""
    made = []

    def make(say, renderer="chat_template", tokenizer="qwen3"):
        endpoint = Endpoint(
            ScriptedBackend(
                say,
                renderer,
                None if tokenizer is None else str(shared_data / "tokenizers" / tokenizer),
            )
        )
        endpoint.http = httpx.Client(base_url=endpoint.url, timeout=60)
        made.append(endpoint)
        return endpoint

    yield make
    for endpoint in made:
        endpoint.http.close()
        endpoint.close()


def chat(endpoint, messages=ASK, path="", headers=None, **body):
    reply = endpoint.http.post(
        f"{path}/v1/chat/completions", json={"messages": messages, **body}, headers=headers or {}
    )
    assert reply.status_code == 200, reply.text
    return reply.json()


# ------------------------------------------------------------------------------------------ answers


def test_answers_are_the_clients_own_to_the_bit(tiny_endpoint):
    options = {"n": 3, "seed": 7, "temperature": 0.7, "max_tokens": 6}
    text = chat(tiny_endpoint, **options, logprobs=True, return_token_ids=True)
    prompt = tiny_endpoint.engine._renderer.build_generation_prompt(ASK)
    params = SamplingParams(max_tokens=6, temperature=0.7, seed=7, stop=[1])
    reference = tiny_endpoint.engine.client.sample(prompt, 3, params).result()
    assert text["prompt_token_ids"] == prompt.to_ints() and text["object"] == "chat.completion"
    assert [choice["index"] for choice in text["choices"]] == [0, 1, 2]
    for choice, sequence in zip(text["choices"], reference.sequences, strict=True):
        content = choice["logprobs"]["content"]
        assert choice["token_ids"] == sequence.tokens
        assert [item["logprob"] for item in content] == sequence.logprobs
        assert [item["token"] for item in content] == [f"token_id:{t}" for t in sequence.tokens]
        assert choice["finish_reason"] == sequence.stop_reason
        parsed, _ = tiny_endpoint.engine._renderer.parse_response(sequence.tokens)
        assert choice["message"]["content"] == parsed["content"]
    drawn = sum(len(sequence.tokens) for sequence in reference.sequences)
    assert text["usage"] == {
        "prompt_tokens": prompt.length, "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens": drawn, "total_tokens": prompt.length + drawn,
    }  # fmt: skip
    body = {"token_ids": prompt.to_ints(),
            "sampling_params": {**options, "logprobs": 1, "stop_token_ids": [1]}}  # fmt: skip
    ids = tiny_endpoint.http.post("/inference/v1/generate", json=body).json()
    assert ids["prompt_token_ids"] == prompt.to_ints()
    for choice, sequence in zip(ids["choices"], reference.sequences, strict=True):
        assert choice["token_ids"] == sequence.tokens
        assert [item["logprob"] for item in choice["logprobs"]["content"]] == sequence.logprobs
    assert ids["choices"][0]["finish_reason"] == reference.sequences[0].stop_reason


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.3}, {"top_k": 3}, {"top_k": 8, "top_p": 0.5}])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 2.0])
def test_logprobs_are_of_the_untruncated_distribution_at_the_temperature(
    tiny_endpoint, temperature, cut
):
    """The logprobs match the model's scores (of greedy answers: at temperature 1)."""
    text = chat(
        tiny_endpoint, seed=3, temperature=temperature, max_tokens=4, logprobs=True, top_logprobs=4,
        return_token_ids=True, **cut,
    )  # fmt: skip
    prompt, (choice,) = text["prompt_token_ids"], text["choices"]
    sequences, results = [], []
    for i, entry in enumerate(choice["logprobs"]["content"]):
        tops = entry["top_logprobs"]
        assert len(tops) == 4 and tops == sorted(tops, key=lambda item: -item["logprob"])
        for item in [entry, *tops]:
            token = int(item["token"].removeprefix("token_id:"))
            sequences.append(ModelInput.from_ints([*prompt, *choice["token_ids"][:i], token]))
            results.append(item["logprob"])
    scores = tiny_endpoint.engine.client.compute_logprobs_many(
        sequences, temperature or 1.0
    ).result()
    assert results == pytest.approx([score[-1] for score in scores], abs=2e-5)


def test_a_stream_put_together_is_the_whole(tiny_endpoint):
    body = {
        "messages": ASK, "seed": 5, "max_tokens": 9, "n": 2, "logprobs": True,
        "return_token_ids": True,
    }  # fmt: skip
    whole = tiny_endpoint.http.post("/v1/chat/completions", json=body).json()
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    with tiny_endpoint.http.stream("POST", "/v1/chat/completions", json=streamed) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in reply.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert events[-1]["usage"] == whole["usage"] and events[-1]["choices"] == []
    parts = [event["choices"][0] for event in events[:-1]]
    for choice in whole["choices"]:
        reference = [part for part in parts if part["index"] == choice["index"]]
        text = "".join(part["delta"].get("content") or "" for part in reference)
        assert text == choice["message"]["content"]
        reasons = [part["finish_reason"] for part in reference]
        assert reasons == [None] * (len(reference) - 1) + [choice["finish_reason"]]
        entries = [
            entry
            for part in reference
            for entry in (part["logprobs"] or {"content": []})["content"]
        ]
        assert entries == choice["logprobs"]["content"]
        tokens = [token for part in reference for token in part.get("token_ids", [])]
        assert tokens == choice["token_ids"]


def test_tools_are_called_and_answered(make_scripted_endpoint):
    text = iter(['<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "ü"]}}\n</tool_call>',
                 "It is 3.", "No tools."])  # fmt: skip
    endpoint = make_scripted_endpoint(lambda *_: next(text))
    first = chat(endpoint, tools=TOOLS, path="/session/a")
    (choice,) = first["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert call["type"] == "function"
    assert call["function"]["name"] == "add"
    assert call["id"].startswith("call")
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": [2, "ü"]}
    again = [*ASK, choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "3"}]
    second = chat(endpoint, again, tools=TOOLS, path="/session/a")
    assert second["choices"][0]["message"]["content"] == "It is 3."
    assert second["choices"][0]["finish_reason"] == "stop"
    (item, one_answer), (two, _) = endpoint.engine.drawn
    # the prompt holds the sampled tokens, not a re-tokenized text
    assert two[: len(item) + len(one_answer)] == [*item, *one_answer]
    assert "<tool_response>\n3\n</tool_response>" in endpoint.engine.tokenizer(None, "").decode(two)
    third = chat(endpoint, tools=TOOLS, tool_choice="none")
    assert third["choices"][0]["message"]["content"] == "No tools."
    assert "Adds." not in endpoint.engine.tokenizer(None, "").decode(endpoint.engine.drawn[-1][0])


@pytest.mark.parametrize("wish", [{"stop": "lo"}, {"stop": ["zz", "lo"]}])
def test_a_stop_text_ends_an_answer_and_is_no_part_of_it(make_scripted_endpoint, wish):
    # The script plays the sampler: its answer ends with the stop text.
    endpoint = make_scripted_endpoint(lambda *_: "Hello...")
    endpoint.engine.reason = "stop"
    choice = chat(endpoint, **wish)["choices"][0]
    assert choice["message"]["content"] == "Hel" and choice["finish_reason"] == "stop"
    body = {"prompt": "x", **wish}
    assert endpoint.http.post("/v1/completions", json=body).json()["choices"][0]["text"] == "Hel"


# ------------------------------------------------------------------------------------------ scoring


@pytest.mark.parametrize("most", [0, 1])
def test_loglikelihoods_as_a_harness_asks_for_them(tiny_endpoint, most):
    """Send requests and read scores as lm-evaluation-harness's local-completions does."""
    greedy = tiny_endpoint.engine.client.sample(
        ModelInput.from_ints([20, 30]), 1, SamplingParams(max_tokens=3, temperature=0.0, stop=[])
    ).result()
    rows = [([20, 30], greedy.sequences[0].tokens), ([5], [9, 9]), ([40, 41, 42], [7])]
    body = {
        "model": "tiny:ascii", "prompt": [[*context, *answer] for context, answer in rows],
        "echo": True, "logprobs": 1, "temperature": 0, "max_tokens": most, "seed": 1234,
    }  # fmt: skip
    output = tiny_endpoint.http.post("/v1/completions", json=body)
    assert output.status_code == 200, output.text
    choices = sorted(output.json()["choices"], key=lambda first: first["index"])
    reference = tiny_endpoint.engine.client.compute_logprobs_many(
        [ModelInput.from_ints([*context, *answer]) for context, answer in rows]
    ).result()
    for (context, answer), choice, scores in zip(rows, choices, reference, strict=True):
        end = len(context) + len(answer)
        actual = choice["logprobs"]
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        assert [len(actual[name]) for name in names] == [end + most] * 4
        assert actual["token_logprobs"][0] is None and actual["top_logprobs"][0] is None
        # Equal to float32 rounding: arrival times decide which requests share a forward pass.
        assert scores[0] is None and actual["token_logprobs"][1:end] == pytest.approx(
            scores[1:], abs=1e-5
        )
        pairs = list(zip(actual["tokens"], actual["top_logprobs"], strict=True))[len(context) : end]
        assert all(max(top, key=top.get) == token for token, top in pairs) == (answer is rows[0][1])
        if most == 0:
            assert choice["text"] == tiny_endpoint.engine.tokenizer(None, "").decode(
                [*context, *answer]
            )


def test_several_texts_are_continued(tiny_endpoint):
    body = {
        "prompt": ["ab", "12+3"], "n": 2, "max_tokens": 3, "seed": 1, "temperature": 1.5,
        "logprobs": 0, "return_token_ids": True,
    }  # fmt: skip
    choices = tiny_endpoint.http.post("/v1/completions", json=body).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    for p, text in enumerate(body["prompt"]):
        prompt = tiny_endpoint.engine.tokenizer(None, "").encode(text)
        reference = tiny_endpoint.engine.client.sample(
            ModelInput.from_ints(prompt), 2, SamplingParams(max_tokens=3, seed=1, temperature=1.5)
        ).result()
        for choice, sequence in zip(choices[2 * p : 2 * p + 2], reference.sequences, strict=True):
            assert choice["token_ids"] == sequence.tokens and choice["prompt_token_ids"] == prompt
            # Equal to float32 rounding: here both prompts share a batch, in the reference each has
            # a batch.
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(
                sequence.logprobs, abs=1e-5
            )
            assert choice["logprobs"]["top_logprobs"] is None


def test_models_say_how_long_prompt_and_answer_may_be(tiny_endpoint):
    (model,) = tiny_endpoint.http.get("/v1/models").json()["data"]
    longest = model["max_model_len"]
    assert (
        model["id"] == "tiny:ascii"
        and tiny_endpoint.http.get("/v1/models/tiny:ascii").json() == model
    )
    assert tiny_endpoint.http.get("/v1/models/other").json()["error"]["code"] == "model_not_found"
    for length, status in ((longest - 1, 200), (longest, 400)):
        reply = tiny_endpoint.http.post(
            "/v1/completions", json={"prompt": [5] * length, "max_tokens": 1}
        )
        assert reply.status_code == status
    assert reply.json()["error"]["code"] == "context_length_exceeded"


def test_only_a_prompt_beyond_the_context_has_the_code_of_it():
    advice = "max_tokens=None samples up to the context's end, and this model has no limit"
    assert to_http_error(BadRequestError(advice)).code is None
    assert to_http_error(ContextLengthError(advice)).code == "context_length_exceeded"
    assert HttpError(400, advice).code is None


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_likely_tokens_of_an_answer_that_ends_with_the_context(tiny_endpoint, path):
    """The likeliest token at the last position is the greedy sample after the tokens before it."""
    (model,) = tiny_endpoint.http.get("/v1/models").json()["data"]
    longest, k = model["max_model_len"], 3
    asks = {
        "/v1/completions": {"prompt": [5] * (longest - 4), "max_tokens": 4, "logprobs": k},
        "/v1/chat/completions": {"messages": ASK, "logprobs": True, "top_logprobs": k},
    }
    body = {"seed": 2, "logit_bias": {"1": -100}, "return_token_ids": True, **asks[path]}
    reply = tiny_endpoint.http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    prompt = choice.get("prompt_token_ids") or reply.json()["prompt_token_ids"]
    tokens = [*prompt, *choice["token_ids"]]
    assert len(tokens) == longest
    before = ModelInput.from_ints(tokens[:-1])
    params = SamplingParams(max_tokens=1, temperature=0.0, stop=[])
    (greedy,) = tiny_endpoint.engine.client.sample(before, 1, params).result().sequences
    if path == "/v1/completions":
        top = choice["logprobs"]["top_logprobs"][-1]
        best = max(top, key=top.__getitem__)
        result = (best, top[best])
    else:
        first = choice["logprobs"]["content"][-1]["top_logprobs"][0]
        result = (first["token"], first["logprob"])
    assert result[0] == f"token_id:{greedy.tokens[0]}"
    assert result[1] == pytest.approx(greedy.logprobs[0], abs=2e-5)


# ----------------------------------------------------------------------------------------- refusals

CHAT, TEXT, IDS = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
FINE = {
    CHAT: {"messages": ASK, "max_tokens": 1},
    TEXT: {"prompt": "a", "max_tokens": 1},
    IDS: {"token_ids": [5]},
}
REFUSED = [
    (CHAT, {"max_tokns": 3}, "max_tokns"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    (CHAT,
     {"messages": [{"role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages[0].content[0]"),
    (CHAT, {"messages": [*ASK, {"role": "assistant", "content": "so"}]}, "messages[2]"),
    (CHAT, {"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
    (CHAT, {"tools": [{"type": "web_search"}]}, "tools[0]"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
     "tools[0].function.strict"),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"frequency_penalty": 2.5}, "frequency_penalty"),
    (TEXT, {"presence_penalty": "a"}, "presence_penalty"),
    (TEXT, {"repetition_penalty": 0}, "repetition_penalty"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    (CHAT, {"guided_json": {}}, "guided_json"),
    (CHAT, {"logit_bias": {"a": 3}}, "logit_bias"),
    (CHAT, {"logit_bias": {"5": 101}}, "logit_bias"),
    (CHAT, {"logit_bias": {"5": True}}, "logit_bias"),
    (CHAT, {"logit_bias": [5]}, "logit_bias"),
    (TEXT, {"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    (CHAT, {"min_p": 1.5}, "min_p"),
    (TEXT, {"min_p": "a"}, "min_p"),
    (CHAT, {"min_tokens": 2}, "min_tokens"),
    (TEXT, {"max_tokens": 3, "min_tokens": 1, "stop": "x"}, "min_tokens"),
    (CHAT, {"ignore_eos": True}, "ignore_eos"),
    (TEXT, {"ignore_eos": 1}, "ignore_eos"),
    (CHAT, {"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
    (TEXT, {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"temperature": "hot"}, "temperature"),
    (CHAT, {"temperature": -1}, "temperature"),
    (CHAT, {"top_p": 0}, "top_p"),
    (CHAT, {"n": 0}, "n"),
    (CHAT, {"n": True}, "n"),
    (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    (CHAT, {"stop": [""]}, "stop"),
    (CHAT, {"stream": "yes"}, "stream"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
    (TEXT, {"stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
    (CHAT, {"parallel_tool_calls": False}, "parallel_tool_calls"),
    (TEXT, {"max_tokens": 0}, "max_tokens"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": [[5], [-1]]}, "prompt[1]"),
    (TEXT, {"suffix": "z"}, "suffix"),
    (TEXT, {"best_of": 3}, "best_of"),
    (TEXT, {"logprobs": 99}, "logprobs"),
    (IDS, {"token_ids": "abc"}, "token_ids"),
    (IDS, {"sampling_params": {"prompt_logprobs": 1}}, "sampling_params.prompt_logprobs"),
    (IDS, {"sampling_params": {"min_tokens": -1}}, "sampling_params.min_tokens"),
]  # fmt: skip


@pytest.mark.parametrize("path, body, named", REFUSED)
def test_what_is_not_supported_is_refused_by_name(tiny_endpoint, path, body, named):
    before = len(tiny_endpoint.engine.requests_seen)
    reply = tiny_endpoint.http.post(path, json={**FINE[path], **body})
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == named
    assert (
        named.split(".")[-1].split("[")[0] in error["message"]
        and len(tiny_endpoint.engine.requests_seen) == before
    )


REASONS = {
    "response_format": {"type": "json_object"},
    "guided_regex": "a*",
    "structured_outputs": {"json": {}},
    "tool_choice": "required",
}


@pytest.mark.parametrize("field", REASONS)
def test_what_would_constrain_the_model_is_refused_with_a_reason_and_a_remedy(tiny_endpoint, field):
    body = {**FINE[CHAT], "tools": TOOLS, field: REASONS[field]}
    message = tiny_endpoint.http.post(CHAT, json=body).json()["error"]["message"]
    assert field in message
    assert "not constrain the model to a grammar" in message
    assert "in the messages" in message


HOW = {
    "min_p": {"min_p": 0.3},
    "bias": {"logit_bias": {"5": 6.5, "7": -100}},
    "least": {"min_tokens": 6},
    "on": {"ignore_eos": True},
    "penalties": {"presence_penalty": 1, "frequency_penalty": 1.5, "repetition_penalty": 1.4},
}  # fmt: skip


@pytest.mark.parametrize("mode", HOW)
def test_how_tokens_are_drawn_is_the_clients_own_to_the_bit(tiny_endpoint, mode):
    """Every route samples the same tokens as the client; logprobs ignore biases and truncation."""
    body, prompt = HOW[mode], [5, 9, 6]
    same = {"n": 4, "seed": 3, "max_tokens": 8, "temperature": 0.8, **body}
    params = {name: value for name, value in body.items() if name != "logit_bias"}
    params |= (
        {"logit_bias": {int(token): value for token, value in body["logit_bias"].items()}}
        if "logit_bias" in body
        else {}
    )
    usual = SamplingParams(max_tokens=8, temperature=0.8, seed=3, untruncated_logprobs=True)
    start, client = ModelInput.from_ints(prompt), tiny_endpoint.engine.client
    reference, plain = (
        client.sample(start, 4, item).result().sequences
        for item in (replace(usual, **params), usual)
    )
    text = tiny_endpoint.http.post(
        TEXT, json={"prompt": prompt, "return_token_ids": True, "logprobs": 0, **same}
    ).json()
    ids = tiny_endpoint.http.post(IDS, json={"token_ids": prompt, "sampling_params": same}).json()
    for output in (text, ids):
        assert [choice["token_ids"] for choice in output["choices"]] == [
            sequence.tokens for sequence in reference
        ]
    whole = client.compute_logprobs_many(
        [ModelInput.from_ints([*prompt, *item.tokens]) for item in reference], 0.8
    ).result()
    for choice, values in zip(text["choices"], whole, strict=True):
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(
            values[len(prompt) :], abs=1e-4
        )
    if mode in ("min_p", "bias", "penalties"):
        assert [item.tokens for item in reference] != [item.tokens for item in plain]
    elif mode == "least":
        assert all(1 not in item.tokens[:6] for item in reference)


def test_a_chat_takes_them_too(tiny_endpoint):
    options = {"min_p": 0.2, "min_tokens": 4}
    body = {
        **options, "logit_bias": {"5": 4}, "seed": 1, "max_tokens": 6, "return_token_ids": True,
        "logprobs": True,
    }  # fmt: skip
    text = chat(tiny_endpoint, **body)
    params = SamplingParams(
        max_tokens=6, seed=1, stop=[1], logit_bias={5: 4.0}, untruncated_logprobs=True, **options
    )
    (reference,) = (
        tiny_endpoint.engine.client.sample(
            tiny_endpoint.engine._renderer.build_generation_prompt(ASK), 1, params
        )
        .result()
        .sequences
    )
    (choice,) = text["choices"]
    assert choice["token_ids"] == reference.tokens
    assert [item["logprob"] for item in choice["logprobs"]["content"]] == reference.logprobs


def test_chat_template_kwargs_reach_the_template(make_scripted_endpoint):
    """The prompt equals that of transformers' chat template."""
    endpoint = make_scripted_endpoint(lambda *_: "hm")
    tokenizer = endpoint.engine._renderer.tokenizer
    for settings in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
        text = chat(endpoint, chat_template_kwargs=settings, return_token_ids=True)
        reference = tokenizer.apply_chat_template(
            ASK, add_generation_prompt=True, return_dict=False, **settings
        )
        assert text["prompt_token_ids"] == reference
    reply = endpoint.http.post(
        CHAT, json={"messages": ASK, "chat_template_kwargs": {"enable_thinkng": False}}
    )
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert error["param"] == "chat_template_kwargs"
    assert "has no setting 'enable_thinkng'" in error["message"]
    for name in ("messages", "add_generation_prompt"):
        assert (
            endpoint.http.post(
                CHAT, json={"messages": ASK, "chat_template_kwargs": {name: 1}}
            ).status_code
            == 400
        )


def test_what_asks_for_nothing_is_taken(tiny_endpoint):
    neutral = {
        "min_p": 0, "min_tokens": 0, "ignore_eos": False, "chat_template_kwargs": {},
        "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {},
        "response_format": {"type": "text"}, "user": "me", "metadata": {"a": "b"}, "store": False,
        "parallel_tool_calls": True, "stop": None, "tools": [], "seed": 3,
    }  # fmt: skip
    assert chat(tiny_endpoint, max_tokens=2, **neutral)["choices"]


@pytest.mark.slow
def test_no_body_makes_the_server_stumble(tiny_endpoint):
    """Send every field of every route with every kind of value. The server answers or refuses with
    a reason, never with a traceback.
    """
    values = [
        None,
        True,
        -1,
        0,
        1e308,
        2**70,
        math.pi,
        "",
        "x",
        "\ud800",
        [],
        [[]],
        {},
        {"a": 1},
        [1, "a"],
        [{"role": "user"}],
    ]
    fields = {
        CHAT: [
            "messages",
            "model",
            "tools",
            "tool_choice",
            "n",
            "stop",
            "stop_token_ids",
            "seed",
            "logprobs",
            "top_logprobs",
            "stream_options",
            "temperature",
            "top_p",
            "top_k",
            "max_tokens",
            "return_token_ids",
            "min_p",
            "logit_bias",
            "min_tokens",
            "ignore_eos",
            "chat_template_kwargs",
        ],
        TEXT: [
            "prompt",
            "model",
            "n",
            "stop",
            "logprobs",
            "echo",
            "max_tokens",
            "best_of",
            "min_p",
            "logit_bias",
            "min_tokens",
            "ignore_eos",
        ],
        IDS: ["token_ids", "sampling_params", "model"],
    }
    bodies = [
        (path, json.dumps({**FINE[path], field: value}))
        for path, names in fields.items()
        for field in names
        for value in values
    ]
    bodies += [
        (path, text)
        for path in FINE
        for text in ("", "{", "[]", "3", "null", "[" * 100_000, '"\xff"')
    ]

    async def ask_all():
        async with httpx.AsyncClient(base_url=tiny_endpoint.url, timeout=60) as client:
            return [
                await client.post(path, content=text.encode("utf-8", "surrogatepass"))
                for path, text in bodies
            ]

    for (path, text), reply in zip(bodies, asyncio.run(ask_all()), strict=True):
        assert reply.status_code in (200, 400, 404), (path, text[:200], reply.text)
        if reply.status_code != 200:
            assert reply.json()["error"]["message"], (path, text[:200])
            assert "Traceback" not in reply.text


def test_a_server_that_ends_or_is_full_says_try_again():
    from rl.serve import HttpError
    from rl.serve.http_errors import ShutdownError, make_error_response, report_error

    for error, status in (
        (ShutdownError(), 503),
        (HttpError(429, "too many requests are waiting", retry_after=2.0), 429),
    ):
        reply = make_error_response(report_error(error), is_openai=True)
        assert reply.status_code == status and float(reply.headers["retry-after"]) > 0
    reply = report_error(RuntimeError("a secret prompt"))
    assert reply.status == 500 and "secret" not in reply.message and reply.kind == "server_error"


# ----------------------------------------------------------------------------------------- sessions


def conversation(endpoint, turns, headers):
    """Run a conversation that sends answers back as clients do, without thoughts; return its
    messages.
    """
    messages = [*ASK]
    for i in range(turns):
        text = chat(endpoint, messages, headers=headers)["choices"][0]["message"]
        kept = {key: text[key] for key in ("role", "content", "tool_calls") if text.get(key)}
        messages += [kept, {"role": "user", "content": f"And {i}?"}]
    return messages


def trained_tokens(datums):
    pairs = [
        (datum.loss_fn_inputs["target_tokens"].array, datum.loss_fn_inputs["mask"].array > 0)
        for datum in datums
    ]
    return sorted(token for targets, mask in pairs for token in targets[mask].tolist())


# Every renderer, and the turn that each turn continues. Each continues the previous turn, except
# for a template that renders answers differently in a prompt than in generation.
RENDERERS = [
    ("plain", None, [None, 0, 1]),
    ("role_colon", None, [None, 0, 1]),
    ("chat_template", "qwen2.5", [None, 0, 1]),
    ("chat_template", "qwen3", [None, 0, 1]),
    ("qwen3_disable_thinking", "qwen3", [None] * 3),
    ("chat_template", "minimind_6400", [None, 0, 1]),
    ("role_colon", "qwen2.5", [None, 0, 1]),
    ("plain", "gpt2", [None, 0, 1]),
]


@pytest.mark.parametrize("renderer, tokenizer, parents", RENDERERS)
def test_turns_of_a_session_are_trained_as_they_were_drawn(
    make_scripted_endpoint, renderer, tokenizer, parents
):
    """Answers consist of one token per character, which no tokenizer would choose."""
    endpoint = make_scripted_endpoint(lambda *_: "It is so.", renderer, tokenizer)
    endpoint.engine.by_character = True
    conversation(endpoint, 3, {"X-Session-ID": "s"})
    trajectory = endpoint.sessions.find("", "s").make_trajectory()
    prompts, answers = map(list, zip(*endpoint.engine.drawn, strict=True))
    assert [turn.ac.tokens for turn in trajectory.transitions] == answers
    assert [turn.ob.to_ints() for turn in trajectory.transitions] == prompts
    trajectory.advantage = 1.0
    datums = trajectory_to_datums(trajectory)
    targets = [
        token
        for fields in (datum.loss_fn_inputs for datum in datums)
        for token in fields["target_tokens"].array[fields["mask"].array.astype(bool)].tolist()
    ]
    assert targets == [token for answer in answers for token in answer]
    shown = endpoint.http.get("/session/s").json()
    assert [turn["parent"] for turn in shown["turns"]] == parents
    assert len(datums) == parents.count(None)
    assert [turn["token_ids"] for turn in shown["turns"]] == answers


def test_thoughts_that_clients_drop_are_read_as_the_template_says(make_scripted_endpoint):
    """Qwen3's template drops thoughts after a user message and keeps them after a tool message."""
    call = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    text = iter([call, "<think>\nso\n</think>\n\nIt is 3.", "<think>\nyes\n</think>\n\nBye."])
    endpoint = make_scripted_endpoint(lambda *_: next(text))
    messages = [*ASK]
    for more in ({"role": "tool", "content": "3"}, {"role": "user", "content": "Thanks."}, None):
        message = chat(endpoint, messages, path="/session/t", tools=TOOLS)["choices"][0]["message"]
        assert message["reasoning_content"] in ("hm", "so", "yes")
        if more is None:
            break
        kept = {key: message[key] for key in ("role", "content", "tool_calls") if message.get(key)}
        if more["role"] == "tool":
            more["tool_call_id"] = message["tool_calls"][0]["id"]
        messages += [kept, more]
    turns = endpoint.http.get("/session/t").json()["turns"]
    assert [turn["parent"] for turn in turns] == [None, 0, None]
    trajectory = endpoint.sessions.find("", "t").make_trajectory()
    trajectory.advantage = 1.0
    datums = trajectory_to_datums(trajectory)
    drawn = sorted(token for _, answer in endpoint.engine.drawn for token in answer)
    assert len(datums) == 2 and trained_tokens(datums) == drawn


def test_history_that_was_rewritten_begins_a_branch_and_nothing_is_trained_twice(
    make_scripted_endpoint,
):
    endpoint = make_scripted_endpoint(lambda _, turn: f"Answer {turn}.", "chat_template", "qwen2.5")
    headers = {"X-Session-ID": "b"}
    messages = conversation(endpoint, 2, headers)
    chat(endpoint, messages, headers=headers)
    rewritten = [
        {**message, "content": "Summary."} if message["role"] == "assistant" else message
        for message in messages
    ]
    chat(endpoint, rewritten, headers=headers)  # a harness that shortens its history
    chat(endpoint, messages[:4], headers=headers)  # and a harness that retries an earlier turn
    assert [turn["parent"] for turn in endpoint.http.get("/session/b").json()["turns"]] == [
        None, 0, 1, None, 0,
    ]  # fmt: skip
    trajectory = endpoint.sessions.find("", "b").make_trajectory()
    trajectory.advantage = 1.0
    datums = trajectory_to_datums(trajectory)
    assert len(datums) == 3 and sum(d.episode_share for d in datums) == pytest.approx(1.0)
    assert trained_tokens(datums) == sorted(
        token for _, answer in endpoint.engine.drawn for token in answer
    )


def test_a_session_is_scored_shown_and_dropped(tiny_endpoint):
    chat(tiny_endpoint, path="/session/x", max_tokens=2)
    assert tiny_endpoint.http.post(
        "/session/x/reward", json={"reward": 0.5, "metrics": {"steps": 3}}
    ).json() == {"reward": 0.5, "turns": 1}
    for wrong in (
        {},
        {"reward": "1"},
        {"reward": math.nan},
        {"reward": 1, "metrics": {"a": None}},
        {"reward": 1, "rewrad": 2},
    ):
        reply = tiny_endpoint.http.post("/session/x/reward", content=json.dumps(wrong))
        assert reply.status_code == 400 and reply.json()["error"]["param"]
    shown = tiny_endpoint.http.get("/session/x").json()
    assert shown["reward"] == 0.5 and shown["metrics"] == {"steps": 3.0} and shown["done"]
    assert "x" in tiny_endpoint.http.get("/sessions").json()["sessions"]
    last = tiny_endpoint.sessions.find("", "x").make_trajectory().transitions[-1]
    assert last.reward == 0.5 and last.episode_done and last.metrics["steps"] == 3.0
    assert tiny_endpoint.http.delete("/session/x").json() == {"deleted": True}
    assert tiny_endpoint.http.get("/session/x").json()["error"]["code"] == "session_not_found"


def test_a_request_that_comes_again_after_a_lost_answer_is_drawn_once(tiny_endpoint):
    body = {"messages": ASK, "max_tokens": 3, "return_token_ids": True}
    first = tiny_endpoint.http.post("/session/r/v1/chat/completions", json=body).json()
    again = tiny_endpoint.http.post(
        "/session/r/v1/chat/completions", json=body, headers={"x-stainless-retry-count": "1"}
    ).json()
    restarted = tiny_endpoint.http.post("/session/r/v1/chat/completions", json=body).json()
    assert again == first and restarted["id"] != first["id"]
    assert len(tiny_endpoint.sessions.find("", "r").turns) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_retry_of_a_request_that_failed_is_sampled(make_scripted_endpoint, monkeypatch, stream):
    """The OpenAI client repeats a request after 429 and 503, with the number of the retry."""
    endpoint = make_scripted_endpoint(lambda *_: "It is so.")
    sample = endpoint.engine.sample

    async def fail(*_, **__):
        raise HttpError(503, "too many requests are open: try again")

    path, body = "/session/f/v1/chat/completions", {"messages": ASK, "stream": stream}
    monkeypatch.setattr(endpoint.engine, "sample", fail)
    assert endpoint.http.post(path, json=body).status_code == 503
    monkeypatch.setattr(endpoint.engine, "sample", sample)
    headers = {"x-stainless-retry-count": "1"}
    replies = [endpoint.http.post(path, json=body, headers=headers) for _ in range(2)]
    assert [reply.status_code for reply in replies] == [200, 200], replies[0].text
    assert len(endpoint.sessions.find("", "f").turns) == 1


def test_a_stream_that_comes_again_after_its_connection_broke_is_sampled_once(
    make_scripted_endpoint,
):
    endpoint, may_continue = make_scripted_endpoint(lambda prompt, turn: f"answer {turn}"), False
    endpoint.engine.by_character = True

    async def pace(count):
        while count > 2 and not may_continue:
            await asyncio.sleep(0.01)

    endpoint.engine.pace = pace
    path, body = "/session/r/v1/chat/completions", {"messages": ASK, "stream": True}
    with endpoint.http.stream("POST", path, json=body) as reply:
        next(reply.iter_lines())
    session = endpoint.sessions.find("", "r")
    end = time.monotonic() + 30
    while not session._disconnected and time.monotonic() < end:
        time.sleep(0.01)
    may_continue = True
    reply = endpoint.http.post(path, json=body)
    events = [
        json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")
    ]
    pieces = [event["choices"][0]["delta"].get("content") or "" for event in events]
    assert "".join(pieces) == "answer 0"
    assert len(session.turns) == 1
    endpoint.http.post(path, json=body)
    assert len(session.turns) == 2, "the same request after a complete answer is another turn"


def test_nobody_sees_anothers_session():
    from rl.serve import AgentSessions, HttpError

    sessions = AgentSessions(max_sessions=3)
    mine = sessions.get_or_create("me", "s")
    assert sessions.get_or_create("you", "s") is not mine and sessions.list_names("you") == ["s"]
    with pytest.raises(HttpError):
        sessions.find("they", "s")
    for name in "abc":
        sessions.get_or_create("me", name)
    # the session store evicts the oldest session of the key with the most sessions
    assert sessions.list_names("me") == ["b", "c"] and sessions.list_names("you") == ["s"]
    for bad in ("", "a/b", "x" * 201, "a\nb"):
        with pytest.raises(HttpError):
            sessions.get_or_create("me", bad)


def test_the_ids_of_all_turns_are_bounded():
    from rl.serve import AgentSessions

    sessions = AgentSessions(max_ids=40)
    answer = {"role": "assistant", "content": "x"}
    turn = SampledTurn([4] * 8, SampledSequence([5, 6], [-1.0, -1.0], "stop"), answer, True)
    for name in "abc":
        sessions.get_or_create("me", name).record_turn(turn)
    for _ in range(2):
        sessions.get_or_create("me", "a").record_turn(turn)
    sessions.get_or_create("me", "d")  # now 50 ids, of which b's 10 were used longest ago
    assert sessions.list_names("me") == ["c", "a", "d"]
    sessions.get_or_create("me", "d").record_turn(replace(turn, prompt=[4] * 90))
    sessions.get_or_create("me", "e")
    assert sessions.list_names("me") == ["e"], "the session of a request stays"
    sessions.get_or_create("other", "f").record_turn(replace(turn, prompt=[4] * 90))
    sessions.get_or_create("other", "f")
    assert sessions.list_names("me") == ["e"], "the ids of an owner remove no session of another"


def test_an_address_from_before_programs_had_a_package_is_resolved():
    spec = resolve_environment("rl.serve.program_env:Endpoint", program="true")
    assert spec.cls is program_env.Endpoint
