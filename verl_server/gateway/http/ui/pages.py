"""`SessionPages`: the rendered pages of sessions. Rendering takes seconds for a long record."""

from __future__ import annotations

import asyncio
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from pathlib import Path

from verl_server.errors import BadInputError
from verl_server.gateway.errors import ErrorKind, GatewayError
from verl_server.gateway.sessions.session_end import record_kinds
from verl_server.gateway.worker_threads import call_in_thread
from verl_server.trajectory.recorder import load_session
from verl_server.trajectory.view.page import render_page
from verl_server.trajectory.view.session import make_session_view
from verl_server.trajectory.view.token_texts import DecodeFn

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
