"""Test that the prompt of a row describes its tools, as transformers' chat templates do."""

import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_helpers import write_rows
from transformers import AutoTokenizer

from rl.algorithms.reward_model import make_scored_pair
from rl.algorithms.row_datums import make_answer_datum
from rl.algorithms.sft import make_response_datum
from rl.data import LengthLimits, RowCheck, load_problems
from rl.data.row_readers import FaultyRows
from rl.envs import ProblemGroupBuilder
from rl.errors import UserError
from rl.models import load_tokenizer
from rl.renderers import get_renderer
from rl.types import SampledSequence

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
CHAT = [
    {"role": "system", "content": "Use the tools."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "4"},
]


@pytest.fixture(params=["qwen2.5", "qwen3"])
def tokenizer(request, shared_data):
    return AutoTokenizer.from_pretrained(shared_data / "tokenizers" / request.param)


def render(tokenizer, messages, tools, **settings) -> list[int]:
    return tokenizer.apply_chat_template(messages, tools=tools, return_dict=False, **settings)


def read_sequence(datum) -> list[int]:
    """Return the tokens of a datum with its last target."""
    return [*datum.model_input.to_ints(), int(datum.loss_fn_inputs["target_tokens"].array[-1])]


ROWS = [
    ({"messages": [*CHAT, {"role": "assistant", "content": "It is 4."}], "tools": [ADD]}, [ADD]),
    ({"prompt": "2+2?", "completion": "4", "tools": [CLOCK, ADD]}, [CLOCK, ADD]),
    ({"prompt": "2+2?", "completion": "4", "tools": json.dumps([ADD])}, [ADD]),
    ({"prompt": "2+2?", "completion": "4", "tools": None}, None),
    ({"prompt": "2+2?", "completion": "4", "tools": []}, None),
    ({"prompt": "2+2?", "completion": "4", "tools": ["hammer"]}, None),  # not about calls
    ({"prompt": "2+2?", "completion": "4", "tools": "a hammer"}, None),
    ({"prompt": "2+2?", "completion": "4", "tools": "[" * 100_000}, None),
]


@pytest.mark.parametrize(("row", "tools"), ROWS, ids=range(len(ROWS)))
@pytest.mark.parametrize("stream", [False, True])
def test_a_row_is_rendered_with_its_tools(tmp_path, tokenizer, row, tools, stream):
    path = write_rows(tmp_path / "rows.jsonl", row)
    problem = load_problems(path, answer_column=None, stream=stream)[0]
    messages = row.get("messages") or [
        {"role": "user", "content": row["prompt"]},
        {"role": "assistant", "content": row["completion"]},
    ]
    renderer = get_renderer("chat_template", tokenizer)
    sequence = read_sequence(make_response_datum(problem, renderer))
    expected = render(tokenizer, messages, tools)
    assert sequence == expected[: len(sequence)]
    assert tokenizer.decode(expected[len(sequence) :]) in ("", "\n")
    prompt = render(tokenizer, messages[:-1], tools, add_generation_prompt=True)
    assert ProblemGroupBuilder(problem, 1, renderer, None).prompt.to_ints() == prompt


def test_the_calls_of_an_answer_are_read_with_the_tools_of_its_row(tmp_path):
    row = {"prompt": "2+2?", "completion": "4", "tools": [ADD]}
    (problem,) = load_problems(write_rows(tmp_path / "rows.jsonl", row))
    renderer = get_renderer("role_colon", load_tokenizer("tiny:ascii"))

    class Scores:
        def make_task(self, scored):
            return "a task"

    builder = ProblemGroupBuilder(problem, 1, renderer, None, Scores())
    # a call ends the answer, as in an environment with tools; the ranks' renderer has none
    assert builder.stop == renderer.with_tools([ADD]).get_stop_sequences() != renderer.stops
    assert "</tool_call>" in builder.stop and builder.scoring is None
    text = '<tool_call>{"name":"add","arguments":{"a":2}}</tool_call>'
    (env,) = builder.make_envs()
    step = env.step(SampledSequence(renderer.encode(text), None, "stop"))
    call = json.dumps({"name": "add", "arguments": {"a": 2}})
    assert step.logs["response"] == f"<tool_call>\n{call}\n</tool_call>"
    assert step.metrics["ended"] == 1.0
    plain = ProblemGroupBuilder(replace(problem, tools=()), 1, renderer, None, Scores())
    assert plain.scoring == "a task" and plain.stop == renderer.get_stop_sequences()


def test_both_answers_of_a_pair_follow_the_tools(tmp_path, tokenizer):
    row = {"prompt": "2+2?", "chosen": "4", "rejected": "5", "tools": [ADD]}
    path = write_rows(tmp_path / "rows.jsonl", row)
    problem = load_problems(path, format="preferences", answer_column=None)[0]
    renderer = get_renderer("chat_template", tokenizer)
    ask = [{"role": "user", "content": "2+2?"}]
    scored = [datum.model_input.to_ints() for datum in make_scored_pair(problem, renderer)]
    for number, answer in enumerate("45"):
        expected = render(tokenizer, [*ask, {"role": "assistant", "content": answer}], [ADD])
        sequence = read_sequence(make_answer_datum(problem, answer, renderer))
        assert sequence == expected[: len(sequence)]
        assert scored[number] == expected[: len(scored[number])]


def test_a_table_does_not_add_the_keys_of_other_rows(tmp_path):
    tools = [[ADD], [CLOCK], None]
    rows = [{"prompt": "2+2?", "completion": "4", "tools": each} for each in tools]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    problems = load_problems(tmp_path / "rows.parquet")
    assert [list(problem.tools) for problem in problems] == [[ADD], [CLOCK], []]


def test_a_table_does_not_add_the_arguments_of_other_calls(tmp_path):
    calls = [
        {"type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in (("add", {"a": 2}), ("find", {"query": {"text": "x"}}))
    ]
    rows = [{"messages": [*CHAT[:2], {**CHAT[2], "tool_calls": [call]}, CHAT[3]]} for call in calls]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    problems = load_problems(tmp_path / "rows.parquet")
    assert [problem.messages[2]["tool_calls"] for problem in problems] == [[c] for c in calls]
    assert all("tool_calls" not in problem.messages[3] for problem in problems)


def test_the_tools_count_as_tokens_of_the_row(tmp_path, tokenizer):
    rows = [{"prompt": "2+2?", "completion": "4", "tools": each} for each in ([ADD], None)]
    with_tools, without = load_problems(write_rows(tmp_path / "rows.jsonl", *rows))
    renderer = get_renderer("chat_template", tokenizer)
    sizes = [len(read_sequence(make_response_datum(p, renderer))) for p in (with_tools, without)]
    limits = LengthLimits(max_row_tokens=sizes[1], on_too_long="error")
    check = RowCheck({"max_context": None}, renderer, "rows", ("response",), 0, limits=limits)
    assert check(without) is without
    with pytest.raises(UserError, match=f"take {sizes[0]} tokens"):
        check(with_tools)


def test_an_object_that_is_no_schema_is_a_bad_row(tmp_path):
    rows = [{"prompt": "2+2?", "completion": "4", "tools": [{"name": "add"}]}]
    with pytest.raises(FaultyRows, match="rows.jsonl line 1: tool 1 of 'tools' is not"):
        load_problems(write_rows(tmp_path / "rows.jsonl", *rows))


def test_a_template_without_a_place_for_tools_names_the_row(tmp_path, tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    row = {"prompt": "2+2?", "completion": "4", "tools": [ADD]}
    problem = load_problems(write_rows(tmp_path / "rows.jsonl", row))[0]
    renderer = get_renderer("chat_template", tokenizer)
    check = RowCheck({"max_context": None}, renderer, "rows", ("response",), 0)
    with pytest.raises(
        UserError, match="rows.jsonl line 1: the chat template .* no place for tools"
    ):
        check(problem)
