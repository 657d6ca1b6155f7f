"""The routes of the live page: the page, the list of sessions, and the view of one session. All of them only read."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import orjson
from fastapi import FastAPI, Request, Response

from verl_server.gateway.errors import ErrorKind, GatewayError
from verl_server.gateway.http.access import Access
from verl_server.gateway.http.ui.pages import SessionPages, tag_of
from verl_server.gateway.sessions.session_info import SessionInfo
from verl_server.gateway.sessions.session_store import SessionStore
from verl_server.trajectory.view.texts import visible
from verl_server.trajectory.view.token_texts import DecodeFn
from verl_server.types import Json

MAX_LISTED_SESSIONS = 500
"""Number of sessions that the page lists: the latest ones."""
CLIENT_HAS_GONE = 499
"""Status of a request whose client has gone before its page was rendered. Nobody reads it."""


def add_ui_routes(app: FastAPI, store: SessionStore, access: Access, decode: DecodeFn) -> None:
    """Add `/ui` and what it reads. The key of the admin API shows all sessions, the key of a session this session.

    `decode`: decodes token ids with special tokens.
    """
    pages = SessionPages(decode)

    async def page() -> Response:
        return Response(_page(), media_type="text/html", headers={"Content-Security-Policy": _page_policy()})

    async def sessions(request: Request) -> Response:
        infos = [store.info(session_id) for session_id in access.readable_sessions(request)]
        is_admin = access.is_admin(request)
        latest = sorted(infos, key=lambda info: -info.created_at)[:MAX_LISTED_SESSIONS]
        body = orjson.dumps({"sessions": [_row(store, info, is_admin) for info in latest]})
        return Response(body, media_type="application/json", headers=_no_store())

    async def session(request: Request, session_id: str) -> Response:
        if session_id not in access.readable_sessions(request):
            raise GatewayError(ErrorKind.NOT_FOUND, "there is no such session for this key")
        file = store.record_file(session_id)
        if (tag := tag_of(file)) is None:
            raise GatewayError(ErrorKind.NOT_FOUND, f"the session {session_id!r} has no turn yet")
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304)
        if (found := await pages.get(file, request.is_disconnected)) is None:
            return Response(status_code=CLIENT_HAS_GONE)
        tag, html = found
        return Response(html, media_type="text/html", headers={**_no_store(), "ETag": tag})

    app.add_api_route("/ui", page, methods=["GET"])
    app.add_api_route("/ui/sessions", sessions, methods=["GET"])
    app.add_api_route("/ui/sessions/{session_id}", session, methods=["GET"])


def _row(store: SessionStore, info: SessionInfo, is_admin: bool) -> Json:
    """A session. Its agent, which has the key of the session, sees no metadata: the expected answer, for example."""
    file = store.record_file(info.id)
    return {
        "id": info.id,
        "created_at": info.created_at,
        "is_open": info.ended_at is None,
        "stop_reason": visible(info.stop_reason or ""),
        "reward": info.reward,
        "metadata": visible(orjson.dumps(info.metadata).decode())[:500] if is_admin else "{}",
        "kilobytes": -(-file.stat().st_size // 1000) if file.exists() else None,
    }


@functools.cache
def _page() -> bytes:
    return (Path(__file__).parent / "live.html").read_bytes()


@functools.cache
def _page_policy() -> str:
    """The content security policy: only the page's own script runs, and it sends requests to the gateway only."""
    scripts: Sequence[bytes] = re.findall(rb"<script>(.*?)</script>", _page(), re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(script).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )


def _no_store() -> dict[str, str]:
    """The page has texts of agents, which stay out of the browser's disk cache."""
    return {"Cache-Control": "no-store"}
