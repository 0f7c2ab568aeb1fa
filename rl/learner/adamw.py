"""Make AdamW optimizers and move their state by parameter name.

The two moments are fp32 or, through bitsandbytes, 8 bit (Dettmers et al., arXiv 2110.02861),
optionally paged.

The state is `<name>/step` and the moments. In fp32 the moments are `exp_avg` and `exp_avg_sq`. In 8
bit they are the raw `state1`, `state2` and their block scales, so a resumed run continues bit for
bit. The two formats cannot be converted into each other.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rl.distributed import Sharding
from rl.errors import UserError, install_command
from rl.types import AdamParams

OPTIMIZERS = ("adamw", "adamw_8bit", "paged_adamw_8bit")
PACKAGE = "bitsandbytes"
# A parameter of few numbers stays in fp32 and has no scales.
STATE_KEYS_8BIT = ("state1", "state2", "absmax1", "absmax2")


def check_optimizer(kind: str, device: torch.device, sharding: Sharding) -> None:
    """Check that an optimizer is available in this launch.

    Raises UserError, with the remedy, if it is not.
    """
    if kind not in OPTIMIZERS:
        raise UserError(f"optimizer must be {', '.join(OPTIMIZERS)}, got {kind!r}")
    if kind == "adamw":
        return
    if sharding.divides:
        raise UserError(
            f"optimizer {kind} works with a single process or DDP; ZeRO and FSDP2 already shard "
            "adamw's fp32 state: leave the setting out"
        )
    if importlib.util.find_spec(PACKAGE) is None:
        raise UserError(
            f"optimizer {kind} needs the package {PACKAGE}: "
            f"{install_command('quantized')}, or use adamw"
        )
    if kind.startswith("paged") and device.type != "cuda":
        raise UserError(
            f"optimizer {kind} keeps its pages in the unified memory of a GPU, but the device of "
            f"this run is {device.type}: use adamw_8bit"
        )


def make_adamw(trainable: Mapping[str, Tensor], kind: str = "adamw") -> Any:
    """Return an AdamW optimizer; each step's AdamParams set its hyperparameters."""
    kwargs: dict[str, Any] = {"lr": 0.0, "betas": (0.9, 0.95), "eps": 1e-12}
    if kind == "adamw":
        return torch.optim.AdamW(list(trainable.values()), **kwargs, fused=True)
    from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit

    return (PagedAdamW8bit if kind.startswith("paged") else AdamW8bit)(
        list(trainable.values()), **kwargs
    )


def set_adam_params(optimizer: Any, params: AdamParams) -> None:
    """Set the hyperparameters of the next step."""
    for group in optimizer.param_groups:
        group.update(
            lr=params.learning_rate,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
        )


def step_if_finite(
    optimizer: Any, norm: Tensor, is_valid: Tensor | None = None
) -> tuple[float, bool]:
    """Take the optimizer's step if the gradient's norm, a tensor [], is finite and `is_valid` is
    not False: otherwise weights and state stay as they are. Return (the norm, whether the step was
    taken).

    AdamW's kernel reads on the device whether it has to skip the step, as for torch's gradient
    scaler, and the host reads the norm once the step is launched. bitsandbytes has no such kernel:
    there the host waits for the norm first.
    """
    applies = norm.isfinite() if is_valid is None else norm.isfinite() & is_valid
    is_fused = isinstance(optimizer, torch.optim.AdamW)
    is_first = is_fused and not optimizer.state
    kernel_options: Any = optimizer
    applied = 0.0
    try:
        if is_fused:
            kernel_options.found_inf = applies.logical_not().float()
            optimizer.step()
            del kernel_options.found_inf
        value, applied = torch.stack([norm.double(), applies.double()]).tolist()
    finally:
        if is_first and not applied:
            # zeros of a skipped step, or what one without memory made: torch would not complete it
            optimizer.state.clear()
    if applied and not is_fused:
        optimizer.step()
    return value, bool(applied)


def get_adam_state(optimizer: Any, trainable: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state of an optimizer over the parameters themselves.

    The format is that of `Backend.optimizer_tensors`.
    """
    tensors = {}
    for name, parameter in trainable.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if not key.startswith("qmap"):  # a constant table of bitsandbytes
                tensors[f"{name}/{key}"] = (
                    value if isinstance(value, Tensor) else torch.tensor(float(value))
                )
    return tensors


def load_adam_state(
    optimizer: Any,
    trainable: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    copy_: Callable[[Tensor, Tensor], Any] = Tensor.copy_,
) -> None:
    """Replace the optimizer's state by `tensors`, in the format of `get_adam_state`.

    `copy_(moment, whole)` copies a full tensor into a moment, which is stored like its parameter.
    """
    optimizer.state.clear()
    if not isinstance(optimizer, torch.optim.AdamW):
        return _load_8bit(optimizer, trainable, tensors)
    for full_name, value in tensors.items():
        name, key = full_name.rsplit("/", 1)
        parameter = trainable[name]
        state = optimizer.state[parameter]
        if key == "step":
            state[key] = value.to(parameter.device, copy=True)
        else:
            state[key] = torch.zeros_like(parameter)
            copy_(state[key], value)


def _load_8bit(
    optimizer: Any, trainable: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> None:
    (group,) = optimizer.param_groups
    for i, (name, parameter) in enumerate(trainable.items()):
        if f"{name}/step" not in tensors:
            continue
        optimizer.init_state(group, parameter, 0, i)
        state = optimizer.state[parameter]
        for key in STATE_KEYS_8BIT:
            if key in state:
                state[key].copy_(tensors[f"{name}/{key}"])
        state["step"] = int(tensors[f"{name}/step"])


def expected_state_shapes(
    kind: str, name: str, shape: tuple[int, ...], tensors: Mapping[str, Tensor]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes that a state file must hold for a parameter, by tensor name.

    Raises UserError if the file holds the state of another optimizer.
    """
    packed = f"{name}/state1" in tensors
    if packed == (kind == "adamw"):
        saved, requested = ("adamw_8bit", "adamw") if packed else ("adamw", kind)
        raise UserError(
            f"the optimizer state was saved by {saved} and cannot be loaded into {requested}: "
            f"pass --optimizer {saved}, or start a new run from these weights (--base-model)"
        )
    step = tensors.get(f"{name}/step")
    # The step is a scalar, stored with or without dimensions.
    shapes = {f"{name}/step": () if step is None or step.numel() != 1 else tuple(step.shape)}
    if not packed:
        return {**shapes, f"{name}/exp_avg": shape, f"{name}/exp_avg_sq": shape}
    shapes |= {f"{name}/{key}": shape for key in STATE_KEYS_8BIT[:2]}
    if tensors[f"{name}/state1"].dtype == torch.uint8:
        blocks = -(-tensors[f"{name}/state1"].numel() // 256)
        shapes |= {f"{name}/{key}": (blocks,) for key in STATE_KEYS_8BIT[2:]}
    return shapes
