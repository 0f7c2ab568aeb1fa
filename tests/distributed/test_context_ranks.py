"""Ranks that share each micro-batch by its positions: gradients, logprobs and an update are those
of one process.
"""

import numpy as np
import pytest
from context_ranks_case import CASES, MODELS
from test_distributed import case_on_ranks
from tiny_models import tiny_model

pytestmark = pytest.mark.slow
SCRIPT = "context_ranks_case.py"
BOUND = 1e-6  # rounding in fp32, relative to the norm of the gradient
# (launch config, processes, ranks of a group)
LAUNCHES = [
    ("ddp", 2, 2),
    ("fsdp2", 4, 2),
    ("zero3", 4, 4),
    *(
        pytest.param(*launch, marks=pytest.mark.campaign)
        for launch in [
            ("ddp", 4, 2),
            ("ddp", 4, 4),
            ("fsdp2", 2, 2),
            ("fsdp2", 4, 4),
            ("zero3", 2, 2),
            ("zero3", 4, 2),
            ("zero2", 4, 2),
        ]
    ),
]


@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("starts")
    for name, (kind, sizes) in MODELS.items():
        tiny_model(kind, **sizes).save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def alone(starts, tmp_path_factory):
    return case_on_ranks(SCRIPT, starts, tmp_path_factory.mktemp("alone"), None, 280, words=["1"])


@pytest.mark.parametrize(("config", "processes", "size"), LAUNCHES)
def test_a_group_computes_what_one_process_computes(
    config, processes, size, starts, alone, tmp_path
):
    found = case_on_ranks(SCRIPT, starts, tmp_path, config, 500, processes, [str(size)])
    assert len(found) >= len(CASES) - 1
    for name, got in found.items():
        expected = alone[name]
        (gradients, norm), (shared, shared_norm) = expected["gradient"], got["gradient"]
        assert gradients.keys() == shared.keys() and norm > 0
        assert shared_norm == pytest.approx(norm, rel=BOUND), name
        for key, gradient in gradients.items():
            assert float((shared[key] - gradient).norm()) <= BOUND * norm, (name, key)
        assert got["loss"] == pytest.approx(expected["loss"], rel=BOUND), name
        for ours, theirs in zip(got["logprobs"], expected["logprobs"], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=BOUND, atol=BOUND, err_msg=name)
