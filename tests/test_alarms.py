"""Alarms on planted faults (streams of metrics, and whole runs through the loop), and their silence on a healthy run."""

import dataclasses
import json
import math
import random
from pathlib import Path

import pytest

from rl.alarms import ALARMS, Alarms
from rl.cli import parse
from rl.methods import METHODS
from rl.methods.grpo import PolicyGradient
from rl.metrics import credited_share, sampled_metrics
from rl.run import execute
from rl.settings import RunSettings
from rl.types import Datum, ModelInput, SampledSequence, Trajectory, TrajectoryGroup, Transition

REPO = Path(__file__).resolve().parent.parent
STEPS = 60


def healthy(step: int, draw: random.Random) -> dict[str, float]:
    """A batch of 32 problems x 8 answers of a run that learns: reward 0.2 to 0.8, entropy 0.8 to 0.4, all under noise."""
    done = step / STEPS
    noise = draw.gauss(0, 0.03)
    return {
        "optim/kl_sample_train_v1": draw.gauss(0, 1e-4),
        "optim/kl_sample_train_v2": abs(draw.gauss(0, 1e-4)),
        "optim/grad_norm": 2 + draw.random(),
        "optim/entropy": 0.8 - 0.4 * done + noise,
        "optim/frac_credited": 0.7,
        "env/all/reward/total": 0.2 + 0.6 * done + noise,
        "env/all/reward/std": 0.4,
        "env/all/reward/min": 0.0,
        "env/all/reward/max": 1.0,
        "env/all/by_group/frac_mixed": 0.7,
        "env/all/total_groups": 32,
        "env/all/total_episodes": 256,
        "env/all/distinct_beginnings": 0.9 - 0.3 * done,
        "env/all/ac_tokens_per_turn": 100 + 50 * done + 100 * noise,
        "env/all/frac_truncated": 0.05,
        "env/all/correct": 0.2 + 0.6 * done + noise,
        "env/all/format": 0.7 + 0.2 * done + noise,
        "sampler/temperature": 0.8,
    }


def play(edit=lambda row, step: None, *, steps: int = STEPS, seed: int = 0) -> tuple[dict[str, list[int]], list[tuple[int, str]]]:
    """(steps at which each alarm was on, what was said when) of a healthy stream with a fault planted by `edit`."""
    draw, alarms, on, said = random.Random(seed), Alarms(), {}, []
    for step in range(steps):
        row = healthy(step, draw)
        edit(row, step)
        metrics, texts = alarms(row)
        for name, value in metrics.items():
            if value:
                on.setdefault(name.removeprefix("alarm/"), []).append(step)
        said += [(step, text) for text in texts]
    return on, said


@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_run_is_silent(seed):
    assert play(seed=seed) == ({}, [])


def fault(**values):
    """Plants values (numbers, or functions of the step) into every row from step 10 on."""
    names = {
        "v1": "optim/kl_sample_train_v1", "v2": "optim/kl_sample_train_v2", "norm": "optim/grad_norm", "entropy": "optim/entropy",
        "credited": "optim/frac_credited", "reward": "env/all/reward/total", "mixed": "env/all/by_group/frac_mixed",
        "beginnings": "env/all/distinct_beginnings", "tokens": "env/all/ac_tokens_per_turn", "cut": "env/all/frac_truncated",
        "correct": "env/all/correct", "temperature": "sampler/temperature", "low": "env/all/reward/min", "high": "env/all/reward/max",
    }  # fmt: skip

    def edit(row, step):
        first = 0 if {"reward", "mixed", "correct"} & set(values) else 10
        for name, value in values.items():
            if step >= first:
                row[names[name]] = value(step) if callable(value) else value

    return edit


def jitter(middle: float):
    return lambda step: middle + 0.01 * math.sin(7 * step)


@pytest.mark.parametrize(
    ("edit", "expected", "words"),
    [
        (fault(v1=-0.02), {"kl_0.01"}, "0.02, above 0.01"),
        (fault(v2=0.3), {"kl_0.01", "kl_0.1"}, "0.3, above 0.1"),
        (fault(v1=2.0), {"kl_0.01", "kl_0.1", "kl_1"}, "stop, go back"),
        (fault(norm=30.0), {"grad_norm"}, "Lower learning_rate"),
        (fault(norm=math.nan), {"grad_norm"}, "not finite"),
        (fault(credited=0.0), {"zero_advantages"}, "all advantages are zero"),
        (fault(reward=jitter(0.3)), {"reward_flat"}, "min 0, max 1, std 0.4"),
        (fault(reward=lambda step: 0.5 - 0.005 * step), {"reward_flat"}, "has not risen"),
        (fault(entropy=0.01), {"entropy_collapse"}, "from 0.8"),
        (fault(mixed=0.2, temperature=0.2), {"low_temperature"}, "temperature 0.2 explores little: in 80%"),
        (fault(beginnings=1 / 256), {"mode_collapse"}, "0.4% distinct"),
        (fault(tokens=lambda step: 100 + 30 * step), {"length"}, "answers grew from"),
        (fault(tokens=180, cut=0.6), {"length"}, "cut off, 5% at first"),
        (fault(correct=jitter(0.2)), {"format_alone"}, "only the format improves"),
    ],
)  # fmt: skip
def test_each_fault_sets_off_its_alarm_and_no_other_and_is_said_once(edit, expected, words):
    on, said = play(edit)
    assert set(on) == expected
    assert len(said) == len(expected) and any(words in text for _, text in said), said
    assert all(steps == list(range(steps[0], STEPS)) for steps in on.values()), "on from its onset to the end"


def test_what_is_no_fault():
    """A norm of few tokens; two batches without advantages; batches solved for good; a low temperature that explores all the same."""
    assert not play(lambda row, step: row.update({"optim/grad_norm": 50.0, "optim/frac_credited": 0.1}))[0]
    assert not play(lambda row, step: row.update({"optim/frac_credited": float(step % 3 == 0)}))[0]
    solved = {"optim/frac_credited": 0.0, "env/all/reward/min": 1.0, "env/all/reward/total": 1.0, "optim/entropy": 0.001}
    assert not play(lambda row, step: row.update(solved if step >= 20 else {}))[0]
    mastered = {"optim/entropy": 0.001, "env/all/reward/total": 0.95, "env/all/by_group/frac_mixed": 0.1, "sampler/temperature": 0.2}
    assert not play(lambda row, step: row.update(mastered))[0], "from the beginning on, so that it cannot rise"
    assert not play(lambda row, step: row.update({"sampler/temperature": 0.2}))[0]
    few = {"env/all/total_groups": 256, "env/all/by_group/frac_mixed": 0.0, "sampler/temperature": 0.5}
    assert not play(lambda row, step: row.update(few))[0], "one answer each: groups are never mixed"


def test_a_fault_that_comes_back_is_said_again_and_one_that_flickers_is_not():
    def at(*steps):
        return lambda row, step: row.update({"optim/kl_sample_train_v2": 0.02} if step in steps else {})

    assert [step for step, _ in play(at(5, 8, 12))[1]] == [5]
    assert [step for step, _ in play(at(5, 40))[1]] == [5, 40]


@pytest.mark.parametrize("cut", [3, 25, 45])
def test_alarms_go_on_from_the_rows_of_the_metrics_file(cut):
    """What is on and what is said after a resume is what an undisturbed run has: rows go through JSON, as in the file."""
    draw = random.Random(1)
    rows = [healthy(step, draw) for step in range(STEPS)]
    for step, row in enumerate(rows):
        fault(reward=jitter(0.3), entropy=0.01, v2=0.02)(row, step)
    whole = Alarms()
    undisturbed = [whole(row) for row in rows]
    written = [json.loads(json.dumps({**row, **metrics})) for row, (metrics, _) in zip(rows, undisturbed, strict=True)]
    resumed = Alarms(written[:cut])
    assert [resumed(row) for row in rows[cut:]] == undisturbed[cut:]


def test_only_what_a_row_has_is_judged():
    metrics, _ = Alarms()({"optim/grad_norm": 1.0, "optim/loss": 2.0})
    assert metrics == {"alarm/grad_norm": 0.0}
    assert len({alarm.name for alarm in ALARMS}) == len(ALARMS)


def test_metrics_of_samples_by_hand():
    def trajectory(text: str, tokens: int) -> Trajectory:
        action = SampledSequence([1] * tokens, [-0.5] * tokens)
        return Trajectory([Transition(ModelInput.from_ints([1]), action, 0.0, True, logs={"response": text})])

    long = "x" * 50
    groups = [TrajectoryGroup([trajectory(long + "a", 3), trajectory(long + "b", 2)], [0.0] * 2, [{}] * 2)]
    groups.append(TrajectoryGroup([trajectory("y" + long, 4), trajectory("", 1)], [0.0] * 2, [{}] * 2))
    assert sampled_metrics(groups) == {"env/all/total_groups": 2, "env/all/distinct_beginnings": 3 / 4}
    fields = {"target_tokens": [1, 2, 3], "advantages": [0.0, 0.5, -1.0], "mask": [0.0, 1.0, 1.0]}
    assert credited_share(groups, [Datum(ModelInput.from_ints([1, 2, 3]), fields)]) == 2 / 10


def test_the_recorded_default_run_is_silent():
    """Its file keeps few metrics: what they allow to be judged (KL, reward, entropy) stays off."""
    recorded = [json.loads(line) for line in (REPO / "bench/results/default_recipe.jsonl").read_text().splitlines()]
    alarms, judged = Alarms(), set()
    for row in recorded:
        if row["stage"] != "grpo" or "optim/entropy" not in row:
            continue
        row = {**row, "env/all/reward/total": row["reward/total"], "env/all/reward/min": 0.0, "env/all/reward/max": 1.0}
        row["env/all/reward/min"] = float(row["reward/total"] == 1.0)
        row["optim/kl_sample_train_v2"] = abs(row["optim/kl_sample_train_v1"])
        del row["optim/grad_norm"]  # it is a norm over the tokens with signal, whose share this file does not have
        metrics, said = alarms(row)
        judged |= set(metrics)
        assert not said and not any(metrics.values()), (row["step"], said)
    assert judged == {f"alarm/{name}" for name in ("kl_0.01", "kl_0.1", "kl_1", "reward_flat", "entropy_collapse")}


# ------------------------------------------------------------------------------------------------- through the real loop


def run(folder: Path, *words: str) -> list[dict[str, float]]:
    """Training rows of a short run of an untrained tiny model."""
    common = """--base-model tiny:addition --dataset addition --max-tokens 4 --batch-size 4 --group-size 4 --eval-every 0
        --rollouts-every 0 --output-dir""".split()
    execute(parse(["grpo", *common, str(folder / "run"), *words], METHODS, REPO / "recipes" / "addition.yaml", options=RunSettings))
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def test_a_reward_that_never_tells_answers_apart_is_said_by_a_real_run(tmp_path, capsys):
    words = ["--reward", "exact_match", "--steps", "4", "--save-every", "2"]
    rows = run(tmp_path, *words)  # an untrained model is never right
    assert [row["alarm/zero_advantages"] for row in rows] == [0, 0, 1, 1]
    assert not any(value for row in rows for name, value in row.items() if name.startswith("alarm/") and "zero" not in name)
    assert capsys.readouterr().out.count("all advantages are zero") == 1

    notes = tmp_path / "run" / "checkpoints.jsonl"  # resumed after two steps, it comes on at the third all the same
    notes.write_text(notes.read_text().splitlines()[0] + "\n")
    assert [row["alarm/zero_advantages"] for row in run(tmp_path, *words, "--resume")] == [0, 0, 1, 1]


def test_a_learner_that_scores_at_another_temperature_is_said_by_a_real_run(tmp_path, capsys, monkeypatch):
    class Mistaken(PolicyGradient):
        def learn(self, models, datums, progress):
            right = self.settings
            self.settings = dataclasses.replace(right, sampling=dataclasses.replace(right.sampling, temperature=3.0))
            metrics = super().learn(models, datums, progress)
            self.settings = right
            return metrics

    monkeypatch.setitem(METHODS, "grpo", dataclasses.replace(METHODS["grpo"], hooks=Mistaken))
    rows = run(tmp_path, "--reward", "exact_match", "--steps", "2", "--temperature", "0.05")
    assert all(row["alarm/kl_0.01"] for row in rows)
    assert capsys.readouterr().out.count("KL between sampler and learner") >= 1


@pytest.mark.slow
def test_a_learning_rate_that_breaks_the_model_is_said_by_a_real_run(tmp_path, capsys):
    graded = "def graded(prompt, response, meta):\n    return response.count('1') / 4 + int(prompt[0]) % 2\n"
    (tmp_path / "graded.py").write_text(graded)
    words = ["--reward", f"{tmp_path / 'graded.py'}:graded", "--steps", "14", "--learning-rate", "0.05", "--temperature", "1.0"]
    rows = run(tmp_path, *words)
    last = {name for name, value in rows[-1].items() if name.startswith("alarm/") and value}
    assert {"alarm/entropy_collapse", "alarm/mode_collapse"} <= last, last
    assert "entropy fell" in capsys.readouterr().out
