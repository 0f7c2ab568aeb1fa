"""Test what console and curves show for each kind of method, based on the metrics that it logs."""

import json

import pytest

from rl.reporting import format_held_out, metric_plots
from rl.reporting.console import format_headline

LOGGED = {
    "grpo": ({"reward/total": 0.5, "optim/loss": 3.0, "optim/kl_sample_train_v1": 1e-5,
              "optim/entropy": 1.0, "env/all/ac_tokens_per_turn": 123.4,
              "env/all/frac_truncated": 0.125, "env/all/by_group/frac_mixed": 0.75,
              "env/all/total_episodes": 32, "env/all/total_groups": 8},
             "reward 0.500  length 123  cut off 12%  mixed groups 75%"),
    "ppo, whose groups hold a single answer": (
        {"reward/total": 0.5, "env/all/by_group/frac_mixed": 0.0, "env/all/total_episodes": 8,
         "env/all/total_groups": 8}, "reward 0.500"),
    "grpo with a sampler that differs from the learner": (
        {"reward/total": 0.5, "optim/kl_sample_train_v1": 2e-3},
        "reward 0.500  KL sampler-learner 2.0e-03"),
    "grpo with a sampler whose logprobs are lower": (
        {"reward/total": 0.5, "optim/kl_sample_train_v1": -0.2},
        "reward 0.500  KL sampler-learner -2.0e-01"),
    "grpo with scores around zero": ({"reward/total": -1e-5}, "reward -1e-05"),
    "grpo with a score of minus zero": ({"reward/total": -0.0}, "reward 0.000"),
    "grpo with a reference": (
        {"reward/total": 0.5, "optim/kl_ref_k3": 0.01}, "reward 0.500  KL to reference 1.0e-02"),
    "grpo whose reward fails for most answers": (
        {"reward/total": 0.5, "reward/failed": 61, "env/all/total_episodes": 3,
         "optim/kl_ref_k3": 0.01}, "reward 0.500  not scored 61 of 64  KL to reference 1.0e-02"),
    "grpo whose reward fails for none": (
        {"reward/total": 0.5, "reward/failed": 0, "env/all/total_episodes": 64}, "reward 0.500"),
    "distill, own answers": (
        {"teacher/kl_per_token": 0.25, "optim/kl_sample_train_v1": 1e-5}, "KL to teacher 2.5e-01"),
    "distill, the data's": ({"optim/loss": 1.0, "optim/kl": 0.25},
                            "loss 1.000  KL to teacher 2.5e-01"),
    "offline": ({"optim/policy_loss": -0.25, "optim/kl_behaviour_v1": 0.125},
                "policy loss -0.250  KL to behaviour 1.2e-01"),
    "sft": ({"optim/loss": 1.25}, "loss 1.250"),
}  # fmt: skip


@pytest.mark.parametrize("kind", LOGGED)
def test_the_console_shows_a_figure_of_every_method_and_says_which_kl_it_is(kind):
    metrics, shown = LOGGED[kind]
    assert format_headline(metrics) == shown


def test_a_narrow_terminal_loses_the_last_figures_first():
    metrics = {"reward/total": 0.5, "env/all/frac_truncated": 0.5, "time/tokens_per_second": 9.0}
    assert format_headline(metrics, width=40) == "reward 0.500  cut off 50%  9 tok/s"
    assert format_headline(metrics, width=30) == "reward 0.500  cut off 50%"
    assert format_headline(metrics, width=5) == "reward 0.500"


@pytest.mark.parametrize(("metrics", "shown"), [
    ({"optim/loss": 1.0}, ""),
    ({"test/env/all/correct": 0.5, "test/env/all/reward/total": 0.7}, "held-out accuracy 0.500"),
    ({"test/env/all/reward/total": 0.7}, "held-out reward 0.700"),  # tells no accuracy
    ({"test/loss": 1.5, "test/token_accuracy": 0.25}, "held-out loss 1.500, token accuracy 0.250"),
    ({"test/rewards/accuracies": 0.75, "test/loss": 0.5}, "held-out accuracy 0.750, loss 0.500"),
])  # fmt: skip
def test_held_out_figures_of_every_kind_are_shown_while_a_run_goes_on(metrics, shown):
    assert format_held_out(metrics) == shown


@pytest.mark.usefixtures("curves")
def test_parts_of_a_reward_length_share_cut_off_and_the_reference_have_curves(tmp_path):
    parts = {
        "reward/total": 0.5, "style": 0.25, "correct": 1.0, "ac_tokens_per_turn": 12.0,
        "ended": 1.0, "frac_truncated": 0.1,
    }  # fmt: skip
    row = {f"env/all/{name}": value for name, value in parts.items()}
    row |= {"optim/kl_ref_k3": 0.01, "env/sums/correct": 1.0}
    lines = [json.dumps({"step": i, **row}) + "\n" for i in range(3)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    curve = metric_plots.read_curve(tmp_path)
    panels = [*metric_plots.PANELS, *metric_plots.find_reward_panels([curve])]
    assert {panel.title for panel in panels if curve.series(panel)[0]} == {
        "reward", "reward: style", "reward: correct", "answer length (tokens)",
        "share of answers cut off", "KL to reference (nats a token)",
    }  # fmt: skip
    drawn = metric_plots.draw_curves(tmp_path, tmp_path / "curves.png")
    assert drawn.read_bytes().startswith(b"\x89PNG")
