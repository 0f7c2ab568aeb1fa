"""Test random workloads through each engine: see sampler_anything.py."""

import collections
import secrets

import pytest
from sampler_anything import (
    KINDS,
    ReferenceSampler,
    decoders_of,
    play,
    same,
    two_models,
    two_weights,
)
from sampler_models import multistep_engine, one_thread, paged_engine, random_prompts  # noqa: F401
from test_sampler_split import on_ranks

from rl.sampler import Engine, SamplingRequest
from rl.types import SamplingParams


@pytest.fixture(scope="module")
def decoders():
    return two_weights()


def run_seeds(kind, seeds):
    result = collections.Counter()
    for seed in seeds:
        print(f"{kind}: seed {seed}")  # shown if it fails
        change = "none" if kind.endswith("adapters") else ("none", "same", "other")[seed % 3]
        result.update(play(kind, seed, decoders_of(kind), change))
    return result


# Each engine and each kind of model; the slow tests have their other pairs.
QUICK = ("plain", "paged", "paged, drafts", "paged, adapters", "stepped, experts", "stepped, LoRA")


def mark_slow(kinds, quick):
    """Return the kinds as parameters, those outside `quick` marked slow."""
    return [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in quick)) for kind in kinds]


@pytest.mark.parametrize("kind", mark_slow(KINDS, QUICK))
def test_whatever_happens_to_an_engine_the_samples_are_the_same(kind):
    """Requests of all kinds, cancelled or moved to another engine, with new weights midway: each
    result equals that of the request alone.
    """
    # the adapters' requests first preempt rows at seed 9
    result = run_seeds(kind, range(9 + (kind in ("paged, adapters", "stepped, adapters"))))
    assert result["compared"] > 200, result
    assert all(result[what] for what in ("dropped", "moved", "begun", "cached")), result
    assert bool(result["changed"]) != kind.endswith("adapters")
    assert result["waited"] or kind.startswith("plain")
    assert (0 < result["ahead"] < result["looks"]) == kind.startswith("stepped")
    assert bool(result["adjusted"]) == kind.startswith("stepped")
    assert (0 < result["accepted"] < result["drafted"]) == kind.endswith("drafts")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_happens_to_an_engine_in_many_workloads(kind):
    result = run_seeds(kind, range(100, 120))
    # requests of different adapters share no blocks
    least = 200 if kind.endswith("adapters") else 600
    assert result["compared"] > 600 and result["cached"] > least, result


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_happens_to_an_engine_in_a_thousand_workloads(kind):
    """The seeds differ each time."""
    first = secrets.randbelow(10**9)
    run_seeds(kind, range(first, first + 1000))


@pytest.mark.parametrize("kind", mark_slow(KINDS[:5], ["stepped"]))
def test_whatever_happens_to_an_engine_of_two_ranks_the_samples_are_the_same(kind):
    """Each rank runs the same workload; each result equals that of a single rank with only this
    request.
    """
    models = two_models()

    def run(team):
        whole, split, result = two_weights(models), two_weights(models, team), collections.Counter()
        for seed in range(6):
            change = ("none", "same", "other")[seed % 3]
            result.update(play(kind, seed, whole, change, split))
        return result

    first, second = on_ranks(2, run)
    assert first == second and first["compared"] > 200
    assert all(first[what] for what in ("dropped", "changed", "moved", "begun")), first
    assert first["waited"] or kind.startswith("plain")
    assert bool(first["accepted"]) == kind.endswith("drafts")
    assert bool(first["ahead"]) == (kind == "stepped")


def test_a_prompt_of_a_row_that_waited_through_new_weights_is_read_anew(decoders):
    """The preempted row resumes. A later request for the same prompt starts from the new weights'
    logits.
    """
    old, new = decoders
    engine = paged_engine(old, (3,), page=4, kv_cache_tokens=32)
    engine.expects_lengths = False
    first, second = random_prompts([4, 5])
    params = SamplingParams(max_tokens=20, stop=[])
    engine.add(SamplingRequest(prompt=first, params=params))
    waiting = engine.add(SamplingRequest(prompt=second, problem=1, params=params))
    while not engine.preemptions:
        engine.step()
    engine.change_weights(new, 1)
    while engine._preempted:
        engine.step()
    assert waiting in engine.partial_samples()
    late = SamplingRequest(prompt=second, problem=2, params=SamplingParams(max_tokens=2, stop=[]))
    number = engine.add(late)
    finished = {}
    while engine.busy:
        finished.update({done.request_id: done.result() for done in engine.step()})
    same(finished[number].sequences[0], ReferenceSampler(new)(late)[0])


@pytest.mark.parametrize("kind", [Engine, paged_engine, multistep_engine])
def test_two_that_go_on_with_a_conversation_both_reuse_it(kind, decoders):
    """Both requests arrive at once and extend the same turn with different tokens."""
    single, engine = ReferenceSampler(decoders[0]), kind(decoders[0], (3,))
    params = SamplingParams(max_tokens=6, stop=[])
    first = SamplingRequest(prompt=random_prompts([30])[0], params=params, conversation="one")
    engine.add(first)
    text = [*first.prompt, *engine.run()[0].sequences[0].tokens]
    nexts = [
        SamplingRequest(prompt=[*text, *more], problem=i, params=params, conversation="one")
        for i, more in enumerate([(5, 9), (8,)])
    ]
    for request in nexts:
        engine.add(request)
    for request, response in zip(nexts, engine.run(), strict=True):
        same(response.sequences[0], single(request)[0])
    # 36 tokens, of which the last was not fed: two full chunks
    assert len(text) == 36 and engine.counters.prefix_cached_tokens == 2 * 32
