"""Parts of a fleet without servers: health of a replica, delays of restarts, parallel sizes, modes, shared state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from verl_server.config import AdapterConfig, RecoveryConfig, RolloutMode
from verl_server.errors import BadInputError, ShutDownError
from verl_server.rollout.fleet import Fleet, Observation, Replica, ReplicaState, classify_health, restart_delay_s
from verl_server.rollout.modes import parse_mode, parse_parallel_config, require_devices, server_args_for_mode
from verl_server.rollout.updates import FleetUpdates
from verl_server.router.replica_status import ReplicaStats, ReplicaStatus
from verl_server.router.targets import RoutingTarget, RoutingTargets

RECOVERY = RecoveryConfig(
    stall_timeout_s=10.0,
    hard_stall_timeout_s=100.0,
    backoff_s=1.0,
    max_backoff_s=5.0,
    max_restarts=4,
    restart_window_s=60.0,
)


@pytest.mark.parametrize(
    ("observation", "state"),
    [
        (Observation(False, 0, 0.0, 0.0), ReplicaState.DEAD),
        (Observation(True, 0, 0.0, 999.0), ReplicaState.HEALTHY),  # no requests
        (Observation(True, 3, 999.0, 999.0, is_paused=True), ReplicaState.HEALTHY),
        (
            Observation(True, 3, 30.0, 0.1),
            ReplicaState.HEALTHY,
        ),  # a long prefill without an accelerator uses CPU time
        (Observation(True, 3, 6.0, 6.0), ReplicaState.SUSPECT),
        (Observation(True, 3, 11.0, 11.0), ReplicaState.DEAD),
        (Observation(True, 3, 11.0, 2.0), ReplicaState.HEALTHY),
        (Observation(True, 3, 60.0, 0.0), ReplicaState.SUSPECT),
        (Observation(True, 3, 100.0, 0.0), ReplicaState.DEAD),
    ],
)
def test_replica_without_progress_is_stalled(observation: Observation, state: ReplicaState) -> None:
    assert classify_health(observation, RECOVERY) is state


def test_restart_delays_grow_until_no_restart() -> None:
    deaths: list[float] = []
    delays_s = []
    for now in range(6):
        deaths.append(float(now))
        delays_s.append(restart_delay_s(deaths, float(now), RECOVERY))
    assert delays_s == [0.0, 1.0, 2.0, 4.0, None, None]
    assert restart_delay_s(deaths, 1000.0, RECOVERY) == 0.0, "deaths before the window do not count"
    failed = RECOVERY.max_restarts + 1
    assert restart_delay_s(deaths, 1000.0, RECOVERY, failed) is None, "starts that fail after a long time count"
    with pytest.raises(BadInputError, match="stall_timeout_s"):
        RecoveryConfig(stall_timeout_s=0)


@pytest.mark.parametrize(
    ("args", "devices"),
    [
        ({}, 1),
        ({"tp_size": 4}, 4),
        ({"tp_size": 4, "ep_size": 2}, 4),
        ({"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}, 4),
        ({"tp_size": 8, "nnodes": 2}, 8),
    ],
)
def test_number_of_devices(args: dict[str, Any], devices: int) -> None:
    config = parse_parallel_config(args)
    assert config.devices == devices
    assert config.devices_per_node * config.nnodes == devices
    require_devices(config, 3, 3 * devices)
    with pytest.raises(BadInputError, match=f"3 replicas of {devices} devices each"):
        require_devices(config, 3, 3 * devices - 1)


def test_pipeline_stages_and_data_parallel_copies_take_devices() -> None:
    assert parse_parallel_config({"tp_size": 2, "pp_size": 2, "dp_size": 3}).devices == 12


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"tp_size": 4, "dp_size": 3, "enable_dp_attention": True}, "DP attention divides"),
        ({"tp_size": 4, "ep_size": 3}, "ep_size=3 must divide"),
        ({"tp_size": 3, "nnodes": 2}, "does not spread evenly"),
        ({"dp_size": 2, "nnodes": 2, "tp_size": 2}, "cannot be spread over nnodes"),
    ],
)
def test_impossible_parallel_sizes(args: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        parse_parallel_config(args)


def test_rollout_modes() -> None:
    assert parse_mode("hybrid") is RolloutMode.HYBRID
    with pytest.raises(BadInputError, match="mode must be one of"):
        parse_mode("shared")
    assert server_args_for_mode(RolloutMode.STANDALONE, {"a": 1}) == {"a": 1}
    assert server_args_for_mode(RolloutMode.COLOCATED, {}) == {"enable_memory_saver": True}


class RecordingLauncher:
    """A launcher without devices. Records the replicas that it forgets."""

    def __init__(self) -> None:
        self.forgotten: list[str] = []

    def forget_replica(self, name: str) -> None:
        self.forgotten.append(name)


class RecordingServer:
    """The adapter of a server that only records its shutdown."""

    asynchronous = None

    def __init__(self) -> None:
        self.was_shut_down = False

    def shutdown(self) -> None:
        self.was_shut_down = True


class RecordingTarget:
    """A router that records the statuses that it receives."""

    def __init__(self) -> None:
        self.reports: list[Sequence[ReplicaStatus]] = []

    def update_statuses(self, statuses: Sequence[ReplicaStatus]) -> None:
        self.reports.append(statuses)

    def replica_stats(self, name: str) -> ReplicaStats | None:
        return None

    def wait_until_applied(self) -> None: ...

    def close(self) -> None: ...


def make_fleet(launcher: Any, targets: Sequence[RoutingTarget] = (), **server_args: Any) -> Fleet:
    def make_replica(name: str) -> Replica:
        return Replica(name, launcher, server_args, AdapterConfig(), {})

    return Fleet(make_replica, 0, RoutingTargets(targets), lambda event: None)


def test_servers_of_a_fleet_are_detached_before_they_end() -> None:
    """A replica is called `verl_server_{i}`. `stop_replica` also refuses starts and frees the devices."""
    launcher: Any = RecordingLauncher()
    fleet = make_fleet(launcher)
    first, second = fleet.create_replica(), fleet.create_replica()
    assert [first.name, second.name] == ["verl_server_0", "verl_server_1"]
    servers: list[Any] = [RecordingServer(), RecordingServer()]
    for replica, server in zip((first, second), servers, strict=True):
        fleet.add_server(replica, server)
        assert (replica.state, replica.adapter) == (ReplicaState.HEALTHY, server)
    fleet.end_server(first)
    fleet.stop_replica(second)
    assert [replica.adapter for replica in (first, second)] == [None, None]
    assert all(server.was_shut_down for server in servers)
    assert launcher.forgotten == ["verl_server_1"]
    with pytest.raises(ShutDownError, match="was stopped"):
        second.start(lambda replica, adapter: None)
    fleet.close()


def test_routers_know_of_a_removal_before_the_server_ends() -> None:
    """They would otherwise take the end of the server for the work of one of its requests."""
    steps: list[str] = []

    class OrderedTarget(RecordingTarget):
        def update_statuses(self, statuses: Sequence[ReplicaStatus]) -> None:
            steps.extend("removed" for status in statuses if status.removed)

        def wait_until_applied(self) -> None:
            steps.append("applied")

    class OrderedServer(RecordingServer):
        def shutdown(self) -> None:
            steps.append("ended")

    fleet = make_fleet(RecordingLauncher(), [OrderedTarget()])
    replica, server = fleet.create_replica(), OrderedServer()
    fleet.add_server(replica, server)  # type: ignore[arg-type]
    fleet.drop_replica(replica)
    assert steps == ["removed", "applied", "ended"]
    fleet.close()


def test_weights_of_an_unfinished_load_are_undefined() -> None:
    """A release that fails restores the earlier state. Only a whole update makes torn weights defined."""
    launcher: Any = RecordingLauncher()
    fleet = make_fleet(launcher)
    fleet.set_released_memory(frozenset({"weights"}))
    fleet.undo_release(frozenset(), weights_undefined=False)
    assert (fleet.released_memory, fleet.is_open) == (frozenset(), True)
    fleet.begin_load()
    assert fleet.abandon_update()
    is_open = [fleet.is_open]
    for whole in (False, True):
        fleet.finish_update(whole)
        is_open.append(fleet.is_open)
    assert is_open == [False, False, True]
    fleet.close()


def test_replicas_are_opened_together() -> None:
    """Routers distribute waiting requests over all replicas, also when the replicas change their weight version."""
    target = RecordingTarget()
    fleet = make_fleet(RecordingLauncher(), [target], dp_size=8)
    servers: list[Any] = [RecordingServer() for _ in range(4)]
    for server in servers:
        fleet.add_server(fleet.create_replica(), server)
    unused: Any = None
    updates = FleetUpdates(fleet, unused, unused, RoutingTargets([target]), 1.0)
    assert len(updates.members) == 4
    target.reports.clear()
    fleet.set_admission_paused(True)
    updates.published(7, whole=True, replay=None)
    fleet.set_admission_paused(False)
    assert [[(one.admitted, one.weight_version) for one in report] for report in target.reports] == [
        [(False, 0)] * 4,
        [(False, 7)] * 4,
        [(True, 7)] * 4,
    ]
    assert {one.dp_size for report in target.reports for one in report} == {8}
    fleet.close()
