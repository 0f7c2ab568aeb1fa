"""Test that the bounds in the settings reach a policy-gradient loss."""

import numpy as np
import pytest
from algorithm_helpers import LocalPolicy
from helpers import call

from rl.algorithms import GRPO, GrpoSettings, Models, PolicyGradientSettings, Progress
from rl.algorithms.grpo import variant_settings
from rl.config import OptimSettings
from rl.losses import get_loss
from rl.types import Datum, ModelInput, TensorData


def datum(advantages):
    """Return a datum with two prompt tokens and one action per advantage."""
    tokens, zeros = [1, 2, *range(3, 3 + len(advantages))], [0.0]
    fields = {
        "target_tokens": tokens[1:],
        "advantages": zeros + list(advantages),
        "mask": zeros + [1.0] * len(advantages),
    }
    return Datum(ModelInput.from_ints(tokens[:-1]), fields)


def make_drifted_datum(policy, ratio, advantage):
    """Return a datum of two actions sampled with 1 / `ratio` of the policy's probability."""
    first = datum([advantage] * 2)
    config = {"temperature": GrpoSettings().sampling.temperature}
    arguments = (0, [first], get_loss("importance_sampling"), config, 1.0, False)
    (output,), _ = call(policy.worker, "forward_backward", *arguments)
    mask = first.loss_fn_inputs["mask"].array != 0
    logprobs = np.where(mask, output["logprobs"] - np.log(ratio), 0.0).astype(np.float32)
    return Datum(first.model_input, {**first.loss_fn_inputs, "logprobs": TensorData(logprobs)})


# (settings, ratio, advantage, whether the gradient is nonzero)
CLIPS = [
    (PolicyGradientSettings(), 1.25, 1.0, False),  # 0.8 to 1.2
    (PolicyGradientSettings(), 1.15, 1.0, True),
    (PolicyGradientSettings(), 0.75, -1.0, False),
    (PolicyGradientSettings(clip_low=0.7), 0.75, -1.0, True),
    (PolicyGradientSettings(clip_high=1.1), 1.15, 1.0, False),
    (variant_settings("dapo").policy_gradient, 1.25, 1.0, True),  # 1.28 above, 0.8 below
    (variant_settings("dapo").policy_gradient, 1.3, 1.0, False),
    (variant_settings("dapo").policy_gradient, 0.75, -1.0, False),
    (variant_settings("gspo").policy_gradient, 1.001, 1.0, False),  # 1 + 4e-4
    (variant_settings("cispo").policy_gradient, 4.0, 1.0, True),
]


@pytest.fixture(scope="module")
def policy():
    return LocalPolicy()


@pytest.mark.parametrize(("policy_gradient", "ratio", "advantage", "learns"), CLIPS)
def test_clip_bounds_are_those_of_the_settings(policy, policy_gradient, ratio, advantage, learns):
    optim = OptimSettings(learning_rate=1e-2)
    method = GRPO(GrpoSettings(policy_gradient=policy_gradient, optim=optim))
    datum = make_drifted_datum(policy, ratio, advantage)
    metrics = method.update(Models(policy), [datum], Progress(0, 1))
    assert (metrics["optim/grad_norm"] > 0) == (metrics["optim/clip_frac"] == 0) == learns
