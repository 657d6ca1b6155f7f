"""Protection of vLLM's HTTP server by keys: an ASGI class.

vLLM's own key protects a few paths only. The routes for weights, pauses, memory and remote calls would be open, and so
would one route that generates. Here each path needs a key, except `OPEN_PATHS`. The class works in the process that
called `set_keys`, so the keys are in no environment variable.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/metrics"})
"""Paths that GET and HEAD requests reach without a key."""
API_PREFIXES = ("/inference/v1/", "/v1/")
"""Paths below these need the API key or the admin key. All other paths need the admin key, except `api_paths`."""
ADMIN_PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""Paths below `API_PREFIXES` that change the server, and so need the admin key."""
UNAUTHORIZED = b'{"error":{"message":"a valid key is required","type":"Unauthorized","code":401}}'
POLICY_VIOLATION = 1008
"""Close code of a refused websocket (RFC 6455)."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_digests: dict[str, bytes] = {}
"""Digests of the keys "api" and "admin" of this process's server."""


def set_keys(api_key: str, admin_api_key: str) -> None:
    """Set the keys of this process's server. Raises ValueError for an empty key."""
    if not api_key or not admin_api_key:
        raise ValueError("a key is empty")
    _digests.update(api=_digest(api_key.encode()), admin=_digest(admin_api_key.encode()))


class KeyMiddleware:
    """Answers 401 to requests without the key that their path needs. Raises RuntimeError without `set_keys`."""

    def __init__(self, app: App, api_paths: frozenset[str]) -> None:
        """`api_paths`: further paths for which the API key suffices."""
        if not _digests:
            raise RuntimeError("the keys of the server are not set: start it with verl_server.vllm_server.server_main")
        self._app, self._api_paths = app, api_paths
        self._admin = [_digests["admin"]]
        self._api = [_digests["api"], _digests["admin"]]

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._is_allowed(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": UNAUTHORIZED})
        else:
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})

    def _is_allowed(self, scope: Message) -> bool:
        path = scope["path"]
        if scope["type"] == "http" and path in OPEN_PATHS and scope["method"] in ("GET", "HEAD"):
            return True
        is_api = path in self._api_paths or (path.startswith(API_PREFIXES) and path not in ADMIN_PATHS)
        accepted = self._api if is_api else self._admin
        given = _digest(_bearer_token(scope["headers"]))
        # Every digest is compared, so the time of the answer does not tell which key was nearly right.
        return any([hmac.compare_digest(given, digest) for digest in accepted])


def _bearer_token(headers: list[tuple[bytes, bytes]]) -> bytes:
    """The token of the header `Authorization: Bearer TOKEN`. Empty without the header, and with two of them."""
    values = [value for name, value in headers if name.lower() == b"authorization"]
    scheme, _, token = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
    return token.strip() if scheme.lower() == b"bearer" else b""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
