"""Run every test of the engine, of conversations and of streams again, with a paged cache wherever
the fast decoder is used.
"""

import pytest
import test_sample_stream as streams
import test_sampler_engine as engine
from sampler_models import (  # noqa: F401
    make_request,
    multistep_engine,
    one_thread,
    paged_engine,
    tiny_model,
)
from test_sample_stream import policy  # noqa: F401

from rl.runtime import sampler_versions
from rl.sampler import Engine, make_decoder
from rl.sampler.decoder_fast import FastDecoder

OTHER = {
    "test_the_budget_holds_and_rows_wait_for_it",
    "test_what_can_never_fit_is_an_error_with_numbers",
    # test_sampler_anything.py compares requests alone and in random batches over pages.
    "test_a_sample_does_not_depend_on_the_batch_around_it",
    # These use the generic decoder, or a device.
    "test_a_request_that_fits_is_admitted_again_with_its_partial_sample",
    "test_a_trained_model_sorts_all_its_inputs",
    "test_on_a_gpu_the_same_distribution_is_sampled",
    "test_the_generic_decoder_bounds_the_logits_of_prompts_read_together",
}
PAGE = 4
made = []


def pytest_generate_tests(metafunc):
    """Run each test with device steps over pages, and slowly with single steps. A test counts calls
    of a state, which device steps do not make.
    """
    kinds = ["paged"]
    if "no_row_is_decoded_in_vain" not in metafunc.function.__name__:
        kinds = ["stepped", pytest.param("paged", marks=pytest.mark.slow)]
    metafunc.parametrize("small_pages", kinds, indirect=True)


@pytest.fixture(autouse=True)
def small_pages(monkeypatch, request):
    if getattr(request.node, "callspec", None) and "hf" in request.node.callspec.params.values():
        pytest.skip("the generic decoder keeps no pages")
    kind, more = (
        (multistep_engine, {"steps_per_sync": 3})
        if request.param == "stepped"
        else (paged_engine, {})
    )

    def over_pages(decoder, *args, **settings):
        if type(decoder) is not FastDecoder:
            return Engine(decoder, *args, **settings)
        made.append(kind(decoder, *args, page=PAGE, **settings, **more))
        return made[-1]

    for module in (engine, streams):
        monkeypatch.setattr(module, "Engine", over_pages)
    monkeypatch.setattr(
        sampler_versions,
        "make_engine",
        lambda decoder, cache, kept, sizes, features, **settings: over_pages(
            decoder, idle_pool=kept, sizes=sizes, **settings
        ),
    )
    yield
    for item in made:  # only conversations keep pages
        tables = item._state.block_manager
        assert not len(tables.rows) or item.busy
        held = {page for prompt in tables.prompts for page in prompt.block_table}
        held |= {page for row in range(len(tables.rows)) for page in tables.row_table(row)}
        assert len(tables.pool.ref_counts) - tables.pool.num_free == len(held)
    made.clear()


def _of(module):
    return {
        name: test
        for name, test in vars(module).items()
        if name.startswith("test_") and name not in OTHER
    }


assert not _of(engine).keys() & _of(streams).keys()
globals().update(_of(engine) | _of(streams))


def test_what_can_never_fit_in_whole_pages_is_an_error_with_numbers():
    paged = paged_engine(make_decoder(tiny_model("qwen3")), kv_cache_tokens=51, page=PAGE)
    with pytest.raises(ValueError, match="30-token .* takes 52 tokens.*kv_cache_tokens is 51"):
        paged.add(make_request([1] * 30, max_tokens=20))
