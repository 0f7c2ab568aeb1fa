"""Write the verdict of the GPU campaign (see gpu.py): what is right, what is slow, what is next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

Row = dict[str, str]

# metric -> whether a larger value is better; only rows of this project with a floor are ranked
RANKED = {"tokens_per_s": True, "both": False, "forward": False, "TFLOP/s": True, "time": False}
OURS = ("ours", "ours_saved", "paged")
NOT_PEERS = ("plain", "kept 0", "ours_entropy", "ours_frozen", "torch_frozen")  # other work


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


def find_slowest(rows: Sequence[Row], count: int = 4) -> list[tuple[float, Row]]:
    """Return this project's row of each part that is farthest from its floor, the farthest part
    first. policy_loss is left out: its goal is microseconds, of which the host takes most.
    """
    worst: dict[str, tuple[float, Row]] = {}
    for row in rows:
        ranked = row["provider"] in OURS and row["case"] != "policy_loss"
        share = share_of_floor(row) if ranked else None
        if share is not None and (row["part"] not in worst or share < worst[row["part"]][0]):
            worst[row["part"]] = share, row
    return sorted(worst.values(), key=lambda pair: pair[0])[:count]


def find_beaten(rows: Sequence[Row]) -> list[str]:
    """Return where a peer is faster than this project at the same case, one text each. The peers of
    a part have a part of their own. Kernels are compared within a memory class, with which their
    notes begin: those that hold [T, V], the others.
    """
    best: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows:
        value = number(row["value"])
        if row["metric"] in RANKED and value is not None:
            memory = row["note"].split(",")[0]
            key = row["case"], row["metric"], memory if memory in ("flat", "logits") else ""
            best.setdefault(key, {})[row["provider"]] = value
    texts = []
    for (case, metric, _), values in best.items():
        ours = [values[name] for name in OURS if name in values]
        peers = {name: value for name, value in values.items() if name not in (*OURS, *NOT_PEERS)}
        if not ours or not peers:
            continue
        larger = RANKED[metric]
        name, value = (max if larger else min)(peers.items(), key=lambda pair: pair[1])
        ratio = value / max(ours) if larger else min(ours) / value
        if ratio > 1.0:
            texts.append(f"{case}: {name} is {ratio:.2f} times as fast ({metric})")
    return texts


def join(texts: Sequence[str], count: int = 6) -> str:
    """Join texts with semicolons. Beyond `count`, say how many more there are."""
    more = [f"{len(texts) - count} more"] if len(texts) > count else []
    return "; ".join([*texts[:count], *more])


def host_shares(rows: Sequence[Row]) -> dict[str, float]:
    """Return the share of a paged decode step that the GPU waits for the host, by case."""
    shares = (row for row in rows if (row["metric"], row["provider"]) == ("host_share", "paged"))
    return {row["case"]: number(row["value"]) or 0.0 for row in shares}


def list_next(
    failed_tests: list[str], wrong: list[str], unfinished: list[str], rows: Sequence[Row]
) -> list[str]:
    """Return what to do next, the most important first: what is wrong, what was not measured, then
    the parts farthest from their floors.
    """
    steps = [f"mend the failed tests ({len(failed_tests)})"] if failed_tests else []
    steps += ["find where sampler and learner disagree"] if wrong else []
    steps += [f"run again with --part {' '.join(unfinished)}"] if unfinished else []
    waits = host_shares(rows)
    for share, row in find_slowest(rows):
        if share < 0.7:
            host = row["part"] == "decode" and waits.get(row["case"], 0.0) > 0.3
            cause = ", the host's work first" if host else ""
            steps.append(f"speed up {row['part']} ({row['case']}){cause}")
    if not find_slowest(rows):
        steps.append("run the parts that have floors, with --part")
    return steps or ["nothing that was measured is below 70% of its floor"]


def format_verdict(rows: Sequence[Row], device: str) -> str:
    """Return at most ten lines of Markdown about the rows of gpu.csv, below a title: what is right,
    what is slow, what to do next. A line without rows is left out.
    """
    kinds = ("passed", "failed", "error", "skipped")
    tests = [row for row in rows if row["part"] == "tests" and row["value"] == "1"]
    outcomes = Counter(row["metric"] for row in tests if row["metric"] in kinds)
    failed_tests = [row["case"] for row in tests if row["metric"] in ("failed", "error")]
    ends = [row for row in rows if row["metric"] == "status" and row["value"] != "done"]
    broken = [row for row in rows if row["metric"] == "failed" and row["part"] != "tests"]
    agreement = [row for row in rows if row["metric"] == "kl" and number(row["value"]) is not None]
    # not <=: a KL that is not a number is wrong
    wrong = [row for row in agreement if not float(row["value"]) <= float(row["floor"] or 0.01)]
    shares = [(share, case) for case, share in host_shares(rows).items()]

    def kl(rows: Sequence[Row]) -> str:
        return join([f"{r['case']}, {r['provider']}: KL {float(r['value']):.2g}" for r in rows])

    right = [row for row in agreement if row not in wrong]
    failures = [f"{row['part']} ({row['value']})" for row in ends] + failed_tests
    failures += [f"{r['part']}, {r['case']}, {r['provider']} ({r['value']})" for r in broken]
    plans = [row for row in rows if row["metric"] == "measured/planned"]
    steps = [row for row in rows if (row["part"], row["metric"]) == ("step", "samples_per_s")]
    limits = [row for row in rows if row["part"] == "floors" and row["case"] != "whole part"]
    limits = [row for row in limits if number(row["value"]) is not None]
    wrong_cases, unfinished = [row["case"] for row in wrong], [row["part"] for row in ends]
    reached = [
        f"{r['part']}, {r['case']}, {r['metric']} reaches {share:.0%} of its floor"
        for share, r in find_slowest(rows)
    ]
    figures = [f"{r['metric']} {float(r['value']):.4g} {r['unit']}".rstrip() for r in limits]
    host = [f"{share:.0%} of a step at {case}" for share, case in sorted(shares)[-1:]]
    verdicts = [f"WRONG in {kl(wrong)}"] * bool(wrong) + [f"right in {kl(right)}"] * bool(right)
    lines = {
        "tests": ", ".join(f"{n} {outcome}" for outcome, n in outcomes.items()) or "none ran",
        "failed": join(failures),
        "sampler and learner": "; ".join(verdicts),
        "memory": join([f"{r['provider']}: {float(r['value']):.2f} of it" for r in plans]),
        "limits": ", ".join(figures),
        "step": join([f"{r['case']}: {r['value']} samples/s, {r['note']}" for r in steps]),
        "host": "; ".join(host),
        "slow": join(reached),
        "behind": join(find_beaten(rows), 4),
        "next": join(list_next(failed_tests, wrong_cases, unfinished, rows), 4),
    }
    listed = (f"- {name}: {text}\n" for name, text in lines.items() if text)
    return f"# Verdict: {device}\n\n{''.join(listed)}"
