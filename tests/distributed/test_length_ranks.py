"""Test two ranks of which only one may have a pair that needs two forwards: no rank waits for the
other, and the gradient equals that of a single process.
"""

import pytest
from length_ranks_case import CASES
from test_architectures import make_longrope_model
from test_distributed import assert_same_gradients, case_on_ranks

pytestmark = pytest.mark.campaign  # the single-process case is in test_architectures


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start") / "longrope"
    make_longrope_model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def one_process(start, tmp_path_factory):
    return case_on_ranks("length_ranks_case.py", start, tmp_path_factory.mktemp("alone"), None, 280)


@pytest.mark.parametrize("config", ["zero3", "ddp", "zero2", "fsdp2"])
def test_two_ranks_have_the_gradient_of_one_process(config, start, one_process, tmp_path):
    assert_same_gradients(
        one_process, case_on_ranks("length_ranks_case.py", start, tmp_path, config, 280), CASES
    )
