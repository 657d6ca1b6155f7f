"""`Access`: which session a request belongs to, by its key, and whether it may use the admin API."""

from __future__ import annotations

import hmac

from fastapi import Request
from starlette.datastructures import Headers

from verl_server.gateway.config import GatewayConfig
from verl_server.gateway.errors import ErrorKind, GatewayError
from verl_server.gateway.sessions.session import Session
from verl_server.gateway.sessions.session_store import SessionStore

OPEN_SESSION = OPEN_KEY = "open"
"""Id of the session of requests without a key in the open mode, and a key for clients that must send one."""


class Access:
    """Checks the keys of requests."""

    def __init__(self, store: SessionStore, config: GatewayConfig) -> None:
        self._store, self._config = store, config

    def session_of(self, request: Request) -> Session:
        """The session of a request. Its key is in the path, a Bearer token, or the header `x-api-key`.

        Raises GatewayError: 401 without the key of a session, 403 for a session that has ended, 404 for a path with
        the id of another session than that of the key.
        """
        in_path = request.path_params.get("session_key")
        key = key_of(request.headers)
        if in_path is not None and (session_id := self._store.find_by_key(in_path)) is not None:
            return self._store.session(session_id)
        session_id = None if key is None else self._store.find_by_key(key)
        if self._config.is_open and session_id is None and {key, in_path} <= {None, OPEN_KEY}:
            session_id = OPEN_SESSION
            try:
                self._store.info(OPEN_SESSION)
            except GatewayError:
                self._store.create(OPEN_SESSION)
        if session_id is None:
            raise GatewayError(
                ErrorKind.AUTHENTICATION,
                "the key of the session is missing or wrong; send it as `Authorization: Bearer KEY`, as `x-api-key`, "
                "or in the path: /session/KEY/v1/...",
            )
        if in_path is not None and in_path != session_id:
            raise GatewayError(ErrorKind.NOT_FOUND, "there is no such session for this key")
        return self._store.session(session_id)

    def readable_sessions(self, request: Request) -> list[str]:
        """Ids of the sessions that the key of a request may read: all with the admin key, or that of the key.

        A session that has ended can be read. Raises GatewayError (401) for a wrong key.
        """
        key = key_of(request.headers)
        if key is not None and (session_id := self._store.find_by_key(key)) is not None:
            return [session_id]
        if key is None and self._config.is_open:
            return [info.id for info in self._store.infos() if info.id == OPEN_SESSION]
        self.require_admin(request)
        return [info.id for info in self._store.infos()]

    def is_admin(self, request: Request) -> bool:
        """Whether the request has the key of the admin API."""
        key, expected = key_of(request.headers), self._config.admin_key
        return key is not None and expected is not None and hmac.compare_digest(key.encode(), expected.encode())

    def require_admin(self, request: Request) -> None:
        """Raise GatewayError (401) unless the request has the key of the admin API."""
        if not self.is_admin(request):
            raise GatewayError(ErrorKind.AUTHENTICATION, "the key of the admin API is missing or wrong")


def key_of(headers: Headers) -> str | None:
    """The key that a request carries."""
    found = dict[bytes, str]()
    for name, value in reversed(headers.raw):  # of a header that is sent twice, the first counts
        if name in (b"authorization", b"x-api-key"):
            found[name] = value.decode("latin-1")
    kind, _, token = found.get(b"authorization", "").partition(" ")
    if kind.lower() == "bearer" and token.strip():
        return token.strip()
    return found.get(b"x-api-key") or None
