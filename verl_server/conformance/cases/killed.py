"""Cases in which a process is killed: a trainer during its update, the server, the trainer that started the server."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save_file

from verl_server.conformance.case import Case, Trial
from verl_server.conformance.cases.running import running_requests
from verl_server.conformance.interceptor import Interceptor
from verl_server.conformance.messages import CheckFailedError, describe
from verl_server.conformance.other_processes import (
    other_process,
    push_from_file,
    remove_processes,
    require_no_files,
    start_and_wait,
    wait_for_end,
)
from verl_server.conformance.reference import Weights, describe_gap
from verl_server.conformance.served import ServedWeights
from verl_server.errors import ServerError

Step = Literal["loading", "finishing"]
TRAINER_S = 240.0
"""Seconds for a trainer to start, with a server of its own in one case, and to reach the step at which it is killed."""
END_S = 15.0
"""Seconds for the processes of a server to end."""
ERROR_S = 10.0
"""Seconds for a request to fail after its server was killed."""


def trainer_killed(step: Step, trial: Trial) -> str:
    """Kill a second trainer when its request of `step` reaches the server, then push with a third trainer."""
    system = trial.system
    path, number = (system.load_path, system.num_load_requests) if step == "loading" else (system.finish_path, 1)
    old, new, last = (trial.reference.weights(seed) for seed in (91, 92, 93))
    trial.system.update(old)
    pid = _push_and_die(trial, path, number, new)
    request = ServedWeights(trial)
    served = request.describe({"the old weights": old, "the new weights": new})
    with closing(trial.system.connect(trial.system.url)()) as next_trainer:
        try:
            next_trainer.update(last)
        except Exception as error:
            text = f"served afterwards: {served}; the next trainer's update fails: {describe(error)}"
            raise CheckFailedError(text) from error
        gap = trial.reference.require(next_trainer, last, "after the update of the next trainer")
        request.require_answer()
    with contextlib.suppress(ServerError):  # the first trainer may learn once that another one has pushed
        trial.system.update(old)
    require_no_files(pid, END_S)
    return f"served afterwards: {served}; after the next trainer's update {describe_gap(gap)}"


def _push_and_die(trial: Trial, step_path: str, number: int, weights: Weights) -> int:
    """Push in another process, killed when its `number`-th request to `step_path` begins. Returns its process id."""
    to_kill: list[BaseProcess] = []
    paths: list[str] = []

    def before(path: str) -> None:
        paths.append(path)
        if path == step_path and paths.count(path) >= number and to_kill:
            to_kill.pop().kill()

    with (
        tempfile.TemporaryDirectory(prefix="verl-conformance-") as folder,
        Interceptor(trial.system.url, before) as front,
    ):
        file = Path(folder) / "weights.safetensors"
        save_file(dict(weights), file)
        with other_process(push_from_file, trial.system.connect(front.url), file) as (process, connection):
            to_kill.append(process)
            process.join(TRAINER_S)
            if to_kill:
                reached = _receive(connection) if connection.poll() else "not connected"
                raise CheckFailedError(f"the trainer to be killed did not send {step_path}: {reached}")
    assert process.pid is not None
    return process.pid


def _receive(connection: Connection) -> Any:
    """What the other process has sent. A text if the process has ended."""
    try:
        return connection.recv()
    except EOFError:
        return "ended before it was connected; read the log"


def server_killed(trial: Trial) -> str:
    """Kill the server's main process while it generates, then start another server."""
    weights = trial.reference.weights(95)
    trial.system.update(weights)
    pids = trial.system.server_pids()
    with running_requests(trial.system) as futures:
        trial.system.kill_server()
        killed_at = time.monotonic()
        for future in futures:
            _require_error(future.exception, killed_at)
        failed_s = time.monotonic() - killed_at
    wait_for_end(pids, END_S)
    system = trial.restart()
    system.update(weights)
    gap = trial.reference.require(system, weights, "with the next server")
    return f"errors after {failed_s:.1f} s, no process left; the next server {describe_gap(gap)}"


def _require_error(exception: Callable[[float], BaseException | None], killed_at: float) -> None:
    try:
        error = exception(max(0.0, killed_at + ERROR_S - time.monotonic()))
    except TimeoutError:
        raise CheckFailedError(f"a request has no error {ERROR_S:g} s after the server was killed") from None
    if error is None:
        raise CheckFailedError("a request succeeded although its server was killed")


def owner_killed(trial: Trial) -> str:
    """Kill a trainer that has started a server of its own."""
    if not trial.system.owns_server:
        trial.system.kill_server()  # raises NotOfferedError
    with other_process(start_and_wait, trial.start, trial.server_args) as (process, connection):
        if not connection.poll(TRAINER_S):
            raise CheckFailedError(f"a second server did not start within {TRAINER_S:g} s")
        pids = _receive(connection)
        if not isinstance(pids, list):
            raise CheckFailedError(f"the trainer of the second server {pids}")
        with remove_processes(pids):
            process.kill()
            killed_at = time.monotonic()
            wait_for_end(pids, END_S)
    return f"{len(pids)} processes ended after {time.monotonic() - killed_at:.1f} s"


def _killed_at(step: Step, claim: str, *issues: str) -> Case:
    run = functools.partial(trainer_killed, step)
    return Case(f"trainer-killed-{step}", claim, issues, run, deadline_s=300.0)


CASES = (
    _killed_at(
        "loading",
        "A trainer is killed as the server loads: old or new weights or none are served; the next can push.",
        "https://github.com/PrimeIntellect-ai/prime-rl/issues/3599",
        "https://github.com/vllm-project/vllm/pull/57854",
    ),
    _killed_at(
        "finishing",
        "A trainer is killed as the server ends the update: old or new weights or none are served; the next can push.",
        "https://github.com/vllm-project/vllm/pull/57854",
        "https://github.com/huggingface/trl/pull/5937",
    ),
    Case(
        "server-killed",
        "Requests of a killed server fail within 10 s, none of its processes is left, and another server can start.",
        ("https://github.com/sgl-project/sglang/issues/23627", "https://github.com/NVIDIA-NeMo/RL/pull/3592"),
        server_killed,
        deadline_s=400.0,
    ),
    Case(
        "owner-killed",
        "The processes of a server end within 15 s after the trainer that started the server was killed.",
        ("https://github.com/ai-dynamo/dynamo/issues/1889", "https://github.com/sgl-project/sglang/pull/16756"),
        owner_killed,
        deadline_s=400.0,
    ),
)
