"""What generates for a gateway: an engine that runs already, or servers that may start later, and come and go."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from verl_server.adapter.sglang.replies import max_request_tokens, max_running_requests
from verl_server.agent.engines import (
    Engine,
    EngineAccess,
    GenerateFn,
    access_engine,
    limit_concurrency,
    load_named_by_server,
)
from verl_server.agent.limits import RolloutLimits
from verl_server.agent.user_code import call_user_function, call_within
from verl_server.config import RemoteServer
from verl_server.errors import BadInputError
from verl_server.gateway.errors import ErrorKind, GatewayError
from verl_server.gateway.sessions.session_store import require_token_limit
from verl_server.gateway.threads import CallThatMayHang
from verl_server.router.dispatcher import Dispatcher
from verl_server.router.process.static_replicas import ProbedServers, servers_by_url
from verl_server.router.resumable_generation import OnTokens
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
from verl_server.trajectory.rendering.tokenizer import IDENTITY_TEXT
from verl_server.types import Json
from verl_server.validation import checked_value

if TYPE_CHECKING:
    from verl_server.adapter.client import AsyncHttpServerEngineAdapter
    from verl_server.rollout.manager import RolloutManager

logger = logging.getLogger(__name__)


# -- Engine source ----------------------------------------------------------------------------------
# `EngineSource`: what a gateway needs of the engine behind it, which may not be there yet.


@dataclass(frozen=True)
class EngineParts:
    """The engine as sessions use it."""

    generate: GenerateFn
    renderer: ChatRenderer
    max_tokens: int | None
    """Maximum number of tokens of a prompt with its response. None if the engine does not tell it."""

    def complete_limits(self, limits: RolloutLimits) -> RolloutLimits:
        """The limits, with the context length of the engine as `max_context_tokens` if they have none."""
        return limits if limits.max_context_tokens else dataclasses.replace(limits, max_context_tokens=self.max_tokens)


@dataclass(frozen=True)
class EngineReport:
    """What can be said about the engine at one moment."""

    problems: list[str]
    """Why no turn can be generated now, in words that every agent may read: without addresses. Empty: ready."""
    details: Json
    """The engine, its servers and their errors, for the admin."""


@runtime_checkable
class EngineSource(Protocol):
    """Where a gateway gets its engine from. All methods are called in the event loop of the gateway."""

    async def start(self) -> None:
        """Begin to look for the engine. Does not wait for it."""

    async def close(self) -> None:
        """Give back what `start` has opened. The engine keeps running."""

    def parts(self) -> EngineParts:
        """The engine. Raises GatewayError (503) while it is not known yet."""

    async def report(self) -> EngineReport:
        """Ask the engine how it is. Takes a few seconds at most and raises nothing."""


EngineOrSource: TypeAlias = "Engine | EngineSource"

# -- Known engine -----------------------------------------------------------------------------------
# `KnownEngine`: an engine of this library, as `RolloutRunner` takes it. It runs when the gateway is made.

ANSWER_TIMEOUT_S = 5.0
"""Seconds in which a server or a router must answer the question whether it serves."""
SCHEDULER_TIMEOUT_S = 2.0


class KnownEngine:
    """An engine of this library. A fleet follows its replicas by itself."""

    def __init__(self, engine: Engine, renderer: ChatRenderer | None) -> None:
        """Ask the engine for its tokenizer and its context length. A router, an asynchronous adapter and a function
        cannot be asked: for them, `renderer` is needed. Raises the errors of `access_engine`.
        """
        access = access_engine(engine)
        self._engine: Any = engine
        self._close_connections = access.close_connections
        self._parts = EngineParts(access.generate, renderer or access.make_renderer(), access.max_tokens)

    async def start(self) -> None:
        """Nothing to do: the engine runs."""

    async def close(self) -> None:
        """Close the connections of this event loop. The engine is the caller's."""
        await self._close_connections()

    def parts(self) -> EngineParts:
        """The engine."""
        return self._parts

    async def report(self) -> EngineReport:
        """Ask the server, the router or the fleet whether it serves. Nothing is known of a function."""
        details: Json = {"engine": type(self._engine).__name__}
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                problems, found = await _ask(self._engine)
        except TimeoutError:
            problems, found = ["the engine does not answer"], {"error": f"no answer within {ANSWER_TIMEOUT_S:g} s"}
        except Exception as error:  # noqa: BLE001 - any failure means that no engine answers
            problems, found = ["the engine does not answer"], {"error": str(error)}
        return EngineReport(problems, {**details, **found})


async def _ask(engine: Any) -> tuple[list[str], Json]:
    """The problems of an engine, and what the admin may know of it. Raises the errors of the requests."""
    from verl_server.adapter.blocking import HttpServerEngineAdapter
    from verl_server.adapter.client import AsyncHttpServerEngineAdapter
    from verl_server.engine.verl_engine import VerlEngine
    from verl_server.rollout.manager import RolloutManager
    from verl_server.router.client import RouterClient

    if isinstance(engine, RolloutManager):
        return _ask_fleet(engine)
    if isinstance(engine, RouterClient):
        problems, found = report_replicas(await engine.replicas())
        return problems, found if problems else {**found, "models": await engine.models()}
    if isinstance(engine, VerlEngine):
        engine = engine.adapter
    if isinstance(engine, HttpServerEngineAdapter):
        engine = engine.asynchronous
    if isinstance(engine, AsyncHttpServerEngineAdapter):
        return await ask_server(engine)
    return [], {}


async def ask_server(server: AsyncHttpServerEngineAdapter) -> tuple[list[str], Json]:
    """The problems of one server. Raises the errors of the requests."""
    from verl_server.adapter.sglang.replies import released_memory

    info, released = await server.get_model_info(), None
    with contextlib.suppress(TimeoutError):  # the scheduler answers, which may be busy with a long prompt
        async with asyncio.timeout(SCHEDULER_TIMEOUT_S):
            released = released_memory(await server.get_server_info())
    problems = (
        [f"the engine has no loaded model: its memory is released ({', '.join(sorted(released))})"] if released else []
    )
    row = {"name": server.base_url, "admitted": not problems, "model": info.get("model_path")}
    return problems, {"servers": [row]}


def _ask_fleet(fleet: RolloutManager) -> tuple[list[str], Json]:
    rows: list[Json] = [
        {"name": info.name, "admitted": info.admitted, "state": str(info.state), "url": info.base_url}
        for info in fleet.status().replicas
    ]
    return report_replicas(rows)


def report_replicas(rows: list[Json]) -> tuple[list[str], Json]:
    """The problems of a router with these replicas."""
    problems = [] if any(row.get("admitted") for row in rows) else [f"none of the {len(rows)} replicas serves requests"]
    return problems, {"servers": rows}


def make_source(
    engine: EngineOrSource, renderer: ChatRenderer | None, limits: RolloutLimits | None
) -> tuple[EngineSource, RolloutLimits]:
    """Where the engine comes from, and the limits, which are complete if the engine runs already."""
    limits = RolloutLimits(max_turns=1_000_000) if limits is None else checked_value("limits", limits, RolloutLimits)
    if isinstance(engine, EngineSource):
        return engine, limits
    known = KnownEngine(engine, renderer)
    limits = known.parts().complete_limits(limits)
    require_token_limit(limits)
    return known, limits


# -- Server tokenizers ------------------------------------------------------------------------------
# `ServerTokenizers`: whether all servers behind one gateway have the same tokenizer.

LOAD_TIMEOUT_S = 5.0
"""Seconds that a probe waits for a tokenizer to load. A later probe uses a tokenizer that takes longer."""
FIRST_LOAD_TIMEOUT_S = 60.0
"""Seconds in which the tokenizer of the first server must load."""

Stamp = tuple[tuple[str, int, int, int], ...]
"""Name, inode, size and time of change of each file of a folder."""


class ServerTokenizers:
    """Compares the tokenizers of servers with that of the first server, with which the gateway makes all prompts.

    A server has the tokenizer that was in its folder when the server started. So the folder is looked at when the
    server begins to answer, and read if its files have changed. Equal paths on different machines are the same folder
    here: this machine reads both.
    """

    def __init__(self, name: str, server_info: Json) -> None:
        """`name`, `server_info`: the first server, and SGLang's `/server_info` of it. Call `read_first` next."""
        self._name, self._path = name, tokenizer_path(server_info)
        self._first: str | None = None
        """Digest of the tokenizer of the first server. None: nothing can be compared."""
        self._digests = dict[str, tuple[Stamp, str | None]]()
        """The files at a path, and the digest of their tokenizer. None if the path cannot be read here."""
        self._compared = dict[str, tuple[float, str]]()
        """For each server, the time since which it answered when it was compared, and the difference that was found."""
        self._load = CallThatMayHang("loading the tokenizer", self._read)

    async def read_first(self) -> None:
        """Read the tokenizer of the first server. If it cannot be read, nothing is compared. The log names it."""
        try:
            self._first = await self._load.result(FIRST_LOAD_TIMEOUT_S, self._path, None)
        except TimeoutError:
            message = "the tokenizer %r has not loaded in %g s, so no tokenizer is compared with it"
            logger.warning(message, self._path, FIRST_LOAD_TIMEOUT_S)

    async def require_same(self, name: str, model_info: Json, answering_since: float) -> None:
        """Raise BadInputError if a server has another tokenizer. `model_info`: SGLang's `/model_info` of the server.

        `answering_since`: time at which the server began to answer. The server is compared once for each such time.

        A tokenizer that cannot be read on this machine is not compared. The log names it. Raises TimeoutError if a
        tokenizer does not load in `LOAD_TIMEOUT_S` seconds, for example because its file system hangs.
        """
        if self._compared.get(name, (None, ""))[0] != answering_since:
            self._compared[name] = (
                answering_since,
                await self._compare(name, tokenizer_path(model_info), answering_since),
            )
        if difference := self._compared[name][1]:
            raise BadInputError(difference)

    async def _compare(self, name: str, path: str, answering_since: float) -> str:
        """How the tokenizer of a server differs from that of the first server. Empty if nothing is known of it."""
        if self._first is None:
            return ""
        try:
            digest = await self._load.result(LOAD_TIMEOUT_S, path, answering_since)
        except TimeoutError:
            raise TimeoutError(
                f"the tokenizer {path!r} has not loaded in {LOAD_TIMEOUT_S:g} s, so the tokenizer of the "
                f"server {name} cannot be compared with that of the server {self._name}"
            ) from None
        if digest in (None, self._first):
            return ""
        hint = "the files have changed since the gateway read them: start the gateway again to use the new files"
        changed = f"; {hint}" if path == self._path else ""
        return (
            f"the server {name} has the tokenizer {path!r}, which differs from the tokenizer {self._path!r} of the "
            f"server {self._name}{changed}; servers behind one gateway need the same tokenizer"
        )

    def _read(self, path: str, answering_since: float | None) -> str | None:
        """The digest of the tokenizer at a path. Files that have not changed are not read again.

        `answering_since`: of the server. A call for an earlier time may have read earlier files.
        """
        del answering_since
        stamp, known = stamp_of(path), self._digests.get(path)
        if known is None or known[0] != stamp:
            known = self._digests[path] = stamp, self._digest(path)
        return known[1]

    def _digest(self, path: str) -> str | None:
        """The digest of a tokenizer. None if it cannot be loaded."""
        from transformers import AutoTokenizer

        try:
            tokenizer = load_named_by_server(AutoTokenizer, path)
        except Exception as error:  # noqa: BLE001 - code of another library: the folder is on another machine, for example
            logger.warning("the tokenizer %r of a server cannot be loaded, so it is not compared: %s", path, error)
            return None
        vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        return hashlib.sha256(repr((vocabulary, tokenizer.encode(IDENTITY_TEXT))).encode()).hexdigest()


def tokenizer_path(info: Json) -> str:
    """Path of a server's tokenizer. `info`: SGLang's `/server_info` or `/model_info`."""
    return str(info.get("tokenizer_path") or info.get("model_path"))


def stamp_of(path: str) -> Stamp:
    """What changes if a file of a folder is written. Empty for a path that is no folder here, for example a name of
    Hugging Face's hub.
    """
    files = list[tuple[str, int, int, int]]()
    with contextlib.suppress(OSError):
        for entry in os.scandir(path):
            with contextlib.suppress(OSError):  # a link to a file that is gone
                found = entry.stat()
                files.append((entry.name, found.st_ino, found.st_size, found.st_mtime_ns))
    return tuple(sorted(files))


# -- Discovered servers -----------------------------------------------------------------------------

FIND_INTERVAL_S = 2.0
"""Seconds between two searches for servers."""
FIND_TIMEOUT_S = 60.0
"""Seconds that a search for servers may take, and that the tokenizer may take to load."""
CLOSE_TIMEOUT_S = 2.0
"""Seconds that `close` of the function that finds servers may take."""
RENDERER_SETTINGS = ("model_path", "tokenizer_path", "revision", "json_model_override_args")
"""Fields of SGLang's `/server_info` of which the renderer is made."""

FindServers = Callable[[], Mapping[str, RemoteServer]]
"""Finds the servers that run now, by name. May block; is called in a daemon thread, one call at a time."""


class DiscoveredServers:
    """Servers that may start after the gateway, restart, move and end. Requests go to those that answer.

    The gateway asks the first server that answers for its tokenizer and its context length. A server with another
    tokenizer gets no requests.
    """

    def __init__(self, servers: Sequence[RemoteServer] | FindServers, renderer: ChatRenderer | None = None) -> None:
        """`servers`: a list, or a function that is called again and again, for example `verl_server.ray.discover`. Its
        method `close` is called at the end, if it has one.

        `renderer`: None makes the renderer of the tokenizer that the servers name. Raises BadInputError for an empty
        list and for a server that is listed twice.
        """
        self._is_single = False
        """Whether there is one server only, whose queue is kept short."""
        if callable(servers):
            self._find: FindServers = servers
        else:
            listed = servers_by_url(servers)
            self._find, self._is_single = lambda: listed, len(listed) == 1
        self._renderer = renderer
        self._dispatcher: Dispatcher | None = None
        self._probed: ProbedServers | None = None
        self._tokenizers: ServerTokenizers | None = None
        """Refuses servers with another tokenizer. None until the tokenizer of the gateway is known."""
        self._parts: EngineParts | None = None
        self._problem = ""
        """Why the search or the tokenizer failed the last time. The reason is logged once."""
        self._following: asyncio.Task[None] | None = None
        self._search = CallThatMayHang("the search for servers", self._find)
        self._load = CallThatMayHang("loading the tokenizer", self._load_renderer)

    async def start(self) -> None:
        """Begin to look for servers."""
        self._dispatcher = Dispatcher()
        self._probed = ProbedServers(self._dispatcher, self._check_server)
        self._following = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Stop looking for servers, and close the connections to them."""
        if self._following is not None:
            self._following.cancel()
            if (end := getattr(self._find, "close", None)) is not None:
                try:
                    await call_within(call_user_function(end), CLOSE_TIMEOUT_S, "close() of the search for servers")
                except Exception as error:  # noqa: BLE001 - the rest is closed all the same
                    logger.warning("the search for servers was not closed: %s", error)
            await asyncio.gather(self._following, return_exceptions=True)
            await self._search.cancel()
            await self._load.cancel()
        if self._probed is not None:
            await self._probed.close()
        if self._dispatcher is not None:
            await self._dispatcher.close()

    def parts(self) -> EngineParts:
        """The engine. Raises GatewayError (503) until a server has answered for the first time."""
        if self._parts is None:
            raise GatewayError(ErrorKind.OVERLOADED, f"{self._explain()}; send the request again")
        return self._parts

    async def report(self) -> EngineReport:
        """The state of the last probes. Servers that have answered are asked whether their memory is released."""
        assert self._dispatcher is not None
        assert self._probed is not None
        problems, infos = self._probed.problems, self._probed.infos
        rows: list[Json] = [
            {
                "name": replica.name,
                "admitted": replica.admitted,
                "problem": problems.get(replica.name),
                "model": infos.get(replica.name, {}).get("model_path"),
            }
            for replica in self._dispatcher.snapshot().replicas
        ]
        answering = [row for row in rows if row["admitted"]]
        for row, found in zip(answering, await asyncio.gather(*map(self._ask, answering)), strict=True):
            row.update(admitted=not found, problem="; ".join(found) or None)
        details: Json = {"engine": "servers", "servers": rows, "problem": self._problem or None}
        if self._parts is None or not answering:
            return EngineReport([self._explain()], details)
        is_ready = any(row["admitted"] for row in answering)
        return EngineReport([] if is_ready else [answering[0]["problem"]], details)

    async def _ask(self, row: Json) -> list[str]:
        """The problems of a server whose last probe was answered. Empty if it does not answer now."""
        assert self._probed is not None
        with contextlib.suppress(Exception):  # the next probe fails, too, or the server was removed meanwhile
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return (await ask_server(self._probed.adapters[row["name"]]))[0]
        return []

    def _explain(self) -> str:
        """Why no turn can be generated, without addresses."""
        num_servers = len(self._probed.adapters) if self._probed is not None else 0
        if not num_servers:
            return "the gateway has found no server yet"
        if self._probed is not None and len(self._probed.problems) < num_servers:
            return "a server answers, and the gateway does not know its tokenizer yet"
        return f"none of the {num_servers} servers answers"

    async def _follow(self) -> None:
        """Follow the servers that come and go."""
        while True:
            problem = ""
            try:
                await self._look()
            except Exception as error:  # noqa: BLE001 - the next search may succeed: a cluster starts later, for example
                problem = str(error) or type(error).__name__
            if problem and problem != self._problem:
                logger.warning("the gateway looks for its servers again: %s", problem)
            self._problem = problem
            await asyncio.sleep(FIND_INTERVAL_S)

    async def _look(self) -> None:
        """Look for servers once. Makes the parts of the engine when the first server has answered."""
        assert self._probed is not None
        servers: Mapping[str, RemoteServer] = await self._search.result(FIND_TIMEOUT_S)
        await self._probed.set_servers(servers)
        if self._parts is None and self._probed.infos:
            await self._find_parts(self._probed)

    async def _find_parts(self, probed: ProbedServers) -> None:
        """Make the parts of the engine. Servers that were admitted before are compared with the first one."""
        first, info, renderer, stamp = await self._find_renderer(dict(probed.infos))
        tokenizers = ServerTokenizers(first, info)
        await tokenizers.read_first()
        if stamp is not None and stamp != stamp_of(path := tokenizer_path(info)):
            raise BadInputError(f"the tokenizer {path!r} has changed while the gateway has read it")
        self._tokenizers = tokenizers
        await probed.probe_all()
        if infos := list(probed.infos.values()):
            self._parts = self._make_parts(renderer, infos)
            logger.info("the gateway has found its engine: %d of %d servers", len(infos), len(probed.adapters))
        else:
            self._tokenizers = None  # the first server has ended: another one will be the first

    async def _find_renderer(self, infos: Mapping[str, Json]) -> tuple[str, Json, ChatRenderer, Stamp | None]:
        """The first server whose tokenizer loads in time: its name, its `/server_info`, and the renderer.

        The last value: the files of the tokenizer when the renderer was made. None for the renderer of the user.

        Raises TimeoutError if no tokenizer loads in time, and the errors of `EngineAccess.make_renderer`.
        """
        late: TimeoutError | None = None
        for name, info in infos.items():
            if self._renderer is not None:
                return name, info, self._renderer, None
            try:
                return name, info, *(await self._load.result(FIND_TIMEOUT_S, *map(info.get, RENDERER_SETTINGS)))
            except TimeoutError as error:
                late = error
        assert late is not None
        raise late

    async def _check_server(self, name: str, model_info: Json, answering_since: float) -> None:
        """Raise BadInputError for a server with another tokenizer than that of the gateway."""
        if self._tokenizers is not None:
            await self._tokenizers.require_same(name, model_info, answering_since)

    def _load_renderer(self, *settings: Any) -> tuple[ChatRenderer, Stamp]:
        """The renderer for a server, and the files of its tokenizer. `settings`: the values of `RENDERER_SETTINGS`."""
        info = dict(zip(RENDERER_SETTINGS, settings, strict=True))
        stamp = stamp_of(tokenizer_path(info))
        return EngineAccess(self._generate, info).make_renderer(), stamp

    def _make_parts(self, renderer: ChatRenderer, infos: Sequence[Json]) -> EngineParts:
        numbers = [number for info in infos if (number := max_request_tokens(info)) is not None]
        generate: GenerateFn = self._generate
        if self._is_single and (limit := max_running_requests(infos[0])) is not None:
            generate = limit_concurrency(generate, limit)  # see docs/decisions/order-of-arrival.md
        return EngineParts(generate, renderer, min(numbers, default=None))

    async def _generate(self, *, rid: str, session_id: str, on_tokens: OnTokens | None = None, **request: Any) -> Json:
        assert self._dispatcher is not None
        reply = await self._dispatcher.generate(request, rid=rid, session_id=session_id, on_tokens=on_tokens)
        return reply
