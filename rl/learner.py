"""One rank's share of a model that learns: forward, backward over micro-batches, optimizer step.

Gradients are those of a SUM of token losses over every datum of every call since the last step, divided by what the
caller says. How the datums are cut into calls, micro-batches and ranks does not enter.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl import distributed
from rl.logprobs import HeadRequest, LogprobHead
from rl.losses import LossSpec
from rl.models import LoadedModel, is_lora
from rl.packing import PackedBatch, choose_layout, collate, plan, unit_cost, units
from rl.types import AdamParams, Datum, SamplingParams


@dataclass(frozen=True)
class LearnerSettings:
    """token_budget: positions in one micro-batch. layout: see packing. fused: kernels for logprobs."""

    token_budget: int = 16384
    layout: str = "auto"
    fused: bool = True
    gradient_checkpointing: bool = False


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
        self.model.to(accelerator.device)
        self.head = LogprobHead(self.model, fused=settings.fused)
        optimizer = torch.optim.AdamW(list(self.trainable.values()), lr=0.0, betas=(0.9, 0.95), eps=1e-12, fused=True)
        self.wrapped, self.optimizer = accelerator.prepare(self.model, optimizer)
        self.adam: torch.optim.Optimizer = self.optimizer.optimizer
        self.is_lora = is_lora(self.model)
        self.version = 0  # counts updates: what a sample was drawn from, what a datum is trained on
        self.has_gradient = False
        self._forget_sampling()

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
    ) -> tuple[dict[int, dict[str, np.ndarray]], dict[str, float]]:
        """This rank's part of a call: outputs by datum index (logprobs, entropy) and sums of metrics.

        Raises FloatingPointError when the loss is not finite; the gradients since the last step are dropped then.
        """
        outputs: dict[int, dict[str, np.ndarray]] = {}
        sums: dict[str, Tensor] = {}
        for batch in self._my_batches(datums):
            with torch.set_grad_enabled(backward), self._no_sync():
                value, logp, entropy_T, metrics = self._forward(batch, loss, config, temperature, entropy)
                if backward:
                    (value * (batch.scale / divisor)).backward()
            if batch.scale == 0.0:
                continue
            for name, metric in {"loss:sum": value.detach(), **metrics}.items():
                sums[name] = sums[name] + metric.double() if name in sums else metric.detach().double()
            self._collect(outputs, batch, logp, entropy_T if entropy else None)
        totals = {name: float(value) for name, value in sums.items()}
        if not math.isfinite(totals.get("loss:sum", 0.0)):
            self.drop_gradients()
            raise FloatingPointError(
                f"the loss is {totals['loss:sum']}: a logprob or an input is not finite. The gradients since the last step were "
                "dropped, the weights are unchanged; look for logprobs of -inf in the datums, or lower the learning rate"
            )
        self.has_gradient = self.has_gradient or (backward and len(datums) > 0)
        return outputs, totals

    def _forward(
        self, batch: PackedBatch, loss: LossSpec, config: Mapping[str, float], temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        request = HeadRequest(batch.inputs["target_tokens"], batch.token_index, temperature, entropy)
        inputs: dict[str, Any] = {"input_ids": batch.input_ids}
        if batch.position_ids is not None:
            inputs["position_ids"] = batch.position_ids
        if batch.attention_mask is not None:
            inputs["attention_mask"] = batch.attention_mask
        with self.accelerator.autocast():
            logp, entropy_T = self.head(self.wrapped, request, **inputs)
        value, metrics = loss.fn(logp, entropy_T, batch.inputs, batch.cu_seqlens, config)
        return value, logp, entropy_T, metrics

    def _my_batches(self, datums: Sequence[Datum]) -> list[PackedBatch]:
        """This rank's micro-batches: dealt out longest first, as many on every rank, padded with weightless ones."""
        world, rank = distributed.world(), distributed.rank()
        budget = self.settings.token_budget
        chunks: list[tuple[str, list[list[int]]]] = []
        # Datums with and without a field (soft targets, say) cannot share a micro-batch.
        kinds: dict[tuple, list[int]] = {}
        for i, datum in enumerate(datums):
            kinds.setdefault(tuple((n, d.array.shape[1:]) for n, d in datum.loss_fn_inputs.items()), []).append(i)
        for members in kinds.values():
            same = [datums[i] for i in members]
            layout = self._layout(same)
            together = units(same, layout, budget)
            costs = [unit_cost(same, unit) for unit in together]
            if world > 1:  # enough micro-batches to go round
                budget = max(1, min(budget, -(-sum(costs) // world)))
            for chunk in plan(costs, budget, layout):
                chunks.append((layout, [[members[i] for i in together[j]] for j in chunk]))
        mine = chunks[rank::world]
        batches = [collate(datums, chunk, layout, self.accelerator.device) for layout, chunk in mine]
        for _ in range(-(-len(chunks) // world) - len(mine)):
            batches.append(collate(datums, [[0]], "padded", self.accelerator.device))
            batches[-1].scale = 0.0
        return batches

    def _layout(self, datums: Sequence[Datum]) -> str:
        if self.settings.layout != "auto":
            return self.settings.layout
        config = self.model.config.get_text_config().to_dict()
        if "sliding_attention" in (config.get("layer_types") or ()):
            return "padded"  # a mask of our own would let such layers see too far
        return choose_layout(datums, self.settings.token_budget, config.get("hidden_size") or config["n_embd"])

    def _collect(self, outputs: dict, batch: PackedBatch, logp: Tensor, entropy_T: Tensor | None) -> None:
        bounds = batch.cu_seqlens.tolist()
        values = logp.detach().float().cpu().numpy()
        entropies = None if entropy_T is None else entropy_T.detach().float().cpu().numpy()
        for i, start, end in zip(batch.datum_index, bounds[:-1], bounds[1:], strict=True):
            outputs[i] = {"logprobs": values[start:end]}
            if entropies is not None:
                outputs[i]["entropy"] = entropies[start:end]

    def _no_sync(self) -> contextlib.AbstractContextManager:
        """Gradients stay on their rank until the step sums them: the number of backwards is not known in advance."""
        return self.accelerator.no_sync(self.wrapped)

    # ------------------------------------------------------------------------------------------------------------- step

    def step(self, params: AdamParams) -> dict[str, float]:
        """One AdamW update of what was accumulated. Returns the gradient norm before clipping.

        Without a gradient (no datum since the last step) nothing changes, and `skipped` is 1. A gradient that is not
        finite is dropped, nothing changes, and `skipped_nonfinite` is 1.
        """
        if not self.has_gradient:
            return {"grad_norm": 0.0, "skipped": 1.0}
        parameters = list(self.trainable.values())
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        distributed.all_sum_([p.grad for p in parameters if p.grad is not None])
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        self.has_gradient = False
        if not torch.isfinite(norm):
            self.optimizer.zero_grad()
            return {"grad_norm": float(norm), "skipped_nonfinite": 1.0}
        if params.grad_clip_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, params.grad_clip_norm, norm)
        for group in self.adam.param_groups:
            group.update(
                lr=params.learning_rate,
                betas=(params.beta1, params.beta2),
                eps=params.eps,
                weight_decay=params.weight_decay,
            )
        self.adam.step()
        self.optimizer.zero_grad()
        self.version += 1
        self._forget_sampling()
        return {"grad_norm": float(norm)}

    # ---------------------------------------------------------------------------------------- what was sampled from it

    def _forget_sampling(self) -> None:
        """At a new version: nothing has been sampled from it yet."""
        self.last_temperature: float | None = None
        self._truncated = self._untruncated = False

    def note_sampling(self, params: Sequence[SamplingParams]) -> None:
        """Remembers how this version was sampled from; greedy samples are for looking at, not for training."""
        for one in params:
            if one.temperature > 0:
                self.last_temperature = one.temperature
                truncated = one.top_k != -1 or one.top_p < 1
                self._truncated, self._untruncated = self._truncated or truncated, self._untruncated or not truncated

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
        self.optimizer.zero_grad()
        self.has_gradient = False

    # ------------------------------------------------------------------------------------------------------------ state

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """AdamW's state by parameter name: `<name>/exp_avg`, `<name>/exp_avg_sq`, `<name>/step`. Portable: no pickles."""
        tensors = {}
        for name, parameter in self.trainable.items():
            for key, value in self.adam.state.get(parameter, {}).items():
                tensors[f"{name}/{key}"] = value
        return tensors

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self.adam.state.clear()
        for full_name, value in tensors.items():
            name, key = full_name.rsplit("/", 1)
            parameter = self.trainable[name]
            moved = value.clone() if key == "step" else value.to(parameter.device, parameter.dtype, copy=True)
            self.adam.state[parameter][key] = moved

    @torch.no_grad()
    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies the trainable tensors in. Raises ValueError naming what is missing, unknown or of another shape."""
        missing, unknown = sorted(self.trainable.keys() - tensors.keys()), sorted(tensors.keys() - self.trainable.keys())
        if missing or unknown:
            raise ValueError(f"the saved weights do not fit this model: missing {missing[:3]}, unknown {unknown[:3]}")
        for name, parameter in self.trainable.items():
            if parameter.shape != tensors[name].shape:
                raise ValueError(f"{name} has shape {tuple(tensors[name].shape)} in the file, {tuple(parameter.shape)} here")
            parameter.copy_(tensors[name])
        self.drop_gradients()
        self.version += 1
