"""ServiceClient: where a script begins. Makes training and sampling clients that live in this process."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from rl import checkpoint, types
from rl.driver import Driver, is_driver, serve
from rl.errors import UserError
from rl.model_presets import PRESETS
from rl.sampling_client import SamplingClient
from rl.training_client import TrainingClient
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
            serve(settings)
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
    ) -> TrainingClient:
        """A LoRA adapter on `base_model` (a hub name, a folder, tiny:<preset>); the base stays as it is."""
        lora = LoraConfig(rank, seed, train_mlp, train_attn, train_unembed, alpha)
        return self._create(ModelSpec(str(base_model), tokenizer, lora, model_seed))

    def create_full_training_client(self, base_model: str, *, tokenizer: str | None = None, seed: int = 0) -> TrainingClient:
        """An extension: all weights of `base_model` are trained. `seed`: of the weights of a tiny:<preset>."""
        return self._create(ModelSpec(str(base_model), tokenizer, None, seed))

    def create_training_client_from_state(self, path: str) -> TrainingClient:
        """The weights of a checkpoint (a folder of `save_state` or `save_weights_for_sampler`), a fresh optimizer."""
        return self._create(_spec_of(path), str(path), False)

    def create_training_client_from_state_with_optimizer(self, path: str) -> TrainingClient:
        """Weights, optimizer, generator state: goes on where `save_state` was called."""
        return self._create(_spec_of(path), str(path), True)

    def _create(self, spec: ModelSpec, state: str | None = None, with_optimizer: bool = False) -> TrainingClient:
        model_id, self._models = self._models, self._models + 1
        created = self._driver.submit("create_model", model_id, spec, state, with_optimizer)
        return TrainingClient(self, self._driver, model_id, created)

    # -------------------------------------------------------------------------------------------------------- sampling

    def create_sampling_client(self, model_path: str | None = None, base_model: str | None = None) -> SamplingClient:
        """A sampler of saved weights (a folder that `save_weights_for_sampler` wrote, any HF or PEFT folder) or a base model."""
        if model_path is None and base_model is None:
            raise ValueError("create_sampling_client needs model_path (a saved folder) or base_model (hub name, folder, tiny:<preset>)")
        version_id = self._next_version_id()
        created = self._driver.submit("load_sampler", version_id, str(model_path) if model_path else None, base_model)
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


def _spec_of(path: str) -> ModelSpec:
    return ModelSpec.from_json(checkpoint.read_state(Path(path))["spec"])

