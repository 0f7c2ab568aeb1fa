"""Test that docs/reference/ matches the code, and that its page of metrics lists the metrics of
runs.
"""

import re
from pathlib import Path

import pytest

import rl
from rl.algorithms import METHODS
from rl.config.fields import get_fields
from rl.reporting.alarm_monitor import ALARMS
from tools import reference_pages
from tools.metric_names import METRICS, SECTIONS, is_documented

ROOT = Path(__file__).resolve().parents[2]
PREFIXES = {name.partition("/")[0] for name in METRICS if "/" in name}
# Strings of the package that look like metrics: prefixes and parts of composed names.
PARTS = {"env/all", "test/env", "test/env/all", "test/greedy", "test/greedy/all"}
PARTS |= {"optim/kl_ref", "optim/approx_kl"}


@pytest.mark.parametrize("name", reference_pages.PAGES)
def test_a_page_is_what_the_code_says(name):
    committed = (reference_pages.FOLDER / f"{name}.md").read_text()
    assert committed == reference_pages.PAGES[name](), f"write it: {reference_pages.COMMAND}"


def test_the_folder_holds_these_pages_alone():
    names = sorted(path.stem for path in reference_pages.FOLDER.iterdir())
    assert names == sorted(reference_pages.PAGES)


@pytest.mark.parametrize("method", METHODS)
def test_every_setting_of_a_method_is_listed(method):
    text = (reference_pages.FOLDER / "settings.md").read_text()
    assert not [
        name for name in get_fields(METHODS[method].Settings) if f"| `{name}` |" not in text
    ]


def metric_literals() -> set[str]:
    """Return the metric names in strings of the package, except composed ones."""
    name = re.compile(rf'(?<!f)"((?:{"|".join(PREFIXES)})/[a-z_0-9./]*[a-z_0-9])"')
    files = (ROOT / "rl").rglob("*.py")
    return {match for path in files for match in name.findall(path.read_text())} - PARTS


def test_every_metric_of_the_package_is_explained():
    names = metric_literals()
    assert len(names) > 80
    missing = sorted(name for name in names if not is_documented(name))
    assert not missing, "explain these metrics in tools/metric_names.py"


def test_every_metric_of_a_run_is_explained(tmp_path):
    small = {"batch_size": 2, "group_size": 2, "max_tokens": 3, "eval_limit": 2, "steps": 1}
    small |= {"self_test": False}
    rows = rl.train("ppo", output_dir=tmp_path / "run", quiet=True, **small).metrics
    names = {name for row in rows for name in row}
    assert len(names) > 50
    missing = sorted(name for name in names if not is_documented(name, {"exact_match"}))
    assert not missing, "explain these metrics in tools/metric_names.py"


def test_the_alarms_are_those_of_the_package():
    names = [alarm.name for alarm in ALARMS]
    assert [name.removeprefix("alarm/") for name in METRICS if name.startswith("alarm/")] == names
    table = (
        (ROOT / "docs" / "report.md").read_text().partition("## Alarms")[2].partition("\n## ")[0]
    )
    listed = [
        name
        for row in re.findall(r"^\| (`[^|]*) \|", table, re.M)
        for name in re.findall(r"`([\w.]+)`", row)
    ]
    assert listed == names


def test_every_metric_has_a_section():
    assert {reference_pages.find_section(name) for name in METRICS} == set(SECTIONS)


def test_a_name_that_no_row_has_is_seen():
    assert not is_documented("optim/grad_norms") and not is_documented("env/all")
    assert is_documented("env/gsm8k/by_group/frac_mixed") and is_documented("test/a-b/loss")
    for name in ("env/all/frac_truncatd", "test/env/all/frac_truncatd", "env/all/reward/totl"):
        assert not is_documented(name)
    for name in ("env/all/frac_truncated", "test/env/gsm8k/frac_truncated", "async/age/3"):
        assert is_documented(name)
    assert not is_documented("async/age/x")


def test_names_of_a_user_stand_for_the_capitals():
    for name in ("env/all/brevity", "test/env/gsm8k/brevity", "time/reward/brevity"):
        assert is_documented(name, {"brevity"}) and not is_documented(name)
