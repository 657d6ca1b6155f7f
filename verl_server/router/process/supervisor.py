"""`RouterSupervisor`: starts the router process of a fleet, sends it the statuses of replicas, and restarts it.

The process is restarted when it ends, and when it sends no reports (`RouterConfig.report_timeout_s`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO

import orjson

from verl_server.config import RouterConfig
from verl_server.errors import DeadlineError
from verl_server.ranks.placement import own_address
from verl_server.router.process.router_main import encode_status
from verl_server.router.replica_status import ReplicaStats, ReplicaStatus, StatusQueue
from verl_server.server.launch import PortReservation, join_host_port
from verl_server.types import Json
from verl_server.validation import make_writable_folder, require_key

logger = logging.getLogger(__name__)


ALL_ADDRESSES = {"0.0.0.0": ("192.0.2.1", "127.0.0.1"), "::": ("2001:db8::1", "::1")}
"""Hosts that stand for all addresses of this machine, each with an address of no machine (RFC 5737, RFC 3849), which is
reached by the default route, and with the loopback address."""
START_TIMEOUT_S = 60.0
APPLY_TIMEOUT_S = 2.0
"""Maximum number of seconds that `wait_until_applied` waits."""
FIRST_RESTART_DELAY_S = 0.5
"""Seconds before the second restart in a row. The delay doubles with each further restart."""
MAX_RESTART_DELAY_S = 10.0
JOIN_TIMEOUT_S = 10.0
METRICS_INTERVAL_S = 2.0
"""Seconds between two transfers of the fleet's metrics while no status changes."""
HANG_CHECK_INTERVAL_S = 1.0


class RouterSupervisor:
    """A `RoutingTarget`: a router process. Its URL and its API key stay the same over restarts."""

    def __init__(
        self,
        config: RouterConfig,
        log_dir: Path | str | None,
        metrics: Callable[[], str],
        host: str = "127.0.0.1",
        api_key: str | None = None,
    ) -> None:
        """Start the router process and wait until it listens. Raises DeadlineError after START_TIMEOUT_S seconds.

        `host`: address to listen at. `api_key`: key for requests; None means a random key. `log_dir`: folder for
        `router.log`; None discards the log. `metrics` returns the fleet's own metrics, which the router adds to its
        metrics. Raises BadInputError if the folder takes no files.
        """
        self._log = None if log_dir is None else make_writable_folder("log_dir", log_dir) / "router.log"
        self._metrics = metrics
        self._report_timeout_s = config.report_timeout_s
        self._reservation = PortReservation(host)
        self.url = f"http://{join_host_port(_reachable_host(host), self._reservation.port)}"
        self.api_key = require_key("api_key", api_key or secrets.token_urlsafe(32))
        self.restarts = 0
        """Number of restarts of the router process."""
        self._settings: Json = {
            "host": host,
            "port": self._reservation.port,
            "api_key": self.api_key,
            "config": asdict(config),
            "parent_pid": os.getpid(),
        }
        self._status_queue = StatusQueue()
        self._stats: dict[str, ReplicaStats] = {}
        self._applied_sequence = 0
        self._reported_at = time.monotonic()
        self._closed = threading.Event()
        self._ready = threading.Event()
        self._process = self._start_process()
        self._threads = [
            threading.Thread(target=run, name=f"verl-server-router-{run.__name__.strip('_')}", daemon=True)
            for run in (self._read_reports, self._send_statuses, self._detect_hang)
        ]
        for thread in self._threads:
            thread.start()
        if not self._ready.wait(START_TIMEOUT_S):
            self.close()
            raise DeadlineError(f"the router process was not ready after {START_TIMEOUT_S:g} s", operation="start")

    @property
    def pid(self) -> int:
        """Process id of the current router process."""
        return self._process.pid

    def _start_process(self) -> subprocess.Popen[bytes]:
        with contextlib.ExitStack() as stack:
            log = subprocess.DEVNULL if self._log is None else stack.enter_context(self._log.open("ab"))
            process = subprocess.Popen(
                [sys.executable, "-m", "verl_server.router.process.router_main"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        _write_line(process.stdin, self._settings)
        self._reported_at = time.monotonic()
        return process

    def _read_reports(self) -> None:
        """Read the reports of the router process. Start another process when it ends."""
        failed_starts = 0
        while True:
            reported = False
            assert self._process.stdout is not None
            for line in self._process.stdout:
                reported = True
                with contextlib.suppress(orjson.JSONDecodeError, KeyError):  # a killed process may write half a line
                    self._apply_report(orjson.loads(line))
            self._process.wait()
            self._ready.clear()
            self._stats = {}
            if self._closed.is_set():
                return
            logger.warning("the router process ended with exit code %s and is restarted", self._process.returncode)
            _close_pipes(self._process)
            failed_starts = 0 if reported else failed_starts + 1
            if not self._restart(failed_starts):
                return

    def _restart(self, failed_starts: int) -> bool:
        """Start another process after a delay. Returns False when the supervisor was closed meanwhile."""
        while True:
            delay_s = min(FIRST_RESTART_DELAY_S * 2**failed_starts, MAX_RESTART_DELAY_S) if failed_starts else 0.0
            if self._closed.wait(delay_s):
                return False
            try:
                self._process = self._start_process()
                break
            except OSError:
                failed_starts += 1
                logger.exception("the router process cannot be started")
        if self._closed.is_set():  # `close` has killed the previous process only
            self._process.kill()
        self.restarts += 1
        self._status_queue.requeue_all()
        return True

    def _apply_report(self, report: Json) -> None:
        now = time.monotonic()
        has_pending_statuses = self._status_queue.sequence > report["sequence"]
        self._stats = {
            name: ReplicaStats(
                running_requests=replica["running_requests"],
                last_progress_at=now - replica["no_progress_s"] if replica["running_requests"] else 0.0,
                admitted=replica["admitted"] or has_pending_statuses,
            )
            for name, replica in report["replicas"].items()
        }
        self._reported_at, self._applied_sequence = now, report["sequence"]
        self._ready.set()

    def _send_statuses(self) -> None:
        """Send pending statuses. A process that does not read them sends no reports either, so it is restarted."""
        while (taken := self._status_queue.take(METRICS_INTERVAL_S)) is not None:
            sequence, statuses = taken
            message = {
                "sequence": sequence,
                "statuses": [encode_status(status) for status in statuses],
                "metrics": self._metrics(),
            }
            _write_line(self._process.stdin, message)

    def _detect_hang(self) -> None:
        """Kill a process that sends no reports. `_read_reports` then starts another one.

        Only the time between two checks is counted. After a time in which this process itself was stopped or too busy
        to check, the reports of the router process may not have been read yet.
        """
        silent_s, last_reported_at = 0.0, self._reported_at
        while not self._closed.wait(HANG_CHECK_INTERVAL_S):
            reported_at = self._reported_at
            silent_s = silent_s + HANG_CHECK_INTERVAL_S if reported_at == last_reported_at else 0.0
            last_reported_at = reported_at
            timeout_s = self._report_timeout_s if self._ready.is_set() else START_TIMEOUT_S
            if silent_s > timeout_s:
                silent_s = 0.0
                logger.warning("the router process sent no report for %g s and is killed", timeout_s)
                self._process.kill()

    # -- RoutingTarget --------------------------------------------------------------------------------

    def update_statuses(self, statuses: Sequence[ReplicaStatus]) -> None:
        self._status_queue.put(*statuses)

    def replica_stats(self, name: str) -> ReplicaStats | None:
        stats, status = self._stats.get(name), self._status_queue.latest(name)
        if stats is None or status is None:
            return None
        return ReplicaStats(stats.running_requests, stats.last_progress_at, stats.admitted or not status.admitted)

    def wait_until_applied(self) -> None:
        deadline, sequence = time.monotonic() + APPLY_TIMEOUT_S, self._status_queue.sequence
        while self._applied_sequence < sequence and time.monotonic() < deadline:
            time.sleep(0.01)

    def close(self) -> None:
        """Kill the router process and release its port."""
        self._closed.set()
        self._status_queue.close()
        self._process.kill()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(JOIN_TIMEOUT_S)
        _close_pipes(self._process)
        self._reservation.release()


def _reachable_host(host: str) -> str:
    """The address at which other machines reach a server that listens at `host`."""
    if host not in ALL_ADDRESSES:
        return host
    peer, loopback = ALL_ADDRESSES[host]
    try:
        return own_address(peer)
    except OSError:  # there is no route to other machines
        return loopback


def _write_line(pipe: IO[bytes] | None, message: Json) -> None:
    assert pipe is not None
    with contextlib.suppress(BrokenPipeError, ValueError):  # the process has ended; the next one gets everything
        pipe.write(orjson.dumps(message) + b"\n")
        pipe.flush()


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError, ValueError):
                pipe.close()
    process.wait()
