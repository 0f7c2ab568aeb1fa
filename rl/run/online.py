"""Run the online loop: sample, evaluate, compute advantages, prepare, train."""

from __future__ import annotations

from rl.episodes import group_metrics
from rl.methods import StreamedStep
from rl.run.asynchronous import train_asynchronous
from rl.run.not_finite import named
from rl.run.stage import Stage
from rl.seeds import derive_seed


@named
def train_online(stage: Stage) -> None:
    """Run a stage of a method that learns from its samples, from its next batch to its end."""
    if stage.given.flow.steps_off_policy:
        train_asynchronous(stage)
        return
    if stage.given.flow.parts > 1:
        train_streaming(stage)
        return
    sampler = stage.start()
    assert sampler is not None
    for batch in stage.batches():
        builders = stage.groups(
            stage.problems.batch(batch, stage.loop.batch_size, stage.seed), stage.method.group_size
        )
        # 1, 2
        rollouts = stage.samples.roll(
            builders, sampler, batch, derive_seed(stage.seed, "sample", batch)
        )
        rollouts = stage.fill(stage.samples.judged(rollouts), batch, sampler)
        stage.stop_if_late()
        stage.check(rollouts, sampler)
        datums = stage.method.credit(rollouts.groups, stage.models)  # 3, 4
        metrics = stage.method.learn(stage.models, datums, stage.progress(batch))  # 5
        sampler = stage.next_sampler(sampler)
        stage.end_batch(
            batch, {**group_metrics(rollouts.sampled), **metrics}, sampler, rollouts, datums
        )
    stage.end()


def train_streaming(stage: Stage) -> None:
    """Run the same loop, but send each part of a batch to the gradient while the rest is still
    sampled.
    """
    sampler = stage.start()
    assert sampler is not None
    for batch in stage.batches():
        builders = stage.groups(
            stage.problems.batch(batch, stage.loop.batch_size, stage.seed), stage.method.group_size
        )
        step = StreamedStep(stage.method, stage.models, stage.progress(batch))
        seed = derive_seed(stage.seed, "sample", batch)
        rollouts = stage.samples.stream(
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
            batch, {**group_metrics(rollouts.sampled), **metrics}, sampler, rollouts, step.credited
        )
    stage.end()
