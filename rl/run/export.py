"""Weights of a run as a folder for others: transformers, PEFT, vLLM; with a card that says where
they are from.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from rl.errors import UserError
from rl.learner import ModelSpec, saving
from rl.models import LoadedModel, check_whole_folder, is_adapter, is_lora, made_from, merge
from rl.ranks import checkpoint
from rl.run.card import card
from rl.run.inventory import RESUMABLE, WEIGHTS
from rl.run.reopen import open_weights

Dtype = Literal["fp32", "bf16", "fp16"]
DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class Exported:
    """`what`: in words. `untied`: whether the head became a matrix of its own, since the adapter
    changed it and not the embedding.
    """

    folder: Path
    what: str
    untied: bool = False


def export(
    target: str,
    out: Path,
    *,
    name: str | None = None,
    merged: bool = False,
    dtype: Dtype = "fp32",
    overwrite: bool = False,
) -> Exported:
    """Writes the weights that `target` means (a run, a checkpoint, a folder of weights) into the
    new folder `out`.

    `overwrite`: in the place of an earlier export that is there, which goes when the new one is
    whole.

    An adapter stays one unless `merged`, or unless its base is none that others could load (built
    on the spot, or itself merged). Merging and rounding are done in fp32. UserError where `out`
    holds something, or there is nothing to export.
    """
    earlier = overwrite and _is_export(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())) and not earlier:
        what = "no earlier export, and only such a one is replaced" if overwrite else "not empty"
        remedy = (
            "name another"
            if overwrite or not _is_export(out)
            else "name another, or replace the earlier export with --overwrite"
        )
        raise UserError(
            f"{out} is there already and {what}: an export goes into a new folder, {remedy}"
        )
    weights = open_weights(target, name)
    if earlier and weights.path is not None and weights.path.resolve() == out.resolve():
        raise UserError(f"{out} would be written from itself: name another folder")
    if weights.path is None:
        raise UserError(f"{target} is a base model: there is nothing of a run to export")
    source = saving.model_folder(weights.path)
    loaded, _, spec = saving.load_for_sampling(str(weights.path), None)
    tied = bool(loaded.model.config.get_text_config().tie_word_embeddings)
    why = "" if not is_lora(loaded.model) or merged else _alone(source)
    adapter = is_lora(loaded.model) and not merged and not why
    if not adapter and is_lora(loaded.model):
        loaded.model = merge(loaded.model)
    untied = tied and not loaded.model.config.get_text_config().tie_word_embeddings
    loaded.model = loaded.model.to(DTYPES[dtype])
    kind = f"a LoRA adapter of {spec.base_model}" if adapter else "all weights"
    found = Exported(out, f"{kind}, {dtype}" + (f" (merged, since {why})" if why else ""), untied)
    if not adapter:
        spec = ModelSpec(spec.base_model, value_head=spec.value_head)
        loaded.model.config.dtype = DTYPES[dtype]
    try:
        if out.is_dir() and not earlier:
            out.rmdir()  # it is empty
        with checkpoint.writing(
            out, expected_bytes=saving.model_bytes(loaded.model), replace=earlier
        ) as folder:
            _write(loaded, spec, weights.path, folder)
        words = card(weights, found.what, spec.base_model, adapter=adapter)
        (out / "README.md").write_text(words, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{out} cannot be written to ({error}): name another folder") from error
    return found


def push(folder: Path, repository: str) -> str:
    """Uploads an export to the hub, into a repository that is made if there is none (private);
    returns its address.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    api = HfApi()
    try:
        made = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(
            folder_path=str(folder),
            repo_id=made.repo_id,
            commit_message="Weights, exported by Whetstone",
        )
    except (
        HfHubHTTPError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
        OSError,
        ValueError,
    ) as error:
        raise UserError(
            f"{folder} is written, but could not be pushed to {repository}: {error}"
        ) from error
    return str(made)


def _is_export(folder: Path) -> bool:
    """Whether a folder is what `export` writes, with its card; not weights that a run or a server
    saved, which look alike.
    """
    if folder.resolve().parent.name in (RESUMABLE, WEIGHTS):
        return False
    return all(
        (folder / name).is_file() for name in (checkpoint.MANIFEST, "state.json", "README.md")
    )


def _alone(source: Path) -> str:
    """Why an adapter would be of no use by itself; "" where its base can be loaded by anybody."""
    base = made_from(source).name
    if base.startswith("tiny:"):
        return f"its base {base} is built on the spot"
    folder = Path(base).expanduser()
    if (folder / "adapter_config.json").is_file():
        return "its base is itself an adapter, merged"
    return ""


def _write(loaded: LoadedModel, spec: ModelSpec, weights: Path, folder: Path) -> None:
    """The model as a plain folder, and beside it what another run needs to begin from it."""
    saving.write_model(loaded.model, loaded.tokenizer, folder)
    if not is_adapter(folder):
        # a head that was untied may leave a tensor that the architecture ties by another name
        check_whole_folder(folder)
    # PEFT's empty card; ours is written when the folder is whole, and may be edited
    (folder / "README.md").unlink(missing_ok=True)
    head = weights / saving.VALUE_FILE
    if head.is_file():
        shutil.copy(head, folder / head.name)
    state = {
        "format": saving.FORMAT,
        "spec": asdict(spec),
        "version": 0,
        "temperatures": [],
        "metadata": {},
        "user_metadata": {},
    }
    (folder / "state.json").write_text(json.dumps(state, indent=1))


def described(found: Exported) -> str:
    """What was exported, and how it is loaded, as the console says it."""
    text = f"{found.folder}: {found.what}"
    if found.untied:
        text += (
            "\nIts head is a matrix of its own now: the adapter changed the head alone, which in the base is one with the embedding "
            "(--no-train-unembed at training keeps them one)"
        )
    return text
