"""Take an optimizer step over groups that arrive in parts: gradients accumulate while the
remaining groups are still being sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rl.algorithms.grpo import GRPO
from rl.algorithms.importance_correction import merge_effective_sample_size
from rl.algorithms.method_interface import Models, Progress
from rl.algorithms.update import (
    UpdateSums,
    compute_divisor,
    compute_loss_metrics,
    has_gradient,
    make_adam_params,
)
from rl.errors import UserError
from rl.rollout import Metrics, TrajectoryGroup, count_action_tokens, max_or_nan
from rl.types import Datum


class StreamedStep:
    """Accumulate gradients part by part: call `add` with each part's groups, in an order
    independent of sampling speed, then `finish` for the update of the whole batch.

    The divisor of the summed loss is known only after the last part. Gradients are therefore
    accumulated undivided and scaled before the update. Raises UserError under DeepSpeed.
    """

    def __init__(self, method: GRPO, models: Models, progress: Progress):
        if not models.policy.info["scales_gradients"]:
            raise UserError(
                "stream_minibatches scales accumulated gradients, to which DeepSpeed gives no "
                "access: launch with FSDP or DDP"
            )
        self.method, self.models, self.progress = method, models, progress
        self.datums: list[Datum] = []  # as passed to the loss
        self.batch_datums: list[Datum] = []
        self._futures: list[Any] = []
        # metrics of each part, with the number of its tokens or of its answers
        self._correction_metrics: list[tuple[int, Metrics]] = []
        self._shaping_metrics: list[tuple[int, Metrics]] = []
        self._no_signal_groups: list[
            TrajectoryGroup
        ] = []  # the first group, until a group has a signal

    def add(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Compute the gradient of a part's groups and accumulate it."""
        if not groups:
            return
        groups = self.method.shape_rewards(groups)
        answers = sum(len(group.trajectories_G) for group in groups)
        self._shaping_metrics.append((answers, self.method.shaper.metrics))
        datums = self.method.compute_advantages(groups, self.models, keep_first=False)
        if datums:
            self._train(datums)
        elif not self._no_signal_groups:
            self._no_signal_groups = list(groups[:1])

    def _train(self, datums: list[Datum]) -> None:
        self.batch_datums += datums
        ready, before = self.method.prepare_datums(datums, self.models)
        # counted before a correction removes tokens
        self._correction_metrics.append((count_action_tokens(datums), before))
        self.datums += ready
        self._futures.append(
            self.models.policy.forward_backward(ready, self.method.loss, self.method.loss_config())
        )

    def finish(self) -> Metrics:
        """Update the policy. Returns the `optim/...` metrics of the whole batch."""
        method, settings = self.method, self.method.settings
        if not self.datums:
            self._train(method.compute_advantages(self._no_signal_groups, self.models))
        config, kind = method.loss_config(), settings.policy_gradient.normalise
        outputs = [future.result() for future in self._futures]
        self.models.policy.scale_gradients(
            1.0 / compute_divisor(self.datums, kind, settings.sampling.max_tokens)
        )
        params = make_adam_params(settings, self.progress.batch)
        totals = UpdateSums(params)
        if not has_gradient(self.datums, method.loss, config):
            params = replace(params, learning_rate=0.0)
            totals.add_skipped("no_signal", 1.0)
        totals.add_step(self.models.policy.optim_step(params).result().metrics or {})
        totals.first_datums = self.datums
        totals.first_outputs = [item for o in outputs for item in o.loss_fn_outputs]
        for output in outputs:
            totals.add_sums(output.metrics)
        corrections = _merge_part_metrics(self._correction_metrics)
        if "optim/correction_ess" in corrections:
            ess = merge_effective_sample_size(self._correction_metrics)
            corrections["optim/correction_ess"] = ess
        return {
            **totals.compare_first(),
            **totals.summarize(),
            "optim/substeps": 1,
            "optim/minibatches": len(outputs),
            **compute_loss_metrics(totals.sums, self.datums, kind),
            **corrections,
            **_merge_part_metrics(self._shaping_metrics),
        }


def _merge_part_metrics(parts: Sequence[tuple[int, Metrics]]) -> Metrics:
    """Merge the metrics of parts: means weighted by each part's number, maxima of maxima."""
    merged: Metrics = {}
    for name in dict.fromkeys(name for _, metrics in parts for name in metrics):
        values = [(number, metrics[name]) for number, metrics in parts if name in metrics]
        total = sum(number for number, _ in values) or 1
        merged[name] = (
            max_or_nan([value for _, value in values])
            if "max" in name
            else sum(number * value for number, value in values) / total
        )
    return merged
