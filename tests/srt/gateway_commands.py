"""Helpers for tests of `verl-server gateway` in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx
from helpers import free_port, wait_until

SHORT = {"max_new_tokens": 5, "temperature": 1.0}
ADMIN_KEY = "the-key-of-the-admin"


def ask(url: str, key: str | None, path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
    """The reply to a request for a turn."""
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}], **fields}
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.post(f"{url}{path}", json=body, headers=headers, timeout=60.0)


def is_ready(url: str) -> bool:
    """Whether the gateway can serve turns."""
    return httpx.get(f"{url}/health/readiness", timeout=60.0).status_code == 200


def create_session(url: str, key: str = ADMIN_KEY) -> str:
    """The key of a new session."""
    settings = {"sampling_params": SHORT}
    reply = httpx.post(f"{url}/admin/sessions", json=settings, headers={"x-api-key": key}, timeout=60.0)
    assert reply.status_code == 200
    return str(reply.json()["key"])


@contextlib.contextmanager
def gateway_command(*arguments: str, **env: str) -> Iterator[str]:
    """`verl-server gateway` with these arguments. Its URL."""
    program = [sys.executable, "-m", "verl_server.cli", "gateway", *arguments]
    process = subprocess.Popen(program, env=os.environ | env, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("Ready: "):
                yield line.split()[1]
                break
        else:
            raise AssertionError(f"the command has ended: {lines}")
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM


@contextlib.contextmanager
def forward(base_url: str, port: int | None = None) -> Iterator[tuple[str, Callable[[], None]]]:
    """A port that forwards connections to a server, and a function that closes the port and all connections."""
    port = port or free_port()
    target = base_url.removeprefix("http://")
    program = (
        "import socket, sys, threading\n"
        "listening = socket.create_server(('127.0.0.1', int(sys.argv[1])))\n"
        "host, port = sys.argv[2].split(':')\n"
        "def pump(a, b):\n"
        "    try:\n"
        "        while data := a.recv(65536): b.sendall(data)\n"
        "    except OSError: pass\n"
        "    for each in (a, b):\n"
        "        try: each.shutdown(socket.SHUT_RDWR)\n"
        "        except OSError: pass\n"
        "while True:\n"
        "    a, b = listening.accept()[0], socket.create_connection((host, int(port)))\n"
        "    threading.Thread(target=pump, args=(a, b), daemon=True).start()\n"
        "    threading.Thread(target=pump, args=(b, a), daemon=True).start()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(port), target])

    def cut() -> None:
        process.kill()
        process.wait(30)

    try:
        wait_until(lambda: _listens(port), 30, "the port does not listen")
        yield f"http://127.0.0.1:{port}", cut
    finally:
        cut()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False
