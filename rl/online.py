"""The online loop: sample, evaluate, advantage, prepare, train."""

from __future__ import annotations

from rl.learned_rewards import judged
from rl.metrics import group_metrics
from rl.rollout import rollout
from rl.seeds import derive_seed
from rl.stage import Stage


def train_online(stage: Stage) -> None:
    """Runs a stage of a method that learns from its own samples, from where it stands to its end."""
    sampler = stage.start()
    assert sampler is not None
    for batch in stage.batches():
        builders = stage.groups(stage.problems.batch(batch, stage.loop.batch_size, stage.seed), stage.method.group_size)
        rollouts = rollout(builders, sampler, stage.sampling_params, seed=derive_seed(stage.seed, "sample", batch))  # 1, 2
        rollouts = stage.fill(judged(rollouts, stage.models.rewards), batch, sampler)
        stage.stop_if_late()
        stage.check(rollouts, sampler)
        datums = stage.method.credit(rollouts.groups, stage.models)  # 3, 4
        metrics = stage.method.learn(stage.models, datums, stage.progress(batch))  # 5
        sampler = stage.next_sampler(sampler)
        stage.end_batch(batch, {**group_metrics(rollouts.sampled), **metrics}, sampler, rollouts, datums)
    stage.end()
