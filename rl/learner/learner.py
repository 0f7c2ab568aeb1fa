"""Train a rank's share of a model: forward, backward over micro-batches, optimizer step.

Gradients are those of a SUM of token losses over every datum of every call since the last step,
divided by the caller's divisor. The split of the datums into calls, micro-batches and ranks does
not change them.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from rl.distributed import collectives, get_launch_sharding
from rl.errors import UserError
from rl.images import get_image_reader
from rl.layers import ExpertReplay, describe_layers, get_hidden_size, replay_experts
from rl.learner.activation_memory import enable_gradient_checkpointing, offload_layer_inputs
from rl.learner.backend import (
    Backend,
    load_first_layers,
    make_skeleton,
    move_to_device,
)
from rl.learner.backend_factory import make_backend
from rl.learner.call_results import (
    CallOutput,
    LaunchedCall,
    LearnerCall,
    adds_gradient,
    collect_outputs,
    read_sums,
    sum_over_ranks,
)
from rl.learner.context_parallel import ContextParallel, check_divisible
from rl.learner.context_parallel_probe import attend_batch, find_group_fault_on_all_ranks
from rl.learner.expert_parallel import ExpertGroup, check_experts
from rl.learner.frozen_base import convert_frozen_
from rl.learner.head_memory import choose_kept_bytes
from rl.learner.layout_probe import (
    find_layout_faults_on_all_ranks,
    select_attention,
    use_cpu_attention,
)
from rl.learner.logprob_head import HeadRequest, LogprobHead
from rl.learner.microbatches import (
    MicroBatchPlanner,
    RankBatch,
    merge_sub_batches,
    sum_terms,
)
from rl.learner.packing import PackedBatch
from rl.learner.router_aux_loss import RouterAuxLoss
from rl.learner.sampling_record import SamplingRecord
from rl.learner.varlen_attention import VarlenAttention, make_varlen_attention
from rl.losses import LossSpec
from rl.models import (
    LoadedModel,
    get_tensor_shape,
    is_lora,
    is_value_head_parameter,
    skip_packing_search,
    unwrap_model,
)
from rl.sampler import find_rope_switch
from rl.types import AdamParams, Datum
from rl.types.feature_table import check_features
from rl.types.number_checks import validate_target_ids


@dataclass(frozen=True)
class LearnerSettings:
    """Hold the settings of a learner.

    token_budget: positions in a micro-batch. layout: see packing. fused: kernels for logprobs.
    offload_activations: see rl.learner.activation_memory; only with gradient_checkpointing.
    kept_bytes: see linear_logprob; None: see rl.learner.head_memory. optimizer: see
    rl.learner.adamw. router_replay: tokens with recorded experts in their datum are routed to those
    experts. router_aux_loss_coef: see rl.learner.router_aux_loss. context_parallel_size: number of
    ranks that share a micro-batch (rl.learner.context_parallel). expert_parallel_size: number of
    ranks that divide the experts (rl.learner.expert_parallel). varlen: whether attention takes the
    lengths of sequences (rl.learner.varlen_attention); None: on CUDA, if torch's kernel can.
    """

    token_budget: int = 16384
    layout: str = "auto"
    fused: bool = True
    gradient_checkpointing: bool = False
    offload_activations: bool = False
    optimizer: str = "adamw"
    router_replay: bool = False
    router_aux_loss_coef: float = 0.0
    kept_bytes: int | None = None
    context_parallel_size: int = 1
    expert_parallel_size: int = 1
    varlen: bool | None = None

    def __post_init__(self) -> None:
        if self.offload_activations and not self.gradient_checkpointing:
            raise ValueError("offload_activations needs gradient_checkpointing: set it too")
        if self.context_parallel_size > 1:
            features = {"router replay": self.router_replay}
            features["router aux loss"] = bool(self.router_aux_loss_coef)
            check_features(("context parallelism", *(name for name in features if features[name])))


class Learner:
    """Hold a model under the accelerator with its optimizer.

    Every rank holds a learner and makes the same calls.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        accelerator: Any,
        settings: LearnerSettings,
        base_dtype: str = "fp32",
        group: collectives.RankGroup | None = None,
        expert_group: ExpertGroup | None = None,
    ):
        """Set up the backend and the output head. `base_dtype`: storage type of frozen matrices
        (rl.learner.frozen_base). `group`: the ranks that share micro-batches with this rank.
        `expert_group`: those that divide the experts with this rank.

        Raises UserError if there is a group, but the model cannot be divided by positions, or by
        experts.
        """
        self.loaded = loaded
        self.accelerator = accelerator
        self.settings = settings
        self.model = loaded.model
        if settings.gradient_checkpointing:
            enable_gradient_checkpointing(loaded)
            if settings.offload_activations:
                offload_layer_inputs(loaded.model)
        self.trainable: dict[str, Tensor] = {
            n: p for n, p in self.model.named_parameters() if p.requires_grad
        }
        # Sharding replaces a parameter's shape.
        self.parameter_shapes = {n: p.shape for n, p in self.model.named_parameters()}
        self.uses_flash_attention = select_attention(self.model, accelerator)
        self.layers = describe_layers(self.model)
        self.router_aux_loss = RouterAuxLoss(
            self.model, self.layers.experts, settings.router_aux_loss_coef, loaded.name
        )
        self.reader = get_image_reader(unwrap_model(self.model))
        self.vocabulary = loaded.vocab_size
        self.length_switch = find_rope_switch(self.model)
        self.context_parallel: ContextParallel | None = None
        self.varlen: VarlenAttention | None = None
        if group is not None:
            check_divisible(self.model, self.layers, group.size, loaded.name)
            self.context_parallel = ContextParallel(group, accelerator.device)
        self.expert_group = expert_group
        if expert_group is not None:
            size = expert_group.group.size
            check_experts(self.model, self.layers, size, collectives.world(), loaded.name)
        if loaded.lazy_weights is not None:
            self.backend = self._make_sharded_backend(base_dtype)
        else:
            self.backend = self._make_full_backend(base_dtype)
        self.planner = MicroBatchPlanner(
            settings.token_budget,
            settings.layout,
            frozenset(self.layouts),
            get_hidden_size(self.model),
            accelerator.device,
            self.length_switch,
            self.reader is not None,
            group,
            self.varlen is not None,
        )
        kept_bytes, kind = settings.kept_bytes, settings.optimizer
        self.head.kept_bytes = choose_kept_bytes(
            kept_bytes, self.model, self.parameter_shapes, self.trainable, accelerator, kind
        )
        # FSDP replaces parameters by shards: drop the references to the full parameters.
        self.trainable = dict(self.backend.trainable)
        self.is_lora = is_lora(self.model)
        # the value head's parameters; the sampler has no value head
        self.value_head_names = [name for name in self.trainable if is_value_head_parameter(name)]
        self.version = 0  # number of updates; samples and datums are compared by it
        self.has_gradient = False
        self.num_micro_batches = 0  # number of micro-batches of a rank in the last call
        self.sampling_record = SamplingRecord()

    def _make_full_backend(self, base_dtype: str) -> Backend:
        """Return the backend of a loaded model, after probing it.

        The probe comes before sharding, because a sharded model may not run it.
        """
        model, accelerator = self.model, self.accelerator
        if base_dtype == "fp32":
            move_to_device(model, accelerator)
        # Autocast as in training: flash attention does not accept fp32.
        with accelerator.autocast(), use_cpu_attention(model):
            self._probe_layouts(model)
            # The head also runs a check on the model.
            self.head = LogprobHead(
                model, fused=self.settings.fused, kept_bytes=self.settings.kept_bytes
            )
        shell = make_skeleton(model) if base_dtype == "4bit" else None
        # The probe runs in fp32, which shows faults best, and on the CPU, because the model may not
        # fit the device in fp32.
        if base_dtype != "fp32":
            convert_frozen_(model, base_dtype, accelerator.device)
            move_to_device(model, accelerator)
        return make_backend(
            model,
            self.trainable,
            accelerator,
            self.settings.optimizer,
            shell,
            expert_group=self.expert_group,
        )

    def _make_sharded_backend(self, base_dtype: str) -> Backend:
        """Return the backend of a model with weights still in files: each rank reads its shard.

        Rank 0, with the ranks that share its micro-batches, first probes the first layers.
        """
        model, accelerator, settings = self.model, self.accelerator, self.settings
        assert self.loaded.lazy_weights is not None
        unread, self.loaded.lazy_weights = self.loaded.lazy_weights.for_wrapped_model(model), None
        with collectives.all_or_none(accelerator.device):
            probes = collectives.rank() < settings.context_parallel_size
            trial = load_first_layers(model, unread) if probes else None
        fused = torch.zeros(1, device=accelerator.device)
        with (
            accelerator.autocast(),
            contextlib.nullcontext() if trial is None else use_cpu_attention(trial),
        ):
            self._probe_layouts(trial)
            if trial is not None:
                fused += LogprobHead(trial, fused=settings.fused).fused
        del trial
        collectives.all_sum_([fused])
        self.head = LogprobHead(
            model, fused=bool(fused), kept_bytes=settings.kept_bytes, check=False
        )
        convert_frozen_(model, base_dtype, accelerator.device, empty=True)
        return make_backend(
            model,
            self.trainable,
            accelerator,
            lazy_weights=unread,
            expert_group=self.expert_group,
        )

    def _probe_layouts(self, model: Any | None) -> None:
        """Find the exact layouts by probing `model` (rl.learner.layout_probe).

        `model` is None on a rank that does not probe. Raises UserError if the requested layout is
        not exact, or if context parallelism is not. If attention cannot take the lengths of
        sequences, layouts are probed again with masks.
        """
        requested, training = self.settings.layout, self.settings.gradient_checkpointing
        candidates = [
            "padded",
            requested
            if requested != "auto"
            else "packed"
            if self.uses_flash_attention
            else "shared",
        ]
        probe = functools.partial(
            find_layout_faults_on_all_ranks,
            model,
            sorted(set(candidates)),
            training=training,
            device=self.accelerator.device,
        )
        if not self.uses_flash_attention:
            self.varlen = make_varlen_attention(self.model, self.accelerator, self.settings.varlen)
        faults = probe(varlen=self.varlen)
        if self.varlen is not None and (
            candidates[1] in faults
            or self._find_group_fault(model, set(candidates) - faults.keys())
            or not self.varlen.kernel_agrees()  # last: for the heads of a rank of the group too
        ):
            self.varlen = None
            faults = probe()
        kind = type(unwrap_model(self.model)).__name__
        if "padded" in faults:
            raise UserError(
                f"{self.loaded.name} ({kind}) cannot be trained: sequences in a batch must not "
                "affect each other, and a token must not affect earlier tokens, but "
                f"{faults['padded']}. Use a causal language model (a decoder: is_decoder in its "
                "config.json)"
            )
        if requested in faults:
            exact = "padded" if requested != "padded" else "auto"
            raise UserError(
                f"layout {requested} is not exact for {self.loaded.name} ({kind}): "
                f"{faults[requested]}. Use auto or {exact}"
            )
        if "training" in faults:
            raise UserError(
                f"{self.loaded.name} ({kind}) computes different values in training mode than in "
                f"sampling: {faults['training']}. Turn gradient_checkpointing off, which needs "
                "training mode (and lower token_budget, if memory is short)"
            )
        self.layouts = set(candidates) - faults.keys()
        if self.varlen is None and (fault := self._find_group_fault(model, self.layouts)):
            raise UserError(
                f"context_parallel_size {self.settings.context_parallel_size} is not exact for "
                f"{self.loaded.name}: {fault}. Its attention has to use the AttentionInterface of "
                "transformers. Set it to 1"
            )

    def _find_group_fault(self, model: Any | None, layouts: Collection[str]) -> str | None:
        """Return how a group of ranks differs from a single rank, on all ranks; None: it does not,
        or there is no group.
        """
        parallel = self.context_parallel
        if parallel is None:
            return None
        return find_group_fault_on_all_ranks(model, parallel, layouts, self.varlen)

    # ---------------------------------------------------------------------------- forward, backward

    def run(
        self,
        datums: Sequence[Datum],
        loss: LossSpec,
        config: Mapping[str, float],
        *,
        temperature: float | Sequence[float],
        micro_batch: int | None = None,
        **options: Any,
    ) -> CallOutput:
        """Split a batch that every rank has, and return what `run_share` returns for this rank's
        share. `options`: its other arguments.
        """
        shares = self.split_batch(datums, loss.group, temperature, micro_batch)
        return self.run_share(shares[collectives.rank()], loss, config, **options)

    def split_batch(
        self,
        datums: Sequence[Datum],
        group: int = 1,
        temperature: float | Sequence[float] = 1.0,
        micro_batch: int | None = None,
    ) -> list[RankBatch]:
        """Return each rank's share of a batch (rl.learner.microbatches).

        `group`: consecutive datums that stay together. `micro_batch`: only that item of the
        `num_micro_batches` of a rank; all of them in order equal the full call, bit for bit.
        `temperature`: a number for all datums, or a number for each datum (the datums of a pair use
        that of the first).

        Raises ValueError for a target that is not a token id of the model, or experts of another
        model.
        """
        for i, datum in enumerate(datums):  # the head does not check them again
            self._check_datum(i, datum)
        temperatures = (
            [temperature] * len(datums) if isinstance(temperature, (int, float)) else temperature
        )
        return self.planner.split(datums, group, temperatures, micro_batch)

    def run_share(
        self, share: RankBatch, loss: LossSpec, config: Mapping[str, float], **options: Any
    ) -> CallOutput:
        """Return this rank's part of a call: outputs by datum index and sums of metrics.

        Outputs are logprobs, entropy and values. `options`: the other arguments of `_launch`.

        The host reads no result before the last micro-batch is launched: losses, outputs and sums
        stay on the device. Exceptions, which wait for a GPU in each micro-batch: the backward of a
        loss without `gradient_fields` (LossSpec), the backward of soft targets under a trained
        head, and layers that read on the host themselves (flash_attn on packed rows, images,
        experts).

        Raises FloatingPointError if the loss is not finite; after a backward the gradients since
        the last step are dropped then. Raises OtherRankFailed if another rank failed.
        """
        call = (share, loss, config, options)
        (output,), _ = self._run_calls([call], None)
        self.has_gradient = self.has_gradient or adds_gradient([call])
        return output

    def train_step(
        self, calls: Sequence[LearnerCall], params: AdamParams
    ) -> tuple[list[CallOutput], dict[str, float]]:
        """Run `run_share` with the arguments of each call, then `step`. Return what they return.

        The host reads no result before the update is launched. After an error in a call the weights
        are unchanged, and the caller has to drop the gradients.
        """
        self.has_gradient = self.has_gradient or adds_gradient(calls)
        return self._run_calls(calls, params)

    def _run_calls(
        self, calls: Sequence[LearnerCall], params: AdamParams | None
    ) -> tuple[list[CallOutput], dict[str, float]]:
        """Launch the calls, and with `params` an update, then read the results."""
        try:
            launched = [
                self._launch(share, loss, config, **options)
                for share, loss, config, options in calls
            ]
        except Exception as error:
            # The other ranks wait for this rank's sums, or inside a micro-batch that communicates.
            communicates = get_launch_sharding().divides or self.context_parallel is not None
            if collectives.world() > 1 and not communicates:
                self._end_failed_calls(error, len(calls), updates=params is not None)
            raise
        status = sum_over_ranks([call.sums["loss:sum"] for call in launched], failed=False)
        metrics = {}
        if params is not None:
            metrics = self.step(params, status.isfinite().all() & (status[-1] == 0))
        try:
            sums = read_sums(launched, status)
        except FloatingPointError:
            if any(call.backward for call in launched):
                self.drop_gradients()
            raise
        outputs = [collect_outputs(call.parts) for call in launched]
        return list(zip(outputs, sums, strict=True)), metrics

    def _end_failed_calls(self, error: Exception, count: int, *, updates: bool) -> None:
        """Take part in the sums of the other ranks, which learn from them that this rank failed.
        `updates`: they have launched an update after `count` calls, which this rank does not need.
        """
        traceback.clear_frames(error.__traceback__)  # the sums of gradients need memory
        zeros = [torch.zeros((), device=self.accelerator.device)] * count
        status = sum_over_ranks(zeros, failed=True)
        if updates and self.has_gradient:
            self.backend.reduce_gradients()
        # On a GPU the copy waits for the others, which may take long for their share.
        status.tolist()

    def _launch(
        self,
        share: RankBatch,
        loss: LossSpec,
        config: Mapping[str, float],
        *,
        divisor: float,
        backward: bool,
        entropy: bool = False,
        use_adapters: bool = True,
    ) -> LaunchedCall:
        """Launch the micro-batches of a call. `use_adapters`: False scores with the LoRA adapter
        disabled, like the base model; never together with `backward`.
        """
        self.num_micro_batches = share.num_micro_batches
        # A GPU that waits for the host between two micro-batches idles.
        select_tokens = partial(loss.find_gradient_tokens, config=config) if backward else None
        device = self.accelerator.device
        zero = torch.zeros((), dtype=torch.float64, device=device)
        call = LaunchedCall(loss, backward, {"loss:sum": zero})
        for batch in self.planner.make_micro_batches(share, select_tokens):
            value, token_outputs, metrics = self._run_micro_batch(
                batch, loss, config, divisor, backward, entropy, use_adapters
            )
            if batch.scale == 0.0 or not self.reports_results:
                continue
            for name, metric in {"loss:sum": value, **metrics}.items():
                call.add(name, metric)
            lengths = dict(zip(batch.datum_index, batch.lengths, strict=True))
            call.parts.append(
                (lengths, {k: tensor.detach() for k, tensor in token_outputs.items()})
            )
        return call

    def _run_micro_batch(
        self,
        batch: PackedBatch,
        loss: LossSpec,
        config: Mapping[str, float],
        divisor: float,
        backward: bool,
        entropy: bool,
        use_adapters: bool,
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Run the forward and the backward of a micro-batch; return what `_forward` returns."""
        replaying = self._router_replay(batch if use_adapters else None)
        with (
            torch.set_grad_enabled(backward),
            contextlib.nullcontext() if use_adapters else self.model.disable_adapter(),
            self.backend.micro_batch(),
            replaying as replay,
            attend_batch(self.model, batch, self.varlen, self.context_parallel),
        ):
            with record_function("whetstone/forward"):
                value, token_outputs, metrics = self._forward(
                    batch, loss, config, batch.temperature, entropy
                )
            if backward:
                with record_function("whetstone/backward"):
                    self.backend.backward(value * (batch.scale / divisor))
        if replay is not None:
            rerouted, routed = replay.counts()
            metrics = {**metrics, "rerouted:sum": rerouted, "routed:sum": routed}
        return value.detach(), token_outputs, metrics

    def _forward(
        self,
        batch: PackedBatch,
        loss: LossSpec,
        config: Mapping[str, float],
        temperature: float,
        entropy: bool,
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Return (loss, outputs of each token by name, metrics) of a micro-batch."""
        argmax_match = bool(config.get("token_accuracy"))
        parts, balances = [], []
        for side in batch.sub_batches or (batch,):
            needs_entropy = loss.needs_entropy(config)
            targets, shard = side.inputs["target_tokens"], side.shard
            request = HeadRequest(
                targets if shard is None else targets[shard.tokens],
                side.token_index if shard is None else shard.token_index,
                temperature,
                entropy or needs_entropy,
                loss.logprobs,
                argmax_match,
                entropy_gradient=needs_entropy,
                active_rows=side.gradient_tokens,
            )
            search = skip_packing_search(side.sequences)
            with search, self.router_aux_loss.record() as balance:
                part = self.head(self.backend.wrapped, request, **self._model_inputs(side))
            parts.append(self._gather_tokens(part, side))
            if balance is not None:
                balances.append(balance(side, loss))
        logp, entropy_T, values_T = merge_sub_batches(parts, batch.sub_batch_order)
        fields = batch.inputs if values_T is None else {**batch.inputs, "values": values_T}
        value, metrics = loss.compute(
            logp, entropy_T, fields, batch.cu_seqlens, config, fused=self.settings.fused
        )
        if balances:
            aux_loss, aux_metrics = sum_terms(balances)
            value, metrics = (
                value + aux_loss,
                {**metrics, "loss:sum": value.detach(), **aux_metrics},
            )
        if values_T is not None:
            # ZeRO needs every parameter, and the model's output, in the graph of every backward.
            value = (
                value
                + 0.0
                * (
                    values_T if loss.logprobs else values_T + logp.reshape(len(values_T), -1)[:, 0]
                ).sum()
            )
        token_outputs = {"logprobs": logp} if loss.logprobs else {}
        token_outputs |= {"entropy": entropy_T} if entropy else {}
        return (
            value,
            token_outputs if values_T is None else token_outputs | {"values": values_T},
            metrics,
        )

    def _check_datum(self, index: int, datum: Datum) -> None:
        """Raise ValueError if datum `index` has wrong targets, or the experts of another model."""
        targets = datum.loss_fn_inputs["target_tokens"].array
        validate_target_ids(f"datum {index}", targets, self.vocabulary)
        experts, recorded = self.layers.experts, datum.experts
        if recorded is None or not self.settings.router_replay:
            return
        columns = recorded.shape[1]
        if (
            experts is None
            or columns != len(experts.blocks) * experts.per_token
            or recorded.max(initial=-1) >= experts.count
        ):
            raise ValueError(
                f"datum {index}: its {columns} experts a token do not fit this model "
                f"({self.layers}): was it sampled from another model?"
            )

    def _router_replay(
        self, batch: PackedBatch | None
    ) -> AbstractContextManager[ExpertReplay | None]:
        """Return a context that replays the routers, if enabled and the batch records its
        experts.
        """
        if batch is None or batch.experts is None or not self.settings.router_replay:
            return contextlib.nullcontext()
        experts = self.layers.experts
        assert experts is not None  # see `_check_datum`
        return replay_experts(
            self.model, experts, batch.experts.unflatten(1, (-1, experts.per_token))
        )

    @property
    def reports_results(self) -> bool:
        """Return whether this rank reports the results of its micro-batches: of the ranks that
        share them, only the first does.
        """
        return self.context_parallel is None or self.context_parallel.group.rank == 0

    def _gather_tokens(
        self, part: tuple[Tensor | None, ...], batch: PackedBatch
    ) -> tuple[Any, ...]:
        """Return the output head's results of all tokens of the batch."""
        if self.context_parallel is None or batch.shard is None:
            return part
        return tuple(self.context_parallel.gather_tokens(x, batch.shard) for x in part)

    def _model_inputs(self, batch: PackedBatch) -> dict[str, Any]:
        """Return the forward's inputs: the tokens and images of a micro-batch."""
        inputs: dict[str, Any] = batch.make_model_inputs(self.model)
        if self.reader is not None and batch.images is not None:
            rows, lengths = zip(*batch.images, strict=True)
            inputs |= self.reader.model_inputs(
                unwrap_model(self.model), batch.input_ids, rows, [0] * len(rows), lengths
            )
        return inputs

    # ----------------------------------------------------------------------------------------- step

    def step(self, params: AdamParams, is_valid: Tensor | None = None) -> dict[str, float]:
        """Apply an AdamW update of the accumulated gradients; return the gradient norm before
        clipping.

        Without a gradient (no datum since the last step) nothing changes, and `skipped` is 1. If
        the gradient is not finite, or `is_valid`, a tensor [] on the device, is False, the gradient
        is dropped, nothing changes, and `skipped_nonfinite` is 1. The host reads the norm once,
        after it has launched the update (rl.learner.backend).
        """
        if not self.has_gradient:
            return {"grad_norm": 0.0, "skipped": 1.0}
        self.has_gradient = False
        with record_function("whetstone/update"):
            norm, applied = self.backend.step(params, is_valid)
        if not applied:
            return {"grad_norm": norm, "skipped_nonfinite": 1.0}
        self.version += 1
        return {"grad_norm": norm}

    @torch.no_grad()
    def scale_gradients(self, factor: float) -> None:
        """Multiply the accumulated gradients by `factor`.

        Raises UserError under DeepSpeed, which stores gradients in private buffers.
        """
        if get_launch_sharding().owns_weights:
            raise UserError(
                "gradients cannot be scaled under DeepSpeed, which stores them in private "
                "buffers: pass forward_backward a divisor"
            )
        for parameter in self.trainable.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def drop_gradients(self) -> None:
        """Discard the accumulated gradients."""
        self.backend.drop_gradients()
        self.has_gradient = False

    # ---------------------------------------------------------------------------------------- state

    def iter_weights(self, *, frozen: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield the full trained parameters in turn, without the value head: the sampler's
        weights.

        `frozen`: yield all parameters. All ranks iterate together.
        """
        names = self.parameter_shapes if frozen else self.trainable
        return self.backend.iter_weights(
            [name for name in names if not is_value_head_parameter(name)]
        )

    def full_model(self, *, adapter_only: bool) -> AbstractContextManager[Any | None]:
        """Yield the model with all its weights (or only its adapter's) on rank 0, None elsewhere.

        All ranks enter together.
        """
        return self.backend.full_model(
            list(self.trainable if adapter_only else self.parameter_shapes)
        )

    @property
    def num_parameters(self) -> int:
        """Return the number of parameters of the whole model."""
        return sum(shape.numel() for shape in self.parameter_shapes.values())

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the trainable tensors in.

        Raises ValueError naming tensors that are missing, unknown or of another shape.
        """
        missing, unknown = (
            sorted(self.trainable.keys() - tensors.keys()),
            sorted(tensors.keys() - self.trainable.keys()),
        )
        if missing or unknown:
            raise ValueError(
                f"the saved weights do not fit this model: missing {missing[:3]}, unknown "
                f"{unknown[:3]}"
            )
        for name in self.trainable:
            expected_shape, saved_shape = (
                tuple(self.parameter_shapes[name]),
                get_tensor_shape(tensors, name),
            )
            if expected_shape != saved_shape:
                raise ValueError(
                    f"{name} has shape {saved_shape} in the file, expected {expected_shape}"
                )
        self.backend.load_weights(tensors)
        self.drop_gradients()
        self.version += 1
