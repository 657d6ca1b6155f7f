"""Abilities and limits of a running SGLang server, found by requests to its routes instead of by its version."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_server.adapter.sglang.replies import BEGIN_UPDATE, LOADS, OPENAPI, WEIGHTS_CHECKER, Endpoint
from verl_server.adapter.sglang.requests import REQUEST_FIELDS
from verl_server.errors import UnsupportedError, VerlServerError

if TYPE_CHECKING:
    from verl_server.adapter.http import HttpClient

#: Lowest and highest supported version. `verl-server doctor` warns about other versions, which may work too.
SUPPORTED_VERSIONS = ("0.5.15", "0.5.23")
#: The version that CI runs all tests with. The differences of the other supported versions are probed.
TESTED_VERSION = "0.5.23"


@dataclass(frozen=True)
class Capabilities:
    """Abilities that differ between SGLang 0.5.15 and 0.5.23."""

    update_sessions: bool
    """`/begin_weight_update` and `/end_weight_update` exist. Weight updates must then be sent between the two."""
    loads: bool
    """`/v1/loads` exists."""
    weights_checker: bool
    """`/weights_checker` exists."""


async def probe_capabilities(http: HttpClient) -> Capabilities:
    """Request each route with OPTIONS, which changes nothing: an existing route answers 405, a missing route 404.

    Starlette's router answers in this way, and SGLang accepts OPTIONS requests without a key.
    """
    routes = (BEGIN_UPDATE, LOADS, WEIGHTS_CHECKER)
    update_sessions, loads, weights_checker = await asyncio.gather(*(_route_exists(http, route) for route in routes))
    return Capabilities(update_sessions=update_sessions, loads=loads, weights_checker=weights_checker)


async def _route_exists(http: HttpClient, endpoint: Endpoint) -> bool:
    try:
        await http.call(Endpoint(endpoint.path, method="OPTIONS", retryable=True, is_optional=True))
    except UnsupportedError:
        return False
    except VerlServerError as error:
        if error.details.get("status") != 405:
            raise
    return True


async def probe_request_fields(http: HttpClient) -> frozenset[str]:
    """The fields of `/generate`, from the server's description of its own routes (OpenAPI).

    The server generates its description at the first request, which takes a second. The fields that 0.5.15 and 0.5.23
    have are added: a server that was started with DISABLE_OPENAPI_DOC has no description.
    """
    try:
        schemas = (await http.call(OPENAPI))["components"]["schemas"]
    except UnsupportedError:
        return REQUEST_FIELDS
    return REQUEST_FIELDS.union(schemas["GenerateReqInput"]["properties"])
