"""One update of a policy-gradient method: what a sequence weighs, what is said of its loss, and
what moves no weight.
"""

import numpy as np
import pytest
import torch
from helpers import call, make_worker
from test_datums import turn

from rl.algorithms import GRPO, GrpoSettings, Models, PolicyGradientSettings, Progress
from rl.algorithms.grpo_settings import variant_settings
from rl.algorithms.update import compute_divisor, split_into_substeps, weight_by_sequence
from rl.config import OptimSettings
from rl.losses import get_loss
from rl.rollout import Trajectory, TrajectoryGroup
from rl.types import Datum, ForwardBackwardOutput, ModelInput, OptimStepResponse, TensorData


class Done:
    def __init__(self, value):
        self.value = value

    def result(self):
        return self.value


class Policy:
    """A training client on a worker of this process."""

    def __init__(self):
        self.worker = make_worker()

    def forward_backward(self, data, loss_fn, config, *, divisor):
        outputs, metrics = call(
            self.worker,
            "forward_backward",
            0,
            list(data),
            get_loss(loss_fn),
            dict(config),
            divisor,
            True,
        )
        return Done(
            ForwardBackwardOutput(
                [{k: TensorData(v, "float32") for k, v in one.items()} for one in outputs], metrics
            )
        )

    def optim_step(self, params):
        return Done(OptimStepResponse(call(self.worker, "optim_step", 0, params)))

    def weights(self):
        return torch.cat(
            [p.detach().reshape(-1).clone() for p in self.worker.learners[0].trainable.values()]
        )


def learn(policy, datums, *, optim=None, **given):
    settings = GrpoSettings(
        policy_gradient=PolicyGradientSettings(**given),
        optim=optim or OptimSettings(learning_rate=1e-2),
    )
    return GRPO(settings).update(Models(policy), datums, Progress(0, 1))


def datum(advantages):
    """After two prompt tokens one action for each advantage."""
    tokens, zeros = [1, 2, *range(3, 3 + len(advantages))], [0.0]
    fields = {
        "target_tokens": tokens[1:],
        "advantages": zeros + list(advantages),
        "mask": zeros + [1.0] * len(advantages),
    }
    return Datum(ModelInput.from_ints(tokens[:-1]), fields)


@pytest.mark.parametrize(
    ("normalise", "expected"),
    [("sequence_means", -(1.0 - 0.5) / 2), ("tokens", -(2 * 1.0 - 4 * 0.5) / 6)],
)
def test_the_logged_policy_loss_by_hand(normalise, expected):
    """At ratio 1 the loss of a token is minus its advantage: 1 on two tokens, -0.5 on four."""
    metrics = learn(
        Policy(),
        [datum([1.0] * 2), datum([-0.5] * 4)],
        normalise=normalise,
        loss="importance_sampling",
    )
    assert metrics["optim/policy_loss"] == pytest.approx(expected, abs=1e-6)


def drifted(policy, ratio, advantage):
    """A datum whose two actions the policy gives `ratio` times the probability that they were drawn
    with.
    """
    one = datum([advantage] * 2)
    config = {"temperature": GrpoSettings().sampling.temperature}
    (output,), _ = call(
        policy.worker,
        "forward_backward",
        0,
        [one],
        get_loss("importance_sampling"),
        config,
        1.0,
        False,
    )
    mask = one.loss_fn_inputs["mask"].array != 0
    logprobs = np.where(mask, output["logprobs"] - np.log(ratio), 0.0).astype(np.float32)
    return Datum(one.model_input, {**one.loss_fn_inputs, "logprobs": TensorData(logprobs)})


# (settings, ratio, advantage, whether a gradient is left): each bound on its way from the settings
# to the loss
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


@pytest.mark.parametrize(("policy_gradient", "ratio", "advantage", "learns"), CLIPS)
def test_clip_bounds_are_those_of_the_settings(policy_gradient, ratio, advantage, learns):
    policy = Policy()
    method = GRPO(
        GrpoSettings(policy_gradient=policy_gradient, optim=OptimSettings(learning_rate=1e-2))
    )
    metrics = method.update(Models(policy), [drifted(policy, ratio, advantage)], Progress(0, 1))
    assert (metrics["optim/grad_norm"] > 0) == learns and (
        metrics["optim/clip_frac"] == 0
    ) == learns


# ------------------------------------------------------------- an episode that makes several datums


def credited(*, cut):
    """Two episodes, of 1 + 3 and of 2 action tokens, with rewards 1 and 0; the first one's second
    turn continues it or does not.
    """
    second = turn([9, 9] if cut else [1, 2, 3, 4], [5, 6, 7], [-1.0] * 3)
    first = Trajectory([turn([1, 2], [3], [-1.0]), second])
    members = [first, Trajectory([turn([1, 2], [4, 5], [-1.0] * 2)])]
    members[0].transitions[-1].reward = 1.0
    return GRPO(GrpoSettings()).compute_advantages(
        [TrajectoryGroup(members, [0.0] * 2, [{}] * 2)], None
    )


def weights_of(datums, normalise, parts=1):
    """What each action's (ratio 1) gradient is multiplied with, in order: its advantage over its
    optimizer step's divisor.
    """
    if normalise == "sequence_means":
        datums = weight_by_sequence(datums)
    found = []
    for part in split_into_substeps(datums, parts):
        size = compute_divisor(part, normalise, 10)
        found += [
            a / size
            for d in part
            for a in d.loss_fn_inputs["advantages"].array[d.loss_fn_inputs["mask"].array != 0]
        ]
    return found


@pytest.mark.parametrize(("normalise", "first", "second"), [
    ("sequence_means", 0.5 / 4 / 2, -0.5 / 2 / 2), ("sequences", 0.5 / 2, -0.5 / 2),
    ("constant", 0.5 / 20, -0.5 / 20),
])  # fmt: skip
def test_an_episode_weighs_the_same_however_many_datums_it_makes(normalise, first, second):
    one, two = credited(cut=False), credited(cut=True)
    assert (len(one), len(two)) == (2, 3)
    for datums in (one, two):
        assert weights_of(datums, normalise) == pytest.approx([first] * 4 + [second] * 2)
    assert [d.episode_share for d in two] == [0.25, 0.75, 1.0]
    a, b, c = (
        weights_of(two[:1], normalise),
        weights_of(two[:2], normalise),
        weights_of(two[1:], normalise),
    )
    scale = 2 / np.array([0.25, 1.0, 1.75])  # episodes in each of these optimizer steps
    assert a == pytest.approx([first * scale[0]]) and b == pytest.approx([first * scale[1]] * 4)
    assert c == pytest.approx([first * scale[2]] * 3 + [second * scale[2]] * 2)


# --------------------------------------------------------------------------------- nothing to learn


def test_a_batch_without_signal_moves_no_weight_whatever_adam_remembers():
    policy, optim = Policy(), OptimSettings(learning_rate=1e-2, weight_decay=0.1)
    start = policy.weights()
    metrics = learn(
        policy, [datum([1.0, 1.0]), datum([-1.0])], optim=optim, loss="importance_sampling"
    )
    moved = policy.weights()
    assert not torch.equal(moved, start) and "optim/skipped_no_signal" not in metrics
    metrics = learn(
        policy, [datum([0.0, 0.0]), datum([0.0])], optim=optim, loss="importance_sampling"
    )
    assert torch.equal(policy.weights(), moved)
    assert metrics["optim/skipped_no_signal"] == 1
    assert metrics["optim/grad_norm"] == 0
    assert metrics["optim/lr"] == 1e-2
    # an update like any other to what counts them: streams, schedules, checkpoints
    assert policy.worker.learners[0].version == 2
    metrics = learn(
        policy,
        [datum([0.0, 0.0]), datum([0.0])],
        optim=optim,
        loss="importance_sampling",
        entropy_coef=0.1,
    )
    assert not torch.equal(policy.weights(), moved) and "optim/skipped_no_signal" not in metrics
