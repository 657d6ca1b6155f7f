"""Abilities and limits of a running SGLang server, found by requests to its routes instead of by its version."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl_server.adapter.sglang.endpoints import BEGIN_UPDATE, LOADS, OPENAPI, WEIGHTS_CHECKER, Endpoint
from verl_server.adapter.sglang.request_fields import REQUEST_FIELDS
from verl_server.errors import UnsupportedError, VerlServerError
from verl_server.types import Json

if TYPE_CHECKING:
    from verl_server.adapter.http_client import HttpClient

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


def max_request_tokens(server_info: Json) -> int | None:
    """Maximum number of tokens of a prompt with its response, from `/server_info`. None if the server does not tell it.

    SGLang calls the number `max_req_input_len`. It is also the shortest prompt that the server refuses.
    """
    states = server_info.get("internal_states") or [{}]
    number = server_info.get("max_req_input_len") or states[0].get("max_req_input_len")
    return None if number is None else int(number)


def max_running_requests(server_info: Json) -> int | None:
    """Number of requests that a server processes at a time, from `/server_info`. None if the server does not tell it.

    SGLang calls it `effective_max_running_requests_per_dp`: the number for each data parallel rank.
    """
    states = server_info.get("internal_states")
    state = states[0] if isinstance(states, list) and states else None
    number = state.get("effective_max_running_requests_per_dp") if isinstance(state, dict) else None
    if not isinstance(number, int) or number < 1:
        return None
    return number * num_data_parallel_ranks(server_info)


def num_data_parallel_ranks(server_args: Mapping[str, Any]) -> int:
    """Number of ranks with a scheduler of their own, from `/server_info` or from the arguments of a server.

    SGLang 0.5.23 replaces `dp_size` by `attn_dp_size` if there is DP attention, and refuses both above 1.
    """
    return max(int(server_args.get(name) or 1) for name in ("dp_size", "attn_dp_size"))
