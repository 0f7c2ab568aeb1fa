"""Try a reward on rows of the data before anything is loaded, so that its faults are known before
sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl.envs import last_user_text, make_reward_episode, make_reward_meta
from rl.errors import UserError
from rl.rewards import Episode, EpisodeTurn, Score, Scorer
from rl.types import Problem

CHECKED_ROWS = 8  # rows, evenly spread over the data
# Errors of a reward that no other answer would avoid.
_FATAL_ERRORS = (
    "KeyError",
    "NameError",
    "ImportError",
    "ModuleNotFoundError",
    "AttributeError",
    "TypeError",
    "NotApplicable",
    "no expected answer",
)


def check_reward(scorer: Scorer, rows: Sequence[Problem]) -> list[str]:
    """Score the reference answers of some rows. Return remarks. Raises UserError if no row can be
    scored.

    A row without an answer is scored with an empty answer. A reward may rightly refuse it, unless
    its error shows that it is broken.
    """
    rows = select_trial_rows(rows, CHECKED_ROWS)
    if not rows:
        return []
    name = scorer.reward.name
    if lacking := [column for column in scorer.reward.columns if column not in rows[0].meta]:
        available = ", ".join(map(repr, rows[0].meta)) or "none"
        raise UserError(
            f"reward {name!r} takes the column{'s' * (len(lacking) > 1)} "
            f"{', '.join(map(repr, lacking))}, and the rows of {rows[0].tag} have {available} "
            "and their prompt: rename the column, or give it a default in the function"
        )
    answers = [get_reference_answer(row) for row in rows]
    scores = scorer.score_many(
        make_reward_item(row, answer or "", scorer)
        for row, answer in zip(rows, answers, strict=True)
    )
    failed = [score for score in scores if score.reward is None]
    if not failed:
        return _check_reference_scores(name, rows, scores)
    first = failed[0].error or ""
    if len(failed) == len(scores) and not any(score.failure == "timeout" for score in failed):
        if any(answers) or any(word in first for word in _FATAL_ERRORS):
            answer_kind = "the reference answers" if any(answers) else "an empty answer"
            raise UserError(f"tried on {answer_kind} of {len(rows)} rows of {rows[0].tag}, {first}")
    return [
        f"tried on the answers of {len(rows)} rows, {first}; such samples are left out of training"
    ]


def select_trial_rows(rows: Sequence[Problem], count: int) -> list[Problem]:
    """Return at most `count` rows with a prompt, evenly spread over the data."""
    count = min(count, len(rows))
    return [row for i in range(count) if (row := rows[i * len(rows) // count]).messages]


def make_reward_item(row: Problem, answer: str, scorer: Scorer) -> tuple[Any, ...]:
    """Return the arguments of `Scorer.submit` for an answer to a row, as in training."""
    return (
        last_user_text(row.messages),
        answer,
        make_reward_meta(row, scorer),
        _make_episode(row, answer, scorer),
    )


def _make_episode(row: Problem, answer: str, scorer: Scorer) -> Episode | None:
    """Return the answer as an episode of one turn, for a reward that scores episodes. Each letter
    counts as a token.
    """
    return (
        make_reward_episode(row, EpisodeTurn(answer, tokens=max(1, len(answer))))
        if scorer.reward.episode
        else None
    )


def get_reference_answer(row: Problem) -> str | None:
    """Return the row's worked response, else its expected answer as text; None without both."""
    return get_expected_answer(row) if row.response is None else row.response


def get_expected_answer(row: Problem) -> str | None:
    """Return the row's expected answer as text; None without one."""
    answer = row.meta.get("answer")
    return str(answer) if isinstance(answer, (str, int, float)) else None


def _check_reference_scores(
    name: str, rows: Sequence[Problem], scores: Sequence[Score]
) -> list[str]:
    """Return a remark if the reward says that none of the data's worked answers is right."""
    if any(row.response is None for row in rows) or any(
        score.metrics.get("correct", 1.0) != 0.0 for score in scores
    ):
        return []
    return [
        f"reward {name!r} calls the data's reference answers wrong, all of {len(rows)} rows tried "
        f"(such as {rows[0].response!r:.80}, expected {rows[0].meta.get('answer')!r:.40}): is "
        "it the reward for this data, and does --answer-column name the right column?"
    ]
