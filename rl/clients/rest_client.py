"""RestClient: what saved folders tell of themselves, under the names that Tinker's client has for
it. There is no server.
"""

from __future__ import annotations

import json
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rl.clients.futures import APIFuture
from rl.errors import UserError
from rl.models import PRESETS
from rl.ranks import checkpoint
from rl.types import (
    Checkpoint,
    GetServerCapabilitiesResponse,
    SupportedModel,
    TrainingRun,
    WeightsInfoResponse,
)


def server_capabilities() -> GetServerCapabilitiesResponse:
    """What can be trained without a download; any hub name or folder of a causal LM works too."""
    return GetServerCapabilitiesResponse([SupportedModel(f"tiny:{name}") for name in PRESETS])


class RestClient:
    """Reads checkpoints' folders. A path is what `save_state(...).result().path` returned."""

    def __init__(self, base_url: str | None = None, api_key: str | None = None, **_: Any):
        refuse_base_url(base_url)

    def get_server_capabilities(self) -> APIFuture[GetServerCapabilitiesResponse]:
        return _done(server_capabilities())

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: str = "owned"
    ) -> APIFuture[TrainingRun]:
        """What made a checkpoint, and the words (`user_metadata`) that were saved with it."""
        return _done(_training_run(Path(tinker_path)))

    def get_weights_info_by_tinker_path(self, tinker_path: str) -> APIFuture[WeightsInfoResponse]:
        spec = checkpoint.read_state(Path(tinker_path))["spec"]
        lora = spec.get("lora") or {}
        flags = [lora.get(name) for name in ("rank", "train_unembed", "train_mlp", "train_attn")]
        return _done(WeightsInfoResponse(spec["base_model"], bool(lora), *flags))

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Removes a checkpoint's folder. UserError for what is none."""
        folder = Path(tinker_path)
        if folder.is_symlink() or not (folder / checkpoint.MANIFEST).is_file():
            raise UserError(
                f"{folder} is no checkpoint (it has no {checkpoint.MANIFEST}): nothing was removed"
            )
        checkpoint.remove(folder)
        return _done(None)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"RestClient has no {name!r} here: there is no server; checkpoints are folders, which the file system lists"
        )


def refuse_base_url(base_url: str | None) -> None:
    if base_url is not None:
        raise UserError(
            f"base_url={base_url!r} names a server, and here models live in your own process, on your own GPUs: leave base_url out "
            "(None), and start the script with `python` on one GPU or `accelerate launch` on several"
        )


def _training_run(folder: Path) -> TrainingRun:
    state = checkpoint.read_state(folder)
    spec, words = state["spec"], state.get("user_metadata") or {}
    file = folder / checkpoint.MANIFEST
    manifest = json.loads(file.read_text()) if file.is_file() else {"files": {}, "expires_at": None}
    expires = manifest["expires_at"]
    saved = Checkpoint(
        checkpoint_id=folder.name,
        checkpoint_type="training" if (folder / "optimizer.safetensors").is_file() else "sampler",
        time=datetime.fromtimestamp((folder / "state.json").stat().st_mtime, UTC),
        tinker_path=str(folder),
        size_bytes=sum(entry["bytes"] for entry in manifest["files"].values()),
        user_metadata=words,
        expires_at=None if expires is None else datetime.fromtimestamp(expires, UTC),
    )
    lora = spec.get("lora")
    rank = lora["rank"] if lora else None
    return TrainingRun(
        folder.parent.parent.name, spec["base_model"], lora is not None, rank, saved, words
    )


def _done(value: Any) -> APIFuture[Any]:
    future: Future = Future()
    future.set_result(value)
    return APIFuture(future)
