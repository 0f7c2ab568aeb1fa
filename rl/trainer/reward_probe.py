"""Try a reward on reference answers of the data, and on mutants of them: report its faults, and
what it pays for.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl.envs import last_user_text, make_scored_problem
from rl.errors import UserError
from rl.rewards import Score, Scorer
from rl.sanitize import sanitize_text
from rl.trainer.answer_mutants import (
    MUTANTS,
    RIGHT,
    AnswerMutant,
    MutantSource,
    ReferenceAnswer,
    build_mutants,
    get_reference_answer,
    list_answer_forms,
)
from rl.types import Problem

CHECKED_ROWS = 8  # rows, evenly spread over the data
PROBED_ROWS = 50
_FORM_TRIAL_ROWS = 4  # rows on which the form of a right answer is chosen
_LEAST_ROWS = 4  # a check of fewer rows says nothing
_NEARLY = 0.05  # a trick pays as much if it misses at most this share of a right answer's reward
_ACCUSED_SHARE = 0.25  # of the rows; a mutant may be right by chance on some
# Built-in rewards of an answer's form: a wrong answer of the same form earns the same, by design.
_FORM_REWARDS = frozenset(
    {
        "format_compliance",
        "keyword_contains",
        "language",
        "length_penalty",
        "repetition",
        "script",
    }
)
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
        has_worked_answers = all(row.response is not None for row in rows)
        if not has_worked_answers or any(score.metrics.get("correct") != 0.0 for score in scores):
            return []
        return [
            f"reward {name!r} calls the data's reference answers wrong, all of {len(rows)} rows "
            f"tried (such as {rows[0].response!r:.80}, expected "
            f"{rows[0].meta.get('answer')!r:.40}): is it the reward for this data, and does "
            "--answer-column name the right column?"
        ]
    first = failed[0].error or ""
    if len(failed) == len(scores) and not any(score.failure == "timeout" for score in failed):
        if any(answers) or any(word in first for word in _FATAL_ERRORS):
            answer_kind = "the reference answers" if any(answers) else "an empty answer"
            if "KeyError" in first:
                first += f"; meta has {', '.join(rows[0].meta) or 'no column'}"
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
    # a reward that scores episodes gets one turn, in which each letter counts as a token
    return make_scored_problem(row, scorer.reward).make_item(answer, max(1, len(answer)))


@dataclass(frozen=True)
class MutantResult:
    """Hold what a reward pays for one kind of answer.

    mean: the mean reward of the answers that were scored; None if none was
    top_share: the share of them that earn the highest reward of the whole check
    paid: rows on which it earns as much as the right answer, of `compared` rows
    failures: answers that could not be scored
    sample: an answer, if possible one that earns as much
    """

    name: str
    mean: float | None
    top_share: float
    paid: int
    compared: int
    failures: int
    sample: str


@dataclass(frozen=True)
class RewardProbeResult:
    """Hold what a check of a reward showed.

    form: how the right answers were written
    rows: number of rows that were checked
    results: a result for each kind of answer, the right answer first
    warnings: a sentence for each trick that pays as much as a right answer, and other faults
    notes: what a user may want to know, and is no fault
    skipped: why nothing was checked; None if it was
    """

    reward: str
    form: str = ""
    rows: int = 0
    results: tuple[MutantResult, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    skipped: str | None = None


class _OutOfTime(Exception):
    """Raised when the budget is spent."""


@dataclass(frozen=True)
class _ProbedRow:
    """Hold the texts and the scores of a row's mutants."""

    question: str
    is_program: bool
    texts: Mapping[AnswerMutant, str]
    scores: Mapping[AnswerMutant, Score]

    @property
    def rewards(self) -> dict[AnswerMutant, float]:
        """Return the rewards of the mutants that were scored."""
        return {
            mutant: score.reward
            for mutant, score in self.scores.items()
            if score.reward is not None
        }

    def pays_right(self) -> bool:
        """Return whether the right answer earns more than some other answer."""
        rewards = self.rewards
        return RIGHT in rewards and rewards[RIGHT] > min(rewards.values())

    def pays(self, mutant: AnswerMutant) -> bool | None:
        """Return whether a mutant earns as much as the right answer, and more than some other
        answer. None if it or the right answer was not scored.
        """
        rewards = self.rewards
        if RIGHT not in rewards or mutant not in rewards:
            return None
        least, right = min(rewards.values()), rewards[RIGHT]
        return rewards[mutant] > least and rewards[mutant] >= right - _NEARLY * (right - least)


def probe_reward(
    scorer: Scorer,
    rows: Sequence[Problem],
    *,
    limit: int = PROBED_ROWS,
    budget: float = 30.0,
    answer_format: str | None = None,
    tried: bool = False,
) -> RewardProbeResult:
    """Score right answers and mutants of them on at most `limit` rows, in at most about `budget`
    seconds.

    `answer_format`: how a right answer is written, with {answer} in it. None: the form that the
    reward pays best. `tried`: the reward has passed `check_reward` on the rows already. A reward
    that is too slow is skipped. Raises UserError as `check_reward` does.
    """
    begin = time.monotonic()
    deadline = begin + budget
    result = RewardProbeResult(scorer.reward.name)
    chosen_rows = select_trial_rows(rows, limit)
    if not chosen_rows:
        return replace(result, skipped="the data has no row with a prompt")
    probed: list[_ProbedRow] = []
    notes: list[str] = []
    form, answers = "", list[tuple[Problem, ReferenceAnswer]]()
    try:
        if not tried:
            _check_speed(scorer, chosen_rows[0], deadline)
            notes += check_reward(scorer, rows)
        form, answers = _choose_form(scorer, chosen_rows, answer_format, deadline)
        if not answers:
            missing = "the rows have no expected answer and no worked response"
            return replace(
                result,
                notes=tuple(notes),
                skipped=f"{missing}: name a column with --answer-column or --response-column",
            )
        _probe_rows(scorer, answers, deadline, probed)
    except _OutOfTime:
        pass
    if len(probed) < max(1, min(_LEAST_ROWS, len(answers))):
        slow = f"the reward is slow: {budget:.3g} s were not enough for {_LEAST_ROWS} rows"
        return replace(result, skipped=f"{slow} (check_reward.py has --budget for this time)")
    if len(answers) < len(chosen_rows):
        count = len(chosen_rows) - len(answers)
        notes.append(f"{count} rows are left out: they have no right answer written as {form}")
    if len(probed) < len(answers):
        notes.append(f"{len(probed)} of {len(answers)} rows were checked in {budget:.3g} s")
    results = _summarize(probed)
    warnings = _describe_failures(probed, results)
    if all(part.builtin and part.name in _FORM_REWARDS for part in scorer.reward.parts()):
        notes.append(
            f"{scorer.reward.name} measures the form of an answer, not whether it is right: add a "
            "reward that compares the answer (--rewards)"
        )
    else:
        warnings += _describe_tricks(probed, results)
    return replace(
        result,
        form=form,
        rows=len(probed),
        results=tuple(results.values()),
        warnings=tuple(warnings),
        notes=tuple(notes),
        seconds=time.monotonic() - begin,
    )


def format_probe_table(result: RewardProbeResult, width: int = 100) -> list[str]:
    """Return the table of a check as lines of at most `width` columns, if `width` is at least
    80.
    """
    cells = [("answer", "mean", "top", "as right", "sample")]
    for row in result.results:
        mean = "failed" if row.mean is None else f"{row.mean:.2f}"
        sample = sanitize_text(repr(row.sample[:200]), 400)
        ratio = f"{row.paid} of {row.compared}"
        cells.append((row.name, mean, f"{row.top_share:.0%}", ratio, sample))
    names, *numbers = (max(len(line[i]) for line in cells) for i in range(4))
    lines = []
    for name, *columns, sample in cells:
        figures = "  ".join(f"{text:>{size}}" for text, size in zip(columns, numbers, strict=True))
        lines.append(f"{name:<{names}}  {figures}  {sample}"[:width].rstrip())
    return lines


def _score(scorer: Scorer, answers: Sequence[tuple[Problem, str]], deadline: float) -> list[Score]:
    """Return the scores of answers. Raises _OutOfTime at the deadline."""
    pending = [scorer.submit(*make_reward_item(row, text, scorer)) for row, text in answers]
    try:
        return [each.result(max(0.0, deadline - time.monotonic())) for each in pending]
    except TimeoutError as error:
        raise _OutOfTime from error


def _check_speed(scorer: Scorer, row: Problem, deadline: float) -> None:
    """Raise _OutOfTime if the reward is too slow for `check_reward`. The first call may include
    imports, so the second is measured.
    """
    for _ in range(2):
        begin = time.monotonic()
        _score(scorer, [(row, "")], deadline)
    now = time.monotonic()
    if now + CHECKED_ROWS * (now - begin) > deadline:
        raise _OutOfTime


def _choose_form(
    scorer: Scorer, rows: Sequence[Problem], answer_format: str | None, deadline: float
) -> tuple[str, list[tuple[Problem, ReferenceAnswer]]]:
    """Return the form of right answers that earns most on some rows (the first of equals), and the
    rows that have such an answer.
    """
    programs = scorer.reward.runs_programs
    forms = [list_answer_forms(row, programs, answer_format) for row in rows]
    step = max(1, len(rows) // _FORM_TRIAL_ROWS)
    trials = [
        (name, row, answer)
        for row, row_forms in zip(rows[::step], forms[::step], strict=True)
        for name, answer in row_forms.items()
    ]
    scores = _score(scorer, [(row, answer.text) for _, row, answer in trials], deadline)
    earned: dict[str, list[float]] = defaultdict(list)
    for (name, _, _), score in zip(trials, scores, strict=True):
        earned[name].append(float("-inf") if score.reward is None else score.reward)
    form = max(earned, key=lambda name: sum(earned[name]) / len(earned[name]), default="")
    return form, [
        (row, row_forms[form])
        for row, row_forms in zip(rows, forms, strict=True)
        if form in row_forms
    ]


def _probe_rows(
    scorer: Scorer,
    answers: Sequence[tuple[Problem, ReferenceAnswer]],
    deadline: float,
    probed: list[_ProbedRow],
) -> None:
    """Append the scores of the rows' mutants to `probed`, in growing blocks. Raises _OutOfTime if
    the time until the deadline is not enough for another block.
    """
    size, start, row_seconds = 1, 0, 0.0
    while start < len(answers):
        begin = time.monotonic()
        if begin + size * row_seconds > deadline:
            raise _OutOfTime
        rows = answers[start : start + size]
        block = [build_mutants(_make_source(answers, start + i)) for i in range(len(rows))]
        texts = [
            (row, text)
            for (row, _), mutants in zip(rows, block, strict=True)
            for text in mutants.values()
        ]
        scores = iter(_score(scorer, texts, deadline))
        for (row, answer), mutants in zip(rows, block, strict=True):
            row_scores = {mutant: next(scores) for mutant in mutants}
            question = last_user_text(row.messages)
            probed.append(_ProbedRow(question, answer.is_program, mutants, row_scores))
        row_seconds = (time.monotonic() - begin) / len(block)
        start, size = start + size, 2 * size


def _make_source(answers: Sequence[tuple[Problem, ReferenceAnswer]], number: int) -> MutantSource:
    """Return what the mutants of a row are made of: the answers of the rows after it, too."""
    row, answer = answers[number]
    others = {
        other.final.strip(): other for _, other in (*answers[number + 1 :], *answers[:number])
    }
    others.pop(answer.final.strip(), None)
    return MutantSource(answer, last_user_text(row.messages), list(others.values()), number)


def _summarize(probed: Sequence[_ProbedRow]) -> dict[AnswerMutant, MutantResult]:
    """Return a result for each kind of answer that some row has."""
    top = max((reward for row in probed for reward in row.rewards.values()), default=0.0)
    results = {}
    for mutant in MUTANTS:
        rows = [row for row in probed if mutant in row.texts]
        if not rows:
            continue
        rewards = [row.rewards[mutant] for row in rows if mutant in row.rewards]
        paid = [pays for row in rows if (pays := row.pays(mutant)) is not None]
        sample = next((row for row in rows if row.pays(mutant)), rows[0])
        results[mutant] = MutantResult(
            mutant.name,
            sum(rewards) / len(rewards) if rewards else None,
            sum(reward == top for reward in rewards) / max(1, len(rewards)),
            sum(paid),
            len(paid),
            len(rows) - len(rewards),
            sample.texts[mutant],
        )
    return results


def _describe_failures(
    probed: Sequence[_ProbedRow], results: Mapping[AnswerMutant, MutantResult]
) -> list[str]:
    """Return a warning for each kind of answer on which the reward fails."""
    warnings = []
    for mutant, result in results.items():
        if result.failures:
            errors = [row.scores[mutant].error for row in probed if mutant in row.scores]
            warnings.append(
                f"{result.name}: the reward fails on {result.failures} of "
                f"{len(errors)} ({next(filter(None, errors), '')}); such samples are left out of "
                "training: return a number for every answer"
            )
    return warnings


def _describe_tricks(
    probed: Sequence[_ProbedRow], results: Mapping[AnswerMutant, MutantResult]
) -> list[str]:
    """Return a warning for each trick that pays as much as a right answer, and if right answers are
    not recognised.
    """
    rewards = {reward for row in probed for reward in row.rewards.values()}
    if len(rewards) == 1:
        return [
            f"the reward pays {rewards.pop():g} for every answer, right or wrong: is it the reward "
            "for this data, and does --answer-format show how a right answer is written?"
        ]
    warnings = []
    recognised = sum(row.pays_right() for row in probed)
    if 2 * recognised < len(probed):
        warnings.append(
            f"{RIGHT.name} earns no more than wrong answers on {len(probed) - recognised} of "
            f"{len(probed)} rows, such as {_shorten(results[RIGHT].sample)}: is it the reward for "
            "this data, and does --answer-format show how a right answer is written?"
        )
    program = any(row.is_program for row in probed)
    for mutant, result in results.items():
        if mutant.is_wrong(program) and result.paid >= max(1.0, _ACCUSED_SHARE * result.compared):
            sample = next(row for row in probed if row.pays(mutant))
            warnings.append(
                f"{mutant.name} pays as much as the right answer on {result.paid} of "
                f"{result.compared} rows, such as {_shorten(sample.texts[mutant])} to "
                f"{_shorten(sample.question)} ({sample.rewards[mutant]:g}; the right answer "
                f"{_shorten(sample.texts[RIGHT])} earns {sample.rewards[RIGHT]:g}): {mutant.remedy}"
            )
    return warnings


def _shorten(text: str) -> str:
    """Return the beginning of a text on one line, for a message."""
    return sanitize_text(repr(text if len(text) <= 60 else text[:57] + "..."), 400)
