"""Measure weights that are written and read again: the columns resume, reload and adapter of
bench/architectures.py.

    resume   two steps, a save, and two more steps in a learner made from the saved state: "exact"
             if weights and AdamW's state equal, bit for bit, those of four steps in a single
             learner
    reload   the weights as plain transformers reads them (AutoModelForCausalLM): "exact" if its
             logits equal those of the learner's model to 1e-5 of the largest (1 at least)
    adapter  the same for a LoRA on everything after two steps, read by PEFT on the base model as
             transformers reads it
Otherwise each cell is "refused: why" or "WRONG: ...". In the last two columns, "refused" may mean
that transformers changes the values it reads: the cell names the tensors. AdamW moves every weight
by some 2e-3 a step; a cell reports it if no weight moved.
"""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tiny_models import VOCAB

from rl.learner import Learner, LearnerSettings, ModelSpec, learner_checkpoint
from rl.losses import get_loss
from rl.models import add_lora, load_model
from rl.models import model_loading as models
from rl.types import AdamParams, Datum, LoraConfig

NEAR = 1e-5
_ADAM = AdamParams(learning_rate=2e-3, eps=1e-8)
_SPEC = ModelSpec("tiny")
_IDS = torch.arange(3, 40)[None] % VOCAB  # [1, 37]: within every window


def _loaded(folder: str, model: Any) -> models.LoadedModel:
    return replace(load_model(folder), name=f"tiny {model.config.model_type}")


def _learner(loaded: models.LoadedModel, accelerator: Any) -> Learner:
    return Learner(loaded, accelerator, LearnerSettings(token_budget=400))


def _steps(learner: Learner, datums: list[Datum], count: int) -> None:
    for _ in range(count):
        options = {"temperature": 1.0, "divisor": 10.0, "backward": True}
        learner.run(datums, get_loss("cross_entropy"), {}, **options)
        learner.step(_ADAM)


def _state(learner: Learner) -> dict[str, torch.Tensor]:
    """Return copies of the weights and of AdamW's state."""
    results = dict(learner.trainable) | learner.backend.optimizer_tensors()
    return {name: tensor.detach().clone() for name, tensor in results.items()}


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=_IDS, use_cache=False).logits.double()


def _apart(result: torch.Tensor, expected: torch.Tensor, plain: Any, folder: Path) -> str:
    """Return a verdict on the logits of transformers' model, compared with `expected`. `plain`: the
    model as transformers read it from `folder`.
    """
    off = float((result - expected).abs().max()) / max(1.0, float(expected.abs().max()))
    if off > NEAR and (other := _read_otherwise(plain, folder)):
        return f"refused: transformers does not read what the file says of {', '.join(other)}"
    return "exact" if off <= NEAR else f"WRONG: logits {off:.2g} of the largest apart"


def saved_columns(
    model: Any, datums: list[Datum], accelerator: Any, folder: Path
) -> dict[str, Any]:
    """Return `resume` and `reload`, from a single training run of all weights. `model`: as
    transformers builds it; `folder`: for the written files.
    """
    learner_checkpoint.write_model(model, None, folder / "base")
    first = _learner(_loaded(str(folder / "base"), model), accelerator)
    begun = _state(first)
    _steps(first, datums, 2)
    random, metadata = [torch.get_rng_state()], learner_checkpoint.SaveMetadata({})
    learner_checkpoint.save_learner_state(first, _SPEC, folder / "at2", random, metadata, None)
    _steps(first, datums, 2)
    base, _ = learner_checkpoint.resolve_base_model(_SPEC, str(folder / "at2"))
    second = _learner(_loaded(base, model), accelerator)
    learner_checkpoint.load_learner_state(second, folder / "at2", True, 0)
    _steps(second, datums, 2)
    whole, resumed = _state(first), _state(second)
    unlike = sorted(whole.keys() ^ resumed.keys())
    unlike += [n for n in whole if n in resumed and not torch.equal(whole[n], resumed[n])]
    still = all(torch.equal(tensor, whole[name]) for name, tensor in begun.items())
    resume = "exact"
    if unlike:
        resume = f"WRONG: {len(unlike)} of {len(whole)} tensors differ, {unlike[0]} first"
    learner_checkpoint.write_model(first.model, None, folder / "last")
    plain = _plain(folder / "last")
    reload = _apart(_logits(plain), _logits(first.model), plain, folder / "last")
    return {"resume": "WRONG: nothing moved" if still else resume, "reload": reload}


def adapter_column(model: Any, datums: list[Datum], accelerator: Any, folder: Path) -> str:
    """Return the cell `adapter`. `folder`: for the written files."""
    from peft import PeftModel

    learner_checkpoint.write_model(model, None, folder / "bare")
    loaded = add_lora(_loaded(str(folder / "bare"), model), LoraConfig(rank=2, seed=0))
    before = _logits(loaded.model)
    learner = _learner(loaded, accelerator)
    _steps(learner, datums, 2)
    after = _logits(learner.model)
    learner_checkpoint.write_model(learner.model, None, folder / "adapter")
    bare = _plain(folder / "bare")
    plain = PeftModel.from_pretrained(copy.deepcopy(bare), str(folder / "adapter"))
    if torch.equal(before, after):
        return "WRONG: nothing moved"
    return _apart(_logits(plain), after, bare, folder / "bare")


def _read_otherwise(plain: Any, folder: Path) -> list[str]:
    """Return the names of tensors that differ between a file and the model that transformers made
    from it (example: Youtu's padding row: zeros).
    """
    from safetensors.torch import load_file

    reference, written = dict(plain.named_parameters()), load_file(folder / "model.safetensors")
    shared = (name for name in written if name in reference)
    return [name for name in shared if not torch.equal(reference[name], written[name])]


def _plain(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
