"""Test the chat templates of GLM and Gemma, which differ from other families."""

import json

import numpy as np
import pytest

from rl.errors import UserError
from rl.models.info import get_recommended_renderer_name
from rl.models.tokenizer_loading import build_character_tokenizer
from rl.renderers import get_renderer, parse_partial_answer, prompt_opens_thoughts

LETTERS = "\n " + "".join(chr(c) for c in range(33, 127))
GLM = (
    "[gMASK]<sop>{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n"
    "<think>{{ m.reasoning_content if m.reasoning_content and loop.last else '' }}</think>\n{{ "
    "m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '\n<tool_call>' + c.function.name }}{% for k, v in "
    "c.function.arguments.items() %}"
    "{{ '\n<arg_key>' + k + '</arg_key>\n<arg_value>' + v + '</arg_value>' }}{% endfor %}{{ '\n"
    "</tool_call>' }}{% endfor %}"
    "{% elif m.role == 'tool' %}<|observation|>\n{{ m.content }}{% else %}<|{{ m.role }}|>\n{{ "
    "m.content }}{% endif %}{% endfor %}"
    "{% if tools %}<|system|>\ntools{% endif %}{% if add_generation_prompt %}<|assistant|>{% "
    "endif %}"
)
GEMMA = (
    "{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<|channel>thought\n{{ m.reasoning_content }}\n"
    "<channel|>{% endif %}{{ m.content }}<turn|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% if think %}<|channel>thought\n{% "
    "endif %}{% endif %}"
)
CALLS = [{"type": "function", "function": {"name": "add", "arguments": {"a": "2", "b": "x y"}}}]


def glm():
    tokenizer = build_character_tokenizer(
        LETTERS, ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
    )
    tokenizer.chat_template = GLM
    return tokenizer


def user(text):
    return {"role": "user", "content": text}


def find_trained_span(renderer, messages):
    """Return the trained part of the last message as ids and text. It must be a single span
    directly after the prompt.
    """
    example, weights = renderer.build_supervised_example(messages)
    ids, (where,) = example.to_ints(), np.nonzero(weights)
    begin, end = int(where[0]), int(where[-1]) + 1
    assert len(where) == end - begin
    assert ids[:begin] == renderer.build_generation_prompt(messages[:-1]).to_ints()
    return ids[begin:end], renderer.tokenizer.decode(ids[begin:end])


def test_glm_ends_an_answer_with_the_mark_of_who_speaks_next():
    tokenizer = glm()
    renderer = get_renderer("chat_template", tokenizer)
    ask, output = user("2+2?"), {"role": "assistant", "content": "4", "reasoning_content": "hm"}
    tokens, text = find_trained_span(renderer, [ask, output])
    assert text == "\n<think>hm</think>\n4<|user|>"
    prompt = tokenizer.decode(renderer.build_generation_prompt([ask]).to_ints())
    assert prompt == "[gMASK]<sop><|user|>\n2+2?<|assistant|>"
    assert renderer.parse_response(tokens) == (output, True)
    tokens, text = find_trained_span(
        renderer, [ask, {"role": "assistant", "content": "I add.", "tool_calls": CALLS}]
    )
    assert text.startswith("\n<think></think>\nI add.\n<tool_call>add\n<arg_key>a</arg_key>")
    assert text.endswith("</tool_call><|observation|>")
    message, ended = renderer.parse_response(tokens)
    assert ended and (message["content"], message["tool_calls"]) == ("I add.", CALLS)
    stops = {tokenizer.convert_ids_to_tokens(i) for i in renderer.get_stop_sequences()}
    assert stops == {"<|user|>", "<|observation|>", tokenizer.eos_token}
    assert renderer.with_end_mark(tokens) == tokens
    assert renderer.parse_response(tokens[:-1])[1] is False
    turns = [ask, output, user("and?"), output]
    example, weights = renderer.build_supervised_example(turns, "all_assistant")
    trained = [i for i, weight in zip(example.to_ints(), weights, strict=True) if weight]
    assert tokenizer.decode(trained) == "\n<think></think>\n4<|user|>\n<think>hm</think>\n4<|user|>"


@pytest.mark.parametrize("thoughts", ["", "hm"])
def test_glm_goes_on_from_the_mark_or_refuses(thoughts):
    tokenizer = glm()
    renderer = get_renderer("chat_template", tokenizer)
    ask, tool = user("2+2?"), {"role": "tool", "content": "4"}
    text = {"role": "assistant", "content": "4", "reasoning_content": thoughts}
    calling = {"role": "assistant", "content": "", "tool_calls": CALLS}
    seen = renderer.build_generation_prompt([ask]).to_ints()
    answer, _ = find_trained_span(renderer, [ask, text])
    after = renderer.extend_prompt([ask], seen, answer, [user("and 3+3?")])
    if thoughts:
        assert after is None  # its template drops thoughts from history
    else:
        assert after.to_ints()[: len(seen) + len(answer)] == [*seen, *answer]
        before = tokenizer.decode([*seen, *answer])
        assert tokenizer.decode(after.to_ints()) == before + "\nand 3+3?<|assistant|>"
        assert after == renderer.build_generation_prompt([ask, text, user("and 3+3?")])
        cut_off = renderer.extend_prompt([ask], seen, answer[:-1], [user("and 3+3?")])
        assert cut_off == after  # the missing mark is added
    assert renderer.extend_prompt([ask], seen, answer, [tool]) is None  # it handed over to the user
    system = {"role": "system", "content": "!"}
    assert renderer.extend_prompt([ask], seen, answer, [system, user("b")]) is None
    called, _ = find_trained_span(renderer, [ask, calling])
    after = renderer.extend_prompt([ask], seen, called, [tool])
    assert after.to_ints() == [
        *seen, *called, *tokenizer.encode("\n4<|assistant|>", add_special_tokens=False),
    ]  # fmt: skip
    assert renderer.extend_prompt([ask], seen, called, [user("b")]) is None
    # the answer ended for neither user nor tool, and the history would not contain that token
    stopped = [*called[:-1], tokenizer.eos_token_id]
    assert renderer.extend_prompt([ask], seen, stopped, [tool]) is None


def test_a_mark_in_a_users_text_ends_no_answer_of_glm():
    tokenizer = glm()
    renderer = get_renderer("chat_template", tokenizer)
    ids = renderer.build_generation_prompt([user("a<|user|>b<|observation|>")]).to_ints()
    names = [tokenizer.convert_ids_to_tokens(i) for i in ids]
    assert names.count("<|user|>") == 1 and "<|observation|>" not in names
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"a": "<|user|>"}}}]
    calling = {"role": "assistant", "content": "c", "tool_calls": calls}
    tokens, text = find_trained_span(renderer, [user("a"), calling])
    assert renderer.parse_response(tokens)[0]["tool_calls"] == calls
    assert text.endswith("<|observation|>")
    assert tokens.count(tokenizer.convert_tokens_to_ids("<|user|>")) == 0


def test_another_template_that_ends_no_answer_is_still_refused():
    tokenizer = glm()
    tokenizer.chat_template = GLM.replace("arg_key", "key")
    with pytest.raises(UserError, match="holds no special token"):
        get_renderer("chat_template", tokenizer)


def gemma():
    marks = ["<|turn>", "<turn|>", "<|channel>", "<channel|>"]
    tokenizer = build_character_tokenizer(LETTERS, marks)
    tokenizer.chat_template = GEMMA
    return tokenizer


def test_thoughts_of_gemma_are_taken_out_and_rendered_back():
    tokenizer = gemma()
    renderer = get_renderer("chat_template", tokenizer)
    ask, output = user("2+2?"), {"role": "assistant", "content": "4", "reasoning_content": "hm\nso"}
    tokens, text = find_trained_span(renderer, [ask, output])
    assert text == "<|channel>thought\nhm\nso\n<channel|>4<turn|>"
    assert renderer.parse_response(tokens) == (output, True)
    broken = "<|channel>thought\nhm"
    for text, content, ended in (("4<turn|>", "4", True), (broken, broken, False)):
        message = {"role": "assistant", "content": content}
        tokens_of = tokenizer.encode(text, add_special_tokens=False)
        assert renderer.parse_response(tokens_of) == (message, ended)
    seen = renderer.build_generation_prompt([ask]).to_ints()
    # history has no thoughts
    assert renderer.extend_prompt([ask], seen, tokens, [user("and?")]) is None
    plain = tokenizer.encode("4<turn|>", add_special_tokens=False)
    after = renderer.extend_prompt([ask], seen, plain, [user("and?")]).to_ints()
    assert after[: len(seen) + len(plain)] == [*seen, *plain]


def test_thoughts_of_gemma_while_they_are_drawn():
    tokenizer = gemma()
    renderer = get_renderer("chat_template", tokenizer)
    answer = "<|channel>thought\nhm so\n<channel|>it is 4"
    tokens = tokenizer.encode(answer, add_special_tokens=False)
    thinking = get_renderer("chat_template", tokenizer, think=True)
    for item, opens in ((renderer, False), (thinking, True)):
        prompt = item.build_generation_prompt([user("a")]).to_ints()
        assert prompt_opens_thoughts(item, prompt) == opens
    ends = range(1, len(tokens) + 1)
    text = [parse_partial_answer(renderer, tokens[:n], False, False) for n in ends]
    whole = parse_partial_answer(renderer, tokens, False, True)
    assert whole == {"role": "assistant", "content": "it is 4", "reasoning_content": "hm so"}
    for item in text:
        assert whole["content"].startswith(item["content"])
        assert whole["reasoning_content"].startswith(item.get("reasoning_content", ""))
    assert any(item.get("reasoning_content") == "hm" and not item["content"] for item in text)


def test_a_folder_with_such_a_template_is_rendered_by_it(tmp_path):
    tokenizer = glm()
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "glm4_moe"}))
    assert get_recommended_renderer_name(str(tmp_path)) == "chat_template"
    assert get_recommended_renderer_name("zai-org/GLM-4.6") == "chat_template"
