"""Test online_dpo and best_of_n: choice of answers, loss and gradient in float64, whole runs."""

import copy

import pytest
import torch
from algorithm_helpers import LocalPolicy, make_method
from helpers import make_worker
from learning import check_figure
from whole_runs import train

from rl.algorithms import Models, Progress
from rl.algorithms.best_of_n import SelectionSettings, select_best
from rl.algorithms.online_dpo import OnlinePreferenceSettings, make_pairs
from rl.errors import UserError
from rl.rollout import Trajectory, TrajectoryGroup, Transition
from rl.types import ModelInput, SampledSequence

TEMPERATURE = 0.7
PROMPTS = [[3, 4, 12], [5, 12, 6, 13]]
ANSWERS = [[[3, 1], [4, 5, 1], [6, 1]], [[7, 8, 1], [9, 1], [2, 2, 2, 1]]]


def groups(rewards_P_G):
    results = []
    for p, rewards_G in enumerate(rewards_P_G):
        members, ask = [], ModelInput.from_ints(PROMPTS[p])
        for answer, reward in zip(ANSWERS[p], rewards_G, strict=True):
            drawn = SampledSequence(list(answer), [-2.5] * len(answer), temperature=TEMPERATURE)
            members.append(Trajectory([Transition(ask, drawn, reward, True)]))
        results.append(TrajectoryGroup(members, [0.0] * 3, [{}] * 3, problem_index=p))
    return results


class Reference:
    """Another model's logprobs, with the interface of a scorer."""

    def __init__(self):
        self.worker = make_worker(seed=2)

    def logprobs(self, datums, temperature=1.0):
        results = []
        for datum in datums:
            targets = torch.from_numpy(datum.loss_fn_inputs["target_tokens"].array).long()
            logp = every_logprob(self.worker, datum.model_input.to_ints(), temperature)
            results.append(logp.gather(1, targets[:, None])[:, 0].numpy())
        return results


def every_logprob(worker, tokens, temperature):
    model = copy.deepcopy(worker.learners[0].model).double()
    with torch.no_grad():
        return (model(input_ids=torch.tensor([tokens])).logits[0] / temperature).log_softmax(-1)


def compute_answer_logprob(model, p, i):
    """Return log p of an answer, in float64, attached to the graph."""
    tokens = [*PROMPTS[p], *ANSWERS[p][i]]
    logp = (model(input_ids=torch.tensor([tokens[:-1]])).logits[0] / TEMPERATURE).log_softmax(-1)
    start = len(PROMPTS[p]) - 1
    return logp[start:].gather(1, torch.tensor(tokens[start + 1 :])[:, None]).sum()


def gradients(model, value):
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(value, list(model.parameters()))])


def moved_by(policy):
    """Return the gradient according to AdamW's first moment, from the worker."""
    learner = policy.worker.learners[0]
    tensors = learner.backend.optimizer_tensors()
    return torch.cat(
        [tensors[f"{name}/exp_avg"].reshape(-1) for name in learner.trainable]
    ).double()


ASKED = {"group_size": 3, "temperature": TEMPERATURE, "max_tokens": 8}
LOOK = {**ASKED, "learning_rate": 1e-30, "beta1": 0.0, "grad_clip_norm": 0.0}


@pytest.mark.parametrize(
    ("loss", "pairs"), [("dpo", "best_worst"), ("ipo", "best_worst"), ("dpo", "all")]
)
def test_online_dpo_is_dpos_loss_on_the_better_and_the_worse_answer(loss, pairs):
    policy, reference = LocalPolicy(), Reference()
    options = {"loss": loss, "pairs": pairs, "beta": 0.3, "length_normalise": False}
    method = make_method("online_dpo", **options, **LOOK)
    models = Models(policy, {"reference": reference})
    rewards = [[0.0, 1.0, 0.25], [0.5, 0.5, 0.5]]
    datums = method.compute_advantages(groups(rewards), models)
    expected_pairs = {"best_worst": [(0, 1, 0)], "all": [(0, 1, 0), (0, 1, 2), (0, 2, 0)]}[pairs]
    model, other = (
        copy.deepcopy(item.learners[0].model).double() for item in (policy.worker, reference.worker)
    )
    total = torch.zeros((), dtype=torch.float64)
    for p, best, worst in expected_pairs:
        chosen, rejected = (
            compute_answer_logprob(model, p, i) - compute_answer_logprob(other, p, i).detach()
            for i in (best, worst)
        )
        delta = chosen - rejected
        by_dpo = -torch.nn.functional.logsigmoid(0.3 * delta)
        total = total + (by_dpo if loss == "dpo" else (delta - 1 / 0.6) ** 2)
    total = total / len(expected_pairs)
    metrics = method.update(models, datums, Progress(0, 1))
    assert metrics["optim/pairs"] == len(expected_pairs)
    assert metrics["optim/loss"] == pytest.approx(float(total), rel=1e-5)
    expected = gradients(model, total)
    assert float((moved_by(policy) - expected).norm() / expected.norm()) < 1e-5
    assert metrics["optim/kl_sample_train_v2"] > 0  # the sampler's logprobs are made up here


def test_best_of_n_is_the_mean_of_the_best_answers_tokens():
    policy, method = LocalPolicy(), make_method("best_of_n", **LOOK)
    datums = method.compute_advantages(groups([[0.0, 1.0, 1.0], [0.2, 0.1, 0.3]]), Models(policy))
    model = copy.deepcopy(policy.worker.learners[0].model).double()
    total = -(compute_answer_logprob(model, 0, 1) + compute_answer_logprob(model, 1, 2)) / (3 + 4)
    metrics = method.update(Models(policy), datums, Progress(0, 1))
    assert metrics["optim/loss"] == pytest.approx(float(total), rel=1e-5)
    assert metrics["optim/answers_kept"] == 2 and metrics["reward/kept"] == pytest.approx(0.65)
    expected = gradients(model, total)
    assert float((moved_by(policy) - expected).norm() / expected.norm()) < 1e-5


def test_which_answers_are_chosen_by_hand():
    assert make_pairs([1.0, 3.0, 2.0, 1.0], "best_worst") == [(1, 0)]
    assert make_pairs([1.0, 3.0, 1.0], "all") == [(1, 0), (1, 2)]
    assert make_pairs([2.0, 2.0], "best_worst") == make_pairs([2.0, 2.0], "all") == []
    assert select_best([0.0, 2.0, 1.0, 2.0], SelectionSettings(group_size=4)) == [1]
    assert select_best([0.0, 2.0, 1.0, 2.0], SelectionSettings(group_size=4, keep=3)) == [1, 3, 2]
    assert select_best([1.0, 1.0], SelectionSettings(group_size=2)) == []
    assert select_best([1.0, 1.0], SelectionSettings(group_size=2, min_reward=1.0)) == [0]
    assert select_best([0.0, 0.5], SelectionSettings(group_size=2, min_reward=1.0)) == []
    for wrong in (dict(keep=4, group_size=4), dict(keep=9)):
        with pytest.raises(ValueError, match="all of them"):
            SelectionSettings(**wrong)
    with pytest.raises(ValueError, match="leave out precompute_reference"):
        OnlinePreferenceSettings(precompute_reference=True)


@pytest.mark.parametrize("name", ["online_dpo", "best_of_n"])
def test_answers_that_all_earn_the_same_move_no_weight(name):
    policy = LocalPolicy()
    method = make_method(name, **ASKED, learning_rate=1e-2, weight_decay=0.1)
    models = Models(policy, {"reference": Reference()})

    def learn(rewards, batch):
        datums = method.compute_advantages(groups(rewards), models)
        return method.update(models, datums, Progress(batch, 2))

    learn([[0.0, 1.0, 0.5], [0.0, 0.0, 1.0]], 0)
    before = policy.weights()
    metrics = learn([[1.0] * 3, [0.0] * 3], 1)
    assert torch.equal(policy.weights(), before) and metrics["optim/skipped_no_signal"] == 1
    assert metrics["optim/grad_norm"] == 0.0  # AdamW's moments hear of no preference either
    assert policy.worker.learners[0].version == 2


def test_an_episode_of_several_sequences_is_refused_by_online_dpo():
    (group, *_) = groups([[0.0, 1.0, 0.5], [0.0] * 3])
    action = SampledSequence([3, 1], [-1.0] * 2, temperature=TEMPERATURE)
    again = Transition(ModelInput.from_ints([9, 9]), action, 0.0, True)
    group.trajectories_G[1].transitions.append(again)
    method = make_method("online_dpo", group_size=3, reference_free=True)
    with pytest.raises(UserError, match="a single sequence of tokens"):
        method.compute_advantages([group], Models(LocalPolicy()))


def test_online_dpo_samples_answers_to_held_out_problems(tmp_path):
    path = tmp_path / "sums.jsonl"  # answers, but no pairs of answers
    path.write_text("".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(8)))
    data = f"--dataset {path} --eval-dataset {path} --reward exact_match"
    options = "--steps 1 --batch-size 2 --max-tokens 3 --eval-every 1 --eval-limit 2 --save-every 0"
    rows = train(f"online_dpo {data} {options}", tmp_path / "run")
    assert "test/env/all/reward/total" in rows[-1]


@pytest.fixture(scope="module")
def careless_policy(tmp_path_factory):
    """Train a policy on sums with noisy answers."""
    folder = tmp_path_factory.mktemp("careless") / "sft"
    options = (
        "--steps 700 --batch-size 128 --learning-rate 4e-3 --schedule cosine --warmup-steps 20 "
        "--beta2 0.99 --eval-every 0 --save-every 0"
    )
    train(f"sft --dataset addition:noise=0.7,from=8 {options}", folder)
    return folder


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize(("name", "words"), [("online_dpo", "--beta 0.05"), ("best_of_n", "")])
def test_addition_is_learnt_from_ones_own_answers(name, words, careless_policy, tmp_path):
    often = (
        "--dataset addition --reward exact_match --max-tokens 4 --temperature 1.0 --steps 40 "
        "--batch-size 48 --group-size 6 --learning-rate 1e-3 --eval-every 40 --eval-limit 256 "
        "--save-every 0 --rollouts-every 0"
    )
    rows = train(f"{name} --base-model {careless_policy} {often} {words}", tmp_path / name)
    held_out = [row["test/env/all/correct"] for row in rows if "test/env/all/correct" in row]
    check_figure(f"{name}: gain in held-out accuracy", held_out[-1] - held_out[0], above=0.15)
