"""Test learning-rate schedules against values computed by hand."""

import pytest

from rl.lr_schedule import compute_lr_factor


def test_constant_linear_cosine_by_hand():
    assert [compute_lr_factor("constant", s, 4) for s in range(4)] == [1.0] * 4
    assert [compute_lr_factor("linear", s, 4) for s in range(4)] == [1.0, 0.75, 0.5, 0.25]
    assert [compute_lr_factor("cosine", s, 4) for s in range(4)] == pytest.approx(
        [1.0, 0.8535533905932737, 0.5, 0.1464466094067262]
    )


def test_warm_up_rises_to_one_and_never_starts_at_zero():
    values = [compute_lr_factor("linear", s, 10, warmup=4) for s in range(10)]
    assert values[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert values[5:] == pytest.approx([5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])


def test_end_and_unknown():
    assert compute_lr_factor("cosine", 10, 10) == pytest.approx(0)
    with pytest.raises(ValueError, match="constant, linear, cosine"):
        compute_lr_factor("polynomial", 0, 10)
