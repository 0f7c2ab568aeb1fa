"""Test clustered standard errors, evaluation tables and paired evaluations."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from rank_server import run_script

from rl.errors import UserError
from rl.reporting import (
    compare_evaluations,
    format_markdown,
    list_evaluation_tables,
    make_table_rows,
    read_evaluation,
)
from rl.rollout import Trajectory, TrajectoryGroup, Transition
from rl.trainer import compute_evaluation_metrics, make_response_rows
from rl.trainer.evaluator import compute_clustered_error
from rl.types import ModelInput, Problem, SampledSequence

REPO = Path(__file__).resolve().parents[2]


def make_group(problem: int, answers: list[dict[str, float]], stop: str = "stop"):
    """Return the group of answers to a problem from their metrics, which include `reward`."""
    members = []
    for metrics in answers:
        others = {name: value for name, value in metrics.items() if name != "reward"}
        action, read = SampledSequence([2], [0.0], stop), ModelInput.from_ints([1])
        members.append(Trajectory([Transition(read, action, metrics["reward"], True, others)]))
    return TrajectoryGroup(members, [0.0] * len(members), [{}] * len(members), "set", problem)


def miller_error(clusters: list[list[float]]) -> float:
    """Return the clustered standard error by the formula of Miller's paper."""
    scores = [score for cluster in clusters for score in cluster]
    n, mean = len(scores), sum(scores) / len(scores)
    independent = sum((score - mean) ** 2 for score in scores) / n**2
    pairs = sum(
        (cluster[i] - mean) * (cluster[j] - mean)
        for cluster in clusters
        for i, j in itertools.permutations(range(len(cluster)), 2)
    )
    return math.sqrt(independent + pairs / n**2)


def compute_error(clusters: list[list[float]]) -> float:
    return compute_clustered_error([sum(c) for c in clusters], [float(len(c)) for c in clusters])


def test_the_clustered_error_is_millers_sum_over_pairs():
    rng = np.random.default_rng(0)
    for sizes in ([3] * 5, [1, 4, 2, 7], [1] * 6):
        clusters = [list(rng.random(size)) for size in sizes]
        count = len(sizes)
        assert compute_error(clusters) == pytest.approx(
            miller_error(clusters) * math.sqrt(count / (count - 1))
        )
    # clusters of equal size: the standard error of the mean of their means
    clusters = [list(rng.random(4)) for _ in range(9)]
    means = [np.mean(cluster) for cluster in clusters]
    assert compute_error(clusters) == pytest.approx(np.std(means, ddof=1) / 3)
    # repeated answers add no information
    once = [[0.0], [1.0], [1.0], [0.0], [1.0]]
    assert compute_error([cluster * 8 for cluster in once]) == pytest.approx(compute_error(once))


def test_the_clustered_error_is_that_of_all_resampled_problems():
    """Enumerate all 5^5 ways to draw five problems with replacement."""
    rng = np.random.default_rng(1)
    means = rng.random((5, 3)).mean(1)
    draws = [np.mean(draw) for draw in itertools.product(means, repeat=5)]
    expected = np.std(draws) * math.sqrt(5 / 4)
    assert compute_clustered_error(list(3 * means), [3.0] * 5) == pytest.approx(expected)
    assert (
        compute_clustered_error([1e200, -1e200], [1.0, 1.0]) == math.inf
    )  # a square beyond floats


def test_the_error_of_a_ratio_is_that_of_a_simulation():
    """Prompts have one to three instructions; the ratio is the share of followed instructions."""
    rng = np.random.default_rng(2)
    counts = rng.integers(1, 4, (4000, 200))
    skill = rng.beta(1, 1, (4000, 200))
    totals = rng.binomial(counts, skill)
    ratios = totals.sum(1) / counts.sum(1)
    errors = [
        compute_clustered_error(t.astype(float).tolist(), c.astype(float).tolist())
        for t, c in zip(totals[:400], counts[:400], strict=True)
    ]
    assert np.mean(errors) == pytest.approx(ratios.std(), rel=0.04)


def test_seeds_and_samples_share_problems():
    correct = [[1, 0, 1, 1], [0, 0, 0, 1], [1, 1, 1, 1]]  # two samples from each of two seeds
    groups = [
        make_group(problem, [{"reward": value, "correct": value} for value in row[at : at + 2]])
        for at in (0, 2)
        for problem, row in enumerate(correct)
    ]
    metrics = compute_evaluation_metrics(groups, 4)
    means = np.mean(correct, axis=1)
    assert metrics["correct"] == metrics["pass@1"] == pytest.approx(means.mean())
    error = np.std(means, ddof=1) / 3**0.5
    assert metrics["standard error of correct"] == pytest.approx(error)
    assert metrics["standard error of mean reward"] == pytest.approx(error)
    pairs = [
        [max(row[i], row[j]) for i, j in itertools.combinations(range(4), 2)] for row in correct
    ]
    assert metrics["pass@2"] == pytest.approx(np.mean(pairs))
    assert metrics["pass@4"] == 1.0 and metrics["truncated"] == 0.0


def test_the_correctness_that_a_reward_of_episodes_reports_counts():
    """It is a metric of the episode, not of its last turn."""
    groups = [make_group(problem, [{"reward": 1.0}] * 4) for problem in range(2)]
    for group in groups:
        group.metrics_G = [{"correct": float(i % 2)} for i in range(4)]
    metrics = compute_evaluation_metrics(groups, 4)
    assert metrics["correct"] == metrics["pass@1"] == 0.5 and metrics["pass@4"] == 1.0
    rows = make_response_rows(groups[:1], [Problem([], index=0)])
    assert [row["correct"] for row in rows] == [0.0, 1.0] * 2


@pytest.mark.parametrize("correct", [0.4, 2.0, -1.0])
def test_partly_correct_answers_have_no_pass_at_k(correct):
    group = make_group(0, [{"reward": correct, "correct": correct}] * 4)
    metrics = compute_evaluation_metrics([group], 4)
    assert metrics["correct"] == pytest.approx(correct)
    assert not [name for name in metrics if "pass@" in name]


def test_accuracies_of_instructions():
    answers = [
        [(1, 1, 1, 1, 1)],  # correct, loose, instructions, followed strictly, followed loosely
        [(0, 1, 3, 2, 3)],
        [(0, 0, 2, 0, 1)],
    ]
    names = ("correct", "loose", "instructions", "instructions_strict", "instructions_loose")
    groups = [
        make_group(i, [dict(zip(names, values, strict=True), reward=values[0]) for values in row])
        for i, row in enumerate(answers)
    ]
    metrics = compute_evaluation_metrics(groups, 1)
    expected = {
        "prompt_level_strict_acc": 1 / 3,
        "prompt_level_loose_acc": 2 / 3,
        "inst_level_strict_acc": 3 / 6,
        "inst_level_loose_acc": 5 / 6,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    rows = make_table_rows("ifeval", metrics, 3, 3)
    assert {row["metric"] for row in rows} == set(expected)
    # residuals 1 - 1/2, 2 - 3/2, 0 - 2/2: sum of squares 3/2
    assert rows[1]["metric"] == "inst_level_strict_acc"
    assert rows[1]["standard_error"] == pytest.approx(math.sqrt(3 / 2 * 3 / 2) / 6)


def test_the_table_has_what_a_reader_needs():
    cut = make_group(1, [{"reward": 0.5}], "length")
    metrics = compute_evaluation_metrics([make_group(0, [{"reward": 2.0}]), cut], 1)
    (row,) = make_table_rows("my|set", metrics, 2, 2)
    assert row == {
        "dataset": "my|set", "metric": "mean reward", "mean": 1.25,
        "standard_error": pytest.approx(0.75), "problems": 2, "answers": 2, "truncated": 0.5,
    }  # fmt: skip
    (single,) = make_table_rows("b", compute_evaluation_metrics([cut], 1), 1, 1)
    assert format_markdown([row, single]).splitlines() == [
        "| dataset | metric | mean | standard error | problems | answers | truncated |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
        "| my\\|set | mean reward | 1.2500 | 0.7500 | 2 | 2 | 0.5000 |",
        "| b | mean reward | 0.5000 | n/a | 1 | 1 | 1.0000 |",
    ]


def make_evaluation(scores: list[list[int]], dataset: str = "aime") -> dict:
    rows = [
        {"problem": i, "prompt": f"p{i}", "reward": 0.0, "correct": float(score)}
        for i, row in enumerate(scores)
        for score in row
    ]
    return {"dataset": dataset, "table": [], "rows": rows}


def test_two_evaluations_are_paired_by_problem_and_set():
    before = {"table": [], "datasets": [make_evaluation([[0, 1], [1, 1], [0, 0]])]}
    after = make_evaluation([[1, 1], [1, 1], [0, 1], [1, 1]])
    ((name, paired),) = compare_evaluations(before, after)
    differences = [0.5, 0.0, 0.5]
    assert name == "aime" and paired.problems == 3
    assert paired.difference == pytest.approx(np.mean(differences))
    assert paired.standard_error == pytest.approx(np.std(differences, ddof=1) / 3**0.5)
    others = [make_evaluation([[1]], "gpqa"), make_evaluation([[1]], "ifeval")]
    assert compare_evaluations({"table": [], "datasets": others}, after) == []


def test_a_data_set_is_paired_under_any_name_that_requests_it():
    """`gsm8k`, `openai/gsm8k` and a run's held-out set contain the same problems."""
    scores, later = [[0], [1]], [[1], [1]]
    parts = [
        {**make_evaluation(scores, name), "source": source}
        for name, source in (("openai/gsm8k", "gsm8k/test"), ("aime:rows.jsonl", "rows/test"))
    ]
    several = {"table": [], "datasets": parts}
    after = {**make_evaluation(later, "gsm8k"), "source": "gsm8k/test"}
    ((name, paired),) = compare_evaluations(several, after)
    assert name == "gsm8k" and (paired.problems, paired.difference) == (2, 0.5)
    # single data sets are compared directly; the rows' tags are those of the requested names
    for row in parts[1]["rows"]:
        row["tag"] = "rows"
    ((_, paired),) = compare_evaluations(parts[1], make_evaluation(later, "aime"))
    assert paired.problems == 2
    # the requested name distinguishes two files of the same name
    files = [
        {**make_evaluation(rows, name), "source": "rows/test"}
        for name, rows in (("aime:a/rows.jsonl", [[0]]), ("aime:b/rows.jsonl", [[1]]))
    ]
    both = {"table": [], "datasets": files}
    assert [paired.difference for _, paired in compare_evaluations(both, both)] == [0.0, 0.0]
    other = {**make_evaluation([[1]]), "rows": [{"problem": 0, "prompt": "?", "reward": 1.0}]}
    assert compare_evaluations(parts[0], other) == []


def test_other_files_in_the_folder_are_no_evaluations(tmp_path: Path):
    folder = tmp_path / "evaluations"
    folder.mkdir()
    for name, text in (("a", "{"), ("b", "[]"), ("c", '{"table": 1}'), ("d", '{"table": [1]}')):
        (folder / f"{name}.json").write_text(text)
    (folder / "link.json").symlink_to(tmp_path / "gone.json")
    assert [table["name"] for table in list_evaluation_tables(tmp_path)] == ["d.json"]
    assert list_evaluation_tables(tmp_path / "none") == []
    with pytest.raises(UserError, match=r"b.json is no evaluation: expected a .json file"):
        read_evaluation(folder / "b.json")


@pytest.mark.slow
def test_several_sets_samples_and_seeds_make_one_table(tmp_path: Path):
    """Evaluate an untrained model. Its answers must be scored exactly as written."""
    aime = [{"problem": f"Find {i}.", "answer": str(i)} for i in range(3)]
    choice = [{"question": f"{i}?", "choices": ["yes", "no"], "answer": "A"} for i in range(2)]
    rule = {"instruction_id_list": ["punctuation:no_comma", "keywords:existence"]}
    rule |= {"kwargs": [{}, {"keywords": ["zebra crossing"]}]}
    instructions = [{"prompt": f"Answer {i}.", **rule} for i in range(2)]
    for name, rows in (("aime", aime), ("gpqa", choice), ("ifeval", instructions)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = [f"{name}:{name}.jsonl" for name in ("aime", "gpqa", "ifeval")]
    words = "--samples 2 --seeds 3 4 --max-tokens 6 --output all.json".split()
    done = run_script("evaluate.py", "tiny:ascii", "--dataset", *names, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "all.json").read_text())
    table, text = content["table"], (tmp_path / "all.md").read_text()
    assert text == format_markdown(table) and text.strip() in done.stdout
    metrics = [(row["dataset"].partition(":")[0], row["metric"]) for row in table]
    passes = ["pass@1", "pass@2", "pass@4"]
    accuracies = [
        f"{level}_level_{kind}_acc" for kind in ("strict", "loose") for level in ("prompt", "inst")
    ]
    assert metrics == [
        *(("aime", name) for name in ["correct", *passes]),
        *(("gpqa", name) for name in ["correct", *passes]),
        *(("ifeval", name) for name in [*accuracies, *passes]),
    ]
    for part, problems in zip(content["datasets"], (3, 2, 2), strict=True):
        assert part["seeds"] == [3, 4] and part["problems"] == problems
        assert len(part["rows"]) == part["answers"] == 4 * problems
        assert {row["seed"] for row in part["rows"]} == {3, 4}
        assert part["correct"] == np.mean([row["correct"] for row in part["rows"]])
    followed = [row["instructions_strict"] for row in content["datasets"][2]["rows"]]
    strict = next(row for row in table if row["metric"] == "inst_level_strict_acc")
    assert strict["mean"] == pytest.approx(sum(followed) / 16) and 0 < strict["mean"] <= 0.5

    # a run with only the second seed draws the same samples; the weights may be the last argument
    words = "--seed 4 --samples 2 --max-tokens 6 --baseline all.json --output b.json".split()
    words += ["--dataset", names[0], "tiny:ascii"]
    done = run_script("evaluate.py", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    single = json.loads((tmp_path / "b.json").read_text())
    both = content["datasets"][0]["rows"]
    assert [row["response"] for row in single["rows"]] == [
        row["response"] for row in both if row["seed"] == 4
    ]
    assert single["comparison"][0]["problems"] == 3
    assert single["comparison"][0]["sentence"] in done.stdout

    done = run_script("evaluate.py", "tiny:ascii", "--baseline", "gone.json", cwd=tmp_path)
    message = "gone.json cannot be read as an evaluation"
    assert done.returncode == 2 and message in " ".join(done.stderr.split()), done.stderr
