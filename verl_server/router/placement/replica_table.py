"""`ReplicaTable`: the replicas of one router with their states, and the choice of the replica of a request."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection

from verl_server.config import RouterConfig
from verl_server.errors import BadInputError, NotReadyError, ServerDiedError, VerlServerError
from verl_server.router.placement.load_index import LoadIndex
from verl_server.router.placement.policy import RoutingRequest
from verl_server.router.placement.routed_replica import GenerationServer, RoutedReplica
from verl_server.router.replica_status import ReplicaStatus
from verl_server.router.snapshot import RouterCounters

MAX_REASONS = 8
"""Maximum number of replicas that the message of an error names."""


class ReplicaTable:
    """The replicas of one router, and the replica of each session."""

    def __init__(self, config: RouterConfig, counters: RouterCounters) -> None:
        """`counters.refused` is counted here."""
        self._config, self._counters = config, counters
        self.replicas: dict[str, RoutedReplica] = {}
        """Replicas that have a server, by name."""
        self._index = LoadIndex(config.overload_factor)
        self._session_replicas: OrderedDict[str, str] = OrderedDict()
        self._awaited: set[str] = set()
        """Names of the replicas that are not admitted and will serve without an action of the user."""
        self._unavailable: dict[str, ReplicaStatus] = {}
        """The last status of each replica that does not serve until the user acts, and of each failed replica."""

    @property
    def num_admitted(self) -> int:
        """Number of admitted replicas."""
        return self._index.num_replicas

    # -- states -------------------------------------------------------------------------------------

    def apply_status(self, status: ReplicaStatus) -> None:
        """Bring a replica to the state that the fleet reports."""
        replica = self.replicas.get(status.name)
        self._unavailable.pop(status.name, None)
        if not status.removed and (status.reason or status.failure is not None):
            self._unavailable[status.name] = status
        if replica is not None and status.removed:
            replica.is_removed = True
        if status.removed or status.failure is not None:
            self.remove(status.name)
        elif status.adapter is not None and (replica is None or replica.server is not status.adapter):
            self.add(
                status.name,
                status.adapter,
                status.weight_version,
                admitted=status.admitted,
                will_serve=status.will_serve,
                dp_size=status.dp_size,
            )
        elif replica is None:
            self._set_awaited(status.name, status.will_serve)
        else:
            if status.adapter is None:
                replica.lost.set()
            self.update(
                status.name,
                weight_version=status.weight_version,
                admitted=status.admitted,
                suspect=status.suspect,
                will_serve=status.will_serve,
            )

    def add(
        self,
        name: str,
        server: GenerationServer,
        weight_version: int,
        *,
        admitted: bool,
        will_serve: bool,
        dp_size: int,
    ) -> None:
        """Add a replica, or replace the server of a known replica. `dp_size`: number of its data parallel ranks."""
        self.remove(name)
        limit = self._config.max_running_requests_per_dp_rank * dp_size
        self.replicas[name] = RoutedReplica(name, server, weight_version, limit, admitted, will_serve=will_serve)
        self.refresh(self.replicas[name])

    def update(
        self,
        name: str,
        *,
        weight_version: int | None = None,
        admitted: bool | None = None,
        suspect: bool | None = None,
        will_serve: bool | None = None,
        dp_size: int | None = None,
    ) -> None:
        """Change the state of a replica. None keeps a value. Raises BadInputError for an unknown replica."""
        if name not in self.replicas:
            raise BadInputError(f"there is no replica {name!r}; the replicas are {sorted(self.replicas)}")
        replica = self.replicas[name]
        if weight_version is not None:
            replica.weight_version = weight_version
        if admitted is not None:
            replica.admitted = admitted
        if suspect is not None:
            replica.is_stalled = suspect
        if will_serve is not None:
            replica.will_serve = will_serve
        if dp_size is not None:
            replica.max_running_requests = self._config.max_running_requests_per_dp_rank * dp_size
        self.refresh(replica)

    def remove(self, name: str) -> None:
        """Remove a replica. Its running requests continue on other replicas when they fail there."""
        self._set_awaited(name, False)
        replica = self.replicas.pop(name, None)
        if replica is not None:
            replica.lost.set()
            self._index.remove(replica)

    def refresh(self, replica: RoutedReplica) -> None:
        """The state of a replica has changed. A replica that is not in the table any more is ignored."""
        if self.replicas.get(replica.name) is replica:
            self._set_awaited(replica.name, replica.will_serve and not replica.admitted)
            self._index.refresh(replica)

    def update_load(self, replica: RoutedReplica, added_tokens: int) -> None:
        """The load of a replica has changed by `added_tokens` tokens or by one request."""
        self._index.update_load(replica, added_tokens)

    def _set_awaited(self, name: str, is_awaited: bool) -> None:
        if is_awaited:
            self._awaited.add(name)
        else:
            self._awaited.discard(name)

    # -- choice -------------------------------------------------------------------------------------

    def choose(self, request: RoutingRequest, tried: Collection[RoutedReplica]) -> RoutedReplica | None:
        """The replica for a request, see `LoadIndex.choose`. None when the request has to wait.

        Raises NotReadyError or ServerDiedError when no replica serves the required weights and none is expected to.
        """
        session_id = request.session_id
        session_replica = None if session_id is None else self._session_replicas.get(session_id)
        try:
            replica = self._index.choose(request, session_replica, tried)
        except NotReadyError as error:
            if self._awaited:
                return None
            self._counters.refused += 1
            raise self._explain(error) from None
        if replica is not None and session_id is not None:
            self._session_replicas[session_id] = replica.name
            self._session_replicas.move_to_end(session_id)
            if len(self._session_replicas) > self._config.max_sessions:
                self._session_replicas.popitem(last=False)
        return replica

    def _explain(self, error: NotReadyError) -> VerlServerError:
        """The error for a request that no replica can take, with the state of each replica if none is admitted.

        It is not retryable when every replica has failed.
        """
        statuses = self._unavailable.values()
        if self.num_admitted:
            return error
        if not statuses:
            problems = [f"{name}: {each.problem:.400}" for name, each in self.replicas.items() if each.problem]
            return NotReadyError("; ".join([error.message, *problems[:MAX_REASONS]]))
        if not self.replicas and all(status.failure is not None for status in statuses):
            failure = max(statuses, key=lambda status: status.name).failure
            assert failure is not None
            return ServerDiedError(
                "no replica serves requests: every replica has failed and is not started again. Correct the cause, "
                f"then create a new fleet. {failure['message']}",
                **failure["details"],
            )
        named = heapq.nsmallest(MAX_REASONS, statuses, key=lambda status: status.name)
        reasons = [f"{status.name} {status.reason}" for status in named]
        if len(statuses) > len(named):
            reasons.append(f"and {len(statuses) - len(named)} more replicas")
        return NotReadyError(f"{error.message}: {'; '.join(reasons)}")
