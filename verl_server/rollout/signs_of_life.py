"""`SignsOfLife`: signs that the schedulers of one server work, although no token arrives."""

from __future__ import annotations

import time
from concurrent.futures import Future

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.errors import ShutDownError
from verl_server.server.cpu_time import SchedulerCpu
from verl_server.types import Json


class SignsOfLife:
    """Looks for signs of life of one server. It never waits for the server.

    A sign is an answer of the schedulers to a question, which they give between two steps, and CPU time of the programs
    that they have started, for example compilers of kernels. Without an accelerator, CPU time of the schedulers is a
    sign, too: one step can take minutes. With an accelerator it is none, because a scheduler that waits for a hung
    kernel may use a whole core.
    """

    def __init__(self, adapter: HttpServerEngineAdapter) -> None:
        """`adapter`: the adapter of a server that is ready. It is asked at once what device it has."""
        self._adapter = adapter
        self._answer: Future[Json] | None = adapter.ask_schedulers()
        self._has_accelerator = False
        self._cpu: SchedulerCpu | None = None
        self._next_look = 0.0
        self._last_sign_at = time.monotonic()

    def last_sign_at(self, now: float, interval_s: float) -> float:
        """Time of the last sign (`time.monotonic`). Looks for signs, at most once in `interval_s` seconds."""
        if now >= self._next_look:
            self._next_look = now + interval_s
            has_answered, has_computed = self._take_answer(), self._take_cpu_time()
            if has_answered or has_computed:
                self._last_sign_at = now
        return self._last_sign_at

    def _take_answer(self) -> bool:
        """Whether the last question was answered. Asks the next question when none is open."""
        answered = False
        if self._answer is not None and self._answer.done():
            if not self._answer.cancelled() and self._answer.exception() is None:
                answered = True
                self._has_accelerator = self._answer.result().get("device", "cpu") != "cpu"
            self._answer = None
        if self._answer is None:
            try:
                self._answer = self._adapter.ask_schedulers()
            except ShutDownError:  # the server is being ended
                self._answer = None
        return answered

    def _take_cpu_time(self) -> bool:
        """Whether CPU time was used, since the last look, that is a sign of life."""
        process = self._adapter.process
        assert process is not None
        before, self._cpu = self._cpu, process.scheduler_cpu()
        if before is None:
            return False
        return self._cpu.helpers_s != before.helpers_s or (
            not self._has_accelerator and self._cpu.own_s != before.own_s
        )
