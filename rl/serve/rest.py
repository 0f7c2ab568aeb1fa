"""Serve the REST part of Tinker's protocol.

Its routes list runs, checkpoints and sessions, delete checkpoints, set their time to live, and
download them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tarfile
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from email.utils import formatdate
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route

from rl.clients import RestClient
from rl.ranks import checkpoint
from rl.serve.answers import JsonAnswer
from rl.serve.body import Body
from rl.serve.book import KINDS, Book, Model
from rl.serve.desk import Desk
from rl.serve.links import Links
from rl.serve.promises import Promises
from rl.serve.refusals import Refused
from rl.serve.tenants import Tenants

Answer = Callable[[Request], Awaitable[Response]]
_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
_LINK_SECONDS = 3600
_PIECE = 2**20  # bytes read and sent per chunk of a file
ARCHIVE = "archive.tar"  # file name in a link that means all files of the folder


class Rest:
    """Hold the handlers under /api/v1 that inspect and manage saved weights."""

    def __init__(self, desk: Desk, book: Book, tenants: Tenants, promises: Promises, links: Links):
        self.desk = desk
        self.book = book
        self.links = links

    def routes(self) -> list[Route]:
        """Return the routes of the REST part."""
        checkpoint_path = "training_runs/{model_id}/checkpoints/{kind}/{name}"
        table: list[tuple[str, str, Answer]] = [
            ("GET", "get_server_capabilities", self.capabilities),
            ("GET", "training_runs", self.runs),
            ("GET", "training_runs/{model_id}", self.run),
            ("GET", "training_runs/{model_id}/checkpoints", self.checkpoints),
            ("GET", "checkpoints", self.all_checkpoints),
            ("DELETE", checkpoint_path, self.delete),
            ("PUT", checkpoint_path + "/ttl", self.ttl),
            ("GET", checkpoint_path + "/archive", self.archive),
            ("GET", checkpoint_path + "/external_weights_urls", self.file_urls),
            ("GET", "files/{expires}/{sign}/{model_id}/{kind}/{name}/{file:path}", self.file),
            ("POST", checkpoint_path + "/publish", _no_others),
            ("DELETE", checkpoint_path + "/publish", _no_others),
            ("POST", "weights_info", self.weights_info),
            ("GET", "samplers/{sampler_id}", self.sampler),
            ("GET", "sessions", self.sessions),
            ("GET", "sessions/{session_id}", self.session),
        ]
        return [
            Route(f"/api/v1/{path}", answer, methods=[method]) for method, path, answer in table
        ]

    async def capabilities(self, request: Request) -> Response:
        """Return the base models and their context lengths."""
        bases = await self.desk.run(request.state.owner, "capabilities", self.desk.bases)
        models = [
            {
                "model_name": base.name,
                "max_context_length": base.max_context,
                "trainable": True,
                "sampleable": True,
            }
            for base in bases
        ]
        return JsonAnswer({"supported_models": models})

    # ---------------------------------------------------------------------------- runs, checkpoints

    def _run(self, model: Model) -> dict[str, Any]:
        """Return a training run as Tinker's JSON describes it."""
        checkpoints = sorted(
            (self._checkpoint(model, *entry) for entry in self.book.checkpoints(model)),
            key=lambda entry: entry["time"],
        )
        last = {
            kind: next(
                (entry for entry in reversed(checkpoints) if entry["checkpoint_type"] == kind), None
            )
            for kind in ("training", "sampler")
        }
        return {
            "training_run_id": model.model_id,
            "base_model": model.base.name,
            "model_owner": model.owner,
            "is_lora": model.lora_rank is not None,
            "lora_rank": model.lora_rank,
            "corrupted": False,
            "last_request_time": _moment(model.last_request),
            "last_checkpoint": last["training"],
            "last_sampler_checkpoint": last["sampler"],
            "user_metadata": model.user_metadata,
        }

    def _checkpoint(self, model: Model, kind: str, folder: Path) -> dict[str, Any]:
        """Return a checkpoint as Tinker's JSON describes it."""
        saved = RestClient().get_training_run_by_tinker_path(str(folder)).result().last_checkpoint
        assert saved is not None  # the folder has just been identified as a checkpoint
        return {
            "checkpoint_id": f"{kind}/{folder.name}",
            "checkpoint_type": _TYPES[kind],
            "time": saved.time.isoformat(),
            "tinker_path": self.book.path_of(model, kind, folder.name),
            "size_bytes": saved.size_bytes,
            "public": False,
            "user_metadata": saved.user_metadata,
            "expires_at": saved.expires_at.isoformat() if saved.expires_at else None,
        }

    async def runs(self, request: Request) -> Response:
        """Return a page of the owner's training runs, the most recently used first."""
        models = sorted(
            self.book.models_of(request.state.owner),
            key=lambda model: model.last_request,
            reverse=True,
        )
        page, cursor = _page(request, models)
        records = await asyncio.to_thread(lambda: [self._run(model) for model in page])
        return JsonAnswer({"training_runs": records, "cursor": cursor})

    async def run(self, request: Request) -> Response:
        """Return a training run."""
        return JsonAnswer(await asyncio.to_thread(self._run, self._model(request)))

    def _model(self, request: Request) -> Model:
        """Return the model of the path. Raises Refused (404) if the owner has no such model."""
        model = self.book.models.get(request.path_params["model_id"])
        if model is None or model.owner != request.state.owner:
            raise Refused(404, f"unknown training run {request.path_params['model_id'][:80]!r}")
        return model

    async def checkpoints(self, request: Request) -> Response:
        """Return the checkpoints of a training run."""
        model = self._model(request)
        checkpoints = await asyncio.to_thread(
            lambda: [
                self._checkpoint(model, *location) for location in self.book.checkpoints(model)
            ]
        )
        return JsonAnswer({"checkpoints": checkpoints})

    async def all_checkpoints(self, request: Request) -> Response:
        """Return a page of the checkpoints of all runs of the owner, the newest first."""
        models = self.book.models_of(request.state.owner)
        checkpoints = await asyncio.to_thread(
            lambda: [
                self._checkpoint(model, *entry)
                for model in models
                for entry in self.book.checkpoints(model)
            ]
        )
        page, cursor = _page(
            request, sorted(checkpoints, key=lambda entry: entry["time"], reverse=True)
        )
        return JsonAnswer({"checkpoints": page, "cursor": cursor})

    def _folder(self, request: Request) -> Path:
        """Return the folder of the checkpoint of the path."""
        params = request.path_params
        return self.book.folder_of(
            f"tinker://{params['model_id']}/{params['kind']}/{params['name']}", request.state.owner
        )[1]

    async def delete(self, request: Request) -> Response:
        """Delete a checkpoint."""
        await asyncio.to_thread(lambda: checkpoint.remove(self._folder(request)))
        return Response(status_code=204)

    async def ttl(self, request: Request) -> Response:
        """Set or remove the time to live of a checkpoint, in seconds."""
        body = await Body.of(request)
        seconds = body.maybe_whole("ttl_seconds", 1)
        await asyncio.to_thread(lambda: checkpoint.expire(self._folder(request), seconds))
        return Response(status_code=204)

    async def weights_info(self, request: Request) -> Response:
        """Return the base model and the LoRA settings of saved weights."""
        body = await Body.of(request)
        path = body.text("tinker_path")
        model, folder = await asyncio.to_thread(self.book.folder_of, path, request.state.owner)
        info = await asyncio.to_thread(
            lambda: RestClient().get_weights_info_by_tinker_path(str(folder)).result()
        )
        flags = {
            name: getattr(info, name)
            for name in ("is_lora", "lora_rank", "train_unembed", "train_mlp", "train_attn")
        }
        return JsonAnswer({"base_model": model.base.name, **flags})

    # ------------------------------------------------------------------------------------ downloads

    async def archive(self, request: Request) -> Response:
        """Return a redirect to a link to the folder as a tar file.

        The link needs no key and expires after an hour.
        """
        folder = await asyncio.to_thread(self._folder, request)
        await asyncio.to_thread(checkpoint.verify, folder)
        expires = int(time.time()) + _LINK_SECONDS
        headers = {
            "location": self._link(request, expires, ARCHIVE),
            "expires": formatdate(expires, usegmt=True),
        }
        return Response(status_code=302, headers=headers)

    async def file_urls(self, request: Request) -> Response:
        """Return a link for each file. A link needs no key and expires after an hour."""
        folder = await asyncio.to_thread(self._folder, request)
        expires, hidden = int(time.time()) + _LINK_SECONDS, (checkpoint.MANIFEST, "state.json")
        names = [
            file.relative_to(folder).as_posix()
            for file in files_of(folder)
            if file.name not in hidden
        ]
        return JsonAnswer(
            {
                "urls": {name: self._link(request, expires, name) for name in names},
                "expires": _moment(expires),
            }
        )

    def _link(self, request: Request, expires: int, name: str) -> str:
        """Return a signed URL of a file of the path's checkpoint. `expires`: Unix seconds."""
        params = request.path_params
        place = f"{params['model_id']}/{params['kind']}/{params['name']}/{name}"
        path = self.links.path(request.state.owner, expires, place)
        return f"{str(request.base_url).rstrip('/')}{path}"

    async def file(self, request: Request) -> Response:
        """Return the file of a signed link, or the folder as a tar file.

        Raises Refused (404) if the link is invalid or expired, or if the file does not exist.
        """
        params = request.path_params
        model = self.book.models.get(params["model_id"])
        valid = model is not None and self.links.valid(model.owner, request.scope["path"])
        if model is None or not valid or params["kind"] not in KINDS:
            raise Refused(404, "the link was not created by this server, or it has expired")
        tinker_path = f"tinker://{model.model_id}/{params['kind']}/{params['name']}"
        _, folder = await asyncio.to_thread(self.book.folder_of, tinker_path, model.owner)
        if params["file"] == ARCHIVE:
            headers = {"content-disposition": f'attachment; filename="{folder.name}.tar"'}
            chunks = tar_of(folder)
            try:
                await asyncio.to_thread(next, chunks)
            except OSError as error:  # removed in the meantime
                raise Refused(404, f"no checkpoint at {tinker_path}") from error
            return StreamingResponse(chunks, media_type="application/x-tar", headers=headers)
        file = (folder / params["file"]).resolve()
        if not file.is_file() or not file.is_relative_to(folder.resolve()):
            raise Refused(404, "the checkpoint has no such file")
        return FileResponse(file)

    # ----------------------------------------------------------------------- samplers and sessions

    async def sampler(self, request: Request) -> Response:
        """Return the base model of a sampling session and the path of its weights."""
        sampler = self.book.sampler(request.path_params["sampler_id"], request.state.owner)
        path = None
        if sampler.path is not None:
            model_id = (
                f"{sampler.path.parent.parent.parent.name}:train:"
                f"{sampler.path.parent.parent.name.removeprefix('train-')}"
            )
            path = f"tinker://{model_id}/{sampler.path.parent.name}/{sampler.path.name}"
        return JsonAnswer(
            {"sampler_id": sampler.sampler_id, "base_model": sampler.base.name, "model_path": path}
        )

    async def sessions(self, request: Request) -> Response:
        """Return a page of the owner's session ids, the newest first."""
        session_ids = [
            session.session_id
            for session in list(self.book.sessions.values())
            if session.owner == request.state.owner
        ]
        page, _ = _page(request, session_ids[::-1])
        return JsonAnswer({"sessions": page})

    async def session(self, request: Request) -> Response:
        """Return the training runs and sampling sessions of a session."""
        session = self.book.session(
            request.path_params["session_id"], request.state.owner, alive=False
        )
        models = [
            model.model_id
            for model in list(self.book.models.values())
            if model.session == session.session_id
        ]
        samplers = [
            sampler.sampler_id
            for sampler in list(self.book.samplers.values())
            if sampler.session == session.session_id
        ]
        ids = {
            "training_run_ids": models,
            "sampler_ids": samplers,
            "user_metadata": session.user_metadata,
        }
        return JsonAnswer({**ids, "display_name": session.display_name})


def files_of(folder: Path) -> list[Path]:
    """Return all files below `folder`, sorted by path."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def tar_of(folder: Path) -> Iterator[bytes]:
    """Yield a tar file of a folder in chunks. No copy is written to disk.

    The first chunk is empty. When it has been yielded, all files are open. Raises
    FileNotFoundError if the folder has no manifest, and OSError if a file shrinks meanwhile.
    """
    with contextlib.ExitStack() as stack:
        opened = [
            (file.relative_to(folder).as_posix(), stack.enter_context(file.open("rb")))
            for file in files_of(folder)
        ]
        if checkpoint.MANIFEST not in dict(opened):
            raise FileNotFoundError(folder)
        yield b""
        for name, file in opened:
            info = tarfile.TarInfo(name)
            status = os.fstat(file.fileno())
            info.size, info.mtime = status.st_size, int(status.st_mtime)
            yield info.tobuf(tarfile.PAX_FORMAT)
            remaining = info.size
            while remaining:
                chunk = file.read(min(remaining, _PIECE))
                if not chunk:
                    raise OSError(f"{name} became shorter while it was being sent")
                remaining -= len(chunk)
                yield chunk
            yield bytes(-info.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _page(request: Request, found: list[Any]) -> tuple[list[Any], dict[str, int]]:
    """Return the items that `limit` and `offset` select, and the cursor (with the total count).

    Raises Refused (400) if either is not a whole number.
    """
    requested = {
        name: request.query_params.get(name, default)
        for name, default in (("limit", "20"), ("offset", "0"))
    }
    if not all(value.isdigit() and len(value) < 10 for value in requested.values()):
        raise Refused(400, f"limit and offset must be whole numbers, got {requested}")
    limit, offset = int(requested["limit"]), int(requested["offset"])
    return found[offset : offset + limit], {
        "offset": offset,
        "limit": limit,
        "total_count": len(found),
    }


def _moment(seconds: float) -> str:
    """Return a Unix time as ISO 8601 text in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


async def _no_others(request: Request) -> Response:
    """Raise Refused (400): checkpoints cannot be published."""
    raise Refused(400, "publishing is not supported here: a checkpoint belongs to its key")
