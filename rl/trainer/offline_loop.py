"""Run the offline loop: read, prepare, train."""

from __future__ import annotations

from rl.seed import derive_seed
from rl.trainer.nan_check import report_nonfinite
from rl.trainer.stage import Stage


@report_nonfinite
def train_offline(stage: Stage) -> None:
    """Run a stage of a method that learns from rows of data, from its next batch to its end."""
    sampler = stage.start()
    for batch in stage.batches():
        rows = stage.problems.batch(batch, stage.loop.batch_size, stage.seed)
        datums = stage.method.datums(
            rows, stage.renderer, stage.models, derive_seed(stage.seed, "datums", batch)
        )
        metrics = stage.method.update(stage.models, datums, stage.progress(batch))
        if stage.evaluates_after(batch) and stage.samples_held_out:
            sampler = stage.next_sampler(sampler)
        stage.end_batch(batch, metrics, sampler)
    stage.end()
