"""Provide the numbers, input checks and row selection that every operation of this package shares.

Shape letters of this package: T tokens, N tokens that take part (not ignored), D hidden size, V
vocabulary size, S sequences.
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
# A finite substitute for minus infinity: (x - LOW) * 0 is 0, where (x - (-inf)) * 0 would be NaN.
LARGE_NEGATIVE = -1e30
# A CUDA graph cannot capture an op that waits for the device or has shapes that depend on values.
# torch.compile reads this tag to find such ops; older torch versions have no such tag.
CUDAGRAPH_UNSAFE_TAGS = tuple(
    tag for name, tag in torch.Tag.__members__.items() if name == "cudagraph_unsafe"
)
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)
# A [T, V] tensor of up to this many bytes may be saved between forward and backward, if the caller
# sets no `saved_bytes`.
DEFAULT_SAVED_BYTES = 64 << 20
# Without CUDA, float32 logits [T, V] of up to this many bytes are computed by torch's operations.
# The Python overhead of a custom op, 0.25 ms for forward and backward, would exceed the work.
SMALL_PROBLEM_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Hold the temperature and softcap that turn raw scores into logits.

    logits = softcap * tanh(raw / softcap) / temperature; the tanh is skipped if softcap is None.
    """

    temperature: float = 1.0
    softcap: float | None = None

    @property
    def in_scale(self) -> float:
        """Return the factor on raw scores: before the tanh, or (without softcap) directly to logits
        in units of log 2.
        """
        return LOG2E / self.temperature if self.softcap is None else 1.0 / self.softcap

    @property
    def out_scale(self) -> float:
        """Return the factor from the tanh to logits in units of log 2; 0 (unused) without a
        softcap.
        """
        return 0.0 if self.softcap is None else self.softcap * LOG2E / self.temperature

    @property
    def grad_scale(self) -> float:
        """Return d(logit) / d(raw score) without the slope of the tanh."""
        return 1.0 / self.temperature


@cache
def _triton_installed() -> bool:
    """Return whether the triton package is installed."""
    return find_spec("triton") is not None


def can_run_triton(tensor: Tensor) -> bool:
    """Return whether Triton kernels can run on this tensor: on CUDA, with triton installed."""
    return tensor.is_cuda and _triton_installed()


def device_context(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context that makes the tensor's GPU the current device.

    Triton launches on the current device, which may differ from the tensor's device.
    """
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def check_head(name: str, temperature: float, softcap: float | None) -> None:
    """Check the temperature and softcap of an operation.

    Raises ValueError if the temperature or the softcap is not a finite number above 0.
    """
    if not (temperature > 0.0 and math.isfinite(temperature)):
        raise ValueError(
            f"{name}: temperature is {temperature}; expected a finite number above "
            "0 (greedy scores: use argmax)"
        )
    if softcap is not None and not (softcap > 0.0 and math.isfinite(softcap)):
        raise ValueError(
            f"{name}: softcap is {softcap}; expected a finite number above 0, or None for no "
            "softcap"
        )


def check_same_device(name: str, **tensors: Tensor | None) -> None:
    """Check that all tensors are on the device of the first tensor. None entries are skipped.

    Raises ValueError naming the first tensor on another device.
    """
    tensors_present = [(key, value) for key, value in tensors.items() if value is not None]
    first_key, first = tensors_present[0]
    for key, value in tensors_present[1:]:
        if value.device != first.device:
            raise ValueError(
                f"{name}: {key} is on {value.device}, {first_key} on {first.device}; expected the "
                "same device for both: use .to()"
            )


def check_matmul(name: str, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Check hidden [..., D] and weight [V, D] of the same floating dtype, and bias [V] or None.

    Raises ValueError for a wrong shape or bias, TypeError for a wrong dtype.
    """
    if weight.dim() != 2 or weight.shape[0] == 0:
        hint = (
            ": under ZeRO-3 the weight is empty outside the head's forward; call this function "
            "inside it"
            if weight.numel() == 0
            else ""
        )
        raise ValueError(
            f"{name}: weight has shape {tuple(weight.shape)}; expected [V, D] with V > 0{hint}"
        )
    if hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{name}: hidden has shape {tuple(hidden.shape)}, weight {tuple(weight.shape)}; "
            "expected [..., D] and [V, D]"
        )
    if hidden.dtype not in FLOAT_DTYPES or weight.dtype != hidden.dtype:
        raise TypeError(
            f"{name}: hidden is {hidden.dtype}, weight {weight.dtype}; expected float32, bfloat16 "
            "or float16, the same for both: cast hidden or weight, or run under torch.autocast"
        )
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype not in FLOAT_DTYPES):
        raise ValueError(
            f"{name}: bias is {bias.dtype} {tuple(bias.shape)}; expected a floating [V] with V = "
            f"{weight.shape[0]}"
        )


def check_target(name: str, target: Tensor, shape: torch.Size) -> None:
    """Check that target holds integer token ids of the expected shape.

    Raises TypeError for a dtype that is not an integer, ValueError for another shape.
    """
    if target.dtype not in INTEGER_DTYPES:
        raise TypeError(
            f"{name}: target is {target.dtype}; expected token ids of an integer dtype: use .long()"
        )
    if target.shape != shape:
        raise ValueError(
            f"{name}: target has shape {tuple(target.shape)}; expected {tuple(shape)}, a token id "
            "for each position"
        )


def cast_for_autocast(*tensors: Tensor | None) -> list[Tensor | None]:
    """Return the tensors cast to autocast's dtype if autocast is on, else unchanged.

    torch.nn.functional.linear casts in the same way. None entries stay None.
    """
    first = next(tensor for tensor in tensors if tensor is not None)
    if not torch.is_autocast_enabled(first.device.type):
        return list(tensors)
    dtype = torch.get_autocast_dtype(first.device.type)
    return [tensor if tensor is None else tensor.to(dtype) for tensor in tensors]


def disable_autocast(tensor: Tensor) -> torch.autocast:
    """Return a context with autocast off.

    The public functions cast their inputs once; float32 values inside them must stay float32.
    """
    return torch.autocast(tensor.device.type, enabled=False)


def find_target_rows(name: str, target_T: Tensor, vocab: int, ignore_index: int) -> Tensor | None:
    """Return the positions with a target other than `ignore_index` (int64, ascending), or None if
    these are all positions.

    Waits for the device at most once. Raises ValueError naming the first target outside [0, vocab).
    """
    if target_T.numel() == 0:
        return None
    if not target_T.is_cuda:
        low, high = (int(bound) for bound in torch.aminmax(target_T))
        if low >= 0 and high < vocab and not low <= ignore_index <= high:
            return None  # the usual case, decided by a single pass
    used = target_T != ignore_index
    outside = used & ((target_T < 0) | (target_T >= vocab))
    count, invalid_count = torch.stack((used.sum(), outside.sum())).tolist()
    if invalid_count:
        expected = (
            f"[0, {vocab}) and not ignore_index ({ignore_index}); check that targets come from "
            "this model's tokenizer, or set them to ignore_index"
        )
        raise make_target_error(name, target_T, outside, expected)
    return find_true_rows(used, count)


def make_target_error(name: str, target: Tensor, outside: Tensor, expected: str) -> ValueError:
    """Return the error of the first target that is `outside` (bool, of the same shape)."""
    place = outside.nonzero()[0].tolist()
    return ValueError(f"{name}: target{place} is {int(target[tuple(place)])}, outside {expected}")


def check_targets(
    name: str,
    target: Tensor,
    vocab: int,
    remedy: str = "; check that targets come from this model's tokenizer",
) -> None:
    """Check that all targets lie in [0, vocab).

    Waits for the device once. Raises ValueError naming the first target outside.
    """
    outside = (target < 0) | (target >= vocab)
    if bool(outside.any()):
        raise make_target_error(name, target, outside, f"[0, {vocab}){remedy}")


def find_true_rows(used_T: Tensor, count: int | None = None) -> Tensor | None:
    """Return the positions where `used_T` is True, ascending, or None if all are True.

    `count`: the number of True entries, if it is known; this saves a wait for the device.
    """
    count = int(used_T.sum()) if count is None else count
    if count == used_T.numel():
        return None
    # A stable sort of False before True keeps the order. Unlike nonzero, it needs no second wait on
    # a GPU.
    return (
        torch.argsort(~used_T, stable=True)[:count]
        if used_T.is_cuda
        else used_T.nonzero().squeeze(1)
    )


def select_rows(tensor: Tensor, rows: Tensor | None) -> Tensor:
    """Return the rows `rows` of the tensor; None selects all rows."""
    return tensor if rows is None else tensor.index_select(0, rows)


def scatter_rows(values: Tensor, rows: Tensor | None, size: int) -> Tensor:
    """Return a tensor of `size` rows with `values` at `rows` and zeros elsewhere: the reverse of
    `select_rows`.
    """
    if rows is None:
        return values
    return values.new_zeros((size, *values.shape[1:])).index_copy_(0, rows, values)


def check_tokens(name: str, tokens: int, **tensors: Tensor | None) -> None:
    """Check that every tensor has shape [tokens]. None entries are skipped.

    Raises ValueError naming the first tensor with another shape.
    """
    for key, value in tensors.items():
        if value is not None and value.shape != (tokens,):
            raise ValueError(
                f"{name}: {key} has shape {tuple(value.shape)}; expected ({tokens},), a value for "
                "each token"
            )


def check_sequences(name: str, cu_seqlens: Tensor, tokens: int) -> None:
    """Check cu_seqlens [S + 1]: 0, then the end of each sequence, up to `tokens`.

    The values are checked only without CUDA, where reading them needs no wait. The kernels clamp
    the values, so wrong values cannot cause reads outside the tensors. Raises ValueError for a
    wrong shape, dtype or value.
    """
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 1 or cu_seqlens.dtype not in INTEGER_DTYPES:
        raise ValueError(
            f"{name}: cu_seqlens is {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}; expected "
            "integers [S + 1], for lengths 3 and 2: torch.tensor([0, 3, 5])"
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
            f"{name}: cu_seqlens is {ends}; expected 0, then ends in order up to the number of "
            f"tokens ({tokens})"
        )
