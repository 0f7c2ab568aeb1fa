"""Run the training loop: every method, on rows of data or on its own samples."""

from __future__ import annotations

from contextlib import closing

from rl.trainer.batch_source import open_source
from rl.trainer.trainer import Trainer


def train(trainer: Trainer) -> None:
    """Train from the trainer's next batch to its last. Raises FloatingPointError for a loss or
    logits that are not finite.

    The final checkpoint is saved before the source closes: it holds the groups in flight, of which
    an asynchronous run has some at its end if its steps were lowered.
    """
    with closing(open_source(trainer, trainer.start())) as source:
        for number in trainer.batches():
            batch = source.take_batch(number)  # rows of data, or samples with their rewards
            metrics = source.update(batch)  # advantages, gradients, optimizer step
            sampler = source.sync_weights(number)
            trainer.end_batch(batch, metrics, sampler)  # log, evaluate, save, stop on request
        trainer.end()
