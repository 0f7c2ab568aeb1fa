"""Whose a checkpoint is: the run, seed, model and data that its state names, against those of the
run that is to go on from it.

Checkpoints of before these were noted go on as they did: what a state does not say is not asked of
it.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl.data import ProblemSet
from rl.errors import RunFolderError, UserError
from rl.jsonl import METRICS, read_metrics
from rl.methods import METHODS
from rl.models import LATER_PARTS, PARTS
from rl.run.beginnings import begins_after
from rl.run.origins import goes_on, origin_of
from rl.seeds import derive_seed
from rl.settings import Run

ID = "id"
_ROWS = 2000  # of a data set that are hashed: all of a small one, of a large one every so many
_ROWS_OF_A_STREAM = 64


def new_id() -> str:
    return uuid.uuid4().hex


def of(run: Run, run_id: str | None, index: int, problems: ProblemSet) -> dict[str, Any]:
    """What a checkpoint of this stage notes of its run."""
    return {
        ID: run_id,
        "seed": run.options.seed,
        "stage": run.stages[index].name,
        "data": fingerprint(problems),
    }


def fingerprint(problems: ProblemSet) -> str:
    """Of what is trained on: how many rows, and what is asked and answered in them."""
    found = hashlib.sha256(str(len(problems)).encode())
    every = -(-len(problems) // (_ROWS_OF_A_STREAM if problems.is_lazy else _ROWS))
    for i in range(0, len(problems), every):
        row = problems.at(i)
        stored = [[answer.reward, answer.text] for answer in row.answers]
        said = [
            list(map(dict, row.messages)),
            row.response,
            row.rejected,
            row.meta.get("answer"),
            stored,
        ]
        found.update(json.dumps(said, sort_keys=True, default=str).encode("utf-8", "surrogatepass"))
    return found.hexdigest()[:32]


def check_run(
    state: Mapping[str, Any], config: Mapping[str, Any], run: Run, index: int, place: Path
) -> None:
    """RunFolderError naming what differs where a checkpoint is not of this run: another id, seed or
    model.
    """
    noted = state["metadata"].get("run")
    noted = noted if isinstance(noted, dict) else {}
    changed = []
    mine = {ID: config.get(ID), "seed": run.options.seed, "stage": run.stages[index].name}
    for key, value in mine.items():
        if value is not None and noted.get(key) not in (None, value):
            changed.append(
                f"its {'run' if key == ID else key} is {noted[key]!r}, this run's is {value!r}"
            )
    changed += _other_model(state["spec"], run, index)
    if changed:
        raise RunFolderError(
            f"the checkpoint {place} is not of this run: {'; '.join(changed)}. Move it out of {place.parent}, and --resume goes on from "
            f"the newest that is; or begin a run from its weights with --base-model {place / 'model'} and another --output-dir"
        )


def _other_model(spec: Mapping[str, Any], run: Run, index: int) -> list[str]:
    """What in a checkpoint's spec is not as this stage makes its model."""
    stages, root = run.stages, index
    while (before := begins_after(stages, root)) is not None and goes_on(
        stages[before].settings.model, stages[root].settings.model
    ):
        root = before  # an adapter is gone on with, as it was made
    model, seed = stages[root].settings.model, run.options.seed
    base = model.base_model if before is None else f"{stages[before].name}-final/model"
    # another run's adapter: its seed and its base
    theirs = before is None and origin_of(model, None).continued is not None
    wanted: dict[str, Any] = (
        {} if theirs else {"seed": derive_seed(seed, "weights") % 2**31, "lora": None}
    )
    wanted["value_head"] = bool(METHODS[stages[index].method].value_head(stages[index].settings))
    if model.lora_rank and not theirs:
        parts = {part: getattr(model, part) for part in PARTS}
        wanted["lora"] = {
            "rank": model.lora_rank,
            "seed": derive_seed(seed, "adapter") % 2**31,
            **parts,
            "alpha": model.lora_alpha,
        }
    if spec.get("lora"):
        spec = {**spec, "lora": {**LATER_PARTS, **spec["lora"]}}
    other = [key for key, value in wanted.items() if spec.get(key, value) != value]
    found = [f"{key} of its model is {spec[key]!r}, this run's is {wanted[key]!r}" for key in other]
    there = str(spec.get("base_model", base))
    if (
        not theirs
        and there != base
        and not (before is not None and Path(there).parts[-2:] == Path(base).parts)
    ):
        found.append(f"it was made from {there}, this run's stage {stages[index].name} from {base}")
    return found


def check_data(noted: Any, problems: ProblemSet, stage: str, place: str) -> None:
    """UserError where the rows are not those that a checkpoint's stage trained on."""
    if not isinstance(noted, dict) or not isinstance(noted.get("data"), str):
        return
    if noted["data"] != (now := fingerprint(problems)):
        raise UserError(
            f"the data of stage {stage}, {problems.name}, are not those that {place} was trained on (their fingerprint is {now}, was "
            f"{noted['data']}): put the file back as it was, or begin a run from those weights with --base-model {place}/model and another "
            "--output-dir"
        )


def check_metrics(folder: Path, steps: Sequence[range]) -> None:
    """UserError where metrics.jsonl lacks (or has twice) a step that the run has taken. `steps`: of
    each stage so far.
    """
    path = folder / METRICS
    seen = [row["step"] for row in read_metrics(path)]
    counts: dict[int, int] = {}
    for step in seen:
        counts[step] = counts.get(step, 0) + 1
    wanted = [step for part in steps for step in part]
    lost, twice = (
        [step for step in wanted if step not in counts],
        [step for step in wanted if counts.get(step, 0) > 1],
    )
    if lost or twice:
        what = f"lacks {_some(lost)}" if lost else f"has {_some(twice)} more than once"
        raise UserError(
            f"{path} {what}, and the checkpoint was made after them: put the file back from a copy, or begin a run from the checkpoint's "
            "weights with --base-model and another --output-dir"
        )


def _some(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:6]))
    return f"step{'s' * (len(steps) > 1)} {shown}" + (
        f" and {len(steps) - 6} more" if len(steps) > 6 else ""
    )
