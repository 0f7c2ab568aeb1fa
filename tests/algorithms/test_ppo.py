"""PPO: advantages against float64 brute force (holes, cut-off episodes, several datums), KL in the
reward, epochs, critic, resume.
"""

import dataclasses
import itertools
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import random_datums

from rl import ServiceClient
from rl.algorithms import (
    PPO,
    AdaptiveKL,
    Models,
    PpoOptions,
    PpoSettings,
    Progress,
    apply_kl_penalty,
    compute_gae,
    compute_kl_metrics,
    compute_logprob_gaps,
)
from rl.algorithms.ppo import summarize_epochs
from rl.algorithms.update import UpdateSums
from rl.config import (
    KlSettings,
    LoopSettings,
    ModelSettings,
    OptimSettings,
    SamplingSettings,
    ShapingSettings,
)
from rl.rollout import Trajectory, TrajectoryGroup, Transition
from rl.seed import derive_seed
from rl.trainer.stage_context import StageContext
from rl.trainer.stage_models import StageModelFactory, make_policy
from rl.trainer.trainer import Trainer
from rl.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    SampledSequence,
    SamplingParams,
    TensorData,
)

REPO = Path(__file__).resolve().parents[2]


# ----------------------------------------------------------------------------------- pure functions


def brute_force(rewards, values, gamma, lam, bootstrap):
    """sum_l (gamma lam)^l delta_{t+l}, each sum written out."""
    n = len(rewards)
    after = [*values[1:], bootstrap]
    delta = [rewards[t] + gamma * after[t] - values[t] for t in range(n)]
    return [math.fsum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]


@pytest.mark.parametrize(
    ("gamma", "lam", "bootstrap"),
    [(1.0, 0.95, 0.0), (0.9, 0.8, 1.7), (1.0, 1.0, 0.0), (0.97, 0.0, -0.5)],
)
def test_token_advantages_are_the_written_out_sums(gamma, lam, bootstrap):
    rng = np.random.default_rng(0)
    rewards, values = rng.standard_normal(17), rng.standard_normal(17)
    found = compute_gae(rewards, values, gamma=gamma, lam=lam, bootstrap=bootstrap)
    np.testing.assert_allclose(
        found, brute_force(rewards, values, gamma, lam, bootstrap), rtol=0, atol=1e-12
    )
    if gamma == lam == 1:
        np.testing.assert_allclose(found, rewards[::-1].cumsum()[::-1] - values, atol=1e-6)


def datum(logprobs, mask, advantages=None):
    n = len(mask)
    fields = {
        "target_tokens": [1] * n,
        "logprobs": logprobs,
        "mask": mask,
        "advantages": advantages or [0.0] * n,
    }
    return Datum(ModelInput.from_ints([1] * n), fields)


def test_penalty_by_hand():
    datums = [
        datum([0.0, -1.0, -2.0], [0.0, 1.0, 1.0], [0.0, 0.5, 0.5]),
        datum([-3.0, 0.0], [1.0, 0.0]),
    ]
    ref = [np.array([9.0, -1.5, -1.0]), np.array([-2.0, 9.0])]
    # g at actions: 0.5, -1.0, -1.0; their mean -0.5
    assert [g.tolist() for g in compute_logprob_gaps(datums, ref)] == [
        [0.0, 0.5, -1.0],
        [-1.0, 0.0],
    ]
    plain, metrics = apply_kl_penalty(datums, ref, 0.1)
    np.testing.assert_allclose(
        plain[0].loss_fn_inputs["advantages"].array, [0.0, 0.5 - 0.1, 0.5 + 0.05], atol=1e-7
    )
    np.testing.assert_allclose(plain[1].loss_fn_inputs["advantages"].array, [0.05, 0.0], atol=1e-7)
    later, _ = apply_kl_penalty(datums, ref, 0.1, discount=0.5)
    # with half of what comes later: 0, -1.0, -1.0; their mean -2/3
    np.testing.assert_allclose(
        later[0].loss_fn_inputs["advantages"].array, [0.0, 0.5 - 0.2 / 3, 0.5 + 0.1 / 3], atol=1e-7
    )
    np.testing.assert_allclose(
        later[1].loss_fn_inputs["advantages"].array, [0.1 / 3, 0.0], atol=1e-7
    )
    assert metrics["optim/kl_ref_k1"] == pytest.approx(-0.5)
    k3 = [math.exp(-g) - 1 + g for g in (0.5, -1.0, -1.0)]
    assert metrics["optim/kl_ref_k3"] == pytest.approx(sum(k3) / 3)


def test_a_penalty_with_full_discount_has_the_gradient_of_the_kl_of_answers():
    """Enumerated over all answers of one to three tokens, of which the third token ends one: -grad
    KL(policy || ref).
    """
    answers = [
        q
        for n in (1, 2, 3)
        for q in itertools.product(range(3), repeat=n)
        if 2 not in q[:-1] and (q[-1] == 2 or n == 3)
    ]
    states = {q[:i]: 0 for q in answers for i in range(len(q))}
    rows = {state: i for i, state in enumerate(states)}
    torch.manual_seed(2)
    logits = torch.randn(len(rows), 3, dtype=torch.float64, requires_grad=True)
    logp, ref = (
        torch.log_softmax(logits, -1),
        torch.log_softmax(torch.randn(len(rows), 3, dtype=torch.float64), -1),
    )
    lp, ref_lp = (
        [torch.stack([table[rows[q[:i]], token] for i, token in enumerate(q)]) for q in answers]
        for table in (logp, ref)
    )
    chances = [one.sum().exp() for one in lp]
    assert float(sum(chances).detach()) == pytest.approx(1.0)
    (truth,) = torch.autograd.grad(
        sum(p * (a - b).sum() for p, a, b in zip(chances, lp, ref_lp, strict=True)),
        logits,
        retain_graph=True,
    )
    datums = [datum(one.tolist(), [1.0] * len(one)) for one in lp]
    for discount, right in ((1.0, True), (0.0, False)):
        credited, _ = apply_kl_penalty(datums, [one.numpy() for one in ref_lp], 1.0, discount)
        credits = [one.loss_fn_inputs["advantages"].to_torch().double() for one in credited]
        loss = -sum(
            p.detach() * (credit * one).sum()
            for p, credit, one in zip(chances, credits, lp, strict=True)
        )
        (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
        assert torch.allclose(found, truth, atol=1e-6) == right


def test_the_adaptive_coefficient():
    control = AdaptiveKL(0.0, 0.1)
    control.update(0.05)
    assert control.needs_reference and control.coefficient == 0.0
    control.update(1.0)
    assert control.coefficient == pytest.approx(AdaptiveKL.MIN_COEFFICIENT * 1.02)  # leaves zero
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


class Values:
    """Stands for a client: a value for each prefix, from its tokens alone."""

    def compute_values(self, inputs):
        found = [
            np.cumsum(np.sin(np.asarray(one.to_ints(), dtype=np.float64))).astype(np.float32)
            for one in inputs
        ]
        return dataclasses.make_dataclass(
            "Future", ["value", ("result", object, dataclasses.field(default=None))]
        )(found, lambda: found)


class Reference:
    def logprobs(self, datums, temperature):
        assert temperature == 0.8
        return [
            -0.1 * np.asarray(d.loss_fn_inputs["target_tokens"].array, dtype=np.float32)
            for d in datums
        ]


def episode(turns, rewards, stop="stop", truncated=False):
    transitions = []
    for (ob, ac), reward in zip(turns, rewards, strict=True):
        action = SampledSequence(ac, [-0.2 * t for t in ac], stop)
        transitions.append(Transition(ModelInput.from_ints(ob), action, reward, False))
    transitions[-1].truncated = truncated
    return Trajectory(transitions)


EPISODES = [
    # a hole between two actions
    episode([([1, 2], [3, 4]), ([1, 2, 3, 4, 9, 9], [5])], [0.5, 1.0]),
    # the second turn forgets the first: two datums
    episode([([1, 2], [3, 4]), ([1, 7], [5, 6])], [0.25, -1.0]),
    episode([([2, 2, 2], [8, 8, 8])], [0.0], stop="length"),
    # by the environment, after an answer that ended
    episode([([4], [1]), ([4, 1, 6], [2, 5])], [0.5, 0.0], truncated=True),
]
CUT = [False, False, True, True]
FINAL = [0.0, 2.0, 0.125, 0.0]


def settings(**changes) -> PpoSettings:
    options = {
        "normalise_advantages": False, "gamma": 0.9, "gae_lambda": 0.7, **changes.pop("ppo", {}),
    }  # fmt: skip
    kl = {"kl_coef": 0.3, **changes.pop("kl", {})}
    return PpoSettings(
        ppo=PpoOptions(**options),
        kl=KlSettings(**kl),
        sampling=SamplingSettings(max_tokens=3, temperature=0.8),
        **changes,
    )


def expected(trajectory, final, coef, cut):
    """Advantages and values by walking the episode turn by turn, action by action."""
    rewards, values = [], []
    for turn in trajectory.transitions:
        read = turn.ob.to_ints()
        for token, q in zip(turn.ac.tokens, turn.ac.logprobs, strict=True):
            values.append(sum(math.sin(t) for t in read))
            rewards.append(-coef * (q - -0.1 * token))
            read = [*read, token]
        rewards[-1] += turn.reward
    rewards[-1] += final
    return brute_force(
        rewards, values, 0.9, 0.7, sum(math.sin(t) for t in read) if cut else 0.0
    ), values


@pytest.mark.parametrize("truncated", ["bootstrap", "end"])
@pytest.mark.parametrize(
    "kl", [{"kl_placement": "reward"}, {"kl_placement": "loss"}, {"kl_coef": 0.0}]
)
def test_credit_by_walking_the_episodes(truncated, kl):
    method = PPO(settings(ppo={"truncated": truncated}, kl=kl))
    models = Models(Values(), {"reference": Reference()})
    datums = method.compute_advantages([TrajectoryGroup(EPISODES, list(FINAL), [{}] * 4)], models)
    assert len(datums) == 5  # the second episode makes two
    charged = 0.3 if kl == {"kl_placement": "reward"} else 0.0
    advantages, values = [], []
    for trajectory, final, cut in zip(EPISODES, FINAL, CUT, strict=True):
        a, v = expected(trajectory, final, charged, cut and truncated == "bootstrap")
        advantages, values = advantages + a, values + v
        assert trajectory.advantage == pytest.approx(np.mean(a), abs=1e-5)
    masks = np.concatenate([d.loss_fn_inputs["mask"].array for d in datums]) != 0
    fields = {
        name: np.concatenate([d.loss_fn_inputs[name].array for d in datums])
        for name in ("advantages", "returns", "values_old")
    }
    np.testing.assert_allclose(fields["advantages"][masks], advantages, atol=1e-5)
    np.testing.assert_allclose(fields["values_old"][masks], values, atol=1e-5)
    np.testing.assert_allclose(fields["returns"][masks], np.add(advantages, values), atol=1e-5)
    assert not any(field[~masks].any() for field in fields.values())
    assert all(
        ("ref_logprobs" in d.loss_fn_inputs) == (kl == {"kl_placement": "loss"}) for d in datums
    )


@pytest.mark.parametrize("truncated", ["bootstrap", "end"])
def test_credit_follows_the_turns_of_two_conversations(truncated):
    """The third turn goes on with the first conversation, so the first datum holds turns 0 and 2
    and the second turn 1.
    """
    trajectory = episode(
        [([1, 2], [3, 4]), ([6, 7], [5, 9, 3]), ([1, 2, 3, 4, 9], [8, 2])],
        [0.5, -1.0, 2.0],
        stop="length",
    )
    method = PPO(settings(ppo={"truncated": truncated}))
    datums = method.compute_advantages(
        [TrajectoryGroup([trajectory], [0.25], [{}])], Models(Values(), {"reference": Reference()})
    )
    advantages, values = expected(trajectory, 0.25, 0.3, truncated == "bootstrap")
    order = [0, 1, 5, 6, 2, 3, 4]
    masks = np.concatenate([d.loss_fn_inputs["mask"].array for d in datums]) != 0
    for name, wanted in (
        ("advantages", advantages),
        ("values_old", values),
        ("returns", np.add(advantages, values)),
    ):
        found = np.concatenate([d.loss_fn_inputs[name].array for d in datums])[masks]
        np.testing.assert_allclose(found, np.array(wanted)[order], atol=1e-5, err_msg=name)


def test_a_minibatch_that_a_correction_leaves_empty_adds_nothing_to_the_means():
    totals = UpdateSums(AdamParams(learning_rate=1e-3))
    for loss in (6.0, 0.0):
        totals.add_sums({"loss:sum": loss, "policy_loss:sum": loss})
    totals.epochs = 1
    datums = [datum([-1.0] * 3, [1.0] * 3), datum([-1.0] * 3, [0.0] * 3)]
    metrics = summarize_epochs(totals, datums)
    assert metrics["optim/policy_loss"] == metrics["optim/loss"] == 2.0


def test_normalised_advantages_have_mean_0_and_std_1_over_actions():
    plain, scaled = (
        PPO(settings(ppo={"normalise_advantages": on})).compute_advantages(
            [TrajectoryGroup(EPISODES, list(FINAL), [{}] * 4)],
            Models(Values(), {"reference": Reference()}),
        )
        for on in (False, True)
    )
    masks = np.concatenate([d.loss_fn_inputs["mask"].array for d in plain]) != 0
    before, after = (
        np.concatenate([d.loss_fn_inputs["advantages"].array for d in datums])[masks]
        for datums in (plain, scaled)
    )
    np.testing.assert_allclose(after, (before - before.mean()) / before.std(), atol=1e-5)


def test_rewards_are_scaled_by_running_statistics():
    method = PPO(settings(shaping=ShapingSettings(normalise_rewards=True), kl={"kl_coef": 0.0}))
    groups = method.shape_rewards([TrajectoryGroup(EPISODES, list(FINAL), [{}] * 4)])
    method.compute_advantages(groups, Models(Values()))
    totals = [1.5, 1.25, 0.125, 0.5]
    assert method.state()["reward_statistics"] == pytest.approx(
        {"count": 4, "mean": np.mean(totals), "m2": 4 * np.var(totals)}
    )
    assert method.shaper.metrics["reward/running_std"] == pytest.approx(np.std(totals))


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


def learn_once(service, critic=False, reference=True, **ppo):
    changed = {
        "optim": OptimSettings(learning_rate=3e-3, num_substeps=2),
        "loop": LoopSettings(steps=5, batch_size=8),
    }
    method = PPO(
        settings(
            ppo={"truncated": "end", **ppo}, kl={} if reference else {"kl_coef": 0.0}, **changed
        )
    )
    policy = service.create_full_training_client("tiny:addition", seed=2, value_head=not critic)
    others = (
        {
            "reference": StageModelFactory(
                service, policy, ModelSettings(), None, {}, 2
            ).initial_policy()
        }
        if reference
        else {}
    )
    if critic:
        others["critic"] = service.create_full_training_client(
            "tiny:addition", seed=5, value_head=True
        )
    models = Models(policy, others)
    datums = method.compute_advantages(sampled_groups(policy), models)
    before = (models.critic or policy).compute_values([d.model_input for d in datums]).result()
    metrics = method.update(models, datums, Progress(0, 5))
    return method, models, datums, metrics, before


def test_minibatches_are_dealt_out_by_the_runs_seed():
    """The order of datums over an epoch's minibatches, as a policy that only takes notes sees it."""
    seen: list[list[int]] = []
    datums = [datum([-1.0], [1.0], [1.0]) for _ in range(12)]

    def noted(part, *_, **__):
        seen.append([next(i for i, one in enumerate(datums) if one is d) for d in part])
        outputs = [{"logprobs": TensorData([-1.0])} for _ in part]
        return SimpleNamespace(result=lambda: ForwardBackwardOutput(outputs, {"loss:sum": 0.0}))

    step = SimpleNamespace(result=lambda: SimpleNamespace(metrics={"grad_norm": 0.0}))
    policy = SimpleNamespace(forward_backward=noted, forward=noted, optim_step=lambda params: step)
    method = PPO(
        settings(
            ppo={"epochs": 2},
            optim=OptimSettings(num_substeps=3),
            loop=LoopSettings(steps=5, batch_size=12),
        )
    )

    def order(batch, seed):
        seen.clear()
        method.update(Models(policy), datums, Progress(batch, 5, seed))
        # without the whole batch, after each epoch
        return [part for part in seen if len(part) < 12]

    first = order(0, 1)
    assert [len(part) for part in first] == [4] * 6 and sorted(sum(first[:3], [])) == sorted(
        sum(first[3:], [])
    ) == list(range(12))
    assert order(0, 1) == first and first[:3] != first[3:]
    assert order(0, 2) != first and order(1, 1) != first
    with_settings = SimpleNamespace(settings=settings(loop=LoopSettings(steps=9)))
    context = StageContext(
        name="ppo",
        index=2,
        method=with_settings,
        models=None,
        problems=None,
        test_problems=None,
        renderer=None,
        scorer=None,
        run_seed=77,
        first_step=0,
        logbook=None,
        console=None,
        checkpoints=None,
    )
    assert Trainer(context, stop_request=None).progress(3) == Progress(3, 9, derive_seed(77, 2))


def test_epochs_end_where_the_policy_is_target_kl_away(service):
    counts = {}
    for target in (None, 1e-6, 1e3):
        method, models, datums, metrics, _ = learn_once(service, target_kl=target)
        counts[target] = (metrics["optim/epochs"], metrics["optim/substeps"])
        after = (
            models.policy.forward(datums, "importance_sampling", {"temperature": 0.8})
            .result()
            .loss_fn_outputs
        )
        truth = compute_kl_metrics(
            datums,
            compute_logprob_gaps(datums, [o["logprobs"].array for o in after]),
            "optim/approx_kl",
        )
        # of the weights as they are now, not as they were
        assert {k: metrics[k] for k in truth} == truth
        assert truth["optim/approx_kl_k3"] > 1e-4
    assert counts == {None: (4, 8), 1e-6: (1, 2), 1e3: (4, 8)}


def test_sampler_and_learner_agree_and_everything_is_reported(service):
    _, _, _, metrics, _ = learn_once(service)
    assert metrics["optim/max_logprob_difference"] < 1e-4
    wanted = """optim/lr optim/policy_loss optim/value_loss optim/policy_entropy optim/clip_frac optim/value_clip_frac optim/grad_norm
        optim/approx_kl_k1 optim/approx_kl_k3 optim/kl_ref_k1 optim/kl_ref_k3 optim/kl_coef optim/explained_variance""".split()
    assert [name for name in wanted if name not in metrics] == []


def test_a_critic_learns_beside_a_policy_without_a_head(service):
    _, models, datums, metrics, before = learn_once(
        service, critic=True, reference=False, critic_model="policy", critic_learning_rate=1e-3
    )
    assert not models.policy.info["value_head"] and metrics["optim/critic_grad_norm"] > 0
    inputs = [d.model_input for d in datums]
    after = models.critic.compute_values(inputs).result()

    def error(values_D):
        gaps_D = [
            (v - d.loss_fn_inputs["returns"].array) * d.loss_fn_inputs["mask"].array
            for v, d in zip(values_D, datums, strict=True)
        ]
        return sum(float((gap_T**2).sum()) for gap_T in gaps_D)

    assert error(after) < 0.9 * error(before)


def whole_sequence(datum):
    """Its targets are its inputs shifted by one, as those of a sampled sequence are."""
    targets = [*datum.model_input.to_ints()[1:], 7]
    return Datum(datum.model_input, {**datum.loss_fn_inputs, "target_tokens": targets})


@pytest.mark.parametrize("rank", [0, 4])
def test_the_reference_stays_what_it_was(service, rank):
    """While the policy's weights are replaced, and made again as a resumed run does."""
    model = ModelSettings(lora_rank=rank)
    policy = make_policy(service, model, None, None, 7, value_head=True)
    hosts = StageModelFactory(service, policy, model, None, {}, 7)
    reference = hosts.initial_policy()
    datums = [whole_sequence(d) for d in random_datums(3)]
    first = reference.logprobs(datums, 0.8)
    own = (
        policy.forward(datums, "importance_sampling", {"temperature": 0.8}).result().loss_fn_outputs
    )
    np.testing.assert_allclose(
        np.concatenate(first), np.concatenate([o["logprobs"].array for o in own]), atol=1e-5
    )
    for _ in range(3):
        policy.forward_backward(datums, "importance_sampling").result()
        policy.optim_step(AdamParams(1e-2)).result()
    path = policy.save_state("here").result().path
    moved = (
        policy.forward(datums, "importance_sampling", {"temperature": 0.8}).result().loss_fn_outputs
    )
    assert (
        np.abs(np.concatenate([o["logprobs"].array for o in moved]) - np.concatenate(first)).max()
        > 0.01
    )
    resumed = make_policy(service, model, None, path, 7)
    for scorer in (
        reference,
        StageModelFactory(service, resumed, model, None, {}, 7, path).initial_policy(),
    ):
        np.testing.assert_array_equal(
            np.concatenate(scorer.logprobs(datums, 0.8)), np.concatenate(first)
        )
