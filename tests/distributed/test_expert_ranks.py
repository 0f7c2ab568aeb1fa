"""Test expert gradients when two ranks route to different experts and a third expert gets no
tokens: no rank waits, and the gradient equals that of a single process.
"""

import pytest
import torch
from expert_ranks_case import CASES, COLUMNS
from test_distributed import assert_same_gradients, case_on_ranks
from tiny_models import tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def initial_models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("starts")
    for name in COLUMNS:
        tiny_model(name).save_pretrained(str(folder / name))
    return folder


def gradients(initial_models, out, config):
    return case_on_ranks("expert_ranks_case.py", initial_models, out, config, 250)


@pytest.fixture(scope="module")
def one_process(initial_models, tmp_path_factory):
    return gradients(initial_models, tmp_path_factory.mktemp("alone"), None)


@pytest.mark.parametrize("config", ["zero3", "fsdp2", "ddp"])
def test_experts_that_a_rank_never_reaches(config, initial_models, one_process, tmp_path):
    result = gradients(initial_models, tmp_path, config)
    assert_same_gradients(one_process, result, CASES)


def test_the_datums_reach_what_they_are_told_to(one_process):
    for name in ("qwen3_moe", "deepseek_v3"):
        stacks = {
            n: g for n, g in one_process[name][0].items() if n.endswith("experts.gate_up_proj")
        }
        sizes = torch.stack([g.flatten(1).norm(dim=1) for g in stacks.values()])
        assert len(stacks) > 2 and (sizes[:, :3] > 0).all() and (sizes[:, 3] == 0).all()
