"""Count the work of a server, and render it for Prometheus.

The format is https://prometheus.io/docs/instrumenting/exposition_formats (text, 0.0.4).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

_METRICS = {
    "requests_total": ("counter", "Responses, by route and status."),
    "request_seconds_total": ("counter", "Seconds spent on responses, by route."),
    "sampled_tokens_total": ("counter", "Tokens sampled."),
    "prompt_tokens_total": ("counter", "Prompt tokens processed."),
    "trained_tokens_total": ("counter", "Tokens of datums in forward and forward_backward calls."),
    "work_total": ("counter", "Verbs executed, by verb and outcome."),
    "work_seconds_total": ("counter", "Seconds spent executing, by verb."),
    "written_out_total": (
        "counter",
        "Models written to disk to free memory, and models read back, by which.",
    ),
    "open_requests": ("gauge", "Requests in progress."),
    "queued": ("gauge", "Accepted requests that have not started."),
    "held_bytes": ("gauge", "Bytes of waiting requests and stored results."),
    "sessions": ("gauge", "Live sessions."),
    "models": ("gauge", "Training clients, by location (memory or disk)."),
    "samplers": ("gauge", "Sampling sessions."),
}


class ServingMetrics:
    """Hold counters, which any thread may increase, and gauges, which are read when rendered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        self.gauges: dict[str, Callable[[], Mapping[str, float] | float]] = {}

    def increment(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Increase a counter by `amount`."""
        key = tuple(sorted(labels.items()))
        with self._lock:
            counts = self._counters.setdefault(name, {})
            counts[key] = counts.get(key, 0.0) + amount

    def get_value(self, name: str, **labels: str) -> float:
        """Return the value of a counter, 0 if it was never increased."""
        with self._lock:
            return self._counters.get(name, {}).get(tuple(sorted(labels.items())), 0.0)

    def render(self) -> str:
        """Return all counters and gauges as Prometheus text."""
        with self._lock:
            counts = {name: dict(values) for name, values in self._counters.items()}
        for name, read_gauge in self.gauges.items():
            values = read_gauge()
            table = values if isinstance(values, Mapping) else {"": values}
            counts[name] = {
                ((("state", label),) if label else ()): value for label, value in table.items()
            }
        lines = []
        for name in sorted(counts):
            kind, text = _METRICS[name]
            lines += [f"# HELP whetstone_{name} {text}", f"# TYPE whetstone_{name} {kind}"]
            for key, value in sorted(counts[name].items()):
                labels = ",".join(
                    f'{label}="{_escape_label(label_value)}"' for label, label_value in key
                )
                lines.append(
                    f"whetstone_{name}{{{labels}}} {value:g}"
                    if labels
                    else f"whetstone_{name} {value:g}"
                )
        return "\n".join(lines) + "\n"


def _escape_label(text: str) -> str:
    """Escape a label value."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
