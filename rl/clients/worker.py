"""Execute the verbs on every rank, on the models and sampler versions that live on the rank.

A verb is a method of `Worker` without a leading underscore. All ranks run the same verbs with the
same arguments in the same order. A verb splits its work over the ranks, and rank 0 receives the
results.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl.clients.bases import Key
from rl.clients.drawing import Drawing
from rl.clients.drawn import as_drawn, mean_temperature
from rl.clients.landing import Staged
from rl.clients.parts import merged, share, summed
from rl.clients.proof import Seen, look, look_at_learner
from rl.clients.settings import WorkerSettings
from rl.clients.versions import SamplerVersion
from rl.errors import remark
from rl.learner import Learner, ModelSpec, check_kind, chosen, reads_in_parts, saving
from rl.losses import LossSpec, get_loss
from rl.models import (
    Classifier,
    add_lora,
    add_value_head,
    classify,
    load_classifier,
    load_unread,
    set_alpha,
)
from rl.ranks import asks_for_fsdp, distributed
from rl.sampler import Decoder, make_decoder
from rl.types import AdamParams, Datum, LoraConfig, SamplingParams


class Worker(Drawing):
    """Hold a rank's models and sampler versions, and execute the verbs on them."""

    def __init__(self, settings: WorkerSettings, objects: distributed.ObjectGroup | None = None):
        super().__init__(settings, objects)
        self.specs: dict[int, ModelSpec] = {}
        self.stands_on: dict[int, Key] = {}
        self.classifiers: dict[int, Classifier] = {}
        # by learner: the decoder whose frozen base later versions share
        self.latest: dict[int, Decoder] = {}

    def merge(self, verb: str, parts: Sequence[Any]) -> Any:
        """Merge the ranks' results of a verb into the driver's result. Return rank 0's result if
        the others add nothing.
        """
        match verb:
            case "forward_backward":
                metrics = {
                    "loss:sum": 0.0,
                    **summed([sums for _, sums, _ in parts]),
                    "temperature:mean": parts[0][2],
                }
                return merged([outputs for outputs, _, _ in parts]), metrics
            case "forward_backward_part":
                return (
                    {i: output for outputs, *_ in parts for i, output in outputs.items()},
                    summed([part[1] for part in parts]),
                    *parts[0][2:],
                )
            case "classify":
                return merged(parts)
            case "prove":
                return Seen.together(parts)
            case "prove_learner":
                return Seen.together([report for report, _ in parts]), parts[0][1]
        return super().merge(verb, parts)

    # --------------------------------------------------------------------------------------- models

    def create_model(
        self, model_id: int, spec: ModelSpec, state: str | None, with_optimizer: bool
    ) -> dict[str, Any]:
        """Create a learner from its spec and return the model's details. `state`: a checkpoint
        whose weights (and optimizer) it starts from.
        """
        self.kept.forget()
        # a folder may be missing on some machine
        with distributed.all_or_none(self.accelerator.device):
            held_in = self._held_in(spec)
            check_kind(
                self.settings.learner.optimizer,
                self.accelerator.device,
                sharded=self._deepspeed or asks_for_fsdp(),
            )
            base, tokenizer = saving.base_of(spec, state)
            lazy_model = (
                load_unread(base, tokenizer=tokenizer) if reads_in_parts(self.accelerator) else None
            )
            loaded = lazy_model or self.bases.load(
                base, tokenizer, spec.seed, spec.lora is not None
            )
            loaded.name = spec.base_model
            if spec.lora is not None:
                loaded = add_lora(loaded, spec.lora)
            if spec.value_head:
                loaded = add_value_head(loaded)
            self.stands_on[model_id] = (base, tokenizer, spec.seed)
        info = {**self._info(loaded, spec), "base_dtype": held_in}  # before the weights are sharded
        # DeepSpeed casts all weights
        learner = Learner(
            loaded, self.accelerator, self.settings.learner, "fp32" if self._deepspeed else held_in
        )
        self.learners[model_id], self.specs[model_id] = learner, spec
        if state is not None:
            self.load_state(model_id, state, with_optimizer)
        return {
            **info,
            "distributed_type": self.accelerator.distributed_type.value,
            "wrapped": type(learner.backend.wrapped).__name__,
        }

    @property
    def _deepspeed(self) -> bool:
        """Return whether DeepSpeed owns the model."""
        return self.accelerator.distributed_type.value == "DEEPSPEED"

    def _held_in(self, spec: ModelSpec) -> str:
        """Return the dtype of the frozen base weights."""
        bf16 = self.sampler_dtype == torch.bfloat16
        return chosen(
            spec.base_dtype, lora=spec.lora is not None, bf16=bf16, deepspeed=self._deepspeed
        )

    def load_classifier(self, model_id: int, name: str) -> dict[str, Any]:
        """Load a published reward model, unsharded on every rank. Return its details."""
        self.kept.forget()
        with distributed.all_or_none(self.accelerator.device):
            classifier = load_classifier(name, self.sampler_dtype)
            classifier.model.to(self.accelerator.device)
        self.classifiers[model_id] = classifier
        parameters = sum(p.numel() for p in classifier.model.parameters())
        details = {
            "tokenizer": classifier.tokenizer,
            "max_context": classifier.max_context,
            "parameters": parameters,
        }
        return {"base_model": name, "arch": classifier.model.config.model_type, **details}

    def classify(self, model_id: int, inputs: Sequence[Sequence[int]]) -> dict[int, float]:
        """Return the scores of this rank's share of the inputs by index. Merged: all of them in
        order.
        """
        indices = share([len(tokens) for tokens in inputs])
        with self.kept.aside():
            scores = classify(
                self.classifiers[model_id],
                [inputs[i] for i in indices],
                self.settings.learner.token_budget,
            )
        return dict(zip(indices, scores, strict=True))

    def forget_all(self) -> None:
        """Free the memory of all models."""
        super().forget_all()
        for model_id in [*self.learners, *self.classifiers]:
            self.forget_model(model_id)

    def forget_model(self, model_id: int) -> None:
        """Free a model."""
        self.classifiers.pop(model_id, None)
        learner = self.learners.pop(model_id, None)
        if learner is not None:  # None if its creation failed
            learner.release()
        self.specs.pop(model_id, None)
        self.stands_on.pop(model_id, None)
        self.latest.pop(model_id, None)

    # ------------------------------------------------------------------------------------- learning

    def forward_backward(
        self,
        model_id: int,
        datums: Sequence[Datum],
        loss_fn: str | LossSpec,
        config: Mapping[str, float],
        divisor: float,
        backward: bool,
        entropy: bool = False,
        adapters: bool = True,
        drawn_at: Sequence[float | None] | None = None,
        part: int | None = None,
    ) -> tuple[dict[int, dict[str, np.ndarray]], dict[str, float], float]:
        """Return this rank's outputs by datum index, its metric sums, and the mean temperature.
        Merged: outputs in order, and metrics.

        `drawn_at`: the temperature at which each datum was sampled, if known. "temperature" in
        `config` overrides it.
        """
        learner = self.learners[model_id]
        loss = get_loss(loss_fn) if isinstance(loss_fn, str) else loss_fn
        if backward and datums and "advantages" in loss.required:
            learner.sampled.refuse_truncated()
        settings = dict(config)
        temperature = settings.pop("temperature", None)
        if temperature is None and loss.as_sampled and datums:
            temperatures = as_drawn(drawn_at or [None] * len(datums), learner.sampled.temperature)
        else:
            temperatures = [1.0 if temperature is None else float(temperature)] * len(datums)
        kwargs = {
            "divisor": divisor,
            "backward": backward,
            "entropy": entropy,
            "adapters": adapters,
            "part": part,
        }
        with self.kept.aside():
            outputs, sums = learner.run(datums, loss, settings, temperature=temperatures, **kwargs)  # type: ignore[arg-type]
        return (
            outputs,
            sums,
            mean_temperature(temperatures or [1.0 if temperature is None else float(temperature)]),
        )

    def forward_backward_part(
        self, model_id: int, part: int, *call: Any
    ) -> tuple[Any, dict[str, float], float, int]:
        """Run micro-batch `part` of a forward_backward call. Return (outputs by datum index, metric
        sums, mean temperature, number of micro-batches).
        """
        return *self.forward_backward(model_id, *call, part=part), self.learners[model_id].parts  # type: ignore[misc]

    def optim_step(self, model_id: int, params: AdamParams) -> dict[str, float]:
        """Update the weights with the accumulated gradient and return the metrics."""
        with self.kept.aside():
            metrics = self.learners[model_id].step(params)
        self.kept.learned()
        return metrics

    def scale_gradients(self, model_id: int, factor: float) -> None:
        """Multiply the accumulated gradient by `factor`."""
        self.learners[model_id].scale_gradients(factor)

    def version(self, model_id: int) -> int:
        """Return the number of updates of the learner."""
        return self.learners[model_id].version

    def drop_gradients(self, model_id: int) -> None:
        """Discard the accumulated gradient."""
        self.learners[model_id].drop_gradients()

    # ------------------------------------------------------------------------------------- sampling

    def snapshot(self, model_id: int, version_id: int) -> dict[str, Any]:
        """Copy the learner's current weights to a new sampler version. Return the learner's version
        and the seconds it took.
        """
        begin = time.perf_counter()
        self.kept.make_room()  # for a copy of the weights
        learner = self.learners[model_id]
        decoder = self.latest.get(model_id)
        if decoder is None:
            decoder = self._decoder_of(model_id)
        else:
            # a version still uses this decoder
            if any(v.decoder is decoder for v in self.versions.values()):
                decoder = decoder.fork()
            decoder.load_(learner.weights())
        self.latest[model_id] = decoder
        self.versions[version_id] = SamplerVersion(
            decoder, learner.loaded, learner.version, learner, learned=True
        )
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()  # copies are asynchronous: measure until they have finished
        return {
            "version": learner.version,
            "seconds": time.perf_counter() - begin,
            "mixes": self._mixes(decoder),
        }

    def snapshot_base(self, model_id: int, version_id: int) -> dict[str, Any]:
        """Create a sampler version of the base model under the LoRA adapter: the adapter's B
        matrices are 0, and the base weights are those of its sampler.
        """
        begin = time.perf_counter()
        learner = self.learners[model_id]
        if model_id not in self.latest:
            self.latest[model_id] = self._decoder_of(model_id)
        decoder = self.latest[model_id].fork()
        shapes = {
            name: learner.parameter_shapes[name]
            for name in learner.trainable
            if ".lora_B." in name or ".lora_embedding_B." in name
        }
        decoder.load_((name, torch.zeros(shape)) for name, shape in shapes.items())
        self.versions[version_id] = SamplerVersion(decoder, learner.loaded, 0, None)
        return {"version": 0, "seconds": time.perf_counter() - begin, "mixes": self._mixes(decoder)}

    def _decoder_of(self, model_id: int) -> Decoder:
        """Return a new decoder of the learner's weights."""
        learner, device, kind = (
            self.learners[model_id],
            self.accelerator.device,
            self.settings.sampler.kind,
        )
        weights = learner.weights(frozen=True) if learner.shell is not learner.model else None
        base = self._base(self.stands_on[model_id]) if weights is None and learner.is_lora else None
        return make_decoder(
            learner.shell,
            dtype=self.sampler_dtype,
            device=device,
            kind=kind,
            weights=weights,
            base=base,
            team=self.team,
        )

    def note_drawn(self, model_id: int, version: int, params: Sequence[SamplingParams]) -> None:
        """Record that sampler ranks sample from this version of the weights with these
        parameters.
        """
        learner = self.learners.get(model_id)
        if learner is not None and learner.version == version:
            learner.sampled.note(version, params)

    def stage(self, model_id: int, first: bool) -> Staged | None:
        """Copy the current weights to host memory of rank 0, for the transfer to sampler ranks.
        `first`: whether the samplers do not have the model yet.
        """
        learner, spec = self.learners[model_id], self.specs[model_id]
        # the base is rounded to bf16 or 4 bit, while samplers read the original from its folder
        send_base = first and self._held_in(spec) != "fp32"
        is_rank_0 = distributed.rank() == 0
        tensors = {
            name: tensor.detach().to("cpu", copy=True)
            for name, tensor in learner.weights(frozen=send_base)
            if is_rank_0
        }
        return (
            Staged(model_id, spec, self.stands_on[model_id], learner.version, tensors)
            if is_rank_0
            else None
        )

    def stage_nothing(self, model_id: int) -> Staged:
        """Return what `stage` returns, without weights."""
        return Staged(model_id, self.specs[model_id], self.stands_on[model_id], 0, {})

    def reach(self) -> None:
        """Do nothing. Its future completes after all verbs submitted before."""

    def prove_learner(
        self, model_id: int, datums: Sequence[Datum], temperature: float
    ) -> tuple[Seen, Staged | None]:
        """Return the learner's part of `prove` and the perturbed weights for the transfer, if
        sampling runs on other ranks.
        """
        return look_at_learner(
            self.learners[model_id], datums, temperature, lambda: self.stage(model_id, False)
        )

    def prove(
        self, model_id: int, version_id: int, datums: Sequence[Datum], temperature: float
    ) -> Seen:
        """Compare learner and sampler on the datums, with current and perturbed weights. The
        weights are unchanged afterwards.
        """
        return look(
            self.learners[model_id],
            self.versions[version_id].decoder,
            datums,
            temperature,
            self._share,
        )

    # --------------------------------------------------------------------------------------- saving

    def save_state(
        self,
        model_id: int,
        path: str,
        metadata: Mapping[str, Any],
        ttl_seconds: float | None,
        beside: Mapping[str, int] | None = None,
        overwrite: bool = False,
        user_metadata: Mapping[str, str] | None = None,
    ) -> str:
        """Write a checkpoint of the model, with the models of `beside` in subfolders. Return its
        path.
        """
        rng = self.objects.gather(torch.get_rng_state())
        other_models = {
            name: (self.learners[other], self.specs[other])
            for name, other in (beside or {}).items()
        }
        save_metadata = saving.Words(metadata, dict(user_metadata or {}), overwrite)
        saving.save_state(
            self.learners[model_id],
            self.specs[model_id],
            Path(path),
            rng,
            save_metadata,
            ttl_seconds,
            other_models,
        )
        self.saved_by[str(Path(path).resolve())] = model_id
        return path

    def save_for_sampler(
        self,
        model_id: int,
        path: str,
        merged: bool,
        ttl_seconds: float | None,
        value_head: bool = False,
        user_metadata: Mapping[str, str] | None = None,
    ) -> str:
        """Write only the weights. Return the path."""
        save_metadata = saving.Words({}, dict(user_metadata or {}))
        saving.save_for_sampler(
            self.learners[model_id],
            self.specs[model_id],
            Path(path),
            merged,
            ttl_seconds,
            value_head,
            save_metadata,
        )
        self.saved_by[str(Path(path).resolve())] = model_id
        return path

    def load_state(self, model_id: int, path: str, with_optimizer: bool) -> dict[str, Any]:
        """Load a checkpoint's weights, and its optimizer if requested. Return the checkpoint's
        state.
        """
        state = saving.load_state(
            self.learners[model_id], Path(path), with_optimizer, distributed.rank()
        )
        self._take_alpha(model_id, ModelSpec.from_json(state["spec"]).lora)
        return state

    def _take_alpha(self, model_id: int, saved: LoraConfig | None) -> None:
        """Scale the adapter as the saved adapter was scaled: with another scale the same weights
        would be another function.
        """
        spec = self.specs[model_id]
        if spec.lora is None or saved is None or saved.effective_alpha == spec.lora.effective_alpha:
            return
        remark(
            f"LoRA: alpha is now {saved.effective_alpha:g}, as in the loaded checkpoint (it was "
            f"{spec.lora.effective_alpha:g})"
        )
        self.specs[model_id] = replace(spec, lora=replace(spec.lora, alpha=saved.alpha))
        for model in (self.learners[model_id].model, self.learners[model_id].shell):
            set_alpha(model, saved)
        self.latest.pop(model_id, None)  # a decoder's scale is fixed
