"""`KnownEngine`: an engine of this library, as `RolloutRunner` takes it. It runs when the gateway is made."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from verl_server.agent.engine_access import Engine, access_engine
from verl_server.agent.episodes.episode_state import require_limits
from verl_server.agent.limits import RolloutLimits
from verl_server.gateway.engines.engine_source import EngineParts, EngineReport, EngineSource
from verl_server.gateway.sessions.session_info import require_token_limit
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
from verl_server.types import Json

if TYPE_CHECKING:
    from verl_server.adapter.client import AsyncHttpServerEngineAdapter
    from verl_server.rollout.manager import RolloutManager

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
    engine: Engine | EngineSource, renderer: ChatRenderer | None, limits: RolloutLimits | None
) -> tuple[EngineSource, RolloutLimits]:
    """Where the engine comes from, and the limits, which are complete if the engine runs already."""
    limits = RolloutLimits(max_turns=1_000_000) if limits is None else require_limits(limits)
    if isinstance(engine, EngineSource):
        return engine, limits
    known = KnownEngine(engine, renderer)
    limits = known.parts().complete_limits(limits)
    require_token_limit(limits)
    return known, limits
