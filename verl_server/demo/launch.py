"""`Ranks`: starts the processes of the trainer ranks, reads their reports, and ends the processes.

Each rank is a spawned process that reports over its own pipe and logs to its own file. When one rank fails, all ranks
end. When this process ends for any reason, the ranks end too. The SGLang server ends with the rank that started it;
`VerlEngine` takes care of that.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from verl_server.demo.settings import SERVER_ENV, Failure, Report, Settings
from verl_server.errors import DeadlineError, PeerError
from verl_server.server.forkserver.forkserver import prepare_forkserver

REPORT_TIMEOUT_S = 420.0
"""Seconds without a report after which the run fails. The first report follows the start of the server, which is slow
on a cold disk."""
STOP_TIMEOUT_S = 15.0
"""Seconds for a process to end after SIGTERM."""
FAILURE_TIMEOUT_S = 5.0
"""Seconds for the other ranks to report their errors after one rank has failed."""


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Make SIGTERM raise KeyboardInterrupt, so that processes and temporary files are cleaned up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt


class Ranks:
    """The processes of the trainer ranks. A context manager; iterate over `reports()` until the training ends."""

    def __init__(self, settings: Settings, workdir: Path, log_dir: Path) -> None:
        self.processes: list[SpawnProcess] = []
        self._pipes: list[Connection] = []
        try:
            for rank in range(settings.ranks):
                self._start(rank, settings, workdir, log_dir)
        except BaseException:
            self.__exit__()
            raise

    def _start(self, rank: int, settings: Settings, workdir: Path, log_dir: Path) -> None:
        context = multiprocessing.get_context("spawn")
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank_main, args=(rank, settings, workdir, log_dir, writer), name=f"demo trainer rank {rank}"
        )
        process.start()
        writer.close()
        self.processes.append(process)
        self._pipes.append(reader)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        """End the running processes: SIGTERM first, SIGKILL after a timeout."""
        for process in self.processes:
            if process.is_alive():
                process.terminate()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()

    def reports(self, tick_s: float = 0.25) -> Iterator[Report | None]:
        """Yield the reports of the ranks until all ranks have ended with exit code 0, and None at least every `tick_s`.

        Raises PeerError with the errors of the failed ranks, DeadlineError after `REPORT_TIMEOUT_S` without a report.
        """
        open_pipes = list(self._pipes)
        last_report_at = time.monotonic()
        while open_pipes:
            for pipe in wait(open_pipes, timeout=tick_s):
                assert isinstance(pipe, Connection)
                last_report_at = time.monotonic()
                try:
                    report = pipe.recv()
                except EOFError:
                    open_pipes.remove(pipe)
                    self._check_end(self._pipes.index(pipe))
                    continue
                if isinstance(report, Failure):
                    raise self._failed([report])
                yield report
            if time.monotonic() - last_report_at > REPORT_TIMEOUT_S:
                raise DeadlineError(
                    f"no trainer rank has reported for {REPORT_TIMEOUT_S:g} s; read the logs of the ranks",
                    operation="report",
                    seconds=REPORT_TIMEOUT_S,
                )
            yield None

    def _check_end(self, rank: int) -> None:
        process = self.processes[rank]
        process.join(STOP_TIMEOUT_S)
        if process.exitcode != 0:
            state = "does not end" if process.exitcode is None else f"ended with exit code {process.exitcode}"
            raise self._failed([Failure(rank, f"the process {state}")])

    def _failed(self, failures: list[Failure]) -> PeerError:
        """One error with the failures of all ranks. The failure that was reported first comes first."""
        deadline = time.monotonic() + FAILURE_TIMEOUT_S
        open_pipes = [pipe for rank, pipe in enumerate(self._pipes) if rank != failures[0].rank]
        while open_pipes and (ready := wait(open_pipes, timeout=max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                with contextlib.suppress(EOFError):
                    report = pipe.recv()
                    if not isinstance(report, Failure):
                        continue
                    failures.append(report)
                open_pipes.remove(pipe)
        ranks = [failure.rank for failure in failures]
        return PeerError(f"training failed\n{_describe_failures(failures)}", ranks=ranks)


def _describe_failures(failures: list[Failure]) -> str:
    """The errors of the ranks, one line per error. Ranks with the same error share a line."""
    ranks_by_error: dict[str, list[str]] = {}
    for failure in failures:
        ranks_by_error.setdefault(failure.error, []).append(str(failure.rank))
    return "\n".join(f"rank {', '.join(ranks)}: {error}" for error, ranks in ranks_by_error.items())


def _rank_main(rank: int, settings: Settings, workdir: Path, log_dir: Path, pipe: Connection) -> None:
    """Main function of a rank's process."""
    # The demo runs on the CPU on every machine. The server inherits this variable.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    _follow_parent(workdir)
    _log_to(log_dir / f"rank{rank}.log")
    try:
        if rank == 0:
            prepare_forkserver(SERVER_ENV)  # it imports SGLang while this process imports torch
        from verl_server.demo.trainer import train

        train(rank, settings, workdir, log_dir, pipe.send)
    except BaseException as error:  # noqa: BLE001 - end of the process: the parent receives the error
        traceback.print_exc()
        with contextlib.suppress(OSError):
            pipe.send(Failure(rank, f"{type(error).__name__}: {error}"))
        sys.exit(1)


def _follow_parent(workdir: Path) -> None:
    """End this process when the parent ends, even by SIGKILL, and remove `workdir`. SIGINT is left to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        shutil.rmtree(workdir, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


def _log_to(path: Path) -> None:
    """Write all output of this process, also of C++ code, to a file. The terminal shows the progress only."""
    with path.open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
