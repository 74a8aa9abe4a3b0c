"""Prometheus metrics of one server, in a registry of its own. Names follow vLLM's with the prefix `zhilight:`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from zhilight.engine.client import AsyncEngine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TTFT = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
_BETWEEN = (0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
_WHOLE = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)

_ENGINE_GAUGES = {
    "running": ("zhilight:num_requests_running", "Sequences the engine is running."),
    "waiting": ("zhilight:num_requests_waiting", "Sequences waiting to be admitted."),
    "kv_usage": ("zhilight:kv_cache_usage_perc", "Share of the KV cache in use, from 0 to 1."),
}
_ENGINE_COUNTERS = {
    "prompt_tokens": ("zhilight:prompt_tokens", "Prompt tokens processed."),
    "generation_tokens": ("zhilight:generation_tokens", "Tokens generated."),
    "prefix_query_tokens": ("zhilight:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_hit_tokens": ("zhilight:prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "preemptions": ("zhilight:num_preemptions", "Times a running sequence was preempted."),
    "aborts": ("zhilight:num_aborts", "Requests aborted before their end."),
    "steps": ("zhilight:engine_steps", "Steps of the engine."),
    "schedule_seconds": ("zhilight:engine_schedule_seconds", "Seconds of choosing steps and building their arrays."),
    "host_seconds": ("zhilight:engine_host_seconds", "Seconds of the engine's other work on the host."),
    "device_seconds": ("zhilight:engine_device_seconds", "Seconds of waiting for the device (on a CPU: of computing)."),
    "kv_faults": ("zhilight:kv_faults", "Times that the KV blocks' bookkeeping was found wrong and rebuilt."),
}


class EngineCollector:
    """Reads the engine's own figures when the metrics are scraped."""

    def __init__(self, engine: AsyncEngine, model_name: str):
        self._engine = engine
        self._labels = [model_name]

    def collect(self) -> Iterable[Metric]:
        stats = self._engine.stats()
        for field, (name, text) in _ENGINE_GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric(self._labels, getattr(stats, field))
            yield gauge
        for field, (name, text) in _ENGINE_COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric(self._labels, getattr(stats, field))
            yield counter


class ServerMetrics:
    """Counters and histograms that the routes feed."""

    def __init__(self, engine: AsyncEngine, model_name: str):
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(EngineCollector(engine, model_name))
        self._model_name = model_name

        def histogram(name: str, text: str, buckets: tuple) -> Histogram:
            metric = Histogram(name, text, ["model_name"], buckets=buckets, registry=self.registry)
            return metric.labels(model_name)

        self.time_to_first_token = histogram(
            "zhilight:time_to_first_token_seconds", "Seconds from a request's arrival to its first token.", _TTFT)
        self.inter_token_latency = histogram(
            "zhilight:inter_token_latency_seconds", "Seconds between two outputs of a sequence.", _BETWEEN)
        self.end_to_end_latency = histogram(
            "zhilight:e2e_request_latency_seconds", "Seconds from a request's arrival to its end.", _WHOLE)
        self.prompt_length = histogram("zhilight:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.generation_length = histogram(
            "zhilight:request_generation_tokens", "Tokens generated for a request.", _TOKENS)
        self._outcomes = Counter("zhilight:request_success", "Requests by how they ended: stop, length, abort, error, "
                                 "rejected.", ["model_name", "finished_reason"], registry=self.registry)
        self._http = Counter("zhilight:http_requests", "HTTP requests.", ["method", "handler", "status"],
                             registry=self.registry)
        self.connections = Gauge("zhilight:http_connections", "Open client connections.", registry=self.registry)
        for reason in ("stop", "length", "abort", "error", "rejected"):
            self._outcomes.labels(model_name, reason)

    def count_outcome(self, reason: str) -> None:
        self._outcomes.labels(self._model_name, reason).inc()

    def count_http(self, method: str, handler: str, status: int) -> None:
        self._http.labels(method, handler, str(status)).inc()

    def text(self) -> bytes:
        """The exposition format that Prometheus scrapes."""
        return generate_latest(self.registry)
