"""Check what the host does for a sampler on a GPU, without a GPU (host_counts.py)."""

import pytest
from host_counts import (
    LAYERS,
    count_prefill_launches,
    decode_launches,
    graph_captures,
    measure_idle_seconds,
    run_schedule,
    selection_launch,
)
from sampler_models import one_thread  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize(
    ("lora", "of_rows", "launches"), [(False, False, 271), (True, False, 478), (True, True, 478)]
)
def test_the_launches_of_a_decode_step(lora, of_rows, launches):
    assert decode_launches(lora, of_rows) == launches


def test_a_prefill_writes_the_cache_with_one_launch_per_layer_and_batch_and_one_copy():
    writes, layers_of_batches = count_prefill_launches()
    assert layers_of_batches == 7 * LAYERS and writes == layers_of_batches + 1


@pytest.mark.parametrize("rows", [64, 1024])
def test_the_selection_has_a_program_per_row_and_three_iterations(rows):
    assert selection_launch(rows) == (1.0, 3)


def test_the_default_budget_preempts_no_row():
    schedule = run_schedule(64)
    assert (schedule["preempted"], schedule["recomputed"], schedule["steps"]) == (0, 0, 2029)
    assert (schedule["chunks"], schedule["ahead"]) == (247, 204)


def test_requests_that_wait_cause_no_step_outside_graphs():
    schedule = run_schedule(128, kv_cache_tokens=1024 * 2048)
    assert (schedule["outside"], schedule["steps"]) == (0, 1589)
    assert (schedule["chunks"], schedule["ahead"]) == (194, 149)


def test_no_graph_is_captured_after_the_first_chunk():
    assert graph_captures() == (0, "thread_local")


@pytest.mark.parametrize("rows", [16, 256])
def test_the_device_waits_for_the_host_only_between_two_calls_of_step(rows):
    assert measure_idle_seconds(rows, ahead=True, chunks=12) == 0
    assert measure_idle_seconds(rows, ahead=False, chunks=12) > 0
