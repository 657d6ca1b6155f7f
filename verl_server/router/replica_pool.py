"""`ReplicaPool`: places the requests of one router on its replicas, and lets requests wait for them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import heapq
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection, Iterable

from verl_server.config import RouterConfig
from verl_server.errors import BadInputError, NotReadyError, ServerDiedError, ShutDownError, VerlServerError
from verl_server.router.placement import LoadIndex, RequestQueue, RequestQueues, RoutingRequest, require_queue_capacity
from verl_server.router.replica import GenerationServer, RoutedReplica, RunningLimit, Slot, Trust
from verl_server.router.replica_status import ReplicaStatus, RouterCounters

logger = logging.getLogger(__name__)

# -- Replica pool -----------------------------------------------------------------------------------

MAX_REASONS = 8
"""Maximum number of replicas that the message of an error names."""
MAX_ISOLATED_REQUESTS = 16
"""Maximum number of isolated requests, see `RoutingRequest`, that run at the same time, on one replica each. They run
on half of the admitted replicas at most, because each of them may end its server."""


class ReplicaPool:
    """The replicas of one router and the requests that run on them or wait for them.

    All methods must be called in one event loop. Between two calls, no waiting request could be placed on a replica.
    """

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
        self._queues = RequestQueues()
        self._closed = False
        self._isolated_requests = 0
        self._limit = RunningLimit(lambda: bool(self._queues), self._serve_queues)

    # -- replicas -----------------------------------------------------------------------------------

    def apply_statuses(self, statuses: Iterable[ReplicaStatus]) -> None:
        """Bring replicas to the states that the fleet reports.

        Waiting requests are placed afterwards, so that they are distributed over all replicas that are admitted
        together.
        """
        for status in statuses:
            self._apply_status(status)
        self._serve_queues()

    def add_replica(
        self,
        name: str,
        server: GenerationServer,
        weight_version: int,
        *,
        admitted: bool = True,
        will_serve: bool = True,
        dp_size: int = 1,
    ) -> None:
        """Add a replica, or replace the server of a known replica. `dp_size`: number of its data parallel ranks."""
        self._add(name, server, weight_version, admitted=admitted, will_serve=will_serve, dp_size=dp_size)
        self._serve_queues()

    def update_replica(
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
        self._refresh(replica)
        self._serve_queues()

    def mark_unreachable(self, replica: RoutedReplica) -> None:
        """Record a broken connection. The replica receives no requests until its next status admits it."""
        replica.admitted = False
        self._refresh(replica)
        self._serve_queues()

    def _apply_status(self, status: ReplicaStatus) -> None:
        """Bring a replica to the state that the fleet reports."""
        replica = self.replicas.get(status.name)
        self._unavailable.pop(status.name, None)
        if not status.removed and (status.reason or status.failure is not None):
            self._unavailable[status.name] = status
        if replica is not None and status.removed:
            replica.is_removed = True
        if status.removed or status.failure is not None:
            self._remove(status.name)
        elif status.adapter is not None and (replica is None or replica.server is not status.adapter):
            self._add(
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
            replica.weight_version, replica.admitted = status.weight_version, status.admitted
            replica.is_stalled, replica.will_serve = status.suspect, status.will_serve
            self._refresh(replica)

    def _add(
        self,
        name: str,
        server: GenerationServer,
        weight_version: int,
        *,
        admitted: bool,
        will_serve: bool,
        dp_size: int,
    ) -> None:
        self._remove(name)
        limit = self._config.max_running_requests_per_dp_rank * dp_size
        self.replicas[name] = RoutedReplica(name, server, weight_version, limit, admitted, will_serve=will_serve)
        self._refresh(self.replicas[name])

    def _remove(self, name: str) -> None:
        """Remove a replica. Its running requests continue on other replicas when they fail there."""
        self._set_awaited(name, False)
        replica = self.replicas.pop(name, None)
        if replica is not None:
            replica.lost.set()
            self._index.remove(replica)

    def _refresh(self, replica: RoutedReplica) -> None:
        """The state of a replica has changed. A replica that was removed is ignored."""
        if self.replicas.get(replica.name) is replica:
            self._set_awaited(replica.name, replica.will_serve and not replica.admitted)
            self._index.refresh(replica)

    def _set_awaited(self, name: str, is_awaited: bool) -> None:
        if is_awaited:
            self._awaited.add(name)
        else:
            self._awaited.discard(name)

    # -- placement ----------------------------------------------------------------------------------

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
        return len(self._queues)

    @property
    def running_requests(self) -> int:
        """Number of requests that run on all replicas together."""
        return self._limit.running

    @property
    def is_held(self) -> bool:
        """Whether all requests wait, see `hold`."""
        return self._limit.is_held

    def hold(self, is_held: bool) -> None:
        """Let all requests wait in the queue that are not running yet, or place them again."""
        self._limit.is_held = is_held
        self._serve_queues()

    async def acquire(
        self, request: RoutingRequest, *, tried: Collection[RoutedReplica] = (), is_retry: bool = False
    ) -> Slot:
        """A place for a request on a replica. Waits in the queue of its requirement, in order of arrival.

        Replicas in `tried` are chosen only when no other replica has capacity. A retry is placed before other requests
        and is not refused because of a full queue. The caller must call `release` at the end. Raises NotReadyError,
        ServerBusyError when the queue is full, DeadlineError when the queue stands still, ShutDownError when the router
        is closed.
        """
        self.require_open()
        replica = None if self._queues.has_queue(request) else self._choose(request, tried)
        if replica is not None:
            return self._start(replica, request)
        if request.may_be_refused and not is_retry:
            require_queue_capacity(len(self._queues), self._config.max_queued_requests)
        waiting = self._queues.add(request, tried, is_retry)
        try:
            return await waiting.ticket
        except asyncio.CancelledError:
            self._queues.discard(waiting)
            if waiting.ticket.done() and not waiting.ticket.cancelled() and waiting.ticket.exception() is None:
                self.release(waiting.ticket.result())  # placed, but cancelled before it could begin
            raise

    @contextlib.asynccontextmanager
    async def lease(
        self, request: RoutingRequest, *, tried: Collection[RoutedReplica] = (), is_retry: bool = False
    ) -> AsyncIterator[Slot]:
        """A place for the duration of one request. Arguments and errors are those of `acquire`."""
        slot = await self.acquire(request, tried=tried, is_retry=is_retry)
        try:
            yield slot
        finally:
            self.release(slot)

    def release(self, slot: Slot) -> None:
        """Record that a request no longer runs on its replica. May be called more than once."""
        if slot.is_released:
            return
        replica = slot.replica
        slot.release()
        self._limit.running -= 1
        self._index.update_load(replica, -slot.tokens)
        self.end_isolation(slot)
        self._serve_queues(None if self._limit.is_limited else replica.weight_version)

    def end_isolation(self, slot: Slot) -> None:
        """Let another isolated request run on the replica. Does nothing for a request that is not isolated."""
        if slot.end_isolation():
            self._isolated_requests -= 1
            self._serve_queues()

    def limit_running_requests(self, slot: Slot) -> None:
        """Run no more requests at the same time than now, without that of `slot`, which could not be sent.

        For a process that cannot open more connections. The request of `slot` waits like the requests of full replicas.
        """
        self._limit.lower(max(1, self._limit.running - (not slot.is_released)))

    @property
    def has_other_requests(self) -> bool:
        """Whether more than one request runs: the end of another one would close a connection."""
        return self._limit.running > 1

    def close(self) -> None:
        """Refuse new requests and end the queued ones with ShutDownError."""
        self._closed = True
        for queue in self._queues.get():
            self._queues.fail(queue, lambda: ShutDownError("the router was shut down"))

    def _choose(self, request: RoutingRequest, tried: Collection[RoutedReplica]) -> RoutedReplica | None:
        """The replica for a request, see `LoadIndex.choose`. None when the request has to wait.

        Raises NotReadyError or ServerDiedError when no replica serves the required weights and none is expected to.
        """
        if self._limit.is_reached:
            return None
        max_isolated = max(1, min(MAX_ISOLATED_REQUESTS, self._index.num_replicas // 2))
        if request.is_isolated and self._isolated_requests >= max_isolated:
            return None
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
        if self._index.num_replicas:
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

    def _start(self, replica: RoutedReplica, request: RoutingRequest) -> Slot:
        slot = Slot(replica, request.prompt_tokens, request.is_isolated)
        self._limit.running += 1
        self._isolated_requests += request.is_isolated
        self._index.update_load(replica, slot.tokens)
        return slot

    def _serve_queues(self, weight_version: int | None = None) -> None:
        """Place waiting requests until no replica has capacity for any of them.

        `weight_version`: the capacity of replicas with this version has changed. None: any state may have changed.
        """
        queues = self._queues.get(weight_version) if self._queues else []
        while queues:
            queue = min(queues, key=lambda queue: queue.rank)
            if not self._serve_first(queue) or not queue:
                queues.remove(queue)

    def _serve_first(self, queue: RequestQueue) -> bool:
        """Place the first request of a queue. Returns False when none of its requests can be placed."""
        waiting = queue.first
        if waiting.ticket.done():  # its caller no longer waits
            self._queues.discard(waiting)
            return True
        try:
            replica = self._choose(waiting.request, waiting.tried)
        except VerlServerError as error:
            self._counters.refused += len(queue) - 1  # one is counted already
            self._queues.fail(queue, functools.partial(type(error), error.message, **error.details))
            return False
        if replica is None:
            return False
        queue.moved_at = time.monotonic()
        self._queues.discard(waiting)
        waiting.ticket.set_result(self._start(replica, waiting.request))
        return True

    # -- outcomes -----------------------------------------------------------------------------------

    def record_progress(self, slot: Slot, tokens: int) -> None:
        """Record that a running request has `tokens` tokens, prompt and output together."""
        replica = slot.replica
        added_tokens = slot.set_tokens(tokens)
        was_probed = replica.errors.trust is Trust.PROBED
        replica.errors.record_progress(slot.period)
        self._index.update_load(replica, added_tokens)
        if was_probed:
            self._serve_queues()

    def record_finish(self, slot: Slot) -> None:
        """Record that a request has finished without an error of its replica."""
        slot.replica.errors.record_finish(slot.period)
        self._refresh(slot.replica)

    def record_error(self, slot: Slot) -> None:
        """Record that a request has failed because of its replica. After several errors in a row it is suspect."""
        replica, errors = slot.replica, slot.replica.errors
        probe_delay_s = errors.record_error(slot.period)
        if probe_delay_s is None:
            return
        logger.warning(
            "replica %s failed several times in a row; other replicas are preferred for %g s",
            replica.name,
            probe_delay_s,
        )
        asyncio.get_running_loop().call_later(probe_delay_s, self._begin_probe, replica, errors.period)
        self._refresh(replica)
        self._serve_queues()

    def _begin_probe(self, replica: RoutedReplica, period: int) -> None:
        replica.errors.begin_probe(period)
        self._refresh(replica)
        self._serve_queues()
