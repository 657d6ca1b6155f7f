"""The replicas of a fleet, the states that they are in, and who is told of a change."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.config import MemoryTag
from verl_server.errors import BadInputError, ShutDownError, VerlServerError
from verl_server.rollout.health import ReplicaState
from verl_server.rollout.replica import Replica, StartPreempted
from verl_server.router.targets import ReplicaStatus, RoutingTargets
from verl_server.weights.update.servers import ReplayFn

logger = logging.getLogger(__name__)

Event = dict[str, Any]

LISTENER_S = 10.0
"""That a listener may take for the last events when the fleet ends."""

SERVING = frozenset({ReplicaState.HEALTHY, ReplicaState.SUSPECT})
UP = SERVING | {ReplicaState.STALE}
WEIGHTS = frozenset({MemoryTag.WEIGHTS.value})


@dataclass
class Tally:
    """Since the start."""

    deaths: int = 0
    restarts: int = 0
    given_up: int = 0
    updates: int = 0
    phase_s: dict[str, float] = field(default_factory=dict)
    """Seconds that weight updates took, by phase."""


class Fleet:
    """Replicas by name. State is changed under `lock` only."""

    def __init__(
        self,
        make: Callable[[str], Replica],
        first_version: int,
        targets: RoutingTargets,
        on_event: Callable[[Event], None],
    ) -> None:
        self._make, self._on_event, self._targets = make, on_event, targets
        self.first_version = self.version = first_version
        """Of the weights that a new server has; of those that are published."""
        self.replay: ReplayFn | None = None
        """Brings a replica to the published version."""
        self.asleep: frozenset[str] = frozenset()
        """Memory tags that are released."""
        self.holding = False
        """New requests wait until an update has landed."""
        self.loading = False
        """An update began to load and has not been published: over, or torn."""
        self.undefined = False
        """The served weights are torn, or were released and not pushed since."""
        self.lock = threading.RLock()
        self.closed = threading.Event()
        self.tally = Tally()
        self.pool = ThreadPoolExecutor(64, thread_name_prefix="verl-server-fleet")
        self._numbers = itertools.count()
        self._replicas: dict[str, Replica] = {}
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._deliver, name="verl-server-fleet-events", daemon=True)
        self._listener.start()

    @property
    def replicas(self) -> list[Replica]:
        with self.lock:
            return list(self._replicas.values())

    def has(self, replica: Replica) -> bool:
        return self._replicas.get(replica.name) is replica

    def named(self, name: str) -> Replica:
        """Raises BadInputError."""
        replica = self._replicas.get(name)
        if replica is None:
            raise BadInputError(f"there is no replica {name!r}; there are {sorted(self._replicas)}")
        return replica

    def up(self) -> list[tuple[Replica, HttpServerEngineAdapter]]:
        """Those whose servers run."""
        with self.lock:
            return [(one, one.adapter) for one in self.replicas if one.adapter is not None and one.state in UP]

    def serving(self) -> Sequence[HttpServerEngineAdapter]:
        return [one.adapter for one in self.replicas if one.adapter is not None and one.state in SERVING]

    def new(self) -> Replica:
        with self.lock:
            replica = self._make(f"verl_server_{next(self._numbers)}_0")
            replica.version = self.first_version
            self._replicas[replica.name] = replica
        return replica

    def forget(self, replica: Replica) -> None:
        with self.lock:
            self._replicas.pop(replica.name, None)

    def begin(self, replica: Replica, adapter: HttpServerEngineAdapter) -> None:
        """A server of the replica is ready, with the weights of its checkpoint."""
        with self.lock:
            if self.closed.is_set() or not self.has(replica):
                raise ShutDownError("the fleet was shut down")
            if self.asleep:
                raise StartPreempted(f"the memory of {replica.name} was lent while it started")
            replica.adapter = adapter
            current = self.version == self.first_version and self.replay is None
            replica.version = self.first_version
            self.turn(replica, ReplicaState.HEALTHY if current else ReplicaState.STALE)

    def sleep(self, tags: frozenset[str]) -> None:
        """These are released now; nobody is given requests while any is, nor before its weights are whole again."""
        with self.lock:
            self.undefined = self.undefined or self.loading or bool(WEIGHTS & (tags - self.asleep))
            self.asleep = tags
            self._tell_all()

    def defined(self, whole: bool) -> None:
        """An update was published, or all weights were loaded again."""
        with self.lock:
            self.loading, changed = False, self.undefined and whole
            if changed:
                self.undefined = False
                self._tell_all()

    def hold(self, holding: bool) -> None:
        """Whether new requests wait."""
        with self.lock:
            if self.holding != holding:
                self.holding = holding
                self._tell_all()

    def _tell_all(self) -> None:
        for replica in self.replicas:
            self.tell(replica)

    @property
    def is_open(self) -> bool:
        """Whether its replicas are given requests at all."""
        return not self.asleep and not self.holding and not self.undefined

    def turn(self, replica: Replica, state: ReplicaState, error: VerlServerError | None = None) -> None:
        """Change a state, and tell the router and whoever listens. Under the lock."""
        before, replica.state = replica.state, state
        replica.error = error
        event = {
            "time": time.time(),
            "replica": replica.name,
            "before": before.value,
            "after": state.value,
            "version": replica.version,
            "error": None if error is None else error.message,
        }
        logger.info("replica %s: %s -> %s%s", replica.name, before, state, f" ({error.message})" if error else "")
        self.tell(replica)
        self._events.put(event)

    def _deliver(self) -> None:
        """Events to whoever listens, in a thread of its own: a listener may call the fleet, shutdown included."""
        while (event := self._events.get()) is not None:
            try:
                self._on_event(event)
            except Exception:  # the listener's own mistake must not end a recovery
                logger.exception("on_event failed")

    def close(self) -> None:
        """When nothing changes any more."""
        self._events.put(None)
        if threading.current_thread() is not self._listener:
            self._listener.join(LISTENER_S)

    def tell(self, replica: Replica) -> None:
        """The routers, how it stands with a replica."""
        state = replica.state
        waits = state is ReplicaState.STALE and (self.replay is None or replica.needs_update)
        self._targets.tell(
            ReplicaStatus(
                name=replica.name,
                engine=None if replica.adapter is None else replica.adapter.asynchronous,
                version=replica.version,
                admitted=state in SERVING and self.is_open,
                suspect=state is ReplicaState.SUSPECT,
                expected=state is not ReplicaState.DRAINING and not waits and not self.asleep and not self.undefined,
                gone=state in (ReplicaState.REMOVED, ReplicaState.FAILED),
            )
        )
