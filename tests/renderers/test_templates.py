"""Test renderers on random conversations through the templates of each family."""

import contextlib
import functools
import importlib.util
import json
import random
import re
from pathlib import Path

import pytest

from rl.errors import UserError
from rl.renderers import get_renderer
from rl.renderers.response_parsing import split_calls, split_channels
from rl.renderers.tool_call_formats import find_call_format

COUNT = 100
WORDS = (
    "yes", "no", "12", "the answer is", "(a+b)*c", "what?", "x = 1", "-3.5e2", "a: b", "é 数 🙂",
    "Straße", "שלום", "{{ x }}", "a\n\nb",
)  # fmt: skip
FOLDER = {
    "qwen2.5": {},
    "qwen3": {},
    "qwen3, no thinking": {"enable_thinking": False},
    "minimind_6400": {},
}
# Templates of the package trl, with the thoughts and calls that can be parsed back.
PACKAGE = {
    "cohere": "", "cohere2": "", "gemma": "", "gemma3": "", "llama3": "", "phi3": "", "phi3_5": "",
    "lfm2": "", "lfm2_v2": "calls", "qwen2_5": "calls", "qwen2_5_vl": "", "qwen3": "thoughts calls",
    "qwen3_instruct_2507": "calls", "qwen3_vl": "calls", "qwen3_5_think": "thoughts calls",
    "qwen3_5_nothink": "calls", "qwen3_6": "thoughts calls", "qwen3_8": "thoughts calls",
    "llama3_1": "calls one_call", "llama3_2": "calls one_call", "gptoss": "thoughts calls one_call",
    "gemma4": "thoughts_of_calls calls", "gemma4_v5": "thoughts calls", "glm4moe": "thoughts calls",
    "deepseekv3": "", "deepseek_r1_distill": "", "lfm2_2_5": "calls", "nemotron_3_nano": "",
    "nemotron_3_super": "",
}  # fmt: skip
_SPECIAL = re.compile(
    r"<\|[^|<>\s'\"]+\|>|<\|[a-z_]+>|<[a-z_]+\|>|<｜[^｜]+｜>|<(?:start|end)_of_turn>|</s>|<s>|\[gMASK\]|<sop>|</?think>|</?tool_call>|</?tool_response>"
)
# Families whose template does not end an answer: the trained end is the mark of the next speaker
# (after text, after a call).
NEXT = {"glm4moe": ("<|user|>", "<|observation|>")}
_MARKUP = re.compile(r"</?(think|tool_call|tool_response)>")
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "text": {"type": "string"}},
    "required": ["a"],
}
FUNCTION = {"name": "add", "description": "Adds é and 数", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}


def package_template(name):
    result = importlib.util.find_spec("trl")
    if result is None or result.origin is None:
        pytest.skip("its template is in the package trl (extra bench), which is not installed")
    return (Path(result.origin).parent / "chat_templates" / f"{name}.jinja").read_text(
        encoding="utf-8"
    )


def of_package(name, tokenizers):
    from transformers import AddedToken, AutoTokenizer

    template = package_template(name)
    tokenizer = AutoTokenizer.from_pretrained(
        tokenizers / "minimind_6400", bos_token="<bos>", eos_token="<eos>"
    )
    written = sorted({*_SPECIAL.findall(template), "<bos>", "<eos>"})
    tokenizer.add_tokens(
        [AddedToken(w, special=not _MARKUP.fullmatch(w), normalized=False) for w in written]
    )
    tokenizer.chat_template = template
    return get_renderer("chat_template", tokenizer)


@functools.cache
def of_folder(name, tokenizers):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizers / name.partition(",")[0])
    return get_renderer("chat_template", tokenizer, **FOLDER[name])


def make_text(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 6)))


def conversation(rng: random.Random, can: set[str]):
    """Return (messages ending with the assistant's, whether tools are available)."""

    def text():
        return make_text(rng) + (" \0 " + make_text(rng) if rng.random() < 0.1 else "")

    tools = "tools" in can and rng.random() < 0.4
    system = "system" in can and rng.random() < 0.5
    messages = [{"role": "system", "content": text()}] if system else []
    for _ in range(rng.randrange(1, 4)):
        messages.append({"role": "user", "content": text()})
        while tools and rng.random() < 0.4:
            messages.append(answer(rng, can, call=True))
            messages.append({"role": "tool", "name": "add", "content": text()})
        messages.append(answer(rng, can, call=False))
    if tools and "calls" in can and rng.random() < 0.5:
        messages[-1] = answer(rng, can, call=True)
    return messages, tools


def answer(rng, can, call):
    message = {"role": "assistant", "content": make_text(rng)}
    if ("thoughts" in can or (call and "thoughts_of_calls" in can)) and rng.random() < 0.5:
        message["reasoning_content"] = make_text(rng).replace("\n\n", " ")
    if call:
        arguments = {"a": rng.randrange(9), "text": rng.choice(["é", "a b", "[1]"])}
        function = {"name": "add", "arguments": arguments}
        message["tool_calls"] = [{"type": "function", "function": function}]
        if "one_call" in can:
            message["content"] = ""
    return message


def fill_messages(messages, word):
    return json.loads(json.dumps(messages).replace("\\u0000", json.dumps(word)[1:-1]))


def probe_template_features(renderer, name) -> set[str]:
    """Return what the template accepts when tried, plus what the table says can be parsed back."""
    template, result = str(renderer.tokenizer.chat_template), set()
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    with contextlib.suppress(UserError):
        renderer.build_generation_prompt(messages)
        result.add("system")
    known = PACKAGE.get(name, "thoughts calls" if name == "qwen3" else "calls")
    return result | set(known.split()) | ({"tools"} if "tools" in template else set())


def apply_template(tokenizer, messages, settings, tools, generation):
    inputs = {"tools": [TOOL]} if tools else {}
    return tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=generation, **settings, **inputs
    )


def check_thought(renderer, messages, thought, answer):
    """Check an answer to a prompt that opened its thought. Return counts of bridges."""
    seen = renderer.build_generation_prompt(messages[:-1]).to_ints()
    text = f"{thought}\n</think>\n\n{answer}"
    written = renderer.tokenizer.encode(text, add_special_tokens=False)
    written += sorted(renderer.end_tokens)[:1]
    message, ended = renderer.parse_response(written)
    parts = message["reasoning_content"].strip(), message["content"].strip()
    assert ended and parts == (thought.strip(), answer.strip()), message
    new = [{"role": "user", "content": thought}]
    following = renderer.extend_prompt(messages[:-1], seen, written, new)
    if following is not None:
        assert following.to_ints()[: len(seen) + len(written)] == [*seen, *written]
    return {"answers": 1, "bridged": int(following is not None), "anew": int(following is None)}


def check(renderer, name):
    """Return the numbers of compared prompts, answers and bridges. Raise on any difference."""
    tokenizer, settings = renderer.tokenizer, FOLDER.get(name, {})
    rng, can = random.Random(name), probe_template_features(renderer, name)
    with_tools = renderer.with_tools([TOOL]) if "tools" in can else renderer
    words = sorted(renderer.escaper.control)
    control = {tokenizer.convert_tokens_to_ids(word) for word in words}
    counts = dict.fromkeys(("prompts", "forged", "answers", "bridged", "anew"), 0)
    for _ in range(COUNT):
        messages, tools = conversation(rng, can)
        first = with_tools if tools else renderer
        harmless, word = fill_messages(messages, "x"), rng.choice(words)
        for upto in (len(messages), len(messages) - 1):
            plain = harmless[:upto]
            text = apply_template(tokenizer, plain, settings, tools, True)
            expected = tokenizer.encode(text, add_special_tokens=False)
            assert first.build_generation_prompt(plain).to_ints() == expected
            counts["prompts"] += 1
            forged = fill_messages(messages, word)[:upto]
            if forged != plain:
                tokens = first.build_generation_prompt(forged).to_ints()
                text = apply_template(tokenizer, forged, settings, tools, True)
                assert tokenizer.decode(tokens) == text
                marks, harmless_marks = (
                    [t for t in ids if t in control] for ids in (tokens, expected)
                )
                assert marks == harmless_marks, word
                counts["forged"] += 1
        try:
            example, weights = first.build_supervised_example(harmless)
        except UserError as refused:
            says = str(refused)
            assert "differently from the prompt" in says or "does not end message" in says
            end = first.build_generation_prompt(harmless[:-1]).to_ints()[-8:]
            if "</think>" in says or "<think>" in tokenizer.decode(end):
                more = check_thought(first, harmless, make_text(rng), make_text(rng))
                counts = {name: count + more.get(name, 0) for name, count in counts.items()}
            continue
        learnt = [token for token, weight in zip(example.to_ints(), weights, strict=True) if weight]
        end = NEXT[name]["tool_calls" in harmless[-1]] if name in NEXT else ""
        text = apply_template(tokenizer, harmless, settings, tools, False)
        assert tokenizer.decode(example.to_ints()) == text + end
        message, ended = first.parse_response(learnt)
        empty = {"reasoning_content": ""} if "reasoning_content" in message else {}
        target = {**empty, **harmless[-1]}
        if "calls" in can or "tool_calls" not in target:
            assert ended and message == target, tokenizer.decode(learnt)
            counts["answers"] += 1
        new = [{"role": "tool", "name": "add", "content": "7"}]
        if "tool_calls" not in target:
            new = [{"role": "user", "content": make_text(rng)}]
        seen = first.build_generation_prompt(harmless[:-1]).to_ints()
        following = first.extend_prompt(harmless[:-1], seen, learnt, new)
        counts["anew" if following is None else "bridged"] += 1
        if following is not None:
            assert following.to_ints()[: len(seen) + len(learnt)] == [*seen, *learnt]
            text = apply_template(tokenizer, [*harmless, *new], settings, tools, True)
            assert tokenizer.decode(following.to_ints()) == text
    return counts


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "minimind_6400" else pytest.mark.slow) for n in FOLDER],
)
def test_the_tokenizers_own_templates(name, shared_data):
    counts = check(of_folder(name, shared_data / "tokenizers"), name)
    assert counts["prompts"] == 2 * COUNT and counts["forged"] > 0.15 * COUNT
    assert counts["answers"] > 0.9 * COUNT or name == "qwen3, no thinking"


def test_calls_by_parts_are_read_by_their_types():
    """Check by hand Qwen3.5's format, which does not mark whether a value is text."""
    properties = {"n": {"type": "integer"}, "s": {"type": "string"}, "l": {}}
    typed = {"function": {"name": "f", "parameters": {"properties": properties}}}
    written = {"n": "7", "s": "7", "l": "[1, 2]", "m": "7\n8"}
    parameters = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in written.items())
    text = f"So.\n\n<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"
    arguments = {"n": 7, "s": "7", "l": [1, 2], "m": "7\n8"}
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    assert split_calls(text, [typed]) == ("So.", [call], [])
    for broken, why in (
        (text[:-20], "was not finished"),
        (text.replace("</function>", ""), "no <function=...> that ends"),
        (text.replace("</function>", "x</function>"), "unexpected text outside"),
    ):
        make_text, calls, unparsed = split_calls(broken, [typed])
        assert make_text == broken and not calls and why in unparsed[0]["error"]


@pytest.mark.parametrize(("schema", "text", "value"), [
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "12345", "12345"),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
    ({"type": ["string", "null"]}, "true", "true"),
    ({"type": ["string", "integer"]}, "7", 7),
    ({"oneOf": [{"type": "string"}, {"type": "array"}]}, '["a"]', ["a"]),
    ({"anyOf": [{"type": "number"}, {"type": "null"}]}, "7", 7),
    ({"anyOf": [True, {"type": "number"}]}, "7", 7),
    ({"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]}, '{"x": 1}', {"x": 1}),
    ({"type": "boolean"}, "False", False), ({"type": ["integer", "null"]}, "None", None),
    ({"type": "string"}, "True", "True"), (None, "7", "7"),
])  # fmt: skip
def test_a_parameter_that_may_be_a_text_stays_a_text(schema, text, value):
    properties = None if schema is None else {"p": schema}
    tool = {"function": {"name": "f", "parameters": {"properties": properties}}}
    written = f"<function=f>\n<parameter=p>\n{text}\n</parameter>\n</function>"
    _, (call,), _ = split_calls(f"<tool_call>\n{written}\n</tool_call>", [tool])
    assert call["function"]["arguments"] == {"p": value}


def test_messages_with_channels_are_read_by_hand():
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I "
        "add.<|end|><|start|>assistant to="
        'functions.f<|channel|>commentary json<|message|>{"a": 2}'
    )
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 2}}}
    assert split_channels(text) == ("I add.", "hm", [call], [])
    # the form that models write
    written = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 2}'
    assert split_channels(written) == ("", None, [call], [])
    assert split_channels(written[:-1])[2:][1][0]["error"].startswith("no JSON")
    assert split_channels("<|channel|>final<|message|>4") == ("4", None, [], [])
    assert split_channels("<|channel|>ana") == ("<|channel|>ana", None, [], [])  # cut off


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGE)
def test_templates_of_other_families(name, shared_data):
    counts = check(of_package(name, shared_data / "tokenizers"), name)
    assert counts["prompts"] == 2 * COUNT and counts["forged"] > 0.15 * COUNT


@pytest.mark.slow
def test_calls_of_glm_are_read_as_its_template_writes_them(shared_data):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(shared_data / "tokenizers" / "minimind_6400")
    tokenizer.chat_template = package_template("glm4moe")
    form, rng = find_call_format(tokenizer.chat_template), random.Random("glm")
    for _ in range(COUNT):
        message = answer(rng, set(), call=True)
        more = [answer(rng, set(), call=True)["tool_calls"] for _ in range(rng.randrange(1, 4))]
        message["tool_calls"] = sum(more, [])
        messages = [{"role": "user", "content": "a"}, message]
        text = apply_template(tokenizer, messages, {}, True, False)
        content, calls, unparsed = form.parse(text.rpartition("</think>")[2], [TOOL])
        assert (content.strip(), calls, unparsed) == (message["content"], message["tool_calls"], [])


@pytest.mark.slow
def test_a_template_that_cannot_be_read_back_is_refused(shared_data):
    with pytest.raises(UserError, match="an unsupported form"):
        of_package("muse_glimmer", shared_data / "tokenizers")


@pytest.mark.slow
def test_an_answer_that_ends_otherwise_in_history_is_not_learnt_there(shared_data):
    """gpt-oss ends the last answer with <|return|> and earlier answers with <|end|>."""
    renderer = of_package("gptoss", shared_data / "tokenizers")
    both = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(UserError, match="last_assistant"):
        renderer.build_supervised_example(both * 2, "all_assistant")
