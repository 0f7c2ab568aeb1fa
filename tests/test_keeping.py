"""What the output head keeps of a micro-batch on a GPU by default: the learner's rule, and the
plan's count of it.
"""

from dataclasses import replace

import pytest
import torch
from helpers import ADAM, make_worker, random_datums
from test_memory_plan import REPO, SHAPE

from kernels import kept_bytes
from rl.learner import Sharing, default_kept, gradient_bytes, keeping, optimizer_bytes
from rl.memory import Held, Launch, MicroBatch, kept_logits
from rl.methods import METHODS
from rl.models.load import load_model
from rl.ranks import distributed
from rl.run.plan_changes import remedies
from rl.run.plan_needs import launch_of, needs_of
from rl.settings.cli import read
from rl.settings.tables import RunSettings
from rl.types import LoraConfig

GIB = 1 << 30


def test_a_quarter_of_what_stays_free_down_to_a_power_of_two():
    for left, kept in (
        (60 * GIB, 8 * GIB),
        (61 * GIB, 8 * GIB),
        (64 * GIB, 16 * GIB),
        (0, 0),
        (-GIB, 0),
        (3, 0),
        (4, 1),
    ):
        assert default_kept(80 * GIB, 80 * GIB - left) == kept


@pytest.mark.parametrize("lora", [None, LoraConfig(4)])
def test_the_optimizers_state_is_left_room_before_it_exists(monkeypatch, lora):
    """The default is there when a learner is made, is the same after an update, and counts what the
    update makes.
    """
    left = []
    monkeypatch.setattr(keeping, "_memory", lambda device: 80.0 * GIB)
    monkeypatch.setattr(
        keeping,
        "default_kept",
        lambda memory, stays: left.append(stays) or default_kept(memory, stays),
    )
    worker = make_worker(lora=lora)
    learner = worker.learners[0]
    assert (
        not learner.backend.adam.state
        and learner.head.kept_bytes == default_kept(80.0 * GIB, left[0]) == 16 * GIB
    )
    worker.forward_backward(0, random_datums(4), "importance_sampling", {}, 1.0, True)
    held = sum(p.nbytes for p in learner.model.parameters()) + sum(
        p.grad.nbytes for p in learner.trainable.values()
    )
    worker.optim_step(0, ADAM)
    moments = (value for state in learner.backend.adam.state.values() for value in state.values())
    held += sum(value.nbytes for value in moments if value.ndim)
    copy = 4 * sum(p.numel() for p in learner.model.parameters())
    assert left == [held + copy] and learner.head.kept_bytes == 16 * GIB
    # who says is asked alone
    assert make_worker(lora=lora, kept_bytes=0).learners[0].head.kept_bytes == 0


def test_all_ranks_take_the_least(monkeypatch):
    model = load_model("tiny:addition", seed=0).model
    shapes = {name: p.shape for name, p in model.named_parameters()}
    accelerator = type(
        "Accelerator", (), {"device": torch.device("cpu"), "mixed_precision": "bf16"}
    )()
    monkeypatch.setattr(keeping, "_memory", lambda device: 80.0 * GIB)
    monkeypatch.setattr(distributed, "world", lambda: 3)
    monkeypatch.setattr(distributed, "rank", lambda: 1)

    def sum_(tensors):
        assert tensors[0].tolist() == [0, 16 * GIB, 0]
        tensors[0].copy_(torch.tensor([32 * GIB, 16 * GIB, 4 * GIB]))

    monkeypatch.setattr(distributed, "all_sum_", sum_)
    assert keeping.settled(None, model, shapes, list(shapes), accelerator, "adamw") == 4 * GIB
    assert keeping.settled(7, model, shapes, list(shapes), accelerator, "adamw") == 7


def test_what_is_not_on_a_gpu_is_left_to_the_kernels():
    assert make_worker().learners[0].head.kept_bytes is None


def test_bytes_of_what_is_trained_by_hand():
    for how, optimizer, gradient in (
        (Sharing(), 8, 4), (Sharing(world=4), 8, 4), (Sharing(world=4, fsdp=True), 2, 1), (Sharing(world=4, zero=1), 3, 4),
        (Sharing(world=4, zero=2), 3, 1), (Sharing(world=4, zero=3), 3, 1), (Sharing(world=4, zero=3, offload=True), 0, 0),
        (Sharing(optimizer="adamw_8bit"), 2 + 8 / 256, 4), (Sharing(optimizer="paged_adamw_8bit"), 0, 4),
    ):  # fmt: skip
        assert (optimizer_bytes(1000, how), gradient_bytes(1000, how)) == (
            1000 * optimizer,
            1000 * gradient,
        )


def test_kept_logits_by_hand():
    batch, shape = MicroBatch(8, 1024, 8192), replace(SHAPE, vocab=150_000)
    one, scores = Launch(cuda=True, bf16=True, memory=80.0 * GIB), 8192 * 150_000 * 2
    exponents = 8192 * 4 * 1172
    # the gradient of the scores in one piece, too
    assert kept_logits(shape, one, batch, None) == 2 * scores + exponents
    assert (
        kept_logits(shape, one, batch, 2 * scores - 1)
        == scores + exponents
        == kept_bytes(8192, 150_000, 2, scores)
    )
    assert (
        kept_logits(shape, one, batch, scores)
        > 0
        == kept_logits(shape, one, batch, scores - 1)
        == kept_logits(shape, one, batch, 0)
    )
    assert kept_logits(shape, replace(one, bf16=False), batch, None) == kept_bytes(
        8192, 150_000, 4, 1 << 40
    )
    assert kept_logits(shape, replace(one, cuda=False), batch, None) == 0
    # 16 bytes of each and 2 of a copy: little is left
    grown = replace(shape, parameters=4_500_000_000, trainable=4_500_000_000)
    assert (
        kept_logits(grown, one, batch, None)
        == 0
        < kept_logits(grown, replace(one, memory=141.0 * GIB), batch, None)
    )
    assert kept_logits(grown, replace(one, world=8, fsdp=True), batch, None) > 0


LINE = (
    "grpo --base-model tiny:addition --batch-size 64 --group-size 8 --max-tokens 64 --plan-gpus 1 "
    "--plan-gpu-memory 40"
)


def train_item(*words: str) -> tuple[float, Launch, object]:
    run = read([*LINE.split(), *words], METHODS, REPO / "recipes" / "addition.yaml", RunSettings)
    launch, _ = launch_of(run.options, "auto")
    found = needs_of(run, launch, 16, holds=lambda *_: Held())[0]
    return (
        next(
            item.train for item in found.plan.items if item.name == "logits kept for the backward"
        ),
        launch,
        run,
    )


def test_the_plan_counts_what_the_setting_keeps():
    kept, launch, _ = train_item()
    assert kept > 0 and launch.memory == 40 * GIB
    assert train_item("--kept-logits-gib", "1")[0] == kept
    assert train_item("--kept-logits-gib", "0")[0] == train_item("--no-fused-logprobs")[0] == 0


def test_to_keep_nothing_is_named_where_that_helps(monkeypatch):
    """A vocabulary that is most of what a micro-batch holds."""
    monkeypatch.setattr(
        "rl.run.plan_needs.kept_logits",
        lambda shape, launch, batch, asked: 0.0 if asked == 0 else 4.0 * GIB,
    )
    _, launch, run = train_item()
    assert "--kept-logits-gib 0" in [change.words for change in remedies(run, launch, 16)]
