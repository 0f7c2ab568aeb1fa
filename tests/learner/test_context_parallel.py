"""Test what each rank of a context-parallel group holds, and what is refused.
tests/distributed/test_context_ranks.py tests the gradients of groups.
"""

import sys
from dataclasses import dataclass
from inspect import stack
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from helpers import VOCABULARY
from tiny_models import tiny_model
from transformers import Qwen2Config
from whole_runs import RECIPE

from rl.algorithms import METHODS
from rl.config.cli import parse_run
from rl.config.sections import RunSettings
from rl.distributed import ZeroSharding, check_context_parallel
from rl.errors import UserError
from rl.layers import describe_layers
from rl.learner import Learner, LearnerSettings, context_parallel
from rl.learner.context_parallel import _spread_heads, check_divisible
from rl.learner.packing import collate, make_units
from rl.learner.varlen_attention import VarlenAttention
from rl.losses import get_loss
from rl.memory_plan import LaunchShape
from rl.models import load_model
from rl.trainer.memory_report import find_savings
from rl.trainer.memory_requirements import compute_stage_needs
from rl.types import Datum, ModelInput


@dataclass
class Ranks:
    """A group of ranks. Only a group of one can send messages."""

    rank: int = 0
    size: int = 1

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        assert self.size == 1
        return x

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        assert self.size == 1
        return [x]


def draw_datums() -> list[Datum]:
    """Return two groups of answers to a prompt, and an answer to another prompt."""
    rng, datums = np.random.default_rng(0), []
    for prompt, *answers in ((5, 3, 1, 6), (2, 4, 4), (7, 2)):
        request = rng.integers(0, VOCABULARY, prompt).tolist()
        for n in answers:
            mask = np.array([0.0] * (prompt - 1) + [1.0] * n, np.float32)
            fields = {
                "target_tokens": rng.integers(0, VOCABULARY, len(mask)),
                "mask": mask,
                "logprobs": mask * -2.5,
                "advantages": mask * rng.standard_normal(len(mask)),
            }
            tokens = [*request, *rng.integers(0, VOCABULARY, n - 1).tolist()]
            datums.append(Datum(ModelInput.from_ints(tokens), fields))
    return datums


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_columns_of_all_ranks_are_the_micro_batch(layout, size, varlen):
    datums = draw_datums()
    units = make_units(datums, layout, 1000)
    whole = collate(datums, units, layout, varlen=varlen)
    tokens = torch.cat([torch.tensor(d.model_input.token_ids()) for d in datums])
    batches = [
        collate(datums, units, layout, group=Ranks(r, size), varlen=varlen) for r in range(size)
    ]
    shards = [batch.shard for batch in batches]
    for batch in batches if varlen and layout != "padded" else ():
        assert batch.attention_mask is None and batch.shard.sequences is None
        padding = len(shards) * shards[0].input_ids.shape[1] - whole.input_ids.shape[1]
        assert batch.bounds.query_lengths == whole.bounds.query_lengths + [padding] * (padding > 0)
        assert batch.bounds.key_lengths == whole.bounds.key_lengths + [padding] * (padding > 0)
        keys = batch.bounds.key_index
        end = whole.input_ids.numel()
        expected = whole.bounds.key_index
        if expected is None:
            assert keys is None
        else:
            assert torch.equal(keys, torch.cat([expected, torch.arange(end, end + padding)]))
    columns = torch.cat([s.input_ids for s in shards], 1)
    assert columns.shape[1] % size == 0 and columns.shape[1] - whole.input_ids.shape[1] < size
    assert torch.equal(columns[:, : whole.input_ids.shape[1]], whole.input_ids)
    assert torch.equal(torch.cat([s.position_ids for s in shards], 1), shards[0].all_positions)
    held = torch.cat([s.input_ids.flatten()[s.token_index] for s in shards])
    assert torch.equal(held[shards[0].order], tokens)
    of_targets = torch.cat([tokens[s.tokens] for s in shards])
    assert torch.equal(of_targets[shards[0].order], tokens)
    assert len({len(s.tokens) for s in shards}) == 1  # equal lengths, as one message requires


def make_learner(group: Ranks | None, **settings: Any) -> Learner:
    accelerator = Accelerator(cpu=True)
    settings = {"token_budget": 40, "layout": "packed"} | settings
    loaded = load_model("tiny:addition", seed=1)
    return Learner(loaded, accelerator, LearnerSettings(**settings), group=group)


def run(learner: Learner) -> torch.Tensor:
    """Return the gradient of a call."""
    learner.run(draw_datums(), get_loss("ppo"), {}, temperature=0.9, divisor=3.0, backward=True)
    return torch.cat([p.grad.flatten() for p in learner.trainable.values()])


@pytest.mark.parametrize("layout", ["packed", "shared"])
def test_attention_of_a_group_takes_lengths_and_builds_no_mask(layout, monkeypatch):
    expected = run(make_learner(None, layout="padded"))
    learner = make_learner(Ranks(), layout=layout, varlen=True)
    assert learner.varlen is not None

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a mask is built")

    monkeypatch.setattr(context_parallel, "_make_full_mask", refuse)
    for name in ("packing", "layout_probe"):
        module = sys.modules[f"rl.learner.{name}"]
        monkeypatch.setattr(module, "make_attention_mask", refuse, raising=False)
    gradient = run(learner)
    assert (gradient - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("fault", ["kernel", "group"])
def test_a_group_uses_masks_where_lengths_do_not_work(fault, monkeypatch):
    """The kernel is tried for the heads of a rank of the group, after the group itself."""
    expected, tried = run(make_learner(None, layout="padded")), []

    def try_kernel(varlen: VarlenAttention) -> bool:
        tried.append({shape.heads for shape in varlen.shapes})
        return fault != "kernel"

    attend_row = VarlenAttention.attend_row

    def attend_wrongly(*args: Any, **kwargs: Any) -> Any:
        out, weights = attend_row(*args, **kwargs)
        inside = any(frame.function == "_attend" for frame in stack())
        return (2 * out if inside else out), weights

    monkeypatch.setattr(VarlenAttention, "kernel_agrees", try_kernel)
    if fault == "group":
        monkeypatch.setattr(VarlenAttention, "attend_row", attend_wrongly)
    learner = make_learner(Ranks(), varlen=True)
    assert learner.varlen is None and learner.layouts == {"padded", "packed"}
    assert (run(learner) - expected).norm() <= 1e-6 * expected.norm()
    heads = learner.model.config.num_attention_heads
    assert tried == ([{heads}] if fault == "kernel" else [])


@pytest.mark.parametrize(("heads", "key_heads"), [(14, 2), (28, 4), (3, 3), (6, 3), (8, 1), (5, 5)])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_each_rank_has_every_key_head_of_its_query_heads(heads, key_heads, size):
    """Each query head holds the number of its key head, so that pairs can be compared."""
    per_key = heads // key_heads
    query = (torch.arange(heads) // per_key + 1.0).reshape(1, heads, 1, 1)
    key = torch.arange(1.0, key_heads + 1).reshape(1, key_heads, 1, 1)
    query, key, value = _spread_heads(query, key, key, size)
    assert query.shape[1] % size == key.shape[1] % size == 0 and torch.equal(key, value)
    pairs = []
    for q, k in zip(query.flatten().chunk(size), key.flatten().chunk(size), strict=True):
        pairs += zip(q.tolist(), k.repeat_interleave(len(q) // len(k)).tolist(), strict=True)
    real = [pair for pair in pairs if pair[0]]
    assert len(real) == heads and all(q == k for q, k in real)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("qwen3_next", "carry a state"),
        ("mamba2", "carry a state"),
        ("bloom", "takes no position_ids"),
        ("qwen3", "has 4 attention heads, fewer than the ranks"),
    ],
)
def test_models_that_cannot_be_divided_are_refused(name, why):
    model = tiny_model(name)
    with pytest.raises(UserError, match=f"context_parallel_size 8 .*{why}.*: set it to 1"):
        check_divisible(model, describe_layers(model), 8, name)


def test_settings_and_launches_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match="turn router_replay off"):
        LearnerSettings(context_parallel_size=2, router_replay=True)
    with pytest.raises(UserError, match="router_aux_loss_coef to 0"):
        LearnerSettings(context_parallel_size=2, router_aux_loss_coef=0.1)
    with pytest.raises(UserError, match="2 processes, but 1 learns: use 1, or start a multiple"):
        check_context_parallel(2)


def plan(folder, words, world=8):
    run = parse_run(
        [
            *f"grpo --base-model {folder} --dataset addition --layout padded".split(),
            *"--gradient-checkpointing --max-tokens 65536 --token-budget 66048".split(),
            *f"--batch-size 16 --output-dir /nowhere {words}".split(),
        ],
        METHODS,
        RECIPE,
        options=RunSettings,
    )
    launch = LaunchShape(
        cuda=True, bf16=True, world=world, per_node=8, memory=80e9, sharding=ZeroSharding(stage=3)
    )
    return run, launch


def test_a_plan_divides_activations_and_names_the_setting(tmp_path):
    Qwen2Config(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=24,
        num_attention_heads=28,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=70000,
        architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(tmp_path)

    def activations(words):
        (needs,) = compute_stage_needs(*plan(tmp_path, words), 512)
        return next(i.train for i in needs.plan.items if i.name == "activations")

    whole, eighth = activations(""), activations("--context-parallel-size 8")
    assert whole / 8 < eighth < 1.1 * whole / 8
    run, launch = plan(tmp_path, "")
    changes = [c for c in find_savings(run, launch, 512) if c.kind == "context_parallel_size"]
    assert {c.command for c in changes} == {f"--context-parallel-size {n}" for n in (2, 4, 8)}
    with pytest.raises(UserError, match="context_parallel_size 8 .*but 4 learn: use 1, 2, 4"):
        compute_stage_needs(*plan(tmp_path, "--context-parallel-size 8", world=4), 512)
