"""What a fleet counts, and its metrics in the text format of Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from verl_server.router.metrics import metrics_text

if TYPE_CHECKING:
    from verl_server.rollout.fleet import Fleet


@dataclass
class FleetCounters:
    """What a fleet has counted since its start."""

    deaths: int = 0
    """Number of servers that ended or counted as stalled."""
    restarts: int = 0
    """Number of servers that were started again."""
    given_up: int = 0
    """Number of times that a replica was given up because its servers ended too often."""
    updates: int = 0
    """Number of weight updates that were published."""
    phase_s: dict[str, float] = field(default_factory=dict)
    """Seconds spent in weight updates, by phase."""


class _FleetCollector(Collector):
    """Reads the metrics of a fleet whenever they are requested."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterable[Metric]:
        counters = self._fleet.counters
        for name, text, value in (
            ("deaths", "Servers that ended or counted as stalled", counters.deaths),
            ("restarts", "Servers that were started again", counters.restarts),
            (
                "given_up",
                "Replicas that are not started again because their servers ended too often",
                counters.given_up,
            ),
            ("updates", "Weight updates that were published", counters.updates),
        ):
            yield CounterMetricFamily(f"verl_fleet_{name}", text, value=value)
        seconds = CounterMetricFamily("verl_fleet_sync_seconds", "Seconds spent in weight updates", labels=["phase"])
        for phase, spent_s in sorted(counters.phase_s.items()):
            seconds.add_metric([phase], spent_s)
        yield seconds
        yield GaugeMetricFamily(
            "verl_fleet_weight_version",
            "Version of the weights that were published last",
            value=self._fleet.weight_version,
        )
        states = GaugeMetricFamily("verl_fleet_replicas", "Number of replicas by state", labels=["state"])
        for state, count in sorted(Counter(replica.state.value for replica in self._fleet.replicas).items()):
            states.add_metric([state], count)
        yield states


def fleet_metrics(fleet: Fleet) -> bytes:
    """The metrics of a fleet, without those of its routers."""
    return metrics_text(_FleetCollector(fleet))
