"""What every rank executes: the verbs, on the models and sampler versions that live there.

A verb is a method of `Worker` whose name has no underscore. All ranks run the same verbs with the same arguments in the
same order; inside one, work is split and results come back to rank 0.
"""

from __future__ import annotations

import time
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
from rl.models import LoadedModel, add_lora, add_value_head, load_model
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
    timeout_seconds: float = 1800.0  # of one wait for another rank
    stop_grace_seconds: float = 90.0  # see rl.interrupts
    learner: LearnerSettings = field(default_factory=LearnerSettings)
    sampler: SamplerSettings = field(default_factory=SamplerSettings)


@dataclass(frozen=True)
class ModelSpec:
    """What makes a model: enough to make it again."""

    base_model: str
    tokenizer: str | None = None
    lora: LoraConfig | None = None
    seed: int = 0
    value_head: bool = False

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
        self.accelerator = make_accelerator(bf16=bf16, timeout_seconds=settings.timeout_seconds)
        self.objects = distributed.ObjectGroup(settings.timeout_seconds)
        self.settings = settings
        self.sampler_dtype = torch.bfloat16 if bf16 else torch.float32
        self.learners: dict[int, Learner] = {}
        self.specs: dict[int, ModelSpec] = {}
        self.versions: dict[int, SamplerVersion] = {}
        self.saved_by: dict[str, int] = {}  # which learner wrote a folder, so that samples from it count as that learner's
        self.latest: dict[int, Decoder] = {}  # per learner: the decoder whose frozen base later versions share

    def merge(self, verb: str, parts: Sequence[Any]) -> Any:
        """The ranks' parts of a verb's result as what the driver gets; rank 0's own where the others' say nothing new."""
        match verb:
            case "forward_backward":
                metrics = {"loss:sum": 0.0, **_summed([sums for _, sums, _ in parts]), "temperature:mean": parts[0][2]}
                return _merged([outputs for outputs, _, _ in parts]), metrics
            case "sample":
                return _merged([responses for responses, _ in parts]), _summed([counters for _, counters in parts])
            case "compute_logprobs":
                return _merged(parts)
        return parts[0]

    # ----------------------------------------------------------------------------------------------------------- models

    def create_model(self, model_id: int, spec: ModelSpec, state: str | None, with_optimizer: bool) -> dict[str, Any]:
        """Makes a learner from its spec; `state`: a checkpoint whose weights (and optimizer) it starts from."""
        with distributed.all_or_none(self.accelerator.device):  # a folder may be missing on another machine
            base, tokenizer = saving.base_of(spec, state)
            loaded = load_model(base, tokenizer=tokenizer, seed=spec.seed)
            loaded.name = spec.base_model
            if spec.lora is not None:
                loaded = add_lora(loaded, spec.lora)
            if spec.value_head:
                loaded = add_value_head(loaded)
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
            "value_head": spec.value_head,
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
        adapters: bool = True,
    ) -> tuple[dict[int, dict[str, np.ndarray]], dict[str, float], float]:
        """This rank's outputs by datum index, its metric sums, the temperature. Merged: outputs in order, and metrics."""
        learner = self.learners[model_id]
        loss = get_loss(loss_fn) if isinstance(loss_fn, str) else loss_fn
        if backward and datums and "advantages" in loss.required:
            learner.refuse_truncated_samples()
        settings = dict(config)
        temperature = settings.pop("temperature", None)
        if temperature is None:
            temperature = learner.sampled_temperature() if loss.as_sampled and datums else 1.0
        outputs, sums = learner.run(
            datums, loss, settings, temperature=temperature, divisor=divisor, backward=backward, entropy=entropy, adapters=adapters
        )
        return outputs, sums, temperature

    def optim_step(self, model_id: int, params: AdamParams) -> dict[str, float]:
        return self.learners[model_id].step(params)

    def version(self, model_id: int) -> int:
        return self.learners[model_id].version

    def drop_gradients(self, model_id: int) -> None:
        self.learners[model_id].drop_gradients()

    # --------------------------------------------------------------------------------------------------------- sampling

    def snapshot(self, model_id: int, version_id: int) -> dict[str, Any]:
        """The learner's weights, as they are now, under a new version id. Returns the learner's version and what it took."""
        begin = time.perf_counter()
        learner = self.learners[model_id]
        decoder = self.latest.get(model_id)
        if decoder is None:
            decoder = self._decoder_of(learner)
        else:
            if any(v.decoder is decoder for v in self.versions.values()):  # somebody still samples from it
                decoder = decoder.fork()
            decoder.load_(learner.weights())
        self.latest[model_id] = decoder
        self.versions[version_id] = SamplerVersion(decoder, learner.loaded, learner.version, learner)
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()  # copies are queued; what is reported is when they are done
        return {"version": learner.version, "seconds": time.perf_counter() - begin}

    def snapshot_base(self, model_id: int, version_id: int) -> dict[str, Any]:
        """The base model under the learner's LoRA adapter: the adapter's B matrices are 0, the base weights those of its sampler."""
        begin = time.perf_counter()
        learner = self.learners[model_id]
        if model_id not in self.latest:
            self.latest[model_id] = self._decoder_of(learner)
        decoder = self.latest[model_id].fork()
        shapes = {name: learner.parameter_shapes[name] for name in learner.trainable if ".lora_B." in name or ".lora_embedding_B." in name}
        decoder.load_((name, torch.zeros(shape)) for name, shape in shapes.items())
        self.versions[version_id] = SamplerVersion(decoder, learner.loaded, 0, None)
        return {"version": 0, "seconds": time.perf_counter() - begin}

    def _decoder_of(self, learner: Learner) -> Decoder:
        where, kind = self.accelerator.device, self.settings.sampler.kind
        decoder = make_decoder(learner.shell, dtype=self.sampler_dtype, device=where, kind=kind)
        if learner.shell is not learner.model:
            decoder.load_(learner.weights(frozen=True))
        return decoder

    def load_sampler(
        self, version_id: int, path: str | None, base_model: str | None, tokenizer: str | None = None, seed: int = 0
    ) -> dict[str, Any]:
        """A sampler version from saved weights (a folder of `save_weights_for_sampler`, any HF or PEFT folder) or a base model."""
        loaded, version, spec = saving.load_for_sampling(path, base_model, tokenizer, seed)
        loaded.model.to(self.accelerator.device)
        decoder = make_decoder(loaded.model, dtype=self.sampler_dtype, kind=self.settings.sampler.kind)
        owner = self.saved_by.get(str(Path(path).resolve())) if path is not None else None
        self.versions[version_id] = SamplerVersion(decoder, loaded, version, None if owner is None else self.learners.get(owner))
        return {**self._info(loaded, spec), "version": version}

    def forget_version(self, version_id: int) -> None:
        self.versions.pop(version_id, None)

    def sample(self, version_id: int, requests: Sequence[Request]) -> tuple[dict[int, SampleResponse], dict[str, int]]:
        """This rank's responses by index and its engine's counters. Merged: all in the order of requests, counters summed.

        Requests are dealt out over the ranks by cost.
        """
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
        return dict(zip(mine, responses, strict=True)), asdict(engine.counters)

    def compute_logprobs(
        self, version_id: int, prompts: Sequence[list[int]], temperature: float = 1.0
    ) -> dict[int, list[float | None]]:
        """This rank's share by index; merged: all of them in the order of `prompts`."""
        mine = _share([len(p) for p in prompts])
        found = score(self.versions[version_id].decoder, [prompts[i] for i in mine], temperature)
        return dict(zip(mine, found, strict=True))

    # ------------------------------------------------------------------------------------------------------------ saving

    def save_state(
        self,
        model_id: int,
        path: str,
        metadata: Mapping[str, Any],
        ttl_seconds: float | None,
        beside: Mapping[str, int] | None = None,
    ) -> str:
        rng = self.objects.gather(torch.get_rng_state())
        others = {name: (self.learners[other], self.specs[other]) for name, other in (beside or {}).items()}
        saving.save_state(self.learners[model_id], self.specs[model_id], Path(path), rng, metadata, ttl_seconds, others)
        self.saved_by[str(Path(path).resolve())] = model_id
        return path

    def save_for_sampler(self, model_id: int, path: str, merged: bool, ttl_seconds: float | None, value_head: bool = False) -> str:
        saving.save_for_sampler(self.learners[model_id], self.specs[model_id], Path(path), merged, ttl_seconds, value_head)
        self.saved_by[str(Path(path).resolve())] = model_id
        return path

    def load_state(self, model_id: int, path: str, with_optimizer: bool) -> dict[str, Any]:
        state = saving.load_state(self.learners[model_id], Path(path), with_optimizer, distributed.rank())
        return state


def _merged(tables: Sequence[Mapping[int, Any]]) -> list[Any]:
    """The ranks' results by index, in order."""
    together = {i: value for table in tables for i, value in table.items()}
    return [together[i] for i in range(len(together))]


def _summed(tables: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    total: dict[str, float] = {}
    for table in tables:
        for name, value in table.items():
            total[name] = total.get(name, 0) + value
    return total


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
