"""Provide TrainingClient: Tinker's training verbs on a learner in this process (and on the ranks
that serve it).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from rl import types
from rl.client.api_future import APIFuture, AwaitableClient, SavedState, make_async, make_awaited
from rl.client.check_arguments import (
    check_call,
    require_value_head,
    resolve_datum_images,
    resolve_images,
)
from rl.client.custom_loss import CustomLoss, LossHandle, evaluate_custom_loss, strip_datums
from rl.client.sampling_client import SamplingClient
from rl.client.service_context import ServiceContext, check_user_metadata, expand_path
from rl.distributed import checkpoint_folder
from rl.errors import BadRequestError, UserError
from rl.losses import CUSTOM_LOSS, CUSTOM_VALUE_LOSS, LossSpec
from rl.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    OptimStepResponse,
    TensorData,
)
from rl.types.number_checks import validate_number

T = TypeVar("T")


class CallRecorder(Protocol):
    """Receive the calls that change a model, in their order. It must not change their arguments."""

    def record_backward(
        self,
        data: Sequence[Datum],
        loss: str,
        config: Mapping[str, Any],
        divisor: float,
        outputs: Future,
    ) -> None:
        """Receive a forward_backward call. `outputs`: a future of (outputs by datum, metrics);
        outputs have the entropies of a recorded call, which change neither loss nor gradient.
        """

    def record_scale(self, factor: float) -> None:
        """Receive a factor that multiplies the gradient accumulated since the last step."""

    def record_step(self, params: AdamParams) -> None:
        """Receive an optimizer step."""


class TrainingClient(AwaitableClient):
    """Train a model. Verbs return futures and run in the order they were called."""

    def __init__(
        self,
        context: ServiceContext,
        model_id: int,
        created: Future,
        user_metadata: Mapping[str, str] | None = None,
        service: Any = None,
    ):
        super().__init__(context, created, "free_model", model_id)
        self._service = service
        self._pending_backwards: list[Future] = []  # since the last optim_step or load_state
        self.model_id = model_id
        self.recorder: CallRecorder | None = None  # receives the learner calls (an extension)
        self._user_metadata = dict(user_metadata or {})

    @property
    def service(self) -> Any:
        """Return the ServiceClient that made this client (an extension)."""
        return self._service

    @property
    def info(self) -> dict[str, Any]:
        """Return the model's details: base_model, arch, vocab_size, max_context, parameters,
        device, dtype, ...
        """
        return self._future.result()

    @property
    def version(self) -> int:
        """Return the number of updates of the weights, after all verbs submitted before (an
        extension). Samples carry it.
        """
        return self._submit("version").result()

    def _submit(self, verb: str, *arguments: Any, dependencies: Sequence[Future] = ()) -> Future:
        """Submit a verb of this model."""
        return self._driver.submit(verb, self.model_id, *arguments, dependencies=dependencies)

    # ------------------------------------------------------------------------------------- learning

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, Any] | None = None,
        *,
        divisor: float = 1.0,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Add the gradient of the loss's SUM over `data`, divided by `divisor` (an extension), to
        the accumulated gradient.

        `loss_fn_config` takes the loss's keys and "temperature", an override. By default a loss
        with advantages scores each datum at the temperature its sample was drawn at (a batch may
        mix temperatures), and a datum of unknown origin at the temperature of this version's
        samples; other losses score at 1. `forward_backward([])` is a no-op. Raises ValueError at
        the call if a datum does not fit the loss.
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
        """Compute the loss and outputs as `forward_backward` does, without a gradient. Extensions:

        `entropy` adds each position's entropy to the outputs. `adapters=False` disables a LoRA
        adapter for this call, so that the base model scores (a reference model without extra
        memory).
        """
        if not adapters and self.info["lora_rank"] is None:
            raise ValueError(
                "adapters=False scores with the base model under a LoRA adapter; this client "
                "trains full weights"
            )
        return self._forward(
            data, loss_fn, loss_fn_config, 1.0, backward=False, entropy=entropy, adapters=adapters
        )

    def compute_values(self, inputs: Sequence[ModelInput]) -> APIFuture[list[np.ndarray]]:
        """Return the value head's output at each position of each input, having read the input up
        to and including that position (an extension).
        """
        require_value_head(self.info, "compute_values")
        model_inputs = [resolve_images(model_input, self.info) for model_input in inputs]
        bare = [
            Datum(model_input, {"target_tokens": np.zeros(model_input.length, np.int64)})
            for model_input in model_inputs
        ]
        check_call(bare, "cross_entropy", {}, self.info)
        future = self._submit("forward_backward", bare, CUSTOM_VALUE_LOSS, {}, 1.0, False)
        return APIFuture(future, lambda value: [output["values"] for output in value[0]])

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
        """Check the arguments and submit a forward, or a forward and backward."""
        config, records = dict(loss_fn_config or {}), backward and self.recorder is not None
        options = (divisor, backward, entropy or records, adapters)
        call = self._make_call(data, loss_fn, config, *options)
        _validate_divisor(divisor)
        future = self._submit("forward_backward", *call)
        if backward:
            self._pending_backwards.append(future)
            if self.recorder is not None:
                self.recorder.record_backward(data, loss_fn, config, divisor, future)
        return APIFuture(future, _to_output)

    def _make_call(
        self, data: Sequence[Datum], loss_fn: str, config: Mapping[str, Any], *options: Any
    ) -> tuple[Any, ...]:
        """Check data, loss and config. Return the arguments of the verb `forward_backward`."""
        loss, data = check_call(data, loss_fn, config, self.info, self._context)
        return list(data), loss, config, *options, self._find_temperatures(data, loss, config)

    def _find_temperatures(
        self, data: Sequence[Datum], loss: LossSpec, config: Mapping[str, Any]
    ) -> list[float | None] | None:
        """Return the sampling temperature of each datum, None if unknown; None in place of the list
        if the loss is scored at another temperature.
        """
        if "temperature" in config or not loss.at_sampling_temperature:
            return None
        return [self._context.sample_temperatures.find_temperature(datum) for datum in data]

    def forward_backward_custom(
        self,
        data: Sequence[Datum],
        loss_fn: CustomLoss | LossHandle,
        loss_fn_config: Mapping[str, Any] | None = None,
        *,
        loss_type_input: Literal["logprobs"] | None = None,
        outputs: Sequence[Literal["logprobs", "values"]] = ("logprobs",),
    ) -> APIFuture[ForwardBackwardOutput]:
        """Add the gradient of a user-defined loss on the logprobs: `loss_fn(data, logprobs) ->
        (loss, metrics)`. The metrics keep their names.

        `logprobs[i]` is a float32 tensor of datum i's target logprobs that records gradients. The
        loss runs on the driver: a forward, the user's loss and its gradient dC/dlogprobs, then
        `cross_entropy` with weights -dC/dlogprobs. `loss_fn_config` takes "temperature"; default:
        each datum's sampling temperature, as in `forward_backward`. `outputs` (an extension): what
        the loss receives after `data`, in that order; "values" are the value head's, a scalar per
        position. A loss of values only needs no `target_tokens`, and the vocabulary logits are not
        computed for it.
        """
        if loss_type_input not in (None, "logprobs"):
            raise BadRequestError(f"loss_type_input is 'logprobs', got {loss_type_input!r}")
        config, spec = (
            dict(loss_fn_config or {}),
            CUSTOM_LOSS if "logprobs" in outputs else CUSTOM_VALUE_LOSS,
        )
        data = resolve_datum_images(data, self.info)
        bare = strip_datums(data, outputs)
        if "values" in outputs:
            require_value_head(self.info, "outputs")
        check_call(bare, "cross_entropy", config, self.info)
        sampling_temperatures = self._find_temperatures(data, spec, config)

        def run(backward: bool) -> Future:
            options = (1.0, backward, False, True, sampling_temperatures)
            return self._submit("forward_backward", bare, spec, config, *options)

        forward_outputs = _to_output(run(False).result()).loss_fn_outputs
        loss, metrics = evaluate_custom_loss(loss_fn, data, bare, forward_outputs, outputs)
        future = run(True)
        self._pending_backwards.append(future)

        def convert(value: Any) -> ForwardBackwardOutput:
            output = _to_output(value)
            output.metrics = {"loss:sum": loss, **metrics}
            return output

        return APIFuture(future, convert)

    def scale_gradients(self, factor: float) -> APIFuture[None]:
        """Multiply the accumulated gradient by `factor`, such as 1/count for a count that was not
        known before (an extension). Not supported under DeepSpeed.
        """
        validate_number("factor", factor, "a positive number", minimum=0, open_ends=True)
        if self.recorder is not None:
            self.recorder.record_scale(factor)
        future = self._submit("scale_gradients", factor)
        self._pending_backwards.append(future)
        return APIFuture(future)

    def optim_step(
        self, optim_params: AdamParams | None = None, *, adam_params: AdamParams | None = None
    ) -> APIFuture[OptimStepResponse]:
        """Apply an AdamW update with the accumulated gradient. Metrics hold `grad_norm` (before
        clipping).

        If no gradient is accumulated, nothing changes and `skipped` is 1. If a forward_backward or
        a load_state has failed since the last step or load_state, an error is raised, the gradients
        are dropped and the weights are unchanged. `adam_params`: the older name of `optim_params`.
        """
        params = _get_adam_params("optim_step", optim_params, adam_params)
        if self.recorder is not None:
            self.recorder.record_step(params)
        backwards, self._pending_backwards = self._pending_backwards, []
        future = self._submit("optim_step", params, dependencies=backwards)
        return APIFuture(future, OptimStepResponse)

    def train_step(
        self,
        calls: Sequence[tuple[Sequence[Datum], str, Mapping[str, Any], float]],
        optim_params: AdamParams,
    ) -> tuple[list[APIFuture[ForwardBackwardOutput]], APIFuture[OptimStepResponse]]:
        """Submit `forward_backward` for each (data, loss_fn, loss_fn_config, divisor) of `calls`,
        then `optim_step`, and return their futures (an extension).

        The weights are those of the separate verbs, bit for bit. A GPU does not wait for the host
        between them, and all futures complete together. If a call fails, all of them raise its
        error; the gradients are dropped and the weights are unchanged. Raises ValueError without
        a call, or as `forward_backward` does.
        """
        if not calls:
            raise ValueError("train_step received no calls: pass at least one, or use optim_step")
        params = _get_adam_params("train_step", optim_params)
        records = self.recorder is not None
        arguments = []
        for data, loss_fn, config, divisor in calls:
            _validate_divisor(divisor)
            options = (divisor, True, records, True)
            arguments.append(self._make_call(data, loss_fn, dict(config), *options))
        backwards, self._pending_backwards = self._pending_backwards, []
        future = self._submit("train_step", arguments, params, dependencies=backwards)

        def select(i: int, convert: Callable[[Any], T]) -> APIFuture[T]:
            return APIFuture(future, lambda value: convert(value[0][i]))

        if self.recorder is not None:
            for i, (data, loss_fn, config, divisor) in enumerate(calls):
                output = select(i, lambda value: value).future()
                self.recorder.record_backward(data, loss_fn, dict(config), divisor, output)
            self.recorder.record_step(params)
        outputs = [select(i, _to_output) for i in range(len(calls))]
        return outputs, APIFuture(future, lambda value: OptimStepResponse(value[1]))

    # ----------------------------------------------------------------------------- saving, sampling

    def save_state(
        self,
        name: str | None = None,
        ttl_seconds: float | None = None,
        overwrite: bool = False,
        user_metadata: Mapping[str, str] | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        companions: Mapping[str, TrainingClient] | None = None,
        folder: str | Path | None = None,
    ) -> SavedState:
        """Save weights and optimizer for resuming into `<output_dir>/checkpoints/<name>`, with
        `metadata` (JSON).

        `overwrite`: replace an earlier checkpoint of that name once the new checkpoint is complete;
        otherwise an existing name is an error. `user_metadata`: string pairs, which
        `rl.RestClient().get_training_run_by_tinker_path(path)` reads. `companions` (an extension):
        other clients (a critic, for example) saved into the same checkpoint, each into the
        subfolder of its name. All of it is written or nothing.

        Without a name (an extension) it is named state-000001, -000002, ..., and is written when
        this call returns; the checkpoint's folder is `.artifact_id`. If another client of this
        service has saved under the name, it is written to `<output_dir>/model-<id>/checkpoints`.
        `folder` (an extension): the parent folder to use instead.
        """
        path = self._make_save_path("checkpoints", name, ttl_seconds, folder)
        other_model_ids = {key: client.model_id for key, client in (companions or {}).items()}
        options = ttl_seconds, other_model_ids, overwrite, self._merge_user_metadata(user_metadata)
        future = self._submit("save_state", path, dict(metadata or {}), *options)
        saved = SavedState(future, types.SaveWeightsResponse)
        if name is None:
            saved.result()
        return saved

    def save_weights_for_sampler(
        self,
        name: str,
        ttl_seconds: float | None = None,
        user_metadata: Mapping[str, str] | None = None,
        *,
        merged: bool = False,
        value_head: bool = False,
        folder: str | Path | None = None,
    ) -> APIFuture[types.SaveWeightsForSamplerResponse]:
        """Save only the weights into `<output_dir>/sampler_weights/<name>`: a Hugging Face folder,
        or a PEFT adapter for LoRA.

        `merged` (an extension): merge the adapter into the base in fp32, for engines that support
        no adapters. `value_head` (an extension): include the value head, which is omitted
        otherwise; the model is then in the subfolder model/.
        """
        if value_head:
            require_value_head(self.info, "save_weights_for_sampler with value_head")
        path = self._make_save_path("sampler_weights", name, ttl_seconds, folder)
        options = merged, ttl_seconds, value_head, self._merge_user_metadata(user_metadata)
        future = self._submit("save_for_sampler", path, *options)
        return APIFuture(future, types.SaveWeightsForSamplerResponse)

    def save_weights_external(self, *args: Any, **kwargs: Any) -> APIFuture[Any]:
        """Raise UserError: weights are written to folders here."""
        raise UserError(
            "save_weights_external is for weights stored by a hosted service: use "
            "save_weights_for_sampler, which writes a folder"
        )

    def save_weights_and_get_sampling_client(
        self,
        name: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
        kind: Literal["snapshot"] = "snapshot",
    ) -> SamplingClient:
        """Return a sampling client of the current weights. Nothing is written:
        `save_weights_for_sampler(name)` does that.

        `name` has no effect, as in Tinker's client. `retry_config` has no effect, since no requests
        are sent over a network, and neither has `record_stability_info`: the learner always records
        its samples.
        """
        if kind != "snapshot":
            raise UserError(
                "kind is 'snapshot' (a sampling client keeps its weights; make a new client "
                f"after each update), got {kind!r}"
            )
        return self._take_snapshot("snapshot")

    def _take_snapshot(self, verb: str) -> SamplingClient:
        """Return a sampling client of the weights that a verb takes a snapshot of."""
        version_id = self._context.next_version_id()
        created = self._submit(verb, version_id)
        return SamplingClient(self._context, version_id, created, self.info)

    def create_sampling_client(
        self, model_path: str, retry_config: Any = None, record_stability_info: bool = False
    ) -> SamplingClient:
        """Create a sampling client of saved weights, as
        `ServiceClient.create_sampling_client(model_path)` does.
        """
        return SamplingClient.from_weights(self._context, model_path)

    def get_base_sampling_client(self) -> SamplingClient:
        """Return a sampling client of the base model under the LoRA adapter, which shares the base
        weights with the policy's sampler (an extension).

        Raises UserError for a client that trains full weights: it keeps no base.
        """
        if self.info["lora_rank"] is None:
            raise UserError(
                "get_base_sampling_client needs a LoRA client: a client that trains full weights "
                "keeps no base weights"
            )
        return self._take_snapshot("snapshot_base")

    def load_state(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[types.LoadWeightsResponse]:
        """Load only the weights of a checkpoint; the optimizer starts fresh. A folder needs no
        token.
        """
        return self._load(path, False)

    def load_state_with_optimizer(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[types.LoadWeightsResponse]:
        """Load weights, optimizer and generator state of a checkpoint."""
        return self._load(path, True)

    def _load(self, path: str, with_optimizer: bool) -> APIFuture[types.LoadWeightsResponse]:
        path = expand_path(path)
        future = self._submit("load_state", path, with_optimizer)
        self._pending_backwards = [future]  # it drops what earlier backwards, failed ones too, left
        return APIFuture(future, lambda _: types.LoadWeightsResponse(path))

    def _make_save_path(
        self,
        kind: Literal["checkpoints", "sampler_weights"],
        name: str | None,
        ttl_seconds: float | None,
        folder: str | Path | None = None,
    ) -> str:
        """Return the folder to save to, in `folder` if it is set. Raises BadRequestError for an
        invalid name or `ttl_seconds`.
        """
        parent = Path(folder).expanduser() if folder is not None else None
        if name is None:
            name = _choose_next_name(parent or self._context.get_save_parent(self.model_id, kind))
        if not checkpoint_folder.is_checkpoint_name(name):
            raise BadRequestError(
                f"a checkpoint's name is letters, digits, '.', '_' and '-', got {name!r:.100}"
            )
        if ttl_seconds is not None:
            validate_number(
                "ttl_seconds",
                ttl_seconds,
                "a number of seconds above 0, or None to keep it",
                minimum=0,
                open_ends=True,
            )
        return self._context.choose_save_folder(self.model_id, kind, name, parent)

    def _merge_user_metadata(self, user_metadata: Mapping[str, str] | None) -> dict[str, str]:
        """Return the user metadata of service, client and call, merged in this order."""
        return {
            **self._context.user_metadata,
            **self._user_metadata,
            **check_user_metadata(user_metadata),
        }

    # -------------------------------------------------------------------------------------- queries

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer. Raises ValueError if it has none."""
        tokenizer = self.info["tokenizer"]
        if tokenizer is None:
            raise ValueError(
                f"the model {self.info['base_model']!r} has no tokenizer: use token ids"
            )
        return tokenizer

    def get_info(self) -> types.GetInfoResponse:
        """Return the model's details in Tinker's type."""
        info, rank = self.info, self.info["lora_rank"]
        data = types.ModelData(
            info["arch"], info["base_model"], getattr(info["tokenizer"], "name_or_path", None)
        )
        return types.GetInfoResponse(
            data, str(self.model_id), rank is not None, rank, info["base_model"]
        )

    def get_console_url(self) -> str:
        """Return the service's output folder, since no console exists."""
        return self._context.absolute_output_dir()

    def get_telemetry(self) -> None:
        """Return None: no telemetry is sent."""

    forward_async = make_async(forward)
    forward_backward_async = make_async(forward_backward)
    forward_backward_custom_async = make_async(forward_backward_custom)
    optim_step_async = make_async(optim_step)
    save_state_async = make_async(save_state)
    save_weights_for_sampler_async = make_async(save_weights_for_sampler)
    save_weights_external_async = make_async(save_weights_external)
    load_state_async = make_async(load_state)
    load_state_with_optimizer_async = make_async(load_state_with_optimizer)
    save_weights_and_get_sampling_client_async = make_awaited(save_weights_and_get_sampling_client)
    create_sampling_client_async = make_awaited(create_sampling_client)
    get_info_async = make_async(get_info)


class _InvalidAdamParams(BadRequestError, TypeError):
    """Signal that a verb received another type than AdamParams."""


def _get_adam_params(verb: str, *arguments: AdamParams | None) -> AdamParams:
    """Return the only argument that is not None. Raises _InvalidAdamParams if it is no
    AdamParams.
    """
    params = [argument for argument in arguments if argument is not None]
    if len(params) != 1 or not isinstance(params[0], AdamParams):
        received = " and ".join(type(argument).__name__ for argument in params) or "nothing"
        raise _InvalidAdamParams(
            f"{verb} takes a single types.AdamParams (the only optimizer here), got {received}"
        )
    return params[0]


def _validate_divisor(divisor: float) -> None:
    expected = "a positive number that divides the sum"
    validate_number("divisor", divisor, expected, minimum=0, open_ends=True)


def _choose_next_name(parent: Path) -> str:
    """Return the first name of state-000001, ... after all checkpoints in a folder."""
    matches = (re.fullmatch(r"state-(\d+)", path.name) for path in parent.glob("state-*"))
    return f"state-{max((int(match[1]) for match in matches if match), default=0) + 1:06d}"


def _to_output(value: tuple[list[dict[str, Any]], dict[str, float]]) -> ForwardBackwardOutput:
    """Return the verb's (outputs, metrics) in Tinker's type."""
    outputs, metrics = value
    return ForwardBackwardOutput(
        [{k: TensorData._of(v) for k, v in item.items()} for item in outputs], metrics
    )


def forward_backward_microbatches(
    client: TrainingClient,
    data: Sequence[Datum],
    loss_fn: str,
    loss_fn_config: Mapping[str, Any] | None = None,
    *,
    backward: bool = True,
) -> Generator[None, None, ForwardBackwardOutput]:
    """Run `client.forward_backward` (or `forward` if `backward` is false), bit-identically, and
    yield between micro-batches.

    A verb submitted between two micro-batches (sampling steps, say) runs between them: it waits for
    a micro-batch instead of the whole call. Raises what the call raises. An update after a failed
    micro-batch is refused, as after a failed call.
    """
    call = client._make_call(data, loss_fn, dict(loss_fn_config or {}), 1.0, backward, False, True)
    outputs: dict[int, dict[str, Any]] = {}
    metrics, temperature, index, num_microbatches = {"loss:sum": 0.0}, 1.0, 0, 1
    while index < num_microbatches:
        future = client._submit("forward_backward_microbatch", index, *call)
        if backward:
            client._pending_backwards.append(future)
        microbatch_outputs, sums, temperature, num_microbatches = future.result()
        outputs |= microbatch_outputs
        metrics |= {name: metrics.get(name, 0.0) + value for name, value in sums.items()}
        index += 1
        if index < num_microbatches:
            yield
    rows = [outputs[i] for i in range(len(call[0]))]
    return _to_output((rows, {**metrics, "temperature:mean": temperature}))


def drop_gradients(client: TrainingClient) -> None:
    """Discard the gradients accumulated since the last update, because that update will not be
    requested.
    """
    client._pending_backwards.clear()
    client._submit("drop_gradients").result()
