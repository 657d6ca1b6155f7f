"""The trainer's processes: start them, hear from them, end them.

One process per rank, spawned. Each rank reports over its own pipe and logs into its own file. When one fails, all end;
when this process ends, however it ends, so do they. (The rollout server ends with the rank that started it: that
is the engine's promise, not this file's.)
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
from verl_server.server.shared_forkserver import prepare_forkserver

SILENCE_S = 420.0
"""The longest wait for a report; the first one waits for the server's start on a cold disk."""
STOP_S = 15.0
LAST_WORDS_S = 5.0
"""For the other ranks to say what happened after one has failed."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM unwinds like the keyboard's interrupt, so that processes and scratch files are cleaned up."""
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
    """The trainer's processes, as a context manager. Iterate `reports()` until they are done."""

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
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank_main, args=(rank, settings, workdir, log_dir, theirs), name=f"demo trainer rank {rank}"
        )
        process.start()
        theirs.close()
        self.processes.append(process)
        self._pipes.append(ours)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        """End what still runs, politely first."""
        for process in self.processes:
            if process.is_alive():
                process.terminate()
        deadline = time.monotonic() + STOP_S
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()

    def reports(self, tick_s: float = 0.25) -> Iterator[Report | None]:
        """Reports as they come, and None at least every `tick_s`, until every rank has ended well.

        Raises PeerError with the words of the ranks that failed, DeadlineError when nothing comes.
        """
        open_pipes = list(self._pipes)
        heard = time.monotonic()
        while open_pipes:
            for pipe in wait(open_pipes, timeout=tick_s):
                assert isinstance(pipe, Connection)
                heard = time.monotonic()
                try:
                    report = pipe.recv()
                except EOFError:
                    open_pipes.remove(pipe)
                    self._check_end(self._pipes.index(pipe))
                    continue
                if isinstance(report, Failure):
                    raise self._failed([report])
                yield report
            if time.monotonic() - heard > SILENCE_S:
                raise DeadlineError(f"the trainer's ranks have not reported for {SILENCE_S:g} s")
            yield None

    def _check_end(self, rank: int) -> None:
        process = self.processes[rank]
        process.join(STOP_S)
        if process.exitcode != 0:
            how = "does not end" if process.exitcode is None else f"ended with exit code {process.exitcode}"
            raise self._failed([Failure(rank, f"the process {how}")])

    def _failed(self, failures: list[Failure]) -> PeerError:
        """One error out of what all ranks say; the first to fail comes first."""
        deadline = time.monotonic() + LAST_WORDS_S
        silent = [pipe for rank, pipe in enumerate(self._pipes) if rank != failures[0].rank]
        while silent and (ready := wait(silent, timeout=max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                with contextlib.suppress(EOFError):
                    report = pipe.recv()
                    if not isinstance(report, Failure):
                        continue
                    failures.append(report)
                silent.remove(pipe)
        return PeerError(f"training failed\n{_in_words(failures)}", ranks=[failure.rank for failure in failures])


def _in_words(failures: list[Failure]) -> str:
    """What the ranks say; what several say alike is said once."""
    ranks_by_error: dict[str, list[str]] = {}
    for failure in failures:
        ranks_by_error.setdefault(failure.error, []).append(str(failure.rank))
    return "\n".join(f"rank {', '.join(ranks)}: {error}" for error, ranks in ranks_by_error.items())


def _rank_main(rank: int, settings: Settings, workdir: Path, log_dir: Path, pipe: Connection) -> None:
    """First and last function of a rank's process."""
    # The demo is the same everywhere: an accelerator is not used, and the server inherits this.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    _follow_parent(workdir)
    _log_to(log_dir / f"rank{rank}.log")
    try:
        if rank == 0:
            prepare_forkserver(SERVER_ENV)  # it imports SGLang while this process imports torch
        from verl_server.demo.trainer import train

        train(rank, settings, workdir, log_dir, pipe.send)
    except BaseException as error:  # noqa: BLE001 - the edge of the process: the parent is told, the exit code says it
        traceback.print_exc()
        with contextlib.suppress(OSError):
            pipe.send(Failure(rank, f"{type(error).__name__}: {error}"))
        sys.exit(1)


def _follow_parent(workdir: Path) -> None:
    """End with the parent even if it is killed, and clean up for it. The keyboard's interrupt is left to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        shutil.rmtree(workdir, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


def _log_to(path: Path) -> None:
    """Send all output of this process, C++ included, to a file: the terminal belongs to the progress display."""
    with path.open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
