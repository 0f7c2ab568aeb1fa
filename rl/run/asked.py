"""What evaluate.py and sample.py ask, by data settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl.data import Dress, Limits, ProblemSet, RowCheck, good_rows
from rl.errors import UserError
from rl.renderers import Renderer
from rl.run.sources import held_out_problems
from rl.settings import DataSettings
from rl.types import Message


def that_fit(
    problems: ProblemSet,
    data: DataSettings,
    info: Mapping[str, Any],
    renderer: Renderer,
    max_tokens: int,
) -> ProblemSet:
    """The problems whose prompts leave room for an answer; those that do not are cut or left out as
    the settings say, or a UserError.
    """
    check = RowCheck(info, renderer, problems.name, (), max_tokens, limits=Limits.of(data))
    return good_rows(problems, check, data.on_bad_row)


def asked_with(
    data: DataSettings, prompts: Iterable[str], dataset: str | None, limit: int
) -> Iterator[Sequence[Message]]:
    """The rows of `dataset` or, without one, `prompts`, with what the settings put around a prompt."""
    if dataset is not None:
        problems = held_out_problems(
            replace(
                data,
                eval_dataset=dataset,
                more_datasets=(),
                more_eval_datasets=(),
                eval_limit=limit,
            )
        )
        yield from (problem.messages for problem in problems or () if problem.messages)
        return
    dress = Dress(data.system_prompt, data.prompt_template, data.prompt_suffix, data.answer_column)
    for prompt in prompts:
        if not prompt.strip():
            raise UserError("an empty prompt asks nothing: give --prompt a text")
        yield dress([{"role": "user", "content": prompt}], {})
