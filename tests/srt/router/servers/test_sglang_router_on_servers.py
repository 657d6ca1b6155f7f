"""The tests of `test_sglang_router.py` that need servers."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import requests
from helpers import wait_until, workers_of
from test_sglang_router import GatedWorker, status_of, target_at


@pytest.mark.parametrize("is_closed", [False, True])
def test_an_sglang_router_has_no_worker_that_ended_during_its_check(sglang_router: int, is_closed: bool) -> None:
    with GatedWorker().serving() as worker:
        with target_at(sglang_router) as target:
            target.update_statuses([status_of(admitted=True, url=worker.url)])
            wait_until(lambda: worker.num_requests, 20.0, "not checked")
            if not is_closed:
                target.update_statuses([status_of(admitted=False, url=worker.url)])
            time.sleep(0.3)  # for the removal
            threading.Timer(0.5, worker.is_open.set).start()
            if not is_closed:
                wait_until(lambda: worker.num_requests > 1, 20.0, "the check does not go on")
                time.sleep(3.0)
                assert worker.url not in workers_of(sglang_router)
        time.sleep(2.0)
        try:
            assert worker.url not in workers_of(sglang_router)
        finally:
            remove_worker(sglang_router, worker.url)


def remove_worker(router_port: int, url: str) -> None:
    """Remove a worker from a real router, as another program would do it."""
    router = f"http://127.0.0.1:{router_port}"
    with requests.Session() as session:
        session.trust_env = False
        for worker in session.get(f"{router}/workers", timeout=10).json()["workers"]:
            if worker["url"] == url:
                session.delete(f"{router}/workers/{worker['id']}", timeout=10)
    wait_until(lambda: url not in workers_of(router_port), 10.0, "not removed")


def test_an_sglang_router_that_has_lost_a_worker_gets_it_again(sglang_router: int) -> None:
    with GatedWorker().serving() as worker:
        worker.is_open.set()
        with target_at(sglang_router) as target:
            target.update_statuses([status_of(admitted=True, url=worker.url)])
            wait_until(lambda: worker.url in workers_of(sglang_router), 20.0, "not registered")
            time.sleep(1.0)
            remove_worker(sglang_router, worker.url)
            target.update_statuses([replace(status_of(admitted=True, url=worker.url), weight_version=1)])
            wait_until(lambda: worker.url in workers_of(sglang_router), 20.0, "not registered again")
        assert worker.url not in workers_of(sglang_router)
