"""What a learner writes and reads: resumable state, and weights alone as plain Hugging Face or PEFT folders."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl import checkpoint, distributed
from rl.errors import UserError
from rl.models import (
    LoadedModel,
    eos_token_ids,
    inner_model,
    is_lora,
    is_value_head,
    load_model,
    quiet_about_tied_heads,
    value_head_of,
)

if TYPE_CHECKING:
    from rl.learner import Learner
    from rl.worker import ModelSpec

FORMAT = 1
VALUE_FILE = "value_head.safetensors"


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values())


def _model_bytes(model: Any, merged: bool = False) -> int:
    adapter_only = is_lora(model) and not merged
    return _bytes({name: p for name, p in model.named_parameters() if p.requires_grad or not adapter_only})


def _write_model(model: Any, tokenizer: Any | None, folder: Path, *, merged: bool = False) -> None:
    """A plain folder that transformers (or PEFT) loads: weights in safetensors, config, generation config, tokenizer."""
    from huggingface_hub import save_torch_state_dict

    if is_lora(model) and merged:
        model = _merged_copy(model)
    folder.mkdir(exist_ok=True)
    if is_lora(model):
        # An adapter on the head counts as one on an embedding layer to PEFT, which would then save the whole matrix.
        model.save_pretrained(str(folder), save_embedding_layers=False)
    else:
        # Not the model's own save_pretrained: it imports DeepSpeed to look for a wrapper that is not there, which takes seconds.
        model.config.save_pretrained(str(folder))
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(str(folder))
        tied = list(getattr(model, "all_tied_weights_keys", None) or model._tied_weights_keys or [])
        weights = {name: tensor for name, tensor in model.state_dict().items() if not is_value_head(name)}
        save_torch_state_dict(weights, str(folder), shared_tensors_to_discard=tied)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))


def _merged_copy(model: Any) -> Any:
    """The adapter merged into a copy of the base in fp32 (in bf16 a young adapter would be rounded away).

    A tied head with an adapter of its own is untied first: merging must not change the embedding.
    """
    import copy

    twin = copy.deepcopy(model).float().cpu()
    base = inner_model(twin)
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    layer = head.get_base_layer() if hasattr(head, "get_base_layer") else head
    if layer is not head and layer.weight is embedding.weight:
        layer.weight = torch.nn.Parameter(layer.weight.detach().clone())
        base.config.get_text_config().tie_word_embeddings = False
        base.config.tie_word_embeddings = False
    return twin.merge_and_unload()


def _state(learner: Learner, spec: ModelSpec, metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "spec": asdict(spec),
        "version": learner.version,
        "temperatures": learner.temperatures,
        "metadata": dict(metadata),
    }


def save_state(
    learner: Learner,
    spec: ModelSpec,
    path: Path,
    rng_by_rank: Sequence[Tensor] | None,
    metadata: Mapping[str, Any],
    ttl_seconds: float | None,
    beside: Mapping[str, tuple[Learner, ModelSpec]] | None = None,
) -> None:
    """Weights, optimizer, generator states and the caller's metadata (JSON), whole or not at all. Written by rank 0.

    `beside`: other learners of the same run (a critic), each into a folder of its name in this checkpoint.
    All ranks call it, since weights may have to be put together. What can be wrong with the arguments is found on all of
    them before that, what can be wrong with the disk on rank 0 afterwards: nobody is left waiting.
    """
    from safetensors.torch import save_file

    learners = {"": (learner, spec), **(beside or {})}
    if any(one.has_gradient for one, _ in learners.values()):
        raise UserError("save_state between forward_backward and optim_step would lose the gradient: call optim_step first")
    # metadata that is no JSON fails here
    texts = {name: json.dumps(_state(*own, {} if name else metadata), indent=1) for name, own in learners.items()}
    optimizers = {
        name: {key: t.detach().cpu().contiguous() for key, t in one.optimizer_tensors().items()} for name, (one, _) in learners.items()
    }
    with contextlib.ExitStack() as stack:
        models = {name: stack.enter_context(one.whole_model(adapter_only=one.is_lora)) for name, (one, _) in learners.items()}
        if models[""] is None:
            return
        assert rng_by_rank is not None
        expected = sum(_model_bytes(model) for model in models.values()) + sum(map(_bytes, optimizers.values()))
        with checkpoint.writing(path, expected_bytes=expected, ttl_seconds=ttl_seconds) as folder:
            for name, model in models.items():
                _write_learner(model, learners[name][0].loaded.tokenizer, optimizers[name], texts[name], folder / name)
            save_file({f"rank{r}": rng for r, rng in enumerate(rng_by_rank)}, str(folder / "rng.safetensors"))


def _write_learner(model: Any, tokenizer: Any | None, optimizer: Mapping[str, Tensor], text: str, folder: Path) -> None:
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    _write_model(model, tokenizer, folder / "model")
    _write_value_head(model, folder)
    save_file(dict(optimizer), str(folder / "optimizer.safetensors"))
    (folder / "state.json").write_text(text)


def _write_value_head(model: Any, folder: Path) -> None:
    """Beside model/, which is what everybody's loaders read (some of them all of its tensors)."""
    from safetensors.torch import save_file

    if (value_head := value_head_of(model)) is not None:
        save_file({name: t.detach().cpu() for name, t in value_head.state_dict().items()}, str(folder / VALUE_FILE))


def save_for_sampler(
    learner: Learner, spec: ModelSpec, path: Path, merged: bool, ttl_seconds: float | None, value_head: bool = False
) -> None:
    """Weights alone: a Hugging Face folder, or a PEFT adapter folder for LoRA unless `merged`. All ranks call it.

    `value_head`: a checkpoint's folder without the optimizer, that folder as model/ and the head beside it.
    """
    with learner.whole_model(adapter_only=learner.is_lora and not merged) as model:
        if model is None:
            return
        with checkpoint.writing(path, expected_bytes=_model_bytes(model, merged), ttl_seconds=ttl_seconds) as folder:
            _write_model(model, learner.loaded.tokenizer, folder / "model" if value_head else folder, merged=merged)
            if value_head:
                _write_value_head(model, folder)
            (folder / "state.json").write_text(json.dumps(_state(learner, spec, {}), indent=1))


def load_state(learner: Learner, path: Path, with_optimizer: bool, rank: int) -> dict[str, Any]:
    """Puts a checkpoint's weights (and optimizer, generator state, version) into a learner. Returns its state.json."""
    from safetensors.torch import load_file

    with distributed.all_or_none(learner.accelerator.device):  # every rank reads for itself, maybe on another machine
        state = checkpoint.read_state(path)
        file = path / "optimizer.safetensors"
        if with_optimizer and not file.is_file():
            raise UserError(f"{path} holds weights for sampling alone, no optimizer: load_state (weights) can read it")
        if with_optimizer and learner.values and not state["spec"].get("value_head"):
            raise UserError(f"{path} was saved without a value head, so its optimizer cannot go on with one: load_state makes it fresh")
        weights = _read_weights(learner, model_folder(path)) | _read_value_head(learner, path, state)
    learner.load_weights(weights)
    del weights
    learner.forget_sampling()
    learner.load_optimizer_tensors(load_file(str(file)) if with_optimizer else {})
    if with_optimizer:
        learner.version, learner.temperatures = state["version"], list(state["temperatures"])
        file = path / "rng.safetensors"
        rng = load_file(str(file if file.is_file() else path.parent / file.name))  # one saved beside another shares that one's
        if f"rank{rank}" in rng:
            torch.set_rng_state(rng[f"rank{rank}"])
    return state


def _read_weights(learner: Learner, folder: Path) -> dict[str, Tensor]:
    """The trainable tensors of a saved folder by this learner's parameter names."""
    if not is_lora(learner.model):
        if (folder / "adapter_config.json").is_file():
            raise UserError(f"{folder} holds a LoRA adapter, this client trains full weights: make it with create_lora_training_client")
        saved = load_model(str(folder)).model
        return {name: p.detach() for name, p in saved.named_parameters() if name in learner.trainable}
    if not (folder / "adapter_config.json").is_file():
        raise UserError(f"{folder} holds full weights, this client trains a LoRA adapter: make it with create_training_client_from_state")
    from safetensors.torch import load_file

    saved_tensors = load_file(str(folder / "adapter_model.safetensors"))
    # PEFT drops the adapter's name when it saves: "...q_proj.lora_A.weight" for "...q_proj.lora_A.default.weight".
    own = [name for name in learner.trainable if not is_value_head(name)]
    return {name: saved_tensors[name.replace(".default.", ".")] for name in own}


def _read_value_head(learner: Learner, path: Path, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The value head's tensors by this learner's names, {} for one without; a fresh one's zeros where the model saved had none."""
    from safetensors.torch import load_file

    file = path / VALUE_FILE
    if not learner.values:
        return {}
    if not file.is_file():
        if state["spec"].get("value_head"):
            raise UserError(f"{path} holds weights for sampling alone, without the value head of the model: give a folder of save_state")
        return {name: torch.zeros(learner.parameter_shapes[name]) for name in learner.values}
    saved = load_file(str(file))
    return {name: saved[name.rsplit(".", 1)[1]] for name in learner.values}


def model_folder(path: Path) -> Path:
    """Where the weights lie in a checkpoint: `model/` beside the optimizer, or the folder itself in one for sampling alone."""
    return path / "model" if (path / "model").is_dir() else path


def base_of(spec: ModelSpec, state: str | None) -> tuple[str, str | None]:
    """(base model, tokenizer) that a learner is made from: the checkpoint itself for full weights, else the spec's base.

    An adapter's base may be an earlier checkpoint of the same run; it is found beside the adapter's if the run was moved.
    """
    if state is None:
        return spec.base_model, spec.tokenizer
    if spec.lora is None:
        return str(model_folder(Path(state))), None
    base = Path(spec.base_model)
    if not base.exists() and base.name == "model":
        for parent in list(Path(state).parents)[:2]:  # a critic's checkpoint lies in the policy's
            if (moved := parent.joinpath(*base.parts[-2:])).is_dir():
                return str(moved), spec.tokenizer
    return spec.base_model, spec.tokenizer


def load_for_sampling(
    path: str | None, base_model: str | None, tokenizer: str | None = None, seed: int = 0
) -> tuple[LoadedModel, int, ModelSpec]:
    """(model, version, spec) of a base model, or of a folder: ours, or any Hugging Face or PEFT folder."""
    from rl.worker import ModelSpec

    if path is None:
        if base_model is None:
            raise UserError("create_sampling_client needs model_path (a saved folder) or base_model (a hub name, a folder, tiny:<preset>)")
        return load_model(base_model, tokenizer=tokenizer, seed=seed), 0, ModelSpec(base_model, tokenizer, seed=seed)
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"no saved weights at {folder}: give the path that save_weights_for_sampler(name).result().path returned")
    version, spec = 0, ModelSpec(base_model or str(folder))
    if (folder / checkpoint.MANIFEST).is_file():
        state = checkpoint.read_state(folder)
        version, spec = state["version"], ModelSpec.from_json(state["spec"])
        folder = model_folder(folder)
    if not (folder / "adapter_config.json").is_file():
        loaded = load_model(str(folder))
        loaded.name = spec.base_model
        return loaded, version, spec
    return _load_adapter(folder, spec, base_model), version, spec


def _load_adapter(folder: Path, spec: ModelSpec, base_model: str | None) -> LoadedModel:
    from peft import PeftModel

    config = json.loads((folder / "adapter_config.json").read_text())
    checkpoint_folder = folder.parent if folder.name == "model" else folder
    tokenizer = spec.tokenizer
    base = base_model or config.get("base_model_name_or_path")
    if spec.lora and base_model is None:
        base, tokenizer = base_of(spec, str(checkpoint_folder))
    if not base:
        raise UserError(f"{folder}/adapter_config.json names no base model: pass base_model")
    loaded = load_model(base, tokenizer=tokenizer, seed=spec.seed)
    with quiet_about_tied_heads():
        model = PeftModel.from_pretrained(loaded.model, str(folder))
    return LoadedModel(model, loaded.tokenizer, base, eos_token_ids(loaded.model, loaded.tokenizer))

