"""Execute the sampling verbs on weight versions, for learners in this process or on other
processes.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rl.distributed import collectives, make_accelerator, spans_machines
from rl.errors import UserError
from rl.layers import find_max_context, get_hidden_size
from rl.learner import Learner, ModelSpec, learner_checkpoint
from rl.models import LoadedModel
from rl.renderers import set_end_tokens
from rl.rewards import Score, ScoreTicket, ScoringTask
from rl.rollout import SampleScorer, open_sample_scorer
from rl.runtime.rank_settings import WorkerSettings
from rl.runtime.sampler_versions import (
    BaseKey,
    BaseModelCache,
    RankEngine,
    SamplerVersion,
    add_versions,
    make_version_engine,
)
from rl.runtime.stream_worker import StepOutput, StepRequest, WorkerStream
from rl.runtime.verb_table import SAMPLER, assign_indices, merge_by_index, verb
from rl.sampler import (
    BLOCK_SIZE,
    Decoder,
    IdleKVCachePool,
    MultiAdapterDecoder,
    SamplingRequest,
    disable_cudnn_attention,
    find_rope_switch,
    is_supported,
    make_base_decoder,
    make_decoder,
    score_sequences,
)
from rl.types import PlacedImage, SampleResponse, merge_counters
from rl.vllm import (
    AdapterCheck,
    ServerLaunch,
    ServerPool,
    StartedServer,
    VllmDecoder,
    VllmEngine,
    enables_adapters,
    enables_sleep,
    find_command,
    find_free_port,
    score_on_servers,
)

# A rank waits this share of a verb's time limit for the scores of its samples.
_WAIT_SHARE = 0.1


def load_base(decoder: Decoder, shapes: Mapping[str, Any]) -> Decoder:
    """Set the adapter's B matrices, of these shapes by name, to 0: the decoder is that of the base
    model.
    """
    names = [name for name in shapes if ".lora_B." in name or ".lora_embedding_B." in name]
    decoder.load_((name, torch.zeros(shapes[name])) for name in names)
    return decoder


class SamplingWorker:
    """Hold the weight versions of a rank that can be sampled from, and execute the verbs
    on them.
    """

    def __init__(self, settings: WorkerSettings, objects: collectives.ObjectGroup | None = None):
        """Set up the accelerator and the process groups. `objects`: an existing object group of the
        ranks, if another service of the script made it.
        """
        disable_cudnn_attention()  # shapes change with every batch, the learner's too
        bf16 = settings.dtype == "bf16" or (settings.dtype == "auto" and torch.cuda.is_available())
        self.accelerator = make_accelerator(bf16=bf16, timeout_seconds=settings.timeout_seconds)
        self.objects = objects or collectives.ObjectGroup(settings.timeout_seconds)
        self.settings = settings
        self.base_models = BaseModelCache(settings.share_bases)
        self.tp_group = collectives.get_rank_group(settings.sampler.tp, settings.timeout_seconds)
        # the first rank of a tensor-parallel group reports its samples
        self.reports_results = self.tp_group is None or self.tp_group.rank == 0
        self.sampler_dtype = torch.bfloat16 if bf16 else torch.float32
        # vLLM servers, which then sample
        self.server_pool = self._connect_servers() if settings.sampler.kind == "vllm" else None
        self.learners: dict[int, Learner] = {}
        self.versions: dict[int, SamplerVersion] = {}
        self.streams: dict[int, WorkerStream] = {}  # see rl.runtime.stream_worker
        self.sample_scorers: dict[int, SampleScorer] = {}  # those that this rank could open
        # KV cache memory that an engine leaves to the next engine
        self.kv_cache_pool = IdleKVCachePool()

    def _connect_servers(self) -> ServerPool:
        """Return the vLLM servers of the settings, or one that the run starts with the first
        weights. Raises UserError if one cannot be used.
        """
        sampler = self.settings.sampler
        sleeps = not sampler.urls and enables_sleep(sampler.command, self._is_cuda)
        port = 0 if sampler.urls else find_free_port()
        nonce, port = self.objects.broadcast_verb((secrets.token_hex(4), port))
        server = None
        if not sampler.urls:
            with collectives.all_or_none(self.accelerator.device):
                launch = self._make_server_launch(sleeps)
            server = StartedServer(
                port,
                sampler.request_seconds,
                launch,
                enables_adapters(sampler.command),
                sampler.lora_rank,
            )
        return ServerPool(
            sampler.urls,
            nonce,
            folder=sampler.folder,
            request_seconds=sampler.request_seconds,
            max_rows=sampler.max_rows,
            started_server=server,
            sleeps=sleeps,
            needs_experts=sampler.router_replay,
            needs_adapters=self.settings.share_bases,
        )

    def _make_server_launch(self, sleeps: bool) -> ServerLaunch | None:
        """Return how rank 0 starts a vLLM server, None on other ranks. Raises UserError if it
        cannot.
        """
        sampler, cuda = self.settings.sampler, self._is_cuda
        if spans_machines():
            raise UserError(
                "sampler vllm starts a server on one machine, and this launch has processes on "
                "several: start servers and set sampler_url (docs/vllm.md)"
            )
        if collectives.rank() != 0:
            return None
        dtype = "bfloat16" if self.sampler_dtype == torch.bfloat16 else "float32"
        command = find_command(sampler.command)
        return ServerLaunch(
            command, dtype, sampler.max_rows, sampler.memory, cuda, sampler.router_replay, sleeps
        )

    @property
    def _is_cuda(self) -> bool:
        return self.accelerator.device.type == "cuda"

    def _sleep_servers(self) -> None:
        """Let the vLLM server of the run free its memory for the learner, unless samples of a
        stream may be in flight.
        """
        if self.server_pool is not None and self.server_pool.can_sleep and not self.streams:
            with collectives.all_or_none(self.accelerator.device):  # no rank learns before
                self.server_pool.sleep()

    def _make_server_decoder(
        self,
        loaded: LoadedModel,
        learner_id: Hashable,
        num_parameters: int,
        base: VllmDecoder | None = None,
    ) -> VllmDecoder:
        """Return a decoder for the vLLM servers, without weights. `base`: of the model below its
        adapter.
        """
        assert self.server_pool is not None
        self.server_pool.num_parameters = max(self.server_pool.num_parameters, num_parameters)
        sizes = loaded.vocab_size, find_max_context(loaded.model)
        return VllmDecoder(self.server_pool, *sizes, learner_id, base)

    def _write_server_weights(
        self,
        decoder: VllmDecoder,
        model: Any,
        tokenizer: Any,
        version: int,
        check: AdapterCheck | None = None,
        base_only: bool = False,
    ) -> None:
        """Write the weights of a model, which rank 0 holds in full (or its adapter), for the vLLM
        servers. `base_only`: without its adapter.
        """

        def write(folder: Path) -> None:
            merged = decoder.base_decoder is None
            learner_checkpoint.write_model(
                model, tokenizer, folder, merged=merged, base_only=base_only
            )

        decoder.replace_weights(write if collectives.rank() == 0 else None, version, check)

    def _load_server_weights(self, decoder: Decoder) -> None:
        """Let the vLLM servers load the weights of a decoder, unless they hold them."""
        if not isinstance(decoder, VllmDecoder):
            return
        pool, weights_id = decoder.pool, decoder.weights_id
        # rank 0 may have seen a server fail
        if self.objects.broadcast_verb(pool.is_resident(weights_id)):
            return
        # of each server: whether it has the weights, and its limits
        servers: tuple[list[bool], list[tuple[int, int]]] = ([], [])
        used = (
            self.objects.gather(pool.find_used_adapters())
            if decoder.base_decoder is not None
            else None
        )
        with collectives.all_or_none(self.accelerator.device):
            if collectives.rank() == 0:
                assert decoder.weights is not None
                names = {name for part in used or () for name in part}
                loads = pool.load_weights(decoder.weights, names)
                limits = [(server.max_context, server.max_samples) for server in pool.servers]
                servers = (loads, limits)
        pool.set_weights(weights_id, *self.objects.broadcast_verb(servers))

    def _send_saved_weights(
        self, loaded: LoadedModel, version_id: int, version: int
    ) -> VllmDecoder:
        """Load saved weights into the vLLM servers and check them; return a decoder. Raises
        UserError if the servers' logprobs differ from those of the model.
        """
        # a negative id is never that of a learner
        num_parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
        decoder = self._make_server_decoder(loaded, -1 - version_id, num_parameters)

        def compute_logprobs(tokens: list[int]) -> list[float]:
            ids = torch.tensor([tokens])
            with torch.inference_mode():
                logprobs = loaded.model(ids).logits[0, :-1].float().log_softmax(-1)
            return logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()

        with collectives.all_or_none(self.accelerator.device):
            self._write_server_weights(decoder, loaded.model, loaded.tokenizer, version)
        self._load_server_weights(decoder)
        with collectives.all_or_none(self.accelerator.device):
            if collectives.rank() == 0:
                decoder.pool.check_scores(decoder.weights_id, compute_logprobs)
        return decoder

    def free_all(self) -> None:
        """Free the memory of all models, send no further requests to vLLM servers, and end the
        server that the run started.
        """
        self.kv_cache_pool.release()
        for scorer_id in list(self.sample_scorers):
            self.close_scorer(scorer_id)
        if self.server_pool is not None:
            self.server_pool.close()

    def _describe_model(self, loaded: LoadedModel, spec: ModelSpec) -> dict[str, Any]:
        """Return the model details that a client's `info` shows."""
        config = loaded.model.config.get_text_config().to_dict()
        parameters = sum(p.numel() for p in loaded.model.parameters())
        trainable = sum(p.numel() for p in loaded.model.parameters() if p.requires_grad)
        return {
            "base_model": spec.base_model,
            "arch": config.get("model_type", "unknown"),
            "lora_rank": spec.lora.rank if spec.lora else None,
            "lora_unadapted": loaded.unadapted_share,
            "value_head": spec.value_head,
            "vocab_size": loaded.vocab_size,
            "max_context": find_max_context(loaded.model),
            **self._describe_limits(loaded),
            "hidden_size": get_hidden_size(loaded.model),
            "parameters": parameters,
            "trainable_parameters": trainable,
            "tokenizer": set_end_tokens(loaded.tokenizer, loaded.eos_token_ids),
            "device": str(self.accelerator.device),
            "dtype": "bf16" if self.sampler_dtype == torch.bfloat16 else "fp32",
            "world": collectives.world(),
            "sampler": self.settings.sampler.kind,
            "sampler_tp": self.settings.sampler.tp,
        }

    def _describe_limits(self, loaded: LoadedModel) -> dict[str, Any]:
        """Return the limits of a sample's length besides the context, for `find_length_limit`. vLLM
        servers have their own limits.
        """
        settings = self.settings.sampler
        if settings.kind == "vllm":
            return {}
        may_page = settings.cache == "paged" or (
            settings.cache == "auto" and self.accelerator.device.type == "cuda"
        )
        unit = BLOCK_SIZE if may_page else 1
        return {
            "kv_cache_tokens": settings.kv_cache_tokens // unit * unit,
            # the generic decoder stores a prompt, and a copy for each row
            "copies_prompts": settings.kind == "hf" or not is_supported(loaded.model),
            "length_switch": find_rope_switch(loaded.model),
        }

    def _assign_indices(self, costs: Sequence[int]) -> list[int]:
        """Return the indices of the texts that this rank's sampler scores or samples from. All
        ranks of a tensor-parallel group get the same indices.
        """
        size = self.settings.sampler.tp
        return assign_indices(costs, collectives.world() // size)[collectives.rank() // size]

    def _make_decoder(
        self, model: Any, base_key: BaseKey | None = None, weights: Any = None
    ) -> Decoder:
        """Return a new decoder of a model, over the decoder that adapters on its base share, if
        `base_key` is set. `weights`: see `make_decoder`.
        """
        kind, group = self.settings.sampler.local_kind, self.tp_group
        options = (self.sampler_dtype, self.accelerator.device, kind)
        base = base_key and self.base_models.get_base_decoder(
            base_key, lambda model: make_base_decoder(model, *options, group)
        )
        return make_decoder(model, *options, weights, base, group)

    def _add_version(
        self, version_id: int, version: SamplerVersion, begin: float, mixes: int | None = None
    ) -> dict[str, Any]:
        """Add a sampler version. Return its version of the learner, the seconds since `begin`, and
        the group of versions that it mixes with.
        """
        self.versions[version_id] = version
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()  # copies are asynchronous: measure until they have finished
        seconds = time.perf_counter() - begin
        return {"version": version.version, "seconds": seconds, "mixes": mixes}

    @verb(SAMPLER, version_arg=0, router_method="load_sampler")
    def load_sampler(
        self,
        version_id: int,
        path: str | None,
        base_model: str | None,
        tokenizer: str | None = None,
        seed: int = 0,
        prefers_servers: bool = False,
        saved_by: int | None = None,
    ) -> dict[str, Any]:
        """Create a sampler version from saved weights (a folder of `save_weights_for_sampler`, any
        HF or PEFT folder) or a base model. Return the model's details.

        It is sampled from in this process, also if vLLM servers sample from the learner's weights,
        unless `prefers_servers`. `saved_by`: the model that wrote the folder, so that samples from
        it count as that model's.
        """
        self._free_idle_caches()  # memory for another model's weights
        local_kind = self.settings.sampler.local_kind
        base_keys: list[BaseKey] = []

        def load(base: str, *, tokenizer: str | None = None, seed: int = 0) -> LoadedModel:
            base_keys.append((base, tokenizer, seed))
            return self.base_models.load(base, tokenizer, seed, True)

        loaded, version, spec = learner_checkpoint.load_for_sampling(
            path, base_model, tokenizer, seed, load
        )
        on_servers = prefers_servers and self.server_pool is not None
        if on_servers:
            decoder: Decoder = self._send_saved_weights(loaded, version_id, version)
        else:
            if self.tp_group is None:
                loaded.model.to(self.accelerator.device)
            decoder = self._make_decoder(loaded.model, base_keys[0] if base_keys else None)
        if not self.base_models.enabled:
            loaded.model.to("meta")  # the decoder, or the servers, have copied the weights
        learner = None if saved_by is None else self.learners.get(saved_by)
        self.versions[version_id] = SamplerVersion(
            decoder, loaded, version, learner, learned=saved_by is not None
        )
        return {
            **self._describe_model(loaded, spec),
            "sampler": self.settings.sampler.kind if on_servers else local_kind,
            "version": version,
            "mixes": self.base_models.find_mix_group(decoder),
        }

    @verb(SAMPLER)
    def set_cache_size(self, tokens: int) -> None:
        """Set the size of the KV cache, in tokens, of engines that are made from now on."""
        sampler = replace(self.settings.sampler, kv_cache_tokens=tokens)
        self.settings = replace(self.settings, sampler=sampler)

    @verb(SAMPLER, version_arg=0, is_cleanup=True)
    def free_version(self, version_id: int) -> None:
        """Free a sampler version."""
        self.versions.pop(version_id, None)

    @verb(
        SAMPLER,
        lambda parts: (
            merge_by_index([p[0] for p in parts]),
            merge_counters([p[1] for p in parts]),
        ),
        version_arg=0,
        get_params=lambda arguments: [request.params for request in arguments[1]],
    )
    def sample(
        self, version_id: int, requests: Sequence[SamplingRequest]
    ) -> tuple[dict[int, SampleResponse | ValueError], dict[str, int]]:
        """Return this rank's responses by index, and its engine's counters. Merged: all responses
        in request order, counters summed.

        Requests are distributed over the ranks (or their tensor-parallel groups) by cost. A request
        that cannot run yields its error as its response and does not affect the others. Samples of
        a request with `scoring` are scored here, if this rank has opened the scorer; they have
        tickets (`take_scores`) if that takes longer than a share of the verb's time limit.
        """
        source = self.versions[version_id]
        indices = self._assign_indices(
            [len(r.prompt) + r.num_samples * (r.params.max_tokens or 1024) for r in requests]
        )
        self._load_server_weights(source.decoder)
        engine = make_version_engine(
            source,
            self.settings.sampler,
            kv_cache_pool=self.kv_cache_pool,
            requests=[requests[i] for i in indices],
        )
        errors: dict[int, ValueError] = {}
        numbers: dict[int, SamplingRequest] = {}  # requests by the engine's request id
        for i in indices:
            try:
                numbers[engine.add(requests[i])] = requests[i]
            except ValueError as error:
                errors[i] = error.with_traceback(None)
        accepted = [i for i in indices if i not in errors]
        with self._score_samples(_WAIT_SHARE * self.settings.timeout_seconds):
            responses = engine.run(
                lambda done: self._begin_scoring(numbers[done.request_id].scoring, done.response)
            )
            engine.close()
        source.report_params(requests)
        if not self.reports_results:
            return {}, {}
        return {**dict(zip(accepted, responses, strict=True)), **errors}, asdict(engine.counters)

    def _begin_scoring(self, task: ScoringTask | None, response: object) -> None:
        """Begin to score the samples of a finished request, if this rank has opened the scorer of
        its task.
        """
        scorer = None if task is None else self.sample_scorers.get(task.scorer_id)
        if task and scorer and self.reports_results and isinstance(response, SampleResponse):
            scorer.submit(task, response.sequences)

    @contextmanager
    def _score_samples(self, seconds: float | None) -> Iterator[None]:
        """Give the samples that finish meanwhile their scores or tickets: see
        `SampleScorer.hand_over`.
        """
        try:
            yield
            for scorer in self.sample_scorers.values():
                scorer.hand_over(seconds)
        finally:
            for scorer in self.sample_scorers.values():
                scorer.drop_pending()

    @verb(SAMPLER, lambda parts: [part for part in parts if part is not None])
    def name_machine(self) -> str | None:
        """Return the name of this machine. Merged: those of the ranks that report samples."""
        return socket.gethostname() if self.reports_results else None

    @verb(SAMPLER, lambda parts: [part for part in parts if part is not None])
    def open_scorer(
        self, scorer_id: int, packed: bytes, machines: Sequence[str]
    ) -> tuple[str, str | None] | None:
        """Open a scorer of this rank's samples. Return the name of this machine, and the reason if
        the reward cannot be loaded here. Merged: those of the ranks that report samples.

        `machines`: what `name_machine` returns; ranks of a machine divide its reward workers.
        """
        if not self.reports_results:
            return None
        machine = socket.gethostname()
        local = -(-int(os.environ.get("LOCAL_WORLD_SIZE", "1")) // self.settings.sampler.tp)
        ranks = min(local, machines.count(machine))  # machines may have the same name
        scorer, reason = open_sample_scorer(packed, self.objects.rank, ranks)
        if scorer is not None:
            self.sample_scorers[scorer_id] = scorer
        return machine, reason

    @verb(
        SAMPLER,
        lambda parts: {ticket: s for part in parts for ticket, s in part.items()},
        is_cleanup=True,  # it comes often, and would cut up batches of sample requests
    )
    def take_scores(
        self, scorer_id: int, tickets: Sequence[ScoreTicket]
    ) -> dict[ScoreTicket, Score | None]:
        """Return the scores of this rank's samples with these tickets, and with those of earlier
        calls, as far as they are computed. Merged: those of all ranks.
        """
        scorer = self.sample_scorers.get(scorer_id)
        return {} if scorer is None else scorer.take_scores(tickets)

    @verb(SAMPLER, is_cleanup=True)
    def close_scorer(self, scorer_id: int) -> None:
        """Stop the reward workers of a scorer."""
        scorer = self.sample_scorers.pop(scorer_id, None)
        if scorer is not None:
            scorer.close()

    @verb(
        SAMPLER,
        StepOutput.merge,
        version_arg=1,
        get_params=lambda arguments: [r.params for _, _, r in arguments[2].new_requests],
    )
    def run_steps(self, stream_id: int, version_id: int, step_request: StepRequest) -> StepOutput:
        """Run a few steps of a stream with this version of the weights. The stream is created at
        its first step request.

        In a mixed stream each request names its version: `version_id` is any version on the same
        base. Samples of a request with `scoring` have a ticket of their score (`take_scores`): they
        do not wait for it, so that a stream's steps do not depend on the time of rewards. Raises
        UserError if the version has been released.
        """
        source = self.versions.get(version_id)
        stream = self.streams.get(stream_id)
        sampler_settings = self.settings.sampler
        if source is None:
            raise UserError(
                "the stream's weights have been freed, since its sampling client was released: "
                "switch the stream to another client, or close it"
            )
        new_engine = partial(
            make_version_engine,
            source,
            sampler_settings,
            step_request.mixed,
            self.kv_cache_pool,
        )
        if stream is None:
            stream = self.streams[stream_id] = WorkerStream(new_engine())
        elif stream.version_id != version_id and not step_request.mixed:
            if isinstance(source.decoder, VllmDecoder) != isinstance(stream.engine, VllmEngine):
                raise UserError(
                    "a stream cannot switch between the policy's weights, which vLLM servers hold, "
                    "and weights that are sampled from in this process: open another stream"
                )
            self._load_server_weights(source.decoder)  # before samples name a new adapter
            stream.engine.change_weights(source.decoder, source.version)
        self._load_server_weights(source.decoder)
        stream.version_id = version_id
        arrived = [request for _, _, request in step_request.new_requests]
        if step_request.mixed:
            add_versions(stream.engine, self.versions, arrived)
        else:
            source.report_params(arrived)

        def make_engine(unfinished: Sequence[SamplingRequest]) -> RankEngine:
            engine = new_engine()
            if step_request.mixed:
                add_versions(engine, self.versions, [*unfinished, *arrived])
            return engine

        rank = collectives.rank() // sampler_settings.tp
        with self._score_samples(None):
            output = stream.run(step_request, rank, make_engine, self._begin_scoring)
        return output if self.reports_results else StepOutput()

    @verb(SAMPLER, lambda parts: dict(sorted(item for part in parts for item in part.items())))
    def unfinished(self, stream_id: int) -> dict[int, SamplingRequest]:
        """Return this rank's unfinished requests of a stream by ticket, with the tokens sampled so
        far.
        """
        stream = self.streams.get(stream_id)
        return {} if stream is None or not self.reports_results else stream.unfinished()

    def _is_in_use(self, decoder: Decoder) -> bool:
        """Return whether a version has a decoder, or a mixed stream, which samples to the end of a
        request from weights that were freed meanwhile.
        """
        mixed = [
            used
            for stream in self.streams.values()
            if isinstance(stream.engine.decoder, MultiAdapterDecoder)
            for used in stream.engine.decoder.decoders.values()
        ]
        versions = (version.decoder for version in self.versions.values())
        return any(used is decoder for used in (*versions, *mixed))

    def _free_idle_caches(self) -> None:
        """Free the KV caches that no request uses. The next request of a stream makes another."""
        for stream_id, stream in list(self.streams.items()):
            if not stream.engine.busy:
                self.close_stream(stream_id)
        self.kv_cache_pool.release()

    @verb(SAMPLER, is_cleanup=True)
    def close_stream(self, stream_id: int) -> None:
        """Close a stream and free its engine."""
        stream = self.streams.pop(stream_id, None)
        if stream is not None:
            stream.engine.close()

    @verb(SAMPLER, merge_by_index, version_arg=0)
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
        indices = self._assign_indices([len(p) for p in prompts])
        placed_images = [images[i] for i in indices] if images else ()
        decoder, texts = self.versions[version_id].decoder, [prompts[i] for i in indices]
        if isinstance(decoder, VllmDecoder):
            self._load_server_weights(decoder)
            logprobs = score_on_servers(decoder, texts, temperature, placed_images)
        else:
            logprobs = score_sequences(decoder, texts, temperature, placed_images)
        return dict(zip(indices, logprobs, strict=True)) if self.reports_results else {}
