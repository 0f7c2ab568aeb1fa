"""Run the training loop: every method, on rows of data or on its own samples."""

from __future__ import annotations

from contextlib import closing

from rl.client import SamplingClient
from rl.trainer.batch_source import (
    AsyncSource,
    BatchSource,
    RowSource,
    SampleSource,
    StreamedSource,
)
from rl.trainer.trainer import Trainer, report_nonfinite


@report_nonfinite
def train(trainer: Trainer) -> None:
    """Train from the trainer's next batch to its last."""
    with closing(open_source(trainer, trainer.start())) as source:
        for number in trainer.batches():
            batch = source.take_batch(number)  # rows of data, or samples with their rewards
            metrics = source.update(batch)  # advantages, gradients, optimizer step
            sampler = source.sync_weights(number)
            trainer.end_batch(batch, metrics, sampler)  # log, evaluate, save, stop on request
    trainer.end()


def open_source(trainer: Trainer, sampler: SamplingClient | None) -> BatchSource:
    """Return the source of a trainer's batches. `sampler` samples from the current weights; None
    if the stage never samples.
    """
    flow = trainer.context.flow
    if not trainer.method.online:
        return RowSource(trainer, sampler)
    assert sampler is not None
    if flow.steps_off_policy:
        return AsyncSource(trainer, sampler)
    return (StreamedSource if flow.gradient_parts > 1 else SampleSource)(trainer, sampler)
