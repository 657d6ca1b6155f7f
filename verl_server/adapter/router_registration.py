"""Registration of servers with an SGLang router (`sglang-router`).

Routes of sglang-router 0.3: `POST /workers` with `{"url", "api_key"}` answers "accepted" with a `worker_id` and checks
the worker in the background; the same request during the check starts a second check. `GET /workers` lists the workers
that passed the check. `GET /workers/{worker_id}` has a `job_status` while the check lasts, and answers 404 for an
unknown worker. `DELETE /workers/{worker_id}` is answered before the worker is removed, and has no effect during the
check.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import requests

from verl_server.config import AdapterConfig
from verl_server.errors import DeadlineError, ServerError
from verl_server.server.launch import join_host_port

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 10.0
POLL_INTERVAL_S = 0.2
REPEAT_S = 2.0
"""Seconds before the same request about a worker is repeated while it has no effect."""
UNKNOWN_S = 5.0
"""Seconds in which a worker may appear in the list although the answer to its `POST` was lost."""
FORGET_S = 20.0
"""Seconds after its removal in which a worker that appears in the list again is removed again."""
REMOVAL_S = 10.0
"""Seconds in which all workers are removed at the end."""
MAX_FAILURES = 3
"""Number of successive attempts to reach the router at the end."""


@dataclass
class _Entry:
    """What is known of a server that is a worker of the router, was one, or is to become one."""

    url: str
    api_key: str | None
    worker_id: str | None = None
    """Id from the router. None: the router has not answered, or does not know the worker any more."""
    sent: str = ""
    """Method of the last request about this worker. Empty: the router does not know the worker."""
    sent_at: float = 0.0
    """Time of that request."""
    missing_since: float | None = None
    """Time since which the worker is wanted but is not in the list."""
    removed_at: float | None = None
    """Time since which the worker is not wanted and the router does not know it."""

    def was_sent(self, method: str) -> bool:
        """Whether the last request had this method and may still take effect."""
        return self.sent == method and time.monotonic() < self.sent_at + REPEAT_S


class RouterWorkers:
    """The servers of one caller in a router's list of workers. Other workers of the router stay. Not thread-safe."""

    def __init__(self, router_url: str) -> None:
        self.router_url = router_url
        self._entries: dict[str, _Entry] = {}

    @classmethod
    def from_config(cls, config: AdapterConfig) -> Self | None:
        """None when `config` names no router."""
        if config.router_ip is None or config.router_port is None:
            return None
        return cls(f"http://{join_host_port(config.router_ip, config.router_port)}")

    def bring_to(self, wanted: Mapping[str, str | None]) -> bool:
        """Send the requests that are needed so that the list contains the servers `wanted`, and no earlier server.

        `wanted`: URLs with API keys. The requests take effect later, so the call must be repeated until it returns
        True: then the list is right, and the router does not check a server that is no longer wanted.

        Raises requests.RequestException when the router cannot be reached. Raises ServerError when it refuses the
        request about a server; the requests about the other servers are sent nevertheless.
        """
        if not wanted and not self._entries:
            return True
        is_reached, refusals = True, list[ServerError]()
        with requests.Session() as session:
            session.trust_env = False
            listed = self._list(session)
            for url, api_key in wanted.items():
                self._entries.setdefault(url, _Entry(url, api_key))
            for is_wanted, entry in self._in_order(wanted):
                bring = self._add if is_wanted else self._remove
                try:
                    is_reached = bring(session, entry, listed.get(entry.url)) and is_reached
                except ServerError as error:
                    refusals.append(error)
        is_reached = not self._forget_removed(wanted) and is_reached
        if refusals:
            raise refusals[0]
        return is_reached

    def missing_for(self, seconds: float) -> list[str]:
        """URLs of the wanted servers that have not been in the list for more than `seconds`."""
        started = time.monotonic() - seconds
        entries = self._entries.values()
        return [entry.url for entry in entries if entry.missing_since is not None and entry.missing_since < started]

    def remove_all(self) -> bool:
        """Remove all servers, within `REMOVAL_S`. Returns False if one may still be, or become, a worker."""
        deadline, num_failures = time.monotonic() + REMOVAL_S, 0
        while True:
            pause_s, reason = POLL_INTERVAL_S, "the router still checks it"
            try:
                if self.bring_to({}):
                    return True
                num_failures = 0
            except requests.RequestException as error:
                pause_s, reason, num_failures = 1.0, str(error), num_failures + 1
            except ServerError as error:
                reason, num_failures = error.message, 0
            if num_failures == MAX_FAILURES or time.monotonic() > deadline:
                kept = [entry.url for entry in self._entries.values() if entry.removed_at is None]
                logger.warning(
                    "the router %s may keep %d workers (%s): %s", self.router_url, len(kept), kept[:3], reason
                )
                return False
            time.sleep(pause_s)

    def _in_order(self, wanted: Mapping[str, str | None]) -> list[tuple[bool, _Entry]]:
        """All servers and whether they are wanted. Removals are first, then the servers with the oldest requests."""
        entries = sorted(self._entries.values(), key=lambda entry: entry.sent_at)
        pairs = [(entry.url in wanted and wanted[entry.url] == entry.api_key, entry) for entry in entries]
        return sorted(pairs, key=lambda pair: pair[0])

    def _add(self, session: requests.Session, entry: _Entry, listed_id: str | None) -> bool:
        """Add a worker that the router neither has nor checks. Whether the list contains it, and will contain it."""
        entry.removed_at = None
        is_leaving = entry.was_sent("DELETE")
        if listed_id is not None and entry.worker_id is not None and not is_leaving:
            entry.missing_since = None
            return True
        entry.missing_since = entry.missing_since or time.monotonic()
        if listed_id is not None and is_leaving:
            return False
        if entry.worker_id is not None:
            if not self._may_send(entry, "GET") or self._knows(session, entry):
                return False
            entry.worker_id, entry.sent = None, ""
        if self._may_send(entry, "POST"):
            worker = {"url": entry.url, "api_key": entry.api_key}
            reply = self._send(session, "POST", "/workers", entry.url, json=worker)
            with self._explain_replies():
                entry.worker_id = str(reply.json()["worker_id"])
        return False

    def _remove(self, session: requests.Session, entry: _Entry, listed_id: str | None) -> bool:
        """Remove a worker that the list contains. Whether the router neither has nor checks it."""
        entry.missing_since = None
        if listed_id is not None:
            entry.removed_at, entry.worker_id = None, listed_id
            if self._may_send(entry, "DELETE"):
                self._send(session, "DELETE", f"/workers/{listed_id}", entry.url)
            return False
        if entry.worker_id is not None:
            if not self._may_send(entry, "GET") or self._knows(session, entry):
                return False
        elif entry.sent and time.monotonic() < entry.sent_at + UNKNOWN_S:
            return False
        entry.worker_id, entry.sent = None, ""
        entry.removed_at = entry.removed_at or time.monotonic()
        return True

    def _forget_removed(self, wanted: Mapping[str, str | None]) -> bool:
        """Whether one of the forgotten servers is wanted with another API key."""
        now = time.monotonic()
        removed = [entry for entry in self._entries.values() if entry.removed_at is not None]
        for entry in removed:
            assert entry.removed_at is not None
            if entry.url in wanted or now > entry.removed_at + FORGET_S:
                del self._entries[entry.url]
        return any(entry.url in wanted for entry in removed)

    def _may_send(self, entry: _Entry, method: str) -> bool:
        """Whether to send a request about a worker now. It is then counted as sent."""
        if entry.was_sent(method):
            return False
        entry.sent, entry.sent_at = method, time.monotonic()
        return True

    def _list(self, session: requests.Session) -> dict[str, str]:
        """Ids of all workers in the list, by URL."""
        reply = self._send(session, "GET", "/workers", "GET /workers")
        with self._explain_replies():
            return {str(worker["url"]): str(worker["id"]) for worker in reply.json()["workers"]}

    def _knows(self, session: requests.Session, entry: _Entry) -> bool:
        """Whether the router has the worker or checks it: not after a check that has failed."""
        reply = self._send(session, "GET", f"/workers/{entry.worker_id}", entry.url)
        with self._explain_replies():
            return reply.status_code != 404 and (reply.json().get("job_status") or {}).get("status") != "failed"

    def _send(
        self, session: requests.Session, method: str, path: str, subject: str, **arguments: Any
    ) -> requests.Response:
        """Raises ServerError for an error status, but not for an unknown worker."""
        reply = session.request(method, f"{self.router_url}{path}", timeout=REQUEST_TIMEOUT_S, **arguments)
        is_unknown_worker = reply.status_code == 404 and path != "/workers"
        if reply.status_code >= 300 and not is_unknown_worker:
            raise ServerError(
                f"the router {self.router_url} refused {subject} ({reply.status_code}): {reply.text[:500]}",
                url=self.router_url,
                status=reply.status_code,
            )
        return reply

    @contextlib.contextmanager
    def _explain_replies(self) -> Iterator[None]:
        """A reply of another form is a ServerError, which callers of `bring_to` expect: their threads go on."""
        try:
            yield
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ServerError(
                f"{self.router_url} does not answer as an sglang-router does ({type(error).__name__}: {error}): "
                "check router_ip and router_port",
                url=self.router_url,
            ) from error


class RouterRegistration:
    """One server as a worker of a router. Does nothing when no router is configured."""

    def __init__(self, config: AdapterConfig, worker_url: str, api_key: str | None) -> None:
        self.worker_url, self._api_key = worker_url, api_key
        self._workers = RouterWorkers.from_config(config)

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

    def wait_until_accepted(self, timeout_s: float) -> None:
        """Register the server, and wait until the router has accepted it. `stop` must be called after an error, too.

        A router that cannot be reached is asked again, because the router may be starting.

        Raises ServerError when the router refuses the server, ServerError when the router cannot be reached within
        `timeout_s`, and DeadlineError when the router has not accepted the server within that time.
        """
        deadline = time.monotonic() + timeout_s
        while self._workers is not None:
            failure: requests.RequestException | None = None
            try:
                if self._workers.bring_to({self.worker_url: self._api_key}):
                    return
            except requests.RequestException as error:
                failure = error
            if time.monotonic() > deadline:
                router_url = self._workers.router_url
                if failure is not None:
                    raise ServerError(
                        f"the router {router_url} could not be reached within {timeout_s:g} s: {failure}",
                        url=router_url,
                    ) from failure
                raise DeadlineError(
                    f"the router {router_url} did not accept {self.worker_url} within {timeout_s:g} s: the router must "
                    "be able to reach this address",
                    operation="register",
                    seconds=timeout_s,
                )
            time.sleep(POLL_INTERVAL_S)

    def stop(self) -> bool:
        """Remove the server from the router. Returns False if the router may still have it, or may still accept it."""
        return self._workers is None or self._workers.remove_all()
