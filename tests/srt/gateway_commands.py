"""Helpers for tests of `verl-server gateway` in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx

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
