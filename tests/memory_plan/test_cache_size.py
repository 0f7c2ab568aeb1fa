"""Test the size of a GPU's KV cache if `kv_cache_tokens` is not set, against plans with each size
set.
"""

from pathlib import Path

import numpy as np
import pytest
from sampler_models import one_thread, tiny_model  # noqa: F401

from rl import ServiceClient
from rl.algorithms import METHODS
from rl.config import RunSettings, read_run
from rl.memory_plan import USABLE_FRACTION, LaunchShape
from rl.trainer.memory_requirements import (
    DeviceMemory,
    choose_cache_size,
    compute_stage_needs,
    fit_cache_size,
)
from rl.types import ModelInput, SamplingParams

REPO = Path(__file__).resolve().parents[2]
GPU, DEFAULT = LaunchShape(cuda=True, bf16=True), 262_144
WORDS = "grpo --dataset addition --reward exact_match --base-model tiny:ascii --batch-size 64"
WORDS += " --group-size 16 --max-tokens 1024 --max-rows 2048"


def read(*words: str):
    return read_run(
        [*WORDS.split(), *words], METHODS, REPO / "recipes" / "addition.yaml", RunSettings
    )


def sums_of(size: int, prompt: int) -> tuple[float, float]:
    """Return the bytes while sampling, and the peak if the cache stays allocated."""
    (needs,) = compute_stage_needs(read("--kv-cache-tokens", str(size)), GPU, prompt)
    cache = next(item.sample for item in needs.plan.items if item.name == "KV cache")
    sums = needs.plan.sums
    return sums["sample"], max(sums["sample"], sums["train"] + cache, sums["update"] + cache)


def fit_cache_tokens(memory: float, *words: str) -> int:
    sized = fit_cache_size(read(*words), GPU, DeviceMemory("GPU", memory))
    return sized.stages[0].settings.sampling.kv_cache_tokens


def test_the_size_is_the_one_that_the_rule_names_for_any_memory():
    prompt = read().options.plan_prompt_tokens
    sizes = {1 << i: sums_of(1 << i, prompt) for i in range(11, 23)}
    longest, most = prompt + 1024, 2048 * (prompt + 1024)
    rng, seen, before = np.random.default_rng(0), set(), 0
    shares = (USABLE_FRACTION, 0.8)  # of a size at most the default, and of a larger one
    edges = [
        sum_ / share for pair in sizes.values() for sum_, share in zip(pair, shares, strict=True)
    ]
    for memory in sorted([*rng.uniform(min(edges) * 0.9, max(edges) * 1.1, 12), *edges]):
        large = [n for n, (_, peak) in sizes.items() if n > DEFAULT and peak <= 0.8 * memory]
        small = [
            n
            for n, (sampling, _) in sizes.items()
            if longest <= n <= DEFAULT and sampling <= USABLE_FRACTION * memory
        ]
        expected = max(large, default=max(small, default=DEFAULT))
        while expected // 2 >= most:
            expected //= 2
        size = fit_cache_tokens(memory)
        assert size == expected, f"{memory:.0f} bytes"
        if small:
            assert size >= before  # a larger GPU never has a smaller cache
            before = size
        seen.add(size)
    assert len(seen) >= 8 and {DEFAULT, 1 << 22, 1 << 11} <= seen


def test_a_size_that_is_set_and_a_cpu_keep_theirs():
    assert fit_cache_tokens(1e13, "--kv-cache-tokens", "5000") == 5000
    cpu = fit_cache_size(read(), LaunchShape(cuda=False, bf16=False), DeviceMemory("CPU", 1e13))
    assert cpu.stages[0].settings.sampling.kv_cache_tokens == DEFAULT
    assert choose_cache_size(read()) == cpu
    longer = choose_cache_size(read("--max-tokens", "300000")).stages[0].settings.sampling
    assert longer.kv_cache_tokens == 300_000


def test_rows_that_batches_do_not_fill_do_not_enlarge_it():
    assert fit_cache_tokens(1e13, "--max-rows", "64") == DEFAULT
    # 256 x (512 + 1024) = 393,216
    assert fit_cache_tokens(1e13, "--max-rows", "256") == 2 * DEFAULT


def test_a_service_samples_the_same_in_a_cache_of_another_size(tmp_path):
    params, prompt = SamplingParams(max_tokens=8, seed=5), ModelInput.from_ints([3, 4, 5])
    with ServiceClient(output_dir=tmp_path) as service:
        sampler = service.create_sampling_client(base_model="tiny:ascii")

        def sample():
            response = sampler.sample(prompt, 6, params).result()
            tokens = [sequence.tokens for sequence in response.sequences]
            return tokens, np.concatenate([sequence.logprobs for sequence in response.sequences])

        whole = sample()
        service.set_cache_size(16)  # two rows at a time instead of six
        few = sample()
        assert few[0] == whole[0]
        np.testing.assert_allclose(few[1], whole[1], rtol=0, atol=2e-6)
        service.set_cache_size(8)
        with pytest.raises(ValueError, match="kv_cache_tokens is 8"):
            sample()
