"""Find the layouts that a model supports by running it on a few tokens when it is loaded.

The architecture's name plays no role. A layout is exact if every sequence has the same hidden
states as in a separate forward, and if those states depend only on that sequence's tokens. The
dependence is read from gradients with respect to the embeddings. Masked attention gives exactly
zero, so a leak shows however small it is (in a model with fresh weights it may be 1e-4 of the
total), in every dtype. Shapes: R rows, L positions, T tokens of all sequences, D hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rl.distributed import collectives
from rl.layers import describe_layers, shrink_window, truncated_layers
from rl.learner.packing import PackedBatch, collate, make_units
from rl.learner.varlen_attention import VarlenAttention
from rl.models import (
    get_vocab_size,
    seeded_torch,
    unwrap_model,
    uses_flash_attention,
)
from rl.types import Datum, ModelInput

# A window up to this size is probed unchanged, a larger window as
# rl.layers.receptive_field.SHRUNK_WINDOW.
MAX_PROBED_WINDOW = 24
# Relative to the gradient's norm. Masked attention gives 0; this is eight times float32's rounding.
MAX_LEAK = 1e-6
# Largest differences from a separate forward, relative to its norm: (hidden states of a token,
# gradient at a token). In float32 rounding gives up to 3e-6 and 5e-5, a fault on fresh weights (std
# 0.02) 1e-4 and 1e-2 or more. In bf16 rounding, and experts that change because of it, reach 0.1
# at single tokens, so the median over tokens is compared.
FP32_TOLERANCES, BF16_TOLERANCES = (5e-5, 2e-3), (0.1, 0.3)


@dataclass(frozen=True)
class ProbeSequences:
    """Hold three answers to the same prompt and an unrelated sequence.

    The judged sequence is short and has neighbors before and after it.
    """

    datums: list[Datum]
    probed: int = 1

    @classmethod
    def make(cls, vocabulary: int, reach: int) -> ProbeSequences:
        """Return sequences of random tokens that are long enough for a window of `reach`."""
        rng = np.random.default_rng(0)

        def draw(n: int) -> list[int]:
            return rng.integers(0, vocabulary, n).tolist()

        prompt, answers, single = (
            draw(4 + reach),
            [draw(n + reach // 2) for n in (4, 3, 6)],
            draw(7 + 2 * reach),
        )
        masks = [[0.0] * (len(prompt) - 1) + [1.0] * (len(answer) + 1) for answer in answers] + [
            [1.0] * len(single)
        ]
        texts = [*([*prompt, *answer] for answer in answers), single]
        fields = [
            {"target_tokens": text, "mask": mask} for text, mask in zip(texts, masks, strict=True)
        ]
        return cls(
            [
                Datum(ModelInput.from_ints(text), field)
                for text, field in zip(texts, fields, strict=True)
            ]
        )


@dataclass(frozen=True)
class ProbeOutputs:
    """Hold the outputs of a forward.

    `hidden`: hidden states of each sequence [T, D]. `gradient`: the judged sequence's gradient at
    its tokens. `other_gradient_norm`: the norm of that gradient at all other tokens.
    """

    hidden: list[Tensor]
    gradient: Tensor | None = None
    other_gradient_norm: float = 0.0


class RandomOpRecorder(TorchDispatchMode):
    """Record the operations that generate random tensors.

    Dropout that changes a token in a thousand would not show in a few tokens. A single number is
    ignored (layer dropout generates it at rate 0 too), and so is attention, which is tagged random
    because of its dropout argument.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and "attention" not in func.name():
            if any(
                isinstance(output, Tensor) and output.numel() > 1
                for output in (out if isinstance(out, tuple) else (out,))
            ):
                self.ops.add(func.name().removeprefix("aten::"))
        return out


class ProbeError(Exception):
    """Report that a layout could not be run on this model; the text says why."""


def find_layout_faults(
    model: Any,
    layouts: Sequence[str],
    *,
    training: bool = False,
    varlen: VarlenAttention | None = None,
) -> dict[str, str]:
    """Return the reason that a layout is not exact, by layout; an exact layout is not listed.

    "padded" means the plain model in a plain batch. The probe runs under the ambient autocast, and
    first without it if the weights are float32, which shows faults best. `training`: probe the
    model's training mode as well, under the name "training". `varlen`: set if attention takes the
    lengths of sequences. Generators, buffers and the mode of every module are
    restored afterwards.
    """
    device = next(model.parameters()).device
    under_autocast = torch.is_autocast_enabled(device.type)
    faults: dict[str, str] = {}
    with preserve_state(model), use_cpu_attention(model), truncated_layers(model):
        sharply = next(model.parameters()).dtype == torch.float32 and not uses_flash_attention(
            model
        )
        if sharply:
            with torch.autocast(device.type, enabled=False):
                faults = _LayoutProbe(model, FP32_TOLERANCES, varlen).run(layouts, training)
        if under_autocast or not sharply:
            remaining = [layout for layout in layouts if layout not in faults]
            faults |= _LayoutProbe(model, BF16_TOLERANCES, varlen, is_retry=sharply).run(
                remaining, training and "training" not in faults
            )
    return faults


def find_layout_faults_on_all_ranks(
    model: Any | None,
    layouts: Sequence[str],
    *,
    training: bool,
    device: torch.device,
    varlen: VarlenAttention | None = None,
) -> dict[str, str]:
    """Return `find_layout_faults` combined over all ranks.

    A fault on any rank holds for all ranks; otherwise they would choose different layouts. `model`:
    None on a rank that does not probe.
    """
    mine = {}
    if model is not None:
        mine = find_layout_faults(model, layouts, training=training, varlen=varlen)
    names = [*layouts, "training"]
    fault_counts = torch.tensor([float(name in mine) for name in names], device=device)
    collectives.all_sum_([fault_counts])
    return {
        name: mine.get(name, "another rank reported this fault")
        for name, count in zip(names, fault_counts.tolist(), strict=True)
        if count
    }


def select_attention(model: Any, accelerator: Any) -> bool:
    """Return whether a learner runs flash attention, which has no fp32: there the model gets
    torch's attention.
    """
    if uses_flash_attention(model) and accelerator.mixed_precision != "bf16":
        unwrap_model(model).set_attn_implementation("sdpa")
    return uses_flash_attention(model)


@contextlib.contextmanager
def use_cpu_attention(model: Any) -> Iterator[None]:
    """Use torch's attention for flash-attention models on the CPU.

    Flash attention runs only on a GPU, and weights to be sharded are probed on the CPU.
    """
    swap = uses_flash_attention(model) and next(model.parameters()).device.type == "cpu"
    if swap:
        unwrap_model(model).set_attn_implementation("sdpa")
    try:
        yield
    finally:
        if swap:
            unwrap_model(model).set_attn_implementation("flash_attention_2")


@contextlib.contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Restore generators, the mode of every module, and buffers after the block."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        with seeded_torch(0):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for module, name, buffer, before in buffers:
            if not torch.equal(buffer, before):
                buffer.copy_(before)
            module._buffers[name] = buffer


class _LayoutProbe:
    """Probe a model at one precision.

    `tolerances`: the largest differences, see FP32_TOLERANCES. `varlen`: see `find_layout_faults`.
    `is_retry`: a more precise probe ran before.
    """

    def __init__(
        self,
        model: Any,
        tolerances: tuple[float, float],
        varlen: VarlenAttention | None,
        is_retry: bool = False,
    ):
        self.model, self.inner = model, unwrap_model(model)
        self.tolerances, self.varlen, self.is_retry = tolerances, varlen, is_retry
        self.vocabulary = get_vocab_size(self.inner)
        self.device = next(self.model.parameters()).device
        self.layers = describe_layers(self.model)

    def run(self, layouts: Sequence[str], training: bool) -> dict[str, str]:
        """Return the reason that a layout is not exact, by layout."""
        faults: dict[str, str] = {}
        reach = self.layers.receptive_fields
        sequence_reach = max((n for n in reach.values() if n <= MAX_PROBED_WINDOW), default=0)
        sequences = ProbeSequences.make(self.vocabulary, sequence_reach)
        self.model.eval()
        with contextlib.ExitStack() as stack:
            unshrinkable = self._shrink_windows(
                stack, sequences, {name: n for name, n in reach.items() if n > MAX_PROBED_WINDOW}
            )
            try:
                reference = self._run_separately(sequences)
            except ProbeError as reason:
                return {layout: str(reason) for layout in layouts}
            for layout in layouts:
                fault = (
                    unshrinkable
                    if layout != "padded" and unshrinkable
                    else self._check_layout(layout, sequences, reference)
                )
                if fault:
                    faults[layout] = fault
            if training and "padded" not in faults:
                fault = self._check_training_mode(sequences, reference)
                if fault:
                    faults["training"] = fault
        return faults

    def _shrink_windows(
        self, stack: contextlib.ExitStack, sequences: ProbeSequences, windows: Mapping[str, int]
    ) -> str | None:
        """Shrink the windows that are too large to probe, for the following forwards.

        Return the reason if that is impossible; packed and shared are then not probed.
        """
        if self.is_retry:
            return None
        if self.layers.unknown_kinds:
            return (
                f"its layers of the kind {self.layers.unknown_kinds} may attend farther than this "
                "probe can check"
            )
        if self.tolerances is not FP32_TOLERANCES and self.layers.receptive_fields:
            return (
                f"its layers ({', '.join(self.layers.receptive_fields)}) do not see all positions, "
                "and in this precision a fault may not show"
            )
        try:
            plain = self._forward(self._batch(sequences, "padded", [sequences.probed]))
            for name, value in windows.items():
                stack.enter_context(shrink_window(self.model, name))
                now = self._forward(self._batch(sequences, "padded", [sequences.probed]))
                if self._compare(now, plain)[0] <= MAX_LEAK:
                    return f"{name}={value} reaches farther than this probe can check"
                plain = now
        except ProbeError as reason:
            return (
                f"its layers ({', '.join(windows)}) reach farther than this probe "
                f"can check: {reason}"
            )
        return None

    def _check_layout(
        self, layout: str, sequences: ProbeSequences, reference: ProbeOutputs
    ) -> str | None:
        """Return the reason that a layout is not exact, or None."""
        if layout != "padded" and not self.layers.takes_positions:
            return "its forward takes no position_ids"
        if layout == "shared" and uses_flash_attention(self.model):
            return "flash attention takes no custom mask"
        try:
            result = self._forward(self._batch(sequences, layout), probed=sequences.probed)
        except ProbeError as reason:
            return str(reason)
        neighbors = {
            "padded": "tokens to its right or in other rows",
            "packed": "other sequences in its row",
            "shared": "other answers",
        }
        assert result.gradient is not None and reference.gradient is not None
        size = float(reference.gradient.norm())
        if not result.other_gradient_norm <= MAX_LEAK * size:
            return (
                f"a sequence depends on {neighbors[layout]} (by "
                f"{result.other_gradient_norm / max(size, 1e-30):.1g} of its gradient)"
            )
        return self._explain_difference(result, reference)

    def _check_training_mode(
        self, sequences: ProbeSequences, reference: ProbeOutputs
    ) -> str | None:
        """Compare two forwards in training mode and a backward with evaluation mode; return the
        fault.

        Gradient checkpointing is active if it is enabled.
        """
        self.model.train()
        batch = self._batch(sequences, "padded")
        try:
            for _ in range(2):
                with RandomOpRecorder() as draws:
                    result = self._forward(batch, probed=sequences.probed)
                why = self._explain_difference(result, reference) or (
                    f"it uses random numbers ({', '.join(sorted(draws.ops))})"
                    if draws.ops
                    else None
                )
                if why:
                    return why
        except ProbeError as reason:
            return str(reason)
        finally:
            self.model.eval()
        return None

    def _explain_difference(self, result: ProbeOutputs, reference: ProbeOutputs) -> str | None:
        """Return the difference between two results that is above the tolerance, or None."""
        states, gradient = self._compare(result, reference)
        if not states <= self.tolerances[0]:
            return (
                f"hidden states differ from those of a separate forward by {states:.1g} of their "
                "size"
            )
        if not gradient <= self.tolerances[1]:
            return (
                f"gradients differ from those of a separate forward by {gradient:.1g} of their size"
            )
        return None

    def _compare(self, result: ProbeOutputs, reference: ProbeOutputs) -> tuple[float, float]:
        """Return the relative differences of hidden states and of gradients over tokens.

        Each is the maximum, or in bf16 the median.
        """

        def relative(a: Tensor, b: Tensor) -> Tensor:
            size = torch.maximum(a.norm(dim=-1), b.norm(dim=-1))
            return ((a - b).norm(dim=-1) / size.clamp_min(1e-30)).nan_to_num(nan=float("inf"))

        def reduce_errors(values: Tensor) -> float:
            return float(values.max() if self.tolerances is FP32_TOLERANCES else values.median())

        states = max(
            reduce_errors(relative(a, b))
            for a, b in zip(result.hidden, reference.hidden, strict=True)
        )
        if result.gradient is None or reference.gradient is None:
            return states, 0.0
        # A position with a gradient of rounding errors only is ignored.
        floor = 1e-6 * reference.gradient.norm(dim=-1).max()
        compared = (reference.gradient.norm(dim=-1) > floor) | (
            result.gradient.norm(dim=-1) > floor
        )
        return states, reduce_errors(
            relative(result.gradient, reference.gradient)[compared]
        ) if bool(compared.any()) else float("inf")

    # -------------------------------------------------------------------------------------- running

    def _batch(
        self, sequences: ProbeSequences, layout: str, indices: Sequence[int] | None = None
    ) -> PackedBatch:
        """Return the sequences (or those in `indices`) as a batch in a layout."""
        datums = sequences.datums if indices is None else [sequences.datums[i] for i in indices]
        units = make_units(datums, layout, 10**9)
        return collate(datums, units, layout, self.device, varlen=self.varlen is not None)

    def _run_separately(self, sequences: ProbeSequences) -> ProbeOutputs:
        """Run each sequence in a separate forward."""
        parts = [
            self._forward(
                self._batch(sequences, "padded", [i]), probed=0 if i == sequences.probed else None
            )
            for i in range(len(sequences.datums))
        ]
        return ProbeOutputs([part.hidden[0] for part in parts], parts[sequences.probed].gradient)

    def _forward(self, batch: PackedBatch, probed: int | None = None) -> ProbeOutputs:
        """Run a batch as the learner does.

        `probed`: the sequence for which the gradient of the last two tokens is computed. Raises
        ProbeError if the model cannot run it.
        """
        inputs = batch.make_model_inputs(self.model)
        try:
            with (
                torch.set_grad_enabled(probed is not None),
                nullcontext() if self.varlen is None else self.varlen.use(self.model, batch.bounds),
                self._record_states(batch.input_ids.shape, probed is not None) as (leaves, states),
            ):
                logits = self.model(**inputs, use_cache=False).logits
                hidden = states[-1] if states else logits
                if hidden.shape[:2] != batch.input_ids.shape:
                    raise ProbeError(
                        f"logits of shape {tuple(hidden.shape)} for tokens of shape "
                        f"{tuple(batch.input_ids.shape)}"
                    )
                index = (
                    torch.arange(batch.input_ids.numel(), device=self.device)
                    if batch.token_index is None
                    else batch.token_index
                )
                parts = index.split(batch.cu_seqlens.diff().tolist())
                flat = hidden.flatten(0, 1)
                hidden_states = [flat[part].detach().float() for part in parts]
                if probed is None:
                    return ProbeOutputs(hidden_states)
                last = flat[parts[probed][-2:]].float()
                weights = torch.from_numpy(np.random.default_rng(1).standard_normal(last.shape)).to(
                    last
                )
                return ProbeOutputs(
                    hidden_states,
                    *self._embedding_gradient(
                        (last * weights).sum(), leaves, parts[probed], batch.input_ids.shape
                    ),
                )
        except (
            RuntimeError,
            ValueError,
            TypeError,
            IndexError,
            KeyError,
            AttributeError,
            NotImplementedError,
            AssertionError,
        ) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ProbeError(
                f"it cannot run this layout ({type(error).__name__}: {first[:200]})"
            ) from error

    def _embedding_gradient(
        self, value: Tensor, leaves: list[Tensor], positions: Tensor, shape: torch.Size
    ) -> tuple[Tensor, float]:
        """Return the gradient of `value` at the judged sequence's embeddings [T, D], and its norm
        elsewhere.

        Raises ProbeError if the forward does not use the embeddings as expected.
        """
        if not leaves:
            raise ProbeError("its forward does not use its input embeddings")
        gradients = torch.autograd.grad(value, leaves, allow_unused=True)
        total = (
            torch.stack(
                [
                    torch.zeros_like(leaf) if g is None else g
                    for g, leaf in zip(gradients, leaves, strict=True)
                ]
            )
            .sum(0)
            .float()
        )
        if total.shape[:2] != shape:
            raise ProbeError(
                f"embeddings of shape {tuple(total.shape)} for tokens of shape {tuple(shape)}"
            )
        flat = total.flatten(0, 1)
        inside = torch.zeros(len(flat), dtype=torch.bool, device=flat.device)
        inside[positions] = True
        return flat[positions], float(flat[~inside].norm())

    @contextlib.contextmanager
    def _record_states(
        self, shape: torch.Size, needs_gradient: bool
    ) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Make the embeddings leaves of the graph and record the output head's input during a
        forward.

        A linear head itself runs on no token: it may be most of the work, and it treats tokens
        independently.
        """
        leaves: list[Tensor] = []
        states: list[Tensor] = []

        def cut(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            leaf = out.detach().requires_grad_()
            leaves.append(leaf)
            return leaf.clone()  # a model may write into it

        def note(module: nn.Module, args: Any) -> Any:
            if args[0].shape[:-1] != shape:
                return None
            states.append(args[0])
            return (args[0][:, : 0 if isinstance(module, nn.Linear) else 1],)

        head = self.inner.get_output_embeddings()
        hooks = (
            [self.inner.get_input_embeddings().register_forward_hook(cut)] if needs_gradient else []
        )
        hooks += [] if head is None else [head.register_forward_pre_hook(note)]
        try:
            yield leaves, states
        finally:
            for hook in hooks:
                hook.remove()
