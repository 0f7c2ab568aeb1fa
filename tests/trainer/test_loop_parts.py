"""Test the parts of a stage between the five steps, each in isolation."""

import gc
import json
import signal
import weakref
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from test_controls import make_curriculum

from rl.algorithms import GrpoSettings
from rl.algorithms.update import make_adam_params
from rl.config import LoopSettings, OptimSettings, SamplingSettings
from rl.distributed import RunStopped, StopRequest
from rl.errors import UserError
from rl.jsonl import read_jsonl
from rl.rollout import RolloutBatch, Trajectory, TrajectoryGroup, Transition
from rl.rollout.event_log import TickEvents
from rl.trainer import evaluator, load_evaluation_opponents, stage_sampling
from rl.trainer.execute import RunState
from rl.trainer.saved_weights import SavedWeights
from rl.trainer.stage_sampling import ReplayLog
from rl.trainer.trainer import Trainer, TrainingBatch
from rl.trainer.training_loop import train
from rl.types import ModelInput, SampledSequence

SETTINGS = GrpoSettings(
    loop=LoopSettings(eval_every=2), sampling=SamplingSettings(max_tokens=4, temperature=0.8)
)


def bare_stage(*, method=None, models=None, problems=None, keeper=None, seed=5, logbook=None,
               renderer=None, settings=SETTINGS, **overridden) -> Trainer:  # fmt: skip
    """Return a stage with only these parts; `overridden`: methods to replace."""
    method = method or SimpleNamespace()
    method.settings = settings
    stage = Trainer(
        name="grpo", index=1, method=method,
        models=models or SimpleNamespace(rewards=None, learning={}, opponents=None),
        problems=problems, test_problems=["a", "b"], renderer=renderer,
        scorer=SimpleNamespace(take_seconds=dict), run_seed=seed, first_step=3, logbook=logbook,
        console=None, checkpoints=keeper, stop_request=None,
    )  # fmt: skip
    stage.stage_sampler.build_groups = lambda problems, size: [(p, size) for p in problems]
    stage.stage_sampler.check_rollouts = lambda result, sampler: None
    for name, value in overridden.items():
        setattr(stage, name, value)
    return stage


def test_held_out_answers_are_always_drawn_with_the_same_streams(monkeypatch):
    drawn = []

    def rollout(builders, sampler, params, *, seed, **more):
        drawn.append((tuple(builders), params.temperature, seed))
        return RolloutBatch([], [], {}, 0.0, 0.0)

    monkeypatch.setattr(stage_sampling, "rollout", rollout)
    stage = bare_stage()
    for done, version in ((0, 0), (7, 9), (40, 41)):
        stage.done = done
        stage.evaluator.evaluate_sampled(SimpleNamespace(version=version))
        stage.evaluator.evaluate_greedy(SimpleNamespace(version=version))
    assert len(set(drawn)) == 2
    assert drawn[0][:2] == ((("a", 1), ("b", 1)), 0.8) and drawn[1][1] == 0.0
    # another run has other random streams
    bare_stage(seed=6).evaluator.evaluate_sampled(SimpleNamespace(version=0))
    assert drawn[-1] not in drawn[:-1] and drawn[-1][:2] == drawn[0][:2]


def test_storing_held_out_answers_decodes_nothing_and_counts_as_evaluation(monkeypatch):
    """`time/test` covers it: here, storing an answer takes 100 seconds of a mocked clock."""
    now, stored = [0.0], []
    answer = SampledSequence(tokens=[1, 2, 3], logprobs=[-1.0, -2.0, -3.0], stop_reason="stop")
    turn = Transition(
        ModelInput.from_ints([7]), answer, 1.0, True, {"correct": 1.0}, {"response": "abc"}
    )
    group = TrajectoryGroup([Trajectory([turn])], [0.0], [{}], "sums", 4)
    decode = Mock(side_effect=AssertionError("a token was decoded"))

    def write_held_out_answers(step, rows, stage, *, greedy):
        stored.extend((step, greedy, row) for row in rows)
        now[0] += 100.0

    monkeypatch.setattr(evaluator, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(
        stage_sampling, "rollout", lambda *_, **__: RolloutBatch([group], [], {}, 0.0, 0.0)
    )
    stage = bare_stage(
        logbook=SimpleNamespace(write_held_out_answers=write_held_out_answers),
        renderer=SimpleNamespace(tokenizer=SimpleNamespace(decode=decode)),
    )
    metrics = stage.evaluator.evaluate(0, SimpleNamespace(version=0))
    assert metrics["time/test"] == 200.0 and decode.call_count == 0
    assert [(step, greedy) for step, greedy, _ in stored] == [(3, False), (3, True)]
    expected = {
        "problem": 4,
        "tag": "sums",
        "response": "abc",
        "reward": 1.0,
        "stop_reason": "stop",
    }
    for *_, row in stored:
        assert {key: row[key] for key in expected} == expected


def test_training_samples_have_streams_of_their_own_at_each_batch(monkeypatch):
    """The streams differ from those of other batches and of held-out answers."""
    drawn = []

    def rollout(*_, seed, **more):
        drawn.append(seed)
        return RolloutBatch([], [], {}, 0, 0)

    monkeypatch.setattr(stage_sampling, "rollout", rollout)
    nothing = {name: lambda *_, **__: None for name in ("stop_if_late", "end_batch", "end")}
    method = SimpleNamespace(
        group_size=2, online=True, shape_rewards=lambda groups: groups,
        compute_advantages=lambda groups, models: [], update=lambda *_: {},
    )  # fmt: skip
    stage = bare_stage(
        **nothing, start=lambda: SimpleNamespace(version=0), next_sampler=lambda old: old,
        batches=lambda: range(4), progress=lambda batch: None, method=method,
        problems=SimpleNamespace(batch=lambda step, size, seed: []),
    )  # fmt: skip
    train(stage)
    stage.evaluator.evaluate_sampled(SimpleNamespace(version=0))
    assert len(drawn) == len(set(drawn)) == 5
    again = drawn.copy()
    train(stage)
    assert drawn[5:] == again[:4]


def test_the_old_sampler_is_let_go_before_the_new_weights_are_taken():
    """Otherwise every step would keep a copy of the weights."""
    happened = []
    old = SimpleNamespace(release=lambda: happened.append("released"))
    policy = SimpleNamespace(
        save_weights_and_get_sampling_client=lambda: happened.append("taken") or "new"
    )
    stage = bare_stage(models=SimpleNamespace(policy=policy))
    assert stage.next_sampler(old) == "new" and happened == ["released", "taken"]
    assert stage.next_sampler(None) == "new"


def stage_with_parts(**models) -> Trainer:
    """Return a stage whose method, evaluation, log and checkpoints only record their calls."""
    parts = {"policy": None, "rewards": None, "trainable": {}, "opponents": None, **models}
    stage = bare_stage(models=SimpleNamespace(**parts), _warn_once=Mock())
    stage.log, stage.console, stage.save = Mock(), Mock(), Mock()
    stage.log.build_row.return_value, stage.log.check_alarms.return_value = {}, []
    stage.method = Mock(settings=SETTINGS, shaping_metrics={})
    stage.evaluator.evaluate = Mock(return_value={})
    stage.stop_request = StopRequest(60.0)
    return stage


@pytest.mark.parametrize(
    ("seconds", "steps", "evaluations"), [(0.0, 9, 1), (120.0, 9, 0), (120.0, 4, 1)]
)
def test_a_stop_request_leaves_out_an_evaluation_that_does_not_fit(seconds, steps, evaluations):
    """The step is saved. The last step is evaluated in any case. `seconds`: of the last one."""
    stage = stage_with_parts()
    stage.method.settings = replace(SETTINGS, loop=replace(stage.loop, steps=steps))
    stage.evaluator.seconds = seconds
    with stage.stop_request:
        stage.stop_request.has_started = True
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(RunStopped):
            stage.end_batch(TrainingBatch(3), {}, None)
    stage.save.assert_called_once_with(4)
    assert stage.evaluator.evaluate.call_count == evaluations
    assert stage.log.write_row.call_args.args == (4, {})


def test_the_policy_is_evaluated_against_versions_before_it_joins_them():
    calls = Mock()
    calls.update_pool.return_value = calls.evaluate.return_value = {}
    stage = stage_with_parts(opponents=calls)
    stage.evaluator.evaluate = calls.evaluate
    stage.end_batch(TrainingBatch(1, RolloutBatch([], [], {}, 0.0, 0.0)), {}, None)
    assert [call[0] for call in calls.method_calls] == ["record_results", "evaluate", "update_pool"]


def test_saved_weights_are_evaluated_against_the_newest_older_version(tmp_path):
    for step in (2, 3, 4, 6):
        (tmp_path / "sampler_weights" / f"grpo-opponent-step-{step:06d}").mkdir(parents=True)
    path, stage, service = tmp_path / "checkpoints" / "x", SimpleNamespace(name="grpo"), Mock()
    environment, settings = SimpleNamespace(models=["pool"]), Mock()
    weights = SavedWeights("x", path, stage=stage, step=4)
    load_evaluation_opponents(environment, settings, weights, service)
    assert service.create_sampling_client.call_args.kwargs["model_path"].endswith("step-000003")
    with pytest.raises(UserError, match="no older versions"):
        load_evaluation_opponents(environment, settings, replace(weights, step=2), service)


class StateRecorder:
    """A method and a checkpoint manager that record their state."""

    def __init__(self):
        self.method, self.saved = {"kl_coef": 0.3}, None

    def state(self):
        return self.method

    def load_state(self, state):
        self.method = state

    def save(self, policy, step, name, state, **_):
        self.saved = json.loads(json.dumps(state))


@pytest.mark.parametrize("curriculum", ["success", "steps", None])
def test_what_a_stage_saves_is_where_it_goes_on(curriculum):
    keeper = StateRecorder()
    inputs = {"curriculum_window": 3} if curriculum == "success" else {"curriculum_steps": (2, 4)}

    def fresh():
        problems = None if curriculum is None else make_curriculum(curriculum=curriculum, **inputs)
        models = SimpleNamespace(policy=None, trainable={}, opponents=None)
        return bare_stage(problems=problems, method=StateRecorder(), keeper=keeper, models=models)

    first, second = fresh(), fresh()
    first.method.method = {"kl_coef": 0.7}
    for _ in range(5):
        if curriculum:
            first.problems.record_success(0.9)
    first.save(17)
    state = keeper.saved
    assert (state["stage"], state["next_batch"], state["first_step"]) == (1, 17, 3)
    second.load_state(state)
    assert second.method.method == {"kl_coef": 0.7}
    if curriculum:
        assert second.problems.state() == first.problems.state()
        assert curriculum == "steps" or first.problems.state() != fresh().problems.state()
        for problems in (first.problems, second.problems):
            problems.record_success(0.9)
            problems.record_success(0.9)
        level = 2 if curriculum == "success" else 0
        assert second.problems.level == first.problems.level == level


def test_events_after_a_line_that_was_cut_off_are_read(tmp_path):
    path = tmp_path / "decisions.jsonl"
    path.write_text('{"stage": "grpo", "batch": 0, "tick": 1, "learned": true}\n{"stage": "gr')
    log = ReplayLog(tmp_path, "grpo", 1).create_event_log()
    log.log_events(TickEvents(update_ended=True))
    assert [row["batch"] for row in read_jsonl(path)] == [0, 1]


def test_every_setting_of_adam_reaches_the_update():
    optim = OptimSettings(
        learning_rate=0.02, beta1=0.7, beta2=0.8, adam_eps=1e-5, weight_decay=0.03,
        grad_clip_norm=0.4, warmup_steps=4, schedule="linear",
    )  # fmt: skip
    settings = GrpoSettings(optim=optim, loop=LoopSettings(steps=24))
    params = make_adam_params(settings, 14)
    assert (params.beta1, params.beta2, params.eps, params.weight_decay, params.grad_clip_norm) == (
        0.7, 0.8, 1e-5, 0.03, 0.4,
    )  # fmt: skip
    assert params.learning_rate == pytest.approx(0.02 * (1 - 10 / 20))
    assert make_adam_params(settings, 1).learning_rate == pytest.approx(0.02 * 2 / 5)


@pytest.mark.parametrize(("asked", "expected"), [(None, 0.6), (1.0, 1.0)])
def test_held_out_answers_have_the_temperature_asked_for(asked, expected):
    sampling = SamplingSettings(temperature=0.6, eval_temperature=asked)
    stage = bare_stage(settings=GrpoSettings(sampling=sampling))
    temperatures = stage.sampling_params.temperature, stage.eval_params.temperature
    assert temperatures == (0.6, expected)


def test_a_stage_keeps_no_garbage_and_closes_its_scorers_after_an_error(monkeypatch, tmp_path):
    """A reference cycle, as of a stage's models, is freed before objects are frozen."""
    cycles, closed = [], []

    def create_trainer(*_):
        cycle = Mock()
        cycle.itself = cycle
        cycles.append(weakref.ref(cycle))

    def fail(trainer):
        raise LookupError("garbage" if cycles[0]() else "free")

    monkeypatch.setattr("rl.trainer.execute.train", fail)
    run = SimpleNamespace(
        finished=False,
        position=SimpleNamespace(rows=(), stale=()),
        create_trainer=create_trainer,
        sample_scorers=SimpleNamespace(close=lambda: closed.append(True)),
    )
    gc.disable()
    try:
        with pytest.raises(LookupError, match="free"):
            RunState.train_stages(run, SimpleNamespace(folder=tmp_path), None)
    finally:
        gc.enable()
    assert closed == [True]
