"""Finds the turn of a request that is sent again: a running turn, a finished turn, or a turn of an earlier process."""

from __future__ import annotations

from collections.abc import Iterator

from verl_server.gateway.sessions.generation import Generation
from verl_server.trajectory.graph import TrajectoryGraph
from verl_server.trajectory.nodes import Node

MAX_FINISHED_TURNS = 256
"""Number of finished turns that are returned when their requests are repeated."""


class Turns:
    """The turns that this process has started for a session, by the fingerprints of their requests."""

    def __init__(self) -> None:
        self._turns = dict[bytes, list[Generation]]()

    def __iter__(self) -> Iterator[Generation]:
        return (turn for turns in self._turns.values() for turn in turns)

    def find(self, fingerprint: bytes, *, is_retry: bool) -> Generation | None:
        """The turn of a request that was sent before, or None if the request needs a turn of its own.

        A turn without a client comes first: the request is probably that of the client which has left. Without such a
        turn, a client that does not say that it repeats its request wants another sample.
        """
        known = [turn for turn in self._turns.get(fingerprint, ()) if not turn.has_failed]
        if (abandoned := next((turn for turn in known if turn.is_abandoned), None)) is not None or not is_retry:
            return abandoned
        undelivered = [turn for turn in known if not turn.is_delivered]
        return next(reversed(undelivered or known), None)

    def add(self, fingerprint: bytes, turn: Generation) -> None:
        """Add a turn, and forget old turns: a client repeats a request within minutes."""
        self._turns.setdefault(fingerprint, []).append(turn)
        finished = [(key, turn) for key, turns in self._turns.items() for turn in turns if turn.task.done()]
        for key, old in finished[:-MAX_FINISHED_TURNS]:
            self._turns[key].remove(old)
            if not self._turns[key]:
                del self._turns[key]


class RecordedTurns:
    """The turns that an earlier process has recorded for a session, by the fingerprints of their requests."""

    def __init__(self, graph: TrajectoryGraph) -> None:
        self._graph = graph
        self._nodes = dict[str, list[int]]()
        self._undelivered = set[int]()
        """Turns that were not returned by this process."""
        for node in graph.nodes:
            if node.sampled and (digest := (node.message or {}).get("request", {}).get("digest")):
                self._nodes.setdefault(digest, []).append(node.id)
                self._undelivered.add(node.id)

    def take(self, fingerprint: bytes, *, is_retry: bool) -> Node | None:
        """The recorded turn of a request that was sent before, or None if the request needs a turn of its own.

        A turn that no conversation continues has perhaps not reached its client: it is returned once to a request that
        does not say that it is repeated. A repeated request gets its turn each time.
        """
        nodes = self._nodes.get(fingerprint.hex(), [])
        waiting = [node for node in nodes if node in self._undelivered and not self._graph.children(node)]
        found = next(iter(waiting or (nodes[-1:] if is_retry else ())), None)
        if found is None:
            return None
        self._undelivered.discard(found)
        return self._graph.node(found)
