"""TrainingClient: Tinker's verbs on a learner in this process (and on the ranks that serve it)."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rl import types
from rl.datums import check_datum
from rl.driver import Driver
from rl.futures import APIFuture, IsItsOwnFuture
from rl.losses import CUSTOM, LossSpec, get_loss
from rl.sampling_client import SamplingClient
from rl.types import AdamParams, Datum, ForwardBackwardOutput, OptimStepResponse, TensorData

if TYPE_CHECKING:
    from rl.service import ServiceClient

CustomLoss = Callable[[list[Datum], list[torch.Tensor]], tuple[torch.Tensor, dict[str, float]]]


class TrainingClient(IsItsOwnFuture):
    """Trains one model. Verbs return futures and run in the order they were called."""

    def __init__(self, service: ServiceClient, driver: Driver, model_id: int, created: Future):
        self._service = service
        self._driver = driver
        self._created = created
        self._backwards: list[Future] = []  # since the last optim_step
        self.model_id = model_id
        self._finalizer = weakref.finalize(self, _forget, driver, model_id)
        self._finalizer.atexit = False

    @property
    def info(self) -> dict[str, Any]:
        """What is known of the model: base_model, arch, vocab_size, max_context, parameters, device, dtype, ..."""
        return self._created.result()

    # --------------------------------------------------------------------------------------------------------- learning

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float] | None = None,
        *,
        divisor: float = 1.0,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Adds the gradient of the loss's SUM over `data`, divided by `divisor` (an extension), to what is accumulated.

        `loss_fn_config` takes the loss's own keys and "temperature" (by default the one last sampled with at this
        version of the weights, for losses with advantages; 1 otherwise). `forward_backward([])` is a no-op.
        Raises ValueError at once for a datum that does not fit the loss.
        """
        return self._forward(data, loss_fn, loss_fn_config, divisor, backward=True)

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float] | None = None, *, entropy: bool = False
    ) -> APIFuture[ForwardBackwardOutput]:
        """The same without a gradient. `entropy` (an extension) adds each position's entropy to the outputs."""
        return self._forward(data, loss_fn, loss_fn_config, 1.0, backward=False, entropy=entropy)

    def _forward(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float] | None,
        divisor: float,
        *,
        backward: bool,
        entropy: bool = False,
    ) -> APIFuture[ForwardBackwardOutput]:
        config = dict(loss_fn_config or {})
        loss = self._check(data, loss_fn, config)
        if not divisor > 0:
            raise ValueError(f"the divisor is a positive number, got {divisor}")
        future = self._driver.submit("forward_backward", self.model_id, list(data), loss, config, divisor, backward, entropy)
        if backward:
            self._backwards.append(future)
        return APIFuture(future, _output)

    def _check(self, data: Sequence[Datum], loss_fn: str, config: Mapping[str, float]) -> LossSpec:
        loss = get_loss(loss_fn)
        allowed = (*loss.config, "temperature")
        for key, value in config.items():
            if key not in allowed:
                raise ValueError(f"loss_fn_config has the key {key!r}; {loss_fn} takes {', '.join(allowed)}")
            if key == "temperature" and not value > 0:
                raise ValueError(f"the learner scores at a positive temperature, got {value}")
        known, vocabulary = (*loss.required, *loss.optional), self.info["vocab_size"]
        for i, datum in enumerate(data):
            check_datum(
                i, datum, required=loss.required, known=known, soft_targets=loss.soft_targets, vocab_size=vocabulary
            )
            self._check_length(i, datum)
        return loss

    def _check_length(self, index: int, datum: Datum) -> None:
        limit = self.info["max_context"]
        if limit is not None and datum.model_input.length > limit:
            raise ValueError(f"datum {index} has {datum.model_input.length} tokens, the model's context holds {limit}")

    def forward_backward_custom(
        self, data: Sequence[Datum], loss_fn: CustomLoss, loss_fn_config: Mapping[str, float] | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """A loss of one's own on the logprobs: `loss_fn(data, logprobs) -> (loss, metrics)`.

        `logprobs[i]` is a float32 tensor of datum i's target logprobs that records gradients. It runs on the driver:
        a forward, the user's loss and its gradient dC/dlogprobs, then `cross_entropy` with weights -dC/dlogprobs.
        `loss_fn_config` takes "temperature"; by default the one last sampled with, or 1 where nothing was sampled.
        """
        config = dict(loss_fn_config or {})
        for i, datum in enumerate(data):
            if "target_tokens" not in datum.loss_fn_inputs:
                raise ValueError(f"datum {i} lacks loss_fn_inputs['target_tokens'] (it has {sorted(datum.loss_fn_inputs)})")
        bare = [Datum(d.model_input, {"target_tokens": d.loss_fn_inputs["target_tokens"]}) for d in data]
        self._check(bare, "cross_entropy", config)
        first = self._driver.submit("forward_backward", self.model_id, bare, CUSTOM, config, 1.0, False)
        outputs = _output(first.result()).loss_fn_outputs
        logprobs = [output["logprobs"].to_torch().clone().requires_grad_(True) for output in outputs]
        loss, metrics = loss_fn(list(data), logprobs)
        if not isinstance(loss, torch.Tensor) or loss.ndim != 0 or not loss.requires_grad:
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(f"the custom loss returns a scalar tensor that depends on the logprobs, got {shape}")
        gradients = torch.autograd.grad(loss, logprobs, allow_unused=True)
        for datum, gradient in zip(bare, gradients, strict=True):
            n = datum.model_input.length
            datum.loss_fn_inputs["weights"] = TensorData.from_torch(torch.zeros(n) if gradient is None else -gradient)
        named = {name if ":" in name else f"{name}:mean": float(value) for name, value in metrics.items()}
        future = self._driver.submit("forward_backward", self.model_id, bare, CUSTOM, config, 1.0, True)
        self._backwards.append(future)

        def convert(value: Any) -> ForwardBackwardOutput:
            output = _output(value)
            output.metrics = {"loss:sum": float(loss.detach()), **named}
            return output

        return APIFuture(future, convert)

    def optim_step(self, adam_params: AdamParams) -> APIFuture[OptimStepResponse]:
        """One AdamW update of the accumulated gradient; metrics hold `grad_norm` (before clipping).

        Nothing accumulated: nothing changes, `skipped` is 1. A forward_backward that failed since the last step: an
        error, the gradients are dropped, the weights are unchanged.
        """
        if not isinstance(adam_params, AdamParams):
            raise TypeError(f"optim_step takes types.AdamParams, got {type(adam_params).__name__}")
        backwards, self._backwards = self._backwards, []
        future = self._driver.submit("optim_step", self.model_id, adam_params, after=backwards)
        return APIFuture(future, OptimStepResponse)

    async def forward_async(self, *args: Any, **kwargs: Any) -> APIFuture[ForwardBackwardOutput]:
        return self.forward(*args, **kwargs)

    async def forward_backward_async(self, *args: Any, **kwargs: Any) -> APIFuture[ForwardBackwardOutput]:
        return self.forward_backward(*args, **kwargs)

    async def forward_backward_custom_async(self, *args: Any, **kwargs: Any) -> APIFuture[ForwardBackwardOutput]:
        return self.forward_backward_custom(*args, **kwargs)

    async def optim_step_async(self, adam_params: AdamParams) -> APIFuture[OptimStepResponse]:
        return self.optim_step(adam_params)

    # ------------------------------------------------------------------------------------------------- saving, sampling

    def save_state(
        self, name: str, ttl_seconds: float | None = None, *, metadata: Mapping[str, Any] | None = None
    ) -> APIFuture[types.SaveWeightsResponse]:
        """Weights and optimizer, resumable, into `<output_dir>/checkpoints/<name>`; `metadata` (JSON) travels along."""
        path = self._path("checkpoints", name)
        return APIFuture(
            self._driver.submit("save_state", self.model_id, path, dict(metadata or {}), ttl_seconds), types.SaveWeightsResponse
        )

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: float | None = None, *, merged: bool = False
    ) -> APIFuture[types.SaveWeightsForSamplerResponse]:
        """Weights alone into `<output_dir>/sampler_weights/<name>`: a Hugging Face folder, or a PEFT adapter for LoRA.

        `merged` (an extension): the adapter merged into the base in fp32, for engines that take no adapters.
        """
        path = self._path("sampler_weights", name)
        future = self._driver.submit("save_for_sampler", self.model_id, path, merged, ttl_seconds)
        return APIFuture(future, types.SaveWeightsForSamplerResponse)

    def save_weights_and_get_sampling_client(self, name: str | None = None) -> SamplingClient:
        """A sampling client of the weights as they are now. Without a name nothing is written."""
        saved = [] if name is None else [self.save_weights_for_sampler(name)._future]
        version_id = self._service._next_version_id()
        created = self._driver.submit("snapshot", self.model_id, version_id, after=saved)
        return SamplingClient(self._service, self._driver, version_id, created, self.info)

    def load_state(self, path: str) -> APIFuture[types.LoadWeightsResponse]:
        """The weights of a checkpoint alone; the optimizer starts fresh."""
        return self._load(path, False)

    def load_state_with_optimizer(self, path: str) -> APIFuture[types.LoadWeightsResponse]:
        return self._load(path, True)

    def _load(self, path: str, with_optimizer: bool) -> APIFuture[types.LoadWeightsResponse]:
        future = self._driver.submit("load_state", self.model_id, str(path), with_optimizer)
        return APIFuture(future, lambda _: types.LoadWeightsResponse(str(path)))

    async def save_state_async(self, *args: Any, **kwargs: Any) -> APIFuture[types.SaveWeightsResponse]:
        return self.save_state(*args, **kwargs)

    async def save_weights_for_sampler_async(self, *args: Any, **kwargs: Any) -> APIFuture[types.SaveWeightsForSamplerResponse]:
        return self.save_weights_for_sampler(*args, **kwargs)

    async def save_weights_and_get_sampling_client_async(self, name: str | None = None) -> SamplingClient:
        return await self.save_weights_and_get_sampling_client(name)

    async def load_state_async(self, path: str) -> APIFuture[types.LoadWeightsResponse]:
        return self.load_state(path)

    async def load_state_with_optimizer_async(self, path: str) -> APIFuture[types.LoadWeightsResponse]:
        return self.load_state_with_optimizer(path)

    def _path(self, kind: str, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or ".partial-" in name:
            raise ValueError(f"a checkpoint's name is letters, digits, '.', '_' and '-', got {name!r}")
        return str(Path(self._service.output_dir, kind, name))

    # ----------------------------------------------------------------------------------------------------------- asking

    def get_tokenizer(self) -> Any:
        tokenizer = self.info["tokenizer"]
        if tokenizer is None:
            raise ValueError(f"the model {self.info['base_model']!r} came without a tokenizer; it is used with token ids")
        return tokenizer

    def release(self) -> None:
        """Gives the model's memory back now rather than when the client is collected."""
        self._finalizer()

    def get_info(self) -> types.GetInfoResponse:
        info = self.info
        data = types.ModelData(info["arch"], info["base_model"], getattr(info["tokenizer"], "name_or_path", None))
        rank = info["lora_rank"]
        return types.GetInfoResponse(data, str(self.model_id), rank is not None, rank, info["base_model"])


def _forget(driver: Driver, model_id: int) -> None:
    if not driver.closed:
        driver.submit("forget_model", model_id)


def _output(value: tuple[list[dict[str, Any]], dict[str, float]]) -> ForwardBackwardOutput:
    outputs, metrics = value
    return ForwardBackwardOutput([{k: TensorData(v, "float32") for k, v in item.items()} for item in outputs], metrics)
