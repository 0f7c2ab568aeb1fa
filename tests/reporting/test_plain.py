"""Test that untrusted text is made safe to print."""

import random
import unicodedata

import pytest

from rl.sanitize import describe_error, sanitize_message, sanitize_text


@pytest.mark.parametrize(("text", "shown", "message"), [
    ("plain, ä, 中, 🙂 and\ttabs\nlines", "plain, ä, 中, 🙂 and\ttabs\nlines",
     "plain, ä, 中, 🙂 and\ttabs\nlines"),
    ("\x1b[31mred\x1b[0m", "red", "red"),
    ("\x1b[2J\x1b[1;1H\x1bc\x1b(Bgone", "gone", "gone"),
    ("\x1b]0;a title\x07text", "text", "text"),
    ("\x1b]8;;http://example.org\x1b\\link\x1b]8;;\x1b\\", "link", "link"),
    ("\x1bPdevice\x1b\\control", "control", "control"),
    ("\x9b31mred in eight bits\x9d", "red in eight bits\\x9d", "red in eight bits"),
    ("bell\x07 null\x00 delete\x7f", "bell\\x07 null\\x00 delete\\x7f", "bell null delete"),
    ("half \ud83d and \udc80", "half \\ud83d and \\udc80", "half \ufffd and \ufffd"),
    ("turned \u202e round\u2066", "turned \\u202e round\\u2066", "turned  round"),
    ("a bar\ra bar", "a bar\na bar", "a bara bar"),
    ("dos\r\nlines", "dos\nlines", "dos\nlines"),
    ("ends in \x1b", "ends in \\x1b", "ends in "),
    ("", "", ""),
])  # fmt: skip
def test_by_hand(text, shown, message):
    """A text shows control characters as escapes; a message leaves them out."""
    assert sanitize_text(text, 1000) == shown
    assert sanitize_message(text) == message


def test_any_text_is_bounded_printable_and_stays_as_it_is_the_second_time():
    rng = random.Random(0)
    kinds = [*"\x1b[]0m;\x07\\a\n\réP\x9b\ud800\u202e"]
    for _ in range(500):
        text = "".join(rng.choice(kinds) for _ in range(rng.randrange(60)))
        plain = sanitize_text(text, 1000)
        odd = [c for c in plain if c not in "\n\t" and unicodedata.category(c) in ("Cc", "Cs")]
        assert odd == [] and sanitize_text(plain, 10_000) == plain, text


def test_what_is_left_out_is_counted():
    text = sanitize_text("x" * 1_000_000 + "end", 100)
    assert text.startswith("x" * 75 + " [... 999903 characters omitted ...] ")
    assert text.endswith("end") and len(text) < 200
    long = sanitize_message("x" * 10_000_000)
    assert len(long) < 4100 and "9996000 characters omitted" in long


def test_a_message_is_escaped_for_its_stream():
    assert sanitize_message("é日", encoding="ascii") == "\\xe9\\u65e5"


def test_an_exceptions_text_may_fail():
    class Bad(Exception):
        def __str__(self):
            raise KeyError("x")

    assert describe_error(Bad()) == "Bad: (its text could not be computed: KeyError)"
    assert describe_error(ValueError("why")) == "ValueError: why"
