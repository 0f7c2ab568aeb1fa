"""Load what a stage's data settings name: problems, held-out problems, or stored answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl.algorithms import METHODS, RolloutDataSettings
from rl.config import DataSettings, PreferenceDataSettings, StageConfig
from rl.data import (
    FaultyRows,
    MissingSplit,
    Mixture,
    ProblemSet,
    StreamedProblemSet,
    concatenate_sets,
    filter_answers,
    has_row_splits,
    load_problems,
    load_rollouts,
    split_named_file,
)
from rl.errors import UserError


def _column_settings(data: DataSettings) -> dict[str, Any]:
    pair = {}
    if isinstance(data, PreferenceDataSettings):
        pair = {"chosen_column": data.chosen_column, "rejected_column": data.rejected_column}
    return {
        **pair,
        "format": data.data_format,
        "config": data.dataset_config,
        "prompt_column": data.prompt_column,
        "answer_column": data.answer_column,
        "response_column": data.response_column,
        "system_prompt": data.system_prompt,
        "on_bad_row": data.on_bad_row,
        "prompt_template": data.prompt_template,
        "prompt_suffix": data.prompt_suffix,
        "image_column": data.image_column,
    }


def load_training_problems(
    data: DataSettings, held_out: bool
) -> tuple[ProblemSet, ProblemSet | None]:
    """Load training and held-out problems of all data sets. Raises FaultyRows naming the faults of
    all sets together.
    """
    if data.stream and data.more_datasets:
        raise UserError(
            "stream reads a single data set (a folder of several files counts as a single "
            "set): leave out more_datasets, or stream"
        )
    parts: list[tuple[ProblemSet, ProblemSet | None]] = []
    more: list[ProblemSet] = []
    faults: list[FaultyRows] = []  # of all data sets, to be reported together
    for i, source in enumerate(_split_sources(data)):
        try:
            parts.append(_load_source(source, held_out and (i == 0 or data.eval_dataset is None)))
        except FaultyRows as error:
            faults.append(error)
    try:
        more = _load_more_held_out(data) if held_out else []
    except FaultyRows as error:
        faults.append(FaultyRows(error.faults, error.good))
    if faults:
        raise FaultyRows.merge_all(faults)
    sets = [train for train, _ in parts]
    tests = [test for _, test in parts if test is not None] + more
    mixed = Mixture(sets, data.dataset_weights) if data.dataset_weights else concatenate_sets(sets)
    return mixed, concatenate_sets(tests) if tests else None


def _split_sources(data: DataSettings) -> list[DataSettings]:
    """Return the settings of each data set separately."""
    single: dict[str, Any] = {"more_datasets": (), "dataset_weights": (), "more_eval_datasets": ()}
    settings = [replace(data, **single)]
    return settings + [
        replace(data, **single, dataset=source, eval_dataset=None) for source in data.more_datasets
    ]


def _load_source(data: DataSettings, held_out: bool) -> tuple[ProblemSet, ProblemSet | None]:
    try:
        train = load_problems(
            data.dataset,
            split="train",
            limit=data.train_limit,
            stream=data.stream,
            **_column_settings(data),
        )
    except FaultyRows as error:
        if held_out and data.eval_dataset is not None:  # report the faults of both sets together
            try:
                _load_test_split(data)
            except FaultyRows as more:
                raise FaultyRows.merge_all([error, FaultyRows(more.faults, more.good)]) from more
        raise
    if not held_out:
        return train, None
    if data.eval_dataset is None and _is_single_file(data):
        return _split_off_held_out(train, data.eval_limit)
    try:
        return train, _load_test_split(data)
    except MissingSplit:
        if data.eval_dataset is not None:
            raise
        return _split_off_held_out(train, data.eval_limit)


def _load_test_split(data: DataSettings) -> ProblemSet:
    """Load the test split of the evaluation set, or of the data set itself; the only split if a set
    has no test split.
    """
    source = data.eval_dataset or data.dataset
    try:
        return load_problems(source, split="test", limit=data.eval_limit, **_column_settings(data))
    except MissingSplit:
        if data.eval_dataset is None:
            raise
        return load_problems(source, split="train", limit=data.eval_limit, **_column_settings(data))


def _load_more_held_out(data: DataSettings) -> list[ProblemSet]:
    return [
        _load_test_split(replace(data, eval_dataset=source)) for source in data.more_eval_datasets
    ]


def load_held_out_problems(data: DataSettings) -> ProblemSet | None:
    """Return the problems of an evaluation. None for a file too short to hold out any problem, and
    for stored answers without an evaluation set.
    """
    if isinstance(data, RolloutDataSettings):
        if data.eval_dataset is None and not data.more_eval_datasets:
            return None
        columns = _column_settings(data) | {"prompt_column": "prompt", "response_column": None}
        sources = [
            source for source in (data.eval_dataset, *data.more_eval_datasets) if source is not None
        ]
        return concatenate_sets(
            [
                load_problems(source, split="test", limit=data.eval_limit, **columns)
                for source in sources
            ]
        )
    if data.eval_dataset is not None and not data.more_datasets:
        return concatenate_sets([_load_test_split(data), *_load_more_held_out(data)])
    return load_training_problems(data, True)[1]


def _is_single_file(data: DataSettings) -> bool:
    """Return whether the data set is a file without named splits."""
    named_file = split_named_file(data.dataset)
    file = data.dataset if named_file is None else named_file[1]
    return Path(file).expanduser().is_file() and not has_row_splits(
        data.dataset, **_column_settings(data)
    )


LAST_ROWS_SUFFIX = ", held out"  # of the name of rows that were split off


def _split_off_held_out(problems: ProblemSet, limit: int) -> tuple[ProblemSet, ProblemSet | None]:
    """Split off the last tenth (at most `limit` rows) of a file without a test split. It is held
    out and never trained on.
    """
    count = min(limit, len(problems) // 10)
    if count == 0:
        return problems, None
    if isinstance(problems, StreamedProblemSet):
        return problems.first(len(problems) - count), problems.last(count)
    rows = list(problems)
    return ProblemSet(rows[:-count], name=problems.name), ProblemSet(
        rows[-count:], name=f"{problems.name}{LAST_ROWS_SUFFIX}"
    )


def find_writing_stage(plan: StageConfig, earlier: Sequence[StageConfig]) -> int | None:
    """Return the number of the earlier stage whose rollouts a stage names as its `dataset`; None if
    its data exists already.

    Raises UserError if that stage writes no rollouts, or rollouts that this stage cannot learn
    from.
    """
    data, names = plan.settings.data, [stage.name for stage in earlier]
    if not isinstance(data, RolloutDataSettings):
        return None
    if data.dataset not in names:
        _check_dataset_exists(data.dataset, plan, earlier)
        return None
    index = names.index(data.dataset)
    source, settings = earlier[index], earlier[index].settings
    relation = f"stage {plan.name} learns from the rollouts of stage {source.name}"
    if not _samples_answers(source):
        raise UserError(
            f"{relation}, but {source.method} samples no answers: name a stage that does"
        )
    if settings.loop.rollouts_every == 0:
        raise UserError(
            f"{relation}, which stores none: set its rollouts_every (1 stores every step's)"
        )
    behavior_temperature, learner_temperature = (
        settings.sampling.temperature,
        plan.settings.sampling.temperature,
    )
    if (
        plan.settings.offline.needs_behavior_logprobs
        and behavior_temperature != learner_temperature
    ):
        raise UserError(
            f"{relation}, sampled at temperature {behavior_temperature:g}, which their logprobs "
            f"belong to, and would score them at {learner_temperature:g}: give stage "
            f"{plan.name} temperature: {behavior_temperature:g}"
        )
    return index


def load_stored_answers(
    plan: StageConfig, folder: Path | None = None, steps: range | None = None
) -> ProblemSet:
    """Return what a stage learns from: its `dataset`, or what the run in `folder` wrote in `steps`;
    for `bc` only the best answers.
    """
    data, offline = plan.settings.data, plan.settings.offline
    if folder is None and not data.dataset:
        raise UserError(
            "offline needs stored answers: --dataset with a run's folder, a file of answers "
            "and rewards, or in a recipe the name of an earlier stage"
        )
    problems = load_rollouts(
        data.dataset if folder is None else folder,
        steps=steps,
        prompt_column=None if data.prompt_column == "auto" else data.prompt_column,
        response_column=data.response_column,
        reward_column=data.reward_column,
        system_prompt=data.system_prompt,
        limit=data.train_limit,
        on_bad_row=data.on_bad_row,
    )
    return (
        filter_answers(problems, offline.top_fraction, offline.reward_threshold)
        if offline.loss_spec.selects_answers
        else problems
    )


def _samples_answers(plan: StageConfig) -> bool:
    return METHODS[plan.method](plan.settings).online


def _check_dataset_exists(dataset: str, plan: StageConfig, earlier: Sequence[StageConfig]) -> None:
    """Raise UserError if a word is neither a path nor a stage. The message lists earlier stages,
    since the word may have meant an earlier stage.
    """
    if not dataset or not earlier or Path(dataset).expanduser().exists():
        return
    sampling = [stage.name for stage in earlier if _samples_answers(stage)]
    raise UserError(
        f"stage {plan.name}: stored rollouts {dataset} do not exist (seen from {Path.cwd()}), "
        "and no earlier stage has that name; earlier stages that sample: "
        f"{', '.join(sampling) or 'none'}"
    )
