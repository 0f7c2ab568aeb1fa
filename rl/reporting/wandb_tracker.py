"""Log metrics to weights & biases in addition to the run's files. The tracker never ends a run: it
warns about its first failure and ignores later failures.
"""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from rl.errors import RunFolderError, install_command
from rl.jsonl import write_atomically


class WarningSink(Protocol):
    """Receive warnings about failures that must not end the run."""

    def warn(self, text: str) -> None: ...


def check_tracker(project: str | None) -> None:
    """Raise RunFolderError if a project is set but the package is not installed. Called before any
    work.
    """
    if project is not None and importlib.util.find_spec("wandb") is None:
        raise _missing_package_error(project)


def _missing_package_error(project: str) -> RunFolderError:
    """Return the error for a missing wandb package."""
    return RunFolderError(
        f"logging to the weights & biases project {project!r} needs the package wandb: "
        f"{install_command('wandb')}, or omit the flag"
    )


class WandbTracker:
    """Log to a weights & biases run, with its files, and its id for a resume, in the run's
    folder.
    """

    def __init__(
        self,
        project: str,
        folder: Path,
        config: Mapping[str, Any],
        *,
        resumed: bool,
        console: WarningSink | None,
    ):
        self._console = console
        self._warned = False
        try:
            import wandb
        except ImportError as error:
            raise _missing_package_error(project) from error
        id_file = folder / "wandb_id.txt"

        def start() -> Any:
            run_id = (
                id_file.read_text(encoding="utf-8").strip()
                if resumed and id_file.exists()
                else uuid.uuid4().hex[:8]
            )
            run = wandb.init(
                project=project,
                name=folder.name,
                id=run_id,
                resume="allow" if resumed else None,
                dir=str(folder),
                config=dict(config),
                settings=wandb.Settings(console="off", silent=True),
            )
            write_atomically(id_file, run_id + "\n")
            return run

        self._run: Any = None
        self._run = self._try("did not start (WANDB_MODE=offline logs without its server)", start)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log the metrics of a step, except null values."""
        values = {key: value for key, value in metrics.items() if value is not None}
        if self._run is not None:
            self._try(
                f"did not accept the metrics of step {step}",
                lambda: self._run.log(values, step=step),
            )

    def finish(self) -> None:
        """Finish the weights & biases run."""
        if self._run is not None:
            self._try("did not finish", lambda: self._run.finish())

    def _try(self, label: str, action: Callable[[], Any]) -> Any:
        """Return the result of `action`; None if it failed. The first failure is reported as a
        warning. All exceptions are caught: wandb's and the network's.
        """
        try:
            return action()
        except Exception as error:
            if self._console is not None and not self._warned:
                cause = f"{type(error).__name__}: {error}"
                self._console.warn(
                    f"weights & biases {label}: {cause}. The run continues; metrics.jsonl has all "
                    f"metrics"
                )
            self._warned = True
            return None
