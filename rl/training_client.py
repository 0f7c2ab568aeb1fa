"""TrainingClient: Tinker's verbs on a learner in this process (and on the ranks that serve it)."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from rl import types
from rl.datums import check_datum
from rl.driver import Driver
from rl.errors import UserError
from rl.futures import APIFuture, IsItsOwnFuture, SavedState
from rl.loss_terms import check_config
from rl.losses import CUSTOM, VALUES, LossSpec, get_loss
from rl.sampling_client import SamplingClient
from rl.types import AdamParams, Datum, ForwardBackwardOutput, ModelInput, OptimStepResponse, TensorData

if TYPE_CHECKING:
    from rl.service import ServiceClient

CustomLoss = Callable[..., tuple[torch.Tensor, dict[str, float]]]  # of the datums and, for each output asked for, a list of tensors


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
    def service(self) -> ServiceClient:
        """An extension: what made this client."""
        return self._service

    @property
    def info(self) -> dict[str, Any]:
        """What is known of the model: base_model, arch, vocab_size, max_context, parameters, device, dtype, ..."""
        return self._created.result()

    @property
    def version(self) -> int:
        """An extension: how many updates its weights have seen, once what was submitted before is done; samples carry it."""
        return self._driver.submit("version", self.model_id).result()

    # --------------------------------------------------------------------------------------------------------- learning

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, Any] | None = None,
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
        self,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, Any] | None = None,
        *,
        entropy: bool = False,
        adapters: bool = True,
    ) -> APIFuture[ForwardBackwardOutput]:
        """The same without a gradient. Extensions:

        `entropy` adds each position's entropy to the outputs; `adapters` False turns a LoRA adapter off for this call, so
        that the base model scores (a reference that costs no memory).
        """
        if not adapters and self.info["lora_rank"] is None:
            raise ValueError("adapters=False asks for the base model under a LoRA adapter; this client trains full weights")
        return self._forward(data, loss_fn, loss_fn_config, 1.0, backward=False, entropy=entropy, adapters=adapters)

    def compute_values(self, inputs: Sequence[ModelInput]) -> APIFuture[list[np.ndarray]]:
        """An extension: what the value head says at each position of each input, having read it up to and with that position."""
        self._need_value_head("compute_values")
        bare = [Datum(one, {"target_tokens": [0] * one.length}) for one in inputs]
        self._check(bare, "cross_entropy", {})
        future = self._driver.submit("forward_backward", self.model_id, bare, VALUES, {}, 1.0, False)
        return APIFuture(future, lambda value: [output["values"] for output in value[0]])

    def _need_value_head(self, what: str) -> None:
        if not self.info["value_head"]:
            raise ValueError(f"{what} reads values, and this model has no value head: create the client with value_head=True")

    def _forward(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, Any] | None,
        divisor: float,
        *,
        backward: bool,
        entropy: bool = False,
        adapters: bool = True,
    ) -> APIFuture[ForwardBackwardOutput]:
        config = dict(loss_fn_config or {})
        loss = self._check(data, loss_fn, config)
        if not divisor > 0:
            raise ValueError(f"the divisor is a positive number, got {divisor}")
        future = self._driver.submit(
            "forward_backward", self.model_id, list(data), loss, config, divisor, backward, entropy, adapters
        )
        if backward:
            self._backwards.append(future)
        return APIFuture(future, _output)

    def _check(self, data: Sequence[Datum], loss_fn: str, config: Mapping[str, Any]) -> LossSpec:
        loss = get_loss(loss_fn)
        if len(data) % loss.group:
            raise ValueError(f"{loss_fn} takes datums in groups of {loss.group}, one after the other; {len(data)} datums were given")
        for key, value in config.items():
            if key not in loss.known_config:
                raise ValueError(f"loss_fn_config has the key {key!r}; {loss_fn} takes {', '.join(loss.known_config)}")
            if key == "temperature" and not value > 0:
                raise ValueError(f"the learner scores at a positive temperature, got {value}")
        check_config(config)
        if loss.needs_values(config):
            self._need_value_head(f"the loss {loss_fn!r}" if loss.values else "value_coef")
        known, vocabulary = loss.known_fields, self.info["vocab_size"]
        for i, datum in enumerate(data):
            check_datum(
                i, datum, required=loss.required, known=known, soft_targets=loss.soft_targets, vocab_size=vocabulary
            )
            loss.check_terms(i, datum.loss_fn_inputs, config)
            self._check_length(i, datum)
        return loss

    def _check_length(self, index: int, datum: Datum) -> None:
        limit = self.info["max_context"]
        if limit is not None and datum.model_input.length > limit:
            raise ValueError(f"datum {index} has {datum.model_input.length} tokens, the model's context holds {limit}")

    def forward_backward_custom(
        self,
        data: Sequence[Datum],
        loss_fn: CustomLoss,
        loss_fn_config: Mapping[str, Any] | None = None,
        *,
        outputs: Sequence[Literal["logprobs", "values"]] = ("logprobs",),
    ) -> APIFuture[ForwardBackwardOutput]:
        """A loss of one's own on the logprobs: `loss_fn(data, logprobs) -> (loss, metrics)`.

        `logprobs[i]` is a float32 tensor of datum i's target logprobs that records gradients. It runs on the driver:
        a forward, the user's loss and its gradient dC/dlogprobs, then `cross_entropy` with weights -dC/dlogprobs.
        `loss_fn_config` takes "temperature"; by default the one last sampled with, or 1 where nothing was sampled.
        `outputs` (an extension): what the loss gets after `data`, in that order; "values" are the value head's, one a
        position. A loss of values alone needs no `target_tokens`, and the vocabulary is not computed for it.
        """
        config, spec = dict(loss_fn_config or {}), CUSTOM if "logprobs" in outputs else VALUES
        bare = self._bare(data, outputs, config)
        first = self._driver.submit("forward_backward", self.model_id, bare, spec, config, 1.0, False)
        found = _output(first.result()).loss_fn_outputs
        leaves = {name: [output[name].to_torch().clone().requires_grad_(True) for output in found] for name in outputs}
        loss, metrics = loss_fn(list(data), *leaves.values())
        if not isinstance(loss, torch.Tensor) or loss.ndim != 0 or not loss.requires_grad:
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(f"the custom loss returns a scalar tensor that depends on the {' or '.join(outputs)}, got {shape}")
        for name, field in (("logprobs", "weights"), ("values", "value_weights")):
            if name not in leaves:
                continue
            gradients = torch.autograd.grad(loss, leaves[name], allow_unused=True, retain_graph=True)
            for datum, leaf, gradient in zip(bare, leaves[name], gradients, strict=True):
                weights = torch.zeros_like(leaf) if gradient is None else -gradient
                datum.loss_fn_inputs[field] = TensorData.from_torch(weights)
        named = {name if ":" in name else f"{name}:mean": float(value) for name, value in metrics.items()}
        future = self._driver.submit("forward_backward", self.model_id, bare, spec, config, 1.0, True)
        self._backwards.append(future)

        def convert(value: Any) -> ForwardBackwardOutput:
            output = _output(value)
            output.metrics = {"loss:sum": float(loss.detach()), **named}
            return output

        return APIFuture(future, convert)

    def _bare(self, data: Sequence[Datum], outputs: Sequence[str], config: Mapping[str, Any]) -> list[Datum]:
        """The datums with their targets alone, checked."""
        unknown = [name for name in outputs if name not in ("logprobs", "values")]
        if unknown or not outputs or len(set(outputs)) < len(outputs):
            raise ValueError(f"outputs is one or both of 'logprobs' and 'values', got {tuple(outputs)}")
        if "values" in outputs:
            self._need_value_head("outputs")
        bare = []
        for i, datum in enumerate(data):
            targets = datum.loss_fn_inputs.get("target_tokens")
            if targets is None and "logprobs" in outputs:
                raise ValueError(f"datum {i} lacks loss_fn_inputs['target_tokens'] (it has {sorted(datum.loss_fn_inputs)})")
            bare.append(Datum(datum.model_input, {"target_tokens": [0] * datum.model_input.length if targets is None else targets}))
        self._check(bare, "cross_entropy", config)
        return bare

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
        self,
        name: str | None = None,
        ttl_seconds: float | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        beside: Mapping[str, TrainingClient] | None = None,
    ) -> SavedState:
        """Weights and optimizer, resumable, into `<output_dir>/checkpoints/<name>`; `metadata` (JSON) travels along.

        `beside` (an extension): other clients (a critic, say) whose state goes into the same checkpoint, each in the folder
        of its name there: all of it is whole or absent together.
        Without a name (an extension) it is called state-000001, -000002, ..., and is written when this returns; the
        checkpoint's folder is `.artifact_id`.
        """
        path = self._path("checkpoints", self._next_name() if name is None else name)
        others = {key: client.model_id for key, client in (beside or {}).items()}
        future = self._driver.submit("save_state", self.model_id, path, dict(metadata or {}), ttl_seconds, others)
        saved = SavedState(future, types.SaveWeightsResponse)
        if name is None:
            saved.result()
        return saved

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: float | None = None, *, merged: bool = False, value_head: bool = False
    ) -> APIFuture[types.SaveWeightsForSamplerResponse]:
        """Weights alone into `<output_dir>/sampler_weights/<name>`: a Hugging Face folder, or a PEFT adapter for LoRA.

        `merged` (an extension): the adapter merged into the base in fp32, for engines that take no adapters.
        `value_head` (an extension): with the value head, which else is left out: that folder is then model/ in the one of this name.
        """
        if value_head:
            self._need_value_head("save_weights_for_sampler with value_head")
        path = self._path("sampler_weights", name)
        future = self._driver.submit("save_for_sampler", self.model_id, path, merged, ttl_seconds, value_head)
        return APIFuture(future, types.SaveWeightsForSamplerResponse)

    def save_weights_and_get_sampling_client(self, name: str | None = None) -> SamplingClient:
        """A sampling client of the weights as they are now. Without a name nothing is written."""
        saved = [] if name is None else [self.save_weights_for_sampler(name)._future]
        version_id = self._service._next_version_id()
        created = self._driver.submit("snapshot", self.model_id, version_id, after=saved)
        return SamplingClient(self._service, self._driver, version_id, created, self.info)

    def get_base_sampling_client(self) -> SamplingClient:
        """An extension: a sampling client of the base model under the LoRA adapter, whose weights it shares with the policy's sampler.

        Raises UserError for a client that trains full weights: it keeps no base.
        """
        if self.info["lora_rank"] is None:
            raise UserError("get_base_sampling_client needs a LoRA client: one that trains full weights has no other ones beside them")
        version_id = self._service._next_version_id()
        created = self._driver.submit("snapshot_base", self.model_id, version_id)
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

    def _next_name(self) -> str:
        """The first of state-000001, ... after all that were written."""
        there = Path(self._service.output_dir, "checkpoints").glob("state-*")
        numbers = [int(found[1]) for path in there if (found := re.fullmatch(r"state-(\d+)", path.name))]
        return f"state-{max(numbers, default=0) + 1:06d}"

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
