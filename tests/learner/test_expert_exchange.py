"""Test experts that threads divide like ranks, against all experts in one place; and what a plan
counts and what is refused. tests/distributed/test_expert_parallel.py tests processes.
"""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_context_parallel import plan
from tiny_models import tiny_model
from transformers import Qwen3MoeConfig

from rl.distributed import (
    FSDPSharding,
    Sharding,
    ZeroSharding,
    check_expert_parallel,
    check_expert_parallel_size,
)
from rl.errors import UserError
from rl.layers import describe_layers
from rl.learner import check_experts
from rl.learner.expert_parallel import ExpertGroup
from rl.trainer.memory_requirements import compute_stage_needs


class ThreadGroup:
    """A group of ranks that are threads of this process."""

    def __init__(self, rank, boxes, barrier):
        self.rank, self.size, self.boxes, self.barrier = rank, len(boxes), boxes, barrier

    def _exchange(self, parts):
        self.boxes[self.rank] = parts
        self.barrier.wait()
        received = [box[self.rank] for box in self.boxes]
        self.barrier.wait()
        return received

    def all_to_all(self, x):
        return torch.stack(self._exchange(list(x)))

    def exchange_rows(self, x, sent, received):
        parts = self._exchange(x.split(sent))
        assert [len(part) for part in parts] == received
        return torch.cat(parts)


def find_experts(model):
    return model.get_submodule(describe_layers(model).experts.blocks[0]).experts


def assert_close(result, expected):
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-6)


# stacked weights in both orders, biases, interleaved gates; two and four ranks
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss", "aria_text", "glm4_moe"])
def test_divided_experts_give_the_output_and_gradients_of_all_experts(name, size):
    model = tiny_model(name)
    reference = copy.deepcopy(model).double()
    reference.set_experts_implementation(
        "eager"
    )  # a loop over experts, instead of grouped products
    whole, hidden, ranks = find_experts(reference), model.config.hidden_size, []
    boxes, barrier = [None] * size, threading.Barrier(size, timeout=20)
    for rank in range(size):
        divided = copy.deepcopy(model)
        ExpertGroup(ThreadGroup(rank, boxes, barrier), None).split_(divided)
        ranks.append(find_experts(divided))
    torch.manual_seed(0)
    # all tokens of the first rank go to experts 0 and 1: other ranks may receive nothing of it
    inputs = []
    for rank in range(size):
        tokens = 3 + 2 * rank
        chosen = torch.stack([torch.randperm(4)[:2] for _ in range(tokens)]) if rank else None
        inputs.append(
            (
                torch.randn(tokens, hidden, requires_grad=True),
                torch.tensor([[0, 1]] * tokens) if chosen is None else chosen,
                torch.rand(tokens, 2, requires_grad=True),
            )
        )

    def run(experts, x, index, weights):
        out = experts(x, index, weights)
        value = (out * torch.arange(hidden)).sum() / hidden
        return out, torch.autograd.grad(value, [x, weights, *experts.parameters()])

    with ThreadPoolExecutor(size) as pool:
        jobs = [
            pool.submit(run, experts, *arguments)
            for experts, arguments in zip(ranks, inputs, strict=True)
        ]
        results = [job.result() for job in jobs]
    totals = [torch.zeros_like(p) for p in whole.parameters()]
    for arguments, (out, (by_x, by_weights, *_)) in zip(inputs, results, strict=True):
        x, index, weights = arguments
        expected, gradients = run(whole, x.double(), index, weights.double())
        expected_x, expected_weights, *shares = gradients
        assert_close(out, expected)
        assert_close(by_x, expected_x)
        assert_close(by_weights, expected_weights)
        totals = [total + share for total, share in zip(totals, shares, strict=True)]
    for i, total in enumerate(totals):
        assert_close(torch.cat([gradients[2 + i] for _, gradients in results]), total)


@pytest.mark.parametrize(
    ("name", "size", "world", "why"),
    [
        ("qwen3", 2, 2, "has no experts"),
        ("qwen3_moe", 8, 8, "has 4 experts, which 8 does not divide"),
        ("qwen3_moe", 2, 14, "which 2 x 7 ranks do not divide"),
        ("llama4_text", 2, 2, "ExpertsInterface"),
        ("dbrx", 2, 2, "ExpertsInterface"),
    ],
)
def test_models_whose_experts_cannot_be_divided_are_refused(name, size, world, why):
    model = tiny_model(name)
    with pytest.raises(UserError, match=f"expert_parallel_size {size} .*{why}.*: set it to 1"):
        check_experts(model, describe_layers(model), size, world, name)


def test_launches_that_do_not_divide_experts_are_refused():
    with pytest.raises(UserError, match=r"not with a single process: start .*fsdp2\.yaml"):
        check_expert_parallel(2)
    for sharding in (Sharding(), ZeroSharding(stage=3), FSDPSharding(replicas=2)):
        with pytest.raises(UserError, match=f"not with {sharding.describe(4)}: start"):
            check_expert_parallel_size(2, 4, sharding)
    with pytest.raises(UserError, match="8 processes, but 4 learn: use 1, 2, 4"):
        check_expert_parallel_size(8, 4, FSDPSharding())
    check_expert_parallel_size(2, 4, FSDPSharding())


def test_a_plan_counts_the_weights_of_a_rank_and_the_rows_that_it_exchanges(tmp_path):
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=64,
        num_experts_per_tok=4,
        moe_intermediate_size=512,
        max_position_embeddings=70000,
        architectures=["Qwen3MoeForCausalLM"],
    )
    config.save_pretrained(tmp_path)

    def find_items(words):
        run, launch = plan(tmp_path, f"--max-tokens 64 --token-budget 1024 {words}")
        launch = type(launch)(**{**vars(launch), "sharding": FSDPSharding()})
        (needs,) = compute_stage_needs(run, launch, 64)
        return needs, {item.name: item.train for item in needs.plan.items}

    _, whole = find_items("")
    needs, divided = find_items("--expert-parallel-size 8")
    rows = needs.work.batch.rows * needs.work.batch.length * 4
    assert divided.pop("rows for experts of other ranks") == 2 * 2 * rows * 256
    # an eighth of the experts is gathered, of two layers in bf16 and a layer's gradients in fp32,
    # and no tensor of a backward has the size of all experts
    experts = 64 * 3 * 256 * 512
    saved = whole["temporary buffers"] - divided["temporary buffers"]
    assert saved >= 0.99 * (2 * 2 + 4) * experts * 7 / 8
    same = ("weights", "optimizer (AdamW)", "gradients")
    assert [whole[name] for name in same] == [divided[name] for name in same]
