"""Two ranks of which one may have no image: no rank waits for the other's tower, and the gradient is one process's."""

import sys

import numpy as np
import pytest
import torch
from image_ranks_case import CASES
from test_distributed import REPO, run, sharded

from rl.models import load_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    from rl.learner import saving

    folder, loaded = tmp_path_factory.mktemp("start") / "eyes", load_model("tiny:vision", seed=3)
    saving.write_model(loaded.model, loaded.tokenizer, folder)
    return folder


def found_by(start, out, config):
    launch = []
    if config is not None:
        launch = ["-m", "accelerate.commands.launch", "--config_file", str(REPO / f"accelerate_configs/{config}.yaml")]
        launch += ["--num_processes", "2", "--main_process_port", "0"]
        launch += ["--deepspeed_config_file", str(sharded("zero3", out))] if config == "zero3" else []
    run([sys.executable, *launch, str(REPO / "tests" / "image_ranks_case.py"), str(start), str(out)], out, 280)
    return torch.load(out / "found.pt", weights_only=False)


@pytest.fixture(scope="module")
def alone(start, tmp_path_factory):
    return found_by(start, tmp_path_factory.mktemp("alone"), None)


@pytest.mark.parametrize("config", ["ddp", "zero2", "zero3", "fsdp2"])
def test_two_ranks_have_the_gradient_and_the_samples_of_one_process(config, start, alone, tmp_path):
    found = found_by(start, tmp_path, config)
    for case in CASES:
        (one, norm), (both, found_norm) = alone[case], found[case]
        assert one.keys() == both.keys() and norm > 0
        assert found_norm == pytest.approx(norm, rel=2e-5), case
        for name, expected in one.items():
            assert float((both[name] - expected).norm()) <= 2e-5 * norm, (case, name)
    assert [tokens for tokens, _ in found["drawn"]] == [tokens for tokens, _ in alone["drawn"]]
    for (_, logprobs), (_, expected) in zip(found["drawn"], alone["drawn"], strict=True):
        np.testing.assert_allclose(logprobs, expected, atol=1e-4)


def test_the_tower_learns_where_somebody_sees_and_nowhere_else(alone):
    """What the comparison above rests on: the images reach the gradient."""

    def of_tower(case):
        return sum(float(g.norm()) for name, g in alone[case][0].items() if ".visual." in name)

    assert min(of_tower("mixed, ppo, all weights"), of_tower("one sees, ppo, all weights")) > 1e-6
    assert of_tower("mixed, ppo, lora on the tower too") > 0 and of_tower("one sees, ppo, lora") == 0
    assert of_tower("nobody sees, ppo, all weights") == 0
