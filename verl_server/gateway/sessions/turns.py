"""The turns of a session: running generations, their slots, and requests that are sent again."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import Self

from verl_server.gateway.conversation import AssistantTurn, TurnDelta
from verl_server.gateway.errors import ErrorKind, GatewayError, as_gateway_error
from verl_server.gateway.turn_text.splitting import TurnDeltas, TurnProgress
from verl_server.trajectory.graph import Node, TrajectoryGraph

# -- Slots ------------------------------------------------------------------------------------------
# `Slots`: how many requests may be open at a time, in a session and in the whole gateway.


class Slots:
    """Counts open requests. Use it in one event loop.

    A request is open until its client has the reply or has gone. A turn that is generated without a client counts as a
    request.
    """

    def __init__(
        self,
        maximum: float = math.inf,
        kind: ErrorKind = ErrorKind.TOO_MANY_REQUESTS,
        owner: str = "the session",
        parent: Slots | None = None,
    ) -> None:
        """`kind`: kind of the error for a request without a slot. `parent`: each slot needs a slot of it, too."""
        self._maximum, self._kind, self._owner, self._parent = maximum, kind, owner, parent
        self.num_taken = 0
        """Number of open requests."""
        self.num_arriving = 0
        """Number of requests that are being read and have no slot yet."""

    def _require(self, num_known: int) -> None:
        if num_known >= self._maximum:
            raise GatewayError(
                self._kind, f"{self._owner} has {self._maximum} open requests already; send the request again later"
            )

    @property
    def is_full(self) -> bool:
        """Whether all slots are taken."""
        return self.num_taken >= self._maximum or (self._parent is not None and self._parent.is_full)

    def require_free(self) -> None:
        """Raise GatewayError if all slots are taken."""
        self._require(self.num_taken)
        if self._parent is not None:
            self._parent.require_free()

    def begin_arrival(self) -> None:
        """Count a request that is being read, until `end_arrival`.

        Raises GatewayError if as many requests as there are slots are being read.
        """
        self._require(self.num_arriving)
        if self._parent is not None:
            self._parent.begin_arrival()
        self.num_arriving += 1

    def end_arrival(self) -> None:
        """The request of `begin_arrival` has a slot or is refused."""
        self.num_arriving -= 1
        if self._parent is not None:
            self._parent.end_arrival()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold a slot within the block. Raises the errors of `take`."""
        with self.taken():
            yield
        self.release()

    def take(self) -> None:
        """Take a slot. Raises GatewayError if all are taken."""
        self._require(self.num_taken)
        if self._parent is not None:
            self._parent.take()
        self.num_taken += 1

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Take a slot, which is given back if the block raises an exception. Raises the errors of `take`."""
        self.take()
        try:
            yield
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Give a slot back."""
        self.num_taken -= 1
        if self._parent is not None:
            self._parent.release()


# -- Generation -------------------------------------------------------------------------------------
# `Generation`: a turn that is being generated, and the clients that wait for the turn (`Client`).

ABANDONED_S = 30.0
"""Seconds for which a turn is generated whose client has gone. The client may send the request again."""

TurnCoroutine = Coroutine[None, None, AssistantTurn]


class Client:
    """A client that has sent a request for a turn. It leaves the turn at the end of a `with` block."""

    def __init__(
        self,
        fingerprint: bytes = b"",
        *,
        num_retries: int = 0,
        has_id: bool = False,
        has_left: Callable[[], bool] = lambda: False,
    ) -> None:
        """`fingerprint`: digest of the request. `num_retries`: how often the client says that it has sent the request
        before. `has_id`: whether no other request has the fingerprint. `has_left`: whether the connection of the client
        closes. The task that answers the request may learn so only later.
        """
        self.fingerprint, self.num_retries, self.has_id, self.has_left = fingerprint, num_retries, has_id, has_left
        self.is_retry = num_retries > 0 or has_id
        """Whether the request may be one that was sent before."""
        self.turn: Generation | None = None
        """The turn that the client waits for."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.turn is not None:
            self.turn.leave(self)
            self.turn = None


class Generation:
    """A turn that is being generated, and the clients that wait for it."""

    def __init__(
        self,
        turn: TurnCoroutine,
        num_prompt_tokens: int,
        progress: TurnProgress,
        slots: Slots | None = None,
        reply_id: str = "",
    ) -> None:
        """`progress`: gets the tokens of the turn while it is generated. `slots`: each client needs a slot. The caller
        has taken the slot of the first client. `reply_id`: id of the reply of a stream, before the turn has an id.
        """
        self.task = asyncio.create_task(turn)
        self.task.add_done_callback(lambda _: progress.end())
        self.num_prompt_tokens = num_prompt_tokens
        self._progress = progress
        self._slots, self._num_slots = slots or Slots(), 1
        self.task.add_done_callback(lambda _: self._release_slots())
        self._clients = list[Client]()
        self.is_delivered = False
        """Whether a client has received the whole reply, as far as it is known. False in case of doubt."""
        self.reply_id = reply_id
        self.num_retries = 0
        """`Client.num_retries` of the client that joined last."""
        self.num_joins = 0
        """Number of requests that have waited for the turn, or wait."""
        self._abort_error = GatewayError(ErrorKind.OVERLOADED, "the turn was aborted; send the request again")
        self._abort_timer: asyncio.TimerHandle | None = None
        self._is_aborted = False
        """Whether the turn was cancelled. The engine may need seconds to confirm this."""

    @classmethod
    def of_recorded(
        cls, turn: TurnCoroutine, num_prompt_tokens: int, progress: TurnProgress, slots: Slots, reply_id: str
    ) -> Generation:
        """A turn that was recorded for an earlier request, perhaps of an earlier process. `progress` has its node."""
        generation = cls(turn, num_prompt_tokens, progress, slots, reply_id)
        generation.num_joins = 1
        return generation

    @property
    def has_failed(self) -> bool:
        """Whether the turn was aborted or failed before it was recorded: the request has no sample."""
        if self.node_id is not None:
            return False
        if not self.task.done():
            return self._is_aborted
        return self.task.cancelled() or self.task.exception() is not None

    @property
    def is_aborting(self) -> bool:
        """Whether the turn was aborted and has not ended."""
        return self._is_aborted and not self.task.done()

    @property
    def node_id(self) -> int | None:
        """Id of the recorded turn. None before the turn is recorded."""
        return self._progress.node_id

    @property
    def is_open(self) -> bool:
        """Whether the turn is being generated, or a client waits for it or receives it."""
        return bool(self._clients) or not self.task.done()

    @property
    def is_abandoned(self) -> bool:
        """Whether a client can come back for the turn: none waits for it, and none has received all of it."""
        return self._num_present == 0 and not self.is_delivered and not self.has_failed

    @property
    def _num_present(self) -> int:
        return sum(not client.has_left() for client in self._clients)

    async def wait(self) -> AssistantTurn:
        """The turn. A client that stops waiting does not end the generation for the others.

        Raises GatewayError if the turn was aborted, and the exceptions of the generation.
        """
        try:
            return await asyncio.shield(self.task)
        except asyncio.CancelledError:
            if not self.task.cancelled():
                raise  # the client has gone
            raise self._abort_error from None

    async def follow(self, keep_alive_s: float) -> AsyncGenerator[TurnDelta | None, None]:
        """The deltas of the turn from its beginning, and None after each `keep_alive_s` seconds without a delta.

        Ends when the turn has ended. Raises the errors of `wait`, and GatewayError if the deltas are no beginning of
        the turn, because the engine had to generate the turn again.
        """
        loop = asyncio.get_running_loop()
        deltas, deadline = TurnDeltas(self._progress), loop.time() + keep_alive_s
        while not self.task.done():
            delta = deltas.take()
            is_silent = delta is None and loop.time() >= deadline
            if delta is not None or is_silent:
                yield delta
                deadline = loop.time() + keep_alive_s
            elif not deltas.has_news:
                try:
                    async with asyncio.timeout_at(deadline):
                        await self._progress.wait_for_news()
                except TimeoutError:
                    continue
        yield deltas.take_rest(await self.wait())

    def abort(self, error: GatewayError | None = None) -> None:
        """End the generation. Clients that wait for the turn get the error."""
        self._abort_error = error or self._abort_error
        self._is_aborted = True
        self.task.cancel()

    def join(self, client: Client | None = None) -> Client:
        """Count a client until it leaves. Raises GatewayError without a slot."""
        client = client or Client()
        if self._num_present >= self._num_slots:
            self._slots.take()
            self._num_slots += 1
        self._clients.append(client)
        client.turn, self.num_retries = self, client.num_retries
        self.num_joins += 1
        if self._abort_timer is not None:
            self._abort_timer.cancel()
        return client

    def leave(self, client: Client) -> None:
        """A client waits no more. A running turn without clients is aborted later."""
        self._clients.remove(client)
        self._release_slots()
        if not self._clients and not self.task.done():
            self._abort_timer = asyncio.get_running_loop().call_later(ABANDONED_S, self.abort)

    def _release_slots(self) -> None:
        """Give back the slots that neither a client nor the running turn needs."""
        while self._num_slots > max(len(self._clients), not self.task.done()):
            self._slots.release()
            self._num_slots -= 1

    def set_delivered(self) -> None:
        """A client was there until the end of the reply."""
        self.is_delivered = True


# -- Turns ------------------------------------------------------------------------------------------

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
