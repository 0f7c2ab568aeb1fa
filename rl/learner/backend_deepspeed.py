"""Shard weights, gradients and optimizer with DeepSpeed, ZeRO stages 0 to 3.

DeepSpeed averages over ranks, so losses are multiplied by the world size (at stages 1 to 3). Every
forward goes through the engine and is followed by its backward before the next forward, because
ZeRO-3 updates its accumulation counter only then. Written against DeepSpeed 0.19.8. Some calls use
private attributes (named where they are used), because no public API drops gradients or loads an
optimizer's state.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rl.distributed import collectives
from rl.layers import describe_layers, unwrap_model
from rl.learner.adamw import make_adamw, set_adam_params
from rl.learner.backend import Backend, make_skeleton
from rl.models import SafetensorsWeights
from rl.types import AdamParams

_MOMENTS = ("exp_avg", "exp_avg_sq")


class DeepSpeedBackend(Backend):
    """Implement a backend with DeepSpeed; see the module.

    `config`: the result of `rl.distributed.accelerate_launch.make_engine_config`.
    """

    def __init__(
        self,
        model: Any,
        trainable: Mapping[str, Tensor],
        config: dict[str, Any],
        lazy_weights: SafetensorsWeights | None = None,
    ):
        import deepspeed
        from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

        self.trainable = trainable
        self.stage: int = config["zero_optimization"]["stage"]
        # Modules can be copied only before the weights are sharded.
        self.skeleton = make_skeleton(model)
        if self.stage == 3:
            _set_expert_leaf_modules(model)
        if lazy_weights is not None:
            _shard_parameters(model, config, lazy_weights)
        self.adam = make_adamw(trainable)
        # accelerator.prepare would make an engine per accelerator and plugin; each backend needs
        # a separate engine.
        self.wrapped, self.optimizer, *_ = deepspeed.initialize(
            model=model, optimizer=self.adam, config=config
        )
        # BF16_Optimizer has other private attributes than the rest of ZeRO.
        self.bf16_stage1 = isinstance(self.optimizer, BF16_Optimizer)
        self.parameters: dict[str, Tensor] = dict(model.named_parameters())

    def backward(self, value: Tensor) -> None:
        # Stage 0 reduces nothing in a backward: its step adds the gradients up.
        self.wrapped.backward(value * collectives.world() if self.stage else value)

    # ----------------------------------------------------------------------------------------- step

    def step(self, params: AdamParams, is_valid: Tensor | None = None) -> tuple[float, bool]:
        """Take a step; of stage 0 as the base class does it, without the engine, which decides on
        the host whether to update.

        The engine's stage 0 reports no norm and would also step on a gradient that is not finite.
        It would also reduce gradients that are summed already, to compute the norm.
        """
        if self.stage == 0:
            return super().step(params, is_valid)
        if is_valid is not None and not bool(is_valid):
            self.drop_gradients()
            return float("nan"), False
        set_adam_params(self.adam, params)
        self.optimizer.clip_grad = params.grad_clip_norm
        self.wrapped.step()
        norm, applied = float(self.wrapped.get_global_grad_norm()), self.wrapped.was_step_applied()
        self.drop_gradients()
        return norm, applied

    def drop_gradients(self) -> None:
        """Discard the accumulated gradients, wherever the stage stores them.

        ZeRO-3 overwrites its buffers at the first micro-batch of a step, but only for the
        parameters used in that micro-batch. Without clearing, a parameter used later or not at all
        would receive the gradient of the previous step.
        """
        self.wrapped.zero_grad()
        self.optimizer.zero_grad()
        if self.bf16_stage1:
            return  # zero_grad clears its fp32 sums as well
        if self.stage in (1, 2):
            for buffers in (self.optimizer.all_grad_tensors, self.optimizer.averaged_gradients):
                for group in buffers:
                    buffers[group] = None
            # The counter of gradients kept on the CPU; -1 is its value after a step.
            self.optimizer.micro_step_id = -1
        elif self.stage == 3:
            self.optimizer.grad_partitions_flat_buffer.zero_()
        if self.stage > 0:
            self.optimizer.reset_cpu_buffers()

    # -------------------------------------------------------------------------------------- weights

    def _gather_parameter(
        self, parameter: Tensor, writer: int | None = None
    ) -> contextlib.AbstractContextManager:
        import deepspeed

        if self.stage < 3:
            return contextlib.nullcontext()
        return deepspeed.zero.GatheredParameters([parameter], modifier_rank=writer)

    def iter_weights(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            with self._gather_parameter(self.parameters[name]):
                yield name, self.parameters[name].detach()

    def _iter_precise_weights(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        return ((name, self._full_fp32_parameter(name)) for name in names)

    def _full_fp32_parameter(self, name: str) -> Tensor:
        """Return a parameter at the optimizer's precision (in bf16 training its fp32 master
        copy).
        """
        from deepspeed.utils import safe_get_full_fp32_param

        if name in self.trainable and self.stage > 0:
            return safe_get_full_fp32_param(self.trainable[name])
        return next(tensor.clone() for _, tensor in self.iter_weights([name]))

    def _local_gradient(self, parameter: Any) -> Tensor | None:
        from deepspeed.utils import safe_get_full_grad

        # a collective call: every rank takes part
        return parameter.grad if self.stage == 0 else safe_get_full_grad(parameter)

    def max_gradient_magnitudes(self) -> dict[str, float]:
        # Before a step the gradients are in buffers that safe_get_full_grad does not read.
        if self.stage in (1, 2) and not self.bf16_stage1:
            self.optimizer.finalize_gradient_accumulation_boundary()
            self.optimizer.set_gradient_accumulation_boundary(False)
        return super().max_gradient_magnitudes()

    @torch.no_grad()
    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        for name, tensor in tensors.items():
            parameter = self.trainable[name]
            with self._gather_parameter(parameter, writer=0):
                parameter.data.copy_(tensor)
            whole = tensor.to(self.wrapped.device, torch.float32)
            if self.stage == 3:
                safe_set_local_fp32_param(parameter, self._local_partition(parameter, whole))
            elif self.stage > 0:
                safe_set_full_fp32_param(parameter, whole)

    @staticmethod
    def _local_partition(parameter: Any, whole: Tensor) -> Tensor:
        """Return this rank's partition of a full ZeRO-3 tensor; the last partition is padded with
        zeros.
        """
        size = parameter.ds_tensor.numel()
        flat = nn.functional.pad(whole.reshape(-1), (0, size * collectives.world() - whole.numel()))
        return flat[size * collectives.rank() :][:size]

    # ------------------------------------------------------------------------------------ optimizer

    def _flat_parameters(self) -> list[Tensor]:
        """Return the tensors that AdamW steps on: this rank's flat fp32 partitions."""
        if self.bf16_stage1:
            return self.optimizer.fp32_groups_flat_partition
        return (
            self.optimizer.fp32_partitioned_groups_flat
            if self.stage == 3
            else self.optimizer.single_partition_of_fp32_groups
        )

    def optimizer_tensors(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_optimizer_state

        if self.stage == 0:
            return super().optimizer_tensors()
        states = [
            state
            for state in (self.adam.state.get(flat) for flat in self._flat_parameters())
            if state
        ]
        if not states:
            return {}  # no step yet
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.trainable.items():
            # a collective call: every rank takes part
            full_states = {key: safe_get_full_optimizer_state(parameter, key) for key in _MOMENTS}
            if collectives.rank() == 0:
                tensors |= {
                    f"{name}/{key}": whole.to("cpu", copy=True)
                    for key, whole in full_states.items()
                }
                tensors[f"{name}/step"] = states[0]["step"].cpu().clone()
        return tensors

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        if self.stage == 0:
            return super().load_optimizer_tensors(tensors)
        self.adam.state.clear()
        # Without this the setters below, and the getters after the next step, would access the old
        # state.
        if self.stage < 3:
            self.optimizer._hp_optimizer_states_linked = False
        if not tensors:
            return
        step = next(tensors[name] for name in tensors if name.endswith("/step"))
        for flat in self._flat_parameters():
            zeros = {key: torch.zeros_like(flat) for key in _MOMENTS}
            self.adam.state[flat] = {"step": step.to(flat.device, copy=True), **zeros}
        if self.stage < 3:
            self.optimizer._lazy_init_hp_params_optimizer_state()
        for name, parameter in self.trainable.items():
            for key in _MOMENTS:
                whole = tensors[f"{name}/{key}"].to(self.wrapped.device, torch.float32)
                if self.stage == 3:
                    safe_set_local_optimizer_state(
                        parameter, self._local_partition(parameter, whole), key
                    )
                else:
                    safe_set_full_optimizer_state(parameter, whole, key)

    def release(self) -> None:
        self.wrapped.destroy()
        del self.wrapped, self.optimizer, self.adam, self.skeleton
        gc.collect()  # engine and optimizer refer to each other


def _set_expert_leaf_modules(model: nn.Module) -> None:
    """Gather and release each layer's experts together, if they are separate modules.

    The same holds for experts under adapters. The experts that run depend on a rank's tokens, and
    ranks that gather different experts would deadlock.
    """
    from deepspeed.utils import set_z3_leaf_modules

    moe = describe_layers(model).experts
    expert_modules = (
        [unwrap_model(model).get_submodule(name).experts for name in moe.blocks]
        if moe is not None
        else []
    )
    kinds = {
        type(experts)
        for experts in expert_modules
        if any(True for part in experts.children() for _ in part.parameters())
    }
    if kinds:
        set_z3_leaf_modules(model, list(kinds))


def _shard_parameters(
    model: nn.Module, config: dict[str, Any], lazy_weights: SafetensorsWeights
) -> None:
    """Create the ZeRO-3 partitions of a model without values, parameter by parameter.

    Rank 0 reads a tensor and broadcasts it, each rank keeps its partition, then the next tensor
    follows. deepspeed.initialize does the same with a model that has values, which must then have
    one dtype.
    """
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.partition_parameters import Init
    from deepspeed.utils import groups

    # accelerate adds the key.
    dtype = torch.bfloat16 if config.get("bf16", {}).get("enabled") else torch.float32
    device = torch.device(get_accelerator().current_device_name())
    offload_device = config["zero_optimization"].get("offload_param", {}).get("device", "none")
    first: Any = None
    for name, parameter in model.named_parameters():
        whole = torch.empty(parameter.shape, dtype=dtype, device=device)
        if collectives.rank() == 0:
            whole.copy_(lazy_weights.read(name) if name in lazy_weights else parameter.detach())
        parameter.data = whole
        del whole
        if first is None:
            first, holder = parameter, nn.Module()
            holder.register_parameter("first", first)
            Init(
                module=holder,
                config_dict_or_path=config,
                dtype=dtype,
                remote_device=None if offload_device == "none" else offload_device,
                zero_param_parallel_group=groups._get_zero_param_intra_parallel_group(),
            )
        else:
            first.convert_to_zero_parameters(param_list=[parameter])
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
