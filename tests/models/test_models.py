"""Test that a loaded model computes the function its weights define: the adapter's scale is
applied, and dropout is off.
"""

import json
import re
import string
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import call, gather_targets, make_worker, random_datums
from safetensors.torch import load_file, save_file
from sampler_models import VOCAB, tiny_model
from transformers import Gemma2Config, Gemma2ForCausalLM

from rl.algorithms import METHODS
from rl.config import RunSettings, parse_run
from rl.errors import UserError
from rl.learner.learner_checkpoint import write_model
from rl.models import (
    MODEL_PRESETS,
    add_lora,
    count_classifier_parameters,
    load_model,
    load_model_lazily,
    load_skeleton,
)
from rl.models.check_weights import convert_read_errors
from rl.trainer.initial_weights import describe_random_weights
from rl.types import LoraConfig


def test_a_lack_of_memory_is_not_reported_as_unfitting_weights():
    with pytest.raises(RuntimeError, match="can't allocate memory"), convert_read_errors("a model"):
        torch.empty(2**60)
    with pytest.raises(torch.OutOfMemoryError), convert_read_errors("a model"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(UserError, match="do not fit its config"), convert_read_errors("a model"):
        torch.zeros(2).copy_(torch.zeros(3))


@pytest.mark.parametrize("package", ["layers", "vllm"])
def test_a_package_that_imports_torch_may_be_imported_first(package):
    """While torch is imported, it looks at every module, those that load on access too."""
    subprocess.run([sys.executable, "-c", f"import rl.{package}"], check=True)


@pytest.mark.parametrize("load", [load_model, load_model_lazily])
@pytest.mark.parametrize("text", ['{"metadata": {', "{}", "[]"])
def test_a_damaged_index_is_named(load, text, tmp_path):
    load_model("tiny:ascii").model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UserError, match=f"weights of {tmp_path} cannot be read.* damaged"):
        load(str(tmp_path))


@pytest.mark.parametrize(
    "load", [load_model, load_skeleton, load_model_lazily, count_classifier_parameters]
)
@pytest.mark.parametrize(("change", "named"), [
    ({"num_attention_heads": "four"}, "num_attention_heads.* got str"),
    ({"hidden_size": None}, "hidden_size.* got NoneType"),
    ({"num_attention_heads": 0}, "ZeroDivisionError"),
    ({"hidden_act": "sillu"}, "sillu"),
    ({"model_type": "qwen99"}, "qwen99"),
])  # fmt: skip
def test_a_config_with_a_wrong_value_is_named(load, change, named, tmp_path):
    load_model("tiny:ascii").model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UserError, match=f"from the config.json of {tmp_path}: .*{named}"):
        load(str(tmp_path))


def test_a_damaged_generation_config_is_ignored_or_named(tmp_path):
    load_model("tiny:ascii").model.save_pretrained(tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text('{"a":')
    assert load_model_lazily(str(tmp_path)).eos_token_ids == load_model(str(tmp_path)).eos_token_ids
    file.write_text("[]")
    for load in (load_model, load_model_lazily):
        with pytest.raises(UserError, match="TypeError"):
            load(str(tmp_path))


@pytest.mark.parametrize("change", [
    {"target_modules": ["c_attn"]},
    {"target_modules": 3},
    {"peft_type": "NO_SUCH"},
    {"r": "2"},
])  # fmt: skip
def test_an_adapter_that_does_not_fit_is_named(change, tmp_path):
    add_lora(load_model("tiny:ascii"), LoraConfig(rank=2)).model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UserError, match=f"adapter in {tmp_path} does not fit.*pass the base model"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("content", [None, b"{}", b"[]"])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_that_is_damaged_is_named(name, content, tmp_path):
    if (name, content) == ("tokenizer_config.json", b"{}"):
        return  # a valid one
    loaded = load_model("tiny:ascii")
    loaded.model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    (tmp_path / name).write_bytes(content or (tmp_path / name).read_bytes()[:40])
    with pytest.warns(UserWarning, match=f"tokenizer of {tmp_path} is ignored, it cannot be read"):
        assert load_model(str(tmp_path)).tokenizer is None


def quantize_to_fp8(folder: Path) -> dict[str, torch.Tensor]:
    """Save tiny:addition with q_proj in FP8 and the scales of one block, as the hub has it. Return
    the weights before.
    """
    loaded = load_model("tiny:addition")
    write_model(loaded.model, loaded.tokenizer, folder)
    plain, stored = load_file(folder / "model.safetensors"), {}
    for name, weight in plain.items():
        stored[name] = weight
        if "q_proj" in name:
            scale = weight.abs().max() / 448
            stored[name] = (weight / scale).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale.view(1, 1)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return plain


@pytest.mark.parametrize("on_gpu", [False, True])
def test_fp8_weights_are_dequantized_and_other_quantized_weights_refused(
    on_gpu, monkeypatch, tmp_path
):
    plain = quantize_to_fp8(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    others = ["k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    quantization |= {"activation_scheme": "dynamic", "modules_to_not_convert": others}
    file.write_text(json.dumps({**config, "quantization_config": quantization}))
    if on_gpu:  # where transformers would compute in FP8
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    model = load_model(str(file.parent)).model
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, plain[name], rtol=0.07, atol=1e-4)
    file.write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(UserError, match=r"are quantized \(gptq\).*pass the model that"):
        load_model(str(file.parent))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral", "qwen2", "qwen3"])
def test_nothing_is_dropped_in_training(kind, tmp_path):
    """A model saved with dropout everywhere computes the same function in training mode (as under
    gradient checkpointing) as in eval mode.
    """
    tiny_model(kind).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    rates = (
        ("attn_pdrop", "resid_pdrop", "embd_pdrop") if kind == "gpt2" else ("attention_dropout",)
    )
    (tmp_path / "config.json").write_text(json.dumps({**config, **dict.fromkeys(rates, 0.5)}))
    model, ids = load_model(str(tmp_path)).model, torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    assert not model.training
    expected = model(input_ids=ids).logits
    assert torch.equal(model.train()(input_ids=ids).logits, expected)


@pytest.mark.parametrize("fused", [True, False])
def test_a_softcap_holds_in_the_fused_head_too(fused, tmp_path):
    """Cap Gemma 2's logits at 2 and compare with logprobs computed by hand from the hidden states.
    The fused head must be the path in use.
    """
    shape = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2)
    torch.manual_seed(0)
    shape |= {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
    config = Gemma2Config(**shape, final_logit_softcapping=2.0)
    model = Gemma2ForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(20.0)  # raw logits far beyond 2
    model.save_pretrained(tmp_path)
    worker, (datum, *_) = make_worker(str(tmp_path), fused=fused), random_datums(1)
    assert worker.learners[0].head.fused == fused
    config = {"temperature": 0.7}
    out, _ = call(worker, "forward_backward", 0, [datum], "ppo", config, 1.0, False, True)
    trained = worker.learners[0].model
    with torch.no_grad():
        ids = torch.tensor([datum.model_input.to_ints()])
        hidden = trained.model(input_ids=ids).last_hidden_state[0].double()
        raw = hidden @ trained.lm_head.weight.double().T
        assert raw.abs().max() > 6
        logp = (2 * torch.tanh(raw / 2) / 0.7).log_softmax(-1)
    np.testing.assert_allclose(out[0]["logprobs"], gather_targets(logp, datum), atol=1e-5)
    np.testing.assert_allclose(out[0]["entropy"], -(logp.exp() * logp).sum(-1), atol=1e-5)


@pytest.mark.parametrize("load", [load_model, load_skeleton])
def test_without_the_hub_a_model_that_is_not_cached_says_why(load, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        UserError,
        match=r"'nobody/nothing' \(HF_HUB_OFFLINE=1 is set: only cached models are available\)",
    ):
        load("nobody/nothing")


def test_the_page_lists_every_tiny_model_with_its_characters_size_and_context():
    page = (Path(__file__).parents[2] / "docs/models.md").read_text()
    listed = re.findall(r"^\| `tiny:(\S+)`.*? \| (.*?) \| (.*?) \| ([\d,]+) \|", page, re.M)
    assert [name for name, *_ in listed] == list(MODEL_PRESETS)
    for name, characters, size, context in listed:
        preset = MODEL_PRESETS[name]
        assert int(context.replace(",", "")) == preset.max_position
        if preset.alphabet is None:
            assert characters == "those of the tokenizer"
            continue
        ascii_text = "\n" + string.printable[:95]
        expected = ascii_text if characters.startswith("printable ASCII") else characters.strip("`")
        assert sorted(preset.alphabet) == sorted(expected)
        with torch.device("meta"):
            model = load_skeleton(f"tiny:{name}").model
        assert f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M" == size


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("grpo --base-model tiny:ascii", "sft first.*--learning-rate 1e-3 instead of 1e-06"),
        ("grpo --base-model tiny:ascii --learning-rate 3e-4", r"sft first \(docs/models.md\S+$"),
        ("sft --base-model tiny:ascii", None),
        ("grpo --base-model Qwen/Qwen3-0.6B", None),
        ("recipes/addition.yaml", None),  # its grpo stage continues from its sft stage
    ],
)
def test_rl_on_random_weights_is_hinted_at(words, expected):
    run = parse_run(words.split(), METHODS, Path("recipes/addition.yaml"), options=RunSettings)
    lines = describe_random_weights(run.stages)
    assert len(lines) == (expected is not None)
    assert all(re.search(expected, line) for line in lines)
