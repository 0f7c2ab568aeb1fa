"""Test reward models and RLHF: losses, calibration by hand, models in the loop, controls."""

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import learning
import numpy as np
import pytest
import torch
from helpers import ADAM, VOCABULARY, call, compute_relative_difference, gradient, make_worker
from safetensors.torch import load_file, save_file
from test_dpo import largest_digit_pairs
from whole_runs import final_weights, train

from rl import ServiceClient
from rl.algorithms import METHODS
from rl.algorithms.reward_model import (
    compute_preference_metrics,
    make_comparison_pair,
    make_scored_pair,
)
from rl.config import RunSettings, cli
from rl.data import addition
from rl.distributed import checkpoint_folder
from rl.envs import ProblemGroupBuilder
from rl.errors import UserError
from rl.judges import (
    AnswerComparison,
    ComparisonModel,
    LearnedRewards,
    PairwiseJudge,
    RewardModel,
    Rubric,
    RubricQuestion,
    make_comparison_prompt,
    swap_answers,
)
from rl.judges.comparison_judge import VERDICT_LABELS, ComparisonVerdict
from rl.judges.rubric_judge import make_rubric_prompt
from rl.learner.packing import LAYOUTS
from rl.losses import get_loss
from rl.rollout import Trajectory, TrajectoryGroup, Transition, compute_calibration_error
from rl.trainer import make_renderer
from rl.trainer.initial_weights import check_initial_weights, find_previous_stage
from rl.types import Datum, ModelInput, Problem, SampledSequence

# ----------------------------------------------------------------------------------------- the loss


def by_hand(scores, centre):
    """Return the sum over pairs in plain float64 arithmetic, and its gradient with respect to each
    score.
    """
    total, gradients = 0.0, []
    for chosen, rejected in zip(scores[0::2], scores[1::2], strict=True):
        p = 1 / (1 + math.exp(rejected - chosen))
        both = chosen + rejected
        total += -math.log(p) + centre * both**2
        gradients += [-(1 - p) + 2 * centre * both, (1 - p) + 2 * centre * both]
    return total, gradients


@pytest.mark.parametrize("centre", [0.0, 0.3])
def test_bradley_terry_is_the_formula_at_each_last_position(centre):
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 6, 8)
    cu = np.concatenate([[0], np.cumsum(lengths)])
    values = torch.tensor(rng.standard_normal(cu[-1]) * 3, requires_grad=True)
    inputs = torch.zeros(int(cu[-1])), torch.zeros(int(cu[-1])), {"values": values}
    config = {"centre_coef": centre}
    loss, metrics = get_loss("bradley_terry").fn(*inputs, torch.from_numpy(cu), config)
    (result,) = torch.autograd.grad(loss, values)
    scores = values.detach().numpy()[cu[1:] - 1]
    expected, gradients = by_hand(scores.tolist(), centre)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    whole = np.zeros(cu[-1])
    whole[cu[1:] - 1] = gradients
    np.testing.assert_allclose(result.numpy(), whole, atol=1e-12)
    assert metrics["chosen_rewards:sum"].item() == pytest.approx(scores[0::2].sum())
    assert metrics["ranked_right:sum"].item() == (scores[0::2] > scores[1::2]).sum()


def pairs(count=6, seed=0):
    rng, datums = np.random.default_rng(seed), []
    for _ in range(count):
        prompt = rng.integers(0, VOCABULARY, rng.integers(2, 6)).tolist()
        for _ in range(2):
            tokens = [*prompt, *rng.integers(0, VOCABULARY, rng.integers(1, 8)).tolist()]
            mask = (np.arange(1, len(tokens) + 1) >= len(prompt)).astype(np.float32)
            fields = {"target_tokens": [*tokens[1:], 0], "mask": mask}
            datums.append(Datum(ModelInput.from_ints(tokens), fields))
    return datums


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_does_not_depend_on_how_pairs_are_cut(layout):
    """The gradient equals that of the model run on single sequences."""
    datums, worker = pairs(), make_worker(value_head=True)
    model, head = worker.learners[0].model, worker.learners[0].head.value_head

    def score(datum):
        read = torch.tensor([datum.model_input.to_ints()])
        return head(model(input_ids=read, output_hidden_states=True).hidden_states[-1][0])[-1]

    scores = [score(datum) for datum in datums]
    both = zip(scores[0::2], scores[1::2], strict=True)
    total = sum(-torch.log(torch.sigmoid(a - b)) for a, b in both)
    (total / 3.0).backward()
    for parameter in worker.learners[0].trainable.values():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    expected = gradient(worker).clone()
    for budget in (10_000, 1, 40):
        worker = make_worker(value_head=True, layout=layout, token_budget=budget)
        _, metrics = call(worker, "forward_backward", 0, datums, "bradley_terry", {}, 3.0, True)
        assert metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-5)
        assert compute_relative_difference(gradient(worker), expected) < 1e-5


def test_calibration_and_metrics_by_hand():
    # two bins from 0.5 to 1: {0.6, 0.7}, half of them right, and {0.8, 0.9, 1.0}, all right
    p, right = [0.6, 0.7, 0.8, 0.9, 1.0], [1, 0, 1, 1, 1]
    error = compute_calibration_error(p, right, bins=2)
    assert error == pytest.approx((abs(1 - 1.3) + abs(3 - 2.7)) / 5)
    assert compute_calibration_error([0.5] * 4, [1, 0, 1, 0]) == 0
    # P: 3/4, 1/5, 1/2
    metrics = compute_preference_metrics(np.array([math.log(3), -math.log(4), 0.0]))
    assert metrics["test/loss"] == pytest.approx(-math.log(0.75 * 0.2 * 0.5) / 3)
    assert metrics["test/rewards/accuracies"] == pytest.approx(0.5)
    # bins of 0.05: 0.75 right, 0.8 wrong, 0.5 a tie
    assert metrics["test/rewards/calibration_error"] == pytest.approx((0.25 + 0.8 + 0.0) / 3)


# ----------------------------------------------------------------------------------- pairwise judge


class Judge:
    """A sampling client with logprobs that are a function of the preceding text."""

    def __init__(self, prefers, max_context=None):
        self.prefers = prefers
        self.info = {"max_context": max_context, "base_model": "stub"}

    def compute_logprobs_many(self, inputs):
        texts = ["".join(map(chr, item.to_ints())) for item in inputs]
        return SimpleNamespace(result=lambda: [self._score(text) for text in texts])

    def _score(self, text):
        request, label = text.rsplit("\n", 1)
        first = request.split("[Answer A]\n")[1].split("\n")[0]
        second = request.split("[Answer B]\n")[1].split("\n")[0]
        logp = self.prefers(first, second)[VERDICT_LABELS.index(label.rstrip("$"))]
        return [None, *[-9.0] * (len(request)), *[logp / len(label)] * len(label)]


class Letters:
    """A renderer of characters, with "$" at the end of an answer."""

    def build_supervised_example(self, messages):
        *request, answer = (str(m["content"]) for m in messages)
        prompt, text = "".join(request), answer + "$"
        weights = [0.0] * len(prompt) + [1.0] * len(text)
        return ModelInput.from_ints([ord(c) for c in prompt + text]), weights


def test_both_orders_are_read_and_averaged():
    """P(A, B, tie) is (6, 1, 1)/8 if the longer answer comes first, else (2, 1, 1)/4."""

    def prefers(first, second):
        return np.log([6, 1, 1]) + 2.0 if len(first) > len(second) else np.log([2, 1, 1])

    item = AnswerComparison([{"role": "user", "content": "Hi?"}], "long answer", "short")
    (verdict,) = ComparisonModel(Judge(prefers), Letters()).compare([item])
    assert verdict.first == pytest.approx((6 / 8 + 1 / 4) / 2)
    assert verdict.second == pytest.approx((1 / 8 + 2 / 4) / 2)
    assert verdict.tie == pytest.approx((1 / 8 + 1 / 4) / 2) and not verdict.consistent
    (other,) = ComparisonModel(Judge(prefers), Letters()).compare([swap_answers(item)])
    swapped = verdict.second, verdict.first, verdict.tie
    assert (other.first, other.second, other.tie) == pytest.approx(swapped)


def test_a_comparison_that_exceeds_the_judges_context_is_named():
    judge = PairwiseJudge(ComparisonModel(Judge(None, max_context=40), Letters()))
    says = r"comparison model stub reads at most 40 tokens, .* has \d+: lower max_tokens, or use"
    with pytest.raises(UserError, match=says):
        judge.scores([group("a", "b")])


def group(*texts, rewards=None, finals=None):
    members = []
    for i, (text, reward) in enumerate(zip(texts, rewards or [0.0] * len(texts), strict=True)):
        action, logs = SampledSequence([5 + i, 6], [-1.0, -1.0]), {"prompt": "p", "response": text}
        turn = Transition(ModelInput.from_ints([3, 4]), action, reward, True, {}, logs)
        members.append(Trajectory([turn]))
    return TrajectoryGroup(members, list(finals or [0.0] * len(texts)), [{} for _ in texts])


def test_scores_within_a_group_are_shares_of_wins():
    def prefers(first, second):
        gap = np.clip(len(first) - len(second), -1, 1)
        return np.log([[0.2, 0.6, 0.2], [1 / 3] * 3, [0.6, 0.2, 0.2]][gap + 1])

    judge = PairwiseJudge(ComparisonModel(Judge(prefers), Letters()))
    (scores, single) = judge.scores([group("a", "bbb", "a", "cc"), group("x")])
    # a longer answer beats a shorter one 0.6 + 0.2 / 2 = 0.7 to 0.3; equal texts tie at 0.5
    assert scores == pytest.approx([1.1 / 3, 0.7, 1.1 / 3, 1.7 / 3])
    assert sum(scores) == pytest.approx(2.0) and single == [0.5]


def test_a_judge_in_the_loop_is_asked_what_the_comparison_form_is_trained_on(tmp_path):
    """A sampled answer gives the same text as a row of pairs."""
    output = [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "1+1="},
    ]  # fmt: skip
    with ServiceClient(output_dir=tmp_path) as service:
        renderer = make_renderer(service.create_sampling_client(base_model="tiny:ascii"), None)
    envs = ProblemGroupBuilder(Problem(output), 2, renderer, None).make_envs()
    sampled = [SampledSequence(renderer.encode(text), [-1.0] * len(text)) for text in ("2", "33")]
    logs = [env.step(first).logs for env, first in zip(envs, sampled, strict=True)]
    turns = [
        Transition(ModelInput.empty(), first, 0.0, True, {}, reference)
        for first, reference in zip(sampled, logs, strict=True)
    ]
    members = [Trajectory([turn]) for turn in turns]
    (asked,), _ = record_comparisons([TrajectoryGroup(members, [0.0, 0.0], [{}, {}])])
    (prompt,) = make_comparison_prompt(asked)
    trained_on = make_comparison_pair(Problem(output, response="2", rejected="33"), renderer)[0]
    shown, _ = renderer.build_supervised_example([prompt, {"role": "assistant", "content": "A"}])
    assert shown.to_ints()[:-1] == trained_on.model_input.to_ints()
    messages = "System: Be brief.\n\nUser: Hi\n\nAssistant: Yes?\n\nUser: 1+1="
    assert messages in prompt["content"]


def record_comparisons(groups, verdict=(0.5, 0.5)) -> tuple[list[AnswerComparison], list]:
    """Return what a judge is asked about these groups, and their scores."""
    asked: list[AnswerComparison] = []

    def compare(comparisons):
        asked.extend(comparisons)
        return [ComparisonVerdict(*verdict, 0.0, True) for _ in comparisons]

    return asked, PairwiseJudge(SimpleNamespace(compare=compare)).scores(groups)


def make_logged_episode(*exchange, messages=True):
    """Return an episode of (question, answer) turns, logged with or without `told`."""
    turns = []
    for request, answer in exchange:
        logs = {"prompt": request, "response": answer}
        if messages:
            logs["new_messages"] = [{"role": "user", "content": request}]
        action = SampledSequence([5], [-1.0])
        turns.append(Transition(ModelInput.empty(), action, 0.0, False, {}, logs))
    return Trajectory(turns)


def test_a_thought_that_was_cut_off_is_not_shown_to_a_judge():
    """The judge would pay for reasoning that never became an answer."""
    user = [{"role": "user", "content": "2+2?"}]
    cut, question = "<think>\nIt is four", RubricQuestion("Is it right?")
    rubric = make_rubric_prompt(user, cut, question, Rubric((question,)))[0]["content"]
    assert "[Answer]\n\n\n[Question]" in rubric
    compared = make_comparison_prompt(AnswerComparison(user, cut, "4, not <think>"))[0]["content"]
    assert "[Answer A]\n\n\n[Answer B]\n4, not <think>\n" in compared


@pytest.mark.parametrize("messages", [True, False])
def test_each_member_of_several_turns_is_judged_by_its_own_conversation(messages):
    members = [
        make_logged_episode(("2+2?", "<think>five?</think>4"), ("sure?", "yes"), messages=messages),
        make_logged_episode(("2+2?", "5"), ("really?", "no, 4"), messages=messages),
        make_logged_episode(("2+2?", "4!"), messages=messages),
    ]
    asked, scores = record_comparisons([TrajectoryGroup(members, [0.0] * 3, [{}] * 3)], (1.0, 0.0))
    both = [shown for item in asked for shown in (item, swap_answers(item))]
    seen = [str(make_comparison_prompt(shown)[0]["content"]) for shown in both]
    assert scores == [[1.0, 0.5, 0.0]]
    reference = [
        "Assistant: 4\n\nUser: sure?\n\nAssistant: yes",
        "Assistant: 5\n\nUser: really?\n\nAssistant: no, 4", "Assistant: 4!",
    ]  # fmt: skip
    form = ("[Conversation]\n2+2?\n\n[Answer A]\n{}\n\n[Answer B]\n{}\n\n"
            "Which answer is better? Say A, B or tie.\n")  # fmt: skip
    pairs = [(reference[i], reference[j]) for i, j in itertools.combinations(range(3), 2)]
    assert seen == [form.format(*pair) for a, b in pairs for pair in ((a, b), (b, a))]


def test_episodes_are_compared_from_where_they_part():
    """A shared first turn is part of the conversation."""
    members = [
        make_logged_episode(("a", first), ("c", last))
        for first, last in (("b", "d"), ("b", "e"), ("x", "d"), ("b", "d"))
    ]
    request, _ = record_comparisons([TrajectoryGroup(members, [0.0] * 4, [{}] * 4)])
    assert len(request) == 5  # the first and the last are equal
    talk = (("user", "a"), ("assistant", "b"), ("user", "c"))
    whole = [{"role": role, "content": content} for role, content in talk]
    shown = [(list(item.messages), item.first, item.second) for item in request]
    tail = "\n\nUser: c\n\nAssistant: d"
    assert shown[0] == (whole, "d", "e")
    assert shown[1] == (whole[:1], "Assistant: b" + tail, "Assistant: x" + tail)


class Scores:
    scores_single_answers = True

    def __init__(self, *scores):
        self.results = [list(s) for s in scores]

    def scores(self, groups):
        return self.results


def test_rewards_are_replaced_or_added_to_by_weight():
    groups = [group("a", "b", rewards=[1.0, 0.0], finals=[0.0, 0.5])]
    (only,) = LearnedRewards(Scores([2.0, -1.0]), 0.0).judge_groups(groups)[0]
    assert only.get_total_rewards() == [2.0, -1.0]
    (both,) = LearnedRewards(Scores([2.0, -1.0]), 0.1).judge_groups(groups)[0]
    assert both.get_total_rewards() == pytest.approx([2.1, -0.95])
    assert both.metrics_G == [
        {"reward/learned": 2.0, "reward/given": 1.0},
        {"reward/learned": -1.0, "reward/given": 0.5},
    ]
    assert groups[0].get_total_rewards() == [1.0, 0.5]  # unchanged


# --------------------------------------------------------------------------------------- whole runs


def test_a_model_in_the_loop_gives_what_it_gives_alone(tmp_path):
    with ServiceClient(output_dir=tmp_path) as service:
        client = service.create_full_training_client("tiny:addition", seed=2, value_head=True)
        renderer = make_renderer(client, None)
        rows = list(addition("train"))[:8]
        datums = [d for row in rows for d in make_scored_pair(row, renderer)]
        client.forward_backward(datums, "bradley_terry").result()
        client.optim_step(ADAM).result()
        scores = RewardModel(client, "rm", renderer).scores([group("a", "b"), group("c")])
        for g, many in enumerate((2, 1)):
            for i in range(many):
                (values,) = client.compute_values([ModelInput.from_ints([3, 4, 5 + i, 6])]).result()
                assert scores[g][i] == pytest.approx(float(values[-1]), abs=1e-6)
        assert len({round(s, 6) for s in scores[0]}) == 2


LEARNS = (
    "reward_model --steps 60 --batch-size 32 --learning-rate 1e-3 --warmup-steps 10 --schedule "
    "linear --eval-every 60 --save-every 0"
)


@pytest.mark.slow
@pytest.mark.parametrize("options", ["--lora-rank 8 --learning-rate 5e-3", "--centre-coef 0.05"])
def test_it_learns_preferences_with_a_known_answer(options, tmp_path):
    data = largest_digit_pairs(tmp_path / "pairs.jsonl")
    rows = train(f"{LEARNS} --dataset {data} {options}", tmp_path / "run")
    start, first, last = next(row for row in rows if row["step"] == 1), rows[0], rows[-1]
    assert start["optim/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert abs(rows[2]["optim/loss"] - math.log(2)) > 1e-4
    assert first["test/rewards/accuracies"] == 0.5
    learning.check_figure("pairs ranked right", last["test/rewards/accuracies"], above=0.9)
    assert last["test/loss"] < 0.5 * math.log(2) and last["test/rewards/calibration_error"] < 0.2
    if "centre" in options:
        sums = last["test/rewards/chosen"] + last["test/rewards/rejected"]
        assert abs(sums) < 0.5 * last["test/rewards/margins"]


@pytest.mark.slow
def test_swapped_labels_are_learnt_and_score_below_a_tenth(tmp_path):
    wrong = largest_digit_pairs(tmp_path / "swapped.jsonl", swapped=True)
    right = largest_digit_pairs(tmp_path / "right.jsonl")
    rows = train(f"{LEARNS} --dataset {wrong} --eval-dataset {right}", tmp_path / "run")
    assert rows[-2]["optim/loss"] < 0.5 * math.log(2)
    assert rows[-1]["test/rewards/accuracies"] < 0.1


@pytest.mark.slow
@pytest.mark.campaign
def test_the_comparison_form_learns_the_same_preferences(tmp_path):
    """Train the judge to prefer whichever of two letters it does not prefer untrained; which letter
    that is depends on its weights.
    """
    words = (
        LEARNS.replace("--steps 60", "")
        + " --form comparison --base-model tiny:ascii --eval-limit 40 --learning-rate 3e-3"
    )
    pairs_file = tmp_path / "pairs.jsonl"

    def trained(better: str, worse: str, steps: int, folder: str) -> list[dict]:
        lengths = np.random.default_rng(0).integers(1, 4, 400).tolist()
        rows = [{"prompt": "?", "chosen": better * n, "rejected": worse * n} for n in lengths]
        pairs_file.write_text("\n".join(map(json.dumps, rows)))
        return train(f"{words} --dataset {pairs_file} --steps {steps}", tmp_path / folder)

    prefers_b = trained("b", "a", 0, "untrained")[0]["test/rewards/accuracies"] > 0.5
    result = trained(*("ab" if prefers_b else "ba"), 40, "run")
    first, last = result[0], result[-1]
    check, ties = learning.check_figure, first["test/comparison/tie"]
    check("pairs ranked right at first", first["test/rewards/accuracies"], below=0.8)
    check("pairs ranked right", last["test/rewards/accuracies"], above=0.9)
    check("share of ties", last["test/comparison/tie"], below=ties)
    same = last["test/comparison/consistent"]
    check("verdicts that are the same in both orders", same, above=0.9)


def reward_model(folder: Path, *, constant: float | None = None) -> Path:
    """Train reward_model on a few pairs and return the run's folder. With `constant`, the model is
    patched to always return it.
    """
    train("reward_model --steps 2 --batch-size 8 --learning-rate 1e-2 --eval-every 0", folder)
    final = folder / "checkpoints" / "reward_model-final"
    if constant is not None:
        head = final / "value_head.safetensors"
        fill = {"bias": constant, "weight": 0.0}
        tensors = {n: torch.full_like(t, fill[n]) for n, t in load_file(str(head)).items()}
        save_file(tensors, str(head))
        checkpoint_folder._write_manifest(final, None)
    return folder


SAMPLES = "--batch-size 8 --max-tokens 4 --eval-every 0 --learning-rate 1e-2"


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        "grpo --group-size 4",
        # Every term except the reward is off. The value of an untrained head is 0, so return minus
        # value is the same at each token, and 0 after subtracting the batch mean. With lambda below
        # 1, tokens nearer to the end would get more of it.
        "rlhf --kl-coef 0 --entropy-coef 0 --value-coef 0 --gae-lambda 1 --truncated end",
    ],
)
def test_a_constant_reward_model_leaves_the_weights_bit_equal(options, tmp_path):
    """A model that is not constant changes the weights, so the control could fail."""
    words = f"{options} {SAMPLES} --reward None"
    runs = {constant: reward_model(tmp_path / f"rm-{constant}", constant=constant)
            for constant in (3.7, None)}  # fmt: skip
    train(f"{words} --steps 0 --reward-model {runs[None]}", tmp_path / "before")
    before = final_weights(tmp_path / "before")
    for constant, model in runs.items():
        folder = tmp_path / f"run-{constant}"
        rows = train(f"{words} --steps 2 --reward-model {model}", folder)
        after = final_weights(folder)
        same = all(torch.equal(before[key], after[key]) for key in before)
        assert same == (constant is not None)
        for row in rows if same else ():
            assert row["env/all/reward/learned"] == pytest.approx(3.7, abs=1e-6)
            assert row["env/all/reward/std"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "--lora-rank 4"])
def test_the_best_weights_score_as_the_model_did(options, tmp_path):
    """The last step of the run is its best, so the best weights and their head must equal the final
    checkpoint; rlhf learns from both.
    """
    often = "--steps 2 --batch-size 8 --learning-rate 1e-3 --eval-every 1 --eval-limit 16"
    train(f"reward_model {often} {options} --keep-best progress/batch", tmp_path / "rm")
    (best,) = (tmp_path / "rm" / "sampler_weights").iterdir()
    final = tmp_path / "rm" / "checkpoints" / "reward_model-final"
    assert best.name == "reward_model-best-000002" and not (best / "optimizer.safetensors").exists()
    assert load_file(str(best / "value_head.safetensors"))["weight"].any()
    with ServiceClient(output_dir=tmp_path / "service") as service:
        clients = [service.create_training_client_from_state(str(path)) for path in (best, final)]
        judges = [RewardModel(client, "rm", make_renderer(client, None)) for client in clients]
        scores = [judge.scores([group("a", "b")]) for judge in judges]
        assert scores[0] == scores[1]
        # the best weights can also be sampled from
        service.create_sampling_client(model_path=str(best)).get_tokenizer()
    words = f"rlhf --steps 1 {SAMPLES} --reward None"
    first, other = (
        train(f"{words} --reward-model {path}", tmp_path / path.name) for path in (best, final)
    )
    assert first == other


@pytest.mark.slow
def test_the_value_head_of_a_policy_is_no_reward_model(tmp_path):
    small = "--steps 1 --batch-size 4 --max-tokens 2 --eval-every 0"
    train(f"ppo {small}", tmp_path / "ppo")
    with pytest.raises(UserError, match="is no reward model: ppo trained it"):
        train(f"rlhf {small} --reward-model {tmp_path / 'ppo'}", tmp_path / "run")


@pytest.mark.slow
def test_a_reward_model_of_another_vocabulary_scores_the_policy(tmp_path):
    often = "--steps 1 --batch-size 4 --learning-rate 1e-2 --eval-every 0"
    train(f"reward_model --base-model tiny:ascii {often}", tmp_path / "rm")
    words = f"rlhf --steps 1 {SAMPLES} --reward None --reward-model {tmp_path / 'rm'}"
    (row,) = train(words, tmp_path / "run")
    assert row["env/all/reward/std"] > 0


def test_a_comparing_judge_rewards_groups(tmp_path):
    """An untrained tiny:ascii judges itself: its rewards are shares of wins, with mean 0.5."""
    words = (
        "grpo --base-model tiny:ascii --comparison-model tiny:ascii --group-size 3 --batch-size 2 "
        "--max-tokens 2 --reward None"
    )
    (row,) = train(f"{words} --steps 1 --eval-every 0", tmp_path / "run")
    assert row["env/all/reward/learned"] == pytest.approx(0.5, abs=1e-6)
    assert row["env/all/reward/std"] > 0


@pytest.mark.parametrize(("words", "says"), [
    ("rlhf", "rlhf needs a reward model"),
    ("rlhf --reward-model tiny:addition", "tiny:addition is no reward model"),
    ("grpo --other-reward-weight 1", "or leave --other-reward-weight out"),
    ("ppo --comparison-model tiny:ascii", "set --group-size to 2 or more"),
    ("rlhf --reward-model nowhere/at/all", "no folder nowhere/at/all"),
    ("reward_model --reward exact_match", "a reward could score: leave reward out"),
])  # fmt: skip
def test_misuse_is_named_before_anything_is_written(words, says, tmp_path, capsys):
    with pytest.raises((UserError, SystemExit)) as caught:
        train(f"{words} --steps 1", tmp_path / "run")
    text = " ".join((str(caught.value) + capsys.readouterr().err).replace("│", " ").split())
    assert says in text and not (tmp_path / "run").exists()


def largest_digit_rows(path: Path) -> Path:
    """Write rows of three digits, the largest of which is the right answer. `response` is a random
    digit of the three, so a model trained on it is right for four in ten.

    Each prompt has three consecutive rows. `rejected` is any other digit, in the prompt or not,
    because RLHF exploits what the pairs do not cover. (With pairs of only the prompt's digits, a
    reward model ranked all held-out pairs right, and PPO on it took the true reward from 0.30 to
    0.05.)
    """
    rng, rows = np.random.default_rng(0), []
    for digits in rng.permutation(list(itertools.product(range(10), repeat=3))).tolist():
        best = str(max(digits))
        for wrong in rng.choice([str(d) for d in range(10) if str(d) != best], 3, replace=False):
            answers = dict(response=str(rng.choice(digits)), answer=best, chosen=best)
            prompt = "".join(map(str, digits)) + "="
            rows.append({"prompt": prompt, **answers, "rejected": str(wrong)})
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.slow
@pytest.mark.campaign
def test_rlhf_raises_the_learned_reward_and_the_true_one(tmp_path):
    """The true reward, exact_match on held-out prompts, is never trained on.

    Answers are a digit and an end mark. Longer answers, which no pair contains, lose reward (a
    score without an end mark is meaningless).
    """
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "stages:\n"
        "  - {method: sft, response_column: response, steps: 100, learning_rate: 3e-3, "
        "warmup_steps: 10, batch_size: 64, eval_every: 0}\n"
        "  - {method: reward_model, steps: 200, learning_rate: 2e-3, warmup_steps: 10, "
        "batch_size: 64, eval_every: 200}\n"
        "  - {method: rlhf, base_model: sft, reward_model: reward_model, reward: exact_match, "
        "data_format: columns, eval_every: 30,\n"
        "     steps: 30, learning_rate: 1e-3, batch_size: 128, normalise_rewards: true, "
        "temperature: 1.0, max_tokens: 4,\n"
        "     overlong_share: 0.5, overlong_penalty: 20}\n"
        f"dataset: {largest_digit_rows(tmp_path / 'rows.jsonl')}\nschedule: linear\nsave_every: "
        f"0\nrollouts_every: 0\n"
        "eval_limit: 300  # the last hundred prompts\n"
    )
    rows = train(str(recipe), tmp_path / "run")
    model = [row for row in rows if row["stage"] == "reward_model" and "test/loss" in row][-1]
    check, right = learning.check_figure, model["test/rewards/accuracies"]
    check("pairs ranked right by the reward model", right, above=0.95)
    first, last = (row for row in rows if row["stage"] == "rlhf" and "test/env/all/correct" in row)
    check("true reward at first", first["test/env/all/correct"], below=0.5)
    check("true reward", last["test/env/all/correct"], above=0.85)
    near_right = 0.75 * model["test/rewards/chosen"] + 0.25 * model["test/rewards/rejected"]
    check("learned reward at first", first["test/env/all/reward/learned"], below=near_right)
    check("learned reward", last["test/env/all/reward/learned"], above=near_right)


def test_a_policy_does_not_begin_from_the_reward_model_before_it(tmp_path):
    def begins(top, *stages):
        recipe = tmp_path / "recipe.yaml"
        lines = "".join(f"  - {{{stage}}}\n" for stage in stages)
        recipe.write_text(f"stages:\n{lines}steps: 1\n{top}\n")
        run = cli.read_run([str(recipe)], METHODS, recipe, RunSettings)
        check_initial_weights(run.stages)
        return [find_previous_stage(run.stages, i) for i in range(len(run.stages))]

    rm, rlhf = "method: reward_model", "method: rlhf, reward_model: reward_model"
    assert begins("base_model: tiny:ascii", "method: sft", rm, rlhf) == [None, 0, 0]
    assert begins("base_model: tiny:ascii", rm, rlhf) == begins("", rm, rlhf) == [None, None]
    # a judge may continue from a judge
    assert begins("", rm, rm + ", name: second", rlhf) == [None, 0, None]
    other = rm + ", base_model: tiny:chat"
    assert begins("base_model: tiny:ascii", "method: sft", other, rlhf) == [None, None, 0]
    assert begins("", rm, rlhf, "method: sft") == [None, None, 1]
    for wrong, near in (
        ("method: rlhf, reward_model: reward_modl", "reward_model"),
        (rlhf + ", base_model: stf", "sft"),
    ):
        says = f"stage rlhf: neither an earlier stage nor a folder is called .*did you mean {near}"
        with pytest.raises(UserError, match=says):
            begins("", "method: sft", rm, wrong)
    says = "stage rlhf comes after a reward model.*base_model: tiny:ascii"
    with pytest.raises(UserError, match=says):
        begins("", rm + ", base_model: tiny:ascii", rlhf)


@pytest.mark.slow
def test_rlhf_begins_from_the_weights_of_the_stage_that_it_names(tmp_path):
    """Not from those of the reward model before it."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "stages:\n  - {method: sft, steps: 2}\n  - {method: reward_model, steps: 2}\n"
        "  - {method: rlhf, base_model: sft, reward_model: reward_model, steps: 1, "
        "learning_rate: 1e-9, max_tokens: 3}\n"
        "learning_rate: 1e-2\nbatch_size: 8\neval_every: 0\nself_test: false\nreward_check: false\n"
    )
    train(str(recipe), tmp_path / "run")
    sft, model, rlhf = (
        load_file(str(tmp_path / f"run/checkpoints/{name}-final/model/model.safetensors"))
        for name in ("sft", "reward_model", "rlhf")
    )
    assert all(torch.allclose(sft[name], rlhf[name], atol=1e-6) for name in sft)
    assert any((sft[name] - model[name]).abs().max() > 1e-4 for name in sft)
