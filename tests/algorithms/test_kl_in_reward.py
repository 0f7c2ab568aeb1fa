"""Test the KL penalty that is subtracted from advantages."""

import numpy as np
import pytest

from rl.algorithms import apply_kl_penalty
from rl.types import Datum, ModelInput


def charges_by_hand(gap_T: np.ndarray, mask_T: np.ndarray, discount: float) -> np.ndarray:
    """Return each action's gap plus discount^k times the gap of the k-th action after it."""
    actions = np.flatnonzero(mask_T)
    result = np.zeros(len(gap_T))
    for i, t in enumerate(actions):
        result[t] = sum(discount**k * gap_T[later] for k, later in enumerate(actions[i:]))
    return result


@pytest.mark.parametrize("discount", [0.0, 0.5, 0.9, 1.0])
def test_observations_between_actions_discount_nothing(discount):
    rng = np.random.default_rng(4)
    datums, references, gaps, masks = [], [], [], []
    for observations in (0, 1, 3, 7):
        pattern = ([1, 1] + [0] * observations) * 3 + [1]
        mask = np.array([0, 0, *pattern], np.float32)
        q, ref = (rng.normal(-1, 0.5, len(mask)).astype(np.float32) for _ in range(2))
        fields = {
            "target_tokens": [1] * len(mask),
            "logprobs": q * mask,
            "advantages": mask * 0.25,
            "mask": mask,
        }
        datums.append(Datum(ModelInput.from_ints([1] * len(mask)), fields))
        references.append(ref)
        gaps.append((q.astype(np.float64) - ref) * mask)
        masks.append(mask != 0)
    charges = [charges_by_hand(gap, mask, discount) for gap, mask in zip(gaps, masks, strict=True)]
    mean = np.concatenate(
        [charge[mask] for charge, mask in zip(charges, masks, strict=True)]
    ).mean()
    result, _ = apply_kl_penalty(datums, references, 0.3, discount)
    for datum, charge, mask in zip(result, charges, masks, strict=True):
        expected = np.where(mask, 0.25 + 0.3 * (mean - charge), 0.0)
        np.testing.assert_allclose(datum.loss_fn_inputs["advantages"].array, expected, atol=1e-6)
