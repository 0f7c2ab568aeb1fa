"""Test that alarms with bounded windows equal the formulas over all rows of a stage."""

from __future__ import annotations

import json
import math
import random
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from alarms_brute_force import CHECKS, brute_force

from rl.reporting import AlarmMonitor
from rl.reporting.alarm_monitor import ALARMS

NEEDS = {alarm.name: alarm.required_metrics for alarm in ALARMS}
REMEDIES = {alarm.name: alarm.remedy for alarm in ALARMS}


def make_series(seed: int, steps: int) -> list[dict[str, Any]]:
    """Return rows that drift, jump, omit metrics, and contain null and NaN."""
    draw = random.Random(seed)
    names = sorted({name for names in NEEDS.values() for name in names})
    spread = {name: 10 ** draw.uniform(-4, 2) for name in names}
    level = {name: draw.choice([0.0, 0.2, 1.0, 5.0]) for name in spread}
    rows = []
    for step in range(steps):
        if draw.random() < 0.05:  # the run changes its behavior
            level = {
                name: value * draw.choice([0.05, 0.5, 1.0, 3.0]) for name, value in level.items()
            }
        row: dict[str, Any] = {"step": step}
        for name, middle in level.items():
            value: Any = abs(middle + spread[name] * draw.gauss(0, 0.05))
            odd = draw.random()
            if odd < 0.01:
                continue
            row[name] = None if odd < 0.02 else math.nan if odd < 0.03 else value
        low, high = sorted(draw.choice([0.0, 0.5, 1.0]) for _ in range(2))
        row |= {
            "env/all/reward/min": low, "env/all/reward/max": high,
            "env/all/reward/total": draw.uniform(low, high), "env/all/total_groups": 4,
            "env/all/total_episodes": draw.choice([4, 32]),
            "optim/frac_credited": draw.choice([0.0, 0.7]),
            "env/all/by_group/frac_mixed": draw.choice([0.0, 0.0, 0.4]),
            "sampler/temperature": draw.choice([0.3, 0.8]), "env/all/reward/std": 0.4,
        }  # fmt: skip
        if draw.random() < 0.3:
            row["optim/skipped_nonfinite"] = float(draw.random() < 0.1)
        if draw.random() < 0.3:
            row["optim/critic_grad_norm"] = draw.choice([1.0, 30.0, math.inf])
        if draw.random() < 0.05:
            row["teacher/kl_per_token"] = 0.1
        rows.append(row)
    return rows


def iter_warnings(
    alarms: AlarmMonitor, rows: list[dict[str, Any]]
) -> Iterator[tuple[Mapping[str, float], list[str]]]:
    """Yield the metrics and messages of `alarms`, without remedies."""

    def strip_remedy(text: str) -> str:
        (remedy,) = {r for r in REMEDIES.values() if text.endswith(f". {r}")}
        return text.removesuffix(f". {remedy}")

    for row in rows:
        metrics, output = alarms(row)
        yield metrics, [strip_remedy(text) for text in output]


@pytest.mark.parametrize("seed", range(12))
def test_bounded_windows_say_what_the_formulas_over_all_rows_say(seed: int) -> None:
    rows = make_series(seed, 90)
    expected = brute_force(rows, NEEDS)
    assert list(iter_warnings(AlarmMonitor(), rows)) == expected
    cut = 5 + 7 * seed  # resumed after these rows
    written = [
        json.loads(json.dumps({**row, **metrics}))
        for row, (metrics, _) in zip(rows[:cut], expected, strict=False)
    ]
    assert list(iter_warnings(AlarmMonitor(written), rows[cut:])) == expected[cut:]


def test_the_random_series_set_off_every_alarm_and_leave_each_off_at_times() -> None:
    """Otherwise the equivalence above would show little."""
    on: dict[str, set[float]] = {}
    for seed in range(12):
        for metrics, _ in iter_warnings(AlarmMonitor(), make_series(seed, 90)):
            for name, value in metrics.items():
                on.setdefault(name.removeprefix("alarm/"), set()).add(value)
    assert on == {name: {0.0, 1.0} for name in CHECKS}


def _size(obj: Any, seen: set[int]) -> int:
    """Return the bytes of `obj` and everything it refers to."""
    if id(obj) in seen:
        return 0
    seen.add(id(obj))
    if isinstance(obj, (str, float, int, type(None))):
        return sys.getsizeof(obj)
    inner = list(obj) if hasattr(obj, "__iter__") else []
    inner += list(obj.values()) if isinstance(obj, Mapping) else []
    reference = vars(obj).values() if hasattr(obj, "__dict__") else ()
    return sys.getsizeof(obj) + sum(_size(item, seen) for item in [*inner, *reference])


def test_what_is_kept_and_a_rows_time_do_not_grow_with_the_rows() -> None:
    rows = make_series(3, 200)
    alarms, sizes, seconds = AlarmMonitor(), [], []
    for _ in range(10):
        start = time.process_time()
        for row in rows:
            alarms(row)
        seconds.append(time.process_time() - start)
        sizes.append(_size(alarms, set()))
    assert max(sizes[1:]) < 1.1 * min(sizes[1:]) and max(sizes) < 100_000
    # 200 rows after 1,800 take as long as the first 200
    assert min(seconds[-3:]) < 3 * min(seconds[:3])
