"""Measure the memory of a micro-batch by running it on tensors without memory: no weights are read,
nothing is computed.

The model's modules, this project's output head and torch's autograd run under torch's
FakeTensorMode. Sizes therefore equal those of the real run for any architecture, with LoRA,
gradient checkpointing, autocast and every kind of head. A dispatch mode tracks allocated and freed
storages. It cannot see inside a custom op (see `HEAD_BLOCKS`).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels import estimate_workspace_bytes
from rl.distributed import PERSISTENCE_THRESHOLD
from rl.errors import UserError
from rl.layers import (
    ModelLayers,
    describe_layers,
    find_layer_list,
    find_layer_period,
    find_max_context,
    get_config_number,
    get_hidden_size,
    keep_first_layers_,
    layers_share_tensors,
)
from rl.learner import (
    ContextParallel,
    HeadRequest,
    LogprobHead,
    SequenceBounds,
    SequenceShard,
    VarlenAttention,
    attend_by_kernel,
    check_divisible,
    check_experts,
    keep_experts_,
    offload_layer_inputs,
    supports_varlen_attention,
)
from rl.memory_plan.activations import AllocationRecord, StorageTracker
from rl.memory_plan.shapes import MicroBatch, MicroBatchMemory, ModelShape
from rl.models import (
    LoadedModel,
    add_lora,
    compute_unadapted_share,
    is_vision_parameter,
    load_skeleton,
    make_attention_mask,
    skip_packing_search,
    unwrap_model,
)
from rl.sampler import (
    cast_frozen_,
    count_unsharded_parameters,
    find_mlp_divisor,
    is_supported,
    iter_frozen_matrices,
)
from rl.types import LoraConfig

# bytes of the score blocks in which kernels.linear_logprob traverses the vocabulary, off CUDA
HEAD_BLOCKS = 32 << 20


@dataclass(frozen=True)
class ComputeConfig:
    """Describe the way a backend runs a micro-batch.

    dtype            of the weights
    autocast         bf16 computation on fp32 weights
    keeps_gradients  they accumulate in `.grad` (otherwise they are freed at once)
    cuda             the output head runs in kernels, with larger slabs of scores; what it saves
                     is not counted here (`kept_logits` counts it)
    offloads         the inputs of checkpointed layers are in host memory
    saved_bytes      bytes that the head may save off CUDA, as `LearnerSettings.kept_bytes`
    bf16_base        the frozen matrices are bf16
    expert_parallel_size  number of ranks that divide the experts
    """

    dtype: torch.dtype = torch.float32
    autocast: bool = False
    keeps_gradients: bool = True
    fused: bool = True
    checkpointing: bool = False
    offloads: bool = False
    cuda: bool = False
    saved_bytes: int | None = None
    bf16_base: bool = False
    expert_parallel_size: int = 1


class AbsentTensor:
    """Describe a tensor that is held elsewhere, by its size alone."""

    def __init__(self, tensor: Tensor):
        self.shape, self.dtype = tensor.shape, tensor.dtype

    def restore(self) -> Tensor:
        """Return a tensor of this size."""
        return torch.empty(self.shape, dtype=self.dtype)


class ModelSkeleton:
    """Build a model without weights, as the learner would train it. Raises UserError if the model
    is not available.

    Layers of the same kind hold the same memory. Of a deep model only the first layers are kept,
    and the memory of the others is extrapolated (`AllocationRecord.extrapolate_block`): a trace of
    all layers gives the same bytes and takes several seconds, and a plan makes about eight.
    `all_layers`: keep all layers.
    """

    def __init__(
        self,
        base_model: str,
        tokenizer: str | None,
        lora: LoraConfig | None,
        *,
        all_layers: bool = False,
    ):
        self._arguments = base_model, tokenizer, lora
        with torch.device("meta"):
            loaded = load_skeleton(base_model, tokenizer=tokenizer)
            described, fast = describe_layers(loaded.model), is_supported(loaded.model)
            share = None if lora is None else compute_unadapted_share(loaded.model, lora)
            layers = find_layer_list(loaded.model)
            depth, period, before = find_layer_period(loaded.model) or (0, 1, 0)
            short = before + max(period, 2) + (depth - before) % period
            # number of periods that are left out; none if layers share a tensor, which is held once
            self._omitted = 0
            if layers is not None and not all_layers and not layers_share_tensors(layers[1]):
                self._omitted = max(0, (depth - short) // period - 1)
            if layers is not None and self._omitted:
                keep_first_layers_(loaded.model, layers, short + period)
            self._loaded = loaded if lora is None else add_lora(loaded, lora, unadapted=share)
        numbers = _count_parameters(self._loaded.model, fast)
        # names of the layers at which a period begins and ends: not the first layer of all, whose
        # input may need no gradient, and not the last
        self._marked_layers: list[str] = []
        if layers is not None and self._omitted:
            self._marked_layers = [f"{layers[0]}.{before + 1 + i}" for i in (0, period)]
            keep_first_layers_(self._loaded.model, layers, short)
            fewer = _count_parameters(self._loaded.model, fast)
            keep_first_layers_(self._loaded.model, layers, short + period)
            numbers = {
                name: number + self._omitted * (number - fewer[name])
                for name, number in numbers.items()
            }
        self.shape = _make_shape(self._loaded, numbers, described, fast)
        self._described = described

    def check_divisible(self, size: int) -> None:
        """Raise UserError if the model's sequences cannot be divided among `size` ranks."""
        check_divisible(self._loaded.model, self._described, size, self.shape.name)

    def check_experts(self, size: int, world: int) -> None:
        """Raise UserError if the experts cannot be divided over groups of `size` of `world`
        ranks.
        """
        check_experts(self._loaded.model, self._described, size, world, self.shape.name)

    def measure_micro_batch(self, batch: MicroBatch, config: ComputeConfig) -> MicroBatchMemory:
        """Return what a micro-batch holds at the peak of its forward and backward. Raises UserError
        for a model whose forward depends on tensor values. Attention that cannot take the lengths
        of sequences is traced with a mask.
        """
        try:
            record, inside_op = self._trace(batch, config)
        except (RuntimeError, ValueError) as error:
            if batch.keys:
                masked = dataclasses.replace(batch, masked=True, keys=0, sequences=0)
                return self.measure_micro_batch(masked, config)
            first = str(error).strip().partition("\n")[0]
            raise UserError(
                f"the memory of a micro-batch of {self.shape.name} cannot be computed without "
                "weights: its forward does not run on tensors without values "
                f"({type(error).__name__}: {first}). Measure it with a short run: --steps 1 "
                "--eval-every 0, with the intended lengths"
            ) from error
        if not self._omitted:
            peak = record.peak
        elif record.block is not None:
            peak = record.extrapolate_block(self._omitted)
        else:  # its layers do not run one by one
            whole = ModelSkeleton(*self._arguments, all_layers=True)
            return whole.measure_micro_batch(batch, config)
        activations = peak.activations + self._attention_bytes(batch, config)
        return dataclasses.replace(peak, activations=activations, logits=peak.logits + inside_op)

    def _trace(self, batch: MicroBatch, config: ComputeConfig) -> tuple[AllocationRecord, int]:
        """Return (record of the storages, bytes that an op holds inside)."""
        # `measure_micro_batch` reports failures
        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
        # checkpointing stores the generator's state, a real tensor
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = _copy_to_fake_cpu(self._loaded.model, config.dtype)
            if config.bf16_base:
                cast_frozen_(model, torch.bfloat16, without_values=True)
            if config.expert_parallel_size > 1:
                # With evenly spread tokens a rank receives as many rows as it sends.
                keep_experts_(model, config.expert_parallel_size, 0)
            if config.checkpointing:
                model.gradient_checkpointing_enable(
                    gradient_checkpointing_kwargs={"use_reentrant": False}
                )
                model.train()
                if config.offloads:
                    offload_layer_inputs(model, AbsentTensor)
            kept_bytes = 0 if config.cuda else config.saved_bytes
            head = LogprobHead(model, fused=config.fused, kept_bytes=kept_bytes, check=False)
            storages = StorageTracker(model)
            modules = unwrap_model(model)
            storages.mark_layers([modules.get_submodule(name) for name in self._marked_layers])
            with _gradients_as_in_training(model, storages, config.keeps_gradients):
                ids = torch.zeros(batch.rows, batch.length, dtype=torch.int64)
                inputs: dict[str, Any] = {"input_ids": ids}
                if batch.masked or batch.ranks > 1 or batch.keys:
                    inputs["position_ids"] = torch.zeros_like(ids)
                if batch.masked:
                    length = batch.length * batch.ranks
                    sees = torch.ones(batch.rows, 1, length, length, dtype=torch.bool)
                    inputs["attention_mask"] = make_attention_mask(model, sees)
                at = torch.zeros(batch.tokens, dtype=torch.int64)
                autocast = torch.autocast("cpu", torch.bfloat16, enabled=config.autocast)
                # A search in tensors without values would count as found, and build a mask.
                search = skip_packing_search()
                with search, _batch_attention(modules, batch, ids), storages, autocast:
                    logp, *_ = head(model, HeadRequest(at, at, 0.8, False), **inputs)
                    storages.end_forward()
                    logp.sum().backward()
            inside_op = self._op_bytes(model, batch, config) if head.fused else 0
        return storages.get_record(), inside_op

    def _attention_bytes(self, batch: MicroBatch, config: ComputeConfig) -> int:
        """Return the bytes inside the backward of flash attention over the sequences of a row: the
        gradient of queries in fp32, each sequence rounded up to 128 positions, and that of keys and
        values for each query head (mha_varlen_bwd of torch).
        """
        if not batch.keys:
            return 0
        shape = self.shape
        size = 2 if config.autocast else config.dtype.itemsize
        queries = 4 * (batch.length * batch.ranks + 128 * batch.sequences)
        keys = 2 * size * batch.keys if shape.heads > shape.key_heads else 0
        return (queries + keys) * -(-shape.heads // batch.ranks) * shape.head_width

    def _op_bytes(self, model: Any, batch: MicroBatch, config: ComputeConfig) -> int:
        """Return the bytes inside linear_logprob, which the tracker cannot see: hidden states in
        fp32 and blocks of scores, or a slab of their gradient.
        """
        if not config.cuda:
            return batch.tokens * self.shape.hidden * 4 + HEAD_BLOCKS
        size = 2 if config.autocast else config.dtype.itemsize
        frozen = not any(
            p.requires_grad for p in unwrap_model(model).get_output_embeddings().parameters()
        )
        return estimate_workspace_bytes(
            batch.tokens, self.shape.hidden, self.shape.vocab, size, frozen=frozen
        )


class _AbsentRanks:
    """Stand in for a group of ranks: messages have the right sizes."""

    def __init__(self, size: int):
        self.size, self.rank = size, 0

    def all_to_all(self, x: Tensor) -> Tensor:
        """Return a tensor of the size of what the ranks would send."""
        return torch.empty_like(x)


def _batch_attention(
    model: Any, batch: MicroBatch, ids: Tensor
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the ranks of the batch share attention, and in which attention
    takes the lengths of sequences if the batch has keys.
    """
    index, size = None, batch.length * batch.ranks
    if batch.keys != size:  # otherwise the keys are those of the queries
        index = torch.zeros(batch.keys, dtype=torch.int64)
    ends = torch.zeros(2, dtype=torch.int32)
    bounds = SequenceBounds([size], [batch.keys], ends, ends, index) if batch.keys else None
    varlen = VarlenAttention(attend_by_kernel)
    if batch.ranks == 1:
        return varlen.use(model, bounds)
    group: Any = _AbsentRanks(batch.ranks)
    positions = ids.repeat(1, batch.ranks)
    shard = SequenceShard(ids, ids, positions, None, ids, ids, ids)
    attend = None if bounds is None else functools.partial(varlen.attend_row, bounds)
    return ContextParallel(group, ids.device).split_attention(model, shard, attend)


@functools.cache
def load_model_skeleton(
    base_model: str, tokenizer: str | None, lora: LoraConfig | None
) -> ModelSkeleton:
    """Return the model's skeleton, which is built once."""
    return ModelSkeleton(base_model, tokenizer, lora)


def trace_micro_batch(
    skeleton: ModelSkeleton, batch: MicroBatch, config: ComputeConfig
) -> MicroBatchMemory:
    """Return `ModelSkeleton.measure_micro_batch`, which is traced once, whether the trace fails or
    not. Raises UserError if it fails.
    """
    outcome = _trace_once(skeleton, batch, config)
    if isinstance(outcome, UserError):
        raise outcome.with_traceback(None)
    return outcome


@functools.cache
def _trace_once(
    skeleton: ModelSkeleton, batch: MicroBatch, config: ComputeConfig
) -> MicroBatchMemory | UserError:
    """Return the memory of a micro-batch, or the error of its trace: `cache` keeps no errors that
    are raised.
    """
    try:
        return skeleton.measure_micro_batch(batch, config)
    except UserError as error:
        return error


def _copy_to_fake_cpu(model: Any, dtype: torch.dtype) -> Any:
    """Return a copy of a model on the meta device whose tensors are (fake) CPU tensors,
    floating-point tensors in `dtype`.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(
            torch.empty(parameter.shape, dtype=dtype), requires_grad=parameter.requires_grad
        )
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return copy.deepcopy(model, memo)


def _count_parameters(model: Any, fast: bool) -> dict[str, int]:
    """Return the fields of `ModelShape` that grow with the number of layers."""

    def count(parameters: Iterable[Tensor]) -> int:
        return sum(p.numel() for p in parameters)

    unsplit, unsplit_adapters = count_unsharded_parameters(model) if fast else (0, 0)
    named = dict(model.named_parameters())
    frozen = dict(iter_frozen_matrices(model)).values()
    vision_parameters = [p for name, p in named.items() if is_vision_parameter(name)]
    head = {id(p) for p in model.get_output_embeddings().parameters()}
    linear = {id(module.weight) for module in model.modules() if type(module) is nn.Linear}
    return {
        "parameters": count(named.values()),
        "trainable": count(p for p in named.values() if p.requires_grad),
        "adapters": count(p for name, p in named.items() if "lora_" in name),
        "small": count(p for p in named.values() if p.numel() < PERSISTENCE_THRESHOLD),
        "vision_parameters": count(vision_parameters),
        "vision_trainable": count(p for p in vision_parameters if p.requires_grad),
        "matrices": count(frozen),
        "linears": count(p for p in frozen if id(p) in linear and id(p) not in head),
        "unsplit": unsplit,
        "unsplit_adapters": unsplit_adapters,
    }


def _make_shape(
    loaded: LoadedModel, numbers: Mapping[str, int], described: ModelLayers, fast: bool
) -> ModelShape:
    model, hidden = loaded.model, get_hidden_size(loaded.model)
    number = functools.partial(get_config_number, model)
    heads = number("num_attention_heads", "n_head") or 1
    kinds = set(unwrap_model(model)._no_split_modules or ())
    layers = [m for m in model.modules() if type(m).__name__ in kinds]
    routing: dict[str, int] = {}
    if (experts := described.experts) is not None:
        width = number("moe_intermediate_size", "intermediate_size") or 0
        shared = number("shared_expert_intermediate_size") or 0
        idle = experts.num_parameters * (experts.count - experts.per_token) // experts.count
        routing = {
            "experts_per_token": experts.per_token,
            "routed_width": experts.per_token * width + shared,
            "idle_experts": idle,
            "layer_experts": experts.num_parameters // len(experts.blocks),
        }
    return ModelShape(
        name=loaded.name,
        largest=max(p.numel() for p in model.parameters()),
        layers=number("num_hidden_layers", "n_layer") or 1,
        hidden=hidden,
        heads=heads,
        key_heads=number("num_key_value_heads") or heads,
        head_width=number("head_dim") or hidden // heads,
        mlp=number("intermediate_size", "n_inner", "ffn_dim") or 4 * hidden,
        vocab=loaded.vocab_size,
        max_context=find_max_context(model),
        fast=fast,
        layer=max((sum(p.numel() for p in m.parameters()) for m in layers), default=0),
        caching=described.num_kv_layers if described.kinds else None,
        windowed=described.special_kinds is not None or not described.takes_positions,
        varlen=supports_varlen_attention(model),
        mlp_divisor=find_mlp_divisor(unwrap_model(model).config) if fast else 0,
        **routing,
        **numbers,
    )


@contextlib.contextmanager
def _gradients_as_in_training(
    model: nn.Module, storages: StorageTracker, keep: bool
) -> Iterator[None]:
    """Allocate gradients beforehand, as from the second micro-batch of a step on (`keep`), or free
    each gradient once it is computed.
    """
    hooks = []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if keep:
            parameter.grad = torch.zeros_like(parameter)
            storages.exclude(parameter.grad)
        else:
            hooks.append(parameter.register_post_accumulate_grad_hook(_free_gradient))
    yield
    for hook in hooks:
        hook.remove()


def _free_gradient(parameter: Tensor) -> None:
    parameter.grad = None
