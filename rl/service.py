"""ServiceClient: where a script begins. Makes training and sampling clients that live in this process."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rl import checkpoint, distributed, types
from rl.driver import Driver, is_driver, serve
from rl.errors import RankLost, UserError
from rl.model_presets import PRESETS
from rl.sampling_client import SamplingClient
from rl.training_client import TrainingClient
from rl.training_config import TrainingConfig
from rl.types import LoraConfig
from rl.worker import ModelSpec, WorkerSettings


class ServiceClient:
    """Rank 0 gets clients from it; every other rank serves inside the constructor and exits when rank 0 closes.

    output_dir  where `save_*` write; default: WHETSTONE_OUTPUT_DIR, or runs/<script>-<time>. Made when first written to.
    seed        of samples drawn without a seed of their own
    settings    device-side settings: precision, micro-batch and KV budgets
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        output_dir: str | Path | None = None,
        seed: int = 0,
        settings: WorkerSettings | None = None,
    ):
        if base_url is not None:
            raise UserError(f"this service runs in your own process and speaks to no server: drop base_url={base_url!r}")
        settings = settings or WorkerSettings()
        if not is_driver():
            try:
                serve(settings)
            except RankLost as lost:
                print(f"rank {distributed.rank()} ends: {lost}", file=sys.stderr, flush=True)
                sys.exit(1)
            sys.exit(0)
        self._driver = Driver(settings)
        self.output_dir = str(output_dir or os.environ.get("WHETSTONE_OUTPUT_DIR") or _default_output_dir())
        self.seed = seed
        self._models = 0
        self._versions = 0
        self._streams = 0

    # -------------------------------------------------------------------------------------------------------- training

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        *,
        alpha: float | None = None,
        tokenizer: str | None = None,
        model_seed: int = 0,
        value_head: bool = False,
    ) -> TrainingClient:
        """A LoRA adapter on `base_model` (a hub name, a folder, tiny:<preset>); the base stays as it is.

        `value_head` (an extension): a scalar for each position besides, trained in full; see `forward`.
        """
        lora = LoraConfig(rank, seed, train_mlp, train_attn, train_unembed, alpha)
        return self._create(ModelSpec(str(base_model), tokenizer, lora, model_seed, value_head))

    def create_full_training_client(
        self, base_model: str, *, tokenizer: str | None = None, seed: int = 0, value_head: bool = False
    ) -> TrainingClient:
        """An extension: all weights of `base_model` are trained. `seed`: of the weights of a tiny:<preset>."""
        return self._create(ModelSpec(str(base_model), tokenizer, None, seed, value_head))

    def create_training_client(self, config: TrainingConfig, checkpoint_id: str | None = None) -> TrainingClient:
        """An extension: what `config` describes, afresh or as it was when `save_state` wrote `checkpoint_id`, optimizer included.

        `checkpoint_id`: a checkpoint's folder (`.artifact_id` of what `save_state` returned), or its name in this service's own.
        Raises UserError where the checkpoint is of another model than the config's.
        """
        if not isinstance(config, TrainingConfig):
            raise UserError(f"create_training_client takes a TrainingConfig(model_ref=...), got {config!r}")
        lora = config.lora_config
        adapter = None
        if lora is not None:
            adapter = LoraConfig(lora.rank, config.seed, lora.train_mlp, lora.train_attn, lora.train_unembed, lora.alpha)
        spec = ModelSpec(config.model_ref, config.tokenizer, adapter, config.seed, config.value_head)
        if checkpoint_id is None:
            return self._create(spec)
        here = Path(self.output_dir, "checkpoints", checkpoint_id)
        path = str(here if here.is_dir() else checkpoint_id)
        _check_same(spec, _spec_of(path), path)
        return self._create(spec, path, True)

    def create_training_client_from_state(self, path: str, *, value_head: bool | None = None) -> TrainingClient:
        """The weights of a checkpoint (a folder of `save_state` or `save_weights_for_sampler`), a fresh optimizer.

        `value_head`: with one (fresh, where the model saved had none) or without; None: as it was saved.
        """
        spec = _spec_of(path)
        return self._create(spec if value_head is None else replace(spec, value_head=value_head), str(path), False)

    def create_training_client_from_state_with_optimizer(self, path: str) -> TrainingClient:
        """Weights, optimizer, generator state: goes on where `save_state` was called."""
        return self._create(_spec_of(path), str(path), True)

    def _create(self, spec: ModelSpec, state: str | None = None, with_optimizer: bool = False) -> TrainingClient:
        model_id, self._models = self._models, self._models + 1
        created = self._driver.submit("create_model", model_id, spec, state, with_optimizer)
        return TrainingClient(self, self._driver, model_id, created)

    # -------------------------------------------------------------------------------------------------------- sampling

    def create_sampling_client(
        self, model_path: str | None = None, base_model: str | None = None, *, tokenizer: str | None = None, seed: int = 0
    ) -> SamplingClient:
        """A sampler of saved weights (a folder that `save_weights_for_sampler` wrote, any HF or PEFT folder) or a base model.

        `tokenizer`, `seed` (extensions): of a base model, as in `create_full_training_client`.
        """
        if model_path is None and base_model is None:
            raise ValueError("create_sampling_client needs model_path (a saved folder) or base_model (hub name, folder, tiny:<preset>)")
        version_id = self._next_version_id()
        path = str(model_path) if model_path else None
        created = self._driver.submit("load_sampler", version_id, path, base_model, tokenizer, seed)
        return SamplingClient(self, self._driver, version_id, created, None)

    async def create_lora_training_client_async(self, *args: Any, **kwargs: Any) -> TrainingClient:
        return await self.create_lora_training_client(*args, **kwargs)

    async def create_training_client_from_state_async(self, path: str) -> TrainingClient:
        return await self.create_training_client_from_state(path)

    async def create_training_client_from_state_with_optimizer_async(self, path: str) -> TrainingClient:
        return await self.create_training_client_from_state_with_optimizer(path)

    async def create_sampling_client_async(self, *args: Any, **kwargs: Any) -> SamplingClient:
        return await self.create_sampling_client(*args, **kwargs)

    # --------------------------------------------------------------------------------------------------------- the rest

    def get_server_capabilities(self) -> types.GetServerCapabilitiesResponse:
        """What can be trained without a download; any hub name or folder of a causal LM works too."""
        return types.GetServerCapabilitiesResponse([types.SupportedModel(f"tiny:{name}") for name in PRESETS])

    def close(self) -> None:
        """Runs what was submitted, then ends the worker thread and the other ranks. Happens by itself at exit."""
        self._driver.close()

    def __enter__(self) -> ServiceClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _next_version_id(self) -> int:
        self._versions += 1
        return self._versions

    def _next_stream(self) -> int:
        self._streams += 1
        return self._streams


def _default_output_dir() -> Path:
    script = Path(sys.argv[0]).stem or "interactive"
    return Path("runs") / f"{script}-{time.strftime('%Y%m%d-%H%M%S')}"


def _check_same(asked: ModelSpec, saved: ModelSpec, path: str) -> None:
    """Raises UserError that names what differs between a config and the checkpoint that it should go on from."""
    mine, theirs = asdict(asked), asdict(saved)
    changed = [f"{name} is {theirs[name]!r} there and {value!r} in the config" for name, value in mine.items() if theirs[name] != value]
    if changed:
        raise UserError(f"{path} is a checkpoint of another model: {'; '.join(changed)}. Pass the config that it was made with")


def _spec_of(path: str) -> ModelSpec:
    return ModelSpec.from_json(checkpoint.read_state(Path(path))["spec"])

