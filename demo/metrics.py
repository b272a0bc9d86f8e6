"""What is going on in Prometheus' words, and whether requests are taken."""

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from demo.refusals import ERRORS
from engine import Engine
from engine.histogram import Histogram

WHY = {
    "loading": "The model is loading.",
    "draining": "The server is about to end: running answers finish, new ones are refused.",
    "stopped": "The engine has stopped.",
}


def health(engine: Engine) -> dict[str, Any]:
    """`live`: the engine can still come to serve; `ready`: it takes requests; `why`: a sentence where it does not."""
    snapshot = engine.snapshot()
    status, ready = snapshot["worker"], engine.ready
    why = None if ready else snapshot["error"] or WHY.get(status, f"The engine is {status}.")
    return {"status": status, "live": status != "stopped", "ready": ready, "why": why}


class EngineCollector:
    """The engine's snapshot and counts, and the errors that visitors were told of; called at each scrape."""

    def __init__(self, engine: Engine):
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        """One family a number."""
        snapshot: dict[str, Any] = self._engine.snapshot()
        yield from self._gauges(snapshot)
        yield from self._counters(snapshot["totals"])
        telemetry = self._engine.telemetry
        yield histogram("kvscope_first_token_seconds", "from the request to its first token", telemetry.first_token)
        yield histogram("kvscope_token_gap_seconds", "between two tokens of one answer", telemetry.gaps)
        ends = CounterMetricFamily("kvscope_requests_ended", "requests by how they ended", labels=["reason"])
        for reason, count in telemetry.ends.copy().items():
            ends.add_metric([reason], count)
        yield ends
        yield from ERRORS.collect()
        if lease := snapshot["lease"]:
            yield CounterMetricFamily(
                "kvscope_lease_handovers", "leases that another one went on for", lease["handovers"]
            )

    def _gauges(self, snapshot: dict[str, Any]) -> Iterable[Metric]:
        queue, cache = snapshot["queue"], snapshot["cache"]
        speed = snapshot["throughput"]["tokens_per_second"]
        yield GaugeMetricFamily("kvscope_ready", "1 while requests are taken", float(self._engine.ready))
        yield GaugeMetricFamily("kvscope_requests_waiting", "requests in line", queue["waiting"])
        yield GaugeMetricFamily("kvscope_requests_running", "requests in the batch", queue["running"])
        yield GaugeMetricFamily("kvscope_batch_size_peak", "most rows ever decoded together", queue["peak_batch_size"])
        yield GaugeMetricFamily("kvscope_cache_used_bytes", "cache bytes that hold tokens", cache["used_bytes"])
        yield GaugeMetricFamily("kvscope_cache_allocated_bytes", "cache bytes reserved", cache["allocated_bytes"])
        yield GaugeMetricFamily("kvscope_tokens_per_second", "tokens a second over the last seconds", speed)

    def _counters(self, totals: dict[str, int]) -> Iterable[Metric]:
        yield CounterMetricFamily("kvscope_requests", "requests so far", totals["requests"])
        yield CounterMetricFamily("kvscope_tokens", "tokens generated so far", totals["tokens"])
        yield CounterMetricFamily("kvscope_worker_restarts", "times the worker was started again", totals["restarts"])


def histogram(name: str, help_text: str, values: Histogram) -> Metric:
    """`values` as Prometheus takes them, where each bucket holds the smaller ones, too."""
    bounds = [*map(str, values.bounds), "+Inf"]
    buckets = list(zip(bounds, accumulate(list(values.counts)), strict=True))
    return HistogramMetricFamily(name, help_text, buckets=buckets, sum_value=values.sum)
