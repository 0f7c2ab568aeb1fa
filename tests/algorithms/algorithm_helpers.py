"""Helpers shared by the tests of several methods."""

from __future__ import annotations

import numpy as np
import torch
from helpers import SeparateCalls, call, make_worker

from rl.algorithms import METHODS
from rl.config import unflatten_settings
from rl.losses import get_loss
from rl.types import Datum, ForwardBackwardOutput, ModelInput, OptimStepResponse, TensorData


def make_method(name: str = "grpo", **flat):
    """Return a method with settings by their flat names, as in a recipe."""
    problems: list[str] = []
    settings = unflatten_settings(METHODS[name].Settings, flat, problems, "a test")
    assert not problems, problems
    return METHODS[name](settings)


class Done:
    """A future that already has its result."""

    def __init__(self, value):
        self.value = value

    def result(self):
        return self.value


class LocalPolicy(SeparateCalls):
    """A training client on a worker in this process."""

    def __init__(self):
        self.worker = make_worker()

    def forward_backward(self, data, loss_fn, config, *, divisor):
        arguments = (0, list(data), get_loss(loss_fn), dict(config), divisor, True)
        outputs, metrics = call(self.worker, "forward_backward", *arguments)
        rows = [{k: TensorData(v, "float32") for k, v in row.items()} for row in outputs]
        return Done(ForwardBackwardOutput(rows, metrics))

    def optim_step(self, params):
        return Done(OptimStepResponse(call(self.worker, "optim_step", 0, params)))

    def weights(self):
        parameters = self.worker.learners[0].trainable.values()
        return torch.cat([p.detach().reshape(-1).clone() for p in parameters])


class FixedScores:
    """Models with a policy that returns fixed logprobs for each datum."""

    def __init__(self, lp_D):
        self.policy, self.lp_D = self, lp_D

    def forward(self, datums, loss, config):
        return Done(ForwardBackwardOutput([{"logprobs": TensorData(lp)} for lp in self.lp_D], {}))


def target_logprobs(client, datums) -> list[np.ndarray]:
    """Return a client's logprobs of the targets of each datum."""
    plain = [
        Datum(d.model_input, {"target_tokens": d.loss_fn_inputs["target_tokens"]}) for d in datums
    ]
    outputs = client.forward(plain, "cross_entropy").result().loss_fn_outputs
    return [output["logprobs"].array for output in outputs]


def score_sequences(policy, sequences: list[list[int]]) -> list[np.ndarray]:
    """Return a client's logprobs of each sequence's tokens after the first."""
    datums = [Datum(ModelInput.from_ints(s[:-1]), {"target_tokens": s[1:]}) for s in sequences]
    return target_logprobs(policy, datums)


def off_the_policy(policy, groups, rng: np.random.Generator) -> None:
    """Give every sampled token a logprob slightly different from the learner's."""
    turns = [
        turn for group in groups for member in group.trajectories_G for turn in member.transitions
    ]
    texts = [[*turn.ob.to_ints(), *turn.ac.tokens] for turn in turns]
    for turn, lp in zip(turns, score_sequences(policy, texts), strict=True):
        reference = lp[-len(turn.ac.tokens) :]
        turn.ac.logprobs = (
            reference + rng.normal(0, 0.25, len(reference)) + rng.normal(0, 0.1)
        ).tolist()
