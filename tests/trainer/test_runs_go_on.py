"""Test runs that start from the checkpoints of other runs."""

import copy
import json
import os
import shlex
import shutil
import sys
import warnings
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from whole_runs import RECIPE, train

from rl.algorithms import METHODS
from rl.client import ServiceClient
from rl.config import RunSettings, parse_run
from rl.errors import UserError
from rl.learner import learner_checkpoint
from rl.models import load_model, merge_adapter
from rl.reporting import Console
from rl.trainer.execute import execute
from rl.trainer.initial_weights import resolve_initial_weights
from rl.trainer.memory_requirements import compute_stage_needs, resolve_launch
from rl.trainer.run_summary import format_resume_command

SFT = "sft --steps 2 --batch-size 4 --learning-rate 1e-2 --eval-every 0 --max-tokens 4"
GRPO = (
    "grpo --steps 2 --batch-size 4 --group-size 2 --learning-rate 1e-2 --eval-every 0 "
    "--max-tokens 4"
)


SFT_FINAL = "checkpoints/sft-final"


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([[2, 3, 12, 4, 5, 13, 7]])).logits


def of(checkpoint: Path) -> torch.Tensor:
    """Return the logits of a checkpoint as the run computes them: the adapter on its base,
    unmerged.
    """
    return logits(learner_checkpoint.load_for_sampling(str(checkpoint), None)[0].model)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    """Return a run of SFT with LoRA, of a tied model with an adapted head."""
    folder = tmp_path_factory.mktemp("runs") / "sft"
    train(f"{SFT} --lora-rank 4 --train-unembed --seed 5", folder)
    return folder


@pytest.fixture
def get_console_notes(monkeypatch):
    """Return a function that joins the notes of the console."""
    notes: list[str] = []
    monkeypatch.setattr(Console, "note", lambda self, text: notes.append(text))
    return lambda: " ".join(notes)


def config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def spec(folder: Path, name: str) -> dict:
    return json.loads((folder / "checkpoints" / name / "state.json").read_text())["spec"]


@pytest.mark.parametrize("form", ["", SFT_FINAL, f"{SFT_FINAL}/model"])
def test_a_lora_run_is_gone_on_with_by_default_and_says_so(
    adapter, form, tmp_path, get_console_notes
):
    target = adapter / form
    train(f"{GRPO} --base-model {target} --learning-rate 1e-9", tmp_path / "next")
    assert "its LoRA adapter of rank 4 is continued" in get_console_notes()
    (note,) = config(tmp_path / "next")["origins"]
    assert note["asked"] == str(target) and "is continued" in note["how"]
    settings = config(tmp_path / "next")["stages"][0]["settings"]
    assert settings["lora_rank"] == 4
    assert settings["base_model"] == str(adapter / SFT_FINAL / "model")
    # at a rate of 1e-9 nothing moves: the adapter is the same
    ended, begun = of(tmp_path / "next/checkpoints/grpo-final"), of(adapter / SFT_FINAL)
    torch.testing.assert_close(ended, begun, rtol=0, atol=1e-5)
    assert spec(tmp_path / "next", "grpo-final")["base_model"] == "tiny:addition"


@pytest.mark.slow
@pytest.mark.parametrize("flags,rank", [
    ("--lora-rank 2 --no-train-mlp", 2),
    ("--lora-rank 4 --lora-start merge", 4),
    ("--lora-start merge", None),
])  # fmt: skip
def test_another_adapter_is_trained_on_the_merged_one(
    adapter, flags, rank, tmp_path, get_console_notes
):
    words = f"{GRPO} --base-model {adapter} {flags} --kl-coef 0.1"
    train(f"{words} --learning-rate 1e-9", tmp_path / "next")
    assert "merged into its base, in fp32" in get_console_notes()
    lora = spec(tmp_path / "next", "grpo-final")["lora"]
    assert (lora and lora["rank"]) == rank
    begun = of(adapter / SFT_FINAL)
    ended = of(tmp_path / "next/checkpoints/grpo-final")
    torch.testing.assert_close(ended, begun, rtol=0, atol=1e-5)
    rows = train(words, tmp_path / "moving")
    assert rows[-1]["optim/grad_norm"] > 0
    assert (of(tmp_path / "moving/checkpoints/grpo-final") - begun).abs().max() > 1e-4


@pytest.mark.slow
def test_what_a_run_began_from_is_kept_when_it_is_resumed(adapter, tmp_path):
    """Later checkpoints of the first run have no effect, although the settings say `--base-model
    RUN`.
    """
    source, run = tmp_path / "sft", tmp_path / "next"
    shutil.copytree(adapter, source)
    words = f"{GRPO} --base-model {source} --lora-rank 2 --save-every 1 --steps 2"
    whole = train(words, run)
    shutil.rmtree(run / "checkpoints" / "grpo-final")
    newer = source / "checkpoints" / "sft-000009"  # as if the first run had continued
    shutil.copytree(source / "checkpoints" / "sft-final", newer)
    assert train(f"{words} --resume", run) == whole
    assert config(run)["origins"][0]["base_model"].endswith("sft-final/model")


@pytest.mark.slow
@pytest.mark.parametrize(("base", "flags"), [
    ("runs/sft", "--lora-rank 2"),
    ("runs/sft/checkpoints/sft-final", ""),
    ("runs/sft/checkpoints/sft-final/model", "--lora-rank 2"),
    ("runs/sft/checkpoints/sft-final/model", ""),
])  # fmt: skip
def test_what_is_named_by_a_relative_path_is_gone_on_with_by_the_folder_alone(
    adapter, base, flags, tmp_path, monkeypatch
):
    shutil.copytree(adapter, tmp_path / "runs" / "sft")
    monkeypatch.chdir(tmp_path)
    run = Path("runs/next")
    whole = train(f"{GRPO} --base-model {base} {flags} --save-every 1", run)
    shutil.rmtree(run / "checkpoints" / "grpo-final")
    assert train("--resume", run) == whole
    assert len(train("--resume --steps 3", run)) == len(whole) + 1


def test_two_runs_with_stages_of_one_name_are_not_mixed_up(adapter, tmp_path):
    """The base of the second run's adapter is the first run's sft-final."""
    run = tmp_path / "again"
    train(f"{SFT} --base-model {adapter} --lora-rank 2 --seed 7", run)
    moved_there = tmp_path / "elsewhere"
    shutil.move(run, moved_there)
    final = moved_there / "checkpoints" / "sft-final"
    base = str(adapter / SFT_FINAL / "model")
    assert spec(moved_there, "sft-final")["base_model"] == base
    plain = PeftModel.from_pretrained(load_model(base).model, str(final / "model"))
    assert torch.equal(of(final), logits(plain))


@pytest.mark.slow
def test_a_chain_of_stages_under_other_adapters_is_one_of_merged_weights(
    tmp_path, get_console_notes
):
    recipe = tmp_path / "chain.yaml"
    recipe.write_text(
        "stages:\n  - {method: sft, lora_rank: 3, train_unembed: yes}\n  - {method: sft, name: second, lora_rank: 2, "
        "train_mlp: no}\n"
        "  - {method: grpo, group_size: 2}\nlearning_rate: 1e-2\nsteps: 1\nbatch_size: 4\n"
        "eval_every: 0\nmax_tokens: 4\n"
    )
    train(str(recipe), tmp_path / "run")
    notes = get_console_notes()
    assert "stage second begins from stage sft: its LoRA adapter of rank 3 is merged" in notes
    assert "stage grpo begins from stage second: its LoRA adapter of rank 2 is continued" in notes
    shutil.move(tmp_path / "run", tmp_path / "moved")
    first, second, last = (
        tmp_path / "moved" / "checkpoints" / f"{name}-final" for name in ("sft", "second", "grpo")
    )
    base = load_model("tiny:addition", seed=spec(first.parents[1], first.name)["seed"]).model
    merged = merge_adapter(PeftModel.from_pretrained(base, str(first / "model")))
    assert not merged.config.tie_word_embeddings
    for stage in (second, last):
        expected = logits(PeftModel.from_pretrained(copy.deepcopy(merged), str(stage / "model")))
        torch.testing.assert_close(of(stage), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("words,problem", [
    ("--lora-start continue --lora-rank 2", "lora_rank 4 -> 2"),
    ("--lora-start continue --base-model tiny:addition", "no LoRA adapter"),
    ("--lora-start merge --base-model tiny:addition", "no LoRA adapter"),
])  # fmt: skip
def test_what_cannot_be_gone_on_with_is_said_before_anything_is_written(
    adapter, words, problem, tmp_path
):
    base = "" if "--base-model" in words else f"--base-model {adapter}"
    with pytest.raises(UserError, match=problem):
        train(f"{GRPO} {base} {words}", tmp_path / "next")
    assert not (tmp_path / "next").exists()


def test_a_conflict_of_a_later_stage_is_said_before_the_first_trains(tmp_path):
    recipe = tmp_path / "chain.yaml"
    recipe.write_text(
        "stages:\n  - {method: sft, lora_rank: 3}\n  - {method: grpo, lora_rank: 2, lora_start: "
        "continue}\n"
        "steps: 1\nbatch_size: 8\neval_every: 0\nmax_tokens: 4\n"
    )
    with pytest.raises(UserError, match="stage grpo: lora_start continue .* lora_rank 3 -> 2"):
        train(str(recipe), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_does_not_begin_from_its_own_folder(adapter, tmp_path):
    shutil.copytree(adapter, tmp_path / "sft")
    with pytest.raises(UserError, match="another --output-dir"):
        train(f"{GRPO} --base-model {tmp_path / 'sft'} --overwrite", tmp_path / "sft")
    (tmp_path / "sft/decisions.jsonl").touch()
    for source in (
        "grpo --replay",
        "offline --dataset",
        "sft --dataset",
        "grpo --eval-dataset",
        "grpo --more-datasets",
        "grpo --kl-coef 1 --reference-model",
        "ppo --critic-model",
        "grpo --tokenizer",
    ):
        with pytest.raises(UserError, match="into the same folder"):
            train(f"{source} {tmp_path / 'sft'} --overwrite", tmp_path / "sft")
    assert (tmp_path / "sft/checkpoints/sft-final/model").is_dir()


def test_a_run_folder_may_have_the_name_of_a_stage_or_of_generated_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("two.yaml").write_text("""
stages:
  - {method: grpo, group_size: 2}
  - {method: offline, dataset: grpo, temperature: 0.8}
steps: 1
batch_size: 2
eval_every: 0
max_tokens: 2
""")
    for words, folder in (
        ("two.yaml", "grpo"),
        (f"{GRPO} --steps 1 --dataset addition", "addition"),
    ):
        for flag in ("", " --overwrite"):
            train(words + flag, Path(folder))


def test_a_reward_model_is_no_policy(tmp_path):
    words = "reward_model --dataset addition --steps 1 --batch-size 4 --eval-every 0 --max-tokens 4"
    train(words, tmp_path / "rm")
    with pytest.raises(UserError, match="trained as a reward model"):
        train(f"{GRPO} --base-model {tmp_path / 'rm'}", tmp_path / "next")


def test_the_plan_knows_what_a_run_begins_from(adapter):
    def show_needs(words: str) -> dict:
        words = f"{GRPO} {words} --plan".split()
        run, _ = resolve_initial_weights(parse_run(words, METHODS, RECIPE, options=RunSettings))
        return compute_stage_needs(run, resolve_launch(run)[0], 16)[0].plan.sums

    assert show_needs(f"--base-model {adapter}") == show_needs("--lora-rank 4 --train-unembed")


def test_commands_at_the_end_are_whole_and_quoted(adapter, tmp_path, monkeypatch):
    """Each printed command splits into words that its script or parser accepts unchanged."""
    shown = {}
    monkeypatch.setattr(Console, "end", lambda self, title, **what: shown.update(what))
    folder = tmp_path / "my runs" / "it's"
    words = [*f"{GRPO} --base-model {adapter} --steps 1".split(), "--output-dir", str(folder)]
    execute(parse_run(words, METHODS, RECIPE, options=RunSettings))
    commands = [shlex.split(text) for text in shown["commands"]]
    assert [words[:2] for words in commands] == [
        ["python", f"{name}.py"] for name in ("sample", "evaluate", "plot", "report", "export")
    ]
    assert all(words[2] == str(folder) for words in commands) and commands[-1][-1] == "--merge"
    for name in [*os.environ]:
        if name.startswith(("ACCELERATE_", "TORCHELASTIC_")) or name == "LOCAL_RANK":
            monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    for mark in (None, "ACCELERATE_MIXED_PRECISION", "LOCAL_RANK"):
        started = ["python"] if mark is None else ["accelerate", "launch"]
        if mark is not None:
            monkeypatch.setenv(mark, "0")
        again = shlex.split(format_resume_command(folder))
        assert again[: len(started) + 1] == [*started, "train.py"]
        run = parse_run(again[len(started) + 1 :], METHODS, RECIPE, options=RunSettings)
        assert run.options.output_dir == folder


def test_a_client_loads_without_bars_or_words_about_the_future(adapter, tmp_path, capfd):
    import transformers.utils.logging as bars

    bars.enable_progress_bar()
    loaded = load_model(str(adapter / "checkpoints/sft-final/model"))
    learner_checkpoint.write_model(loaded.model, loaded.tokenizer, tmp_path / "base")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ServiceClient(output_dir=tmp_path / "out") as service:
            client = service.create_lora_training_client(str(tmp_path / "base"), rank=2)
            client.save_weights_and_get_sampling_client()
    assert bars.is_progress_bar_enabled()
    assert "Loading weights" not in capfd.readouterr().err
    assert not [w for w in caught if issubclass(w.category, FutureWarning)]
