"""Cases with faults: killed processes, refused updates, repeated messages."""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from verl_server.conformance.cases import Case, Footprint, ServedWeights, Trial
from verl_server.conformance.cases.serving import running_requests
from verl_server.conformance.other_processes import (
    is_running,
    other_process,
    push_from_file,
    require_no_files,
    start_and_wait,
    wait_for_end,
)
from verl_server.conformance.reference import Interceptor, Weights, describe_gap, require_gap
from verl_server.conformance.systems import CheckFailedError, NotOfferedError, describe, remove_processes, tree_of
from verl_server.errors import ServerError
from verl_server.types import Json

Step = Literal["loading", "finishing"]
TRAINER_S = 240.0
"""Seconds for a trainer to start, with a server of its own in one case, and to reach the step at which it is killed."""
KILLED_END_S = 15.0
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
    require_no_files(pid, KILLED_END_S)
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
    wait_for_end(pids, KILLED_END_S)
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
        with remove_processes({process for pid in pids for process in tree_of(pid)}):
            process.kill()
            killed_at = time.monotonic()
            wait_for_end(pids, KILLED_END_S)
    return f"{len(pids)} processes ended after {time.monotonic() - killed_at:.1f} s"


def _killed_at(step: Step, claim: str, *issues: str) -> Case:
    run = functools.partial(trainer_killed, step)
    return Case(f"trainer-killed-{step}", claim, issues, run, deadline_s=300.0)


KILLED_CASES = (
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


# -- Refused ----------------------------------------------------------------------------------------
# Cases of updates that cannot be loaded: the mistake is in the middle of the tensors.

REFUSED_END_S = 10.0
"""Maximum number of seconds to wait for the end of a server that does not take a whole update any more."""
POLL_S = 0.1
NamedTensors = dict[str, torch.Tensor]


def with_unknown_name(tensors: NamedTensors) -> NamedTensors:
    """The tensors, one of them under a name that no model has."""
    name = _middle(tensors)
    return {key if key != name else "model.layers.0.no_such_tensor.weight": value for key, value in tensors.items()}


def with_wrong_shape(tensors: NamedTensors) -> NamedTensors:
    """The tensors, one of them with a missing row."""
    name = _middle(tensors)
    return {**tensors, name: tensors[name][:-1].clone()}


def with_nan(tensors: NamedTensors) -> NamedTensors:
    """The tensors, one of them with one NaN."""
    name = _middle(tensors)
    changed = tensors[name].clone()
    changed.view(-1)[-1] = torch.nan
    return {**tensors, name: changed}


def _middle(tensors: NamedTensors) -> str:
    return list(tensors)[len(tensors) // 2]


def bad_update(spoil: Callable[[NamedTensors], NamedTensors], check_finite: bool, trial: Trial) -> str:
    """Push spoiled weights over whole weights, look at what is served, and repair it with whole weights."""
    old, repaired = trial.reference.weights(81), trial.reference.weights(83)
    trial.system.update(old)
    trial.reference.require(trial.system, old, "before the bad update")
    pids = trial.system.server_pids()
    try:
        trial.system.update(spoil(trial.reference.weights(82)), check_finite=check_finite)
    except NotOfferedError:
        raise
    except Exception as error:  # noqa: BLE001 - boundary to the system under test: any error is a refusal
        refusal = type(error).__name__
    else:
        raise CheckFailedError("the update returned without an error")
    request = ServedWeights(trial)
    served = request.describe({"the old weights": old})
    try:
        trial.system.update(repaired)
    except Exception as error:
        ended = _count_ended(pids)
        raise CheckFailedError(
            f"{refusal}; served afterwards: {served}; {ended} of {len(pids)} processes of the server have ended, and a "
            f"whole update raises {type(error).__name__}"
        ) from error
    request.require_answer()
    gap = trial.reference.require(trial.system, repaired, "after a whole update")
    return f"{refusal}; served afterwards: {served}; after a whole update {describe_gap(gap)}"


def _count_ended(pids: list[int]) -> int:
    """Number of processes of a server that have ended. A server that dies of a request needs seconds for that."""
    deadline = time.monotonic() + REFUSED_END_S
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return sum(not is_running(pid) for pid in pids)


_CLAIM = (
    "An update {} is refused with an error; the old weights or none are served, and a whole update repairs the server."
)

REFUSED_CASES = (
    Case(
        "unknown-name",
        _CLAIM.format("with an unknown name"),
        ("https://github.com/vllm-project/vllm/pull/57854",),
        functools.partial(bad_update, with_unknown_name, False),
    ),
    Case(
        "wrong-shape",
        _CLAIM.format("with a wrong shape"),
        ("https://github.com/sgl-project/sglang/issues/17107",),
        functools.partial(bad_update, with_wrong_shape, False),
    ),
    Case(
        "nan",
        _CLAIM.format("with NaN"),
        ("https://github.com/NVIDIA-NeMo/RL/issues/2180",),
        functools.partial(bad_update, with_nan, True),
    ),
)


# -- Repeated ---------------------------------------------------------------------------------------
# The case of many updates: log probabilities stay right, and nothing grows.

SAMPLES = 100
"""Number of comparisons with Hugging Face, spread evenly over the updates."""
WARM_UP = 20
"""Number of updates before the footprint at the start is measured, at most half of all updates."""
MAX_MORE_BYTES, MAX_MORE_FILES = 64 << 20, 8
"""Largest accepted growth of resident memory and of open files."""
MIN_SAMPLES_FOR_DRIFT, MAX_DRIFT = 40, 2.0
"""The median gap of the last quarter may be this multiple of that of the first quarter, if there are enough samples."""


def many_updates(trial: Trial) -> str:
    """Push other weights `trial.updates` times, and compare and measure again and again."""
    system, every = trial.system, max(1, trial.updates // SAMPLES)
    pids = [os.getpid(), *system.server_pids()]
    warm_at = min(WARM_UP, trial.updates // 2)
    gaps: list[list[float]] = []
    seconds: list[float] = []
    footprints: list[Json] = []
    trial.figures.update(updates=0, gaps=gaps, update_s=seconds, footprints=footprints)
    for number in range(1, trial.updates + 1):
        weights = trial.reference.weights(1000 + number)
        started = time.monotonic()
        system.update(weights)
        seconds.append(round(time.monotonic() - started, 5))
        trial.figures["updates"] = number
        if number % every == 0 or number == trial.updates:
            gap = require_gap(trial.reference.measure(system, weights), f"after update {number}")
            gaps.append([number, float(f"{gap:.3g}")])
        if number == warm_at or (number > warm_at and number % every == 0) or number == trial.updates:
            footprints.append({"update": number, **asdict(Footprint.of(pids))})
    _require_no_growth(footprints)
    _require_no_drift([gap for _, gap in gaps])
    rate = f"{1e3 * statistics.median(seconds):.0f} ms per update"
    return f"{trial.updates} updates, {describe_gap(max(gap for _, gap in gaps))}, {rate}"


def _require_no_growth(footprints: list[Json]) -> None:
    first, last = footprints[0], footprints[-1]
    since = f"from update {first['update']} to {last['update']}"
    more = {name: last[name] - first[name] for name in ("resident_bytes", "open_files", "shared_memory_files")}
    if more["resident_bytes"] > MAX_MORE_BYTES:
        raise CheckFailedError(f"resident memory grew by {more['resident_bytes'] / 2**20:.0f} MiB {since}")
    if more["open_files"] > MAX_MORE_FILES:
        raise CheckFailedError(f"the number of open files grew by {more['open_files']} {since}")
    if more["shared_memory_files"] > 0:
        raise CheckFailedError(f"the number of files in shared memory grew by {more['shared_memory_files']} {since}")


def _require_no_drift(gaps: list[float]) -> None:
    if len(gaps) < MIN_SAMPLES_FOR_DRIFT:
        return
    quarter = len(gaps) // 4
    first, last = statistics.median(gaps[:quarter]), statistics.median(gaps[-quarter:])
    if last > MAX_DRIFT * first:
        raise CheckFailedError(f"the median log-prob gap grew from {first:.1e} to {last:.1e}")


REPEATED_CASES = (
    Case(
        "repeated",
        "After many updates, log probabilities are as close to Hugging Face as after the first, and memory, open files "
        "and files in shared memory have not grown.",
        ("https://github.com/vllm-project/vime/issues/64", "https://github.com/sgl-project/sglang/pull/4446"),
        many_updates,
        deadline_s=240.0,
        deadline_per_update_s=2.0,
    ),
)
