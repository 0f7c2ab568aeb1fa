"""Test distillation at temperatures other than 1."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from algorithm_helpers import Done, make_method
from test_distill import TableScorer, trajectory

from rl.algorithms import Models, Progress
from rl.data import addition
from rl.models import load_tokenizer
from rl.renderers import get_renderer
from rl.rollout import TrajectoryGroup
from rl.types import ForwardBackwardOutput, OptimStepResponse, SampledSequence, SampleResponse


def test_both_sides_are_taken_at_the_temperature_of_the_samples():
    """At T = 1/2 the teacher's 1/2, 1/4, 1/4 become 2/3, 1/6, 1/6."""
    teacher = torch.log(torch.tensor([[0.5, 0.25, 0.25]] * 4))
    method = make_method("distill", teacher=("t",), temperature=0.5)
    group = TrajectoryGroup([trajectory([0, 1], np.log([0.25, 0.5]))], [0.0], [{}])
    models = Models(None, {"teachers": {"": TableScorer(teacher)}})
    (datum,) = method.compute_advantages([group], models)
    expected = np.log([(2 / 3) / 0.25, (1 / 6) / 0.5])
    assert datum.loss_fn_inputs["advantages"].array == pytest.approx(expected, abs=1e-6)
    requests = []

    def forward_backward(data, loss, config, *, divisor):
        requests.append((loss, config["temperature"], divisor))
        sums = {"loss:sum": 0.0, "active_tokens:sum": 2.0}
        return Done(ForwardBackwardOutput([{"logprobs": data[0].loss_fn_inputs["logprobs"]}], sums))

    step = Done(OptimStepResponse({"grad_norm": 1.0}))
    policy = SimpleNamespace(forward_backward=forward_backward, optim_step=lambda params: step)
    method.update(Models(policy), [datum], Progress(0, 1))
    assert requests == [("importance_sampling", 0.5, 2)]


def test_a_teachers_answers_are_drawn_as_the_settings_say():
    queries = []

    def sample_many(requests):
        queries.extend(requests)
        first = SampledSequence([4, 1], [-1.0, -1.0])
        return Done(([SampleResponse([first] * r.num_samples) for r in requests], {}))

    method = make_method("distill", teacher=("t",), learn_from="teacher", group_size=2,
                         temperature=0.7, max_tokens=5)  # fmt: skip
    renderer = get_renderer("plain", load_tokenizer("tiny:addition"))
    rows = list(addition("train"))[:3]
    rows[2] = replace(rows[0], tag="other")  # another data set, with the same weight
    teacher = SimpleNamespace(sample_many=sample_many)
    result = method._sample_teacher(rows, renderer, teacher, 11)
    params = [(r.params.temperature, r.params.max_tokens, r.seed, r.num_samples) for r in queries]
    assert params == [(0.7, 5, 11, 2)] * 3
    assert len(result) == 6 and result[0].loss_fn_inputs["weights"].array.sum() == 2
    streams = [r.problem for r in queries]
    assert len(set(streams)) == 3
    queries.clear()
    method._sample_teacher(rows[1:], renderer, teacher, 11)
    assert [r.problem for r in queries] == streams[1:]  # independent of the other rows in the batch
