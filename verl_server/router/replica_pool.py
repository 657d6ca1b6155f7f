"""`ReplicaPool`: the replicas of one router, the replica of each session, and the queue of waiting requests."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import uuid
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from verl_server.config import RouterConfig
from verl_server.errors import BadInputError, NotReadyError, ServerDiedError, ShutDownError, VerlServerError
from verl_server.router.policy import VersionRequirement, choose_replica, require_queue_capacity
from verl_server.router.replica_status import ReplicaStatus
from verl_server.router.routed_replica import GenerationServer, RoutedReplica
from verl_server.router.snapshot import RouterCounters


@dataclass(frozen=True)
class RoutingRequest:
    """What the choice of a replica depends on."""

    requirement: VersionRequirement = field(default_factory=VersionRequirement)
    """Which weights the request must be generated with."""
    session_id: str | None = None
    """Session of the request. Requests of a session share a prefix and prefer the same replica."""
    prompt_tokens: int = 0
    """Number of prompt tokens."""


class ReplicaPool:
    """The replicas of one router. All methods must be called in one event loop."""

    def __init__(self, config: RouterConfig, counters: RouterCounters) -> None:
        """`counters.refused` is counted here."""
        self._config, self._counters = config, counters
        self.replicas: dict[str, RoutedReplica] = {}
        """Replicas that have a server, by name."""
        self._session_replicas: OrderedDict[str, str] = OrderedDict()
        self._queue: deque[tuple[RoutingRequest, asyncio.Future[RoutedReplica]]] = deque()
        self._closed = False
        self._starting: set[str] = set()
        self._unavailable: dict[str, ReplicaStatus] = {}
        """The last status of each replica that does not serve until the user acts, and of each failed replica."""

    # -- replicas -----------------------------------------------------------------------------------

    def apply_status(self, status: ReplicaStatus) -> None:
        """Bring a replica to the state that the fleet reports."""
        known = self.replicas.get(status.name)
        self._unavailable.pop(status.name, None)
        if not status.removed and (status.reason or status.failure is not None):
            self._unavailable[status.name] = status
        if status.removed or status.failure is not None:
            self.remove_replica(status.name)
        elif status.adapter is not None and (known is None or known.server is not status.adapter):
            self.add_replica(
                status.name,
                status.adapter,
                status.weight_version,
                admitted=status.admitted,
                will_serve=status.will_serve,
            )
        elif known is None:
            self.set_without_server(status.name, will_serve=status.will_serve)
        else:
            self.update_replica(
                status.name,
                weight_version=status.weight_version,
                admitted=status.admitted,
                suspect=status.suspect,
                will_serve=status.will_serve,
            )

    def add_replica(
        self,
        name: str,
        server: GenerationServer,
        weight_version: int,
        *,
        admitted: bool = True,
        will_serve: bool = True,
    ) -> None:
        """Add a replica, or replace the server of a known replica."""
        self._starting.discard(name)
        self.replicas[name] = RoutedReplica(name, server, weight_version, admitted, will_serve=will_serve)
        self._serve_queue()

    def update_replica(
        self,
        name: str,
        *,
        weight_version: int | None = None,
        admitted: bool | None = None,
        suspect: bool | None = None,
        will_serve: bool | None = None,
    ) -> None:
        """Change the state of a replica. None keeps a value. Raises BadInputError for an unknown replica."""
        replica = self.get_replica(name)
        if weight_version is not None:
            replica.weight_version = weight_version
        if admitted is not None:
            replica.admitted = admitted
        if suspect is not None:
            replica.suspect = suspect
        if will_serve is not None:
            replica.will_serve = will_serve
        self._serve_queue()

    def set_without_server(self, name: str, *, will_serve: bool) -> None:
        """Record whether a replica that has no server yet will get one. If so, requests are queued for it."""
        if will_serve:
            self._starting.add(name)
        else:
            self._starting.discard(name)
        self._serve_queue()

    def remove_replica(self, name: str) -> None:
        """Remove a replica. Its running requests continue on other replicas when they fail there."""
        self._starting.discard(name)
        self.replicas.pop(name, None)
        self._serve_queue()

    def mark_unreachable(self, replica: RoutedReplica) -> None:
        """Record a broken connection. The replica receives no requests until its next status admits it."""
        replica.admitted = False

    def get_replica(self, name: str) -> RoutedReplica:
        """The replica with this name. Raises BadInputError for an unknown name."""
        if name not in self.replicas:
            raise BadInputError(f"there is no replica {name!r}; the replicas are {sorted(self.replicas)}")
        return self.replicas[name]

    # -- requests -----------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def require_open(self) -> None:
        """Raises ShutDownError after `close`."""
        if self._closed:
            raise ShutDownError("the router was shut down")

    @property
    def queued_requests(self) -> int:
        """Number of requests that wait for a replica."""
        return len(self._queue)

    async def acquire(self, request: RoutingRequest) -> RoutedReplica:
        """A replica with capacity for one more request. Waits in the queue, in order of arrival.

        The caller must call `start_request` on the replica before it yields to the event loop, and `release` at the
        end. Raises NotReadyError, ServerBusyError when the queue is full, ShutDownError when the router is closed.
        """
        replica = None if self._queue else self._choose(request)
        if replica is not None:
            return replica
        require_queue_capacity(len(self._queue), self._config.max_queued_requests)
        ticket: asyncio.Future[RoutedReplica] = asyncio.get_running_loop().create_future()
        self._queue.append((request, ticket))
        self._serve_queue()
        return await ticket

    def release(self, replica: RoutedReplica, key: str) -> None:
        """Record that a request no longer runs on the replica."""
        replica.request_tokens.pop(key, None)
        self._serve_queue()

    @contextlib.asynccontextmanager
    async def lease(self, request: RoutingRequest) -> AsyncIterator[RoutedReplica]:
        """A replica for the duration of one request. Raises the errors of `acquire`."""
        replica = await self.acquire(request)
        key = uuid.uuid4().hex
        replica.start_request(key, request.prompt_tokens)
        try:
            yield replica
        finally:
            self.release(replica, key)

    def close(self) -> None:
        """Refuse new requests and end the queued ones with ShutDownError."""
        self._closed = True
        for _, ticket in self._queue:
            if not ticket.done():
                ticket.set_exception(ShutDownError("the router was shut down"))
        self._queue.clear()

    def _choose(self, request: RoutingRequest) -> RoutedReplica | None:
        """The replica for a request. None when the request has to wait in the queue."""
        session_id = request.session_id
        try:
            name = choose_replica(
                [replica.load() for replica in self.replicas.values()],
                request.requirement,
                session_replica=None if session_id is None else self._session_replicas.get(session_id),
                prompt_tokens=request.prompt_tokens,
                config=self._config,
            )
        except NotReadyError as error:
            if self._awaits_a_replica():
                return None
            self._counters.refused += 1
            raise self._explain(error) from None
        if name is None:
            return None
        if session_id is not None:
            self._session_replicas[session_id] = name
            self._session_replicas.move_to_end(session_id)
            while len(self._session_replicas) > self._config.max_sessions:
                self._session_replicas.popitem(last=False)
        return self.replicas[name]

    def _awaits_a_replica(self) -> bool:
        return bool(self._starting) or any(
            replica.will_serve and not replica.admitted for replica in self.replicas.values()
        )

    def _explain(self, error: NotReadyError) -> VerlServerError:
        """The error for a request that no replica can take, with the state of each replica if none is admitted.

        It is not retryable when every replica has failed.
        """
        statuses = sorted(self._unavailable.values(), key=lambda status: status.name)
        if not statuses or any(replica.admitted for replica in self.replicas.values()):
            return error
        failures = [status.failure for status in statuses if status.failure is not None]
        if len(failures) == len(statuses) and not self.replicas:
            return ServerDiedError(
                "no replica serves requests: every replica has failed and is not started again. Correct the cause, "
                f"then create a new fleet. {failures[-1]['message']}",
                **failures[-1]["details"],
            )
        reasons = "; ".join(f"{status.name} {status.reason}" for status in statuses)
        return NotReadyError(f"{error.message}: {reasons}")

    def _serve_queue(self) -> None:
        """Assign replicas to queued requests, in order of arrival, as long as a replica has capacity."""
        if not self._queue:
            return
        still_queued: deque[tuple[RoutingRequest, asyncio.Future[RoutedReplica]]] = deque()
        while self._queue:
            request, ticket = self._queue.popleft()
            if ticket.done():  # its caller no longer waits
                continue
            try:
                replica = self._choose(request)
            except VerlServerError as error:
                ticket.set_exception(error)
                continue
            if replica is None:
                still_queued.append((request, ticket))
                if not self._has_capacity():
                    break
                continue
            replica.request_tokens[_reservation(ticket)] = 0  # counts as running until its request has started
            ticket.add_done_callback(functools.partial(self._end_reservation, replica))
            ticket.set_result(replica)
        still_queued.extend(self._queue)
        self._queue = still_queued

    def _end_reservation(self, replica: RoutedReplica, ticket: asyncio.Future[RoutedReplica]) -> None:
        self.release(replica, _reservation(ticket))

    def _has_capacity(self) -> bool:
        limit = self._config.max_running_requests_per_replica
        return any(replica.admitted and replica.running_requests < limit for replica in self.replicas.values())


def _reservation(ticket: asyncio.Future[RoutedReplica]) -> str:
    return f"reserved-{id(ticket)}"
