"""Hold the state that the clients of a service share: its driver, the output folder, and the
counters for ids and random streams.
"""

from __future__ import annotations

import itertools
import os
import uuid
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rl.errors import BadRequestError, warn_on_rank_zero
from rl.runtime import Driver, SampleTemperatures


class ServiceContext:
    """Hold the shared state of a service. A ServiceClient makes it and passes it to each client
    that it creates.

    `seed`: seed of samples requested without a seed. `user_metadata`: string pairs saved with
    every checkpoint. `sample_temperatures`: the temperatures of the last samples.
    """

    def __init__(
        self, driver: Driver, output_dir: str, seed: int, user_metadata: Mapping[str, str]
    ):
        self.driver = driver
        self.output_dir = os.path.expanduser(output_dir)
        self.seed = seed
        self.user_metadata = user_metadata
        self.sample_temperatures = SampleTemperatures()
        self._id = uuid.uuid4().hex[:12]
        self._sequences = itertools.count()
        self._folder_models: dict[str, int] = {}  # which model wrote a folder
        # by output folder: ids of the models that save to a separate subfolder of it
        self._separate_models: dict[str, set[int]] = {}
        # each returns a new id of a model, weight version or scorer, or the index of a new random
        # stream
        self.next_model_id = itertools.count().__next__
        self.next_version_id = itertools.count(1).__next__
        self.next_stream = itertools.count(1).__next__
        self.next_scorer_id = itertools.count().__next__
        self._warnings: set[str] = set()

    def warn_once(self, text: str) -> None:
        """Warn with `text`, at its first occurrence only."""
        if text not in self._warnings:
            self._warnings.add(text)
            warn_on_rank_zero(text, stacklevel=7)

    def next_sequence_id(self) -> str:
        """Return a new id of a sampled sequence, unique across services."""
        return f"{self._id}:{next(self._sequences)}"

    def choose_save_folder(
        self,
        model_id: int,
        kind: Literal["checkpoints", "sampler_weights"],
        name: str,
        parent: Path | None = None,
    ) -> str:
        """Return the folder that a model saves to under `name`, in `parent` if it is set. Record
        that the model saved last in it.

        If another model of this service has saved under that name in the output folder, it is in
        model-<id>/, a subfolder for this model.
        """
        path = (parent or self.get_save_parent(model_id, kind)) / name
        if parent is None and self.find_saving_model(path) not in (None, model_id):
            self._separate_models.setdefault(self.output_dir, set()).add(model_id)
            path = self.get_save_parent(model_id, kind) / name
        self._folder_models[str(path.resolve())] = model_id
        return str(path)

    def get_save_parent(self, model_id: int, kind: str) -> Path:
        """Return the folder that a model's next save is written into."""
        is_separate = model_id in self._separate_models.get(self.output_dir, ())
        return Path(self.output_dir, f"model-{model_id}" if is_separate else "", kind)

    def find_saving_model(self, path: str | Path) -> int | None:
        """Return the model that this service saved last in a folder; None if it saved none."""
        return self._folder_models.get(str(Path(path).resolve()))

    def absolute_output_dir(self) -> str:
        """Return the absolute path of the output folder."""
        return str(Path(self.output_dir).absolute())


def expand_path(path: str | os.PathLike[str]) -> str:
    """Return the path of saved weights without `~`. Raises BadRequestError if it is no path."""
    if not isinstance(path, (str, os.PathLike)):
        raise BadRequestError(
            "the path of saved weights is a folder, such as save_state(...).result().path; got "
            f"{path!r:.100}"
        )
    return os.path.expanduser(path)


def free_when_collected(
    owner: object, driver: Driver, verb: str, number: int
) -> weakref.finalize[..., Any]:
    """Return a finalizer that submits `verb`, which frees what `owner` holds on the ranks, once
    `owner` is collected or the finalizer is called, unless the service is closed.
    """

    def free() -> None:
        if not driver.closed:
            driver.submit(verb, number)

    finalizer = weakref.finalize(owner, free)
    finalizer.atexit = False
    return finalizer


def check_user_metadata(user_metadata: Mapping[str, str] | None) -> dict[str, str]:
    """Return `user_metadata` as a dict. Raises BadRequestError (a ValueError) unless it maps
    strings to strings.
    """
    words = {} if user_metadata is None else user_metadata
    if not isinstance(words, Mapping) or any(
        not isinstance(part, str) for pair in words.items() for part in pair
    ):
        raise BadRequestError(
            f"user_metadata is a dict of strings to strings, got {user_metadata!r}"
        )
    return dict(words)
