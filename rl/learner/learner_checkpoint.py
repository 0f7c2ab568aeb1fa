"""Save and load learners: resumable state, and weights as plain Hugging Face or PEFT folders."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl.distributed import checkpoint_folder, collectives, get_launch_sharding
from rl.errors import UserError
from rl.images import get_image_reader
from rl.learner.adamw import expected_state_shapes
from rl.learner.learner import Learner
from rl.models import (
    LazyTensors,
    LoadedModel,
    check_tensors,
    collect_eos_token_ids,
    convert_read_errors,
    get_value_head,
    ignore_tied_head_warnings,
    is_lora,
    is_value_head_parameter,
    load_checked_adapter,
    load_model,
    load_model_lazily,
    locate_base,
    merge_adapter,
    read_base_name,
    unwrap_model,
    write_weights,
)
from rl.types import LoraConfig

FORMAT = 1
VALUE_FILE = "value_head.safetensors"


@dataclass(frozen=True)
class ModelSpec:
    """Describe a model completely enough to build it again.

    elsewhere   whether `base_model` is a folder outside the folders that the same service writes
                (another run's); it is then read from the recorded path
    base_dtype  storage type of the frozen matrices under an adapter: auto, fp32, bf16 or 4bit
                (rl.learner.frozen_base)
    """

    base_model: str
    tokenizer: str | None = None
    lora: LoraConfig | None = None
    seed: int = 0
    value_head: bool = False
    elsewhere: bool = False
    base_dtype: str = "auto"

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelSpec:
        """Return the spec from its JSON dict. Raises TypeError for unknown or missing fields."""
        lora = data.get("lora")
        return cls(**{**data, "lora": LoraConfig(**lora) if lora else None})


def _num_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the total bytes of `tensors`."""
    return sum(t.numel() * t.element_size() for t in tensors.values())


def model_bytes(model: Any, merged: bool = False) -> int:
    """Return the bytes that `write_model` writes for a model's weights; merged ones are fp32."""
    parameters = dict(model.named_parameters())
    if not is_lora(model):
        return _num_bytes(parameters)
    if merged:
        return sum(4 * p.numel() for name, p in parameters.items() if "lora_" not in name)
    return _num_bytes({name: p for name, p in parameters.items() if p.requires_grad})


def write_model(
    model: Any,
    tokenizer: Any | None,
    folder: Path,
    *,
    merged: bool = False,
    base_only: bool = False,
) -> None:
    """Write a plain folder that transformers (or PEFT) loads.

    It holds weights in safetensors, config, generation config and tokenizer. `merged`: a LoRA
    adapter is merged, or left out if `base_only`.
    """
    if is_lora(model) and merged:
        model = _merged_copy(model, base_only)
    folder.mkdir(exist_ok=True)
    if is_lora(model):
        # PEFT would write a set in hash order, which varies.
        for config in model.peft_config.values():
            if isinstance(config.target_modules, set):
                config.target_modules = sorted(config.target_modules)
        # PEFT treats an adapter on the head as an adapter on an embedding layer and would save the
        # full matrix.
        model.save_pretrained(str(folder), save_embedding_layers=False)
    else:
        # model.save_pretrained imports DeepSpeed to look for a wrapper, which takes seconds.
        # vLLM chooses its model class by this
        model.config.architectures = [type(unwrap_model(model)).__name__]
        model.config.save_pretrained(str(folder))
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(str(folder))
        weights = model.state_dict().items()
        write_weights(
            model, {name: t for name, t in weights if not is_value_head_parameter(name)}, folder
        )
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))
    if (reader := get_image_reader(unwrap_model(model))) is not None:
        reader.save(folder)


def _merged_copy(model: Any, base_only: bool) -> Any:
    """Return a copy of the base with the adapter merged in, in fp32, in host memory. `base_only`:
    the adapter is 0.

    A tied head with a separate adapter becomes a separate matrix.
    """
    import copy

    # deepcopy takes these copies, so that none is made on the model's device
    copies: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if type(tensor) in (torch.nn.Parameter, Tensor):
            host = tensor.detach().to("cpu", copy=True)
            if isinstance(tensor, torch.nn.Parameter):
                host = torch.nn.Parameter(host, tensor.requires_grad)
            copies[id(tensor)] = host
    duplicate = copy.deepcopy(model, copies).float().cpu()
    for name, parameter in duplicate.named_parameters() if base_only else ():
        if ".lora_B." in name or ".lora_embedding_B." in name:
            torch.nn.init.zeros_(parameter)
    return merge_adapter(duplicate)


@dataclass(frozen=True)
class SaveMetadata:
    """Hold the metadata of a save.

    `metadata`: the caller's, JSON. `user_metadata`: the user's strings. `overwrite`: whether the
    save may replace an existing checkpoint.
    """

    metadata: Mapping[str, Any]
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    overwrite: bool = False


def _make_state(learner: Learner, spec: ModelSpec, save_metadata: SaveMetadata) -> dict[str, Any]:
    """Return the content of state.json."""
    return {
        "format": FORMAT,
        "spec": asdict(spec),
        "version": learner.version,
        **learner.sampling_record.to_state(),
        "metadata": dict(save_metadata.metadata),
        "user_metadata": dict(save_metadata.user_metadata),
    }


def save_learner_state(
    learner: Learner,
    spec: ModelSpec,
    path: Path,
    rng_by_rank: Sequence[Tensor] | None,
    save_metadata: SaveMetadata,
    ttl_seconds: float | None,
    other_learners: Mapping[str, tuple[Learner, ModelSpec]] | None = None,
) -> None:
    """Save weights, optimizer, generator states and the caller's metadata (JSON), atomically.

    Rank 0 writes. `other_learners`: other learners of the same run (a critic), each saved to a
    subfolder of its name in this checkpoint. All ranks call it, since weights may have to be
    gathered. Every rank checks the arguments before that, and rank 0 handles disk errors
    afterwards, so no rank waits for a failed rank.

    Raises UserError for a gradient without a step, TypeError for metadata that is not JSON.
    """
    learners = {"": (learner, spec), **(other_learners or {})}
    if any(learner_.has_gradient for learner_, _ in learners.values()):
        raise UserError(
            "save_state between forward_backward and optim_step would lose the gradient: call "
            "optim_step first"
        )
    # Metadata that is not JSON fails here.
    texts = {
        name: json.dumps(_make_state(*entry, SaveMetadata({}) if name else save_metadata), indent=1)
        for name, entry in learners.items()
    }
    optimizers = {
        name: {
            key: t.detach().cpu().contiguous()
            for key, t in learner_.backend.optimizer_tensors().items()
        }
        for name, (learner_, _) in learners.items()
    }
    with contextlib.ExitStack() as stack:
        models = {
            name: stack.enter_context(learner_.full_model(adapter_only=learner_.is_lora))
            for name, (learner_, _) in learners.items()
        }
        if models[""] is None:
            return
        assert rng_by_rank is not None
        expected = sum(model_bytes(model) for model in models.values()) + sum(
            map(_num_bytes, optimizers.values())
        )
        with checkpoint_folder.write_checkpoint(
            path, expected_bytes=expected, ttl_seconds=ttl_seconds, replace=save_metadata.overwrite
        ) as folder:
            for name, model in models.items():
                _write_learner(
                    model,
                    learners[name][0].loaded.tokenizer,
                    optimizers[name],
                    texts[name],
                    folder / name,
                )
            save_file(
                {f"rank{r}": rng for r, rng in enumerate(rng_by_rank)},
                str(folder / "rng.safetensors"),
            )


def _write_learner(
    model: Any, tokenizer: Any | None, optimizer: Mapping[str, Tensor], text: str, folder: Path
) -> None:
    """Write a learner's model, value head, optimizer and state.json to `folder`."""
    folder.mkdir(exist_ok=True)
    write_model(model, tokenizer, folder / "model")
    _write_value_head(model, folder)
    save_file(dict(optimizer), str(folder / "optimizer.safetensors"))
    (folder / "state.json").write_text(text)


def _write_value_head(model: Any, folder: Path) -> None:
    """Write the value head to a separate file.

    Other loaders read model/, and some read all of its tensors.
    """
    if (value_head := get_value_head(model)) is not None:
        save_file(
            {name: t.detach().cpu() for name, t in value_head.state_dict().items()},
            str(folder / VALUE_FILE),
        )


def save_sampler_weights(
    learner: Learner,
    spec: ModelSpec,
    path: Path,
    merged: bool,
    ttl_seconds: float | None,
    value_head: bool,
    save_metadata: SaveMetadata,
) -> None:
    """Save weights only: a Hugging Face folder, or a PEFT adapter folder for LoRA unless `merged`.

    All ranks call it. `value_head`: write a checkpoint folder without the optimizer, with the model
    folder as model/ and the value head next to it.
    """
    with learner.full_model(adapter_only=learner.is_lora and not merged) as model:
        if model is None:
            return
        with checkpoint_folder.write_checkpoint(
            path, expected_bytes=model_bytes(model, merged), ttl_seconds=ttl_seconds
        ) as folder:
            write_model(
                model,
                learner.loaded.tokenizer,
                folder / "model" if value_head else folder,
                merged=merged,
            )
            if value_head:
                _write_value_head(model, folder)
            (folder / "state.json").write_text(
                json.dumps(_make_state(learner, spec, save_metadata), indent=1)
            )


def load_learner_state(
    learner: Learner, path: Path, with_optimizer: bool, rank: int
) -> dict[str, Any]:
    """Load a checkpoint's weights (and optimizer, generator state, version) into a learner.

    Return its state.json. Raises UserError for a checkpoint without the requested parts.
    """
    # Every rank reads the files, possibly on another machine.
    with collectives.all_or_none(learner.accelerator.device):
        state = read_learner_state(path)
        file = path / "optimizer.safetensors"
        if with_optimizer and not file.is_file():
            raise UserError(
                f"{path} holds weights for sampling only, no optimizer: load_state (weights) can "
                "read it"
            )
        if with_optimizer and learner.value_head_names and not state["spec"].get("value_head"):
            raise UserError(
                f"{path} was saved without a value head, so its optimizer has no state for this "
                "learner's: load_state starts a fresh optimizer"
            )
        head = _read_value_head(learner, path, state)
        weights = _read_weights(learner, model_folder(path))
        if isinstance(weights, LazyTensors):
            weights = weights.with_tensors(head)
        else:
            weights = {**weights, **head}
        optimizer = _read_optimizer(learner, file) if with_optimizer else {}
        file = path / "rng.safetensors"
        # A learner in a subfolder uses the generator states of the checkpoint.
        rng = (
            _read_tensors(file if file.is_file() else path.parent / file.name)
            if with_optimizer
            else {}
        )
    learner.load_weights(weights)
    del weights
    learner.sampling_record.clear()
    learner.backend.load_optimizer_tensors(optimizer)
    if with_optimizer:
        learner.version = state["version"]
        learner.sampling_record.load_state(state, learner.version)
        if f"rank{rank}" in rng:
            torch.set_rng_state(rng[f"rank{rank}"])
    return state


def read_learner_state(path: Path) -> dict[str, Any]:
    """Return state.json of a checkpoint that save_state wrote.

    Raises DamagedCheckpoint if a required entry is missing or has the wrong type.
    """
    state = checkpoint_folder.read_verified_state(path)
    kinds: dict[str, type] = {"spec": dict, "version": int, "temperatures": list, "metadata": dict}
    for key, kind in kinds.items():
        if not isinstance(state.get(key), kind):
            raise checkpoint_folder.DamagedCheckpoint(
                f"{path}/state.json: {key!r} must be a {kind.__name__}, as save_state writes it, "
                f"got {state.get(key)!r}"
            )
    return state


def read_spec(path: Path) -> ModelSpec:
    """Return the model spec of a checkpoint. Raises DamagedCheckpoint if state.json has no valid
    spec.
    """

    spec = read_learner_state(path)["spec"]
    try:
        return ModelSpec.from_json(spec)
    except TypeError as error:  # an unknown or a missing field
        raise checkpoint_folder.DamagedCheckpoint(
            f"{path}/state.json: its 'spec' is not a valid model spec ({error})"
        ) from error


def _read_tensors(file: Path, *, lazy: bool = False) -> Mapping[str, Tensor]:
    """Return the tensors of a safetensors file.

    `lazy`: read each tensor when it is used. Raises UserError naming the file if it is missing or
    not a safetensors file.
    """
    if not file.is_file():
        raise UserError(f"{file} is missing: the folder is incomplete")
    with convert_read_errors(str(file)):
        return LazyTensors.from_file(file) if lazy else load_file(str(file))


def _read_optimizer(learner: Learner, file: Path) -> Mapping[str, Tensor]:
    """Return AdamW's state of every trained parameter; {} if it was saved before its first step.

    Raises UserError naming tensors that are missing or have a wrong shape.
    """
    tensors: Mapping[str, Tensor] = _read_tensors(
        file, lazy=get_launch_sharding().reads_shards(collectives.world())
    )
    shapes: dict[str, tuple[int, ...]] = {}
    for name in learner.trainable if tensors else ():
        shapes |= expected_state_shapes(
            learner.settings.optimizer, name, tuple(learner.parameter_shapes[name]), tensors
        )
    check_tensors(str(file), shapes, tensors)
    return tensors


def _read_weights(learner: Learner, folder: Path) -> Mapping[str, Tensor]:
    """Return the trainable tensors of a saved folder by this learner's parameter names.

    If weights are sharded, the tensors are lazy.
    """
    if not is_lora(learner.model):
        if (folder / "adapter_config.json").is_file():
            raise UserError(
                f"{folder} holds a LoRA adapter, but this client trains full weights: create it "
                "with create_lora_training_client"
            )
        sharded = get_launch_sharding().reads_shards(collectives.world())
        saved = load_model_lazily(str(folder)) if sharded else None
        if saved is not None and saved.lazy_weights is not None:
            stored = saved.lazy_weights.for_wrapped_model(saved.model)
            return LazyTensors({name: stored for name in learner.trainable if name in stored})
        whole = load_model(str(folder)).model
        return {
            name: p.detach() for name, p in whole.named_parameters() if name in learner.trainable
        }
    if not (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{folder} holds full weights, but this client trains a LoRA adapter: create it with "
            "create_training_client_from_state"
        )
    # PEFT drops the adapter's name when it saves: "...q_proj.lora_A.weight" for
    # "...q_proj.lora_A.default.weight".
    saved_names = {
        name: name.replace(".default.", ".")
        for name in learner.trainable
        if not is_value_head_parameter(name)
    }
    return _read_parameters(learner, folder / "adapter_model.safetensors", saved_names)


def _read_parameters(
    learner: Learner, file: Path, saved_names: Mapping[str, str]
) -> dict[str, Tensor]:
    """Return the tensors of a file by parameter; `saved_names`: the name of each in the file.

    Raises UserError for missing or unexpected tensors, or tensors of another shape.
    """
    saved = _read_tensors(file)
    shapes = {name: tuple(learner.parameter_shapes[p]) for p, name in saved_names.items()}
    check_tensors(str(file), shapes, saved)
    return {parameter: saved[name] for parameter, name in saved_names.items()}


def _read_value_head(learner: Learner, path: Path, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the value head's tensors by this learner's names.

    Return {} for a learner without a value head, and zeros (a fresh head) if the saved model had
    none.
    """
    file = path / VALUE_FILE
    if not learner.value_head_names:
        return {}
    if not file.is_file():
        if state["spec"].get("value_head"):
            raise UserError(
                f"{path} holds weights for sampling only, without the model's value head: pass a "
                "folder of save_state"
            )
        return {
            name: torch.zeros(learner.parameter_shapes[name]) for name in learner.value_head_names
        }
    saved_names = {name: name.rsplit(".", 1)[1] for name in learner.value_head_names}
    return _read_parameters(learner, file, saved_names)


def model_folder(path: Path) -> Path:
    """Return the folder of a checkpoint's weights.

    It is `model/` next to the optimizer, or the folder itself for weights that are for sampling
    only.
    """
    return path / "model" if (path / "model").is_dir() else path


def resolve_base_model(spec: ModelSpec, state: str | None) -> tuple[str, str | None]:
    """Return (base model, tokenizer) from which a learner is made.

    The base is the checkpoint itself for full weights, else the spec's base. An adapter's base may
    be an earlier checkpoint of the same run: see rl.models.adapter_folders.
    """
    if state is None:
        return spec.base_model, spec.tokenizer
    if spec.lora is None:
        return str(model_folder(Path(state))), None
    return locate_base(asdict(spec), Path(state)), spec.tokenizer


def load_for_sampling(
    path: str | None,
    base_model: str | None,
    tokenizer: str | None = None,
    seed: int = 0,
    load: Callable[..., LoadedModel] = load_model,
) -> tuple[LoadedModel, int, ModelSpec]:
    """Return (model, version, spec) of a base model or of a folder.

    The folder may be a checkpoint, or any Hugging Face or PEFT folder. `load(base, tokenizer=,
    seed=)` loads a base that is requested or that an adapter needs. Raises UserError without a path
    and a base, and for a folder that does not exist.
    """

    if path is None:
        if base_model is None:
            raise UserError(
                "create_sampling_client needs model_path (a saved folder) or base_model (a hub "
                "name, a folder, tiny:<preset>)"
            )
        return (
            load(base_model, tokenizer=tokenizer, seed=seed),
            0,
            ModelSpec(base_model, tokenizer, seed=seed),
        )
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(
            f"no saved weights at {folder}: give the path that "
            "save_weights_for_sampler(name).result().path returned"
        )
    version, spec = 0, ModelSpec(base_model or str(folder))
    if (folder / checkpoint_folder.MANIFEST).is_file():
        version, spec = read_learner_state(folder)["version"], read_spec(folder)
        folder = model_folder(folder)
    if not (folder / "adapter_config.json").is_file():
        loaded = load_model(str(folder))
        loaded.name = spec.base_model
        return loaded, version, spec
    return _load_adapter(folder, spec, base_model, load), version, spec


def _load_adapter(
    folder: Path, spec: ModelSpec, base_model: str | None, load: Callable[..., LoadedModel]
) -> LoadedModel:
    """Load an adapter folder on its base."""
    checkpoint = folder.parent if folder.name == "model" else folder
    tokenizer = spec.tokenizer
    if spec.lora and base_model is None:
        base, tokenizer = resolve_base_model(spec, str(checkpoint))
    else:
        base = base_model or read_base_name(folder)
    loaded = load(base, tokenizer=tokenizer, seed=spec.seed)
    with ignore_tied_head_warnings():
        model = load_checked_adapter(loaded.model, folder)
    return LoadedModel(
        model, loaded.tokenizer, base, collect_eos_token_ids(loaded.model, loaded.tokenizer)
    )
