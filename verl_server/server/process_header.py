"""The header by which each HTTP reply of a server names the process that has answered.

An address does not say which server answers: a server that was started again has the address of the one before, and a
host name or a load balancer may lead to several servers. Imports the standard library only: it runs in the servers.
"""

from __future__ import annotations

import secrets
from typing import Any

PROCESS_HEADER = "x-verl-server-process"


class ProcessHeader:
    """ASGI class that adds `PROCESS_HEADER` to each reply of `app`. The value is random and belongs to this object."""

    def __init__(self, app: Any) -> None:
        self._app, self._header = app, (PROCESS_HEADER.encode(), secrets.token_hex(8).encode())

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_named(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), self._header]}
            await send(message)

        await self._app(scope, receive, send_named)
