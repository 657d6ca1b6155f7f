"""The routes of the live page: the page, the list of sessions, and the view of one session. All of them only read."""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import re
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import orjson
from fastapi import FastAPI, Request, Response

from verl_server.errors import BadInputError
from verl_server.gateway.errors import ErrorKind, GatewayError
from verl_server.gateway.http.access import Access
from verl_server.gateway.sessions.session_store import SessionInfo, SessionStore, record_kinds
from verl_server.gateway.threads import call_in_thread
from verl_server.trajectory.recorder import load_session
from verl_server.trajectory.view import DecodeFn, make_session_view, render_page, visible
from verl_server.types import Json

# -- Pages ------------------------------------------------------------------------------------------
# `SessionPages`: the rendered pages of sessions. Rendering takes seconds for a long record.

MAX_RECORD_BYTES = 64 << 20
"""Maximum size of a record that is shown."""
MAX_TOKENS = 1_000_000
"""Maximum number of tokens of a record that is shown."""
MAX_CACHED_BYTES = 64 << 20
"""Maximum size of all pages that are kept. The latest page is always kept."""
CURE = "`verl-server trajectory show --html` writes the page of a longer record"


class SessionPages:
    """Renders one page at a time, and keeps the latest ones. Requests for the same version of a record share a page.

    A page is rendered in a daemon thread, which does not hold up the end of the gateway.
    """

    def __init__(self, decode: DecodeFn) -> None:
        """`decode`: decodes token ids with special tokens."""
        self._decode = decode
        self._rendering = asyncio.Semaphore(1)  # many open pages do not slow down all turns
        self._locks = weakref.WeakValueDictionary[Path, asyncio.Lock]()
        self._pages = OrderedDict[Path, tuple[str, bytes | GatewayError]]()

    async def get(self, file: Path, has_left: Callable[[], Awaitable[bool]]) -> tuple[str, bytes] | None:
        """The tag and the page of a record, which has a file. None if the client has left before its page was rendered.

        Raises GatewayError for a record that is too long or cannot be read.
        """
        lock = self._locks.setdefault(file, asyncio.Lock())
        async with lock:
            tag = tag_of(file) or ""
            if self._pages.get(file, ("",))[0] != tag:
                async with self._rendering:
                    if await has_left():
                        return None
                    try:
                        found: bytes | GatewayError = await call_in_thread(_render, file, self._decode)
                    except GatewayError as error:
                        found = error  # it is not read again until it changes
                self._keep(file, tag, found)
            page = self._pages[file][1]
        if isinstance(page, GatewayError):
            raise GatewayError(page.kind, page.message)
        return tag, page

    def _keep(self, file: Path, tag: str, page: bytes | GatewayError) -> None:
        self._pages.pop(file, None)
        self._pages[file] = (tag, page)
        while len(self._pages) > 1 and sum(_size(page) for _, page in self._pages.values()) > MAX_CACHED_BYTES:
            self._pages.popitem(last=False)


def _size(page: bytes | GatewayError) -> int:
    return 1 << 10 if isinstance(page, GatewayError) else len(page)


def tag_of(file: Path) -> str | None:
    """Changes with the file. None without a file."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return f'"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"'


def _render(file: Path, decode: DecodeFn) -> bytes:
    """The page of a record, which may be written at the same time. Raises GatewayError if it cannot be shown."""
    if file.stat().st_size > MAX_RECORD_BYTES:
        raise GatewayError(ErrorKind.TOO_LARGE, f"the record has more than {MAX_RECORD_BYTES >> 20} MiB; {CURE}")
    try:
        graph = load_session(file)
        if sum(len(node.token_ids) for node in graph.nodes) > MAX_TOKENS:
            raise GatewayError(ErrorKind.TOO_LARGE, f"the record has more than {MAX_TOKENS} tokens; {CURE}")
        record_kinds(graph)  # of a session that runs; the file gets them at the end of the session
        return render_page(make_session_view(graph, decode)).encode()
    except BadInputError as error:
        raise GatewayError(ErrorKind.INTERNAL, f"the record cannot be read: {error.message}") from None


# -- Routes -----------------------------------------------------------------------------------------

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
