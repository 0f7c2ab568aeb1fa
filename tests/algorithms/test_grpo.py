"""Test grpo and reinforce: variants, credit, dynamic sampling, state."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args, get_type_hints

import numpy as np
import pytest

from rl.algorithms import (
    ADVANTAGES,
    GRPO,
    METHODS,
    AdvantageEstimator,
    GrpoSettings,
    PerProblemBaseline,
    PolicyGradientSettings,
    normalize_by_batch,
)
from rl.algorithms.advantages import subtract_mean_divide_by_batch_std
from rl.algorithms.grpo import VARIANTS, variant_settings
from rl.config import (
    AsyncRolloutSettings,
    KlSettings,
    LoopSettings,
    RunSettings,
    SamplingSettings,
    load_resolved_config,
    read_run,
    resolve_config,
)
from rl.distributed.stop_signals import StopRequest
from rl.errors import UnusedSettingError, UserError
from rl.losses import LOSSES, LossSpec
from rl.losses.losses import importance_sampling, ppo
from rl.rollout import RolloutBatch, Trajectory, TrajectoryGroup, Transition
from rl.trainer import stage_sampling as samples_module
from rl.trainer.stage_sampling import AllRewardsFailed, StageSampler, WarnOnce
from rl.trainer.trainer import Trainer, TrainingBatch
from rl.types import ModelInput, SampledSequence

REPO = Path(__file__).resolve().parents[2]
RECIPE = REPO / "recipes" / "addition.yaml"


def group(*rewards_G: list[float], problem: int = 0) -> TrajectoryGroup:
    """Return a group in which each member has a turn of two tokens for each reward."""
    members = []
    for rewards in rewards_G:
        seen, turns = [7], []
        for reward in rewards:
            action = SampledSequence([3, 4], [-0.5, -1.0])
            turns.append(Transition(ModelInput.from_ints(list(seen)), action, reward, False))
            seen += [3, 4, 9]
        members.append(Trajectory(turns))
    count = len(members)
    return TrajectoryGroup(members, [0.0] * count, [{}] * count, problem_index=problem)


def method(**inputs) -> GRPO:
    return GRPO(GrpoSettings(policy_gradient=PolicyGradientSettings(**inputs)))


def compute(groups, **inputs) -> list[list[float]]:
    """Return the advantages of a method with these settings."""
    return advantages(method(**inputs).compute_advantages(groups, None))


# --------------------------------------------------------------------------------------- advantages


def test_advantages_over_a_batch_by_hand():
    rewards_P_G = [[1.0, 0.0], [3.0, 0.0]]
    mean, std = 1.0, math.sqrt((0 + 1 + 4 + 1) / 4)
    for got, rewards in zip(normalize_by_batch(rewards_P_G), rewards_P_G, strict=True):
        np.testing.assert_allclose(got, (np.array(rewards) - mean) / std, rtol=1e-7)
    std = math.sqrt((0.25 + 0.25 + 2.25 + 2.25) / 4)
    np.testing.assert_allclose(
        subtract_mean_divide_by_batch_std(rewards_P_G),
        np.array([[0.5, -0.5], [1.5, -1.5]]) / std,
        rtol=1e-7,
    )
    for function in (normalize_by_batch, subtract_mean_divide_by_batch_std):
        # exactly 0, although the mean of the rewards is rounded
        assert np.concatenate(function([[0.1] * 3, [0.1] * 4])).tolist() == [0.0] * 7


def test_a_baseline_for_each_problem_by_hand():
    baseline = PerProblemBaseline(decay=0.5)
    first = baseline([[1.0], [0.0]], ["a", "b"])
    assert [a.tolist() for a in first] == [[0.5], [-0.5]]  # new problems: the batch's mean
    again = baseline([[0.0], [1.0]], ["a", "c"])
    assert again[0].tolist() == [-1.0]  # the running mean of problem a
    assert again[1].tolist() == [0.5]  # problem c is new: the running mean over all problems
    assert baseline.values == {"a": 0.5, "b": 0.0, "c": 1.0}


# ------------------------------------------------------------------------------------------- credit


def advantages(datums) -> list[list[float]]:
    return [d.loss_fn_inputs["advantages"].array[d.action_mask].tolist() for d in datums]


COMPARING = [name for name, estimator in ADVANTAGES.items() if estimator.compares_members]


@pytest.mark.parametrize("advantage", COMPARING)
def test_equal_returns_earn_nothing_however_many_turns_they_took(advantage):
    groups = [group([1.0], [0.0, 1.0], [0.0, 0.0, 1.0]), group([1.0], [0.0], problem=1)]
    credit = compute(groups, advantage=advantage, step_rewards="to_go", entropy_coef=0.01)
    assert [any(a) for a in credit] == [False, False, False, True, True]
    paper = compute(groups[:1], advantage="mean", step_rewards="process_supervision")
    assert any(any(a) for a in paper)  # the paper's form credits them differently


@pytest.mark.parametrize(
    "advantage",
    ["mean", "mean_std", "leave_one_out", "batch", "mean_batch_std", "running_mean", "none"],
)
def test_process_and_outcome_rewards_are_one_where_an_episode_has_one_step(advantage):
    groups = [group([1.0], [0.0], [0.5]), group([0.25], [0.0], [1.0], problem=1)]
    kinds = ("sum", "to_go", "process_supervision")
    every = [compute(groups, advantage=advantage, step_rewards=kind) for kind in kinds]
    assert every[0] == every[1] == every[2]


def test_a_new_estimator_is_one_entry(monkeypatch):
    def subtract_best(rewards_G):
        return np.asarray(rewards_G) - max(rewards_G)

    best = AdvantageEstimator(subtract_best, scope="group", compares_members=True)
    monkeypatch.setitem(ADVANTAGES, "best", best)
    groups = [group([1.0], [1.0]), group([1.0], [0.25], problem=1)]
    # the first group has no signal
    assert compute(groups, advantage="best") == [[0.0, 0.0], [-0.75, -0.75]]
    says = "a group of 1 answer has no other answers to compare with: advantage 'best'"
    with pytest.raises(ValueError, match=says):
        method(advantage="best", group_size=1)
    of_batch = replace(best, scope="batch", fn=lambda rewards_P_G: [*map(best.fn, rewards_P_G)])
    monkeypatch.setitem(ADVANTAGES, "best", of_batch)
    assert compute(groups, advantage="best") == [[0.0, 0.0], [-0.75, -0.75]]
    pg = PolicyGradientSettings(advantage="best")
    with pytest.raises(ValueError, match="advantage best compares the answers of the whole batch"):
        GrpoSettings(policy_gradient=pg, flow=AsyncRolloutSettings(stream_minibatches=2))
    with pytest.raises(ValueError, match="unknown advantage 'worst': expected mean, "):
        PolicyGradientSettings(advantage="worst")


def test_every_estimator_is_a_choice_of_the_line():
    assert set(get_args(get_type_hints(PolicyGradientSettings)["advantage"])) == set(ADVANTAGES)


def test_what_an_estimator_remembers_survives_a_checkpoint():
    for name in ("running_mean", "per_problem"):
        went, back = method(advantage=name), method(advantage=name)
        went.compute_advantages([group([1.0], [0.0]), group([1.0], [1.0], problem=1)], None)
        back.load_state(json.loads(json.dumps(went.state())))
        later = [[group([0.5], [0.0]), group([1.0], [0.25], problem=2)] for _ in range(2)]
        first, other = (
            advantages(each.compute_advantages(groups, None))
            for each, groups in zip((went, back), later, strict=True)
        )
        assert first == other
    # the names in older checkpoints
    assert set(went.state()) == {"baseline", "per_problem", "reward_statistics", "kl_coef"}


def test_groups_without_signal_stay_where_another_term_needs_them():
    groups = [group([1.0], [1.0]), group([1.0], [0.0], problem=1)]
    assert len(compute(groups)) == 2
    assert len(compute(groups, entropy_coef=0.01)) == 4
    assert len(compute(groups, advantage="running_mean")) == 4


def test_kl_is_charged_in_the_reward_or_handed_to_the_loss():
    """Two tokens with q = -0.5, -1 and ref = -0.5, -2."""
    ref = np.array([-0.5, -2.0], np.float32)
    reference = SimpleNamespace(logprobs=lambda datums, temperature: [ref] * len(datums))
    models = SimpleNamespace(reference=reference)

    def credited(**kl):
        pg = PolicyGradientSettings(kl_discount=kl.pop("discount", 1.0))
        made = GRPO(GrpoSettings(policy_gradient=pg, kl=KlSettings(**kl)))
        return made.compute_advantages([group([1.0], [0.0])], models)

    each, later = (
        np.array(advantages(credited(kl_coef=0.2, discount=discount))) for discount in (0.0, 1.0)
    )
    assert each == pytest.approx(np.array([[0.5 + 0.1, 0.5 - 0.1], [-0.4, -0.6]]))
    assert later == pytest.approx(np.array([[0.5, 0.5], [-0.5, -0.5]]))
    in_loss = credited(kl_coef=0.2, kl_placement="loss")
    assert advantages(in_loss) == [[0.5, 0.5], [-0.5, -0.5]]
    assert in_loss[0].loss_fn_inputs["ref_logprobs"].array.tolist() == [-0.5, -2.0]


def test_kl_is_off_until_a_reference_is_named():
    def coefficient(**kl) -> tuple[bool, float]:
        result = GRPO(GrpoSettings(kl=KlSettings(**kl))).kl
        return result.needs_reference, result.coefficient

    assert coefficient() == (False, 0.0) and coefficient(reference_model="x") == (True, 0.1)
    assert coefficient(reference_model="x", kl_coef=0.02) == (True, 0.02)
    assert coefficient(kl_target=0.1) == (True, 0.0)


@pytest.mark.parametrize(("before", "now", "used"), [
    ({}, {"reference_model": "x"}, 0.1),
    ({"kl_coef": 0.1}, {}, 0.0),
    ({"kl_coef": 0.3, "kl_target": 0.1}, {"kl_coef": 0.2, "kl_target": 0.1}, 0.3),
])  # fmt: skip
def test_only_an_adapted_kl_coefficient_is_restored(before, now, used):
    first, second = (GRPO(GrpoSettings(kl=KlSettings(**kl))) for kl in (before, now))
    second.load_state(first.state())
    assert second.kl.coefficient == used


# ----------------------------------------------------------------------------------------- variants


def stage_settings(*words: str):
    return read_run(list(words), METHODS, RECIPE, RunSettings).stages[0].settings


# Values of each paper; GRPO's leaves its bounds open, so these are PPO's. Loss ppo is the clipped
# ratio of each token.
PUBLISHED = {
    # 2402.03300, (3)
    "grpo": {"advantage": "mean_std", "loss": "ppo", "clip_low": 0.8, "clip_high": 1.2,
             "normalise": "sequence_means"},
    # 2503.20783: no std, no length
    "dr_grpo": {"advantage": "mean", "loss": "ppo", "normalise": "constant"},
    # 2503.14476, 4.1: 4096 of 20480 tokens, no KL
    "dapo": {"advantage": "mean_std", "loss": "ppo", "clip_low": 0.8, "clip_high": 1.28,
             "normalise": "tokens", "overlong_share": 0.2, "overlong_penalty": 1.0,
             "kl_coef": None, "kl_target": None},
    # 2507.18071
    "gspo": {"advantage": "mean_std", "loss": "gspo", "clip_low": 0.9997, "clip_high": 1.0004,
             "normalise": "sequence_means"},
    # 2510.13786, no lower
    "cispo": {"advantage": "mean_std", "loss": "cispo", "clip_low": 0.0, "clip_high": 5.0,
              "normalise": "tokens"},
    # 2402.14740, a sum over tokens
    "rloo": {"advantage": "leave_one_out", "loss": "importance_sampling", "normalise": "sequences"},
    "reinforce_plus_plus": {"advantage": "batch", "loss": "ppo", "group_size": 1},  # 2501.03262
    "reinforce_plus_plus_baseline": {"advantage": "mean_batch_std", "loss": "ppo", "group_size": 8},
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_is_what_its_paper_says_and_what_is_given_wins(variant):
    run = read_run(["grpo", "--variant", variant], METHODS, RECIPE, RunSettings)
    resolved = resolve_config(run)
    flat, expected = resolved["stages"][0]["settings"], {**VARIANTS[variant], **PUBLISHED[variant]}
    assert {key: flat[key] for key in expected} == expected and flat["variant"] == variant
    assert (flat["dynamic_sampling"] > 0) == (variant == "dapo")
    stored = json.loads(json.dumps(resolved))
    assert load_resolved_config(stored, METHODS, options=RunSettings) == run
    words = ("--variant", variant, "--normalise", "sum", "--max-tokens", "9")
    pg = stage_settings("grpo", *words).policy_gradient
    assert pg.normalise == "sum" and pg.variant == variant
    GRPO(run.stages[0].settings)


def test_a_variant_in_python_is_all_of_its_settings_or_an_error():
    with pytest.raises(ValueError, match=r"clip_high, .*variant_settings\('dapo'"):
        PolicyGradientSettings(variant="dapo", advantage="mean_std")
    made = variant_settings("dapo", max_tokens=9, clip_high=1.5)
    words = "grpo --variant dapo --max-tokens 9 --clip-high 1.5"
    assert made == stage_settings(*words.split())
    assert made.shaping.overlong_share == 0.2 and made.policy_gradient.clip_high == 1.5
    assert replace(made.policy_gradient, clip_low=0.5).variant == "dapo"
    for make in (variant_settings, lambda name: PolicyGradientSettings(variant=name)):
        with pytest.raises(ValueError, match="unknown variant 'dappo'.*dapo"):
            make("dappo")
    with pytest.raises(ValueError, match="max_token: no setting.*max_tokens"):
        variant_settings("dapo", max_token=9)


def test_reinforce_has_no_variants():
    with pytest.raises(UserError, match="grpo --variant rloo"):
        stage_settings("reinforce", "--variant", "rloo")


def test_a_variant_in_a_recipe_yields_to_the_line(tmp_path):
    (tmp_path / "r.yaml").write_text("method: grpo\nvariant: dapo\nclip_high: 1.5\n")
    pg = stage_settings(str(tmp_path / "r.yaml"), "--clip-low", "0.7").policy_gradient
    assert (pg.clip_low, pg.clip_high) == (0.7, 1.5)
    assert (pg.normalise, pg.advantage) == ("tokens", "mean_std")


# --------------------------------------------------------------------------------- dynamic sampling


def make_stage_sampler(bound: int, expected: int) -> StageSampler:
    """Return a sampler with the minimum for `fill` and `check`; problems double as their groups."""
    inputs = SimpleNamespace(
        settings=GrpoSettings(sampling=SamplingSettings(dynamic_sampling=bound)),
        loop=SimpleNamespace(batch_size=expected),
        seed=5,
        problems=SimpleNamespace(batch=lambda step, size, seed: (step, size, seed)),
        models=SimpleNamespace(rewards=None, opponents=None),
        method=SimpleNamespace(group_size=2),
        **dict.fromkeys(("sampling_params", "scorer", "environment", "opponents", "replay_log")),
    )
    samples = StageSampler(inputs, WarnOnce(SimpleNamespace(warn=lambda text: None)))
    samples.build_groups = lambda problems, size: problems
    return samples


def test_dynamic_sampling_does_not_go_on_where_every_reward_fails(monkeypatch):
    rounds: list[RolloutBatch] = []

    def broken(*_, **__):
        errors = ["reward 'r' raised KeyError (prompt 'x')"]
        rounds.append(RolloutBatch([], errors, {"emitted_tokens": 5}, 1.0, 0.5))
        return rounds[-1]

    monkeypatch.setattr(samples_module, "rollout", broken)
    samples = make_stage_sampler(bound=10, expected=3)
    filled = samples.fill_mixed_groups(broken(), 4, None)
    assert len(rounds) == 1  # only the batch itself, no extra round
    with pytest.raises(AllRewardsFailed, match="raised KeyError"):
        samples.check_rollouts(filled, 0)
    worked = RolloutBatch([group([1.0], [0.0])], [], {"emitted_tokens": 5}, 1.0, 0.5)
    filled = samples.fill_mixed_groups(worked, 4, None)  # a reward that starts to fail mid-run
    assert len(rounds) == 2 and len(filled.groups) == 1 and filled.counters["extra_rounds"] == 1


def test_dynamic_sampling_fills_the_batch_with_mixed_groups_within_its_bound(monkeypatch):
    mixed = lambda index: group([1.0], [0.0], problem=index)  # noqa: E731
    alike = lambda index: group([1.0], [1.0], problem=index)  # noqa: E731
    drawn: list[tuple[int, int]] = []

    def sampled(builders, sampler, params, *, seed, **_):
        drawn.append((builders, seed))
        groups = [mixed(len(drawn)), alike(0), mixed(len(drawn))]
        return RolloutBatch(groups, ["lost"], {"emitted_tokens": 5}, 1.0, 0.5)

    def fill(start):
        return samples.fill_mixed_groups(start, 4, None)

    def without_signal(index):
        return RolloutBatch([alike(index)], [], {}, 0.0, 0.0)

    def problems(batch):
        return [g.problem_index for g in batch.groups]

    monkeypatch.setattr(samples_module, "rollout", sampled)
    samples = make_stage_sampler(bound=2, expected=3)
    start = RolloutBatch([alike(8), mixed(9), alike(8)], [], {"emitted_tokens": 7}, 2.0, 1.0)
    full = fill(start)
    assert problems(full) == [9, 1, 1]
    assert (len(full.untrained_groups), len(full.all_groups)) == (3, 6)
    assert full.counters == {"emitted_tokens": 12, "extra_rounds": 1}
    assert (full.errors, full.sample_seconds) == (["lost"], 3.0)
    samples.context.loop.batch_size = 50
    assert problems(fill(start)) == [9, 2, 2, 3, 3]  # exactly two rounds
    assert len({seed for _, seed in drawn}) == 2 and len({builders for builders, _ in drawn}) == 3
    monkeypatch.setattr(samples_module, "rollout", lambda *_, **__: without_signal(1))
    nothing = fill(without_signal(0))  # no group is mixed
    assert problems(nothing) == [0, 1, 1] and not nothing.untrained_groups
    samples.context.loop.batch_size = 2
    nothing = fill(without_signal(0))  # at most batch_size groups are trained on
    assert len(nothing.groups) == 2 and len(nothing.untrained_groups) == 1
    samples.context.settings = GrpoSettings()
    assert fill(start) is start


@pytest.mark.parametrize(
    "judge", [None, SimpleNamespace(scores_single_answers=False, take_seconds=dict)]
)
def test_a_batch_that_a_model_scored_has_a_reward_though_no_function_gave_one(judge):
    rows: list[dict] = []
    loop = {"steps": 9, "batch_size": 1, "eval_every": 0, "save_every": 0, "rollouts_every": 0}
    settings = GrpoSettings(loop=LoopSettings(**loop, keep_best=None))
    trainer = Trainer(
        name="grpo", index=0, run_seed=0, first_step=0, stop_request=StopRequest(),
        method=SimpleNamespace(settings=settings, shaping_metrics={}),
        models=SimpleNamespace(rewards=judge, opponents=None),
        problems=SimpleNamespace(epoch=lambda step, size: 0.0),
        logbook=SimpleNamespace(log=lambda step, row: rows.append(row)),
        console=SimpleNamespace(update=lambda step, row: None, warn=lambda text: None),
        **dict.fromkeys(("test_problems", "renderer", "scorer", "checkpoints")),
    )  # fmt: skip
    rollouts = RolloutBatch([group([1.0], [0.0])], [], {"emitted_tokens": 4}, 1.0, 0.5)
    trainer.end_batch(TrainingBatch(0, rollouts), {}, None)
    has = rows[0].get("reward/total") == 0.5, "env/all/by_group/frac_mixed" in rows[0]
    assert has == (judge is not None,) * 2


def test_a_coefficient_that_a_registered_loss_does_not_read_is_rejected(monkeypatch):
    """The loss entry declares which coefficients the loss reads."""
    required = ("target_tokens", "advantages", "logprobs")
    low, high = "clip_low_threshold", "clip_high_threshold"
    entries = {
        "bare": LossSpec(importance_sampling, required),
        "upper": LossSpec(importance_sampling, required, config=(high,), terms=True),
        "both": LossSpec(ppo, required, config=(low, high)),
    }
    coefficients = {"clip_low": 0.5, "clip_high": 1.5, "entropy_coef": 0.1}
    reads = {"bare": [], "upper": ["clip_high", "entropy_coef"], "both": ["clip_low", "clip_high"]}
    for loss, spec in entries.items():
        monkeypatch.setitem(LOSSES, loss, spec)
        for name, value in coefficients.items():
            if name in reads[loss]:
                PolicyGradientSettings(loss=loss, **{name: value})
                continue
            with pytest.raises(UnusedSettingError, match=f"{name} .* has no effect: loss {loss}"):
                PolicyGradientSettings(loss=loss, **{name: value})
        settings = GrpoSettings(policy_gradient=PolicyGradientSettings(loss=loss))
        config = GRPO(settings).loss_config()
        clips = {key: value for key, value in ((low, 0.8), (high, 1.2)) if key in spec.config}
        assert config == {"temperature": settings.sampling.temperature, **clips}
    with pytest.raises(ValueError, match="unknown loss 'none_such'"):
        PolicyGradientSettings(loss="none_such")
