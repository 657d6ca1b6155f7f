"""`Access`: which session a request belongs to, by its key, and whether it may use the admin API."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from urllib.parse import urlsplit

from fastapi import Request
from starlette.datastructures import Headers

from verl_server.gateway.config import GatewayConfig
from verl_server.gateway.errors import ErrorKind, GatewayError
from verl_server.gateway.sessions.session import Session
from verl_server.gateway.sessions.session_store import SessionStore
from verl_server.ranks.placement import is_loopback

OPEN_SESSION = OPEN_KEY = "open"
"""Id of the session of requests without a key in the open mode, and a key for clients that must send one."""


class Access:
    """Checks the keys of requests."""

    def __init__(self, store: SessionStore, config: GatewayConfig) -> None:
        self._store, self._config = store, config

    def session_of(self, request: Request) -> Session:
        """The session of a request. Its key is in the path, a Bearer token, or the header `x-api-key`.

        Raises GatewayError: 401 without the key of a session, 403 for a session that has ended and for a page of
        another origin without a key, 404 for a path with the id of another session than that of the key.
        """
        in_path = request.path_params.get("session_key")
        keys = keys_of(request.headers)
        if in_path is not None and (session_id := self._store.find_by_key(in_path)) is not None:
            return self._store.session(session_id)
        session_id = self._find_session(keys)
        if session_id is None and self._needs_no_key(*keys, in_path):
            _require_own_origin(request.headers)
            session_id = self._find_open_session()
        if session_id is None:
            if self.is_admin(request):
                message = (
                    "this is the key of the admin API; create a session with POST /admin/sessions and send its key"
                )
                raise GatewayError(ErrorKind.AUTHENTICATION, message)
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

        A session that has ended can be read. Raises GatewayError: 401 for a wrong key, 403 for a page of another
        origin without a key.
        """
        keys = keys_of(request.headers)
        if (session_id := self._find_session(keys)) is not None:
            return [session_id]
        if self._needs_no_key(*keys):
            _require_own_origin(request.headers)
            return [info.id for info in self._store.infos() if info.id == OPEN_SESSION]
        if not self.is_admin(request):
            message = "the key is missing or wrong; enter the admin key or the key of a session"
            raise GatewayError(ErrorKind.AUTHENTICATION, message)
        return [info.id for info in self._store.infos()]

    def _find_session(self, keys: Sequence[str]) -> str | None:
        """Id of the session of the first key that is one of a session."""
        found = (self._store.find_by_key(key) for key in keys)
        return next((session_id for session_id in found if session_id is not None), None)

    def _find_open_session(self) -> str:
        """Id of the session of requests without a key, which is created. Raises GatewayError (403) if it has ended."""
        try:
            info = self._store.info(OPEN_SESSION)
        except GatewayError:
            info, _ = self._store.create(OPEN_SESSION, can_expire=False)
        if info.ended_at is not None:
            raise GatewayError(
                ErrorKind.PERMISSION,
                f"the session {OPEN_SESSION!r} of requests without a key has ended ({info.stop_reason}); "
                "create a session and send its key, or use another folder",
            )
        return info.id

    def _needs_no_key(self, *sent: str | None) -> bool:
        """Whether the open mode serves a request that has sent these keys and no others."""
        return self._config.is_open and set(sent) <= {None, OPEN_KEY}

    def is_admin(self, request: Request) -> bool:
        """Whether the request has the key of the admin API."""
        keys, expected = keys_of(request.headers), self._config.admin_key
        return expected is not None and any(hmac.compare_digest(key.encode(), expected.encode()) for key in keys)

    def require_admin(self, request: Request) -> None:
        """Raise GatewayError (401) unless the request has the key of the admin API."""
        if not self.is_admin(request):
            raise GatewayError(ErrorKind.AUTHENTICATION, "the key of the admin API is missing or wrong")


def _require_own_origin(headers: Headers) -> None:
    """Raise GatewayError (403) for a request without a key that a page of another origin can have sent.

    A browser sends such requests for each page that the user opens, also to the loopback address. A page can also give
    the loopback address a name of its own (DNS rebinding): then `Host` has this name.
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    cure = "create a session and send its key"
    if not _is_loopback_host(host):
        message = f"requests without a key need a loopback address or localhost as Host; {cure}"
        raise GatewayError(ErrorKind.PERMISSION, message)
    if origin is not None and origin.lower() != f"http://{host.lower()}":
        message = f"requests without a key are refused for pages of another Origin than the gateway's; {cure}"
        raise GatewayError(ErrorKind.PERMISSION, message)


def _is_loopback_host(host: str) -> bool:
    """Whether the header `Host`, a name or an address with or without a port, means this machine."""
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False


def keys_of(headers: Headers) -> list[str]:
    """The keys that a request carries: a program may send a key of its own beside that of the session."""
    found = dict[bytes, str]()
    for name, value in reversed(headers.raw):  # of a header that is sent twice, the first counts
        if name in (b"authorization", b"x-api-key", b"api-key"):
            found[name] = value.decode("latin-1")
    kind, _, token = found.get(b"authorization", "").partition(" ")
    bearer = token.strip() if kind.lower() == "bearer" else ""
    keys = (bearer, found.get(b"x-api-key"), found.get(b"api-key"))  # the latter is the header of Azure's clients
    return [key for key in keys if key]
