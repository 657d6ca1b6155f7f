"""`RouterClient`: a router process as callers see it. When the router dies, the call goes on with the next one."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any, Self

import aiohttp
import orjson

from verl_server.errors import DeadlineError, ServerError, VerlServerError, from_wire

Json = dict[str, Any]

CONNECT_S = 5.0
FIRST_WAIT_S, MAX_WAIT_S = 0.05, 1.0
WORKED_S = 2.0
"""A router that keeps a call for so long was one; what accepts and closes is none."""


class RouterClient:
    """`generate` is that of `RolloutRouter`. Belongs to one event loop; use it as an async context manager.

    A request carries its id, so asking again attaches to the sample that runs or takes its result; only a router that
    died itself forgets them, and then the engine has ended what its caller can no longer get. So every call returns
    one sample. A router that cannot be reached for `reconnect_timeout_s` seconds raises ServerError.
    """

    def __init__(self, url: str, api_key: str | None, reconnect_timeout_s: float = 60.0) -> None:
        self._url, self._patience_s = url.rstrip("/"), reconnect_timeout_s
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            headers=headers,
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._session.close()

    async def generate(
        self,
        *,
        request_id: str | None = None,
        session_id: str | None = None,
        weight_version: int | None = None,
        min_weight_version: int | None = None,
        timeout_s: float | None = None,
        **request: Any,
    ) -> Json:
        """See `RolloutRouter.generate`; errors are the same."""
        own = {
            "rid": request_id or uuid.uuid4().hex,
            "session_id": session_id,
            "weight_version": weight_version,
            "min_weight_version": min_weight_version,
        }
        if "prompt" in request:
            request["text"] = request.pop("prompt")
        body = {**request, **{name: value for name, value in own.items() if value is not None}}
        deadline = time.monotonic() + timeout_s if isinstance(timeout_s, (int, float)) else None
        lost_at: float | None = None
        wait_s = FIRST_WAIT_S
        body["timeout_s"] = timeout_s
        while True:
            asked_at = time.monotonic()
            try:
                async with asyncio.timeout_at(None if deadline is None else _loop_time(deadline) + CONNECT_S):
                    return await self._post(body)
            except (aiohttp.ClientError, ConnectionError) as error:
                now = time.monotonic()
                reached = not isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError))
                if lost_at is None or (reached and now - asked_at > WORKED_S):
                    lost_at, wait_s = now, FIRST_WAIT_S  # it was there until now
                if now - lost_at > self._patience_s:
                    raise ServerError(f"the router at {self._url} cannot be reached: {error}", url=self._url) from error
                wait_s = min(2 * wait_s, MAX_WAIT_S)
            except TimeoutError as error:
                if isinstance(error, VerlServerError):
                    raise
                raise _late(timeout_s) from None
            await asyncio.sleep(wait_s)
            if deadline is not None:
                body["timeout_s"] = deadline - time.monotonic()
                if body["timeout_s"] <= 0:
                    raise _late(timeout_s)

    async def _post(self, body: Json) -> Json:
        async with self._session.post(
            f"{self._url}/generate", data=orjson.dumps(body), headers={"Content-Type": "application/json"}
        ) as answer:
            raw = await answer.read()
        try:
            reply: Json = orjson.loads(raw)
        except orjson.JSONDecodeError:
            words = raw[:200].decode("utf-8", "replace")
            raise ServerError(
                f"the router at {self._url} answered {answer.status}: {words}", url=self._url, status=answer.status
            ) from None
        if answer.status == 200:
            return reply
        said = reply.get("error", {})
        raise from_wire({"type": said.get("type", "ServerError"), "message": said.get("message", ""), "details": {}})


def _loop_time(deadline: float) -> float:
    """A time of `time.monotonic` on the running loop's clock."""
    return asyncio.get_running_loop().time() + deadline - time.monotonic()


def _late(timeout_s: float | None) -> DeadlineError:
    return DeadlineError(f"the sample was not finished within {timeout_s:g} s", operation="generate", seconds=timeout_s)
