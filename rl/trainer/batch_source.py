"""Provide the batches of a stage: rows of data, or samples of the current weights."""

from __future__ import annotations

import abc
from contextlib import ExitStack

from rl.algorithms import StreamedStep
from rl.client import SamplingClient
from rl.rollout import RolloutBatch
from rl.seed import derive_seed
from rl.trainer.trainer import Trainer, TrainingBatch


class BatchSource(abc.ABC):
    """Provide the batches of a stage, and a sampler of the weights after each.

    `sampler` samples from the current weights; None if the stage never samples.
    """

    def __init__(self, trainer: Trainer, sampler: SamplingClient | None):
        self.trainer, self.sampler, self.stack = trainer, sampler, ExitStack()

    def close(self) -> None:
        """Stop sampling."""
        self.stack.close()

    @abc.abstractmethod
    def take_batch(self, number: int) -> TrainingBatch:
        """Return batch `number` of the stage, complete. Raises RunStopped if a stop was requested
        and the rest of the step would exceed the grace time.
        """

    def update(self, batch: TrainingBatch) -> dict[str, float]:
        """Train on a batch. Return the `optim/...` metrics."""
        method, models = self.trainer.method, self.trainer.models
        if batch.rollouts is not None:
            groups = method.shape_rewards(batch.rollouts.groups)
            batch.datums = method.compute_advantages(groups, models)
        return method.update(models, batch.datums, self.trainer.progress(batch.number))

    @abc.abstractmethod
    def sync_weights(self, number: int) -> SamplingClient | None:
        """Return a sampler for the evaluation and the log after batch `number`."""


class RowSource(BatchSource):
    """Read rows of data. Weights are synced only for an evaluation that samples."""

    def take_batch(self, number: int) -> TrainingBatch:
        trainer = self.trainer
        rows = trainer.problems.batch(number, trainer.loop.batch_size, trainer.seed)
        seed = derive_seed(trainer.seed, "datums", number)
        datums = trainer.method.datums(rows, trainer.renderer, trainer.models, seed)
        return TrainingBatch(number, datums=datums)

    def sync_weights(self, number: int) -> SamplingClient | None:
        evaluator = self.trainer.evaluator
        if evaluator.is_due(number) and evaluator.samples_held_out:
            self.sampler = self.trainer.next_sampler(self.sampler)
        return self.sampler


class SampleSource(BatchSource):
    """Sample each batch from the weights of the step before it."""

    sampler: SamplingClient

    def take_batch(self, number: int) -> TrainingBatch:
        rollouts = self._sample(number)
        self.trainer.stop_if_late()
        self.trainer.stage_sampler.check_rollouts(rollouts, self.sampler.version)
        return TrainingBatch(number, rollouts)

    def _sample(self, number: int) -> RolloutBatch:
        """Return the samples of a batch with their rewards."""
        trainer, samples = self.trainer, self.trainer.stage_sampler
        seed = derive_seed(trainer.seed, "sample", number)
        rollouts = samples.sample_batch(trainer.build_groups(number), self.sampler, number, seed)
        return samples.fill_mixed_groups(samples.add_judgements(rollouts), number, self.sampler)

    def sync_weights(self, number: int) -> SamplingClient:
        self.sampler = self.trainer.next_sampler(self.sampler)
        return self.sampler


class StreamedSource(SampleSource):
    """Sample as SampleSource does, and send each part of a batch to the gradient while the rest is
    still sampled.
    """

    step: StreamedStep

    def _sample(self, number: int) -> RolloutBatch:
        trainer = self.trainer
        self.step = StreamedStep(trainer.method, trainer.models, trainer.progress(number))
        return trainer.stage_sampler.sample_in_parts(
            trainer.build_groups(number),
            self.sampler,
            number,
            derive_seed(trainer.seed, "sample", number),
            lambda part: self.step.add(part.groups),
        )

    def update(self, batch: TrainingBatch) -> dict[str, float]:
        metrics = self.step.finish()
        batch.datums = self.step.batch_datums
        return metrics
