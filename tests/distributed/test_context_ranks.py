"""Test ranks that split each micro-batch by positions: gradients, logprobs and an update equal
those of a single process.
"""

import json
import shutil

import numpy as np
import pytest
from context_ranks_case import BY_LENGTHS, CASES, MODELS, REFUSED
from test_distributed import case_on_ranks, run_launch
from tiny_models import tiny_model

pytestmark = pytest.mark.slow
SCRIPT = "context_ranks_case.py"
BOUND = 1e-6  # rounding in fp32, relative to the norm of the gradient
# (launch config, processes, ranks of a group): each config, groups of two and of four, several
# groups
LAUNCHES = [
    ("ddp", 4, 4),
    ("fsdp2", 4, 2),
    ("zero3", 2, 2),
    *(
        pytest.param(*launch, marks=pytest.mark.campaign)
        for launch in [
            ("ddp", 2, 2),
            ("ddp", 4, 2),
            ("fsdp2", 2, 2),
            ("fsdp2", 4, 4),
            ("zero3", 4, 4),
            ("zero3", 4, 2),
            ("zero2", 4, 2),
        ]
    ),
]


@pytest.fixture(scope="module")
def initial_models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("starts")
    for name, (kind, sizes) in MODELS.items():
        tiny_model(kind, **sizes).save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def one_process(initial_models, tmp_path_factory):
    return case_on_ranks(
        SCRIPT, initial_models, tmp_path_factory.mktemp("alone"), None, 280, words=["1"]
    )


@pytest.mark.parametrize(("config", "processes", "size"), LAUNCHES)
def test_a_group_computes_what_one_process_computes(
    config, processes, size, initial_models, one_process, tmp_path
):
    result = case_on_ranks(SCRIPT, initial_models, tmp_path, config, 500, processes, [str(size)])
    assert len(result) >= len(CASES) - 1
    assert "is not exact for" in result.pop(REFUSED)
    for name, got in result.items():
        expected = one_process[name]
        assert got["by lengths"] == (BY_LENGTHS in name and "eager" not in name), name
        assert not expected["by lengths"]
        (gradients, norm), (shared, shared_norm) = expected["gradient"], got["gradient"]
        assert gradients.keys() == shared.keys() and norm > 0
        assert shared_norm == pytest.approx(norm, rel=BOUND), name
        for key, gradient in gradients.items():
            assert float((shared[key] - gradient).norm()) <= BOUND * norm, (name, key)
        # a sum over tokens, of both signs
        tokens = sum(map(len, expected["logprobs"]))
        assert got["loss"] == pytest.approx(expected["loss"], rel=BOUND, abs=tokens * BOUND), name
        for ours, theirs in zip(got["logprobs"], expected["logprobs"], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=BOUND, atol=BOUND, err_msg=name)


# ---------------------------------------------------------------------------------------- whole runs

REWARD = "def score(prompt, response, meta):\n    return float(sum(map(ord, response)) % 5)\n"
NEW_RUN = (
    "grpo --base-model tiny:addition --dataset addition --reward own.py:score --batch-size 4 "
    "--group-size 4 --max-tokens 6 --eval-every 0 --save-every 2 --token-budget 60 "
    "--learning-rate 1e-3 --no-eval-greedy"
)


def train(folder, words, config="zero3"):
    """Run `train.py WORDS` on two processes of a launch config; return its metrics."""
    options = [*words.split(), "--quiet", "--output-dir", folder]
    run_launch(config, folder.parent, *options, script="train.py", seconds=200)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_same_metrics(ours, theirs):
    """Check all metrics except times, within fp32 rounding (logprob differences are rounding)."""
    assert len(ours) == len(theirs) == 4
    for first, other in zip(ours, theirs, strict=True):
        for name, value in other.items():
            if not name.startswith(("time/", "progress/")) and isinstance(value, (int, float)):
                assert first[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_a_run_has_the_metrics_of_one_without_and_resumes_with_and_without(tmp_path):
    (tmp_path / "own.py").write_text(REWARD)
    expected = train(tmp_path / "plain", f"{NEW_RUN} --steps 4 --no-self-test")
    assert len({row["optim/grad_norm"] for row in expected}) == 4  # it learns at each step
    train(tmp_path / "shared", f"{NEW_RUN} --steps 2 --context-parallel-size 2")
    shutil.copytree(tmp_path / "shared", tmp_path / "without")
    assert_same_metrics(train(tmp_path / "shared", "--resume --steps 4 --no-self-test"), expected)
    words = "--resume --steps 4 --no-self-test --context-parallel-size 1"
    assert_same_metrics(train(tmp_path / "without", words), expected)
