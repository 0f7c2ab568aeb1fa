"""What a method is: settings, and three hooks. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rl.datums import action_tokens
from rl.schedules import factor
from rl.settings import LoopSettings, OptimSettings
from rl.types import AdamParams, Datum, Problem, TrajectoryGroup

if TYPE_CHECKING:
    from rl.training_client import TrainingClient


@dataclass
class Models:
    """The clients a method has at hand. `policy` is always there; others are made by the methods that need them."""

    policy: TrainingClient
    others: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Progress:
    """Where a stage is: batch `batch` of `steps`."""

    batch: int
    steps: int


class Method(Protocol):
    """`online`: whether it samples (credit) or reads (datums)."""

    online: bool

    def state(self) -> dict[str, Any]:
        """What must survive a resume, as readable JSON."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...

    def learn(self, models: Models, datums: Sequence[Datum], progress: Progress) -> dict[str, float]: ...


class OnlineMethod(Method, Protocol):
    group_size: int

    def credit(self, groups: Sequence[TrajectoryGroup], models: Models) -> list[Datum]: ...


class OfflineMethod(Method, Protocol):
    def datums(self, rows: Sequence[Problem], renderer: Any) -> list[Datum]: ...


def adam_params(optim: OptimSettings, loop: LoopSettings, batch: int, peak: float) -> AdamParams:
    """AdamW's settings at this batch: the schedule's learning rate, all else constant."""
    return AdamParams(
        learning_rate=peak * factor(optim.schedule, batch, loop.steps, optim.warmup_steps),
        beta1=optim.beta1,
        beta2=optim.beta2,
        eps=optim.adam_eps,
        weight_decay=optim.weight_decay,
        grad_clip_norm=optim.grad_clip_norm,
    )


def substeps(datums: Sequence[Datum], n: int) -> list[list[Datum]]:
    """`datums` dealt out over n optimizer steps, in turn, so that each sees every problem's group.

    Fewer datums than steps make fewer steps: an optimizer step on nothing is not taken.
    """
    parts = [list(datums[i::n]) for i in range(n)]
    return [part for part in parts if part]


def divisor(datums: Sequence[Datum], kind: str) -> float:
    """What an optimizer step's summed loss is divided by: its action tokens, its sequences, or 1 ("sum")."""
    match kind:
        case "tokens":
            return max(1, action_tokens(datums))
        case "sequences":
            return max(1, len(datums))
        case "sum":
            return 1.0
    raise ValueError(f"unknown normalisation {kind!r}: tokens, sequences or sum")


def one_pass(
    models: Models,
    datums: Sequence[Datum],
    *,
    loss: str,
    config: Mapping[str, float],
    normalise: str,
    optim: OptimSettings,
    loop: LoopSettings,
    progress: Progress,
    peak: float,
) -> dict[str, float]:
    """The default `learn`: one pass over the data in `num_substeps` optimizer steps. Returns `optim/...` metrics.

    Sampler and learner are compared on the first substep, whose weights are those that sampled.
    """
    params = adam_params(optim, loop, progress.batch, peak)
    metrics: dict[str, float] = {"optim/lr": params.learning_rate}
    sums: dict[str, float] = {}
    norms: list[float] = []
    for i, part in enumerate(substeps(datums, optim.num_substeps)):
        forward = models.policy.forward_backward(part, loss, config, divisor=divisor(part, normalise))
        update = models.policy.optim_step(params)
        output = forward.result()
        for name, value in output.metrics.items():
            if name.endswith(":sum"):
                sums[name] = sums.get(name, 0.0) + value
        step_metrics = update.result().metrics or {}
        norms.append(step_metrics["grad_norm"])
        if step_metrics.get("skipped_nonfinite"):
            metrics["optim/skipped_nonfinite"] = metrics.get("optim/skipped_nonfinite", 0.0) + 1
        if i == 0 and "logprobs" in part[0].loss_fn_inputs:
            metrics.update(sampler_against_learner(part, [o["logprobs"].array for o in output.loss_fn_outputs]))
    metrics["optim/grad_norm"] = max(norms, default=0.0)
    metrics["optim/substeps"] = len(norms)
    metrics.update(_loss_metrics(sums, datums))
    return metrics


def _loss_metrics(sums: Mapping[str, float], datums: Sequence[Datum]) -> dict[str, float]:
    tokens = action_tokens(datums) if datums else 0
    name = "optim/loss" if "weights:sum" in sums else "optim/policy_loss"
    metrics = {name: sums.get("loss:sum", 0.0) / max(1, tokens), "optim/tokens": tokens}
    active = sums.get("active_tokens:sum", 0.0)
    if "clipped_low:sum" in sums:
        metrics["optim/clip_frac"] = (sums["clipped_low:sum"] + sums["clipped_high:sum"]) / max(1.0, active)
    return metrics


def sampler_against_learner(datums: Sequence[Datum], logprobs: Sequence[Any]) -> dict[str, float]:
    """How far the sampler's logprobs q are from the learner's p over action tokens, with d = q - p.

    `kl_sample_train_v1` = mean d, `_v2` = mean d^2 / 2 (two estimators of KL(sampler || learner)), their largest
    difference, and `entropy` = -mean q.
    """
    import numpy as np

    masks = np.concatenate([d.loss_fn_inputs["mask"].array for d in datums]) != 0
    q = np.concatenate([d.loss_fn_inputs["logprobs"].array for d in datums])[masks].astype(np.float64)
    p = np.concatenate(list(logprobs))[masks].astype(np.float64)
    if not len(q):
        return {}
    d = q - p
    return {
        "optim/kl_sample_train_v1": float(d.mean()),
        "optim/kl_sample_train_v2": float((d * d).mean() / 2),
        "optim/max_logprob_difference": float(np.abs(d).max()),
        "optim/entropy": float(-q.mean()),
    }
