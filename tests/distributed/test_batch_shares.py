"""Test that a rank receives its share of a batch alone, and that two and four processes compute
what one process computes on the whole batch.
"""

import numpy as np
import pytest
from share_ranks_case import CASES
from test_distributed import case_on_ranks

pytestmark = pytest.mark.slow
SCRIPT = "share_ranks_case.py"
BOUND = 1e-6  # rounding in fp32, relative to the norm of the gradient
# (processes, ranks that share a micro-batch)
LAUNCHES = [(4, 2), *(pytest.param((n, 1), marks=pytest.mark.campaign) for n in (2, 4))]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return case_on_ranks(SCRIPT, folder, folder, None, 280, words=["1"])


@pytest.fixture(
    scope="module", params=LAUNCHES, ids=lambda launch: "processes, sharing {}, {}".format(*launch)
)
def launched(request, tmp_path_factory):
    processes, size = request.param
    folder = tmp_path_factory.mktemp("ranks")
    return (
        processes,
        size,
        case_on_ranks(SCRIPT, folder, folder, "ddp", 280, processes, [str(size)]),
    )


def assert_same_gradient(ours, theirs):
    (gradients, norm), (expected, expected_norm) = ours, theirs
    assert gradients.keys() == expected.keys() and norm > 0
    assert norm == pytest.approx(expected_norm, rel=BOUND)
    for key, gradient in expected.items():
        assert float((gradients[key] - gradient).norm()) <= BOUND * norm, key


@pytest.mark.parametrize("case", CASES)
def test_ranks_compute_what_one_process_computes(launched, one_process, case):
    ours, theirs = launched[2][case], one_process[case]
    assert_same_gradient(ours["gradient"], theirs["gradient"])
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    for got, expected in zip(ours["logprobs"], theirs["logprobs"], strict=True):
        np.testing.assert_allclose(got, expected, rtol=BOUND, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_a_rank_receives_its_share_of_the_bytes(launched, case):
    """Rank 0 receives nothing, and each other rank the part that its micro-batches are of the
    batch, with those that share them; the rest is the verbs.
    """
    processes, size, results = launched
    (first, *others), batch = results[case]["received"], results[case]["batch"]
    part = batch * size / processes
    assert first == 0 and len(others) == processes - 1
    assert all(0.8 * part < received < 1.25 * part for received in others), (others, batch)


def test_a_call_that_cannot_be_sent_leaves_the_ranks_in_step(launched, one_process):
    ours, theirs = launched[2]["refused"], one_process["refused"]
    assert "datum 7: target_tokens holds the id 99" in ours["errors"][0]
    assert "pickle" in ours["errors"][1].lower()
    assert_same_gradient(ours["gradient"], theirs["gradient"])
