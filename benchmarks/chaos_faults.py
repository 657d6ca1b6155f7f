"""The faults of `bench_chaos`: kills, errors, paused servers, bursts of requests, slow readers and full disks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import psutil
from chaos_report import KILLS, Measurement

if TYPE_CHECKING:
    from chaos_proxy import ProxiedLauncher

    from verl_server import RolloutManager

FAULT_INTERVAL_S = (2.0, 8.0)
"""Minimum and maximum number of seconds between two faults."""
TARGET_DEADLINE_S = 180.0
"""Maximum number of seconds for which a fault waits for its target."""
ERRORS_S = 10.0
"""Seconds for which a replica answers each generation with an error at once."""
PAUSE_S = 6.0
"""Seconds for which a scheduler is stopped. Longer than the interval between two updates, so that one update waits."""
BURST_REQUESTS = 400
"""Number of additional requests at one moment, more than the replicas run and the router queues."""
SLOW_READERS = 8
SLOW_READER_BYTES_PER_S = 400
OTHER_FAULTS = ("error", "abort", "pause", "burst", "slow readers")
LOG_DISK_BYTES = 64 * 1024


def make_plan(kills: int, rng: random.Random) -> list[str]:
    """`kills` kills, and a quarter as many of each other fault, at least one of each, in random order."""
    plan = [KILLS[number % len(KILLS)] for number in range(kills)]
    plan += [fault for fault in OTHER_FAULTS for _ in range(max(1, kills // 4))]
    rng.shuffle(plan)
    return plan


class FaultInjector:
    """Injects the faults of a plan into a running fleet, one after the other."""

    def __init__(
        self, fleet: RolloutManager, launcher: ProxiedLauncher, measured: Measurement, burst: Callable[[int], None]
    ) -> None:
        """`burst(n)` makes the callers send `n` additional requests at once."""
        self._fleet, self._launcher, self._measured, self._burst = fleet, launcher, measured, burst

    def run(self, plan: list[str], rng: random.Random, stop: threading.Event) -> None:
        """Inject the faults. A fault waits until two replicas are healthy. Raises TimeoutError if it waits too long."""
        for fault in plan:
            deadline = time.monotonic() + TARGET_DEADLINE_S
            while not self._try(fault, rng):
                if stop.wait(rng.uniform(*FAULT_INTERVAL_S)):
                    return
                if time.monotonic() > deadline:
                    raise TimeoutError(f"fault {fault!r}: no target for {TARGET_DEADLINE_S:g} s")
            if stop.wait(rng.uniform(*FAULT_INTERVAL_S)):
                return

    def _try(self, fault: str, rng: random.Random) -> bool:
        """Inject a fault. Returns False without two healthy replicas, or when the target has just ended."""
        healthy = [one for one in self._fleet.status().replicas if one.state.value == "healthy" and one.pids]
        if len(healthy) < 2:
            return False
        with contextlib.suppress(psutil.Error, ProcessLookupError, StopIteration):
            self._inject(fault, rng.choice(healthy).name)
            return True
        return False

    def _inject(self, fault: str, replica: str) -> None:
        entry = {"time": time.time(), "fault": fault, "replica": replica}
        if fault in KILLS:
            os.kill(self._find_process(fault, replica), signal.SIGKILL)
            if fault == "forkserver":  # the recovery of this replica needs another forkserver
                os.kill(self._find_process("server", replica), signal.SIGKILL)
        elif fault in ("error", "abort"):
            proxy = self._launcher.proxies[replica]
            before = proxy.answered
            proxy.fault = fault
            time.sleep(ERRORS_S)
            proxy.fault = None
            entry["answered"] = proxy.answered - before
        elif fault == "pause":
            process = psutil.Process(self._find_process("scheduler", replica))
            process.suspend()
            try:
                time.sleep(PAUSE_S)
            finally:
                process.resume()
        elif fault == "burst":
            self._burst(BURST_REQUESTS)
        else:
            entry["slow_replies"] = asyncio.run(self._read_slowly())
        if fault in ("router", "burst", "slow readers"):
            entry["replica"] = None
        self._measured.faults.append(entry)

    def _find_process(self, target: str, replica: str) -> int:
        """Process id of the target of a kill. Raises StopIteration if there is none."""
        status = self._fleet.status()
        if target == "router":
            assert status.router_process is not None
            return status.router_process.pid
        if target == "forkserver":
            children = psutil.Process().children()
            return next(child.pid for child in children if any("forkserver" in part for part in child.cmdline()))
        pids = next(one.pids for one in status.replicas if one.name == replica and one.pids is not None)
        if target == "server":
            return pids.main
        return next(pid for pid in pids.workers if any("scheduler" in part for part in psutil.Process(pid).cmdline()))

    async def _read_slowly(self) -> int:
        """Read streams of the router a few bytes at a time. Returns the number of streams that were complete."""
        body = {"model": "default", "prompt": "slow", "max_tokens": 100, "stream": True, "ignore_eos": True}
        url, headers = f"{self._fleet.router_url}/v1/completions", {"Authorization": f"Bearer {self._fleet.router_key}"}
        connector = aiohttp.TCPConnector(limit=0, socket_factory=_socket_with_small_buffer)

        async def read_one(session: aiohttp.ClientSession) -> bool:
            text = b""
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):  # its replica may be killed
                async with session.post(url, json=body, headers=headers) as answer:
                    while chunk := await answer.content.read(SLOW_READER_BYTES_PER_S):
                        text += chunk
                        await asyncio.sleep(1.0)
            return text.rstrip().endswith(b"data: [DONE]")

        timeout = aiohttp.ClientTimeout(total=120.0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1024) as session:
            return sum(await asyncio.gather(*(read_one(session) for _ in range(SLOW_READERS))))


def _socket_with_small_buffer(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket whose sender soon has to wait for the reader."""
    family, kind, protocol = address[:3]
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    return made


@contextlib.contextmanager
def small_log_disk(folder: Path) -> Iterator[Path | None]:
    """A file system of `LOG_DISK_BYTES` bytes, mounted at `folder`. None where this process may not mount."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={LOG_DISK_BYTES}", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def free_bytes(folder: Path) -> int:
    """Free bytes of the file system of `folder`."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
