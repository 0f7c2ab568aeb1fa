"""Test the slots of adapters in steps of a device: what rebuilds their tables, and what stays on the
host.
"""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from sampler_models import (  # noqa: F401
    add_lora,
    make_request,
    multistep_engine,
    one_thread,
    random_prompts,
    run_requests,
    tiny_model,
)
from test_sampler_mixed import check

from kernels.adapter_table import TILE_ROWS
from kernels.lora_ops import MAX_RANK
from rl.sampler import MultiAdapterDecoder, make_decoder
from rl.sampler.paged_state import PagedState

PROMPTS = random_prompts([5, 9, 7])


@pytest.fixture(scope="module")
def base():
    return make_decoder(tiny_model("qwen3"), kind="fast")


def adapt(base, rank=4, targets=("q_proj", "down_proj"), seed=0, dtype=torch.float32):
    """Return a decoder of a random adapter on the base."""
    torch.manual_seed(seed)
    model = add_lora(tiny_model("qwen3"), list(targets), r=rank, lora_alpha=rank)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)
    return make_decoder(model, kind="fast", base=base)


def sample(engine):
    """Sample from each adapter by its number, and from the base, in a batch; check the samples."""
    requests = [
        make_request(prompt, 2, max_tokens=9, stop=[], problem=i, adapter_id=number)
        for number in engine.decoder.decoders
        for i, prompt in enumerate(PROMPTS)
    ]
    for request, response in zip(requests, run_requests(engine, requests), strict=True):
        check(engine.decoder.decoders[request.adapter_id], request, response)


def make_engine(base, *adapters):
    """Return an engine that samples from the base (0) and these adapters (1, 2, ..)."""
    decoder = MultiAdapterDecoder(base)
    for number, adapter in enumerate([base, *adapters]):
        decoder.add_adapter(number, adapter, 0)
    return multistep_engine(decoder, (3,), page=4)


def test_another_adapter_of_the_same_sizes_rebuilds_nothing(base):
    """Also one on fewer matrices, or of a smaller rank. The tables keep their addresses."""
    engine = make_engine(base, adapt(base))
    sample(engine)
    slots = engine.decoder.adapter_slots
    tables = [module.table for module in engine.decoder.iter_adaptable_modules()]
    others = [adapt(base, seed=1), adapt(base, 2, seed=2), adapt(base, 3, ("q_proj",), seed=3)]
    for number, adapter in enumerate(others, 1):  # the first replaces what had its number
        engine.decoder.add_adapter(number, adapter, 1)
        sample(engine)
    engine.keep_weights([0, 3])
    sample(engine)
    engine.decoder.add_adapter(7, adapt(base, seed=4), 1)
    sample(engine)
    assert slots.layout == 1
    present = [module.table for module in engine.decoder.iter_adaptable_modules()]
    assert all(mine is other for mine, other in zip(present, tables, strict=True))


@pytest.mark.parametrize(
    "change", [{"rank": 40}, {"targets": ("o_proj",)}, {"targets": ("lm_head",)}, {"count": 9}]
)
def test_more_room_is_made_for_what_does_not_fit(base, change):
    engine = make_engine(base, adapt(base))
    sample(engine)
    settings = dict(change)
    for seed in range(settings.pop("count", 1)):
        adapter = adapt(base, seed=seed, **settings)
        engine.decoder.add_adapter(2 + seed, adapter, 0)
    sample(engine)
    assert engine.decoder.adapter_slots.layout == 2


def test_running_rows_keep_their_adapters_when_more_room_is_made(base):
    """Their tiles are the same, in new memory."""
    engine = make_engine(base, adapt(base))
    requests = [
        make_request(prompt, 2, max_tokens=30, stop=[], problem=i, adapter_id=i % 2)
        for i, prompt in enumerate(PROMPTS)
    ]
    for request in requests:
        engine.add(request)
    engine.step(), engine.step()
    engine.decoder.add_adapter(2, adapt(base, 40), 0)
    for request, response in zip(requests, engine.run(), strict=True):
        check(engine.decoder.decoders[request.adapter_id], request, response)
    assert engine.decoder.adapter_slots.layout == 2


@pytest.mark.parametrize("change", [{"rank": MAX_RANK + 1}, {"dtype": torch.bfloat16}])
def test_rows_of_what_no_slot_can_hold_run_on_the_host(base, change, monkeypatch):
    """Only while such rows are there."""
    decodes, decode = [], PagedState.decode
    monkeypatch.setattr(PagedState, "decode", lambda *args: decodes.append(1) or decode(*args))
    engine = make_engine(base, adapt(base))
    sample(engine)
    assert not decodes
    engine.decoder.add_adapter(2, adapt(base, **change), 0)
    sample(engine)
    assert decodes
    decodes.clear()
    engine.keep_weights([0, 1])
    sample(engine)
    assert not decodes and engine.decoder.adapter_slots.layout == 1


def test_the_base_alone_after_adapters_that_were_removed(base):
    """As in the engine after one that was closed. The tables remain, without any adapter; then one
    of another dtype takes them over, also after one whose rank no slot can hold.
    """
    engine = make_engine(base, adapt(base))
    sample(engine)
    engine.keep_weights([])
    engine.decoder.add_adapter(3, base, 1)
    sample(engine)
    assert engine.decoder.adapter_slots.layout == 1
    engine.decoder.add_adapter(4, adapt(base, MAX_RANK + 1), 1)
    sample(engine)
    engine.decoder.add_adapter(5, adapt(base, dtype=torch.bfloat16), 1)
    sample(engine)
    slots = engine.decoder.adapter_slots
    assert slots.layout == 2 and slots.holds(np.array([3, 5])) and not slots.holds(np.array([4]))


def test_weights_that_were_removed_are_freed(base):
    first = adapt(base)
    engine = make_engine(base, first, adapt(base, seed=1))
    sample(engine)
    matrix = weakref.ref(first.weights.buffers["layers.0.qkv.lora_a"])
    engine.keep_weights([0, 2])
    del first
    gc.collect()
    assert matrix() is None


def test_each_row_with_an_adapter_is_in_one_tile_of_its_slot(base):
    engine = make_engine(base, *(adapt(base, seed=seed) for seed in range(5)))
    slots, rng = engine.decoder.adapter_slots, np.random.default_rng(0)
    slots.update(engine.decoder.names, 256)
    assert [slots.find_slots(np.arange(6))[i] == 0 for i in range(6)] == [True] + [False] * 5
    for _ in range(200):
        rows = int(rng.choice([1, 2, 4, 8, 16, 24, 64, 256]))
        used = rng.integers(0, 8, int(rng.integers(1, rows + 1)))
        tiles = slots.make_tiles(used, rows)
        assert tiles.shape == tuple(slots.select_tiles(rows).shape) == (len(tiles), 1 + TILE_ROWS)
        pairs = [(row, tile[0]) for tile in tiles for row in tile[1:].tolist() if row >= 0]
        assert sorted(pairs) == [(row, slot) for row, slot in enumerate(used) if slot]
        assert all((tile[1:] < 0).all() for tile in tiles if tile[0] == 0)
