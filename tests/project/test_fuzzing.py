"""Run each family of fuzz tests on many inputs. tests/fuzzing.py defines what a family is."""

import importlib
from pathlib import Path

import pytest
from fuzzing import run_family

FAMILIES = sorted(path.stem for path in Path(__file__).parents[1].rglob("test_fuzz_*.py"))
# Rounds of 1,000 inputs for a family with SHARE 1: about 100,000 inputs for all families.
ROUNDS, ROUND = 28, 1000
FIRST_SEED = 1000  # the seeds of `make test` are below 100


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", FAMILIES)
def test_many_inputs_are_accepted_or_refused_by_a_single_error(family):
    """A failure can be reproduced from the seed and the number of the input."""
    module = importlib.import_module(family)
    rounds = round(ROUNDS * getattr(module, "SHARE", 1.0))
    for seed in range(FIRST_SEED, FIRST_SEED + rounds):
        report = run_family(module.inputs, module.check, seed=seed, count=ROUND)
        assert not report.faults, (seed, report.faults[:3])
