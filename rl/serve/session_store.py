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
import logging
import re
import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rl.client import SamplingClient, TrainingClient
from rl.distributed import checkpoint_folder
from rl.jsonl import write_atomically
from rl.serve.http_errors import HttpError
from rl.serve.scheduler import EngineJob, check_share, choose_evictions
from rl.serve.serve_settings import LOCAL_OWNER, ServedBaseModel, ServeSettings

log = logging.getLogger("whetstone.serve")

CHECKPOINT_KINDS = ("weights", "sampler_weights", "external_weights")
LIVE_FOLDER = "live"
_SESSION_PATTERN = re.compile(r"[0-9a-f]{32}")
_FOLDER_PATTERN = re.compile(r"train-(0|[1-9][0-9]{0,8})")
_CHECKPOINT_PATTERN = re.compile(
    rf"tinker://([0-9a-f]{{32}}:train:(?:0|[1-9][0-9]{{0,8}}))/({'|'.join(CHECKPOINT_KINDS)})/([^/]*)"
)


class TenantRecord:
    """Base class of what a tenant holds: the tenant is its owner, or its session if the server has
    no keys.
    """

    owner: str
    session: str
    last_used: float

    @property
    def tenant(self) -> str:
        """Return the tenant for which the record counts."""
        return self.session if self.owner == LOCAL_OWNER else self.owner


RecordT = TypeVar("RecordT", bound=TenantRecord)


@dataclass(eq=False)
class SessionRecord(TenantRecord):
    """Hold the record of a session: a ServiceClient of a user.

    `session.json` holds every field but `last_used`, the monotonic time of the last heartbeat.
    """

    session_id: str
    owner: str
    user_metadata: dict[str, str] = field(default_factory=dict)
    display_name: str | None = None
    created: float = field(default_factory=time.time)
    finished: str | None = None
    last_used: float = field(default_factory=time.monotonic)

    @property
    def session(self) -> str:  # type: ignore[override]
        return self.session_id


@dataclass(eq=False)
class ModelRecord(TenantRecord):
    """Hold the record of a training client of a user.

    `client`: the training client; None while the model is written out to disk.
    """

    model_id: str
    owner: str
    session: str
    folder: Path
    base: ServedBaseModel
    user_metadata: dict[str, str]
    client: TrainingClient | None = None
    next_seq: int = 1  # sequence number of the request to run next
    # requests with a later number than `next_seq`, by number
    queued_jobs: dict[int, EngineJob] = field(default_factory=dict)
    last_started_seq: int = 0  # sequence number of the request that started last
    last_update: dict[str, Any] | None = None  # number and result of the last optimizer step
    gradient_error: str | None = None  # the reason for which the accumulated gradient was dropped
    # the reason for which an optimizer step would use only part of the accumulated batches
    batch_error: str | None = None
    has_gradient: bool = False  # whether a gradient is accumulated
    is_running: bool = False  # whether a request of the model is running
    is_written_out: bool = False  # whether `live/` holds the current state
    # `last_started_seq` when `live/` was written: requests that change no weights have numbers too
    written_seq: int = 0
    # monotonic time since which later requests wait for `next_seq`
    gap_since: float | None = None
    # whether an earlier server may have run the requests before the next update
    resumed: bool = False
    lora_rank: int | None = None
    # of the body of the request that created the model; empty: an earlier release created it
    request_digest: str = ""
    create_result: dict[str, Any] = field(default_factory=dict)  # the result of that request
    last_used: float = field(default_factory=time.monotonic)
    last_request: float = field(default_factory=time.time)

    @property
    def live_folder(self) -> Path:
        """Return the folder to which the model is written out."""
        return self.folder / LIVE_FOLDER


@dataclass(eq=False)
class SamplerRecord(TenantRecord):
    """Hold the record of a sampling session of a user.

    `path`: the folder from which its weights can be loaded again.
    """

    sampler_id: str
    owner: str
    session: str
    base: ServedBaseModel
    path: Path | None = None
    client: SamplingClient | None = None
    is_in_memory: bool = False  # whether its weights exist only in memory
    clones: int = 0
    loading_lock: threading.Lock = field(default_factory=threading.Lock)
    last_used: float = field(default_factory=time.monotonic)


def format_path(folder: Path) -> str:
    """Return the tinker:// path of a checkpoint's folder."""
    session, model, kind, name = folder.parts[-4:]
    return f"tinker://{session}:{model.replace('-', ':')}/{kind}/{name}"


def _is_checkpoint(folder: Path) -> bool:
    """Return whether a folder holds a complete checkpoint."""
    return not folder.is_symlink() and (folder / checkpoint_folder.MANIFEST).is_file()


def find_record(records: Mapping[str, RecordT], record_id: str, owner: str, label: str) -> RecordT:
    """Return the record of an id. Raises HttpError (404) if the owner has no such `label`."""
    record = records.get(record_id)
    if record is None or record.owner != owner:
        raise HttpError(404, f"unknown {label} {record_id[:80]!r}")
    return record


def choose_oldest(records: Sequence[RecordT], count: int) -> list[RecordT]:
    """Return `count` records to evict, by tenant and least recent use."""
    oldest_first = sorted(records, key=lambda record: record.last_used)
    return choose_evictions({record: record.tenant for record in oldest_first}, count)


class SessionStore:
    """Hold the records of sessions, models and samplers by id.

    Lookups raise HttpError (404) for a record of another owner, as for an unknown id.
    """

    def __init__(self, settings: ServeSettings):
        self.root, self.keys, self.limits = settings.output_dir, settings.keys, settings.limits
        self._open_lock = threading.Lock()
        self.sessions: dict[str, SessionRecord] = {}
        self.models: dict[str, ModelRecord] = {}
        self.samplers: dict[str, SamplerRecord] = {}

    def has_other_tenants(self, tenant: str) -> bool:
        """Return whether another tenant exists: another key, or another live session."""
        if self.keys:
            return len(self.keys) > 1
        return any(session.session_id != tenant for session in self.list_live_sessions())

    # ------------------------------------------------------------------------------------- sessions

    def open_session(
        self, owner: str, user_metadata: dict[str, str], display_name: str | None
    ) -> SessionRecord:
        """Create a session and write its file. Raises HttpError (429) above the owner's share."""
        with self._open_lock:
            live_owners = [session.owner for session in self.list_live_sessions()]
            # without keys all sessions belong to the same tenant
            has_others = owner != LOCAL_OWNER and self.has_other_tenants(owner)
            check_share(
                "sessions that are alive (--sessions)",
                self.limits.sessions,
                len(live_owners),
                live_owners.count(owner),
                has_others,
            )
            session = SessionRecord(uuid.uuid4().hex, owner, user_metadata, display_name)
            try:
                self.save_session(session)
            except BaseException:
                shutil.rmtree(self.root / session.session_id, ignore_errors=True)
                raise
            self.sessions[session.session_id] = session
            return session

    def save_session(self, session: SessionRecord) -> None:
        """Write `session.json` atomically."""
        fields = {name: value for name, value in asdict(session).items() if name != "last_used"}
        _write_json(self.root / session.session_id / "session.json", fields)

    def get_session(self, session_id: str, owner: str, *, alive: bool = True) -> SessionRecord:
        """Return the session and renew its heartbeat. Raises HttpError: 404 for an unknown id, 410
        for an ended session if `alive`.
        """
        session = find_record(self.sessions, session_id, owner, "session")
        if alive and session.finished is not None:
            raise HttpError(
                410,
                f"session {session_id} has ended ({session.finished}): create a new ServiceClient",
            )
        session.last_used = time.monotonic()
        return session

    # -------------------------------------------------------------------------- models and samplers

    def add_model(
        self, session: SessionRecord, seq: int, base: ServedBaseModel, user_metadata: dict[str, str]
    ) -> ModelRecord:
        """Add the record of a new model. Raises HttpError (429) above the tenant's share."""
        model = self._make_model(session, seq, base, {**session.user_metadata, **user_metadata})
        tenants = [
            other.tenant
            for other in self.list_models()
            # a model that an earlier server lost is replaced
            if other.model_id != model.model_id and self.sessions[other.session].finished is None
        ]
        check_share(
            "training clients in sessions that are alive (--models)",
            self.limits.models,
            len(tenants),
            tenants.count(session.tenant),
            self.has_other_tenants(session.tenant),
        )
        self.models[model.model_id] = model
        return model

    def _make_model(
        self,
        session: SessionRecord,
        seq: int | str,
        base: ServedBaseModel,
        user_metadata: dict[str, str],
    ) -> ModelRecord:
        """Return the record of a model of a session."""
        session_id = session.session_id
        folder, model_id = self.root / session_id / f"train-{seq}", f"{session_id}:train:{seq}"
        return ModelRecord(model_id, session.owner, session_id, folder, base, user_metadata)

    def get_model(self, model_id: str, owner: str) -> ModelRecord:
        """Return the model and note its use. Raises HttpError: 404 for an unknown id, 410 if its
        session has ended.
        """
        model = find_record(self.models, model_id, owner, "model")
        self.get_session(model.session, owner)
        model.last_used, model.last_request = time.monotonic(), time.time()
        return model

    def get_sampler(self, sampler_id: str, owner: str) -> SamplerRecord:
        """Return the sampling session and note its use, or raise HttpError (404)."""
        sampler = find_record(self.samplers, sampler_id, owner, "sampling session")
        sampler.last_used = time.monotonic()
        return sampler

    def find_path_sampler(self, path: str, owner: str) -> SamplerRecord:
        """Return the sampling session of a tinker:// path, and add it if there is none."""
        source, folder = self.find_folder(path, owner)
        for candidate in self.list_samplers():
            if candidate.path == folder and candidate.owner == owner:
                candidate.last_used = time.monotonic()
                return candidate
        sampler_id = f"{source.model_id}:{folder.parent.name}:{folder.name}"
        return self.add_sampler(
            SamplerRecord(sampler_id, owner, source.session, source.base, folder)
        )

    def add_sampler(self, sampler: SamplerRecord) -> SamplerRecord:
        """Add a sampling session.

        Above `limits.samplers`, remove the least recently used sessions of the tenants that hold
        the most.
        """
        self.samplers[sampler.sampler_id] = sampler
        if (count := len(self.samplers) - self.limits.samplers) > 0:
            for evicted in choose_oldest(self.list_samplers(), count):
                if evicted is not sampler:
                    self.samplers.pop(evicted.sampler_id, None)  # unless another thread did
                    evicted.client = None
        return sampler

    # Other threads add records meanwhile, so that each list begins with a copy.

    def list_models(
        self, owner: str | None = None, session_id: str | None = None
    ) -> list[ModelRecord]:
        """Return all models, or those of an owner or of a session."""
        return [
            model
            for model in list(self.models.values())
            if owner in (None, model.owner) and session_id in (None, model.session)
        ]

    def list_samplers(self, session_id: str | None = None) -> list[SamplerRecord]:
        """Return all sampling sessions, or those of a session."""
        samplers = list(self.samplers.values())
        return [sampler for sampler in samplers if session_id in (None, sampler.session)]

    def list_live_sessions(self) -> list[SessionRecord]:
        """Return the sessions that have not ended."""
        return [session for session in list(self.sessions.values()) if session.finished is None]

    # ---------------------------------------------------------------------------------------- paths

    def find_folder(
        self, tinker_path: str, owner: str, *, kinds: tuple[str, ...] = CHECKPOINT_KINDS
    ) -> tuple[ModelRecord, Path]:
        """Return the model and folder of a checkpoint tinker://<model>/<kind>/<name>.

        Raises HttpError: 404 if the path is malformed, unknown or of another owner, 400 if its kind
        is not in `kinds`. The folder is always below the model's folder.
        """
        match = _CHECKPOINT_PATTERN.fullmatch(tinker_path)
        if match is None or not checkpoint_folder.is_checkpoint_name(match[3]):
            raise HttpError(
                404,
                f"{tinker_path[:120]!r} is not a path of this server: expected "
                "tinker://<model>/weights/<name>, as returned when saving",
            )
        model_id, kind, name = match.groups()
        if kind not in kinds:
            raise HttpError(400, f"{tinker_path} holds {kind}, expected {' or '.join(kinds)}")
        model = self.models.get(model_id)
        if model is not None and model.owner == owner:
            folder = checkpoint_folder.checkpoint_path(model.folder / kind, name)
            # it alone: reading the manifests of a thousand checkpoints takes 0.1 s a request
            checkpoint_folder.remove_if_expired(folder)
            if _is_checkpoint(folder):
                return model, folder
            saved = [f"{k}/{path.name}" for k, path in self.iter_checkpoints(model) if k in kinds]
            listed = ", ".join(saved[-8:]) or "no " + " or ".join(kinds)
            hint = f": this model has {listed}"
        else:
            hint = ": it is not a path that saving with this key returned"
        raise HttpError(404, f"there is nothing at {tinker_path}{hint}")

    def iter_checkpoints(self, model: ModelRecord) -> Iterator[tuple[str, Path]]:
        """Yield (kind, folder) of each checkpoint of a model that has not expired."""
        for kind in CHECKPOINT_KINDS:
            parent = model.folder / kind
            checkpoint_folder.remove_expired(parent)
            for folder in sorted(parent.iterdir()) if parent.is_dir() else ():
                if _is_checkpoint(folder) and checkpoint_folder.is_checkpoint_name(folder.name):
                    yield kind, folder

    # --------------------------------------------------------------------------------------- resume

    def has_saved_sessions(self) -> bool:
        """Return whether the output folder holds sessions of an earlier server."""
        return self.root.is_dir() and any(
            _SESSION_PATTERN.fullmatch(path.name) for path in self.root.iterdir()
        )

    def load_sessions(self, bases: dict[str, ServedBaseModel]) -> None:
        """Load the sessions of an earlier server and their models, as last written out. Log the
        damaged ones and load the others: those of other tenants, for example.

        `bases`: served base models by name. A model of any other base is skipped.
        """
        for path in sorted(self.root.iterdir()):
            file = path / "session.json"
            if not _SESSION_PATTERN.fullmatch(path.name) or path.is_symlink():
                continue
            # an earlier server was killed while it created this session, before it responded
            if not file.is_file():
                for partial in path.glob("session.json.*"):
                    partial.unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    path.rmdir()
                continue
            try:
                session = SessionRecord(**json.loads(file.read_text()))
            except (OSError, ValueError, TypeError) as error:
                log.error("a session was not resumed: %s: %s", file, error)
                continue
            self.sessions[path.name] = session
            for folder in sorted(path.glob("train-*")):
                if _FOLDER_PATTERN.fullmatch(folder.name) and (folder / "model.json").is_file():
                    try:
                        self._load_model(session, folder, bases)
                    except (OSError, ValueError, KeyError, TypeError) as error:
                        log.error("a model was not resumed: %s: %r", folder, error)

    def _load_model(
        self, session: SessionRecord, folder: Path, bases: dict[str, ServedBaseModel]
    ) -> None:
        """Load the record of a model, and the state of its `live/` folder if it exists. Log a
        damaged state.
        """
        record = json.loads((folder / "model.json").read_text())
        base = bases.get(record["base"])
        if base is None:
            return  # its base is not served now; the paths work again once it is
        seq = folder.name.removeprefix("train-")
        model = self._make_model(session, seq, base, record["user_metadata"])
        model.lora_rank, model.resumed = record["lora_rank"], True
        model.request_digest = record.get("digest", "")
        default_result = {"model_id": model.model_id, "type": "create_model"}
        # an earlier release called it "answer"
        model.create_result = record.get("create_result", record.get("answer", default_result))
        checkpoint_folder.restore_replaced(model.live_folder)
        checkpoint_folder.remove_leftovers(folder)
        self.models[model.model_id] = model
        if not _is_checkpoint(model.live_folder):
            return
        try:
            state = checkpoint_folder.read_verified_state(model.live_folder)["metadata"]
        except checkpoint_folder.DamagedCheckpoint as error:
            log.error("a model was not resumed: %s", error, extra={"model": model.model_id})
            return
        model.is_written_out, model.next_seq = True, state["next_seq"]
        model.batch_error, model.last_update = state["failed"], state["last"]
        model.last_started_seq = model.written_seq = model.next_seq - 1

    @staticmethod
    def save_model_record(model: ModelRecord) -> None:
        """Write `model.json`, so that a later server knows the paths of the model."""
        record = {
            "base": model.base.name,
            "user_metadata": model.user_metadata,
            "lora_rank": model.lora_rank,
            "digest": model.request_digest,
            "create_result": model.create_result,
        }
        _write_json(model.folder / "model.json", record)

    @staticmethod
    def read_live_metadata(model: ModelRecord) -> dict[str, Any] | None:
        """Return the metadata of the last time that the model was written out; None if it never
        was.
        """
        checkpoint_folder.restore_replaced(model.live_folder)
        if not _is_checkpoint(model.live_folder):
            return None
        return dict(checkpoint_folder.read_unverified_state(model.live_folder)["metadata"])


def _write_json(file: Path, fields: dict[str, Any]) -> None:
    """Write JSON to `file` atomically, and create its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(fields, indent=1))
