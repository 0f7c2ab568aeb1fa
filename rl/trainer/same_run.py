"""Check that a checkpoint belongs to a run: compare run id, seed, model and data of the two.

A checkpoint from before a field was recorded is accepted: fields that its state lacks are not
compared.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rl.algorithms import METHODS
from rl.config import RunConfig
from rl.data import ProblemSet
from rl.errors import RunFolderError, UserError
from rl.jsonl import METRICS_FILE, read_metrics
from rl.seed import derive_seed
from rl.trainer.initial_weights import (
    continues_adapter,
    find_adapter_root,
    find_previous_stage,
)
from rl.types import LoraConfig

RUN_ID_KEY = "id"
_HASHED_ROWS = (
    2000  # hashed rows of a data set: all of a small set, evenly spaced rows of a large set
)
_HASHED_STREAM_ROWS = 64


def make_run_id() -> str:
    """Return a new random run id."""
    return uuid.uuid4().hex


def make_identity(
    run: RunConfig, run_id: str | None, index: int, problems: ProblemSet
) -> dict[str, Any]:
    """Return the identity of the run that a checkpoint of this stage records."""
    return {
        RUN_ID_KEY: run_id,
        "seed": run.options.seed,
        "stage": run.stages[index].name,
        "data": compute_data_fingerprint(problems),
    }


def compute_data_fingerprint(problems: ProblemSet) -> str:
    """Return a hash of the training data: the number of rows, their prompts and answers."""
    digest = hashlib.sha256(str(len(problems)).encode())
    stride = -(-len(problems) // (_HASHED_STREAM_ROWS if problems.is_lazy else _HASHED_ROWS))
    for i in range(0, len(problems), stride):
        row = problems.at(i)
        stored_answers = [[answer.reward, answer.text] for answer in row.answers]
        content = [
            list(map(dict, row.messages)),
            row.response,
            row.rejected,
            row.meta.get("answer"),
            stored_answers,
        ]
        digest.update(
            json.dumps(content, sort_keys=True, default=str).encode("utf-8", "surrogatepass")
        )
    return digest.hexdigest()[:32]


def check_same_run(
    state: Mapping[str, Any],
    config: Mapping[str, Any],
    run: RunConfig,
    index: int,
    checkpoint_path: Path,
) -> None:
    """Raise RunFolderError, naming the differences, if a checkpoint is of another run.

    Run id, seed, stage and model are compared with those of `run`.
    """
    recorded = state["metadata"].get("run")
    recorded = recorded if isinstance(recorded, dict) else {}
    changed = []
    expected = {
        RUN_ID_KEY: config.get(RUN_ID_KEY),
        "seed": run.options.seed,
        "stage": run.stages[index].name,
    }
    for key, value in expected.items():
        if value is not None and recorded.get(key) not in (None, value):
            changed.append(
                f"its {'run' if key == RUN_ID_KEY else key} is {recorded[key]!r}, this run's is "
                f"{value!r}"
            )
    changed += _diff_model(state["spec"], run, index)
    if changed:
        raise RunFolderError(
            f"the checkpoint {checkpoint_path} belongs to another run: {'; '.join(changed)}. Move "
            "it out of "
            f"{checkpoint_path.parent}, so that --resume continues from the newest checkpoint of "
            "this run, "
            f"or begin a new run from its weights with --base-model {checkpoint_path / 'model'} "
            "and another "
            "--output-dir"
        )


def _diff_model(spec: Mapping[str, Any], run: RunConfig, index: int) -> list[str]:
    """Return a line for each difference between a checkpoint's spec and this stage's model."""
    stages, root = run.stages, find_adapter_root(run.stages, index)
    before = find_previous_stage(stages, root)
    model, seed = stages[root].settings.model, run.options.seed
    base = model.base_model if before is None else f"{stages[before].name}-final/model"
    is_continued = continues_adapter(stages, root)  # another run's, with its seed and base
    expected: dict[str, Any] = {}
    if not is_continued:
        lora = model.make_lora(derive_seed(seed, "adapter") % 2**31)
        expected["seed"] = derive_seed(seed, "weights") % 2**31
        expected["lora"] = lora and asdict(lora)
    plan = stages[index]
    expected["value_head"] = METHODS[plan.method](plan.settings).value_head
    if spec.get("lora"):
        spec = {**spec, "lora": asdict(LoraConfig(**spec["lora"]))}
    differing_keys = [key for key, value in expected.items() if spec.get(key, value) != value]
    differences = [
        f"{key} of its model is {spec[key]!r}, this run's is {expected[key]!r}"
        for key in differing_keys
    ]
    recorded_base = str(spec.get("base_model", base))
    if (
        not is_continued
        and recorded_base != base
        and not (before is not None and Path(recorded_base).parts[-2:] == Path(base).parts)
    ):
        differences.append(
            f"it was made from {recorded_base}, this run's stage {stages[index].name} from {base}"
        )
    return differences


def check_same_data(recorded: Any, problems: ProblemSet, stage: str, checkpoint_path: str) -> None:
    """Raise UserError if the rows are not those that a checkpoint's stage trained on."""
    if not isinstance(recorded, dict) or not isinstance(recorded.get("data"), str):
        return
    if recorded["data"] != (current := compute_data_fingerprint(problems)):
        raise UserError(
            f"the data of stage {stage}, {problems.name}, are not those that {checkpoint_path} "
            "was trained "
            f"on (their fingerprint is {current}, was {recorded['data']}): restore the file, or "
            "begin "
            f"a new run from those weights with --base-model {checkpoint_path}/model and another "
            "--output-dir"
        )


def check_logged_steps(folder: Path, steps: Sequence[range]) -> None:
    """Raise UserError if metrics.jsonl lacks or repeats a step that the run has taken.

    `steps` holds the steps of each stage so far.
    """
    path = folder / METRICS_FILE
    logged_steps = [row["step"] for row in read_metrics(path)]
    counts: dict[int, int] = {}
    for step in logged_steps:
        counts[step] = counts.get(step, 0) + 1
    expected = [step for part in steps for step in part]
    missing, duplicated = (
        [step for step in expected if step not in counts],
        [step for step in expected if counts.get(step, 0) > 1],
    )
    if missing or duplicated:
        problem = (
            f"lacks {_format_steps(missing)}"
            if missing
            else f"has {_format_steps(duplicated)} more than once"
        )
        raise UserError(
            f"{path} {problem}, and the checkpoint was made after them: restore the file from a "
            "copy, or begin a new run from the checkpoint's weights with --base-model and another "
            "--output-dir"
        )


def _format_steps(steps: Sequence[int]) -> str:
    """Return the steps as words, at most 6 of them."""
    listing = ", ".join(map(str, steps[:6]))
    return f"step{'s' * (len(steps) > 1)} {listing}" + (
        f" and {len(steps) - 6} more" if len(steps) > 6 else ""
    )
