"""Finds the turn of a request that is sent again: a running turn, a finished turn, or a turn of an earlier process."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Iterator

from verl_server.gateway.conversation import AssistantTurn
from verl_server.gateway.errors import ErrorKind, as_gateway_error
from verl_server.gateway.sessions.generation import Client, Generation
from verl_server.gateway.sessions.slots import Slots
from verl_server.trajectory.graph import TrajectoryGraph
from verl_server.trajectory.nodes import Node

MAX_FINISHED_TURNS = 256
"""Number of finished turns that are kept for requests that are repeated. Older turns are read from the record."""
FAILURES = (ErrorKind.OVERLOADED, ErrorKind.INTERNAL)
"""Errors for which the program is not responsible."""


class Turns:
    """The turns that this process has started for a session, by the fingerprints of their requests."""

    def __init__(self, recorded: RecordedTurns) -> None:
        """`recorded`: turns of earlier processes. It gets the turns that are forgotten here."""
        self._recorded = recorded
        self._turns = dict[bytes, list[Generation]]()
        self._order = deque[tuple[bytes, Generation]]()
        """All turns, the oldest first, except that a turn that was still open may stand later."""
        self._refused = Counter[tuple[bytes, int]]()
        """Number of requests without a turn that have not been sent again, by fingerprint and `Client.num_retries`."""
        self.failure: Exception | None = None
        """Why the last request without a turn failed, if no later request has got a turn: a failure of the engine or of
        the gateway, or the GatewayError of a conversation that is too long. Other mistakes of the program do not count.
        """

    def __iter__(self) -> Iterator[Generation]:
        return (turn for turns in self._turns.values() for turn in turns)

    @property
    def is_aborting(self) -> bool:
        """Whether a turn was aborted and has not ended. It counts as a turn of the session until then."""
        return any(turn.is_aborting for _, turn in self._order)

    def find(self, client: Client) -> Generation | Node | None:
        """The turn of a request that was sent before, or None if the request needs a turn of its own.

        A turn without a client comes first: the request is probably that of the client which has left. Then comes a
        turn of its own for a request that failed or was refused, and is sent again. Otherwise, a client that does not
        say that it repeats its request wants another sample. A Node is a recorded turn, see `RecordedTurns`. If it has
        perhaps not reached its client, it comes before turns that have reached their clients.

        A request that was refused before it was read is not known, because there were too many connections, for
        example. When it is sent again without an id, it gets the turn of an equal request if there is one.
        """
        fingerprint = client.fingerprint
        known = [turn for turn in self._turns.get(fingerprint, []) if not turn.has_failed]
        if (abandoned := next((turn for turn in known if turn.is_abandoned), None)) is not None:
            return abandoned
        waiting = self._recorded.find_undelivered(fingerprint)
        if not client.is_retry or (not client.has_id and self._take_refused(client)):
            return waiting
        undelivered = [turn for turn in known if not turn.is_delivered]
        if not undelivered and waiting is not None:
            return waiting
        return next(reversed(undelivered or known), None) or self._recorded.find_last(fingerprint)

    @contextlib.contextmanager
    def refusals_of(self, client: Client) -> Iterator[None]:
        """Note that a request got no turn if the block raises an exception: its client may send the request again."""
        try:
            yield
        except BaseException as error:
            self._note_failure(error)
            if not client.has_id:  # no other request has its fingerprint
                self._add_refused(client.fingerprint, client.num_retries)
            raise

    def note_refusal(self, client: Client) -> None:
        """Note that a request was refused before `find`. If it was sent before, its turn may be known."""
        if self._take_refused(client) or not client.is_retry:
            self._add_refused(client.fingerprint, client.num_retries)

    @contextlib.contextmanager
    def arriving(self, slots: Slots) -> Iterator[None]:
        """Count a request while it is read. Raises GatewayError if it can have no slot."""
        # A request that joins a running turn without a client needs no slot.
        if slots.is_full and not any(turn.is_abandoned and not turn.task.done() for turn in self):
            slots.require_free()
        slots.begin_arrival()
        try:
            yield
        finally:
            slots.end_arrival()

    def _take_refused(self, client: Client) -> bool:
        """Whether an equal request has failed or was refused, and was probably that of the client. Each counts once.

        A client counts its retries. So a request that was refused after more retries is another one. The same holds for
        a request that its client has given up, and sends again as a new request.
        """
        fingerprint, num_retries = client.fingerprint, client.num_retries
        refused = [key for key in self._refused if key[0] == fingerprint and key[1] < num_retries]
        if refused:
            key = max(refused)
            self._refused[key] -= 1
            if not self._refused[key]:
                del self._refused[key]
            return True
        turns = self._turns.get(fingerprint, [])
        failed = next((turn for turn in turns if turn.has_failed and turn.num_retries < num_retries), None)
        if failed is not None:
            turns.remove(failed)
        return failed is not None

    def _add_refused(self, fingerprint: bytes, num_retries: int) -> None:
        self._refused[fingerprint, num_retries] += 1
        if len(self._refused) > MAX_FINISHED_TURNS:
            del self._refused[next(iter(self._refused))]  # the oldest

    def add(self, fingerprint: bytes, turn: Generation) -> None:
        """Add a turn, and forget old turns, so that the session does not keep the texts of all its turns."""
        self._turns.setdefault(fingerprint, []).append(turn)
        failure = self.failure
        turn.task.add_done_callback(lambda task: self._note_end(task, failure))
        self._order.append((fingerprint, turn))
        for _ in range(2):  # one more than was added, because one of them may be open
            if len(self._order) > MAX_FINISHED_TURNS:
                self._forget(*self._order.popleft())

    def _forget(self, fingerprint: bytes, turn: Generation) -> None:
        """Forget a turn, unless it is open."""
        if turn.is_open:
            self._order.append((fingerprint, turn))
            return
        turns = self._turns.get(fingerprint, [])
        if turn in turns:  # otherwise, the turn has failed, and its request was sent again
            turns.remove(turn)
            self._hand_over(fingerprint, turn)
        if not turns:
            self._turns.pop(fingerprint, None)

    def continue_with(self, graph: TrajectoryGraph) -> None:
        """Continue after the record was read again into `graph`. Turns that were running have been aborted."""
        self._recorded.continue_with(graph)
        for fingerprint, turns in self._turns.items():
            for turn in [turn for turn in turns if not turn.task.done()]:
                turns.remove(turn)
                self._hand_over(fingerprint, turn)

    def _hand_over(self, fingerprint: bytes, turn: Generation) -> None:
        """Note what the next equal request needs of a turn that is not kept."""
        if turn.node_id is None:
            self._add_refused(fingerprint, turn.num_retries)
        else:
            self._recorded.add(fingerprint, turn.node_id, is_delivered=turn.is_delivered)

    def _note_end(self, task: asyncio.Task[AssistantTurn], failure: Exception | None) -> None:
        """Note how a turn has ended. `failure`: the value of the attribute when the turn was added."""
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            self._note_failure(error)
        elif self.failure is failure:  # the turn is later than the failure
            self.failure = None

    def _note_failure(self, error: BaseException) -> None:
        if not isinstance(error, Exception):
            return  # the client has gone
        kind = as_gateway_error(error).kind
        if kind in FAILURES or (kind is ErrorKind.CONTEXT_OVERFLOW and self.failure is None):
            self.failure = error


class RecordedTurns:
    """Recorded turns of a session that `Turns` does not keep: turns of earlier processes, and forgotten turns.

    By the fingerprints of their requests.
    """

    def __init__(self, graph: TrajectoryGraph) -> None:
        self._graph = graph
        self._last = dict[str, int]()
        """The last turn of each request. Keys are fingerprints as hexadecimal text."""
        self._undelivered = dict[str, deque[int]]()
        """The turns of each request that have perhaps not reached their clients."""

    def restore(self) -> None:
        """Add the turns of an earlier process. It is not known whether they have reached their clients."""
        for node in self._graph.nodes:
            if node.sampled and (digest := (node.message or {}).get("request", {}).get("digest")):
                self._last[digest] = node.id
                self._undelivered.setdefault(digest, deque()).append(node.id)

    def continue_with(self, graph: TrajectoryGraph) -> None:
        """Use another graph that has the same turns."""
        self._graph = graph

    def add(self, fingerprint: bytes, node: int, *, is_delivered: bool) -> None:
        """Add a turn. `is_delivered`: whether a client has received it."""
        digest = fingerprint.hex()
        self._last[digest] = max(node, self._last.get(digest, node))
        if not is_delivered:
            self._undelivered.setdefault(digest, deque()).append(node)

    def find_undelivered(self, fingerprint: bytes) -> Node | None:
        """The first turn of a request that has perhaps not reached its client: no conversation continues it."""
        waiting = self._undelivered.get(fingerprint.hex())
        while waiting:
            if not self._graph.children(waiting[0]):
                return self._graph.node(waiting[0])
            waiting.popleft()
        return None

    def find_last(self, fingerprint: bytes) -> Node | None:
        """The last turn of a request."""
        node = self._last.get(fingerprint.hex())
        return None if node is None else self._graph.node(node)

    def take(self, fingerprint: bytes, node: Node) -> None:
        """Note that `Turns` keeps a turn again."""
        waiting = self._undelivered.get(fingerprint.hex(), ())
        if node.id in waiting:
            waiting.remove(node.id)  # type: ignore[union-attr]
