"""Tinker's REST part: what there is (runs, checkpoints, sessions), removing it, its time to live,
and taking it along.
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
_PIECE = 2**20  # bytes of a file that are sent at once
ARCHIVE = "archive.tar"  # in a link: all files of the folder


class Rest:
    """What is answered under /api/v1 to those who look after what was saved."""

    def __init__(self, desk: Desk, book: Book, tenants: Tenants, promises: Promises, links: Links):
        self.desk = desk
        self.book = book
        self.links = links

    def routes(self) -> list[Route]:
        one = "training_runs/{model_id}/checkpoints/{kind}/{name}"
        table: list[tuple[str, str, Answer]] = [
            ("GET", "get_server_capabilities", self.capabilities),
            ("GET", "training_runs", self.runs),
            ("GET", "training_runs/{model_id}", self.run),
            ("GET", "training_runs/{model_id}/checkpoints", self.checkpoints),
            ("GET", "checkpoints", self.all_checkpoints),
            ("DELETE", one, self.delete),
            ("PUT", one + "/ttl", self.ttl),
            ("GET", one + "/archive", self.archive),
            ("GET", one + "/external_weights_urls", self.file_urls),
            ("GET", "files/{expires}/{sign}/{model_id}/{kind}/{name}/{file:path}", self.file),
            ("POST", one + "/publish", _no_others),
            ("DELETE", one + "/publish", _no_others),
            ("POST", "weights_info", self.weights_info),
            ("GET", "samplers/{sampler_id}", self.sampler),
            ("GET", "sessions", self.sessions),
            ("GET", "sessions/{session_id}", self.session),
        ]
        return [
            Route(f"/api/v1/{path}", answer, methods=[method]) for method, path, answer in table
        ]

    async def capabilities(self, request: Request) -> Response:
        lengths = await self.desk.run(request.state.owner, "capabilities", self.desk.bases)
        models = [
            {
                "model_name": one.name,
                "max_context_length": one.max_context,
                "trainable": True,
                "sampleable": True,
            }
            for one in lengths
        ]
        return JsonAnswer({"supported_models": models})

    # ---------------------------------------------------------------------------- runs, checkpoints

    def _run(self, model: Model) -> dict[str, Any]:
        found = sorted(
            (self._checkpoint(model, *one) for one in self.book.checkpoints(model)),
            key=lambda one: one["time"],
        )
        last = {
            kind: next((one for one in reversed(found) if one["checkpoint_type"] == kind), None)
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
        saved = RestClient().get_training_run_by_tinker_path(str(folder)).result().last_checkpoint
        assert saved is not None  # the folder was just found to be a checkpoint's
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
        models = sorted(
            self.book.models_of(request.state.owner),
            key=lambda model: model.last_request,
            reverse=True,
        )
        page, cursor = _page(request, models)
        shown = await asyncio.to_thread(lambda: [self._run(model) for model in page])
        return JsonAnswer({"training_runs": shown, "cursor": cursor})

    async def run(self, request: Request) -> Response:
        return JsonAnswer(await asyncio.to_thread(self._run, self._model(request)))

    def _model(self, request: Request) -> Model:
        model = self.book.models.get(request.path_params["model_id"])
        if model is None or model.owner != request.state.owner:
            raise Refused(404, f"there is no training run {request.path_params['model_id'][:80]!r}")
        return model

    async def checkpoints(self, request: Request) -> Response:
        model = self._model(request)
        found = await asyncio.to_thread(
            lambda: [self._checkpoint(model, *one) for one in self.book.checkpoints(model)]
        )
        return JsonAnswer({"checkpoints": found})

    async def all_checkpoints(self, request: Request) -> Response:
        models = self.book.models_of(request.state.owner)
        found = await asyncio.to_thread(
            lambda: [
                self._checkpoint(model, *one)
                for model in models
                for one in self.book.checkpoints(model)
            ]
        )
        page, cursor = _page(request, sorted(found, key=lambda one: one["time"], reverse=True))
        return JsonAnswer({"checkpoints": page, "cursor": cursor})

    def _folder(self, request: Request) -> Path:
        where = request.path_params
        return self.book.folder_of(
            f"tinker://{where['model_id']}/{where['kind']}/{where['name']}", request.state.owner
        )[1]

    async def delete(self, request: Request) -> Response:
        await asyncio.to_thread(lambda: checkpoint.remove(self._folder(request)))
        return Response(status_code=204)

    async def ttl(self, request: Request) -> Response:
        body = await Body.of(request)
        seconds = body.maybe_whole("ttl_seconds", 1)
        await asyncio.to_thread(lambda: checkpoint.expire(self._folder(request), seconds))
        return Response(status_code=204)

    async def weights_info(self, request: Request) -> Response:
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

    # ------------------------------------------------------------------------------ taking it along

    async def archive(self, request: Request) -> Response:
        """A redirect to a link for the folder as a tar file, which needs no key and works for an
        hour.
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
        """A link for each file that needs no key, and works for an hour."""
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
        where = request.path_params
        place = f"{where['model_id']}/{where['kind']}/{where['name']}/{name}"
        path = self.links.path(request.state.owner, expires, place)
        return f"{str(request.base_url).rstrip('/')}{path}"

    async def file(self, request: Request) -> Response:
        where = request.path_params
        model = self.book.models.get(where["model_id"])
        known = model is not None and self.links.valid(model.owner, request.scope["path"])
        if model is None or not known or where["kind"] not in KINDS:
            raise Refused(404, "the link is none of this server's, or has expired")
        tinker_path = f"tinker://{model.model_id}/{where['kind']}/{where['name']}"
        _, folder = await asyncio.to_thread(self.book.folder_of, tinker_path, model.owner)
        if where["file"] == ARCHIVE:
            headers = {"content-disposition": f'attachment; filename="{folder.name}.tar"'}
            pieces = tar_of(folder)
            try:
                await asyncio.to_thread(next, pieces)
            except OSError as error:  # somebody removed it in between
                raise Refused(404, f"there is nothing at {tinker_path}") from error
            return StreamingResponse(pieces, media_type="application/x-tar", headers=headers)
        file = (folder / where["file"]).resolve()
        if not file.is_file() or not file.is_relative_to(folder.resolve()):
            raise Refused(404, "there is no such file")
        return FileResponse(file)

    # --------------------------------------------------------------------------------- who is there

    async def sampler(self, request: Request) -> Response:
        sampler = self.book.sampler(request.path_params["sampler_id"], request.state.owner)
        path = None
        if sampler.path is not None:
            model_id = f"{sampler.path.parent.parent.parent.name}:train:{sampler.path.parent.parent.name.removeprefix('train-')}"
            path = f"tinker://{model_id}/{sampler.path.parent.name}/{sampler.path.name}"
        return JsonAnswer(
            {"sampler_id": sampler.sampler_id, "base_model": sampler.base.name, "model_path": path}
        )

    async def sessions(self, request: Request) -> Response:
        mine = [
            session.session_id
            for session in list(self.book.sessions.values())
            if session.owner == request.state.owner
        ]
        page, _ = _page(request, mine[::-1])
        return JsonAnswer({"sessions": page})

    async def session(self, request: Request) -> Response:
        session = self.book.session(
            request.path_params["session_id"], request.state.owner, alive=False
        )
        models = [
            model.model_id
            for model in list(self.book.models.values())
            if model.session == session.session_id
        ]
        samplers = [
            one.sampler_id
            for one in list(self.book.samplers.values())
            if one.session == session.session_id
        ]
        found = {
            "training_run_ids": models,
            "sampler_ids": samplers,
            "user_metadata": session.user_metadata,
        }
        return JsonAnswer({**found, "display_name": session.display_name})


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def tar_of(folder: Path) -> Iterator[bytes]:
    """Yield a tar file of a folder, a piece at a time; no copy is written. With the first piece, an
    empty one, all files are open.
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
            left = info.size
            while left:
                piece = file.read(min(left, _PIECE))
                if not piece:
                    raise OSError(f"{name} became shorter while it was sent")
                left -= len(piece)
                yield piece
            yield bytes(-info.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _page(request: Request, found: list[Any]) -> tuple[list[Any], dict[str, int]]:
    """What `limit` and `offset` ask for, and where that lies in the whole."""
    asked = {
        name: request.query_params.get(name, default)
        for name, default in (("limit", "20"), ("offset", "0"))
    }
    if not all(value.isdigit() and len(value) < 10 for value in asked.values()):
        raise Refused(400, f"limit and offset are whole numbers, got {asked}")
    limit, offset = int(asked["limit"]), int(asked["offset"])
    return found[offset : offset + limit], {
        "offset": offset,
        "limit": limit,
        "total_count": len(found),
    }


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


async def _no_others(request: Request) -> Response:
    raise Refused(400, "not done here: publishing; what a key saved is that key's")
