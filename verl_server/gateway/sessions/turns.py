"""The turns of a session: running generations, their slots, and requests that are sent again."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from collections import Counter
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

    @functools.cached_property
    def arrivals(self) -> Slots:
        """Counts the requests that are being read and have no slot yet: at most as many as there are slots."""
        return Slots(self._maximum, self._kind, self._owner, self._parent and self._parent.arrivals)

    @property
    def is_full(self) -> bool:
        """Whether all slots are taken."""
        return self.num_taken >= self._maximum or (self._parent is not None and self._parent.is_full)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold a slot within the block. Raises the errors of `take`."""
        with self.taken():
            yield
        self.release()

    def take(self) -> None:
        """Take a slot. Raises GatewayError if all are taken."""
        if self.num_taken >= self._maximum:
            raise GatewayError(
                self._kind, f"{self._owner} has {self._maximum} open requests already; send the request again later"
            )
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
        self.task.add_done_callback(lambda _: self._settle())
        self._clients = list[Client]()
        self.on_closed: Callable[[], None] | None = None
        """Called once, when the turn is open no more."""
        self.is_delivered = False
        """Whether a client has received the whole reply, as far as it is known. False in case of doubt."""
        self.is_sent_again = False
        """Whether the turn has failed and its request was sent again."""
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
        self._settle()
        if not self._clients and not self.task.done():
            self._abort_timer = asyncio.get_running_loop().call_later(ABANDONED_S, self.abort)

    def _settle(self) -> None:
        """Give back the slots that neither a client nor the running turn needs, and tell when the turn is closed."""
        while self._num_slots > max(len(self._clients), not self.task.done()):
            self._slots.release()
            self._num_slots -= 1
        if not self.is_open and self.on_closed is not None:
            on_closed, self.on_closed = self.on_closed, None
            on_closed()

    def set_delivered(self) -> None:
        """A client was there until the end of the reply."""
        self.is_delivered = True


# -- Turns ------------------------------------------------------------------------------------------

MAX_REFUSED = 256
"""Number of different requests without a turn that are remembered. The oldest is forgotten."""
FAILURES = (ErrorKind.OVERLOADED, ErrorKind.INTERNAL)
"""Errors for which the program is not responsible."""


class Turns:
    """The turns of a session by the fingerprints of their requests: turns that are open, and those in the record."""

    def __init__(self, graph: TrajectoryGraph) -> None:
        """`graph`: the record. Call `restore` for turns of an earlier process."""
        self._graph = graph
        self._open = dict[bytes, list[Generation]]()
        """Turns that are being generated, or that a client waits for or receives."""
        self._last = dict[bytes, int]()
        """The last recorded turn of each request."""
        self._undelivered = dict[bytes, list[int]]()
        """The recorded turns of each request that are not open and have perhaps not reached their clients."""
        self._refused = Counter[tuple[bytes, int]]()
        """Number of requests without a turn that have not been sent again, by fingerprint and `Client.num_retries`."""
        self.failure: Exception | None = None
        """Why the last request without a turn failed, if no later request has got a turn: a failure of the engine or of
        the gateway, or the GatewayError of a conversation that is too long. Other mistakes of the program do not count.
        """

    def __iter__(self) -> Iterator[Generation]:
        """The open turns."""
        return (turn for turns in list(self._open.values()) for turn in turns)

    @property
    def is_aborting(self) -> bool:
        """Whether a turn was aborted and has not ended. It counts as a turn of the session until then."""
        return any(turn.is_aborting for turn in self)

    def restore(self) -> None:
        """Know the turns of an earlier process. It is not known whether they have reached their clients."""
        for node in self._graph.nodes:
            if node.sampled and (digest := (node.message or {}).get("request", {}).get("digest")):
                self._add_recorded(bytes.fromhex(digest), node.id, is_delivered=False)

    def continue_with(self, graph: TrajectoryGraph) -> None:
        """Continue after the record was read again into `graph`. Turns that were running are being aborted.

        A network file system may have lost the last nodes. Other turns will have their ids, so lost turns are
        forgotten, also those that a client still receives.
        """
        self._graph, count = graph, len(graph.nodes)
        for fingerprint, turns in list(self._open.items()):
            for turn in list(turns):
                if turn.node_id is not None and turn.node_id >= count:
                    self._forget_open(fingerprint, turn)
                    turn.on_closed = None
        self._last = {key: node for key, node in self._last.items() if node < count}
        self._undelivered = {key: [each for each in ids if each < count] for key, ids in self._undelivered.items()}

    def find(self, client: Client) -> Generation | Node | None:
        """The turn of a request that was sent before, or None if the request needs a turn of its own.

        A Node is a recorded turn. A turn without a client comes first: the request is probably that of the client which
        has left. If a conversation continues a recorded turn, its client has received it. Then comes a turn of its own
        for a request that failed or was refused, and is sent again. Otherwise, a client that does not say that it
        repeats its request wants another sample.

        A request that was refused before it was read is not known, because there were too many connections, for
        example. When it is sent again without an id, it gets the turn of an equal request if there is one.
        """
        fingerprint = client.fingerprint
        opened = [turn for turn in self._open.get(fingerprint, []) if not turn.has_failed]
        if (abandoned := next((turn for turn in opened if turn.is_abandoned), None)) is not None:
            return abandoned
        waiting = self._find_undelivered(fingerprint)
        if not client.is_retry or (not client.has_id and self._take_refused(client)):
            return waiting
        undelivered = [turn for turn in opened if not turn.is_delivered]
        if waiting is not None:
            return waiting
        if undelivered or opened:
            return (undelivered or opened)[-1]
        last = self._last.get(fingerprint)
        return None if last is None else self._graph.node(last)

    def _find_undelivered(self, fingerprint: bytes) -> Node | None:
        """The first turn of a request that has perhaps not reached its client: no conversation continues it."""
        waiting = self._undelivered.get(fingerprint)
        while waiting:
            if not self._graph.children(waiting[0]):
                return self._graph.node(waiting[0])
            del waiting[0]
        return None

    @contextlib.contextmanager
    def refusals_of(self, client: Client) -> Iterator[None]:
        """Note that a request got no turn if the block raises an exception: its client may send the request again."""
        try:
            yield
        except BaseException as error:
            self._note_failure(error)
            self._add_refused(client, client.num_retries)
            raise

    def note_refusal(self, client: Client) -> None:
        """Note that a request was refused before `find`. If it was sent before, its turn may be known."""
        if self._take_refused(client) or not client.is_retry:
            self._add_refused(client, client.num_retries)

    @contextlib.contextmanager
    def arriving(self, slots: Slots) -> Iterator[None]:
        """Count a request while it is read. Raises GatewayError if it can have no slot."""
        # A request that joins a running turn without a client needs no slot.
        if slots.is_full and not any(turn.is_abandoned and not turn.task.done() for turn in self):
            slots.take()  # raises the error
        with slots.arrivals.held():
            yield

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
        failed = [turn for turn in self._open.get(fingerprint, []) if turn.has_failed and not turn.is_sent_again]
        if (turn := next((turn for turn in failed if turn.num_retries < num_retries), None)) is not None:
            turn.is_sent_again = True
        return turn is not None

    def _add_refused(self, client: Client, num_retries: int) -> None:
        if client.has_id:
            return  # no other request has its fingerprint
        self._refused[client.fingerprint, num_retries] += 1
        if len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]  # the oldest

    def add(self, client: Client, turn: Generation) -> None:
        """Add the turn of a client, which is open. A recorded turn that is open has perhaps not reached its client."""
        fingerprint, failure = client.fingerprint, self.failure
        self._open.setdefault(fingerprint, []).append(turn)
        if turn.node_id in (waiting := self._undelivered.get(fingerprint, [])):
            waiting.remove(turn.node_id)
        turn.task.add_done_callback(lambda task: self._note_end(task, failure))
        turn.on_closed = lambda: self._close(client, turn)

    def _close(self, client: Client, turn: Generation) -> None:
        """Keep of a turn that is open no more what the next equal request needs: the record has the turn."""
        self._forget_open(client.fingerprint, turn)
        if turn.node_id is not None:
            self._add_recorded(client.fingerprint, turn.node_id, is_delivered=turn.is_delivered)
        elif not turn.is_sent_again:
            self._add_refused(client, turn.num_retries)

    def _forget_open(self, fingerprint: bytes, turn: Generation) -> None:
        turns = self._open[fingerprint]
        turns.remove(turn)
        if not turns:
            del self._open[fingerprint]

    def _add_recorded(self, fingerprint: bytes, node: int, *, is_delivered: bool) -> None:
        self._last[fingerprint] = max(node, self._last.get(fingerprint, node))
        if not is_delivered:
            self._undelivered.setdefault(fingerprint, []).append(node)

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
