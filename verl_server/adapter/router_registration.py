"""Registration of a server with an SGLang router (`sglang-router`), and its removal at the end.

Routes of sglang-router 0.3: `POST /workers` with `{"url", "api_key"}` answers "accepted" with a `worker_id` and
checks the worker in the background; `GET /workers` lists those that passed; `DELETE /workers/{worker_id}` removes one.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Self

import requests

from verl_server.config import AdapterConfig
from verl_server.errors import DeadlineError, ServerError
from verl_server.server.ports import join_host_port

logger = logging.getLogger(__name__)

TIMEOUT_S = 10.0
POLL_S = 0.2


class RouterRegistration:
    """One worker entry in a router; nothing when no router is configured."""

    def __init__(self, router_url: str | None, worker_url: str) -> None:
        self._router, self.worker = router_url, worker_url
        self._entry: str | None = None

    @classmethod
    def start(cls, config: AdapterConfig, worker_url: str, api_key: str | None) -> Self:
        """Register if `config` names a router, and wait until the router has taken the server in.

        Raises ServerError when it refuses or cannot be reached, DeadlineError when it does not take it in.
        """
        if config.router_ip is None or config.router_port is None:
            return cls(None, worker_url)
        self = cls(f"http://{join_host_port(config.router_ip, config.router_port)}", worker_url)
        try:
            self._register(api_key, config.timeouts.control_s)
        except requests.RequestException as error:
            raise ServerError(f"the router {self._router} cannot be reached: {error}", url=self._router) from error
        return self

    def _register(self, api_key: str | None, deadline_s: float) -> None:
        reply = self._send("POST", "/workers", json={"url": self.worker, "api_key": api_key})
        if reply.status_code >= 300:
            raise ServerError(
                f"the router {self._router} refused {self.worker} ({reply.status_code}): {reply.text[:500]}",
                url=self._router,
                status=reply.status_code,
            )
        self._entry = str(reply.json()["worker_id"])
        deadline = time.monotonic() + deadline_s
        while not any(worker.get("id") == self._entry for worker in self._send("GET", "/workers").json()["workers"]):
            if time.monotonic() > deadline:
                self.stop()
                raise DeadlineError(
                    f"the router {self._router} did not take {self.worker} in within {deadline_s:g} s: "
                    "it must be able to reach this address",
                    operation="register",
                    seconds=deadline_s,
                )
            time.sleep(POLL_S)

    def stop(self) -> None:
        """Take the entry back. A router that is gone or refuses is only logged: the server goes anyway."""
        if self._entry is None:
            return
        try:
            reply = self._send("DELETE", f"/workers/{self._entry}")
            if reply.status_code >= 300:
                logger.warning("router %s kept %s: %s", self._router, self.worker, reply.text[:200])
        except requests.RequestException as error:
            logger.warning("could not remove %s from router %s: %s", self.worker, self._router, error)
        self._entry = None

    def _send(self, method: str, path: str, **arguments: Any) -> requests.Response:
        with requests.Session() as session:
            session.trust_env = False
            return session.request(method, f"{self._router}{path}", timeout=TIMEOUT_S, **arguments)
