"""What the clients of one service share: its driver, where saves go, and the counters from which
ids and random streams come.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from rl.clients.drawn import DrawnSamples
from rl.clients.driver import Driver
from rl.errors import BadRequestError, remark


class ServiceContext:
    """Made by a ServiceClient, handed to each client that it makes.

    `seed`: of samples drawn without one of their own. `user_metadata`: words saved with every
    checkpoint. `drawn`: at which temperature the last samples were drawn.
    """

    def __init__(
        self, driver: Driver, output_dir: str, seed: int, user_metadata: Mapping[str, str]
    ):
        self.driver = driver
        self.output_dir = output_dir
        self.seed = seed
        self.user_metadata = user_metadata
        self.drawn = DrawnSamples()
        self._id = uuid.uuid4().hex[:12]
        self._sequences = itertools.count()
        self._saved_by: dict[str, int] = {}  # which model wrote a folder
        # by output folder: models with a room of their own there
        self._rooms: dict[str, set[int]] = {}
        self._models = 0
        self._versions = 0
        self._streams = 0
        self._remarks: set[str] = set()

    def remark_once(self, text: str) -> None:
        """Warn of `text` the first time only."""
        if text not in self._remarks:
            self._remarks.add(text)
            remark(text, stacklevel=7)

    def next_model_id(self) -> int:
        model_id, self._models = self._models, self._models + 1
        return model_id

    def next_version_id(self) -> int:
        self._versions += 1
        return self._versions

    def next_stream(self) -> int:
        self._streams += 1
        return self._streams

    def next_sequence_id(self) -> str:
        return f"{self._id}:{next(self._sequences)}"

    def place_of(
        self, model_id: int, kind: Literal["checkpoints", "sampler_weights"], name: str
    ) -> str:
        """The folder that a model's save under a name goes to: of its own, where another model of
        this service has saved under it.
        """
        own = self._rooms.setdefault(self.output_dir, set())
        path = Path(self.output_dir, kind, name)
        if model_id in own or self._saved_by.get(str(path), model_id) != model_id:
            own.add(model_id)
            path = Path(self.output_dir, f"model-{model_id}", kind, name)
        self._saved_by[str(path)] = model_id
        return str(path)

    def shown_place(self) -> str:
        """Where this service writes, in full."""
        return str(Path(self.output_dir).absolute())


def check_words(user_metadata: Mapping[str, str] | None) -> dict[str, str]:
    """Raises ValueError unless it is a dict of strings."""
    words = {} if user_metadata is None else user_metadata
    if not isinstance(words, Mapping) or any(
        not isinstance(part, str) for pair in words.items() for part in pair
    ):
        raise BadRequestError(
            f"user_metadata is a dict of strings to strings, got {user_metadata!r}"
        )
    return dict(words)
