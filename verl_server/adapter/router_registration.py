"""Registration of a server with an SGLang router (`sglang-router`).

Routes of sglang-router 0.3: `POST /workers` with `{"url", "api_key"}` answers "accepted" with a `worker_id` and checks
the worker in the background; `GET /workers` lists the workers that passed the check; `DELETE /workers/{worker_id}`
removes a worker.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

import requests

from verl_server.config import AdapterConfig
from verl_server.errors import DeadlineError, ServerError, ShutDownError, VerlServerError
from verl_server.server.ports import join_host_port

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 10.0
POLL_INTERVAL_S = 0.2


class RouterRegistration:
    """The entry of one server in a router's list of workers. Does nothing when no router is configured."""

    def __init__(self, config: AdapterConfig, worker_url: str, api_key: str | None) -> None:
        self.worker_url, self._api_key = worker_url, api_key
        self._router_url: str | None = None
        if config.router_ip is not None and config.router_port is not None:
            self._router_url = f"http://{join_host_port(config.router_ip, config.router_port)}"
        self._may_be_registered = False
        """Whether the router may have an entry of the server."""
        self._worker_id: str | None = None
        """Id of the entry. None: the server is not registered."""

    @classmethod
    def start(cls, config: AdapterConfig, worker_url: str, api_key: str | None) -> Self:
        """Register the server if `config` names a router, and wait until the router has accepted it.

        Raises the errors of `wait_until_accepted`.
        """
        self = cls(config, worker_url, api_key)
        try:
            self.wait_until_accepted(config.timeouts.control_s)
        except BaseException:
            self.stop()
            raise
        return self

    def wait_until_accepted(self, timeout_s: float, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        """Register the server, and wait until the router has accepted it. `stop` must be called after an error, too.

        A router that cannot be reached is asked again, because the router may be starting: the same `POST` again
        answers with the same `worker_id`. The wait ends when `is_cancelled()` is true.

        Raises ServerError when the router refuses the server, ServerError when the router cannot be reached within
        `timeout_s`, DeadlineError when the router has not accepted the server within that time, and ShutDownError when
        the wait was cancelled.
        """
        deadline = time.monotonic() + timeout_s
        while self._router_url is not None:
            failure: requests.RequestException | None = None
            try:
                if self._is_accepted():
                    return
            except requests.RequestException as error:
                failure = error
            if time.monotonic() > deadline:
                raise self._timed_out(timeout_s, failure) from failure
            if is_cancelled():
                raise ShutDownError(f"the registration of {self.worker_url} was cancelled")
            time.sleep(POLL_INTERVAL_S)

    def _is_accepted(self) -> bool:
        """Add the server if it has no entry yet. Whether the router has accepted the entry."""
        if self._worker_id is None:
            self._worker_id = self._add()
        with self._explain_replies():
            workers = self._send("GET", "/workers").json()["workers"]
            return any(worker["id"] == self._worker_id for worker in workers)

    def _add(self) -> str:
        """Add the server. Returns the id of its entry; a repeated request returns the same id."""
        self._may_be_registered = True
        reply = self._send("POST", "/workers", json={"url": self.worker_url, "api_key": self._api_key})
        if reply.status_code >= 300:
            raise ServerError(
                f"the router {self._router_url} refused {self.worker_url} ({reply.status_code}): {reply.text[:500]}",
                url=self._router_url,
                status=reply.status_code,
            )
        with self._explain_replies():
            return str(reply.json()["worker_id"])

    @contextlib.contextmanager
    def _explain_replies(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, KeyError, TypeError) as error:
            raise ServerError(
                f"{self._router_url} does not answer as an sglang-router does ({type(error).__name__}: {error}): "
                "check router_ip and router_port",
                url=self._router_url,
            ) from error

    def _timed_out(self, timeout_s: float, failure: Exception | None) -> VerlServerError:
        if failure is not None:
            return ServerError(
                f"the router {self._router_url} could not be reached within {timeout_s:g} s: {failure}",
                url=self._router_url,
            )
        return DeadlineError(
            f"the router {self._router_url} did not accept {self.worker_url} within {timeout_s:g} s: "
            "the router must be able to reach this address",
            operation="register",
            seconds=timeout_s,
        )

    def stop(self) -> bool:
        """Remove the entry. Returns False if the router could not be reached: the entry may still exist."""
        if not self._may_be_registered:
            return True
        try:
            if self._worker_id is None:  # the answer was lost; the same request has the same answer
                self._worker_id = self._add()
            reply = self._send("DELETE", f"/workers/{self._worker_id}")
        except requests.RequestException as error:
            logger.warning("could not remove %s from router %s: %s", self.worker_url, self._router_url, error)
            return False
        except ServerError as error:
            logger.warning("%s is not removed: %s", self.worker_url, error.message)
            if error.details.get("status", 0) >= 500:
                return False
        else:
            if reply.status_code >= 500:
                return False
            if reply.status_code >= 300:
                logger.warning("router %s did not remove %s: %s", self._router_url, self.worker_url, reply.text[:200])
        self._worker_id, self._may_be_registered = None, False
        return True

    def _send(self, method: str, path: str, **arguments: Any) -> requests.Response:
        with requests.Session() as session:
            session.trust_env = False
            return session.request(method, f"{self._router_url}{path}", timeout=REQUEST_TIMEOUT_S, **arguments)
