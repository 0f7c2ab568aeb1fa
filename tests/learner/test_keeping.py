"""Test what the output head keeps of a micro-batch on a GPU by default: the learner's rule, and its
size in the memory plan.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import ADAM, call, make_worker, random_datums
from test_memory_plan import REPO, SHAPE

from kernels import estimate_saved_bytes
from rl.algorithms import METHODS
from rl.config import RunSettings, read_run
from rl.distributed import FSDPSharding, Launch, ZeroSharding, collectives
from rl.learner import default_kept_bytes, head_memory
from rl.memory_plan import LaunchShape, MicroBatch, saved_logits_bytes
from rl.models import load_model
from rl.trainer.memory_report import find_savings
from rl.trainer.memory_requirements import compute_stage_needs, resolve_launch
from rl.types import LoraConfig

GIB = 1 << 30


def test_a_quarter_of_what_stays_free_down_to_a_power_of_two():
    sizes = {60 * GIB: 8 * GIB, 61 * GIB: 8 * GIB, 64 * GIB: 16 * GIB, 0: 0, -GIB: 0, 3: 0, 4: 1}
    for remaining, kept in sizes.items():
        assert default_kept_bytes(80 * GIB, 80 * GIB - remaining) == kept


@pytest.mark.parametrize("lora", [None, LoraConfig(4)])
def test_the_optimizers_state_is_left_room_before_it_exists(monkeypatch, lora):
    """The default is set when a learner is created, is the same after an update, and counts the
    state that the update allocates.
    """
    remaining = []
    monkeypatch.setattr(head_memory, "_device_memory", lambda device: 80.0 * GIB)
    monkeypatch.setattr(
        head_memory,
        "default_kept_bytes",
        lambda memory, stays: remaining.append(stays) or default_kept_bytes(memory, stays),
    )
    worker = make_worker(lora=lora)
    learner = worker.learners[0]
    assert not learner.backend.adam.state
    assert learner.head.kept_bytes == default_kept_bytes(80.0 * GIB, remaining[0]) == 16 * GIB
    call(worker, "forward_backward", 0, random_datums(4), "importance_sampling", {}, 1.0, True)
    held = sum(p.nbytes for p in learner.model.parameters()) + sum(
        p.grad.nbytes for p in learner.trainable.values()
    )
    worker.optim_step(0, ADAM)
    moments = (value for state in learner.backend.adam.state.values() for value in state.values())
    held += sum(value.nbytes for value in moments if value.ndim)
    copy = 4 * sum(p.numel() for p in learner.model.parameters())
    assert remaining == [held + copy] and learner.head.kept_bytes == 16 * GIB
    # An explicit setting overrides the default.
    assert make_worker(lora=lora, kept_bytes=0).learners[0].head.kept_bytes == 0


def test_all_ranks_take_the_least(monkeypatch):
    model = load_model("tiny:addition", seed=0).model
    shapes = {name: p.shape for name, p in model.named_parameters()}
    accelerator = SimpleNamespace(device=torch.device("cpu"), mixed_precision="bf16")
    arguments = model, shapes, list(shapes), accelerator, "adamw"
    monkeypatch.setattr(head_memory, "_device_memory", lambda device: 80.0 * GIB)
    monkeypatch.setattr(collectives, "world", lambda: 3)
    monkeypatch.setattr(collectives, "rank", lambda: 1)

    def sum_(tensors):
        assert tensors[0].tolist() == [0, 16 * GIB, 0]
        tensors[0].copy_(torch.tensor([32 * GIB, 16 * GIB, 4 * GIB]))

    monkeypatch.setattr(collectives, "all_sum_", sum_)
    assert head_memory.choose_kept_bytes(None, *arguments) == 4 * GIB
    assert head_memory.choose_kept_bytes(7, *arguments) == 7


def test_what_is_not_on_a_gpu_is_left_to_the_kernels():
    assert make_worker().learners[0].head.kept_bytes is None


def test_bytes_of_what_is_trained_by_hand():
    for options, optimizer, gradient in (
        ({}, 8, 4),
        ({"world": 4}, 8, 4),
        ({"world": 4, "sharding": FSDPSharding()}, 2, 1),
        ({"world": 4, "sharding": ZeroSharding(stage=1)}, 3, 4),
        ({"world": 4, "sharding": ZeroSharding(stage=2)}, 3, 1),
        ({"world": 4, "sharding": ZeroSharding(stage=3)}, 3, 1),
        ({"world": 4, "sharding": ZeroSharding(stage=3, offload=True)}, 0, 0),
        ({"optimizer": "adamw_8bit"}, 2 + 8 / 256, 4),
        ({"optimizer": "paged_adamw_8bit"}, 0, 4),
    ):
        launch = Launch(cuda=True, bf16=False, **options)
        assert (launch.optimizer_bytes(1000), launch.gradient_bytes(1000)) == (
            1000 * optimizer,
            1000 * gradient,
        )


def test_kept_logits_by_hand():
    batch, shape = MicroBatch(8, 1024, 8192), replace(SHAPE, vocab=150_000)
    first, scores = LaunchShape(cuda=True, bf16=True, memory=80.0 * GIB), 8192 * 150_000 * 2
    exponents = 8192 * 4 * 1172

    def keep(bound: int | None = None, of=shape, **changes) -> float:
        return saved_logits_bytes(of, replace(first, **changes), batch, bound)

    # The gradient of the scores is made in a single piece too.
    assert keep() == 2 * scores + exponents
    assert keep(2 * scores - 1) == scores + exponents
    assert keep(2 * scores - 1) == estimate_saved_bytes(8192, 150_000, 2, scores)
    assert keep(scores) > 0 == keep(scores - 1) == keep(0)
    assert keep(bf16=False) == estimate_saved_bytes(8192, 150_000, 4, 1 << 40)
    assert keep(cuda=False) == 0
    # 16 bytes per parameter and 2 for a copy leave little memory.
    grown = replace(shape, parameters=4_500_000_000, trainable=4_500_000_000)
    assert keep(of=grown) == 0 < keep(of=grown, memory=141.0 * GIB)
    assert keep(of=grown, world=8, sharding=FSDPSharding()) > 0


LINE = (
    "grpo --base-model tiny:addition --batch-size 64 --group-size 8 --max-tokens 64 --plan-gpus 1 "
    "--plan-gpu-memory 40"
)


def train_item(*words: str) -> tuple[float, LaunchShape, object]:
    recipe = REPO / "recipes" / "addition.yaml"
    run = read_run([*LINE.split(), *words], METHODS, recipe, RunSettings)
    launch, _ = resolve_launch(run)
    (needs,) = compute_stage_needs(run, launch, 16, traced=False)
    items = {item.name: item.train for item in needs.plan.items}
    return items["logits kept for the backward"], launch, run


def test_the_plan_counts_what_the_setting_keeps():
    kept, launch, _ = train_item()
    assert kept > 0 and launch.memory == 40 * GIB
    assert train_item("--kept-logits-gib", "1")[0] == kept
    assert train_item("--kept-logits-gib", "0")[0] == train_item("--no-fused-logprobs")[0] == 0


def test_to_keep_nothing_is_named_where_that_helps(monkeypatch):
    """The vocabulary takes most of a micro-batch's memory."""
    monkeypatch.setattr(
        "rl.trainer.memory_requirements.saved_logits_bytes",
        lambda shape, launch, batch, max_bytes: 0.0 if max_bytes == 0 else 4.0 * GIB,
    )
    _, launch, run = train_item()
    assert "--kept-logits-gib 0" in [change.command for change in find_savings(run, launch, 16)]
