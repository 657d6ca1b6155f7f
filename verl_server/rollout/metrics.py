"""What a router has counted, for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from verl_server.rollout.fleet import Fleet
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


class _FleetCollector(Collector):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterable[Metric]:
        tally = self._fleet.tally
        for name, words, value in (
            ("deaths", "Servers that ended or were wedged", tally.deaths),
            ("restarts", "Servers that were started again", tally.restarts),
            ("given_up", "Replicas that died too often", tally.given_up),
            ("updates", "Weight updates that were published", tally.updates),
        ):
            yield CounterMetricFamily(f"verl_fleet_{name}", words, value=value)
        seconds = CounterMetricFamily("verl_fleet_sync_seconds", "Time in weight updates", labels=["phase"])
        for phase, spent in sorted(tally.phase_s.items()):
            seconds.add_metric([phase], spent)
        yield seconds
        yield GaugeMetricFamily("verl_fleet_weight_version", "Published last", value=self._fleet.version)
        states = GaugeMetricFamily("verl_fleet_replicas", "Replicas by state", labels=["state"])
        for state, count in sorted(Counter(one.state.value for one in self._fleet.replicas).items()):
            states.add_metric([state], count)
        yield states


def exposition(core: Dispatcher) -> bytes:
    """A router's metrics in Prometheus' text format."""
    return _text(_RouterCollector(core))


def fleet_exposition(fleet: Fleet) -> bytes:
    """A fleet's, without its routers'."""
    return _text(_FleetCollector(fleet))


def _text(collector: Collector) -> bytes:
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry)
