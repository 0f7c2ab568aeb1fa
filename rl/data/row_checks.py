"""Check all rows before the first step; report bad rows with file and line, or skip them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from rl.data.length_limits import LengthLimits, RowTooLong, cut_prompt
from rl.data.problem_set import ProblemSet
from rl.data.row_readers import BadRow, BadRowCollector, FaultyRows, OnBadRow, kind_of_fault
from rl.data.streaming import StreamedProblemSet
from rl.errors import UserError
from rl.renderers import Renderer, TrainOn, renderer_for_row
from rl.types import Problem, StoredAnswer, find_length_limit

logger = logging.getLogger(__name__)

_REMEDIES = {
    "response": "no response to learn: name its column with --response-column",
    "rejected": (
        "no pair of answers: name their columns with --chosen-column and --rejected-column, or "
        "set --data-format"
    ),
}
_EXAMPLES = {
    "response": '{"prompt": "2+2=", "completion": "4"}',
    "rejected": '{"prompt": "2+2=", "chosen": "4", "rejected": "5"}',
}
_MAX_FAULTS = 1000  # number of faulty rows after which the check stops
_TEMPLATE = 256  # tokens that a chat template may add around the messages


# common names of the column with the response, most common first
_RESPONSES = ("response", "answer", "output", "solution", "target", "reply", "text")
# the format of a column with a whole conversation, which some data sets have beside the prompt
_CONVERSATIONS = {"messages": "messages", "conversations": "sharegpt", "conversation": "sharegpt"}


def _suggest_response_flag(problem: Problem) -> str:
    """Return the flag that finds a row's response: that of a column with its name, of a
    conversation, or of the only text; "" if unknown.
    """
    texts = [name for name, value in problem.meta.items() if isinstance(value, str) and value]
    if known := [name for name in _RESPONSES if name in texts]:
        return f"--response-column {known[0]}"
    for name, data_format in _CONVERSATIONS.items():
        if isinstance(problem.meta.get(name), list):
            return f"--data-format {data_format}"
    return f"--response-column {texts[0]}" if len(texts) == 1 else ""


@dataclass(frozen=True)
class RowCheck:
    """Check that a row is usable in a training stage.

    reads: the answers (fields of Problem) that the stage trains on or ranks.
    sampled: the most tokens of a sampled answer, or 0.
    longest: return the tokens of the longest further sequence that the method builds from a row.
    train_on: the messages of a conversation that the stage trains on.
    limits: the length limits of a row.
    skip_missing: check only those of `reads` that the row has.
    """

    info: Mapping[str, Any]
    renderer: Renderer
    name: str
    reads: Sequence[str]
    sampled: int
    longest: Callable[[Problem, Renderer], int] | None = None
    limits: LengthLimits = LengthLimits()
    skip_missing: bool = False
    train_on: TrainOn = "last_assistant"

    def _find_limit(self, prompt_length: int | None) -> tuple[int, str]:
        """Return (maximum number of tokens, name of this limit): of a sample after a prompt of
        `prompt_length` tokens, or of a row that is only trained on (None).
        """
        info = self.info if prompt_length is not None else {"max_context": self.info["max_context"]}
        return find_length_limit(info, prompt_length or 0)

    def __call__(self, problem: Problem) -> Problem:
        """Return the row, with its prompt cut if on_too_long is "cut".

        Raises UserError if the row cannot be rendered, lacks an answer, or would be cut before it;
        RowTooLong if it exceeds the model's context or a limit. Each row of a file is rendered. A
        generated row is not rendered if it must fit by its number of bytes, since a token has at
        least 1 byte.
        """
        where = problem.place or f"row {problem.index} of {self.name}"
        answers = {
            field: answer
            for field in self.reads
            if (answer := getattr(problem, field)) is not None or not self.skip_missing
        }
        for field, answer in answers.items():
            if answer is None:
                flag = _suggest_response_flag(problem) if field == "response" else ""
                raise UserError(
                    f"{where} has {_REMEDIES[field]} (beside its prompt it has "
                    f"{', '.join(map(repr, problem.meta)) or 'nothing'}; such a row is "
                    f"{_EXAMPLES[field]})" + (f"; here: {flag}" if flag else "")
                )
        if self.sampled and not problem.messages:
            raise UserError(
                f"{where} is a text without a prompt, but an answer to a prompt is to be sampled: "
                "name the prompt's column with --prompt-column"
            )
        if (
            not self.limits.has_limits
            and not problem.place
            and self._must_fit(problem, [*answers.values(), problem.rejected or ""])
        ):
            return problem
        problem = self._with_prompt(problem, where)
        cut = self.limits.row_cut or sys.maxsize
        for answer in answers.values():
            length, first_trained = self._measure_row(problem, answer, where)
            if first_trained >= cut:
                raise UserError(
                    f"{where}: its prompt fills max_row_tokens {cut}, so nothing of the answer "
                    "remains: set max_prompt_tokens as well, or raise max_row_tokens"
                )
            parts = "its prompt and response take"
            self._check_length(min(cut, length), parts, where, False)
        if self.sampled:
            parts = f"its prompt and max_tokens {self.sampled} take"
            length = self._measure_prompt(problem, where) + self.sampled
            self._check_length(length, parts, where, True)
        longest = 0
        if self.longest is not None and answers:
            with _name_row(where):
                longest = self.longest(problem, self.renderer)
        self._check_length(min(cut, longest), "its longest sequence takes", where, False)
        return problem

    def _with_prompt(self, problem: Problem, where: str) -> Problem:
        """Return the problem, its prompt cut to the limit if allowed, or raise RowTooLong."""
        limit, setting = self.limits.prompt_limit(self.sampled)
        if limit is None or not problem.messages:
            return problem
        length = self._measure_prompt(problem, where)
        if length <= limit:
            return problem
        if self.limits.on_too_long == "cut" and limit > 0:
            return cut_prompt(problem, self.renderer, limit, where)
        raise self.limits.limit_error(
            f"{where} has a prompt of {length} tokens, more than {setting}"
        )

    def _check_length(self, length: int, parts: str, where: str, samples: bool) -> None:
        """Raise RowTooLong if `length` tokens exceed the row limit, the model's context or, for
        samples, the sampler's limits.
        """
        # For samples, `_with_prompt` has checked the prompt.
        longest = None if samples else self.limits.max_row_tokens
        if longest is not None and length > longest:
            raise self.limits.limit_error(
                f"{where} is too long: {parts} {length} tokens, more than max_row_tokens {longest}"
            )
        limit, name = self._find_limit(length - self.sampled if samples else None)
        if length > limit:
            raise self.limits.context_error(
                f"{where} does not fit: {parts} {length} tokens, the {name} holds "
                f"{limit}; shorten the row, or leave such rows out with --on-too-long skip"
                + (", or lower --max-tokens" if samples else "")
            )

    def _must_fit(self, problem: Problem, answers: Sequence[str]) -> bool:
        """Return whether the row fits the context by its bytes alone."""
        size = _TEMPLATE + sum(len(str(m.get("content") or "").encode()) for m in problem.messages)
        lengths = [0, size] if self.sampled else [None]  # the least and the most of the prompt
        limit = min(self._find_limit(length)[0] for length in lengths)
        return size + self.sampled + sum(len(answer.encode()) for answer in answers) <= limit

    def _measure_prompt(self, problem: Problem, where: str) -> int:
        """Return the tokens of the generation prompt."""
        with _name_row(where):
            renderer = renderer_for_row(self.renderer, problem)
            return renderer.build_generation_prompt(problem.messages).length

    def _measure_row(self, problem: Problem, response: str, where: str) -> tuple[int, int]:
        """Return (the tokens of prompt and response, the position of the first trained token)."""
        with _name_row(where):
            if not problem.messages:
                return self.renderer.build_text(response).length, 1
            messages = [*problem.messages, {"role": "assistant", "content": response}]
            renderer = renderer_for_row(self.renderer, problem)
            example, weights = renderer.build_supervised_example(messages, self.train_on)
            return example.length, int(weights.argmax())


@contextmanager
def _name_row(where: str) -> Iterator[None]:
    """Return a context that names the row in each UserError."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def select_good_rows(
    problems: ProblemSet, check: Callable[[Problem], Problem], on_bad_row: OnBadRow
) -> ProblemSet:
    """Return the rows that pass `check`, each as `check` returns it.

    The rows of a stream are checked when they are read.
    on_bad_row: "error" raises FaultyRows (a UserError) for bad rows; "skip" logs and skips the bad
        rows, and raises UserError if no row remains.
    Rows that are too long are skipped (see LengthLimits), logged and counted, too.
    """
    if isinstance(problems, StreamedProblemSet):
        return problems.with_check(check, on_bad_row)
    bad, long, good_indices = BadRowCollector(on_bad_row), BadRowCollector("skip"), []
    changed: dict[int, Problem] = {}
    faults: list[UserError] = []
    for i, problem in enumerate(problems):
        try:
            checked = check(problem)
        except UserError as error:
            skipped = isinstance(error, RowTooLong) and error.skip
            if on_bad_row == "error" and not skipped:
                faults.append(error)
                if len(faults) == _MAX_FAULTS:
                    break
                continue
            place = problem.place or f"row {i}"
            reason = str(error).removeprefix(place).removeprefix(":").strip()
            (long if skipped else bad).add(place, BadRow(reason))
            continue
        good_indices.append(i)
        if checked is not problem:
            changed[i] = checked
    if faults:
        texts = [str(fault) for fault in faults]
        text = ""  # the fault itself if all rows share it, else a listing
        if len(texts) == 1:
            text = texts[0]
        elif not good_indices and len({kind_of_fault(text) for text in texts}) == 1:
            text = f"{texts[0]}\nAll {len(texts)} rows have this fault."
        is_partial = len(texts) == _MAX_FAULTS
        raise FaultyRows(texts, len(good_indices), is_partial=is_partial, text=text) from faults[0]
    bad.raise_or_log(len(good_indices), {})
    long.raise_or_log(len(good_indices), {})
    if changed:
        problems = problems.with_rows(changed)
    return problems if len(good_indices) == len(problems) else problems.subset(good_indices)


def make_answers_check(
    check: Callable[[Problem, StoredAnswer], None], on_bad_row: OnBadRow
) -> Callable[[Problem], Problem]:
    """Return a check of rows that applies `check` to each stored answer.

    If bad rows are skipped, a row keeps its good answers.
    """

    def whole(problem: Problem) -> Problem:
        bad, long, good = BadRowCollector(on_bad_row), BadRowCollector("skip"), []
        for answer in problem.answers:
            try:
                check(problem, answer)
            except UserError as error:
                skipped = isinstance(error, RowTooLong) and error.skip
                if on_bad_row == "error" and not skipped:
                    raise
                reason = str(error).removeprefix(f"{answer.place}: ")
                (long if skipped else bad).add(answer.place, BadRow(reason))
                continue
            good.append(answer)
        faults = long.faults
        if faults and not good:
            raise RowTooLong(faults[0], skip=True)
        bad.faults += faults if on_bad_row == "skip" else []
        bad.raise_or_log(len(good), {})
        if faults and on_bad_row != "skip":
            logger.warning(
                "left out %d stored answers that are too long: %s", len(faults), faults[0]
            )
        return replace(problem, answers=tuple(good))

    return whole
