"""Test streams: every part is a prefix of the answer, sent as soon as it is sampled."""

import asyncio
import json
import threading
from functools import cache

import httpx
import pytest
from endpoints import Endpoint, ScriptedBackend, TinyBackend
from serving import BASE, server

from rl.models import load_tokenizer
from rl.renderers import get_renderer, parse_partial_answer, prompt_opens_thoughts
from rl.renderers.tool_call_formats import find_call_format
from rl.types import SamplingParams

ASK = [{"role": "user", "content": "Hello?"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
PROPERTIES = {"a": {"type": "integer"}, "text": {"type": "string"}}
TOOLS = [
    {"type": "function",
     "function": {"name": "add", "description": "Adds.",
                  "parameters": {"type": "object", "properties": PROPERTIES}}},
]  # fmt: skip
BY_PARTS = "<tool_call>\n<function=add>\n{}</function>\n</tool_call>"
ANSWERS = [
    "It is so, and so it goes on.", "  Spaces,\n\nlines \n",
    "Ünïcödé, 漢字, 🙂🙃 and a family 👨‍👩‍👧‍👦.", "<think>\nhm, 🙂\n</think>\n\nYes.", "<think>\ncut off",
    "First. <think>a</think>\nThen. <think>b</think> And <think> no end", f"I call.\n{CALL}",
    f"<think>so</think>\n\nI call.\n\n{CALL}\n{CALL}", f"Call {CALL} and text behind it.",
    "A broken <tool_call>{no json}</tool_call> call, and more.",
    'Nested <tool_call>\n{"name": "add", "arguments": {"a": [1, {"b": "}</tool_call> \\" 🙂"}], '
    '"c": {}}}\n</tool_call>',
    'Turned round <tool_call>\n{"arguments": {"a": 1}, "name": "add"}\n</tool_call>\n' + CALL,
    'Cut off <tool_call>\n{"name": "add", "arguments": {"text": "half of i',
    'No name yet <tool_call>\n{"name": "ad',
    'Broken inside <tool_call>\n{"name": "add", "arguments": {"a": 1, b}}\n</tool_call> and on',
    f"<think>I would {CALL} but no</think>\n\nNo.",
    f"<think>It calls and does not end its thoughts {CALL}",
    f"I call.\n{CALL}\n<think>hm", f"I call.\n{CALL}\n<think>hm</think>\nYes.",
    'Cut off <tool_call>\n{"name": "add", "arguments": {"text": "a <think> of i',
    "By parts\n\n"
    + BY_PARTS.format(
        "<parameter=a>\n12\n</parameter>\n<parameter=text>\nfirst\n<second> 🙂\n\n</parameter>\n"
    ),
    BY_PARTS.format("") + "\n" + BY_PARTS.format("<parameter=text>\n\n</parameter>\n"),
    "<tool_call>\n<function=add>\n<parameter=text>\nhalf of i", "a < b, <th>, <tool, <<think",
    "Stop here: lo and behold", "User: no. \n\nUser: me",
]  # fmt: skip
RENDERERS = [
    ("plain", "gpt2"), ("role_colon", "qwen2.5"), ("role_colon", "gpt2"),
    ("chat_template", "qwen2.5"), ("chat_template", "qwen3"), ("qwen3_disable_thinking", "qwen3"),
    ("chat_template", "minimind_6400"),
]  # fmt: skip


@pytest.fixture(scope="module")
def load(shared_data):
    """Return a function that loads a tokenizer of the data folder once."""
    return cache(lambda name: load_tokenizer(str(shared_data / "tokenizers" / name)))


@pytest.fixture(scope="module")
def scripted(shared_data):
    """Yield an endpoint whose answers are those of `say` of its engine, and its client."""
    folder = str(shared_data / "tokenizers" / "qwen3")
    endpoint = Endpoint(ScriptedBackend(lambda *_: "", "chat_template", folder))
    with httpx.Client(base_url=endpoint.url, timeout=60) as http:
        yield endpoint.engine, http
    endpoint.close()


@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize("name, tokenizer", RENDERERS)
def test_what_is_certain_of_an_answer_is_a_beginning_of_it(load, name, tokenizer, with_tools):
    """Check every prefix of every answer, in the tokenizer's tokens and character by character."""
    base = get_renderer(name, load(tokenizer))
    renderer = (base.with_tools(TOOLS) if with_tools else base).with_stops(["lo and", "zz"])
    assert not prompt_opens_thoughts(renderer, renderer.build_generation_prompt(ASK).to_ints())
    begun = 0
    for text in ANSWERS:
        for pieces in ([text], text):
            tokens = encode_pieces(base.tokenizer, pieces)
            last = check_prefixes(renderer, tokens, False, text)
            whole = renderer.parse_response(tokens)[0]
            # a well-formed answer: the stream shows the message that is trained on
            if not whole.get("unparsed_tool_calls") and "<think>" not in whole["content"]:
                assert read_message(last) == read_message(whole), text
            begun += bool(parse_partial_text(renderer, tokens[:-1], False)["content"])
    assert begun >= len(ANSWERS), "next to nothing is ever certain"


def test_a_call_before_thoughts_that_never_end_is_a_call(load):
    renderer = get_renderer("chat_template", load("qwen3")).with_tools(TOOLS)
    tokens = encode_pieces(load("qwen3"), [f"I call.\n{CALL}\n<think>hm"])
    expected = {"content": "I call.", "reasoning_content": "hm", "calls": [("add", '{"a": 1}')]}
    for ended in (False, True):
        assert parse_partial_text(renderer, tokens, False, ended) == expected


def encode_pieces(tokenizer, pieces):
    """Return the tokens of a text that is encoded piece by piece (a text: by character)."""
    return [t for piece in pieces for t in tokenizer.encode(piece, add_special_tokens=False)]


def stages_of(renderer, tokens, part):
    """Return the stages in which a part of an answer is shown while it is sampled."""
    return {
        json.dumps(parse_partial_text(renderer, tokens[:k], False)[part])
        for k in range(len(tokens))
    }


def parse_partial_text(renderer, tokens, within, ended=False):
    result = parse_partial_answer(renderer, tokens, within, ended)
    functions = [call["function"] for call in result.get("tool_calls", ())]
    return {
        "content": result["content"],
        "reasoning_content": result.get("reasoning_content") or "",
        "calls": [(function["name"], function["arguments"]) for function in functions],
    }


def read_message(message):
    calls = [call["function"] for call in message.get("tool_calls", ())]
    for name, arguments in message.get("calls", ()):
        calls.append({"name": name, "arguments": json.loads(arguments)})
    return message["content"], message.get("reasoning_content") or "", calls


def check_prefixes(renderer, tokens, within, text):
    """Check that each prefix shows a continuation of the last prefix; return the whole answer."""
    whole = parse_partial_text(renderer, tokens, within, ended=True)
    before = parse_partial_text(renderer, [], within)
    for k in range(1, len(tokens) + 1):
        now = parse_partial_text(renderer, tokens[:k], within) if k < len(tokens) else whole
        for later in (now, whole):
            where = (text, k, before, later)
            for name in ("content", "reasoning_content"):
                assert later[name].startswith(before[name]), where
            assert len(later["calls"]) >= len(before["calls"]), where
            calls = zip(before["calls"], later["calls"], strict=False)
            for (name, arguments), (then, longer) in calls:
                assert name == then and longer.startswith(arguments), where
        before = now
    return whole


def test_thoughts_and_arguments_go_on_as_they_are_drawn(load):
    """Thoughts and arguments are shown token by token, not only when they are complete."""
    renderer = get_renderer("chat_template", load("qwen3")).with_tools(TOOLS)
    words = "word " * 30
    for pieces, part, least in (
        (ANSWERS[7], "calls", 5),
        (ANSWERS[3], "reasoning_content", 5),
        ("<think>\none two three four", "reasoning_content", 5),
        ([CALL.replace('"a": 1', f'"text": "{words}"')], "calls", 31),
        ([BY_PARTS.format(f"<parameter=text>\n{words}\n</parameter>\n")], "calls", 31),
    ):
        stages = stages_of(renderer, encode_pieces(renderer.tokenizer, pieces), part)
        assert len(stages) >= least, (pieces, stages)


CHANNELS = (
    "{% for m in messages %}{% if m.role == 'assistant' "
    "%}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% else %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
IN_CHANNELS = [
    "<|channel|>final<|message|>Yes, and <so> on.",
    "<|channel|>analysis<|message|>hm, 🙂<|end|><|start|>assistant<|channel|>final<|message|>Yes. "
    "<|e",
    "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>I "
    "call.<|end|><|start|>assistant"
    ' to=functions.f<|channel|>commentary json<|message|>{"a": 2}',
    "<|channel|>commentary to=functions.f<|message|>no object",
    "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.f<|message|>{"text": "so and so"}',
]


def test_what_is_certain_of_messages_in_channels(shared_data):
    """gpt-oss format: no header and no part of a mark or call is ever shown."""
    tokenizer = load_tokenizer(str(shared_data / "tokenizers" / "qwen2.5"))
    tokenizer.chat_template = CHANNELS
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    renderer = get_renderer("chat_template", tokenizer)
    for text in IN_CHANNELS:
        tokens = encode_pieces(tokenizer, text)
        stages = [parse_partial_text(renderer, tokens[:k], False) for k in range(len(tokens))]
        whole = check_prefixes(renderer, tokens, False, text)
        assert not any("<|" in str(stage) for stage in stages)
        message = renderer.parse_response(tokens)[0]
        if not message.get("unparsed_tool_calls"):
            assert read_message(whole) == read_message(message) and any(stages[-1].values())
    # the stages of the last text
    assert len(stages_of(renderer, tokens, "calls")) > 5


FORMS = {  # template snippet that identifies the call format -> answers in it
    "{{- '<|tool_call>call:' + name }}": [
        'I call.\n<|tool_call>call:add{a:12,text:<|"|>so }<|"|>}<tool_call|>',
        "<|tool_call>call:add{a:1",
        "A<|tool_call>call:add{a:1}<tool_call|> B <|tool_call>broken<tool_call|>",
    ],
    '{{- "<|tool_call_start|>[" + calls }}': [
        "I call. <|tool_call_start|>[add(a=1, text='b'), add()]<|tool_call_end|>\n",
        "<|tool_call_start|>[ad",
    ],
    "<tool_call>{name}<arg_key>": [
        "\n<tool_call>add<arg_key>a</arg_key>\n<arg_value>12</arg_value>\n</tool_call>",
        "So <tool_call>add<arg_key>",
    ],
    """{{- '"parameters": ' }}""": [
        '{"name": "add", "parameters": {"a": 1}}', '{"name": "add"',
        '<|python_tag|>add.call(a="b")', '{"a": 1}', "a {",
    ],
}  # fmt: skip


@pytest.mark.parametrize("sign", FORMS)
def test_what_is_certain_of_an_answer_with_calls_of_other_forms(load, sign):
    """No part of a call is ever shown as text."""
    renderer = get_renderer("chat_template", load("qwen2.5")).with_tools(TOOLS)
    renderer._call_format = find_call_format(sign)
    for wrapped in (renderer, renderer.with_stops(["zz"])):
        for text in (*FORMS[sign], "No call <at> all, 🙂 {"):
            tokens = encode_pieces(renderer.tokenizer, text)
            whole = check_prefixes(wrapped, tokens, False, text)
            stages = [parse_partial_text(wrapped, tokens[:k], False) for k in range(len(tokens))]
            assert not any("add" in stage["content"] or stage["calls"] for stage in stages)
            assert read_message(whole) == read_message(wrapped.parse_response(tokens)[0]), text


@pytest.mark.parametrize(
    "text, content, thoughts",
    [("so, a", "", "so, a"), ("so</think>\n\nYes", "Yes", "so"), ("<think>so", "", "so")],
)
def test_thoughts_that_the_prompt_opened_are_thoughts(load, text, content, thoughts):
    renderer, encode = get_renderer("chat_template", load("qwen3")), load("qwen3").encode
    begin = renderer.build_generation_prompt(ASK).to_ints()
    prompt = [*begin, *renderer.encode("x"), *encode("<think>\n")]
    assert prompt_opens_thoughts(renderer, prompt)
    assert not prompt_opens_thoughts(renderer, [*prompt, *encode("</think>")])
    mention = [{"role": "user", "content": "What does <think> mean?"}]
    assert not prompt_opens_thoughts(renderer, renderer.build_generation_prompt(mention).to_ints())
    result = check_prefixes(renderer, encode_pieces(renderer.tokenizer, text), True, text)
    assert (result["content"], result["reasoning_content"]) == (content, thoughts)


def events(http, path, body):
    """Yield the events of a stream as they arrive."""
    with http.stream("POST", path, json={**body, "stream": True}) as reply:
        assert reply.status_code == 200, reply.read()
        assert reply.headers["content-type"].startswith("text/event-stream")
        for line in reply.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


def test_a_token_is_sent_while_the_next_is_not_drawn_yet(scripted, monkeypatch):
    """Before each token, the model waits until the client has read the text of the last token."""
    (desk, http), read, waited, pieces = scripted, threading.Semaphore(0), [], []

    async def pace(drawn):
        if drawn and "It is so."[drawn - 1] != " ":  # a space is sent with the next token
            waited.append(await asyncio.to_thread(read.acquire, timeout=30))

    monkeypatch.setattr(desk, "pace", pace)
    monkeypatch.setattr(desk, "say", lambda *_: "It is so.")
    monkeypatch.setattr(desk, "by_character", True)
    for event in events(http, CHAT, {"messages": ASK}):
        if event["choices"][0]["delta"].get("content"):
            pieces.append(event["choices"][0]["delta"]["content"])
            read.release()
    assert pieces == ["I", "t", " i", "s", " s", "o", "."] and waited == [True] * len(pieces)


@pytest.mark.parametrize("text", ANSWERS, ids=range(len(ANSWERS)))
def test_a_stream_of_any_answer_put_together_is_the_whole(scripted, monkeypatch, text):
    desk, http = scripted
    monkeypatch.setattr(desk, "say", lambda *_: text)
    body = {"messages": ASK, "tools": TOOLS, "logprobs": True, "return_token_ids": True}
    body["stop"] = "lo and"
    (whole,) = http.post(CHAT, json=body).json()["choices"]
    results = [event["choices"][0] for event in events(http, CHAT, body)]
    plain_body = {"prompt": "a", "stop": "lo and", "echo": True}
    plain = [event["choices"][0] for event in events(http, TEXT, plain_body)]
    (text_whole,) = http.post(TEXT, json=plain_body).json()["choices"]
    message = whole["message"]
    for field in ("content", "reasoning_content"):
        joined = "".join(item["delta"].get(field) or "" for item in results)
        assert joined == (message.get(field) or "")
    calls = []
    for call in [call for item in results for call in item["delta"].get("tool_calls", [])]:
        if call["index"] == len(calls):
            calls.append({"id": call["id"], "type": call["type"], "name": call["function"]["name"],
                          "arguments": ""})  # fmt: skip
        calls[call["index"]]["arguments"] += call["function"]["arguments"]
    assert len({call.pop("id") for call in calls}) == len(calls)
    whole_calls = message.get("tool_calls", [])
    assert calls == [{**call["function"], "type": "function"} for call in whole_calls]
    reasons = [item["finish_reason"] for item in results]
    assert reasons == [None] * (len(results) - 1) + [whole["finish_reason"]]
    assert [token for item in results for token in item.get("token_ids", [])] == whole["token_ids"]
    with_logprobs = [item["logprobs"] for item in results if item["logprobs"]]
    entries = [entry for logprobs in with_logprobs for entry in logprobs["content"]]
    assert entries == whole["logprobs"]["content"]
    assert "".join(item["text"] for item in plain) == text_whole["text"]
    assert plain[-1]["finish_reason"] == text_whole["finish_reason"]


def test_several_completions_are_streamed_side_by_side():
    endpoint = Endpoint(TinyBackend())
    body = {"prompt": ["ab", [5, 6]], "n": 2, "max_tokens": 6, "seed": 3, "echo": True}
    body["logprobs"] = 0
    try:
        with httpx.Client(base_url=endpoint.url, timeout=60) as http:
            whole = http.post(TEXT, json=body).json()["choices"]
            results = [event["choices"][0] for event in events(http, TEXT, body)]
    finally:
        endpoint.close()
    for choice in whole:
        reference = [item for item in results if item["index"] == choice["index"]]
        assert "".join(item["text"] for item in reference) == choice["text"] and len(reference) > 3
        assert reference[-1]["logprobs"]["tokens"] == choice["logprobs"]["tokens"]
        assert reference[-1]["finish_reason"] == choice["finish_reason"]
        logprobs = [item["logprobs"]["token_logprobs"] for item in (reference[-1], choice)]
        # a batch of another size sums in another order
        assert logprobs[0][1:] == pytest.approx(logprobs[1][1:], abs=1e-5)


def test_the_desk_shows_what_it_has_drawn_and_draws_the_same(tmp_path):
    with server(tmp_path) as served:
        params, shown = SamplingParams(max_tokens=24, seed=1, stop=[]), []

        def sample(**show):
            request = served.model_manager.sample(BASE, [5, 6, 7], 2, params, **show)
            return asyncio.run(request).sequences

        whole, seen = sample(), sample(show=shown.append)
        gone = sample(show=lambda samples: 1 / 0)  # a failing `show` loses no answer
    for sequences in (seen, gone):
        assert [item.tokens for item in sequences] == [item.tokens for item in whole]
    lengths = [{i: len(item.tokens) for i, item in samples.items()} for samples in shown]
    assert lengths == [{0: n, 1: n} for n in (4, 8, 12, 16, 20)]
    for i, item in [pair for samples in shown for pair in samples.items()]:
        n = len(item.tokens)
        assert item.tokens == whole[i].tokens[:n] and item.logprobs == whole[i].logprobs[:n]
