"""The words of a command line: which are flags, and what belongs to each."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rl.settings.fields import Given
from rl.settings.resumed import plain


@dataclass(frozen=True)
class Flag:
    key: str
    given: Given


def split_flags(argv: Sequence[str], problems: list[str]) -> tuple[list[str], list[Flag]]:
    """The leading words, and the flags with the words that follow each. "-3" is a value, "-x" is a
    mistake.
    """
    words: list[str] = []
    flags: list[tuple[str, list[str]]] = []
    for token in argv:
        if token.startswith("--") and len(token) > 2:
            name, equals, value = token.partition("=")
            flags.append((name, [value] if equals else []))
        elif (
            token.startswith("-") and token[1:2].isalpha() and token.lower() not in ("-inf", "-nan")
        ):
            problems.append(f"{token}: flags begin with two dashes, like --{token.lstrip('-')}")
            flags.append((token, []))  # takes the values that follow it
        elif flags:
            flags[-1][1].append(token)
        else:
            words.append(token)
    good = [(name, values) for name, values in flags if name.startswith("--")]
    return words, [Flag(plain(name[2:]), Given(tuple(values), name)) for name, values in good]


def with_dots(flags: Sequence[Flag], mappings: Collection[str] = ("template",)) -> list[Flag]:
    """`--template.enable_thinking false --template.x 1` as the one flag `--template enable_thinking
    false x 1`.
    """
    merged: list[Flag] = []
    for flag in flags:
        holder, dot, _ = flag.key.partition(".")
        if not dot or holder not in mappings:
            merged.append(flag)
            continue
        name = flag.given.place.partition(".")[2]  # as it was written: templates tell - from _
        words = (
            *(old.given.words for old in merged if old.key == holder),
            (name, *(flag.given.words or ("true",))),
        )
        merged = [old for old in merged if old.key != holder]
        merged.append(
            Flag(holder, Given(tuple(word for part in words for word in part), f"--{holder}"))
        )
    return merged
