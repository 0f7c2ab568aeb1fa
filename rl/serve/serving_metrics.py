"""Count the work of a server, and render it for Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    disable_created_metrics,
    generate_latest,
)

# name -> (description, labels)
_COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "requests_total": ("Responses, by route and status.", ("route", "status")),
    "request_seconds_total": ("Seconds spent on responses, by route.", ("route",)),
    "sampled_tokens_total": ("Tokens sampled.", ()),
    "prompt_tokens_total": ("Prompt tokens processed.", ()),
    "trained_tokens_total": ("Tokens of datums in forward and forward_backward calls.", ()),
    "work_total": ("Verbs executed, by verb and outcome.", ("verb", "outcome")),
    "work_seconds_total": ("Seconds spent executing, by verb.", ("verb",)),
    "written_out_total": (
        "Models written to disk to free memory, and models read back, by which.",
        ("which",),
    ),
}
_GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "open_requests": ("Requests in progress.", ()),
    "queued": ("Accepted requests that have not started.", ()),
    "held_bytes": ("Bytes of waiting requests and stored results.", ()),
    "sessions": ("Live sessions.", ()),
    "models": ("Training clients, by location (memory or disk).", ("state",)),
    "samplers": ("Sampling sessions.", ()),
}


class ServingMetrics:
    """Hold counters, which any thread may increase, and gauges, which are read when rendered.

    Every server has its own registry, so that servers of the same process count separately.
    """

    def __init__(self) -> None:
        disable_created_metrics()  # no series <name>_created next to each counter
        self.registry = CollectorRegistry()
        self._series: dict[str, Any] = {
            name: kind(f"whetstone_{name}", text, labels, registry=self.registry)
            for kind, table in ((Counter, _COUNTERS), (Gauge, _GAUGES))
            for name, (text, labels) in table.items()
        }

    def _find(self, name: str, labels: dict[str, str]) -> Any:
        """Return the counter or gauge of that name and those labels."""
        series = self._series[name]
        return series.labels(**labels) if labels else series

    def increment(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Increase a counter by `amount`."""
        self._find(name, labels).inc(amount)

    def set_gauge(self, name: str, function: Callable[[], float], **labels: str) -> None:
        """Set the function that returns the value of a gauge."""
        self._find(name, labels).set_function(function)

    def render(self) -> bytes:
        """Return all counters and gauges in Prometheus' text format 0.0.4."""
        return generate_latest(self.registry)
