"""Test the OpenAI-style routes over plain HTTP."""

import asyncio
import json
import math
import sys
from dataclasses import replace

import httpx
import pytest
from endpoints import Endpoint, ScriptedBackend, TinyBackend
from serving import until
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rl.envs import resolve_environment
from rl.errors import BadRequestError, ContextLengthError
from rl.programs import program_env
from rl.rollout import trajectory_to_datums
from rl.serve import AgentSession, AgentSessions, HttpError, SampledTurn
from rl.serve.http_errors import to_http_error
from rl.types import ModelInput, SampledSequence, SamplingParams

ASK = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello?"}]
TOOLS = [
    {"type": "function",
     "function": {"name": "add", "description": "Adds.",
                  "parameters": {"type": "object", "properties": {}}}},
]  # fmt: skip


@pytest.fixture(scope="module")
def tiny():
    endpoint = Endpoint(TinyBackend())
    with httpx.Client(base_url=endpoint.url, timeout=60) as client:
        endpoint.http = client
        yield endpoint
    endpoint.close()


@pytest.fixture
def make_scripted(shared_data):
    """Return `make(say, renderer, tokenizer)`, which builds an endpoint with scripted answers."""
    made = []

    def make(say, renderer="chat_template", tokenizer="qwen3"):
        folder = None if tokenizer is None else str(shared_data / "tokenizers" / tokenizer)
        endpoint = Endpoint(ScriptedBackend(say, renderer, folder))
        endpoint.http = httpx.Client(base_url=endpoint.url, timeout=60)
        made.append(endpoint)
        return endpoint

    yield make
    for endpoint in made:
        endpoint.http.close()
        endpoint.close()


def chat(endpoint, messages=ASK, path="", headers=None, **body):
    body = {"messages": messages, **body}
    reply = endpoint.http.post(f"{path}/v1/chat/completions", json=body, headers=headers or {})
    assert reply.status_code == 200, reply.text
    return reply.json()


def draw(endpoint, prompt, count=1, **params):
    """Return the sequences that the model's client draws without the server."""
    prompt = ModelInput.from_ints(prompt) if isinstance(prompt, list) else prompt
    return endpoint.engine.client.sample(prompt, count, SamplingParams(**params)).result().sequences


# ------------------------------------------------------------------------------------------ answers


def test_answers_are_the_clients_own_to_the_bit(tiny):
    options = {"n": 3, "seed": 7, "temperature": 0.7, "max_tokens": 6}
    text = chat(tiny, **options, logprobs=True, return_token_ids=True)
    renderer = tiny.engine._renderer
    prompt = renderer.build_generation_prompt(ASK)
    reference = draw(tiny, prompt, 3, max_tokens=6, temperature=0.7, seed=7, stop=[1])
    assert text["prompt_token_ids"] == prompt.to_ints() and text["object"] == "chat.completion"
    assert [choice["index"] for choice in text["choices"]] == [0, 1, 2]
    for choice, sequence in zip(text["choices"], reference, strict=True):
        content = choice["logprobs"]["content"]
        assert choice["token_ids"] == sequence.tokens
        assert [item["logprob"] for item in content] == sequence.logprobs
        assert [item["token"] for item in content] == [f"token_id:{t}" for t in sequence.tokens]
        assert choice["finish_reason"] == sequence.stop_reason
        parsed, _ = renderer.parse_response(sequence.tokens)
        assert choice["message"]["content"] == parsed["content"]
    drawn = sum(len(sequence.tokens) for sequence in reference)
    assert text["usage"] == {
        "prompt_tokens": prompt.length, "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens": drawn, "total_tokens": prompt.length + drawn,
    }  # fmt: skip
    params = {**options, "logprobs": 1, "stop_token_ids": [1]}
    body = {"token_ids": prompt.to_ints(), "sampling_params": params}
    ids = tiny.http.post("/inference/v1/generate", json=body).json()
    assert ids["prompt_token_ids"] == prompt.to_ints()
    for choice, sequence in zip(ids["choices"], reference, strict=True):
        assert choice["token_ids"] == sequence.tokens
        assert [item["logprob"] for item in choice["logprobs"]["content"]] == sequence.logprobs
    assert ids["choices"][0]["finish_reason"] == reference[0].stop_reason


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.3}, {"top_k": 3}, {"top_k": 8, "top_p": 0.5}])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 2.0])
def test_logprobs_are_of_the_untruncated_distribution_at_the_temperature(tiny, temperature, cut):
    """The logprobs match the model's scores (of greedy answers: at temperature 1)."""
    text = chat(
        tiny, seed=3, temperature=temperature, max_tokens=4, logprobs=True, top_logprobs=4,
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
    scores = tiny.engine.client.compute_logprobs_many(sequences, temperature or 1.0).result()
    assert results == pytest.approx([score[-1] for score in scores], abs=2e-5)


def test_a_stream_put_together_is_the_whole(tiny):
    body = {
        "messages": ASK, "seed": 5, "max_tokens": 9, "n": 2, "logprobs": True,
        "return_token_ids": True,
    }  # fmt: skip
    whole = tiny.http.post("/v1/chat/completions", json=body).json()
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    with tiny.http.stream("POST", "/v1/chat/completions", json=streamed) as reply:
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


def test_tools_are_called_and_answered(make_scripted):
    text = iter(['<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "ü"]}}\n</tool_call>',
                 "It is 3.", "No tools."])  # fmt: skip
    endpoint = make_scripted(lambda *_: next(text))
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
    assert "<tool_response>\n3\n</tool_response>" in endpoint.engine._tokenizer.decode(two)
    third = chat(endpoint, tools=TOOLS, tool_choice="none")
    assert third["choices"][0]["message"]["content"] == "No tools."
    assert "Adds." not in endpoint.engine._tokenizer.decode(endpoint.engine.drawn[-1][0])


@pytest.mark.parametrize("wish", [{"stop": "lo"}, {"stop": ["zz", "lo"]}])
def test_a_stop_text_ends_an_answer_and_is_no_part_of_it(make_scripted, wish):
    # The script plays the sampler: its answer ends with the stop text.
    endpoint = make_scripted(lambda *_: "Hello...")
    endpoint.engine.reason = "stop"
    choice = chat(endpoint, **wish)["choices"][0]
    assert choice["message"]["content"] == "Hel" and choice["finish_reason"] == "stop"
    body = {"prompt": "x", **wish}
    assert endpoint.http.post("/v1/completions", json=body).json()["choices"][0]["text"] == "Hel"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_id_ends_an_answer_and_is_no_part_of_it(tiny, stream):
    options = {"seed": 1, "max_tokens": 12}
    free = chat(tiny, **options, return_token_ids=True)
    ids = free["choices"][0]["token_ids"]
    k = next(i for i in range(2, len(ids)) if ids[i] not in ids[:i])
    text = tiny.engine.client.get_tokenizer().decode(ids[:k])
    body = {"messages": ASK, **options, "stop_token_ids": [ids[k]], "stream": stream}
    reply = tiny.http.post("/session/stop-id/v1/chat/completions", json=body)
    if stream:
        lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
        deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
        assert "".join(delta.get("content") or "" for delta in deltas) == text
    else:
        assert reply.json()["choices"][0]["message"]["content"] == text
    session = tiny.sessions.find("", "stop-id")
    turn = session.turns[-1]
    assert turn.sequence.tokens == ids[: k + 1]  # which training needs
    assert turn.answer["content"] == text and turn.is_complete


@pytest.mark.parametrize("stream", [False, True])
def test_a_continuation_begins_with_its_space(make_scripted, tmp_path, stream):
    """Llama 2's tokenizer, as others of SentencePiece, drops the first space of a text."""
    words = ["<unk>", "</s>", "▁It", "▁is", "▁so", "▁", "s"]
    model = models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")
    fast.save_pretrained(tmp_path)
    assert fast.decode([3, 4]) == "is so"
    endpoint = make_scripted(lambda *_: "is so", "plain", str(tmp_path))
    body = {"prompt": "It", "stream": stream, "echo": True}
    reply = endpoint.http.post("/v1/completions", json=body)
    if stream:
        lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
        text = "".join(json.loads(line)["choices"][0]["text"] for line in lines)
    else:
        text = reply.json()["choices"][0]["text"]
    ((prompt, tokens),) = endpoint.engine.drawn
    assert text == "It is so" == fast.decode([*prompt, *tokens[:-1]])


# ------------------------------------------------------------------------------------------ scoring


@pytest.mark.parametrize("most", [0, 1])
def test_loglikelihoods_as_a_harness_asks_for_them(tiny, most):
    """Send requests and read scores as lm-evaluation-harness's local-completions does."""
    (greedy,) = draw(tiny, [20, 30], max_tokens=3, temperature=0.0, stop=[])
    rows = [([20, 30], greedy.tokens), ([5], [9, 9]), ([40, 41, 42], [7])]
    wholes = [[*context, *answer] for context, answer in rows]
    body = {
        "model": "tiny:ascii", "prompt": wholes, "echo": True, "logprobs": 1, "temperature": 0,
        "max_tokens": most, "seed": 1234,
    }  # fmt: skip
    output = tiny.http.post("/v1/completions", json=body)
    assert output.status_code == 200, output.text
    choices = sorted(output.json()["choices"], key=lambda first: first["index"])
    inputs = [ModelInput.from_ints(whole) for whole in wholes]
    reference = tiny.engine.client.compute_logprobs_many(inputs).result()
    for (context, answer), choice, scores in zip(rows, choices, reference, strict=True):
        end, actual = len(context) + len(answer), choice["logprobs"]
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        assert [len(actual[name]) for name in names] == [end + most] * 4
        assert actual["token_logprobs"][0] is actual["top_logprobs"][0] is scores[0] is None
        # Equal to float32 rounding: arrival times decide which requests share a forward pass.
        assert actual["token_logprobs"][1:end] == pytest.approx(scores[1:], abs=1e-5)
        pairs = list(zip(actual["tokens"], actual["top_logprobs"], strict=True))[len(context) : end]
        assert all(max(top, key=top.get) == token for token, top in pairs) == (answer is rows[0][1])
        if most == 0:
            assert choice["text"] == tiny.engine.client.get_tokenizer().decode([*context, *answer])


def test_several_texts_are_continued(tiny):
    body = {
        "prompt": ["ab", "12+3"], "n": 2, "max_tokens": 3, "seed": 1, "temperature": 1.5,
        "logprobs": 0, "return_token_ids": True,
    }  # fmt: skip
    choices = tiny.http.post("/v1/completions", json=body).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    for p, text in enumerate(body["prompt"]):
        prompt = tiny.engine.client.get_tokenizer().encode(text)
        reference = draw(tiny, prompt, 2, max_tokens=3, seed=1, temperature=1.5)
        for choice, sequence in zip(choices[2 * p : 2 * p + 2], reference, strict=True):
            assert choice["token_ids"] == sequence.tokens and choice["prompt_token_ids"] == prompt
            # Equal to float32 rounding: here both prompts share a batch, in the reference each has
            # a batch.
            logprobs = pytest.approx(sequence.logprobs, abs=1e-5)
            assert choice["logprobs"]["token_logprobs"] == logprobs
            assert choice["logprobs"]["top_logprobs"] is None


def test_models_say_how_long_prompt_and_answer_may_be(tiny):
    (model,) = tiny.http.get("/v1/models").json()["data"]
    longest = model["max_model_len"]
    assert model["id"] == "tiny:ascii"
    assert tiny.http.get("/v1/models/tiny:ascii").json() == model
    assert tiny.http.get("/v1/models/other").json()["error"]["code"] == "model_not_found"
    for length, status in ((longest - 1, 200), (longest, 400)):
        body = {"prompt": [5] * length, "max_tokens": 1}
        reply = tiny.http.post("/v1/completions", json=body)
        assert reply.status_code == status
    assert reply.json()["error"]["code"] == "context_length_exceeded"


def test_only_a_prompt_beyond_the_context_has_the_code_of_it():
    advice = "max_tokens=None samples up to the context's end, and this model has no limit"
    for kind, code in ((BadRequestError, None), (ContextLengthError, "context_length_exceeded")):
        assert to_http_error(kind(advice)).code == code


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_likely_tokens_of_an_answer_that_ends_with_the_context(tiny, path):
    """The likeliest token at the last position is the greedy sample after the tokens before it."""
    (model,) = tiny.http.get("/v1/models").json()["data"]
    longest, k = model["max_model_len"], 3
    asks = {
        "/v1/completions": {"prompt": [5] * (longest - 4), "max_tokens": 4, "logprobs": k},
        "/v1/chat/completions": {"messages": ASK, "logprobs": True, "top_logprobs": k},
    }
    body = {"seed": 2, "logit_bias": {"1": -100}, "return_token_ids": True, **asks[path]}
    reply = tiny.http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    prompt = choice.get("prompt_token_ids") or reply.json()["prompt_token_ids"]
    tokens = [*prompt, *choice["token_ids"]]
    assert len(tokens) == longest
    (greedy,) = draw(tiny, tokens[:-1], max_tokens=1, temperature=0.0, stop=[])
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
    (CHAT, {"guided_regex": "a*"}, "guided_regex"),
    (CHAT, {"structured_outputs": {"json": {}}}, "structured_outputs"),
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
    (CHAT, {"stream": True, "stream_options": 3}, "stream_options"),
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
    (CHAT, {"parallel_tool_calls": False}, "parallel_tool_calls"),
    (TEXT, {"max_tokens": 0}, "max_tokens"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": [[5], [-1]]}, "prompt[1]"),
    (TEXT, {"suffix": "z"}, "suffix"),
    (TEXT, {"best_of": 3}, "best_of"),
    (TEXT, {"best_of": ["x"]}, "best_of"),
    (TEXT, {"logprobs": 99}, "logprobs"),
    (IDS, {"token_ids": "abc"}, "token_ids"),
    (IDS, {"sampling_params": {"prompt_logprobs": 1}}, "sampling_params.prompt_logprobs"),
    (IDS, {"sampling_params": {"min_tokens": -1}}, "sampling_params.min_tokens"),
]  # fmt: skip


@pytest.mark.parametrize("path, body, named", REFUSED)
def test_what_is_not_supported_is_refused_by_name(tiny, path, body, named):
    before = len(tiny.engine.requests_seen)
    reply = tiny.http.post(path, json={**FINE[path], **body})
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == named
    assert named.split(".")[-1].split("[")[0] in error["message"]
    assert len(tiny.engine.requests_seen) == before
    if named in ("response_format", "guided_json", "structured_outputs", "tool_choice"):
        assert "not constrain the model to a grammar" in error["message"]  # and the remedy
        assert "in the messages" in error["message"]


HOW = {
    "min_p": {"min_p": 0.3},
    "bias": {"logit_bias": {"5": 6.5, "7": -100}},
    "least": {"min_tokens": 6},
    "on": {"ignore_eos": True},
    "penalties": {"presence_penalty": 1, "frequency_penalty": 1.5, "repetition_penalty": 1.4},
}  # fmt: skip


@pytest.mark.parametrize("mode", HOW)
def test_how_tokens_are_drawn_is_the_clients_own_to_the_bit(tiny, mode):
    """Every route samples the same tokens as the client; logprobs ignore biases and truncation."""
    body, prompt = HOW[mode], [5, 9, 6]
    same = {"n": 4, "seed": 3, "max_tokens": 8, "temperature": 0.8, **body}
    usual = {"max_tokens": 8, "temperature": 0.8, "seed": 3, "untruncated_logprobs": True}
    plain, params = draw(tiny, prompt, 4, **usual), dict(body)
    if "logit_bias" in body:
        params["logit_bias"] = {int(token): value for token, value in body["logit_bias"].items()}
    reference = draw(tiny, prompt, 4, **usual, **params)
    options = {"prompt": prompt, "return_token_ids": True, "logprobs": 0}
    text = tiny.http.post(TEXT, json={**options, **same}).json()
    ids = tiny.http.post(IDS, json={"token_ids": prompt, "sampling_params": same}).json()
    for output in (text, ids):
        tokens = [choice["token_ids"] for choice in output["choices"]]
        assert tokens == [sequence.tokens for sequence in reference]
    inputs = [ModelInput.from_ints([*prompt, *item.tokens]) for item in reference]
    whole = tiny.engine.client.compute_logprobs_many(inputs, 0.8).result()
    for choice, values in zip(text["choices"], whole, strict=True):
        expected = pytest.approx(values[len(prompt) :], abs=1e-4)
        assert choice["logprobs"]["token_logprobs"] == expected
    if mode in ("min_p", "bias", "penalties"):
        assert [item.tokens for item in reference] != [item.tokens for item in plain]
    elif mode == "least":
        assert all(1 not in item.tokens[:6] for item in reference)


def test_a_chat_takes_them_too(tiny):
    options = {"min_p": 0.2, "min_tokens": 4, "seed": 1, "max_tokens": 6}
    text = chat(tiny, **options, logit_bias={"5": 4}, return_token_ids=True, logprobs=True)
    prompt = tiny.engine._renderer.build_generation_prompt(ASK)
    options |= {"stop": [1], "logit_bias": {5: 4.0}, "untruncated_logprobs": True}
    (reference,) = draw(tiny, prompt, **options)
    (choice,) = text["choices"]
    assert choice["token_ids"] == reference.tokens
    assert [item["logprob"] for item in choice["logprobs"]["content"]] == reference.logprobs


def test_chat_template_kwargs_reach_the_template(make_scripted):
    """The prompt equals that of transformers' chat template."""
    endpoint = make_scripted(lambda *_: "hm")
    tokenizer = endpoint.engine._renderer.tokenizer
    for settings in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
        text = chat(endpoint, chat_template_kwargs=settings, return_token_ids=True)
        options = {"add_generation_prompt": True, "return_dict": False, **settings}
        assert text["prompt_token_ids"] == tokenizer.apply_chat_template(ASK, **options)
    for name in ("enable_thinkng", "messages", "add_generation_prompt"):
        body = {"messages": ASK, "chat_template_kwargs": {name: 1}}
        reply = endpoint.http.post(CHAT, json=body)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "chat_template_kwargs"
        assert name in reply.json()["error"]["message"]


def test_what_asks_for_nothing_is_taken(tiny):
    neutral = {
        "min_p": 0, "min_tokens": 0, "ignore_eos": False, "chat_template_kwargs": {},
        "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {},
        "response_format": {"type": "text"}, "user": "me", "metadata": {"a": "b"}, "store": False,
        "parallel_tool_calls": True, "stop": None, "tools": [], "seed": 3,
    }  # fmt: skip
    assert chat(tiny, max_tokens=2, **neutral)["choices"]


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


def make_datums(endpoint, session):
    """Return the datums of a session, and their trained tokens in order."""
    trajectory = endpoint.sessions.find("", session).make_trajectory()
    trajectory.advantage = 1.0
    datums, trained = trajectory_to_datums(trajectory), []
    for fields in (datum.loss_fn_inputs for datum in datums):
        trained += fields["target_tokens"].array[fields["mask"].array > 0].tolist()
    return datums, trained


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
    make_scripted, renderer, tokenizer, parents
):
    """Answers consist of one token per character, which no tokenizer would choose."""
    endpoint = make_scripted(lambda *_: "It is so.", renderer, tokenizer)
    endpoint.engine.by_character = True
    conversation(endpoint, 3, {"X-Session-ID": "s"})
    transitions = endpoint.sessions.find("", "s").make_trajectory().transitions
    prompts, answers = map(list, zip(*endpoint.engine.drawn, strict=True))
    assert [turn.ac.tokens for turn in transitions] == answers
    assert [turn.ob.to_ints() for turn in transitions] == prompts
    datums, trained = make_datums(endpoint, "s")
    assert trained == [token for answer in answers for token in answer]
    assert len(datums) == parents.count(None)
    turns = endpoint.http.get("/session/s").json()["turns"]
    assert [turn["parent"] for turn in turns] == parents
    assert [turn["token_ids"] for turn in turns] == answers


def test_thoughts_that_clients_drop_are_read_as_the_template_says(make_scripted):
    """Qwen3's template drops thoughts after a user message and keeps them after a tool message."""
    call = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    text = iter([call, "<think>\nso\n</think>\n\nIt is 3.", "<think>\nyes\n</think>\n\nBye."])
    endpoint = make_scripted(lambda *_: next(text))
    messages, thoughts = [*ASK], []
    for more in ({"role": "tool", "content": "3"}, {"role": "user", "content": "Thanks."}, {}):
        message = chat(endpoint, messages, path="/session/t", tools=TOOLS)["choices"][0]["message"]
        thoughts.append(message["reasoning_content"])
        kept = {key: message[key] for key in ("role", "content", "tool_calls") if message.get(key)}
        if more.get("role") == "tool":
            more["tool_call_id"] = message["tool_calls"][0]["id"]
        messages += [kept, more]
    assert thoughts == ["hm", "so", "yes"]
    turns = endpoint.http.get("/session/t").json()["turns"]
    assert [turn["parent"] for turn in turns] == [None, 0, None]
    datums, trained = make_datums(endpoint, "t")
    drawn = sorted(token for _, answer in endpoint.engine.drawn for token in answer)
    assert len(datums) == 2 and sorted(trained) == drawn


def test_history_that_was_rewritten_begins_a_branch_and_nothing_is_trained_twice(make_scripted):
    endpoint = make_scripted(lambda _, turn: f"Answer {turn}.", "chat_template", "qwen2.5")
    headers = {"X-Session-ID": "b"}
    messages = conversation(endpoint, 2, headers)
    chat(endpoint, messages, headers=headers)
    rewritten = [
        {**message, "content": "Summary."} if message["role"] == "assistant" else message
        for message in messages
    ]
    chat(endpoint, rewritten, headers=headers)  # a harness that shortens its history
    chat(endpoint, messages[:4], headers=headers)  # and a harness that retries an earlier turn
    turns = endpoint.http.get("/session/b").json()["turns"]
    assert [turn["parent"] for turn in turns] == [None, 0, 1, None, 0]
    datums, trained = make_datums(endpoint, "b")
    assert len(datums) == 3 and sum(d.episode_share for d in datums) == pytest.approx(1.0)
    drawn = sorted(token for _, answer in endpoint.engine.drawn for token in answer)
    assert sorted(trained) == drawn


def make_turn(prompt, messages=None):
    answer = {"role": "assistant", "content": "x"}
    return SampledTurn(prompt, SampledSequence([5], [-1.0]), answer, True, messages)


def count_calls_of_to_json(num_turns):
    """Return the number of calls of C functions that show a chat."""
    session, count = AgentSession(), 0
    for i in range(num_turns):
        session.record_turn(make_turn([5] * (i + 1)))

    def add(frame, event, argument):
        nonlocal count
        count += event == "c_call"

    sys.setprofile(add)
    try:
        turns = session.to_json()["turns"]
    finally:
        sys.setprofile(None)
    assert [turn["parent"] for turn in turns] == [None, *range(num_turns - 1)]
    return count


def test_turns_of_a_chat_are_not_compared_with_all_others():
    assert count_calls_of_to_json(800) < 16 * count_calls_of_to_json(100)


def test_a_turn_is_shown_once_it_is_complete():
    """Another thread may show the session at any time."""
    session, shown = AgentSession(), []

    class Messages(list):
        def __iter__(self):
            shown.extend(session.to_json()["turns"])
            return super().__iter__()

    session.record_turn(make_turn([4], Messages(ASK)))
    result = session.to_json()
    session.metrics["later"] = 1.0
    assert not shown and result["turns"][0]["new_messages"] == ASK and not result["metrics"]


def test_a_session_is_scored_shown_and_dropped(tiny):
    chat(tiny, path="/session/x", max_tokens=2)
    scored = {"reward": 0.5, "metrics": {"steps": 3}}
    reply = tiny.http.post("/session/x/reward", json=scored)
    assert reply.json() == {"reward": 0.5, "turns": 1}
    for wrong in (
        {}, {"reward": "1"}, {"reward": math.nan}, {"reward": 1, "metrics": {"a": None}},
        {"reward": 1, "rewrad": 2},
    ):  # fmt: skip
        reply = tiny.http.post("/session/x/reward", content=json.dumps(wrong))
        assert reply.status_code == 400 and reply.json()["error"]["param"], wrong
    shown = tiny.http.get("/session/x").json()
    assert shown["reward"] == 0.5 and shown["metrics"] == {"steps": 3.0} and shown["done"]
    assert tiny.http.post("/session/refused/v1/chat/completions", json={}).status_code == 400
    names = tiny.http.get("/sessions").json()["sessions"]
    assert "x" in names and "refused" not in names
    last = tiny.sessions.find("", "x").make_trajectory().transitions[-1]
    assert last.reward == 0.5 and last.episode_done and last.metrics["steps"] == 3.0
    assert tiny.http.delete("/session/x").json() == {"deleted": True}
    assert tiny.http.get("/session/x").json()["error"]["code"] == "session_not_found"


def test_a_request_that_comes_again_after_a_lost_answer_is_drawn_once(tiny):
    ask = {"path": "/session/r", "max_tokens": 3, "return_token_ids": True}
    first = chat(tiny, **ask)
    again = chat(tiny, **ask, headers={"x-stainless-retry-count": "1"})
    restarted = chat(tiny, **ask)
    assert again == first and restarted["id"] != first["id"]
    assert len(tiny.sessions.find("", "r").turns) == 2


def test_broken_connections_whose_requests_do_not_come_again_are_forgotten():
    session = AgentSession()

    async def sample():
        return 1

    async def script():
        for i in range(50):
            await session.run_once(b"%d" % i, False, sample)
            session.mark_disconnected(b"%d" % i)

    asyncio.run(script())
    assert len(session._disconnected) < 20


@pytest.mark.parametrize("stream", [False, True])
def test_a_retry_of_a_request_that_failed_is_sampled(make_scripted, monkeypatch, stream):
    """The OpenAI client repeats a request after 429 and 503, with the number of the retry."""
    endpoint = make_scripted(lambda *_: "It is so.")
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


def test_a_stream_that_comes_again_after_its_connection_broke_is_sampled_once(make_scripted):
    endpoint, may_continue = make_scripted(lambda prompt, turn: f"answer {turn}"), False
    endpoint.engine.by_character = True

    async def pace(count):
        while count > 2 and not may_continue:
            await asyncio.sleep(0.01)

    endpoint.engine.pace = pace
    path, body = "/session/r/v1/chat/completions", {"messages": ASK, "stream": True}
    with endpoint.http.stream("POST", path, json=body) as reply:
        next(reply.iter_lines())
    session = endpoint.sessions.find("", "r")
    assert until(lambda: session._disconnected, 30)
    may_continue = True
    lines = endpoint.http.post(path, json=body).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    pieces = [event["choices"][0]["delta"].get("content") or "" for event in events]
    assert "".join(pieces) == "answer 0"
    assert len(session.turns) == 1
    endpoint.http.post(path, json=body)
    assert len(session.turns) == 2, "the same request after a complete answer is another turn"


def test_nobody_sees_anothers_session():
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
