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
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels import head_bytes
from rl.errors import UserError
from rl.layers import (
    Layers,
    config_number,
    describe,
    first_layers_,
    layer_list,
    rhythm,
    share_weights,
    width,
)
from rl.learner import HeadRequest, LogprobHead
from rl.memory.given import Held, MicroBatch, ModelShape
from rl.memory.plan import SMALL
from rl.memory.storages import Course, Storages
from rl.models import (
    LoadedModel,
    add_lora,
    attention_mask_for,
    belongs_to_eyes,
    inner_model,
    load_skeleton,
    unadapted_share,
)
from rl.sampler import Unsupported, check_supported, frozen_matrices, held_whole, lower_frozen_
from rl.types import LoraConfig

# bytes of the score blocks in which kernels.linear_logprob traverses the vocabulary, off CUDA
HEAD_BLOCKS = 32 << 20


@dataclass(frozen=True)
class Arithmetic:
    """Describe the way a backend runs a micro-batch.

    dtype            of the weights
    autocast         bf16 computation on fp32 weights
    keeps_gradients  they accumulate in `.grad` (otherwise they are freed at once)
    cuda             the output head runs in kernels, with larger slabs of scores; what it saves
                     is not counted here (`kept_logits` counts it)
    kept             bytes that the head may save off CUDA, as `LearnerSettings.kept_bytes`
    low_base         the frozen matrices are bf16
    """

    dtype: torch.dtype = torch.float32
    autocast: bool = False
    keeps_gradients: bool = True
    fused: bool = True
    checkpointing: bool = False
    cuda: bool = False
    kept: int | None = None
    low_base: bool = False


class Skeleton:
    """Build a model without weights, as the learner would train it. Raises UserError if the model
    is not available.

    Layers of the same kind hold the same memory. Of a deep model only the first layers get adapters
    and run (see `held`), and the memory of the others is extrapolated. `whole`: run all layers,
    which takes longer and gives the same result; for tests.
    """

    def __init__(
        self,
        base_model: str,
        tokenizer: str | None,
        lora: LoraConfig | None,
        *,
        whole: bool = False,
    ):
        with torch.device("meta"):
            loaded = load_skeleton(base_model, tokenizer=tokenizer)
            described, fast, self._layers = (
                describe(loaded.model),
                _is_fast(loaded.model),
                layer_list(loaded.model),
            )
            self._depth, period, before = rhythm(loaded.model) or (0, 1, 0)
            short = before + max(period, 2) + (self._depth - before) % period
            self._two = (
                (short, short + period) if short + period < self._depth and not whole else None
            )
            # number of repetitions: the longer model is deeper than the shorter by a single period
            self._times = (self._depth - short) // period
            # not the first layer of all, whose input may need no gradient, and not the last
            self._block = (before + 1, before + 1 + period)
            share = None if lora is None else unadapted_share(loaded.model, lora)
            # A tensor shared by several layers is held once, whatever the depth. Then all layers
            # stay, to be counted exactly.
            cut = (
                self._layers is not None
                and self._two is not None
                and not share_weights(self._layers[1])
            )
            if self._layers is not None and self._two is not None and cut:
                self._depth = self._two[1]
                first_layers_(loaded.model, self._layers, self._depth)
            self._loaded = loaded if lora is None else add_lora(loaded, lora, unadapted=share)
        numbers = _numbers(self._loaded.model, fast)
        if self._two is not None and cut:
            with self._first(self._two[0]):
                shorter = _numbers(self._loaded.model, fast)
            numbers = {
                name: n + (self._times - 1) * (n - shorter[name]) for name, n in numbers.items()
            }
        self.shape = _shape(self._loaded, numbers, described, fast)

    def held(self, batch: MicroBatch, how: Arithmetic) -> Held:
        """Return what a micro-batch holds at the peak of its forward and backward.

        Of a deep model a shorter copy is run in which the repeating layers are marked, see
        `Course.stretched`. If these layers do not run one by one, two short copies are run, the
        second with more of these layers, see `Course.deeper`. Raises UserError for a model whose
        forward depends on tensor values.
        """
        try:
            if self._two is None:
                course, inside_op = self._run(batch, how)
                peak = course.peak
            else:
                with self._first(self._two[1]):
                    longer, inside_op = self._run(batch, how)
                if longer.block is not None:
                    peak = longer.stretched(self._times - 1)
                else:
                    with self._first(self._two[0]):
                        course, inside_op = self._run(batch, how)
                    peak = course.deeper(longer, self._times)
        except RuntimeError as error:
            first = str(error).strip().partition("\n")[0]
            raise UserError(
                f"the memory of a micro-batch of {self.shape.name} cannot be computed without "
                "weights: its forward does not run on tensors without values "
                f"({type(error).__name__}: {first}). Measure it with a short run: --steps 1 "
                "--eval-every 0, with the intended lengths"
            ) from error
        return dataclasses.replace(peak, logits=peak.logits + inside_op)

    @contextlib.contextmanager
    def _first(self, depth: int) -> Iterator[None]:
        """Shorten the model to its first `depth` layers within the context."""
        assert self._layers is not None
        first_layers_(self._loaded.model, self._layers, depth)
        try:
            yield
        finally:
            first_layers_(self._loaded.model, self._layers, self._depth)

    def _run(self, batch: MicroBatch, how: Arithmetic) -> tuple[Course, int]:
        """Return (record of the storages, bytes that an op holds inside)."""
        # `held` reports failures
        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
        # checkpointing stores the generator's state, a real tensor
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = _on_cpu(self._loaded.model, how.dtype)
            if how.low_base:
                lower_frozen_(model, torch.bfloat16, hollow=True)
            if how.checkpointing:
                model.gradient_checkpointing_enable(
                    gradient_checkpointing_kwargs={"use_reentrant": False}
                )
                model.train()
            head = LogprobHead.untried(
                model, fused=how.fused, kept_bytes=0 if how.cuda else how.kept
            )
            storages = Storages(model)
            if self._layers is not None and self._two is not None:
                blocks: Any = inner_model(model).get_submodule(self._layers[0])
                storages.mark([blocks[i] for i in self._block if i < len(blocks)])
            with _gradients(model, storages, how.keeps_gradients):
                ids = torch.zeros(batch.rows, batch.length, dtype=torch.int64)
                inputs: dict[str, Any] = {"input_ids": ids}
                if batch.masked:
                    inputs["position_ids"] = torch.zeros_like(ids)
                    sees = torch.ones(batch.rows, 1, batch.length, batch.length, dtype=torch.bool)
                    inputs["attention_mask"] = attention_mask_for(model, sees)
                at = torch.zeros(batch.tokens, dtype=torch.int64)
                with storages, torch.autocast("cpu", torch.bfloat16, enabled=how.autocast):
                    logp, *_ = head(model, HeadRequest(at, at, 0.8, False), **inputs)
                    storages.turns()
                    logp.sum().backward()
            inside_op = self._inside_op(model, batch, how) if head.fused else 0
        return storages.course(), inside_op

    def _inside_op(self, model: Any, batch: MicroBatch, how: Arithmetic) -> int:
        """Return the bytes inside linear_logprob, which the tracker cannot see: hidden states in
        fp32 and blocks of scores, or a slab of their gradient.
        """
        if not how.cuda:
            return batch.tokens * self.shape.hidden * 4 + HEAD_BLOCKS
        size = 2 if how.autocast else how.dtype.itemsize
        frozen = not any(
            p.requires_grad for p in inner_model(model).get_output_embeddings().parameters()
        )
        return head_bytes(batch.tokens, self.shape.hidden, self.shape.vocab, size, frozen=frozen)


def _on_cpu(model: Any, dtype: torch.dtype) -> Any:
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


def _is_fast(model: Any) -> bool:
    """Return whether the sampler's fast decoder supports the model."""
    try:
        check_supported(inner_model(model))
    except Unsupported:
        return False
    return True


def _numbers(model: Any, fast: bool) -> dict[str, int]:
    """Return the fields of `ModelShape` that grow with the number of layers."""
    unsplit, unsplit_adapters = held_whole(model) if fast else (0, 0)
    parameters = dict(model.named_parameters())
    frozen, head = (
        dict(frozen_matrices(model)),
        {id(p) for p in model.get_output_embeddings().parameters()},
    )
    linear = {id(module.weight) for module in model.modules() if type(module) is nn.Linear}
    return {
        "parameters": sum(p.numel() for p in parameters.values()),
        "trainable": sum(p.numel() for p in parameters.values() if p.requires_grad),
        "adapters": sum(p.numel() for n, p in parameters.items() if "lora_" in n),
        "small": sum(p.numel() for p in parameters.values() if p.numel() < SMALL),
        "seeing": sum(p.numel() for n, p in parameters.items() if belongs_to_eyes(n)),
        "seeing_trained": sum(
            p.numel() for n, p in parameters.items() if belongs_to_eyes(n) and p.requires_grad
        ),
        "matrices": sum(p.numel() for p in frozen.values()),
        "linears": sum(p.numel() for p in frozen.values() if id(p) in linear and id(p) not in head),
        "unsplit": unsplit,
        "unsplit_adapters": unsplit_adapters,
    }


def _shape(
    loaded: LoadedModel, numbers: Mapping[str, int], described: Layers, fast: bool
) -> ModelShape:
    model, hidden = loaded.model, width(loaded.model)
    heads = config_number(model, "num_attention_heads", "n_head") or 1
    kinds, experts = set(inner_model(model)._no_split_modules or ()), described.experts
    return ModelShape(
        name=loaded.name,
        largest=max(p.numel() for p in model.parameters()),
        layers=config_number(model, "num_hidden_layers", "n_layer") or 1,
        hidden=hidden,
        heads=heads,
        key_heads=config_number(model, "num_key_value_heads") or heads,
        head_width=config_number(model, "head_dim") or hidden // heads,
        mlp=config_number(model, "intermediate_size", "n_inner", "ffn_dim") or 4 * hidden,
        vocab=loaded.vocab_size,
        max_context=config_number(model, "max_position_embeddings", "n_positions"),
        fast=fast,
        layer=max(
            (
                sum(p.numel() for p in m.parameters())
                for m in model.modules()
                if type(m).__name__ in kinds
            ),
            default=0,
        ),
        caching=described.keeping_keys if described.kinds else None,
        windowed=described.others is not None or not described.takes_positions,
        idle=experts.parameters * (experts.count - experts.per_token) // experts.count
        if experts is not None
        else 0,
        **numbers,
    )


@contextlib.contextmanager
def _gradients(model: nn.Module, storages: Storages, keep: bool) -> Iterator[None]:
    """Allocate gradients beforehand, as from the second micro-batch of a step on (`keep`), or free
    each gradient once it is computed.
    """
    hooks = []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if keep:
            parameter.grad = torch.zeros_like(parameter)
            storages.known(parameter.grad)
        else:
            hooks.append(parameter.register_post_accumulate_grad_hook(_leave))
    yield
    for hook in hooks:
        hook.remove()


def _leave(parameter: Tensor) -> None:
    parameter.grad = None
