"""Test each IFEval instruction on handwritten answers: some follow it and some do not, including
answers that a careless check would misjudge.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest

from rl.errors import UserError
from rl.rewards import resolve_reward
from rl.rewards.instruction_checks import (
    INSTRUCTIONS,
    bind_instructions,
    count_sentences,
    follow_instructions,
    list_loose_variants,
)

# (instruction, parameters, answers that follow it, answers that do not)
CASES: list[Any] = [
    ("keywords:existence", {"keywords": ["lava", "deep sea"]},
     ["Lava meets the Deep Sea.", "deep sea\nlava"],
     ["Lava alone.", "deep\nsea and lava", "Lav a, deep sea"]),
    # a keyword is plain text, not a regular expression
    ("keywords:existence", {"keywords": ["c++", "a.b"]}, ["I like C++ and a.b"],
     ["ccc a.b", "c++ axb"]),
    ("keywords:frequency", {"keyword": "tea", "frequency": 2, "relation": "at least"},
     ["Tea? tea!", "teatea", "tea tea tea"], ["tea", "te a tea", "t e a"]),
    ("keywords:frequency", {"keyword": "tea", "frequency": 2, "relation": "less than"},
     ["tea", "coffee"], ["tea TEA", "steam and tea"]),
    ("keywords:forbidden_words", {"forbidden_words": ["cat", "big dog"]},
     ["A concatenation.", "cats and a dog that is big", "scat"],
     ["The CAT.", "cat", "no\ncat-like", "a Big Dog!"]),
    ("keywords:letter_frequency", {"letter": "q", "let_frequency": 2, "let_relation": "at least"},
     ["Q and q", "qq"], ["q", "o o"]),
    ("keywords:letter_frequency", {"letter": "#", "let_frequency": 2, "let_relation": "less than"},
     ["# one", "none"], ["# and #", "##"]),
    ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "at least"},
     ["One. Two! Three?", 'He said: "Go." She went. They left.',
      "A title\n\nA line without a stop\n\nAnother"],
     ["One. Two.", "Dr. Smith paid 3.50 to Mr. J. Doe. He left.", "Wait... what?!",
      "1. first\n2. second", "... ! ? ."]),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"},
     ["One sentence, e.g. this one.", "No stop at all", "See example.com for 1.5 litres."],
     ["One. Two.", "Is it I? It is I."]),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2},
     ["a\n***\nb", "***\na\n***\nb\n***", "a *** b"],
     ["a\n\nb", "a", "a\n***\n***\nb", "a\n***\nb\n***\nc", "***"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"},
     ["one two three", "one-two three", "1 2 3 4"], ["one two", "- - -", ""]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, ["one two"],
     ["one two three"]),
    ("length_constraints:nth_paragraph_first_word",
     {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "weekend"},
     ["a\n\nWeekend plans", 'a\n\n\n\n"Weekend" it is', "a b\n\n**Weekend:** c"],
     ["a\n\nWeekends", "weekend\n\na", "a\nweekend", "a\n\nb\n\nweekend", "a\n\nThe weekend"]),
    ("detectable_content:number_placeholders", {"num_placeholders": 2},
     ["[name] lives in [city of birth]", "[a][b][c]"],
     ["[name]", "[] []", "[ ] [x]", "[name\n] [city", "(name) (city)"]),
    ("detectable_content:postscript", {"postscript_marker": "P.S."},
     ["Bye.\n\nP.S. I forgot.", "Bye. p. s. one more", "P.S I forgot"],
     ["Bye.", "P.P.S. I forgot", "The GPS. is off", "PS I forgot"]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"},
     ["P.P.S. again", "P.S. a\nP. P. S. b"], ["P.S. once", "PPS", "P.P.\n\nS"]),
    ("detectable_content:postscript", {"postscript_marker": "Note:"}, ["note: this"], ["no note"]),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2},
     ["* one\n* two", "- one\n  - two", "Intro\n*one\n- two\n---\nEnd"],
     ["* one", "* one\n* two\n* three", "**bold**\n* one", "1. one\n2. two", "a * b\na - b"]),
    ("detectable_format:constrained_response", {},
     ["My answer is yes.", "Well: My answer is maybe."],
     ["My answer is yes", "my answer is no.", "Yes.", "My answer is perhaps."]),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2},
     ["*a* and *b c*", "**a**\n*b*", "* item with *one* and **two**"],
     ["*a*", "** ** * *", "*a\nb* c", "a * b", "****"]),
    ("detectable_format:multiple_sections", {"section_spliter": "Section", "num_sections": 2},
     ["Section 1\na\nSection 2\nb", "Section1 Section2", "**Section 1** Section 12"],
     ["Section 1\na", "Section A\nSection B", "section 1 section 2", "SubSection 1 Section 2"]),
    # punctuation in a splitter is plain text
    ("detectable_format:multiple_sections", {"section_spliter": "Part (", "num_sections": 1},
     ["Part (1)"], ["Part 1"]),
    ("detectable_format:json_format", {},
     ['{"a": [1, null]}', '```json\n{"a": 1}\n```', "```\n[1]\n```", '"text"'],
     ['{"a": 1', "{'a': 1}", 'Here: {"a": 1}', '```json\n{"a": 1}\n``` done', "```", "[" * 9999]),
    ("detectable_format:title", {}, ["<<poem of joy>>\nRoses", "text\n<<Is 1 < 2?>>", "<< a >>"],
     ["<poem>", "<<>>", "<<  >>", "<<a\nb>>", "<< <> >>", "<<a>", "1 << 2"]),
    ("combination:two_responses", {}, ["a\n******\nb", "******\na\n******\nb", "a ****** b ******"],
     ["a", "a\n***\nb", "a ****** a", "a ****** b ****** c", "******", "a ******"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Write a poem."},
     ["Write a poem.\nRoses", "  write A poem. Roses"],
     ["Roses. Write a poem.", "Write a poem", "Sure! Write a poem. Roses"]),
    ("startend:end_checker", {"end_phrase": "Any questions?"},
     ["Bye. Any questions?", 'Bye. "any QUESTIONS?"\n', "Any questions?"],
     ["Any questions? No.", "Any questions", "questions?"]),
    ("startend:quotation", {}, ['"All of it."', '\n"a "b" c"\n'],
     ['"Part" of it', '"', "'single'", "“curly”", 'All "of it"']),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"},
     ["STOP and GO", "I said NO", "WELL-KNOWN FACT"],
     ["STOP it", "WELL-KNOWN thing", "Stop And Go", "1 2 3"]),
    ("change_case:capital_word_frequency",
     {"capital_frequency": 2, "capital_relation": "less than"}, ["ONE word", "none"],
     ["DON'T DO it"]),
    ("punctuation:no_comma", {}, ["No sign here.", "semi; colon: dot.", "Bras\u0326ov"],
     ["a, b", ",", "一\uff0c二", "a\u060c b"]),
    ("language:response_language", {"language": "de"}, ["Dies ist ein Satz."],
     ["This is a sentence.", "123", "..."]),
    ("change_case:english_capital", {}, ["THIS IS ALL LOUD. 123", "WE LIKE IT!"],
     ["THIS IS almost LOUD", "123", "DIES IST EIN SATZ."]),
    ("change_case:english_lowercase", {}, ["this is quiet. 123"],
     ["This is quiet", "123", "dies ist ein satz."]),
]  # fmt: skip


@pytest.fixture(autouse=True)
def few_languages(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Detect German by a phrase, and everything else as English."""
    if "library" not in request.fixturenames:
        monkeypatch.setattr(
            "rl.rewards.instruction_checks.rank_languages",
            lambda text: [("de" if "ist ein" in text else "en", 1.0)],
        )


@pytest.fixture
def library() -> None:
    pytest.importorskip("py3langid")


def check_instruction(name: str, parameters: dict, text: str, loose: bool = False) -> bool:
    return follow_instructions(bind_instructions([name], [parameters]), text, loose=loose)[0]


def test_every_instruction_has_answers_of_both_kinds():
    assert {case[0] for case in CASES} == set(INSTRUCTIONS) and len(INSTRUCTIONS) == 25
    assert all(good and bad for _, _, good, bad in CASES)


@pytest.mark.parametrize(("name", "parameters", "good", "bad"), CASES)
def test_an_instruction_by_hand(name: str, parameters: dict[str, Any], good: Any, bad: Any):
    for text in good:
        assert check_instruction(name, parameters, text), (name, text)
        # an answer that passes the strict check passes the loose check
        assert check_instruction(name, parameters, text, loose=True), (name, text)
    for text in bad:
        assert not check_instruction(name, parameters, text), (name, text)
    # an empty response follows no instruction, not even "less than" and "no comma"
    assert not check_instruction(name, parameters, " \n")
    assert not check_instruction(name, parameters, "", loose=True)


@pytest.mark.parametrize("name", ["language:response_language", "change_case:english_capital"])
def test_the_library_agrees(name: str, library: None):
    ((_, parameters, good, bad),) = [case for case in CASES if case[0] == name]
    assert all(check_instruction(name, parameters, text) for text in good)
    assert not any(check_instruction(name, parameters, text) for text in bad)


def test_sentences_are_counted():
    counts = {
        "": 0,
        "...": 0,
        "Hello": 1,
        "Hello. World": 2,
        "Hello.World.": 1,
        "He (Mr. Fox) won. Then (it was late!) he slept.": 3,
        "What?! No way!!! OK...": 3,
        "1. Buy milk.\n2. Sell it.": 2,
        "今日は。明日も。": 2,
        "A B. C. Jones spoke": 1,
        "I am I. You are you.": 2,
    }
    assert {text: count_sentences(text) for text in counts} == counts


def test_the_loose_accuracy_removes_lines_and_stars():
    assert set(list_loose_variants("Sure:\n*a*\nBye")) == {
        "Sure:\n*a*\nBye", "*a*\nBye", "Sure:\n*a*", "*a*", "Sure:\na\nBye", "a\nBye", "Sure:\na", "a",
    }  # fmt: skip
    name, parameters = "startend:quotation", {}
    for text in ('Sure:\n"yes"', '"yes"\nBye', 'Sure:\n"yes"\nBye', '*"yes"*'):
        assert not check_instruction(name, parameters, text)
        assert check_instruction(name, parameters, text, loose=True)
    assert not check_instruction(name, parameters, 'A\nB\n"yes"', loose=True)


@pytest.mark.parametrize(("ids", "kwargs", "message"), [
    (["keywords:rhyme"], [{}], "unknown instruction 'keywords:rhyme'; known are change_case"),
    ([], [], "at least 1 instruction"),
    ("punctuation:no_comma", [{}], "is a list"),
    (["punctuation:no_comma"], [], "an entry for each of 1 instructions"),
    (["punctuation:no_comma"], [{"num_words": 3}],
     "has the parameters .none.; this row has num_words"),
    (["keywords:existence"], [{"keywords": None}],
     "has the parameters keywords; this row has .none."),
    (["keywords:existence"], [{"keywords": "tea"}], "keywords of keywords:existence is a list"),
    (["keywords:existence"], ["tea"], "are an object, this is 'tea'"),
    (["length_constraints:number_words"], [{"num_words": 3, "relation": "about"}],
     "relation of length_constraints:number_words is one of at least"),
    (["detectable_format:number_bullet_lists"], [{"num_bullets": 2.5}],
     "is a whole number, this is 2.5"),
    (["detectable_format:number_bullet_lists"], [{"num_bullets": float("inf")}],
     "is a whole number, this is inf"),
    ([["punctuation:no_comma"]], [{}], "unknown instruction .'punctuation:no_comma'."),
    (["length_constraints:number_words"], [{"num_words": 3, "relation": ["at least"]}],
     "is one of at least, less than, at most, more than, this is .'at least'."),
    (["startend:end_checker"], [{"end_phrase": ""}],
     "end_phrase of startend:end_checker is a text"),
])  # fmt: skip
def test_a_faulty_instruction_is_named(ids: Any, kwargs: Any, message: str):
    with pytest.raises(ValueError, match=message):
        bind_instructions(ids, kwargs)
    with pytest.raises(UserError, match=message):
        resolve_reward("ifeval")("", "x", {"instruction_id_list": ids, "kwargs": kwargs})


def test_the_reward_counts_instructions_strictly_and_loosely():
    # Rows of a table have every parameter, and integers as floats.
    nothing = {"keywords": None, "num_words": None, "relation": None}
    meta = {
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [nothing, {**nothing, "num_words": 2.0, "relation": "at least"}],
    }
    reward = resolve_reward("ifeval")
    for text, total, loose, strict_count, loose_count in (
        ("two words", 1.0, 1.0, 2.0, 2.0),
        ("Sure, here:\ntwo words", 0.0, 1.0, 1.0, 2.0),
        ("a, b", 0.0, 0.0, 1.0, 1.0),
        ("word", 0.0, 0.0, 1.0, 1.0),
        ("", 0.0, 0.0, 0.0, 0.0),
    ):
        result = reward.evaluate("", text, meta)
        assert result.reward == total
        assert result.metrics == {
            "correct": total,
            "loose": loose,
            "instructions": 2.0,
            "instructions_strict": strict_count,
            "instructions_loose": loose_count,
        }


HOSTILE = (
    "a" * 40_000,
    "." * 40_000,
    "a." * 20_000,
    "<<" * 20_000,
    "[a" * 20_000,
    "*" * 40_000,
    "* a" * 15_000,
    "```" + "\t" * 40_000,
    "\n" * 40_000 + "x",
    "-" * 40_000,
    "p. " * 15_000,
    '"' * 40_000,
)


def test_long_answers_take_no_long_time():
    parameters = {name: parameters for name, parameters, _, _ in reversed(CASES)}
    instructions = bind_instructions(list(parameters), list(parameters.values()))
    for text in HOSTILE:
        begin = time.process_time()
        follow_instructions(instructions, text, loose=True)
        assert time.process_time() - begin < 10, text[:20]


def test_a_missing_library_is_an_error_before_the_first_answer(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
):
    from rl.data import load_problems

    monkeypatch.setitem(sys.modules, "py3langid", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "Auf Deutsch.", "instruction_id_list": ["language:response_language"], '
        '"kwargs": [{"language": "de"}]}\n'
    )
    with pytest.raises(UserError, match=r"language:response_language.*py3langid.*\[language\]"):
        load_problems(tmp_path / "rows.jsonl")
