"""Servers for benchmarks: a tiny model on the spot, our engine on one rank, and a bare SGLang to compare with.

Whatever is started here is ended by process id, and `Watch` checks it.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from verl_server.server.warden import remove_shared_memory, shared_memory_of

POLL_S = 0.05
READY_LIMIT_S = 600.0
GONE_LIMIT_S = 15.0


@contextlib.contextmanager
def tiny_model(**sizes: Any) -> Iterator[Path]:
    """The folder of a random float32 Qwen3 with its tokenizer; removed at the end."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from verl_server.tiny import make_model

    with tempfile.TemporaryDirectory(prefix="verl-bench-") as folder:
        yield make_model(Path(folder) / "model", **sizes)


@contextlib.contextmanager
def one_rank_mesh() -> Iterator[Any]:
    """A process group of this process alone, and its device mesh, as a trainer on one rank has them."""
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
    """A `VerlEngine` on one rank with a server of its own. Raises RuntimeError if a process outlives it."""
    from verl_server import VerlEngine

    watch = Watch()
    with one_rank_mesh() as mesh:
        with VerlEngine(mesh, **server_args) as engine:
            watch.note()
            yield engine
        watch.check()


class Watch:
    """Remembers the processes below this one while they live, and checks later that they are gone."""

    def __init__(self) -> None:
        self._before = set(psutil.Process().children(recursive=True))
        self._seen: set[psutil.Process] = set()

    def note(self) -> None:
        """Remember every process that came since the start."""
        self._seen.update(set(psutil.Process().children(recursive=True)) - self._before)

    def check(self) -> None:
        """Wait until all are gone. Raises RuntimeError, after killing them, when some live on."""
        deadline = time.monotonic() + GONE_LIMIT_S
        while (left := [process for process in self._seen if _lives(process)]) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if left:
            raise RuntimeError(f"processes outlived their server: {[process.pid for process in left]}")


def free_port() -> int:
    """A port of the loopback that nobody has now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class BareServer:
    """`python -m sglang.launch_server` with these arguments, as anybody would start it. Loopback, no keys."""

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
        """Poll `GET /ready` every 50 ms until it answers 200, as our launch does.

        Raises RuntimeError with the server's last words when it ends, TimeoutError after ten minutes.
        """
        deadline = time.monotonic() + READY_LIMIT_S
        while not _ready(self.port):
            if self._process.poll() is not None:
                raise RuntimeError(f"the bare server ended with {self._process.returncode}:\n{self._last_words()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"the bare server was not ready after {READY_LIMIT_S:g} s:\n{self._last_words()}")
            time.sleep(POLL_S)

    def stop(self) -> None:
        """End the whole tree by id and remove the shared memory that it leaves behind."""
        tree: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            tree = psutil.Process(self._process.pid).children(recursive=True)
        pids = [self._process.pid, *(process.pid for process in tree)]
        files = shared_memory_of(pids)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for process in tree:  # whatever left the group
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.wait()
        psutil.wait_procs(tree, timeout=GONE_LIMIT_S)
        remove_shared_memory(files, set(pids))
        self._log.close()

    def _last_words(self) -> str:
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


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
