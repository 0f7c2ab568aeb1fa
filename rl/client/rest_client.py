"""Provide RestClient: read metadata of saved folders through the methods of Tinker's client. No
server is involved.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rl.client.api_future import APIFuture, make_completed
from rl.distributed import checkpoint_folder
from rl.errors import UserError
from rl.models import MODEL_PRESETS
from rl.types import (
    Checkpoint,
    GetServerCapabilitiesResponse,
    SupportedModel,
    TrainingRun,
    WeightsInfoResponse,
)


def list_server_capabilities() -> GetServerCapabilitiesResponse:
    """Return the models that can be trained without a download. Any hub name or folder of a causal
    LM works too.
    """
    return GetServerCapabilitiesResponse([SupportedModel(f"tiny:{name}") for name in MODEL_PRESETS])


class RestClient:
    """Read the folders of checkpoints. A path is what `save_state(...).result().path` returned."""

    def __init__(self, base_url: str | None = None, api_key: str | None = None, **_: Any):
        refuse_base_url(base_url)

    def get_server_capabilities(self) -> APIFuture[GetServerCapabilitiesResponse]:
        """Return the models that can be trained without a download."""
        return make_completed(list_server_capabilities())

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: str = "owned"
    ) -> APIFuture[TrainingRun]:
        """Return the run that made a checkpoint, and the `user_metadata` saved with it."""
        return make_completed(_read_training_run(Path(tinker_path).expanduser()))

    def get_weights_info_by_tinker_path(self, tinker_path: str) -> APIFuture[WeightsInfoResponse]:
        """Return the base model and the LoRA settings of a checkpoint."""
        spec = checkpoint_folder.read_verified_state(Path(tinker_path).expanduser())["spec"]
        lora = spec.get("lora") or {}
        flags = [lora.get(name) for name in ("rank", "train_unembed", "train_mlp", "train_attn")]
        return make_completed(WeightsInfoResponse(spec["base_model"], bool(lora), *flags))

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Remove a checkpoint's folder. Raises UserError if the folder is not a checkpoint."""
        folder = Path(tinker_path).expanduser()
        if folder.is_symlink() or not (folder / checkpoint_folder.MANIFEST).is_file():
            raise UserError(
                f"{folder} is not a checkpoint (it has no {checkpoint_folder.MANIFEST}): nothing "
                "was removed"
            )
        checkpoint_folder.remove_checkpoint(folder)
        return make_completed(None)

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError for Tinker's methods that need a server."""
        raise AttributeError(
            f"RestClient has no {name!r} here, since no server is involved: checkpoints are "
            "folders, which the file system lists"
        )


def refuse_base_url(base_url: str | None) -> None:
    """Raise UserError if `base_url` is set: models run in this process."""
    if base_url is not None:
        raise UserError(
            f"base_url={base_url!r} names a server, and here models run in your process, on your "
            "GPUs: omit base_url (None), and start the script with `python` on one GPU or "
            "`accelerate launch` on several"
        )


def _read_training_run(folder: Path) -> TrainingRun:
    """Return the TrainingRun that a checkpoint's files describe."""
    state = checkpoint_folder.read_verified_state(folder)
    spec, user_metadata = state["spec"], state.get("user_metadata") or {}
    manifest_file = folder / checkpoint_folder.MANIFEST
    manifest = (
        json.loads(manifest_file.read_text())
        if manifest_file.is_file()
        else {"files": {}, "expires_at": None}
    )
    expires_at = manifest["expires_at"]
    saved = Checkpoint(
        checkpoint_id=folder.name,
        checkpoint_type="training" if (folder / "optimizer.safetensors").is_file() else "sampler",
        time=datetime.fromtimestamp((folder / "state.json").stat().st_mtime, UTC),
        tinker_path=str(folder),
        size_bytes=sum(entry["bytes"] for entry in manifest["files"].values()),
        user_metadata=user_metadata,
        expires_at=None if expires_at is None else datetime.fromtimestamp(expires_at, UTC),
    )
    lora = spec.get("lora")
    rank = lora["rank"] if lora else None
    return TrainingRun(
        folder.parent.parent.name, spec["base_model"], lora is not None, rank, saved, user_metadata
    )
