"""A fleet's router in a process of its own, kept alive. Callers reach it by HTTP, and reach the next one there, too."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import orjson

from verl_server.config import RouterConfig
from verl_server.errors import DeadlineError
from verl_server.router.targets import ReplicaStats, ReplicaStatus, StatusQueue
from verl_server.server.ports import PortReservation, join_host_port

logger = logging.getLogger(__name__)

Json = dict[str, Any]

START_S = 60.0
#: A router that says nothing for so long (it reports ten times a second) is ended and started again.
SILENT_S = 20.0
SETTLE_S = 2.0
WAIT_S = 0.5
"""Before the second start in a row; doubled for each further one, up to `MAX_WAIT_S`."""
MAX_WAIT_S = 10.0
JOIN_S = 10.0
METRICS_S = 2.0
"""Between two tellings of the fleet's metrics."""


class RouterProcess:
    """A `RoutingTarget` (planes.py). Its port stays the same over restarts, and so does its key."""

    def __init__(
        self,
        config: RouterConfig,
        log_dir: Path | str | None,
        metrics: Callable[[], str],
        host: str = "127.0.0.1",
    ) -> None:
        """`metrics`: the fleet's own, which the router shows beside its own."""
        self._metrics = metrics
        self._reservation = PortReservation(host)
        self.url = f"http://{join_host_port(host, self._reservation.port)}"
        self.api_key = secrets.token_urlsafe(32)
        self.restarts = 0
        self._settings: Json = {
            "host": host,
            "port": self._reservation.port,
            "api_key": self.api_key,
            "router": asdict(config),
            "parent": os.getpid(),
        }
        self._log: Path | None = None
        if log_dir is not None:
            self._log = Path(log_dir) / "router.log"
            self._log.parent.mkdir(parents=True, exist_ok=True)
        self._status_queue = StatusQueue()
        self._seen: dict[str, ReplicaStats] = {}
        self._kept = 0
        self._heard_at = time.monotonic()
        self._closed = threading.Event()
        self._up = threading.Event()
        self._child = self._spawn()
        self._threads = [
            threading.Thread(target=work, name=f"verl-server-router-{work.__name__.strip('_')}", daemon=True)
            for work in (self._keep, self._write, self._listen_for_silence)
        ]
        for thread in self._threads:
            thread.start()
        if not self._up.wait(START_S):
            self.close()
            raise DeadlineError(f"the router process was not ready after {START_S:g} s", operation="start")

    @property
    def pid(self) -> int:
        return self._child.pid

    def _spawn(self) -> subprocess.Popen[bytes]:
        with contextlib.ExitStack() as stack:
            log = subprocess.DEVNULL if self._log is None else stack.enter_context(self._log.open("ab"))
            child = subprocess.Popen(
                [sys.executable, "-m", "verl_server.router.router_main"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        _send(child.stdin, self._settings)
        self._heard_at = time.monotonic()
        return child

    def _keep(self) -> None:
        """Listen to the child, and start another when it ends."""
        in_a_row = 0
        while True:
            heard = False
            assert self._child.stdout is not None
            for line in self._child.stdout:
                heard = True
                with contextlib.suppress(orjson.JSONDecodeError, KeyError):  # the torn last line of one that died
                    self._hear(orjson.loads(line))
            self._child.wait()
            self._up.clear()
            self._seen = {}
            if self._closed.is_set():
                return
            in_a_row = 0 if heard else in_a_row + 1
            logger.warning("the router process ended with %s; it is started again", self._child.returncode)
            _close(self._child)
            while True:
                if self._closed.wait(min(WAIT_S * 2**in_a_row, MAX_WAIT_S) if in_a_row else 0.0):
                    return
                try:
                    self._child = self._spawn()
                    break
                except OSError:
                    in_a_row += 1
                    logger.exception("the router process cannot be started")
            if self._closed.is_set():  # it came too late to be seen by `close`
                self._child.kill()
            self.restarts += 1
            self._status_queue.again()

    def _hear(self, said: Json) -> None:
        now = time.monotonic()
        self._seen = {
            name: ReplicaStats(
                requests, now - quiet_s if requests else 0.0, admitted or self._status_queue.number > said["number"]
            )
            for name, (requests, quiet_s, admitted) in said["replicas"].items()
        }
        self._heard_at, self._kept = now, said["number"]
        self._up.set()

    def _write(self) -> None:
        """Pass on what stands. A child that does not read is silent as well, and replaced."""
        while (news := self._status_queue.take(METRICS_S)) is not None:
            number, standings = news
            said = {"number": number, "standings": [_wire(one) for one in standings], "metrics": self._metrics()}
            _send(self._child.stdin, said)

    def _listen_for_silence(self) -> None:
        while not self._closed.wait(1.0):
            limit = SILENT_S if self._up.is_set() else START_S
            if time.monotonic() - self._heard_at > limit:
                logger.warning("the router process has been silent for %g s", limit)
                self._child.kill()

    # -- a plane --------------------------------------------------------------------------------------

    def tell(self, standing: ReplicaStatus) -> None:
        self._status_queue.put(standing)

    def seen(self, name: str) -> ReplicaStats | None:
        seen, standing = self._seen.get(name), self._status_queue.latest(name)
        if seen is None or standing is None:
            return None
        return ReplicaStats(seen.requests, seen.progress_at, seen.admitted or not standing.admitted)

    def settle(self) -> None:
        deadline, number = time.monotonic() + SETTLE_S, self._status_queue.number
        while self._kept < number and time.monotonic() < deadline:
            time.sleep(0.01)

    def close(self) -> None:
        self._closed.set()
        self._status_queue.close()
        self._child.kill()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(JOIN_S)
        _close(self._child)
        self._reservation.release()


def _wire(standing: ReplicaStatus) -> Json:
    engine = standing.engine
    return {
        "name": standing.name,
        "url": None if engine is None else engine.base_url,
        "api_key": None if engine is None else engine.api_key,
        "version": standing.version,
        "admitted": standing.admitted,
        "suspect": standing.suspect,
        "expected": standing.expected,
        "gone": standing.gone,
    }


def _send(pipe: IO[bytes] | None, line: Json) -> None:
    assert pipe is not None
    with contextlib.suppress(BrokenPipeError, ValueError):  # it has ended: the next one is told everything
        pipe.write(orjson.dumps(line) + b"\n")
        pipe.flush()


def _close(child: subprocess.Popen[bytes]) -> None:
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError, ValueError):
                pipe.close()
    child.wait()
