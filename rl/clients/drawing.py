"""What a process that samples executes: the verbs on versions of weights, whoever learns them, here
or on other processes.
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
    """One rank's versions of weights that can be sampled from, and the verbs on them."""

    def __init__(self, settings: WorkerSettings, objects: distributed.ObjectGroup | None = None):
        """`objects`: how the ranks talk, where they do already (a further service of the same
        script).
        """
        without_cudnn()  # the learner's shapes change with every batch as well
        bf16 = settings.dtype == "bf16" or (settings.dtype == "auto" and torch.cuda.is_available())
        self.accelerator = make_accelerator(bf16=bf16, timeout_seconds=settings.timeout_seconds)
        self.objects = objects or distributed.ObjectGroup(settings.timeout_seconds)
        self.settings = settings
        self.bases = Bases(settings.share_bases, self.accelerator)
        self.team = distributed.team(settings.sampler.tp, settings.timeout_seconds)
        # what a team draws its first rank reports
        self.speaks = self.team is None or self.team.rank == 0
        self.sampler_dtype = torch.bfloat16 if bf16 else torch.float32
        self.learners: dict[int, Learner] = {}
        self.versions: dict[int, SamplerVersion] = {}
        # which learner wrote a folder, so that samples from it count as that learner's
        self.saved_by: dict[str, int] = {}
        self.streams: dict[int, Stream] = {}  # see rl.clients.slices
        self.kept = Kept()  # what engines leave to the next

    def forget_all(self) -> None:
        """Gives back what models took."""
        self.kept.release()

    @staticmethod
    def together(verb: str, parts: Sequence[Any]) -> Any:
        """The ranks' parts of a verb's result as what the driver gets; the first one's own where
        the others' say nothing new.
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
        return self.together(verb, parts)

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
            "sampler_tp": self.settings.sampler.tp,
        }

    def _share(self, costs: Sequence[int]) -> list[int]:
        """Which of the texts this rank's sampler reads, or draws from: a team's ranks the same."""
        return share(costs, self.settings.sampler.tp)

    def _base(self, key: Key) -> Decoder | None:
        """What samplers of adapters on that base share."""
        where, kind = self.accelerator.device, self.settings.sampler.kind
        return self.bases.sampler(
            key, lambda model: make_base(model, self.sampler_dtype, where, kind, self.team)
        )

    def _mixes(self, decoder: Decoder) -> int | None:
        """A number that versions have in common which can be drawn from in one batch; None of one
        that cannot.
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
        """A sampler version from saved weights (a folder of `save_weights_for_sampler`, any HF or
        PEFT folder) or a base model.
        """
        self.kept.release()  # for another model's weights
        stands_on: list[Key] = []

        def load(base: str, *, tokenizer: str | None = None, seed: int = 0) -> LoadedModel:
            stands_on.append((base, tokenizer, seed))
            return self.bases.load(base, tokenizer, seed, True)

        loaded, version, spec = saving.load_for_sampling(path, base_model, tokenizer, seed, load)
        where, kind = self.accelerator.device, self.settings.sampler.kind
        if self.team is None:
            loaded.model.to(where)
        under = self._base(stands_on[0]) if stands_on else None
        decoder = make_decoder(
            loaded.model,
            dtype=self.sampler_dtype,
            device=where,
            kind=kind,
            base=under,
            team=self.team,
        )
        if self.team is not None and not self.bases.shares:
            # whole, it was in host memory for as long as its part was taken
            loaded.model.to("meta")
        owner = self.saved_by.get(str(Path(path).resolve())) if path is not None else None
        learner = None if owner is None else self.learners.get(owner)
        self.versions[version_id] = SamplerVersion(
            decoder, loaded, version, learner, learned=learner is not None
        )
        return {**self._info(loaded, spec), "version": version, "mixes": self._mixes(decoder)}

    def forget_version(self, version_id: int) -> None:
        self.versions.pop(version_id, None)

    def sample(
        self, version_id: int, requests: Sequence[Request]
    ) -> tuple[dict[int, SampleResponse | ValueError], dict[str, int]]:
        """This rank's responses by index and its engine's counters. Merged: all in the order of
        requests, counters summed.

        Requests are dealt out over the ranks (or their teams) by cost. One that cannot run has its
        error in its place, and costs no other.
        """
        source = self.versions[version_id]
        mine = self._share(
            [len(r.prompt) + r.num_samples * (r.params.max_tokens or 1024) for r in requests]
        )
        engine = engine_of(
            source, self.settings.sampler, kept=self.kept, asked=[requests[i] for i in mine]
        )
        refused: dict[int, ValueError] = {}
        for i in mine:
            try:
                engine.add(requests[i])
            except ValueError as error:
                refused[i] = error.with_traceback(None)
        taken = [i for i in mine if i not in refused]
        responses = engine.run()
        done_with(engine)
        source.note(requests)
        if not self.speaks:
            return {}, {}
        return {**dict(zip(taken, responses, strict=True)), **refused}, asdict(engine.counters)

    def sample_slice(self, stream_id: int, version_id: int, asked: Asked) -> Slice:
        """A few steps of a stream, which begins with its first slice; what is drawn is of this
        version of the weights.

        In a mixed stream it is of those that each request names: `version_id` is any on the same
        base.
        """
        source, stream, limits = (
            self.versions.get(version_id),
            self.streams.get(stream_id),
            self.settings.sampler,
        )
        if source is None:
            raise UserError(
                "a stream's weights are gone, for its sampling client was released: switch it to another client, or close it"
            )
        if stream is None:
            stream = self.streams[stream_id] = Stream(
                engine_of(source, limits, asked.mixed, self.kept)
            )
        elif stream.version_id != version_id and not asked.mixed:
            stream.engine.change_weights(source.decoder, source.version)
        stream.version_id, arrived = version_id, [request for _, _, request in asked.arrived]
        if asked.mixed:
            let_in(stream, self.versions, arrived)
        else:
            source.note(arrived)
        part = run_slice(
            stream,
            asked,
            distributed.rank() // limits.tp,
            lambda: engine_of(source, limits, kept=self.kept),
        )
        return part if self.speaks else Slice()

    def unfinished(self, stream_id: int) -> dict[int, Request]:
        """This rank's requests of a stream that have not ended, by ticket, with what is drawn of
        them.
        """
        stream = self.streams.get(stream_id)
        return {} if stream is None or not self.speaks else stream.unfinished()

    def close_stream(self, stream_id: int) -> None:
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
        """This rank's share by index; merged: all of them in the order of `prompts`."""
        mine = self._share([len(p) for p in prompts])
        placed = [images[i] for i in mine] if images else ()
        found = score(
            self.versions[version_id].decoder, [prompts[i] for i in mine], temperature, placed
        )
        return dict(zip(mine, found, strict=True)) if self.speaks else {}
