"""Streams: what is sent while an answer is drawn is a beginning of it, comes when it is drawn, and put together is the whole."""

import asyncio
import json
import threading

import httpx
import pytest

pytest.importorskip("starlette", reason="needs requirements-serve.txt")
pytest.importorskip("uvicorn", reason="needs requirements-serve.txt")

from endpoints import Endpoint, ScriptedDesk, TinyDesk  # noqa: E402
from serving import BASE, server  # noqa: E402

from rl.models import load_tokenizer  # noqa: E402
from rl.renderers import StopsAt, get_renderer, opens_thoughts, parse_begun  # noqa: E402
from rl.types import SamplingParams  # noqa: E402

ASK = [{"role": "user", "content": "Hello?"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}}]
ANSWERS = [
    "It is so, and so it goes on.",
    "  Spaces,\n\nlines \n",
    "Ünïcödé, 漢字, 🙂🙃 and a family 👨‍👩‍👧‍👦.",
    "<think>\nhm, 🙂\n</think>\n\nYes.",
    "<think>\ncut off",
    "First. <think>a</think>\nThen. <think>b</think> And <think> no end",
    f"I call.\n{CALL}",
    f"<think>so</think>\n\nI call.\n\n{CALL}\n{CALL}",
    f"Call {CALL} and text behind it.",
    "A broken <tool_call>{no json}</tool_call> call, and more.",
    "a < b, <th>, <tool, <<think",
    "Stop here: lo and behold",
    "User: no. \n\nUser: me",
]
RENDERERS = [("plain", "gpt2"), ("role_colon", "qwen2.5"), ("role_colon", "gpt2"), ("chat_template", "qwen2.5"), ("chat_template", "qwen3"),
             ("qwen3_disable_thinking", "qwen3"), ("chat_template", "minimind_6400")]  # fmt: skip


@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize("name, tokenizer", RENDERERS)
def test_what_is_certain_of_an_answer_is_a_beginning_of_it(shared_data, name, tokenizer, with_tools):
    """Every prefix of every answer, in the tokenizer's own tokens and one character at a time."""
    base = get_renderer(name, load_tokenizer(str(shared_data / "tokenizers" / tokenizer)))
    renderer = StopsAt(base.with_tools(TOOLS) if with_tools else base, ["lo and", "zz"])
    within = opens_thoughts(renderer, renderer.build_generation_prompt(ASK).to_ints())
    assert not within
    shown = 0
    for text in ANSWERS:
        for pieces in ([text], list(text)):
            tokens = [token for piece in pieces for token in base.tokenizer.encode(piece, add_special_tokens=False)]
            whole, before = renderer.parse_response(tokens)[0], {"content": "", "reasoning_content": ""}
            for k in range(len(tokens)):
                found = parse_begun(renderer, tokens[:k], within)
                for field, earlier in before.items():
                    now = str(found.get(field) or "")
                    assert now.startswith(earlier) and str(whole.get(field) or "").startswith(now), (text, k, field)
                    before[field] = now
            shown += bool(before["content"])
    assert shown >= len(ANSWERS), "next to nothing is ever certain"


CHANNELS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% else %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
IN_CHANNELS = [
    "<|channel|>final<|message|>Yes, and <so> on.",
    "<|channel|>analysis<|message|>hm, 🙂<|end|><|start|>assistant<|channel|>final<|message|>Yes. <|e",
    "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>I call.<|end|><|start|>assistant"
    ' to=functions.f<|channel|>commentary json<|message|>{"a": 2}',
]


def test_what_is_certain_of_messages_in_channels(shared_data):
    """gpt-oss' form: no header, no part of a mark and no call is ever shown, whichever prefix is read."""
    tokenizer = load_tokenizer(str(shared_data / "tokenizers" / "qwen2.5"))
    tokenizer.chat_template = CHANNELS
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    renderer = get_renderer("chat_template", tokenizer)
    for text in IN_CHANNELS:
        tokens = [token for piece in text for token in tokenizer.encode(piece, add_special_tokens=False)]
        whole, shown = renderer.parse_response(tokens)[0], []
        for k in range(len(tokens)):
            found = parse_begun(renderer, tokens[:k], False)
            for name in ("content", "reasoning_content"):
                assert str(whole.get(name) or "").startswith(str(found.get(name) or "")), (text, k, name)
            shown.append(found["content"])
        assert all(later.startswith(earlier) for earlier, later in zip(shown, shown[1:], strict=False)) and shown[-1]


def test_thoughts_that_the_prompt_opened_are_held_until_they_end(shared_data):
    renderer = get_renderer("chat_template", load_tokenizer(str(shared_data / "tokenizers" / "qwen3")))
    prompt = [*renderer.build_generation_prompt(ASK).to_ints(), *renderer.encode("x"), *renderer.tokenizer.encode("<think>\n")]
    assert opens_thoughts(renderer, prompt) and not opens_thoughts(renderer, [*prompt, *renderer.tokenizer.encode("</think>")])
    for text, content, thoughts in (("so, a", "", None), ("so</think>\n\nYes", "Yes", "so")):
        found = parse_begun(renderer, renderer.tokenizer.encode(text), True)
        assert (found["content"], found.get("reasoning_content")) == (content, thoughts)


def events(http, path, body):
    """Of a stream, as they come."""
    with http.stream("POST", path, json={**body, "stream": True}) as reply:
        assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream"), reply.read()
        for line in reply.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


def test_a_token_is_sent_while_the_next_is_not_drawn_yet(shared_data):
    """The model waits, before each token, until the client has read so much of its text."""
    desk = ScriptedDesk(lambda *_: "It is so.", "chat_template", str(shared_data / "tokenizers" / "qwen3"))
    desk.by_character, read, waited = True, threading.Semaphore(0), []

    async def pace(drawn):
        if drawn and "It is so."[drawn - 1] != " ":  # a space is sent with what follows it
            waited.append(await asyncio.to_thread(read.acquire, timeout=30))

    desk.pace = pace
    endpoint = Endpoint(desk)
    try:
        with httpx.Client(base_url=endpoint.url, timeout=60) as http:
            pieces = []
            for event in events(http, CHAT, {"messages": ASK}):
                if event["choices"][0]["delta"].get("content"):
                    pieces.append(event["choices"][0]["delta"]["content"])
                    read.release()
    finally:
        endpoint.close()
    assert pieces == ["I", "t", " i", "s", " s", "o", "."] and waited == [True] * len(pieces)


@pytest.mark.parametrize("text", ANSWERS)
def test_a_stream_of_any_answer_put_together_is_the_whole(shared_data, text):
    desk = ScriptedDesk(lambda *_: text, "chat_template", str(shared_data / "tokenizers" / "qwen3"))
    endpoint = Endpoint(desk)
    body = {"messages": ASK, "tools": TOOLS, "logprobs": True, "return_token_ids": True, "stop": "lo and"}
    try:
        with httpx.Client(base_url=endpoint.url, timeout=60) as http:
            (whole,) = http.post(CHAT, json=body).json()["choices"]
            found = [event["choices"][0] for event in events(http, CHAT, body)]
            plain = [event["choices"][0] for event in events(http, TEXT, {"prompt": "a", "stop": "lo and", "echo": True})]
            (text_whole,) = http.post(TEXT, json={"prompt": "a", "stop": "lo and", "echo": True}).json()["choices"]
    finally:
        endpoint.close()
    message = whole["message"]
    for field in ("content", "reasoning_content"):
        assert "".join(one["delta"].get(field) or "" for one in found) == (message.get(field) or "")
    calls = [call["function"] for one in found for call in one["delta"].get("tool_calls", [])]
    assert calls == [call["function"] for call in message.get("tool_calls", [])]
    assert [one["finish_reason"] for one in found] == [None] * (len(found) - 1) + [whole["finish_reason"]]
    assert [token for one in found for token in one.get("token_ids", [])] == whole["token_ids"]
    assert [entry for one in found if one["logprobs"] for entry in one["logprobs"]["content"]] == whole["logprobs"]["content"]
    assert "".join(one["text"] for one in plain) == text_whole["text"] and plain[-1]["finish_reason"] == text_whole["finish_reason"]


def test_several_completions_are_streamed_side_by_side():
    endpoint = Endpoint(TinyDesk())
    try:
        with httpx.Client(base_url=endpoint.url, timeout=60) as http:
            body = {"prompt": ["ab", [5, 6]], "n": 2, "max_tokens": 6, "seed": 3, "echo": True, "logprobs": 0}
            whole = http.post(TEXT, json=body).json()["choices"]
            found = [event["choices"][0] for event in events(http, TEXT, body)]
    finally:
        endpoint.close()
    for choice in whole:
        own = [one for one in found if one["index"] == choice["index"]]
        assert "".join(one["text"] for one in own) == choice["text"] and len(own) > 3
        assert own[-1]["logprobs"]["tokens"] == choice["logprobs"]["tokens"] and own[-1]["finish_reason"] == choice["finish_reason"]
        logprobs = [one["logprobs"]["token_logprobs"] for one in (own[-1], choice)]
        assert logprobs[0][1:] == pytest.approx(logprobs[1][1:], abs=1e-5)  # a batch of another size sums in another order


def test_the_desk_shows_what_it_has_drawn_and_draws_the_same(tmp_path):
    with server(tmp_path) as served:
        params, shown = SamplingParams(max_tokens=24, seed=1, stop=[]), []
        whole = asyncio.run(served.desk.sample(BASE, [5, 6, 7], 2, params))
        seen = asyncio.run(served.desk.sample(BASE, [5, 6, 7], 2, params, show=shown.append))
        gone = asyncio.run(served.desk.sample(BASE, [5, 6, 7], 2, params, show=lambda samples: 1 / 0))  # costs nobody's answer
    assert [one.tokens for one in gone.sequences] == [one.tokens for one in whole.sequences]
    assert [one.tokens for one in seen.sequences] == [one.tokens for one in whole.sequences]
    lengths = [{i: len(one.tokens) for i, one in samples.items()} for samples in shown]
    assert lengths == [{0: n, 1: n} for n in (4, 8, 12, 16, 20)]
    for samples in shown:
        for i, one in samples.items():
            n, own = len(one.tokens), whole.sequences[i]
            assert one.tokens == own.tokens[:n] and one.logprobs == own.logprobs[:n]
