"""The frozen base under a LoRA adapter, in fewer bytes than fp32: in bf16, or in 4 bit.

Only matrices are changed, and only what is not trained: norms, biases, buffers, routers' biases,
adapters and a value head stay fp32, and embeddings still give fp32. Under autocast a frozen fp32
matrix is rounded to bf16 at every product, so a product of a bf16 base is the same to the bit; what
is rounded anew are the embedding's values, by nothing where the model was saved in bf16.
"""

from __future__ import annotations

import importlib.util
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl.errors import UserError
from rl.ranks import asks_for_fsdp
from rl.sampler import lower_frozen_

PACKAGE = "bitsandbytes"


def chosen(asked: str, *, lora: bool, bf16: bool, deepspeed: bool) -> str:
    """What a base is held in, "fp32", "bf16" or "4bit", where `asked` may be "auto". `bf16`:
    whether that is the arithmetic.

    Raises UserError for what cannot be had here, with the remedy.
    """
    if asked not in ("auto", "fp32", "bf16", "4bit"):
        raise UserError(f"base_dtype is auto, fp32, bf16 or 4bit, got {asked!r}")
    if asked == "auto" or (asked == "fp32" and not lora):
        return "bf16" if lora and bf16 else "fp32"
    if not lora:
        raise UserError(
            f"base_dtype {asked} is of the frozen weights under an adapter, and all weights are trained here: leave it out"
        )
    if asked == "fp32":
        if deepspeed and bf16:
            raise UserError(
                "base_dtype fp32: DeepSpeed in bf16 holds every weight in bf16. Leave it out, or launch without DeepSpeed"
            )
        return asked
    if not bf16:
        raise UserError(
            f"base_dtype {asked} goes with bf16 arithmetic, and this run computes in fp32: set precision to bf16"
        )
    if asked == "4bit":
        if deepspeed or asks_for_fsdp():
            raise UserError(
                "base_dtype 4bit cannot be sharded by ZeRO or FSDP2: use one process or accelerate_configs/ddp.yaml, or bf16"
            )
        if importlib.util.find_spec(PACKAGE) is None:
            raise UserError(
                f"base_dtype 4bit needs the package {PACKAGE}: pip install -r requirements-{PACKAGE}.txt, or take bf16"
            )
    return asked


def lower_(model: Any, held_in: str, device: torch.device, *, hollow: bool = False) -> None:
    """The frozen matrices to what `chosen` said, in place. `device`: where the model is going to,
    and 4 bit are worked out.

    `hollow`: they hold nothing yet.
    """
    if held_in == "fp32":
        return
    if held_in == "4bit":
        # as QLoRA leaves it
        outside = {id(module) for module in model.get_output_embeddings().modules()}
        for module in model.modules():
            if (
                type(module) is nn.Linear
                and id(module) not in outside
                and not module.weight.requires_grad
            ):
                _quantise_(module, device)
    lower_frozen_(model, torch.bfloat16, hollow=hollow, widen=not asks_for_fsdp())


# -------------------------------------------------------------------------------------------- 4 bit


class _Product(torch.autograd.Function):
    """x [.., I] times a matrix that is made from its 4 bit whenever it is needed: nothing of its
    size is kept for the backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, state: Any) -> Tensor:
        ctx.packed, ctx.state = packed, state
        return F.linear(x, _unpacked(packed, state))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] @ _unpacked(ctx.packed, ctx.state), None, None


def _quantise_(module: nn.Linear, device: torch.device) -> None:
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(
        module.weight.detach().to(device), quant_type="nf4", compress_statistics=True
    )
    state.dtype = torch.bfloat16  # what it is turned back to
    module.weight = nn.Parameter(packed, requires_grad=False)
    module.four_bit = state  # type: ignore[assignment]  # no parameter or buffer: an object of the library
    module.forward = MethodType(_linear_4bit, module)  # type: ignore[method-assign]


def _linear_4bit(self: Any, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        y = _Product.apply(x.to(torch.bfloat16), self.weight.detach(), self.four_bit)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def _unpacked(packed: Tensor, state: Any) -> Tensor:
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(packed, state)


def unpacked(model: nn.Module) -> dict[str, Any]:
    """By name the parameters of a model that are held in 4 bit, each as a function that gives the
    matrix in bf16.
    """
    found = {}
    for name, module in model.named_modules():
        state = vars(module).get("four_bit")
        if state is not None:
            found[f"{name}.weight"] = lambda module=module, state=state: _unpacked(
                module.weight.detach(), state
            )
    return found
