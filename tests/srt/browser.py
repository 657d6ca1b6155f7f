"""A real browser without a window, driven by the DevTools protocol of Chromium."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DEADLINE_S = 30.0
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (Debian: chromium)")


class Page:
    """One page of a browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._numbers = socket, itertools.count(1)

    async def call(self, method: str, **params: Any) -> Any:
        """The result of a command of the DevTools protocol."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(DEADLINE_S):
            while True:
                message = await self._socket.receive_json()
                if message.get("id") == number:
                    assert "error" not in message, message
                    return message["result"]

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def wait_for(self, expression: str) -> Any:
        """The first value of an expression that is not false."""
        async with asyncio.timeout(DEADLINE_S):
            while not (value := await self.evaluate(expression)):
                await asyncio.sleep(0.1)
        return value


@contextlib.asynccontextmanager
async def open_page(url: str, profile: Path) -> AsyncIterator[Page]:
    """Open a page in a browser with an empty profile. All processes of the browser end with the block."""
    assert CHROMIUM is not None
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *options,
        "--remote-debugging-port=0",
        f"--user-data-dir={profile}",
        "--window-size=1500,1000",
        "about:blank",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        port_file = profile / "DevToolsActivePort"
        async with asyncio.timeout(DEADLINE_S):
            while not port_file.exists() or not port_file.read_text():
                await asyncio.sleep(0.05)
        port = port_file.read_text().split()[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as reply:
                target = next(item for item in await reply.json() if item["type"] == "page")
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                await page.call("Page.navigate", url=url)
                await page.wait_for("document.readyState === 'complete' && location.protocol === 'http:'")
                yield page
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
