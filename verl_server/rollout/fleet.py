"""`Fleet`: the replicas of a fleet, their states, and the notification of routers and listeners about changes."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.config import MemoryTag
from verl_server.errors import BadInputError, NotReadyError, ServerDiedError, ShutDownError, VerlServerError, to_wire
from verl_server.rollout.health import KEEPS_NO_WEIGHTS, ReplicaState, unavailable_reason
from verl_server.rollout.metrics import FleetCounters
from verl_server.rollout.replica import Replica, StartPreempted
from verl_server.router.replica_status import ReplicaStatus
from verl_server.router.targets import RoutingTargets
from verl_server.weights.update.servers import ReplayFn

logger = logging.getLogger(__name__)

Event = dict[str, Any]
Server = tuple[Replica, HttpServerEngineAdapter]
"""A replica and the adapter of the server that it had at that moment."""

LISTENER_TIMEOUT_S = 10.0
"""Seconds that a listener has for the last events when the fleet ends."""
MAX_THREADS = 2**20
"""No limit: a broadcast of weights begins when all servers load, so no call may wait for the end of another one."""

SERVING = frozenset({ReplicaState.HEALTHY, ReplicaState.SUSPECT})
RUNNING = SERVING | {ReplicaState.STALE}
"""States of a replica whose server runs and takes part in weight updates."""
ENDING = frozenset({ReplicaState.DEAD, ReplicaState.RESTARTING})


class Fleet:
    """The replicas by name, and the state that they share. Attributes are written under `lock` only."""

    def __init__(
        self,
        make_replica: Callable[[str], Replica],
        checkpoint_version: int,
        targets: RoutingTargets,
        on_event: Callable[[Event], None],
    ) -> None:
        self._make_replica, self._on_event, self._targets = make_replica, on_event, targets
        self.checkpoint_version = self.weight_version = checkpoint_version
        """Version of the weights of a new server, and version of the weights that were published last."""
        self.replay: ReplayFn | None = None
        """Loads the published weights into other servers. None when the trainer does not keep them."""
        self.released_memory: frozenset[str] = frozenset()
        """Memory tags that are released."""
        self.admission_paused = False
        """Whether new requests wait in the routers, for an update or a release of memory."""
        self.update_incomplete = False
        """Whether an update has begun to load and was not published: it is in progress, or the weights are torn."""
        self.weights_undefined = False
        """Whether the servers' weights are torn, or were released and not pushed since."""
        self.lock = threading.RLock()
        self.closed = threading.Event()
        self.counters = FleetCounters()
        self.executor = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="verl-server-fleet")
        self._numbers = itertools.count()
        self._replicas: dict[str, Replica] = {}
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._deliver_events, name="verl-server-fleet-events", daemon=True)
        self._listener.start()

    # -- replicas -------------------------------------------------------------------------------------

    @property
    def replicas(self) -> list[Replica]:
        with self.lock:
            return list(self._replicas.values())

    def has(self, replica: Replica) -> bool:
        return self._replicas.get(replica.name) is replica

    def get(self, name: str) -> Replica:
        """The replica of that name. Raises BadInputError."""
        replica = self._replicas.get(name)
        if replica is None:
            raise BadInputError(f"there is no replica {name!r}; the replicas are {sorted(self._replicas)}")
        return replica

    def servers(self) -> list[Server]:
        """The replicas with a running server."""
        with self.lock:
            return [
                (replica, replica.adapter)
                for replica in self.replicas
                if replica.adapter is not None and replica.state in RUNNING
            ]

    def is_used(self, server: Server) -> bool:
        """Whether the server has not been replaced and is not being ended."""
        replica, adapter = server
        return replica.adapter is adapter and replica.state not in ENDING

    def require_servers(self) -> list[Server]:
        """`servers()`. Raises ServerDiedError when there is none; new requests then do not wait for an update."""
        servers = self.servers()
        if not servers:
            self.set_admission_paused(False)
            raise ServerDiedError("no replica of the fleet has a running server")
        return servers

    def serving_adapters(self) -> list[HttpServerEngineAdapter]:
        """The adapters of the replicas that serve requests."""
        with self.lock:
            adapters = [replica.adapter for replica in self.replicas if replica.state in SERVING]
        return [adapter for adapter in adapters if adapter is not None]

    def create_replica(self, name: str | None = None) -> Replica:
        """Add a replica that has no server yet. Raises BadInputError if there is a replica of that `name`."""
        with self.lock:
            if name in self._replicas:
                raise BadInputError(f"there is a replica {name!r} already; choose another name")
            replica = self._make_replica(name or f"verl_server_{next(self._numbers)}")
            replica.weight_version = self.checkpoint_version
            return self._replicas.setdefault(replica.name, replica)

    def drop_replica(self, replica: Replica) -> None:
        """Remove a replica, tell it to the routers, and end its server."""
        with self.lock:
            self._replicas.pop(replica.name, None)
            self.change_state(replica, ReplicaState.REMOVED)
        try:
            self._targets.wait_until_applied()  # no router takes the end of the server for the work of a request
        finally:
            self.stop_replica(replica)

    def add_server(self, replica: Replica, adapter: HttpServerEngineAdapter) -> None:
        """A new server of the replica is ready. It has the weights of its checkpoint."""
        with self.lock:
            if self.closed.is_set() or not self.has(replica):
                raise ShutDownError("the fleet was shut down")
            if self.released_memory:
                raise StartPreempted(f"the fleet released its memory while the server of {replica.name} started")
            replica.use_server(adapter)
            is_current = self.weight_version == self.checkpoint_version and self.replay is None
            replica.weight_version = self.checkpoint_version
            error = None if is_current or self.replay is not None else NotReadyError(KEEPS_NO_WEIGHTS)
            self.change_state(replica, ReplicaState.HEALTHY if is_current else ReplicaState.STALE, error)

    def end_server(self, replica: Replica) -> None:
        """End the process tree of the replica's server, if the replica has a server. Waits for an end in progress."""
        with replica.end_lock:
            with self.lock:
                adapter, replica.adapter = replica.adapter, None
            if adapter is not None:
                try:
                    adapter.shutdown()
                except Exception:  # the replica continues without this server, whatever the error is
                    logger.exception("the server of %s did not shut down cleanly", replica.name)

    def stop_replica(self, replica: Replica) -> None:
        """End the replica's server permanently, also a server that is starting."""
        replica.refuse_starts()
        self.end_server(replica)
        replica.free_devices()

    def record_death(self, replica: Replica) -> None:
        """Record that a server of the replica ended or could not start."""
        with self.lock:
            replica.deaths.append(time.monotonic())

    def record_restart(self, replica: Replica) -> None:
        """Record that a new server replaced an ended server of the replica."""
        with self.lock:
            self.counters.restarts, replica.restarts = self.counters.restarts + 1, replica.restarts + 1

    # -- state of the whole fleet -----------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether its replicas may receive requests."""
        return not self.released_memory and not self.admission_paused and not self.weights_undefined

    def set_released_memory(self, tags: frozenset[str]) -> None:
        """Record the memory tags that are released now.

        Replicas receive no requests while memory is released, nor before released weights were pushed again.
        """
        with self.lock:
            loses_weights = MemoryTag.WEIGHTS.value in tags - self.released_memory
            self.weights_undefined = self.weights_undefined or self.update_incomplete or loses_weights
            self.released_memory = tags
            self.notify(*self.replicas)

    def undo_release(self, released_memory: frozenset[str], weights_undefined: bool) -> None:
        """Restore the state before a release of memory that failed."""
        with self.lock:
            self.weights_undefined = weights_undefined
            self.set_released_memory(released_memory)

    def begin_load(self) -> None:
        """An update begins to load. Until `finish_update` the weights count as incomplete."""
        with self.lock:
            self.update_incomplete = True

    def add_phase_seconds(self, phase: str, seconds: float) -> None:
        """Count time that a weight update spent in `phase`."""
        with self.lock:
            self.counters.phase_s[phase] = self.counters.phase_s.get(phase, 0.0) + seconds

    def finish_update(self, whole: bool) -> None:
        """An update was published, or all weights were loaded again. `whole`: it had every parameter."""
        with self.lock:
            self.update_incomplete, becomes_defined = False, self.weights_undefined and whole
            if becomes_defined:
                self.weights_undefined = False
                self.notify(*self.replicas)

    def abandon_update(self) -> bool:
        """Forget the weights that the trainer keeps, at the end of its use. Returns whether an update loaded in part.

        The weights are then undefined, and replicas receive no requests until a whole update. Replicas that start again
        wait for the next update, because the trainer no longer keeps the published weights.
        """
        with self.lock:
            self.replay = None
            self.admission_paused = False
            self.weights_undefined = self.weights_undefined or self.update_incomplete
            self.notify(*self.replicas)
            return self.update_incomplete

    def set_admission_paused(self, paused: bool) -> None:
        """Set whether new requests wait in the routers."""
        with self.lock:
            if self.admission_paused != paused:
                self.admission_paused = paused
                self.notify(*self.replicas)

    # -- notification -----------------------------------------------------------------------------------

    def change_state(self, replica: Replica, state: ReplicaState, error: VerlServerError | None = None) -> None:
        """Change the state of a replica; notify the routers and the listener. Must be called under the lock."""
        self._set_state(replica, state, error)
        self.notify(replica)

    def change_states(self, states: Mapping[Replica, ReplicaState]) -> None:
        """`change_state` for several replicas. The listener is notified of those that differ from before."""
        for replica in [replica for replica, state in states.items() if replica.state is not state]:
            self._set_state(replica, states[replica], None)
        self.notify(*states)

    def _set_state(self, replica: Replica, state: ReplicaState, error: VerlServerError | None) -> None:
        before, replica.state, replica.error = replica.state, state, error
        replica.failed_starts *= state is not ReplicaState.HEALTHY
        event = {
            "time": time.time(),
            "replica": replica.name,
            "before": before.value,
            "after": state.value,
            "version": replica.weight_version,
            "error": None if error is None else error.message,
        }
        self._events.put(event)
        waits = state is ReplicaState.STALE and error is not None  # it serves nothing until the trainer does something
        level = logging.WARNING if waits else logging.INFO
        logger.log(level, "replica %s: %s -> %s%s", replica.name, before, state, f" ({error.message})" if error else "")

    def notify(self, *replicas: Replica) -> None:
        """Report the statuses of replicas to the routers, all together: the first would get all waiting requests."""
        self._targets.update_statuses([self._status(replica) for replica in replicas])

    def _status(self, replica: Replica) -> ReplicaStatus:
        state = replica.state
        waits_for_update = state is ReplicaState.STALE and (self.replay is None or replica.needs_update)
        stays_in_use = state is not ReplicaState.DRAINING and not waits_for_update
        return ReplicaStatus(
            name=replica.name,
            adapter=None if replica.adapter is None else replica.adapter.asynchronous,
            weight_version=replica.weight_version,
            admitted=state in SERVING and self.is_open,
            suspect=state is ReplicaState.SUSPECT,
            will_serve=stays_in_use and not self.released_memory and not self.weights_undefined,
            removed=state is ReplicaState.REMOVED,
            reason=unavailable_reason(state, self.released_memory, self.weights_undefined, waits_for_update),
            failure=to_wire(replica.error) if state is ReplicaState.FAILED and replica.error else None,
            dp_size=replica.dp_size,
        )

    def _deliver_events(self) -> None:
        """Call the listener, in a separate thread: the listener may call methods of the fleet, also `shutdown`."""
        while (event := self._events.get()) is not None:
            try:
                self._on_event(event)
            except Exception:  # an error of the listener must not end a recovery
                logger.exception("on_event failed")

    def close(self) -> None:
        """Deliver the last events. Call it when no state changes any more."""
        self._events.put(None)
        if threading.current_thread() is not self._listener:
            self._listener.join(LISTENER_TIMEOUT_S)
