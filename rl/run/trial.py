"""A reward tried out on rows of the data before anything is loaded: what can be known of it before
sampling is known then.
"""

from __future__ import annotations

from collections.abc import Sequence

from rl.environments import episode_of, prompt_text, reward_meta
from rl.errors import UserError
from rl.rewards import Episode, Score, Scorer, Turn
from rl.types import Problem

_TRIED = 8  # rows, from all over the data
# Errors of a reward that no other answer would mend.
_BROKEN = ("KeyError", "NameError", "ImportError", "ModuleNotFoundError", "AttributeError", "TypeError", "NotApplicable",
           "no answer to compare with")  # fmt: skip


def try_reward(scorer: Scorer, rows: Sequence[Problem]) -> list[str]:
    """Scores some rows' own answers. UserError where none can be scored; else what there is to say
    of it.

    Of rows without an answer an empty one is scored: a reward may refuse that and be right, unless
    it says that it is broken.
    """
    rows = [
        row
        for i in range(min(_TRIED, len(rows)))
        if (row := rows[i * len(rows) // min(_TRIED, len(rows))]).messages
    ]
    if not rows:
        return []
    name = scorer.reward.name
    if lacking := [column for column in scorer.reward.columns if column not in rows[0].meta]:
        there = ", ".join(map(repr, rows[0].meta)) or "none"
        raise UserError(
            f"reward {name!r} takes the column{'s' * (len(lacking) > 1)} {', '.join(map(repr, lacking))}, and the rows of {rows[0].tag} "
            f"have {there} and their prompt: rename the column, or give it a default in the function"
        )
    own = [_own_answer(row) for row in rows]
    items = [(prompt_text(row.messages), answer or "", reward_meta(row, scorer), _turn(row, answer or "", scorer))
             for row, answer in zip(rows, own, strict=True)]  # fmt: skip
    scores = scorer.score_many(items)
    failed = [score for score in scores if score.reward is None]
    if not failed:
        return _worthless(name, rows, scores)
    first = failed[0].error or ""
    if len(failed) == len(scores) and not any(score.failure == "timeout" for score in failed):
        if any(own) or any(word in first for word in _BROKEN):
            what = "their own answers" if any(own) else "an empty answer"
            raise UserError(f"tried on {what} of {len(rows)} rows of {rows[0].tag}, {first}")
    return [
        f"tried on the answers of {len(rows)} rows, {first}; such samples are left out of training"
    ]


def _turn(row: Problem, answer: str, scorer: Scorer) -> Episode | None:
    """The answer as an episode of one turn, for a reward that sees episodes; a token is taken to be
    a letter.
    """
    return (
        episode_of(row, Turn(answer, tokens=max(1, len(answer)))) if scorer.reward.episode else None
    )


def _own_answer(row: Problem) -> str | None:
    if row.response is not None:
        return row.response
    answer = row.meta.get("answer")
    return str(answer) if isinstance(answer, (str, int, float)) else None


def _worthless(name: str, rows: Sequence[Problem], scores: Sequence[Score]) -> list[str]:
    """A reward that says of the data's own worked answers that none is right."""
    if any(row.response is None for row in rows) or any(
        score.metrics.get("correct", 1.0) != 0.0 for score in scores
    ):
        return []
    return [
        f"reward {name!r} calls the data's own answers wrong, all of {len(rows)} rows tried (such as {rows[0].response!r:.80}, expected "
        f"{rows[0].meta.get('answer')!r:.40}): is it the reward for this data, and does --answer-column name the right column?"
    ]
