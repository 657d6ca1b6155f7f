"""The HTTP server of a gateway: uvicorn with the connections of this package."""

from __future__ import annotations

import uvicorn
from fastapi import FastAPI

from verl_server.gateway.config import GatewayConfig
from verl_server.gateway.http.connections import protocol_of


def make_server(app: FastAPI, config: GatewayConfig, grace_s: int) -> uvicorn.Server:
    """The server of an application. `grace_s`: seconds in which replies may still be sent at the end."""
    settings = uvicorn.Config(
        app,
        http=protocol_of(config),
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # nothing depends on the address of a client
        timeout_keep_alive=config.idle_timeout_s,
        timeout_graceful_shutdown=grace_s,
    )
    return uvicorn.Server(settings)
