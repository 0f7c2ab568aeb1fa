"""Run optimizer steps of a learner on fake CUDA tensors: `python fake_cuda_step.py CASES [LIBRARY]`.
CASES is a key of `CASES` below. LIBRARY registers a CUDA device with torch for the CPU, for all of
the process.

Prints a line of JSON for each case: its name, what happened in order, and the errors that ended the
step. On fake tensors the first read of a number raises DataDependentOutputException.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if len(sys.argv) > 2:  # before torch looks for devices
    ctypes.CDLL(sys.argv[2])
TESTS = Path(__file__).resolve().parent
# The repository comes first: tests/kernels would shadow the installed package.
sys.path[:0] = [str(TESTS.parent), str(TESTS / "learner")]
import pytest  # noqa: E402
import torch  # noqa: E402
from test_learner_waits import (  # noqa: E402
    LAYOUTS,
    TERMS,
    ReadRecorder,
    make_datums,
    make_learner,
    record_passes,
)
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from rl.learner.adamw import make_adamw  # noqa: E402
from rl.learner.learner import Learner  # noqa: E402
from rl.losses import CUSTOM_LOSS, LOSSES, LossSpec  # noqa: E402
from rl.models.tiny_models import MODEL_PRESETS  # noqa: E402
from rl.types import AdamParams, LoraConfig  # noqa: E402

DEVICE = torch.device("cuda", 0)


class CopyRecorder(ReadRecorder):
    """Record also copies to the host, copies to the device that wait, updates, and the dtypes of
    matrix products.
    """

    def __init__(self, events: list[str]) -> None:
        super().__init__(events)
        self.dtypes: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        name, options = str(func), kwargs or {}
        if name in ("aten.mm.default", "aten.addmm.default", "aten.bmm.default"):
            self.dtypes.add(str(result.dtype))
        if "_fused_adamw" in name and args[0][0].device == DEVICE:
            self.events.append("update")
        if "_to_copy" in name or "aten.copy_" in name:
            source = args[1] if "copy_" in name and "_to_copy" not in name else args[0]
            target = args[0] if "copy_" in name and "_to_copy" not in name else result
            waits = not (options.get("non_blocking") or args[2:3] == (True,))
            if source.device.type != target.device.type and (target.device.type == "cpu" or waits):
                self.events.append(f"copy from {source.device.type}: {list(source.shape)}")
        return result


def move_to_fake_device(learner: Learner, *, bf16: bool) -> None:
    """Replace a learner's tensors by fake tensors on a CUDA device."""
    memo: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def make(tensor: torch.Tensor, wrap: Callable[..., torch.Tensor]) -> torch.Tensor:
        if id(tensor) not in memo:
            memo[id(tensor)] = wrap(torch.empty_like(tensor, device=DEVICE)), tensor
        return memo[id(tensor)][0]

    for module in learner.model.modules():
        for tensors, wrap in (
            (module._parameters, torch.nn.Parameter),
            (module._buffers, lambda x: x),
        ):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = make(tensor, wrap).requires_grad_(tensor.requires_grad)
    trainable = {name: p for name, p in learner.model.named_parameters() if p.requires_grad}
    learner.trainable = learner.backend.trainable = trainable
    learner.backend.adam = make_adamw(trainable)

    def autocast() -> Any:
        return torch.autocast("cuda", torch.bfloat16) if bf16 else contextlib.nullcontext()

    accelerator = SimpleNamespace(device=DEVICE, autocast=autocast)
    learner.accelerator = learner.backend.accelerator = accelerator
    learner.planner = replace(learner.planner, device=DEVICE)


def run_step(
    spec: LossSpec, *, bf16: bool = False, layers: int = 1, calls: int = 2, **settings: Any
) -> dict[str, Any]:
    """Return the events of a step, the numbers of its micro-batches and calls, and the error."""
    events: list[str] = []
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(allow_non_fake_inputs=True):
        preset = replace(MODEL_PRESETS["addition"], layers=layers)
        patch.setitem(MODEL_PRESETS, "addition", preset)
        with torch._subclasses.fake_tensor.unset_fake_temporarily():
            learner, datums = make_learner(patch, spec, **settings).learners[0], make_datums(spec)
        # autocast asks for a GPU
        patch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        patch.setattr(torch.cuda, "is_bf16_supported", lambda *arguments: True)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # unknown to fake tensors
        move_to_fake_device(learner, bf16=bf16)
        record_passes(patch, learner, events)
        (share,) = learner.split_batch(datums, spec.group)
        config = TERMS if spec.terms else {}
        call = (share, spec, config, {"divisor": 3.0, "backward": True})
        with CopyRecorder(events) as recorder:
            try:
                learner.train_step([call] * calls, AdamParams(grad_clip_norm=0.1))
                error = ""
            except Exception:
                error = traceback.format_exc()
    return {
        "events": events,
        "count": learner.num_micro_batches,
        "calls": calls,
        "dtypes": sorted(recorder.dtypes),
        "error": error,
    }


def list_losses() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the arguments of a case for each loss, in changing layouts."""
    layouts = itertools.cycle(LAYOUTS.items())
    for i, name in enumerate([*LOSSES, "custom"]):
        spec, (layout, settings) = LOSSES.get(name, CUSTOM_LOSS), next(layouts)
        bf16 = i % 2 == 1
        case = {"spec": spec, "bf16": bf16, "calls": 1, **settings}
        yield f"{name} {layout}" + " in bf16" * bf16, case


def list_quick_losses() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every third case of `list_losses`: each layout occurs once, two cases are in bf16."""
    yield from itertools.islice(list_losses(), 0, None, 3)


def list_settings() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the arguments of a case for each setting that changes a step."""
    others = {
        "LoRA": {"lora": LoraConfig(rank=2)},
        "gradient checkpointing": {"gradient_checkpointing": True},
        "without fused kernels": {"fused": False},
    }
    for name, settings in others.items():
        yield name, {"spec": LOSSES["ppo"], "layout": "padded", **settings}


def list_products() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the arguments of a padded case for each loss, and of PPO in each layout
    and precision.
    """
    for name in [*LOSSES, "custom"]:
        yield name, {"spec": LOSSES.get(name, CUSTOM_LOSS), "layout": "padded", "layers": 2}
    for layout, settings in LAYOUTS.items():
        for bf16 in (False, True):
            case = {"spec": LOSSES["ppo"], "bf16": bf16, "layers": 2, **settings}
            yield layout + " in bf16" * bf16, case


CASES = {"quick": (list_quick_losses, list_settings), "slow": (list_losses, list_products)}


if __name__ == "__main__":
    for list_cases in CASES[sys.argv[1]]:
        for name, arguments in list_cases():
            print(json.dumps({"name": name, **run_step(**arguments)}), flush=True)
