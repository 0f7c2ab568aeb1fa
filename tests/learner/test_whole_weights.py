"""Test that weights with missing, renamed or extra tensors are refused by name, wherever they are
read. Tied and computed tensors do not count as missing.
"""

import json
import os
import random
import re
import stat
from pathlib import Path

import pytest
import torch
from helpers import ADAM, call, make_worker, random_datums
from safetensors.torch import load_file, save_file
from tiny_models import tiny_config, tiny_model
from transformers import AutoModelForCausalLM, LlamaForSequenceClassification, LlamaModel

from rl.client import ServiceClient
from rl.distributed import checkpoint_folder
from rl.errors import UserError
from rl.models import load_model
from rl.runtime.training_worker import ModelSpec
from rl.types import LoraConfig, ModelInput

# Families with different names of tensors, and models whose head is or is not the embedding.
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
KINDS = {"llama": UNTIED, "llama tied": TIED, "qwen3": TIED, "qwen2": UNTIED}
KINDS |= dict.fromkeys(("mistral", "gemma2", "gpt2", "gpt_neox", "phi", "opt"), {})


def make_model(kind: str):
    return tiny_model(kind.split()[0], **KINDS[kind])


def damage(folder: Path, change, file: str = "model.safetensors") -> None:
    path = folder / file
    save_file(change(load_file(str(path))), str(path), metadata={"format": "pt"})


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_lacks_tensors_is_refused_by_name(kind, tmp_path):
    make_model(kind).save_pretrained(tmp_path)
    whole = load_file(str(tmp_path / "model.safetensors"))
    # The complete model loads, with any ties and buffers.
    loaded = load_model(str(tmp_path)).model.state_dict()
    assert all(
        torch.equal(loaded[name], tensor) for name, tensor in whole.items() if name in loaded
    )
    names, rng = sorted(whole), random.Random(kind)
    first = rng.choice(names)
    for lost in ([first], rng.sample(names, len(names) // 2), names[:-1]):
        kept = {name: tensor for name, tensor in whole.items() if name not in lost}
        damage(tmp_path, lambda tensors, kept=kept: kept)
        with pytest.raises(UserError, match=r"it lacks \d+ tensor") as error:
            load_model(str(tmp_path))
        counted = int(re.search(r"it lacks (\d+)", str(error.value))[1])
        # If a tied pair is stored once, both names are missing.
        assert counted in (len(lost), len(lost) + 1)
        assert len(lost) > 1 or first.split(".")[-2] in str(error.value)
    damage(tmp_path, lambda tensors: {f"x.{k}": v for k, v in whole.items()})
    with pytest.raises(UserError, match=r"it lacks \d+ tensors .*; it has \d+ tensors \(x\."):
        load_model(str(tmp_path))
    damage(tmp_path, lambda tensors: {**whole, "score.weight": torch.zeros(2, 16)})
    with pytest.raises(UserError, match=r"has 1 tensor \(score.weight\), which would be ignored"):
        load_model(str(tmp_path))
    damage(tmp_path, lambda tensors: {**whole, first: torch.zeros(3)})
    with pytest.raises(UserError, match="do not fit its config"):
        load_model(str(tmp_path))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match="damaged or truncated"):
        load_model(str(tmp_path))


def test_a_classifier_is_no_language_model(tmp_path):
    """The error names what is missing, the language model's head, and what would be dropped, the
    classifier's head.
    """
    for tied in (False, True):
        config = tiny_config("llama", tie_word_embeddings=tied, pad_token_id=0)
        LlamaForSequenceClassification(config).save_pretrained(tmp_path / str(tied))
        with pytest.raises(UserError, match="score.weight") as error:
            load_model(str(tmp_path / str(tied)))
        assert ("lm_head.weight" in str(error.value)) != tied
    LlamaModel(tiny_config("llama", **UNTIED)).save_pretrained(tmp_path / "trunk")
    with pytest.raises(UserError, match="lm_head.weight"):
        load_model(str(tmp_path / "trunk"))


def test_buffers_that_old_versions_wrote_are_not_missed(tmp_path):
    make_model("gpt2").save_pretrained(tmp_path)
    buffers = {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 32, 32),
        "transformer.h.1.attn.masked_bias": torch.zeros(1),
    }
    damage(tmp_path, lambda t: {**t, **buffers})
    load_model(str(tmp_path))
    make_model("llama").save_pretrained(tmp_path / "llama")
    damage(
        tmp_path / "llama",
        lambda t: {**t, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)},
    )
    load_model(str(tmp_path / "llama"))


# ------------------------------------------------------------------------------- saved by Whetstone

HOW = {
    "full": {},
    "lora": {"lora": LoraConfig(4, 0)},
    "head": {"value_head": True},
    "lora and head": {"lora": LoraConfig(4, 0), "value_head": True},
}
FORGERIES = {
    "one": lambda t: dict(sorted(t.items())[1:]),
    "half": lambda t: dict(sorted(t.items())[::2]),
    "renamed": lambda t: {f"x{k}": v for k, v in t.items()},
    "beside": lambda t: {**t, "another.weight": torch.zeros(2)},
    "shape": lambda t: {**t, max(t): torch.zeros(5)},
}


def forge(folder: Path, file: str, change) -> None:
    """Change a file of a checkpoint and update the manifest, so that only the tensors' names show
    the change.
    """
    damage(folder, change, file)
    manifest = json.loads((folder / "manifest.json").read_text())
    entry = {
        "bytes": (folder / file).stat().st_size,
        "sha256": checkpoint_folder._file_checksum(folder / file),
    }
    manifest["files"][file] = entry
    manifest.pop("sha256", None)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    checkpoint_folder.verify_checkpoint(folder)


def save_training_state(folder: Path, options: str):
    worker = make_worker(**HOW[options])
    call(worker, "forward_backward", 0, random_datums(3), "ppo", {"temperature": 1.0}, 1.0, True)
    worker.optim_step(0, ADAM)
    call(worker, "save_state", 0, str(folder / "state"), {}, None)
    call(worker, "save_for_sampler", 0, str(folder / "weights"), False, None, "head" in options)
    return worker


@pytest.mark.slow
@pytest.mark.parametrize("mode", HOW)
def test_forged_checkpoints_are_refused_by_name_wherever_they_are_read(mode, tmp_path):
    worker = save_training_state(tmp_path, mode)
    spec = ModelSpec("tiny:addition", seed=1, **HOW[mode])
    weights = "model/adapter_model.safetensors" if "lora" in mode else "model/model.safetensors"
    files = [weights, "optimizer.safetensors", *["value_head.safetensors"] * ("head" in mode)]
    state = tmp_path / "state"
    worker.create_model(1, spec, str(state), True)  # loads when unchanged
    for file in files:
        whole = (state / file).read_bytes()
        for name, change in FORGERIES.items():
            forge(state, file, change)
            with pytest.raises(
                UserError, match=r"lacks \d|would be ignored|has the shape|do not fit"
            ) as error:
                worker.create_model(2, spec, str(state), True)
            assert str(tmp_path) in str(error.value), name
            (state / file).write_bytes(whole)
        forge(state, file, lambda t: t)
    sampled = weights if "head" in mode else weights.removeprefix("model/")
    for change in FORGERIES.values():
        whole = (tmp_path / "weights" / sampled).read_bytes()
        forge(tmp_path / "weights", sampled, change)
        with pytest.raises(UserError, match=r"lacks \d|would be ignored|do not fit"):
            worker.load_sampler(1, str(tmp_path / "weights"), None)
        (tmp_path / "weights" / sampled).write_bytes(whole)
    forge(tmp_path / "weights", sampled, lambda t: t)
    worker.load_sampler(1, str(tmp_path / "weights"), None)


def test_an_adapter_folder_of_somebody_else_is_looked_at_too(tmp_path):
    save_training_state(tmp_path, "lora")
    plain = tmp_path / "plain"
    plain.mkdir()
    for path in (tmp_path / "weights").iterdir():
        if path.name not in ("state.json", "manifest.json"):
            (plain / path.name).write_bytes(path.read_bytes())
    worker = make_worker()
    worker.load_sampler(1, str(plain), "tiny:addition")
    whole = (plain / "adapter_model.safetensors").read_bytes()
    for change in FORGERIES.values():
        damage(plain, change, "adapter_model.safetensors")
        with pytest.raises(UserError, match=re.escape(str(plain))):
            worker.load_sampler(2, str(plain), "tiny:addition")
        (plain / "adapter_model.safetensors").write_bytes(whole)
    (plain / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match="adapter's weights are missing"):
        worker.load_sampler(2, str(plain), "tiny:addition")


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077, 0o002])
def test_weights_may_be_read_by_whom_the_umask_lets(umask, tmp_path):
    before = os.umask(umask)
    try:
        save_training_state(tmp_path, "lora and head")
        plain = tmp_path / "plain"
        plain.touch()
    finally:
        os.umask(before)
    expected = stat.S_IMODE(plain.stat().st_mode)
    assert expected == 0o666 & ~umask
    modes = [stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*") if path.is_file()]
    assert len(modes) > 12 and set(modes) == {expected}


# ------------------------------------------------------------------------------- reproducible bytes


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("kind", ["llama tied", "gpt2"])
def test_a_model_with_tied_weights_is_written_with_the_same_bytes_every_time(kind, tmp_path):
    """The entries of a header's metadata are in the order of a hash map, which differs between
    writes if several exist.
    """
    make_model(kind).save_pretrained(tmp_path / "base")
    with ServiceClient(output_dir=tmp_path / "out") as service:
        client = service.create_full_training_client(str(tmp_path / "base"))
        saved = [client.save_weights_for_sampler(f"w{i}").result() for i in range(4)]
        written = [bytes_of(Path(weights.path)) for weights in saved]
        ids = [1, 2, 3, 4]
        sampler = client.save_weights_and_get_sampling_client()
        expected = sampler.compute_logprobs(ModelInput.from_ints(ids)).result()[1:]
    raw = written[0]["model.safetensors"]
    assert all(again["model.safetensors"] == raw for again in written)
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert header.pop("__metadata__") == {"format": "pt"}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "sampler_weights" / "w0")
    head = again.get_output_embeddings().weight
    assert head is again.get_input_embeddings().weight
    assert sum(list(entry["shape"]) == list(head.shape) for entry in header.values()) == 1
    logprobs = again(torch.tensor([ids])).logits[0].log_softmax(-1).detach()
    ours = [float(logprobs[i, token]) for i, token in enumerate(ids[1:])]
    assert expected == pytest.approx(ours, abs=1e-5)


def test_an_adapters_config_lists_its_modules_in_one_order(tmp_path):
    with ServiceClient(output_dir=tmp_path / "out") as service:
        client = service.create_lora_training_client("tiny:addition", 2, 0)
        folder = client.save_weights_for_sampler("adapter").result().path
    modules = json.loads(Path(folder, "adapter_config.json").read_text())["target_modules"]
    assert modules == sorted(modules) and len(modules) > 3
