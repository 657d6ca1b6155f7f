"""The choice of a replica for a request: policy, replicas ordered by load, queues of waiting requests.

A choice takes time proportional to the logarithm of the number of replicas and to the number of served weight versions,
which is one or two in a fleet. It does not depend on the number of running requests.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from verl_server.errors import DeadlineError, NotReadyError, ServerBusyError, VerlServerError
from verl_server.router.replica import Load, RoutedReplica, Slot
from verl_server.validation import require_whole_number

# -- Policy -----------------------------------------------------------------------------------------
# Rules of the choice of a replica: required weights, and when a session leaves its replica. Pure functions.


@dataclass(frozen=True)
class VersionRequirement:
    """Which weights a request must be generated with. None means no requirement."""

    weight_version: int | None = None
    """Exact weight version."""
    min_weight_version: int | None = None
    """Minimum weight version."""

    def __post_init__(self) -> None:
        for name in ("weight_version", "min_weight_version"):
            value = getattr(self, name)
            if value is not None:
                require_whole_number(name, value, minimum=0)

    def is_met_by(self, weight_version: int) -> bool:
        """Whether a replica that serves `weight_version` may take the request."""
        return (self.weight_version is None or weight_version == self.weight_version) and (
            self.min_weight_version is None or weight_version >= self.min_weight_version
        )

    def __str__(self) -> str:
        if self.weight_version is not None:
            return f"weight version {self.weight_version}"
        if self.min_weight_version is not None:
            return f"weight version {self.min_weight_version} or later"
        return "any weight version"


@dataclass(frozen=True)
class RoutingRequest:
    """What the choice of a replica depends on."""

    requirement: VersionRequirement = field(default_factory=VersionRequirement)
    """Which weights the request must be generated with."""
    session_id: str | None = None
    """Session of the request. Requests of a session share a prefix and prefer the same replica."""
    prompt_tokens: int = 0
    """Number of prompt tokens."""
    may_be_refused: bool = False
    """Whether the request is refused when the queue is full. True for requests of other processes. A request of this
    process waits: its caller holds it in memory anyway."""
    is_isolated: bool = False
    """Whether the request may have ended several servers. Its replica runs no other request of this kind until it has
    returned a token: if the server ends before, this request is the cause."""


def session_moves(
    current_tokens: int, least_tokens: int, total_tokens: int, replicas: int, prompt_tokens: int, overload_factor: float
) -> bool:
    """Whether a session with a prompt of `prompt_tokens` tokens leaves its replica for the least loaded one.

    The session stays because of the prefix cache, except when its replica would exceed `overload_factor` times the mean
    load and the least loaded replica has so many tokens less in flight that computing the whole prompt there costs
    less. `total_tokens`: tokens in flight on all `replicas` replicas that could take the request.
    """
    mean_tokens = (total_tokens + prompt_tokens) / replicas
    is_overloaded = current_tokens + prompt_tokens > overload_factor * mean_tokens
    return is_overloaded and current_tokens - least_tokens > prompt_tokens


def require_queue_capacity(queued_requests: int, max_queued_requests: int) -> None:
    """Raises ServerBusyError (retryable) when the queue is full, so that requests do not wait past their deadline."""
    if queued_requests >= max_queued_requests:
        raise ServerBusyError(
            f"{queued_requests} requests are queued already, the maximum is {max_queued_requests}; try again later",
            queued_requests=queued_requests,
        )


# -- Load index -------------------------------------------------------------------------------------

MIN_REBUILD_ENTRIES = 64
"""Minimum number of outdated heap entries before a heap is built again."""


class LoadOrder:
    """Replicas ordered by load: a heap whose entries are corrected late.

    Each replica that is not full has a current entry, which is at most its load. When a load grows, nothing happens:
    the entry is corrected when it is the first one. When a load falls, a new entry replaces the current one. Replaced
    entries stay in the heap until they are the first ones or the heap is built again.
    """

    def __init__(self) -> None:
        self.replicas: dict[str, RoutedReplica] = {}
        """Replicas by name."""
        self.tokens_in_flight = 0
        """Number of tokens in flight on all replicas."""
        self._heap: list[Load] = []
        self._entries: dict[str, Load] = {}
        """The current entry of each replica. Full replicas may have none."""

    def add(self, replica: RoutedReplica) -> None:
        self.replicas[replica.name] = replica
        self.tokens_in_flight += replica.tokens_in_flight
        self._entries.pop(replica.name, None)
        self.update(replica, 0)

    def remove(self, replica: RoutedReplica) -> None:
        del self.replicas[replica.name]
        self._entries.pop(replica.name, None)
        self.tokens_in_flight -= replica.tokens_in_flight

    def update(self, replica: RoutedReplica, added_tokens: int) -> None:
        """The load of a replica has changed by `added_tokens` tokens or by one request."""
        self.tokens_in_flight += added_tokens
        entry, load = self._entries.get(replica.name), replica.load
        if (entry is None and not replica.is_full) or (entry is not None and load < entry):
            self._entries[replica.name] = load
            heapq.heappush(self._heap, load)
            if len(self._heap) > 2 * len(self.replicas) + MIN_REBUILD_ENTRIES:
                self._heap = list(self._entries.values())
                heapq.heapify(self._heap)

    def least_loaded(self, excluded: Collection[RoutedReplica], is_isolated: bool) -> RoutedReplica | None:
        """The replica with the smallest load that is neither full nor in `excluded`. None when there is none.

        `is_isolated`: for a request that is isolated, see `RoutingRequest`.
        """
        heap, set_aside = self._heap, []
        found = None
        while heap and found is None:
            entry = heap[0]
            name = entry[2]
            if self._entries.get(name) != entry:  # replaced or removed
                heapq.heappop(heap)
                continue
            replica = self.replicas[name]
            if replica.is_full:
                heapq.heappop(heap)
                del self._entries[name]
            elif replica.load != entry:
                self._entries[name] = replica.load
                heapq.heapreplace(heap, replica.load)
            elif replica in excluded or (is_isolated and replica.runs_isolated):
                set_aside.append(heapq.heappop(heap))
            else:
                found = replica
        for entry in set_aside:
            heapq.heappush(heap, entry)
        return found


class LoadIndex:
    """The admitted replicas of one router: one `LoadOrder` for each weight version, suspect replicas apart."""

    def __init__(self, overload_factor: float) -> None:
        self._overload_factor = overload_factor
        self._orders: dict[tuple[int, bool], LoadOrder] = {}
        """By weight version and by whether the replicas are suspect."""
        self._keys: dict[RoutedReplica, tuple[int, bool]] = {}
        """The key in `_orders` of each admitted replica."""

    @property
    def num_replicas(self) -> int:
        """Number of admitted replicas."""
        return len(self._keys)

    def refresh(self, replica: RoutedReplica) -> None:
        """The state of a replica has changed, or the replica is new."""
        key = (replica.weight_version, replica.is_suspect)
        if replica.admitted and self._keys.get(replica) == key:
            self._orders[key].update(replica, 0)
            return
        self.remove(replica)
        if replica.admitted:
            self._keys[replica] = key
            self._orders.setdefault(key, LoadOrder()).add(replica)

    def remove(self, replica: RoutedReplica) -> None:
        """Remove a replica if it is in the index."""
        key = self._keys.pop(replica, None)
        if key is not None:
            self._orders[key].remove(replica)
            if not self._orders[key].replicas:
                del self._orders[key]

    def update_load(self, replica: RoutedReplica, added_tokens: int) -> None:
        """The load of a replica has changed by `added_tokens` tokens or by one request."""
        key = self._keys.get(replica)
        if key is not None:
            self._orders[key].update(replica, added_tokens)

    def choose(
        self, request: RoutingRequest, session_replica: str | None, tried: Collection[RoutedReplica]
    ) -> RoutedReplica | None:
        """The replica for a request. None when all replicas that could take it are full or, if it is isolated, run
        another isolated request.

        Suspect replicas are chosen only if no other replica serves the required weights. A session stays on its
        replica `session_replica` as `session_moves` says; all other requests go to the replica with the smallest
        load. Replicas in `tried` are chosen only when no other replica has capacity. Raises NotReadyError (retryable)
        when no replica is admitted or none of them serves the required weights.
        """
        for is_suspect in (False, True):
            orders = self._matching_orders(request.requirement, is_suspect)
            if orders:
                return self._choose_from(orders, request, session_replica, tried)
        raise self._not_ready_error(request.requirement)

    def _matching_orders(self, requirement: VersionRequirement, is_suspect: bool) -> list[LoadOrder]:
        return [
            order
            for (version, suspect), order in self._orders.items()
            if suspect is is_suspect and requirement.is_met_by(version)
        ]

    def _choose_from(
        self,
        orders: Sequence[LoadOrder],
        request: RoutingRequest,
        session_replica: str | None,
        tried: Collection[RoutedReplica],
    ) -> RoutedReplica | None:
        least = _least_loaded(orders, tried, request.is_isolated)
        if least is None:
            return self._choose_from(orders, request, session_replica, ()) if tried else None
        if session_replica is None:
            return least
        current = next((order.replicas[session_replica] for order in orders if session_replica in order.replicas), None)
        if current is None or current.is_full or current in tried or (request.is_isolated and current.runs_isolated):
            return least
        moves = session_moves(
            current.tokens_in_flight,
            least.tokens_in_flight,
            sum(order.tokens_in_flight for order in orders),
            sum(len(order.replicas) for order in orders),
            request.prompt_tokens,
            self._overload_factor,
        )
        return least if moves else current

    def _not_ready_error(self, requirement: VersionRequirement) -> NotReadyError:
        if not self._orders:
            return NotReadyError("no replica serves requests at the moment")
        served = sorted({version for version, _ in self._orders})
        return NotReadyError(f"no replica serves {requirement}; versions served: {served}")


def _least_loaded(
    orders: Sequence[LoadOrder], excluded: Collection[RoutedReplica], is_isolated: bool
) -> RoutedReplica | None:
    found = [replica for order in orders if (replica := order.least_loaded(excluded, is_isolated)) is not None]
    return min(found, key=lambda replica: replica.load, default=None)


# -- Request queues ---------------------------------------------------------------------------------
# `RequestQueues`: the requests that wait for a replica, in one queue for each requirement of weights.
#
# Isolated requests (see `RoutingRequest`) have queues of their own.
#
# Adding, removing and finding the first request of a queue take constant time. Requests that wait for a weight version
# are not looked at when a replica with another version has capacity.

MAX_STANDSTILL_S = 7200.0
"""Seconds without a placement after which the requests of a queue end with DeadlineError. Longer than the start of a
server and than a weight update: requests wait for so long only when all servers hang without being detected."""


QueueKey = tuple[VersionRequirement, bool]
"""The requirement of a request, and whether the request is isolated."""


class WaitingRequest:
    """A request that waits for a replica."""

    __slots__ = ("is_retry", "number", "request", "ticket", "tried")

    def __init__(self, request: RoutingRequest, tried: Collection[RoutedReplica], is_retry: bool, number: int) -> None:
        self.request, self.tried, self.is_retry = request, tried, is_retry
        self.number = number
        """Position in the order of arrival."""
        self.ticket: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()


class RequestQueue:
    """The waiting requests with the same `QueueKey`, in order of arrival. Retries come first.

    All of them can be placed on the same replicas: if the first one cannot be placed, none can.
    """

    def __init__(self, key: QueueKey) -> None:
        self.key, self.requirement = key, key[0]
        self.moved_at = time.monotonic()
        """Time of the last placement, or of the first request (`time.monotonic`)."""
        self.standstill_timer: asyncio.TimerHandle | None = None
        self._retries: OrderedDict[WaitingRequest, None] = OrderedDict()
        self._new: OrderedDict[WaitingRequest, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._retries) + len(self._new)

    def __iter__(self) -> Iterator[WaitingRequest]:
        return itertools.chain(self._retries, self._new)

    def add(self, waiting: WaitingRequest) -> None:
        (self._retries if waiting.is_retry else self._new)[waiting] = None

    def discard(self, waiting: WaitingRequest) -> bool:
        """Remove a request; returns whether it was in this queue."""
        requests = self._retries if waiting.is_retry else self._new
        if waiting not in requests:
            return False
        del requests[waiting]
        return True

    @property
    def first(self) -> WaitingRequest:
        return next(iter(self))

    @property
    def rank(self) -> tuple[bool, int]:
        """The queue with the smallest rank is served first."""
        return not self._retries, self.first.number


class RequestQueues:
    """All waiting requests of one router. There is no empty queue."""

    def __init__(self) -> None:
        self._queues: dict[QueueKey, RequestQueue] = {}
        self._numbers = itertools.count()
        self._count = 0

    def __len__(self) -> int:
        """Number of requests in all queues."""
        return self._count

    def has_queue(self, request: RoutingRequest) -> bool:
        """Whether requests wait that come before this one."""
        return _key_of(request) in self._queues

    def get(self, weight_version: int | None = None) -> list[RequestQueue]:
        """The queues whose requests may run on a replica with `weight_version`. None: all queues."""
        if weight_version is None:
            return list(self._queues.values())
        return [queue for queue in self._queues.values() if queue.requirement.is_met_by(weight_version)]

    def add(self, request: RoutingRequest, tried: Collection[RoutedReplica], is_retry: bool) -> WaitingRequest:
        """Add a request at the end of its queue, or a retry before all requests that are no retries."""
        waiting = WaitingRequest(request, tried, is_retry, next(self._numbers))
        key = _key_of(request)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = RequestQueue(key)
            self._check_standstill(queue)
        queue.add(waiting)
        self._count += 1
        return waiting

    def discard(self, waiting: WaitingRequest) -> None:
        """Remove a request if it still waits."""
        queue = self._queues.get(_key_of(waiting.request))
        if queue is not None and queue.discard(waiting):
            self._count -= 1
            if not queue:
                self._remove(queue)

    def fail(self, queue: RequestQueue, make_error: Callable[[], VerlServerError]) -> None:
        """End all requests of a queue. Each gets an error of its own."""
        self._remove(queue)
        self._count -= len(queue)
        for waiting in queue:
            if not waiting.ticket.done():
                waiting.ticket.set_exception(make_error())

    def _remove(self, queue: RequestQueue) -> None:
        del self._queues[queue.key]
        if queue.standstill_timer is not None:
            queue.standstill_timer.cancel()

    def _check_standstill(self, queue: RequestQueue) -> None:
        """End the requests of a queue after a standstill; otherwise check again when there can be one."""
        remaining_s = queue.moved_at + MAX_STANDSTILL_S - time.monotonic()
        if remaining_s > 0:
            loop = asyncio.get_running_loop()
            queue.standstill_timer = loop.call_later(remaining_s, self._check_standstill, queue)
            return
        message = (
            f"no request that needs {queue.requirement} was placed on a replica for {MAX_STANDSTILL_S:g} s: all "
            "replicas are full or not admitted. Look for servers that hang"
        )
        self.fail(queue, lambda: DeadlineError(message, operation="wait for a replica", seconds=MAX_STANDSTILL_S))


def _key_of(request: RoutingRequest) -> QueueKey:
    return request.requirement, request.is_isolated
