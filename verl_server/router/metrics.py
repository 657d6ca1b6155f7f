"""Metrics of one router, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from verl_server.router.dispatcher import Dispatcher

COUNTER_HELP = {
    "requests": "Calls that started a generation, or continued a generation after an abort",
    "finished": "Generations that finished",
    "failed": "Generations that ended with an error",
    "refused": "Requests refused because no replica serves the required weights, or none serves at all",
    "attached": "Calls that received a running generation or a stored result with the same request id",
    "continued": "Lost attempts after which a generation continued from the tokens received so far",
    "restarted": "Lost attempts after which a generation started again without tokens",
    "saved_tokens": "Output tokens that were kept when a replica was lost",
    "output_tokens": "Output tokens of finished generations",
    "prompt_tokens": "Prompt tokens of finished generations",
    "cached_tokens": "Prompt tokens of finished generations that a prefix cache provided",
}
"""Help text of each field of `RouterCounters`."""
GAUGE_HELP = {
    "running_requests": "Requests that run on the replica",
    "tokens_in_flight": "Tokens of the requests that run on the replica",
    "admitted": "1 if the router sends requests to the replica",
    "suspect": "1 if the replica made no progress for a long time, or failed several times in a row",
    "weight_version": "Version of the weights that the replica serves",
}
"""Help text of each gauge, a field of `ReplicaSnapshot`."""


class _RouterCollector(Collector):
    """Reads the metrics of a router whenever they are requested."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def collect(self) -> Iterable[Metric]:
        snapshot = self._dispatcher.snapshot()
        for name, value in asdict(snapshot.counters).items():
            yield CounterMetricFamily(f"verl_router_{name}", COUNTER_HELP[name], value=value)
        yield GaugeMetricFamily(
            "verl_router_queued_requests", "Requests that wait for a replica", value=snapshot.queued_requests
        )
        yield GaugeMetricFamily(
            "verl_router_stored_results",
            "Finished results that a repeated request id still receives",
            value=snapshot.stored_results,
        )
        yield GaugeMetricFamily(
            "verl_router_paused",
            "1 while all requests wait until a trainer resumes the router",
            value=snapshot.is_paused,
        )
        for name, text in GAUGE_HELP.items():
            family = GaugeMetricFamily(f"verl_replica_{name}", text, labels=["replica"])
            for replica in snapshot.replicas:
                family.add_metric([replica.name], float(getattr(replica, name)))
            yield family


def router_metrics(dispatcher: Dispatcher) -> bytes:
    """The metrics of a router, in the text format of Prometheus."""
    return metrics_text(_RouterCollector(dispatcher))


def metrics_text(collector: Collector) -> bytes:
    """The metrics of one collector, in the text format of Prometheus."""
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry)
