"""`LoadIndex`: the admitted replicas of a router, ordered by load for each weight version.

A choice takes time proportional to the logarithm of the number of replicas and to the number of served weight versions,
which is one or two in a fleet. It does not depend on the number of running requests.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence

from verl_server.errors import NotReadyError
from verl_server.router.placement.policy import RoutingRequest, VersionRequirement, session_moves
from verl_server.router.placement.routed_replica import Load, RoutedReplica

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
