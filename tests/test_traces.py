"""Micro-batches that other processes follow for a plan: the same figures as alone, whatever becomes
of these processes.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent

SCRIPT = """
import os, signal, sys
from rl.startup import fork_helper

def follow(*ends):
    from rl.memory_plan import serve_traces
    serve_traces(*ends)

ends = fork_helper(follow)
assert len(ends) == (2 if len(os.sched_getaffinity(0)) > 1 else 0)
(child,) = map(int, open(f"/proc/self/task/{os.getpid()}/children").read().split())
print("child", child, flush=True)

from rl.errors import UserError
from rl.memory_plan import ComputeConfig, MicroBatch, TraceCache
from rl.types import LoraConfig

model, refused = ("tiny:addition", None, LoraConfig(4)), ("/nowhere/at/all", None, None)
runs = [(model, MicroBatch(rows, 16, rows * 16), ComputeConfig(checkpointing=on)) for rows in (1, 2, 3) for on in (False, True)]
alone, helped = TraceCache(), TraceCache()
expected = [alone.get_memory(run) for run in runs]
with helped.use_helpers(ends):
    try:
        helped.get_shape(refused)
    except UserError as error:
        print("refused", "no model folder" in str(error) and helped.has_helpers)
    print("shape", helped.get_shape(model) == alone.get_shape(model))
    helped.queue_runs(runs)
    print("first", helped.get_memory(runs[-1]) == expected[-1])
    helped.queue_runs(runs[:3])
    print("three", [helped.get_memory(run) for run in runs[:3]] == expected[:3], "by others", not helped._skeletons)
    if "kill" in sys.argv:
        helped.queue_runs(runs)
        os.kill(child, signal.SIGKILL)
    print("all", [helped.get_memory(run) for run in runs] == expected, "by others", not helped._skeletons)
print("after", [helped.get_memory(run) for run in runs] == expected, helped.has_helpers)
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="processes help where there are two cores"
)
@pytest.mark.parametrize("word", ["", "kill"])
def test_what_others_follow_is_what_is_followed_here(word):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, word],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = done.stdout.splitlines()
    all_of_them = f"all True by others {not word}"
    assert lines[1:] == [
        "refused True",
        "shape True",
        "first True",
        "three True by others True",
        all_of_them,
        "after True False",
    ]
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert not is_alive(int(lines[0].split()[1]))


@pytest.mark.slow
def test_a_helper_ends_with_the_command_whatever_it_is_doing():
    """Of a line that is wrong, and of a command that is killed."""
    words = [sys.executable, "train.py", "grpo", "--plan", "--no-such-setting", "3"]
    begin = time.monotonic()
    # until its output is closed by all who have it
    done = subprocess.run(words, cwd=REPO, capture_output=True, text=True, timeout=300)
    assert (
        done.returncode == 2 and "no such setting" in done.stderr and time.monotonic() - begin < 60
    )
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    child = int(process.stdout.readline().split()[1])
    process.kill()
    process.communicate(timeout=60)
    deadline = time.monotonic() + 10
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(child)


@pytest.mark.slow
def test_a_plan_is_the_same_with_and_without_helpers(tmp_path):
    from transformers import AutoConfig

    sizes = {
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    }
    AutoConfig.for_model(
        "qwen2", **sizes, intermediate_size=18_944, tie_word_embeddings=False
    ).save_pretrained(tmp_path / "model")
    words = (
        f"train.py grpo --plan --base-model {tmp_path / 'model'} --lora-rank 32 --batch-size 64 "
        f"--group-size 8 --max-tokens 1024"
    )
    words += " --dataset addition --reward exact_match --plan-gpus 1 --plan-gpu-memory 80"
    cores, said = sorted(os.sched_getaffinity(0)), []
    for mine in (cores, cores[:1]):

        def on_these(mine: list[int] = mine) -> None:
            os.sched_setaffinity(0, mine)

        env = {**os.environ, "COLUMNS": "200", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [sys.executable, *words.split()],
            cwd=REPO,
            env=env,
            capture_output=True,
            text=True,
            preexec_fn=on_these,
        )
        said.append((done.returncode, done.stdout, done.stderr))
    assert (
        said[0] == said[1]
        and said[0][0] == 2
        and "does not fit" in said[0][1]
        and "What would lower it" in said[0][2]
    ), said
