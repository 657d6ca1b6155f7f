"""Requests that ask a server about itself. They are methods of `AsyncHttpServerEngineAdapter`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from verl_server.adapter.sglang import endpoints
from verl_server.adapter.sglang.capabilities import Capabilities
from verl_server.errors import BadInputError, UnsupportedError
from verl_server.types import Json, parse_weight_version

if TYPE_CHECKING:
    from verl_server.adapter.client import AsyncHttpServerEngineAdapter


async def get_model_info(adapter: AsyncHttpServerEngineAdapter) -> Json:
    """SGLang's `/model_info`: model path, architecture, and `weight_version` as an int."""
    info = dict(await adapter.connection.call(endpoints.MODEL_INFO))
    return {**info, "weight_version": parse_weight_version(info.get("weight_version"))}


async def get_server_info(adapter: AsyncHttpServerEngineAdapter) -> Json:
    """SGLang's `/server_info`: all resolved server arguments and the scheduler's state, without the API keys."""
    return await adapter.connection.get_server_info()


async def get_loads(adapter: AsyncHttpServerEngineAdapter) -> Json:
    """SGLang's `/v1/loads`: running requests, waiting requests and token usage, per DP rank."""
    return dict(await adapter.connection.call(endpoints.LOADS))


async def is_ready(adapter: AsyncHttpServerEngineAdapter) -> bool:
    """Whether the server accepts new requests now. False while generation is paused."""
    return await adapter.connection.is_ok(endpoints.READY)


async def ping(adapter: AsyncHttpServerEngineAdapter) -> bool:
    """Whether the server's HTTP loop answers. True also while generation is paused."""
    return await adapter.connection.is_ok(endpoints.PING)


async def health(adapter: AsyncHttpServerEngineAdapter) -> bool:
    """Whether the server can generate one token. Takes about one second; meaningless while generation is paused."""
    return await adapter.connection.is_ok(endpoints.HEALTH)


async def check_keys(adapter: AsyncHttpServerEngineAdapter) -> None:
    """Check that the server accepts the keys of this adapter. Changes nothing on the server.

    Raises ServerError with the name of the key that is missing or wrong. The admin key is not checked by a version of
    SGLang that has no request with an admin key that changes nothing.
    """
    await adapter.connection.call(endpoints.MODEL_INFO)
    with contextlib.suppress(BadInputError, UnsupportedError):  # the server has no admin key, or no such request
        await adapter.connection.call(endpoints.ADMIN_STATUS)


async def fused_modules(adapter: AsyncHttpServerEngineAdapter) -> tuple[tuple[str, ...], ...] | None:
    """Internal. The value of `ServerInfo.fused_modules` for this server."""
    modules = (await adapter.connection.get_resolved_args()).get("fused_modules")
    return None if modules is None else tuple(tuple(names) for names in modules)


async def capabilities(adapter: AsyncHttpServerEngineAdapter) -> Capabilities:
    """Abilities of this version of SGLang. They are probed once."""
    return await adapter.connection.get_capabilities()
