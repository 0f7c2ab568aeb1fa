"""What every rank executes: the verbs, on the models and sampler versions that live there.

A verb is a method of `Worker` whose name has no underscore. All ranks run the same verbs with the same arguments in the
same order; inside one, work is split and results come back to rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl import distributed, saving
from rl.launch import make_accelerator
from rl.learner import Learner, LearnerSettings
from rl.losses import LossSpec, get_loss
from rl.models import LoadedModel, add_lora, load_model
from rl.sampler import Decoder, Engine, Request, make_decoder, score
from rl.types import AdamParams, Datum, LoraConfig, SampleResponse


@dataclass(frozen=True)
class SamplerSettings:
    """kv_cache_tokens: the KV cache of one rank, in tokens; max_rows: sequences decoded at once."""

    kv_cache_tokens: int = 262_144
    max_rows: int = 1024
    kind: str = "auto"


@dataclass(frozen=True)
class WorkerSettings:
    dtype: str = "auto"
    timeout_seconds: float = 1800.0
    learner: LearnerSettings = field(default_factory=LearnerSettings)
    sampler: SamplerSettings = field(default_factory=SamplerSettings)


@dataclass(frozen=True)
class ModelSpec:
    """What makes a model: enough to make it again."""

    base_model: str
    tokenizer: str | None = None
    lora: LoraConfig | None = None
    seed: int = 0

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelSpec:
        lora = data.get("lora")
        return cls(**{**data, "lora": LoraConfig(**lora) if lora else None})


@dataclass
class SamplerVersion:
    """Weights that can be sampled from: a decoder, and which learner (if it lives here) at which version they are from."""

    decoder: Decoder
    loaded: LoadedModel
    version: int
    learner: Learner | None


class Worker:
    """One rank's models, sampler versions, and the verbs on them."""

    def __init__(self, settings: WorkerSettings):
        bf16 = settings.dtype == "bf16" or (settings.dtype == "auto" and torch.cuda.is_available())
        self.accelerator = make_accelerator(bf16=bf16)
        self.objects = distributed.ObjectGroup(settings.timeout_seconds)
        self.settings = settings
        self.sampler_dtype = torch.bfloat16 if bf16 else torch.float32
        self.learners: dict[int, Learner] = {}
        self.specs: dict[int, ModelSpec] = {}
        self.versions: dict[int, SamplerVersion] = {}
        self.latest: dict[int, Decoder] = {}  # per learner: the decoder whose frozen base later versions share

    # ----------------------------------------------------------------------------------------------------------- models

    def create_model(self, model_id: int, spec: ModelSpec, state: str | None, with_optimizer: bool) -> dict[str, Any]:
        """Makes a learner from its spec; `state`: a checkpoint whose weights (and optimizer) it starts from."""
        base, tokenizer = saving.base_of(spec, state)
        loaded = load_model(base, tokenizer=tokenizer, seed=spec.seed)
        loaded.name = spec.base_model
        if spec.lora is not None:
            loaded = add_lora(loaded, spec.lora)
        info = self._info(loaded, spec)  # before the weights are sharded
        learner = Learner(loaded, self.accelerator, self.settings.learner)
        self.learners[model_id], self.specs[model_id] = learner, spec
        if state is not None:
            self.load_state(model_id, state, with_optimizer)
        return {**info, "distributed_type": self.accelerator.distributed_type.value, "wrapped": type(learner.backend.wrapped).__name__}

    def _info(self, loaded: LoadedModel, spec: ModelSpec) -> dict[str, Any]:
        config = loaded.model.config.get_text_config().to_dict()
        parameters = sum(p.numel() for p in loaded.model.parameters())
        trainable = sum(p.numel() for p in loaded.model.parameters() if p.requires_grad)
        return {
            "base_model": spec.base_model,
            "arch": config.get("model_type", "unknown"),
            "lora_rank": spec.lora.rank if spec.lora else None,
            "vocab_size": loaded.vocab_size,
            "max_context": _max_context(loaded),
            "hidden_size": config.get("hidden_size") or config.get("n_embd"),
            "parameters": parameters,
            "trainable_parameters": trainable,
            "tokenizer": loaded.tokenizer,
            "device": str(self.accelerator.device),
            "dtype": "bf16" if self.sampler_dtype == torch.bfloat16 else "fp32",
            "world": distributed.world(),
        }

    def forget_model(self, model_id: int) -> None:
        learner = self.learners.pop(model_id, None)
        if learner is not None:  # None where its creation failed
            learner.release()
        self.specs.pop(model_id, None)
        self.latest.pop(model_id, None)

    # --------------------------------------------------------------------------------------------------------- learning

    def forward_backward(
        self,
        model_id: int,
        datums: Sequence[Datum],
        loss_fn: str | LossSpec,
        config: Mapping[str, float],
        divisor: float,
        backward: bool,
        entropy: bool = False,
    ) -> tuple[list[dict[str, np.ndarray]], dict[str, float]]:
        """Outputs in the order of `datums`, and metrics summed over ranks."""
        learner = self.learners[model_id]
        loss = get_loss(loss_fn) if isinstance(loss_fn, str) else loss_fn
        if backward and datums and "advantages" in loss.required:
            learner.refuse_truncated_samples()
        settings = dict(config)
        temperature = settings.pop("temperature", None)
        if temperature is None:
            sampled = learner.last_temperature if "advantages" in loss.required else None
            temperature = sampled if sampled is not None else 1.0
        outputs, sums = learner.run(
            datums, loss, settings, temperature=temperature, divisor=divisor, backward=backward, entropy=entropy
        )
        parts = self.objects.gather((outputs, sums))
        if parts is None:
            return [], {}
        merged: dict[int, dict[str, np.ndarray]] = {}
        metrics: dict[str, float] = {"loss:sum": 0.0}
        for part_outputs, part_sums in parts:
            merged.update(part_outputs)
            for name, value in part_sums.items():
                metrics[name] = metrics.get(name, 0.0) + value
        metrics["temperature:mean"] = temperature
        return [merged[i] for i in range(len(datums))], metrics

    def optim_step(self, model_id: int, params: AdamParams) -> dict[str, float]:
        return self.learners[model_id].step(params)

    def drop_gradients(self, model_id: int) -> None:
        self.learners[model_id].drop_gradients()

    # --------------------------------------------------------------------------------------------------------- sampling

    def snapshot(self, model_id: int, version_id: int) -> int:
        """The learner's weights, as they are now, under a new version id. Returns the learner's version."""
        learner = self.learners[model_id]
        decoder = self.latest.get(model_id)
        if decoder is None:
            decoder = make_decoder(
                learner.shell, dtype=self.sampler_dtype, device=self.accelerator.device, kind=self.settings.sampler.kind
            )
            if learner.shell is not learner.model:
                decoder.load_(learner.weights(list(learner.parameter_shapes)))
        else:
            if any(v.decoder is decoder for v in self.versions.values()):  # somebody still samples from it
                decoder = decoder.fork()
            decoder.load_(learner.weights())
        self.latest[model_id] = decoder
        self.versions[version_id] = SamplerVersion(decoder, learner.loaded, learner.version, learner)
        return learner.version

    def load_sampler(self, version_id: int, path: str | None, base_model: str | None) -> dict[str, Any]:
        """A sampler version from saved weights (a folder of `save_weights_for_sampler`, any HF or PEFT folder) or a base model."""
        loaded, version, spec = saving.load_for_sampling(path, base_model)
        loaded.model.to(self.accelerator.device)
        decoder = make_decoder(loaded.model, dtype=self.sampler_dtype, kind=self.settings.sampler.kind)
        owner = next((i for i, s in self.specs.items() if s == spec and self.learners[i].version == version), None)
        self.versions[version_id] = SamplerVersion(decoder, loaded, version, self.learners.get(owner) if owner is not None else None)
        return {**self._info(loaded, spec), "version": version}

    def forget_version(self, version_id: int) -> None:
        self.versions.pop(version_id, None)

    def sample(self, version_id: int, requests: Sequence[Request]) -> tuple[list[SampleResponse], dict[str, int]]:
        """Responses in the order of requests, and the engines' counters summed. Requests are dealt out over the ranks by cost."""
        source = self.versions[version_id]
        mine = _share([len(r.prompt) + r.num_samples * (r.params.max_tokens or 1024) for r in requests])
        limits = self.settings.sampler
        engine = Engine(
            source.decoder,
            eos_token_ids=source.loaded.eos_token_ids,
            tokenizer=source.loaded.tokenizer,
            max_context=_max_context(source.loaded),
            kv_cache_tokens=limits.kv_cache_tokens,
            max_rows=limits.max_rows,
        )
        for i in mine:
            engine.add(requests[i])
        responses = engine.run()
        for response in responses:
            for sequence in response.sequences:
                sequence.version = source.version
        if source.learner is not None and source.learner.version == source.version:
            source.learner.note_sampling([r.params for r in requests])
        parts = self.objects.gather((mine, responses, asdict(engine.counters)))
        if parts is None:
            return [], {}
        ordered: dict[int, SampleResponse] = {}
        counters: dict[str, int] = {}
        for indices, part, counts in parts:
            ordered.update(zip(indices, part, strict=True))
            for name, count in counts.items():
                counters[name] = counters.get(name, 0) + count
        return [ordered[i] for i in range(len(requests))], counters

    def compute_logprobs(self, version_id: int, prompts: Sequence[list[int]]) -> list[list[float | None]]:
        mine = _share([len(p) for p in prompts])
        values = score(self.versions[version_id].decoder, [prompts[i] for i in mine])
        parts = self.objects.gather((mine, values))
        if parts is None:
            return []
        ordered = {i: v for indices, part in parts for i, v in zip(indices, part, strict=True)}
        return [ordered[i] for i in range(len(prompts))]

    # ------------------------------------------------------------------------------------------------------------ saving

    def save_state(self, model_id: int, path: str, metadata: Mapping[str, Any], ttl_seconds: float | None) -> str:
        rng = self.objects.gather(torch.get_rng_state())
        saving.save_state(self.learners[model_id], self.specs[model_id], Path(path), rng, metadata, ttl_seconds)
        return path

    def save_for_sampler(self, model_id: int, path: str, merged: bool, ttl_seconds: float | None) -> str:
        saving.save_for_sampler(self.learners[model_id], self.specs[model_id], Path(path), merged, ttl_seconds)
        return path

    def load_state(self, model_id: int, path: str, with_optimizer: bool) -> dict[str, Any]:
        state = saving.load_state(self.learners[model_id], Path(path), with_optimizer, distributed.rank())
        return state


def _share(costs: Sequence[int]) -> list[int]:
    """The indices this rank takes: the costliest first, each to the rank with the least so far, then in order."""
    world, rank = distributed.world(), distributed.rank()
    if world == 1:
        return list(range(len(costs)))
    load = [0] * world
    mine = []
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        taker = min(range(world), key=lambda r: (load[r], r))
        load[taker] += costs[i]
        if taker == rank:
            mine.append(i)
    return sorted(mine)


def _max_context(loaded: LoadedModel) -> int | None:
    config = loaded.model.config.get_text_config().to_dict()
    return config.get("max_position_embeddings") or config.get("n_positions")
