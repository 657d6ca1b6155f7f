"""The process that runs cases with one system, one after the other. The runner kills it when a case hangs."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path

import psutil

from verl_server.conformance.cases import Case, CaseResult, ModelKind, Outcome, Trial
from verl_server.conformance.reference import Reference
from verl_server.conformance.systems import (
    CheckFailedError,
    NotOfferedError,
    SystemFactory,
    describe,
    kill_processes,
    without_paths,
)

Models = Mapping[ModelKind, Path]
"""Folders of the models that the system can serve."""
READY = "ready"
"""Message of the worker when the system runs and the case begins."""
STACKS_BEFORE_DEADLINE_S = 0.5
"""Seconds before the deadline of a case at which the stacks of all threads are written to the log."""


def worker_main(connection: Connection, start: SystemFactory, models: Models, updates: int, log: Path) -> None:
    """Main function of the process. Receives cases, sends `READY` and a `CaseResult` for each; None ends it."""
    _log_to(log)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the runner's
    _follow_parent()
    import torch

    torch.set_num_threads(1)
    references: dict[ModelKind, Reference] = {}
    trial: Trial | None = None
    while (case := connection.recv()) is not None:
        try:
            trial = _trial_for(case, trial, start, references, models, updates)
        except NotOfferedError as error:
            trial = None
            connection.send(CaseResult(case.name, Outcome.NOT_OFFERED, str(error), 0.0))
            continue
        except Exception as error:  # noqa: BLE001 - boundary to the system under test
            traceback.print_exc()
            trial = None
            detail = without_paths(f"the server did not start: {describe(error)}")
            connection.send(CaseResult(case.name, Outcome.FAILED, detail, 0.0))
            continue
        connection.send(READY)
        result = run_case(case, trial)
        if result.outcome is Outcome.FAILED:  # the next case gets another server
            _close_failed(trial)
            trial = None
        connection.send(result)
    if trial is not None:
        _close(trial)


def run_case(case: Case, trial: Trial) -> CaseResult:
    """Run one case in this process. Never raises, except KeyboardInterrupt."""
    print(f"--- {case.name}", file=sys.stderr, flush=True)
    started = time.monotonic()
    deadline_s = case.seconds_until_hung(trial.updates) - STACKS_BEFORE_DEADLINE_S
    try:
        with _stacks_after(deadline_s):
            outcome, detail = Outcome.PASSED, case.run(trial)
    except NotOfferedError as error:
        outcome, detail = Outcome.NOT_OFFERED, str(error)
    except CheckFailedError as error:
        outcome, detail = Outcome.FAILED, str(error)
    except Exception as error:  # noqa: BLE001 - boundary to the system under test
        traceback.print_exc()
        outcome, detail = Outcome.FAILED, describe(error)
    seconds = round(time.monotonic() - started, 2)
    return CaseResult(case.name, outcome, without_paths(detail), seconds, trial.figures)


def _trial_for(
    case: Case,
    before: Trial | None,
    start: SystemFactory,
    references: dict[ModelKind, Reference],
    models: Models,
    updates: int,
) -> Trial:
    """A trial with the system of the trial before, or with another one if the model or the server arguments differ."""
    is_same = before is not None and (before.model, before.server_args) == (case.model, case.server_args)
    if before is not None and not is_same:
        _close_failed(before)
    if case.model not in models:
        raise NotOfferedError("the suite tests a running server with the model that it serves only")
    if case.model not in references:
        references[case.model] = Reference(models[case.model])
    start_again = functools.partial(start, models[case.model])
    system = before.system if before is not None and is_same else start_again(**case.server_args)
    return Trial(system, references[case.model], start_again, case.server_args, updates, model=case.model)


def _close(trial: Trial) -> None:
    """End the system. A server that ran before gets the weights of its model's folder back."""
    try:
        if not trial.system.owns_server:
            trial.system.update(trial.reference.original)
    finally:
        trial.system.close()


def _close_failed(trial: Trial) -> None:
    try:
        _close(trial)
    except Exception:  # noqa: BLE001 - boundary to the system under test; the runner kills what is left
        traceback.print_exc()


@contextlib.contextmanager
def _stacks_after(seconds: float) -> Iterator[None]:
    """Write the stacks of all threads to the log if the body takes longer."""
    faulthandler.dump_traceback_later(max(seconds, 0.1), file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _follow_parent() -> None:
    """End this process and all processes below it when the runner ends, even by SIGKILL."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        kill_processes(psutil.Process().children(recursive=True))
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


def _log_to(path: Path) -> None:
    """Append all output of this process and of the processes below it to a file."""
    with path.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
