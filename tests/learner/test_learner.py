"""Test that the gradient does not depend on how a batch is split, laid out or computed; packing by
hand; and steps that must not happen.
"""

import numpy as np
import pytest
import torch
from helpers import (
    ADAM,
    GRADIENT_BOUND,
    call,
    compute_relative_difference,
    gradient,
    make_worker,
    random_datums,
)

from rl.learner.logprob_head import compute_logprobs
from rl.learner.packing import (
    PackedBatch,
    choose_layout,
    collate,
    make_units,
    plan_micro_batches,
    unit_cost,
)
from rl.losses import get_loss
from rl.models import load_model
from rl.sampler.prompt_logprobs import PromptLogprobs
from rl.types import Datum, LoraConfig, ModelInput

LOSSES = ["cross_entropy", "importance_sampling", "ppo", "cispo"]


def as_loss(datums: list[Datum], loss: str) -> list[Datum]:
    if loss != "cross_entropy":
        return datums
    fields = {"target_tokens": "target_tokens", "weights": "mask"}
    return [
        Datum(d.model_input, {name: d.loss_fn_inputs[of] for name, of in fields.items()})
        for d in datums
    ]


def run(worker, datums, loss, calls=None, divisor=7.0):
    """Return gradient and outputs of `datums` in a single call, or split into calls of the sizes
    `calls`.
    """
    worker.drop_gradients(0)
    outputs, start = [], 0
    for size in calls or [len(datums)]:
        out, _ = call(
            worker, "forward_backward", 0, datums[start : start + size], loss, {}, divisor, True
        )
        outputs += out
        start += size
    assert start == len(datums)
    return gradient(worker), np.concatenate([o["logprobs"] for o in outputs])


def grouped(datums: list[Datum]) -> list[Datum]:
    """Return the datums with a common prompt for some neighbors: groups of 4, 3 and 1, and four
    ungrouped datums.
    """
    rng, result = np.random.default_rng(7), list(datums)
    for members, prompt in (([0, 1, 2, 3], 5), ([5, 6, 7], 2), ([9], 4)):
        tokens = rng.integers(0, 14, prompt).tolist()
        for i in members:
            fields = {
                n: np.concatenate([np.zeros(prompt - 1), v.array])
                for n, v in datums[i].loss_fn_inputs.items()
            }
            fields["mask"][prompt - 1] = 1.0
            fields["target_tokens"] = np.concatenate(
                [tokens[1:], datums[i].loss_fn_inputs["target_tokens"].array]
            ).astype(int)
            result[i] = Datum(
                ModelInput.from_ints(tokens + datums[i].model_input.to_ints()[1:]), fields
            )
    return result


@pytest.fixture(scope="module")
def reference():
    """Return gradients and logprobs in float64 by plain autograd on the model's logits: a sequence
    at a time, no padding, no packing.
    """
    worker = make_worker(token_budget=4096)
    datums = grouped(random_datums(12))

    def compute(loss: str):
        model = worker.learners[0].model
        twin = load_model("tiny:addition", seed=1).model.double()
        twin.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
        total, logprobs = 0.0, []
        for datum in as_loss(datums, loss):
            logits = twin(input_ids=torch.tensor([datum.model_input.to_ints()])).logits[0]
            inputs = {k: torch.from_numpy(v.array) for k, v in datum.loss_fn_inputs.items()}
            inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
            logp = torch.log_softmax(logits, -1).gather(-1, inputs["target_tokens"][:, None])[:, 0]
            total = (
                total
                + get_loss(loss).fn(logp, logp, inputs, torch.tensor([0, len(logp)]), {})[0] / 7.0
            )
            logprobs.append(logp.detach().numpy())
        total.backward()
        named = dict(twin.named_parameters())
        grads = torch.cat([named[n].grad.reshape(-1) for n in worker.learners[0].trainable])
        return grads, np.concatenate(logprobs)

    return datums, {loss: compute(loss) for loss in LOSSES}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("settings", "calls"),
    [
        ({"token_budget": 4096}, None),
        ({"token_budget": 1}, None),  # one sequence per micro-batch
        ({"token_budget": 20}, None),
        ({"token_budget": 20}, [3, 5, 4]),
        ({"token_budget": 4096}, [1] * 12),
        ({"token_budget": 4096, "layout": "packed"}, None),
        ({"token_budget": 20, "layout": "packed"}, [5, 7]),
        ({"token_budget": 4096, "layout": "shared"}, None),
        ({"token_budget": 20, "layout": "shared"}, [5, 7]),
        ({"token_budget": 4096, "fused": False}, None),
        ({"token_budget": 20, "gradient_checkpointing": True}, None),
    ],
)
def test_gradient_is_the_same_however_the_batch_is_cut(reference, loss, settings, calls):
    datums, truth = reference
    grad, logprobs = run(make_worker(**settings), as_loss(datums, loss), loss, calls)
    assert compute_relative_difference(grad, truth[loss][0]) < GRADIENT_BOUND
    np.testing.assert_allclose(logprobs, truth[loss][1], atol=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_any_single_token_left_out_would_be_seen(reference, loss):
    """Omitting any token changes the gradient by at least a hundred times the bound, except tokens
    that the loss clips away.
    """
    datums, worker = as_loss(reference[0], loss), make_worker()
    whole, _ = run(worker, datums, loss)
    field, seen = "weights" if loss == "cross_entropy" else "advantages", []
    for datum in datums[::4]:
        kept = datum.loss_fn_inputs[field].array.copy()
        for t in kept.nonzero()[0]:
            datum.loss_fn_inputs[field].array[t] = 0.0
            seen.append(compute_relative_difference(run(worker, datums, loss)[0], whole))
            datum.loss_fn_inputs[field].array[t] = kept[t]
    off = [difference for difference in seen if difference > 0]
    assert len(off) >= 8 and min(off) > 100 * GRADIENT_BOUND


@pytest.mark.parametrize(("layout", "alpha"), [("padded", None), ("packed", 7.5), ("shared", 1)])
def test_lora_gradient_is_the_same_however_cut_and_fused(layout, alpha):
    """`alpha` belongs to an adapter of rank 3, on the head too, which the fused head scales by
    itself.
    """
    lora, datums = LoraConfig(rank=3, alpha=alpha, seed=5), random_datums(9)
    plain, _ = run(make_worker(lora=lora, fused=False), datums, "ppo")
    cut, _ = run(make_worker(lora=lora, layout=layout, token_budget=20), datums, "ppo", [2, 7])
    assert plain.norm() > 0 and compute_relative_difference(cut, plain) < GRADIENT_BOUND


def test_soft_targets_with_one_target_are_cross_entropy():
    worker, datums = make_worker(), as_loss(random_datums(5), "cross_entropy")
    soft = []
    for datum in datums:
        fields = {n: v.array[:, None].repeat(2, 1) for n, v in datum.loss_fn_inputs.items()}
        soft.append(Datum(datum.model_input, {**fields, "weights": fields["weights"] / 2}))
    hard_grad = run(worker, datums, "cross_entropy")[0].clone()
    soft_grad, _ = run(worker, soft, "cross_entropy")
    assert compute_relative_difference(soft_grad, hard_grad) < GRADIENT_BOUND


def test_logprobs_over_a_large_vocabulary_are_exact_to_1e_5():
    """torch's fp32 log_softmax on a CPU is off by 1e-4 and more here, which would hide a sampler
    that disagrees.
    """
    logits = 4 * torch.randn(8, 151_665, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(8) * 1000
    expected = torch.log_softmax(logits.double(), -1).gather(-1, targets[:, None])[:, 0]
    assert (compute_logprobs(logits, targets, 1.0, False)[0] - expected).abs().max() < 1e-5
    reader = PromptLogprobs([0, *targets.tolist()])
    reader(0, logits)
    assert (torch.tensor(reader.logprobs[1:]) - expected).abs().max() < 1e-5


# ------------------------------------------------------------------------------------------ packing


def test_plan_by_hand():
    shapes = [(1, 3), (1, 9), (1, 4), (1, 2)]
    assert plan_micro_batches(shapes, 10, "packed") == [[1], [2, 0, 3]]
    # Two rows of 4 take 8 positions, three would take 12.
    assert plan_micro_batches(shapes, 10, "padded") == [[1], [2, 0], [3]]
    # A row of 5 and two rows of 2 take 3 x 5 positions.
    assert plan_micro_batches([(2, 2), (1, 5)], 14, "shared") == [[1], [0]]
    assert plan_micro_batches([(2, 2), (1, 5)], 15, "shared") == [[1, 0]]
    # A sequence longer than the budget gets a separate micro-batch.
    for layout in ("packed", "padded"):
        assert plan_micro_batches([(1, 50)], 10, layout) == [[0]]
    with pytest.raises(ValueError, match="at least 1"):
        plan_micro_batches([(1, 1)], 0, "packed")


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("seed", range(10))
def test_property_a_plan_holds_every_datum_once_within_its_budget(layout, seed):
    rng = np.random.default_rng(seed)
    lengths, budget = rng.integers(1, 60, 40).tolist(), int(rng.integers(1, 200))
    batches = plan_micro_batches([(1, length) for length in lengths], budget, layout)
    assert sorted(i for batch in batches for i in batch) == list(range(40))
    for batch in batches:
        cost = (
            sum(lengths[i] for i in batch)
            if layout == "packed"
            else len(batch) * max(lengths[i] for i in batch)
        )
        assert cost <= budget or len(batch) == 1


def test_collate_by_hand():
    datums = [
        Datum(ModelInput.from_ints(t), {"target_tokens": t, "weights": [1.0] * len(t)})
        for t in ([5, 6, 7], [8, 9])
    ]
    padded, packed = collate(datums, [[0], [1]], "padded"), collate(datums, [[0], [1]], "packed")
    assert padded.input_ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert padded.token_index.tolist() == [0, 1, 2, 3, 4]
    assert packed.input_ids.tolist() == [[5, 6, 7, 8, 9]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    for batch in (padded, packed):
        assert batch.cu_seqlens.tolist() == [0, 3, 5]
        assert batch.inputs["target_tokens"].tolist() == [5, 6, 7, 8, 9]


def test_shared_prompts_by_hand():
    answers = ([5, 6, 7], [5, 6, 8, 9], [4])
    masks = ([0.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0], [1.0])
    datums = [
        Datum(ModelInput.from_ints(t), {"target_tokens": t, "mask": m})
        for t, m in zip(answers, masks, strict=True)
    ]
    together = make_units(datums, "shared", 100)
    assert together == [[0, 1], [2]]
    assert [unit_cost(datums, unit) for unit in together] == [2 + 1 + 2, 1]
    batch = collate(datums, together, "shared")
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9], [4, 0, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 2, 3], [0, 0, 0, 0, 0]]
    assert batch.token_index.tolist() == [0, 1, 2, 0, 1, 3, 4, 5]
    assert batch.attention_mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],  # the second answer sees the prompt, not the first answer
        [1, 1, 0, 1, 1],
    ]


def test_a_unit_does_not_outgrow_the_budget():
    datums = [
        Datum(
            ModelInput.from_ints([5, 6, 7, 8]),
            {"target_tokens": [1] * 4, "mask": [0.0, 1.0, 1.0, 1.0]},
        )
        for _ in range(4)
    ]
    assert make_units(datums, "shared", 6) == [[0, 1], [2, 3]] and make_units(
        datums, "shared", 3
    ) == [[0], [1], [2], [3]]


def test_the_layout_is_chosen_by_the_work_it_makes():
    def group(prompt, answer, size=8):
        tokens, mask = [1] * (prompt + answer), [0.0] * (prompt - 1) + [1.0] * (answer + 1)
        return [
            Datum(ModelInput.from_ints(tokens), {"target_tokens": tokens, "mask": mask})
            for _ in range(size)
        ]

    assert choose_layout(group(6, 3), 10**6, 128) == "shared"
    assert choose_layout(group(6, 3, 1), 10**6, 128) == "padded"  # no sequence to share with
    assert choose_layout(group(500, 100), 10**6, 1024) == "shared"
    # Rows of 980 and 780 positions, between 6 D and 12 D: a mask doubles the cost of attention.
    assert choose_layout(group(140, 105), 10**6, 128) == "padded"
    assert choose_layout(group(300, 60), 10**6, 128) == "shared"
    # Long answers compute masked scores against each other.
    assert choose_layout(group(20, 2000), 10**6, 1024) == "padded"


def test_the_mask_of_a_micro_batch_is_built_once(monkeypatch):
    datums, builds, model = random_datums(6), [], make_worker().learners[0].model
    batch = collate(datums, [[0, 1], [2], [3]], "shared")
    build = PackedBatch.attention_mask.fget

    def count(batch):
        builds.append(batch)
        return build(batch)

    monkeypatch.setattr(PackedBatch, "attention_mask", property(count))
    mask = batch.make_model_inputs(model)["attention_mask"]
    assert len(builds) == 1 and torch.equal(mask, build(batch))
    # Also in a call whose backward computes the layers again.
    settings = {"layout": "shared", "token_budget": 24, "gradient_checkpointing": True}
    learner = make_worker(**settings).learners[0]
    builds.clear()  # the probe's
    pairs = [datum for datum in datums for _ in range(2)]
    learner.run(pairs, get_loss("ppo"), {}, temperature=1.0, divisor=1.0, backward=True)
    assert len(builds) == learner.num_micro_batches > 1
    assert all(build(batch) is not None for batch in builds)


def test_what_stands_in_the_padding_is_not_read():
    worker, datums = make_worker(), random_datums(6)
    batch = collate(datums, [[i] for i in range(6)], "padded")
    learner, loss = worker.learners[0], get_loss("ppo")
    clean = learner._forward(batch, loss, {}, 1.0, False)[1]["logprobs"]
    flat = batch.input_ids.view(-1)
    padding = torch.ones_like(flat, dtype=torch.bool)
    padding[batch.token_index] = False
    assert padding.any()
    flat[padding] = 7
    assert torch.equal(learner._forward(batch, loss, {}, 1.0, False)[1]["logprobs"], clean)


# -------------------------------------------------------------------------------------------- steps


def weights(worker) -> torch.Tensor:
    return torch.cat(
        [p.detach().reshape(-1).clone() for p in worker.learners[0].trainable.values()]
    )


def test_a_step_on_nothing_and_on_infinity_changes_nothing():
    worker = make_worker()
    before = weights(worker)
    outputs, metrics = call(worker, "forward_backward", 0, [], "ppo", {}, 1.0, True)
    assert outputs == [] and metrics == {"loss:sum": 0.0, "temperature:mean": 1.0}
    assert worker.optim_step(0, ADAM)["skipped"] == 1.0
    run(worker, random_datums(3), "ppo")
    next(iter(worker.learners[0].trainable.values())).grad[0] = float("inf")
    assert worker.optim_step(0, ADAM)["skipped_nonfinite"] == 1.0
    assert torch.equal(weights(worker), before) and worker.learners[0].version == 0
    run(worker, random_datums(3), "ppo")
    assert worker.optim_step(0, ADAM)["grad_norm"] > 0 and worker.learners[0].version == 1


def test_a_loss_that_is_not_finite_is_an_error_and_drops_the_gradient():
    worker, datums = make_worker(), random_datums(3)
    run(worker, datums, "ppo")
    datums[1].loss_fn_inputs["logprobs"].array[:] = -np.inf
    with pytest.raises(FloatingPointError, match="weights are unchanged"):
        call(worker, "forward_backward", 0, datums, "importance_sampling", {}, 1.0, True)
    assert worker.optim_step(0, ADAM)["skipped"] == 1.0


def test_decode_cost_is_not_changed_by_gradient_checkpointing():
    """Checkpointing applies to the learner; the sampler keeps its cache (a known trap
    elsewhere).
    """
    from rl.sampler import SamplingRequest
    from rl.types import SamplingParams

    fed = []
    for checkpointing in (False, True):
        worker = make_worker(gradient_checkpointing=checkpointing)
        worker.snapshot(0, 1)
        params = SamplingParams(max_tokens=20, stop=[])
        request = SamplingRequest(prompt=[3, 4], num_samples=2, params=params)
        _, counters = call(worker, "sample", 1, [request])
        fed.append(counters["fed_tokens"])
    assert fed == [2 * 19, 2 * 19]  # one token per row and step: nothing is recomputed
