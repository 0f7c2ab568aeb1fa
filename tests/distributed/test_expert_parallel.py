"""Test ranks that divide the experts of each layer: gradients, updates, checkpoints and a run equal
those of a single process, and of a launch in which no rank divides them.
"""

import shutil

import numpy as np
import pytest
import torch
import torch.distributed as dist
from expert_parallel_case import CASES, MODELS, SAVED
from test_context_ranks import NEW_RUN, REWARD, assert_same_metrics, train
from test_distributed import case_on_ranks
from tiny_models import tiny_model

from rl import get_tokenizer
from rl.distributed import collectives

pytestmark = pytest.mark.slow
SCRIPT = "expert_parallel_case.py"
BOUND = 1e-6  # rounding in fp32, relative to the norm of the gradient
# (processes, ranks of a group); two groups of two also shard their experts
LAUNCHES = [(2, 2), (4, 2), (4, 4)]


@pytest.fixture(scope="module")
def initial_models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("starts")
    for name in MODELS:
        tiny_model(name).save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def one_process(initial_models, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    return case_on_ranks(SCRIPT, initial_models, out, None, 280, words=["1"])


def continue_in(initial_models, folder, config, processes, size, result):
    """Continue from the checkpoints of `result` in another launch."""
    folder.mkdir()
    for name in SAVED:
        (folder / name).write_text(result[name]["path"])
    words = [str(size), str(folder)]
    return case_on_ranks(SCRIPT, initial_models, folder, config, 280, processes, words)


@pytest.mark.parametrize(("processes", "size"), LAUNCHES)
def test_a_group_computes_what_one_process_computes(
    processes, size, initial_models, one_process, tmp_path
):
    got = case_on_ranks(SCRIPT, initial_models, tmp_path, "fsdp2", 500, processes, [str(size)])
    for name in CASES:
        compare_case(name, one_process[name], got[name])
        held, whole = got[name]["held"]
        assert held * processes == whole  # each rank holds its share of the experts
    stacked, adapters = got["refusals"]
    assert f"expert_parallel_size {size}" in stacked and "ExpertsInterface" in stacked
    assert "adapters on its experts" in adapters
    # the checkpoint of each launch continues in the other, as in its own
    alone = continue_in(initial_models, tmp_path / "alone", None, 1, 1, got)
    again = continue_in(initial_models, tmp_path / "again", "fsdp2", processes, size, one_process)
    for name in SAVED:
        expected = one_process[name]
        for other in (got[name], alone[name], again[name]):
            for moment in ("before", "after"):
                assert_same_weights(expected[moment], other[moment], name)
        for key, weight in got[name]["before"].items():  # loaded to the bit
            assert torch.equal(alone[name]["before"][key], weight)


def compare_case(name, expected, result):
    (gradients, norm), (divided, divided_norm) = expected["gradient"], result["gradient"]
    assert gradients.keys() == divided.keys() and norm > 0
    assert divided_norm == pytest.approx(norm, rel=BOUND), name
    for key, gradient in gradients.items():
        assert float((divided[key] - gradient).norm()) <= BOUND * norm, (name, key)
    assert result["norms"] == pytest.approx(expected["norms"], rel=10 * BOUND), name
    tokens = sum(map(len, expected["logprobs"]))
    assert result["loss"] == pytest.approx(expected["loss"], rel=BOUND, abs=tokens * BOUND), name
    assert_same_weights(expected["weights"], result["weights"], name)
    for ours, theirs in zip(result["logprobs"], expected["logprobs"], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5, err_msg=name)


def assert_same_weights(expected, weights, name):
    """Check weights after updates."""
    assert expected.keys() == weights.keys()
    for key, weight in expected.items():
        difference = float((weights[key] - weight).abs().max())
        assert difference <= BOUND * max(1.0, float(weight.abs().max())), (name, key)


class Layer(torch.nn.Module):
    """A layer that computes the weights of its experts in fp32, as DeepSeek-V3 does."""

    def __init__(self):
        super().__init__()
        self.experts = torch.nn.Bilinear(4, 4, 4, bias=False)
        self.seen = []
        self.experts.forward = lambda *inputs: self.seen.append(inputs) or inputs[0]

    def forward(self, hidden):
        return self.experts(hidden, hidden.float())


def test_divided_experts_keep_the_router_weights_in_fp32():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layer = Layer()
        model = torch.nn.Sequential(layer)
        mesh = collectives.shard_mesh().mesh
        collectives.shard_model(
            model, [layer], bf16=True, experts=[layer.experts], expert_mesh=mesh
        )
        model(torch.ones(2, 4))
        assert [x.dtype for x in layer.seen[0]] == [torch.bfloat16, torch.float32]
    finally:
        dist.destroy_process_group()


# ---------------------------------------------------------------------------------------- whole runs


def test_a_grpo_run_has_the_metrics_of_one_without_and_resumes_with_and_without(tmp_path):
    (tmp_path / "own.py").write_text(REWARD)
    tokenizer = get_tokenizer("tiny:addition")
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    tiny_model("qwen3_moe", vocab_size=len(tokenizer), **ids).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    new_run = NEW_RUN.replace("tiny:addition", str(tmp_path / "base"))
    expected = train(tmp_path / "plain", f"{new_run} --steps 4 --no-self-test", "fsdp2")
    assert len({row["optim/grad_norm"] for row in expected}) == 4  # it learns at each step
    train(tmp_path / "divided", f"{new_run} --steps 2 --expert-parallel-size 2", "fsdp2")
    shutil.copytree(tmp_path / "divided", tmp_path / "without")
    words = "--resume --steps 4 --no-self-test"
    assert_same_metrics(train(tmp_path / "divided", words, "fsdp2"), expected)
    words += " --expert-parallel-size 1"
    assert_same_metrics(train(tmp_path / "without", words, "fsdp2"), expected)
