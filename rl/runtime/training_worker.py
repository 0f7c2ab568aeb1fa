"""Execute the verbs on every rank, on the models and sampler versions that live on the rank.

A verb is a method with a row in the table (`rl.runtime.verb_table`). All ranks run the same verbs
in the same order. A verb splits its work over the ranks, and rank 0 receives the results. A verb
of much data has a method that splits its arguments on rank 0, so that each rank receives its share
alone.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl.distributed import collectives, get_launch_sharding
from rl.errors import UserError, warn_on_rank_zero
from rl.layers import find_max_context
from rl.learner import (
    Learner,
    ModelSpec,
    RankBatch,
    check_optimizer,
    choose_base_dtype,
    learner_checkpoint,
    make_expert_group,
)
from rl.losses import LossSpec
from rl.models import (
    LoadedClassifier,
    add_lora,
    add_value_head,
    is_head_tied,
    load_classifier,
    load_model_lazily,
    resolve_head,
    score_inputs,
    set_lora_alpha,
)
from rl.runtime.consistency import (
    ConsistencyReport,
    compute_learner_logprobs,
    make_texts,
    measure,
    to_arrays,
)
from rl.runtime.learner_calls import (
    merge_microbatch,
    merge_outputs,
    merge_train_step,
    resolve_loss,
    split_call,
    split_train_step,
)
from rl.runtime.rank_settings import WorkerSettings
from rl.runtime.sampler_versions import BaseKey, SamplerVersion
from rl.runtime.sampling_worker import SamplingWorker, load_base
from rl.runtime.verb_table import (
    LEARNER,
    SAMPLER,
    assign_indices,
    merge_by_index,
    verb,
)
from rl.runtime.weight_sync import WeightSnapshot
from rl.sampler import Decoder
from rl.types import (
    AdamParams,
    Datum,
    LoraConfig,
    ModelInput,
    SamplingParams,
    TensorData,
)
from rl.vllm import AdapterCheck, VllmDecoder

_CHECK_TOKENS = 32  # of the text with which a server's adapter is compared


class TrainingWorker(SamplingWorker):
    """Hold a rank's models and sampler versions, and execute the verbs on them."""

    def __init__(self, settings: WorkerSettings, objects: collectives.ObjectGroup | None = None):
        super().__init__(settings, objects)
        self.specs: dict[int, ModelSpec] = {}
        self.base_keys: dict[int, BaseKey] = {}
        self.classifiers: dict[int, LoadedClassifier] = {}
        # by learner: the decoder whose frozen base later versions share
        self.latest_decoders: dict[int, Decoder] = {}
        # models on the vLLM servers, below the adapters that are sent there
        self.server_bases: dict[Hashable, VllmDecoder] = {}
        self.unservable: set[int] = set()  # learners whose adapters servers do not load

    # --------------------------------------------------------------------------------------- models

    @verb(in_step=True)
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
                self._check_adapter(model_id, lora, is_head_tied(loaded.model))
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
            make_expert_group(settings.expert_parallel_size, self.settings.timeout_seconds),
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

    def _check_adapter(self, model_id: int, lora: LoraConfig, has_tied_head: bool) -> None:
        """Raise UserError if vLLM servers get adapters and cannot load this one. With shared bases
        (a server of many clients), warn and sample from the model in this process.
        """
        if self.server_pool is None or not self.server_pool.uses_adapters:
            return
        try:
            self.server_pool.check_adapters(lora, has_tied_head)
        except UserError as error:
            if not self.settings.share_bases:
                raise
            warn_on_rank_zero(f"{error}. This model is sampled from in this process")
            self.unservable.add(model_id)

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

    @verb(LEARNER, merge_by_index, split="split_inputs")
    def classify(self, model_id: int, inputs: Mapping[int, Sequence[int]]) -> dict[int, float]:
        """Return the scores of this rank's share of the inputs by index. Merged: all of them in
        order.
        """
        with self.kv_cache_pool.yield_to_learner():
            scores = score_inputs(
                self.classifiers[model_id],
                [*inputs.values()],
                self.settings.learner.token_budget,
            )
        return dict(zip(inputs, scores, strict=True))

    def split_inputs(self, model_id: int, inputs: Sequence[Sequence[int]]) -> list[tuple[Any, ...]]:
        """Return by rank the arguments of `classify`."""
        indices = assign_indices([len(tokens) for tokens in inputs], collectives.world())
        return [(model_id, {i: inputs[i] for i in share}) for share in indices]

    def free_all(self) -> None:
        """Free the memory of all models."""
        super().free_all()
        for model_id in [*self.learners, *self.classifiers]:
            self.free_model(model_id)

    @verb(LEARNER, is_cleanup=True, router_method="free_model")
    def free_model(self, model_id: int) -> None:
        """Free a model."""
        self.classifiers.pop(model_id, None)
        learner = self.learners.pop(model_id, None)
        if learner is not None:  # None if its creation failed
            learner.backend.release()
            for version in self.versions.values():
                if version.learner is learner:
                    version.learner = None  # the version stays, without the learner's memory
        self.specs.pop(model_id, None)
        self.base_keys.pop(model_id, None)
        self.latest_decoders.pop(model_id, None)

    # ------------------------------------------------------------------------------------- learning

    def split_batch(self, model_id: int, *call: Any) -> list[tuple[Any, ...]]:
        """Return by rank the arguments of `forward_backward`. `call`: see `split_call`."""
        return split_call(self.learners[model_id], model_id, *call)

    def split_microbatch(self, model_id: int, part: int, *call: Any) -> list[tuple[Any, ...]]:
        """Return by rank the arguments of `forward_backward_microbatch`: those of `split_batch` for
        micro-batch `part`.
        """
        return split_call(  # type: ignore[misc]
            self.learners[model_id], model_id, *call, part=part
        )

    @verb(LEARNER, merge_outputs, split="split_batch", in_step=True)
    def forward_backward(
        self,
        model_id: int,
        share: RankBatch,
        loss_fn: str | LossSpec,
        config: Mapping[str, float],
        options: Mapping[str, Any],
        mean_temperature: float,
    ) -> tuple[dict[int, dict[str, np.ndarray]], dict[str, float], float]:
        """Return this rank's outputs by datum index, its metric sums, and the mean temperature of
        the whole batch. Merged: outputs in order, and metrics. `options`: of `Learner.run_share`.
        """
        self._sleep_servers()
        with self.kv_cache_pool.yield_to_learner():
            outputs, sums = self.learners[model_id].run_share(
                share, resolve_loss(loss_fn), config, **options
            )
        return outputs, sums, mean_temperature

    @verb(LEARNER, merge_microbatch, split="split_microbatch", in_step=True)
    def forward_backward_microbatch(
        self, model_id: int, share: RankBatch, *call: Any
    ) -> tuple[Any, dict[str, float], float, int]:
        """Run a micro-batch of a forward_backward call. Return (outputs by datum index, metric
        sums, mean temperature, number of micro-batches).
        """
        return *self.forward_backward(model_id, share, *call), share.num_micro_batches

    @verb(LEARNER, on_refusal="drop_gradients", in_step=True)
    def optim_step(self, model_id: int, params: AdamParams) -> dict[str, float]:
        """Update the weights with the accumulated gradient and return the metrics."""
        self._sleep_servers()
        with self.kv_cache_pool.yield_to_learner():
            metrics = self.learners[model_id].step(params)
        self.kv_cache_pool.record_update()
        return metrics

    def split_train_step(
        self, model_id: int, calls: Sequence[Sequence[Any]], params: AdamParams
    ) -> list[tuple[Any, ...]]:
        """Return by rank the arguments of `train_step`. `calls`: the arguments of `split_batch`,
        without the model.
        """
        return split_train_step(self.learners[model_id], model_id, calls, params)

    @verb(
        LEARNER,
        merge_train_step,
        split="split_train_step",
        on_refusal="drop_gradients",
        in_step=True,
    )
    def train_step(
        self, model_id: int, calls: Sequence[Sequence[Any]], params: AdamParams
    ) -> tuple[list[Any], dict[str, float]]:
        """Run forward_backward on each call, then optim_step; a GPU does not wait for the host
        between them. Return what they return.
        """
        learner = self.learners[model_id]
        try:
            self._sleep_servers()
            launches = [(share, resolve_loss(loss), *rest) for share, loss, *rest, _ in calls]
            with self.kv_cache_pool.yield_to_learner():
                outputs, metrics = learner.train_step(launches, params)
        except Exception:
            learner.drop_gradients()
            raise
        self.kv_cache_pool.record_update()
        temperatures = [call[-1] for call in calls]
        return [(*o, t) for o, t in zip(outputs, temperatures, strict=True)], metrics

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

    @verb(SAMPLER, version_arg=1, router_method="snapshot", in_step=True)
    def snapshot(self, model_id: int, version_id: int) -> dict[str, Any]:
        """Copy the learner's current weights to a new sampler version. Return the learner's version
        and the seconds it took.
        """
        begin = time.perf_counter()
        self.kv_cache_pool.free_for_learner()  # for a copy of the weights
        learner = self.learners[model_id]
        decoder = self.latest_decoders.get(model_id)
        on_servers = self.server_pool is not None
        if self.settings.share_bases:  # servers that hold adapters of many clients hold no others
            on_servers &= learner.is_lora and model_id not in self.unservable
        if on_servers:
            size, base = learner.num_parameters, self._find_server_base(model_id)
            decoder = self._make_server_decoder(learner.loaded, model_id, size, base)
            self._write_learner_weights(decoder, learner)
        elif decoder is None:
            decoder = self._make_learner_decoder(model_id)
        else:
            if self._is_in_use(decoder):
                decoder = decoder.fork()
            decoder.load_(learner.iter_weights())
        if not on_servers:
            self.latest_decoders[model_id] = decoder
        version = SamplerVersion(decoder, learner.loaded, learner.version, learner, learned=True)
        return self._add_version(
            version_id, version, begin, self.base_models.find_mix_group(decoder)
        )

    @verb(SAMPLER, version_arg=1, router_method="snapshot_base", in_step=True)
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

    def _find_server_base(self, model_id: int) -> VllmDecoder | None:
        """Return the model below a learner's adapter for vLLM servers that get adapters; None if
        they get all weights.
        """
        learner = self.learners[model_id]
        key = (*self.base_keys[model_id], self.specs[model_id].base_dtype)
        assert self.server_pool is not None
        if not learner.is_lora or not self.server_pool.uses_adapters:
            return None
        if key not in self.server_bases:
            base = self._make_server_decoder(learner.loaded, key, learner.num_parameters)
            with (
                collectives.all_or_none(self.accelerator.device),
                learner.full_model(adapter_only=False) as model,
            ):
                tokenizer = learner.loaded.tokenizer
                self._write_server_weights(base, model, tokenizer, 0, base_only=True)
            self.server_bases[key] = base
        return self.server_bases[key]

    def _write_learner_weights(self, decoder: VllmDecoder, learner: Learner) -> None:
        """Write the learner's weights for the vLLM servers: its adapter, or all weights, with an
        adapter merged.
        """
        is_adapter = decoder.base_decoder is not None
        check = self._make_adapter_check(learner) if is_adapter else None
        with (
            collectives.all_or_none(self.accelerator.device),
            learner.full_model(adapter_only=is_adapter) as model,
        ):
            tokenizer = None if is_adapter else learner.loaded.tokenizer
            self._write_server_weights(decoder, model, tokenizer, learner.version, check)

    def _make_adapter_check(self, learner: Learner) -> AdapterCheck | None:
        """Return the learner's logprobs of fixed tokens, on rank 0."""
        length = min(_CHECK_TOKENS, (find_max_context(learner.loaded.model) or _CHECK_TOKENS) - 1)
        tokens = [(7 * i + 3) % learner.loaded.vocab_size for i in range(length)]
        targets = TensorData(np.array(tokens[1:], np.int64))
        datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": targets})
        with self.kv_cache_pool.yield_to_learner():
            logprobs = compute_learner_logprobs(learner, [datum] * collectives.world(), 1.0)
        if collectives.rank() != 0:
            return None
        exact = self.sampler_dtype == torch.float32
        return AdapterCheck(tokens, next(iter(logprobs.values())).tolist(), exact)

    def _make_learner_decoder(self, model_id: int) -> Decoder:
        """Return a new decoder of the learner's weights."""
        learner = self.learners[model_id]
        skeleton = learner.backend.skeleton
        if skeleton is not learner.model:
            return self._make_decoder(skeleton, weights=learner.iter_weights(frozen=True))
        base_key = self.base_keys[model_id] if learner.is_lora else None
        return self._make_decoder(skeleton, base_key)

    @verb()
    def record_params(self, model_id: int, version: int, params: Sequence[SamplingParams]) -> None:
        """Record that sampler ranks sample from this version of the weights with these
        parameters.
        """
        learner = self.learners.get(model_id)
        if learner is not None and learner.version == version:
            learner.sampling_record.record(version, params)

    @verb(in_step=True)
    def take_snapshot(
        self,
        model_id: int,
        is_first: bool | None,
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> WeightSnapshot:
        """Copy the current weights to host memory of rank 0, for the transfer to sampler ranks; the
        snapshots of other ranks are empty. `is_first`: whether the samplers do not have the model
        yet; None: copy no weights. `dtypes`: by name, the dtype in which the samplers keep a
        tensor, to which it is rounded before it leaves the device.
        """
        learner, spec = self.learners[model_id], self.specs[model_id]
        base_key = self.base_keys[model_id]
        if is_first is None:
            return WeightSnapshot(model_id, spec, base_key, 0, {})
        # the base is rounded to bf16 or 4 bit, while samplers read the original from its folder
        send_base = is_first and self._choose_base_dtype(spec) != "fp32"
        named = (
            (name, tensor.detach().to((dtypes or {}).get(name, tensor.dtype)))
            for name, tensor in learner.iter_weights(frozen=send_base)
            if collectives.rank() == 0
        )
        snapshot = WeightSnapshot(model_id, spec, base_key, learner.version, {})
        if not is_first and dtypes is not None:
            return snapshot.cut(named)
        # the samplers choose the dtypes before chunks are cut
        return replace(snapshot, tensors={name: t.to("cpu", copy=True) for name, t in named})

    @verb()
    def wait_for_verbs(self) -> None:
        """Do nothing. Its future completes after all verbs submitted before."""

    @verb(
        LEARNER,
        lambda parts: (ConsistencyReport.merge([p[0] for p in parts]), parts[0][1]),
        in_step=True,
    )
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

    @verb(LEARNER, in_step=True)
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
        return path

    @verb(LEARNER, in_step=True)
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
        return path

    @verb(LEARNER, router_method="forget_sent_weights", in_step=True)
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
        learner = self.learners[model_id]
        for model in (learner.model, learner.backend.skeleton):
            set_lora_alpha(model, saved)
        self.latest_decoders.pop(model_id, None)  # a decoder's scale is fixed
