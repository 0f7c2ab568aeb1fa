"""Execute the verbs on every rank, on the models and sampler versions that live on the rank.

A verb is a method with a row in the table (`rl.runtime.verb_table`). All ranks run the same verbs
with the same arguments in the same order. A verb splits its work over the ranks, and rank 0
receives the results.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl.distributed import collectives, get_launch_sharding
from rl.errors import warn_on_rank_zero
from rl.learner import (
    Learner,
    ModelSpec,
    check_optimizer,
    choose_base_dtype,
    learner_checkpoint,
)
from rl.losses import LossSpec, get_loss
from rl.models import (
    LoadedClassifier,
    add_lora,
    add_value_head,
    load_classifier,
    load_model_lazily,
    resolve_head,
    score_inputs,
    set_lora_alpha,
)
from rl.runtime.base_models import BaseKey
from rl.runtime.consistency import ConsistencyReport, make_texts, measure, to_arrays
from rl.runtime.rank_settings import WorkerSettings
from rl.runtime.sample_temperatures import compute_mean_temperature, resolve_temperatures
from rl.runtime.sampler_versions import SamplerVersion
from rl.runtime.sampling_worker import SamplingWorker, load_base
from rl.runtime.verb_table import (
    LEARNER,
    SAMPLER,
    assign_indices,
    merge_by_index,
    sum_counters,
    verb,
)
from rl.runtime.weight_sync import WeightSnapshot
from rl.sampler import Decoder
from rl.types import AdamParams, Datum, LoraConfig, SamplingParams
from rl.vllm import VllmDecoder


def _merge_outputs(parts: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return (outputs in datum order, metrics) of the ranks' (outputs, sums, temperature)."""
    sums = sum_counters([part[1] for part in parts])
    metrics = {"loss:sum": 0.0, **sums, "temperature:mean": parts[0][2]}
    return merge_by_index([part[0] for part in parts]), metrics


def _merge_microbatch(parts: Sequence[Any]) -> tuple[Any, ...]:
    """Return (outputs by datum index, sums, temperature, number of micro-batches) of all ranks."""
    outputs = {i: output for part in parts for i, output in part[0].items()}
    return outputs, sum_counters([part[1] for part in parts]), *parts[0][2:]


class TrainingWorker(SamplingWorker):
    """Hold a rank's models and sampler versions, and execute the verbs on them."""

    def __init__(self, settings: WorkerSettings, objects: collectives.ObjectGroup | None = None):
        super().__init__(settings, objects)
        self.specs: dict[int, ModelSpec] = {}
        self.base_keys: dict[int, BaseKey] = {}
        self.classifiers: dict[int, LoadedClassifier] = {}
        # by learner: the decoder whose frozen base later versions share
        self.latest_decoders: dict[int, Decoder] = {}

    # --------------------------------------------------------------------------------------- models

    @verb()
    def create_model(
        self, model_id: int, spec: ModelSpec, state: str | None, with_optimizer: bool
    ) -> dict[str, Any]:
        """Create a learner from its spec and return the model's details. `state`: a checkpoint
        whose weights (and optimizer) it starts from.
        """
        self.kv_cache_pool.reset()
        settings, sharding = self.settings.learner, get_launch_sharding()
        # a folder may be missing on some machine
        with collectives.all_or_none(self.accelerator.device):
            held_in = self._choose_base_dtype(spec)
            check_optimizer(settings.optimizer, self.accelerator.device, sharding)
            base, tokenizer = learner_checkpoint.resolve_base_model(spec, state)
            lazy_model = (
                load_model_lazily(base, tokenizer=tokenizer)
                if sharding.reads_shards(collectives.world())
                else None
            )
            loaded = lazy_model or self.base_models.load(
                base, tokenizer, spec.seed, spec.lora is not None
            )
            loaded.name = spec.base_model
            if spec.lora is not None:
                lora = resolve_head(loaded.model, spec.lora)
                spec, loaded = replace(spec, lora=lora), add_lora(loaded, lora)
            if spec.value_head:
                loaded = add_value_head(loaded)
            self.base_keys[model_id] = (base, tokenizer, spec.seed)
        info = self._describe_model(loaded, spec)  # before the weights are sharded
        learner = Learner(
            loaded,
            self.accelerator,
            settings,
            "fp32" if sharding.owns_weights else held_in,  # the backend casts all weights
            collectives.get_rank_group(
                settings.context_parallel_size, self.settings.timeout_seconds
            ),
        )
        self.learners[model_id], self.specs[model_id] = learner, spec
        if state is not None:
            self.load_state(model_id, state, with_optimizer)
        return {
            **info,
            "base_dtype": held_in,
            "distributed_type": self.accelerator.distributed_type.value,
            "scales_gradients": not sharding.owns_weights,
            "wrapped": type(learner.backend.wrapped).__name__,
        }

    def _choose_base_dtype(self, spec: ModelSpec) -> str:
        """Return the dtype of the frozen base weights."""
        bf16 = self.sampler_dtype == torch.bfloat16
        return choose_base_dtype(
            spec.base_dtype, lora=spec.lora is not None, bf16=bf16, sharding=get_launch_sharding()
        )

    @verb()
    def load_classifier(self, model_id: int, name: str) -> dict[str, Any]:
        """Load a published reward model, unsharded on every rank. Return its details."""
        self.kv_cache_pool.reset()
        with collectives.all_or_none(self.accelerator.device):
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

    @verb(LEARNER, merge_by_index)
    def classify(self, model_id: int, inputs: Sequence[Sequence[int]]) -> dict[int, float]:
        """Return the scores of this rank's share of the inputs by index. Merged: all of them in
        order.
        """
        indices = assign_indices([len(tokens) for tokens in inputs])
        with self.kv_cache_pool.yield_to_learner():
            scores = score_inputs(
                self.classifiers[model_id],
                [inputs[i] for i in indices],
                self.settings.learner.token_budget,
            )
        return dict(zip(indices, scores, strict=True))

    def free_all(self) -> None:
        """Free the memory of all models."""
        super().free_all()
        for model_id in [*self.learners, *self.classifiers]:
            self.free_model(model_id)

    @verb(LEARNER, frees=True, router_method="free_model")
    def free_model(self, model_id: int) -> None:
        """Free a model."""
        self.classifiers.pop(model_id, None)
        learner = self.learners.pop(model_id, None)
        if learner is not None:  # None if its creation failed
            learner.release()
        self.specs.pop(model_id, None)
        self.base_keys.pop(model_id, None)
        self.latest_decoders.pop(model_id, None)

    # ------------------------------------------------------------------------------------- learning

    @verb(LEARNER, _merge_outputs)
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
        sampling_temperatures: Sequence[float | None] | None = None,
        part: int | None = None,
    ) -> tuple[dict[int, dict[str, np.ndarray]], dict[str, float], float]:
        """Return this rank's outputs by datum index, its metric sums, and the mean temperature.
        Merged: outputs in order, and metrics.

        `sampling_temperatures`: the temperature at which each datum was sampled, if known.
        "temperature" in `config` overrides it.
        """
        learner = self.learners[model_id]
        loss = get_loss(loss_fn) if isinstance(loss_fn, str) else loss_fn
        if backward and datums and "advantages" in loss.required:
            learner.sampling_record.check_untruncated()
        settings = dict(config)
        temperature = settings.pop("temperature", None)
        if temperature is None and loss.at_sampling_temperature and datums:
            temperatures = resolve_temperatures(
                sampling_temperatures or [None] * len(datums),
                learner.sampling_record.scoring_temperature,
            )
        else:
            temperatures = [1.0 if temperature is None else float(temperature)] * max(
                len(datums), 1
            )
        with self.kv_cache_pool.yield_to_learner():
            outputs, sums = learner.run(
                datums,
                loss,
                settings,
                temperature=temperatures[: len(datums)],
                divisor=divisor,
                backward=backward,
                entropy=entropy,
                use_adapters=adapters,
                micro_batch=part,
            )
        return outputs, sums, compute_mean_temperature(temperatures)

    @verb(LEARNER, _merge_microbatch)
    def forward_backward_microbatch(
        self, model_id: int, part: int, *call: Any
    ) -> tuple[Any, dict[str, float], float, int]:
        """Run micro-batch `part` of a forward_backward call. Return (outputs by datum index, metric
        sums, mean temperature, number of micro-batches).
        """
        learner = self.learners[model_id]
        return *self.forward_backward(model_id, *call, part=part), learner.num_micro_batches  # type: ignore[misc]

    @verb(LEARNER, on_refusal="drop_gradients")
    def optim_step(self, model_id: int, params: AdamParams) -> dict[str, float]:
        """Update the weights with the accumulated gradient and return the metrics."""
        with self.kv_cache_pool.yield_to_learner():
            metrics = self.learners[model_id].step(params)
        self.kv_cache_pool.record_update()
        return metrics

    @verb()
    def scale_gradients(self, model_id: int, factor: float) -> None:
        """Multiply the accumulated gradient by `factor`."""
        self.learners[model_id].scale_gradients(factor)

    @verb()
    def version(self, model_id: int) -> int:
        """Return the number of updates of the learner."""
        return self.learners[model_id].version

    @verb()
    def drop_gradients(self, model_id: int) -> None:
        """Discard the accumulated gradient."""
        self.learners[model_id].drop_gradients()

    # ------------------------------------------------------------------------------------- sampling

    @verb(SAMPLER, version_arg=1, router_method="snapshot")
    def snapshot(self, model_id: int, version_id: int) -> dict[str, Any]:
        """Copy the learner's current weights to a new sampler version. Return the learner's version
        and the seconds it took.
        """
        begin = time.perf_counter()
        self.kv_cache_pool.free_for_learner()  # for a copy of the weights
        learner = self.learners[model_id]
        decoder = self.latest_decoders.get(model_id)
        if self.server_pool is not None:
            decoder = self._make_server_decoder(learner.loaded, model_id)
            self._write_learner_weights(decoder, learner)
        elif decoder is None:
            decoder = self._make_learner_decoder(model_id)
        else:
            # a version still uses this decoder
            if any(v.decoder is decoder for v in self.versions.values()):
                decoder = decoder.fork()
            decoder.load_(learner.iter_weights())
        if self.server_pool is None:
            self.latest_decoders[model_id] = decoder
        version = SamplerVersion(decoder, learner.loaded, learner.version, learner, learned=True)
        return self._add_version(
            version_id, version, begin, self.base_models.find_mix_group(decoder)
        )

    @verb(SAMPLER, version_arg=1, router_method="snapshot_base")
    def snapshot_base(self, model_id: int, version_id: int) -> dict[str, Any]:
        """Create a sampler version of the base model under the LoRA adapter: the adapter's B
        matrices are 0, and the base weights are those of its sampler.
        """
        begin = time.perf_counter()
        learner = self.learners[model_id]
        if model_id not in self.latest_decoders:
            self.latest_decoders[model_id] = self._make_learner_decoder(model_id)
        decoder = load_base(self.latest_decoders[model_id].fork(), learner.parameter_shapes)
        version = SamplerVersion(decoder, learner.loaded, 0, None)
        return self._add_version(
            version_id, version, begin, self.base_models.find_mix_group(decoder)
        )

    def _write_learner_weights(self, decoder: VllmDecoder, learner: Learner) -> None:
        """Write the learner's weights, adapters merged, for the vLLM servers."""
        with (
            collectives.all_or_none(self.accelerator.device),
            learner.full_model(adapter_only=False) as model,
        ):
            tokenizer = learner.loaded.tokenizer
            self._write_server_weights(decoder, model, tokenizer, learner.version)

    def _make_learner_decoder(self, model_id: int) -> Decoder:
        """Return a new decoder of the learner's weights."""
        learner = self.learners[model_id]
        if learner.skeleton is not learner.model:
            weights = learner.iter_weights(frozen=True)
            return self._make_decoder(learner.skeleton, weights=weights)
        base_key = self.base_keys[model_id] if learner.is_lora else None
        return self._make_decoder(learner.skeleton, base_key)

    @verb()
    def record_params(self, model_id: int, version: int, params: Sequence[SamplingParams]) -> None:
        """Record that sampler ranks sample from this version of the weights with these
        parameters.
        """
        learner = self.learners.get(model_id)
        if learner is not None and learner.version == version:
            learner.sampling_record.record(version, params)

    @verb()
    def take_snapshot(self, model_id: int, is_first: bool) -> WeightSnapshot:
        """Copy the current weights to host memory of rank 0, for the transfer to sampler ranks; the
        snapshots of other ranks are empty. `is_first`: whether the samplers do not have the model
        yet.
        """
        learner, spec = self.learners[model_id], self.specs[model_id]
        # the base is rounded to bf16 or 4 bit, while samplers read the original from its folder
        send_base = is_first and self._choose_base_dtype(spec) != "fp32"
        tensors = {
            name: tensor.detach().to("cpu", copy=True)
            for name, tensor in learner.iter_weights(frozen=send_base)
            if collectives.rank() == 0
        }
        base_key = self.base_keys[model_id]
        return WeightSnapshot(model_id, spec, base_key, learner.version, tensors)

    @verb()
    def take_empty_snapshot(self, model_id: int) -> WeightSnapshot:
        """Return what `take_snapshot` returns, without weights."""
        return WeightSnapshot(model_id, self.specs[model_id], self.base_keys[model_id], 0, {})

    @verb()
    def wait_for_verbs(self) -> None:
        """Do nothing. Its future completes after all verbs submitted before."""

    @verb(LEARNER, lambda parts: (ConsistencyReport.merge([p[0] for p in parts]), parts[0][1]))
    def check_sync(
        self, model_id: int, version_id: int | None, datums: Sequence[Datum], temperature: float
    ) -> tuple[ConsistencyReport, WeightSnapshot | None]:
        """Compare learner and sampler on the datums, with current and perturbed weights. The
        weights are unchanged afterwards.

        `version_id`: None if sampling runs on other ranks: return the learner's part of the report,
        and the perturbed weights for the transfer.
        """
        learner = self.learners[model_id]
        if version_id is None:
            staged = partial(self.take_snapshot, model_id, False)
            return measure(learner, datums, temperature, staged, dict)
        datums, texts, images = make_texts(datums)
        decoder = self.versions[version_id].decoder

        def load_weights() -> None:
            if isinstance(decoder, VllmDecoder):
                self._write_learner_weights(decoder, learner)
            else:
                decoder.load_(learner.iter_weights())

        def compute_sampler_logprobs() -> dict[int, np.ndarray]:
            return to_arrays(self.compute_logprobs(version_id, texts, temperature, images))

        try:
            return measure(learner, datums, temperature, load_weights, compute_sampler_logprobs)
        finally:
            load_weights()

    # --------------------------------------------------------------------------------------- saving

    @verb(LEARNER, router_method="record_folder")
    def save_state(
        self,
        model_id: int,
        path: str,
        metadata: Mapping[str, Any],
        ttl_seconds: float | None,
        companions: Mapping[str, int] | None = None,
        overwrite: bool = False,
        user_metadata: Mapping[str, str] | None = None,
    ) -> str:
        """Write a checkpoint of the model, with the models of `companions` in subfolders. Return
        its path.
        """
        rng = self.objects.gather(torch.get_rng_state())
        other_models = {
            name: (self.learners[other], self.specs[other])
            for name, other in (companions or {}).items()
        }
        save_metadata = learner_checkpoint.SaveMetadata(
            metadata, dict(user_metadata or {}), overwrite
        )
        learner_checkpoint.save_learner_state(
            self.learners[model_id],
            self.specs[model_id],
            Path(path),
            rng,
            save_metadata,
            ttl_seconds,
            other_models,
        )
        self.folder_models[str(Path(path).resolve())] = model_id
        return path

    @verb(LEARNER, router_method="record_folder")
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
        save_metadata = learner_checkpoint.SaveMetadata({}, dict(user_metadata or {}))
        learner_checkpoint.save_sampler_weights(
            self.learners[model_id],
            self.specs[model_id],
            Path(path),
            merged,
            ttl_seconds,
            value_head,
            save_metadata,
        )
        self.folder_models[str(Path(path).resolve())] = model_id
        return path

    @verb(LEARNER, router_method="forget_sent_weights")
    def load_state(self, model_id: int, path: str, with_optimizer: bool) -> dict[str, Any]:
        """Load a checkpoint's weights, and its optimizer if requested. Return the checkpoint's
        state.
        """
        state = learner_checkpoint.load_learner_state(
            self.learners[model_id], Path(path), with_optimizer, collectives.rank()
        )
        self._apply_saved_alpha(model_id, ModelSpec.from_json(state["spec"]).lora)
        return state

    def _apply_saved_alpha(self, model_id: int, saved: LoraConfig | None) -> None:
        """Scale the adapter as the saved adapter was scaled: with another scale the same weights
        would be another function.
        """
        spec = self.specs[model_id]
        if spec.lora is None or saved is None or saved.effective_alpha == spec.lora.effective_alpha:
            return
        warn_on_rank_zero(
            f"LoRA: alpha is now {saved.effective_alpha:g}, as in the loaded checkpoint (it was "
            f"{spec.lora.effective_alpha:g})"
        )
        self.specs[model_id] = replace(spec, lora=replace(spec.lora, alpha=saved.alpha))
        for model in (self.learners[model_id].model, self.learners[model_id].skeleton):
            set_lora_alpha(model, saved)
        self.latest_decoders.pop(model_id, None)  # a decoder's scale is fixed
