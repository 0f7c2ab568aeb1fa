"""What a method is: settings, and three hooks. No torch here."""

from __future__ import annotations

import abc
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from rl.datums import action_tokens
from rl.episodes import TrajectoryGroup
from rl.metrics import largest
from rl.schedules import factor
from rl.settings import LearnedRewardSettings, LoopSettings, OptimSettings
from rl.types import AdamParams, Datum, Problem, TensorData

if TYPE_CHECKING:
    from rl.learned_rewards import LearnedRewards
    from rl.sampling_client import SamplingClient
    from rl.scoring import TokenScorer
    from rl.training_client import TrainingClient

Item = TypeVar("Item")

# Losses whose gradient is their advantages': without one other than 0, only a term that is added to them has one.
_OF_ADVANTAGES = ("importance_sampling", "ppo", "cispo", "gspo")


@dataclass
class Models:
    """The clients a method has at hand. `policy` is always there; `others` are what the method asked its `Hosts` for."""

    policy: TrainingClient
    others: dict[str, Any] = field(default_factory=dict)

    @property
    def reference(self) -> TokenScorer:
        return self.others["reference"]

    @property
    def critic(self) -> TrainingClient | None:
        return self.others.get("critic")

    @property
    def rewards(self) -> LearnedRewards | None:
        """What rewards answers beside (or instead of) the environments, where the method asked for it."""
        return self.others.get("rewards")

    @property
    def learning(self) -> dict[str, TrainingClient]:
        """Those beside the policy that learn, and are saved with it: the critic, where there is one."""
        return {name: self.others[name] for name in ("critic",) if name in self.others}


class Hosts(Protocol):
    """What a method's other models are made with, at the beginning of its stage and again after a resume.

    `tags`: the names of the stage's data sets.
    """

    policy: TrainingClient
    tags: Sequence[str]

    def beginning(self) -> TokenScorer:
        """The policy as it was before the stage's first step: the base under a fresh adapter, else frozen weights."""
        ...

    def load(self, target: str) -> SamplingClient:
        """The final weights of an earlier stage (by its name), of a run's folder, or those of a model folder or hub name.

        The base model under the policy's own adapter is not loaded once more.
        """
        ...

    def rewards(self, learned: LearnedRewardSettings) -> dict[str, LearnedRewards]:
        """The model whose judgement is the reward, as `rewards` in `Models.others`; nothing where none is named."""
        ...

    def critic(self, base_model: str) -> TrainingClient:
        """A model of its own with a value head, as `critic` in `Models.others`: saved with the policy, and resumed with it.

        `base_model`: a hub name, a model folder or tiny:<preset>; "policy": the weights that the stage begins from.
        """
        ...


@dataclass(frozen=True)
class Progress:
    """Where a stage is: batch `batch` of `steps`. `seed`: the stage's, for what `learn` draws at random."""

    batch: int
    steps: int
    seed: int = 0


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
    def datums(self, rows: Sequence[Problem], renderer: Any, models: Models, seed: int) -> list[Datum]:
        """`seed`: of the batch, for what is drawn at random."""
        ...


class EvaluatesRows(abc.ABC):
    """A method that measures held-out rows itself, besides (or instead of) sampling answers to them.

    `headline`: the metric that sums a run up. `keeps_value_head`: whether its best weights are nothing without the value head.
    """

    headline: str
    keeps_value_head = False

    def begin(self, rows: Iterable[Problem], renderer: Any, models: Models) -> None:  # noqa: B027  (nothing, by default)
        """Called before the first step, and after a resume, with every row that the stage trains on or evaluates."""

    @abc.abstractmethod
    def evaluate(self, rows: Sequence[Problem], renderer: Any, models: Models) -> dict[str, float]:
        """`test/...` metrics."""


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


def substeps(datums: Sequence[Item], n: int) -> list[list[Item]]:
    """`datums` (or pairs of them) dealt out over n optimizer steps, in turn, so that each sees every problem's group.

    Fewer datums than steps make fewer steps: an optimizer step on nothing is not taken.
    """
    parts = [list(datums[i::n]) for i in range(n)]
    return [part for part in parts if part]


def divisor(datums: Sequence[Datum], kind: str, max_tokens: int = 1) -> float:
    """What an optimizer step's summed loss is divided by.

    "tokens": its action tokens. "sequences", "sequence_means" (of losses already weighted by `weighted_by_sequence`): its
    sequences. "constant": its sequences times max_tokens (Dr. GRPO, arXiv 2503.20783, appendix). "sum": 1.
    An episode of several datums is one sequence, each of them its share of one.
    """
    match kind:
        case "tokens":
            return max(1, action_tokens(datums))
        case "sequences" | "sequence_means":
            return sequences(datums)
        case "constant":
            return sequences(datums) * max_tokens
        case "sum":
            return 1.0
    raise ValueError(f"unknown normalisation {kind!r}: tokens, sequences, sequence_means, constant or sum")


def sequences(datums: Sequence[Datum]) -> float:
    """How many episodes the datums make up; 1 where they hold no action."""
    return math.fsum(datum.episode_share for datum in datums) or 1.0


def weighted_by_sequence(datums: Sequence[Datum]) -> list[Datum]:
    """The datums with advantages and mask divided by their episode's number of action tokens: summed, losses become its mean."""
    weighted = []
    for datum in datums:
        advantages, mask = (datum.loss_fn_inputs[name].array for name in ("advantages", "mask"))
        tokens = max(1, int(np.count_nonzero(mask))) / (datum.episode_share or 1.0)
        weighted.append(with_fields(datum, advantages=advantages / tokens, mask=mask / tokens))
    return weighted


def truncated_importance_sampling(
    models: Models, datums: Sequence[Datum], cap: float, temperature: float
) -> tuple[list[Datum], dict[str, float]]:
    """Datums whose ratios are taken against the learner before the step, each token weighted by min(cap, learner / sampler).

    Truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training",
    equation of TIS): the mismatch of sampler and learner is a weight of its own, so that clipping acts on the update alone.
    All policy losses are homogeneous in the advantage, which carries the weight; a KL in the loss is weighted by the ratio to the
    sampler's own logprobs (`drawn_logprobs`), which is not cut off. Metrics compare sampler and learner, and
    give the weights' mean and the share that was cut off.
    """
    output = models.policy.forward(datums, "importance_sampling", {"temperature": temperature}).result()
    learner = [o["logprobs"].array for o in output.loss_fn_outputs]
    weighted, weights = [], []
    for datum, lp in zip(datums, learner, strict=True):
        inputs = datum.loss_fn_inputs
        active = inputs["mask"].array != 0
        ratio = np.exp(np.where(active, lp.astype(np.float64) - inputs["logprobs"].array, 0.0))
        weights.append(ratio[active])
        advantages = inputs["advantages"].array * np.minimum(ratio, cap)
        fields = {"advantages": advantages, "logprobs": np.where(active, lp, 0.0), "drawn_logprobs": inputs["logprobs"].array}
        weighted.append(with_fields(datum, **fields))
    every = np.concatenate(weights)
    metrics = sampler_against_learner(datums, learner)
    if len(every):
        metrics |= {"optim/tis_weight": float(np.minimum(every, cap).mean()), "optim/tis_frac_capped": float((every > cap).mean())}
    return weighted, metrics


def with_fields(datum: Datum, **fields: np.ndarray) -> Datum:
    new = {name: TensorData(value.astype(np.float32), "float32") for name, value in fields.items()}
    return Datum(datum.model_input, {**datum.loss_fn_inputs, **new}, datum.episode_share)


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
    max_tokens: int = 1,
) -> dict[str, float]:
    """The default `learn`: one pass over the data in `num_substeps` optimizer steps. Returns `optim/...` metrics.

    Sampler and learner are compared on the first substep, whose weights are those that sampled.
    Where nothing has a gradient (every advantage is 0 and no other term is on) the step is taken at learning rate 0:
    AdamW's memory of earlier batches and its weight decay would move the weights for no reason. It counts as a step all the
    same, so versions, random streams and schedules stand as they would; `optim/skipped_no_signal` says how many there were.
    """
    params = adam_params(optim, loop, progress.batch, peak)
    metrics: dict[str, float] = {"optim/lr": params.learning_rate}
    sums: dict[str, float] = {}
    norms: list[float] = []
    for i, part in enumerate(substeps(datums, optim.num_substeps)):
        forward = models.policy.forward_backward(part, loss, config, divisor=divisor(part, normalise, max_tokens))
        signal = _has_signal(part, loss, config)
        update = models.policy.optim_step(params if signal else replace(params, learning_rate=0.0))
        if not signal:
            metrics["optim/skipped_no_signal"] = metrics.get("optim/skipped_no_signal", 0.0) + 1
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
    metrics["optim/grad_norm"] = largest(norms)
    metrics["optim/substeps"] = len(norms)
    metrics.update(_loss_metrics(sums, datums, normalise))
    return metrics


def _has_signal(datums: Sequence[Datum], loss: str, config: Mapping[str, float]) -> bool:
    if loss not in _OF_ADVANTAGES or any(config.get(term, 0.0) for term in ("entropy_coef", "kl_coef", "value_coef")):
        return True
    return any(datum.loss_fn_inputs["advantages"].array.any() for datum in datums)


def _loss_metrics(sums: Mapping[str, float], datums: Sequence[Datum], normalise: str) -> dict[str, float]:
    """Means over action tokens; the loss under "sequence_means", which is a mean over each sequence's tokens already, over sequences."""
    tokens = action_tokens(datums) if datums else 0
    name = "optim/loss" if "weights:sum" in sums else "optim/policy_loss"
    loss = sums.get("policy_loss:sum", sums.get("loss:sum", 0.0))  # without the terms that were added to it
    count = sequences(datums) if normalise == "sequence_means" else max(1, tokens)
    metrics = {name: loss / count, "optim/tokens": tokens}
    if "entropy:sum" in sums:
        metrics["optim/policy_entropy"] = sums["entropy:sum"] / max(1, tokens)
    metrics |= {f"optim/{part}": sums[f"{part}:sum"] / max(1, tokens) for part in ("td_loss", "cql", "value_loss") if f"{part}:sum" in sums}
    active = sums.get("active_tokens:sum", 0.0)
    if "clipped_low:sum" in sums:
        metrics["optim/clip_frac"] = (sums["clipped_low:sum"] + sums["clipped_high:sum"]) / max(1.0, active)
    return metrics


def sampler_against_learner(datums: Sequence[Datum], logprobs: Sequence[Any]) -> dict[str, float]:
    """How far the sampler's logprobs q are from the learner's p over action tokens, with d = q - p.

    `kl_sample_train_v1` = mean d, `_v2` = mean d^2 / 2 (two estimators of KL(sampler || learner)), their largest
    difference, and `entropy` = -mean q.
    """
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
