"""Saved weights, opened again for sampling: of a run's folder with the settings they were trained
under, or anybody's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.errors import UserError
from rl.ranks import below
from rl.report import CHECKPOINTS, CONFIG, holds_a_run, saved_config
from rl.run.inventory import RESUMABLE, WEIGHTS, completed, listed, stage_steps
from rl.run.trust import check_code
from rl.seeds import derive_seed
from rl.settings import Run, StagePlan, from_resolved

if TYPE_CHECKING:
    from rl.clients import SamplingClient, ServiceClient


@dataclass(frozen=True)
class Weights:
    """Weights that can be sampled from: a folder, or the name of a base model.

    name   what to call them
    path   their folder; None for a base model
    run, stage, stage_index   the run and the stage that made them; None where no run is known
    run_folder, step   where that run lies, and its step at which they were saved
    """

    name: str
    path: Path | None = None
    run: Run | None = None
    stage: StagePlan | None = None
    stage_index: int | None = None
    run_folder: Path | None = None
    step: int | None = None

    @property
    def evaluation_seed(self) -> int:
        """Of the random streams that the run's own held-out evaluation draws from."""
        stage_seed = (
            0 if self.run is None else derive_seed(self.run.options.seed, self.stage_index or 0)
        )
        return derive_seed(stage_seed, "test")

    def service(self, seed: int = 0, sampler_tp: int = 1) -> ServiceClient:
        """A service with the run's own precision and sampler, so that the same weights draw the
        same samples.

        What of the run's was of its launch (`sampler_ranks`, `sampler_tp`) is not asked of this
        one, which may be of one process.
        """
        from rl.clients import ServiceClient, WorkerSettings
        from rl.run.device_side import worker_settings

        settings = worker_settings(self.run.stages) if self.run is not None else WorkerSettings()
        # what several hold together is in no pages
        cache = settings.sampler.cache if sampler_tp == 1 else "auto"
        settings = replace(
            settings, sampler_ranks=0, sampler=replace(settings.sampler, tp=sampler_tp, cache=cache)
        )
        return ServiceClient(seed=seed, settings=settings)

    def sampler(self, service: ServiceClient) -> SamplingClient:
        """Loads them. UserError where they cannot be."""
        if self.path is None:
            return service.create_sampling_client(base_model=self.name)
        return service.create_sampling_client(model_path=str(self.path))


def open_weights(target: str, checkpoint: str | None = None) -> Weights:
    """What a word on the line means: a run's folder, a folder of weights, a hub name, or
    tiny:<preset>.

    `checkpoint`: of a run's folder, "best" or a name in checkpoints.jsonl; None: the newest that
    training reached. UserError where there is nothing of that name, or nothing saved yet.
    """
    folder = Path(target).expanduser()
    if is_run(folder):
        return _of_run(folder, checkpoint)
    if checkpoint is not None:
        raise UserError(
            f"--checkpoint {checkpoint} chooses among those of a run, and {target} is no folder of a run"
        )
    if folder.is_dir():
        return _of_folder(folder)
    if target.startswith("tiny:") or not _meant_as_path(target, folder):
        return Weights(target)
    wanted = "a run's folder, a folder of weights, a hub name or tiny:<preset>"
    raise UserError(f"no folder {target}{_neighbours(folder)}: give {wanted}")


def is_run(folder: Path) -> bool:
    """Whether config.json is a run's; a model's folder has one too."""
    return holds_a_run(folder)


def _of_run(folder: Path, checkpoint: str | None) -> Weights:
    from rl.methods import METHODS, is_address
    from rl.settings import RunSettings

    for stage in saved_config(folder)["stages"]:
        if is_address(stage["method"]):
            check_code(stage["method"], str(folder / CONFIG))
    run = from_resolved(
        saved_config(folder), METHODS, options=RunSettings, place=str(folder / CONFIG)
    )
    row = _pick(folder, _rows(folder), checkpoint)
    # by name below this folder, not by the path noted: a run's folder may have been moved
    path = below(folder / (RESUMABLE if row["state_path"] else WEIGHTS), row["name"])
    names = [stage.name for stage in run.stages]
    if row["stage"] not in names:
        raise UserError(
            f"{folder / CHECKPOINTS} says that {row['name']} is of stage {row['stage']!r}; the run's are {', '.join(names)}"
        )
    index = names.index(row["stage"])
    return Weights(
        f"{folder}: {row['name']}", path, run, run.stages[index], index, folder, row["batch"]
    )


def _rows(folder: Path) -> list[dict[str, Any]]:
    """The run's checkpoints: those that lie there; what its list names where none does, so that
    what is missing has a name.
    """
    return completed(folder, stage_steps(saved_config(folder)["stages"]))[0] or listed(folder)


def _pick(folder: Path, rows: list[dict[str, Any]], checkpoint: str | None) -> dict[str, Any]:
    """The row of a checkpoint. Best weights were chosen by held-out problems, so they are taken
    only where asked for.
    """
    if not rows:
        raise UserError(
            f"the run in {folder} has saved no weights yet: wait for its first checkpoint (its setting save_every)"
        )
    best = [row for row in rows if row.get("kind") == "best"]
    if checkpoint is None:
        return max(
            (row for row in rows if row not in best), key=lambda row: row["batch"], default=rows[-1]
        )
    if checkpoint == "best" and best:
        return best[-1]
    named = [row for row in rows if row["name"] == checkpoint]
    if not named:
        there = ", ".join([*(["best"] if best else []), *(row["name"] for row in rows)])
        raise UserError(f"the run in {folder} has no checkpoint {checkpoint!r}; it has {there}")
    return named[0]


def _of_folder(folder: Path) -> Weights:
    """A folder of weights; one that lies in a run's folder brings the run's settings with it."""
    if folder.name == "model" and (folder.parent / "state.json").is_file():
        folder = folder.parent  # its state.json knows what the model was made from
    run_folder = folder.resolve().parent.parent
    if (folder / "state.json").is_file() and is_run(run_folder):
        if any(row["name"] == folder.name for row in _rows(run_folder)):
            return _of_run(run_folder, folder.name)
    if not any(
        (folder / name).is_file() for name in ("state.json", "config.json", "adapter_config.json")
    ):
        there = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        raise UserError(f"{folder} holds neither a run nor weights (it has {there})")
    return Weights(str(folder), folder)


def _meant_as_path(target: str, folder: Path) -> bool:
    """Hub names look like paths: a word is one if it begins like one, goes deeper, or what it would
    lie in is there.
    """
    beside = folder.parent != Path(".") and folder.parent.is_dir()
    return (
        target.startswith((".", "/", "~", "runs/"))
        or target.count("/") > 1
        or beside
        or Path("runs", target).is_dir()
    )


def _neighbours(folder: Path) -> str:
    if Path("runs", folder).is_dir():
        return f" (did you mean {Path('runs', folder)}?)"
    there = (
        sorted(str(path) for path in folder.parent.iterdir() if path.is_dir())
        if folder.parent.is_dir()
        else []
    )
    return f" ({folder.parent} has {', '.join(there[:8])})" if there else ""
