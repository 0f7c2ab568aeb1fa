"""Test `why`, which explains an update token by token."""

import math
import runpy
import sys
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from whole_runs import read_metrics, same_weights

import rl
from rl.errors import UserError
from rl.jsonl import read_jsonl
from rl.losses import compute_token_gradients, get_loss
from rl.reporting import format_explanation, list_update_files, render_explanation
from rl.reporting.update_files import add_token_values
from rl.rollout import Trajectory, TrajectoryGroup, Transition, trajectory_to_datums
from rl.trainer import explain_update
from rl.trainer.batch_log import UpdateRecorder
from rl.types import ModelInput, SampledSequence

REPO = Path(__file__).resolve().parents[2]
SMALL = {
    "base_model": "tiny:addition", "dataset": "addition",
    "reward": "tests_why_reward.py:last_digit", "batch_size": 3, "group_size": 4, "max_tokens": 4,
    "eval_every": 0, "rollouts_every": 1, "self_test": False, "reward_check": False, "quiet": True,
}  # fmt: skip
REWARD = "def last_digit(prompt, response, meta):\n    return sum(map(ord, response)) % 7 / 7\n"


def train(tmp_path, method, **settings) -> Path:
    path = tmp_path / "tests_why_reward.py"
    path.write_text(REWARD)
    words = SMALL | {"reward": f"{path}:last_digit"} | settings
    if words["reward"] is None:
        del words["reward"]
    rl.train(method, **words, output_dir=tmp_path / "run")
    return tmp_path / "run"


def read_samples(run: Path, step: int) -> list[dict]:
    (path,) = (run / "rollouts").glob(f"step_{step:06d}*.jsonl")
    return read_jsonl(path)


def explain_all(run: Path, step: int) -> list:
    """Return the groups of all problems of a step."""
    problems = dict.fromkeys(row["problem"] for row in read_samples(run, step))
    return [g for p in problems for g in explain_update(run, step, str(p)).groups]


def list_passes(run: Path, step: int) -> list[tuple]:
    """Return (group, answer, pass) of a step."""
    return [
        (group, answer, item)
        for group in explain_all(run, step)
        for answer in group.answers
        for item in answer.passes
    ]


def compute_log_distribution(model, row: dict) -> torch.Tensor:
    """Return the log probability of every token at each position of the answer."""
    tokens = row["prompt_tokens"] + row["response_tokens"]
    with torch.no_grad():
        logits = model(torch.tensor([tokens[:-1]])).logits[0] / row["temperature"]
    return logits.log_softmax(-1)[len(row["prompt_tokens"]) - 1 :]


def compute_logprobs(model, row: dict) -> list[float]:
    logp = compute_log_distribution(model, row)
    return [float(logp[i, t]) for i, t in enumerate(row["response_tokens"])]


def test_grpo_equals_a_float64_computation_by_hand(tmp_path):
    run = train(tmp_path, "grpo", steps=2, save_every=1, learning_rate=1e-3)
    folder = run / "checkpoints" / "grpo-000001" / "model"  # the weights before step 2
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    rows = read_samples(run, 2)
    groups = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    expected = {}
    for g, members in groups.items():
        rewards = [row["reward"] for row in members]
        mean = sum(rewards) / len(rewards)
        if len(set(rewards)) > 1:
            for row in members:
                for j, logprob in enumerate(compute_logprobs(model, row)):
                    advantage = row["reward"] - mean
                    expected[g, row["index"], j] = (logprob, row["logprobs"][j], advantage)
    assert len({g for g, _, _ in expected}) > 1, "several groups have a signal"
    # The ratios are 1 up to rounding, so nothing is clipped: loss = -sum r A / tokens
    gradients = {
        key: -advantage * math.exp(logprob - sampled) / len(expected)
        for key, (logprob, sampled, advantage) in expected.items()
    }
    total = sum(map(abs, gradients.values()))
    seen = {
        (group.group, answer.index, j): token
        for group, answer, item in list_passes(run, 2)
        for j, token in enumerate(item.tokens)
    }
    assert seen.keys() == expected.keys()
    for key, token in seen.items():
        logprob, sampled, advantage = expected[key]
        assert token.learner == pytest.approx(logprob, abs=1e-5)
        assert token.sampled == pytest.approx(sampled, abs=1e-6)
        assert token.ratio == pytest.approx(math.exp(logprob - sampled), abs=1e-5)
        assert token.advantage == pytest.approx(advantage, abs=1e-6) and token.clip == ""
        assert token.gradient == pytest.approx(gradients[key], rel=1e-4, abs=1e-9)
        assert token.share == pytest.approx(abs(gradients[key]) / total, rel=1e-4, abs=1e-9)


def test_recorded_entropies_and_ratios_equal_those_of_the_saved_weights(tmp_path):
    run = train(tmp_path, "grpo", steps=2, save_every=1, learning_rate=1e-2)
    rows = read_samples(run, 2)
    add_token_values(rows, list_update_files(run / "rollouts")[2])
    weights = run / "checkpoints" / "grpo-000001" / "model"
    model = AutoModelForCausalLM.from_pretrained(weights).double()
    compared = 0
    for row in rows:
        if not row["advantage"]:
            continue
        logp = compute_log_distribution(model, row)
        entropies = -(logp.exp() * logp).sum(-1)
        assert row["entropies"] == pytest.approx(entropies.tolist(), rel=1e-4, abs=1e-5)
        learner = np.array(compute_logprobs(model, row))
        expected = np.exp(learner - np.array(row["logprobs"]))
        assert row["ratios"] == pytest.approx(expected.tolist(), rel=1e-4)
        compared += len(expected)
    assert compared > 20
    # rows of another run are unchanged
    other = read_samples(run, 2)
    for row in other:
        row["response_tokens"].insert(0, 0)
    add_token_values(other, list_update_files(run / "rollouts")[2])
    assert not any("ratios" in row for row in other)


@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_a_record_changes_neither_weights_nor_metrics(tmp_path, method):
    runs = []
    for every in (0, 1):
        folder = tmp_path / str(every)
        folder.mkdir()
        runs.append(train(folder, method, steps=2, rollouts_every=every, learning_rate=1e-2))
    assert len(list_update_files(runs[1] / "rollouts")) == 2 and not (runs[0] / "rollouts").exists()
    assert same_weights(*runs) and read_metrics(runs[0]) == read_metrics(runs[1])


def test_later_passes_of_ppo_are_clipped_as_the_run_counted(tmp_path):
    words = {"epochs": 3, "num_substeps": 3, "learning_rate": 1e-2, "clip": 0.1, "target_kl": None}
    run = train(tmp_path, "ppo", steps=1, **words)
    assert {group.num_passes for group in explain_all(run, 1)} == {3}
    tokens = {}
    for _, answer, item in list_passes(run, 1):
        (step,) = item.optimizer_steps
        assert item is answer.passes[step // 3]
        tokens.setdefault(step, []).extend(item.tokens)
    assert sorted(tokens) == list(range(9))
    kinds = set()
    for members in tokens.values():
        gradients = []
        for token in members:
            ratio = math.exp(token.learner - token.sampled)
            clip = "low" if ratio < 0.9 else "high" if ratio > 1.1 else ""
            cut = clip and (clip == "high") == (token.advantage > 0)
            gradients.append(0.0 if cut else -ratio * token.advantage / len(members))
            kinds.add((clip, bool(cut)))
            assert token.clip == clip and token.ratio == pytest.approx(ratio, rel=1e-5)
        total = sum(map(abs, gradients))
        for token, gradient in zip(members, gradients, strict=True):
            assert token.gradient == pytest.approx(gradient, rel=1e-4, abs=1e-12)
            assert token.share == pytest.approx(abs(gradient) / total, rel=1e-4, abs=1e-12)
    assert kinds >= {("low", True), ("low", False), ("high", True), ("high", False)}
    clipped = [bool(token.clip) for members in tokens.values() for token in members]
    (row,) = [r for r in read_jsonl(run / "metrics.jsonl") if "optim/clip_frac" in r]
    assert sum(clipped) / len(clipped) == pytest.approx(row["optim/clip_frac"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "settings"), [
    ("grpo", {"num_substeps": 3, "loss": "gspo", "kl_coef": 0.1, "kl_placement": "loss"}),
    ("grpo", {"episodes": "continuous", "stream_minibatches": 2}),
    ("grpo", {"max_steps_off_policy": 1, "correction": "mask", "correction_high": 1.01}),
    ("reinforce", {"group_size": 1}),
    ("best_of_n", {}),
    ("online_dpo", {"pairs": "all"}),
    ("distill", {"teacher": "tiny:addition", "learn_from": "student", "reward": None}),
], ids=["gspo", "streamed", "asynchronous", "reinforce", "best_of_n", "online_dpo", "distill"])  # fmt: skip
def test_shares_of_every_optimizer_step_add_up_to_one(tmp_path, method, settings):
    run = train(tmp_path, method, steps=2, **settings)
    for step in list_update_files(run / "rollouts"):
        shares = Counter()
        for _, _, item in list_passes(run, step):
            (number,) = item.optimizer_steps
            shares[number] += item.share
            assert all(token.learner is not None for token in item.tokens)
        assert shares and all(total == pytest.approx(1.0) for total in shares.values())


FIELDS = {
    "advantages": [1.0, 1.0, -2.0, -2.0, 0.5, 0.0],
    "logprobs": [-1.0, -2.0, -0.5, -1.5, -1.0, -1.0],
    "mask": [1.0, 1.0, 1.0, 1.0, 0.5, 0.0],
}
LEARNER = [-0.7, -2.1, -0.9, -1.3, -1.05, -5.0]
CUTS = torch.tensor([0, 2, 6])


def compute(loss: str, **config):
    inputs = {name: torch.tensor(values) for name, values in FIELDS.items()}
    inputs["ref_logprobs"] = torch.tensor([-1.2, -1.2, -1.2, -1.2, -1.2, float("nan")])
    learner = torch.tensor(LEARNER, dtype=torch.float64)
    return compute_token_gradients(get_loss(loss), learner, inputs, CUTS, config)


def test_gradients_of_the_losses_equal_their_formulas():
    gaps = [lp - q for lp, q in zip(LEARNER, FIELDS["logprobs"], strict=True)][:5]
    ratios, advantages = [math.exp(gap) for gap in gaps], FIELDS["advantages"][:5]
    means = [sum(gaps[:2]) / 2] * 2 + [sum(gaps[2:5]) / 3] * 3

    def cut(ratio: float, advantage: float) -> bool:
        return (ratio > 1.2 and advantage > 0) or (ratio < 0.8 and advantage < 0)

    pairs = list(zip(ratios, advantages, strict=True))
    sequence = [(math.exp(mean), a) for mean, a in zip(means, advantages, strict=True)]
    expected = {
        "importance_sampling": [-r * a for r, a in pairs],
        "ppo": [0.0 if cut(r, a) else -r * a for r, a in pairs],
        "cispo": [-min(max(r, 0.8), 1.2) * a for r, a in pairs],
        "gspo": [0.0 if cut(s, a) else -s * a for s, a in sequence],
        "dro": [0.05 * gap - a for gap, a in zip(gaps, advantages, strict=True)],
    }
    for loss, values in expected.items():
        result = compute(loss)
        assert result.gradient_T.tolist() == pytest.approx([*values, 0.0], abs=1e-6)
        shown = [s for s, _ in sequence] if loss == "gspo" else ratios
        assert result.ratio_T[:5].tolist() == pytest.approx(shown, abs=1e-6)
        assert math.isnan(result.ratio_T[5])
        assert (result.low_T is None) == (loss in ("importance_sampling", "dro"))
    # with a KL term in the loss: c * mask * r * (lp - ref)
    with_kl = compute("importance_sampling", kl_coef=0.3, kl_kind="k2", entropy_coef=1.0)
    for j, (ratio, advantage) in enumerate(pairs):
        kl = 0.3 * FIELDS["mask"][j] * ratio * (LEARNER[j] + 1.2)
        assert float(with_kl.gradient_T[j]) == pytest.approx(kl - ratio * advantage, abs=1e-6)


@pytest.fixture(scope="module")
def two_stages(tmp_path_factory):
    """Return the folder of a run of sft and grpo that keeps the samples of some steps."""
    folder = tmp_path_factory.mktemp("stages")
    (folder / "tests_why_reward.py").write_text(REWARD)
    reward = f"{folder / 'tests_why_reward.py'}:last_digit"
    (folder / "recipe.yaml").write_text(f"""
stages:
- {{method: sft, steps: 1, base_model: "tiny:addition"}}
- {{method: grpo, steps: 4, group_size: 2, max_tokens: 4, rollouts_every: 2, reward: "{reward}"}}
batch_size: 2
eval_every: 0
dataset: addition
""")
    options = {"self_test": False, "reward_check": False, "quiet": True}
    rl.train(folder / "recipe.yaml", **options, output_dir=folder / "run")
    return folder / "run"


def test_errors_name_the_steps_and_the_problems(two_stages):
    # the evaluation before the second stage counts as a step: the first update of grpo is step 3
    (*_, last) = sorted(list_update_files(two_stages / "rollouts"))
    recorded = "the recorded steps are 3, 5, 6"
    with pytest.raises(UserError, match=f"kept no samples.*{recorded}.*--rollouts-every 1"):
        explain_update(two_stages, 4, "1")
    with pytest.raises(UserError, match=f"not a training step.*last step is 6; {recorded}"):
        explain_update(two_stages, 57, "1")
    with pytest.raises(UserError, match=f"stage sft, which learns from rows.*{recorded}"):
        explain_update(two_stages, 1, "1")
    problems = {str(row["problem"]) for row in read_samples(two_stages, last)}
    with pytest.raises(UserError, match="no samples of problem '99999'") as caught:
        explain_update(two_stages, last, "99999")
    assert set(str(caught.value).rpartition("problems are ")[2].split(", ")) == problems
    with pytest.raises(UserError, match="holds no run"):
        explain_update(two_stages.parent, 1, "1")
    rows = list_update_files(two_stages / "rollouts")[last].with_suffix("").with_suffix(".jsonl")
    text = rows.read_text()
    rows.write_text("[]\n")
    with pytest.raises(UserError, match="cannot be read"):
        explain_update(two_stages, last, "1")
    rows.write_text(text)


def run_script(monkeypatch, *words: str) -> int:
    """Return the exit code of why.py."""
    monkeypatch.setattr(sys, "argv", ["why.py", *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(REPO / "why.py"), run_name="__main__")
    return ended.value.code or 0


def test_the_command_prints_every_token_and_writes_a_page(
    two_stages, tmp_path, monkeypatch, capsys
):
    row = read_samples(two_stages, 6)[0]
    page = tmp_path / "why.html"
    words = [str(two_stages), "--step", "6", "--problem", f"addition:{row['problem']}"]
    assert run_script(monkeypatch, *words, "-o", str(page)) == 0
    shown = capsys.readouterr().out
    assert "answer 0: reward" in shown and "answer 1: reward" in shown
    for token, logprob in zip(row["tokens"], row["logprobs"], strict=True):
        assert f"    {token!r}" in shown and f"{logprob:.4f}" in shown
    html = page.read_text()
    assert "answer 1: reward" in html and "<script" not in html
    assert run_script(monkeypatch, *words, "--answer", "1") == 0
    assert "answer 0: reward" not in capsys.readouterr().out
    for wrong, message in (("--pass", "--pass is from 1 to 1"), ("--answer", "no answer 5")):
        assert run_script(monkeypatch, *words, wrong, "5") == 2
        assert message in capsys.readouterr().err


def test_hostile_tokens_stay_text(two_stages):
    row = read_samples(two_stages, 6)[0]
    explanation = explain_update(two_stages, 6, str(row["problem"]))
    (group, *_) = explanation.groups
    token = replace(group.answers[0].tokens[0], text="</pre><script>alert(1)</script>\x1b[2J\u202e")
    answer = replace(group.answers[0], tokens=(token,), passes=())
    hostile = replace(group, answers=(answer,), prompt="<b>&\x1b[31m")
    changed = replace(explanation, groups=(hostile,))
    html, text = render_explanation(changed, "<i>"), "\n".join(format_explanation(changed))
    for page in (html, text):
        assert "\x1b" not in page and "\u202e" not in page
    assert "<script" not in html and "<b>&" not in html and "<i>" not in html
    assert "not trained on" in text


def test_a_large_batch_is_recorded_up_to_a_number_of_tokens(two_stages):
    recorder, groups = UpdateRecorder(), []
    for g in range(3):
        action = SampledSequence([3, 4, 5], [-1.0, -2.0, -3.0 - g], "stop")
        turn = Transition(ModelInput.from_ints([1, 2]), action, 1.0, True)
        groups.append(TrajectoryGroup([Trajectory([turn], advantage=1.0)], [0.0], [{}]))
    datums = [d for group in groups for t in group.trajectories_G for d in trajectory_to_datums(t)]
    outputs = Future()
    outputs.set_result(([{"logprobs": np.arange(4.0)} for _ in datums], {}))
    for _ in range(2):
        recorder.record_backward(datums, "ppo", {}, 9.0, outputs)
    arrays, metadata = recorder.build_record(groups, max_tokens=13)
    assert metadata["recorded_groups"] == 2 and metadata["groups"] == 3
    assert arrays["sampled"].tolist() == [-1, -2, -3, -1, -2, -4]
    assert arrays["call/1/logprobs"].tolist() == [1, 2, 3, 1, 2, 3]
    assert arrays["target_tokens"].tolist() == [3, 4, 5] * 2
