"""Test that a run resumes from its folder only."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from whole_runs import RECIPE, final_weights, same_weights, train

from rl.algorithms import METHODS
from rl.config import RunSettings, SettingsError, current_settings, list_changed_settings, read_run
from rl.errors import RunFolderError
from rl.jsonl import read_jsonl
from rl.lr_schedule import compute_lr_factor
from rl.reporting import Console
from rl.rollout import save_engine_state
from rl.trainer import batch_source, open_weights

WORDS = (
    "grpo --batch-size 4 --group-size 2 --learning-rate 1e-2 --eval-every 2 --eval-limit 4 "
    "--max-tokens 4 --kl-coef 0.1"
)
TWO = """
stages:
  - {method: sft, learning_rate: 1e-2}
  - {method: grpo, group_size: 2, learning_rate: 1e-2}
steps: 2
batch_size: 4
eval_every: 0
save_every: 1
max_tokens: 4
"""


def config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def read_config(words: str):
    return read_run(words.split(), METHODS, RECIPE, RunSettings)


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory) -> Path:
    """Return a run of four steps with a checkpoint of each; `cut` removes the last two."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(f"{WORDS} --steps 4 --save-every 1 --keep-last 9 --seed 3", folder)
    return folder


@pytest.fixture
def truncated_run(stopped_run, tmp_path) -> Path:
    folder = tmp_path / "run"
    shutil.copytree(stopped_run, folder)
    for name in ("grpo-000003", "grpo-final"):
        shutil.rmtree(folder / "checkpoints" / name)
    return folder


@pytest.fixture
def console_notes(monkeypatch):
    notes: list[str] = []
    monkeypatch.setattr(Console, "note", lambda self, text: notes.append(text))
    return notes


def test_the_folder_alone_is_enough(stopped_run, truncated_run):
    train("--resume", truncated_run)
    assert same_weights(stopped_run, truncated_run)
    assert config(truncated_run)["stages"] == config(stopped_run)["stages"]
    assert config(truncated_run)["name"] == "grpo"


@pytest.mark.slow
def test_what_changes_no_result_may_change(stopped_run, truncated_run, console_notes):
    free = (
        "--token-budget 64 --save-every 3 --eval-every 0 --rollouts-every 1 --keep-last 1 "
        "--reward-timeout 20 --kv-cache-tokens 5000"
    )
    train(f"--resume {free}", truncated_run)
    a, b = final_weights(stopped_run), final_weights(truncated_run)
    for name in a:
        # Smaller micro-batches: equal up to rounding.
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-5)
    assert any("eval_every 2 -> 0" in text for text in console_notes)
    assert "eval_every" in {note["setting"] for note in config(truncated_run)["changes"]}
    assert list((truncated_run / "rollouts").glob("*.jsonl"))


@pytest.mark.parametrize("again", ["", WORDS + " --seed 3 --save-every 1 --keep-last 9 "])
def test_what_changes_the_result_needs_to_be_named(truncated_run, again):
    with pytest.raises(RunFolderError, match=r"learning_rate 0.01 -> 0.5.*--change"):
        train(f"{again} --resume --steps 4 --learning-rate 0.5", truncated_run)
    assert "changes" not in config(truncated_run) or not config(truncated_run)["changes"]


@pytest.mark.slow
def test_a_change_takes_effect_from_its_step_on_and_is_noted(
    truncated_run, stopped_run, console_notes
):
    rows = train("--resume --change learning_rate=5e-3 kl-coef=0.5", truncated_run)
    before = read_jsonl(stopped_run / "metrics.jsonl")
    kept, expected = ([row["reward/total"] for row in rs[1:3]] for rs in (rows, before))
    assert kept == expected
    assert [row.get("optim/lr") for row in rows[1:]] == [1e-2, 1e-2, 5e-3, 5e-3]
    notes = {note["setting"]: note for note in config(truncated_run)["changes"]}
    assert notes["learning_rate"] == {
        "step": 2, "stage": "grpo", "setting": "learning_rate", "from": 0.01, "to": 0.005,
    }  # fmt: skip
    assert config(truncated_run)["stages"][0]["settings"]["kl_coef"] == 0.5
    state = json.loads((truncated_run / "checkpoints/grpo-final/state.json").read_text())
    assert state["metadata"]["method"]["kl_coef"] == 0.5
    assert not same_weights(truncated_run, stopped_run)
    train("--resume --steps 5", truncated_run)  # the recorded changes remain
    settings = [note["setting"] for note in config(truncated_run)["changes"]]
    assert settings.count("learning_rate") == 1


def test_a_change_may_begin_a_curriculum_or_replace_its_levels(truncated_run):
    for steps, change in ((4, "curriculum=success"), (5, "curriculum_column=answer")):
        rows = train(f"--resume --steps {steps} --change {change}", truncated_run)
        assert rows[-1]["curriculum/level"] == 0 and rows[-1]["step"] == steps


def test_a_flag_that_replaces_a_setting_of_the_recipe_resumes_older_runs(tmp_path):
    """Older versions kept the replaced pair in config.json, and read the last one."""
    environment = "environment: {name: calculator, digits: 3, operations: +}"
    (tmp_path / "one.yaml").write_text(f"""
stages: [{{method: grpo, group_size: 2}}]
{environment}
steps: 1
batch_size: 2
eval_every: 0
max_tokens: 2
""")
    words = f"{tmp_path / 'one.yaml'} --environment.digits 1"
    folder = tmp_path / "run"
    train(words, folder)
    saved = config(folder)
    settings = saved["stages"][0]["settings"]
    assert settings["environment_settings"] == [["operations", "+"], ["digits", "1"]]
    settings["environment_settings"] = [["digits", "3"], ["operations", "+"], ["digits", "1"]]
    (folder / "config.json").write_text(json.dumps(saved))
    train(f"{words} --resume --steps 2", folder)
    assert config(folder)["stages"][0]["settings"]["steps"] == 2


def test_runs_of_older_versions_may_name_a_reward_twice(truncated_run):
    """Older versions read the last weight."""
    saved = config(truncated_run)
    settings = saved["stages"][0]["settings"] | {"reward": None}
    saved["stages"][0]["settings"] = settings | {"rewards": [["gsm8k", 1], ["gsm8k", 2]]}
    (truncated_run / "config.json").write_text(json.dumps(saved))
    assert open_weights(str(truncated_run)).stage.settings.data.rewards == (("gsm8k", 2),)
    train("--resume", truncated_run)
    assert config(truncated_run)["stages"][0]["settings"]["rewards"] == [["gsm8k", 2]]


def test_a_change_may_use_a_former_name(truncated_run):
    train("--resume --change kl_coef=0.5 kl_in=loss", truncated_run)
    assert config(truncated_run)["stages"][0]["settings"]["kl_placement"] == "loss"
    changes = {note["setting"] for note in config(truncated_run)["changes"]}
    assert changes == {"kl_coef", "kl_placement"}


@pytest.mark.parametrize("change", ["lora_rank=4", "base_model=tiny:ascii", "seed=9"])
def test_a_checkpoint_stays_that_of_its_model(truncated_run, change):
    with pytest.raises(RunFolderError, match="--base-model"):
        train(f"--resume --change {change}", truncated_run)


@pytest.mark.slow
@pytest.mark.parametrize("ended", [False, True])
def test_steps_may_be_added(stopped_run, truncated_run, ended, tmp_path, console_notes):
    """Add steps to an interrupted run and to a finished run: the weights equal those of a run with
    all steps from the start.
    """
    train(f"{WORDS} --steps 6 --save-every 1 --keep-last 9 --seed 3", tmp_path / "whole")
    folder = truncated_run
    if ended:
        folder = tmp_path / "ended"
        shutil.copytree(stopped_run, folder)
    train("--resume --steps 6", folder)
    assert same_weights(folder, tmp_path / "whole")
    assert [row["step"] for row in read_jsonl(folder / "metrics.jsonl")] == [*range(7)]
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == [f"grpo-{i:06d}" for i in range(1, 6)] + ["grpo-final"]
    with pytest.raises(RunFolderError, match="6 steps of this stage are done"):
        train("--resume --steps 5", folder)


@pytest.mark.parametrize("is_older", [False, True])
def test_steps_may_be_removed_and_added_again_while_groups_are_in_flight(
    is_older, tmp_path, monkeypatch
):
    """Older versions saved the final checkpoint without its groups in flight."""
    flow = "--max-steps-off-policy 2 --eval-every 0 --save-every 1 --keep-last 9"
    train(f"{WORDS} {flow} --steps 5", tmp_path / "run")
    for name in ("grpo-000003", "grpo-000004", "grpo-final"):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / name)
    lost = {"groups": [], "acting": [], "asked": []} if is_older else {}
    with monkeypatch.context() as patch:
        patch.setattr(batch_source, "save_engine_state", lambda e: save_engine_state(e) | lost)
        assert train("--resume --steps 2", tmp_path / "run")[-1]["step"] == 2
    assert train("--resume --steps 4", tmp_path / "run")[-1]["step"] == 4


@pytest.mark.slow
def test_a_schedule_that_ends_says_what_more_steps_do(tmp_path, console_notes):
    train(f"{WORDS} --steps 2 --schedule linear", tmp_path / "run")
    rows = train("--resume --steps 4", tmp_path / "run")
    expected = (
        "the linear schedule now ends at step 4 of the stage, not at 2: the next step's learning "
        "rate is 0.005"
    )
    assert any(expected in text for text in console_notes)
    rates = [1e-2 * compute_lr_factor("linear", i, 4) for i in (2, 3)]
    assert [row["optim/lr"] for row in rows if row["step"] > 2] == pytest.approx(rates)


@pytest.mark.slow
def test_of_several_stages_those_that_ended_stay(tmp_path, console_notes):
    (tmp_path / "two.yaml").write_text(TWO)
    train(str(tmp_path / "two.yaml"), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "grpo-final")
    ended = "(?s)stage sft, which has ended: steps 2 -> 3.*--grpo.steps"
    for flag in ("--steps 3", "--change sft.steps=3"):
        with pytest.raises(RunFolderError, match=ended) as refusal:
            train(f"--resume {flag}", tmp_path / "run")
        assert "--change" not in str(refusal.value)  # it would be refused again
    train("--resume --grpo.steps 3 --change learning_rate=1e-3", tmp_path / "run")
    assert not any("changes nothing" in text for text in console_notes)
    sft, grpo = config(tmp_path / "run")["stages"]
    assert (sft["settings"]["steps"], sft["settings"]["learning_rate"]) == (2, 0.01)
    assert (grpo["settings"]["steps"], grpo["settings"]["learning_rate"]) == (3, 0.001)
    train("--resume --change sft.learning_rate=1e-4", tmp_path / "run")
    assert "stage sft has ended: --change sft.learning_rate changes nothing" in console_notes
    assert any("all steps of this run are done: --grpo.steps N" in text for text in console_notes)


def test_a_change_before_the_first_checkpoint_may_be_of_any_stage(tmp_path, console_notes):
    (tmp_path / "two.yaml").write_text(TWO)
    train(f"{tmp_path / 'two.yaml'} --steps 1", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    train("--resume --change sft.learning_rate=1e-3", tmp_path / "run")
    stages = config(tmp_path / "run")["stages"]
    assert [stage["settings"]["learning_rate"] for stage in stages] == [0.001, 0.01]
    assert "from step 0 on: learning_rate 0.01 -> 0.001" in console_notes
    train("--resume --rollouts-every 7", tmp_path / "run")  # the files of the first stage stay
    stages = config(tmp_path / "run")["stages"]
    assert [stage["settings"]["rollouts_every"] for stage in stages] == [20, 7]


def test_a_stage_whose_rollouts_are_read_keeps_its_steps_of_rollouts(tmp_path):
    (tmp_path / "two.yaml").write_text("""
stages:
  - {method: grpo, group_size: 2, steps: 5}
  - {method: offline, dataset: grpo, steps: 1, temperature: 0.8}
batch_size: 4
eval_every: 0
save_every: 1
keep_last: 9
max_tokens: 4
""")
    folder = tmp_path / "run"
    train(f"{tmp_path / 'two.yaml'} --rollouts-every 2", folder)
    for names in (
        ("offline-final",),
        ("offline-final", "grpo-final", "grpo-000004", "grpo-000003"),
    ):
        for name in names:
            shutil.rmtree(folder / "checkpoints" / name)
        assert train("--resume --rollouts-every 1", folder)[-1]["step"] == 7
        assert config(folder)["stages"][0]["settings"]["rollouts_every"] == 2
        files = sorted((folder / "rollouts").glob("*.jsonl"))
        assert [int(file.stem[-6:]) for file in files] == [1, 3, 5]


# --------------------------------------------------------------------------------- the command line


def test_a_flag_of_one_stage(tmp_path):
    (tmp_path / "two.yaml").write_text(TWO)
    run = read_config(
        f"{tmp_path / 'two.yaml'} --grpo.steps 7 --steps 3 --sft.no-train-mlp "
        f"--sft.learning-rate=0.5"
    )
    assert [stage.settings.loop.steps for stage in run.stages] == [3, 7]
    assert [stage.settings.model.train_mlp for stage in run.stages] == [False, True]
    assert [stage.settings.optim.learning_rate for stage in run.stages] == [0.5, 0.01]


def test_a_flag_of_one_stage_may_be_of_its_environment_or_template(tmp_path):
    (tmp_path / "two.yaml").write_text(TWO)
    run = read_config(
        f"{tmp_path / 'two.yaml'} --grpo.environment calculator --grpo.environment.digits 3 "
        "--template.a_b 1 --grpo.template.enable-thinking --sft.template.x-y no"
    )
    sft, grpo = (stage.settings for stage in run.stages)
    assert grpo.env.environment_settings == (("digits", "3"),)
    assert grpo.data.template == (("a_b", "1"), ("enable-thinking", "true"))
    assert sft.data.template == (("a_b", "1"), ("x-y", "no"))
    older = {"template": [["a", "1"], ["b", "2"], ["a", "3"]]}
    assert current_settings(older) == {"template": [["b", "2"], ["a", "3"]]}
    assert current_settings({"template": [["b", "2"], ["a", "3"]]}) == current_settings(older)


def test_the_settings_that_a_change_names():
    words = "grpo.kl_in=loss environment.digits=2 sft.template.x=1 learning-rate=1 =3 x"
    assert list_changed_settings(words.split()) == {
        "kl_placement", "environment_settings", "template", "learning_rate",
    }  # fmt: skip


@pytest.mark.parametrize("flags,problem", [
    ("--grop.steps 7", "no stage 'grop'; did you mean grpo?"),
    ("--grpo.stepps 7", "no such setting of stage grpo; did you mean steps?"),
    ("--grpo.steps x", "--grpo.steps: x is not INT"),
    ("--sft.group-size 4", "no such setting of stage sft"),
    ("--sft.lr 4", "no such setting of stage sft; it is called --learning-rate here"),
    ("--sft.no-train-mlp x", "--sft.no-train-mlp: takes no value, got x"),
    ("--change steps=4", "use it with --resume|use it with resume"),
    ("--resume --change steps", "expected NAME=VALUE"),
    ("--resume --change stepps=4", "did you mean --steps"),
    ("--resume --change learning_rate=x", "--change learning_rate: x is not"),
])  # fmt: skip
def test_what_is_wrong_with_it_is_said(flags, problem, tmp_path):
    (tmp_path / "two.yaml").write_text(TWO)
    with pytest.raises(SettingsError, match=problem):
        read_config(f"{tmp_path / 'two.yaml'} {flags}")


@pytest.mark.parametrize("words,expected", [
    ("GRPO", "unknown method 'GRPO'; did you mean grpo?"),
    ("grpo --lr 1", "it is called --learning-rate here"),
    ("grpo --num_generations 1", "it is called --group-size here"),
    ("grpo --max_completion_length 1", "it is called --max-tokens here"),
    ("grpo --gradient-accumulation-steps 1", "it is called --token-budget here"),
    ("grpo --per_device_train_batch_size 1", "it is called --batch-size here"),
    ("grpo --beta 1", "it is called --kl-coef here"),
    ("grpo --actor_rollout_ref.rollout.n 8", "it is called --group-size here"),
    ("grpo actor_rollout_ref.rollout.n=8", "it is called --group-size here"),
    ("grpo data.train_batch_size=8", "it is called --batch-size here"),
    ("grpo --trainer.nnodes 2", "accelerate launch --num_machines"),
    ("grpo mine=3", "a setting is --name value"),
    ("--config recipes/gsm8k.yaml", "a recipe is named without a flag"),
    ("grpo --epochs 3", "it is called --steps here"),
    ("grpo --max_prompt_length 256", "it is called --max-prompt-tokens here"),
    ("grpo --steps_per_generation 4", "it is called --num-substeps here"),
    ("grpo --importance_sampling_level sequence", "it is called --loss here (gspo"),
    ("grpo --target_modules all-linear", "it is called --train-attn here"),
    ("sft --packing true", "it is called --layout here (packed"),
    ("sft --max_length 2048", "it is called --max-row-tokens here"),
    ("sft --assistant_only_loss true", "it is called --train-on here"),
    ("sft --num_train_epochs 3", "it is called --epochs here"),
    ("ppo --num_train_epochs 3", "it is called --steps here"),
    ("grpo --algorithm.kl_ctrl.kl_coef 1", "it is called --kl-coef here"),
    ("grpo --actor.use_kl_loss True", "it is called --kl-placement here (loss, with kl_coef)"),
    ("grpo --actor_rollout_ref.actor.use_kl_loss True", "it is called --kl-placement here"),
    ("grpo custom_reward_function.path=r.py", "it is called --reward here"),
    ("grpo --custom_reward_function.path r.py", "as in --reward FILE.py:FUNCTION"),
    ("dpo --loss_type sigmoid", "it is called --loss here (TRL's sigmoid is dpo)"),
    ("grpo --loss_type dapo", "it is called --variant here"),
    ("sft --loss_type nll", "(it is called --variant here, a setting of grpo, reinforce)"),
    ("sft --actor.use_kl_loss True", "a setting of grpo, reinforce, ppo"),
    ("ppo --cliprange 0.2", "it is called --clip here"),
    ("grpo --cliprange 0.2", "it is called --clip-low here"),
    ("ppo --vf-coef 0.1", "it is called --value-coef here"),
    ("ppo --lam 0.9", "it is called --gae-lambda here"),
    ("sft --beta 0.1", "of this run (it is a setting of online_dpo, dpo"),
])  # fmt: skip
def test_commands_in_the_manner_of_other_libraries_are_answered(words, expected):
    with pytest.raises(SettingsError, match=re.escape(expected)):
        read_config(words)


def test_words_of_other_libraries_in_a_recipe_are_answered(tmp_path):
    (tmp_path / "trl.yaml").write_text("method: grpo\nnum_generations: 1\n")
    with pytest.raises(SettingsError, match="it is called --group-size here"):
        read_config(str(tmp_path / "trl.yaml"))


def test_every_word_of_other_libraries_leads_to_a_setting():
    from rl.config.aliases import _FOREIGN_NAMES
    from rl.config.fields import get_fields

    known = {*get_fields(RunSettings)}.union(*(get_fields(m.Settings) for m in METHODS.values()))
    names = [name for rows in _FOREIGN_NAMES.values() for name in rows]
    assert {here for here, *_ in names if here} <= known
    # settings of some methods: beta of dpo and offline, epochs of ppo and others
    assert known & _FOREIGN_NAMES.keys() == {"beta", "epochs"}


def test_a_reward_on_the_line_replaces_the_rewards_of_a_recipe_and_the_reverse(tmp_path):
    recipe = tmp_path / "own.yaml"
    for text, words, reward, count in (
        ("reward: gsm8k", "--rewards exact_match 1 length_penalty 0.1", None, 2),
        ("rewards: {exact_match: 1}", "--reward gsm8k", "gsm8k", 0),
    ):
        recipe.write_text(f"method: grpo\n{text}\n")
        data = read_config(f"{recipe} {words}").stages[0].settings.data
        assert len(data.rewards) == count and (count or data.reward == reward)


@pytest.mark.parametrize("method", ["sft", "distill", "rlhf"])
def test_rewards_need_no_reward_where_there_is_none_by_default(method):
    data = read_config(f"{method} --rewards gsm8k 3").stages[0].settings.data
    assert (data.reward, data.rewards) == (None, (("gsm8k", 3.0),))


def test_step_rewards_without_steps_are_said(tmp_path, monkeypatch):
    console_notes = []
    monkeypatch.setattr(Console, "warn", lambda self, text: console_notes.append(text))
    words = "grpo --step-rewards to_go --steps 2 --batch-size 4 --group-size 2 --eval-every 0"
    train(f"{words} --max-tokens 4", tmp_path / "run")
    said = "to_go has no effect: every episode has one turn"
    assert sum(said in text for text in console_notes) == 1
