"""What a micro-batch holds, found by running it on tensors without memory: no weights are read,
nothing is computed.

The model's own modules, the product's own output head and torch's own autograd run under torch's
FakeTensorMode, so sizes are those of the real run for any architecture, with LoRA, gradient
checkpointing, autocast and every kind of head; a dispatch mode follows the storages that come and
go. It cannot see inside a custom op (see `HEAD_BLOCKS`).
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

# bytes: the blocks of scores that kernels.linear_logprob goes through the vocabulary with, off CUDA
HEAD_BLOCKS = 32 << 20


@dataclass(frozen=True)
class Arithmetic:
    """How a backend runs a micro-batch.

    dtype: of the weights; autocast: bf16 on fp32 weights; keeps_gradients: they add up in `.grad`
    (else they leave at once). cuda: the output head runs in kernels, whose slabs of scores are
    larger; what it keeps is not counted here (`kept_logits` does). kept: bytes that it may keep
    elsewhere, as `LearnerSettings.kept_bytes`. low_base: the frozen matrices are bf16.
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
    """A model without weights, as the learner would train it. Raises UserError where it cannot be
    had.

    Layers of one make hold the same, so of a model of many only the first are given adapters and
    run (see `held`), and what the others hold is worked out from them. `whole`: all of them are,
    which takes longer and gives the same; for tests.
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
            # as often as the longer of the two is deeper than the shorter
            self._times = (self._depth - short) // period
            # not the first of all layers, whose input may need no gradient, nor the last
            self._block = (before + 1, before + 1 + period)
            share = None if lora is None else unadapted_share(loaded.model, lora)
            # a tensor of several layers is held once, however many there are: then all stay, to be
            # counted one by one
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
        """What one micro-batch of forward and backward holds at its peak.

        Of a model of many layers a short one is run and the layers that repeat are marked in it:
        see `Course.stretched`. Where they do not run one by one, two short ones are, the second
        longer by these layers: see `Course.deeper`. Raises UserError for a model whose forward asks
        what its numbers are.
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
                f"what a micro-batch of {self.shape.name} holds cannot be worked out without weights: its forward does not run on tensors "
                f"that hold no numbers ({type(error).__name__}: {first}). Try it: --steps 1 --eval-every 0, with the lengths that you mean"
            ) from error
        return dataclasses.replace(peak, logits=peak.logits + inside_op)

    @contextlib.contextmanager
    def _first(self, depth: int) -> Iterator[None]:
        """The model with its first `depth` layers alone."""
        assert self._layers is not None
        first_layers_(self._loaded.model, self._layers, depth)
        try:
            yield
        finally:
            first_layers_(self._loaded.model, self._layers, self._depth)

    def _run(self, batch: MicroBatch, how: Arithmetic) -> tuple[Course, int]:
        """(what is held all along, bytes that an op holds inside)."""
        # what fails is said by `held`
        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
        # checkpointing puts the generator's state, a real tensor, aside
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
        """What linear_logprob holds where nobody sees it: hidden states in fp32 and blocks of
        scores, or a slab of their gradient.
        """
        if not how.cuda:
            return batch.tokens * self.shape.hidden * 4 + HEAD_BLOCKS
        size = 2 if how.autocast else how.dtype.itemsize
        frozen = not any(
            p.requires_grad for p in inner_model(model).get_output_embeddings().parameters()
        )
        return head_bytes(batch.tokens, self.shape.hidden, self.shape.vocab, size, frozen=frozen)


def _on_cpu(model: Any, dtype: torch.dtype) -> Any:
    """A copy of a model on the meta device whose tensors are (fake) CPU tensors, floating ones of
    `dtype`.
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
    """Whether the sampler's own decoder serves it."""
    try:
        check_supported(inner_model(model))
    except Unsupported:
        return False
    return True


def _numbers(model: Any, fast: bool) -> dict[str, int]:
    """What a model with more layers has more of: see `ModelShape`."""
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
    """Gradients are there already, as from the second micro-batch of a step on, or leave as they
    come.
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
