"""Measure the memory of a rank that loads a model, and its results, for test_sharded_loading.py.
Not a test itself.

    accelerate launch --config_file ... tests/sharded_loading_case.py MODEL OUT KIND

KIND: lora or full; made: lora, without any training step.

OUT/rank-N.json: peak bytes of the process while the model was loaded, above the bytes before; on
rank 0 also the step's gradient norm, and logprobs after it and after a resume.
"""

import json
import os
import re
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
import torch  # noqa: E402
from helpers import random_datums  # noqa: E402

from rl import ServiceClient  # noqa: E402
from rl.runtime import WorkerSettings, worker_group  # noqa: E402
from rl.runtime.training_worker import TrainingWorker  # noqa: E402
from rl.types import AdamParams  # noqa: E402

UPDATE = AdamParams(1e-3, eps=1e-3)


def status(name: str) -> int:
    """Return bytes from /proc: VmRSS (now) or VmHWM (the peak since it was cleared)."""
    return 1024 * int(re.findall(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])


class MeasuredWorker(TrainingWorker):
    def create_model(self, *arguments):
        import deepspeed  # noqa: F401  (what is imported is not counted)
        import peft  # noqa: F401
        import transformers.models.qwen3.modeling_qwen3  # noqa: F401

        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        info = super().create_model(*arguments)
        rank, out = os.environ.get("RANK", "0"), Path(sys.argv[2])
        (out / f"rank-{rank}.json").write_text(
            json.dumps({"peak": status("VmHWM") - before, "after": status("VmRSS") - before})
        )
        return info


def main() -> None:
    torch.set_num_threads(1)
    worker_group.TrainingWorker = MeasuredWorker
    base, out, kind = sys.argv[1:4]
    service = ServiceClient(output_dir=out, settings=WorkerSettings(timeout_seconds=120))
    client = (
        service.create_lora_training_client(base, rank=3, seed=5)
        if kind != "full"
        else service.create_full_training_client(base)
    )
    wrapped = client.info["wrapped"]  # waits until the model is loaded
    # Read it now: the model resumed below is measured as well.
    measured = json.loads((Path(out) / "rank-0.json").read_text())
    if kind == "made":
        (Path(out) / "found.json").write_text(json.dumps(measured))
        return

    def logprobs(of) -> list[list[float]]:
        datums = random_datums(4, seed=9, vocabulary=60)
        results = of.forward(datums, "importance_sampling", {}).result()
        return [item["logprobs"].array.tolist() for item in results.loss_fn_outputs]

    first = logprobs(client)
    datums = random_datums(6, vocabulary=60)
    client.forward_backward(datums, "importance_sampling", {}, divisor=6.0).result()
    norm = client.optim_step(UPDATE).result().metrics["grad_norm"]
    then = logprobs(client)
    path = client.save_state("one").result().path
    resumed = service.create_training_client_from_state_with_optimizer(path)
    results = {"first": first, "norm": norm, "then": then, "resumed": logprobs(resumed)}
    results |= {"wrapped": wrapped}
    (Path(out) / "found.json").write_text(json.dumps({**results, **measured}))


if __name__ == "__main__":
    main()
