"""Test that each machine of a launch scores what its ranks sampled: the run equals one in which
rank 0 has all answers scored. Two ranks stand for two machines, each of a single process.
"""

import json
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from rank_server import shared_ranks
from safetensors.torch import load_file

CASE = str(Path(__file__).resolve().parents[1] / "sample_scoring_case.py")
RECIPE = """
method: grpo
base_model: tiny:addition
dataset: addition
learning_rate: 1e-3
steps: 3
batch_size: 8
group_size: 4
max_tokens: 24
eval_limit: 8
eval_every: 2
save_every: 1
rollouts_every: 1
reward_workers: 1
reward_timeout: 2
reward_check: false
self_test: false
reward: graded.py:grade
"""
# The reward fails in each way at some answers of the tiny model. It records them on its machine.
GRADED = """
import json, os, time
from rl.rewards import RewardResult
def grade(prompt, response, meta):
    name = f"scored-{os.environ['LC_MACHINE']}.jsonl"
    with open(os.path.join(os.path.dirname(__file__), name), "a") as file:
        file.write(json.dumps([response]) + "\\n")
    kind = sum(map(ord, response)) % 41
    if kind == 3:
        raise ValueError("an answer of kind 3")
    if kind == 5:
        os._exit(7)
    if kind == 7:
        time.sleep(1000)
    if kind == 11:
        return float("nan")
    return RewardResult(kind / 41, {"digits": sum(c.isdigit() for c in response)})
"""


def start(
    folder: Path, graded: str = GRADED, *words: str, script: str = CASE, world: int = 2, **changes
):
    """Start a run on ranks that are each the only one of its machine."""
    (folder / "graded.py").write_text(graded)
    lines = [line for line in RECIPE.splitlines() if line.partition(":")[0] not in changes]
    lines += [f"{name}: {value}" for name, value in changes.items()]
    (folder / "recipe.yaml").write_text("\n".join(lines) + "\n")
    options = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    words = ("recipe.yaml", "--output-dir", "out", *words)
    return shared_ranks().start(*words, cwd=folder, world=world, script=script, **options)


def run(folder: Path, *arguments: str, **changes) -> tuple[str, Path]:
    """Return (the output of rank 0, the run's folder) of a run that ends well."""
    launch = start(folder, *arguments, **changes)
    assert launch.wait(300) == [0, 0], launch.output()
    return launch.output(0), folder / "out"


def read_rows(folder: Path, name: str) -> list[dict]:
    """Return the rows of a file without fields that depend on the clock."""
    rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("checkpoints/*-final/model/model.safetensors")
    return load_file(str(file))


def read_records(run_folder: Path, name: str) -> list[list]:
    """Return what ranks or rewards have recorded beside the run's folder."""
    file = run_folder.parent / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def read_texts(run_folder: Path, name: str) -> Counter:
    """Return how often each answer was sampled or scored."""
    return Counter(text for (text,) in read_records(run_folder, name))


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """Return a run in which rank 0's machine scores all answers."""
    return run(tmp_path_factory.mktemp("first"), reward_machines="first")


@pytest.fixture(scope="module")
def everywhere(tmp_path_factory):
    """Return a run in which each machine scores what it sampled, which is the default."""
    return run(tmp_path_factory.mktemp("everywhere"))


def assert_equal_runs(folder: Path, expected: Path) -> None:
    assert read_rows(folder, "metrics.jsonl") == read_rows(expected, "metrics.jsonl")
    names = [path.name for path in sorted((expected / "rollouts").iterdir())]
    assert names and names == [path.name for path in sorted((folder / "rollouts").iterdir())]
    for name in names:
        if name.endswith(".jsonl"):
            assert (folder / "rollouts" / name).read_text() == (
                expected / "rollouts" / name
            ).read_text()
    weights, expected_weights = read_weights(folder), read_weights(expected)
    assert all(torch.equal(weights[name], expected_weights[name]) for name in expected_weights)


def assert_scored_where_sampled(folder: Path) -> None:
    """Each answer is scored once, on the machine that sampled it. Rank 0 has a few reference answers
    scored before the run, on any machine.
    """
    extra: Counter = Counter()
    for rank in (0, 1):
        sampled, scored = (read_texts(folder, f"{word}-{rank}") for word in ("sampled", "scored"))
        assert sampled and sampled <= scored
        extra += scored - sampled
    assert extra.total() <= 16


@pytest.mark.slow
def test_the_run_equals_one_that_rank_0_scores(first, everywhere):
    assert_equal_runs(everywhere[1], first[1])
    rows = read_rows(first[1], "metrics.jsonl")
    assert sum(row.get("reward/failed", 0) for row in rows) > 0
    for rank in (0, 1):  # the reward failed in each way on each machine
        texts = read_texts(everywhere[1], f"sampled-{rank}")
        kinds = {sum(map(ord, text)) % 41 for text in texts}
        assert kinds & {5, 7} and kinds & {3, 11}, (rank, kinds)


@pytest.mark.slow
def test_each_machine_scores_what_it_sampled(everywhere, first):
    assert_scored_where_sampled(everywhere[1])
    assert not read_texts(first[1], "scored-1")


@pytest.mark.slow
def test_rank_0_receives_numbers_alone(everywhere):
    messages = [row for row in read_records(everywhere[1], "received-0") if row[1]]
    assert sum(answers for _, answers, _, _ in messages) >= 3 * 16 + 2 * 4
    for num_bytes, answers, tokens, legible in messages:
        assert legible == []
        # int32 and float32 of each token; numbers, names and offsets of each answer and message
        assert num_bytes <= 8 * tokens + 400 * answers + 2000


@pytest.mark.slow
def test_a_machine_that_cannot_load_the_reward_leaves_its_answers_to_rank_0(first, tmp_path):
    """The second machine lacks a module of the reward: in its rank alone loading raises."""
    refusal = (
        'import os\nif os.environ.get("RANK") == "1":\n    raise ImportError("no such library")\n'
    )
    output, folder = run(tmp_path, refusal + GRADED)
    assert_equal_runs(folder, first[1])
    assert output.count("rank 0 has the answers of") == 1 and "no such library" in output
    assert not read_texts(folder, "sampled-1")  # its rank has no scorer
    assert read_texts(folder, "sampled-0") <= read_texts(folder, "scored-0")


@pytest.mark.slow
def test_a_killed_run_resumes_with_the_same_steps(everywhere, tmp_path):
    launch = start(tmp_path)
    metrics = tmp_path / "out" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (metrics.exists() and '"progress/batch": 1' in metrics.read_text()):
        assert time.monotonic() < deadline and not launch.poll()
        time.sleep(0.05)
    for rank in (0, 1):
        launch.kill(rank)
    launch.wait(60)
    launch = start(tmp_path, GRADED, "--resume")
    assert launch.wait(300) == [0, 0], launch.output()
    assert_equal_runs(tmp_path / "out", everywhere[1])


@pytest.mark.slow
def test_a_replay_of_overlapping_steps_is_the_same_run(tmp_path_factory):
    """Streams return samples before their scores: the log decides when these have arrived."""
    options = {"rollout_mode": "async", "max_steps_off_policy": 1, "steps": 4}
    _, recorded = run(tmp_path_factory.mktemp("recorded"), **options)
    assert_scored_where_sampled(recorded)
    words = (GRADED, "--replay", str(recorded))
    _, replayed = run(tmp_path_factory.mktemp("replayed"), *words, **options)
    assert_equal_runs(replayed, recorded)


@pytest.mark.slow
def test_what_ranks_cannot_score_is_scored_by_rank_0_with_a_reason(tmp_path):
    batched = (
        "from rl.rewards import register_reward\n"
        "@register_reward('lists', batched=True)\n"
        "def grade(prompts, responses, metas):\n"
        "    return [float(len(response)) for response in responses]\n"
    )
    output, folder = run(tmp_path, batched, steps=1)
    assert output.count("it takes many answers at once") == 1
    assert not read_texts(folder, "sampled-0")


@pytest.mark.slow
def test_all_machines_score_if_few_of_them_sample(tmp_path):
    options = {"rollout_mode": "async", "max_steps_off_policy": 1, "sampler_ranks": 1, "steps": 1}
    launch = start(tmp_path, GRADED, world=3, **options)
    assert launch.wait(300) == [0, 0, 0], launch.output()
    reason = "only 1 of the 3 machines have processes that sample"
    assert launch.output(0).count(reason) == 1
    assert not read_texts(tmp_path / "out", "sampled-2")  # its rank has no scorer
