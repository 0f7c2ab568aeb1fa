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


# Rank FAILING fails in its second micro-batch of the first `train_step`, and has no memory for an
# update then.
STEP = """
import os, sys
sys.path[:0] = [{repo!r}, {repo!r} + "/tests"]
import numpy as np
import torch
from helpers import random_datums
from rl import AdamParams, ServiceClient
from rl.learner.learner import Learner
from rl.learner import LearnerSettings
from rl.runtime import WorkerSettings
forward, train_step, steps, count = Learner._forward, Learner.train_step, [0], [0]
def fails(self, *arguments):
    count[0] += 1
    if os.environ["RANK"] == {failing!r} and steps[0] == 1 and count[0] == 2:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. If reserved")
    return forward(self, *arguments)
def count_steps(self, *arguments):
    steps[0], count[0] = steps[0] + 1, 0
    return train_step(self, *arguments)
adam_step = torch.optim.AdamW.step
def adam_step_with_memory(self, *arguments):
    if os.environ["RANK"] == {failing!r} and steps[0] == 1:
        raise torch.OutOfMemoryError("no memory for the update")
    return adam_step(self, *arguments)
torch.optim.AdamW.step = adam_step_with_memory
Learner._forward, Learner.train_step = fails, count_steps
settings = WorkerSettings(timeout_seconds=600, learner=LearnerSettings(token_budget=40))
service = ServiceClient(output_dir=".", settings=settings)
datums = random_datums(24)
calls = [(part, "importance_sampling", {{}}, 1.0) for part in (datums, datums[:7])]
client, other = (service.create_full_training_client("tiny:addition") for _ in range(2))
def score():
    outputs = client.forward(datums, "importance_sampling").result().loss_fn_outputs
    return np.concatenate([output["logprobs"].array for output in outputs])
before = score()
client.forward_backward(datums[:5], "importance_sampling").result()  # it has to be dropped
outputs, update = client.train_step(calls, AdamParams())
for future in (*outputs, update):
    try:
        future.result()
    except Exception as error:
        print(type(error).__name__, error, flush=True)
print("unchanged", client.version == 0 and (score() == before).all(), flush=True)
norms = [c.train_step(calls, AdamParams())[1].result().metrics["grad_norm"] for c in (client, other)]
print("update", norms[0] == norms[1] > 0 and client.version == 1, flush=True)
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
def test_a_step_in_which_a_rank_fails_changes_nothing(tmp_path, failing):
    """The ranks whose calls succeed have launched the update before they learn of the failure."""
    launch = start(tmp_path, "ddp", failing, STEP)
    assert launch.wait(90) == [0, 0], launch.output()
    *errors, unchanged, update = launch.output(0).split("] ", 1)[1].strip().splitlines()[-5:]
    for error in errors:
        assert error.startswith("OutOfMemoryError out of memory in train_step: CUDA out of"), error
        assert "lower token_budget (40 positions" in error
        assert ("(on rank 1 (process" in error) == (failing == "1")
    assert (unchanged, update) == ("unchanged True", "update True")


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
