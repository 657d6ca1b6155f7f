"""Calls of all servers of a router that answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from verl_server.adapter.client import AsyncHttpServerEngineAdapter
from verl_server.errors import DeadlineError, NotReadyError, ServerDiedError, ServerError, VerlServerError

ANSWER_TIMEOUT_S = 5.0
"""Seconds within which a server must answer to take part in an operation."""
Servers = Mapping[str, AsyncHttpServerEngineAdapter]
"""The adapters of servers by the names of their replicas."""
Call = Callable[[str, AsyncHttpServerEngineAdapter], Awaitable[Any]]
"""Calls a server; its name comes first."""


class AwaitedError(NotReadyError):
    """A server must receive no requests now. The router itself lets it receive requests later."""


async def find_answering(servers: Servers) -> dict[str, AsyncHttpServerEngineAdapter]:
    """The servers that answer now, which take part in the operation. Raises NotReadyError if none does.

    A server that answers again later has missed the operation.
    """
    servers = dict(servers)

    async def answers(server: AsyncHttpServerEngineAdapter) -> bool:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await server.get_model_info()
        except (VerlServerError, TimeoutError):
            return False
        return True

    answering = await asyncio.gather(*(answers(server) for server in servers.values()))
    found = {name: server for (name, server), is_there in zip(servers.items(), answering, strict=True) if is_there}
    if not found:
        raise NotReadyError("no server of this router answers")
    return found


def is_lost(error: BaseException) -> bool:
    """Whether the error says that the server has ended. A server that refuses a call, or hangs, still runs."""
    return isinstance(error, ServerDiedError) or (isinstance(error, ServerError) and "status" not in error.details)


def is_lost_or_silent(error: BaseException) -> bool:
    """Whether the server has ended or does not answer."""
    return is_lost(error) or isinstance(error, DeadlineError)


async def call_all(servers: Servers, call: Call, may_miss: Callable[[BaseException], bool] = is_lost) -> set[str]:
    """Call all servers that answer; returns the names of those where the call has succeeded.

    A server with an error that `may_miss` accepts is left out, unless it is the last one. Other errors are raised
    when all calls have ended.
    """
    return await call_each(await find_answering(servers), call, may_miss)


async def call_each(answering: Servers, call: Call, may_miss: Callable[[BaseException], bool] = is_lost) -> set[str]:
    """Call all of these servers, as `call_all` does."""
    outcomes = await asyncio.gather(*(call(name, server) for name, server in answering.items()), return_exceptions=True)
    errors = {
        name: outcome for name, outcome in zip(answering, outcomes, strict=True) if isinstance(outcome, BaseException)
    }
    if refusals := [error for error in errors.values() if not may_miss(error)]:
        raise refusals[0]
    if errors and len(errors) == len(answering):
        raise next(iter(errors.values()))
    return answering.keys() - errors.keys()
