"""Test curricula, reward shaping, weighted rewards, best weights and learning rates."""

import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from rl.algorithms import METHODS, RewardShaper
from rl.algorithms.reward_shaping import RunningStatistics, overlong_penalty
from rl.config import (
    DataSettings,
    RunSettings,
    SettingsError,
    ShapingSettings,
    flatten_settings,
    read_run,
    unflatten_settings,
)
from rl.data import Curriculum, ProblemSet, addition
from rl.errors import UserError
from rl.reporting import Logbook
from rl.rollout import Trajectory, TrajectoryGroup, Transition
from rl.trainer import resolve_stage_reward
from rl.trainer.checkpoint_manager import CheckpointManager, make_checkpoint_row
from rl.types import ModelInput, Problem, SampledSequence

REPO = Path(__file__).resolve().parents[2]


def group(*rewards_G: list[float], tokens: int = 1, final: float = 0.0) -> TrajectoryGroup:
    """Return a group in which each member has a turn per reward."""

    def turn(reward: float) -> Transition:
        return Transition(
            ModelInput.from_ints([1]), SampledSequence([2] * tokens, [-0.5] * tokens), reward, True
        )

    members = [Trajectory([turn(r) for r in rewards]) for rewards in rewards_G]
    return TrajectoryGroup(members, [final] * len(members), [{}] * len(members))


def make_settings(*words: str, method: str = "grpo"):
    (stage,) = stages_of(method, *words)
    return stage.settings


def stages_of(*words: str):
    return read_run(list(words), METHODS, REPO / "recipes" / "addition.yaml", RunSettings).stages


# Command lines, and the settings that the guide lists for them.
GUIDE = {
    "grpo": {
        "group_size": 8, "temperature": 0.8, "clip_low": 0.8, "clip_high": 1.2, "entropy_coef": 0.0,
        "grad_clip_norm": 1.0, "learning_rate": 1e-6,
    },
    "grpo --lora-rank 8": {"learning_rate": 4e-5},
    "reinforce": {
        "entropy_coef": 0.01, "advantage": "running_mean", "loss": "importance_sampling",
        "learning_rate": 1e-5,
    },
    "ppo": {
        "epochs": 4, "clip": 0.2, "value_coef": 0.1, "entropy_coef": 0.01, "target_kl": 0.01,
        "kl_coef": 0.1, "learning_rate": 1e-6,
    },
    "dpo": {"beta": 0.1, "reference_free": False, "learning_rate": 5e-7},
    "distill": {"distill_temperature": 2.0, "alpha": 0.5, "group_size": 4, "learning_rate": 2e-5},
    str(REPO / "recipes" / "gsm8k.yaml"): {
        "base_model": "Qwen/Qwen2.5-0.5B-Instruct", "dataset": "openai/gsm8k", "reward": "gsm8k",
        "lora_rank": 32, "learning_rate": 4e-5, "batch_size": 128, "group_size": 16,
        "max_tokens": 256, "temperature": 1.0, "loss": "importance_sampling", "advantage": "mean",
        "steps": 7473 // 128, "renderer": "chat_template",
    },
}  # fmt: skip


@pytest.mark.parametrize("line", GUIDE)
def test_the_guides_settings(line):
    (stage,) = stages_of(*line.split())
    values = {**flatten_settings(stage.settings), "learning_rate": stage.settings.learning_rate}
    assert {name: values[name] for name in GUIDE[line]} == GUIDE[line]


# ------------------------------------------------------------------------------------------ shaping


def test_running_statistics_are_those_of_all_values():
    rng, statistics, seen = np.random.default_rng(0), RunningStatistics(), []
    for size in (1, 7, 3, 100):
        values = rng.normal(3.0, 2.0, size).tolist()
        seen += values
        statistics.update(values)
        assert statistics.mean == pytest.approx(np.mean(seen), rel=1e-12)
        assert statistics.std == pytest.approx(np.std(seen), rel=1e-9, abs=1e-12)
    copy = RunningStatistics(**asdict(statistics))
    assert (copy.mean, copy.std, copy.count) == (statistics.mean, statistics.std, 111)
    statistics.update([1e200, -1e200])  # their squares are beyond floats
    assert statistics.std == math.inf


def test_overlong_penalty_by_hand():
    """DAPO's figures: 16,384 tokens cost nothing, the next 4,096 cost up to 1."""
    assert [overlong_penalty(n, 20_480, 0.2, 1.0) for n in (100, 16_384, 18_432, 20_480)] == [
        0.0, 0.0, 0.5, 1.0,
    ]  # fmt: skip
    assert overlong_penalty(20_480, 20_480, 0.0, 1.0) == 0.0


def test_shaping_by_hand_and_as_the_guide_does_it():
    groups = [group([3.0], [1.0], tokens=10), group([0.0], [0.0], tokens=5)]
    for settings, expected in (
        ({}, [3.0, 1.0]),
        ({"reward_scale": 2.0, "reward_clip": 4.0}, [4.0, 2.0]),
        ({"overlong_share": 0.5, "overlong_penalty": 0.5}, [2.5, 0.5]),
    ):
        shaper = RewardShaper(ShapingSettings(**settings), 10)
        assert shaper.shape_totals(groups) == [expected, [0.0, 0.0]], settings
    groups[0].trajectories_G[1].transitions[-1].ac.stop_reason = "length"  # cut off: only it pays
    shaper = RewardShaper(ShapingSettings(cut_off_penalty=2.0), 10)
    assert shaper.shape_totals(groups) == [[3.0, -1.0], [0.0, 0.0]]
    assert shaper.shape_steps(groups)[0] == [[3.0], [-1.0]]
    assert shaper.metrics == {"reward/cut_off_penalty": 0.5}
    guide = np.array([3.0, 1.0, 0.0, 0.0])
    guide = np.clip((guide - guide.mean()) / (guide.std() + 1e-8), -1.2, 1.2)
    shaper = RewardShaper(ShapingSettings(normalise_rewards=True, reward_clip=1.2), 10)
    np.testing.assert_allclose(np.array(shaper.shape_totals(groups)).ravel(), guide, rtol=1e-12)
    assert shaper.metrics["reward/running_mean"] == 1.0
    shaper.shape_totals([group([5.0])])
    assert shaper.statistics.mean == pytest.approx(9 / 5)


def test_the_overlong_penalty_is_of_the_longest_turn():
    """max_tokens bounds each turn: three turns of half that length are not overlong."""
    shaper = RewardShaper(ShapingSettings(overlong_share=0.5, overlong_penalty=1.0), 10)
    assert shaper.shape_totals([group([1.0, 1.0, 1.0], tokens=5)]) == [[3.0]]
    assert shaper.shape_totals([group([1.0, 1.0, 1.0], tokens=9)]) == [[pytest.approx(3.0 - 4 / 5)]]


def test_rewards_that_never_differed_are_not_divided_by_nothing():
    shaper = RewardShaper(ShapingSettings(normalise_rewards=True), 10)
    assert shaper.shape_steps([group([0.1]), group([0.1]), group([0.1])]) == [
        [[0.1]], [[0.1]], [[0.1]],
    ]  # fmt: skip
    assert shaper.shape_steps([group([2.1])])[0][0][0] == pytest.approx(
        2.1 / np.std([0.1, 0.1, 0.1, 2.1])
    )


def test_step_rewards_keep_their_place():
    shaper = RewardShaper(ShapingSettings(reward_scale=2.0), 10)
    assert shaper.shape_steps([group([1.0, 0.0, 2.0], [0.5], final=0.25)]) == [
        [[2.0, 0.0, 4.5], [1.5]]
    ]


# --------------------------------------------------------------------------------------- curriculum


def make_curriculum(**inputs) -> Curriculum:
    """Return a curriculum of ten problems at each of the levels 1, 2, 3."""
    problems = [
        Problem([{"role": "user", "content": str(i)}], {"level": 1 + i // 10}, index=i)
        for i in range(30)
    ]
    return Curriculum(ProblemSet(problems), DataSettings(**inputs))


def get_levels(curriculum: Curriculum, step: int) -> set[int]:
    return {problem.meta["level"] for problem in curriculum.batch(step, 20, seed=3)}


def test_by_step():
    curriculum = make_curriculum(curriculum="steps", curriculum_steps=(10, 30))
    assert [get_levels(curriculum, step) for step in (0, 9, 10, 29, 30, 99, 5)] == [
        {1}, {1}, {1, 2}, {1, 2}, {1, 2, 3}, {1, 2, 3}, {1},
    ]  # fmt: skip
    only = make_curriculum(curriculum="steps", curriculum_steps=(10, 30), curriculum_mix="only")
    assert [get_levels(only, step) for step in (9, 10, 30)] == [{1}, {2}, {3}]


def test_texts_that_are_numbers_are_ordered_as_numbers():
    """The cells of a .csv file are texts."""

    def get_names(*levels) -> list:
        problems = [Problem([], {"level": level}, index=i) for i, level in enumerate(levels)]
        return Curriculum(ProblemSet(problems), DataSettings(curriculum="success")).names

    assert get_names("10", "9", "1.5", "2") == ["1.5", "2", "9", "10"]
    assert get_names("level 2", "level 1", "10") == ["10", "level 1", "level 2"]
    assert get_names(10, 9.5, 2) == [2, 9.5, 10]
    assert get_names("nan", "10", "9") == ["10", "9", "nan"]
    assert get_names(10**400, 2) == [2, 10**400]


def test_the_order_of_levels_is_that_of_the_checkpoint():
    """An older checkpoint has no names: its order was that of texts."""
    problems = [Problem([], {"level": str(level)}, index=level) for level in (1, 2, 10)]

    def restore(state) -> list:
        curriculum = Curriculum(ProblemSet(problems), DataSettings(curriculum="success"))
        curriculum.load_state(state)
        batch = curriculum.batch(0, 9, seed=0)
        assert {p.meta["level"] for p in batch} == set(curriculum.names[: state["level"] + 1])
        return curriculum.names

    assert restore({"level": 1, "recent": []}) == ["1", "10", "2"]
    current = Curriculum(ProblemSet(problems), DataSettings(curriculum="success")).state()
    assert restore({**current, "level": 1}) == ["1", "2", "10"]


def test_by_success_up_and_back():
    curriculum = make_curriculum(
        curriculum="success", curriculum_up=0.8, curriculum_down=0.2, curriculum_window=2,
        curriculum_mix="only",
    )  # fmt: skip
    levels = []
    #        1.0 .7 | .9 .5 .3 .0 | 1. .9 | 1. 1. | 1.(top) .1 .2 | 0. .1 | .1 .1 (bottom)
    rates = [1.0, 0.7, 0.9, 0.5, 0.3, 0.0, 1.0, 0.9, 1.0, 1.0, 1.0, 0.1, 0.2, 0.0, 0.1, 0.1, 0.1]
    for success in rates:
        curriculum.record_success(success)
        levels.append(curriculum.level)
    assert levels == [0, 1, 1, 1, 1, 0, 0, 1, 1, 2, 2, 2, 1, 1, 0, 0, 0]
    assert curriculum.metrics() == {"curriculum/level": 0, "curriculum/problems": 10}


def test_its_state_goes_on_in_the_middle_of_a_window():
    whole, first, second = (
        make_curriculum(curriculum="success", curriculum_window=3) for _ in range(3)
    )
    for success in (0.9, 0.9):
        whole.record_success(success)
        first.record_success(success)
    second.load_state(first.state())
    for curriculum in (whole, second):
        curriculum.record_success(0.9)
    assert whole.level == second.level == 1 and whole.batch(7, 20, 5) == second.batch(7, 20, 5)


def test_a_level_has_every_one_of_its_problems_once_an_epoch():
    curriculum = make_curriculum(curriculum="steps", curriculum_steps=(10, 30))
    indices = [problem.index for step in (10, 11) for problem in curriculum.batch(step, 10, seed=0)]
    assert sorted(indices) == list(range(20))


@pytest.mark.parametrize(("inputs", "message"), [
    ({"curriculum": "success", "curriculum_column": "hardness"},
     "row 0 of problems has no level.*'level'.*--curriculum-column"),
    ({"curriculum": "steps", "curriculum_steps": (5,)},
     "has 3 levels of 'level' .1, 2, 3., so curriculum_steps takes 2"),
])  # fmt: skip
def test_problems_that_do_not_fit_the_curriculum_are_errors(inputs, message):
    with pytest.raises(UserError, match=message):
        make_curriculum(**inputs)
    with pytest.raises(ValueError, match="ascending"):
        DataSettings(curriculum="steps", curriculum_steps=(30, 10))


def test_additions_levels_are_carries():
    problems = {p.messages[-1]["content"]: p.meta["level"] for p in addition("train")}
    known = {
        "11+22=": 0, "19+11=": 1, "19+12=": 1, "90+20=": 1, "55+55=": 2, "45+55=": 2, "99+99=": 2,
    }  # fmt: skip
    trained = known.keys() & problems.keys()
    assert {text: problems[text] for text in trained} == {text: known[text] for text in trained}
    for text, level in list(problems.items())[::97]:
        a, b = map(int, text[:-1].split("+"))
        digits_lost = sum(int(c) for c in str(a) + str(b)) - sum(int(c) for c in str(a + b))
        assert level == digits_lost / 9  # each carry turns 10 into 1


# ---------------------------------------------------------------- rewards, best weights, rate rules


def test_several_rewards_are_weighted_and_logged(tmp_path):
    code = "def short(prompt, response, meta):\n    return -len(response)\n"
    (tmp_path / "mine.py").write_text(code)
    words = ("--rewards", "exact_match", "1", f"{tmp_path / 'mine.py'}:short", "0.1")
    result = resolve_stage_reward(make_settings(*words).data).evaluate("1+1=", "2", {"answer": "2"})
    assert result.reward == pytest.approx(0.9)
    assert result.metrics == {"exact_match": 1.0, "correct": 1.0, "short": -1.0}
    assert resolve_stage_reward(DataSettings()) == "exact_match"
    (tmp_path / "r.yaml").write_text("method: grpo\nrewards: {exact_match: 1.0, gsm8k: 0.5}\n")
    (stage,) = stages_of(str(tmp_path / "r.yaml"))
    assert stage.settings.data.rewards == (("exact_match", 1.0), ("gsm8k", 0.5))
    with pytest.raises(SettingsError, match="names a reward twice: gsm8k, gsm8k"):
        stages_of("grpo", "--rewards", "gsm8k", "1", "gsm8k", "2")


def test_best_weights_by_the_highest_or_the_lowest_stay_with_those_at_the_last_checkpoint(tmp_path):
    class Policy:
        def save_weights_for_sampler(self, name, *, value_head):
            assert not value_head
            self.path = tmp_path / name
            return self

        def result(self):
            return self

    resumable = make_checkpoint_row(tmp_path / "grpo-000002", "last", "grpo", 2)
    for mode, kept in (("max", [2, 6]), ("min", [1, 3])):
        with Logbook(tmp_path / mode) as book:
            checkpoints = CheckpointManager(book)
            for step, value in enumerate([0.5, 0.7, 0.1, math.nan, 0.9, 0.95, 0.95], start=1):
                checkpoints.save_best(Policy(), step, "grpo", "optim/loss", value, mode=mode)
                if step == 2:
                    checkpoints = CheckpointManager(book, [*checkpoints.rows, resumable])
            rows = [row for row in checkpoints.rows if row["kind"] == "best"]
        assert [row["batch"] for row in rows] == kept


WITHOUT_EFFECT = [
    ("reinforce --clip-low 0.5", "loss importance_sampling does not read it", "--loss ppo"),
    ("reinforce --clip-high 3", "loss importance_sampling does not read it", "--loss cispo"),
    ("grpo --kl-kind k1", "--kl-placement is reward", "--kl-placement loss"),
    ("grpo --kl-placement loss --kl-discount 0.5", "--kl-placement is loss",
     "--kl-placement reward"),
    ("ppo --kl-rate 0.3", "set --kl-target", "--kl-target 0.01"),
    ("grpo --reward-discount 0.9", "--step-rewards is sum", "--step-rewards to_go"),
    ("grpo --overlong-penalty 2", "set --overlong-share", "--overlong-share 0.1"),
    ("grpo --curriculum-steps 1 2", "curriculum is off", "--curriculum steps"),
    ("grpo --curriculum success --curriculum-steps 1 2", "curriculum is success",
     "--curriculum steps"),
    ("ppo --critic-learning-rate 1e-4", "set --critic-model", "--critic-model policy"),
    ("ppo --critic-model policy --value-coef 0.5", "leave --critic-model out",
     "--critic-model None"),
    ("ppo --dynamic-sampling 3", "ppo compares no answers", None),
    ("distill --dynamic-sampling 3", "distill learns from every answer", None),
    ("distill --alpha 0.3", "--learn-from is student", "--learn-from data"),
    ("distill --distill-temperature 3", "--learn-from is student", "--learn-from teacher"),
    ("distill --teacher-top-k 3", "--learn-from is student", "--learn-from teacher"),
    ("distill --learn-from data --kl-discount 1", "--learn-from is data", "--learn-from student"),
    ("distill --learn-from data --group-size 8", "--learn-from is data", "--learn-from teacher"),
    ("distill --curriculum success", "without a reward nothing scores them",
     "--reward exact_match"),
    ("distill --curriculum success --reward exact_match --learn-from teacher",
     "the student answers nothing", "--learn-from student"),
    ("dpo --loss ipo --label-smoothing 0.1", "the loss is ipo", "--loss dpo"),
    ("reward_model --form comparison --centre-coef 0.1", "the form is comparison", "--form scalar"),
    *((f"{name} --dynamic-sampling 3", "such as grpo", None)
      for name in ("sft", "dpo", "reward_model", "offline")),
    *((f"{name} --curriculum success", "--curriculum-steps", "--curriculum off")
      for name in ("sft", "dpo", "reward_model")),
    *((f"offline --loss ilql {words}", "the loss is ilql", "--loss dro")
      for words in ("--beta 0.2", "--baseline learned")),
    *((f"offline --{name} 0.35", "the loss is dro", "--loss ilql")
      for name in ("gamma", "tau", "expectile", "cql-coef")),
    ("offline --value-coef 0.1", "no value is learned", "--baseline learned"),
    ("grpo --reward gsm8k --rewards repetition 1", "rewards replaces it", None),
    # the default reward, set explicitly
    ("grpo --reward exact_match --rewards repetition 1", "rewards replaces it", None),
]  # fmt: skip


@pytest.mark.parametrize(("words", "says", "remedy"), WITHOUT_EFFECT)
def test_a_setting_without_effect_is_refused_and_the_remedy_works(words, says, remedy):
    message = "has no effect|curriculum success depends on"
    with pytest.raises(SettingsError, match=message) as caught:
        stages_of(*words.split())
    (problem,) = caught.value.problems
    assert says in problem
    if remedy is not None:
        stages_of(*words.split(), *remedy.split())


def test_what_a_variant_stands_for_gives_way_to_what_is_asked_for():
    """dapo widens a clip range that importance_sampling does not have."""
    changed = make_settings("--variant", "dapo", "--loss", "importance_sampling")
    gradient = changed.policy_gradient
    assert (gradient.loss, gradient.clip_high) == ("importance_sampling", 1.2)
    assert changed.sampling.dynamic_sampling == 10
    assert make_settings("--variant", "dapo").policy_gradient.clip_high == 1.28
    with pytest.raises(SettingsError, match="--clip-high 1.3 has no effect"):
        make_settings("--variant", "dapo", "--loss", "importance_sampling", "--clip-high", "1.3")


@pytest.mark.parametrize(("words", "message"), [
    ("--reward-clip -1", "--reward-clip is positive"),
    ("--dynamic-sampling 3 --group-size 1 --advantage none", "--dynamic-sampling selects"),
    ("--variant dapoo", "dapo"),
])  # fmt: skip
def test_settings_that_mean_nothing_are_refused(words, message):
    with pytest.raises(SettingsError, match=message):
        make_settings(*words.split())


@pytest.mark.parametrize(("recipe", "flag", "value", "remaining"), [
    ("addition_offline", "curriculum", "success", {"sft": "off", "offline": "off"}),
    ("addition_rlhf", "reward", "gsm8k", {"reward_model": None}),
    ("addition_offline", "base_model", "tiny:addition-small", {"offline": "sft"}),
])  # fmt: skip
def test_a_flag_that_some_stages_use_is_taken_by_those(recipe, flag, value, remaining):
    words = (str(REPO / "recipes" / f"{recipe}.yaml"), f"--{flag.replace('_', '-')}", value)
    stages = {stage.name: flatten_settings(stage.settings)[flag] for stage in stages_of(*words)}
    assert {stage: result for stage, result in stages.items() if result != value} == remaining


def test_settings_that_were_saved_before_they_were_errors_still_open():
    plain = make_settings(method="ppo")
    # refused on the command line, without critic_model
    saved = flatten_settings(plain) | {"critic_learning_rate": 1e-3}
    problems = []
    assert unflatten_settings(type(plain), saved, problems, "config.json") == plain and not problems


def test_what_is_given_for_all_stages_is_for_those_that_use_it(tmp_path):
    """A flag on the default recipe (sft, grpo) that only its second stage can use."""
    words = "--curriculum success --dynamic-sampling 3 --train-limit 50".split()
    names = ("curriculum", "dynamic_sampling", "train_limit")
    settings = [flatten_settings(stage.settings) for stage in stages_of(*words)]
    sft, grpo = ([values[name] for name in names] for values in settings)
    assert sft == ["off", 0, 50] and grpo == ["success", 3, 50]
    recipe = tmp_path / "r.yaml"
    for stages, refused in (
        ("- {method: sft}\n- {method: dpo}\ndynamic_sampling: 3\n", "dpo"),
        ("- {method: sft, dynamic_sampling: 3}\n- {method: grpo, dynamic_sampling: 3}\n", "sft"),
    ):
        recipe.write_text(f"stages:\n{stages}")
        message = f"^stage {refused}: dynamic_sampling 3 has no effect"
        with pytest.raises(SettingsError, match=message):
            stages_of(str(recipe))
    # other mistakes are still reported
    with pytest.raises(SettingsError, match="--reward-clip is positive"):
        stages_of("--reward-clip", "-1", "--dynamic-sampling", "3")


@pytest.mark.parametrize(("former", "current"), [
    ("--episodes in_step", {"rollout_mode": "lockstep"}),
    ("--episodes continuous", {"rollout_mode": "async"}),
    ("--max-steps-off-policy 2 --over-age redraw", {"on_stale": "resample"}),
    ("--max-steps-off-policy 2 --over-age finish", {"on_stale": "wait"}),
    ("--kl-in loss", {"kl_placement": "loss"}),
    ("--grpo.kl-in loss", {"kl_placement": "loss"}),
])  # fmt: skip
def test_former_names_of_settings_are_read(former, current, tmp_path):
    """Flags, flags of a stage and recipes accept the names that settings had before."""

    def read_values(*words: str) -> dict:
        (stage,) = stages_of(*words)
        return {name: flatten_settings(stage.settings)[name] for name in current}

    assert read_values("grpo", *former.split()) == current
    if not former.startswith("--grpo."):
        names, values = former.replace("--", "").split()[::2], former.split()[1::2]
        pairs = zip(names, values, strict=True)
        recipe = tmp_path / "former.yaml"
        lines = [f"{name.replace('-', '_')}: {value}" for name, value in pairs]
        recipe.write_text("\n".join(["method: grpo", *lines]))
        assert read_values(str(recipe)) == current


def test_a_former_name_beside_the_current_one_is_an_error(tmp_path):
    recipe = tmp_path / "both.yaml"
    recipe.write_text("method: grpo\nkl_in: loss\nkl_placement: loss\n")
    with pytest.raises(SettingsError, match="line 3: kl_in and kl_placement are the same setting"):
        stages_of(str(recipe))
