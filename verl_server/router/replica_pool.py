"""Who works where: the replicas as the router knows them, the sessions, the queue for a place. In one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from verl_server.config import RouterConfig
from verl_server.errors import BadInputError, NotReadyError, ShutDownError, VerlServerError
from verl_server.router.policy import ReplicaLoad, VersionRequirement, choose, require_place_in_queue

MAX_ID = 512
"""Characters of a request's or session's id."""


class Engine(Protocol):
    """What the router needs of a replica: the asynchronous adapter's generation."""

    base_url: str
    api_key: str | None

    async def generate(self, **request: Any) -> Any: ...
    def generate_stream(self, **request: Any) -> Any: ...


@dataclass
class Replica:
    """What the router knows of one replica."""

    name: str
    engine: Engine
    load: ReplicaLoad
    expected: bool = True
    """It serves, or will serve again by itself."""
    tokens: dict[str, int] = field(default_factory=dict)
    """Of each of its requests."""
    progress_at: float = 0.0
    """When it last made progress (`time.monotonic`)."""


@dataclass
class Counters:
    """Since the start."""

    requests: int = 0
    finished: int = 0
    failed: int = 0
    refused: int = 0
    attached: int = 0
    continued: int = 0
    """Samples that went on elsewhere with the tokens that they had."""
    restarted: int = 0
    """Samples that began again elsewhere."""
    saved_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True)
class RoutingRequest:
    """What a request brings when it looks for a replica."""

    need: VersionRequirement = field(default_factory=VersionRequirement)
    session_id: str | None = None
    size: int = 0
    """Of its prompt, in tokens: what another replica would have to compute again."""


class ReplicaPool:
    """Made and used in one event loop."""

    def __init__(self, config: RouterConfig | None = None) -> None:
        self.config = config or RouterConfig()
        self.replicas: dict[str, Replica] = {}
        self.counters = Counters()
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._waiting: deque[tuple[RoutingRequest, asyncio.Future[Replica]]] = deque()
        self._closed = False
        self._coming: set[str] = set()
        """Replicas that have no server yet, but will."""

    # -- the fleet's side ---------------------------------------------------------------------------

    def put(self, name: str, engine: Engine, version: int, *, admitted: bool = True) -> None:
        """A replica, new or with another server behind it."""
        self._coming.discard(name)
        self.replicas[name] = Replica(
            name, engine, ReplicaLoad(name, 0, 0, version, admitted), progress_at=time.monotonic()
        )
        self._place_waiting()

    def update(
        self,
        name: str,
        *,
        version: int | None = None,
        admitted: bool | None = None,
        suspect: bool | None = None,
        expected: bool | None = None,
    ) -> None:
        """What has changed of a replica; None leaves a thing as it is. Raises BadInputError for an unknown one."""
        one = self.replica(name)
        before = one.load
        one.load = replace(
            before,
            version=before.version if version is None else version,
            admitted=before.admitted if admitted is None else admitted,
            suspect=before.suspect if suspect is None else suspect,
        )
        if expected is not None:
            one.expected = expected
        self._place_waiting()

    def announce(self, name: str, *, coming: bool) -> None:
        """Whether a replica that has no server yet will serve: then requests wait for it."""
        (self._coming.add if coming else self._coming.discard)(name)
        self._place_waiting()

    def drop(self, name: str) -> None:
        """Forget a replica; what runs on it goes on elsewhere."""
        self._coming.discard(name)
        self.replicas.pop(name, None)
        self._place_waiting()

    def lost(self, replica: Replica) -> None:
        """The connection to it broke: it gets nothing until somebody says that it is back."""
        replica.load = replace(replica.load, admitted=False)

    def replica(self, name: str) -> Replica:
        if name not in self.replicas:
            raise BadInputError(f"there is no replica {name!r}; there are {sorted(self.replicas)}")
        return self.replicas[name]

    @property
    def closed(self) -> bool:
        """Whether it was shut down."""
        return self._closed

    @property
    def waiting(self) -> int:
        """Requests that have no replica yet."""
        return len(self._waiting)

    # -- places -------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def place(self, session_id: str | None, size: int) -> AsyncIterator[Replica]:
        """A replica for a request that is passed on as it is; `size`: of its prompt, about, in tokens."""
        replica = await self._place(RoutingRequest(session_id=checked_id(session_id, "session_id"), size=size))
        ticket = uuid.uuid4().hex
        replica.tokens[ticket] = size
        if len(replica.tokens) == 1:
            replica.progress_at = time.monotonic()
        try:
            yield replica
        finally:
            self._leave(replica, ticket)

    def _loads(self) -> list[ReplicaLoad]:
        found = []
        for one in self.replicas.values():
            know = one.load  # (`replace` takes five times as long, and this is done for every request)
            tokens, requests = sum(one.tokens.values()), len(one.tokens)
            found.append(ReplicaLoad(one.name, tokens, requests, know.version, know.admitted, know.suspect))
        return found

    def _choose(self, ask: RoutingRequest) -> Replica | None:
        """The replica for a request, None when it has to wait for one."""
        session_id = ask.session_id
        sticky = None if session_id is None else self._sessions.get(session_id)
        try:
            name = choose(self._loads(), ask.need, sticky, ask.size, self.config.limits)
        except NotReadyError:
            if self._coming or any(not one.load.admitted and one.expected for one in self.replicas.values()):
                return None
            self.counters.refused += 1
            raise
        if name is None:
            return None
        if session_id is not None:
            self._sessions[session_id] = name
            self._sessions.move_to_end(session_id)
            while len(self._sessions) > self.config.keep_sessions:
                self._sessions.popitem(last=False)
        return self.replicas[name]

    async def _place(self, ask: RoutingRequest) -> Replica:
        """A replica with room; waits for one, in turn."""
        found = self._choose(ask) if not self._waiting else None
        if found is not None:
            return found
        require_place_in_queue(len(self._waiting), self.config.max_queued_requests)
        ticket: asyncio.Future[Replica] = asyncio.get_running_loop().create_future()
        self._waiting.append((ask, ticket))
        self._place_waiting()
        return await ticket

    def _place_waiting(self) -> None:
        """Give places to those who wait, the first come first, as far as there is room."""
        if not self._waiting:
            return
        still: deque[tuple[RoutingRequest, asyncio.Future[Replica]]] = deque()
        while self._waiting:
            ask, ticket = self._waiting.popleft()
            if ticket.done():  # its caller has gone
                continue
            try:
                replica = self._choose(ask)
            except VerlServerError as error:
                ticket.set_exception(error)
                continue
            if replica is None:
                still.append((ask, ticket))
                if not self._has_room():
                    break
                continue
            replica.tokens[f"placed-{id(ticket)}"] = 0  # until its request has begun
            ticket.add_done_callback(functools.partial(self._forget_place, replica))
            ticket.set_result(replica)
        still.extend(self._waiting)
        self._waiting = still

    def _forget_place(self, replica: Replica, ticket: asyncio.Future[Replica]) -> None:
        replica.tokens.pop(f"placed-{id(ticket)}", None)
        self._place_waiting()

    def _has_room(self) -> bool:
        limit = self.config.limits.requests
        return any(one.load.admitted and len(one.tokens) < limit for one in self.replicas.values())

    def _leave(self, replica: Replica, attempt: str) -> None:
        replica.tokens.pop(attempt, None)
        self._place_waiting()

    def _turn_away(self) -> None:
        """Nobody gets a place any more."""
        self._closed = True
        for _, ticket in self._waiting:
            if not ticket.done():
                ticket.set_exception(ShutDownError("the router was shut down"))
        self._waiting.clear()


def checked_id(given: str | None, what: str) -> str | None:
    """Raises BadInputError for what is no id."""
    if given is None:
        return None
    if not isinstance(given, str) or not given or len(given) > MAX_ID:
        size = f"{len(given)} characters" if isinstance(given, str) else type(given).__name__
        raise BadInputError(f"{what} must be a string of 1 to {MAX_ID} characters, got {size}")
    return given
