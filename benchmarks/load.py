"""Keep a fixed number of requests in flight, from threads or from tasks, and time each of them.

A closed loop: each of N workers sends its next request when the last one was answered. Before the clock
starts every worker sends one request, so that opening connections and starting threads are not counted.
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

Json = dict[str, Any]
#: Milliseconds of one request: the whole latency, and the part that is not the server's own.
Times = tuple[float, float]
#: Sends request number i and returns the decoded reply.
Send = Callable[[int], Json]
AsyncSend = Callable[[int], Awaitable[Json]]
#: One for each worker thread: a connection may belong to it.
OpenSend = Callable[[], AbstractContextManager[Send]]


@dataclass(frozen=True)
class Round:
    """One round of one way of sending."""

    seconds: float
    """From the first request to the last reply."""
    latencies_ms: list[float]
    """One for each request, in the order in which they were answered."""
    client_ms: list[float]
    """The part of each latency that is not the server's own (`meta_info.e2e_latency`, from SGLang's receipt of a
    request to its last token): HTTP on both sides and the client."""
    cpu_s: float
    """CPU time of the client process, all threads. It does not depend on what else runs on the machine."""

    @property
    def throughput(self) -> float:
        """Requests per second."""
        return len(self.latencies_ms) / self.seconds

    @property
    def cpu_ms(self) -> float:
        """Milliseconds of client CPU per request."""
        return self.cpu_s * 1e3 / len(self.latencies_ms)


def run_threads(open_send: OpenSend, in_flight: int, requests: int, check: Callable[[Json], None]) -> Round:
    """`requests` requests from `in_flight` threads. The first error of any thread is raised."""
    numbers = iter(range(requests))  # shared: `next` on it is atomic
    ready = threading.Barrier(in_flight + 1)
    times: list[Times] = []

    def work() -> None:
        try:
            with open_send() as send:
                check(send(0))
                ready.wait()
                _work_off(send, numbers, times, check)
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


def _work_off(send: Send, numbers: Iterator[int], times: list[Times], check: Callable[[Json], None]) -> None:
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
    """Wait for all; raise what went wrong, rather than the broken barrier that it caused elsewhere."""
    errors = [error for worker in workers if (error := worker.exception()) is not None]
    errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
    if errors:
        raise errors[0]


async def run_tasks(send: AsyncSend, in_flight: int, requests: int, check: Callable[[Json], None]) -> Round:
    """`requests` requests from `in_flight` tasks of the running loop."""
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
