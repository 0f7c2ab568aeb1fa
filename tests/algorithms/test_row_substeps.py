"""Test methods that learn from rows with several answers."""

import numpy as np
import pytest
from algorithm_helpers import make_method
from helpers import SeparateCalls

from rl import ServiceClient
from rl.algorithms import Models, Progress
from rl.config import ModelSettings
from rl.judges import restore_full_input
from rl.trainer import make_renderer
from rl.trainer.stage_models import StageModelFactory
from rl.types import Problem, StoredAnswer

ROWS = 8
OFTEN = {"steps": 4, "learning_rate": 1e-3}


def make_problem(i, **more):
    ask = [{"role": "user", "content": f"{i}+1="}]
    return Problem(ask, response=f"{i + 1}", index=i, tag="t", **more)


def make_pair_problem(i):
    return make_problem(i, rejected=f"{i + 2}0")


def single(i):
    return make_problem(i, meta={"label": i % 3 > 0})


def make_stored_problem(i):
    texts = (1.0, f"{i + 1}"), (0.0, f"{i + 2}0")
    answers = tuple(StoredAnswer(*pair, place="here") for pair in texts)
    return Problem([{"role": "user", "content": f"{i}+1="}], answers=answers, index=i, tag="t")


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with ServiceClient(output_dir=tmp_path_factory.mktemp("out"), seed=3) as service:
        yield service


class RecordingPolicy(SeparateCalls):
    """A policy that records the datums of each optimizer step."""

    def __init__(self, policy):
        self._policy, self.steps = policy, []

    def __getattr__(self, name):
        return getattr(self._policy, name)

    def forward_backward(self, datums, *args, **kwargs):
        self.steps.append(list(datums))
        return self._policy.forward_backward(datums, *args, **kwargs)


def learn(service, method, rows):
    """Update a policy once; return the datums, and those of each optimizer step."""
    client = service.create_full_training_client("tiny:addition", seed=2)
    settings = ModelSettings()
    hosts = StageModelFactory(service, client, settings, None, {}, 2)
    policy = RecordingPolicy(client)
    models = Models(policy, method.required_models(hosts))
    datums = method.build_datums(rows, make_renderer(client, None), models, 0)
    method.update(models, datums, Progress(0, 4))
    return datums, policy.steps


def index_datums(steps, datums):
    return [
        [next(i for i, first in enumerate(datums) if first is d) for d in part] for part in steps
    ]


def test_no_prompt_of_a_mixed_batch_stands_beside_an_answer_of_its_own(service):
    """Batches mix pairs and single answers in any order."""
    for rows in (
        [single(0), make_pair_problem(1), single(2), make_pair_problem(3)],
        [make_pair_problem(0), make_pair_problem(1), single(2), single(3)],
    ):
        method = make_method("kto", batch_size=4, **OFTEN)
        datums, _ = learn(service, method, rows)
        reference = {tuple(restore_full_input(d).to_ints()) for d in datums}
        assert len(method._mismatched) == len(datums)
        assert not reference & {tuple(restore_full_input(d).to_ints()) for d in method._mismatched}


@pytest.mark.parametrize("steps", [2, 4])
def test_offline_sees_good_and_bad_answers_in_every_step(service, steps):
    options = {"loss": "dro", "baseline": "group", "batch_size": ROWS, "num_substeps": steps}
    method = make_method("offline", **options, **OFTEN)
    datums, parts = learn(service, method, [make_stored_problem(i) for i in range(ROWS)])
    assert index_datums(parts, datums) == [
        [2 * row + side for row in range(k, ROWS, steps) for side in (0, 1)] for k in range(steps)
    ]
    for part in parts:
        signs = [np.sign(d.loss_fn_inputs["advantages"].array.sum()) for d in part]
        assert signs.count(1.0) == signs.count(-1.0) == ROWS // steps
