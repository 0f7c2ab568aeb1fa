"""Split a command line into words and flags."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rl.settings.fields import Given
from rl.settings.resumed import plain


@dataclass(frozen=True)
class Flag:
    """Hold a flag of the command line: its key and its raw value."""

    key: str
    given: Given


def split_flags(argv: Sequence[str], problems: list[str]) -> tuple[list[str], list[Flag]]:
    """Return (leading words, flags), each flag with the words that follow it. "-3" is a value; "-x"
    is appended to `problems`.
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
            flags.append((token, []))  # takes the words that follow it
        elif flags:
            flags[-1][1].append(token)
        else:
            words.append(token)
    good = [(name, values) for name, values in flags if name.startswith("--")]
    return words, [Flag(plain(name[2:]), Given(tuple(values), name)) for name, values in good]


def with_dots(flags: Sequence[Flag], mappings: Collection[str] = ("template",)) -> list[Flag]:
    """Merge `--template.enable_thinking false --template.x 1` into the flag `--template
    enable_thinking false x 1`, for each setting in `mappings`.
    """
    merged: list[Flag] = []
    for flag in flags:
        holder, dot, _ = flag.key.partition(".")
        if not dot or holder not in mappings:
            merged.append(flag)
            continue
        name = flag.given.place.partition(".")[2]  # unchanged: templates distinguish - and _
        words = (
            *(old.given.words for old in merged if old.key == holder),
            (name, *(flag.given.words or ("true",))),
        )
        merged = [old for old in merged if old.key != holder]
        merged.append(
            Flag(holder, Given(tuple(word for part in words for word in part), f"--{holder}"))
        )
    return merged
