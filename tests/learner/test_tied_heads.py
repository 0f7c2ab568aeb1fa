"""Test LoRA on a model with tied head and embedding: the adapter holds the head only on request."""

import json
from pathlib import Path

import pytest
import torch
from whole_runs import RECIPE, train

from rl.algorithms import METHODS
from rl.client import LoRAConfig, ServiceClient, TrainingConfig
from rl.config import RunSettings, parse_run
from rl.models import load_model
from rl.reporting import Console
from rl.trainer.initial_weights import describe_tied_heads, resolve_initial_weights

SFT = (
    "sft --steps 1 --batch-size 2 --eval-every 0 --max-tokens 4 --lora-rank 2 "
    "--dataset addition --base-model"
)


@pytest.fixture(scope="module")
def separate_heads(tmp_path_factory) -> Path:
    """Return a model folder with separate matrices for head and embedding."""
    folder = tmp_path_factory.mktemp("models") / "separate"
    loaded = load_model("tiny:addition")
    loaded.model.config.tie_word_embeddings = False
    loaded.model.lm_head.weight = torch.nn.Parameter(loaded.model.lm_head.weight.detach().clone())
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


def resolve_heads(words: str, recorded: dict | None = None) -> list[bool]:
    run = parse_run(words.split(), METHODS, RECIPE, options=RunSettings)
    stages = resolve_initial_weights(run, recorded)[0].stages
    return [stage.settings.model.train_unembed for stage in stages]


def read_targets(folder: Path) -> list[str]:
    config = json.loads((folder / "adapter_config.json").read_text())
    return sorted(name.rpartition(".")[2] for name in config["target_modules"])


def test_a_run_leaves_a_tied_head_out_unless_it_is_requested(separate_heads):
    assert resolve_heads(f"{SFT} tiny:addition") == [False]
    assert resolve_heads(f"{SFT} tiny:addition --train-unembed") == [True]
    assert resolve_heads(f"{SFT} {separate_heads}") == [True]
    assert resolve_heads(f"{SFT} {separate_heads} --no-train-unembed") == [False]


def test_the_adapter_of_a_run_holds_what_the_run_says(tmp_path, monkeypatch):
    notes: list[str] = []
    monkeypatch.setattr(Console, "note", lambda self, text: notes.append(text))
    train(f"{SFT} tiny:addition", tmp_path / "default")
    assert "lm_head" not in read_targets(tmp_path / "default/checkpoints/sft-final/model")
    settings = json.loads((tmp_path / "default/config.json").read_text())["stages"][0]["settings"]
    assert settings["train_unembed"] is False
    assert not any("vLLM" in text for text in notes)
    train(f"{SFT} tiny:addition --train-unembed", tmp_path / "head")
    assert "lm_head" in read_targets(tmp_path / "head/checkpoints/sft-final/model")
    assert any("vLLM cannot serve this adapter" in text for text in notes)


def test_a_resumed_run_keeps_the_recorded_choice():
    """Runs from before this default recorded true."""
    recorded = {"stages": [{"name": "sft", "settings": {"train_unembed": True}}]}
    assert resolve_heads(f"{SFT} tiny:addition", recorded) == [True]


def test_a_run_on_top_of_an_adapter_continues_it_with_or_without_its_head(tmp_path):
    train(f"{SFT} tiny:addition --train-unembed", tmp_path / "head")
    for words in (f"{SFT} {tmp_path / 'head'}", f"{SFT} {tmp_path / 'head'} --train-unembed"):
        run = parse_run(words.split(), METHODS, RECIPE, options=RunSettings)
        run, notes = resolve_initial_weights(run)
        assert run.stages[0].settings.model.train_unembed is True
        assert "is continued" in notes[0]["how"]
        (remark,) = describe_tied_heads(run)
        assert "vLLM cannot serve this adapter" in remark
    # After a merge the head is a separate matrix, which an adapter may hold.
    merged = f"{SFT} {tmp_path / 'head'} --lora-start merge"
    assert resolve_heads(merged) == [True]
    run = parse_run(merged.split(), METHODS, RECIPE, options=RunSettings)
    assert describe_tied_heads(resolve_initial_weights(run)[0]) == []


def test_the_plan_says_what_a_tied_head_in_an_adapter_costs(capsys):
    from rl.trainer.memory_report import report_memory

    for words, expected in ((" --train-unembed", True), ("", False)):
        line = f"{SFT} tiny:addition --plan --plan-prompt-tokens 8{words}".split()
        report_memory(parse_run(line, METHODS, RECIPE, options=RunSettings))
        assert ("vLLM cannot serve this adapter" in capsys.readouterr().out) == expected


def test_clients_adapt_a_head_as_tinker_does_unless_a_tied_one_is_to_be_left_out(
    tmp_path, separate_heads
):
    with ServiceClient(output_dir=tmp_path) as service:
        for name, base, flags, expected in (
            ("default", "tiny:addition", {}, True),
            ("left-out", "tiny:addition", {"train_unembed": None}, False),
            ("separate", str(separate_heads), {"train_unembed": None}, True),
        ):
            client = service.create_lora_training_client(base, 2, **flags)
            folder = Path(client.save_state(name).result().path)
            assert ("lm_head" in read_targets(folder / "model")) == expected
            saved = json.loads((folder / "state.json").read_text())["spec"]["lora"]
            assert saved["train_unembed"] is expected
            client.release()
        config = TrainingConfig(
            model_ref="tiny:addition", lora_config=LoRAConfig(rank=2), value_head=False
        )
        saved = service.create_training_client(config).save_state("mine").result()
        service.create_training_client(config, saved.path)
