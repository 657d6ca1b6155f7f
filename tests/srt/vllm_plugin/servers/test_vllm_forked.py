"""Forked vLLM servers: exact weights with two workers, the end of each process, and when processes are spawned."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from helpers import reference_model
from vllm_helpers import (
    SIZES,
    VLLM_PYTHON,
    VllmServer,
    expected_of,
    leaves_nothing,
    needs_vllm,
    weights_of,
)

from verl_server.adapter.vllm.server_arguments import VLLM
from verl_server.cpu import vllm_fork
from verl_server.cpu.forkserver import forkserver_pid
from verl_server.cpu.hooks import PF_FORKNOEXEC
from verl_server.server.environment import ServerPython
from verl_server.tiny import make_model

TOLERANCE = 1e-5
NOTICE_S = 2.0
"""Maximum number of seconds until the end of a server is noticed."""
WAIT_S = 0.6
"""Seconds in which vLLM's own workers would use a whole CPU each."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("forked")
    return [make_model(root / str(seed), "qwen3", seed=seed, **SIZES) for seed in (0, 1)]


def processes_by_name(server: VllmServer) -> dict[str, psutil.Process]:
    """The processes of a server by their titles, and its warden."""
    pids = server.process.pids
    found = {process.cmdline()[0]: process for process in map(psutil.Process, (pids.main, *pids.workers))}
    assert pids.warden is not None
    return {**found, "warden": psutil.Process(pids.warden)}


def require_forked(server: VllmServer) -> None:
    """The processes are forks: each has started no program since, and the log does not say that it was spawned."""
    assert psutil.Process(server.process.pids.warden).ppid() == forkserver_of_vllm()
    for name, process in processes_by_name(server).items():
        if name.startswith("VLLM::"):
            flags = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[6])
            assert flags & PF_FORKNOEXEC, f"{name} is a program of its own"
    assert "are spawned" not in server.process.log_path.read_text()


def forkserver_of_vllm() -> int | None:
    assert VLLM.forked_module is not None
    return forkserver_pid(ServerPython(os.path.abspath(VLLM_PYTHON)), VLLM.forked_module)


@needs_vllm
def test_two_forked_workers_take_weights_on_the_cpus_of_their_own(models: list[Path]) -> None:
    weights, expected = [], []
    for folder in models:
        weights.append(weights_of(folder))
        expected.append(expected_of(reference_model(folder)))
    cpus = sorted(os.sched_getaffinity(0))
    first, last = cpus[0], cpus[-1]
    with leaves_nothing() as env:
        server = VllmServer(models[0], env, tp_size=2, cpu_omp_threads_bind=f"{last}|{first}")
        try:
            require_forked(server)
            require_sleeping_waits(server)
            processes = processes_by_name(server)
            assert {"VLLM::EngineCore", "VLLM::Worker_TP0", "VLLM::Worker_TP1"} < processes.keys()
            assert processes["VLLM::Worker_TP0"].cpu_affinity() == [last]
            assert processes["VLLM::Worker_TP1"].cpu_affinity() == [first]
            log = server.process.log_path.read_text()
            assert all(f"({name} pid=" in log for name in ("APIServer", "EngineCore", "Worker_TP0", "Worker_TP1"))
            assert server.largest_gap(expected[0]) < TOLERANCE
            for version in range(1, 6):
                server.push(weights[version % 2], version)
                assert server.largest_gap(expected[version % 2]) < TOLERANCE
        finally:
            server.close()


def require_sleeping_waits(server: VllmServer) -> None:
    """In the second after a request, the workers wait for the next one and leave the CPUs to other processes."""
    workers = [psutil.Process(pid) for pid in server.process.pids.workers if "Worker" in psutil.Process(pid).name()]
    assert workers
    server.generate([1, 2, 3], {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True})
    before = [sum(process.cpu_times()[:2]) for process in workers]
    time.sleep(WAIT_S)
    used = [sum(process.cpu_times()[:2]) - start for process, start in zip(workers, before, strict=True)]
    assert max(used) < WAIT_S / 2, f"CPU seconds of the workers in {WAIT_S} s: {used}"


@needs_vllm
@pytest.mark.parametrize("name", ["VLLM::EngineCore", "VLLM::Worker", "warden"])
def test_the_death_of_a_process_ends_a_forked_server(models: list[Path], name: str) -> None:
    with leaves_nothing() as env:
        server = VllmServer(models[0], env)
        try:
            require_forked(server)
            os.kill(processes_by_name(server)[name].pid, signal.SIGKILL)
            started = time.monotonic()
            assert server.process.wait_exit(30.0) is not None
            assert time.monotonic() - started < NOTICE_S
        finally:
            server.close()


# -- when processes are spawned ------------------------------------------------------------------------


def test_a_process_with_threads_or_without_a_library_spawns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def choose(other_threads: list[str], preload: str = "") -> tuple[str, str]:
        monkeypatch.setattr(vllm_fork, "_must_spawn", False)
        monkeypatch.setattr(vllm_fork, "find_other_threads", lambda: other_threads)
        monkeypatch.setenv("LD_PRELOAD", preload)
        return vllm_fork._choose(), capsys.readouterr().out

    monkeypatch.setattr(vllm_fork, "NAMING_TIMEOUT_S", 0.0)
    (loaded,) = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libc.so" in line}
    assert choose([]) == choose([], loaded) == ("fork", "")
    for others, preload, reason in (
        (["tokio"], "", "the threads tokio"),
        ([], f"{loaded}:/lib/libmissing.so", "has not loaded: /lib/libmissing.so"),
        ([], "/opt/libiomp5.so", "another OpenMP"),
    ):
        method, output = choose(others, preload)
        assert method == "spawn"
        assert reason in output
    assert vllm_fork._choose() == "spawn"
    assert capsys.readouterr().out == "", "the reason is logged once"


def test_other_threads_are_found() -> None:
    stopped = threading.Event()
    before = len(vllm_fork.find_other_threads())
    thread = threading.Thread(target=stopped.wait)
    thread.start()
    assert len(vllm_fork.find_other_threads()) == before + 1
    stopped.set()
    thread.join()


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({}, (4, [])),
        ({"OMP_NUM_THREADS": "2"}, (2, [])),
        ({"OMP_NUM_THREADS": "2", "GOMP_CPU_AFFINITY": "5 7"}, (2, [5, 7])),
        ({"OMP_NUM_THREADS": "3", "OMP_PLACES": "{0,1,2}", "OMP_PROC_BIND": "true"}, (3, [0, 1, 2])),
    ],
)
def test_threads_are_those_of_the_variables(environment: dict[str, str], threads: tuple[int, list[int]]) -> None:
    assert vllm_fork.wanted_threads(environment, [0, 1, 2, 3]) == threads


THREADS = """
import os, torch
from verl_server.cpu.vllm_fork import start_threads
pid = os.fork()
if pid == 0:
    cpus = sorted(os.sched_getaffinity(0))[:2]
    start_threads(len(cpus), cpus)
    tasks = [int(task) for task in os.listdir("/proc/self/task")]
    bound = [os.sched_getaffinity(task) for task in tasks]
    assert os.sched_getaffinity(0) == {cpus[0]}
    assert all(len(mask) == 1 for mask in bound)
    assert {cpu for mask in bound for cpu in mask} == set(cpus)
    assert torch.get_num_threads() == len(cpus)
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_each_thread_of_a_fork_is_bound_to_its_cpu() -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", THREADS], env=env, check=True, timeout=60)


@pytest.mark.parametrize(
    ("installed", "refusal"), [("0.32.0", None), ("0.32.4+cpu", None), ("0.33.0", "only 0.32 is forked")]
)
def test_other_versions_of_vllm_are_spawned(
    installed: str, refusal: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_fork, "installed_version", lambda: ("vllm", installed))
    found = vllm_fork.find_fork_refusal()
    assert found is None if refusal is None else refusal in str(found)
