"""What every operation here shares: numbers in one place, the checks of inputs, the rows that take
part.

Shape letters of this package: T tokens, N tokens that take part, D hidden, V vocabulary, S
sequences.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
# A finite stand-in for minus infinity: (x - LOW) * 0 is 0, where (x - (-inf)) * 0 would be NaN.
LOW = -1e30
# An op that waits for the device, or whose shapes depend on values, cannot be captured into a CUDA
# graph; torch.compile asks this tag. older torch has none
WAITS = tuple(tag for name, tag in torch.Tag.__members__.items() if name == "cudagraph_unsafe")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)
# [T, V] may be kept between forward and backward up to this many bytes where the caller says
# nothing.
SAVED_BYTES = 64 << 20
# Off CUDA, whole float32 logits of up to this many bytes are handled by torch's own operations:
# Python's share of a custom op, 0.25 ms forward and backward, would be more than the work.
TINY_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Head:
    """How raw scores become logits: softcap * tanh(raw / softcap) / temperature, without the tanh
    if softcap is None.
    """

    temperature: float = 1.0
    softcap: float | None = None

    @property
    def in_scale(self) -> float:
        """The factor on raw scores before the tanh, or (without one) straight to logits in units of
        log 2.
        """
        return LOG2E / self.temperature if self.softcap is None else 1.0 / self.softcap

    @property
    def out_scale(self) -> float:
        """The factor from the tanh to logits in units of log 2; unused without a softcap."""
        return 0.0 if self.softcap is None else self.softcap * LOG2E / self.temperature

    @property
    def grad_scale(self) -> float:
        """d(logit) / d(raw score), without the tanh's own slope."""
        return 1.0 / self.temperature


@cache
def _triton_installed() -> bool:
    return find_spec("triton") is not None


def triton_works(tensor: Tensor) -> bool:
    """Whether Triton kernels can run on this tensor: on CUDA, with triton installed."""
    return tensor.is_cuda and _triton_installed()


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def check_head(name: str, temperature: float, softcap: float | None) -> None:
    if not (temperature > 0.0 and math.isfinite(temperature)):
        raise ValueError(
            f"{name}: temperature is {temperature}; expected a finite number above 0 (greedy scores: use argmax)"
        )
    if softcap is not None and not (softcap > 0.0 and math.isfinite(softcap)):
        raise ValueError(
            f"{name}: softcap is {softcap}; expected a finite number above 0, or None for no softcap"
        )


def check_same_device(name: str, **tensors: Tensor | None) -> None:
    """Every tensor on the device of the first. Errors name the one that is not."""
    given = [(key, value) for key, value in tensors.items() if value is not None]
    first_key, first = given[0]
    for key, value in given[1:]:
        if value.device != first.device:
            raise ValueError(
                f"{name}: {key} is on {value.device}, {first_key} on {first.device}; expected one device: use .to()"
            )


def check_matmul(name: str, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """hidden [..., D] and weight [V, D] of one floating dtype, bias [V] or None."""
    if weight.dim() != 2 or weight.shape[0] == 0:
        hint = (
            ": ZeRO-3 shows it empty outside the head's own forward, so call this inside"
            if weight.numel() == 0
            else ""
        )
        raise ValueError(
            f"{name}: weight has shape {tuple(weight.shape)}; expected [V, D] with V > 0{hint}"
        )
    if hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{name}: hidden has shape {tuple(hidden.shape)}, weight {tuple(weight.shape)}; expected [..., D] and [V, D]"
        )
    if hidden.dtype not in FLOATS or weight.dtype != hidden.dtype:
        raise TypeError(
            f"{name}: hidden is {hidden.dtype}, weight {weight.dtype}; expected one of float32, bfloat16, float16 for both: "
            "cast one of them, or run under torch.autocast"
        )
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype not in FLOATS):
        raise ValueError(
            f"{name}: bias is {bias.dtype} {tuple(bias.shape)}; expected a floating [V] with V = {weight.shape[0]}"
        )


def check_target(name: str, target: Tensor, shape: torch.Size) -> None:
    if target.dtype not in INTEGERS:
        raise TypeError(
            f"{name}: target is {target.dtype}; expected token ids of an integer dtype: use .long()"
        )
    if target.shape != shape:
        raise ValueError(
            f"{name}: target has shape {tuple(target.shape)}; expected {tuple(shape)}, one token id for each position"
        )


def under_autocast(*tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors in autocast's dtype where autocast is on (as torch.nn.functional.linear does),
    else as they are.
    """
    first = next(tensor for tensor in tensors if tensor is not None)
    if not torch.is_autocast_enabled(first.device.type):
        return list(tensors)
    dtype = torch.get_autocast_dtype(first.device.type)
    return [tensor if tensor is None else tensor.to(dtype) for tensor in tensors]


def without_autocast(tensor: Tensor) -> torch.autocast:
    """Autocast off: the public functions cast once, and what is float32 inside has to stay so."""
    return torch.autocast(tensor.device.type, enabled=False)


def target_rows(name: str, target_T: Tensor, vocab: int, ignore_index: int) -> Tensor | None:
    """The positions whose target is not `ignore_index` (int64, ascending), or None where that is
    all of them.

    Raises ValueError naming the first target outside [0, vocab). One wait for the device at most.
    """
    if target_T.numel() == 0:
        return None
    if not target_T.is_cuda:
        low, high = (int(bound) for bound in torch.aminmax(target_T))
        if low >= 0 and high < vocab and not low <= ignore_index <= high:
            return None  # the usual case, decided by one pass
    used = target_T != ignore_index
    outside = used & ((target_T < 0) | (target_T >= vocab))
    count, wrong = torch.stack((used.sum(), outside.sum())).tolist()
    if wrong:
        position = int(outside.nonzero()[0, 0])
        raise ValueError(
            f"{name}: target[{position}] is {int(target_T[position])}, outside [0, {vocab}) and not "
            f"ignore_index ({ignore_index}); do targets come from this model's tokenizer? Or set them to ignore_index"
        )
    return rows_of(used, count)


def check_targets(name: str, target_T: Tensor, vocab: int, ignore_index: int) -> None:
    """What `target_rows` raises, for who needs no positions. One wait for the device."""
    outside = (target_T != ignore_index) & ((target_T < 0) | (target_T >= vocab))
    if bool(outside.any()):
        target_rows(name, target_T, vocab, ignore_index)


def rows_of(used_T: Tensor, count: int | None = None) -> Tensor | None:
    """The positions where `used_T` is True, ascending; None if all are. A known count saves the
    wait for the device.
    """
    count = int(used_T.sum()) if count is None else count
    if count == used_T.numel():
        return None
    # A stable sort of False-before-True keeps the order and, unlike nonzero, needs no second wait
    # on a GPU.
    return (
        torch.argsort(~used_T, stable=True)[:count]
        if used_T.is_cuda
        else used_T.nonzero().squeeze(1)
    )


def take(tensor: Tensor, rows: Tensor | None) -> Tensor:
    return tensor if rows is None else tensor.index_select(0, rows)


def put(values: Tensor, rows: Tensor | None, size: int) -> Tensor:
    """The reverse of `take`: `values` at `rows`, zeros elsewhere."""
    if rows is None:
        return values
    return values.new_zeros((size, *values.shape[1:])).index_copy_(0, rows, values)


def check_tokens(name: str, tokens: int, **tensors: Tensor | None) -> None:
    """Every given tensor of shape [tokens]. Errors name the one that is not."""
    for key, value in tensors.items():
        if value is not None and value.shape != (tokens,):
            raise ValueError(
                f"{name}: {key} has shape {tuple(value.shape)}; expected ({tokens},), one value for each token"
            )


def check_sequences(name: str, cu_seqlens: Tensor, tokens: int) -> None:
    """cu_seqlens [S + 1] of integers: 0, then where each sequence ends, up to `tokens`.

    The values are read where that costs nothing (off CUDA); the kernels clamp them, so that wrong
    ones cannot read outside.
    """
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 1 or cu_seqlens.dtype not in INTEGERS:
        raise ValueError(
            f"{name}: cu_seqlens is {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}; expected integers [S + 1], "
            "for lengths 3 and 2: torch.tensor([0, 3, 5])"
        )
    if cu_seqlens.is_cuda or type(cu_seqlens) is not Tensor:
        return
    ends = cu_seqlens.tolist()
    if (
        ends[0] != 0
        or ends[-1] != tokens
        or any(a > b for a, b in zip(ends, ends[1:], strict=False))
    ):
        raise ValueError(
            f"{name}: cu_seqlens is {ends}; expected 0, then ends in order up to the number of tokens ({tokens})"
        )
