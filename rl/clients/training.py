"""TrainingClient: Tinker's verbs on a learner in this process (and on the ranks that serve it)."""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rl import types
from rl.clients.async_spellings import AsyncTraining
from rl.clients.call_checks import check_call, need_value_head, settled, with_images
from rl.clients.context import ServiceContext, check_words
from rl.clients.custom_loss import CustomLoss, LossHandle, bare_datums, evaluate
from rl.clients.driver import Driver
from rl.clients.futures import APIFuture, IsItsOwnFuture, SavedState
from rl.clients.sampling import SamplingClient
from rl.errors import BadRequestError, UserError
from rl.losses import CUSTOM, VALUES
from rl.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    OptimStepResponse,
    TensorData,
)
from rl.types.checked import number


class TrainingClient(AsyncTraining, IsItsOwnFuture):
    """Trains one model. Verbs return futures and run in the order they were called."""

    def __init__(
        self,
        context: ServiceContext,
        model_id: int,
        created: Future,
        user_metadata: Mapping[str, str] | None = None,
        service: Any = None,
    ):
        self._context = context
        self._driver = context.driver
        self._service = service
        self._created = created
        self._backwards: list[Future] = []  # since the last optim_step
        self.model_id = model_id
        self._user_metadata = dict(user_metadata or {})
        self._finalizer = weakref.finalize(self, _forget, context.driver, model_id)
        self._finalizer.atexit = False

    @property
    def service(self) -> Any:
        """An extension: the ServiceClient that made this client."""
        return self._service

    @property
    def info(self) -> dict[str, Any]:
        """What is known of the model: base_model, arch, vocab_size, max_context, parameters,
        device, dtype, ...
        """
        return self._created.result()

    @property
    def version(self) -> int:
        """An extension: how many updates its weights have seen, once what was submitted before is
        done; samples carry it.
        """
        return self._driver.submit("version", self.model_id).result()

    # ------------------------------------------------------------------------------------- learning

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, Any] | None = None,
        *,
        divisor: float = 1.0,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Adds the gradient of the loss's SUM over `data`, divided by `divisor` (an extension), to
        what is accumulated.

        `loss_fn_config` takes the loss's own keys and "temperature", an override: by default a loss
        with advantages scores each datum at the temperature its sample was drawn at (a batch may
        mix them), and one of unknown origin at that of this version's samples; other losses score
        at 1. `forward_backward([])` is a no-op. Raises ValueError at once for a datum that does not
        fit the loss.
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

        `entropy` adds each position's entropy to the outputs; `adapters` False turns a LoRA adapter
        off for this call, so that the base model scores (a reference that costs no memory).
        """
        if not adapters and self.info["lora_rank"] is None:
            raise ValueError(
                "adapters=False asks for the base model under a LoRA adapter; this client trains full weights"
            )
        return self._forward(
            data, loss_fn, loss_fn_config, 1.0, backward=False, entropy=entropy, adapters=adapters
        )

    def compute_values(self, inputs: Sequence[ModelInput]) -> APIFuture[list[np.ndarray]]:
        """An extension: what the value head says at each position of each input, having read it up
        to and with that position.
        """
        need_value_head(self.info, "compute_values")
        read = [settled(one, self.info) for one in inputs]
        bare = [Datum(one, {"target_tokens": np.zeros(one.length, np.int64)}) for one in read]
        check_call(bare, "cross_entropy", {}, self.info)
        future = self._driver.submit(
            "forward_backward", self.model_id, bare, VALUES, {}, 1.0, False
        )
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
        config = dict(loss_fn_config or {})
        loss, data = check_call(data, loss_fn, config, self.info, self._context)
        number(
            "divisor",
            divisor,
            "a positive number that the sum is divided by",
            least=0,
            open_ends=True,
        )
        drawn_at = self._drawn_at(data) if loss.as_sampled and "temperature" not in config else None
        future = self._driver.submit(
            "forward_backward",
            self.model_id,
            list(data),
            loss,
            config,
            divisor,
            backward,
            entropy,
            adapters,
            drawn_at,
        )
        if backward:
            self._backwards.append(future)
        return APIFuture(future, _output)

    def _drawn_at(self, data: Sequence[Datum]) -> list[float | None]:
        return [self._context.drawn.temperature_of(datum) for datum in data]

    def forward_backward_custom(
        self,
        data: Sequence[Datum],
        loss_fn: CustomLoss | LossHandle,
        loss_fn_config: Mapping[str, Any] | None = None,
        *,
        loss_type_input: Literal["logprobs"] | None = None,
        outputs: Sequence[Literal["logprobs", "values"]] = ("logprobs",),
    ) -> APIFuture[ForwardBackwardOutput]:
        """A loss of one's own on the logprobs: `loss_fn(data, logprobs) -> (loss, metrics)`,
        metrics under the names it gives them.

        `logprobs[i]` is a float32 tensor of datum i's target logprobs that records gradients. It
        runs on the driver: a forward, the user's loss and its gradient dC/dlogprobs, then
        `cross_entropy` with weights -dC/dlogprobs. `loss_fn_config` takes "temperature"; by default
        each datum's own, as in `forward_backward`. `outputs` (an extension): what the loss gets
        after `data`, in that order; "values" are the value head's, one a position. A loss of values
        alone needs no `target_tokens`, and the vocabulary is not computed for it.
        """
        if loss_type_input not in (None, "logprobs"):
            raise BadRequestError(f"loss_type_input is 'logprobs', got {loss_type_input!r}")
        config, spec = dict(loss_fn_config or {}), CUSTOM if "logprobs" in outputs else VALUES
        data = with_images(data, self.info)
        bare = bare_datums(data, outputs)
        if "values" in outputs:
            need_value_head(self.info, "outputs")
        check_call(bare, "cross_entropy", config, self.info)
        drawn_at = self._drawn_at(data) if "temperature" not in config else None

        def run(backward: bool) -> Future:
            return self._driver.submit(
                "forward_backward",
                self.model_id,
                bare,
                spec,
                config,
                1.0,
                backward,
                False,
                True,
                drawn_at,
            )

        found = _output(run(False).result()).loss_fn_outputs
        loss, metrics = evaluate(loss_fn, data, bare, found, outputs)
        future = run(True)
        self._backwards.append(future)

        def convert(value: Any) -> ForwardBackwardOutput:
            output = _output(value)
            output.metrics = {"loss:sum": loss, **metrics}
            return output

        return APIFuture(future, convert)

    def scale_gradients(self, factor: float) -> APIFuture[None]:
        """An extension: what is accumulated times `factor`, such as one over a count that was not
        known before. Not under DeepSpeed.
        """
        number("factor", factor, "a positive number", least=0, open_ends=True)
        future = self._driver.submit("scale_gradients", self.model_id, factor)
        self._backwards.append(future)
        return APIFuture(future)

    def optim_step(
        self, optim_params: AdamParams | None = None, *, adam_params: AdamParams | None = None
    ) -> APIFuture[OptimStepResponse]:
        """One AdamW update of the accumulated gradient; metrics hold `grad_norm` (before clipping).

        Nothing accumulated: nothing changes, `skipped` is 1. A forward_backward that failed since
        the last step: an error, the gradients are dropped, the weights are unchanged.
        `adam_params`: the older name of `optim_params`.
        """
        given = [params for params in (optim_params, adam_params) if params is not None]
        if len(given) != 1 or not isinstance(given[0], AdamParams):
            got = " and ".join(type(params).__name__ for params in given) or "nothing"
            raise _NotAdam(
                f"optim_step takes one types.AdamParams (the only optimizer here), got {got}"
            )
        backwards, self._backwards = self._backwards, []
        future = self._driver.submit("optim_step", self.model_id, given[0], after=backwards)
        return APIFuture(future, OptimStepResponse)

    # ----------------------------------------------------------------------------- saving, sampling

    def save_state(
        self,
        name: str | None = None,
        ttl_seconds: float | None = None,
        overwrite: bool = False,
        user_metadata: Mapping[str, str] | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        beside: Mapping[str, TrainingClient] | None = None,
        folder: str | Path | None = None,
    ) -> SavedState:
        """Weights and optimizer, resumable, into `<output_dir>/checkpoints/<name>`; `metadata`
        (JSON) travels along.

        `overwrite`: what was saved under the name before is replaced once this is whole; an error
        otherwise. `user_metadata`: words of your own, which
        `rl.RestClient().get_training_run_by_tinker_path(path)` reads. `beside` (an extension):
        other clients (a critic, say) whose state goes into the same checkpoint, each in the folder
        of its name there: all of it is whole or absent together.
        Without a name (an extension) it is called state-000001, -000002, ..., and is written when
        this returns; the checkpoint's folder is `.artifact_id`. A name that another client of this
        service has saved under is this one's too: it lies in `<output_dir>/model-<id>/checkpoints`
        then. `folder` (an extension): where it lies instead, under its name.
        """
        path = self._path(
            "checkpoints", self._next_name() if name is None else name, ttl_seconds, folder
        )
        others = {key: client.model_id for key, client in (beside or {}).items()}
        words = self._words(user_metadata)
        future = self._driver.submit(
            "save_state",
            self.model_id,
            path,
            dict(metadata or {}),
            ttl_seconds,
            others,
            overwrite,
            words,
        )
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
        """Weights alone into `<output_dir>/sampler_weights/<name>`: a Hugging Face folder, or a
        PEFT adapter for LoRA.

        `merged` (an extension): the adapter merged into the base in fp32, for engines that take no
        adapters. `value_head` (an extension): with the value head, which else is left out: that
        folder is then model/ in the one of this name.
        """
        if value_head:
            need_value_head(self.info, "save_weights_for_sampler with value_head")
        path = self._path("sampler_weights", name, ttl_seconds, folder)
        words = self._words(user_metadata)
        future = self._driver.submit(
            "save_for_sampler", self.model_id, path, merged, ttl_seconds, value_head, words
        )
        return APIFuture(future, types.SaveWeightsForSamplerResponse)

    def save_weights_external(self, *args: Any, **kwargs: Any) -> APIFuture[Any]:
        raise UserError(
            "save_weights_external is for weights that lie with a service: save_weights_for_sampler writes a folder here"
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

        `name` has no effect, as in Tinker's client. Nor have `retry_config`, since nothing is sent
        here, and `record_stability_info`: the learner always knows its samples.
        """
        if kind != "snapshot":
            raise UserError(
                f"kind is 'snapshot' (a sampling client stays at its weights; make one after each update), got {kind!r}"
            )
        version_id = self._context.next_version_id()
        created = self._driver.submit("snapshot", self.model_id, version_id)
        return SamplingClient(self._context, version_id, created, self.info)

    def create_sampling_client(
        self, model_path: str, retry_config: Any = None, record_stability_info: bool = False
    ) -> SamplingClient:
        """A sampler of saved weights, as `ServiceClient.create_sampling_client(model_path)` makes
        it.
        """
        return SamplingClient.of_weights(self._context, model_path)

    def get_base_sampling_client(self) -> SamplingClient:
        """An extension: a sampling client of the base model under the LoRA adapter, whose weights
        it shares with the policy's sampler.

        Raises UserError for a client that trains full weights: it keeps no base.
        """
        if self.info["lora_rank"] is None:
            raise UserError(
                "get_base_sampling_client needs a LoRA client: one that trains full weights has no other ones beside them"
            )
        version_id = self._context.next_version_id()
        created = self._driver.submit("snapshot_base", self.model_id, version_id)
        return SamplingClient(self._context, version_id, created, self.info)

    def load_state(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[types.LoadWeightsResponse]:
        """The weights of a checkpoint alone; the optimizer starts fresh. A folder needs no token."""
        return self._load(path, False)

    def load_state_with_optimizer(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[types.LoadWeightsResponse]:
        return self._load(path, True)

    def _load(self, path: str, with_optimizer: bool) -> APIFuture[types.LoadWeightsResponse]:
        future = self._driver.submit("load_state", self.model_id, str(path), with_optimizer)
        return APIFuture(future, lambda _: types.LoadWeightsResponse(str(path)))

    def _next_name(self) -> str:
        """The first of state-000001, ... after all that were written."""
        there = Path(self._context.output_dir, "checkpoints").glob("state-*")
        numbers = [
            int(found[1]) for path in there if (found := re.fullmatch(r"state-(\d+)", path.name))
        ]
        return f"state-{max(numbers, default=0) + 1:06d}"

    def _path(
        self,
        kind: Literal["checkpoints", "sampler_weights"],
        name: str,
        ttl_seconds: float | None,
        folder: str | Path | None = None,
    ) -> str:
        if (
            not isinstance(name, str)
            or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", name)
            or ".partial-" in name
        ):
            raise BadRequestError(
                f"a checkpoint's name is letters, digits, '.', '_' and '-', got {name!r}"
            )
        if ttl_seconds is not None:
            number(
                "ttl_seconds",
                ttl_seconds,
                "a number of seconds above 0, or None to keep it",
                least=0,
                open_ends=True,
            )
        return (
            str(Path(folder, name))
            if folder is not None
            else self._context.place_of(self.model_id, kind, name)
        )

    def _words(self, user_metadata: Mapping[str, str] | None) -> dict[str, str]:
        return {**self._context.user_metadata, **self._user_metadata, **check_words(user_metadata)}

    # --------------------------------------------------------------------------------------- asking

    def get_tokenizer(self) -> Any:
        tokenizer = self.info["tokenizer"]
        if tokenizer is None:
            raise ValueError(
                f"the model {self.info['base_model']!r} came without a tokenizer; it is used with token ids"
            )
        return tokenizer

    def release(self) -> None:
        """Gives the model's memory back now rather than when the client is collected."""
        self._finalizer()

    def get_info(self) -> types.GetInfoResponse:
        info, rank = self.info, self.info["lora_rank"]
        data = types.ModelData(
            info["arch"], info["base_model"], getattr(info["tokenizer"], "name_or_path", None)
        )
        return types.GetInfoResponse(
            data, str(self.model_id), rank is not None, rank, info["base_model"]
        )

    def get_console_url(self) -> str:
        """Where this client's service writes: there is no console."""
        return self._context.shown_place()

    def get_telemetry(self) -> None:
        """Nothing is sent anywhere."""


class _NotAdam(BadRequestError, TypeError):
    """optim_step got something else than AdamParams."""


def _forget(driver: Driver, model_id: int) -> None:
    if not driver.closed:
        driver.submit("forget_model", model_id)


def _output(value: tuple[list[dict[str, Any]], dict[str, float]]) -> ForwardBackwardOutput:
    outputs, metrics = value
    return ForwardBackwardOutput(
        [{k: TensorData(v, "float32") for k, v in item.items()} for item in outputs], metrics
    )
