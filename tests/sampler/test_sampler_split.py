"""Test a decoder split over several ranks: samples equal those of a single rank with the whole
model.

The ranks are threads; test_sampler_teams.py uses processes.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from sampler_models import (  # noqa: F401
    VOCAB,
    add_lora,
    check_logprobs,
    check_same,
    crowded_engines,
    make_request,
    one_thread,
    paged_engine,
    random_prompts,
    run_requests,
    tiny_model,
)

from rl.errors import UserError
from rl.sampler import Engine, MultiAdapterDecoder, make_base_decoder, make_decoder, score_sequences
from rl.sampler.decode_state import BatchSize
from rl.sampler.decoder_fast import FastDecoder
from rl.types import SamplingParams

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, two query heads a key head": ("llama", {}),
    "llama, a bias on every matrix": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2, biases of q, k and v": ("qwen2", {}),
    "qwen3, norms of queries and keys": ("qwen3", {}),
    "qwen3, untied": ("qwen3", {"tie_word_embeddings": False}),
    "mistral": ("mistral", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen2_moe, a shared expert, a dense layer": ("qwen2_moe", {"mlp_only_layers": [0]}),
    "olmoe": ("olmoe", {}),
}
ADAPTERS = {
    "every layer": [*ALL],
    "head and embedding too": [*ALL, "lm_head", "embed_tokens"],
    "what is summed": ["o_proj", "down_proj"],
}


class Threads:
    """A team of threads. `fault`: number of all-reduces after which the sums are left unreduced."""

    def __init__(
        self,
        rank: int,
        size: int,
        meeting: threading.Barrier,
        table: list,
        fault: int | None = None,
    ):
        self.rank, self.size, self.meeting, self.table = rank, size, meeting, table
        self.fault, self.sums = fault, 0

    def _all(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.table[self.rank] = x.clone()
        self.meeting.wait(60)
        result = list(self.table)
        self.meeting.wait(60)
        return result

    def all_reduce_(self, x: torch.Tensor) -> torch.Tensor:
        self.sums += 1
        total = functools.reduce(torch.add, self._all(x))
        return x if self.fault is not None and self.sums > self.fault else x.copy_(total)

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return self._all(x)

    def broadcast_(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self._all(x)[0])


def on_ranks(size: int, run: Callable[[Threads], Any], fault: int | None = None) -> list[Any]:
    """Return the result of `run` on each rank of a team. A failed rank aborts the others."""
    meeting, table = threading.Barrier(size), [None] * size

    def first(rank: int) -> Any:
        try:
            with torch.no_grad():
                return run(Threads(rank, size, meeting, table, fault))
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(first, rank) for rank in range(size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise next(
                (e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0]
            )
        return [future.result() for future in futures]


def split(model: torch.nn.Module, team: Threads, **settings: Any) -> FastDecoder:
    decoder = make_decoder(copy.deepcopy(model), kind="fast", tp_group=team, **settings)
    assert isinstance(decoder, FastDecoder)
    return decoder


def sample_groups(decoder: FastDecoder, kind: type[Engine] = Engine, **settings: Any) -> list[Any]:
    """Sample groups of prompts of several lengths, more rows than fit at once, some with prompt
    logprobs.
    """
    engine = kind(decoder, eos_token_ids=(3,), max_rows=5, **settings)
    requests = []
    for i, prompt in enumerate(random_prompts([4, 11, 1, 7])):
        params = SamplingParams(max_tokens=9, temperature=0.9, top_k=7 if i == 3 else -1)
        fields = dict(params=params, seed=5, problem=i, include_prompt_logprobs=i < 2)
        requests.append(make_request(prompt, 3, **fields))
    return run_requests(engine, requests)


# --------------------------------------------------------------------------------- the same samples


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_are_those_of_one_rank_and_of_the_model_itself(family):
    kind, changes = FAMILIES[family]
    model = tiny_model(kind, **changes)
    expected = sample_groups(make_decoder(model, kind="fast"))
    result = on_ranks(2, lambda team: sample_groups(split(model, team)))
    for rank in result:
        check_same(rank, expected)
    for prompt, response in zip(random_prompts([4, 11, 1]), result[1], strict=False):
        for sequence in response.sequences:
            check_logprobs(model, prompt, sequence, 0.9, atol=1e-5)


@pytest.mark.parametrize("size", [2, 4])
def test_without_the_kernels_of_a_cpu_and_from_pages(size):
    """float64 uses the general forward, which returns float32 logprobs. The vocabulary of 41 does
    not divide evenly.
    """
    model = tiny_model("qwen3", num_key_value_heads=4).double()
    decoder = make_decoder(model, kind="fast")
    assert isinstance(decoder, FastDecoder) and decoder.cpu_kernels is None
    expected = sample_groups(decoder)
    pages = {"page": 4, "kv_cache_tokens": 80}
    for rank in on_ranks(size, lambda team: sample_groups(split(model, team))):
        check_same(rank, expected, 2e-6)
    for rank in on_ranks(
        size, lambda team: sample_groups(split(model, team), paged_engine, **pages)
    ):
        check_same(rank, expected, 2e-6)


@pytest.mark.parametrize(
    ("kind", "targets"), [("qwen2", "every layer"), *(("llama", targets) for targets in ADAPTERS)]
)
def test_adapters_unmerged(kind, targets):
    model = add_lora(tiny_model(kind, tie_word_embeddings=False), ADAPTERS[targets])
    expected = sample_groups(make_decoder(model, kind="fast"))
    for rank in on_ranks(2, lambda team: sample_groups(split(model, team))):
        check_same(rank, expected)
    model.disable_adapter_layers()  # control: without the adapter the samples differ
    plain = sample_groups(make_decoder(model.unload(), kind="fast"))
    with pytest.raises(AssertionError):
        check_same(plain, expected)


@pytest.mark.parametrize("pages", [False, True])
def test_several_adapters_on_one_base_in_one_batch(pages):
    plain = tiny_model("qwen2", tie_word_embeddings=False)
    models = []
    for i, targets in enumerate((ALL, ["o_proj", "lm_head"], ["embed_tokens", "q_proj"])):
        torch.manual_seed(i)
        models.append(add_lora(copy.deepcopy(plain), targets, r=2 + i))
    requests = [
        make_request(prompt, 2, max_tokens=7, seed=1, problem=i, adapter_id=i % 3)
        for i, prompt in enumerate(random_prompts([4, 6, 3, 5]))
    ]

    def run(team: Any) -> list[Any]:
        base = make_base_decoder(copy.deepcopy(plain), None, None, tp_group=team)
        assert isinstance(base, FastDecoder)
        decoder = MultiAdapterDecoder(base)
        for number, model in enumerate(models):
            adapted = make_decoder(copy.deepcopy(model), kind="fast", base=base, tp_group=team)
            assert adapted.base is base
            decoder.add_adapter(number, adapted, 0)
        if not pages or team is None:
            return run_requests(Engine(decoder, eos_token_ids=(3,)), requests)
        engine = paged_engine(decoder, (3,), page=4, kv_cache_tokens=44)
        responses = run_requests(engine, requests)
        assert engine.preemptions
        return responses

    expected = run(None)
    for rank in on_ranks(2, run):
        check_same(rank, expected)


def test_logprobs_of_texts():
    model, texts = tiny_model("llama"), random_prompts([5, 12, 2])
    expected = score_sequences(make_decoder(model, kind="fast"), texts, 0.7)
    for result in on_ranks(2, lambda team: score_sequences(split(model, team), texts, 0.7)):
        for first, other in zip(result, expected, strict=True):
            np.testing.assert_allclose(first[1:], other[1:], atol=1e-5)


def test_a_sum_that_is_left_out_is_seen():
    """A missing sum is detected when the decoder is made, or in the samples if no trial is made."""
    model = tiny_model("qwen3")
    with pytest.raises(UserError, match="sampler_tp 2 requires the fast .*reproduce the logits"):
        on_ranks(2, lambda team: split(model, team), fault=3)
    weights = [(name, p.detach()) for name, p in model.named_parameters(remove_duplicate=False)]
    expected = sample_groups(make_decoder(model, kind="fast"))
    hollow = on_ranks(2, lambda team: sample_groups(split(model, team, weights=weights)))
    check_same(hollow[0], expected)
    broken = on_ranks(2, lambda team: sample_groups(split(model, team, weights=weights)), fault=30)
    with pytest.raises(AssertionError):
        check_same(broken[0], expected)


# --------------------------------------------------------------------------------- memory of a rank


def test_new_weights_come_whole_one_at_a_time_and_each_rank_takes_its_part():
    model = add_lora(tiny_model("qwen2", tie_word_embeddings=False), [*ALL, "lm_head"])
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
                assert "lora" in name
    expected = sample_groups(make_decoder(other, kind="fast"))
    changed = [(name, p.detach()) for name, p in other.named_parameters() if p.requires_grad]

    def run(team: Threads) -> list[Any]:
        first = split(model, team)
        second = first.fork()
        second.load_(changed)
        assert second.weights.shared
        assert second.weights.buffers["embed"] is first.weights.buffers["embed"]
        return [sample_groups(second), sample_groups(first)]

    before = sample_groups(make_decoder(model, kind="fast"))
    for loaded, untouched in on_ranks(2, run):
        check_same(loaded, expected)
        check_same(untouched, before)


def test_a_part_in_the_place_of_the_whole_is_refused():
    model = tiny_model("llama")
    name = "model.layers.0.self_attn.q_proj.weight"
    part = model.get_parameter(name).detach()[:16]

    def run(team: Threads) -> str:
        with pytest.raises(ValueError) as text:
            split(model, team).load_([(name, part)])
        return str(text.value)

    assert set(on_ranks(2, run)) == {f"{name} has shape (32, 32) in the decoder, got (16, 32)"}


@pytest.mark.parametrize("tied", [False, True])
def test_a_rank_holds_its_share_of_the_weights_and_of_the_cache(tied):
    """Norms are excluded: every rank has all of them."""
    model = tiny_model("qwen3", num_key_value_heads=4, tie_word_embeddings=tied)

    def held(decoder: FastDecoder) -> tuple[int, int, int]:
        state = decoder.new_state(1000)
        state.reserve(BatchSize(2, 16, 4, 8))
        buffers = decoder.weights.buffers
        norms = sum(b.numel() for key, b in buffers.items() if "norm" in key)
        weights = sum(b.numel() for b in buffers.values()) - norms
        return weights, norms, sum(b.numel() for b in state.row_kv)

    whole, norms, cache = held(make_decoder(model, kind="fast"))  # type: ignore[arg-type]
    assert whole + norms == sum(p.numel() for p in model.parameters())
    ranks = on_ranks(4, lambda team: held(split(model, team)))
    assert sum(weights for weights, *_ in ranks) == whole
    # up to a whole row more, since 41 rows do not divide evenly
    assert max(weights for weights, *_ in ranks) <= whole / 4 + 32 * (1 if tied else 2)
    assert {(n, c * 4) for _, n, c in ranks} == {(norms, cache)}


# ------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"intermediate_size": 48}, "2 key-value heads: .* Smaller sizes that do: 1, 2$"),
        ({"num_key_value_heads": 4, "intermediate_size": 50}, "50 MLP columns"),
    ],
)
def test_heads_and_columns_that_cannot_be_dealt_out(changes, says):
    model = tiny_model("llama", **changes)
    with pytest.raises(UserError, match=f"sampler_tp 4 does not divide this model's {says}"):
        on_ranks(4, lambda team: split(model, team))


@pytest.mark.parametrize("kind", ["auto", "fast", "hf"])
def test_what_only_the_generic_decoder_samples(kind):
    model = tiny_model("gpt2")
    with pytest.raises(UserError, match="requires the fast decoder .* leave sampler_tp at 1"):
        on_ranks(2, lambda team: make_decoder(copy.deepcopy(model), kind=kind, tp_group=team))


def test_the_words_are_all_there():
    model = tiny_model("llama")
    decoders = on_ranks(2, lambda team: split(model, team))
    assert [len(decoder.embed.weight_VE) for decoder in decoders] == [20, 21]
    assert decoders[0].vocab_size == VOCAB
