"""Load a checkpoint, save it again as "again", train on, and save as "end". test_crash_safety.py
runs this script under several launch configurations.

Usage: portable_cases.py OUT [CHECKPOINT]. Saving right after loading must give what was written,
whichever launch configuration wrote it.
"""

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
from helpers import random_datums  # noqa: E402

from rl import ServiceClient, types  # noqa: E402
from rl.runtime.training_worker import TrainingWorker  # noqa: E402
from rl.runtime.verb_table import verb  # noqa: E402


@verb()
def whole_at_once(worker: TrainingWorker, model_id: int) -> list[list[int]]:
    """Return a pair for each piece of the weights sent to the sampler: [its elements, elements of
    all parameters in memory].
    """
    learner = worker.learners[model_id]
    held = lambda: sum(p.numel() for p in learner.model.parameters())  # noqa: E731  # 0 if sharded, until gathered
    return [[tensor.numel(), held()] for _, tensor in learner.iter_weights(frozen=True)]


def main(out: Path, state: str | None) -> None:
    TrainingWorker.whole_at_once = whole_at_once
    service = ServiceClient(output_dir=out)
    if state is None:
        client = service.create_full_training_client("tiny:addition", seed=2)
    else:
        client = service.create_training_client_from_state_with_optimizer(state)
        client.save_state("again").result()
    for step in range(2):
        client.forward_backward(random_datums(5, seed=step), "ppo", divisor=10.0).result()
        client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    client.save_state("end").result()
    launch = [client.info["distributed_type"], client.info["wrapped"], client.info["world"]]
    pieces = service._driver.submit("whole_at_once", client.model_id).result()
    sync = client.save_weights_and_get_sampling_client().sync_seconds
    (out / "result.json").write_text(json.dumps({"launch": launch, "pieces": pieces, "sync": sync}))
    service.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
