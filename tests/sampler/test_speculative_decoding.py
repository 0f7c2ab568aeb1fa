"""Test speculative decoding by prompt lookup: the tokens of plain decoding, in fewer steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sampler_models import (  # noqa: F401
    VOCAB,
    check_same,
    crowded_engines,
    make_request,
    one_thread,
    paged_engine,
    run_requests,
    tiny_model,
)
from whole_runs import RECIPE

from rl.algorithms import METHODS
from rl.config import RunSettings
from rl.config.cli import parse_run
from rl.sampler import Engine, SamplingRequest, build_stop_condition, make_decoder
from rl.sampler.running_rows import RunningRows
from rl.sampler.sampling_requests import EngineCounters, SequenceGroup
from rl.sampler.speculative_decoder import DraftController, SpeculativeDecoder
from rl.trainer.saved_weights import collect_worker_settings
from rl.types import SamplingParams

EOS = (3,)


def make_requests(rng: np.random.Generator, count: int = 12) -> list[SamplingRequest]:
    """Return requests with repeated text, of low and high entropy, some of which share a prompt."""
    requests = []
    for problem in range(count):
        phrase = rng.integers(0, VOCAB, int(rng.integers(2, 9))).tolist()
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 40)),
            temperature=float(rng.choice([0.0, 0.2, 1.0])),
            top_p=0.7 if problem % 5 == 1 else 1.0,
            logit_bias={token: 5.0 for token in phrase} if problem % 3 else None,
            frequency_penalty=0.3 if problem % 4 == 2 else 0.0,
            min_tokens=1 if problem % 2 else 0,
        )
        prompt = (phrase * 4)[: int(rng.integers(2, 30))]
        requests.append(make_request(prompt, 1 + problem % 3, problem=problem, params=params))
    return requests


WAYS = [("qwen3", True, True), ("qwen3", False, False)]  # (model, pages, kernels of a CPU)
for kind in ("qwen3", "gemma2", "olmo3", "qwen3_moe"):
    WAYS += [(kind, False, True), (kind, True, False)]


@pytest.mark.parametrize(("kind", "paged", "kernels"), WAYS)
def test_tokens_are_those_of_plain_decoding(kind, paged, kernels, monkeypatch):
    """Full and sliding attention, soft caps and experts; the kernels of a CPU, torch operations, and
    block tables with few free blocks.
    """
    monkeypatch.setattr(DraftController, "may_draft", lambda controller, rows: True)
    if not kernels:
        monkeypatch.setattr("rl.sampler.cpu_kernels.load_cpu_kernels", lambda: None)
    decoder = make_decoder(tiny_model(kind), kind="fast")
    make: Any = Engine
    settings: dict[str, Any] = {"kv_cache_tokens": 800, "record_experts": kind == "qwen3_moe"}
    if paged:
        make, settings = paged_engine, settings | {"page": 4, "kv_cache_tokens": 240}
    for seed in range(2):
        requests = make_requests(np.random.default_rng(seed))
        plain = Engine(decoder, EOS, record_experts=kind == "qwen3_moe")
        expected = run_requests(plain, requests)
        engine = make(decoder, EOS, num_speculative_tokens=1 + 3 * seed, **settings)
        result = run_requests(engine, requests)
        check_same(result, expected)
        for response, other in zip(result, expected, strict=True):
            for mine, theirs in zip(response.sequences, other.sequences, strict=True):
                assert np.array_equal(mine.experts, theirs.experts)
        counters = engine.counters
        assert 0 < counters.accepted_tokens < counters.drafted_tokens
        rejected = counters.drafted_tokens - counters.accepted_tokens
        assert counters.decoded_rows - rejected == counters.emitted_tokens
        assert not paged or engine.preemptions


def find_drafts(history: list[int], most: int) -> list[int]:
    """Return the tokens after the newest earlier occurrence of the last 3 or 2 tokens."""
    for size in (3, 2):
        for start in range(len(history) - size - 1, -1, -1):
            if history[start : start + size] == history[-size:]:
                drafts = list(history)
                while len(drafts) < len(history) + most:
                    drafts.append(drafts[start + size + len(drafts) - len(history)])
                return drafts[len(history) :]
    return []


def test_drafts_follow_the_newest_match_of_the_longest_ngram():
    """Random texts of two or three symbols, against a search row by row."""
    rng = np.random.default_rng(5)
    drafted, state = 0, make_decoder(tiny_model("qwen3"), kind="fast").new_state(8)
    no_stop = build_stop_condition([], ())
    for _ in range(300):
        rows, groups, texts, most = RunningRows(), {}, [], int(rng.integers(1, 6))
        for number in range(3):
            prompt = rng.integers(0, 3, int(rng.integers(1, 9))).tolist()
            limit = int(rng.integers(2, 20))
            request = SamplingRequest(prompt=prompt, num_samples=2)
            groups[number] = SequenceGroup(number, request, limit, 0, no_stop, (), num_unfinished=2)
            rows.add([groups[number]], [2])
            texts += [list(prompt), list(prompt)]
        limits = rows["max_tokens"].tolist()
        for _ in range(int(rng.integers(1, min(limits)))):
            tokens = rng.integers(0, 3, 6)
            rows.record(tokens[None], np.zeros((1, 6)))
            for text, token in zip(texts, tokens.tolist(), strict=True):
                text.append(token)
        bound = int(rng.integers(0, 25))
        speculation = SpeculativeDecoder(most, rows, state, None, EngineCounters())
        entries, room = speculation.draft(groups, bound), bound
        for row, text in enumerate(texts):
            left = limits[row] - int(rows["num_sampled"][row]) - 1
            expected = find_drafts(text, min(most, left))[: max(min(most, left, room), 0)]
            room -= len(expected)
            drafted += len(expected)
            if entries is not None:
                mine = entries["request_id"] * 2 + entries["sample"] == row
                assert entries.last_tokens()[mine].tolist() == [text[-1], *expected]
        assert (entries is None) == (room == bound)
    assert drafted > 1000


def test_copied_text_takes_fewer_steps():
    """A model whose next token is a function of the last token repeats a cycle of its prompt."""
    model = tiny_model("qwen3", tie_word_embeddings=False)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(VOCAB, 32))
        model.lm_head.weight.zero_()
        for token in range(8):
            model.lm_head.weight[(token + 1) % 8, token] = 10.0
    engine = Engine(make_decoder(model, kind="fast"), num_speculative_tokens=4)
    cycle = list(range(8))
    (response,) = run_requests(engine, [make_request(cycle * 2, max_tokens=51)])
    assert response.sequences[0].tokens == (cycle * 7)[:51]
    counters = engine.counters
    assert (counters.drafted_tokens, counters.accepted_tokens, counters.steps) == (40, 40, 11)


def test_drafting_pauses_by_counts_where_it_does_not_pay():
    """Without accepted drafts, the cost of drafting is at most 1/50 of that of the steps between
    (a step of R rows costs R + 16, a draft 1, a search 2). With enough of them it never pauses.
    """
    for rows, drafts in ((1, 0), (1, 4), (16, 3), (64, 256)):
        controller, drafting, between, searches = DraftController(2.0), 0, 0, 0
        for _ in range(20_000):
            if controller.may_draft(rows):
                controller.record(rows, drafts, 0)
                drafting, searches = drafting + drafts + 2, searches + 1
            else:
                between += rows + 16
        assert searches > 1 and 0 < drafting < between / 50
    for rows, accepted in ((1, 1), (16, 36), (64, 220)):
        controller = DraftController(2.0)
        assert all(
            controller.may_draft(rows) and controller.record(rows, 4 * rows, accepted) is None
            for _ in range(1000)
        )


def test_the_setting_of_a_run_reaches_the_sampler():
    line = "grpo --base-model tiny:addition --dataset addition --reward exact_match"
    words = f"{line} --num-speculative-tokens 4 --kv-cache-tokens 512".split()
    run = parse_run(words, METHODS, RECIPE, options=RunSettings)
    sampler = collect_worker_settings(run.stages).sampler
    assert (sampler.num_speculative_tokens, sampler.kv_cache_tokens) == (4, 512)
    assert sampler.lora_rank == 0
