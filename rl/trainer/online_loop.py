"""Run the online loop: sample, evaluate, compute advantages, prepare, train."""

from __future__ import annotations

from rl.algorithms import StreamedStep
from rl.rollout import compute_group_metrics
from rl.seed import derive_seed
from rl.trainer.async_source import train_asynchronous
from rl.trainer.nan_check import report_nonfinite
from rl.trainer.stage import Stage


@report_nonfinite
def train_online(stage: Stage) -> None:
    """Run a stage of a method that learns from its samples, from its next batch to its end."""
    if stage.context.flow.steps_off_policy:
        train_asynchronous(stage)
        return
    if stage.context.flow.gradient_parts > 1:
        train_streaming(stage)
        return
    sampler = stage.start()
    assert sampler is not None
    for batch in stage.batches():
        builders = stage.build_groups(
            stage.problems.batch(batch, stage.loop.batch_size, stage.seed), stage.method.group_size
        )
        # 1, 2
        rollouts = stage.stage_sampler.sample_batch(
            builders, sampler, batch, derive_seed(stage.seed, "sample", batch)
        )
        rollouts = stage.fill(stage.stage_sampler.add_judgements(rollouts), batch, sampler)
        stage.stop_if_late()
        stage.check(rollouts, sampler)
        groups = stage.method.shape_rewards(rollouts.groups)
        datums = stage.method.compute_advantages(groups, stage.models)  # 3, 4
        metrics = stage.method.update(stage.models, datums, stage.progress(batch))  # 5
        sampler = stage.next_sampler(sampler)
        stage.end_batch(
            batch,
            {**compute_group_metrics(rollouts.all_groups), **metrics},
            sampler,
            rollouts,
            datums,
        )
    stage.end()


def train_streaming(stage: Stage) -> None:
    """Run the same loop, but send each part of a batch to the gradient while the rest is still
    sampled.
    """
    sampler = stage.start()
    assert sampler is not None
    for batch in stage.batches():
        builders = stage.build_groups(
            stage.problems.batch(batch, stage.loop.batch_size, stage.seed), stage.method.group_size
        )
        step = StreamedStep(stage.method, stage.models, stage.progress(batch))
        seed = derive_seed(stage.seed, "sample", batch)
        rollouts = stage.stage_sampler.sample_in_parts(
            builders,
            sampler,
            batch,
            seed,
            lambda part, step=step: step.add(part.groups),  # type: ignore[misc]
        )
        stage.stop_if_late()
        stage.check(rollouts, sampler)
        metrics = step.finish()
        sampler = stage.next_sampler(sampler)
        stage.end_batch(
            batch,
            {**compute_group_metrics(rollouts.all_groups), **metrics},
            sampler,
            rollouts,
            step.batch_datums,
        )
    stage.end()
