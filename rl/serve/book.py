"""Who is there, and what is theirs: sessions, models, samplers, and where they lie on disk. Nothing
here computes.

<output_dir>/<session>/session.json                     whose it is, its words
<output_dir>/<session>/train-<n>/weights/<name>/        tinker://<session>:train:<n>/weights/<name>
<output_dir>/<session>/train-<n>/sampler_weights/<name>/
<output_dir>/<session>/train-<n>/external_weights/<name>/
<output_dir>/<session>/train-<n>/live/                  the model as it was when it was written out,
and what it was asked last
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
    """One ServiceClient of somebody's."""

    session_id: str
    owner: str
    user_metadata: dict[str, str] = field(default_factory=dict)
    display_name: str | None = None
    created: float = field(default_factory=time.time)
    finished: str | None = None
    beat: float = field(default_factory=time.monotonic)

    def note(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "beat"}


@dataclass
class Model:
    """A training client of somebody's. What computes is `client`, None while it is written out."""

    model_id: str
    owner: str
    session: str
    folder: Path
    base: ServedBase
    user_metadata: dict[str, str]
    client: TrainingClient | None = None
    next_seq: int = 1  # the number of the request that is run next
    waiting: dict[int, Job] = field(default_factory=dict)  # that came before their turn
    ran: int = 0  # the number of the request that was begun last
    last: dict[str, Any] | None = None  # the last update's number and answer
    lost: str | None = None  # why there is no gradient where one was accumulated
    failed: str | None = None  # why an update would be on half of what was meant
    gradient: bool = False  # something is accumulated
    busy: bool = False  # a request of it has begun
    written: bool = False  # `live/` is what it is now
    # since when a number is missing that an earlier server may have taken
    gap_since: float | None = None
    resumed: bool = False
    lora_rank: int | None = None
    digest: str = ""  # of the body that it was made for (empty: an earlier version made it)
    answer: dict[str, Any] = field(default_factory=dict)  # to that
    used: float = field(default_factory=time.monotonic)
    last_request: float = field(default_factory=time.time)

    @property
    def live(self) -> Path:
        return self.folder / LIVE


@dataclass
class Sampler:
    """A sampling session of somebody's. `path`: the folder that its weights can be read from again."""

    sampler_id: str
    owner: str
    session: str
    base: ServedBase
    path: Path | None = None
    client: SamplingClient | None = None
    snapshot: bool = False  # weights that lie in memory alone
    clones: int = 0
    used: float = field(default_factory=time.monotonic)


def tenant_of(thing: Session | Model | Sampler) -> str:
    """Return in whose part something is counted: its key's, or its session's where the server has
    no keys.
    """
    if thing.owner != LOCAL:
        return thing.owner
    return thing.session_id if isinstance(thing, Session) else thing.session


class Book:
    """All of it by id. To an owner, what is another's does not exist."""

    def __init__(self, output_dir: Path, limits: Limits):
        self.root = Path(output_dir)
        self.limits = limits
        self._opening = threading.Lock()
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, Sampler] = {}
        # whether there are more tenants than this one
        self.others: Callable[[str], bool] = lambda tenant: False

    # ------------------------------------------------------------------------------------- sessions

    def open_session(
        self, owner: str, user_metadata: dict[str, str], display_name: str | None
    ) -> Session:
        with self._opening:
            alive = [
                session.owner
                for session in list(self.sessions.values())
                if session.finished is None
            ]
            # without keys all sessions are one tenant's
            others = owner != LOCAL and self.others(owner)
            check_share(
                "sessions that are alive (--sessions)",
                self.limits.sessions,
                len(alive),
                alive.count(owner),
                others,
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
        """Writes what is known of a session, whole or not at all."""
        write_whole(self.root / session.session_id / "session.json", session.note())

    def session(self, session_id: str, owner: str, *, alive: bool = True) -> Session:
        session = self.sessions.get(session_id)
        if session is None or session.owner != owner:
            raise Refused(404, f"there is no session {session_id[:64]!r}")
        if alive and session.finished is not None:
            raise Refused(
                410,
                f"the session {session_id} has ended ({session.finished}): make a new ServiceClient",
            )
        session.beat = time.monotonic()
        return session

    # -------------------------------------------------------------------------- models and samplers

    def add_model(
        self, session: Session, seq: int, base: ServedBase, user_metadata: dict[str, str]
    ) -> Model:
        models = [
            model
            for model in list(self.models.values())
            if self.sessions[model.session].finished is None
        ]
        mine = sum(tenant_of(model) == tenant_of(session) for model in models)
        what = "training clients in sessions that are alive (--models)"
        check_share(what, self.limits.models, len(models), mine, self.others(tenant_of(session)))
        model_id = f"{session.session_id}:train:{seq}"
        folder = self.root / session.session_id / f"train-{seq}"
        words = {**session.user_metadata, **user_metadata}
        model = self.models[model_id] = Model(
            model_id, session.owner, session.session_id, folder, base, words
        )
        return model

    def model(self, model_id: str, owner: str, *, alive: bool = True) -> Model:
        model = self.models.get(model_id)
        if model is None or model.owner != owner:
            raise Refused(404, f"there is no model {model_id[:80]!r}")
        self.session(model.session, owner, alive=alive)
        model.used, model.last_request = time.monotonic(), time.time()
        return model

    def sampler(self, sampler_id: str, owner: str) -> Sampler:
        sampler = self.samplers.get(sampler_id)
        if sampler is None or sampler.owner != owner:
            raise Refused(404, f"there is no sampling session {sampler_id[:80]!r}")
        sampler.used = time.monotonic()
        return sampler

    def add_sampler(self, sampler: Sampler) -> Sampler:
        """Note a sampling session, and forget the oldest ones of whoever has most of them beyond
        `limits.samplers`.
        """
        self.samplers[sampler.sampler_id] = sampler
        count = len(self.samplers) - self.limits.samplers
        if count > 0:
            by_use = sorted(list(self.samplers.values()), key=lambda one: one.used)
            holders = {one.sampler_id: tenant_of(one) for one in by_use}
            for sampler_id in surplus(holders, list(holders), count):
                gone = (
                    self.samplers.pop(sampler_id, None)
                    if sampler_id != sampler.sampler_id
                    else None
                )
                if gone is not None:  # another thread may have been first
                    gone.client = None
        return sampler

    def models_of(self, owner: str) -> list[Model]:
        return [model for model in list(self.models.values()) if model.owner == owner]

    # ---------------------------------------------------------------------------------------- paths

    def folder_of(
        self, tinker_path: str, owner: str, *, kinds: tuple[str, ...] = KINDS
    ) -> tuple[Model, Path]:
        """Where tinker://<model>/<kind>/<name> lies, if it is this owner's. Refused (404) for
        anything else; nothing leads outside.
        """
        parts = tinker_path.removeprefix("tinker://").split("/")
        known = (
            tinker_path.startswith("tinker://")
            and len(parts) == 3
            and parts[1] in KINDS
            and checkpoint.is_name(parts[2])
        )
        if not known or not _MODEL.fullmatch(parts[0]):
            raise Refused(
                404,
                f"{tinker_path[:120]!r} is no path of this server: tinker://<model>/weights/<name>, as saving returned it",
            )
        if parts[1] not in kinds:
            raise Refused(
                400, f"{tinker_path} holds {parts[1]}, and {' or '.join(kinds)} is wanted"
            )
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
        return f"tinker://{model.model_id}/{kind}/{name}"

    def checkpoints(self, model: Model) -> Iterator[tuple[str, Path]]:
        """(kind, folder) of what was saved of a model and has not expired."""
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
        return self.root.is_dir() and any(
            _SESSION.fullmatch(path.name) for path in self.root.iterdir()
        )

    def read_again(self, bases: dict[str, ServedBase]) -> None:
        """What an earlier server left in the folder: sessions, models as they were last written,
        paths.
        """
        for path in sorted(self.root.iterdir()):
            file = path / "session.json"
            if not _SESSION.fullmatch(path.name) or path.is_symlink():
                continue
            # an earlier server was killed while it made this session, which it never answered
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
        noted = json.loads((folder / "model.json").read_text())
        base = bases.get(noted["base"])
        if base is None:
            return  # a base that is not served now: its paths come back with it
        model_id = f"{session.session_id}:train:{folder.name.removeprefix('train-')}"
        model = Model(
            model_id,
            session.owner,
            session.session_id,
            folder,
            base,
            noted["user_metadata"],
            lora_rank=noted["lora_rank"],
        )
        model.resumed, model.digest = True, noted.get("digest", "")
        model.answer = noted.get("answer", {"model_id": model_id, "type": "create_model"})
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
        """Writes what a model is, so that its paths are known to a later server."""
        noted = {
            "base": model.base.name,
            "user_metadata": model.user_metadata,
            "lora_rank": model.lora_rank,
        }
        write_whole(
            model.folder / "model.json", {**noted, "digest": model.digest, "answer": model.answer}
        )

    def forget_model(self, model: Model, with_files: bool) -> None:
        """Remove a model that could not be made. `with_files`: its folder too."""
        self.models.pop(model.model_id, None)
        if with_files:
            shutil.rmtree(model.folder, ignore_errors=True)

    @staticmethod
    def live_state(model: Model) -> dict[str, Any] | None:
        """Return what was noted of a model when it was written out last; None if it never was."""
        checkpoint.bring_back(model.live)
        if not (model.live / checkpoint.MANIFEST).is_file():
            return None
        return dict(checkpoint.glance(model.live)["metadata"])


def write_whole(file: Path, fields: dict[str, Any]) -> None:
    """Write JSON to `file`, whole or not at all, and make its folder. Nothing partial is left
    behind if writing fails.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(f"{file.name}.partial")
    try:
        with aside.open("w") as handle:
            handle.write(json.dumps(fields, indent=1))
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(aside, file)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
