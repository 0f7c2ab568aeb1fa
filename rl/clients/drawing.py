"""Execute the sampling verbs on weight versions, for learners in this process or on other
processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from rl.clients.bases import Bases, Key
from rl.clients.parts import merged, share, summed
from rl.clients.settings import WorkerSettings
from rl.clients.slices import Asked, Slice, Stream, run_slice
from rl.clients.versions import SamplerVersion, done_with, engine_of, let_in, max_context
from rl.errors import UserError
from rl.layers import width
from rl.learner import Learner, ModelSpec, saving
from rl.models import LoadedModel
from rl.ranks import distributed, make_accelerator
from rl.renderers import note_ends
from rl.sampler import Decoder, Kept, Request, make_base, make_decoder, score, without_cudnn
from rl.types import PlacedImage, SampleResponse


class Drawing:
    """Hold the weight versions of a rank that can be sampled from, and execute the verbs
    on them.
    """

    def __init__(self, settings: WorkerSettings, objects: distributed.ObjectGroup | None = None):
        """Set up the accelerator and the process groups. `objects`: an existing object group of the
        ranks, if another service of the script made it.
        """
        without_cudnn()  # shapes change with every batch, the learner's too
        bf16 = settings.dtype == "bf16" or (settings.dtype == "auto" and torch.cuda.is_available())
        self.accelerator = make_accelerator(bf16=bf16, timeout_seconds=settings.timeout_seconds)
        self.objects = objects or distributed.ObjectGroup(settings.timeout_seconds)
        self.settings = settings
        self.bases = Bases(settings.share_bases, self.accelerator)
        self.team = distributed.team(settings.sampler.tp, settings.timeout_seconds)
        # the first rank of a tensor-parallel group reports its samples
        self.speaks = self.team is None or self.team.rank == 0
        self.sampler_dtype = torch.bfloat16 if bf16 else torch.float32
        self.learners: dict[int, Learner] = {}
        self.versions: dict[int, SamplerVersion] = {}
        # learner that wrote each folder, so that samples from it count as that learner's
        self.saved_by: dict[str, int] = {}
        self.streams: dict[int, Stream] = {}  # see rl.clients.slices
        self.kept = Kept()  # KV cache memory that an engine leaves to the next engine

    def forget_all(self) -> None:
        """Free the memory of all models."""
        self.kept.release()

    @staticmethod
    def together(verb: str, parts: Sequence[Any]) -> Any:
        """Merge the ranks' results of a verb into the driver's result. Return rank 0's result if
        the others add nothing.
        """
        match verb:
            case "sample":
                return merged([responses for responses, _ in parts]), summed(
                    [counters for _, counters in parts]
                )
            case "compute_logprobs":
                return merged(parts)
            case "sample_slice":
                return Slice.together(parts)
            case "unfinished":
                return dict(
                    sorted((ticket, request) for part in parts for ticket, request in part.items())
                )
        return parts[0]

    def merge(self, verb: str, parts: Sequence[Any]) -> Any:
        """Merge the ranks' results of a verb; subclasses add verbs."""
        return self.together(verb, parts)

    def _info(self, loaded: LoadedModel, spec: ModelSpec) -> dict[str, Any]:
        """Return the model details that a client's `info` shows."""
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
            "sampler_tp": self.settings.sampler.tp,
        }

    def _share(self, costs: Sequence[int]) -> list[int]:
        """Return the indices of the texts that this rank's sampler scores or samples from. All
        ranks of a tensor-parallel group get the same indices.
        """
        return share(costs, self.settings.sampler.tp)

    def _base(self, key: Key) -> Decoder | None:
        """Return the decoder that samplers of adapters on that base share."""
        device, kind = self.accelerator.device, self.settings.sampler.kind
        return self.bases.sampler(
            key, lambda model: make_base(model, self.sampler_dtype, device, kind, self.team)
        )

    def _mixes(self, decoder: Decoder) -> int | None:
        """Return an id that is equal for versions which can be sampled in a single batch. Return
        None for a version that cannot be mixed.
        """
        return None if self.settings.sampler.router_replay else self.bases.number(decoder)

    def load_sampler(
        self,
        version_id: int,
        path: str | None,
        base_model: str | None,
        tokenizer: str | None = None,
        seed: int = 0,
    ) -> dict[str, Any]:
        """Create a sampler version from saved weights (a folder of `save_weights_for_sampler`, any
        HF or PEFT folder) or a base model. Return the model's details.
        """
        self.kept.release()  # memory for another model's weights
        base_keys: list[Key] = []

        def load(base: str, *, tokenizer: str | None = None, seed: int = 0) -> LoadedModel:
            base_keys.append((base, tokenizer, seed))
            return self.bases.load(base, tokenizer, seed, True)

        loaded, version, spec = saving.load_for_sampling(path, base_model, tokenizer, seed, load)
        device, kind = self.accelerator.device, self.settings.sampler.kind
        if self.team is None:
            loaded.model.to(device)
        base_decoder = self._base(base_keys[0]) if base_keys else None
        decoder = make_decoder(
            loaded.model,
            dtype=self.sampler_dtype,
            device=device,
            kind=kind,
            base=base_decoder,
            team=self.team,
        )
        if self.team is not None and not self.bases.shares:
            # the shard has been copied: free the full model in host memory
            loaded.model.to("meta")
        owner = self.saved_by.get(str(Path(path).resolve())) if path is not None else None
        learner = None if owner is None else self.learners.get(owner)
        self.versions[version_id] = SamplerVersion(
            decoder, loaded, version, learner, learned=learner is not None
        )
        return {**self._info(loaded, spec), "version": version, "mixes": self._mixes(decoder)}

    def forget_version(self, version_id: int) -> None:
        """Free a sampler version."""
        self.versions.pop(version_id, None)

    def sample(
        self, version_id: int, requests: Sequence[Request]
    ) -> tuple[dict[int, SampleResponse | ValueError], dict[str, int]]:
        """Return this rank's responses by index, and its engine's counters. Merged: all responses
        in request order, counters summed.

        Requests are distributed over the ranks (or their tensor-parallel groups) by cost. A request
        that cannot run yields its error as its response and does not affect the others.
        """
        source = self.versions[version_id]
        indices = self._share(
            [len(r.prompt) + r.num_samples * (r.params.max_tokens or 1024) for r in requests]
        )
        engine = engine_of(
            source, self.settings.sampler, kept=self.kept, asked=[requests[i] for i in indices]
        )
        errors: dict[int, ValueError] = {}
        for i in indices:
            try:
                engine.add(requests[i])
            except ValueError as error:
                errors[i] = error.with_traceback(None)
        accepted = [i for i in indices if i not in errors]
        responses = engine.run()
        done_with(engine)
        source.note(requests)
        if not self.speaks:
            return {}, {}
        return {**dict(zip(accepted, responses, strict=True)), **errors}, asdict(engine.counters)

    def sample_slice(self, stream_id: int, version_id: int, asked: Asked) -> Slice:
        """Run a few steps of a stream with this version of the weights. The stream is created at
        its first step request.

        In a mixed stream each request names its version: `version_id` is any version on the same
        base. Raises UserError if the version has been released.
        """
        source, stream, sampler_settings = (
            self.versions.get(version_id),
            self.streams.get(stream_id),
            self.settings.sampler,
        )
        if source is None:
            raise UserError(
                "the stream's weights have been freed, since its sampling client was released: "
                "switch the stream to another client, or close it"
            )
        if stream is None:
            stream = self.streams[stream_id] = Stream(
                engine_of(source, sampler_settings, asked.mixed, self.kept)
            )
        elif stream.version_id != version_id and not asked.mixed:
            stream.engine.change_weights(source.decoder, source.version)
        stream.version_id, arrived = version_id, [request for _, _, request in asked.arrived]
        if asked.mixed:
            let_in(stream, self.versions, arrived)
        else:
            source.note(arrived)
        output = run_slice(
            stream,
            asked,
            distributed.rank() // sampler_settings.tp,
            lambda: engine_of(source, sampler_settings, kept=self.kept),
        )
        return output if self.speaks else Slice()

    def unfinished(self, stream_id: int) -> dict[int, Request]:
        """Return this rank's unfinished requests of a stream by ticket, with the tokens sampled so
        far.
        """
        stream = self.streams.get(stream_id)
        return {} if stream is None or not self.speaks else stream.unfinished()

    def close_stream(self, stream_id: int) -> None:
        """Close a stream and free its engine."""
        stream = self.streams.pop(stream_id, None)
        if stream is not None:
            done_with(stream.engine)

    def compute_logprobs(
        self,
        version_id: int,
        prompts: Sequence[list[int]],
        temperature: float = 1.0,
        images: Sequence[Sequence[PlacedImage]] = (),
    ) -> dict[int, list[float | None]]:
        """Return the logprobs of this rank's share of `prompts` by index. Merged: all of them in
        the order of `prompts`.
        """
        indices = self._share([len(p) for p in prompts])
        placed_images = [images[i] for i in indices] if images else ()
        logprobs = score(
            self.versions[version_id].decoder,
            [prompts[i] for i in indices],
            temperature,
            placed_images,
        )
        return dict(zip(indices, logprobs, strict=True)) if self.speaks else {}
