"""Measure models that sample and learn for the GPU campaign (see gpu.py). The models have random
weights and are created on the device from configs. A peer sampler is created once, then called for
`new` tokens after each of some prompts.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench.gpu_kernels import device_of
from bench.harness import SIZES, config_of, make_model


def free_gpu_memory(device: str) -> None:
    """Free cached GPU memory without references. A model, decoder or engine is freed with its last
    name.
    """
    if device == "cuda":
        torch.cuda.empty_cache()


def seconds_of(run: Callable[[], Any], device: str) -> tuple[float, Any]:
    """Return the wall seconds and the result of `run`."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    result = run()
    wait()
    return time.perf_counter() - began, result


def busy_seconds(run: Callable[[], Any], device: str) -> float:
    """Return the seconds in which the device works during `run`, by the profiler. Raises
    NotImplementedError on a CPU, where nothing waits for the host.
    """
    if device != "cuda":
        raise NotImplementedError("the host's share is of a device of its own")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        seconds_of(run, device)
    cuda = torch.autograd.DeviceType.CUDA  # kernels and copies
    return sum(e.device_time for e in profile.events() if e.device_type == cuda) / 1e6


def random_prompts(count: int, length: int, vocab: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(1, vocab, (count, length)).tolist()


def split_rows(rows: int, prompts: int) -> list[int]:
    """Return the number of rows of each prompt. They add up to `rows`; if `rows` is not a multiple
    of `prompts`, each of the first prompts gets an additional row.
    """
    return [rows // prompts + (i < rows % prompts) for i in range(prompts)]


def get_cache_settings(dry: bool) -> dict[str, str]:
    """Return the cache setting of each timed engine, by provider: the engine that the product
    chooses (without a GPU: the engine that it chooses with a GPU), and the plain engine.
    """
    return {"ours": "paged" if dry else "auto", "plain": "plain"}


def engine_of(
    decoder: Any, cache: str, rows: int, prompts: list[list[int]], new_tokens: int, kept: Any = None
) -> Any:
    """Return an engine as `rl.sampler.make_engine` chooses it, with the prompts queued over `rows`
    rows. `kept`: state that a call passes on to the next call.
    """
    from rl.sampler import SamplingRequest, make_engine
    from rl.types import SamplingParams

    params, counts = SamplingParams(max_tokens=new_tokens), split_rows(rows, len(prompts))
    sizes = [(len(prompt), n, new_tokens) for prompt, n in zip(prompts, counts, strict=True)]
    room: dict[str, Any] = {"kv_cache_tokens": 1 << 22, "max_rows": rows}
    engine = make_engine(decoder, cache, idle_pool=kept, sizes=sizes, **room)
    for i, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        engine.add(SamplingRequest(prompt=prompt, num_samples=count, params=params, problem=i))
    return engine


# Maps prompts of equal length and the number of new tokens of each to the number of all new tokens.
Peer = Callable[[list[list[int]], int], int]


def make_generating_peer(model: Any) -> Peer:
    def run(prompts: list[list[int]], new: int) -> int:
        ids = torch.tensor(prompts, device=model.device)
        options = {"do_sample": True, "top_k": 0, "min_new_tokens": new, "max_new_tokens": new}
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return (out.shape[1] - ids.shape[1]) * len(ids)

    return run


def make_batching_peer(model: Any) -> Peer:
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
        tokens = {"max_new_tokens": new, "pad_token_id": 0, "eos_token_id": -1}
        options = GenerationConfig(do_sample=True, top_k=0, **tokens)
        outputs = model.generate_batch(prompts, generation_config=options, persistent_manager=True)
        return sum(len(output.generated_tokens) for output in outputs.values())

    return run


def serving(size: str) -> Peer:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as folder:
        config_of(size).save_pretrained(folder)
        engine = LLM(
            model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
            gpu_memory_utilization=0.8, max_model_len=512, max_num_seqs=1024,
            enable_prefix_caching=False,
        )  # fmt: skip

    def run(prompts: list[list[int]], new: int) -> int:
        options = SamplingParams(
            max_tokens=new, min_tokens=new, ignore_eos=True, logprobs=0, detokenize=False
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = engine.generate(inputs, options, use_tqdm=False)
        return sum(len(item.token_ids) for output in outputs for item in output.outputs)

    return run


PEERS: dict[str, Callable[[str, str], Peer]] = {  # of a model size, on a device
    "generate": lambda size, device: make_generating_peer(make_model(size, device)),
    "continuous batching": lambda size, device: make_batching_peer(make_model(size, device)),
    "vllm": lambda size, device: serving(size),
}


def part_group(table: Any, dry: bool) -> None:
    """Time 16 answers to a long prompt until all have 64 tokens, compared with `generate`."""
    from rl.sampler import IdleKVCachePool, make_decoder

    device, (size, length, new) = device_of(dry), ("tiny", 64, 4) if dry else ("0.5B", 4096, 64)
    case = f"{size}, 16 answers to {length} tokens"
    model = table.attempt(case, "model", make_model, size, device)
    if model is None:
        return
    prompt = random_prompts(1, length, SIZES[size][1]["vocab_size"])

    def ours(name: str, cache: str) -> None:
        decoder, kept = make_decoder(model, kind="fast"), IdleKVCachePool()
        # The second call reuses the pages and graphs of the first, as a run's next call does.
        for _ in range(2):
            engine = engine_of(decoder, cache, 16, prompt, new, kept)
            seconds, responses = seconds_of(engine.run, device)
            engine.close()
        tokens = sum(len(s.tokens) for response in responses for s in response.sequences)
        put(name, tokens, seconds, "paged" if engine.is_paged else "plain")

    def theirs() -> None:
        peer = make_generating_peer(model)
        for _ in range(2):
            seconds, tokens = seconds_of(lambda: peer(prompt * 16, new), device)
        put("generate", tokens, seconds)

    def put(name: str, tokens: int, seconds: float, what: str = "") -> None:
        note = f"{tokens} tokens in {seconds:.3f} s, prompt and all {what}".strip()
        table.row(case, name, "tokens_per_s", tokens / seconds, note=note)

    for name, cache in get_cache_settings(dry).items():
        table.attempt(case, name, ours, name, cache)
        free_gpu_memory(device)
    table.attempt(case, "generate", theirs)


def part_agreement(table: Any, dry: bool) -> None:
    """Compare each sampled token's logprob between the sampler and the learner's head, both in
    bf16, then both in float32.
    """
    device, size = device_of(dry), "tiny" if dry else "0.5B"
    for dtype in (torch.bfloat16, torch.float32):
        case = f"{size}, {str(dtype).removeprefix('torch.')}"
        model = table.attempt(case, "model", make_model, size, device, dtype)
        for name, cache in () if model is None else get_cache_settings(dry).items():
            table.attempt(case, name, _agreement, table, case, name, cache, model, dry)
        del model
        free_gpu_memory(device)


def _agreement(table: Any, case: str, name: str, cache: str, model: Any, dry: bool) -> None:
    from kernels import linear_logprob
    from rl.sampler import make_decoder

    prompts = random_prompts(4 if dry else 32, 20, model.config.vocab_size)
    decoder, new = make_decoder(model, kind="fast"), 16 if dry else 128
    engine = engine_of(decoder, cache, len(prompts), prompts, new)
    results, scored = [], []
    with torch.no_grad():
        for prompt, response in zip(prompts, engine.run(), strict=True):
            for sequence in response.sequences:
                ids = torch.tensor([[*prompt, *sequence.tokens]], device=model.device)
                hidden = model.model(ids).last_hidden_state[0, len(prompt) - 1 : -1]
                head, targets = model.lm_head.weight, ids[0, len(prompt) :]
                scored.append(linear_logprob(hidden, head, targets, entropy=False)[0].cpu())
                results.append(torch.tensor(sequence.logprobs))
    gap = torch.cat(results).double() - torch.cat(scored).double()
    note = f"{len(gap)} tokens of {len(results)} rows, {type(engine).__name__}"
    table.row(case, name, "largest_difference", float(gap.abs().max()), "nats", "", note)
    table.row(case, name, "kl", float((gap.neg().exp() - 1 + gap).mean()), "nats", 0.01)
