"""Test DPO: losses in float64, pairs under any split of a batch, the reference, and learning."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import VOCABULARY, call, compute_relative_difference, gradient, make_worker
from whole_runs import train

from rl import ServiceClient
from rl.algorithms.dpo import DpoSettings, make_pair_datums
from rl.config import ModelSettings, PreferenceDataSettings
from rl.data import addition
from rl.distributed import collectives
from rl.learner.packing import LAYOUTS, block_cost, make_blocks, plan_micro_batches
from rl.losses import get_loss
from rl.trainer import make_renderer
from rl.trainer.stage_models import StageModelFactory, make_policy
from rl.types import AdamParams, Datum, ModelInput

# --------------------------------------------------------------------------------------- the losses


def make_pair(rng: np.random.Generator, *, prompt: int, answers: tuple[int, int],
         reference: bool = True) -> list[Datum]:  # fmt: skip
    """Return two datums with a shared prompt, these answer lengths and off-policy references."""
    request, datums = rng.integers(0, VOCABULARY, prompt).tolist(), []
    for length in answers:
        tokens = [*request, *rng.integers(0, VOCABULARY, length).tolist()]
        mask = np.arange(1, len(tokens)) >= prompt
        fields = {"target_tokens": tokens[1:], "mask": mask.astype(np.float32)}
        if reference:
            off = -2.6 + 0.3 * rng.standard_normal(len(mask))
            fields["ref_logprobs"] = np.where(mask, off, np.nan)
        datums.append(Datum(ModelInput.from_ints(tokens[:-1]), fields))
    return datums


def pairs(count: int = 6, seed: int = 0, **kwargs) -> list[Datum]:
    rng = np.random.default_rng(seed)
    lengths = [
        (int(rng.integers(2, 6)), (int(rng.integers(1, 8)), int(rng.integers(1, 8))))
        for _ in range(count)
    ]
    made = [make_pair(rng, prompt=prompt, answers=answers, **kwargs) for prompt, answers in lengths]
    return [datum for two in made for datum in two]


def by_hand(
    datums, logprobs, *, loss: str, beta: float, eps: float = 0.0, mean: bool = False
) -> dict[str, float]:
    """Return the sums over pairs of the loss and its metrics, in plain float64 arithmetic."""
    totals = {"loss": 0.0, "chosen": 0.0, "rejected": 0.0, "right": 0.0}
    for first in range(0, len(datums), 2):
        ratios, lengths = [], []
        for i in (first, first + 1):
            fields = datums[i].loss_fn_inputs
            mask = fields["mask"].array != 0
            logp = np.asarray(logprobs[i], dtype=np.float64)[mask]
            ref = 0 * logp
            if "ref_logprobs" in fields:
                ref = fields["ref_logprobs"].array.astype(np.float64)[mask]
            ratios.append(float(logp.sum() - ref.sum()))
            lengths.append(int(mask.sum()))
        delta = ratios[0] / lengths[0] - ratios[1] / lengths[1] if mean else ratios[0] - ratios[1]
        if loss == "dpo":
            right, wrong = 1 / (1 + math.exp(-beta * delta)), 1 / (1 + math.exp(beta * delta))
            totals["loss"] -= (1 - eps) * math.log(right) + eps * math.log(wrong)
        else:
            totals["loss"] += (delta - 1 / (2 * beta)) ** 2
        totals["chosen"] += beta * ratios[0]
        totals["rejected"] += beta * ratios[1]
        totals["right"] += ratios[0] > ratios[1]
    return totals


CASES = [
    ("dpo", {}, dict(beta=0.1)),
    ("dpo", {"beta": 0.7}, dict(beta=0.7)),
    ("dpo", {"beta": 0.7, "label_smoothing": 0.2}, dict(beta=0.7, eps=0.2)),
    ("dpo", {"beta": 2.0, "length_normalise": 1.0}, dict(beta=2.0, mean=True)),
    ("ipo", {"beta": 0.3}, dict(beta=0.3, mean=True)),
    ("ipo", {"beta": 0.3, "length_normalise": 0.0}, dict(beta=0.3)),
]


@pytest.mark.parametrize(("name", "config", "formula"), CASES)
@pytest.mark.parametrize("reference", [True, False])
def test_value_metrics_and_gradient_are_those_of_the_formula(name, config, formula, reference):
    datums = pairs(reference=reference)
    rng = np.random.default_rng(1)
    logprobs = [-2.6 + 0.5 * rng.standard_normal(d.model_input.length) for d in datums]
    sizes = [len(logp) for logp in logprobs]
    flat = torch.tensor(np.concatenate(logprobs), requires_grad=True)
    inputs = {
        k: torch.from_numpy(np.concatenate([d.loss_fn_inputs[k].array for d in datums])).double()
        for k in datums[0].loss_fn_inputs
    }
    cu = torch.tensor(np.concatenate([[0], np.cumsum(sizes)]))
    value, metrics = get_loss(name).fn(flat, torch.zeros_like(flat), inputs, cu, config)
    expected = by_hand(datums, logprobs, loss=name, **formula)
    assert value.item() == pytest.approx(expected["loss"], rel=1e-12)
    assert metrics["chosen_rewards:sum"].item() == pytest.approx(expected["chosen"], rel=1e-12)
    assert metrics["rejected_rewards:sum"].item() == pytest.approx(expected["rejected"], rel=1e-12)
    assert (metrics["ranked_right:sum"].item(), int(metrics["pairs:sum"])) == (expected["right"], 6)

    (result,) = torch.autograd.grad(value, flat)
    step = 1e-6
    for i in range(0, len(flat), 5):
        ends = []
        for sign in (1, -1):
            moved = flat.detach().numpy().copy()
            moved[i] += sign * step
            parts = np.split(moved, np.cumsum(sizes)[:-1])
            ends.append(by_hand(datums, parts, loss=name, **formula)["loss"])
        assert result[i].item() == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-7)


def test_a_policy_that_is_its_reference_has_loss_ln_2_exactly_and_smoothing_changes_nothing_there():
    datums = pairs()
    logp = torch.cat(
        [
            torch.from_numpy(np.nan_to_num(d.loss_fn_inputs["ref_logprobs"].array, nan=-1.0))
            for d in datums
        ]
    )
    inputs = {
        k: torch.from_numpy(np.concatenate([d.loss_fn_inputs[k].array for d in datums]))
        for k in datums[0].loss_fn_inputs
    }
    cu = torch.tensor(np.concatenate([[0], np.cumsum([d.model_input.length for d in datums])]))
    for config in ({}, {"label_smoothing": 0.3}):
        value, metrics = get_loss("dpo").fn(logp, logp, inputs, cu, config)
        assert value.item() == pytest.approx(6 * math.log(2), rel=1e-7)
        assert metrics["chosen_rewards:sum"] == metrics["rejected_rewards:sum"] == 0
        assert metrics["ranked_right:sum"] == 3  # six ties


# --------------------------------------------------------------------------------- pairs stay pairs


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("budget", [1, 20, 1000])
def test_blocks_hold_every_pair_whole_in_order(layout, budget):
    datums = pairs(9)
    result = make_blocks(datums, layout, budget, 2)
    assert [[i for unit in block for i in unit] for block in result] == [
        [i, i + 1] for i in range(0, 18, 2)
    ]
    costs = [block_cost(datums, block, layout) for block in result]
    for chunk in plan_micro_batches(costs, budget, layout):
        lengths = [datums[i].model_input.length for j in chunk for unit in result[j] for i in unit]
        held = sum(lengths) if layout == "packed" else len(lengths) * max(lengths)
        assert len(chunk) == 1 or layout == "shared" or held <= budget


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_share_whole_pairs_in_as_many_micro_batches(layout, monkeypatch):
    datums, learner = pairs(4), make_worker(layout=layout, token_budget=1).learners[0]
    monkeypatch.setattr(collectives, "world", lambda: 3)
    parts = learner.split_batch(datums, 2)
    shares = [list(learner.planner.make_micro_batches(part)) for part in parts]
    assert [len(share) for share in shares] == [2, 2, 2]
    batches = [batch for share in shares for batch in share]
    assert all(
        first % 2 == 0 and second == first + 1
        for first, second in (batch.datum_index for batch in batches)
    )
    assert sorted(i for batch in batches if batch.scale for i in batch.datum_index) == list(
        range(8)
    )
    assert sorted(batch.scale for batch in batches) == [0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("name", ["dpo", "ipo"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_does_not_depend_on_how_pairs_are_cut(name, layout):
    datums = pairs(8)
    config = {"beta": 0.5}
    results = []
    for budget, parts in ((10_000, [datums]), (1, [datums]), (40, [datums[:6], datums[6:]])):
        worker = make_worker(layout=layout, token_budget=budget)
        values = [
            call(worker, "forward_backward", 0, part, name, config, 3.0, True) for part in parts
        ]
        total = sum(metrics["loss:sum"] for _, metrics in values)
        results.append((total, gradient(worker)))
    outputs = [o["logprobs"] for part in values for o in part[0]]
    expected = by_hand(datums, outputs, loss=name, beta=0.5, mean=name == "ipo")["loss"]
    for total, result in results:
        assert total == pytest.approx(expected, rel=1e-5)
        assert compute_relative_difference(result, results[0][1]) < 1e-5


# --------------------------------------------------------------------------------------- whole runs


def largest_digit_pairs(path: Path, *, swapped: bool = False) -> Path:
    """Write preferences with a known answer: the largest of three digits is preferred."""
    rng = np.random.default_rng(0)
    rows = []
    for digits in itertools.product(range(10), repeat=3):
        others = [d for d in digits if d != max(digits)]
        if others:
            answers = [str(max(digits)), str(rng.choice(others))]
            right, wrong = reversed(answers) if swapped else answers
            rows.append(
                {"prompt": "".join(map(str, digits)) + "=", "chosen": right, "rejected": wrong}
            )
    path.write_text("\n".join(json.dumps(rows[i]) for i in rng.permutation(len(rows))))
    return path


LEARNS = (
    "dpo --steps 40 --batch-size 32 --learning-rate 1e-3 --warmup-steps 10 --schedule linear "
    "--eval-every 20 --save-every 0"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        "",
        "--loss ipo",
        "--label-smoothing 0.1",
        "--reference-free",
        "--lora-rank 8 --train-unembed --learning-rate 5e-3",
    ],
)
def test_it_learns_preferences_with_a_known_answer(options, tmp_path):
    rows = train(
        f"{LEARNS} --dataset {largest_digit_pairs(tmp_path / 'pairs.jsonl')} {options}",
        tmp_path / "run",
    )
    first, last = rows[0], rows[-1]
    assert first["test/rewards/accuracies"] < 0.7 and last["test/rewards/accuracies"] > 0.9
    # Final loss as a share of ln 2: plain 0.46 (seed 1); with labels smoothed by 0.1, 0.59 and 0.61
    # (seeds 0 and 1), where the optimum is 0.47.
    share = 0.75 if "label" in options else 0.6
    assert last["test/loss"] < share * first["test/loss"] and last["rewards/margins"] > 0
    start = next(row for row in rows if row["step"] == 1)
    if not options or "label" in options or "lora" in options:
        assert (
            start["optim/loss"] == pytest.approx(math.log(2), abs=1e-6)
            and abs(rows[2]["optim/loss"] - math.log(2)) > 1e-4
        )
    # the learner itself scores the base under the adapter, so the logprobs are bitwise equal
    if "lora" in options:
        assert (
            start["rewards/chosen"] == start["rewards/rejected"] == 0.0
            and first["test/rewards/accuracies"] == 0.5
        )
    if "ipo" in options:
        assert start["optim/loss"] == pytest.approx(25.0, abs=1e-4)


@pytest.mark.slow
def test_swapped_labels_score_below_a_tenth(tmp_path):
    swapped, right = (
        largest_digit_pairs(tmp_path / "swapped.jsonl", swapped=True),
        largest_digit_pairs(tmp_path / "right.jsonl"),
    )
    rows = train(f"{LEARNS} --dataset {swapped} --eval-dataset {right}", tmp_path / "run")
    assert rows[-1]["rewards/accuracies"] > 0.9 and rows[-1]["test/rewards/accuracies"] < 0.1


@pytest.mark.parametrize("lora", [0, 4])
def test_updates_do_not_move_the_reference(lora, tmp_path):
    settings = DpoSettings(model=ModelSettings(lora_rank=lora))
    with ServiceClient(output_dir=tmp_path) as service:
        policy = make_policy(service, settings.model, None, None, 5)
        reference = StageModelFactory(service, policy, settings.model, None, {}, 5).initial_policy()
        renderer = make_renderer(policy, None)
        datums = [
            datum
            for row in list(addition("train"))[:4]
            for datum in make_pair_datums(row, renderer, PreferenceDataSettings())
        ]
        before = reference.logprobs(datums)
        policies = [_logprobs(policy, datums)]
        for _ in range(2):
            policy.forward_backward(datums, "dpo", {"beta": 1.0}, divisor=4.0)
            policy.optim_step(AdamParams(learning_rate=1e-2)).result()
            policies.append(_logprobs(policy, datums))
        after = reference.logprobs(datums)
        assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
        assert max(np.abs(a - b).max() for a, b in zip(policies[0], before, strict=True)) < 1e-5
        assert max(np.abs(a - b).max() for a, b in zip(policies[2], before, strict=True)) > 0.1
        with pytest.raises(ValueError, match="groups of 2.*3 datums"):
            policy.forward_backward(datums[:3], "dpo")


def _logprobs(policy, datums):
    return [
        item["logprobs"].array for item in policy.forward(datums, "dpo").result().loss_fn_outputs
    ]


@pytest.mark.slow
def test_the_loss_falls_on_real_preferences(shared_data, tmp_path):
    source = shared_data / "preferences" / "rasbt_dpo" / "instruction-data-with-preference.json"
    words = f"""dpo --dataset {source} --train-limit 400 --base-model tiny:chat
        --tokenizer {shared_data / "tokenizers" / "minimind_6400"} --renderer role_colon
        --steps 30 --batch-size 16 --learning-rate 1e-3 --eval-every 30 --save-every 0 --precompute-reference"""
    rows = train(words, tmp_path / "run")
    losses = [row["optim/loss"] for row in rows if "optim/loss" in row]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5)
    assert np.mean(losses[-10:]) < 0.6
    held_out = [row for row in rows if "test/loss" in row]
    print(
        "held-out accuracy and loss:",
        [(row["test/rewards/accuracies"], row["test/loss"]) for row in held_out],
    )
    assert held_out[-1]["test/loss"] < held_out[0]["test/loss"]


def test_a_second_stage_is_held_to_the_first_ones_weights(tmp_path):
    """Run SFT, then DPO: the first DPO step has loss ln 2 against the weights of SFT."""
    for lora in (0, 4):
        recipe = tmp_path / f"lora-{lora}.yaml"
        recipe.write_text(
            f"stages:\n  - {{method: sft, steps: 3, learning_rate: 1e-2, eval_every: 0}}\n"
            f"  - {{method: dpo, steps: 2, learning_rate: 1e-2, eval_every: 0}}\nlora_rank: "
            f"{lora}\nbatch_size: 16\n"
        )
        rows = [
            row for row in train(str(recipe), tmp_path / f"run-{lora}") if row["stage"] == "dpo"
        ]
        assert rows[0]["optim/loss"] == pytest.approx(math.log(2), abs=1e-5)
        assert abs(rows[0]["rewards/chosen"]) < 1e-5 < abs(rows[1]["rewards/chosen"])
