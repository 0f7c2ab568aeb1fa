"""Test PPO: KL in the reward, epochs and their minibatches, the reference."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from algorithm_helpers import make_method
from helpers import SeparateCalls, random_datums

from rl import ServiceClient
from rl.algorithms import (
    AdaptiveKL,
    Models,
    PpoSettings,
    Progress,
    apply_kl_penalty,
    compute_kl_metrics,
    compute_logprob_gaps,
)
from rl.algorithms.ppo import summarize_epochs
from rl.algorithms.update import UpdateSums
from rl.config import LoopSettings, ModelSettings
from rl.rollout import Trajectory, TrajectoryGroup, Transition
from rl.seed import derive_seed
from rl.trainer.stage_models import StageModelFactory, make_policy
from rl.trainer.trainer import Trainer
from rl.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    SamplingParams,
    TensorData,
)

FLAT = {"normalise_advantages": False, "max_tokens": 3, "temperature": 0.8, "steps": 5}


# ----------------------------------------------------------------------------------- pure functions


def datum(logprobs, mask, advantages=None):
    n = len(mask)
    fields = {
        "target_tokens": [1] * n,
        "logprobs": logprobs,
        "mask": mask,
        "advantages": [0.0] * n if advantages is None else advantages,
    }
    return Datum(ModelInput.from_ints([1] * n), fields)


@pytest.mark.parametrize("discount", [0.0, 0.5, 0.9, 1.0])
def test_observations_between_actions_discount_nothing(discount):
    """An action is charged its gap plus discount^k times the gap of the k-th action after it."""
    rng = np.random.default_rng(4)
    datums, references, charges = [], [], []
    for observations in (0, 1, 3, 7):
        mask = np.array([0, 0, *([1, 1] + [0] * observations) * 3, 1], np.float32)
        q, ref = (rng.normal(-1, 0.5, len(mask)).astype(np.float32) for _ in range(2))
        datums.append(datum(q * mask, mask, mask * 0.25))
        references.append(ref)
        gaps = (q.astype(np.float64) - ref)[mask != 0]
        after = [[gap * discount**k for k, gap in enumerate(gaps[i:])] for i in range(len(gaps))]
        charges.append([sum(terms) for terms in after])
    result, _ = apply_kl_penalty(datums, references, 0.3, discount)
    for item, charge in zip(result, charges, strict=True):
        expected = np.zeros(item.model_input.length)
        acts = item.loss_fn_inputs["mask"].array != 0
        expected[acts] = 0.25 + 0.3 * (np.concatenate(charges).mean() - charge)
        np.testing.assert_allclose(item.loss_fn_inputs["advantages"].array, expected, atol=1e-6)


def test_a_penalty_with_full_discount_has_the_gradient_of_the_kl_of_answers():
    """Check -grad KL(policy || ref) over all answers of 1 to 3 tokens; the third token ends it."""
    every = [q for n in (1, 2, 3) for q in itertools.product(range(3), repeat=n)]
    answers = [q for q in every if 2 not in q[:-1] and (q[-1] == 2 or len(q) == 3)]
    states = dict.fromkeys(q[:i] for q in answers for i in range(len(q)))
    rows = {state: i for i, state in enumerate(states)}
    torch.manual_seed(2)
    logits = torch.randn(len(rows), 3, dtype=torch.float64, requires_grad=True)
    logp = torch.log_softmax(logits, -1)
    ref = torch.log_softmax(torch.randn(len(rows), 3, dtype=torch.float64), -1)
    lp, ref_lp = (
        [torch.stack([table[rows[q[:i]], token] for i, token in enumerate(q)]) for q in answers]
        for table in (logp, ref)
    )
    chances = [item.sum().exp() for item in lp]
    assert float(sum(chances).detach()) == pytest.approx(1.0)
    kl = sum(p * (a - b).sum() for p, a, b in zip(chances, lp, ref_lp, strict=True))
    (truth,) = torch.autograd.grad(kl, logits, retain_graph=True)
    datums = [datum(item.tolist(), [1.0] * len(item)) for item in lp]
    for discount, right in ((1.0, True), (0.0, False)):
        credited, _ = apply_kl_penalty(datums, [item.numpy() for item in ref_lp], 1.0, discount)
        credits = [item.loss_fn_inputs["advantages"].to_torch().double() for item in credited]
        terms = zip(chances, credits, lp, strict=True)
        loss = -sum(p.detach() * (credit * item).sum() for p, credit, item in terms)
        (result,) = torch.autograd.grad(loss, logits, retain_graph=True)
        assert torch.allclose(result, truth, atol=1e-6) == right


def test_the_adaptive_coefficient():
    control = AdaptiveKL(0.0, 0.1)
    control.update(0.05)
    assert control.needs_reference and control.coefficient == 0.0
    control.update(1.0)
    assert control.coefficient == pytest.approx(AdaptiveKL.MIN_COEFFICIENT * 1.02)  # moves from 0
    for _ in range(400):
        control.update(1.0)
    assert control.coefficient > 1.0
    high = control.coefficient
    control.update(0.09)  # an error of -0.1, not clipped
    assert control.coefficient == pytest.approx(high * 0.99)
    constant = AdaptiveKL(0.3, None)
    constant.update(5.0)
    assert constant.coefficient == 0.3 and not AdaptiveKL(0.0, None).needs_reference


# ------------------------------------------------------------------------------------------- credit


def test_a_minibatch_that_a_correction_leaves_empty_adds_nothing_to_the_means():
    totals = UpdateSums(AdamParams(learning_rate=1e-3))
    for loss in (6.0, 0.0):
        totals.add_sums({"loss:sum": loss, "policy_loss:sum": loss})
    totals.epochs = 1
    datums = [datum([-1.0] * 3, [1.0] * 3), datum([-1.0] * 3, [0.0] * 3)]
    metrics = summarize_epochs(totals, datums)
    assert metrics["optim/policy_loss"] == metrics["optim/loss"] == 2.0


# -------------------------------------------------------------------------------------------- learn


@pytest.fixture
def service(tmp_path):
    with ServiceClient(output_dir=tmp_path / "out", seed=3) as service:
        yield service


def sampled_groups(policy, problems=8):
    sampler = policy.save_weights_and_get_sampling_client()
    groups = []
    for i in range(problems):
        prompt = ModelInput.from_ints([3 + i % 7, 4, 12, 5, 6, 13])
        (sequence,) = (
            sampler.sample(prompt, 1, SamplingParams(max_tokens=4, temperature=0.8, seed=i))
            .result()
            .sequences
        )
        reward = float(sum(t < 8 for t in sequence.tokens))
        groups.append(
            TrajectoryGroup([Trajectory([Transition(prompt, sequence, reward, True)])], [0.0], [{}])
        )
    return groups


def test_minibatches_are_dealt_out_by_the_runs_seed():
    """Check the order of datums over an epoch's minibatches, with a policy that only records it."""
    seen: list[list[int]] = []
    datums = [datum([-1.0], [1.0], [1.0]) for _ in range(12)]

    def noted(part, *_, **__):
        seen.append([next(i for i, item in enumerate(datums) if item is d) for d in part])
        outputs = [{"logprobs": TensorData([-1.0])} for _ in part]
        return SimpleNamespace(result=lambda: ForwardBackwardOutput(outputs, {"loss:sum": 0.0}))

    step = SimpleNamespace(result=lambda: SimpleNamespace(metrics={"grad_norm": 0.0}))
    policy = SeparateCalls(forward_backward=noted, forward=noted, optim_step=lambda params: step)
    method = make_method("ppo", **FLAT, epochs=2, num_substeps=3, batch_size=12)

    def order(batch, seed):
        seen.clear()
        method.update(Models(policy), datums, Progress(batch, 5, seed))
        # excludes the call with the whole batch after each epoch
        return [part for part in seen if len(part) < 12]

    first = order(0, 1)
    assert [len(part) for part in first] == [4] * 6 and sorted(sum(first[:3], [])) == sorted(
        sum(first[3:], [])
    ) == list(range(12))
    assert order(0, 1) == first and first[:3] != first[3:]
    assert order(0, 2) != first and order(1, 1) != first
    with_settings = SimpleNamespace(settings=PpoSettings(loop=LoopSettings(steps=9)))
    trainer = Trainer(
        name="ppo", index=2, method=with_settings, models=None, problems=None, test_problems=None,
        renderer=None, scorer=None, run_seed=77, first_step=0, logbook=None, console=None,
        checkpoints=None, stop_request=None,
    )  # fmt: skip
    assert trainer.progress(3) == Progress(3, 9, derive_seed(77, 2))


def test_epochs_end_where_the_policy_is_target_kl_away(service):
    counts = {}
    for target in (None, 1e-6, 1e3):
        method = make_method("ppo", **FLAT, learning_rate=3e-3, num_substeps=2, batch_size=8,
                             kl_coef=0.3, target_kl=target, truncated="end")  # fmt: skip
        policy = service.create_full_training_client("tiny:addition", seed=2, value_head=True)
        factory = StageModelFactory(service, policy, ModelSettings(), None, {}, 2)
        models = Models(policy, {"reference": factory.initial_policy()})
        datums = method.compute_advantages(sampled_groups(policy), models)
        metrics = method.update(models, datums, Progress(0, 5))
        counts[target] = (metrics["optim/epochs"], metrics["optim/substeps"])
        assert metrics["optim/max_logprob_difference"] < 1e-4
        after = policy.forward(datums, "importance_sampling", {"temperature": 0.8}).result()
        gaps = compute_logprob_gaps(datums, [o["logprobs"].array for o in after.loss_fn_outputs])
        truth = compute_kl_metrics(datums, gaps, "optim/approx_kl")
        # at the current weights, not the earlier ones
        assert {k: metrics[k] for k in truth} == truth
        assert truth["optim/approx_kl_k3"] > 1e-4
    assert counts == {None: (4, 8), 1e-6: (1, 2), 1e3: (4, 8)}


def whole_sequence(datum):
    """Return the datum with shifted inputs as targets, as in a sampled sequence."""
    targets = [*datum.model_input.to_ints()[1:], 7]
    return Datum(datum.model_input, {**datum.loss_fn_inputs, "target_tokens": targets})


@pytest.mark.parametrize("rank", [0, 4])
def test_the_reference_stays_what_it_was(service, rank):
    """The reference is unchanged when the policy's weights are replaced, and when it is rebuilt as
    in a resumed run.
    """

    def score(client):
        scored = client.forward(datums, "importance_sampling", {"temperature": 0.8}).result()
        return np.concatenate([o["logprobs"].array for o in scored.loss_fn_outputs])

    model = ModelSettings(lora_rank=rank)
    policy = make_policy(service, model, None, None, 7, value_head=True)
    hosts = StageModelFactory(service, policy, model, None, {}, 7)
    reference = hosts.initial_policy()
    datums = [whole_sequence(d) for d in random_datums(3)]
    first = np.concatenate(reference.logprobs(datums, 0.8))
    np.testing.assert_allclose(first, score(policy), atol=1e-5)
    for _ in range(3):
        policy.forward_backward(datums, "importance_sampling").result()
        policy.optim_step(AdamParams(1e-2)).result()
    path = policy.save_state("here").result().path
    assert np.abs(score(policy) - first).max() > 0.01
    resumed = make_policy(service, model, None, path, 7)
    rebuilt = StageModelFactory(service, resumed, model, None, {}, 7, path).initial_policy()
    for scorer in (reference, rebuilt):
        np.testing.assert_array_equal(np.concatenate(scorer.logprobs(datums, 0.8)), first)
