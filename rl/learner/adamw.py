"""AdamW, its two moments in fp32 or, through bitsandbytes, in 8 bit (Dettmers et al., arXiv
2110.02861), in pages if asked.

Its state travels by parameter name: `<name>/step` and the moments, `exp_avg` and `exp_avg_sq` in
fp32; of 8 bit as they are, `state1`, `state2` and the scales of their blocks, so that a resumed run
goes on to the bit. One is not read as the other.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rl.errors import UserError
from rl.types import AdamParams

KINDS = ("adamw", "adamw_8bit", "paged_adamw_8bit")
PACKAGE = "bitsandbytes"
# the scales of a parameter of few numbers, which stays in fp32, are not there
IN_8BIT = ("state1", "state2", "absmax1", "absmax2")


def check_kind(kind: str, device: torch.device, *, sharded: bool) -> None:
    """UserError, with the remedy, where an optimizer cannot be had in this launch. `sharded`: under
    DeepSpeed or FSDP2.
    """
    if kind not in KINDS:
        raise UserError(f"optimizer is one of {', '.join(KINDS)}, got {kind!r}")
    if kind == "adamw":
        return
    if sharded:
        raise UserError(
            f"optimizer {kind} works with one process or DDP; ZeRO and FSDP2 shard adamw's fp32 state already: leave it out"
        )
    if importlib.util.find_spec(PACKAGE) is None:
        raise UserError(
            f"optimizer {kind} needs the package {PACKAGE}: pip install -r requirements-{PACKAGE}.txt, or take adamw"
        )
    if kind.startswith("paged") and device.type != "cuda":
        raise UserError(
            f"optimizer {kind} keeps its pages in a GPU's unified memory, and this run is on a {device.type}: take adamw_8bit"
        )


def new_adamw(trainable: Mapping[str, Tensor], kind: str = "adamw") -> Any:
    """Its settings are those of each step's AdamParams."""
    how: dict[str, Any] = {"lr": 0.0, "betas": (0.9, 0.95), "eps": 1e-12}
    if kind == "adamw":
        return torch.optim.AdamW(list(trainable.values()), **how, fused=True)
    from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit

    return (PagedAdamW8bit if kind.startswith("paged") else AdamW8bit)(
        list(trainable.values()), **how
    )


def set_adam(optimizer: Any, params: AdamParams) -> None:
    for group in optimizer.param_groups:
        group.update(
            lr=params.learning_rate,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
        )


def adam_state(optimizer: Any, trainable: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of an optimizer over the parameters themselves, in the form of
    `Backend.optimizer_tensors`.
    """
    found = {}
    for name, parameter in trainable.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if not key.startswith("qmap"):  # the library's own table
                found[f"{name}/{key}"] = (
                    value if isinstance(value, Tensor) else torch.tensor(float(value))
                )
    return found


def load_adam_state(
    optimizer: Any, trainable: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> None:
    optimizer.state.clear()
    if not isinstance(optimizer, torch.optim.AdamW):
        return _load_8bit(optimizer, trainable, tensors)
    for full_name, value in tensors.items():
        name, key = full_name.rsplit("/", 1)
        parameter = trainable[name]
        dtype = value.dtype if key == "step" else parameter.dtype
        optimizer.state[parameter][key] = value.to(parameter.device, dtype, copy=True)


def _load_8bit(
    optimizer: Any, trainable: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> None:
    (group,) = optimizer.param_groups
    for i, (name, parameter) in enumerate(trainable.items()):
        if f"{name}/step" not in tensors:
            continue
        optimizer.init_state(group, parameter, 0, i)
        state = optimizer.state[parameter]
        for key in IN_8BIT:
            if key in state:
                state[key].copy_(tensors[f"{name}/{key}"])
        state["step"] = int(tensors[f"{name}/step"])


def shapes_of_state(
    kind: str, name: str, shape: tuple[int, ...], tensors: Mapping[str, Tensor]
) -> dict[str, tuple[int, ...]]:
    """What a file of state must have for a parameter, by name. UserError where it is another
    optimizer's state.
    """
    packed = f"{name}/state1" in tensors
    if packed == (kind == "adamw"):
        saved, asked = ("adamw_8bit", "adamw") if packed else ("adamw", kind)
        raise UserError(
            f"the optimizer's state was saved by {saved} and cannot go on in {asked}: give --optimizer {saved}, or begin a new run from "
            "these weights (--base-model)"
        )
    step = tensors.get(f"{name}/step")
    # a number, in whatever form
    found = {f"{name}/step": () if step is None or step.numel() != 1 else tuple(step.shape)}
    if not packed:
        return {**found, f"{name}/exp_avg": shape, f"{name}/exp_avg_sq": shape}
    found |= {f"{name}/{key}": shape for key in IN_8BIT[:2]}
    if tensors[f"{name}/state1"].dtype == torch.uint8:
        blocks = -(-tensors[f"{name}/state1"].numel() // 256)
        found |= {f"{name}/{key}": (blocks,) for key in IN_8BIT[2:]}
    return found
