"""What every rank executes: the verbs, on the models and sampler versions that live there.

A verb is a method of `Worker` whose name has no underscore. All ranks run the same verbs with the same arguments in the
same order; inside one, work is split and results come back to rank 0.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl.clients.bases import Bases, Key
from rl.clients.drawn import as_drawn, mean_temperature
from rl.clients.parts import merged, share, summed
from rl.clients.proof import Seen, look
from rl.clients.settings import WorkerSettings
from rl.clients.slices import Asked, Slice, Stream, run_slice
from rl.clients.versions import SamplerVersion, engine_of, let_in, max_context
from rl.errors import UserError
from rl.layers import width
from rl.learner import Learner, ModelSpec, check_kind, chosen, reads_in_parts, saving
from rl.losses import LossSpec, get_loss
from rl.models import LoadedModel, add_lora, add_value_head, load_unread
from rl.ranks import asks_for_fsdp, distributed, make_accelerator
from rl.renderers import note_ends
from rl.sampler import Decoder, Request, make_base, make_decoder, score, without_cudnn
from rl.types import AdamParams, Datum, PlacedImage, SampleResponse


class Worker:
    """One rank's models, sampler versions, and the verbs on them."""

    def __init__(self, settings: WorkerSettings, objects: distributed.ObjectGroup | None = None):
        """`objects`: how the ranks talk, where they do already (a further service of the same script)."""
        without_cudnn()  # the learner's shapes change with every batch as well
        bf16 = settings.dtype == "bf16" or (settings.dtype == "auto" and torch.cuda.is_available())
        self.accelerator = make_accelerator(bf16=bf16, timeout_seconds=settings.timeout_seconds)
        self.objects = objects or distributed.ObjectGroup(settings.timeout_seconds)
        self.settings = settings
        self.bases = Bases(settings.share_bases, self.accelerator)
        self.sampler_dtype = torch.bfloat16 if bf16 else torch.float32
        self.learners: dict[int, Learner] = {}
        self.specs: dict[int, ModelSpec] = {}
        self.stands_on: dict[int, Key] = {}
        self.versions: dict[int, SamplerVersion] = {}
        self.saved_by: dict[str, int] = {}  # which learner wrote a folder, so that samples from it count as that learner's
        self.streams: dict[int, Stream] = {}  # see rl.clients.slices
        self.latest: dict[int, Decoder] = {}  # per learner: the decoder whose frozen base later versions share

    def merge(self, verb: str, parts: Sequence[Any]) -> Any:
        """The ranks' parts of a verb's result as what the driver gets; rank 0's own where the others' say nothing new."""
        match verb:
            case "forward_backward":
                metrics = {"loss:sum": 0.0, **summed([sums for _, sums, _ in parts]), "temperature:mean": parts[0][2]}
                return merged([outputs for outputs, _, _ in parts]), metrics
            case "forward_backward_part":
                return {i: one for outputs, *_ in parts for i, one in outputs.items()}, summed([part[1] for part in parts]), *parts[0][2:]
            case "sample":
                return merged([responses for responses, _ in parts]), summed([counters for _, counters in parts])
            case "compute_logprobs":
                return merged(parts)
            case "prove":
                return Seen.together(parts)
            case "sample_slice":
                return Slice.together(parts)
            case "unfinished":
                return dict(sorted((ticket, request) for part in parts for ticket, request in part.items()))
        return parts[0]

    # ----------------------------------------------------------------------------------------------------------- models

    def create_model(self, model_id: int, spec: ModelSpec, state: str | None, with_optimizer: bool) -> dict[str, Any]:
        """Makes a learner from its spec; `state`: a checkpoint whose weights (and optimizer) it starts from."""
        with distributed.all_or_none(self.accelerator.device):  # a folder may be missing on another machine
            held_in = self._held_in(spec)
            check_kind(self.settings.learner.optimizer, self.accelerator.device, sharded=self._deepspeed or asks_for_fsdp())
            base, tokenizer = saving.base_of(spec, state)
            unread = load_unread(base, tokenizer=tokenizer) if reads_in_parts(self.accelerator) else None
            loaded = unread or self.bases.load(base, tokenizer, spec.seed, spec.lora is not None)
            loaded.name = spec.base_model
            if spec.lora is not None:
                loaded = add_lora(loaded, spec.lora)
            if spec.value_head:
                loaded = add_value_head(loaded)
            self.stands_on[model_id] = (base, tokenizer, spec.seed)
        info = {**self._info(loaded, spec), "base_dtype": held_in}  # before the weights are sharded
        learner = Learner(loaded, self.accelerator, self.settings.learner, "fp32" if self._deepspeed else held_in)  # it casts all itself
        self.learners[model_id], self.specs[model_id] = learner, spec
        if state is not None:
            self.load_state(model_id, state, with_optimizer)
        return {**info, "distributed_type": self.accelerator.distributed_type.value, "wrapped": type(learner.backend.wrapped).__name__}

    @property
    def _deepspeed(self) -> bool:
        return self.accelerator.distributed_type.value == "DEEPSPEED"

    def _held_in(self, spec: ModelSpec) -> str:
        bf16 = self.sampler_dtype == torch.bfloat16
        return chosen(spec.base_dtype, lora=spec.lora is not None, bf16=bf16, deepspeed=self._deepspeed)

    def _info(self, loaded: LoadedModel, spec: ModelSpec) -> dict[str, Any]:
        config = loaded.model.config.get_text_config().to_dict()
        parameters = sum(p.numel() for p in loaded.model.parameters())
        trainable = sum(p.numel() for p in loaded.model.parameters() if p.requires_grad)
        return {
            "base_model": spec.base_model,
            "arch": config.get("model_type", "unknown"),
            "lora_rank": spec.lora.rank if spec.lora else None,
            "lora_unadapted": loaded.unadapted,
            "value_head": spec.value_head,
            "vocab_size": loaded.vocab_size,
            "max_context": max_context(loaded),
            "hidden_size": width(loaded.model),
            "parameters": parameters,
            "trainable_parameters": trainable,
            "tokenizer": note_ends(loaded.tokenizer, loaded.eos_token_ids),
            "device": str(self.accelerator.device),
            "dtype": "bf16" if self.sampler_dtype == torch.bfloat16 else "fp32",
            "world": distributed.world(),
        }

    def forget_model(self, model_id: int) -> None:
        learner = self.learners.pop(model_id, None)
        if learner is not None:  # None where its creation failed
            learner.release()
        self.specs.pop(model_id, None)
        self.stands_on.pop(model_id, None)
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
        drawn_at: Sequence[float | None] | None = None,
        part: int | None = None,
    ) -> tuple[dict[int, dict[str, np.ndarray]], dict[str, float], float]:
        """This rank's outputs by datum index, its metric sums, the mean temperature. Merged: outputs in order, and metrics.

        `drawn_at`: the temperature at which each datum was drawn, where that is known. config's "temperature" overrides it.
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
        how = {"divisor": divisor, "backward": backward, "entropy": entropy, "adapters": adapters, "part": part}
        outputs, sums = learner.run(datums, loss, settings, temperature=temperatures, **how)  # type: ignore[arg-type]
        return outputs, sums, mean_temperature(temperatures or [1.0 if temperature is None else float(temperature)])

    def forward_backward_part(self, model_id: int, part: int, *call: Any) -> tuple[Any, dict[str, float], float, int]:
        """One micro-batch of such a call, and how many there are: outputs by datum index, metric sums, mean temperature."""
        return *self.forward_backward(model_id, *call, part=part), self.learners[model_id].parts  # type: ignore[misc]

    def optim_step(self, model_id: int, params: AdamParams) -> dict[str, float]:
        return self.learners[model_id].step(params)

    def scale_gradients(self, model_id: int, factor: float) -> None:
        self.learners[model_id].scale_gradients(factor)

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
            decoder = self._decoder_of(model_id)
        else:
            if any(v.decoder is decoder for v in self.versions.values()):  # somebody still samples from it
                decoder = decoder.fork()
            decoder.load_(learner.weights())
        self.latest[model_id] = decoder
        self.versions[version_id] = SamplerVersion(decoder, learner.loaded, learner.version, learner)
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()  # copies are queued; what is reported is when they are done
        return {"version": learner.version, "seconds": time.perf_counter() - begin, "mixes": self._mixes(decoder)}

    def snapshot_base(self, model_id: int, version_id: int) -> dict[str, Any]:
        """The base model under the learner's LoRA adapter: the adapter's B matrices are 0, the base weights those of its sampler."""
        begin = time.perf_counter()
        learner = self.learners[model_id]
        if model_id not in self.latest:
            self.latest[model_id] = self._decoder_of(model_id)
        decoder = self.latest[model_id].fork()
        shapes = {name: learner.parameter_shapes[name] for name in learner.trainable if ".lora_B." in name or ".lora_embedding_B." in name}
        decoder.load_((name, torch.zeros(shape)) for name, shape in shapes.items())
        self.versions[version_id] = SamplerVersion(decoder, learner.loaded, 0, None)
        return {"version": 0, "seconds": time.perf_counter() - begin, "mixes": self._mixes(decoder)}

    def _decoder_of(self, model_id: int) -> Decoder:
        learner, where, kind = self.learners[model_id], self.accelerator.device, self.settings.sampler.kind
        weights = learner.weights(frozen=True) if learner.shell is not learner.model else None
        base = self._base(self.stands_on[model_id]) if weights is None and learner.is_lora else None
        return make_decoder(learner.shell, dtype=self.sampler_dtype, device=where, kind=kind, weights=weights, base=base)

    def _base(self, key: Key) -> Decoder | None:
        """What samplers of adapters on that base share."""
        where, kind = self.accelerator.device, self.settings.sampler.kind
        return self.bases.sampler(key, lambda model: make_base(model, self.sampler_dtype, where, kind))

    def _mixes(self, decoder: Decoder) -> int | None:
        """A number that versions have in common which can be drawn from in one batch; None of one that cannot."""
        return None if self.settings.sampler.router_replay else self.bases.number(decoder)

    def load_sampler(
        self, version_id: int, path: str | None, base_model: str | None, tokenizer: str | None = None, seed: int = 0
    ) -> dict[str, Any]:
        """A sampler version from saved weights (a folder of `save_weights_for_sampler`, any HF or PEFT folder) or a base model."""
        stands_on: list[Key] = []

        def load(base: str, *, tokenizer: str | None = None, seed: int = 0) -> LoadedModel:
            stands_on.append((base, tokenizer, seed))
            return self.bases.load(base, tokenizer, seed, True)

        loaded, version, spec = saving.load_for_sampling(path, base_model, tokenizer, seed, load)
        loaded.model.to(self.accelerator.device)
        under = self._base(stands_on[0]) if stands_on else None
        decoder = make_decoder(loaded.model, dtype=self.sampler_dtype, kind=self.settings.sampler.kind, base=under)
        owner = self.saved_by.get(str(Path(path).resolve())) if path is not None else None
        self.versions[version_id] = SamplerVersion(decoder, loaded, version, None if owner is None else self.learners.get(owner))
        return {**self._info(loaded, spec), "version": version, "mixes": self._mixes(decoder)}

    def forget_version(self, version_id: int) -> None:
        self.versions.pop(version_id, None)

    def sample(self, version_id: int, requests: Sequence[Request]) -> tuple[dict[int, SampleResponse | ValueError], dict[str, int]]:
        """This rank's responses by index and its engine's counters. Merged: all in the order of requests, counters summed.

        Requests are dealt out over the ranks by cost. One that cannot run has its error in its place, and costs no other.
        """
        source = self.versions[version_id]
        mine = share([len(r.prompt) + r.num_samples * (r.params.max_tokens or 1024) for r in requests])
        engine = engine_of(source, self.settings.sampler)
        refused: dict[int, ValueError] = {}
        for i in mine:
            try:
                engine.add(requests[i])
            except ValueError as error:
                refused[i] = error.with_traceback(None)
        taken = [i for i in mine if i not in refused]
        responses = engine.run()
        source.note(requests)
        return {**dict(zip(taken, responses, strict=True)), **refused}, asdict(engine.counters)

    def sample_slice(self, stream_id: int, version_id: int, asked: Asked) -> Slice:
        """A few steps of a stream, which begins with its first slice; what is drawn is of this version of the weights.

        In a mixed stream it is of those that each request names: `version_id` is any on the same base.
        """
        source, stream = self.versions.get(version_id), self.streams.get(stream_id)
        if source is None:
            raise UserError("a stream's weights are gone, for its sampling client was released: switch it to another client, or close it")
        if stream is None:
            stream = self.streams[stream_id] = Stream(engine_of(source, self.settings.sampler, asked.mixed))
        elif stream.version_id != version_id and not asked.mixed:
            stream.engine.change_weights(source.decoder, source.version)
        stream.version_id, arrived = version_id, [request for _, _, request in asked.arrived]
        if asked.mixed:
            let_in(stream, self.versions, arrived)
        else:
            source.note(arrived)
        return run_slice(stream, asked, distributed.rank(), lambda: engine_of(source, self.settings.sampler))

    def unfinished(self, stream_id: int) -> dict[int, Request]:
        """This rank's requests of a stream that have not ended, by ticket, with what is drawn of them."""
        stream = self.streams.get(stream_id)
        return {} if stream is None else stream.unfinished()

    def close_stream(self, stream_id: int) -> None:
        self.streams.pop(stream_id, None)

    def compute_logprobs(
        self, version_id: int, prompts: Sequence[list[int]], temperature: float = 1.0, images: Sequence[Sequence[PlacedImage]] = ()
    ) -> dict[int, list[float | None]]:
        """This rank's share by index; merged: all of them in the order of `prompts`."""
        mine = share([len(p) for p in prompts])
        placed = [images[i] for i in mine] if images else ()
        found = score(self.versions[version_id].decoder, [prompts[i] for i in mine], temperature, placed)
        return dict(zip(mine, found, strict=True))

    def prove(self, model_id: int, version_id: int, datums: Sequence[Datum], temperature: float) -> Seen:
        """What learner and sampler make of the datums as they are, and with other weights; everything is as before afterwards."""
        return look(self.learners[model_id], self.versions[version_id].decoder, datums, temperature, share)

    # ------------------------------------------------------------------------------------------------------------ saving

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
        rng = self.objects.gather(torch.get_rng_state())
        others = {name: (self.learners[other], self.specs[other]) for name, other in (beside or {}).items()}
        words = saving.Words(metadata, dict(user_metadata or {}), overwrite)
        saving.save_state(self.learners[model_id], self.specs[model_id], Path(path), rng, words, ttl_seconds, others)
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
        words = saving.Words({}, dict(user_metadata or {}))
        saving.save_for_sampler(self.learners[model_id], self.specs[model_id], Path(path), merged, ttl_seconds, value_head, words)
        self.saved_by[str(Path(path).resolve())] = model_id
        return path

    def load_state(self, model_id: int, path: str, with_optimizer: bool) -> dict[str, Any]:
        state = saving.load_state(self.learners[model_id], Path(path), with_optimizer, distributed.rank())
        return state
