"""What a learner writes and reads: resumable state, and weights alone as plain Hugging Face or PEFT
folders.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl.errors import UserError
from rl.images import reader_of
from rl.learner.adamw import shapes_of_state
from rl.learner.backend import reads_in_parts
from rl.learner.learner import Learner
from rl.learner.spec import ModelSpec
from rl.models import (
    Lazy,
    LoadedModel,
    adapter_base,
    check_tensors,
    eos_token_ids,
    found_base,
    in_folder,
    inner_model,
    is_lora,
    is_value_head,
    load_model,
    load_whole_adapter,
    merge,
    quiet_about_tied_heads,
    readable,
    value_head_of,
    weights_to_write,
)
from rl.ranks import checkpoint, distributed

FORMAT = 1
VALUE_FILE = "value_head.safetensors"


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values())


def model_bytes(model: Any, merged: bool = False) -> int:
    adapter_only = is_lora(model) and not merged
    return _bytes(
        {name: p for name, p in model.named_parameters() if p.requires_grad or not adapter_only}
    )


def write_model(model: Any, tokenizer: Any | None, folder: Path, *, merged: bool = False) -> None:
    """A plain folder that transformers (or PEFT) loads: weights in safetensors, config, generation
    config, tokenizer.
    """
    from huggingface_hub import save_torch_state_dict

    if is_lora(model) and merged:
        model = _merged_copy(model)
    folder.mkdir(exist_ok=True)
    if is_lora(model):
        # PEFT would write a set in the order of its hashes
        for config in model.peft_config.values():
            if isinstance(config.target_modules, set):
                config.target_modules = sorted(config.target_modules)
        # An adapter on the head counts as one on an embedding layer to PEFT, which would then save
        # the whole matrix.
        model.save_pretrained(str(folder), save_embedding_layers=False)
    else:
        # Not the model's own save_pretrained: it imports DeepSpeed to look for a wrapper that is
        # not there, which takes seconds.
        model.config.save_pretrained(str(folder))
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(str(folder))
        weights = weights_to_write(
            model, {name: t for name, t in model.state_dict().items() if not is_value_head(name)}
        )
        save_torch_state_dict(weights, str(folder))
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))
    if (reader := reader_of(inner_model(model))) is not None:
        reader.save(folder)


def _merged_copy(model: Any) -> Any:
    """The adapter merged into a copy of the base, in fp32; a tied head that has an adapter of its
    own becomes a matrix of its own.
    """
    import copy

    twin = copy.deepcopy(model).float().cpu()
    return merge(twin)


@dataclass(frozen=True)
class Words:
    """What a save carries beside the model: the caller's metadata (JSON), his own words; whether it
    may replace what is there.
    """

    metadata: Mapping[str, Any]
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    overwrite: bool = False


def _state(learner: Learner, spec: ModelSpec, words: Words) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "spec": asdict(spec),
        "version": learner.version,
        **learner.sampled.state(),
        "metadata": dict(words.metadata),
        "user_metadata": dict(words.user_metadata),
    }


def save_state(
    learner: Learner,
    spec: ModelSpec,
    path: Path,
    rng_by_rank: Sequence[Tensor] | None,
    words: Words,
    ttl_seconds: float | None,
    beside: Mapping[str, tuple[Learner, ModelSpec]] | None = None,
) -> None:
    """Weights, optimizer, generator states and the caller's metadata (JSON), whole or not at all.
    Written by rank 0.

    `beside`: other learners of the same run (a critic), each into a folder of its name in this
    checkpoint. All ranks call it, since weights may have to be put together. What can be wrong with
    the arguments is found on all of them before that, what can be wrong with the disk on rank 0
    afterwards: nobody is left waiting.
    """
    from safetensors.torch import save_file

    learners = {"": (learner, spec), **(beside or {})}
    if any(one.has_gradient for one, _ in learners.values()):
        raise UserError(
            "save_state between forward_backward and optim_step would lose the gradient: call optim_step first"
        )
    # metadata that is no JSON fails here
    texts = {
        name: json.dumps(_state(*own, Words({}) if name else words), indent=1)
        for name, own in learners.items()
    }
    optimizers = {
        name: {key: t.detach().cpu().contiguous() for key, t in one.optimizer_tensors().items()}
        for name, (one, _) in learners.items()
    }
    with contextlib.ExitStack() as stack:
        models = {
            name: stack.enter_context(one.whole_model(adapter_only=one.is_lora))
            for name, (one, _) in learners.items()
        }
        if models[""] is None:
            return
        assert rng_by_rank is not None
        expected = sum(model_bytes(model) for model in models.values()) + sum(
            map(_bytes, optimizers.values())
        )
        with checkpoint.writing(
            path, expected_bytes=expected, ttl_seconds=ttl_seconds, replace=words.overwrite
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
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    write_model(model, tokenizer, folder / "model")
    _write_value_head(model, folder)
    save_file(dict(optimizer), str(folder / "optimizer.safetensors"))
    (folder / "state.json").write_text(text)


def _write_value_head(model: Any, folder: Path) -> None:
    """Beside model/, which is what everybody's loaders read (some of them all of its tensors)."""
    from safetensors.torch import save_file

    if (value_head := value_head_of(model)) is not None:
        save_file(
            {name: t.detach().cpu() for name, t in value_head.state_dict().items()},
            str(folder / VALUE_FILE),
        )


def save_for_sampler(
    learner: Learner,
    spec: ModelSpec,
    path: Path,
    merged: bool,
    ttl_seconds: float | None,
    value_head: bool,
    words: Words,
) -> None:
    """Weights alone: a Hugging Face folder, or a PEFT adapter folder for LoRA unless `merged`. All
    ranks call it.

    `value_head`: a checkpoint's folder without the optimizer, that folder as model/ and the head
    beside it.
    """
    with learner.whole_model(adapter_only=learner.is_lora and not merged) as model:
        if model is None:
            return
        with checkpoint.writing(
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
            (folder / "state.json").write_text(json.dumps(_state(learner, spec, words), indent=1))


def load_state(learner: Learner, path: Path, with_optimizer: bool, rank: int) -> dict[str, Any]:
    """Puts a checkpoint's weights (and optimizer, generator state, version) into a learner. Returns
    its state.json.
    """
    # every rank reads for itself, maybe on another machine
    with distributed.all_or_none(learner.accelerator.device):
        state = read_state(path)
        file = path / "optimizer.safetensors"
        if with_optimizer and not file.is_file():
            raise UserError(
                f"{path} holds weights for sampling alone, no optimizer: load_state (weights) can read it"
            )
        if with_optimizer and learner.values and not state["spec"].get("value_head"):
            raise UserError(
                f"{path} was saved without a value head, so its optimizer cannot go on with one: load_state makes it fresh"
            )
        weights = _with(
            _read_value_head(learner, path, state), _read_weights(learner, model_folder(path))
        )
        optimizer = _read_optimizer(learner, file) if with_optimizer else {}
        file = path / "rng.safetensors"
        # one saved beside another shares that one's
        rng = (
            _tensors(file if file.is_file() else path.parent / file.name) if with_optimizer else {}
        )
    learner.load_weights(weights)
    del weights
    learner.sampled.forget()
    learner.load_optimizer_tensors(optimizer)
    if with_optimizer:
        learner.version = state["version"]
        learner.sampled.restore(state, learner.version)
        if f"rank{rank}" in rng:
            torch.set_rng_state(rng[f"rank{rank}"])
    return state


def read_state(path: Path) -> dict[str, Any]:
    """state.json of a whole checkpoint of ours. Raises DamagedCheckpoint where it says less than
    every one of them does.
    """
    state = checkpoint.read_state(path)
    kinds: dict[str, type] = {"spec": dict, "version": int, "temperatures": list, "metadata": dict}
    for key, kind in kinds.items():
        if not isinstance(state.get(key), kind):
            raise checkpoint.DamagedCheckpoint(
                f"{path}/state.json has no {key!r} as save_state writes it, but {state.get(key)!r}"
            )
    return state


def read_spec(path: Path) -> ModelSpec:
    """What made the model of a checkpoint. Raises DamagedCheckpoint where state.json does not say
    it.
    """

    spec = read_state(path)["spec"]
    try:
        return ModelSpec.from_json(spec)
    except TypeError as error:  # a name that no spec has, or one that is missing
        raise checkpoint.DamagedCheckpoint(
            f"{path}/state.json: its 'spec' describes no model ({error})"
        ) from error


def _tensors(file: Path, *, lazily: bool = False) -> Mapping[str, Tensor]:
    """A safetensors file. UserError naming it where it is not there or no such file. `lazily`: its
    tensors are read as they are used.
    """
    from safetensors.torch import load_file

    if not file.is_file():
        raise UserError(f"{file} is not there: the folder is not whole")
    with readable(str(file)):
        return Lazy.of(file) if lazily else load_file(str(file))


def _with(here: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return tensors.and_here(here) if isinstance(tensors, Lazy) else {**tensors, **here}


def _read_optimizer(learner: Learner, file: Path) -> Mapping[str, Tensor]:
    """AdamW's state of every trained parameter; {} of one that never took a step. UserError naming
    what is missing or misshapen.
    """
    tensors: Mapping[str, Tensor] = _tensors(file, lazily=reads_in_parts(learner.accelerator))
    shapes: dict[str, tuple[int, ...]] = {}
    for name in learner.trainable if tensors else ():
        shapes |= shapes_of_state(
            learner.settings.optimizer, name, tuple(learner.parameter_shapes[name]), tensors
        )
    check_tensors(str(file), shapes, tensors)
    return tensors


def _read_weights(learner: Learner, folder: Path) -> Mapping[str, Tensor]:
    """The trainable tensors of a saved folder by this learner's parameter names; where weights are
    sharded, none is read yet.
    """
    if not is_lora(learner.model):
        if (folder / "adapter_config.json").is_file():
            raise UserError(
                f"{folder} holds a LoRA adapter, this client trains full weights: make it with create_lora_training_client"
            )
        if reads_in_parts(learner.accelerator):
            found = in_folder(
                folder, [name for name in learner.trainable if not is_value_head(name)]
            )
            if found is not None:
                return found
        saved = load_model(str(folder)).model
        return {
            name: p.detach() for name, p in saved.named_parameters() if name in learner.trainable
        }
    if not (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{folder} holds full weights, this client trains a LoRA adapter: make it with create_training_client_from_state"
        )
    saved_tensors = _tensors(folder / "adapter_model.safetensors")
    # PEFT drops the adapter's name when it saves: "...q_proj.lora_A.weight" for
    # "...q_proj.lora_A.default.weight".
    own = {
        name: name.replace(".default.", ".")
        for name in learner.trainable
        if not is_value_head(name)
    }
    shapes = {there: tuple(learner.parameter_shapes[here]) for here, there in own.items()}
    check_tensors(str(folder / "adapter_model.safetensors"), shapes, saved_tensors)
    return {here: saved_tensors[there] for here, there in own.items()}


def _read_value_head(learner: Learner, path: Path, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The value head's tensors by this learner's names, {} for one without; a fresh one's zeros
    where the model saved had none.
    """
    file = path / VALUE_FILE
    if not learner.values:
        return {}
    if not file.is_file():
        if state["spec"].get("value_head"):
            raise UserError(
                f"{path} holds weights for sampling alone, without the value head of the model: give a folder of save_state"
            )
        return {name: torch.zeros(learner.parameter_shapes[name]) for name in learner.values}
    saved, own = _tensors(file), {name: name.rsplit(".", 1)[1] for name in learner.values}
    check_tensors(
        str(file),
        {there: tuple(learner.parameter_shapes[here]) for here, there in own.items()},
        saved,
    )
    return {here: saved[there] for here, there in own.items()}


def model_folder(path: Path) -> Path:
    """Where the weights lie in a checkpoint: `model/` beside the optimizer, or the folder itself in
    one for sampling alone.
    """
    return path / "model" if (path / "model").is_dir() else path


def base_of(spec: ModelSpec, state: str | None) -> tuple[str, str | None]:
    """(base model, tokenizer) that a learner is made from: the checkpoint itself for full weights,
    else the spec's base.

    An adapter's base may be an earlier checkpoint of the same run: see rl.models.adapters.
    """
    if state is None:
        return spec.base_model, spec.tokenizer
    if spec.lora is None:
        return str(model_folder(Path(state))), None
    return found_base(asdict(spec), Path(state)), spec.tokenizer


def load_for_sampling(
    path: str | None,
    base_model: str | None,
    tokenizer: str | None = None,
    seed: int = 0,
    load: Callable[..., LoadedModel] = load_model,
) -> tuple[LoadedModel, int, ModelSpec]:
    """(model, version, spec) of a base model, or of a folder: ours, or any Hugging Face or PEFT
    folder.

    `load(base, tokenizer=, seed=)`: where a base comes from that is asked for, or that an adapter
    stands on.
    """

    if path is None:
        if base_model is None:
            raise UserError(
                "create_sampling_client needs model_path (a saved folder) or base_model (a hub name, a folder, tiny:<preset>)"
            )
        return (
            load(base_model, tokenizer=tokenizer, seed=seed),
            0,
            ModelSpec(base_model, tokenizer, seed=seed),
        )
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(
            f"no saved weights at {folder}: give the path that save_weights_for_sampler(name).result().path returned"
        )
    version, spec = 0, ModelSpec(base_model or str(folder))
    if (folder / checkpoint.MANIFEST).is_file():
        version, spec = read_state(folder)["version"], read_spec(folder)
        folder = model_folder(folder)
    if not (folder / "adapter_config.json").is_file():
        loaded = load_model(str(folder))
        loaded.name = spec.base_model
        return loaded, version, spec
    return _load_adapter(folder, spec, base_model, load), version, spec


def _load_adapter(
    folder: Path, spec: ModelSpec, base_model: str | None, load: Callable[..., LoadedModel]
) -> LoadedModel:
    checkpoint_folder = folder.parent if folder.name == "model" else folder
    tokenizer = spec.tokenizer
    if spec.lora and base_model is None:
        base, tokenizer = base_of(spec, str(checkpoint_folder))
    else:
        base = base_model or adapter_base(folder)
    loaded = load(base, tokenizer=tokenizer, seed=spec.seed)
    with quiet_about_tied_heads():
        model = load_whole_adapter(loaded.model, folder)
    return LoadedModel(model, loaded.tokenizer, base, eos_token_ids(loaded.model, loaded.tokenizer))
