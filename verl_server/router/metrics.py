"""Metrics of one router, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from verl_server.router.dispatcher import Dispatcher
    from verl_server.router.replica_pool import Replica

WORDS = {
    "requests": "Samples that were asked for",
    "finished": "Samples that were finished",
    "failed": "Samples that raised an error",
    "refused": "Requests refused because no replica serves what they need",
    "attached": "Calls that attached to a sample that was there already",
    "continued": "Samples that went on with another replica from the tokens that they had",
    "restarted": "Samples that began again with another replica",
    "saved_tokens": "Tokens that were not lost with their replica",
    "output_tokens": "Tokens generated",
    "prompt_tokens": "Tokens of prompts",
    "cached_tokens": "Tokens of prompts that a prefix cache had",
}


class _RouterCollector(Collector):
    def __init__(self, core: Dispatcher) -> None:
        self._core = core

    def collect(self) -> Iterable[Metric]:
        for name, value in asdict(self._core.counters).items():
            yield CounterMetricFamily(f"verl_router_{name}", WORDS[name], value=value)
        yield GaugeMetricFamily("verl_router_waiting", "Requests without a replica yet", value=self._core.waiting)
        gauges: dict[str, tuple[str, Callable[[Replica], float]]] = {
            "requests": ("Requests in flight", lambda one: len(one.tokens)),
            "tokens": ("Tokens in flight", lambda one: sum(one.tokens.values())),
            "admitted": ("Whether it is given requests", lambda one: int(one.load.admitted)),
            "suspect": ("Whether it has been quiet for long", lambda one: int(one.load.suspect)),
            "weight_version": ("Version of its weights", lambda one: one.load.version),
        }
        for name, (words, value_of) in gauges.items():
            family = GaugeMetricFamily(f"verl_replica_{name}", words, labels=["replica"])
            for one in self._core.replicas.values():
                family.add_metric([one.name], value_of(one))
            yield family


def router_metrics(dispatcher: Dispatcher) -> bytes:
    """The metrics of a router, in the text format of Prometheus."""
    return metrics_text(_RouterCollector(dispatcher))


def metrics_text(collector: Collector) -> bytes:
    """The metrics of one collector, in the text format of Prometheus."""
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry)
