"""A fleet's router in a process of its own, kept alive. Callers reach it by HTTP, and reach the next one there, too."""

from __future__ import annotations

import contextlib
import logging
import secrets
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import orjson

from verl_server.adapter.ports import PortReservation, authority
from verl_server.errors import DeadlineError
from verl_server.rollout.planes import Mailbox, Seen, Standing
from verl_server.rollout.seats import RouterConfig

logger = logging.getLogger(__name__)

Json = dict[str, Any]

START_S = 60.0
#: A router that says nothing for so long (it reports ten times a second) is ended and started again.
SILENT_S = 20.0
SETTLE_S = 2.0
WAIT_S = 0.5
"""Before the second start in a row; doubled for each further one, up to `MAX_WAIT_S`."""
MAX_WAIT_S = 10.0


class RouterProcess:
    """A `Plane` (planes.py). Its port stays the same over restarts, and so does its key."""

    def __init__(self, config: RouterConfig, log_dir: Path | str | None, host: str = "127.0.0.1") -> None:
        self._config = config
        self._reservation = PortReservation(host)
        self.url = f"http://{authority(host, self._reservation.port)}"
        self.api_key = secrets.token_urlsafe(32)
        self.restarts = 0
        self._settings: Json = {
            "host": host,
            "port": self._reservation.port,
            "api_key": self.api_key,
            "router": asdict(config),
        }
        self._log: Any = subprocess.DEVNULL if log_dir is None else Path(log_dir) / "router.log"
        self._mailbox = Mailbox()
        self._seen: dict[str, Seen] = {}
        self._told = self._kept = 0
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
            log = self._log if isinstance(self._log, int) else stack.enter_context(self._log.open("ab"))
            child = subprocess.Popen(
                [sys.executable, "-m", "verl_server.rollout.routed"],
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
                self._hear(orjson.loads(line))
            self._child.wait()
            self._up.clear()
            self._seen = {}
            if self._closed.is_set():
                return
            in_a_row = 0 if heard else in_a_row + 1
            logger.warning("the router process ended with %s; it is started again", self._child.returncode)
            if self._closed.wait(0.0 if heard else min(WAIT_S * 2**in_a_row, MAX_WAIT_S)):
                return
            self.restarts += 1
            _close(self._child)
            self._child = self._spawn()
            self._mailbox.again()

    def _hear(self, said: Json) -> None:
        now = time.monotonic()
        self._seen = {
            name: Seen(requests, now - quiet_s if requests else 0.0, admitted or self._told > said["number"])
            for name, (requests, quiet_s, admitted) in said["replicas"].items()
        }
        self._heard_at, self._kept = now, said["number"]
        self._up.set()

    def _write(self) -> None:
        """Pass on what stands. A child that does not read is silent as well, and replaced."""
        while (news := self._mailbox.take()) is not None:
            for standing in news:
                self._told += 1
                engine = standing.engine
                line = {
                    "number": self._told,
                    "name": standing.name,
                    "url": None if engine is None else engine.base_url,
                    "api_key": None if engine is None else engine.api_key,
                    "version": standing.version,
                    "admitted": standing.admitted,
                    "suspect": standing.suspect,
                    "expected": standing.expected,
                    "gone": standing.gone,
                }
                _send(self._child.stdin, line)

    def _listen_for_silence(self) -> None:
        while not self._closed.wait(1.0):
            limit = SILENT_S if self._up.is_set() else START_S
            if time.monotonic() - self._heard_at > limit:
                logger.warning("the router process has been silent for %g s", limit)
                self._child.kill()

    # -- a plane --------------------------------------------------------------------------------------

    def tell(self, standing: Standing) -> None:
        self._mailbox.put(standing)

    def seen(self, name: str) -> Seen | None:
        seen, standing = self._seen.get(name), self._mailbox.latest(name)
        if seen is None or standing is None:
            return None
        return Seen(seen.requests, seen.progress_at, seen.admitted or not standing.admitted)

    def settle(self) -> None:
        deadline = time.monotonic() + SETTLE_S
        while not (self._mailbox.is_empty and self._kept >= self._told) and time.monotonic() < deadline:
            time.sleep(0.01)

    def close(self) -> None:
        self._closed.set()
        self._mailbox.close()
        self._child.kill()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        _close(self._child)
        self._reservation.release()


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
