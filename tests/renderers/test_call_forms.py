"""Test the tool call formats of GLM, Llama 3, Gemma 4 and LFM2."""

import json
import random

import pytest

from rl.renderers.tool_call_formats import find_call_format

TYPES = {"a": "integer", "text": "string", "list": "array", "b": "boolean", "o": "object"}
TOOLS = [
    {"type": "function",
     "function": {"name": "add",
                  "parameters": {"properties": {k: {"type": v} for k, v in TYPES.items()}}}},
]  # fmt: skip
FORM = {
    "glm": find_call_format("<tool_call>{function-name}<arg_key>"),
    "gemma": find_call_format("{{- '<|tool_call>call:' + function['name'] }}"),
    "lfm": find_call_format("""{{- "<|tool_call_start|>[" + x }}"""),
    "llama": find_call_format("""{{- '"parameters": ' }}"""),
}


def call(name="add", **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def of(first):
    return first["function"]["name"], first["function"]["arguments"]


def glm(calls):
    pairs = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
    spell = lambda v: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)  # noqa: E731
    return "".join(
        f"\n<tool_call>{n}\n{''.join(pairs.format(k, spell(v)) for k, v in a.items())}</tool_call>"
        for n, a in map(of, calls)
    )


def gemma(calls):
    def spell(value):
        if isinstance(value, str):
            return f'<|"|>{value}<|"|>'
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{spell(value[key])}" for key in sorted(value)) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(spell, value)) + "]"
        return json.dumps(value)

    return "".join(f"<|tool_call>call:{n}{spell(a)}<tool_call|>" for n, a in map(of, calls))


def render_lfm_calls(calls):
    def spell(value):
        if isinstance(value, str):
            for plain, escaped in (("\\", "\\\\"), ("'", "\\'"), ("\n", "\\n"), ("\r", "\\r")):
                value = value.replace(plain, escaped)
            return f"'{value}'"
        is_json = isinstance(value, list | dict)
        return json.dumps(value, ensure_ascii=False) if is_json else str(value)

    pairs = [(n, ", ".join(f"{k}={spell(v)}" for k, v in a.items())) for n, a in map(of, calls)]
    text = ", ".join(f"{n}({arguments})" for n, arguments in pairs)
    return f"<|tool_call_start|>[{text}]<|tool_call_end|>"


def llama(calls):
    ((name, arguments),) = map(of, calls)
    return f'{{"name": "{name}", "parameters": {json.dumps(arguments)}}}'


WRITE = {"glm": glm, "gemma": gemma, "lfm": render_lfm_calls, "llama": llama}
TEXTS = (
    "é 数 🙂", "a b", "", "it's", "7", "true", "[1]", "x=1, y", "a\nb", "\\n", "{}", "<b>", "call:f{",
    "-",
)  # fmt: skip


def random_call(rng):
    known = {
        "a": rng.choice([0, -7, 10**12]), "text": rng.choice(TEXTS), "b": rng.random() < 0.5,
        "list": [rng.choice([1, -2.5, None, True, "q w"]) for _ in range(rng.randrange(3))],
        "o": {"k": rng.choice(TEXTS[:3]), "n": rng.randrange(3)},
    }  # fmt: skip
    keys = rng.sample(sorted(known), rng.randrange(len(known) + 1))
    return call(**{key: known[key] for key in keys})


@pytest.mark.parametrize("name", FORM)
def test_what_is_written_is_read_back(name):
    rng = random.Random(name)
    for _ in range(300):
        calls = [random_call(rng) for _ in range(1 if name == "llama" else rng.randrange(1, 4))]
        output = "" if name == "llama" else rng.choice(["", "So.", "é 数"])
        text = WRITE[name](calls) + output if name == "gemma" else output + WRITE[name](calls)
        assert FORM[name].parse(text, TOOLS) == (output, calls, []), text


@pytest.mark.parametrize("name", FORM)
def test_what_is_cut_off_or_damaged_is_named_and_stays_as_text(name):
    """Try every prefix of a call, and calls with a missing character."""
    written = WRITE[name]([call(a=7, text="q w")])
    begun = FORM[name].begin if name != "llama" else '{"name":'
    for upto in range(len(written)):
        content, calls, unparsed = FORM[name].parse(written[:upto], TOOLS)
        assert content == written[:upto] and calls == []
        if begun in written[:upto]:
            assert len(unparsed) == 1
            assert unparsed[0]["error"]
            assert unparsed[0]["raw_text"] in written[:upto]
    counted = 0
    for at in range(len(written)):
        damaged = written[:at] + written[at + 1 :]
        content, calls, unparsed = FORM[name].parse(damaged, TOOLS)
        assert len(calls) <= 1 and (calls or content == damaged)
        counted += bool(unparsed)
    assert counted > 10


@pytest.mark.parametrize(("name", "text", "why"), [
    ("lfm", "<|tool_call_start|>[f(1)]<|tool_call_end|>", "NAME(KEY=VALUE"),
    ("lfm", "<|tool_call_start|>[f(**{'a': 1})]<|tool_call_end|>", "NAME(KEY=VALUE"),
    ("lfm", "<|tool_call_start|>[f(a=__import__('os').system('ls'))]<|tool_call_end|>",
     "an argument is"),
    ("lfm", "<|tool_call_start|>f(a=1)<|tool_call_end|>", "calls are a list"),
    ("lfm", f"<|tool_call_start|>[f(a={'(' * 5000})]<|tool_call_end|>", ""),
    ("gemma", '<|tool_call>call:f{a:<|"|>x}<tool_call|>', "not finished"),
    ("gemma", "<|tool_call>f{a:1}<tool_call|>", "call:NAME"),
    ("gemma", f"<|tool_call>call:f{{a:{'[' * 100_000}}}<tool_call|>", ""),
    ("glm", "<tool_call>f\n<arg_key>a</arg_key>\n</tool_call>", "outside"),
    ("glm", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "its tool's name"),
    ("llama", '{"name": "f", "parameters": 3}', "is an object"),
    ("llama", '<|python_tag|>print("a")', "NAME(KEY=VALUE"),
    ("llama", '<|python_tag|>print(a="b")', "NAME.call"),
])  # fmt: skip
def test_what_is_no_call_says_why(name, text, why):
    content, calls, unparsed = FORM[name].parse(text, TOOLS)
    assert (content, calls) == (text, []) and len(unparsed) == 1 and why in unparsed[0]["error"]


def test_a_whole_answer_of_llama_is_a_call_only_where_there_are_tools():
    take = FORM["llama"].parse
    assert take('{"name": "add", "parameters": {"a": 1}}', []) == (
        '{"name": "add", "parameters": {"a": 1}}', [], [],
    )  # fmt: skip
    assert take('{"result": 7}', TOOLS) == ('{"result": 7}', [], [])  # an answer in JSON
    assert take("The sum is 7.", TOOLS) == ("The sum is 7.", [], [])
    assert take('<|python_tag|>{"name": "add", "parameters": {"a": 1}}', TOOLS)[1] == [call(a=1)]
    assert take("<|python_tag|>brave_search.call(query=\"what, 'then'?\")", TOOLS)[1] == [
        call("brave_search", query="what, 'then'?")
    ]


def test_an_end_mark_within_a_text_ends_nothing():
    first = call(text="a<|tool_call_end|>b")
    assert FORM["lfm"].parse(render_lfm_calls([first]) + "x", TOOLS) == ("x", [first], [])
    first = call(text="a<tool_call|>b")
    assert FORM["gemma"].parse(gemma([first]), TOOLS) == ("", [first], [])


def test_other_templates_have_none_of_these_forms():
    assert find_call_format("<tool_call>\n{{ tool_call | tojson }}\n</tool_call>") is None
    assert find_call_format("") is None
