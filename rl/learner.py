"""One rank's share of a model that learns: forward, backward over micro-batches, optimizer step.

Gradients are those of a SUM of token losses over every datum of every call since the last step, divided by what the
caller says. How the datums are cut into calls, micro-batches and ranks does not enter.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl import distributed
from rl.backend import make_backend, place
from rl.errors import UserError
from rl.logprobs import HeadRequest, LogprobHead
from rl.losses import LossSpec
from rl.models import LoadedModel, is_lora, is_value_head, uses_flash_attention
from rl.packing import PackedBatch, block_cost, blocks, choose_layout, collate, plan
from rl.types import AdamParams, Datum, SamplingParams


@dataclass(frozen=True)
class LearnerSettings:
    """token_budget: positions in one micro-batch. layout: see packing. fused: kernels for logprobs."""

    token_budget: int = 16384
    layout: str = "auto"
    fused: bool = True
    gradient_checkpointing: bool = False


def _has_sliding_window(model: Any) -> bool:
    config = model.config.get_text_config().to_dict()
    if config.get("layer_types"):
        return "sliding_attention" in config["layer_types"]
    return bool(config.get("sliding_window")) and bool(config.get("use_sliding_window", True))


def _collect(outputs: dict[int, dict[str, np.ndarray]], batch: PackedBatch, found: Mapping[str, Tensor]) -> None:
    """Cuts what was found at each token into datums."""
    bounds = batch.cu_seqlens.tolist()
    arrays = {name: tensor.detach().float().cpu().numpy() for name, tensor in found.items()}
    for i, start, end in zip(batch.datum_index, bounds[:-1], bounds[1:], strict=True):
        outputs[i] = {name: array[start:end] for name, array in arrays.items()}


class Learner:
    """A model under the accelerator with its optimizer. Every rank holds one and makes the same calls."""

    def __init__(self, loaded: LoadedModel, accelerator: Any, settings: LearnerSettings):
        self.loaded = loaded
        self.accelerator = accelerator
        self.settings = settings
        self.model = loaded.model
        if settings.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            self.model.train()  # transformers checkpoints in training mode alone; dropout is 0 in every model here
        self.trainable: dict[str, Tensor] = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.parameter_shapes = {n: p.shape for n, p in self.model.named_parameters()}  # a sharded one's own is no longer its
        place(self.model, accelerator)
        with accelerator.autocast():  # as in training: flash attention takes no fp32
            self.head = LogprobHead(self.model, fused=settings.fused)  # tries the model out, so before it is sharded
        self.backend = make_backend(self.model, self.trainable, accelerator)
        self.trainable = dict(self.backend.trainable)  # FSDP replaces parameters by shares: the whole ones are to be let go
        self.is_lora = is_lora(self.model)
        self.windowed, self.flash = _has_sliding_window(self.model), uses_flash_attention(self.model)
        if (self.windowed or self.flash) and settings.layout == "shared":
            what = "a model with a sliding window would not keep to" if self.windowed else "flash attention does not take"
            raise UserError(f"layout shared gives attention a mask of its own, which {what}: use auto, padded or packed")
        self.values = [name for name in self.trainable if is_value_head(name)]  # of the value head; the sampler has none
        self.version = 0  # counts updates: what a sample was drawn from, what a datum is trained on
        self.has_gradient = False
        self.forget_sampling()

    # ------------------------------------------------------------------------------------------------ forward, backward

    def run(
        self,
        datums: Sequence[Datum],
        loss: LossSpec,
        config: Mapping[str, float],
        *,
        temperature: float,
        divisor: float,
        backward: bool,
        entropy: bool = False,
        adapters: bool = True,
    ) -> tuple[dict[int, dict[str, np.ndarray]], dict[str, float]]:
        """This rank's part of a call: outputs by datum index (logprobs, entropy, values) and sums of metrics.

        `adapters`: False scores with the LoRA adapter off, as the base model does; never with `backward`.
        Raises FloatingPointError when the loss is not finite; the gradients since the last step are dropped then.
        """
        outputs: dict[int, dict[str, np.ndarray]] = {}
        sums: dict[str, Tensor] = {}
        for batch in self._my_batches(datums, loss.group):
            with torch.set_grad_enabled(backward), self._adapters(adapters), self.backend.micro_batch():
                value, found, metrics = self._forward(batch, loss, config, temperature, entropy)
                if backward:
                    self.backend.backward(value * (batch.scale / divisor))
            if batch.scale == 0.0:
                continue
            for name, metric in {"loss:sum": value.detach(), **metrics}.items():
                sums[name] = sums[name] + metric.double() if name in sums else metric.detach().double()
            _collect(outputs, batch, found)
        totals = {name: float(value) for name, value in sums.items()}
        loss_sum = torch.tensor([totals.get("loss:sum", 0.0)], device=self.accelerator.device)
        distributed.all_sum_([loss_sum])  # every rank knows, or those without the bad datum would wait for the others
        if not math.isfinite(float(loss_sum)):
            self.drop_gradients()
            raise FloatingPointError(
                f"the loss is {float(loss_sum)}: a logprob or an input is not finite. The gradients since the last step were "
                "dropped, the weights are unchanged; look for logprobs of -inf in the datums, or lower the learning rate"
            )
        self.has_gradient = self.has_gradient or (backward and len(datums) > 0)
        return outputs, totals

    def _forward(
        self, batch: PackedBatch, loss: LossSpec, config: Mapping[str, float], temperature: float, entropy: bool
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """(the loss, what was found at each token by name, metrics) of one micro-batch."""
        wants_entropy = entropy or loss.needs_entropy(config)
        request = HeadRequest(batch.inputs["target_tokens"], batch.token_index, temperature, wants_entropy, loss.logprobs)
        inputs: dict[str, Any] = {"input_ids": batch.input_ids}
        if batch.position_ids is not None:
            inputs["position_ids"] = batch.position_ids
        if batch.attention_mask is not None:
            inputs["attention_mask"] = batch.attention_mask
        logp, entropy_T, values_T = self.head(self.backend.wrapped, request, **inputs)
        fields = batch.inputs if values_T is None else {**batch.inputs, "values": values_T}
        value, metrics = loss.compute(logp, entropy_T, fields, batch.cu_seqlens, config, fused=self.settings.fused)
        if values_T is not None:
            # ZeRO wants every parameter touched by every backward, and the model's own output to be part of it
            value = value + 0.0 * (values_T if loss.logprobs else values_T + logp.reshape(len(values_T), -1)[:, 0]).sum()
        found = {"logprobs": logp} if loss.logprobs else {}
        found |= {"entropy": entropy_T} if entropy else {}
        return value, found if values_T is None else found | {"values": values_T}, metrics

    @contextlib.contextmanager
    def _adapters(self, on: bool) -> Iterator[None]:
        with contextlib.nullcontext() if on else self.model.disable_adapter():
            yield

    def _my_batches(self, datums: Sequence[Datum], group: int = 1) -> list[PackedBatch]:
        """This rank's micro-batches: dealt out longest first, as many on every rank, padded with weightless ones.

        `group` consecutive datums belong together and are never torn apart.
        """
        world, rank = distributed.world(), distributed.rank()
        budget = self.settings.token_budget
        chunks: list[tuple[str, list[list[int]]]] = []
        # Datums with and without a field (soft targets, say) cannot share a micro-batch.
        kinds: dict[tuple, list[int]] = {}
        for i in range(len(datums)):
            fields = datums[i - i % group].loss_fn_inputs
            kinds.setdefault(tuple((n, d.array.shape[1:]) for n, d in fields.items()), []).append(i)
        for members in kinds.values():
            same = [datums[i] for i in members]
            layout = self._layout(same)
            together = blocks(same, layout, budget, group)
            costs = [block_cost(same, block, layout) for block in together]
            share = budget
            if world > 1:  # enough micro-batches to go round
                share = max(1, min(budget, -(-sum(costs) // world)))
            for chunk in plan(costs, share, layout):
                chunks.append((layout, [[members[i] for i in unit] for j in chunk for unit in together[j]]))
        mine = chunks[rank::world]
        batches = [collate(datums, chunk, layout, self.accelerator.device) for layout, chunk in mine]
        for _ in range(-(-len(chunks) // world) - len(mine)):
            batches.append(collate(datums, [[i] for i in range(group)], "padded", self.accelerator.device))
            batches[-1].scale = 0.0
        return batches

    def _layout(self, datums: Sequence[Datum]) -> str:
        if self.settings.layout != "auto":
            return self.settings.layout
        if self.flash:
            return "packed"  # sequences end to end, told apart by their positions
        if self.windowed:
            return "padded"
        config = self.model.config.get_text_config().to_dict()
        return choose_layout(datums, self.settings.token_budget, config.get("hidden_size") or config["n_embd"])

    # ------------------------------------------------------------------------------------------------------------- step

    def step(self, params: AdamParams) -> dict[str, float]:
        """One AdamW update of what was accumulated. Returns the gradient norm before clipping.

        Without a gradient (no datum since the last step) nothing changes, and `skipped` is 1. A gradient that is not
        finite is dropped, nothing changes, and `skipped_nonfinite` is 1.
        """
        if not self.has_gradient:
            return {"grad_norm": 0.0, "skipped": 1.0}
        self.has_gradient = False
        norm, applied = self.backend.step(params)
        if not applied:
            return {"grad_norm": norm, "skipped_nonfinite": 1.0}
        self.version += 1
        return {"grad_norm": float(norm)}

    # ---------------------------------------------------------------------------------------- what was sampled from it

    def forget_sampling(self) -> None:
        """Nothing is known of samples of these weights."""
        self._sampled_version: int | None = None
        self.temperatures: list[float] = []
        self._truncated = self._untruncated = False

    def note_sampling(self, params: Sequence[SamplingParams]) -> None:
        """Remembers how the newest version that was sampled from was: it stands until a newer one is sampled from.

        (Several updates on the same samples are all scored as these were drawn.) Greedy samples are for looking at.
        """
        for one in params:
            if one.temperature > 0:
                if self._sampled_version != self.version:
                    self.forget_sampling()
                    self._sampled_version = self.version
                if one.temperature not in self.temperatures:
                    self.temperatures.append(one.temperature)
                truncated = one.top_k != -1 or one.top_p < 1
                self._truncated, self._untruncated = self._truncated or truncated, self._untruncated or not truncated

    def sampled_temperature(self) -> float:
        """The temperature to score at by default: that of the samples, 1 if there are none.

        Raises ValueError where these weights were sampled at several: which of them the data is of cannot be known.
        """
        if len(self.temperatures) > 1:
            raise ValueError(
                f"these weights were sampled at the temperatures {self.temperatures}: say which of them this data was drawn at, "
                'loss_fn_config={"temperature": ...}'
            )
        return self.temperatures[0] if self.temperatures else 1.0

    def refuse_truncated_samples(self) -> None:
        """Raises ValueError where every sample of this version was drawn with top-k or top-p.

        Their logprobs are of the renormalised, truncated distribution, the learner's of the whole one: ratios would be
        wrong at every token, by a factor that no clip is meant for.
        """
        if self._truncated and not self._untruncated:
            raise ValueError(
                "all samples of these weights were drawn with top_k or top_p, whose logprobs are not those of the distribution "
                "that is trained: sample training data with top_k=-1 and top_p=1"
            )

    def drop_gradients(self) -> None:
        self.backend.drop_gradients()
        self.has_gradient = False

    # ------------------------------------------------------------------------------------------------------------ state

    @property
    def shell(self) -> Any:
        """The model's modules, shapes and names; its weights may count for nothing."""
        return self.backend.shell

    def weights(self, *, frozen: bool = False) -> Iterator[tuple[str, Tensor]]:
        """The parameters that are trained (`frozen`: all), whole, one at a time, but the value head's: what is sampled from.

        All ranks take them together.
        """
        names = self.parameter_shapes if frozen else self.trainable
        return self.backend.pieces([name for name in names if not is_value_head(name)])

    def whole_model(self, *, adapter_only: bool) -> AbstractContextManager[Any | None]:
        """The model with all its weights (or its adapter's alone) on rank 0, None elsewhere: all ranks enter together."""
        return self.backend.whole_model(list(self.trainable if adapter_only else self.parameter_shapes))

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """On rank 0 AdamW's state by parameter name: `<name>/exp_avg`, `<name>/exp_avg_sq`, `<name>/step`.

        The same under every backend and number of ranks, so what one saves another reads. All ranks call it together.
        """
        return self.backend.optimizer_tensors()

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces AdamW's state; nothing makes it a fresh optimizer."""
        self.backend.load_optimizer_tensors(tensors)

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies the trainable tensors in. Raises ValueError naming what is missing, unknown or of another shape."""
        missing, unknown = sorted(self.trainable.keys() - tensors.keys()), sorted(tensors.keys() - self.trainable.keys())
        if missing or unknown:
            raise ValueError(f"the saved weights do not fit this model: missing {missing[:3]}, unknown {unknown[:3]}")
        for name in self.trainable:
            if self.parameter_shapes[name] != tensors[name].shape:
                here, there = tuple(self.parameter_shapes[name]), tuple(tensors[name].shape)
                raise ValueError(f"{name} has shape {there} in the file, {here} here")
        self.backend.load_weights(tensors)
        self.drop_gradients()
        self.version += 1

    def release(self) -> None:
        self.backend.release()
