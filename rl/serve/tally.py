"""What a server has done, for Prometheus:
https://prometheus.io/docs/instrumenting/exposition_formats (text, 0.0.4).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

_HELP = {
    "requests_total": ("counter", "Answers, by route and status."),
    "request_seconds_total": ("counter", "Time spent on answers, by route."),
    "sampled_tokens_total": ("counter", "Tokens drawn."),
    "prompt_tokens_total": ("counter", "Prompt tokens read."),
    "trained_tokens_total": ("counter", "Tokens of datums that went forward, or forward and back."),
    "work_total": ("counter", "Verbs that were executed, by verb and outcome."),
    "work_seconds_total": ("counter", "Time spent executing, by verb."),
    "written_out_total": (
        "counter",
        "Models that were written to disk to make room, and read back, by which.",
    ),
    "open_requests": ("gauge", "Requests being answered now."),
    "queued": ("gauge", "Requests that were taken and have not begun."),
    "held_bytes": ("gauge", "Bytes of requests that wait and of answers that are kept."),
    "sessions": ("gauge", "Sessions that are alive."),
    "models": ("gauge", "Training clients, by where they are."),
    "samplers": ("gauge", "Sampling sessions."),
}


class Tally:
    """Counters that any thread adds to, and gauges that are asked for when somebody looks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        self.gauges: dict[str, Callable[[], Mapping[str, float] | float]] = {}

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        key = tuple(sorted(labels.items()))
        with self._lock:
            counts = self._counts.setdefault(name, {})
            counts[key] = counts.get(key, 0.0) + amount

    def value(self, name: str, **labels: str) -> float:
        with self._lock:
            return self._counts.get(name, {}).get(tuple(sorted(labels.items())), 0.0)

    def page(self) -> str:
        """All of it as a scraper reads it."""
        with self._lock:
            counts = {name: dict(found) for name, found in self._counts.items()}
        for name, ask in self.gauges.items():
            found = ask()
            table = found if isinstance(found, Mapping) else {"": found}
            counts[name] = {
                ((("state", label),) if label else ()): value for label, value in table.items()
            }
        lines = []
        for name in sorted(counts):
            kind, text = _HELP[name]
            lines += [f"# HELP whetstone_{name} {text}", f"# TYPE whetstone_{name} {kind}"]
            for key, value in sorted(counts[name].items()):
                labels = ",".join(f'{label}="{_escaped(said)}"' for label, said in key)
                lines.append(
                    f"whetstone_{name}{{{labels}}} {value:g}"
                    if labels
                    else f"whetstone_{name} {value:g}"
                )
        return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
