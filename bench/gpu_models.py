"""The campaign's parts about sampling: see gpu.py. Models have random weights, made on the device from configs."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu_kernels import device_of

BANDWIDTH = 3.0e12  # bytes a second, of a large copy on an H100
COMMON = dict(max_position_embeddings=32_768, eos_token_id=None, bos_token_id=None, pad_token_id=0)
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "0.5B": ("Qwen2", dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
                           vocab_size=151_936, tie_word_embeddings=True)),
    "0.6B": ("Qwen3", dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
                           head_dim=128, vocab_size=151_936, tie_word_embeddings=True)),
    "1.7B": ("Qwen3", dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
                           head_dim=128, vocab_size=151_936, tie_word_embeddings=True)),
    "8B": ("Llama", dict(hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
                         vocab_size=128_256, tie_word_embeddings=False)),
    "tiny": ("Qwen3", dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                           head_dim=16, vocab_size=600, tie_word_embeddings=True)),
}  # fmt: skip


def make_model(size: str, device: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    import transformers

    family, sizes = SIZES[size]
    config = getattr(transformers, f"{family}Config")(**COMMON, **sizes)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return getattr(transformers, f"{family}ForCausalLM")(config).eval()
    finally:
        torch.set_default_dtype(before)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def engine_of(decoder: Any, rows: int, prompts: list[list[int]], new_tokens: int) -> Any:
    """An engine with `rows` rows over the prompts, queued."""
    from rl.sampler import Engine, Request
    from rl.types import SamplingParams

    engine = Engine(decoder, kv_cache_tokens=1 << 22, max_rows=rows)
    params = SamplingParams(max_tokens=new_tokens)
    for i, prompt in enumerate(prompts):
        engine.add(Request(prompt=prompt, num_samples=rows // len(prompts), params=params, problem=i))
    return engine


def random_prompts(count: int, length: int, vocab: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(1, vocab, (count, length)).tolist()


def decode_speed(table: Any, case: str, decoder: Any, rows: int, prompts: list[list[int]], dry: bool) -> None:
    """Steps after the prompts were read: tokens a second, and what reading the weights and the cache once a step would allow."""
    device, steps = device_of(dry), 2 if dry else 20
    engine = engine_of(decoder, rows, prompts, steps + 40)
    for _ in range(2 if dry else 5):
        engine.step()
    wait(device)
    began = time.perf_counter()
    for _ in range(steps):
        engine.step()
    wait(device)
    seconds = (time.perf_counter() - began) / steps
    a = decoder.architecture
    weights = sum(b.numel() * b.element_size() for b in decoder.weights.buffers.values())
    cached = 2 * 2 * len(decoder.layers) * a.key_heads * a.head_width
    state = engine._state
    read = weights + cached * int(state.prompt_lengths.sum() + state.response_lengths.sum())
    floor = read / BANDWIDTH
    note = f"{seconds * 1e3:.2f} ms a step, {floor / seconds:.0%} of bandwidth"
    table.row(case, "ours", "tokens_per_s", rows / seconds, "", rows / floor, note)


def part_decode(table: Any, dry: bool) -> None:
    from rl.sampler import make_decoder

    device, sizes = device_of(dry), ("tiny",) if dry else ("0.5B", "1.7B", "8B")
    for size in sizes:  # ours first: a peer that hangs takes what is left of the part with it
        decoder = table.attempt(size, "ours", lambda s=size: make_decoder(make_model(s, device), kind="fast"))
        for rows in () if decoder is None else (4,) if dry else (1, 64, 256, 1024):
            prompts, case = random_prompts(max(rows // 8, 1), 16 if dry else 256, SIZES[size][1]["vocab_size"]), f"{size}, {rows} rows"
            table.attempt(case, "ours", lambda r=rows, p=prompts, c=case, d=decoder: decode_speed(table, c, d, r, p, dry))
        del decoder
        give_back(device)
    for name, peer in PEERS.items():
        for size in sizes:
            model = table.attempt(size, name, lambda s=size: make_model(s, device))
            for rows in () if model is None else (4,) if dry else (64,) if name == "vllm" else (1, 64, 256):
                given = (table, name, peer, model, size, rows, dry)
                table.attempt(f"{size}, {rows} rows", name, lambda given=given: peer_speed(*given))
            del model
            give_back(device)


def give_back(device: str) -> None:
    if device == "cuda":
        torch.cuda.empty_cache()


def peer_speed(table: Any, name: str, peer: Callable[..., int], model: Any, size: str, rows: int, dry: bool) -> None:
    """Prompt and all: `new` tokens for each row after 256 of prompt."""
    device, new = device_of(dry), 4 if dry else 48
    prompts = random_prompts(rows, 16 if dry else 256, SIZES[size][1]["vocab_size"])
    peer(model, prompts, 2 if dry else 4)
    wait(device)
    began = time.perf_counter()
    tokens = peer(model, prompts, new)
    wait(device)
    seconds = time.perf_counter() - began
    table.row(f"{size}, {rows} rows", name, "tokens_per_s", tokens / seconds, note="prompts are read within that time")


def _generate(model: Any, prompts: list[list[int]], new: int) -> int:
    ids = torch.tensor(prompts, device=model.device)
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, min_new_tokens=new, max_new_tokens=new)
    return (out.shape[1] - ids.shape[1]) * len(ids)


def _continuous(model: Any, prompts: list[list[int]], new: int) -> int:
    from transformers import GenerationConfig

    how = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=new, min_new_tokens=new, pad_token_id=0, eos_token_id=-1)
    outputs = model.generate_batch(inputs=prompts, generation_config=how)
    tokens = sum(len(output.generated_tokens) for output in outputs.values())
    if not tokens:
        raise RuntimeError("continuous batching gave no tokens")
    return tokens


def _vllm(model: Any, prompts: list[list[int]], new: int) -> int:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as folder:
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        engine = LLM(model=folder, load_format="dummy", skip_tokenizer_init=True, gpu_memory_utilization=0.4, dtype="bfloat16")
        how = SamplingParams(max_tokens=new, min_tokens=new, ignore_eos=True, logprobs=0, detokenize=False)
        outputs = engine.generate([{"prompt_token_ids": p} for p in prompts], how)
    return sum(len(one.token_ids) for output in outputs for one in output.outputs)


PEERS: dict[str, Callable[[Any, list[list[int]], int], int]] = {"generate": _generate, "continuous batching": _continuous, "vllm": _vllm}


def part_group(table: Any, dry: bool) -> None:
    """16 answers to one long prompt: time until all have 64 tokens, beside `generate`."""
    from rl.sampler import make_decoder

    device, size, length, new = device_of(dry), "tiny" if dry else "0.5B", 64 if dry else 4096, 4 if dry else 64
    model = make_model(size, device)
    prompt = random_prompts(1, length, SIZES[size][1]["vocab_size"])

    def ours() -> None:
        decoder = make_decoder(model, kind="fast")
        for _ in range(2):
            engine = engine_of(decoder, 16, prompt, new)
            wait(device)
            began = time.perf_counter()
            engine.run()
            wait(device)
        seconds = time.perf_counter() - began
        table.row(f"{size}, 16 answers to {length} tokens", "ours", "tokens_per_s", 16 * new / seconds, note=f"{seconds:.3f} s in all")

    def theirs() -> None:
        for _ in range(2):
            wait(device)
            began = time.perf_counter()
            _generate(model, prompt * 16, new)
            wait(device)
        seconds = time.perf_counter() - began
        table.row(f"{size}, 16 answers to {length} tokens", "generate", "tokens_per_s", 16 * new / seconds, note=f"{seconds:.3f} s in all")

    table.attempt("group", "ours", ours)
    table.attempt("group", "generate", theirs)


def part_agreement(table: Any, dry: bool) -> None:
    """Each sampled token's logprob as the sampler gave it and as the learner's head does, both in bf16, and in float32 both."""
    from kernels import linear_logprob
    from rl.sampler import make_decoder

    device, size = device_of(dry), "tiny" if dry else "0.5B"

    def compare(dtype: torch.dtype) -> None:
        model = make_model(size, device, dtype)
        prompts = random_prompts(4 if dry else 32, 20, SIZES[size][1]["vocab_size"])
        responses = engine_of(make_decoder(model, kind="fast"), len(prompts), prompts, 16 if dry else 128).run()
        found, scored = [], []
        with torch.no_grad():
            for prompt, response in zip(prompts, responses, strict=True):
                for sequence in response.sequences:
                    ids = torch.tensor([[*prompt, *sequence.tokens]], device=device)
                    hidden = model.model(ids).last_hidden_state[0, len(prompt) - 1 : -1]
                    scored.append(linear_logprob(hidden, model.lm_head.weight, ids[0, len(prompt) :], entropy=False)[0].cpu())
                    found.append(torch.tensor(sequence.logprobs))
        gap = torch.cat(found).double() - torch.cat(scored).double()
        case = f"{size}, {str(dtype).removeprefix('torch.')}"
        table.row(case, "ours", "largest_difference", float(gap.abs().max()), "nats", "", f"{len(gap)} tokens")
        table.row(case, "ours", "kl", float((gap.neg().exp() - 1 + gap).mean()), "nats", 0.01)

    for dtype in (torch.bfloat16, torch.float32):
        table.attempt(f"{size}, {dtype}", "ours", lambda dtype=dtype: compare(dtype))


def part_trace(table: Any, dry: bool) -> None:
    """A decode step of 64 rows, and forward and backward of 4,096 tokens: kernels launched, time busy, and the trace itself."""
    from kernels import linear_logprob
    from rl.sampler import make_decoder

    device, size = device_of(dry), "tiny" if dry else "0.5B"
    model = make_model(size, device)
    vocab = SIZES[size][1]["vocab_size"]
    engine = engine_of(make_decoder(model, kind="fast"), 8 if dry else 64, random_prompts(8, 16, vocab), 50)
    ids = torch.randint(0, vocab, (1, 64 if dry else 4096), device=device)

    def learn() -> None:
        hidden = model.model(ids).last_hidden_state[0]
        linear_logprob(hidden[:-1], model.lm_head.weight, ids[0, 1:], entropy=False)[0].sum().backward()

    for name, run in {"decode step": engine.step, "learner step": learn}.items():

        def profiled(name: str = name, run: Callable[[], Any] = run) -> None:
            for _ in range(3):
                run()
            wait(device)
            kinds = [torch.profiler.ProfilerActivity.CPU] + ([torch.profiler.ProfilerActivity.CUDA] if device == "cuda" else [])
            began = time.perf_counter()
            with torch.profiler.profile(activities=kinds) as profile:
                run()
                wait(device)
            wall = (time.perf_counter() - began) * 1e3
            path = Path(table.path).parent / f"trace_{name.split()[0]}.json.gz"
            profile.export_chrome_trace(str(path))
            events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
            busy = sum(e.device_time for e in events) / 1e3
            table.row(name, "ours", "kernels", len(events), note=f"{busy:.2f} ms busy of {wall:.2f} ms under the profiler; {path.name}")

        table.attempt(name, "ours", profiled)
