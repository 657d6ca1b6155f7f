"""Runs cases in worker processes, with a deadline for each case: a case that hangs does not stop the suite."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from verl_server.conformance.case import Case, CaseResult, Outcome
from verl_server.conformance.other_processes import kill_processes, process_context
from verl_server.conformance.systems.base import SystemFactory
from verl_server.conformance.worker import READY, Models, worker_main
from verl_server.server.warden.shared_memory_files import find_shared_memory, remove_shared_memory

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 400.0
"""Seconds for a worker to start a server."""
END_TIMEOUT_S = 60.0
"""Seconds for a worker to end its server after the last case."""


def run_cases(
    start: SystemFactory, cases: Sequence[Case], *, models: Models, updates: int, log: Path
) -> Generator[CaseResult]:
    """Run the cases with one system and yield their results.

    `start` starts the system, `models` has the folder of each model that it can serve. `updates` is the number of
    updates of the case that repeats updates, `log` the file for the output of the system.
    """
    worker: _Worker | None = None
    try:
        for case in cases:
            if worker is None:
                worker = _Worker(start, models, updates, log)
            result, is_alive = worker.run(case, case.seconds_until_hung(updates))
            if not is_alive:
                worker.kill()
                worker = None
            yield result
        if worker is not None:
            worker.end()
    finally:
        if worker is not None:
            worker.kill()


class _Worker:
    """A worker process as the runner sees it."""

    def __init__(self, start: SystemFactory, models: Models, updates: int, log: Path) -> None:
        context = process_context()
        self._connection: Connection
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=worker_main, args=(theirs, start, models, updates, log))
        self._process.start()
        theirs.close()
        self._tree: set[psutil.Process] = set()
        """The worker and the processes below it at the start of the cases. Some outlive a worker that crashes."""

    def run(self, case: Case, deadline_s: float) -> tuple[CaseResult, bool]:
        """Run one case. Returns its result, and whether the worker can run another case."""
        try:
            self._connection.send(case)
            if not self._connection.poll(START_TIMEOUT_S):
                detail = f"the server did not start within {START_TIMEOUT_S:g} s"
                return CaseResult(case.name, Outcome.HUNG, detail, START_TIMEOUT_S), False
            message = self._connection.recv()
            if message != READY:
                return message, True
            self._record_tree()
            if not self._connection.poll(deadline_s):
                detail = f"no result after {deadline_s:g} s; the log has the stacks of all threads"
                return CaseResult(case.name, Outcome.HUNG, detail, deadline_s), False
            return self._connection.recv(), True
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._process.join(END_TIMEOUT_S)
            detail = f"the process of the trainer ended with exit code {self._process.exitcode}"
            return CaseResult(case.name, Outcome.FAILED, detail, 0.0), False

    def end(self) -> None:
        """Let the worker end its system."""
        with contextlib.suppress(BrokenPipeError):
            self._connection.send(None)
        self._process.join(END_TIMEOUT_S)
        if self._process.exitcode != 0:
            logger.warning(
                "the system was not closed, its server may hold other weights: exit code %s; read the log",
                self._process.exitcode,
            )

    def kill(self) -> None:
        """Kill the worker and all processes below it, and remove the files that they leave in shared memory."""
        self._record_tree()
        pids = [process.pid for process in self._tree]
        files = find_shared_memory(pids)
        kill_processes(list(self._tree))
        self._process.join()
        remove_shared_memory(files)
        self._connection.close()

    def _record_tree(self) -> None:
        assert self._process.pid is not None
        with contextlib.suppress(psutil.Error):
            worker = psutil.Process(self._process.pid)
            self._tree.update((worker, *worker.children(recursive=True)))
