"""Test that a rank which fails inside a micro-batch does not hold the others until the timeout."""

import time
from pathlib import Path

import pytest
from test_distributed import start_launch

REPO = Path(__file__).resolve().parents[2]
# Rank FAILING runs out of memory in the second of its micro-batches.
SCRIPT = """
import os, sys
sys.path[:0] = [{repo!r}, {repo!r} + "/tests"]
import torch
from helpers import random_datums
from rl import AdamParams, ServiceClient
from rl.learner.learner import Learner
from rl.learner import LearnerSettings
from rl.runtime import WorkerSettings, worker_group
worker_group.FAILURE_SECONDS = 3.0
forward, count = Learner._forward, [0]
def fails(self, *arguments):
    count[0] += 1
    if os.environ["RANK"] == {failing!r} and count[0] == 2:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. If reserved")
    return forward(self, *arguments)
Learner._forward = fails
settings = WorkerSettings(timeout_seconds=600, learner=LearnerSettings(token_budget=40))
service = ServiceClient(output_dir=".", settings=settings)
client = service.create_full_training_client("tiny:addition")
datums = random_datums(24)
try:
    client.forward_backward(datums, "importance_sampling").result()
except Exception as error:
    print(type(error).__name__, error, flush=True)
try:
    client.optim_step(AdamParams()).result()
except Exception as error:
    print(type(error).__name__, error, flush=True)
client.forward_backward(datums, "importance_sampling").result()
print("update", client.optim_step(AdamParams()).result().metrics["grad_norm"] > 0, flush=True)
"""


# Rank FAILING fails where it gathers weights with the others.
GATHER = """
import os, sys
sys.path.insert(0, {repo!r})
import torch
from rl import ServiceClient
from rl.learner import Learner
from rl.runtime import WorkerSettings, worker_group
worker_group.FAILURE_SECONDS = 3.0
gather = Learner.iter_weights
def fails(self, **options):
    if os.environ["RANK"] == {failing!r}:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. If reserved")
    return gather(self, **options)
Learner.iter_weights = fails
service = ServiceClient(output_dir=".", settings=WorkerSettings(timeout_seconds=600))
client = service.create_full_training_client("tiny:addition")
client.save_weights_and_get_sampling_client().result()
"""


def start(folder, config, failing, text=SCRIPT):
    script = folder / "fails.py"
    script.write_text(text.format(repo=str(REPO), failing=failing))
    return start_launch(config, folder, script=str(script))


@pytest.mark.slow
@pytest.mark.parametrize("failing", ["0", "1"])
def test_ranks_that_communicate_only_at_the_end_go_on(tmp_path, failing):
    """The error is that of the verb, with the settings to lower, and the run can continue."""
    launch = start(tmp_path, "ddp", failing)
    assert launch.wait(90) == [0, 0], launch.output()
    first, second, third = launch.output(0).split("] ", 1)[1].strip().splitlines()[-3:]
    assert first.startswith("OutOfMemoryError out of memory in forward_backward: CUDA out of")
    assert "lower token_budget (40 positions" in first and "--plan" in first, first
    assert ("(on rank 1 (process" in first) == (failing == "1"), first
    assert "optim_step was not run, because an earlier forward_backward failed" in second
    assert third == "update True"


@pytest.mark.slow
@pytest.mark.parametrize("failing", ["0", "1"])
@pytest.mark.parametrize("text", [SCRIPT, GATHER], ids=["micro-batch", "gather"])
def test_ranks_that_wait_for_each_other_end_soon(tmp_path, failing, text):
    launch = start(tmp_path, "fsdp2", failing, text)
    begin = time.monotonic()
    codes = launch.wait(90)  # the timeout is 600 s
    assert codes == [1, 1], launch.output()
    assert time.monotonic() - begin < 90
    text = " ".join(launch.output(int(failing)).split())
    assert "CUDA out of memory" in text and "To use less, lower" in text, text
    assert "After that, rank " in text and "did not answer within 3 s" in text, text
