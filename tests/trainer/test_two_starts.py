"""Start a second process on a run's folder at a random moment."""

import multiprocessing
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from whole_runs import final_weights, read_metrics

from rl.algorithms import METHODS
from rl.config import RunSettings, parse_run
from rl.errors import UserError
from rl.trainer.execute import execute

INTERLEAVINGS = 50
WORDS = (
    "grpo --steps 8 --save-every 2 --batch-size 4 --group-size 2 --max-tokens 4 --eval-every 4 "
    "--eval-limit 4 --quiet"
)
FORK = multiprocessing.get_context("fork")
# Errors that a second process may report, if it does not reach the end of its run.
REFUSALS = ("in use by process", "was taken over by", "holds a run", "nothing to resume")


def run(words: str, folder: Path, pipe: Any) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    try:
        arguments = [*words.split(), "--output-dir", str(folder)]
        execute(parse_run(arguments, METHODS, Path("none.yaml"), options=RunSettings))
        pipe.send("done")
    except UserError as error:
        pipe.send(str(error))


def start(words: str, folder: Path) -> tuple[Any, Any]:
    ours, theirs = FORK.Pipe(duplex=False)
    process = FORK.Process(target=run, args=(words, folder, theirs))
    process.start()
    theirs.close()
    return process, ours


def end(process: Any, pipe: Any) -> str:
    """Return the last message of a process, or "killed" if it sent none."""
    try:
        message = str(pipe.recv())
    except EOFError:
        message = "killed"
    process.join()
    return message


def result(folder: Path) -> tuple[Any, ...]:
    """Return the metrics except times, the weights, and the names of the checkpoints."""
    weights = {key: tensor.tolist() for key, tensor in final_weights(folder).items()}
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    return read_metrics(folder), weights, names


@pytest.fixture(scope="module")
def reference_run(tmp_path_factory) -> tuple[tuple[Any, ...], float]:
    """Return (result, seconds) of an undisturbed run."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    begin = time.monotonic()
    assert end(*start(WORDS, folder)) == "done"
    return result(folder), time.monotonic() - begin


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.parametrize("number", [
    pytest.param(n, marks=pytest.mark.campaign if n else pytest.mark.slow)
    for n in range(INTERLEAVINGS)
])  # fmt: skip
def test_a_second_start_leaves_the_run_as_an_undisturbed_run(reference_run, tmp_path, number):
    """Half of the first processes are killed at another random moment."""
    expected, seconds = reference_run
    rng, folder = random.Random(number), tmp_path / "run"
    flag = rng.choice(["--resume", "--overwrite", "--auto-resume", ""])
    kills = rng.random() < 0.5
    moments = [(0.3, "first"), (rng.uniform(0.2, 0.3 + 1.2 * seconds), "second")]
    if kills:
        moments.append((rng.uniform(0.3, 0.3 + seconds), "kill"))
    begin, processes = time.monotonic(), dict[str, Any]()
    for moment, event in sorted(moments):
        time.sleep(max(0.0, begin + moment - time.monotonic()))
        if event == "kill":
            processes["first"][0].kill()
        else:
            processes[event] = start(f"{WORDS} {flag if event == 'second' else ''}", folder)
    messages = {event: end(*process) for event, process in processes.items()}
    for event, message in messages.items():
        killed = event == "first" and message == "killed" and kills
        assert killed or message == "done" or any(text in message for text in REFUSALS), messages
    assert end(*start(f"{WORDS} --auto-resume", folder)) == "done"
    assert result(folder) == expected
