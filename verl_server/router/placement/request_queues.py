"""`RequestQueues`: the requests that wait for a replica, in one queue for each requirement of weights.

Isolated requests (see `RoutingRequest`) have queues of their own.

Adding, removing and finding the first request of a queue take constant time. Requests that wait for a weight version
are not looked at when a replica with another version has capacity.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator

from verl_server.errors import DeadlineError, VerlServerError
from verl_server.router.placement.policy import RoutingRequest, VersionRequirement
from verl_server.router.placement.routed_replica import RoutedReplica, Slot

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
