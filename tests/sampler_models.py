"""Tiny random models for the sampler's tests. Weights are scaled up, so that logits differ enough
for errors to show.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl.sampler import BLOCK_SIZE, Engine, SamplingRequest
from rl.sampler.block_manager import BlockManager, PromptBlockTable
from rl.sampler.running_rows import make_param_columns
from rl.sampler.token_sampling import RowSamplingSettings, make_row_settings
from rl.types import SampledSequence, SampleResponse, SamplingParams

VOCAB = 41
SMALL: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=96,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)

_MULTIPLIERS = {
    "head_dim": 8, "attention_multiplier": 0.4, "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3, "logits_scaling": 1.5,
}  # fmt: skip
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# sequences of the tests are longer than the window
_SLIDING = {
    "head_dim": 8,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"],
}
_TWO_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": 32,
    },
}
_PLAIN: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": None},
}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96}
_GPT2 |= {"bos_token_id": None, "eos_token_id": None}
# families by transformers' model_type, with settings that make their differences show
FAMILIES: dict[str, dict[str, Any]] = {
    "granite": _MULTIPLIERS,
    "gemma": {"head_dim": 8},
    "seed_oss": {"head_dim": 8},
    "hyperclovax": {**_MULTIPLIERS, "use_post_norm": True},
    "olmo2": {},
    "phi3": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "gemma2": {**_SLIDING, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
    "gemma3_text": {**_SLIDING, "query_pre_attn_scalar": 20, "final_logit_softcapping": 3.0},
    "vaultgemma": {**_SLIDING, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
    "olmo3": {**_SLIDING, "rope_parameters": _TWO_ROPES},
    "exaone4": _SLIDING,
    "cwm": {**_SLIDING, "bos_token_id": 1, "rope_parameters": {"rope_type": "default",
        "rope_theta": 1e4}},
    "ministral": {"head_dim": 8, "sliding_window": 7},
    "qwen3_moe": {**_EXPERTS, "head_dim": 8, "norm_topk_prob": True},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 20},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3},
    "flex_olmo": {"num_experts": 6, "num_experts_per_tok": 2},
    "granitemoe": {**_MULTIPLIERS, "num_local_experts": 6, "num_experts_per_tok": 2},
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use a single thread: tiny tensors gain nothing from threads, which wait on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def crowded_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make paged engines admit rows while pages are free, so that small pools preempt."""
    monkeypatch.setattr(Engine, "expects_lengths", False)


def paged_engine(decoder: Any, *args: Any, page: int = BLOCK_SIZE, **settings: Any) -> Engine:
    """Return an engine over a paged cache with blocks of `page` positions."""
    return Engine(decoder, *args, block_size=page, **settings)


def multistep_engine(decoder: Any, *args: Any, **settings: Any) -> Engine:
    """Return an engine over a paged cache that runs several steps per host sync."""
    return paged_engine(decoder, *args, **{"steps_per_sync": 8, **settings})


def tiny_model(kind: str, **changes: Any) -> torch.nn.Module:
    """Return a random model in eval mode: "qwen3", "qwen2", "llama", "mistral", "gpt2" or a family
    of `FAMILIES`. `changes` update its config.
    """
    torch.manual_seed(3)
    settings = {**SMALL, **(_PLAIN.get(kind) or FAMILIES.get(kind, {})), **changes}
    if kind == "gpt2":
        settings = {**_GPT2, "vocab_size": settings["vocab_size"]}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif parameter.dim() >= 2:
                parameter.normal_(0, 0.15)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)  # norms: not all equal to 1
    return model.eval()


def random_prompts(lengths: list[int], vocab: int = VOCAB, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in lengths]


def make_request(prompt: Sequence[int], num_samples: int = 1, **settings: Any) -> SamplingRequest:
    """Return a request. `settings`: its other fields, or those of its sampling parameters."""
    fields = {n: settings.pop(n) for n in [*settings] if n in SamplingRequest.__dataclass_fields__}
    if settings:
        fields["params"] = SamplingParams(**settings)
    return SamplingRequest(prompt=prompt, num_samples=num_samples, **fields)


def run_requests(engine: Engine, requests: Iterable[SamplingRequest]) -> list[SampleResponse]:
    """Add the requests to the engine, run it to the end and return the responses."""
    for request in requests:
        engine.add(request)
    return engine.run()


def check_same(
    responses: Sequence[SampleResponse], expected: Sequence[SampleResponse], atol: float = 1e-5
) -> None:
    """Check that two runs have the same tokens and stop reasons, and logprobs equal to `atol`."""
    for mine, other in zip(responses, expected, strict=True):
        assert [(s.tokens, s.stop_reason) for s in mine.sequences] == [
            (s.tokens, s.stop_reason) for s in other.sequences
        ]
        for sequence, plain in zip(mine.sequences, other.sequences, strict=True):
            np.testing.assert_allclose(sequence.logprobs, plain.logprobs, atol=atol)
        if other.prompt_logprobs is not None:
            np.testing.assert_allclose(
                mine.prompt_logprobs[1:], other.prompt_logprobs[1:], atol=atol
            )


def check_logprobs(
    model: Any,
    prompt: Sequence[int],
    sequence: SampledSequence,
    temperature: float = 1.0,
    atol: float = 1e-4,
) -> None:
    """Compare the logprobs of a sample with those of a plain forward."""
    expected = reference_logprobs(model, list(prompt), sequence.tokens, temperature)
    np.testing.assert_allclose(sequence.logprobs, expected, rtol=0, atol=atol)


def add_prompt(tables: BlockManager, length: int) -> PromptBlockTable:
    """Append a prompt with new blocks."""
    prompt = PromptBlockTable(length, tables.allocate_table(length).block_table)
    tables.prompts.append(prompt)
    return prompt


def row_settings(
    params: Sequence[SamplingParams], vocab: int, device: torch.device | str = "cpu"
) -> RowSamplingSettings:
    """Return the settings of a batch with a row for each of `params`."""
    return make_row_settings(make_param_columns(params), vocab=vocab, device=torch.device(device))


@torch.no_grad()
def reference_logprobs(
    model: Any, prompt: list[int], response: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """Return the logprob of each response token by a plain forward over prompt and response,
    without cache, batch or padding.
    """
    logits = (
        model(input_ids=torch.tensor([prompt + response]), use_cache=False)
        .logits[0, len(prompt) - 1 : -1]
        .double()
    )
    return (
        (logits / temperature).log_softmax(-1).gather(1, torch.tensor(response)[:, None]).squeeze(1)
    )


def add_lora(model: torch.nn.Module, targets: list[str], **changes: Any) -> torch.nn.Module:
    """Return the model with random (not zero) adapters on these modules."""
    from peft import LoraConfig, get_peft_model

    settings = {
        "r": 4,
        "lora_alpha": 10,
        "target_modules": targets,
        "task_type": "CAUSAL_LM",
        **changes,
    }
    wrapped = get_peft_model(model, LoraConfig(**settings))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.2)
    return wrapped.eval()
