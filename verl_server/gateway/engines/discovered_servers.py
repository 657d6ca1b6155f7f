"""`DiscoveredServers`: servers that somebody else starts and stops, with a router of their own in the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl_server.adapter.sglang.replies import max_request_tokens, max_running_requests
from verl_server.agent.engine_access import EngineAccess
from verl_server.agent.generate_fn import GenerateFn, limit_concurrency
from verl_server.agent.user_code import call_user_function, call_within
from verl_server.config import RemoteServer
from verl_server.errors import BadInputError
from verl_server.gateway.engines.engine_source import EngineParts, EngineReport
from verl_server.gateway.engines.known_engine import ANSWER_TIMEOUT_S, ask_server
from verl_server.gateway.engines.server_tokenizers import ServerTokenizers, Stamp, stamp_of, tokenizer_path
from verl_server.gateway.errors import ErrorKind, GatewayError
from verl_server.gateway.hanging_calls import CallThatMayHang
from verl_server.router.dispatcher import Dispatcher
from verl_server.router.process.static_replicas import ProbedServers, servers_by_url
from verl_server.router.token_reports import OnTokens
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
from verl_server.types import Json

logger = logging.getLogger(__name__)

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
