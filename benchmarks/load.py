"""Keeps a fixed number of requests in flight, from threads or from tasks, and measures each request.

The load is a closed loop: each of N workers sends its next request after the reply to the previous one. Every worker
sends one request before the measurement, so that new connections and threads are not measured.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from verl_server.types import Json

#: Milliseconds of one request: the whole latency, and the latency without the time of the server itself.
Times = tuple[float, float]
#: Sends the request with the given number and returns the decoded reply.
Send = Callable[[int], Json]
AsyncSend = Callable[[int], Awaitable[Json]]
#: Opens a `Send` for one worker thread, which may own a connection.
OpenSend = Callable[[], AbstractContextManager[Send]]


@dataclass(frozen=True)
class Round:
    """The measurements of one round of one client."""

    seconds: float
    """Seconds from the first request to the last reply."""
    latencies_ms: list[float]
    """Milliseconds of each request, in the order of the replies."""
    client_ms: list[float]
    """Each latency without the time of the server itself (`meta_info.e2e_latency`, from SGLang's receipt of a request
    to its last token). HTTP on both sides and the client remain."""
    cpu_s: float
    """Seconds of CPU time of the client process, all threads. Other programs on the machine hardly change it."""

    @property
    def throughput(self) -> float:
        """Requests per second."""
        return len(self.latencies_ms) / self.seconds

    @property
    def cpu_ms(self) -> float:
        """Milliseconds of client CPU per request."""
        return self.cpu_s * 1e3 / len(self.latencies_ms)


def run_threads(open_send: OpenSend, in_flight: int, requests: int, check: Callable[[Json], None]) -> Round:
    """Send `requests` requests from `in_flight` threads. Raises the first error of any thread."""
    numbers = iter(range(requests))  # shared: `next` on it is atomic
    ready = threading.Barrier(in_flight + 1)
    times: list[Times] = []

    def work() -> None:
        try:
            with open_send() as send:
                check(send(0))
                ready.wait()
                _send_all(send, numbers, times, check)
        except BaseException:
            ready.abort()
            raise

    with ThreadPoolExecutor(in_flight) as pool:
        workers = [pool.submit(work) for _ in range(in_flight)]
        try:
            ready.wait()
        except threading.BrokenBarrierError:
            _raise_first(workers)
        cpu, started = time.process_time(), time.perf_counter()
        _raise_first(workers)
        return _round(time.perf_counter() - started, times, time.process_time() - cpu)


def _send_all(send: Send, numbers: Iterator[int], times: list[Times], check: Callable[[Json], None]) -> None:
    for number in numbers:
        started = time.perf_counter()
        reply = send(number)
        times.append(_times(time.perf_counter() - started, reply))
        check(reply)


def _times(seconds: float, reply: Json) -> Times:
    return seconds * 1e3, (seconds - reply["meta_info"]["e2e_latency"]) * 1e3


def _round(seconds: float, times: list[Times], cpu_s: float) -> Round:
    return Round(seconds, [whole for whole, _ in times], [client for _, client in times], cpu_s)


def _raise_first(workers: list[Any]) -> None:
    """Wait for all workers. Raises an error of a worker; a broken barrier, which another error caused, comes last."""
    errors = [error for worker in workers if (error := worker.exception()) is not None]
    errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
    if errors:
        raise errors[0]


async def run_tasks(send: AsyncSend, in_flight: int, requests: int, check: Callable[[Json], None]) -> Round:
    """Send `requests` requests from `in_flight` tasks of the running event loop."""
    for reply in await asyncio.gather(*(send(0) for _ in range(in_flight))):
        check(reply)
    numbers = iter(range(requests))
    times: list[Times] = []

    async def work() -> None:
        for number in numbers:
            started = time.perf_counter()
            reply = await send(number)
            times.append(_times(time.perf_counter() - started, reply))
            check(reply)

    cpu, started = time.process_time(), time.perf_counter()
    await asyncio.gather(*(work() for _ in range(in_flight)))
    return _round(time.perf_counter() - started, times, time.process_time() - cpu)
