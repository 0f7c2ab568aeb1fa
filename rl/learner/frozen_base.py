"""Store the frozen base under a LoRA adapter in fewer bytes than fp32: in bf16, or in 4 bit.

Only frozen matrices change. Norms, biases, buffers, routers' biases, adapters and a value head stay
fp32, and embeddings still return fp32. Under autocast a frozen fp32 matrix is rounded to bf16 at
every product, so a product with a bf16 base is bitwise identical. The only new rounding is that of
the embedding's values, which is exact if the model was saved in bf16.
"""

from __future__ import annotations

import importlib.util
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl.distributed import Sharding, get_launch_sharding
from rl.errors import UserError, install_command
from rl.sampler import cast_frozen_

PACKAGE = "bitsandbytes"


def choose_base_dtype(requested: str, *, lora: bool, bf16: bool, sharding: Sharding) -> str:
    """Return the storage type of a base, "fp32", "bf16" or "4bit"; the request may be "auto".

    `bf16`: whether the arithmetic is bf16. Raises UserError, with the remedy, for a request that
    this run cannot satisfy.
    """
    if requested not in ("auto", "fp32", "bf16", "4bit"):
        raise UserError(f"base_dtype must be auto, fp32, bf16 or 4bit, got {requested!r}")
    if requested == "auto" or (requested == "fp32" and not lora):
        return "bf16" if lora and bf16 else "fp32"
    if not lora:
        raise UserError(
            f"base_dtype {requested} applies to the frozen weights under an adapter, but this run "
            "trains all weights: leave it out"
        )
    if requested == "fp32":
        if sharding.owns_weights and bf16:
            raise UserError(
                "base_dtype fp32: DeepSpeed in bf16 stores every weight in bf16. Leave it out, "
                "or launch without DeepSpeed"
            )
        return requested
    if not bf16:
        raise UserError(
            f"base_dtype {requested} needs bf16 arithmetic, but this run computes in fp32: set "
            "precision to bf16"
        )
    if requested == "4bit":
        if sharding.divides:
            raise UserError(
                "base_dtype 4bit cannot be sharded by ZeRO or FSDP2: use a single process or "
                "accelerate_configs/ddp.yaml, or bf16"
            )
        if importlib.util.find_spec(PACKAGE) is None:
            raise UserError(
                f"base_dtype 4bit needs the package {PACKAGE}: "
                f"{install_command('quantized')}, or use bf16"
            )
    return requested


def convert_frozen_(
    model: Any, base_dtype: str, device: torch.device, *, empty: bool = False
) -> None:
    """Convert the frozen matrices to the storage type that `choose_base_dtype` returned, in place.

    `device`: the model's destination, on which the 4-bit codes are computed. `empty`: the matrices
    hold no values yet.
    """
    if base_dtype == "fp32":
        return
    if base_dtype == "4bit":
        # QLoRA does not quantize the output head either.
        outside = {id(module) for module in model.get_output_embeddings().modules()}
        for module in model.modules():
            if (
                type(module) is nn.Linear
                and id(module) not in outside
                and not module.weight.requires_grad
            ):
                _quantize_4bit_(module, device)
    float32_embeddings = get_launch_sharding().float32_embeddings
    cast_frozen_(model, torch.bfloat16, without_values=empty, float32_embeddings=float32_embeddings)


# -------------------------------------------------------------------------------------------- 4 bit


class _Linear4bit(torch.autograd.Function):
    """Multiply x [.., I] by a 4-bit matrix that is dequantized whenever it is needed.

    Nothing of the matrix's size is saved for the backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, state: Any) -> Tensor:
        ctx.packed, ctx.state = packed, state
        return F.linear(x, _dequantize(packed, state))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] @ _dequantize(ctx.packed, ctx.state), None, None


def _quantize_4bit_(module: nn.Linear, device: torch.device) -> None:
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(
        module.weight.detach().to(device), quant_type="nf4", compress_statistics=True
    )
    state.dtype = torch.bfloat16  # the dtype of the dequantized matrix
    module.weight = nn.Parameter(packed, requires_grad=False)
    # bitsandbytes' QuantState is neither a parameter nor a buffer.
    module.four_bit = state  # type: ignore[assignment]
    module.forward = MethodType(_linear_4bit, module)  # type: ignore[method-assign]


def _linear_4bit(self: Any, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        y = _Linear4bit.apply(x.to(torch.bfloat16), self.weight.detach(), self.four_bit)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def _dequantize(packed: Tensor, state: Any) -> Tensor:
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(packed, state)


def get_dequantizers(model: nn.Module) -> dict[str, Any]:
    """Return, for each 4-bit parameter of a model by name, a function that returns the bf16
    matrix.
    """
    getters = {}
    for name, module in model.named_modules():
        state = vars(module).get("four_bit")
        if state is not None:
            getters[f"{name}.weight"] = lambda module=module, state=state: _dequantize(
                module.weight.detach(), state
            )
    return getters
