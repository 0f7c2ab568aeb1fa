"""Two ranks whose tokens reach different experts, and one expert that nobody reaches: no rank waits, the gradient is one process's."""

import sys

import pytest
import torch
from expert_ranks_case import CASES, COLUMNS
from test_distributed import REPO, run, sharded

from bench.tiny_models import tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("starts")
    for name in COLUMNS:
        tiny_model(name).save_pretrained(str(folder / name))
    return folder


def gradients(starts, out, config):
    launch = []
    if config is not None:
        launch = ["-m", "accelerate.commands.launch", "--config_file", str(REPO / f"accelerate_configs/{config}.yaml")]
        launch += ["--num_processes", "2", "--main_process_port", "0"]
        launch += ["--deepspeed_config_file", str(sharded("zero3", out))] if config == "zero3" else []
    run([sys.executable, *launch, str(REPO / "tests" / "expert_ranks_case.py"), str(starts), str(out)], out, 250)
    return torch.load(out / "found.pt", weights_only=False)


@pytest.fixture(scope="module")
def alone(starts, tmp_path_factory):
    return gradients(starts, tmp_path_factory.mktemp("alone"), None)


@pytest.mark.parametrize("config", ["zero3", "fsdp2", "ddp"])
def test_experts_that_a_rank_never_reaches(config, starts, alone, tmp_path):
    found = gradients(starts, tmp_path, config)
    for case in CASES:
        (one, norm), (both, found_norm) = alone[case], found[case]
        assert one.keys() == both.keys() and norm > 0
        assert found_norm == pytest.approx(norm, rel=2e-5), case
        for name, expected in one.items():
            assert float((both[name] - expected).norm()) <= 2e-5 * norm, (case, name)


def test_the_datums_reach_what_they_are_told_to(alone):
    for name in ("qwen3_moe", "deepseek_v3"):
        stacks = {n: g for n, g in alone[name][0].items() if n.endswith("experts.gate_up_proj")}
        sizes = torch.stack([g.flatten(1).norm(dim=1) for g in stacks.values()])
        assert len(stacks) > 2 and (sizes[:, :3] > 0).all() and (sizes[:, 3] == 0).all()
