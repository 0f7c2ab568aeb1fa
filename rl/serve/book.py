"""Keep the records of sessions, models and samplers of a server, and their folders on disk.

<output_dir>/<session>/session.json                     owner and metadata of the session
<output_dir>/<session>/train-<n>/weights/<name>/        tinker://<session>:train:<n>/weights/<name>
<output_dir>/<session>/train-<n>/sampler_weights/<name>/
<output_dir>/<session>/train-<n>/external_weights/<name>/
<output_dir>/<session>/train-<n>/live/                  the model when it was last written out, and
                                                        its last request
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rl.clients import SamplingClient, TrainingClient
from rl.ranks import checkpoint
from rl.serve.refusals import Refused
from rl.serve.settings import LOCAL, Limits, ServedBase
from rl.serve.shares import check_share, surplus
from rl.serve.turns import Job

KINDS = ("weights", "sampler_weights", "external_weights")
LIVE = "live"
_SESSION, _MODEL = (
    re.compile(r"[0-9a-f]{32}"),
    re.compile(r"([0-9a-f]{32}):train:(0|[1-9][0-9]{0,8})"),
)


@dataclass
class Session:
    """Hold the record of a session: a ServiceClient of a user.

    `session.json` holds every field but `beat`, the monotonic time of the last heartbeat.
    """

    session_id: str
    owner: str
    user_metadata: dict[str, str] = field(default_factory=dict)
    display_name: str | None = None
    created: float = field(default_factory=time.time)
    finished: str | None = None
    beat: float = field(default_factory=time.monotonic)

    def note(self) -> dict[str, Any]:
        """Return the fields of `session.json`."""
        return {name: value for name, value in asdict(self).items() if name != "beat"}


@dataclass
class Model:
    """Hold the record of a training client of a user.

    `client`: the training client; None while the model is written out to disk.
    """

    model_id: str
    owner: str
    session: str
    folder: Path
    base: ServedBase
    user_metadata: dict[str, str]
    client: TrainingClient | None = None
    next_seq: int = 1  # sequence number of the request to run next
    # requests with a later number than `next_seq`, by number
    waiting: dict[int, Job] = field(default_factory=dict)
    ran: int = 0  # sequence number of the request that started last
    last: dict[str, Any] | None = None  # number and result of the last optimizer step
    lost: str | None = None  # the reason for which the accumulated gradient was dropped
    # the reason for which an optimizer step would use only part of the accumulated batches
    failed: str | None = None
    gradient: bool = False  # whether a gradient is accumulated
    busy: bool = False  # whether a request of the model is running
    written: bool = False  # whether `live/` holds the current state
    # monotonic time since which a number is missing that an earlier server may have run
    gap_since: float | None = None
    resumed: bool = False
    lora_rank: int | None = None
    # of the body of the request that created the model; empty: an earlier release created it
    digest: str = ""
    answer: dict[str, Any] = field(default_factory=dict)  # the result of that request
    used: float = field(default_factory=time.monotonic)
    last_request: float = field(default_factory=time.time)

    @property
    def live(self) -> Path:
        """Return the folder to which the model is written out."""
        return self.folder / LIVE


@dataclass
class Sampler:
    """Hold the record of a sampling session of a user.

    `path`: the folder from which its weights can be loaded again.
    """

    sampler_id: str
    owner: str
    session: str
    base: ServedBase
    path: Path | None = None
    client: SamplingClient | None = None
    snapshot: bool = False  # whether its weights exist only in memory
    clones: int = 0
    used: float = field(default_factory=time.monotonic)


def tenant_of(thing: Session | Model | Sampler) -> str:
    """Return the tenant for which a record counts: its owner, or its session if the server has no
    keys.
    """
    if thing.owner != LOCAL:
        return thing.owner
    return thing.session_id if isinstance(thing, Session) else thing.session


class Book:
    """Hold the records of sessions, models and samplers by id.

    Lookups raise Refused (404) for a record of another owner, as for an unknown id.
    """

    def __init__(self, output_dir: Path, limits: Limits):
        self.root = Path(output_dir)
        self.limits = limits
        self._opening = threading.Lock()
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, Sampler] = {}
        # returns whether the server has other tenants
        self.others: Callable[[str], bool] = lambda tenant: False

    # ------------------------------------------------------------------------------------- sessions

    def open_session(
        self, owner: str, user_metadata: dict[str, str], display_name: str | None
    ) -> Session:
        """Create a session and write its file. Raises Refused (429) above the owner's share."""
        with self._opening:
            live_owners = [
                session.owner
                for session in list(self.sessions.values())
                if session.finished is None
            ]
            # without keys all sessions belong to the same tenant
            has_others = owner != LOCAL and self.others(owner)
            check_share(
                "sessions that are alive (--sessions)",
                self.limits.sessions,
                len(live_owners),
                live_owners.count(owner),
                has_others,
            )
            session = Session(uuid.uuid4().hex, owner, user_metadata, display_name)
            try:
                self.keep(session)
            except BaseException:
                shutil.rmtree(self.root / session.session_id, ignore_errors=True)
                raise
            self.sessions[session.session_id] = session
            return session

    def keep(self, session: Session) -> None:
        """Write `session.json` atomically."""
        write_whole(self.root / session.session_id / "session.json", session.note())

    def session(self, session_id: str, owner: str, *, alive: bool = True) -> Session:
        """Return the session and renew its heartbeat. Raises Refused: 404 for an unknown id, 410
        for an ended session if `alive`.
        """
        session = self.sessions.get(session_id)
        if session is None or session.owner != owner:
            raise Refused(404, f"unknown session {session_id[:64]!r}")
        if alive and session.finished is not None:
            raise Refused(
                410,
                f"session {session_id} has ended ({session.finished}): create a new ServiceClient",
            )
        session.beat = time.monotonic()
        return session

    # -------------------------------------------------------------------------- models and samplers

    def add_model(
        self, session: Session, seq: int, base: ServedBase, user_metadata: dict[str, str]
    ) -> Model:
        """Add the record of a new model. Raises Refused (429) above the tenant's share."""
        models = [
            model
            for model in list(self.models.values())
            if self.sessions[model.session].finished is None
        ]
        tenant_count = sum(tenant_of(model) == tenant_of(session) for model in models)
        resource = "training clients in sessions that are alive (--models)"
        check_share(
            resource, self.limits.models, len(models), tenant_count, self.others(tenant_of(session))
        )
        model_id = f"{session.session_id}:train:{seq}"
        folder = self.root / session.session_id / f"train-{seq}"
        metadata = {**session.user_metadata, **user_metadata}
        model = self.models[model_id] = Model(
            model_id, session.owner, session.session_id, folder, base, metadata
        )
        return model

    def model(self, model_id: str, owner: str, *, alive: bool = True) -> Model:
        """Return the model and note its use. Raises Refused: 404 for an unknown id, 410 if its
        session has ended and `alive`.
        """
        model = self.models.get(model_id)
        if model is None or model.owner != owner:
            raise Refused(404, f"unknown model {model_id[:80]!r}")
        self.session(model.session, owner, alive=alive)
        model.used, model.last_request = time.monotonic(), time.time()
        return model

    def sampler(self, sampler_id: str, owner: str) -> Sampler:
        """Return the sampling session and note its use. Raises Refused (404) for an unknown id."""
        sampler = self.samplers.get(sampler_id)
        if sampler is None or sampler.owner != owner:
            raise Refused(404, f"unknown sampling session {sampler_id[:80]!r}")
        sampler.used = time.monotonic()
        return sampler

    def add_sampler(self, sampler: Sampler) -> Sampler:
        """Add a sampling session.

        Above `limits.samplers`, remove the least recently used sessions of the tenants that hold
        the most.
        """
        self.samplers[sampler.sampler_id] = sampler
        count = len(self.samplers) - self.limits.samplers
        if count > 0:
            by_last_use = sorted(list(self.samplers.values()), key=lambda record: record.used)
            holders = {record.sampler_id: tenant_of(record) for record in by_last_use}
            for sampler_id in surplus(holders, list(holders), count):
                evicted = (
                    self.samplers.pop(sampler_id, None)
                    if sampler_id != sampler.sampler_id
                    else None
                )
                if evicted is not None:  # None: another thread removed it
                    evicted.client = None
        return sampler

    def models_of(self, owner: str) -> list[Model]:
        """Return the models of an owner."""
        return [model for model in list(self.models.values()) if model.owner == owner]

    # ---------------------------------------------------------------------------------------- paths

    def folder_of(
        self, tinker_path: str, owner: str, *, kinds: tuple[str, ...] = KINDS
    ) -> tuple[Model, Path]:
        """Return the model and folder of a checkpoint tinker://<model>/<kind>/<name>.

        Raises Refused: 404 if the path is malformed, unknown or of another owner, 400 if its kind
        is not in `kinds`. The folder is always below the model's folder.
        """
        parts = tinker_path.removeprefix("tinker://").split("/")
        is_valid = (
            tinker_path.startswith("tinker://")
            and len(parts) == 3
            and parts[1] in KINDS
            and checkpoint.is_name(parts[2])
        )
        if not is_valid or not _MODEL.fullmatch(parts[0]):
            raise Refused(
                404,
                f"{tinker_path[:120]!r} is not a path of this server: expected "
                "tinker://<model>/weights/<name>, as returned when saving",
            )
        if parts[1] not in kinds:
            raise Refused(400, f"{tinker_path} holds {parts[1]}, expected {' or '.join(kinds)}")
        model = self.models.get(parts[0])
        if model is None or model.owner != owner:
            raise Refused(404, f"there is nothing at {tinker_path}")
        folder = checkpoint.below(model.folder / parts[1], parts[2])
        checkpoint.remove_expired(folder.parent)
        if folder.is_symlink() or not (folder / checkpoint.MANIFEST).is_file():
            raise Refused(404, f"there is nothing at {tinker_path}")
        return model, folder

    @staticmethod
    def path_of(model: Model, kind: str, name: str) -> str:
        """Return the tinker:// path of a checkpoint."""
        return f"tinker://{model.model_id}/{kind}/{name}"

    def checkpoints(self, model: Model) -> Iterator[tuple[str, Path]]:
        """Yield (kind, folder) of each checkpoint of a model that has not expired."""
        for kind in KINDS:
            parent = model.folder / kind
            checkpoint.remove_expired(parent)
            for folder in sorted(parent.iterdir()) if parent.is_dir() else ():
                if (
                    (folder / checkpoint.MANIFEST).is_file()
                    and not folder.is_symlink()
                    and checkpoint.is_name(folder.name)
                ):
                    yield kind, folder

    # --------------------------------------------------------------------------------------- resume

    def found_there(self) -> bool:
        """Return whether the output folder holds sessions of an earlier server."""
        return self.root.is_dir() and any(
            _SESSION.fullmatch(path.name) for path in self.root.iterdir()
        )

    def read_again(self, bases: dict[str, ServedBase]) -> None:
        """Load the sessions of an earlier server and their models, as last written out.

        `bases`: served base models by name. A model of any other base is skipped.
        """
        for path in sorted(self.root.iterdir()):
            file = path / "session.json"
            if not _SESSION.fullmatch(path.name) or path.is_symlink():
                continue
            # an earlier server was killed while it created this session, before it responded
            if not file.is_file():
                (path / "session.json.partial").unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    path.rmdir()
                continue
            fields = json.loads(file.read_text())
            session = self.sessions[path.name] = Session(**fields)
            for folder in sorted(path.glob("train-*")):
                if (
                    re.fullmatch(r"train-(0|[1-9][0-9]{0,8})", folder.name)
                    and (folder / "model.json").is_file()
                ):
                    self._read_model(session, folder, bases)

    def _read_model(self, session: Session, folder: Path, bases: dict[str, ServedBase]) -> None:
        """Load the record of a model, and the state of its `live/` folder if it exists."""
        record = json.loads((folder / "model.json").read_text())
        base = bases.get(record["base"])
        if base is None:
            return  # its base is not served now; the paths work again once it is
        model_id = f"{session.session_id}:train:{folder.name.removeprefix('train-')}"
        model = Model(
            model_id,
            session.owner,
            session.session_id,
            folder,
            base,
            record["user_metadata"],
            lora_rank=record["lora_rank"],
        )
        model.resumed, model.digest = True, record.get("digest", "")
        model.answer = record.get("answer", {"model_id": model_id, "type": "create_model"})
        checkpoint.bring_back(model.live)
        checkpoint.remove_leftovers(folder)
        if (model.live / checkpoint.MANIFEST).is_file():
            state = checkpoint.read_state(model.live)["metadata"]
            model.next_seq, model.failed, model.written, model.last = (
                state["next_seq"],
                state["failed"],
                True,
                state["last"],
            )
            model.ran = model.next_seq - 1
        self.models[model_id] = model

    @staticmethod
    def keep_model(model: Model) -> None:
        """Write `model.json`, so that a later server knows the paths of the model."""
        record = {
            "base": model.base.name,
            "user_metadata": model.user_metadata,
            "lora_rank": model.lora_rank,
        }
        write_whole(
            model.folder / "model.json", {**record, "digest": model.digest, "answer": model.answer}
        )

    def forget_model(self, model: Model, with_files: bool) -> None:
        """Remove a model that could not be created. `with_files`: remove its folder as well."""
        self.models.pop(model.model_id, None)
        if with_files:
            shutil.rmtree(model.folder, ignore_errors=True)

    @staticmethod
    def live_state(model: Model) -> dict[str, Any] | None:
        """Return the metadata of the last time that the model was written out; None if it never
        was.
        """
        checkpoint.bring_back(model.live)
        if not (model.live / checkpoint.MANIFEST).is_file():
            return None
        return dict(checkpoint.glance(model.live)["metadata"])


def write_whole(file: Path, fields: dict[str, Any]) -> None:
    """Write JSON to `file` atomically, and create its folder. A failure leaves no partial file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.partial")
    try:
        with partial.open("w") as handle:
            handle.write(json.dumps(fields, indent=1))
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(partial, file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
