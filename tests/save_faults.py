"""Save checkpoints with a fault at the k-th disk operation, for every k. Run by
test_crash_safety.py under LD_PRELOAD of faulty_disk.c.

Usage: save_faults.py MODE FOLDER, MODE "kill" or "full". Each save runs in a forked child on a copy
of a run's folder that contains the checkpoint of step 1. The parent then continues like a resumed
run. Prints counts as JSON; a violated guarantee is an AssertionError.
"""

import ctypes
import hashlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
import torch  # noqa: E402
from helpers import ADAM, call, make_worker, random_datums  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from rl.client import APIFuture  # noqa: E402
from rl.distributed import checkpoint_folder  # noqa: E402
from rl.jsonl import read_jsonl  # noqa: E402
from rl.reporting import CHECKPOINTS, Logbook  # noqa: E402
from rl.trainer.checkpoint_manager import (  # noqa: E402
    CheckpointManager,  # noqa: E402
    StageSteps,
    complete_checkpoint_list,
)
from rl.trainer.resume import ResumePoint, remove_damaged_checkpoints  # noqa: E402
from rl.types import SaveWeightsResponse  # noqa: E402

DISK = ctypes.CDLL(None)
KINDS = ("writes", "fsyncs", "renames", "removals")


class Policy:
    """The part of a TrainingClient that a CheckpointManager calls, in this thread: a process that
    forks must have no other threads.
    """

    def __init__(self, worker, folder: Path):
        self.worker, self.folder = worker, folder

    def save_state(self, name, metadata, companions=None):
        from concurrent.futures import Future

        done: Future = Future()
        done.set_result(
            self.worker.save_state(0, str(self.folder / "checkpoints" / name), metadata, None)
        )
        return APIFuture(done, SaveWeightsResponse)


class Console:
    def warn(self, text):
        raise AssertionError(f"a checkpoint that is noted must be whole: {text}")


def save(worker, folder: Path, step: int) -> None:
    """Do the work of a run at the end of a step: write a row of metrics and a checkpoint, list it,
    remove the older checkpoint.
    """
    with open(os.devnull, "w"):
        logbook = Logbook(folder, resume_step=step - 1)
    logbook.log(step, {"stage": "grpo", "value": step})
    known = [row for row in read_jsonl(folder / CHECKPOINTS) if row["batch"] < step]
    CheckpointManager(logbook, known).save(
        Policy(worker, folder), step, "grpo", {"first_step": 0, "next_batch": step}, keep_last=1
    )
    logbook._metrics.close()  # not close(), which draws curves


def update(worker, seed: int) -> None:
    call(
        worker,
        "forward_backward",
        0,
        random_datums(3, seed=seed),
        "ppo",
        {"temperature": 1.0},
        1.0,
        True,
    )
    worker.optim_step(0, ADAM)


def compute_digests(folder: Path, step: int) -> dict[str, str]:
    """Return a checksum of each file of a complete checkpoint. Tensors are hashed by sorted name,
    since their order in the header is not fixed.
    """
    place = folder / "checkpoints" / f"grpo-{step:06d}"
    checkpoint_folder.verify_checkpoint(place)
    results = {}
    for name in sorted(json.loads((place / checkpoint_folder.MANIFEST).read_text())["files"]):
        content = hashlib.sha256()
        if name.endswith(".safetensors"):
            for key, tensor in sorted(load_file(str(place / name)).items()):
                content.update(
                    f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode()
                    + tensor.numpy().tobytes()
                )
        else:
            content.update((place / name).read_bytes())
        results[name] = content.hexdigest()
    return results


def in_child(worker, folder: Path, k: int, mode: int) -> int:
    """Return the exit code of a save with a fault at operation k: -9 killed, 0 saved, 3 refused
    because the disk is full, 4 other error.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        DISK.arm(k, mode)
        save(worker, folder, 2)
        DISK.disarm()
    except Exception as error:  # every exception is judged here
        DISK.disarm()
        if checkpoint_folder.is_disk_full(error) or isinstance(error, checkpoint_folder.DiskFull):
            os._exit(3)
        import traceback

        traceback.print_exc()
        os._exit(4)
    os._exit(0)


def resume(worker, folder: Path, whole: dict[int, dict]) -> int:
    """Continue like a restarted run and check every guarantee. Return the resumed step."""
    rows, _ = complete_checkpoint_list(folder, [StageSteps("grpo", 0, 9)])
    result = CheckpointManager.find_newest_intact(folder, rows, Console())
    assert result is not None, "nothing to go on from"
    step = result[0]["batch"]
    assert compute_digests(folder, step) == whole[step], (
        f"the checkpoint of step {step} is another than was saved"
    )
    here = rows.index(result[0])
    remove_damaged_checkpoints(folder, ResumePoint(stale=rows[here + 1 :]))
    logbook = Logbook(folder, resume_step=step)
    CheckpointManager(logbook, rows[: here + 1])
    logbook._metrics.close()
    if step == 1:
        save(worker, folder, 2)
    present = sorted(p.name for p in (folder / "checkpoints").iterdir())
    noted = [row["name"] for row in read_jsonl(folder / CHECKPOINTS)]
    # a run killed after listing the new checkpoint and before removing the old checkpoint has both;
    # the next save removes the old one
    assert present == noted and noted in (
        ["grpo-000002"],
        ["grpo-000001", "grpo-000002"] * (step - 1),
    ), f"from step {step}: {present}, {noted}"
    changed = [
        name for name, entry in compute_digests(folder, 2).items() if entry != whole[2].get(name)
    ]
    assert not changed, f"the resumed run saved something else: {changed}"
    assert [row["step"] for row in read_jsonl(folder / "metrics.jsonl")] == [1, 2]
    return step


def main(mode: str, place: Path) -> None:
    torch.set_num_threads(1)
    worker = make_worker()
    base, folder = place / "base", place / "run"
    base.mkdir(parents=True)
    update(worker, 1)
    save(worker, base, 1)
    whole = {1: compute_digests(base, 1)}
    update(worker, 2)
    shutil.copytree(base, folder)
    DISK.arm(0, 0)
    save(worker, folder, 2)
    total = DISK.count(-1)
    counts = {name: DISK.count(i) for i, name in enumerate(KINDS)}
    DISK.disarm()
    whole[2] = compute_digests(folder, 2)
    assert whole[1] != whole[2]
    expected = -signal.SIGKILL if mode == "kill" else 3
    from_step = {1: 0, 2: 0}
    for k in range(1, total + 1):
        shutil.rmtree(folder)
        shutil.copytree(base, folder)
        code = in_child(worker, folder, k, 1 if mode == "kill" else 2)
        # the removals at the end of a save need no disk space
        assert code == expected or (
            mode == "full" and code == 0 and k > total - counts["removals"]
        ), f"operation {k}: exit code {code}"
        if mode == "full" and code != 0:
            assert compute_digests(folder, 1) == whole[1], (
                "the last good checkpoint was touched before the disk was known to be full"
            )
            assert not list((folder / "checkpoints").glob("*.partial-*")), (
                "a failed save left something behind"
            )
        from_step[resume(worker, folder, whole)] += 1
    print(
        json.dumps(
            {
                "operations": total,
                **counts,
                "from_step_1": from_step[1],
                "from_step_2": from_step[2],
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
