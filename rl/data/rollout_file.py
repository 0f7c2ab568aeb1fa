"""Load stored rollouts (answers that were sampled and rewarded earlier, by a run of this project or
published) as problems with `answers`.

A row is one of
- an answer as a run writes it (rollouts/*.jsonl): tokens, logprobs, temperature and, with router
  replay, the experts at sampling; the rows of a group form a problem;
- a prompt with a response and a reward, or with lists of both; the rows of a prompt form a problem;
- a question with columns of {"solution": ..., "is_correct": ...}, a column for each model that
  answered it (GSM8K's published answers).
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from rl.data.problem_set import ProblemSet
from rl.data.prompt_template import PromptTemplate
from rl.data.row_formats import check_text, get_column, make_prompt, read_messages, read_tools
from rl.data.row_readers import (
    FILE_SUFFIXES,
    BadRow,
    BadRowCollector,
    Columns,
    OnBadRow,
)
from rl.data.table_readers import read_file
from rl.errors import UserError
from rl.images import has_images
from rl.jsonl import get_evaluation_step, get_rollout_step
from rl.types import Message, Problem, StoredAnswer, experts_from_text

# The candidates for a column that the caller does not name, in order of preference.
PROMPTS = ("prompt", "question", "problem", "instruction")
RESPONSES = ("response", "responses", "completion", "completions", "code", "output", "solution")
REWARDS = ("reward", "rewards", "score", "scores", "is_correct", "correct")
_TRUTH = {"true": 1.0, "false": 0.0}


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
    """Load problems with `answers`, in the order of their first occurrence.

    source: a run's folder, a folder of files, or a file (.jsonl, .json, .gz of both).
    limit: the number of problems to return.
    steps: the steps of a run's folder to read, all of which must exist; None: all that exist.

    Rewards may be numbers or truth values (true, false, "true", "false"). A row of any other form
    than those above is reported with file and line, or skipped and counted, by on_bad_row. Raises
    UserError if no stored answer exists.
    """
    files = _find_rollout_files(Path(source).expanduser(), steps)
    bad, good = BadRowCollector(on_bad_row), 0
    groups: dict[tuple[Any, ...], list[Problem]] = {}
    for path in files:
        for row in read_file(path):
            try:
                columns = row.columns
                if columns.get("image_count") or any(
                    isinstance(column, list) and has_images(column) for column in columns.values()
                ):
                    raise BadRow(
                        "its prompt has images, which training on stored answers does not support: "
                        "use sft or dpo for such rows"
                    )
                if "response_tokens" in columns:
                    key, problem = _parse_run_row(columns, row.place)
                    key = (path.name, *key)
                else:
                    key, problem = _parse_published_row(
                        columns, row.place, prompt_column, response_column, reward_column
                    )
            except BadRow as error:
                bad.add(row.place, error)
                continue
            good += 1
            if problem.answers:  # a row may have empty lists
                groups.setdefault(key, []).append(problem)
    bad.raise_or_log(
        good,
        {
            "prompt_column": prompt_column,
            "response_column": response_column,
            "reward_column": reward_column,
        },
    )
    if not groups:
        raise UserError(f"{source} holds no stored answer")
    template = PromptTemplate(system_prompt)
    name = Path(source).name.split(".")[0]
    problems = [
        replace(
            group[0],
            messages=template(group[0].messages, {}),
            tag=name,
            index=i,
            answers=tuple(answer for problem in group for answer in problem.answers),
        )
        for i, group in enumerate(list(groups.values())[:limit])
    ]
    return ProblemSet(problems, name=str(source))


def filter_answers(
    problems: ProblemSet, top_fraction: float | None, reward_threshold: float | None
) -> ProblemSet:
    """Keep only the answers of at least `reward_threshold`, or the best `top_fraction` of all.

    Answers that tie with the worst of that fraction are kept too, since rewards often tie. Problems
    without a remaining answer are dropped. Raises UserError if no answer remains.
    """
    rewards = sorted(
        (answer.reward for problem in problems for answer in problem.answers), reverse=True
    )
    cutoff = reward_threshold if reward_threshold is not None else -math.inf
    if top_fraction is not None:
        # exact: 0.07 * 100 is above 7 as a float
        count = math.ceil(Fraction(str(top_fraction)) * len(rewards))
        cutoff = rewards[max(1, count) - 1]
    best = [(p, tuple(a for a in p.answers if a.reward >= cutoff)) for p in problems]
    problems_kept = [
        replace(p, answers=answers, index=i)
        for i, (p, answers) in enumerate(pair for pair in best if pair[1])
    ]
    if not problems_kept:
        raise UserError(
            f"no stored answer of {problems.name} has a reward of {cutoff:g} or more; the best "
            f"has {rewards[0]:g}"
        )
    return ProblemSet(problems_kept, name=problems.name)


def _find_rollout_files(path: Path, steps: range | None) -> list[Path]:
    """Return the rollout files of a path, sorted. Raises UserError if any requested are missing."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(
            f"stored rollouts {path} do not exist (current directory: {Path.cwd()}): "
            "pass a run's folder or a file of rows"
        )
    folder = path / "rollouts" if (path / "rollouts").is_dir() else path
    if folder == path and (path / "metrics.jsonl").is_file():
        raise UserError(
            f"the run in {path} kept no rollouts: a method that samples writes them every "
            f"rollouts_every steps"
        )
    files = sorted(
        file
        for file in folder.iterdir()
        if file.name.endswith(FILE_SUFFIXES) and get_evaluation_step(file.name) is None
    )
    if steps is not None:
        files = [file for file in files if get_rollout_step(file.name) in steps]
        available_steps = {get_rollout_step(file.name) for file in files}
        if missing := [step for step in steps if step not in available_steps]:
            raise UserError(
                f"{folder} lacks the rollouts of {len(missing)} of the {len(steps)} steps "
                f"asked for (step {missing[0]} first)"
            )
    if not files:
        within = ", ".join(sorted(inner.name for inner in folder.iterdir() if inner.is_dir())[:8])
        within = f" (only folders: {within})" if within else ""
        raise UserError(
            f"{folder} holds no rollouts (.jsonl){within}: a run writes them every rollouts_every "
            f"steps"
        )
    return files


def _parse_run_row(columns: Columns, place: str) -> tuple[tuple[Any, ...], Problem]:
    """Return (key of the group within its file, the answer) of a row that a run wrote."""
    tokens, prompt = (_token_ids(columns, name) for name in ("response_tokens", "prompt_tokens"))
    for name in ("group", "tag", "problem"):
        if not isinstance(columns.get(name), (str, int, type(None))):
            raise BadRow(f"{name!r} is a number or a name, this is {str(columns[name])[:60]!r}")
    for name in ("response", "prompt"):
        if not isinstance(columns.get(name, ""), str):
            raise BadRow(f"{name!r} is a text, this is {str(columns[name])[:60]!r}")
    temperature = columns.get("temperature")
    if temperature is not None and not (_is_number(temperature) and temperature > 0):
        raise BadRow(f"'temperature' is a positive number, this is {str(temperature)[:60]!r}")
    answer = StoredAnswer(
        reward=_reward(columns.get("reward"), "reward"),
        text=columns.get("response", ""),
        prompt_tokens=prompt,
        tokens=tokens,
        logprobs=_logprobs(columns.get("logprobs"), len(tokens)),
        temperature=temperature,
        place=place,
        experts=_experts(columns.get("experts"), len(prompt) + len(tokens) - 1),
    )
    message = {"role": "user", "content": columns.get("prompt", "")}
    group = columns.get("group")
    key = (prompt if group is None else group, columns.get("tag"), columns.get("problem"))
    return key, Problem((message,), answers=(answer,), place=place)


def _token_ids(columns: Columns, name: str) -> tuple[int, ...]:
    """Return the token ids of a column. Raises BadRow unless it is a non-empty list of ids."""
    value = columns.get(name)
    if (
        not isinstance(value, list)
        or not value
        or not all(type(t) is int and 0 <= t < 2**31 for t in value)
    ):
        raise BadRow(f"{name!r} is a list of one or more token ids, this is {str(value)[:60]!r}")
    return tuple(value)


def _logprobs(value: Any, count: int) -> tuple[float, ...] | None:
    """Return the logprobs of `count` tokens; None if the row has none.

    Raises BadRow for a wrong count, for numbers that are not finite, and for numbers of at least
    1e-3; smaller positive numbers are rounding errors.
    """
    if value is None:
        return None
    is_list = isinstance(value, list) and len(value) == count
    if not is_list or not all(_is_number(x) and x < 1e-3 for x in value):
        raise BadRow(
            f"'logprobs' has one number for each of the {count} response_tokens, at most 0, "
            f"this is {str(value)[:60]!r}"
        )
    return tuple(float(x) for x in value)


def _experts(value: Any, count: int) -> str | None:
    """Return the expert record of `count` tokens, as stored text; None if the row has none."""
    if value is None:
        return None
    try:
        count_recorded = len(experts_from_text(value))
    except ValueError as error:
        raise BadRow(f"'experts': {error}") from error
    if count_recorded != count:
        raise BadRow(
            f"'experts' tells of {count_recorded} tokens; prompt and response, without the last "
            f"token, have {count}"
        )
    return str(value)


def _is_number(value: Any) -> bool:
    """Return whether a value is a number with |value| < 1e300; true and false are not."""
    return type(value) in (int, float) and abs(value) < 1e300  # False for NaN too


def _parse_published_row(
    columns: Columns,
    place: str,
    prompt: str | None,
    response: str | None,
    reward: str | None,
) -> tuple[tuple[Any, ...], Problem]:
    """Return (key of the prompt, its answers) of a row of text."""
    prompt = _pick_column(columns, prompt, PROMPTS, "prompt")
    prompt_value = columns[prompt]
    text = None if isinstance(prompt_value, list) else check_text(prompt_value, prompt)
    messages: list[Message] = (
        read_messages(prompt_value, prompt) if text is None else make_prompt(text)
    )
    solved = {
        name: value
        for name, value in columns.items()
        if isinstance(value, dict) and {"solution", "is_correct"} <= value.keys()
    }
    if solved and response is None:
        pairs = [
            (
                check_text(value["solution"], f"{name}.solution"),
                _reward(value.get("is_correct"), f"{name}.is_correct"),
            )
            for name, value in solved.items()
        ]
        used = {prompt, *solved}
    else:
        response = _pick_column(columns, response, RESPONSES, "response")
        reward = _pick_column(columns, reward, REWARDS, "reward")
        texts, rewards = (
            value if isinstance(value, list) else [value]
            for value in (columns[response], columns[reward])
        )
        if len(texts) != len(rewards):
            raise BadRow(
                f"{response!r} has {len(texts)} answers and {reward!r} {len(rewards)} rewards"
            )
        pairs = [
            (check_text(text, response), _reward(value, reward))
            for text, value in zip(texts, rewards, strict=True)
        ]
        used = {prompt, response, reward}
    meta = {name: value for name, value in columns.items() if name not in used}
    answers = tuple(StoredAnswer(value, text, place=place) for text, value in pairs)
    tools = read_tools(columns)
    key = (str(messages), str(tools))
    return key, Problem(tuple(messages), meta, answers=answers, place=place, tools=tools)


def _pick_column(columns: Columns, requested: str | None, usual: tuple[str, ...], what: str) -> str:
    """Return the named column, or the first of the usual columns that the row has.

    Raises BadRow if the row has no such column.
    """
    if requested is not None:
        get_column(columns, requested)
        return requested
    for name in usual:
        if name in columns:
            return name
    has = ", ".join(map(repr, columns)) or "none"
    raise BadRow(f"no column of {', '.join(usual)}, it has {has}: name it with --{what}-column")


def _reward(value: Any, name: str) -> float:
    """Return a number or truth value as a float. Raises BadRow for any other value."""
    if isinstance(value, str) and value.lower() in _TRUTH:
        return _TRUTH[value.lower()]
    if not isinstance(value, bool) and not _is_number(value):
        raise BadRow(f"{name!r} is a number or a truth value, this is {str(value)[:60]!r}")
    return float(value)
