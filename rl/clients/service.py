"""ServiceClient: where a script begins. Makes training and sampling clients that live in this
process.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from rl import types
from rl.clients.async_spellings import AsyncService
from rl.clients.classifier import ClassifierClient
from rl.clients.config import TrainingConfig
from rl.clients.context import ServiceContext, check_words
from rl.clients.crew import serve
from rl.clients.custom_loss import LossHandle, PerDatumLossFn
from rl.clients.driver import Driver, is_driver
from rl.clients.futures import APIFuture
from rl.clients.rest_client import RestClient, refuse_base_url, server_capabilities
from rl.clients.sampling import SamplingClient
from rl.clients.settings import WorkerSettings
from rl.clients.training import TrainingClient
from rl.errors import RankLost, UserError
from rl.learner import ModelSpec, saving
from rl.ranks import called, check_roles, check_team, leave_at_exit
from rl.types import LoraConfig
from rl.types.checked import whole

MAX_RANK = 4096
# of every adapter on Tinker, whatever its rank, so that one learning rate suits all ranks
TINKER_ALPHA = 32.0


class ServiceClient(AsyncService):
    """Rank 0 gets clients from it; every other rank serves inside the first one's constructor and
    exits when rank 0's script ends.

    A script may make several, one after another or side by side: each has models, seeds and
    settings of its own.

    user_metadata  words of your own, saved with every checkpoint; project_id, display_name: for a
    service's pages, no effect here output_dir     where `save_*` write; default:
    WHETSTONE_OUTPUT_DIR, or runs/<script>-<time>. Made when first written to. seed           of
    samples drawn without a seed of their own
    settings       device-side settings: precision, micro-batch and KV budgets
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
        words = check_words(user_metadata)
        self.display_name = display_name
        whole("seed", seed, "a whole number")
        settings = settings or WorkerSettings()
        check_roles(settings.sampler_ranks)
        check_team(settings.sampler.tp, settings.sampler_ranks)
        if not is_driver():
            try:
                serve(settings)
            except RankLost as lost:
                print(f"{called()} ends: {lost}", file=sys.stderr, flush=True)
                sys.exit(1)
            leave_at_exit()
            sys.exit(0)
        self._driver = Driver(settings)
        folder = str(output_dir or os.environ.get("WHETSTONE_OUTPUT_DIR") or _default_output_dir())
        self._context = ServiceContext(self._driver, folder, seed, words)

    @property
    def output_dir(self) -> str:
        return self._context.output_dir

    @output_dir.setter
    def output_dir(self, folder: str | Path) -> None:
        self._context.output_dir = str(folder)

    @property
    def seed(self) -> int:
        return self._context.seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._context.seed = seed

    @property
    def user_metadata(self) -> Mapping[str, str]:
        return self._context.user_metadata

    @user_metadata.setter
    def user_metadata(self, words: Mapping[str, str]) -> None:
        self._context.user_metadata = words

    # ------------------------------------------------------------------------------------- training

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
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
        """A LoRA adapter on `base_model` (a hub name, a folder, tiny:<preset>); the base stays as
        it is.

        `user_metadata`: words of your own, saved with its checkpoints. `optimizer`: there is AdamW
        alone. `alpha` (an extension): the adapter is scaled by alpha / rank. 32 by default, as on
        Tinker; None: alpha = rank. `value_head` (an extension): a scalar for each position besides,
        trained in full; see `forward`. `base_dtype` (an extension): what the frozen matrices are
        held in, "auto", "fp32", "bf16" or "4bit". `train_vision` (an extension): adapters on the
        vision tower of a model that sees, too; `train_experts`: on experts in one tensor.
        """
        whole(
            "rank", rank, f"a whole number from 1 to {MAX_RANK}, such as 32", least=1, most=MAX_RANK
        )
        if not (train_mlp or train_attn or train_unembed or train_experts):
            raise UserError(
                "a LoRA that adapts nothing cannot be trained: set train_attn, train_mlp or train_unembed"
            )
        lora = LoraConfig(
            rank, seed, train_mlp, train_attn, train_unembed, alpha, train_vision, train_experts
        )
        spec = ModelSpec(
            _name(base_model), tokenizer, lora, model_seed, value_head, base_dtype=base_dtype
        )
        return self._create(spec, words=user_metadata, optimizer=optimizer)

    def create_full_training_client(
        self,
        base_model: str,
        *,
        tokenizer: str | None = None,
        seed: int = 0,
        value_head: bool = False,
    ) -> TrainingClient:
        """An extension: all weights of `base_model` are trained. `seed`: of the weights of a
        tiny:<preset>.
        """
        return self._create(ModelSpec(_name(base_model), tokenizer, None, seed, value_head))

    def create_training_client(
        self, config: TrainingConfig, checkpoint_id: str | None = None
    ) -> TrainingClient:
        """An extension: what `config` describes, afresh or as it was when `save_state` wrote
        `checkpoint_id`, optimizer included.

        `checkpoint_id`: a checkpoint's folder (`.artifact_id` of what `save_state` returned), or
        its name in this service's own. Raises UserError where the checkpoint is of another model
        than the config's.
        """
        if not isinstance(config, TrainingConfig):
            raise UserError(
                f"create_training_client takes a TrainingConfig(model_ref=...), got {config!r}"
            )
        lora = config.lora_config
        adapter = None
        if lora is not None:
            adapter = LoraConfig(
                lora.rank,
                config.seed,
                lora.train_mlp,
                lora.train_attn,
                lora.train_unembed,
                lora.alpha,
            )
        spec = ModelSpec(
            config.model_ref,
            config.tokenizer,
            adapter,
            config.seed,
            config.value_head,
            base_dtype=config.base_dtype,
        )
        if checkpoint_id is None:
            return self._create(spec)
        here = Path(self.output_dir, "checkpoints", checkpoint_id)
        path = str(here if here.is_dir() else checkpoint_id)
        _check_same(spec, _spec_of(path), path)
        return self._create(spec, path, True)

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
        """The weights of a checkpoint (a folder of `save_state` or `save_weights_for_sampler`), a
        fresh optimizer.

        `base_model`: of an adapter, where it is not the one that the checkpoint names. A folder
        needs no token. `value_head`: with one (fresh, where the model saved had none) or without;
        None: as it was saved. `base_dtype`: likewise.
        """
        spec = _spec_of(path, base_model)
        spec = spec if value_head is None else replace(spec, value_head=value_head)
        spec = (
            spec
            if base_dtype is None or spec.lora is None
            else replace(spec, base_dtype=base_dtype)
        )
        return self._create(spec, str(path), False, user_metadata, optimizer)

    def create_training_client_from_state_with_optimizer(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: Mapping[str, str] | None = None,
        weights_access_token: str | None = None,
    ) -> TrainingClient:
        """Weights, optimizer, generator state: goes on where `save_state` was called."""
        return self._create(_spec_of(path, base_model), str(path), True, user_metadata)

    def create_custom_loss(
        self, fn: PerDatumLossFn, input_ranks: Mapping[str, int]
    ) -> APIFuture[LossHandle]:
        """A loss of one datum, `fn(logprobs, *fields) -> (loss, metrics)`, for
        `forward_backward_custom`; `input_ranks` names its fields.
        """
        done: Future = Future()
        done.set_result(LossHandle(fn, tuple(input_ranks)))
        return APIFuture(done)

    def _create(
        self,
        spec: ModelSpec,
        state: str | None = None,
        with_optimizer: bool = False,
        words: Mapping[str, str] | None = None,
        optimizer: Any = None,
    ) -> TrainingClient:
        if optimizer is not None and not isinstance(optimizer, types.AdamOptimizerConfig):
            raise UserError(
                f"there is AdamW alone (types.AdamOptimizerConfig()), got optimizer={optimizer!r}"
            )
        words = check_words(words)
        spec = self._placed(spec, state)
        model_id = self._context.next_model_id()
        created = self._driver.submit("create_model", model_id, spec, state, with_optimizer)
        return TrainingClient(self._context, model_id, created, words, self)

    def _placed(self, spec: ModelSpec, state: str | None) -> ModelSpec:
        """`spec` with its base as it is found now, and whether that lies outside of what this
        service writes.
        """
        base = spec.base_model if spec.lora is None else saving.base_of(spec, state)[0]
        folder = Path(base).expanduser()
        inside = folder.resolve().is_relative_to(Path(self.output_dir).expanduser().resolve())
        return replace(spec, base_model=base, elsewhere=folder.is_dir() and not inside)

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
    ) -> SamplingClient:
        """A sampler of saved weights (a folder that `save_weights_for_sampler` wrote, any HF or
        PEFT folder) or a base model.

        `tokenizer`, `seed` (extensions): of a base model, as in `create_full_training_client`.
        """
        return SamplingClient.of_weights(self._context, model_path, base_model, tokenizer, seed)

    def create_classifier_client(self, base_model: str) -> ClassifierClient:
        """An extension: a published reward model (a folder or a hub name of a
        `...ForSequenceClassification` with one output).
        """
        return ClassifierClient(self._context, _name(base_model))

    # ------------------------------------------------------------------------------------- the rest

    def get_server_capabilities(self) -> types.GetServerCapabilitiesResponse:
        """What can be trained without a download; any hub name or folder of a causal LM works too."""
        return server_capabilities()

    def create_rest_client(self) -> RestClient:
        return RestClient()

    def copy_weights(self, path: str, **_: Any) -> APIFuture[str]:
        raise UserError(
            f"weights are folders here: copy {path!r} with the tools of your file system"
        )

    def get_console_url(self) -> str:
        """Where this service writes: there is no console."""
        return self._context.shown_place()

    def get_telemetry(self) -> None:
        """Nothing is sent anywhere."""

    def close(
        self,
        status: Literal["success", "errored", "interrupted"] = "success",
        detail: str | None = None,
    ) -> APIFuture[None]:
        """Runs what was submitted, then gives the memory of its models back. Happens by itself at
        exit.

        `status` and `detail` are for a service's records; nothing keeps them here.
        """
        if status not in ("success", "errored", "interrupted"):
            raise UserError(f"status is 'success', 'errored' or 'interrupted', got {status!r}")
        self._driver.close()
        closed: Future = Future()
        closed.set_result(None)
        return APIFuture(closed)

    def __enter__(self) -> ServiceClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _default_output_dir() -> Path:
    script = Path(sys.argv[0]).stem or "interactive"
    return Path("runs") / f"{script}-{time.strftime('%Y%m%d-%H%M%S')}"


def _check_same(asked: ModelSpec, saved: ModelSpec, path: str) -> None:
    """Raises UserError that names what differs between a config and the checkpoint that it should
    go on from.
    """
    mine, theirs = asdict(asked), asdict(saved)
    other = [name for name in mine if theirs[name] != mine[name] and name != "elsewhere"]
    changed = [
        f"{name} is {theirs[name]!r} there and {mine[name]!r} in the config" for name in other
    ]
    if changed:
        raise UserError(
            f"{path} is a checkpoint of another model: {'; '.join(changed)}. Pass the config that it was made with"
        )


def _spec_of(path: str, base_model: str | None = None) -> ModelSpec:
    spec = saving.read_spec(Path(path))
    if base_model is None or base_model == spec.base_model:
        return spec
    if spec.lora is None:
        raise UserError(
            f"{path} holds all weights of a model, so base_model={base_model!r} has no effect: leave it out"
        )
    return replace(spec, base_model=_name(base_model))


def _name(base_model: Any) -> str:
    if not isinstance(base_model, (str, os.PathLike)) or not str(base_model):
        raise UserError(f"base_model is a hub name, a folder, or tiny:<preset>; got {base_model!r}")
    return str(base_model)
