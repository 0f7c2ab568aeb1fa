"""What a micro-batch holds, found by running it on tensors without memory: no weights are read, nothing is computed.

The model's own modules, the product's own output head and torch's own autograd run under torch's FakeTensorMode, so sizes
are those of the real run for any architecture, with LoRA, gradient checkpointing, autocast and every kind of head; a
dispatch mode follows the storages that come and go. It cannot see inside a custom op (see `HEAD_BLOCKS`).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from kernels import head_bytes
from rl.errors import UserError
from rl.layers import Layers, config_number, describe, first_layers_, layer_list, rhythm, share_weights, width
from rl.learner import HeadRequest, LogprobHead
from rl.memory.plan import SMALL, Held, MicroBatch, ModelShape
from rl.models import LoadedModel, add_lora, attention_mask_for, belongs_to_eyes, inner_model, load_skeleton, unadapted_share
from rl.sampler import Unsupported, check_supported, frozen_matrices, lower_frozen_
from rl.types import LoraConfig

HEAD_BLOCKS = 32 << 20  # bytes: the blocks of scores that kernels.linear_logprob goes through the vocabulary with, off CUDA


@dataclass(frozen=True)
class Arithmetic:
    """How a backend runs a micro-batch.

    dtype: of the weights; autocast: bf16 on fp32 weights; keeps_gradients: they add up in `.grad` (else they leave at once).
    cuda: the output head runs in kernels, whose slabs of scores are larger. low_base: the frozen matrices are bf16.
    """

    dtype: torch.dtype = torch.float32
    autocast: bool = False
    keeps_gradients: bool = True
    fused: bool = True
    checkpointing: bool = False
    cuda: bool = False
    low_base: bool = False


class Skeleton:
    """A model without weights, as the learner would train it. Raises UserError where it cannot be had.

    Layers of one make hold the same, so of a model of many only the first are given adapters and run (see `held`), and what the others
    hold is worked out from them. `whole`: all of them are, which takes longer and gives the same; for tests.
    """

    def __init__(self, base_model: str, tokenizer: str | None, lora: LoraConfig | None, *, whole: bool = False):
        with torch.device("meta"):
            loaded = load_skeleton(base_model, tokenizer=tokenizer)
            described, fast, self._layers = describe(loaded.model), _is_fast(loaded.model), layer_list(loaded.model)
            self._depth, period, before = rhythm(loaded.model) or (0, 1, 0)
            short = before + max(period, 2) + (self._depth - before) % period
            self._two = (short, short + period) if short + period < self._depth and not whole else None
            self._times = (self._depth - short) // period  # as often as the longer of the two is deeper than the shorter
            share = None if lora is None else unadapted_share(loaded.model, lora)
            # a tensor of several layers is held once, however many there are: then all stay, to be counted one by one
            cut = self._layers is not None and self._two is not None and not share_weights(self._layers[1])
            if self._layers is not None and self._two is not None and cut:
                self._depth = self._two[1]
                first_layers_(loaded.model, self._layers, self._depth)
            self._loaded = loaded if lora is None else add_lora(loaded, lora, unadapted=share)
        numbers = _numbers(self._loaded.model)
        if self._two is not None and cut:
            with self._first(self._two[0]):
                shorter = _numbers(self._loaded.model)
            numbers = {name: n + (self._times - 1) * (n - shorter[name]) for name, n in numbers.items()}
        self.shape = _shape(self._loaded, numbers, described, fast)

    def held(self, batch: MicroBatch, how: Arithmetic) -> Held:
        """What one micro-batch of forward and backward holds at its peak.

        Of a model of many layers two short ones are run, the second longer by the layers that repeat: see `Course.deeper`.
        Raises UserError for a model whose forward asks what its numbers are.
        """
        try:
            if self._two is None:
                course, inside_op = self._run(batch, how)
                peak = course.peak
            else:
                with self._first(self._two[0]):
                    course, inside_op = self._run(batch, how)
                with self._first(self._two[1]):
                    longer, _ = self._run(batch, how)
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
        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # what fails is said by `held`
        with FakeTensorMode(allow_non_fake_inputs=True):  # checkpointing puts the generator's state, a real tensor, aside
            model = _on_cpu(self._loaded.model, how.dtype)
            if how.low_base:
                lower_frozen_(model, torch.bfloat16, hollow=True)
            if how.checkpointing:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
                model.train()
            head = LogprobHead.untried(model, fused=how.fused)
            storages = _Storages(model)
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
        """What linear_logprob holds where nobody sees it: hidden states in fp32 and blocks of scores, or a slab of their gradient."""
        if not how.cuda:
            return batch.tokens * self.shape.hidden * 4 + HEAD_BLOCKS
        size = 2 if how.autocast else how.dtype.itemsize
        frozen = not any(p.requires_grad for p in inner_model(model).get_output_embeddings().parameters())
        return head_bytes(batch.tokens, self.shape.hidden, self.shape.vocab, size, frozen=frozen)


def _on_cpu(model: Any, dtype: torch.dtype) -> Any:
    """A copy of a model on the meta device whose tensors are (fake) CPU tensors, floating ones of `dtype`."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty(parameter.shape, dtype=dtype), requires_grad=parameter.requires_grad)
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


def _numbers(model: Any) -> dict[str, int]:
    """What a model with more layers has more of: see `ModelShape`."""
    parameters = dict(model.named_parameters())
    frozen, head = dict(frozen_matrices(model)), {id(p) for p in model.get_output_embeddings().parameters()}
    linear = {id(module.weight) for module in model.modules() if type(module) is nn.Linear}
    return {
        "parameters": sum(p.numel() for p in parameters.values()),
        "trainable": sum(p.numel() for p in parameters.values() if p.requires_grad),
        "adapters": sum(p.numel() for n, p in parameters.items() if "lora_" in n),
        "small": sum(p.numel() for p in parameters.values() if p.numel() < SMALL),
        "seeing": sum(p.numel() for n, p in parameters.items() if belongs_to_eyes(n)),
        "seeing_trained": sum(p.numel() for n, p in parameters.items() if belongs_to_eyes(n) and p.requires_grad),
        "matrices": sum(p.numel() for p in frozen.values()),
        "linears": sum(p.numel() for p in frozen.values() if id(p) in linear and id(p) not in head),
    }


def _shape(loaded: LoadedModel, numbers: Mapping[str, int], described: Layers, fast: bool) -> ModelShape:
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
        layer=max((sum(p.numel() for p in m.parameters()) for m in model.modules() if type(m).__name__ in kinds), default=0),
        caching=described.keeping_keys if described.kinds else None,
        windowed=described.others is not None or not described.takes_positions,
        idle=experts.parameters * (experts.count - experts.per_token) // experts.count if experts is not None else 0,
        **numbers,
    )


# ---------------------------------------------------------------------------------------------------- following storages


@contextlib.contextmanager
def _gradients(model: nn.Module, storages: _Storages, keep: bool) -> Iterator[None]:
    """Gradients are there already, as from the second micro-batch of a step on, or leave as they come."""
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


KINDS = tuple(field.name for field in dataclasses.fields(Held))


@dataclass(frozen=True)
class Moment:
    """A storage of `size` bytes and `kind` came to those that are held: bytes of each of KINDS since."""

    size: int
    kind: str
    held: tuple[float, ...]


@dataclass(frozen=True)
class Course:
    """What is held in a forward and in the backward after it."""

    forward: list[Moment]
    backward: list[Moment]

    @property
    def peak(self) -> Held:
        return _largest(moment.held for moment in (*self.forward, *self.backward))

    def deeper(self, longer: Course, times: int) -> Held:
        """The peak of a model that is deeper by `times` what `longer` is deeper by, the layers that repeat.

        At a moment of the last layers, counted from where the backward begins, a deeper model holds more by as much as `longer` does,
        as often; at one of the first layers, counted from the backward's end, likewise. Between them it goes evenly, so the peak is there.
        """
        alike = [
            *_alike(reversed(self.forward), reversed(longer.forward)),
            *_alike(self.backward, longer.backward),
            *_alike(reversed(self.backward), reversed(longer.backward)),
        ]
        return _largest(tuple(a + times * (b - a) for a, b in zip(mine.held, more.held, strict=True)) for mine, more in alike)


def _alike(mine: Iterable[Moment], longer: Iterable[Moment]) -> Iterator[tuple[Moment, Moment]]:
    """Both side by side for as long as they are of the same operations."""
    return takewhile(lambda pair: (pair[0].size, pair[0].kind) == (pair[1].size, pair[1].kind), zip(mine, longer, strict=False))


def _largest(held: Iterable[tuple[float, ...]]) -> Held:
    return Held(*max(held, key=sum, default=(0.0,) * len(KINDS)))


def _grouped_product(a: Tensor, b: Tensor, offs: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """What torch's grouped_mm gives, in any dtype: for tensors without memory torch has bfloat16 alone, though its kernels take float32."""
    if a.ndim == 3:
        size = [a.shape[1], b.shape[1]] if b.ndim == 2 else [a.shape[0], a.shape[1], b.shape[2]]
    else:
        size = [offs.shape[0], a.shape[0], b.shape[1]] if b.ndim == 2 else [a.shape[0], b.shape[2]]
    return a.new_empty(size, dtype=out_dtype or a.dtype)


class _Storages(TorchDispatchMode):
    """Bytes of the storages that live, by kind, at each moment at which one more came to them."""

    def __init__(self, model: Any):
        super().__init__()
        self._vocabulary = model.get_input_embeddings().weight.shape[0]
        matrices = [tuple(p.shape) for p in model.parameters() if p.ndim == 2]
        self._matrices = {*matrices, *(shape[::-1] for shape in matrices)}
        self._live: dict[int, Any] = {}
        self._weights: set[int] = set()
        self._now = dict.fromkeys(KINDS, 0.0)
        self._moments: list[Moment] = []
        self._turn = 0
        for tensor in (*model.parameters(), *model.buffers()):
            self.known(tensor)

    def turns(self) -> None:
        """The forward is over."""
        self._turn = len(self._moments)

    def course(self) -> Course:
        return Course(self._moments[: self._turn], self._moments[self._turn :])

    def known(self, tensor: Tensor) -> None:
        """Not counted: a weight, an accumulated gradient."""
        storage = tensor.untyped_storage()
        self._live[storage._cdata] = storage
        self._weights.add(storage._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # most of all calls, and makes no tensor
            return getattr(args[0], "fake_device", None) or func(*args)
        product = _grouped_product if func is torch.ops.aten._grouped_mm.default else func
        out = product(*args, **(kwargs or {}))
        is_cast = func is torch.ops.aten._to_copy.default and args[0].untyped_storage()._cdata in self._weights
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self._add(tensor, is_cast)
        return out

    def _add(self, tensor: Tensor, is_cast: bool) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._live:
            return
        kind = "casts" if is_cast else self._kind(tensor)
        self._now[kind] += size
        self._live[key] = weakref.ref(storage, lambda _: self._drop(key, kind, size))
        self._moments.append(Moment(size, kind, tuple(self._now.values())))

    def _drop(self, key: int, kind: str, size: int) -> None:
        if self._live.pop(key, None) is not None:
            self._now[kind] -= size

    def _kind(self, tensor: Tensor) -> str:
        if tuple(tensor.shape) in self._matrices:
            return "weight_sized"
        return "logits" if tensor.ndim and tensor.shape[-1] == self._vocabulary else "activations"
