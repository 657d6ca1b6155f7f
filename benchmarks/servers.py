"""Servers for benchmarks: a tiny model, an engine on one rank, and a bare SGLang server as a baseline.

All started processes are ended by process id; `ProcessLeakCheck` verifies it.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from verl_server.cpu.forkserver import forkserver_pids
from verl_server.server.launch import PortReservation
from verl_server.server.warden.processes import find_shared_memory, remove_shared_memory

POLL_S = 0.05
READY_TIMEOUT_S = 600.0
EXIT_TIMEOUT_S = 15.0


@contextlib.contextmanager
def tiny_model(**sizes: Any) -> Iterator[Path]:
    """A temporary folder with a random float32 Qwen3 model and its tokenizer."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from verl_server.tiny import make_model

    with tempfile.TemporaryDirectory(prefix="verl-bench-") as folder:
        yield make_model(Path(folder) / "model", **sizes)


@contextlib.contextmanager
def one_rank_mesh() -> Iterator[Any]:
    """The device mesh of a trainer with one rank, and its process group."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="verl-bench-") as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        finally:
            dist.destroy_process_group()


@contextlib.contextmanager
def one_rank_engine(**server_args: Any) -> Iterator[Any]:
    """A `VerlEngine` on one rank with its own server. Raises RuntimeError if a process is left afterwards."""
    from verl_server import VerlEngine

    leak_check = ProcessLeakCheck()
    with one_rank_mesh() as mesh:
        with VerlEngine(mesh, **server_args) as engine:
            leak_check.record()
            yield engine
        leak_check.check()


@contextlib.contextmanager
def two_servers(folder: Path, server_args: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Two servers of the model in `folder`, started at the same time."""
    from verl_server import HttpServerEngineAdapter

    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        starts = [pool.submit(HttpServerEngineAdapter, model_path=str(folder), **server_args) for _ in range(2)]
        yield [stack.enter_context(start.result()) for start in starts]


class ProcessLeakCheck:
    """Records the child processes of this process, and checks later that they have ended."""

    def __init__(self) -> None:
        self._before = set(psutil.Process().children(recursive=True))
        self._seen: set[psutil.Process] = set()

    def record(self) -> None:
        """Record all child processes that were started after this object was created, except the forkservers."""
        started = set(psutil.Process().children(recursive=True)) - self._before
        self._seen.update(process for process in started if process.pid not in forkserver_pids())

    def check(self) -> None:
        """Wait until the recorded processes have ended. Kills processes that remain, and then raises RuntimeError."""
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        while (left := [process for process in self._seen if _is_running(process)]) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if left:
            raise RuntimeError(f"processes are left after the end of their server: {[process.pid for process in left]}")


_reservations: list[PortReservation] = []


def free_port() -> int:
    """A port of 127.0.0.1 on which nothing listens. It stays reserved for a server until the process ends."""
    _reservations.append(PortReservation("127.0.0.1"))
    return _reservations[-1].port


class BareServer:
    """A server started with `python -m sglang.launch_server` and these arguments, on 127.0.0.1 and without keys."""

    def __init__(self, server_args: Mapping[str, Any]) -> None:
        self.port = free_port()
        flags = [part for name, value in server_args.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        self._log = tempfile.TemporaryFile(prefix="verl-bench-")  # noqa: SIM115 - closed in stop()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(self.port), *flags],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait_ready(self) -> None:
        """Poll `GET /ready` every 50 ms until the status is 200, as the launch of this library does.

        Raises RuntimeError with the end of the log if the server ends, TimeoutError after ten minutes.
        """
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not _ready(self.port):
            if self._process.poll() is not None:
                raise RuntimeError(
                    f"the bare server ended with exit code {self._process.returncode}:\n{self._log_tail()}"
                )
            if time.monotonic() > deadline:
                raise TimeoutError(f"the bare server was not ready after {READY_TIMEOUT_S:g} s:\n{self._log_tail()}")
            time.sleep(POLL_S)

    def stop(self) -> None:
        """End all processes of the server by id, and remove the shared memory files that they leave."""
        tree: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            tree = psutil.Process(self._process.pid).children(recursive=True)
        pids = [self._process.pid, *(process.pid for process in tree)]
        files = find_shared_memory(pids)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for process in tree:  # processes that have left the process group
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.wait()
        psutil.wait_procs(tree, timeout=EXIT_TIMEOUT_S)
        remove_shared_memory(files)
        self._log.close()

    def _log_tail(self) -> str:
        self._log.seek(0)
        return self._log.read().decode("utf-8", "replace")[-4000:]

    def __enter__(self) -> BareServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5.0)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
