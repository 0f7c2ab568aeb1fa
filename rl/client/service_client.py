"""Provide ServiceClient, the entry point of a script: it creates training and sampling clients that
live in this process.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from rl import types
from rl.client.api_future import APIFuture, make_async, make_awaited, make_completed
from rl.client.classifier_client import ClassifierClient
from rl.client.custom_loss import LossHandle, PerDatumLossFn
from rl.client.rest_client import RestClient, list_server_capabilities, refuse_base_url
from rl.client.sampling_client import SamplingClient
from rl.client.scorer_handle import SampleScorerHandle
from rl.client.service_context import ServiceContext, check_user_metadata, expand_path
from rl.client.training_client import TrainingClient
from rl.client.training_config import TrainingConfig
from rl.distributed import (
    check_context_parallel,
    check_expert_parallel,
    check_roles,
    check_tensor_parallel,
    end_process_at_exit,
    rank_name,
)
from rl.errors import RankLost, UserError
from rl.learner import ModelSpec, learner_checkpoint
from rl.runtime import Driver, WorkerSettings, is_driver, serve_verbs
from rl.types import LoraConfig
from rl.types.number_checks import validate_integer

MAX_RANK = 4096
# alpha of every adapter on Tinker, for any rank, so that a learning rate suits all ranks
TINKER_ALPHA = 32.0


class ServiceClient:
    """Create clients on rank 0. On every other rank, serve inside the first constructor and exit
    when rank 0's script ends.

    A script may create several, consecutively or concurrently: each has separate models, seeds and
    settings.

        user_metadata             string pairs, saved with every checkpoint
        project_id, display_name  for a hosted service's pages; no effect here
        output_dir                folder that `save_*` write to; default: WHETSTONE_OUTPUT_DIR, or
                                  runs/<script>-<time>. Created at the first write.
        seed                      seed of samples requested without a seed
        settings                  device settings: precision, micro-batch and KV cache budgets
    """

    def __init__(
        self,
        user_metadata: Mapping[str, str] | None = None,
        project_id: str | None = None,
        *,
        display_name: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        default_headers_overrides: Mapping[str, str] | None = None,
        output_dir: str | Path | None = None,
        seed: int = 0,
        settings: WorkerSettings | None = None,
    ):
        refuse_base_url(base_url)
        metadata = check_user_metadata(user_metadata)
        self.display_name = display_name
        validate_integer("seed", seed, "a whole number")
        settings = settings or WorkerSettings()
        check_roles(settings.sampler_ranks)
        check_tensor_parallel(settings.sampler.tp, settings.sampler_ranks)
        check_context_parallel(settings.learner.context_parallel_size, settings.sampler_ranks)
        check_expert_parallel(settings.learner.expert_parallel_size, settings.sampler_ranks)
        if not is_driver():
            try:
                serve_verbs(settings)
            except RankLost as lost:
                print(f"{rank_name()} ends: {lost}", file=sys.stderr, flush=True)
                sys.exit(1)
            end_process_at_exit()
            sys.exit(0)
        self._driver = Driver(settings)
        script = Path(sys.argv[0]).stem or "interactive"
        default = Path("runs", f"{script}-{time.strftime('%Y%m%d-%H%M%S')}")
        folder = str(output_dir or os.environ.get("WHETSTONE_OUTPUT_DIR") or default)
        self._context = ServiceContext(self._driver, folder, seed, metadata)

    @property
    def output_dir(self) -> str:
        """Return the folder that `save_*` write to."""
        return self._context.output_dir

    @output_dir.setter
    def output_dir(self, folder: str | Path) -> None:
        self._context.output_dir = os.path.expanduser(folder)

    @property
    def seed(self) -> int:
        """Return the seed of samples requested without a seed."""
        return self._context.seed

    @property
    def user_metadata(self) -> Mapping[str, str]:
        """Return the string pairs that are saved with every checkpoint."""
        return self._context.user_metadata

    @property
    def closed(self) -> bool:
        """Return whether verbs can no longer run: the service is closed, or a rank is lost."""
        return self._driver.closed

    def set_cache_size(self, tokens: int) -> None:
        """Set the size of each device's KV cache, in tokens, for samples requested from now on."""
        self._driver.submit("set_cache_size", tokens).result()

    def count_machines(self) -> tuple[int, int]:
        """Return the number of machines of the launch with ranks that sample, and of all."""
        router = self._driver.router
        sampler_ranks = 0 if router is None else router.sampler_ranks
        world = int(os.environ.get("WORLD_SIZE", "1")) + sampler_ranks
        machines = -(-world // int(os.environ.get("LOCAL_WORLD_SIZE", str(world))))
        if router is None:
            return machines, machines
        return len(set(self._driver.submit("name_machine").result())), machines

    def open_scorer(self, packed: bytes) -> SampleScorerHandle:
        """Let every rank score the samples of requests with `scoring` (an extension). `packed`: of
        `ScorerSettings.pack`.
        """
        return SampleScorerHandle(self._driver, self._context.next_scorer_id(), packed)

    # ------------------------------------------------------------------------------------- training

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool | None = True,
        user_metadata: Mapping[str, str] | None = None,
        optimizer: types.OptimizerConfig | None = None,
        *,
        alpha: float | None = TINKER_ALPHA,
        train_vision: bool = False,
        train_experts: bool = False,
        tokenizer: str | None = None,
        model_seed: int = 0,
        value_head: bool = False,
        base_dtype: str = "auto",
    ) -> TrainingClient:
        """Create a client that trains a LoRA adapter on `base_model` (a hub name, a folder,
        tiny:<preset>). The base stays frozen.

        `train_unembed`: adapt the output head, as Tinker does by default. None: unless the model
        ties it to its embedding, where vLLM serves no adapter on it.
        `user_metadata`: string pairs saved with its checkpoints. `optimizer`: only AdamW is
        supported. `alpha` (an extension): the adapter is scaled by alpha / rank. Default 32, as on
        Tinker; None: alpha = rank. `value_head` (an extension): add a scalar output per position,
        trained in full; see `forward`. `base_dtype` (an extension): dtype of the frozen matrices,
        "auto", "fp32", "bf16" or "4bit". `train_vision` (an extension): also adapt the vision tower
        of a vision-language model; `train_experts`: also adapt experts that are stored in a single
        tensor. Raises UserError if nothing would be trained.
        """
        validate_integer(
            "rank",
            rank,
            f"a whole number from 1 to {MAX_RANK}, such as 32",
            minimum=1,
            maximum=MAX_RANK,
        )
        if not (train_mlp or train_attn or train_unembed is not False or train_experts):
            raise UserError(
                "a LoRA that adapts no matrix cannot be trained: set train_attn, train_mlp or "
                "train_unembed"
            )
        lora = LoraConfig(
            rank, seed, train_mlp, train_attn, train_unembed, alpha, train_vision, train_experts
        )
        spec = ModelSpec(
            _check_base_model(base_model),
            tokenizer,
            lora,
            model_seed,
            value_head,
            base_dtype=base_dtype,
        )
        return self._create_client(spec, user_metadata=user_metadata, optimizer=optimizer)

    def create_full_training_client(
        self,
        base_model: str,
        *,
        tokenizer: str | None = None,
        seed: int = 0,
        value_head: bool = False,
    ) -> TrainingClient:
        """Create a client that trains all weights of `base_model` (an extension). `seed`: of the
        weights of a tiny:<preset>.
        """
        return self._create_client(
            ModelSpec(_check_base_model(base_model), tokenizer, None, seed, value_head)
        )

    def create_training_client(
        self, config: TrainingConfig, checkpoint_id: str | None = None
    ) -> TrainingClient:
        """Create a client as `config` describes, with fresh weights or the weights and optimizer
        that `save_state` wrote to `checkpoint_id` (an extension).

        `checkpoint_id`: a checkpoint's folder (`.artifact_id` of what `save_state` returned), or
        its name in this service's output folder. Raises UserError if the checkpoint's model differs
        from the config's.
        """
        if not isinstance(config, TrainingConfig):
            raise UserError(
                f"create_training_client takes a TrainingConfig(model_ref=...), got {config!r}"
            )
        adapter = config.lora_config and LoraConfig(**asdict(config.lora_config))
        if adapter is not None and adapter.seed is None:
            adapter = replace(adapter, seed=config.seed)
        spec = ModelSpec(
            config.model_ref,
            config.tokenizer,
            adapter,
            config.seed,
            config.value_head,
            base_dtype=config.base_dtype,
        )
        if checkpoint_id is None:
            return self._create_client(spec)
        local = Path(self.output_dir, "checkpoints", checkpoint_id)
        path = str(local if local.is_dir() else checkpoint_id)
        saved = _read_spec(path)
        if adapter is not None and adapter.train_unembed is None and saved.lora is not None:
            adapter = replace(adapter, train_unembed=saved.lora.train_unembed)
            spec = replace(spec, lora=adapter)
        _check_same_model(spec, saved, path)
        return self._create_client(spec, path, True)

    def create_training_client_from_state(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: Mapping[str, str] | None = None,
        weights_access_token: str | None = None,
        optimizer: types.OptimizerConfig | None = None,
        *,
        value_head: bool | None = None,
        base_dtype: str | None = None,
    ) -> TrainingClient:
        """Create a client with the weights of a checkpoint (a folder of `save_state` or
        `save_weights_for_sampler`) and a fresh optimizer.

        `base_model`: the base of an adapter, if it differs from the checkpoint's. A folder needs no
        token. `value_head`: with a value head (fresh, if the saved model has none) or without;
        None: as saved. `base_dtype`: likewise.
        """
        spec = _read_spec(path, base_model, base_dtype)
        spec = spec if value_head is None else replace(spec, value_head=value_head)
        return self._create_client(spec, str(path), False, user_metadata, optimizer)

    def create_training_client_from_state_with_optimizer(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: Mapping[str, str] | None = None,
        weights_access_token: str | None = None,
        *,
        base_dtype: str | None = None,
    ) -> TrainingClient:
        """Create a client that resumes from a checkpoint of `save_state`.

        It restores the weights, the optimizer state and the state of the random generators.
        `base_dtype` (an extension): dtype of an adapter's frozen base; None: as saved.
        """
        spec = _read_spec(path, base_model, base_dtype)
        return self._create_client(spec, str(path), True, user_metadata)

    def create_custom_loss(
        self, fn: PerDatumLossFn, input_ranks: Mapping[str, int]
    ) -> APIFuture[LossHandle]:
        """Return a loss of a single datum, `fn(logprobs, *fields) -> (loss, metrics)`, for
        `forward_backward_custom`. The keys of `input_ranks` name its fields.
        """
        return make_completed(LossHandle(fn, tuple(input_ranks)))

    def _create_client(
        self,
        spec: ModelSpec,
        state: str | None = None,
        with_optimizer: bool = False,
        user_metadata: Mapping[str, str] | None = None,
        optimizer: Any = None,
    ) -> TrainingClient:
        """Submit the creation of a model and return its client. Raises UserError for another
        optimizer than AdamW.
        """
        if optimizer is not None and not isinstance(optimizer, types.AdamOptimizerConfig):
            raise UserError(
                "only AdamW is supported (types.AdamOptimizerConfig()), got "
                f"optimizer={optimizer!r}"
            )
        user_metadata = check_user_metadata(user_metadata)
        state = state and os.path.expanduser(state)
        base = spec.base_model
        if spec.lora is not None:
            base = learner_checkpoint.resolve_base_model(spec, state)[0]
        folder = Path(base).expanduser()
        in_output_dir = folder.resolve().is_relative_to(Path(self.output_dir).resolve())
        # whether the base is a folder outside the output folder
        is_elsewhere = folder.is_dir() and not in_output_dir
        spec = replace(spec, base_model=base, elsewhere=is_elsewhere)
        model_id = self._context.next_model_id()
        created = self._driver.submit("create_model", model_id, spec, state, with_optimizer)
        return TrainingClient(self._context, model_id, created, user_metadata, self)

    # ------------------------------------------------------------------------------------- sampling

    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
        *,
        tokenizer: str | None = None,
        seed: int = 0,
        prefers_servers: bool = False,
    ) -> SamplingClient:
        """Create a client that samples from saved weights (a folder that `save_weights_for_sampler`
        wrote, any HF or PEFT folder) or a base model.

        `tokenizer`, `seed` (extensions): of a base model, as in `create_full_training_client`.
        `prefers_servers` (an extension): sample on the configured vLLM servers, if there are any,
        instead of in this process. They hold the weights of one client at a time.
        """
        return SamplingClient.from_weights(
            self._context, model_path, base_model, tokenizer, seed, prefers_servers
        )

    def create_classifier_client(self, base_model: str) -> ClassifierClient:
        """Create a client of a published reward model (an extension): a folder or hub name of a
        `...ForSequenceClassification` with a single output.
        """
        return ClassifierClient(self._context, _check_base_model(base_model))

    # --------------------------------------------------------------------------------------- others

    def get_server_capabilities(self) -> types.GetServerCapabilitiesResponse:
        """Return the models that can be trained without a download. Any hub name or folder of a
        causal LM works too.
        """
        return list_server_capabilities()

    def create_rest_client(self) -> RestClient:
        """Return a RestClient, which reads the folders of checkpoints."""
        return RestClient()

    def copy_weights(self, path: str, **_: Any) -> APIFuture[str]:
        """Raise UserError: weights are folders here."""
        raise UserError(
            f"weights are folders here: copy {path!r} with the tools of your file system"
        )

    def get_console_url(self) -> str:
        """Return the output folder, since no console exists."""
        return self._context.absolute_output_dir()

    def get_telemetry(self) -> None:
        """Return None: no telemetry is sent."""

    def close(
        self,
        status: Literal["success", "errored", "interrupted"] = "success",
        detail: str | None = None,
    ) -> APIFuture[None]:
        """Run the submitted verbs, then free the memory of the service's models. This also happens
        at exit.

        `status` and `detail` are for a hosted service's records; they have no effect here.
        """
        if status not in ("success", "errored", "interrupted"):
            raise UserError(f"status is 'success', 'errored' or 'interrupted', got {status!r}")
        self._driver.close()
        return make_completed(None)

    def __enter__(self) -> ServiceClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    create_lora_training_client_async = make_awaited(create_lora_training_client)
    create_training_client_from_state_async = make_awaited(create_training_client_from_state)
    create_training_client_from_state_with_optimizer_async = make_awaited(
        create_training_client_from_state_with_optimizer
    )
    create_sampling_client_async = make_awaited(create_sampling_client)
    get_server_capabilities_async = make_async(get_server_capabilities)


def _check_same_model(requested: ModelSpec, saved: ModelSpec, path: str) -> None:
    """Raise UserError, which names the differing fields, if the checkpoint's spec differs from the
    config's.
    """
    expected, actual = asdict(requested), asdict(saved)
    differences = [
        f"{name} is {actual[name]!r} in the checkpoint and {expected[name]!r} in the config"
        for name in expected
        if actual[name] != expected[name] and name != "elsewhere"
    ]
    if differences:
        raise UserError(
            f"{path} is a checkpoint of another model: {'; '.join(differences)}. Pass the config "
            "that made it"
        )


def _read_spec(
    path: str, base_model: str | None = None, base_dtype: str | None = None
) -> ModelSpec:
    """Return the spec of a checkpoint, with another base if `base_model` is set, and an adapter's
    with another dtype of its frozen base if `base_dtype` is set. Raises UserError if the checkpoint
    holds all weights of another model.
    """
    spec = learner_checkpoint.read_spec(Path(expand_path(path)))
    if base_model not in (None, spec.base_model):
        if spec.lora is None:
            raise UserError(
                f"{path} holds all weights of a model, so base_model={base_model!r} has no effect: "
                "omit it"
            )
        spec = replace(spec, base_model=_check_base_model(base_model))
    if base_dtype is None or spec.lora is None:
        return spec
    return replace(spec, base_dtype=base_dtype)


def _check_base_model(base_model: Any) -> str:
    """Return a base model's name as a string. Raises UserError if it is empty or not a string or
    path.
    """
    if not isinstance(base_model, (str, os.PathLike)) or not str(base_model):
        raise UserError(f"base_model is a hub name, a folder, or tiny:<preset>; got {base_model!r}")
    return str(base_model)
