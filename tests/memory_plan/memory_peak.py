"""A plain script with a memory use that test_memory_plan.py measures on every rank.

Usage: memory_peak.py OUT SETTINGS.json

Writes OUT/peak-<rank>.json: the peak of resident bytes after the imports, minus the bytes resident
right after the imports.
"""

import atexit
import ctypes
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import numpy as np  # noqa: E402
import torch  # noqa: E402

from rl import ServiceClient, types  # noqa: E402
from rl.learner import LearnerSettings  # noqa: E402
from rl.models import add_lora, load_model  # noqa: E402
from rl.runtime import SamplerSettings, WorkerSettings  # noqa: E402
from rl.sampler import make_decoder  # noqa: E402
from rl.types import Datum, LoraConfig, ModelInput  # noqa: E402


def status(name: str) -> int:
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(name + ":")
    )
    return int(line.split()[1]) * 1024


def return_freed_memory_at_once() -> None:
    """Let malloc return freed memory to the system, so that it is not part of a later peak.

    glibc keeps freed blocks below a threshold that it moves up to 32 MiB; a fixed threshold of 64
    KiB switches that off. There is one arena, because each thread's arena would keep its freed
    blocks.
    """
    libc, mmap_threshold, arena_max = ctypes.CDLL(None), -3, -8  # as in glibc's malloc.h
    assert libc.mallopt(mmap_threshold, 65536) and libc.mallopt(arena_max, 1)
    libc.malloc_trim(0)


def warm_up() -> int:
    """Import everything and call every library once, so that these bytes do not count. Return the
    resident bytes afterwards.
    """
    loaded = add_lora(load_model("tiny:addition"), LoraConfig(2))
    make_decoder(loaded.model)
    ids = torch.zeros(2, 8, dtype=torch.int64)
    loaded.model(input_ids=ids, use_cache=False).logits.sum().backward()
    torch.optim.AdamW([p for p in loaded.model.parameters() if p.requires_grad], fused=True).step()
    if "ACCELERATE_USE_DEEPSPEED" in os.environ:
        import deepspeed  # noqa: F401
    return_freed_memory_at_once()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    return status("VmRSS")


def make_datums(count: int, s: dict) -> list[Datum]:
    rng = np.random.default_rng(0)
    results = []
    for _ in range(count):
        n = s["prompt"] + s["answer"]
        mask = (np.arange(n) >= s["prompt"] - 1).astype(np.float32)
        fields = {
            "target_tokens": rng.integers(0, 100, n),
            "logprobs": -mask,
            "advantages": mask,
            "mask": mask,
        }
        results.append(Datum(ModelInput.from_ints(rng.integers(0, 100, n).tolist()), fields))
    return results


def main(out: Path, s: dict) -> None:
    before = warm_up()

    def report() -> None:
        (out / f"peak-{os.environ.get('RANK', '0')}.json").write_text(
            json.dumps(status("VmHWM") - before)
        )

    atexit.register(report)
    learner = LearnerSettings(s["budget"], "padded", s["fused"], s["checkpointing"])
    service = ServiceClient(
        output_dir=out,
        settings=WorkerSettings(learner=learner, sampler=SamplerSettings(s["kv_cache_tokens"])),
    )
    if s["lora_rank"]:
        client = service.create_lora_training_client(s["model"], rank=s["lora_rank"])
    else:
        client = service.create_full_training_client(s["model"])
    adam = types.AdamParams(learning_rate=1e-4)
    sampler = client.save_weights_and_get_sampling_client()
    few = make_datums(s["world"], {"prompt": 2, "answer": 2})
    # Take a step, so that the optimizer's state exists.
    client.forward_backward(few, "ppo", {"temperature": 0.8}).result()
    client.optim_step(adam).result()
    sampler.release()
    sampler = client.save_weights_and_get_sampling_client()
    # The cache has room for all tokens; its memory becomes resident as it is written.
    stop = [] if s["drawn"] > 1 else list(range(s["vocab"]))
    every = types.SamplingParams(max_tokens=s["answer"], temperature=0.8, stop=stop)
    futures = [
        sampler.sample(
            ModelInput.from_ints(rng.integers(0, 100, s["prompt"]).tolist()), s["group"], every
        )
        for rng in map(np.random.default_rng, range(s["groups"]))
    ]
    for future in futures:
        future.result()
    for _ in range(2):  # the second has the gradients of the first
        client.forward_backward(make_datums(s["datums"], s), "ppo", {"temperature": 0.8}).result()
    client.optim_step(adam).result()
    service.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()))
