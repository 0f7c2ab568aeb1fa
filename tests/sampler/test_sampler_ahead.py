"""Test that the host reads the results of the device only after the device has worked.

The device is simulated: launched steps run only when the host waits for them.
"""

from __future__ import annotations

import numpy as np
import pytest
from sampler_models import (  # noqa: F401
    crowded_engines,
    make_request,
    multistep_engine,
    one_thread,
    random_prompts,
    tiny_model,
)
from test_sampler_stepped import make_tight_engine, run_requests, same

from rl.sampler import Engine, make_decoder
from rl.sampler.cuda_graphs import CUDAGraphRunner
from rl.sampler.device_steps import DeviceSteps


@pytest.fixture
def events(monkeypatch):
    """Return the events in order: "launched", and "waited" for a sync."""
    results, queue = [], []
    run = CUDAGraphRunner.run
    wait = DeviceSteps._start_copy

    def launch(*inputs):
        results.append("launched")
        queue.append(inputs)

    def waited(*inputs):
        results.append("waited")
        while queue:
            run(*queue.pop(0))
        return wait(*inputs)

    monkeypatch.setattr(CUDAGraphRunner, "run", launch)
    monkeypatch.setattr(DeviceSteps, "_start_copy", waited)
    return results


@pytest.fixture(scope="module")
def decoder():
    return make_decoder(tiny_model("qwen3"), kind="fast")


@pytest.mark.parametrize("seed", range(6))
def test_the_samples_are_the_same_however_late_the_device_is(decoder, events, seed):
    """Groups, stops, temperatures, few pages and few rows. A sync that is too early would return
    the tokens of the previous sync.
    """
    engine, requests = make_tight_engine(np.random.default_rng(seed), decoder)
    same(run_requests(engine, requests), run_requests(Engine(decoder, (3,)), requests))
    assert engine._device_steps.num_syncs == events.count("launched") == events.count("waited")
