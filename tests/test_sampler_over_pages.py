"""Every test of the engine, of conversations and of streams once more, with the cache in pages wherever the fast decoder decodes."""

import pytest
import test_sample_stream as streams
import test_sampler_engine as engine
from sampler_models import one_thread  # noqa: F401
from test_sample_stream import policy  # noqa: F401

from rl.clients import versions
from rl.sampler import Engine, PagedEngine
from rl.sampler.decoder_fast import FastDecoder

OTHER = {"test_the_budget_holds_and_rows_wait_for_it"}  # looks into rectangles: the budget in pages is test_sampler_paged.py's
PAGE = 4
made = []


def over_pages(decoder, *args, **settings):
    if type(decoder) is not FastDecoder:
        return Engine(decoder, *args, **settings)
    made.append(PagedEngine(decoder, *args, page=PAGE, **settings))
    return made[-1]


@pytest.fixture(autouse=True)
def pages(monkeypatch, request):
    if getattr(request.node, "callspec", None) and "hf" in request.node.callspec.params.values():
        pytest.skip("the generic decoder keeps no pages")
    for module in (engine, streams, versions):
        monkeypatch.setattr(module, "Engine", over_pages)
    yield
    for one in made:  # nothing stays behind but what conversations keep
        tables = one._state.tables
        held = {page for part in (*tables.rows, *tables.prompts) for page in part.pages}
        assert len(tables.pool.held) - tables.pool.free == len(held)
    made.clear()


def _of(module):
    return {name: test for name, test in vars(module).items() if name.startswith("test_") and name not in OTHER}


assert not _of(engine).keys() & _of(streams).keys()
globals().update(_of(engine) | _of(streams))
