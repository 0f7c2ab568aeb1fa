"""Compute attention over sequences that lie one after another in a row, without a mask or padding.

The layouts "packed" and "shared" need a mask of [T, T] for torch's attention. Flash attention takes
the lengths of sequences instead, and lets a sequence have more keys than queries. So a prompt with
several answers is one sequence for the prompt, and one for each answer, whose keys are those of the
prompt and its own. Keys of a prompt are gathered once for each answer; nothing else is repeated.

Shapes: T positions of a row, N sequences, K keys of all sequences, H heads, D head width.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels import check_kernels_agree
from rl.distributed import collectives
from rl.models import unwrap_model


@dataclass(frozen=True)
class SequenceBounds:
    """Describe the sequences of a row. Their queries follow each other and fill the row; the last
    keys of a sequence are those of its queries.

    query_lengths, key_lengths  tokens of each sequence, in host memory
    cu_queries, cu_keys         int32 [N + 1]
    key_index                   int64 [K] position of each key in the row; None: all, in order
    """

    query_lengths: Sequence[int]
    key_lengths: Sequence[int]
    cu_queries: Tensor
    cu_keys: Tensor
    key_index: Tensor | None


@dataclass(frozen=True)
class RowLayout:
    """Hold a row of sequences as arrays.

    input_ids, position_ids  int64 [1, T]
    token_index              int64, position of each datum's token in the row; None: in order
    query_lengths            tokens of each sequence
    keys                     positions of the keys of each sequence
    """

    input_ids: np.ndarray
    position_ids: np.ndarray
    token_index: np.ndarray | None
    query_lengths: list[int]
    keys: list[np.ndarray]

    def make_bounds(self, put: Callable[[np.ndarray], Tensor], padding: int = 0) -> SequenceBounds:
        """Return the bounds. `put`: copies an array to the device. `padding`: number of positions
        appended to the row, which are a sequence.
        """
        end, query_lengths, keys = self.input_ids.size, self.query_lengths, self.keys
        if padding:
            query_lengths = [*query_lengths, padding]
            keys = [*keys, np.arange(end, end + padding)]
        key_lengths = [len(indices) for indices in keys]
        cu_queries, cu_keys = (
            put(np.cumsum([0, *lengths]).astype(np.int32))
            for lengths in (query_lengths, key_lengths)
        )
        index = None if self.token_index is None else put(np.concatenate(keys))
        return SequenceBounds(query_lengths, key_lengths, cu_queries, cu_keys, index)


def lay_out_row(units: Sequence[tuple[int, Sequence[np.ndarray]]]) -> RowLayout:
    """Return a row of `units`: (tokens of the shared prompt, sequences [L] that begin with it).

    A sequence that is only the prompt gets no queries of its own.
    """
    ids, positions, query_lengths, keys, token_index = [], [], [], [], []
    end = 0
    for prompt, sequences in units:
        shared = np.arange(end, end + prompt)
        parts = [(sequences[0][:prompt], 0, shared[:0])] if prompt else []
        parts += [(sequence[prompt:], prompt, shared) for sequence in sequences]
        for number, (tokens, first, before) in enumerate(parts):
            attended = np.concatenate([before, np.arange(end, end + len(tokens))])
            if len(tokens):
                ids.append(tokens)
                positions.append(np.arange(first, first + len(tokens)))
                query_lengths.append(len(tokens))
                keys.append(attended)
            if number or not prompt:
                token_index.append(attended)
            end += len(tokens)
    has_shared = any(prompt for prompt, _ in units)
    return RowLayout(
        np.concatenate(ids)[None],
        np.concatenate(positions)[None],
        np.concatenate(token_index) if has_shared else None,
        query_lengths,
        keys,
    )


def attend_by_kernel(
    query: Tensor, key: Tensor, value: Tensor, bounds: SequenceBounds, scale: float | None,
    window: int | None,
) -> Tensor:  # fmt: skip
    """Compute `attend_by_loop` by torch's flash attention: half precision, on CUDA."""
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 has no such argument and needs none
    is_known = "enable_gqa" in inspect.signature(varlen_attn).parameters
    grouping: dict[str, Any] = {"enable_gqa": True} if is_known else {}
    width = value.shape[-1]  # narrower than a key in latent attention
    out = varlen_attn(
        query,
        key,
        F.pad(value, (0, key.shape[-1] - width)),
        bounds.cu_queries,
        bounds.cu_keys,
        max(bounds.query_lengths),
        max(bounds.key_lengths),
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **grouping,
    )
    assert isinstance(out, Tensor)  # a pair only if the logsumexp is requested
    return out[..., :width]


def attend_by_loop(
    query: Tensor, key: Tensor, value: Tensor, bounds: SequenceBounds, scale: float | None,
    window: int | None,
) -> Tensor:  # fmt: skip
    """Return causal attention's output [T, H, D] of `query` [T, H, D] over `key` and `value`
    [K, H', D], a call for each sequence. `window`: number of last keys that a query sees, with its
    own; None: all.
    """
    outputs = []
    columns = (x.transpose(0, 1) for x in (query, key, value))
    lengths = (bounds.query_lengths, bounds.key_lengths, bounds.key_lengths)
    parts = (x.split(list(n), dim=1) for x, n in zip(columns, lengths, strict=True))
    for q, k, v in zip(*parts, strict=True):
        ahead = k.shape[1] - q.shape[1]
        sees = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril_(ahead)
        if window is not None:
            sees.triu_(ahead - window + 1)
        attended = F.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=sees, scale=scale, enable_gqa=True
        )
        outputs.append(attended[0])
    return torch.cat(outputs, dim=1).transpose(0, 1)


AttendFunction = Callable[
    [Tensor, Tensor, Tensor, SequenceBounds, float | None, int | None], Tensor
]


class _GatherKeys(torch.autograd.Function):
    """Gather the keys [K, ...] of all sequences from those of a row [T, ...].

    The backward adds the gradients of a shared prompt's keys in float32 and in a fixed order: half
    precision would round after each answer.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return x[index]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (index,), gradient = ctx.saved_tensors, gradients[0]
        total = torch.zeros(ctx.shape, dtype=torch.float32, device=gradient.device)
        total = total.to(torch.promote_types(total.dtype, gradient.dtype))
        return total.index_put_((index,), gradient.to(total), accumulate=True).to(gradient), None


def gather_keys(x: Tensor, bounds: SequenceBounds) -> Tensor:
    """Return the keys or values [K, H, D] of all sequences from those of a row [T, H, D]."""
    return x if bounds.key_index is None else _GatherKeys.apply(x, bounds.key_index)  # type: ignore


@contextlib.contextmanager
def replace_attention(
    model: Any, attend: Callable[..., Any], make_mask: Callable[..., Any]
) -> Iterator[None]:
    """Replace the functions of attention and of masks that transformers looks up by name, for the
    layers of one model: other models, such as a reward in a thread, keep theirs.

    `attend` and `make_mask` get the function that they replace as their first argument. The context
    has to include the backward: gradient checkpointing computes attention again.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = unwrap_model(model).config._attn_implementation
    tables: Any = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
    attention, mask = ALL_ATTENTION_FUNCTIONS.get(name), ALL_MASK_ATTENTION_FUNCTIONS[name]
    modules = {id(module) for module in model.modules()}
    configs = {id(getattr(module, "config", None)) for module in model.modules()}

    def attend_module(module: Any, *args: Any, **kwargs: Any) -> Any:
        # eager attention is a function of each model's file
        before = attention or sys.modules[type(module).__module__].eager_attention_forward
        if id(module) in modules:
            return attend(before, module, *args, **kwargs)
        return before(module, *args, **kwargs)

    def make_model_mask(*args: Any, **kwargs: Any) -> Any:
        if id(kwargs.get("config")) in configs:
            return make_mask(mask, *args, **kwargs)
        return mask(*args, **kwargs)

    for table, function in zip(tables, (attend_module, make_model_mask), strict=True):
        table[name] = function
    try:
        yield
    finally:
        for table in tables:
            del table[name]


def supports_varlen_attention(model: Any) -> bool:
    """Return whether torch has the kernel (2.11 or newer) and the model looks attention up."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return False
    from torch.nn.attention.varlen import varlen_attn

    has_arguments = {"scale", "window_size"} <= inspect.signature(varlen_attn).parameters.keys()
    return has_arguments and unwrap_model(model).config._attn_implementation == "sdpa"


def make_varlen_attention(
    model: Any, accelerator: Any, requested: bool | None
) -> VarlenAttention | None:
    """Return the attention of a learner, None if it needs masks: the same on all ranks.
    `requested`: None chooses it for half precision on CUDA, if torch and the model support it.
    """
    if accelerator.device.type != "cuda":
        return VarlenAttention() if requested else None
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = dtypes.get(accelerator.mixed_precision, next(model.parameters()).dtype)
    if requested is None:
        requested = dtype.itemsize == 2 and supports_varlen_attention(model)
    return VarlenAttention(None, accelerator.device, dtype) if requested else None


class VarlenAttention:
    """Let a model attend within the sequences of a row, and remember the shapes of its layers.

    `attend`: None chooses the kernel for half precision on CUDA, and the loop elsewhere. `device`
    and `dtype`: those of the learner's attention, on which the kernel is tried.
    """

    def __init__(
        self,
        attend: AttendFunction | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ):
        self.attend, self.device, self.dtype = attend, device, dtype
        self.shapes: set[HeadShape] = set()

    def use(self, model: Any, bounds: SequenceBounds | None) -> AbstractContextManager[None]:
        """Return a context of a forward and its backward. `bounds`: None changes nothing."""
        if bounds is None:
            return contextlib.nullcontext()
        return replace_attention(
            model,
            lambda before, *args, **kwargs: self.attend_row(bounds, *args, **kwargs),
            lambda before, *args, **kwargs: None,
        )

    def attend_row(
        self,
        bounds: SequenceBounds,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Return attention's output [1, T, H, D] of a layer; the inputs are [1, H, T, D].

        Raises ValueError for attention that is not plainly causal.
        """
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        extra = [kwargs.get(name) for name in ("position_bias", "softcap", "s_aux")]
        if dropout or not causal or any(x is not None for x in [*extra, attention_mask]):
            raise ValueError("attention that is not plainly causal needs a mask")
        device = query.device.type
        if torch.is_autocast_enabled(device):  # it casts torch's attention, but no custom op
            dtype = torch.get_autocast_dtype(device)
            query, key, value = (x.to(dtype) for x in (query, key, value))
        query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        (_, heads, width), (_, key_heads, value_width) = query.shape, value.shape
        self.shapes.add(HeadShape(heads, width, key_heads, value_width, sliding_window))
        key, value = (gather_keys(x, bounds) for x in (key, value))
        half = device == "cuda" and query.dtype.itemsize == 2
        attend = self.attend or (attend_by_kernel if half else attend_by_loop)
        out = attend(query, key, value, bounds, scaling, sliding_window)
        return out[None].contiguous(), None  # as torch's attention: some models view it

    def kernel_agrees(self) -> bool:
        """Return whether the kernel agrees with the loop for all remembered shapes, on all ranks.
        Off CUDA there is nothing to try.
        """
        if self.device is None or self.device.type != "cuda":
            return True
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        names = ("torch's varlen attention", "attention with masks")
        shapes = sorted(self.shapes, key=str)
        agrees = all(check_kernels_agree(shape, index, self.dtype, names) for shape in shapes)
        failures = torch.tensor([float(not agrees)], device=self.device)
        collectives.all_sum_([failures])
        return not float(failures)


@dataclass(frozen=True)
class HeadShape:
    """Hold the numbers and widths of a layer's heads, and its window (None: all earlier tokens)."""

    heads: int
    width: int
    key_heads: int
    value_width: int
    window: int | None = None

    def __call__(
        self, newer: bool, device: torch.device, dtype: torch.dtype
    ) -> tuple[torch.Tensor, ...]:
        """Run attention on a few sequences: return (output and gradients,) as one tensor.

        `newer`: by the kernel, otherwise by the loop.
        """
        rng = np.random.default_rng(0)
        units = [(5, [np.arange(n) for n in (200, 6, 5, 77)]), (0, [np.arange(130)])]
        layout = lay_out_row(units)
        bounds = layout.make_bounds(lambda array: torch.from_numpy(array).to(device))
        shapes = (
            (self.heads, self.width),
            (self.key_heads, self.width),
            (self.key_heads, self.value_width),
        )
        query, key, value = (
            torch.from_numpy(rng.standard_normal((layout.input_ids.size, *shape)))
            .to(device, dtype)
            .requires_grad_()
            for shape in shapes
        )
        attend = attend_by_kernel if newer else attend_by_loop
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            keys, values = (gather_keys(x, bounds) for x in (key, value))
            out = attend(query, keys, values, bounds, None, self.window)
            weights = torch.from_numpy(rng.standard_normal(tuple(out.shape))).to(out)
            gradients = torch.autograd.grad((out * weights).sum(), (query, key, value))
        return (torch.cat([x.detach().flatten().float() for x in (out, *gradients)]),)
