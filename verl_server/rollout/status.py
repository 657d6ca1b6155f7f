"""The public state of a fleet: `ReplicaView`, a live view of one replica, and `FleetStatus`, a frozen copy."""

from __future__ import annotations

from dataclasses import dataclass

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.errors import VerlServerError
from verl_server.rollout.fleet import Fleet, Replica, ReplicaState
from verl_server.router.dispatcher import Dispatcher
from verl_server.router.process.supervisor import RouterSupervisor
from verl_server.router.replica_status import RouterCounters
from verl_server.router.targets import RoutingTargets
from verl_server.server.process import ServerPids


class ReplicaView:
    """One replica of a fleet, read-only. Its properties show the present state."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def __repr__(self) -> str:
        return f"<replica {self.name}: {self.state}, weight version {self.weight_version}>"

    @property
    def name(self) -> str:
        """Name, which stays when the server is replaced."""
        return self._replica.name

    @property
    def state(self) -> ReplicaState:
        return self._replica.state

    @property
    def weight_version(self) -> int:
        """Version of the weights that its server has."""
        return self._replica.weight_version

    @property
    def restarts(self) -> int:
        """Number of times that a new server replaced an ended server."""
        return self._replica.restarts

    @property
    def error(self) -> VerlServerError | None:
        """The reason of the states DEAD, RESTARTING and FAILED."""
        return self._replica.error

    @property
    def adapter(self) -> HttpServerEngineAdapter | None:
        """Adapter of its server, with every endpoint. None while it has no running server."""
        return self._replica.adapter

    @property
    def base_url(self) -> str | None:
        """URL of its server. None while it has no running server."""
        adapter = self._replica.adapter
        return None if adapter is None else adapter.base_url

    @property
    def pids(self) -> ServerPids | None:
        """Process ids of its server, on the server's machine. None while it has no running server."""
        adapter = self._replica.adapter
        return None if adapter is None else adapter.pids


@dataclass(frozen=True)
class ReplicaInfo:
    """State of one replica at one moment."""

    name: str
    state: ReplicaState
    weight_version: int
    """Version of the weights that its server has."""
    base_url: str | None
    """URL of its server. None without a running server."""
    pids: ServerPids | None
    """Process ids of its server. None without a running server."""
    restarts: int
    """Number of times that a new server replaced an ended server."""
    admitted: bool
    """Whether the router of this process sends requests to it."""
    running_requests: int
    """Number of requests that run on it, from all routers."""
    tokens_in_flight: int
    """Number of tokens of the requests from the router of this process: prompts and received output."""


@dataclass(frozen=True)
class RouterProcessInfo:
    """State of the fleet's router process at one moment."""

    url: str
    pid: int
    restarts: int
    """Number of times that the router process was lost and started again."""


@dataclass(frozen=True)
class FleetStatus:
    """State of a fleet at one moment."""

    replicas: tuple[ReplicaInfo, ...]
    weight_version: int
    """Version of the weights that were published last."""
    released_memory: frozenset[str]
    """Memory tags that are released."""
    queued_requests: int
    """Number of requests that wait for a replica in the router of this process."""
    router_counters: RouterCounters
    """Counters of the router of this process."""
    router_process: RouterProcessInfo | None
    """The router process. None for a fleet without one."""

    def replica(self, name: str) -> ReplicaInfo:
        """The replica of that name. Raises KeyError."""
        for replica in self.replicas:
            if replica.name == name:
                return replica
        raise KeyError(name)


def fleet_status(
    fleet: Fleet, dispatcher: Dispatcher, targets: RoutingTargets, router_process: RouterSupervisor | None
) -> FleetStatus:
    """Collect the state of a fleet from its parts."""
    snapshot = dispatcher.snapshot()
    replicas = []
    for view in map(ReplicaView, fleet.replicas):
        routed = snapshot.replica(view.name)
        replicas.append(
            ReplicaInfo(
                name=view.name,
                state=view.state,
                weight_version=view.weight_version,
                base_url=view.base_url,
                pids=view.pids,
                restarts=view.restarts,
                admitted=routed is not None and routed.admitted,
                running_requests=targets.replica_stats(view.name).running_requests,
                tokens_in_flight=0 if routed is None else routed.tokens_in_flight,
            )
        )
    process = None
    if router_process is not None:
        process = RouterProcessInfo(router_process.url, router_process.pid, router_process.restarts)
    return FleetStatus(
        replicas=tuple(replicas),
        weight_version=fleet.weight_version,
        released_memory=fleet.released_memory,
        queued_requests=snapshot.queued_requests,
        router_counters=snapshot.counters,
        router_process=process,
    )
