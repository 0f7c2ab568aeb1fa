"""Test alarms on injected faults, in metric streams and whole runs; healthy runs raise none."""

import dataclasses
import math
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import SeparateCalls
from whole_runs import RECIPE

from rl.algorithms import GRPO, METHODS, Models, PpoOptions, Progress
from rl.algorithms.distillation import DistillationSettings
from rl.config import LoopSettings, OptimSettings, RunSettings, parse_run
from rl.config.fields import get_fields
from rl.jsonl import read_jsonl
from rl.reporting import AlarmMonitor
from rl.reporting.alarm_monitor import ALARMS
from rl.rollout import (
    Trajectory,
    TrajectoryGroup,
    Transition,
    compute_credited_share,
    compute_group_metrics,
    compute_sample_metrics,
    max_or_nan,
)
from rl.trainer.execute import execute
from rl.types import Datum, ForwardBackwardOutput, ModelInput, SampledSequence, TensorData

STEPS = 60


def healthy(step: int, draw: random.Random) -> dict[str, float]:
    """Return the metrics of a batch of 32 problems x 8 answers from a run that learns."""
    done = step / STEPS
    noise = draw.gauss(0, 0.03)
    return {
        "optim/kl_sample_train_v1": draw.gauss(0, 1e-4),
        "optim/kl_sample_train_v2": abs(draw.gauss(0, 1e-4)), "optim/grad_norm": 2 + draw.random(),
        "optim/entropy": 0.8 - 0.4 * done + noise, "optim/frac_credited": 0.7,
        "env/all/reward/total": 0.2 + 0.6 * done + noise, "env/all/reward/std": 0.4,
        "env/all/reward/min": 0.0, "env/all/reward/max": 1.0, "env/all/by_group/frac_mixed": 0.7,
        "env/all/total_groups": 32, "env/all/total_episodes": 256,
        "env/all/distinct_beginnings": 0.9 - 0.3 * done,
        "env/all/ac_tokens_per_turn": 100 + 50 * done + 100 * noise, "env/all/frac_truncated": 0.05,
        "env/all/correct": 0.2 + 0.6 * done + noise, "env/all/format": 0.7 + 0.2 * done + noise,
        "sampler/temperature": 0.8,
    }  # fmt: skip


def play(
    edit=lambda row, step: None, *, steps: int = STEPS, seed: int = 0
) -> tuple[dict[str, list[int]], list[tuple[int, str]]]:
    """Return (steps of each alarm, texts) of a healthy stream edited by `edit`."""
    draw, alarms, on, output = random.Random(seed), AlarmMonitor(), {}, []
    for step in range(steps):
        row = healthy(step, draw)
        edit(row, step)
        metrics, texts = alarms(row)
        for name, value in metrics.items():
            if value:
                on.setdefault(name.removeprefix("alarm/"), []).append(step)
        output += [(step, text) for text in texts]
    return on, output


@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_run_is_silent(seed):
    assert play(seed=seed) == ({}, [])


def plant_fault(**values):
    """Return an edit that sets values (numbers, or functions of the step) in each row from step 10
    on.
    """
    names = {
        "v1": "optim/kl_sample_train_v1", "v2": "optim/kl_sample_train_v2",
        "norm": "optim/grad_norm", "entropy": "optim/entropy", "age": "async/age/mean",
        "credited": "optim/frac_credited", "reward": "env/all/reward/total",
        "mixed": "env/all/by_group/frac_mixed", "beginnings": "env/all/distinct_beginnings",
        "tokens": "env/all/ac_tokens_per_turn", "cut": "env/all/frac_truncated",
        "correct": "env/all/correct", "temperature": "sampler/temperature",
        "low": "env/all/reward/min", "high": "env/all/reward/max",
        "critic": "optim/critic_grad_norm", "skipped": "optim/skipped_nonfinite",
        "groups": "env/all/total_groups", "failed": "reward/failed",
        "scored": "env/all/total_episodes",
    }  # fmt: skip

    def edit(row, step):
        first = 0 if {"reward", "mixed", "correct"} & set(values) else 10
        for name, value in values.items():
            if step >= first:
                row[names[name]] = value(step) if callable(value) else value

    return edit


def make_jitter(middle: float):
    return lambda step: middle + 0.01 * math.sin(7 * step)


@pytest.mark.parametrize(("edit", "expected", "words"), [
    (plant_fault(v1=-0.02), {"kl_0.01"}, "0.02, above 0.01"),
    (plant_fault(v2=0.3), {"kl_0.01", "kl_0.1"}, "0.3, above 0.1"),
    (plant_fault(v1=2.0), {"kl_0.01", "kl_0.1", "kl_1"}, "stop, return to a checkpoint"),
    (plant_fault(v2=0.3, age=1.5), {"kl_0.01", "kl_0.1"}, "(tokens are 1.5 updates old on average)"),
    (plant_fault(norm=30.0), {"grad_norm"}, "Lower learning_rate"),
    (plant_fault(v1=math.nan), {"kl_0.01", "kl_0.1", "kl_1"}, "is nan, above 1"),
    (plant_fault(v2=math.nan), {"kl_0.01", "kl_0.1", "kl_1"}, "is nan, above 1"),
    # a norm from few tokens counts as well
    (plant_fault(norm=50.0, credited=0.1), {"grad_norm"}, "gradient norm 50, above 10"),
    (plant_fault(norm=math.nan), {"grad_norm"}, "not finite"),
    (plant_fault(skipped=1.0), {"grad_norm"}, "the optimizer step was skipped"),
    (plant_fault(critic=30.0), {"grad_norm"}, "the critic's gradient norm 30"),
    (plant_fault(critic=math.inf), {"grad_norm"}, "the critic's gradient norm is not finite"),
    (plant_fault(credited=0.0), {"zero_advantages"}, "all advantages are zero"),
    # while a KL penalty credits every token
    (plant_fault(mixed=0.0), {"zero_advantages"}, "rewards are equal within every group"),
    (plant_fault(low=0.4, high=0.4, groups=256), {"zero_advantages"}, "rewards are all equal"),
    (plant_fault(reward=make_jitter(0.3)), {"reward_flat"}, "min 0, max 1, std 0.4"),
    (plant_fault(reward=lambda step: 0.5 - 0.005 * step), {"reward_flat"}, "has not risen"),
    (plant_fault(reward=lambda step: 1.7e308 if step % 7 < 2 else 1e200 * math.sin(7 * step)),
     {"reward_flat"}, "has not risen"),  # squares and sums beyond floats
    (plant_fault(entropy=0.01), {"entropy_collapse"}, "from 0.8"),
    # from the first step on
    (lambda row, step: row.update({"optim/entropy": 5e-4}), {"entropy_collapse"},
     "answers are certain: 0.0"),
    (plant_fault(mixed=0.2, temperature=0.2), {"low_temperature"},
     "temperature 0.2 explores little: in 80%"),
    (plant_fault(beginnings=1 / 256), {"mode_collapse"}, "0.4% distinct"),
    (plant_fault(tokens=lambda step: 100 + 30 * step), {"length"}, "answers grew from"),
    (plant_fault(tokens=180, cut=0.6), {"length"}, "cut off, 5% at first"),
    (plant_fault(correct=make_jitter(0.2)), {"format_alone"}, "only the format improves"),
    (plant_fault(failed=255, scored=1, groups=1), {"rewards_failing"},
     "255 of the 256 samples of this batch could not be scored"),
    (plant_fault(failed=32), {"rewards_failing"}, "11% of the samples of 3 batches could not be scored"),
])  # fmt: skip
def test_each_fault_sets_off_its_alarm_and_no_other_and_is_said_once(edit, expected, words):
    on, output = play(edit)
    assert set(on) == expected
    assert len(output) == len(expected) and any(words in text for _, text in output), output
    assert all(steps == list(range(steps[0], STEPS)) for steps in on.values()), (
        "on from its onset to the end"
    )


def test_metrics_of_samples_by_hand():
    def group(*answers: tuple[str, int]) -> TrajectoryGroup:
        members, read = [], ModelInput.from_ints([1])
        for text, tokens in answers:
            action = SampledSequence([1] * tokens, [-0.5] * tokens)
            turn = Transition(read, action, 0.0, True, logs={"response": text})
            members.append(Trajectory([turn]))
        return TrajectoryGroup(members, [0.0] * 2, [{}] * 2)

    long = "x" * 50
    groups = [group((long + "a", 3), (long + "b", 2)), group(("y" + long, 4), ("", 1))]
    shares = {"env/all/total_groups": 2, "env/all/distinct_beginnings": 3 / 4}
    assert compute_sample_metrics(groups) == shares
    fields = {"target_tokens": [1, 2, 3], "advantages": [0.0, 0.5, -1.0], "mask": [0.0, 1.0, 1.0]}
    datum = Datum(ModelInput.from_ints([1, 2, 3]), fields)
    assert compute_credited_share(groups, [datum]) == 2 / 10
    large = [dataclasses.replace(item, final_rewards_G=[1e200, -1e200]) for item in groups]
    metrics = compute_group_metrics(large)
    assert [metrics[f"env/all/reward/{name}"] for name in ("total", "std")] == [0.0, math.inf]


def test_remedies_name_flags_that_the_method_has():
    """A flag that some methods with rewards do not have is followed by "(grpo)"."""
    flags = {name: set(get_fields(spec.Settings)) for name, spec in METHODS.items()}
    every = set.union(*flags.values())
    of_rl = flags["reinforce"] & flags["ppo"] & flags["rlhf"] & flags["grpo"]
    for alarm in ALARMS:
        named = {
            word
            for word in re.findall(r"[a-z_]+", alarm.remedy)
            if word in every and "_" in word or word == "normalise"
        }
        for flag in named - of_rl | named & {"dynamic_sampling"}:  # ppo refuses dynamic_sampling
            assert f"{flag} (grpo)" in alarm.remedy, (alarm.name, flag)
        if alarm.name == "grad_norm":  # every method has this alarm
            assert set.intersection(*flags.values()) >= named - {"reward_scale", "reward_clip"}
    assert sum("(grpo)" in alarm.remedy for alarm in ALARMS) >= 5


@pytest.mark.parametrize(("norms", "largest"), [
    ([], 0.0), ([2.0, 3.0, 1.0], 3.0), ([1.0, math.inf], math.inf),
    ([math.nan, 2.0, 3.0], math.nan), ([1.0, math.nan, 3.0], math.nan),
    ([1.0, 2.0, math.nan], math.nan),
])  # fmt: skip
def test_the_largest_norm_is_not_a_number_where_one_is_not(norms, largest):
    assert max_or_nan(norms) == pytest.approx(largest, nan_ok=True)


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("method", ["grpo", "ppo", "dpo", "distill", "reward_model"])
def test_a_gradient_that_is_not_finite_is_said_by_every_method(method, bad):
    """Run two optimizer steps, the first or second of which is skipped for a norm of NaN."""
    norms = iter([math.nan if i == bad else 2.0 for i in range(2)])
    names = ("loss", "pairs", "chosen_rewards", "rejected_rewards", "ranked_right")
    sums = {f"{name}:sum": 1.0 for name in names}

    def score(datums, *_, **__):
        outputs = [{"logprobs": TensorData([-1.0, -1.0])} for _ in datums]
        return SimpleNamespace(result=lambda: ForwardBackwardOutput(outputs, sums))

    def step(params):
        norm = next(norms)
        metrics = {"grad_norm": norm} | ({"skipped_nonfinite": 1.0} if math.isnan(norm) else {})
        return SimpleNamespace(result=lambda: SimpleNamespace(metrics=metrics))

    inputs = {"optim": OptimSettings(num_substeps=2), "loop": LoopSettings(steps=5, batch_size=4)}
    fields = {"target_tokens": [1, 2], "logprobs": [-1.0, -1.0]}
    fields |= {"advantages": [0.5, -0.5], "mask": [1.0, 1.0]}
    if method == "ppo":
        inputs["ppo"] = PpoOptions(epochs=1)
    if method == "distill":  # soft targets
        inputs["distillation"] = DistillationSettings(learn_from="teacher")
        fields = {"target_tokens": [[1, 2], [2, 1]], "weights": [[0.5, 0.5], [1.0, 0.0]]}
    policy = SeparateCalls(forward_backward=score, forward=score, optim_step=step)
    datums = [Datum(ModelInput.from_ints([1, 2]), fields) for _ in range(4)]
    trained = METHODS[method](METHODS[method].Settings(**inputs))
    metrics = trained.update(Models(policy), datums, Progress(0, 5))
    assert math.isnan(metrics["optim/grad_norm"]) and metrics["optim/skipped_nonfinite"] == 1
    assert AlarmMonitor()(metrics)[0]["alarm/grad_norm"] == 1
    del metrics["optim/skipped_nonfinite"]
    assert AlarmMonitor()(metrics)[0]["alarm/grad_norm"] == 1, "either says so alone"


# ------------------------------------------------------------------- through the real training loop


REWARDS = """
from rl.rewards import RewardResult

def graded(prompt, response, meta):
    return response.count("1") / 4 + int(prompt[0]) % 2

def has_a_one(prompt, response, meta):
    return float("1" in response)

def form_and_substance(prompt, response, meta):
    form, right = float(response[:1] == "1"), float(response[1:2] in ("2", "3", "4"))
    return RewardResult(0.5 * form + 0.5 * right, {"format": form, "correct": right})
"""


COMMON = (
    "--base-model tiny:addition --dataset addition --max-tokens 4 --batch-size 4 --eval-every 0 "
    "--rollouts-every 0"
)


def run(folder: Path, words: str, *, method: str = "grpo") -> list[dict[str, float]]:
    """Return training rows of a short run of an untrained tiny model. `--reward :name` selects one
    of REWARDS.
    """
    folder.mkdir(exist_ok=True)
    (folder / "planted.py").write_text(REWARDS)
    groups = "" if method == "sft" else "--group-size 4"
    words = words.replace("--reward :", f"--reward {folder / 'planted.py'}:")
    line = f"{method} {COMMON} --output-dir {folder / 'run'} {groups} {words}".split()
    execute(parse_run(line, METHODS, RECIPE, options=RunSettings))
    return read_jsonl(folder / "run" / "metrics.jsonl")


def on(row: dict[str, float]) -> set[str]:
    """Return the names of the alarms that are on."""
    return {name[6:] for name, value in row.items() if name.startswith("alarm/") and value}


def test_a_reward_that_never_tells_answers_apart_is_said_by_a_real_run(tmp_path, capsys):
    words = "--reward exact_match --steps 4 --save-every 2"
    rows = run(tmp_path, words)  # an untrained model is never right
    assert [row["alarm/zero_advantages"] for row in rows] == [0, 0, 1, 1]
    assert [on(row) for row in rows] == [set(), set(), {"zero_advantages"}, {"zero_advantages"}]
    assert capsys.readouterr().out.count("all advantages are zero") == 1

    # resumed after two steps, the alarm still starts at the third
    notes = tmp_path / "run" / "checkpoints.jsonl"
    notes.write_text(notes.read_text().splitlines()[0] + "\n")
    rows = run(tmp_path, f"{words} --resume")
    assert [row["alarm/zero_advantages"] for row in rows] == [0, 0, 1, 1]


@pytest.mark.parametrize(("method", "words", "expected"), [
    ("grpo", "--kl-coef 0.1", "rewards are equal within every group"),
    ("ppo", "", "rewards are equal within every group"),
    ("ppo", "--group-size 1", "rewards are all equal"),
    ("reinforce", "--group-size 1", "all advantages are zero"),
])  # fmt: skip
def test_the_same_where_every_token_has_an_advantage_all_the_same(
    tmp_path, capsys, method, words, expected
):
    """A KL penalty, or the error of a learned value, gives every token an advantage."""
    rows = run(tmp_path, f"--reward exact_match --steps 3 {words}", method=method)
    if method != "reinforce":
        assert all(row["optim/frac_credited"] == 1 for row in rows[1:])
    assert [row["alarm/zero_advantages"] for row in rows] == [0, 0, 1]
    assert capsys.readouterr().out.count(expected) == 1


@pytest.mark.parametrize(("sampled", "learnt", "expected"), [
    (1.0, 0.8, {"kl_0.01"}),
    (1.0, 0.5, {"kl_0.01", "kl_0.1"}),
    (0.05, 3.0, {"kl_0.01", "kl_0.1", "kl_1"}),
])  # fmt: skip
def test_a_learner_that_scores_at_another_temperature_is_said_by_a_real_run(
    tmp_path, capsys, monkeypatch, sampled, learnt, expected
):
    class WrongTemperatureGRPO(GRPO):
        def update(self, models, datums, progress):
            right = self.settings
            wrong = dataclasses.replace(right.sampling, temperature=learnt)
            self.settings = dataclasses.replace(right, sampling=wrong)
            metrics = super().update(models, datums, progress)
            self.settings = right
            return metrics

    monkeypatch.setitem(METHODS, "grpo", WrongTemperatureGRPO)
    (row,) = run(tmp_path, f"--reward exact_match --steps 1 --temperature {sampled}")
    assert on(row) == expected
    assert capsys.readouterr().out.count("KL between sampler and learner") >= len(expected)


@pytest.mark.parametrize("method", ["grpo", pytest.param("ppo", marks=pytest.mark.slow)])
def test_large_rewards_without_a_scale_are_said_by_a_real_run(tmp_path, capsys, method):
    """ppo normalizes advantages, so large rewards make the critic diverge instead."""
    words = "--reward :has_a_one --steps 3 --temperature 1"
    words += {"grpo": "", "ppo": " --critic-model policy --kl-coef 0 --epochs 1"}[method]
    rows = run(tmp_path / "large", f"{words} --reward-scale 1000", method=method)
    assert on(rows[-1]) == {"grad_norm"} and "alarm/grad_norm" in rows[0] and not on(rows[1])
    assert capsys.readouterr().out.count("gradient norm") == 1
    assert not any(map(on, run(tmp_path / "unit", words, method=method)))


def test_a_real_run_has_the_metrics_of_every_alarm(tmp_path):
    (row,) = run(tmp_path, "--reward :form_and_substance --steps 1 --temperature 1")
    names = {name.removeprefix("alarm/") for name in row if name.startswith("alarm/")}
    assert {alarm.name for alarm in ALARMS} - names <= {"rewards_failing"}  # no reward failed
    assert not on(row) and row["sampler/temperature"] == 1.0
    assert 0 < row["env/all/format"] < 1 and 1 <= row["env/all/ac_tokens_per_turn"] <= 4


@pytest.mark.slow
def test_a_learning_rate_that_breaks_the_model_is_said_by_a_real_run(tmp_path, capsys):
    rows = run(tmp_path, "--reward :graded --steps 14 --learning-rate 0.05 --temperature 1.0")
    assert {"entropy_collapse", "mode_collapse"} <= on(rows[-1]), on(rows[-1])
    assert "nats of entropy an answer" in capsys.readouterr().out
