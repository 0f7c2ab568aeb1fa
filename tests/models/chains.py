"""Export a chain of LoRA runs and recompute its weights in float64 from the adapter files."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM
from whole_runs import train

from rl.learner import learner_checkpoint
from rl.models import load_tokenizer
from rl.trainer import export_weights

CHAINED = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "mistral",
    "phi3",
    "olmo2",
    "granite",
)
IDS = torch.tensor([[2, 3, 12, 4, 5, 13, 7]])
_WORDS = (
    "--steps 2 --batch-size 4 --learning-rate 2e-2 --eval-every 0 --save-every 0 --rollouts-every "
    "0 --max-tokens 4 --dataset addition"
)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def by_hand(base: Path, adapters: list[Path]) -> torch.Tensor:
    """Return the logits of the base in float64 after adding scale * B A of each adapter to its
    matrices. An adapted head is separate from the embedding.
    """
    model = AutoModelForCausalLM.from_pretrained(base).double().eval()
    modules = dict(model.named_modules())
    for folder in adapters:
        config = json.loads((folder / "adapter_config.json").read_text())
        tensors = load_file(str(folder / "adapter_model.safetensors"))
        for key in [key for key in tensors if ".lora_A." in key]:
            module = modules[key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")]
            a, b = tensors[key].double(), tensors[key.replace(".lora_A.", ".lora_B.")].double()
            delta = config["lora_alpha"] / config["r"] * (b @ a)
            if module.__class__.__name__ == "Conv1D":  # GPT-2's matrices are transposed
                delta = delta.T
            with torch.no_grad():
                # a new parameter, so that a tied embedding keeps its weight
                module.weight = torch.nn.Parameter(module.weight.detach() + delta)
    return logits(model)


def chain(name: str, tied: bool, folder: Path) -> tuple[float, float]:
    """Return the difference of the export's logits from the run's, and from `by_hand`. Both are
    relative to the largest logit (at least 1).
    """
    model = tiny_model(name, tie_word_embeddings=tied)
    model.config.eos_token_id = model.generation_config.eos_token_id = 1
    learner_checkpoint.write_model(model, load_tokenizer("tiny:addition"), folder / "base")
    assert AutoModelForCausalLM.from_pretrained(folder / "base").config.tie_word_embeddings == tied
    train(
        f"sft {_WORDS} --base-model {folder / 'base'} --lora-rank 4 --train-unembed", folder / "sft"
    )
    train(f"dpo {_WORDS} --base-model {folder / 'sft'}", folder / "dpo")
    train(
        f"grpo {_WORDS} --group-size 4 --base-model {folder / 'dpo'} --lora-rank 2 --no-train-mlp",
        folder / "grpo",
    )
    export_weights(str(folder / "grpo"), folder / "out", merged=True)
    got = logits(AutoModelForCausalLM.from_pretrained(folder / "out").eval())
    last = folder / "grpo" / "checkpoints" / "grpo-final"
    reference = logits(learner_checkpoint.load_for_sampling(str(last), None)[0].model)
    exact = by_hand(
        folder / "base", [folder / "dpo" / "checkpoints" / "dpo-final" / "model", last / "model"]
    )
    moved = logits(AutoModelForCausalLM.from_pretrained(folder / "base").eval())
    assert (reference - moved).abs().max() > 1e-2, "the chain learnt nothing"
    size = max(1.0, float(reference.abs().max()))
    return float((got - reference).abs().max()) / size, float(
        (got.double() - exact).abs().max()
    ) / size
