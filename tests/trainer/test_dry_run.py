"""Test that the check before the first step creates the same clients as the later stages."""

import pytest
from test_resume_in_play import DUEL
from test_reward_model import largest_digit_rows
from whole_runs import train

from rl.client import ServiceClient
from rl.errors import UserError
from rl.trainer import preflight

SMALL = "steps: 1\nbatch_size: 4\nmax_tokens: 3\neval_every: 0\nsave_every: 0\nrollouts_every: 0\n"
SMALL += "self_test: false\nreward_check: false\n"
RLHF = "method: rlhf, base_model: sft, reward_model: reward_model, data_format: columns"


def record(monkeypatch, service_class) -> list[tuple]:
    """Record (verb, adapter rank) of each client that such a service creates from now on."""
    calls: list[tuple] = []

    def record_calls(name, real):
        def create(service, *arguments, **settings):
            calls.append((name, settings.get("rank")))
            return real(service, *arguments, **settings)

        monkeypatch.setattr(service_class, name, create)

    for name in [name for name in vars(preflight.OutlineService) if name.startswith("create_")]:
        record_calls(name, getattr(service_class, name))
    return calls


@pytest.mark.parametrize(("settings", "models"), [
    ("lora_rank: 3, kl_coef: 0.1", [("lora_training", 3)]),
    ("kl_coef: 0.1", [("full_training", None), ("sampling", None)]),
    ("lora_rank: 2, critic_model: policy", [("lora_training", 2)] * 2),
])  # fmt: skip
def test_a_stage_checked_before_it_begins_creates_the_models_of_the_stage(
    settings, models, tmp_path, monkeypatch
):
    checked = record(monkeypatch, preflight.OutlineService)
    created = record(monkeypatch, ServiceClient)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "stages:\n  - {method: sft, response_column: response}\n"
        f"  - {{method: reward_model}}\n  - {{{RLHF}, {settings}}}\n{SMALL}"
        f"dataset: {largest_digit_rows(tmp_path / 'rows.jsonl')}\n"
    )
    train(str(recipe), tmp_path / "run")
    reward_model = ("training_client_from_state", None)
    of_stages = [("full_training_client", None), *((f"{n}_client", rank) for n, rank in models)]
    assert checked == [(f"create_{name}", rank) for name, rank in [*of_stages, reward_model]]
    assert created[1:] == checked, "the first stage begins, and is not checked before"


def test_other_players_of_an_asynchronous_stage_are_refused_before_any_training(tmp_path):
    (tmp_path / "duel.py").write_text(DUEL)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "stages:\n  - {method: grpo, name: first, dataset: addition}\n"
        f"  - {{method: grpo, name: second, environment: {tmp_path}/duel.py:Duel, "
        f"max_steps_off_policy: 1}}\nbase_model: tiny:ascii-small\n{SMALL}"
    )
    with pytest.raises(UserError, match="stage second: max_steps_off_policy .* has other players"):
        train(str(recipe), tmp_path / "run")
    assert not (tmp_path / "run").exists()
