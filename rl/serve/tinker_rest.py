"""Serve the REST part of Tinker's protocol.

Its routes list runs, checkpoints and sessions, delete checkpoints, set their time to live, and
download them.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import tarfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from email.utils import formatdate
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse

from rl.client import RestClient
from rl.distributed import checkpoint_folder
from rl.serve.api_routes import RouteHandler, TypedRoute, make_unsupported
from rl.serve.http_errors import HttpError
from rl.serve.schemas import TtlBody, WeightsInfoBody
from rl.serve.served_models import ServerParts
from rl.serve.session_store import ModelRecord, find_record, format_path
from rl.types import GetServerCapabilitiesResponse, SupportedModel

# a link's path: LINK_PREFIX, expiry, signature, and the path of the file
LINK_PREFIX = "/api/v1/files/"
_CHECKPOINT_TYPES = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
_LINK_SECONDS = 3600
_CHUNK_BYTES = 2**20  # bytes read and sent per chunk of a file
ARCHIVE_NAME = "archive.tar"  # file name in a link that means all files of the folder


class UrlSigner:
    """Sign paths of files with a secret that lives as long as the server.

    The signature covers the owner. The link itself names neither the owner nor the key.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def make_path(self, owner: str, expires: int, file_path: str) -> str:
        """Return the URL path of a link that `owner` creates.

        expires: Unix time in seconds. file_path: <model id>/<kind>/<checkpoint>/<file>.
        """
        text = f"{owner} {expires} {file_path}"
        sign = hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()
        return f"{LINK_PREFIX}{expires}/{sign}/{file_path}"

    def is_valid(self, owner: str, path: str) -> bool:
        """Return whether `path` is a link that `owner` created and that has not expired."""
        expires, _, rest = path.removeprefix(LINK_PREFIX).partition("/")
        if not (expires.isascii() and expires.isdigit() and len(expires) < 12):
            return False
        expected = self.make_path(owner, int(expires), rest.partition("/")[2])
        is_equal = hmac.compare_digest(expected.encode(), path.encode())
        return is_equal and int(expires) >= time.time()


@dataclass
class TinkerRestRoutes(ServerParts):
    """Hold the handlers under /api/v1 that inspect and manage saved weights."""

    links: UrlSigner

    def routes(self) -> list[TypedRoute]:
        """Return the routes of the REST part."""
        checkpoint_path = "training_runs/{model_id}/checkpoints/{kind}/{name}"
        refuse_publish = make_unsupported("publishing: a checkpoint belongs to its key")
        table: list[tuple[str, str, RouteHandler]] = [
            ("GET", "get_server_capabilities", self.get_capabilities),
            ("GET", "training_runs", self.list_runs),
            ("GET", "training_runs/{model_id}", self.get_run),
            ("GET", "training_runs/{model_id}/checkpoints", self.list_checkpoints),
            ("GET", "checkpoints", self.list_all_checkpoints),
            ("DELETE", checkpoint_path, self.delete_checkpoint),
            ("PUT", checkpoint_path + "/ttl", self.set_ttl),
            ("GET", checkpoint_path + "/archive", self.redirect_to_archive),
            ("GET", checkpoint_path + "/external_weights_urls", self.list_file_urls),
            ("GET", "files/{expires}/{sign}/{model_id}/{kind}/{name}/{file:path}", self.get_file),
            ("POST", checkpoint_path + "/publish", refuse_publish),
            ("DELETE", checkpoint_path + "/publish", refuse_publish),
            ("POST", "weights_info", self.get_weights_info),
            ("GET", "samplers/{sampler_id}", self.get_sampler),
            ("GET", "sessions", self.list_sessions),
            ("GET", "sessions/{session_id}", self.get_session),
        ]
        return [TypedRoute(f"/api/v1/{path}", handler, method) for method, path, handler in table]

    async def get_capabilities(self) -> Any:
        """Return the base models and their context lengths."""
        bases = self.model_manager.bases.values()
        models = [SupportedModel(base.name, base.max_context) for base in bases]
        return asdict(GetServerCapabilitiesResponse(models))

    # ---------------------------------------------------------------------------- runs, checkpoints

    def _describe_run(self, model: ModelRecord) -> dict[str, Any]:
        """Return a training run as Tinker's JSON describes it."""
        entries = sorted(self._describe_checkpoints([model]), key=_get_time)
        last = {entry["checkpoint_type"]: entry for entry in entries}
        return {
            "training_run_id": model.model_id,
            "base_model": model.base.name,
            "model_owner": model.owner,
            "is_lora": model.lora_rank is not None,
            "lora_rank": model.lora_rank,
            "corrupted": False,
            "last_request_time": _iso_time(model.last_request),
            "last_checkpoint": last.get("training"),
            "last_sampler_checkpoint": last.get("sampler"),
            "user_metadata": model.user_metadata,
        }

    def _describe_checkpoints(self, models: Iterable[ModelRecord]) -> list[dict[str, Any]]:
        """Return the checkpoints of models as Tinker's JSON describes them, except damaged ones."""
        entries = []
        for model in models:
            for kind, folder in self.session_store.iter_checkpoints(model):
                try:
                    run = RestClient().get_training_run_by_tinker_path(str(folder)).result()
                except (checkpoint_folder.DamagedCheckpoint, OSError):
                    continue  # or it was removed in the meantime
                assert run.last_checkpoint is not None  # the folder is a checkpoint
                entry = asdict(run.last_checkpoint)
                entry |= {
                    "checkpoint_id": f"{kind}/{folder.name}",
                    "checkpoint_type": _CHECKPOINT_TYPES[kind],
                    "time": entry["time"].isoformat(),
                    "tinker_path": format_path(folder),
                    "expires_at": entry["expires_at"] and entry["expires_at"].isoformat(),
                }
                entries.append(entry)
        return entries

    def list_runs(self, request: Request, owner: str) -> Any:
        """Return a page of the owner's training runs, the most recently used first."""
        models = self.session_store.list_models(owner)
        models.sort(key=lambda model: model.last_request, reverse=True)
        page, cursor = _paginate(request, models)
        return {"training_runs": list(map(self._describe_run, page)), "cursor": cursor}

    def get_run(self, owner: str, model_id: str) -> Any:
        """Return a training run."""
        return self._describe_run(self._find_model(owner, model_id))

    def _find_model(self, owner: str, model_id: str) -> ModelRecord:
        """Return a model. Raises HttpError (404) if the owner has no such model."""
        return find_record(self.session_store.models, model_id, owner, "training run")

    def list_checkpoints(self, owner: str, model_id: str) -> Any:
        """Return the checkpoints of a training run."""
        return {"checkpoints": self._describe_checkpoints([self._find_model(owner, model_id)])}

    def list_all_checkpoints(self, request: Request, owner: str) -> Any:
        """Return a page of the checkpoints of all runs of the owner, the newest first."""
        models = self.session_store.list_models(owner)
        checkpoints = sorted(self._describe_checkpoints(models), key=_get_time, reverse=True)
        page, cursor = _paginate(request, checkpoints)
        return {"checkpoints": page, "cursor": cursor}

    def _find_folder(self, request: Request) -> Path:
        """Return the folder of the checkpoint of the path."""
        path = "tinker://{model_id}/{kind}/{name}".format_map(request.path_params)
        return self.session_store.find_folder(path, request.state.owner)[1]

    def delete_checkpoint(self, request: Request) -> Response:
        """Delete a checkpoint."""
        checkpoint_folder.remove_checkpoint(self._find_folder(request))
        return Response(status_code=204)

    def set_ttl(self, request: Request, body: TtlBody) -> Response:
        """Set or remove the time to live of a checkpoint, in seconds."""
        checkpoint_folder.set_expiry(self._find_folder(request), body.ttl_seconds)
        return Response(status_code=204)

    def get_weights_info(self, owner: str, body: WeightsInfoBody) -> Any:
        """Return the base model and the LoRA settings of saved weights."""
        model, folder = self.session_store.find_folder(body.tinker_path, owner)
        info = RestClient().get_weights_info_by_tinker_path(str(folder)).result()
        return {**asdict(info), "base_model": model.base.name}

    # ------------------------------------------------------------------------------------ downloads

    def redirect_to_archive(self, request: Request) -> Response:
        """Return a redirect to a link to the folder as a tar file.

        The link needs no key and expires after an hour.
        """
        checkpoint_folder.verify_checkpoint(self._find_folder(request))
        url, expires = self._make_link(request, ARCHIVE_NAME)
        headers = {"location": url, "expires": formatdate(expires, usegmt=True)}
        return Response(status_code=302, headers=headers)

    def list_file_urls(self, request: Request) -> Any:
        """Return a link for each file. A link needs no key and expires after an hour."""
        folder, expires = self._find_folder(request), 0
        urls: dict[str, str] = {}
        for file in list_files(folder):
            if file.name not in (checkpoint_folder.MANIFEST, "state.json"):
                name = file.relative_to(folder).as_posix()
                urls[name], expires = self._make_link(request, name)
        return {"urls": urls, "expires": _iso_time(expires)}

    def _make_link(self, request: Request, name: str) -> tuple[str, int]:
        """Return a signed URL of a file of the path's checkpoint, and its end in Unix seconds."""
        expires = int(time.time()) + _LINK_SECONDS
        place = "{model_id}/{kind}/{name}".format_map(request.path_params)
        path = self.links.make_path(request.state.owner, expires, f"{place}/{name}")
        return f"{str(request.base_url).rstrip('/')}{path}", expires

    def get_file(self, request: Request) -> Response:
        """Return the file of a signed link, or the folder as a tar file.

        Raises HttpError (404) if the link is invalid or expired, or if the file does not exist.
        """
        params = request.path_params
        model = self.session_store.models.get(params["model_id"])
        if model is None or not self.links.is_valid(model.owner, request.scope["path"]):
            raise HttpError(404, "the link was not created by this server, or it has expired")
        tinker_path = "tinker://{model_id}/{kind}/{name}".format_map(params)
        _, folder = self.session_store.find_folder(tinker_path, model.owner)
        if params["file"] == ARCHIVE_NAME:
            headers = {"content-disposition": f'attachment; filename="{folder.name}.tar"'}
            chunks = stream_tar(folder)
            try:
                next(chunks)
            except OSError as error:  # removed in the meantime
                raise HttpError(404, f"no checkpoint at {tinker_path}") from error
            return StreamingResponse(chunks, media_type="application/x-tar", headers=headers)
        file = (folder / params["file"]).resolve()
        if not file.is_file() or not file.is_relative_to(folder.resolve()):
            raise HttpError(404, "the checkpoint has no such file")
        return FileResponse(file)

    # ----------------------------------------------------------------------- samplers and sessions

    async def get_sampler(self, owner: str, sampler_id: str) -> Any:
        """Return the base model of a sampling session and the path of its weights."""
        sampler = self.session_store.get_sampler(sampler_id, owner)
        return {
            "sampler_id": sampler.sampler_id,
            "base_model": sampler.base.name,
            "model_path": sampler.path and format_path(sampler.path),
        }

    async def list_sessions(self, request: Request, owner: str) -> Any:
        """Return a page of the owner's session ids, the newest first."""
        sessions = list(self.session_store.sessions.values())
        sessions.sort(key=lambda session: -session.created)
        ids = [session.session_id for session in sessions if session.owner == owner]
        return {"sessions": _paginate(request, ids)[0]}

    async def get_session(self, owner: str, session_id: str) -> Any:
        """Return the training runs and sampling sessions of a session."""
        session = self.session_store.get_session(session_id, owner, alive=False)
        models = self.session_store.list_models(session_id=session.session_id)
        samplers = self.session_store.list_samplers(session.session_id)
        return {
            "training_run_ids": [model.model_id for model in models],
            "sampler_ids": [sampler.sampler_id for sampler in samplers],
            "user_metadata": session.user_metadata,
            "display_name": session.display_name,
        }


def list_files(folder: Path) -> list[Path]:
    """Return all files below `folder`, sorted by path."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def stream_tar(folder: Path) -> Iterator[bytes]:
    """Yield a tar file of a folder in chunks. No copy is written to disk.

    The first chunk is empty. When it has been yielded, all files are open. Raises
    FileNotFoundError if the folder has no manifest, and OSError if a file shrinks meanwhile.
    """
    with contextlib.ExitStack() as stack:
        opened = [
            (file.relative_to(folder).as_posix(), stack.enter_context(file.open("rb")))
            for file in list_files(folder)
        ]
        if checkpoint_folder.MANIFEST not in dict(opened):
            raise FileNotFoundError(folder)
        yield b""
        for name, file in opened:
            info = tarfile.TarInfo(name)
            status = os.fstat(file.fileno())
            info.size, info.mtime = status.st_size, int(status.st_mtime)
            yield info.tobuf(tarfile.PAX_FORMAT)
            remaining = info.size
            while remaining:
                chunk = file.read(min(remaining, _CHUNK_BYTES))
                if not chunk:
                    raise OSError(f"{name} became shorter while it was being sent")
                remaining -= len(chunk)
                yield chunk
            yield bytes(-info.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _paginate(request: Request, items: list[Any]) -> tuple[list[Any], dict[str, int]]:
    """Return the items that `limit` and `offset` select, and the cursor (with the total count).

    Raises HttpError (400) if either is not a whole number.
    """
    requested = {"limit": "20", "offset": "0"}
    requested |= {name: request.query_params.get(name, requested[name]) for name in requested}
    if not all(re.fullmatch("[0-9]{1,9}", value) for value in requested.values()):
        raise HttpError(400, f"limit and offset must be whole numbers, got {requested}")
    cursor = {name: int(value) for name, value in requested.items()}
    page = items[cursor["offset"] :][: cursor["limit"]]
    return page, {**cursor, "total_count": len(items)}


def _get_time(entry: dict[str, Any]) -> str:
    return str(entry["time"])


def _iso_time(seconds: float) -> str:
    """Return a Unix time as ISO 8601 text in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()
