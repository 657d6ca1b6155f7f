"""The replicas of a fleet as the workers of an `sglang-router` that loses connections, with a small HTTP router."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import free_port, wait_until

from verl_server.config import AdapterConfig
from verl_server.router.replica_status import ReplicaStatus
from verl_server.router.targets import SglangRouterTarget

WORKER = "http://127.0.0.1:9"


class SmallRouter:
    """A router that accepts each worker at once. It closes the connection of a request whose method is in `lost`."""

    def __init__(self) -> None:
        self.workers: list[str] = []
        self.lost: list[str] = []
        self.asked: list[str] = []
        """URLs of all workers that were added."""
        self.not_accepted: set[str] = set()
        """URLs of workers that never appear in the list."""
        self.num_refused_removals = 0
        self.is_hidden = False
        """Whether the list of workers is empty: the router has not checked them yet."""
        self.port = 0

    @contextlib.contextmanager
    def serving(self) -> Iterator[SmallRouter]:
        router = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                """Requests are not logged."""

            def handle_method(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                is_lost = self.command in router.lost
                if is_lost:
                    router.lost.remove(self.command)
                if self.command == "POST":
                    url = json.loads(body)["url"]
                    router.asked.append(url)
                    if url not in router.not_accepted:
                        router.workers = [*(worker for worker in router.workers if worker != url), url]
                elif self.command == "DELETE" and not is_lost and self.path.endswith("/w"):
                    if router.num_refused_removals:
                        router.num_refused_removals -= 1
                        self.send_response(500)
                        self.send_header("Content-Length", "0")
                        self.end_headers()
                        return
                    router.workers = []
                if is_lost:
                    self.connection.close()
                    return
                added = json.loads(body or "{}").get("url")
                reply = {
                    "worker_id": "other" if added in router.not_accepted else "w",
                    "workers": [{"id": "w", "url": url} for url in router.workers if not router.is_hidden],
                }
                data = json.dumps(reply).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_DELETE = handle_method

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            self.port = server.server_address[1]
            threading.Thread(target=server.serve_forever, daemon=True).start()
            try:
                yield self
            finally:
                server.shutdown()


def status_of(admitted: bool, name: str = "") -> ReplicaStatus:
    adapter: Any = SimpleNamespace(base_url=f"http://{name}" if name else WORKER, api_key=None)
    return ReplicaStatus(
        name or "replica", adapter, 0, admitted=admitted, suspect=False, will_serve=True, removed=False
    )


@contextlib.contextmanager
def target_at(port: int) -> Iterator[SglangRouterTarget]:
    target = SglangRouterTarget(AdapterConfig(router_ip="127.0.0.1", router_port=port))
    try:
        yield target
    finally:
        target.close()


@pytest.mark.parametrize("lost", [[], ["POST"], ["GET"], ["POST", "GET"], ["DELETE"], ["DELETE", "DELETE"]])
def test_a_router_has_the_admitted_replicas_whatever_requests_are_lost(lost: list[str]) -> None:
    """A router that is started with `--disable-health-check` keeps a worker until it is removed."""
    with SmallRouter().serving() as router, target_at(router.port) as target:
        router.lost = list(lost)
        target.update_statuses([status_of(admitted=True)])
        wait_until(lambda: router.workers == [WORKER] and set(router.lost) <= {"DELETE"}, 10.0, "not registered")
        target.update_statuses([status_of(admitted=False)])
        wait_until(lambda: not router.workers and not router.lost, 10.0, f"not removed: {router.lost}")
        target.update_statuses([status_of(admitted=True)])
        wait_until(lambda: router.workers == [WORKER], 10.0, "not registered again")
        router.lost = ["DELETE"]
    assert not router.workers, "not removed at the end"


def test_a_replica_that_is_not_accepted_delays_no_other_replica() -> None:
    """The router cannot reach it, so its registration takes until the deadline."""
    with SmallRouter().serving() as router, target_at(router.port) as target:
        router.not_accepted = {"http://unreachable"}
        target.update_statuses([status_of(admitted=True, name="unreachable")])
        wait_until(lambda: "http://unreachable" in router.asked, 10.0, "not asked")
        target.update_statuses([status_of(admitted=True)])
        wait_until(lambda: router.workers == [WORKER], 5.0, "not registered")
        target.update_statuses([status_of(admitted=False)])
        wait_until(lambda: not router.workers, 5.0, "not removed")


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_removal_that_is_answered_with_an_error_is_repeated(is_removed: bool) -> None:
    """Also for a replica that has left the fleet, of which no other status follows."""
    with SmallRouter().serving() as router, target_at(router.port) as target:
        target.update_statuses([status_of(admitted=True)])
        wait_until(lambda: router.workers == [WORKER], 10.0, "not registered")
        router.num_refused_removals = 1
        target.update_statuses([replace(status_of(admitted=False), removed=is_removed)])
        wait_until(lambda: not router.workers, 10.0, "not removed")


def test_a_registration_that_was_cancelled_leaves_no_worker() -> None:
    """The router refuses the removal once, and it has not accepted the worker yet."""
    with SmallRouter().serving() as router, target_at(router.port) as target:
        router.is_hidden = True
        target.update_statuses([status_of(admitted=True)])
        wait_until(lambda: router.workers == [WORKER], 10.0, "not added")
        router.num_refused_removals = 1
        target.update_statuses([status_of(admitted=False)])
        wait_until(lambda: not router.workers, 10.0, "not removed")


def test_a_replica_that_is_not_admitted_any_more_is_not_waited_for() -> None:
    """Neither a newer status nor the end of the fleet waits for a registration, which has 60 s."""
    with target_at(free_port()) as target:
        target.update_statuses([status_of(admitted=True)])
        time.sleep(0.3)
        started = time.monotonic()
    assert time.monotonic() - started < 5.0
