"""Registration of a server with an SGLang router (`sglang-router`), and its removal at the end.

Routes of sglang-router 0.3: `POST /workers` with `{"url", "api_key"}`, `GET /workers`,
`DELETE /workers/{id}`. Older routers: `POST /add_worker?url=`, `POST /remove_worker?url=`.
"""

from __future__ import annotations

import logging
from typing import Any, Self
from urllib.parse import quote

import requests

from verl_server.adapter.ports import authority
from verl_server.config import AdapterConfig
from verl_server.errors import ServerError

logger = logging.getLogger(__name__)

TIMEOUT_S = 10.0


class RouterRegistration:
    """One worker entry in a router; nothing when no router is configured."""

    def __init__(self, router_url: str | None, worker_url: str) -> None:
        self._router, self._worker = router_url, worker_url

    @classmethod
    def start(cls, config: AdapterConfig, worker_url: str, api_key: str | None) -> Self:
        """Register if `config` names a router. Raises ServerError when the router refuses."""
        if config.router_ip is None or config.router_port is None:
            return cls(None, worker_url)
        self = cls(f"http://{authority(config.router_ip, config.router_port)}", worker_url)
        reply = self._send("POST", "/workers", json={"url": worker_url, "api_key": api_key})
        if reply.status_code == 404:
            reply = self._send("POST", f"/add_worker?url={quote(worker_url, safe='')}")
        if reply.status_code >= 300:
            raise ServerError(
                f"the router {self._router} refused {worker_url} ({reply.status_code}): {reply.text[:500]}",
                url=self._router,
                status=reply.status_code,
            )
        return self

    def stop(self) -> None:
        """Take the entry back. A router that is gone or refuses is only logged: the server goes anyway."""
        if self._router is None:
            return
        try:
            entry = self._find()
            if entry is None:
                reply = self._send("POST", f"/remove_worker?url={quote(self._worker, safe='')}")
            else:
                reply = self._send("DELETE", f"/workers/{quote(entry, safe='')}")
            if reply.status_code >= 300:
                logger.warning("router %s kept %s: %s", self._router, self._worker, reply.text[:200])
        except requests.RequestException as error:
            logger.warning("could not remove %s from router %s: %s", self._worker, self._router, error)
        self._router = None

    def _find(self) -> str | None:
        reply = self._send("GET", "/workers")
        if reply.status_code != 200:
            return None
        workers = reply.json().get("workers", [])
        return next((str(worker["id"]) for worker in workers if worker.get("url") == self._worker), None)

    def _send(self, method: str, path: str, **arguments: Any) -> requests.Response:
        with requests.Session() as session:
            session.trust_env = False
            return session.request(method, f"{self._router}{path}", timeout=TIMEOUT_S, **arguments)
