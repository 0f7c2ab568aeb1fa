"""Stored rollouts: answers that were sampled and rewarded earlier, of a run of ours or published,
as problems with `answers`.

A row is one of
- an answer as a run writes it (rollouts/*.jsonl): tokens, logprobs, temperature and, with router
  replay, experts as drawn; rows of one
  group are one problem;
- a prompt with a response and a reward, or with lists of both; rows of one prompt are one problem;
- a question with columns of {"solution": ..., "is_correct": ...}, one for each model that answered
  it (GSM8K's published ones).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rl.data.folders import read_file
from rl.data.formats import read_messages
from rl.data.problem_set import ProblemSet
from rl.data.rows import FILE_SUFFIXES, BadRow, BadRows, NoColumn, OnBadRow
from rl.errors import UserError
from rl.images import has_images
from rl.types import Message, Problem, StoredAnswer, experts_from_text

# Where a column is not named, the first of these that a row has.
PROMPTS = ("prompt", "question", "problem", "instruction")
RESPONSES = ("response", "responses", "completion", "completions", "code", "output", "solution")
REWARDS = ("reward", "rewards", "score", "scores", "is_correct", "correct")
_TRUTH = {"true": 1.0, "false": 0.0}


@dataclass
class _Group:
    """A problem on its way: what was asked, and the answers found so far."""

    messages: list[Message]
    meta: dict[str, Any]
    answers: list[StoredAnswer] = field(default_factory=list)
    place: str = ""


def load_rollouts(
    source: str | Path,
    *,
    prompt_column: str | None = None,
    response_column: str | None = None,
    reward_column: str | None = None,
    system_prompt: str | None = None,
    limit: int | None = None,
    on_bad_row: OnBadRow = "error",
    steps: range | None = None,
) -> ProblemSet:
    """Problems with `answers`, in the order in which they first occur.

    source: a run's folder, a folder of files, or one file (.jsonl, .json, .gz of both). limit: so
    many problems. steps: of a run's folder, the steps whose rollouts are read, all of which must be
    there; by default those that are there. Rewards may be numbers or truth values (true, false,
    "true", "false"). A row that is none of the shapes above is named with file and line, or skipped
    and counted.
    """
    files = _files(Path(source).expanduser(), steps)
    bad, good = BadRows(on_bad_row), 0
    groups: dict[tuple[Any, ...], _Group] = {}
    for path in files:
        for row in read_file(path):
            try:
                if isinstance(row.columns, BadRow):
                    raise row.columns
                if row.columns.get("image_count") or any(
                    isinstance(one, list) and has_images(one) for one in row.columns.values()
                ):
                    raise BadRow(
                        "it was asked with images, and stored answers are trained on without: use sft or dpo for such rows"
                    )
                if "response_tokens" in row.columns:
                    key, group = _drawn(row.columns, row.place)
                    key = (path.name, *key)
                else:
                    key, group = _published(
                        row.columns, row.place, prompt_column, response_column, reward_column
                    )
            except BadRow as error:
                bad.add(row.place, error)
                continue
            good += 1
            groups.setdefault(
                key, _Group(group.messages, group.meta, [], group.place)
            ).answers.extend(group.answers)
    bad.settle(
        good,
        {
            "prompt_column": prompt_column,
            "response_column": response_column,
            "reward_column": reward_column,
        },
    )
    if not groups:
        raise UserError(f"{source} holds no stored answer")
    system: list[Message] = (
        [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    )
    name = Path(source).name.split(".")[0]
    problems = [
        Problem(
            (*system, *group.messages),
            group.meta,
            tag=name,
            index=i,
            answers=tuple(group.answers),
            place=group.place,
        )
        for i, group in enumerate(list(groups.values())[:limit])
    ]
    return ProblemSet(problems, name=str(source))


def filtered(
    problems: ProblemSet, top_fraction: float | None, reward_threshold: float | None
) -> ProblemSet:
    """The problems with their best answers alone, those of at least `reward_threshold` or of the
    best `top_fraction` of all.

    Answers as good as the worst of that fraction are kept too: rewards often tie. Problems left
    without an answer are left out.
    """
    rewards = sorted(
        (answer.reward for problem in problems for answer in problem.answers), reverse=True
    )
    cutoff = reward_threshold if reward_threshold is not None else -math.inf
    if top_fraction is not None:
        cutoff = rewards[max(1, math.ceil(top_fraction * len(rewards))) - 1]
    kept = [replace(p, answers=tuple(a for a in p.answers if a.reward >= cutoff)) for p in problems]
    kept = [replace(p, index=i) for i, p in enumerate(p for p in kept if p.answers)]
    if not kept:
        raise UserError(
            f"no stored answer of {problems.name} has a reward of {cutoff:g} or more; the best has {rewards[0]:g}"
        )
    return ProblemSet(kept, name=problems.name)


def _files(path: Path, steps: range | None) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(
            f"stored rollouts {path} do not exist (seen from {Path.cwd()}): give a run's folder, or a file of rows"
        )
    folder = path / "rollouts" if (path / "rollouts").is_dir() else path
    if folder == path and (path / "metrics.jsonl").is_file():
        raise UserError(
            f"the run in {path} kept no rollouts: a method that samples writes them every rollouts_every steps"
        )
    found = sorted(file for file in folder.iterdir() if file.name.endswith(FILE_SUFFIXES))
    if steps is not None:
        found = [file for file in found if _step(file) in steps]
        there = {_step(file) for file in found}
        if missing := [step for step in steps if step not in there]:
            raise UserError(
                f"{folder} lacks the rollouts of {len(missing)} of the {len(steps)} steps asked for (step {missing[0]} first)"
            )
    if not found:
        within = ", ".join(sorted(inner.name for inner in folder.iterdir() if inner.is_dir())[:8])
        within = f" (only folders: {within})" if within else ""
        raise UserError(
            f"{folder} holds no rollouts (.jsonl){within}: a run writes them every rollouts_every steps"
        )
    return found


def _step(file: Path) -> int:
    """The step in the name of a file that a run wrote (step_000010.jsonl, step_000010_grpo.jsonl);
    -1 of any other.
    """
    digits = file.name.removeprefix("step_").partition(".")[0].partition("_")[0]
    return int(digits) if digits.isdecimal() else -1


def _drawn(columns: Mapping[str, Any], place: str) -> tuple[tuple[Any, ...], _Group]:
    """(which group of its file, the answer) of a row that a run wrote."""
    tokens, prompt = (_token_ids(columns, name) for name in ("response_tokens", "prompt_tokens"))
    for name in ("group", "tag", "problem"):
        if not isinstance(columns.get(name), (str, int, type(None))):
            raise BadRow(f"{name!r} is a number or a name, this is {str(columns[name])[:60]!r}")
    for name in ("response", "prompt"):
        if not isinstance(columns.get(name, ""), str):
            raise BadRow(f"{name!r} is a text, this is {str(columns[name])[:60]!r}")
    answer = StoredAnswer(
        reward=_reward(columns.get("reward"), "reward"),
        text=columns.get("response", ""),
        prompt_tokens=prompt,
        tokens=tokens,
        logprobs=_logprobs(columns.get("logprobs"), len(tokens)),
        temperature=_temperature(columns.get("temperature")),
        place=place,
        experts=_experts(columns.get("experts"), len(prompt) + len(tokens) - 1),
    )
    asked: list[Message] = [{"role": "user", "content": columns.get("prompt", "")}]
    return (columns.get("group"), columns.get("tag"), columns.get("problem")), _Group(
        asked, {}, [answer], place
    )


def _token_ids(columns: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = columns.get(name)
    if (
        not isinstance(value, list)
        or not value
        or not all(type(t) is int and 0 <= t < 2**31 for t in value)
    ):
        raise BadRow(f"{name!r} is a list of one or more token ids, this is {str(value)[:60]!r}")
    return tuple(value)


def _logprobs(value: Any, count: int) -> tuple[float, ...] | None:
    """Of `count` tokens. A little above 0 is rounding; what is not finite is no probability."""
    if value is None:
        return None
    if (
        not isinstance(value, list)
        or len(value) != count
        or not all(_is_number(x) and x < 1e-3 for x in value)
    ):
        raise BadRow(
            f"'logprobs' has one number for each of the {count} response_tokens, at most 0, this is {str(value)[:60]!r}"
        )
    return tuple(float(x) for x in value)


def _experts(value: Any, count: int) -> str | None:
    """Of `count` tokens, as they are written."""
    if value is None:
        return None
    try:
        told = len(experts_from_text(value))
    except ValueError as error:
        raise BadRow(f"'experts': {error}") from error
    if told != count:
        raise BadRow(
            f"'experts' tells of {told} tokens; prompt and response, but for the last token, are {count}"
        )
    return str(value)


def _temperature(value: Any) -> float | None:
    if value is not None and not (_is_number(value) and value > 0):
        raise BadRow(f"'temperature' is a positive number, this is {str(value)[:60]!r}")
    return value


def _is_number(value: Any) -> bool:
    """A finite number that a float holds; true and false are none."""
    return type(value) in (int, float) and abs(value) < 1e300  # False for NaN too


def _published(
    columns: Mapping[str, Any],
    place: str,
    prompt: str | None,
    response: str | None,
    reward: str | None,
) -> tuple[tuple[Any, ...], _Group]:
    """(the prompt, its answers) of a row of text."""
    prompt = _pick(columns, prompt, PROMPTS, "prompt")
    asked = columns[prompt]
    text = None if isinstance(asked, list) else _text(asked, prompt)
    messages: list[Message] = (
        read_messages(asked, prompt) if text is None else [{"role": "user", "content": text}]
    )
    solved = {
        name: value
        for name, value in columns.items()
        if isinstance(value, dict) and "solution" in value
    }
    if solved and response is None:
        pairs = [
            (
                _text(value["solution"], f"{name}.solution"),
                _reward(value.get("is_correct"), f"{name}.is_correct"),
            )
            for name, value in solved.items()
        ]
        used = {prompt, *solved}
    else:
        response = _pick(columns, response, RESPONSES, "response")
        reward = _pick(columns, reward, REWARDS, "reward")
        texts, rewards = (
            value if isinstance(value, list) else [value]
            for value in (columns[response], columns[reward])
        )
        if len(texts) != len(rewards):
            raise BadRow(
                f"{response!r} has {len(texts)} answers and {reward!r} {len(rewards)} rewards"
            )
        pairs = [
            (_text(text, response), _reward(value, reward))
            for text, value in zip(texts, rewards, strict=True)
        ]
        used = {prompt, response, reward}
    meta = {name: value for name, value in columns.items() if name not in used}
    return (str(messages),), _Group(
        messages, meta, [StoredAnswer(value, text, place=place) for text, value in pairs], place
    )


def _pick(columns: Mapping[str, Any], named: str | None, usual: tuple[str, ...], what: str) -> str:
    """The column that is named, or the first usual one that is there."""
    candidates: Iterator[str] = (
        name for name in ([named] if named is not None else usual) if name in columns
    )
    found = next(candidates, None)
    if found is None and named is not None:
        raise NoColumn(named, columns)
    if found is None:
        has = ", ".join(map(repr, columns)) or "none"
        raise BadRow(f"no column of {', '.join(usual)}, it has {has}: name it with --{what}-column")
    return found


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise BadRow(f"{name!r} is a text, this is {str(value)[:60]!r}")
    return value


def _reward(value: Any, name: str) -> float:
    if isinstance(value, str) and value.lower() in _TRUTH:
        return _TRUTH[value.lower()]
    if not isinstance(value, bool) and not _is_number(value):
        raise BadRow(f"{name!r} is a number or a truth value, this is {str(value)[:60]!r}")
    return float(value)
