"""Create the peer samplers of the GPU campaign (gpu.py). Each peer is created once, then called for
`new` tokens after each of some prompts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch

from bench.gpu_models import config_of, make_model

# Maps prompts of equal length and the number of new tokens of each to the number of all new tokens.
Peer = Callable[[list[list[int]], int], int]


def generating(model: Any) -> Peer:
    def run(prompts: list[list[int]], new: int) -> int:
        ids = torch.tensor(prompts, device=model.device)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                min_new_tokens=new,
                max_new_tokens=new,
            )
        return (out.shape[1] - ids.shape[1]) * len(ids)

    return run


def batching(model: Any) -> Peer:
    """Sample with transformers' continuous batching. Its manager is sized for the first call, so
    each number of prompts gets a separate manager.
    """
    from transformers import GenerationConfig

    sized = 0

    def run(prompts: list[list[int]], new: int) -> int:
        nonlocal sized
        if sized not in (0, len(prompts)):
            model.destroy_cached_continuous_batching_manager()
        sized = len(prompts)
        how = GenerationConfig(
            do_sample=True, top_k=0, max_new_tokens=new, pad_token_id=0, eos_token_id=-1
        )
        outputs = model.generate_batch(
            inputs=prompts, generation_config=how, persistent_manager=True
        )
        return sum(len(output.generated_tokens) for output in outputs.values())

    return run


def serving(size: str) -> Peer:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as folder:
        config_of(size).save_pretrained(folder)
        engine = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            gpu_memory_utilization=0.8,
            max_model_len=512,
            max_num_seqs=1024,
            enable_prefix_caching=False,
        )

    def run(prompts: list[list[int]], new: int) -> int:
        how = SamplingParams(
            max_tokens=new, min_tokens=new, ignore_eos=True, logprobs=0, detokenize=False
        )
        outputs = engine.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], how, use_tqdm=False
        )
        return sum(len(one.token_ids) for output in outputs for one in output.outputs)

    return run


PEERS: dict[str, Callable[[str, str], Peer]] = {  # of a model size, on a device
    "generate": lambda size, device: generating(make_model(size, device)),
    "continuous batching": lambda size, device: batching(make_model(size, device)),
    "vllm": lambda size, device: serving(size),
}
