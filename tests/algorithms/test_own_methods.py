"""Test methods defined in a user's file."""

import re
from pathlib import Path

import pytest

import rl
from rl.algorithms import METHODS, ModelRequests
from rl.config import unflatten_settings
from rl.errors import UserError
from rl.rollout import Trajectory, TrajectoryGroup, Transition
from rl.types import ModelInput, SampledSequence

SMALL = {
    "steps": 1, "batch_size": 2, "group_size": 2, "max_tokens": 4, "eval_every": 0, "quiet": True,
    "self_test": False,
}  # fmt: skip
FILE = '''
from rl.rollout import trajectory_to_datums
from rl.algorithms import GrpoSettings, METHODS, GRPO
from rl.algorithms.update import train_single_pass

class Derived(GRPO):
    Settings = GrpoSettings

class Whole:
    """Plain REINFORCE, derived from nothing."""
    Settings = GrpoSettings
    online = True

    def __init__(self, settings):
        self.settings, self.group_size = settings, settings.policy_gradient.group_size

    def compute_advantages(self, groups, models):
        datums = []
        for group in groups:
            for trajectory, reward in zip(group.trajectories_G, group.get_total_rewards()):
                trajectory.advantage = reward
                datums += trajectory_to_datums(trajectory)
        if self.settings.kl.kl_coef:
            models.reference.logprobs(datums)
        return datums

    def update(self, models, datums, progress):
        return train_single_pass(models, datums, self.settings, progress, loss="ppo", config={})

    def state(self):
        return {}

    def load_state(self, state):
        pass
'''
FILE += """
from rl.algorithms import OnlineMethod

class Shaped(OnlineMethod):
    Settings = GrpoSettings
    __init__ = lambda self, s: (super(Shaped, self).__init__(s), setattr(self, "group_size", 2))[1]
    compute_advantages, update = Whole.compute_advantages, Whole.update
"""
FILE += "".join(
    f'\nclass From_{name}(METHODS["{name}"]):\n    Settings = METHODS["{name}"].Settings\n'
    for name in METHODS
)
JUDGES = {
    "reward_model": {"reward_model": "/nonexistent"},
    "comparison_model": {"comparison_model": "/nonexistent"},
    "rubric_model": {"rubric_model": "/nonexistent", "rubric": {"Is it short?": 1}},
    "reference_model": {"reference_model": "/nonexistent"},
}


def test_a_renamed_class_is_named_in_the_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for place, before, after in (
        ("rl.algorithms", "PolicyGradient", "GRPO"), ("rl.algorithms.ppo", "Ppo", "PPO"),
        ("rl.algorithms.orpo_simpo", "WithoutReference", "ReferenceFreeDPO"),
    ):  # fmt: skip
        file = tmp_path / f"{before}.py"
        file.write_text(f"from {place} import {before}\n")
        with pytest.raises(UserError, match=f"{before} was renamed to {after}"):
            rl.train(f"{file.name}:Mine", output_dir="run")
        assert hasattr(rl.algorithms, after)
    assert not hasattr(rl.algorithms, "Nothing")


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path


RANKED = """
from dataclasses import replace

class Ranked(GRPO):
    Settings = GrpoSettings

    def shape_rewards(self, groups):
        ranks = [[[3.0 * i] for i in range(len(group.trajectories_G))] for group in groups]
        return [replace(g, shaped_rewards_G_N=r) for g, r in zip(groups, ranks, strict=True)]
"""

CASES = [(method, judge) for method in ("grpo", "mine.py:Whole") for judge in JUDGES]
# it has no base class and requests no reference
CASES.remove(("mine.py:Whole", "reference_model"))


@pytest.mark.parametrize(("method", "judge"), CASES)
def test_a_judge_that_is_not_there_stops_any_method(run_folder, method, judge):
    with pytest.raises(UserError, match="/nonexistent"):
        rl.train(method, output_dir=run_folder / "run", **JUDGES[judge], **SMALL)
    assert not (run_folder / "run" / "checkpoints").exists()


@pytest.mark.parametrize("method", ["mine.py:Derived", "mine.py:Whole"])
def test_a_judge_rewards_the_samples_of_a_users_method(run_folder, method):
    inputs = {"comparison_model": "tiny:ascii"} | (
        {"kl_coef": 0.1} if method == "mine.py:Derived" else {}
    )
    row = rl.train(method, output_dir=run_folder / "run", **inputs, **SMALL).metrics[-1]
    # the mean of shares that sum to 1 in each group of two
    assert row["env/all/reward/learned"] == pytest.approx(0.5)
    assert row["reward/total"] == pytest.approx(row["env/all/reward/learned"])
    assert ("optim/kl_ref_k3" in row) == (method == "mine.py:Derived")


def test_the_shaping_of_rewards_is_logged_for_any_method(run_folder):
    """Answers of 1 to 4 tokens: the penalty rises from 0 to 0.5 over the last three."""
    settings = {**SMALL, "overlong_share": 0.75, "overlong_penalty": 0.5}
    for method in ("grpo", "mine.py:Shaped"):
        row = rl.train(method, output_dir=run_folder / method[-6:], **settings).metrics[-1]
        expected = 0.5 * (row["env/all/ac_tokens_per_turn"] - 1) / 3
        assert row["reward/overlong_penalty"] == pytest.approx(expected)


@pytest.mark.parametrize(("settings", "message"), [
    ({"kl_coef": 0.1}, "Whole takes kl_coef, .* but requests no reference model"),
    ({"reference_model": "tiny:ascii"}, "but requests no reference model"),
    ({"normalise_rewards": True}, r"shapes none, .* shape_rewards\(self, groups\)"),
])  # fmt: skip
def test_a_setting_that_a_users_class_does_not_use_is_rejected(run_folder, settings, message):
    with pytest.raises(UserError, match=message):
        rl.train("mine.py:Whole", output_dir=run_folder / "run", **settings, **SMALL)
    assert not (run_folder / "run" / "checkpoints").exists()


@pytest.mark.parametrize("name", ["Whole", "Clipped", "Scaled", "Wide"])
def test_parts_are_refused_for_a_class_whose_hooks_they_would_not_call(run_folder, name):
    (run_folder / "mine.py").write_text(
        FILE
        + """
class Clipped(GRPO):
    def update(self, models, datums, progress):
        return super().update(models, datums[:1], progress)

class Scaled(GRPO):
    def compute_advantages(self, groups, models):
        return super().compute_advantages(groups, models)

from rl.algorithms import AdvantageEstimator

class Wide(GRPO):
    def __init__(self, settings):
        super().__init__(settings)
        self.estimator = AdvantageEstimator(list, "batch", compares_members=False)
"""
    )
    with pytest.raises(UserError, match=f"{name} has a compute_advantages or an update of its own"):
        rl.train(f"mine.py:{name}", output_dir=run_folder / "run", stream_minibatches=2, **SMALL)


def test_a_module_that_fails_to_import_is_named_with_its_error(run_folder, monkeypatch):
    (run_folder / "broken_module.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(run_folder)
    with pytest.raises(UserError, match="importing broken_module failed .ZeroDivisionError"):
        rl.train("broken_module:X", output_dir=run_folder / "run", **SMALL)


def test_a_method_imports_a_module_beside_its_file(run_folder):
    (run_folder / "methods").mkdir()
    (run_folder / "methods/beside_the_method.py").write_text("SUMMARY = 'from beside'\n")
    (run_folder / "methods/mine.py").write_text(
        "from beside_the_method import SUMMARY\nfrom rl.algorithms import GRPO\n\n\n"
        'class Near(GRPO):\n    summary = SUMMARY\n\n\nclass Blank(GRPO):\n    """ """\n'
    )
    assert METHODS["methods/mine.py:Near"].summary == "from beside"
    assert METHODS["methods/mine.py:Blank"].summary == "methods/mine.py:Blank"


def test_rewards_that_a_class_shapes_first_are_shaped_further(run_folder):
    (run_folder / "mine.py").write_text(
        FILE
        + RANKED
        + """
class RankedThenScaled(Ranked):
    def shape_rewards(self, groups):
        return GRPO.shape_rewards(self, super().shape_rewards(groups))
"""
    )
    method = METHODS["mine.py:RankedThenScaled"]
    problems: list[str] = []
    settings = unflatten_settings(method.Settings, {"reward_scale": 2.0}, problems, "a test")
    turn = Transition(ModelInput.from_ints([1]), SampledSequence([2], [-1.0]), 7.0, True)
    group = TrajectoryGroup([Trajectory([turn]), Trajectory([turn])], [0.0] * 2, [{}] * 2)
    (shaped,) = method(settings).shape_rewards([group])
    assert shaped.get_total_rewards() == [0.0, 6.0] and group.get_total_rewards() == [7.0, 7.0]


def count_symbols(prompt, response, meta):
    return len(set(response)) / 4


COUNTED = {"reward": count_symbols, "reward_workers": 1}


SCHEDULES: list[dict] = [
    {}, {"rollout_mode": "async"}, {"stream_minibatches": 2}, {"max_steps_off_policy": 1},
]  # fmt: skip


@pytest.mark.parametrize(("method", "schedule"), [
    ("grpo", {}),
    *(
        pytest.param("mine.py:Ranked", schedule, marks=[pytest.mark.slow] * (i == 1))
        for i, schedule in enumerate(SCHEDULES)
    ),
], ids=lambda value: value if isinstance(value, str) else "_".join(value) or "lockstep")  # fmt: skip
def test_shaped_rewards_reach_the_advantages_under_every_schedule(run_folder, method, schedule):
    (run_folder / "mine.py").write_text(FILE + RANKED)
    settings = SMALL | {"steps": 2, "rollouts_every": 1} | COUNTED | schedule
    if method == "grpo":
        settings |= {"reward_scale": 3.0}
    rows = rl.train(method, output_dir=run_folder / "run", **settings).rollouts
    assert len(rows) == 8
    for i, row in enumerate(rows):
        other = rows[i ^ 1]
        assert (row["step"], row["group"]) == (other["step"], other["group"])
        shaped = 3 * row["reward"] - 3 * other["reward"]
        if method == "mine.py:Ranked":
            shaped = 3 if row["index"] else -3
        assert row["advantage"] == pytest.approx(shaped / 2)
    assert any(row["advantage"] for row in rows)


def test_a_users_class_that_requests_a_reference_scores_with_it(run_folder):
    """Without this request, `Models.reference` raises an error."""
    text = "\n    def required_models(self, factory):\n        return {'reference': factory.reference()}\n"
    (run_folder / "mine.py").write_text(FILE.replace("\n    def state", text + "\n    def state"))
    row = rl.train("mine.py:Whole", output_dir=run_folder / "run", kl_coef=0.1, **SMALL).metrics[-1]
    assert row["optim/tokens"] > 0


@pytest.mark.parametrize(("declared", "message"), [
    ("clients = staticmethod(lambda settings, factory: {})",
     "declares clients, which nothing reads any more"),
    ("value_head = staticmethod(lambda settings: False)", "declares value_head as a function"),
])  # fmt: skip
def test_former_declarations_are_explained(run_folder, declared, message):
    text = f"\n    {declared}\n\n    def state"
    (run_folder / "mine.py").write_text(FILE.replace("\n    def state", text))
    with pytest.raises(UserError, match=message):
        rl.train("mine.py:Whole", output_dir=run_folder / "run", **SMALL)


def test_a_batch_without_datums_takes_no_step(run_folder):
    text = FILE.replace(
        "return train_single_pass(models, datums,", "return train_single_pass(models, [],"
    )
    assert text != FILE
    (run_folder / "mine.py").write_text(text)
    row = rl.train("mine.py:Whole", output_dir=run_folder / "run", **SMALL).metrics[-1]
    assert row["optim/substeps"] == 0 and row["optim/grad_norm"] == 0


@pytest.mark.parametrize("returned, message", [
    ("None", "Whole.update returned NoneType; expected a dict of metrics"),
    ("{'mine': 'high', 'fine': 1, 'null': None}",
     "Whole.update returned {'mine': 'high'}; expected a dict"),
    ("{'mine': 1, 'step': 0.5}", "Whole.update returned {'step': 0.5}; expected a dict"),
    ("{'mine': __import__('torch').ones(2)}", "Whole.update returned {'mine': tensor"),
])  # fmt: skip
def test_metrics_that_are_no_numbers_are_refused(run_folder, returned, message):
    before = (
        'return train_single_pass(models, datums, self.settings, progress, loss="ppo", config={})'
    )
    assert before in FILE
    (run_folder / "mine.py").write_text(FILE.replace(before, f"return {returned}"))
    with pytest.raises(UserError, match=message):
        rl.train("mine.py:Whole", output_dir=run_folder / "run", **SMALL)


def test_a_step_without_a_value_of_keep_best_saves_no_best_weights(run_folder):
    before = "return train_single_pass("
    after = (
        "return {'mine': (None, 1, 2)[progress.batch % 3], 'array': __import__('numpy').ones(1)} | "
        + before.removeprefix("return ")
    )
    assert before in FILE
    (run_folder / "mine.py").write_text(FILE.replace(before, after))
    settings = {**SMALL, "steps": 4, "save_every": 1, "keep_best": "mine"}
    result = rl.train("mine.py:Whole", output_dir=run_folder / "run", **settings)
    assert result.metrics[-1]["array"] == 1.0
    names = [path.name for path in (run_folder / "run" / "sampler_weights").iterdir()]
    assert [name.rpartition("-")[2] for name in names] == ["000003"]


@pytest.mark.parametrize("name", METHODS)
def test_a_derived_class_is_prepared_as_its_parent(run_folder, name):
    parent, derived = METHODS[name], METHODS[f"mine.py:From_{name}"]
    changed = {"distill": {"teacher": ("tiny:ascii",)}, "rlhf": {"reward_model": "rm"}}
    settings = unflatten_settings(METHODS[name].Settings, changed.get(name, {}), [], name)
    methods = parent(settings), derived(settings)
    for item in (
        "online", "variants", "needs_reward", "reads", "reads_held_out_answers",
        "reads_optional_answers", "value_head",
    ):  # fmt: skip
        assert getattr(methods[0], item) == getattr(methods[1], item), item
    requests = [vars(ModelRequests(method)) | {"models": None} for method in methods]
    assert requests[0] == requests[1]


def test_a_derived_class_of_rows_runs(run_folder):
    options = {"steps": 1, "batch_size": 2, "eval_every": 0, "quiet": True}
    row = rl.train("mine.py:From_sft", output_dir=run_folder / "run", **options).metrics[-1]
    assert row["optim/loss"] > 0


@pytest.fixture
def documented_files(run_folder):
    """Write the files of docs/methods.md to the folder of the run."""
    text = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()
    files = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, re.S)
    for name, body in files:
        (run_folder / name).write_text(body)
    assert [name for name, _ in files] == ["batch_mean.py", "median_grpo.py", "tanh_grpo.py"]
    return run_folder


def gradient_norm(folder, method, **settings):
    small = SMALL | {"group_size": 4, "batch_size": 4} | COUNTED
    settings = small | {"overwrite": True, "output_dir": folder / "run"} | settings
    return rl.train(method, **settings).metrics[-1]["optim/grad_norm"]


PLAIN = {"loss": "importance_sampling", "normalise": "sequences"}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "same"), [
    # the running mean starts as the mean of the first batch
    ("batch_mean.py:BatchMean", {"advantage": "running_mean", **PLAIN}),
    ("tanh_grpo.py:TanhGRPO", PLAIN),  # the slope of tanh at 0, a ratio of one, is 1
])  # fmt: skip
def test_a_documented_method_has_the_gradient_of_these_settings(documented_files, method, same):
    expected = gradient_norm(documented_files, "grpo", **same)
    assert expected > 0
    assert gradient_norm(documented_files, method) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_the_documented_advantage_reaches_the_gradient(documented_files):
    names: dict = {}
    exec((documented_files / "median_grpo.py").read_text(), names)
    assert names["subtract_median"]([0, 0, 1, 0]).tolist() == [0, 0, 1, 0]
    mean = gradient_norm(documented_files, "grpo")
    median = gradient_norm(documented_files, "median_grpo.py:MedianGRPO")
    assert median != pytest.approx(mean, rel=1e-3)
