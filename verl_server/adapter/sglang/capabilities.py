"""What the server at the other end can do, found by asking its routes, not by its version string."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_server.adapter import sglang as api
from verl_server.errors import UnsupportedError, VerlServerError

if TYPE_CHECKING:
    from verl_server.adapter.http_client import HttpClient

#: Versions whose behaviour is tested; others may work, `verl-server doctor` warns.
TESTED_VERSIONS = ("0.5.15", "0.5.23")


@dataclass(frozen=True)
class Capabilities:
    """Abilities that differ between SGLang 0.5.15 and 0.5.23."""

    update_sessions: bool
    """`/begin_weight_update` and `/end_weight_update` exist, so updates must stand between them."""
    loads: bool
    """`/v1/loads` exists."""
    weights_checker: bool


async def probe(http: HttpClient) -> Capabilities:
    """Ask each route with OPTIONS, which has no effect: 405 where the route exists, 404 where not.

    (Starlette's router answers so; SGLang lets OPTIONS through without a key.)
    """
    routes = (api.BEGIN_UPDATE, api.LOADS, api.WEIGHTS_CHECKER)
    sessions, loads, checker = await asyncio.gather(*(_exists(http, route) for route in routes))
    return Capabilities(update_sessions=sessions, loads=loads, weights_checker=checker)


async def _exists(http: HttpClient, endpoint: api.Endpoint) -> bool:
    try:
        await http.call(api.Endpoint(endpoint.path, method="OPTIONS", repeatable=True))
    except UnsupportedError:
        return False
    except VerlServerError as error:
        if error.details.get("status") != 405:
            raise
    return True
