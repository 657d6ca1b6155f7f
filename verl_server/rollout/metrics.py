"""Metrics of a fleet, in the text format of Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from verl_server.router.metrics import metrics_text

if TYPE_CHECKING:
    from verl_server.rollout.fleet import Fleet


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


def fleet_exposition(fleet: Fleet) -> bytes:
    """A fleet's, without its routers'."""
    return metrics_text(_FleetCollector(fleet))
