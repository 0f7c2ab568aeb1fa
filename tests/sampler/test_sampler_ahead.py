"""Test what the host does while the device works: it selects the next requests and copies their
tokens, and only then waits.

The device is simulated: launched steps run only when the host waits for them.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampler_models import (  # noqa: F401
    crowded_engines,
    make_request,
    multistep_engine,
    one_thread,
    random_prompts,
    tiny_model,
)
from test_sampler_stepped import make_tight_engine, run_requests, same

from rl.sampler import Engine, SamplingRequest, make_decoder
from rl.sampler.cuda_graphs import CUDAGraphRunner
from rl.sampler.decode_state import PromptBatch
from rl.sampler.device_steps import DeviceSteps
from rl.sampler.paged_state import PagedState
from rl.types import SamplingParams


@pytest.fixture
def events(monkeypatch):
    """Return the events in order: "launched", ("brought", sequences), "waited" for a sync, ("read",
    number of sequences, number of these copied ahead).
    """
    results, queue = [], []
    run = CUDAGraphRunner.run
    wait = DeviceSteps.copy_results
    bring = PagedState.copy_ahead
    read = PagedState._prefill_whole

    def launch(*inputs):
        results.append("launched")
        queue.append(inputs)

    def waited(*inputs):
        results.append("waited")
        while queue:
            run(*queue.pop(0))
        return wait(*inputs)

    def brought(self, sequences):
        assert len(queue) == 1  # the device has work
        results.append(("brought", [tuple(item) for item in sequences]))
        bring(self, sequences)

    def reads(self, batch, tables):
        assert not queue
        results.append(
            (
                "read",
                len(batch.prompts),
                sum(tuple(prompt) in self._copied_tokens for prompt in batch.prompts),
            )
        )
        return read(self, batch, tables)

    monkeypatch.setattr(CUDAGraphRunner, "run", launch)
    monkeypatch.setattr(DeviceSteps, "copy_results", waited)
    monkeypatch.setattr(PagedState, "copy_ahead", brought)
    monkeypatch.setattr(PagedState, "_prefill_whole", reads)
    return results


@pytest.fixture(scope="module")
def decoder():
    return make_decoder(tiny_model("qwen3"), kind="fast")


def test_the_next_requests_are_prepared_before_the_wait(decoder, events):
    """The order is launched, brought, waited at each sync. Requests after the first batch are on
    the device before a row is free.
    """
    prompts = random_prompts([6, 9, 4, 12, 7, 5])
    requests = [
        make_request(prompt, 2, max_tokens=6 + 3 * i, stop=[5], problem=i)
        for i, prompt in enumerate(prompts)
    ]
    result = run_requests(multistep_engine(decoder, page=4, max_rows=4, steps_per_sync=5), requests)
    same(result, run_requests(Engine(decoder), requests))
    looks = [i for i, event in enumerate(events) if event == "launched"]
    assert len(looks) > 4
    for i in looks:
        assert events[i + 1][0] == "brought" and events[i + 2] == "waited"
    reads = [event[1:] for event in events if event[0] == "read"]
    assert reads[0] == (2, 0)
    assert len(reads) > 2
    assert all(count == before for count, before in reads[1:])


def test_rows_that_wait_for_pages_are_prepared_first(decoder, events):
    """Preempted rows resume before new requests, by a prefill of prompt and response."""
    engine = multistep_engine(decoder, page=4, kv_cache_tokens=40, max_rows=6, steps_per_sync=2)
    requests = [
        make_request(prompt, 2, max_tokens=20, stop=[], problem=i)
        for i, prompt in enumerate(random_prompts([9, 6, 5]))
    ]
    same(run_requests(engine, requests), run_requests(Engine(decoder), requests))
    begun = [
        item
        for event in events
        if event[0] == "brought"
        for item in event[1]
        if list(item) not in [r.prompt for r in requests]
    ]
    assert engine.preemptions and begun and any(event[0] == "read" and event[2] for event in events)


def test_as_much_is_prepared_as_there_may_be_room_for(decoder, events):
    """All four rows may become free within a sync, so the prompts of the next four samples are
    copied, unless cached.
    """
    engine = multistep_engine(decoder, page=4, max_rows=4, steps_per_sync=4)
    prompts = random_prompts([6] * 9)
    for i, (which, n) in enumerate([(0, 1), (1, 3), (1, 2), (2, 1), (2, 1), (3, 1)]):
        engine.add(make_request(prompts[which], n, max_tokens=30, stop=[], problem=i))
    engine.step()
    engine.step()
    (brought,) = [event[1] for event in events if event[0] == "brought"]
    # two samples of a cached prompt, two of a new prompt
    assert brought == [tuple(prompts[2])]


def test_what_is_prepared_has_a_bound_and_is_sent_once(decoder, monkeypatch):
    from rl.sampler import device_steps, paged_state

    sent, send = [], paged_state.copy_to_device
    monkeypatch.setattr(device_steps, "_PREFETCH_TOKENS", 10)
    monkeypatch.setattr(
        paged_state,
        "copy_to_device",
        lambda numbers, device: sent.append(tuple(numbers)) or send(numbers, device),
    )
    engine = multistep_engine(decoder, page=4, max_rows=2, steps_per_sync=2)
    prompts = random_prompts([6, 7, 8, 9, 5])
    for i, prompt in enumerate(prompts):
        engine.add(
            SamplingRequest(prompt=prompt, problem=i, params=SamplingParams(max_tokens=12, stop=[]))
        )
    for _ in range(3):
        engine.step()
    # two free rows; 17 tokens exceed the bound of 10
    assert list(engine._state._copied_tokens) == [tuple(prompts[2]), tuple(prompts[3])]
    engine.max_rows = 5
    monkeypatch.setattr(engine, "_may_admit", lambda: False)
    engine.step()
    assert list(engine._state._copied_tokens) == [tuple(prompts[2]), tuple(prompts[3])]
    assert sent.count(tuple(prompts[2])) == 1


@pytest.mark.parametrize("seed", range(6))
def test_the_samples_are_the_same_however_late_the_device_is(decoder, events, seed):
    """Groups, stops, temperatures, few pages and few rows. A sync that is too early would return
    the tokens of the previous sync.
    """
    engine, requests = make_tight_engine(np.random.default_rng(seed), decoder)
    same(run_requests(engine, requests), run_requests(Engine(decoder, (3,)), requests))
    assert engine._device_steps.num_syncs == events.count("launched") == events.count("waited")


def test_a_brought_prompt_is_read_as_any_other(decoder):
    """With batches of copied prompts, padded to equal lengths, and batches with only some prompts
    copied.
    """
    prompts = [tuple(prompt) for prompt in random_prompts([5, 9, 9, 7])]
    expected = decoder.forward_prompts(PromptBatch(prompts, [None] * 4), None)
    present = [torch.tensor(prompt) for prompt in prompts]
    for inputs in (present, [*present[:2], None, None]):
        assert torch.equal(
            decoder.forward_prompts(PromptBatch(prompts, [None] * 4, device_tokens=inputs), None),
            expected,
        )
