"""Provide the shared parts of the methods' `update`: settings, minibatches and divisor of an
optimizer step, the default pass, and its metrics. This module imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from rl.algorithms.advantages import select_actions
from rl.algorithms.importance_correction import (
    ImportanceCorrection,
    apply_correction,
    index_episodes,
    sum_by_episode,
)
from rl.algorithms.method_interface import Models, Progress
from rl.config import CorrectionSettings
from rl.lr_schedule import compute_lr_factor
from rl.rollout import Metrics, count_action_tokens, max_or_nan
from rl.types import AdamParams, Datum

Item = TypeVar("Item")


def make_adam_params(settings: Any, batch: int) -> AdamParams:
    """Return AdamW's settings at this batch: the schedule's learning rate, all else constant.

    `settings` has the sections `optim` and `loop`, and `learning_rate`, the peak.
    """
    optim = settings.optim
    factor = compute_lr_factor(optim.schedule, batch, settings.loop.steps, optim.warmup_steps)
    return AdamParams(
        learning_rate=settings.learning_rate * factor,
        beta1=optim.beta1,
        beta2=optim.beta2,
        eps=optim.adam_eps,
        weight_decay=optim.weight_decay,
        grad_clip_norm=optim.grad_clip_norm,
    )


def split_into_substeps(
    datums: Sequence[Item], num_substeps: int, rows: Sequence[int] = ()
) -> list[list[Item]]:
    """Deal `datums` (or pairs of datums) out round-robin over n optimizer steps, so that each step
    sees every problem's group.

    `rows` is the row of each datum; datums of a row are adjacent. Whole rows are then dealt out
    round-robin, because the answers of a row have different roles (good and bad, shown first and
    second): a step that received a single position of each row would see a single role. Fewer
    datums (or rows) than steps make fewer steps: no optimizer step is empty.
    """
    order = {row: i for i, row in enumerate(dict.fromkeys(rows))}
    turns = [order[row] for row in rows] if rows else range(len(datums))
    parts: list[list[Item]] = [[] for _ in range(num_substeps)]
    for datum, turn in zip(datums, turns, strict=True):
        parts[turn % num_substeps].append(datum)
    return [part for part in parts if part]


def compute_divisor(datums: Sequence[Datum], kind: str, max_tokens: int = 1) -> float:
    """Return the divisor of an optimizer step's summed loss.

    "tokens": its action tokens. "sequences", "sequence_means" (of losses already weighted by
    `weight_by_sequence`): its sequences. "constant": its sequences times max_tokens (Dr. GRPO,
    arXiv 2503.20783, appendix). "sum": 1. An episode of several datums counts as a single sequence;
    each datum counts as its share of it. Raises ValueError for any other `kind`.
    """
    match kind:
        case "tokens":
            return max(1, count_action_tokens(datums))
        case "sequences" | "sequence_means":
            return count_sequences(datums)
        case "constant":
            return count_sequences(datums) * max_tokens
        case "sum":
            return 1.0
    raise ValueError(
        f"unknown normalisation {kind!r}: expected tokens, sequences, sequence_means, constant or "
        "sum"
    )


def count_sequences(datums: Sequence[Datum]) -> float:
    """Return the number of episodes that the datums make up; 1 if they hold no action."""
    return math.fsum(datum.episode_share for datum in datums) or 1.0


def weight_by_sequence(datums: Sequence[Datum]) -> list[Datum]:
    """Return the datums with advantages and mask divided by their episode's number of action
    tokens, so that the summed losses become the episode's mean.
    """
    weighted = []
    for datum in datums:
        advantages, mask = (datum.loss_fn_inputs[name].array for name in ("advantages", "mask"))
        tokens = max(1, int(np.count_nonzero(mask))) / (datum.episode_share or 1.0)
        weighted.append(add_loss_inputs(datum, advantages=advantages / tokens, mask=mask / tokens))
    return weighted


def apply_truncated_is(
    models: Models, datums: Sequence[Datum], cap: float, temperature: float
) -> tuple[list[Datum], Metrics]:
    """Apply `correct_datums` per token with only a cap, with ratios taken against the learner
    (TIS, Yao et al. 2025).

    The metrics are the mean weight and the capped share, in addition to the comparison of sampler
    and learner.
    """
    weighted, metrics = correct_datums(
        models,
        datums,
        ImportanceCorrection("truncate", high=cap),
        against_learner=True,
        temperature=temperature,
    )
    names = {
        "optim/correction_weight": "optim/tis_weight",
        "optim/correction_high": "optim/tis_frac_capped",
    }
    return weighted, {
        names.get(name, name): value
        for name, value in metrics.items()
        if name in names or "correction" not in name
    }


def correct_datums(
    models: Models,
    datums: Sequence[Datum],
    correction: ImportanceCorrection,
    *,
    against_learner: bool,
    temperature: float,
) -> tuple[list[Datum], Metrics]:
    """Weight the datums by a correction, from the learner's logprobs before the step; for
    any policy loss, with a single forward pass.

    All policy losses are homogeneous in the advantage, which carries the weight. A rejected token
    loses its mask and its advantage, and no longer counts in the episode's length
    (`compute_remaining_shares`). With `against_learner`, the ratios of the loss are taken against
    the learner before the step (decoupled PPO, arXiv 2110.00641, section 3; AReaL, arXiv
    2505.24298, equation 5), so that clipping acts only on the update; a KL in the loss is weighted
    by the ratio to the behavior logprobs (`behavior_logprobs`), which is not capped. The metrics
    compare sampler and learner and include those of `apply_correction`.
    """
    output = models.policy.forward(
        datums, "importance_sampling", {"temperature": temperature}
    ).result()
    learner_D = [o["logprobs"].array for o in output.loss_fn_outputs]
    sampler_D = [datum.loss_fn_inputs["logprobs"].array for datum in datums]
    masks_D = [datum.action_mask for datum in datums]
    gaps_D = [lp.astype(np.float64) - q for lp, q in zip(learner_D, sampler_D, strict=True)]
    episode_D = index_episodes(datums)
    weights_D, kept_D, metrics = apply_correction(gaps_D, masks_D, episode_D, correction)
    shares_D = compute_remaining_shares(datums, episode_D, masks_D, kept_D)
    result = []
    for datum, lp, q, mask, weight, kept, share in zip(
        datums, learner_D, sampler_D, masks_D, weights_D, kept_D, shares_D, strict=True
    ):
        inputs = datum.loss_fn_inputs
        fields = {
            "advantages": inputs["advantages"].array * np.where(mask, weight * kept, 1.0),
            "mask": inputs["mask"].array * kept,
        }
        if against_learner:
            fields |= {"logprobs": np.where(mask, lp, 0.0), "behavior_logprobs": q}
        result.append(add_loss_inputs(datum, **fields))
        result[-1].episode_share = share
    return result, compare_sampler_and_learner(datums, learner_D) | metrics


def compute_remaining_shares(
    datums: Sequence[Datum],
    episode_D: Sequence[int],
    masks_D: Sequence[np.ndarray],
    kept_D: Sequence[np.ndarray],
) -> list[float]:
    """Return each datum's share of its episode's action tokens among those that remain actions.

    An episode that loses no token keeps its shares; an episode that loses all tokens has shares of
    0, so that no count of sequences holds it.
    """
    sampled, remaining = ([np.count_nonzero(mask) for mask in masks] for masks in (masks_D, kept_D))
    sampled_E, remaining_E = (sum_by_episode(episode_D, counts) for counts in (sampled, remaining))
    return [
        float(count / max(1.0, remaining_E[episode]))
        if remaining_E[episode] < sampled_E[episode]
        else datum.episode_share
        for datum, episode, count in zip(datums, episode_D, remaining, strict=True)
    ]


def correct_by_settings(
    models: Models, datums: Sequence[Datum], settings: Any
) -> tuple[Sequence[Datum], Metrics]:
    """Return the datums as the section `correction` weights them, and metrics; the same datums and
    {} without a correction.
    """
    options: CorrectionSettings = settings.correction
    if not options.active:
        return datums, {}
    names = ("correction", "correction_level", "correction_low", "correction_high")
    return correct_datums(
        models,
        datums,
        ImportanceCorrection(*(getattr(options, name) for name in names)),
        against_learner=options.against_learner,
        temperature=settings.sampling.temperature,
    )


def add_proximal_weight(datums: Sequence[Datum], version: int) -> list[Datum]:
    """Return datums with the weight that approximates ratios against the learner at `version`,
    before the step, without a forward pass.

    A token sampled by the weights of d updates ago lies d of d + 1 updates before the learner that
    the step produces. The proximal policy's logprob is therefore put d / (d + 1) of the way from
    the sampler's to the learner's current logprob (AReaL's log-linear approximation, with v_theta =
    v_proximal + 1; rl.losses.loss_terms.with_proximal_logprobs).
    """
    weighted = []
    for datum in datums:
        fields = datum.loss_fn_inputs
        versions = (
            fields["versions"].array
            if "versions" in fields
            else np.full(datum.model_input.length, float(datum.version or 0))
        )
        age = np.where(datum.action_mask, np.maximum(version - versions, 0), 0)
        weighted.append(add_loss_inputs(datum, proximal_share=age / (age + 1)))
    return weighted


def add_loss_inputs(datum: Datum, **fields: np.ndarray) -> Datum:
    """Return the datum with these loss inputs added or replaced."""
    return datum.with_inputs({**datum.loss_fn_inputs, **fields})


def add_loss_field(
    datums: Sequence[Datum], name: str, values_D: Iterable[np.ndarray]
) -> list[Datum]:
    """Return the datums with a loss input added or replaced, each with its values [T]."""
    return [
        add_loss_inputs(datum, **{name: values_T})
        for datum, values_T in zip(datums, values_D, strict=True)
    ]


@dataclass(frozen=True)
class LossCall:
    """Hold a `forward_backward` of an optimizer step.

    prefix   distinguishes the sums of its metrics from those of the step's other calls
    model    whose gradient and optimizer step it is: the policy, or one of `Models.trainable`
    lr_ratio learning rate of that model, relative to the policy's
    """

    datums: Sequence[Datum]
    loss: str
    config: Mapping[str, Any]
    divisor: float
    prefix: str = ""
    model: str = "policy"
    lr_ratio: float = 1.0


class UpdateSums:
    """Sum the metrics of a batch's optimizer steps.

    sums           of each metric of the losses, under its name with the prefix of its call
    first_outputs  the outputs of the first call of the first step, which has the weights that
                   sampled
    """

    def __init__(self, params: AdamParams):
        self.params = params
        self.sums: Metrics = {}
        self.steps = self.epochs = 0
        self.first_datums: Sequence[Datum] = ()
        self.first_outputs: Sequence[Mapping[str, Any]] = ()
        self._norms: dict[str, list[float]] = {}
        self._skipped: Metrics = {}

    def take_step(self, models: Models, calls: Sequence[LossCall]) -> None:
        """Take an optimizer step of each model that has a call.

        If nothing has a gradient (every advantage is 0 and no other term is active), the step is
        taken at learning rate 0: AdamW's moments of earlier batches and its weight decay would
        otherwise move the weights for no reason. The step still counts, so versions, random streams
        and schedules stay the same; `optim/skipped_no_signal` counts such steps.
        """
        signal = any(has_gradient(call.datums, call.loss, call.config) for call in calls)
        pending = []
        for name in dict.fromkeys(call.model for call in calls):
            client = models.policy if name == "policy" else models.trainable[name]
            members = [call for call in calls if call.model == name]
            rate = self.params.learning_rate * members[0].lr_ratio if signal else 0.0
            forwards, update = client.train_step(
                [(call.datums, call.loss, call.config, call.divisor) for call in members],
                replace(self.params, learning_rate=rate),
            )
            pending.append((name, members, forwards, update))
        for name, members, forwards, update in pending:
            for call, forward in zip(members, forwards, strict=True):
                output = forward.result()
                self.add_sums(output.metrics, call.prefix)
                if not self.first_datums:
                    self.first_datums, self.first_outputs = call.datums, output.loss_fn_outputs
            self.add_step(update.result().metrics or {}, name)
        self.steps += 1
        if not signal:
            self.add_skipped("no_signal", 1.0)

    def add_sums(self, metrics: Mapping[str, float], prefix: str = "") -> None:
        """Add the sums of a loss."""
        for name, value in metrics.items():
            if name.endswith(":sum"):
                self.sums[prefix + name] = self.sums.get(prefix + name, 0.0) + value

    def add_step(self, metrics: Mapping[str, float], model: str = "policy") -> None:
        """Add the metrics of an optimizer step."""
        self._norms.setdefault(model, []).append(metrics["grad_norm"])
        self.add_skipped("nonfinite", metrics.get("skipped_nonfinite", 0.0))

    def add_skipped(self, reason: str, count: float) -> None:
        """Count skipped steps."""
        self._skipped[reason] = self._skipped.get(reason, 0.0) + count

    def compare_first(self, datums: Sequence[Datum] = ()) -> Metrics:
        """Compare sampler and learner on the first step's datums, or on `datums`, the same with
        behavior logprobs. Returns {} if there are none.
        """
        datums = datums or self.first_datums
        if not datums or "logprobs" not in datums[0].loss_fn_inputs:
            return {}
        outputs = [output["logprobs"].array for output in self.first_outputs]
        return compare_sampler_and_learner(datums, outputs)

    def summarize(self) -> Metrics:
        """Return the metrics that do not depend on the loss: learning rate, largest gradient norm,
        skipped steps, and of a mixture of experts the share of rerouted tokens and the mean
        load-balancing loss.
        """
        experts = {}
        if routed := self.sums.get("routed:sum", 0.0):
            experts["optim/rerouted"] = self.sums["rerouted:sum"] / routed
        if counted := self.sums.get("balanced:sum", 0.0):
            experts["optim/router_aux_loss"] = self.sums["router_aux_loss:sum"] / counted
        return {
            "optim/lr": self.params.learning_rate,
            **{
                f"optim/{'' if model == 'policy' else f'{model}_'}grad_norm": max_or_nan(norms)
                for model, norms in {"policy": [], **self._norms}.items()
            },
            **{f"optim/skipped_{why}": count for why, count in self._skipped.items() if count},
            **experts,
        }


def run_updates(
    models: Models,
    items: Sequence[Item],
    make_calls: Callable[[Sequence[Item]], Sequence[LossCall]],
    settings: Any,
    progress: Progress,
    *,
    rows: Sequence[int] = (),
    epochs: Iterable[Sequence[Sequence[Item]]] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> UpdateSums:
    """Take the optimizer steps of a batch; the loop of every method.

    `items`: the datums, or pairs of datums. `make_calls` returns the calls of the step on a part of
    them. `epochs`: the parts of each epoch; by default a single epoch of `num_substeps` parts
    (`split_into_substeps`, with `rows`). `should_stop` is called after each epoch.
    """
    totals = UpdateSums(make_adam_params(settings, progress.batch))
    if epochs is None:
        epochs = [split_into_substeps(items, settings.optim.num_substeps, rows)]
    for parts in epochs:
        for part in parts:
            totals.take_step(models, make_calls(part))
        totals.epochs += 1
        if should_stop():
            break
    return totals


def train_single_pass(
    models: Models,
    datums: Sequence[Datum],
    settings: Any,
    progress: Progress,
    *,
    loss: str,
    config: Mapping[str, Any],
    normalise: str = "tokens",
    behavior_datums: Sequence[Datum] = (),
    rows: Sequence[int] = (),
) -> Metrics:
    """Train a single pass over the data in `num_substeps` optimizer steps: the default `update`.
    Returns `optim/...` metrics.

    If the loss does not read behavior logprobs, sampler and learner are compared with those of
    `behavior_datums`, a second list of the same datums. `rows`: see `split_into_substeps`.
    """
    substeps, max_tokens = settings.optim.num_substeps, settings.sampling.max_tokens
    totals = run_updates(
        models,
        datums,
        lambda part: [LossCall(part, loss, config, compute_divisor(part, normalise, max_tokens))],
        settings,
        progress,
        rows=rows,
    )
    return {
        **totals.compare_first(behavior_datums[::substeps]),
        **totals.summarize(),
        "optim/substeps": totals.steps,
        **compute_loss_metrics(totals.sums, datums, normalise),
    }


def has_gradient(datums: Sequence[Datum], loss: str, config: Mapping[str, float]) -> bool:
    """Return whether the loss or a term added to it can have a gradient; without an action it has
    none.
    """
    from rl.losses import (  # imports torch, which settings and --help avoid
        get_loss,
        list_enabled_terms,
    )

    spec = get_loss(loss)
    if spec.needs_weights:
        return any(
            "weights" not in datum.loss_fn_inputs or datum.loss_fn_inputs["weights"].array.any()
            for datum in datums
        )
    if all("mask" in datum.loss_fn_inputs for datum in datums) and not count_action_tokens(datums):
        return False
    if not spec.needs_advantages or (spec.terms and list_enabled_terms(config)):
        return True
    return any(datum.loss_fn_inputs["advantages"].array.any() for datum in datums)


def compute_loss_metrics(
    sums: Mapping[str, float], datums: Sequence[Datum], normalise: str
) -> Metrics:
    """Return means over action tokens.

    Under "sequence_means" the loss, which is already a mean over each sequence's tokens, is
    averaged over sequences.
    """
    tokens = count_action_tokens(datums) if datums else 0
    name = "optim/loss" if "weights:sum" in sums else "optim/policy_loss"
    # excludes the terms that were added to the loss
    loss = sums.get("policy_loss:sum", sums.get("loss:sum", 0.0))
    count = count_sequences(datums) if normalise == "sequence_means" else max(1, tokens)
    return {name: loss / count, "optim/tokens": tokens, **compute_token_means(sums, tokens)}


def compute_token_means(sums: Mapping[str, float], tokens: int) -> Metrics:
    """Return the metrics that are means over `tokens` tokens, and the share of clipped tokens."""
    names = {
        "entropy": "policy_entropy",
        "td_loss": "td_loss",
        "cql": "cql",
        "value_loss": "value_loss",
        "value_clipped": "value_clip_frac",
    }
    metrics = {
        f"optim/{metric}": sums[f"{name}:sum"] / max(1, tokens)
        for name, metric in names.items()
        if f"{name}:sum" in sums
    }
    if "clipped_low:sum" in sums:
        clipped = sums["clipped_low:sum"] + sums["clipped_high:sum"]
        metrics["optim/clip_frac"] = clipped / max(1.0, sums.get("active_tokens:sum", 0.0))
    return metrics


def compare_sampler_and_learner(datums: Sequence[Datum], logprobs: Sequence[Any]) -> Metrics:
    """Compare the sampler's logprobs q with the learner's logprobs p over action tokens, with d = q
    - p.

    `kl_sample_train_v1` = mean d, `_v2` = mean d^2 / 2 (two estimators of KL(sampler || learner)),
    `max_logprob_difference` = max |d|, and `entropy` = -mean q.
    """
    q = select_actions(datums, [d.loss_fn_inputs["logprobs"].array for d in datums])
    p = select_actions(datums, logprobs)
    if not len(q):
        return {}
    d = q - p
    return {
        "optim/kl_sample_train_v1": float(d.mean()),
        "optim/kl_sample_train_v2": float((d * d).mean() / 2),
        "optim/max_logprob_difference": float(np.abs(d).max()),
        "optim/entropy": float(-q.mean()),
    }
