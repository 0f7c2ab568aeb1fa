"""Methods that learn from rows with several answers."""

import numpy as np
import pytest

from rl import ServiceClient
from rl.algorithms import KTO, Models, Offline, Progress
from rl.algorithms.kto import KtoSettings
from rl.algorithms.offline_settings import OfflineOptions, OfflineSettings
from rl.config import LoopSettings, ModelSettings, OptimSettings, RowLoopSettings
from rl.judges import restore_full_tokens
from rl.trainer import make_renderer
from rl.trainer.stage_models import StageModelFactory
from rl.types import Problem, StoredAnswer

ROWS = 8


def optim(steps):
    return OptimSettings(learning_rate=1e-3, num_substeps=steps)


def loop():
    return {"loop": RowLoopSettings(steps=4, batch_size=ROWS)}


def problem(i, **more):
    ask = [{"role": "user", "content": f"{i}+1="}]
    return Problem(ask, response=f"{i + 1}", index=i, tag="t", **more)


def pair(i):
    return problem(i, rejected=f"{i + 2}0")


def single(i):
    return problem(i, meta={"label": i % 3 > 0})


def stored(i):
    answers = (
        StoredAnswer(1.0, f"{i + 1}", place="here"),
        StoredAnswer(0.0, f"{i + 2}0", place="here"),
    )
    return Problem([{"role": "user", "content": f"{i}+1="}], answers=answers, index=i, tag="t")


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with ServiceClient(output_dir=tmp_path_factory.mktemp("out"), seed=3) as service:
        yield service


class Noted:
    """A policy that notes what each optimizer step is made of."""

    def __init__(self, policy):
        self._policy, self.steps = policy, []

    def __getattr__(self, name):
        return getattr(self._policy, name)

    def forward_backward(self, datums, *args, **kwargs):
        self.steps.append(list(datums))
        return self._policy.forward_backward(datums, *args, **kwargs)


def learn(service, method, rows, reference=False):
    policy = Noted(service.create_full_training_client("tiny:ascii", seed=2))
    hosts = StageModelFactory(
        service, policy._policy, ModelSettings(base_model="tiny:ascii"), None, {}, 2
    )
    models = Models(policy, method.required_models(hosts) if reference else {})
    renderer = make_renderer(policy._policy, None)
    datums = method.datums(rows, renderer, models, 0)
    metrics = method.update(models, datums, Progress(0, 4))
    return datums, policy.steps, metrics, models


def numbers(steps, datums):
    return [[next(i for i, one in enumerate(datums) if one is d) for d in part] for part in steps]


def test_no_prompt_of_a_mixed_batch_stands_beside_an_answer_of_its_own(service):
    """Pairs and single answers in one batch, in any order."""
    for rows in (
        [single(0), pair(1), single(2), pair(3)],
        [pair(0), pair(1), single(2), single(3)],
    ):
        method = KTO(KtoSettings(optim=optim(1), loop=RowLoopSettings(steps=4, batch_size=4)))
        datums, _, _, _ = learn(service, method, rows, reference=True)
        own = {tuple(restore_full_tokens(d)) for d in datums}
        assert len(method._mismatched) == len(datums)
        assert not own & {tuple(restore_full_tokens(d)) for d in method._mismatched}


@pytest.mark.parametrize("steps", [2, 4])
def test_offline_sees_good_and_bad_answers_in_every_step(service, steps):
    how = OfflineOptions(loss="dro", baseline="group")
    method = Offline(
        OfflineSettings(
            offline=how, optim=optim(steps), loop=LoopSettings(steps=4, batch_size=ROWS)
        )
    )
    datums, parts, _, _ = learn(service, method, [stored(i) for i in range(ROWS)], reference=True)
    assert numbers(parts, datums) == [
        [2 * row + side for row in range(k, ROWS, steps) for side in (0, 1)] for k in range(steps)
    ]
    for part in parts:
        signs = [np.sign(d.loss_fn_inputs["advantages"].array.sum()) for d in part]
        assert signs.count(1.0) == signs.count(-1.0) == ROWS // steps
