"""`Generation`: a turn that is being generated, and the clients that wait for the turn (`Client`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Self

from verl_server.gateway.conversation import AssistantTurn, TurnDelta
from verl_server.gateway.errors import ErrorKind, GatewayError
from verl_server.gateway.sessions.slots import Slots
from verl_server.gateway.turn_text.turn_progress import TurnDeltas, TurnProgress

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
