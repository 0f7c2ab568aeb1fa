"""Test two ranks where one may have no image: no rank waits for the other's vision tower, and the
gradient equals that of a single process.
"""

import json
import time

import numpy as np
import pytest
import torch
from image_ranks_case import CASES
from test_distributed import assert_same_gradients, case_on_ranks, start_launch

from rl.models import load_model

WORDS = ("--base-model tiny:vision --dataset shapes:rows=24 --batch-size 4 --seed 0 --eval-every 0 --steps 4 --save-every 2 --keep-last 9 "
         "--no-self-test --quiet --learning-rate 1e-2")  # fmt: skip
METHOD = {
    "sft": "sft",
    "grpo": "grpo --group-size 2 --max-tokens 3 --temperature 1.0 --rollouts-every 0",
}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    from rl.learner import learner_checkpoint

    folder, loaded = tmp_path_factory.mktemp("start") / "eyes", load_model("tiny:vision", seed=3)
    learner_checkpoint.write_model(loaded.model, loaded.tokenizer, folder)
    return folder


def found_by(start, out, config):
    return case_on_ranks("image_ranks_case.py", start, out, config, 280)


@pytest.fixture(scope="module")
def one_process(start, tmp_path_factory):
    return found_by(start, tmp_path_factory.mktemp("alone"), None)


@pytest.mark.parametrize(
    "config",
    [
        "zero3",
        *(pytest.param(item, marks=pytest.mark.campaign) for item in ("ddp", "zero2", "fsdp2")),
    ],
)
def test_two_ranks_have_the_gradient_and_the_samples_of_one_process(
    config, start, one_process, tmp_path
):
    result = found_by(start, tmp_path, config)
    assert_same_gradients(one_process, result, CASES)
    assert [tokens for tokens, _ in result["drawn"]] == [
        tokens for tokens, _ in one_process["drawn"]
    ]
    for (_, logprobs), (_, expected) in zip(result["drawn"], one_process["drawn"], strict=True):
        np.testing.assert_allclose(logprobs, expected, atol=1e-4)


def test_the_tower_learns_where_somebody_sees_and_nowhere_else(one_process):
    """Check the premise of the comparison above: images reach the gradient."""

    def of_tower(case):
        return sum(
            float(g.norm()) for name, g in one_process[case][0].items() if ".visual." in name
        )

    assert min(of_tower("mixed, ppo, all weights"), of_tower("one sees, ppo, all weights")) > 1e-6
    assert (
        of_tower("mixed, ppo, lora on the tower too") > 0 and of_tower("one sees, ppo, lora") == 0
    )
    assert of_tower("nobody sees, ppo, all weights") == 0


def rows(folder) -> list[dict]:
    """Return the metrics without timings."""
    text = (folder / "metrics.jsonl").read_text() if (folder / "metrics.jsonl").exists() else ""
    results = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in results]


def start_run(folder, method, config, *more):
    words = [*METHOD[method].split(), *WORDS.split(), "--output-dir", folder, *more]
    return start_launch(config, folder.parent, *words, script="train.py")


def wait_for_success(launch) -> None:
    assert set(launch.wait(280)) == {0}, launch.output()[-3000:]


def weights(folder, method) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(
        str(folder / "checkpoints" / f"{method}-final" / "model" / "model.safetensors")
    )


# The test above already compares two ranks with a single process in each layout.
OTHER_LAYOUTS = [
    pytest.param(*case, marks=pytest.mark.campaign)
    for case in (("grpo", "ddp"), ("sft", "fsdp2"), ("sft", "zero2"))
]


@pytest.mark.parametrize(("method", "config"), [("grpo", "zero3"), *OTHER_LAYOUTS])
def test_a_run_on_two_ranks_is_that_of_one_process_and_goes_on_after_a_kill(
    method, config, tmp_path
):
    """Whole runs on images: each step equals that of a single process, and kill -9 of all processes
    in the middle changes no bit.
    """
    folders = {name: tmp_path / name for name in ("one", "two", "cut")}
    wait_for_success(start_run(folders["one"], method, None))
    wait_for_success(start_run(folders["two"], method, config))
    for first, second in zip(rows(folders["one"]), rows(folders["two"]), strict=True):
        for key in ("optim/loss", "optim/policy_loss", "optim/grad_norm", "env/all/reward/total"):
            if key in first:
                assert second[key] == pytest.approx(first[key], rel=1e-4, abs=1e-5), key
    launch = start_run(folders["cut"], method, config)
    deadline = time.monotonic() + 200
    while len(rows(folders["cut"])) < 3 and time.monotonic() < deadline:
        assert not launch.poll(), "the run ended before it could be killed"
        time.sleep(0.005)
    for rank in range(2):
        launch.kill(rank)
    launch.wait(30)
    assert not (folders["cut"] / "checkpoints" / f"{method}-final").exists()
    wait_for_success(start_run(folders["cut"], method, config, "--resume"))
    assert rows(folders["cut"]) == rows(folders["two"])
    first, other = weights(folders["two"], method), weights(folders["cut"], method)
    assert first.keys() == other.keys() and all(
        torch.equal(first[name], other[name]) for name in first
    )
