"""Fixtures and hooks of all tests: small thread counts, no network, the data folder if it exists,
no GPU test without a GPU.
"""

import gc
import json
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from math import inf
from pathlib import Path

# As in the scripts (rl.startup.reduce_gc): imports make a million permanent objects.
gc.set_threshold(50_000)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")

import pytest  # noqa: E402

REPO = Path(__file__).resolve().parent.parent
# Tests are in a folder per package. Some import a helper module, or a case of another package's
# tests.
sys.path += [str(folder) for folder in sorted((REPO / "tests").iterdir()) if folder.is_dir()]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of public data sets and tokenizers (never copied into the project)."""
    path = Path(os.environ.get("WHETSTONE_DATA") or REPO.parent / "shared" / "data")
    if not path.is_dir():
        pytest.skip(f"no data folder at {path}: set WHETSTONE_DATA to one to run this test")
    return path


@pytest.fixture(scope="module")
def browser():
    """Start Chromium, from playwright or the system."""
    api = pytest.importorskip("playwright.sync_api", reason="needs the extra browser")
    installed = shutil.which("chromium") or shutil.which("google-chrome")
    with api.sync_playwright() as playwright:
        try:
            chromium = playwright.chromium.launch(executable_path=installed, args=["--no-sandbox"])
        except api.Error as error:
            pytest.skip(f"no Chromium can be started: {str(error)[:100]}")
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def bubblewrap() -> None:
    """Skip the test if the host cannot run programs in bubblewrap, with its message; under
    `.ci/run` the test fails instead.
    """
    from rl.errors import UserError
    from rl.sandbox import Sandbox

    try:
        Sandbox("bubblewrap", workers=1).close()
    except UserError as error:
        if os.environ.get("WHETSTONE_TEST_SANDBOX") == "1":
            pytest.fail(str(error))
        pytest.skip(str(error))


# Seconds of each file, measured with `make durations`. A worker runs a whole file, and a long file
# that starts last would delay the end: files of unknown length start first, then the longest file.
DURATIONS = json.loads((REPO / "tests" / "durations.json").read_text())
SEED = int(os.environ.get("WHETSTONE_TEST_SEED", "0"))


def pytest_report_header() -> str:
    return f"order of the tests of a file: WHETSTONE_TEST_SEED={SEED}"


# Tests of serve.py are in files with these names: they need the extra `serve`. `.ci/run` installs
# it after `make test`.
SERVER = ("test_serve", "test_endpoint")


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem.startswith(SERVER) or item.get_closest_marker("sdk"):
            item.add_marker(pytest.mark.extras)
    random.Random(SEED).shuffle(items)
    items.sort(key=lambda item: (-DURATIONS.get(item.path.stem, inf), item.path))
    if "campaign" not in config.option.markexpr and not any("::" in word for word in config.args):
        remaining = [item for item in items if item.get_closest_marker("campaign")]
        config.hook.pytest_deselected(items=remaining)
        items[:] = [item for item in items if not item.get_closest_marker("campaign")]
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in gpu_items:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


# Runs in this process get an empty `gc.freeze`.
freeze_objects = gc.freeze


def freeze() -> None:
    """Exclude the objects that exist by now from garbage collection."""
    gc.collect()  # garbage with reference cycles would stay
    freeze_objects()


def pytest_collection_finish() -> None:
    """Freeze all objects so far: each full garbage collection spent half a second on them, and a
    run that ends in this process would unfreeze them. Let runs draw no curves: it takes a second.
    """
    from rl.reporting import metric_plots

    freeze()
    gc.freeze = gc.unfreeze = lambda: None
    metric_plots.draw_curves = write_empty_picture


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Freeze after a file also the objects of the modules that it imported, if they are many: two
    collections of each run searched them.
    """
    yield
    if nextitem is not None and nextitem.path != item.path and len(gc.get_objects()) > 20_000:
        freeze()


def write_empty_picture(source: Path, out: Path, *labels: object) -> Path:
    """Stand in for `draw_curves`, for runs with a picture that no test looks at."""
    out.touch()
    return out


@pytest.fixture
def curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs draw their curves, for a test that looks at the picture."""
    from rl import reporting

    monkeypatch.setattr(reporting.metric_plots, "draw_curves", reporting.draw_curves)


# `make durations` sets this. The workers report to the first process, which writes the file.
MEASURED: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    MEASURED[Path(report.location[0]).stem] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    if "WHETSTONE_WRITE_DURATIONS" in os.environ and not hasattr(session.config, "workerinput"):
        measured = {name: round(seconds) for name, seconds in MEASURED.items() if seconds >= 1.0}
        text = json.dumps(dict(sorted({**DURATIONS, **measured}.items())), indent=1)
        (REPO / "tests" / "durations.json").write_text(text + "\n")
