"""The replicas of a fleet as the workers of an `sglang-router` that loses connections, with a small HTTP router."""

from __future__ import annotations

import contextlib
import json
import math
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import free_port, wait_until

from verl_server.adapter.router_registration import RouterRegistration
from verl_server.config import AdapterConfig
from verl_server.errors import DeadlineError
from verl_server.router.replica_status import ReplicaStatus
from verl_server.router.targets import SglangRouterTarget
from verl_server.types import Json

WORKER = "http://127.0.0.1:9"


class SmallRouter:
    """A router with the states of sglang-router 0.3. It closes the connection of a request whose method is in `lost`.

    An added worker is checked for `check_s` seconds; then it is in the list. A removal is answered at once, and has no
    effect while the worker is checked.
    """

    def __init__(self) -> None:
        self.lost: list[str] = []
        self.asked: list[str] = []
        """URLs of all workers that were added."""
        self.api_keys: dict[str, str | None] = {}
        """API keys of the workers that were added last."""
        self.not_accepted: set[str] = set()
        """URLs of workers whose check does not end."""
        self.num_refused_removals = 0
        self.check_s = 0.0
        self._ids: dict[str, str] = {}
        self._checked_at: dict[str, float] = {}
        self.port = 0

    @property
    def workers(self) -> list[str]:
        """URLs of the workers in the list."""
        now = time.monotonic()
        return [url for url, checked_at in list(self._checked_at.items()) if checked_at <= now]

    def restart(self) -> None:
        """Forget all workers."""
        self._ids, self._checked_at = {}, {}

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Json]:
        worker_id = path.removeprefix("/workers").strip("/")
        url = next((url for url, known_id in self._ids.items() if known_id == worker_id), None)
        if method == "POST":
            added = json.loads(body)
            url = str(added["url"])
            self.asked.append(url)
            self.api_keys[url] = added["api_key"]
            check_s = math.inf if url in self.not_accepted else self.check_s
            self._checked_at.setdefault(url, time.monotonic() + check_s)
            return 202, {"worker_id": self._ids.setdefault(url, f"id-{len(self.asked)}")}
        if not worker_id:
            return 200, {"workers": [{"id": self._ids[url], "url": url} for url in self.workers]}
        if url is None:
            return 404, {"code": "WORKER_NOT_FOUND"}
        if method == "DELETE" and self.num_refused_removals:
            self.num_refused_removals -= 1
            return 500, {}
        if method == "DELETE" and url in self.workers:
            del self._checked_at[url], self._ids[url]
        status = {} if url in self.workers else {"job_status": {"job_type": "AddWorker", "status": "processing"}}
        return 202 if method == "DELETE" else 200, {"id": worker_id, **status}

    @contextlib.contextmanager
    def serving(self) -> Iterator[SmallRouter]:
        router, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                """Requests are not logged."""

            def handle_method(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                is_lost = self.command in router.lost
                if is_lost:
                    router.lost.remove(self.command)
                if is_lost and self.command == "DELETE":
                    self.connection.close()
                    return
                with lock:
                    code, reply = router.answer(self.command, self.path, body)
                if is_lost:
                    self.connection.close()
                    return
                data = json.dumps(reply).encode()
                self.send_response(code)
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


class GatedWorker:
    """An HTTP server that answers each request of a router's check after `is_open` was set."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.num_requests = 0
        self.url = ""

    @contextlib.contextmanager
    def serving(self) -> Iterator[GatedWorker]:
        worker = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                """Requests are not logged."""

            def do_GET(self) -> None:
                worker.num_requests += 1
                worker.is_open.wait(60.0)
                data = b'{"status": "ok", "model_path": "model"}'
                with contextlib.suppress(OSError):
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            server.daemon_threads = True
            self.url = f"http://127.0.0.1:{server.server_address[1]}"
            threading.Thread(target=server.serve_forever, daemon=True).start()
            try:
                yield self
            finally:
                self.is_open.set()
                server.shutdown()


def status_of(admitted: bool, name: str = "", url: str = "", api_key: str | None = None) -> ReplicaStatus:
    adapter: Any = SimpleNamespace(base_url=url or (f"http://{name}" if name else WORKER), api_key=api_key)
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


def test_replies_of_another_form_do_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    """For example a proxy, or another version of the router, answers for a while."""

    class OtherRouter(SmallRouter):
        def answer(self, method: str, path: str, body: bytes) -> tuple[int, Json]:
            code, reply = super().answer(method, path, body)
            is_odd = method == "POST" and len(self.asked) == 1
            return (code, {"id": reply["worker_id"]}) if is_odd else (code, reply)

    with OtherRouter().serving() as router, target_at(router.port) as target:
        router.not_accepted = {WORKER}
        target.update_statuses([status_of(admitted=True)])
        wait_until(lambda: "does not answer as an sglang-router does (KeyError" in caplog.text, 10.0, "no warning")
        router.not_accepted.clear()
        router.restart()
        wait_until(lambda: router.workers == [WORKER], 20.0, "not registered")


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
        router.restart()  # so that the end does not wait for the check


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_removal_that_is_answered_with_an_error_is_repeated(is_removed: bool) -> None:
    """Also for a replica that has left the fleet, of which no other status follows."""
    with SmallRouter().serving() as router, target_at(router.port) as target:
        target.update_statuses([status_of(admitted=True)])
        wait_until(lambda: router.workers == [WORKER], 10.0, "not registered")
        router.num_refused_removals = 1
        target.update_statuses([replace(status_of(admitted=False), removed=is_removed)])
        wait_until(lambda: not router.workers, 10.0, "not removed")


@pytest.mark.parametrize("lost", [[], ["POST"], ["POST", "DELETE"]])
@pytest.mark.parametrize("is_closed", [False, True])
def test_a_replica_that_ends_while_the_router_checks_it_leaves_no_worker(lost: list[str], is_closed: bool) -> None:
    """The router refuses the first removal, and a removal has no effect before the end of the check."""
    with SmallRouter().serving() as router:
        router.check_s, router.lost, router.num_refused_removals = 1.5, list(lost), 1
        with target_at(router.port) as target:
            target.update_statuses([status_of(admitted=True)])
            wait_until(lambda: router.asked == [WORKER], 10.0, "not added")
            if not is_closed:
                target.update_statuses([status_of(admitted=False)])
                wait_until(lambda: router.workers == [WORKER], 10.0, "not accepted")
                wait_until(lambda: not router.workers, 10.0, "not removed")
        time.sleep(1.0)
        assert not router.workers


def test_a_registration_that_is_stopped_during_the_check_leaves_no_worker() -> None:
    """Of one server, without a fleet. The same registration can be used again."""
    with SmallRouter().serving() as router:
        router.check_s = 1.0
        config = AdapterConfig(router_ip="127.0.0.1", router_port=router.port)
        registration = RouterRegistration(config, WORKER, None)
        with pytest.raises(DeadlineError, match="did not accept"):
            registration.wait_until_accepted(0.1)
        assert registration.stop()
        time.sleep(1.5)
        assert not router.workers
        registration.wait_until_accepted(10.0)
        assert router.workers == [WORKER]
        assert registration.stop()
        assert not router.workers


@pytest.mark.parametrize("has_new_status", [False, True])
def test_a_router_that_was_started_again_gets_its_workers(has_new_status: bool) -> None:
    """Also if no status of a replica changes. Each worker is added once per start of the router."""
    with SmallRouter().serving() as router, target_at(router.port) as target:
        admitted = [status_of(admitted=True, name=name) for name in ("one", "two")]
        target.update_statuses(admitted)
        wait_until(lambda: len(router.workers) == 2, 10.0, "not registered")
        time.sleep(1.0)
        router.restart()
        if has_new_status:
            target.update_statuses([replace(status, weight_version=1) for status in admitted])
        wait_until(lambda: len(router.workers) == 2, 20.0, "not registered again")
        assert sorted(router.asked) == ["http://one"] * 2 + ["http://two"] * 2


def test_many_replicas_that_are_not_accepted_delay_no_removal() -> None:
    """A worker is not added again during its check: the router would run a second check of the same worker."""
    with SmallRouter().serving() as router, target_at(router.port) as target:
        target.update_statuses([status_of(admitted=True)])
        wait_until(lambda: router.workers == [WORKER], 10.0, "not registered")
        names = [f"n{number}" for number in range(150)]
        router.not_accepted = {f"http://{name}" for name in names}
        target.update_statuses([status_of(admitted=True, name=name) for name in names])
        wait_until(lambda: len(router.asked) > 64, 10.0, "not asked")
        target.update_statuses([status_of(admitted=False)])
        wait_until(lambda: not router.workers, 5.0, "not removed")
        wait_until(lambda: len(router.asked) == 151, 10.0, "some are not asked")
        time.sleep(3.0)
        assert len(router.asked) == 151
        router.restart()  # so that the end does not wait for the checks


def test_the_last_status_is_the_one_that_lasts() -> None:
    """The router loses requests and the statuses change while it checks: old attempts overwrite no newer status."""
    choices = random.Random(0)
    with SmallRouter().serving() as router, target_at(router.port) as target:
        names = [f"n{number}" for number in range(8)]
        last: dict[str, bool] = {}
        for _ in range(60):
            name = choices.choice(names)
            last[name] = choices.random() < 0.5
            router.check_s = choices.choice([0.0, 0.1, 0.3])
            router.lost = choices.choices(["GET", "POST", "DELETE"], k=2)
            target.update_statuses([status_of(admitted=last[name], name=name)])
            time.sleep(choices.choice([0.0, 0.01, 0.2]))
        expected = {f"http://{name}" for name, admitted in last.items() if admitted}
        wait_until(lambda: set(router.workers) == expected, 20.0, f"not {expected}: {router.workers}")
        time.sleep(3.0)
        assert set(router.workers) == expected
    assert not router.workers


def test_a_replica_that_has_moved_and_a_server_with_another_key_replace_their_workers() -> None:
    with SmallRouter().serving() as router, target_at(router.port) as target:
        target.update_statuses([status_of(admitted=True, name="one", url="http://old")])
        wait_until(lambda: router.workers == ["http://old"], 10.0, "not registered")
        target.update_statuses([status_of(admitted=True, name="one", url="http://new")])
        wait_until(lambda: router.workers == ["http://new"], 10.0, "not moved")
        target.update_statuses([status_of(admitted=True, name="one", url="http://new", api_key="k")])
        wait_until(lambda: router.workers == ["http://new"] and router.api_keys["http://new"] == "k", 10.0, "old key")


def test_a_replica_that_is_not_admitted_any_more_is_not_waited_for() -> None:
    """Neither a newer status nor the end of the fleet waits for a registration, which has 60 s."""
    with target_at(free_port()) as target:
        target.update_statuses([status_of(admitted=True)])
        time.sleep(0.3)
        started = time.monotonic()
    assert time.monotonic() - started < 5.0
