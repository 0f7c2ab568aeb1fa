"""Test the compiled CPU kernels against float64, and the fallback if they cannot be compiled.

Tests of whole models: test_sampler_decoders.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sampler_models import make_request, random_prompts, row_settings, run_requests, tiny_model

from kernels import UNBOUNDED, AttentionBounds
from rl.sampler import Engine, cpu_kernels, make_decoder
from rl.sampler.token_sampling import sample_tokens
from rl.types import SamplingParams

pytestmark = pytest.mark.skipif(cpu_kernels.load_cpu_kernels() is None, reason="no C++ compiler")


@pytest.fixture
def kernels() -> cpu_kernels.CpuKernels:
    result = cpu_kernels.load_cpu_kernels()
    assert result is not None
    return result


@pytest.fixture
def fresh(monkeypatch):
    """Clear the cache of loaded kernels before and after the test; what is built is not optimized,
    which takes a quarter of the time.
    """
    monkeypatch.setattr(cpu_kernels, "_FLAGS", (*cpu_kernels._FLAGS, "-O0"))
    cpu_kernels.load_cpu_kernels.cache_clear()
    yield
    cpu_kernels.load_cpu_kernels.cache_clear()


def test_rms_norm(kernels):
    torch.manual_seed(0)
    x = torch.randn(5, 37) * torch.tensor([1e-4, 1.0, 30.0, 1e3, 0.0])[:, None]
    weight = torch.randn(37)
    x64 = x.double()
    expected = x64 / (x64.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    torch.testing.assert_close(
        kernels.rms_norm(x, weight, 1e-6).double(), expected, rtol=3e-7, atol=1e-7
    )


def test_silu_mul_over_every_magnitude(kernels):
    gate = torch.cat([torch.linspace(-120, 120, 4001), torch.tensor([0.0, -0.0, 1e-30, -1e-30])])
    up = torch.linspace(-3, 3, len(gate))
    got = kernels.silu_mul(torch.cat([gate, up])[None])[0]
    expected = torch.nn.functional.silu(gate.double()) * up.double()
    # relative error: the exponential is accurate to 2e-7
    assert ((got - expected).abs() <= 5e-7 * expected.abs() + 1e-35).all()


def attention_inputs(rows=7, heads=6, key_heads=3, width=32):
    torch.manual_seed(1)
    prompts, prompt_positions, positions = 3, 20, 11
    blocks = (
        torch.randn(2, prompts, key_heads, prompt_positions, width),
        torch.randn(2, rows + 2, key_heads, positions, width),
    )
    return {
        "qkv_NX": torch.randn(rows, (heads + 2 * key_heads) * width),
        "norm_qk": torch.rand(2 * width) + 0.5,
        "eps": 1e-6,
        "rope": torch.randn(2, 40, width),
        "position_N": torch.arange(rows) + 3,
        "prompt_kv": blocks[0],
        "prompt_of_row_N": torch.tensor([0, 2, 1, 1, 0, 2, 2])[:rows],
        "prompt_length_P": torch.tensor([20, 1, 13]),
        "row_kv": blocks[1],
        "slot_N": torch.arange(rows),
        "written_N": torch.tensor([0, 10, 3, 0, 7, 1, 5])[:rows],
        "heads": heads,
    }


@pytest.mark.parametrize("window", [1, 2, 6, 17, 100])
@pytest.mark.parametrize("softcap", [0.0, 0.05, 1.0, 30.0])
def test_attend_with_a_window_and_limited_scores(kernels, window, softcap):
    for width, repeat in ((8, 3), (64, 4)):
        _check_attend(kernels, repeat, width, True, AttentionBounds(window, softcap))
    _check_attend(kernels, 2, 128, False, AttentionBounds(0, softcap))


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("width", [8, 32, 64, 80, 128, 256])
@pytest.mark.parametrize("repeat", [1, 2, 3, 4, 7, 8])
def test_attend_against_float64_row_by_row(kernels, repeat, width, normed):
    _check_attend(kernels, repeat, width, normed, UNBOUNDED)


def _check_attend(kernels, repeat, width, normed, bounds):
    rows, key_heads, heads = 7, 3, 3 * repeat
    inputs = attention_inputs(rows, heads, key_heads, width) | ({} if normed else {"norm_qk": None})
    inputs["bounds"] = bounds
    before = inputs["row_kv"].clone()
    got = kernels.attend(**inputs).double().view(rows, heads, width)
    norm_q, norm_k = inputs["norm_qk"].double().split(width) if normed else (None, None)

    def turn(x, weight, cos, sin):
        if weight is not None:
            x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
        return x * cos + x.roll(width // 2, -1) * sin

    for n in range(rows):
        cos, sin = inputs["rope"].double()[:, inputs["position_N"][n]]
        x = inputs["qkv_NX"][n].double().view(-1, width)
        q = turn(x[:heads], norm_q, cos, sin)
        k = turn(x[heads : heads + key_heads], norm_k, cos, sin)
        v = x[heads + key_heads :]
        written, prompt = int(inputs["written_N"][n]), int(inputs["prompt_of_row_N"][n])
        length = int(inputs["prompt_length_P"][prompt])
        cached = torch.cat(
            [inputs["prompt_kv"][:, prompt, :, :length], before[:, n, :, :written]], 2
        ).double()
        keys, values = torch.cat([cached, torch.stack([k, v])[:, :, None]], 2).repeat_interleave(
            repeat, 1
        )
        start = max(keys.shape[1] - bounds.window, 0) if bounds.window else 0
        score = torch.einsum("hd,hld->hl", q, keys[:, start:]) / width**0.5
        if bounds.softcap:
            score = bounds.softcap * torch.tanh(score / bounds.softcap)
        expected = torch.einsum("hl,hld->hd", score.softmax(-1), values[:, start:])
        torch.testing.assert_close(got[n], expected, rtol=2e-5, atol=2e-6)
        torch.testing.assert_close(
            inputs["row_kv"][0, n, :, written].double(), k, rtol=1e-5, atol=1e-6
        )
        assert torch.equal(inputs["row_kv"][1, n, :, written].double(), v)
        before[:, n, :, written] = inputs["row_kv"][:, n, :, written]
    assert torch.equal(before, inputs["row_kv"])  # nothing else was written


def test_threads_change_no_bit(kernels):
    """The inputs are large enough for several threads."""
    torch.manual_seed(2)
    rows, width = 400, 64
    prompt_kv, row_kv = torch.randn(2, 2, 2, 300, width), torch.randn(2, rows, 2, 40, width)
    qkv, rope = torch.randn(rows, 8 * width), torch.ones(2, 400, width)
    every = torch.arange(rows)
    written, owner, lengths = every % 40, every % 2, torch.tensor([300, 117])
    caches = (prompt_kv, owner, lengths, row_kv, every, written)
    results, before = [], torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        attended = kernels.attend(qkv, None, 1e-6, rope, written, *caches, 4)
        results.append((attended, kernels.silu_mul(torch.cat([qkv, qkv * 2], 1).repeat(2, 8))))
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


_WITHOUT_THREADS = """
import resource, torch
from rl.sampler.cpu_kernels import load_cpu_kernels
kernels = load_cpu_kernels()
inputs = torch.randn(1000, 5000), torch.rand(1000, dtype=torch.float64), None, None
torch.set_num_threads(1)
expected = kernels.sample(*inputs)
torch.set_num_threads(3)
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 20), -1))
sampled = kernels.sample(*inputs)
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
torch.set_num_threads(1)
print([torch.equal(a, b) for a, b in zip(sampled, expected)])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_calling_thread_does_all_rows_if_no_other_can_be_started():
    """The limit of the address space leaves no room for the stack of a thread. The process was
    aborted.
    """
    run = subprocess.run(
        [sys.executable, "-c", _WITHOUT_THREADS],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split("\n")[0] == "[True, True]"


def test_several_tokens_of_a_slot_attend_as_if_they_came_one_by_one(kernels):
    """A token attends to the tokens before it in the same call, also if the threads' shares of the
    rows would begin within a slot.
    """
    torch.manual_seed(3)
    counts, width = torch.tensor([1, 5, 40, 1, 1, 300, 2, 50]), 64
    rows, first = int(counts.sum()), torch.tensor([3, 0, 7, 300, 0, 2, 12, 9])
    slot = torch.repeat_interleave(torch.arange(len(counts)), counts)
    index = torch.arange(rows) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    written, owner = first[slot] + index, torch.arange(len(counts)) % 2
    prompt_kv, row_kv = torch.randn(2, 2, 2, 300, width), torch.randn(2, len(counts), 2, 310, width)
    qkv, lengths = torch.randn(rows, 8 * width), torch.tensor([300, 117])
    rope, position = torch.randn(2, 700, width), written + lengths[owner[slot]]

    def attend(chosen, cache):
        return kernels.attend(
            qkv[chosen].contiguous(), None, 1e-6, rope, position[chosen], prompt_kv,
            owner[slot[chosen]], lengths, cache, slot[chosen], written[chosen], 4,
        )  # fmt: skip

    singly, cache = torch.empty(rows, 4 * width), row_kv.clone()
    for step in range(int(counts.max())):
        chosen = torch.nonzero(index == step).flatten()
        singly[chosen] = attend(chosen, cache)
    before = torch.get_num_threads()
    for threads in (1, 3, 7):
        torch.set_num_threads(threads)
        other = row_kv.clone()
        assert torch.equal(attend(torch.arange(rows), other), singly)
        assert torch.equal(other, cache)
    torch.set_num_threads(before)


@pytest.mark.parametrize("where", ["query", "prompt", "response"])
def test_nan_is_not_swallowed(kernels, where):
    inputs = attention_inputs()
    {
        "query": inputs["qkv_NX"][1, :32],
        "prompt": inputs["prompt_kv"][0, 2, 0, 4],
        "response": inputs["row_kv"][1, 1, 0, 2],
    }[where].fill_(torch.nan)
    assert kernels.attend(**inputs)[1, :32].isnan().all()


def test_without_a_compiler_it_says_so(fresh, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(cpu_kernels.shutil, "which", lambda name: None)
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler"):
        assert cpu_kernels.load_cpu_kernels() is None


def sample_tiny_model() -> list:
    """Return tokens and logprobs of 4 prompts with 3 samples each."""
    engine = Engine(make_decoder(tiny_model("qwen3")), eos_token_ids=())
    requests = [
        make_request(prompt, 3, max_tokens=12, temperature=0.8, seed=0, problem=problem)
        for problem, prompt in enumerate(random_prompts([9, 3, 30, 3]))
    ]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    responses = run_requests(engine, requests)
    torch.set_num_threads(threads)
    return [[item.tokens, item.logprobs] for response in responses for item in response.sequences]


@pytest.mark.slow
def test_without_a_compiler_on_path_the_samples_are_those_of_the_torch_path(tmp_path, monkeypatch):
    code = (
        "import json; import test_sampler_cpu_kernels as tests; "
        "print(json.dumps(tests.sample_tiny_model()))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        env={
            "PATH": str(tmp_path),
            "PYTHONPATH": os.pathsep.join(str(folder) for folder in Path(__file__).parents[1:3]),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    warned = [line for line in run.stderr.splitlines() if "Warning: no C++" in line]
    assert len(warned) == 1 and "apt-get install g++" in warned[0]
    compiled = sample_tiny_model()
    monkeypatch.setattr(cpu_kernels, "load_cpu_kernels", lambda: None)
    in_torch = sample_tiny_model()
    assert json.loads(run.stdout.splitlines()[-1]) == in_torch
    assert [tokens for tokens, _ in in_torch] == [tokens for tokens, _ in compiled]


def test_a_compiler_that_fails_is_named_with_what_it_said(fresh, monkeypatch, tmp_path):
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho no such flag >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.warns(UserWarning, match="no such flag"):
        assert cpu_kernels.load_cpu_kernels() is None


def test_a_folder_that_cannot_be_written_is_gone_round(fresh, monkeypatch):
    def refuse(*args):
        raise PermissionError("read-only")

    monkeypatch.setattr(cpu_kernels, "_FLAGS", (*cpu_kernels._FLAGS, "-DANOTHER_KEY"))
    monkeypatch.setattr(cpu_kernels.os, "replace", refuse)
    result = cpu_kernels.load_cpu_kernels()
    assert result is not None and result.silu_mul(torch.zeros(1, 4)).shape == (1, 2)


@pytest.fixture
def use_cache(fresh, monkeypatch, tmp_path):
    """Return a function that makes a folder the cache of libraries, next to a copy of the source."""

    def use(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        shutil.copy(Path(cpu_kernels.__file__).with_suffix(".cpp"), folder)
        monkeypatch.setattr(cpu_kernels, "_SOURCE", folder / "cpu_kernels.cpp")
        cpu_kernels.load_cpu_kernels.cache_clear()
        return folder / "__pycache__"

    return use


def test_a_library_is_built_by_a_compiler_with_arguments_and_anew_if_it_cannot_be_loaded(
    use_cache, monkeypatch
):
    """A cached library that cannot be loaded is built again. Another process, of the same id in
    another container, is about to store its library.
    """
    cache = use_cache("first")
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    monkeypatch.setenv("CXX", f"env {compiler} -pipe")
    assert cpu_kernels.load_cpu_kernels() is not None
    (built,) = cache.iterdir()  # no temporary file is left
    umask = os.umask(0)
    os.umask(umask)
    assert built.stat().st_mode & 0o044 == 0o044 & ~umask  # readable for other users
    second = use_cache("second")
    second.mkdir()
    library, other = second / built.name, second / f"{built.name}.{os.getpid()}"
    library.write_bytes(b"a library of another system")
    other.write_bytes(b"half of a library")
    result = cpu_kernels.load_cpu_kernels()
    assert result is not None and result.silu_mul(torch.zeros(1, 4)).shape == (1, 2)
    assert library.stat().st_size == built.stat().st_size  # the next process loads it
    assert other.read_bytes() == b"half of a library"


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("vocab", [1, 2, 13, 511, 512, 513, 1024, 5000, 151_936])
def test_the_draw_is_that_of_exact_sums(kernels, vocab, threads):
    """The reference is long double. Rows cover several temperatures, greedy sampling, tokens of
    weight zero, ties, and the ends of [0, 1).
    """
    generator = torch.Generator().manual_seed(vocab)
    rows = 12
    logits = torch.randn(rows, vocab, generator=generator) * 4
    logits[:, torch.rand(vocab, generator=generator) < 0.3] = -torch.inf
    logits[:, vocab // 2] = 1.5
    logits[3, vocab // 3] = logits[3].max()  # a tie
    logits[4] = logits[4] - 500.0  # far from zero
    logits[5, vocab // 2] = 120.0  # a single token has weight: all others underflow
    uniform = torch.rand(rows, dtype=torch.float64, generator=generator)
    uniform[:2] = torch.tensor([0.0, 1 - 2**-53])
    temperature = torch.tensor([1.0, 1.0, 0.5, 1.0, 2.0, 1.0, 0.7, 1.0, 1.0, 1.0, 1.3, 1.0])
    greedy = torch.tensor([False] * 8 + [True, True] + [False] * 2)
    torch.set_num_threads(threads)
    try:
        token, logprob = kernels.sample(logits, uniform, temperature, greedy)
    finally:
        torch.set_num_threads(1)
    for i in range(rows):
        scaled = (logits[i] / temperature[i]).numpy().astype(np.longdouble)
        weight = np.exp(scaled - scaled.max())
        weight[weight < 1e-37] = 0
        sums = np.cumsum(weight)
        if greedy[i]:
            assert token[i] == int(np.argmax(scaled))
        else:
            assert weight[token[i]] > 0
        if i != 1 and not greedy[i]:  # at the end of [0, 1) the last few tokens lie within rounding
            number = uniform[i].item()
            expected = int(np.searchsorted(sums, np.longdouble(number) * sums[-1], side="right"))
            gaps = [abs(sums[at] / sums[-1] - number) for at in (expected, token[i])]
            assert token[i] == expected or min(gaps) < 1e-6
        exact = float(scaled[token[i]] - scaled.max() - np.log(sums[-1]))
        assert abs(logprob[i].item() - exact) < 1e-6 * max(1.0, abs(exact)), i


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_give_a_logprob_that_is_none(kernels, bad):
    """The engine refuses such a logprob. Other rows in the batch do not change."""
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(0))
    uniform = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    fine, fine_logprob = kernels.sample(logits[2:].contiguous(), uniform[2:], None, None)
    logits[0, 3], logits[1] = bad, bad
    token, logprob = kernels.sample(logits, uniform, None, torch.tensor([False, True, False]))
    assert logprob[:2].isnan().all() and ((token >= 0) & (token < 700)).all()
    assert token[2] == fine[0] and logprob[2] == fine_logprob[0]


def test_a_row_is_drawn_alike_whoever_is_beside_it(monkeypatch):
    """Truncated, greedy, tempered and plain rows give the same tokens and bits in a batch and
    separately, and the same tokens as torch's operations.
    """
    generator, vocab = torch.Generator().manual_seed(3), 3000
    rows = 4 * [
        SamplingParams(),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=50),
        SamplingParams(temperature=0.9, top_p=0.8, untruncated_logprobs=True),
        SamplingParams(top_k=20, top_p=0.9, untruncated_logprobs=True),
    ]
    logits = torch.randn(len(rows), vocab, generator=generator) * 3
    uniform = torch.rand(len(rows), dtype=torch.float64, generator=generator)
    token, logprob = sample_tokens(logits, uniform, row_settings(rows, vocab))
    with monkeypatch.context() as patch:
        patch.setattr(cpu_kernels, "load_cpu_kernels", lambda: None)
        by_torch, torchs_logprob = sample_tokens(logits, uniform, row_settings(rows, vocab))
    assert token.tolist() == by_torch.tolist() and (logprob - torchs_logprob).abs().max() < 2e-6
    for i, row in enumerate(rows):
        settings = row_settings([row], vocab)
        alone = sample_tokens(logits[i : i + 1], uniform[i : i + 1], settings)
        assert (alone[0][0], alone[1][0]) == (token[i], logprob[i])
