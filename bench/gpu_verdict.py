"""Write the verdict of the GPU campaign (see gpu.py): what is right, what is slow, what is next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

Row = dict[str, str]

# metric -> whether a larger value is better; only rows of this project with a floor are ranked
RANKED = {"tokens_per_s": True, "both": False, "forward": False, "TFLOP/s": True, "time": False}
OURS = ("ours", "paged")


def number(text: str) -> float | None:
    """Return the number in a cell, or None."""
    try:
        return float(text)
    except ValueError:
        return None


def share_of_floor(row: Row) -> float | None:
    """Return how close a row is to the best possible value on the GPU (1: reached), or None if it
    has no floor.
    """
    value, floor = number(row["value"]), number(row["floor"])
    if value is None or floor is None or value <= 0 or floor <= 0 or row["metric"] not in RANKED:
        return None
    return value / floor if RANKED[row["metric"]] else floor / value


def find_slowest(rows: Sequence[Row], count: int = 3) -> list[tuple[float, Row]]:
    """Return this project's rows that are farthest from their floors."""
    shares = [(share_of_floor(row), row) for row in rows if row["provider"] in OURS]
    known = [(share, row) for share, row in shares if share is not None]
    return sorted(known, key=lambda pair: pair[0])[:count]


def find_beaten(rows: Sequence[Row]) -> list[str]:
    """Return where a peer is faster than this project at the same case, one text each."""
    best: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows:
        value = number(row["value"])
        if row["metric"] in RANKED and value is not None:
            best.setdefault((row["part"], row["case"], row["metric"]), {})[row["provider"]] = value
    texts = []
    for (part, case, metric), values in best.items():
        ours = [values[name] for name in OURS if name in values]
        peers = {name: value for name, value in values.items() if name not in (*OURS, "plain")}
        if not ours or not peers:
            continue
        larger = RANKED[metric]
        name, value = (max if larger else min)(peers.items(), key=lambda pair: pair[1])
        ratio = value / max(ours) if larger else min(ours) / value
        if ratio > 1.0:
            texts.append(f"{part}, {case}: {name} is {ratio:.2f} times as fast ({metric})")
    return texts


def format_verdict(rows: Sequence[Row], device: str) -> str:
    """Return about ten lines of Markdown about the rows of gpu.csv."""
    lines = [f"# Verdict: {device}", ""]
    tests = Counter(
        row["metric"]
        for row in rows
        if row["part"] == "tests" and row["metric"] in ("passed", "failed", "error", "skipped")
    )
    counts = ", ".join(f"{count} {outcome}" for outcome, count in tests.items())
    lines.append(f"- tests: {counts or 'none ran'}")
    bad = [row["case"] for row in rows if row["metric"] in ("failed", "error")]
    lines += [f"- failed: {', '.join(bad[:8])}{' ...' if len(bad) > 8 else ''}"] if bad else []
    unfinished = [
        f"{row['part']} ({row['value']})"
        for row in rows
        if row["metric"] == "status" and row["value"] != "done"
    ]
    lines += [f"- parts that did not end: {', '.join(unfinished)}"] if unfinished else []
    for row in rows:
        value = number(row["value"])
        if row["part"] == "floors" and value is not None and row["case"] != "whole part":
            lines.append(f"- limit: {row['metric']} {value:.4g} {row['unit']}".rstrip())
        if row["metric"] == "kl" and value is not None:
            verdict = "right" if value <= float(row["floor"] or 0.01) else "WRONG"
            lines.append(
                f"- agreement, {row['case']}, {row['provider']}: KL {value:.2g}, {verdict}"
            )
        if row["metric"] == "measured/planned" and value is not None:
            lines.append(f"- memory, {row['provider']}: {value:.2f} of the plan")
        if row["part"] == "step" and row["metric"] == "samples_per_s":
            lines.append(f"- step, {row['case']}: {row['value']} samples/s, {row['note']}")
    for share, row in find_slowest(rows):
        lines.append(
            f"- next: {row['part']}, {row['case']}, {row['metric']} reaches {share:.0%} of its floor"
        )
    lines += [f"- behind: {text}" for text in find_beaten(rows)[:5]]
    return "\n".join(lines) + "\n"
