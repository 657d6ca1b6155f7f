"""A complete RL training run in minutes on any machine: `run` trains a tiny random transformer to sort digits.

All parts are real: a trainer of two FSDP2 ranks, an SGLang or vLLM server, GRPO, and a weight update in every step. The
policy starts from random weights and learns from rewards alone.

    settings.py  settings of a run, the reports of the trainer ranks, result of a run
    trainer.py   the training loop of one rank, with its model, task, advantages and loss
    display.py   progress, and the picture of the result

Importing this package imports neither torch nor sglang. Prompts, initial weights and sampling seeds depend on `seed`
only. Two runs on one machine give almost always the same curve. Differences remain because the server forms its batches
by time: logits are rounded differently in another batch, and a token changes when two candidates are closer than that.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING

from verl_server.cpu.forkserver import prepare_forkserver
from verl_server.demo.settings import SERVER_ENV, Exam, Failure, Outcome, Ready, Report, Settings, StepMetrics
from verl_server.errors import BadInputError, DeadlineError, PeerError, VerlServerError
from verl_server.validation import make_writable_folder

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["run"]


def run(seed: int = 0, steps: int = 80, output_dir: Path | str = "demo_output") -> int:
    """Train the model, show the progress, and write `reward.png` and `metrics.json` into `output_dir`.

    Returns the exit code. 0: the mean reward of the last steps reached 0.8, and the trainer and the server agreed on
    the logprobs of all tokens within 1e-3. 1: the run missed one of these targets, or a rank or the server failed;
    the reason is printed. 130: interrupted. Raises BadInputError if `steps` is below 1 or the
    folder takes no files.
    """
    from rich.console import Console

    from verl_server.demo.display import draw

    if steps < 1:
        raise BadInputError(f"steps must be at least 1, got {steps}")
    console = Console(highlight=False)
    output = Path(os.path.expanduser(output_dir))
    log_dir = output / "logs"
    make_writable_folder("output", log_dir)
    try:
        outcome = _train(Settings(seed=seed, steps=steps), log_dir, console)
    except KeyboardInterrupt:
        console.print("Interrupted. All processes of the demo have ended.")
        return 130
    except VerlServerError as error:
        console.print(f"The demo failed: {error}\nLogs: {log_dir}", markup=False, style="red", soft_wrap=True)
        return 1
    values = asdict(outcome) | {"passed": outcome.passed}
    (output / "metrics.json").write_text(json.dumps(values, indent=1), encoding="utf-8")
    draw(outcome, output / "reward.png")
    console.print(outcome.summary(output), markup=False)
    return 0 if outcome.passed else 1


def _train(settings: Settings, log_dir: Path, console: Console) -> Outcome:
    """Run the trainer ranks until they end, and show their reports."""
    from verl_server.demo.display import Display

    started = time.monotonic()
    ready: Ready | None = None
    exam: Exam | None = None
    steps: list[StepMetrics] = []
    with (
        sigterm_as_interrupt(),
        tempfile.TemporaryDirectory(prefix="verl-server-demo-", ignore_cleanup_errors=True) as workdir,
        Display(settings, console) as display,
        Ranks(settings, Path(workdir), log_dir) as ranks,
    ):
        for report in ranks.reports():
            match report:
                case Ready():
                    ready = report
                    display.ready(report)
                case StepMetrics():
                    steps.append(report)
                    display.step(report)
                case Exam():
                    exam = report
    assert ready is not None
    assert exam is not None
    return Outcome(settings, ready, tuple(steps), exam, time.monotonic() - started)


# -- Ranks ------------------------------------------------------------------------------------------
# The processes of the trainer ranks. Each reports over its own pipe and logs to its own file. When one rank fails, all
# end. When this process ends for any reason, the ranks end too. The server ends with the rank that started it;
# `VerlEngine` takes care of that.

REPORT_TIMEOUT_S = 420.0
"""Seconds without a report after which the run fails. The first report follows the start of the server, which is slow
on a cold disk."""
STOP_TIMEOUT_S = 15.0
"""Seconds for a process to end after SIGTERM."""


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

    def reports(self) -> Iterator[Report]:
        """Yield the reports of the ranks until all ranks have ended with exit code 0.

        Raises PeerError with the error of the first rank that fails, DeadlineError after `REPORT_TIMEOUT_S` without a
        report.
        """
        open_pipes = dict(zip(self._pipes, self.processes, strict=True))
        while open_pipes:
            if not (ready := wait(open_pipes, timeout=REPORT_TIMEOUT_S)):
                raise DeadlineError(
                    f"no trainer rank has reported for {REPORT_TIMEOUT_S:g} s; read the logs of the ranks",
                    operation="report",
                    seconds=REPORT_TIMEOUT_S,
                )
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    report = pipe.recv()
                except EOFError:
                    process = open_pipes.pop(pipe)
                    process.join(STOP_TIMEOUT_S)
                    if process.exitcode == 0:
                        continue
                    report = Failure(self.processes.index(process), f"ended with exit code {process.exitcode}")
                if isinstance(report, Failure):
                    raise PeerError(f"training failed\nrank {report.rank}: {report.error}", ranks=[report.rank])
                yield report


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
