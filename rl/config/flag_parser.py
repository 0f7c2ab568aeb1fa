"""Split a command line into words and flags."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rl.config.fields import RawValue
from rl.config.saved_config import to_setting_name


@dataclass(frozen=True)
class ParsedFlag:
    """Hold a flag of the command line: its key and its raw value."""

    key: str
    raw: RawValue


def split_flags(argv: Sequence[str], problems: list[str]) -> tuple[list[str], list[ParsedFlag]]:
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
    return words, [
        ParsedFlag(to_setting_name(name[2:]), RawValue(tuple(values), name))
        for name, values in good
    ]


def merge_dotted_flags(
    flags: Sequence[ParsedFlag], mappings: Collection[str] = ("template",)
) -> list[ParsedFlag]:
    """Merge `--template.enable_thinking false --template.x 1` into the flag `--template
    enable_thinking false x 1`, for each setting in `mappings`.
    """
    merged: list[ParsedFlag] = []
    for flag in flags:
        holder, dot, _ = flag.key.partition(".")
        if not dot or holder not in mappings:
            merged.append(flag)
            continue
        name = flag.raw.place.partition(".")[2]  # unchanged: templates distinguish - and _
        words = (
            *(old.raw.words for old in merged if old.key == holder),
            (name, *(flag.raw.words or ("true",))),
        )
        merged = [old for old in merged if old.key != holder]
        merged.append(
            ParsedFlag(
                holder, RawValue(tuple(word for part in words for word in part), f"--{holder}")
            )
        )
    return merged
