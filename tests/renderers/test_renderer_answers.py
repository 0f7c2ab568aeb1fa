"""Test the end of answers and their parsing."""

import json

import pytest
from test_renderer_specials import (  # noqa: F401
    CHAT,
    LARGE,
    make_word_tokenizer,
    pairs,
    renderers,
    special_ids,
    tokenizers,
)

from rl import ServiceClient, get_tokenizer
from rl.renderers import get_renderer, set_end_tokens
from rl.renderers.stop_tokens import get_end_tokens


@pytest.mark.parametrize(("name", "model"), pairs())
def test_an_answer_ends_at_every_eos_of_the_model(tokenizers, name, model):  # noqa: F811
    """Ends include those of the generation config. The answer is the text before the first end."""
    tokenizer = tokenizers(model)
    others = [i for i in special_ids(tokenizer) if i != tokenizer.eos_token_id][:2]
    renderer = get_renderer(name, tokenizer, eos_token_ids=others)
    body = tokenizer.encode("42", add_special_tokens=False)
    stops = [stop for stop in renderer.get_stop_sequences() if isinstance(stop, int)]
    marked = renderer.with_end_mark([*body, tokenizer.eos_token_id])
    for end in {*others, tokenizer.eos_token_id, *stops}:
        message, ended = renderer.parse_response([*body, end, *others])
        assert message["content"].strip() == "42" and ended, end
        assert renderer.with_end_mark([*body, end]) == marked
    assert renderer.parse_response(body)[1] is False and renderer.with_end_mark(body) == body


def test_the_ends_come_with_the_model_and_from_the_files_beside_a_tokenizer(tokenizers, tmp_path):  # noqa: F811
    tokenizer = make_word_tokenizer()
    assert get_end_tokens(tokenizer) == {1}
    assert get_end_tokens(set_end_tokens(tokenizer, [1, 5])) == {1, 5}
    make_word_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(
        json.dumps({"model_type": "qwen3", "eos_token_id": 4, "text_config": {"eos_token_id": 3}})
    )
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    assert get_end_tokens(get_tokenizer(str(tmp_path / "model"))) == {1, 3, 4, 7}
    with ServiceClient(output_dir=tmp_path / "out") as service:
        client = service.create_sampling_client(base_model="tiny:addition")
        assert get_end_tokens(client.get_tokenizer()) == {client.get_tokenizer().eos_token_id}


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": [2]}}\n</tool_call>'


@pytest.mark.parametrize("model", CHAT)
@pytest.mark.parametrize(("call", "error"), [
    ('<tool_call>\n{"name": "add", "argum', "was not finished"),
    ('<tool_call>\n{"name": "add", "arguments": {}}', "was not finished"),
    ("<tool_call>\n", "was not finished"),
    ("<tool_call>\nadd(2, 2)\n</tool_call>", "no JSON"),
    ('<tool_call>{"name": "add"}</tool_call>', "a call is"),
    ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', "a call is"),
    ("<tool_call>" + "[" * 5000 + "</tool_call>", "no JSON"),
])  # fmt: skip
def test_a_cut_off_call_is_told_from_a_complete_one(renderers, tokenizers, model, call, error):  # noqa: F811
    tokenizer, renderer = tokenizers(model), renderers("chat_template", model)
    message, ended = renderer.parse_response(
        tokenizer.encode(f"Well.\n{CALL}\n{call}", add_special_tokens=False)
    )
    assert not ended and len(message["tool_calls"]) == 1
    (unparsed,) = message["unparsed_tool_calls"]
    assert unparsed["raw_text"] == call and error in unparsed["error"]
    assert message["content"].startswith("Well.") and message["content"].endswith(call)
    both = tokenizer.encode(f"{CALL}\n{CALL}", add_special_tokens=False)
    complete, ended = renderer.parse_response(both)
    # the calls are complete, although the answer was cut off after them
    assert not ended and "unparsed_tool_calls" not in complete
    assert complete["content"] == "" and len(complete["tool_calls"]) == 2


def test_a_call_may_hold_its_own_closing_mark(renderers, tokenizers):  # noqa: F811
    text = '<tool_call>{"name": "f", "arguments": {"text": "a </tool_call> b"}}</tool_call>'
    message, _ = renderers("chat_template", "minimind_6400").parse_response(
        tokenizers("minimind_6400").encode(text)
    )
    assert message["tool_calls"][0]["function"]["arguments"] == {"text": "a </tool_call> b"}
    assert message["content"] == ""


@pytest.mark.parametrize("model", [*LARGE[1:], "minimind_6400"])
def test_every_thought_is_split_off(renderers, tokenizers, model):  # noqa: F811
    renderer, tokenizer = renderers("chat_template", model), tokenizers(model)
    cases = {
        "<think>\na\n</think>\n\nx": ("x", "a"),
        "<think>\na\n</think>\n\nx<think>b</think>\ny": ("xy", "a\n\nb"),
        "a\n</think>\n\nx": ("x", "a"),  # opened by the prompt
        "x <think>a</think>y": ("x y", "a"),
        "<think>\na": ("<think>\na", None),
        "<think>a</think>x<think>b": ("x<think>b", "a"),
        "<think></think>x": ("x", ""),
    }
    for text, (content, thought) in cases.items():
        message, _ = renderer.parse_response(tokenizer.encode(text, add_special_tokens=False))
        assert (message["content"], message.get("reasoning_content")) == (content, thought), text
