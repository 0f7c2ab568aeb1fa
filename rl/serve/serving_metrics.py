"""Count the work of a server, and render it for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import Metric

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


class _PlainCounter(Counter):
    """Count without the series <name>_created, which prometheus_client adds."""

    def collect(self) -> Iterable[Metric]:
        """Yield the metric."""
        for metric in super().collect():
            metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
            yield metric


class ServingMetrics:
    """Hold counters, which any thread may increase, and gauges, which are read when rendered.

    Every server has its own registry, so that servers of the same process count separately.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._counters = {
            name: _PlainCounter(f"whetstone_{name}", text, labels, registry=self._registry)
            for name, (text, labels) in _COUNTERS.items()
        }
        self._gauges = {
            name: Gauge(f"whetstone_{name}", text, labels, registry=self._registry)
            for name, (text, labels) in _GAUGES.items()
        }

    def increment(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Increase a counter by `amount`."""
        counter = self._counters[name]
        (counter.labels(**labels) if labels else counter).inc(amount)

    def set_gauge(self, name: str, function: Callable[[], float], **labels: str) -> None:
        """Set the function that returns the value of a gauge."""
        gauge = self._gauges[name]
        (gauge.labels(**labels) if labels else gauge).set_function(function)

    def get_value(self, name: str, **labels: str) -> float:
        """Return the value of a counter, 0 if it was never increased."""
        return self._registry.get_sample_value(f"whetstone_{name}", labels) or 0.0

    def render(self) -> bytes:
        """Return all counters and gauges in Prometheus' text format 0.0.4."""
        return generate_latest(self._registry)
