"""Select and format the prompts of evaluate.py and sample.py according to the data settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl.config import DataSettings
from rl.data import LengthLimits, ProblemSet, PromptTemplate, RowCheck, select_good_rows
from rl.errors import UserError
from rl.renderers import Renderer
from rl.trainer.data_source import load_held_out_problems
from rl.types import Message


def select_fitting_problems(
    problems: ProblemSet,
    data: DataSettings,
    info: Mapping[str, Any],
    renderer: Renderer,
    max_tokens: int,
) -> ProblemSet:
    """Return the problems with prompts that leave room for `max_tokens` of response.

    Longer prompts are truncated, skipped or raise UserError, as the settings of `data` say.
    """
    check = RowCheck(
        info, renderer, problems.name, (), max_tokens, limits=LengthLimits.from_settings(data)
    )
    return select_good_rows(problems, check, data.on_bad_row)


def iterate_prompts(
    data: DataSettings, prompts: Iterable[str], dataset: str | None, limit: int
) -> Iterator[Sequence[Message]]:
    """Yield the conversation of each row of `dataset`, or of each of `prompts` without a dataset.

    The system prompt, template and suffix of `data` are applied. At most `limit` rows are read.
    Raises UserError if a prompt is empty.
    """
    if dataset is not None:
        problems = load_held_out_problems(
            replace(
                data,
                eval_dataset=dataset,
                more_datasets=(),
                dataset_weights=(),
                more_eval_datasets=(),
                eval_limit=limit,
            )
        )
        yield from (problem.messages for problem in problems or () if problem.messages)
        return
    template = PromptTemplate.from_settings(data)
    for prompt in prompts:
        if not prompt.strip():
            raise UserError("a prompt is empty: pass a text with --prompt")
        yield template([{"role": "user", "content": prompt}], {})
