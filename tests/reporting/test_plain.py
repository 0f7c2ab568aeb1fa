"""Test that untrusted text is made safe to print."""

import random
import unicodedata

import pytest

from rl.sanitize import describe_error, sanitize_text


@pytest.mark.parametrize("inputs, shown", [
    ("plain, ä, 中, 🙂 and\ttabs\nlines", "plain, ä, 中, 🙂 and\ttabs\nlines"),
    ("\x1b[31mred\x1b[0m", "red"),
    ("\x1b[2J\x1b[1;1Hgone", "gone"),
    ("\x1b]0;a title\x07text", "text"),
    ("\x1b]8;;http://example.org\x1b\\link\x1b]8;;\x1b\\", "link"),
    ("\x1bPdevice\x1b\\control", "control"),
    ("\x9b31mred in eight bits", "red in eight bits"),
    ("bell\x07 null\x00 delete\x7f", "bell\\x07 null\\x00 delete\\x7f"),
    ("half a pair \ud83d and \udc80", "half a pair \\ud83d and \\udc80"),
    ("turned \u202e round", "turned \\u202e round"),
    ("a bar\ra bar", "a bar\na bar"),
    ("dos\r\nlines", "dos\nlines"),
    ("", ""),
])  # fmt: skip
def test_by_hand(inputs, shown):
    assert sanitize_text(inputs, 1000) == shown


def test_any_text_is_bounded_printable_and_stays_as_it_is_the_second_time():
    rng = random.Random(0)
    kinds = [
        "\x1b", "[", "]", "0", "m", ";", "\x07", "\\", "a", "\n", "\r", "\ud800", "\u202e", "é",
        "\x9b", "P",
    ]  # fmt: skip
    for _ in range(500):
        text = "".join(rng.choice(kinds) for _ in range(rng.randrange(60)))
        plain = sanitize_text(text, 1000)
        assert all(c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs") for c in plain), (
            text,
            plain,
        )
        assert plain.encode("utf-8") and sanitize_text(plain, 10_000) == plain or not plain


def test_what_is_left_out_is_counted():
    text = sanitize_text("x" * 1_000_000 + "end", 100)
    assert text.startswith("x" * 75 + " [... 999903 characters omitted ...] ")
    assert text.endswith("end")
    assert len(text) < 200


def test_an_exceptions_text_may_fail():
    class Bad(Exception):
        def __str__(self):
            raise KeyError("x")

    assert describe_error(Bad()) == "Bad: (its text could not be computed: KeyError)"
    assert describe_error(ValueError("why")) == "ValueError: why"
