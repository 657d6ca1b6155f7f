"""The runner: a case that hangs, crashes or has no server is reported, and the next case runs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers import processes, wait_until

from verl_server.conformance.cases import Case, ModelKind, Outcome, Trial
from verl_server.conformance.other_processes import is_running
from verl_server.conformance.suite import run_cases
from verl_server.conformance.systems import CheckFailedError, NotOfferedError

NO_SERVER: Mapping[str, Any] = {"no_server": True}


class NoServer:
    """A system without a server. Its process and the process below it are what the runner has to end."""

    name, url, owns_server, weight_version = "nothing", "", True, "0"

    def __init__(self, model: Path, **server_args: Any) -> None:
        if server_args:
            raise OSError("no port is free")
        self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def report_pids(trial: Trial) -> str:
    system: Any = trial.system
    return f"{os.getpid()} {system.process.pid}"


def hang(trial: Trial) -> str:
    print(f"pids {report_pids(trial)}", flush=True)
    threading.Event().wait()
    return "never"


def crash(trial: Trial) -> str:
    os._exit(7)


def refuse(trial: Trial) -> str:
    raise NotOfferedError("there is no such method")


def fail(trial: Trial) -> str:
    raise CheckFailedError("the weights are wrong")


def case(run: Callable[[Trial], str], **changes: Any) -> Case:
    return Case(run.__name__, "", (), run, **{"deadline_s": 60.0, **changes})


def hanging_runner(model: Path, log: Path) -> None:
    start: Any = NoServer
    list(run_cases(start, [case(hang)], models={ModelKind.DENSE: model}, updates=2, log=log))


@pytest.mark.slow
def test_a_killed_runner_leaves_no_process(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """As `verl-server conformance` that is killed while a case runs."""
    log = tmp_path / "log"
    runner = processes().Process(target=hanging_runner, args=(tiny("llama", weight_std=0.07), log))
    runner.start()
    try:
        wait_until(lambda: log.exists() and "pids " in log.read_text(), 60.0, "the case does not begin")
    finally:
        runner.kill()
    text = log.read_text()
    pids = [int(pid) for pid in text[text.index("pids ") :].split()[1:3]]
    wait_until(lambda: not any(map(is_running, pids)), 10.0, "a process is left")


@pytest.mark.slow
def test_every_case_has_a_result(tiny: Callable[..., Path], tmp_path: Path) -> None:
    cases = [
        case(report_pids),
        case(hang, deadline_s=2.0),
        case(report_pids),
        case(refuse),
        case(report_pids),
        case(fail),
        case(report_pids),
        case(crash),
        case(report_pids, server_args=NO_SERVER),
        case(report_pids),
    ]
    log = tmp_path / "log"
    start: Any = NoServer
    models = {ModelKind.DENSE: tiny("llama", weight_std=0.07)}
    results = list(run_cases(start, cases, models=models, updates=2, log=log))
    passed, other = results[::2], results[1::2]
    assert [result.outcome for result in other] == [
        Outcome.HUNG, Outcome.NOT_OFFERED, Outcome.FAILED, Outcome.FAILED, Outcome.PASSED,
    ]  # fmt: skip
    assert other[0].detail.startswith("no result after 2 s")
    assert other[1].detail == "there is no such method"
    assert other[2].detail == "the weights are wrong"
    assert other[3].detail == "the process of the trainer ended with exit code 7"
    assert passed[4].detail == "the server did not start: OSError: no port is free"
    pids = [tuple(map(int, result.detail.split())) for result in (*passed[:4], other[4])]
    workers, servers = zip(*pids, strict=True)
    assert len(set(workers)) == 3, "another process after the hang and after the crash only"
    assert servers[1] == servers[2] != servers[3], "another server after a failure"
    text = log.read_text()
    assert "in hang" in text, "the stacks of the case that hung"
    hung = [int(pid) for pid in text[text.index("pids ") :].splitlines()[0].split()[1:]]
    wait_until(lambda: not any(map(is_running, (*workers, *servers, *hung))), 10.0, "a process is left")
