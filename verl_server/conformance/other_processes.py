"""Trainers in processes of their own, which the cases kill, and the end of processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_server.adapter.vllm.server_arguments import VLLM
from verl_server.conformance.systems import CheckFailedError
from verl_server.errors import BadInputError
from verl_server.server.environment import interpreter_path, read_environment, require_packages
from verl_server.server.warden.processes import SHM_DIR, remove_shared_memory, start_time
from verl_server.vllm_plugin.start import DISTRIBUTIONS

if TYPE_CHECKING:
    from verl_server.conformance.systems import System

#: Imported once by the process from which trainers are forked.
TRAINER_IMPORTS = [
    "torch",
    "safetensors.torch",
    "torch.distributed.device_mesh",
    "transformers.models.auto",
    "transformers.models.llama.modeling_llama",
    "verl_server.conformance.worker",
    "verl_server.conformance.systems.sglang",
]
POLL_S = 0.05


def process_context() -> ForkServerContext:
    """A context whose processes are forked from a process that has imported what trainers use."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(TRAINER_IMPORTS)
    return context


@contextlib.contextmanager
def other_process(body: Callable[..., None], *args: Any) -> Iterator[tuple[ForkServerProcess, Connection]]:
    """A process that runs `body(connection, *args)`, and this end of the connection. Killed at the end."""
    mine, theirs = multiprocessing.Pipe()
    process = process_context().Process(target=body, args=(theirs, *args), daemon=False)
    process.start()
    theirs.close()
    try:
        yield process, mine
    finally:
        process.kill()
        process.join()
        mine.close()


def push_from_file(connection: Connection, connect: Callable[[], System], weights: Path) -> None:
    """Body of a trainer: connect to a server, and push the weights of a safetensors file."""
    import torch
    from safetensors.torch import load_file

    torch.set_num_threads(1)
    system = connect()
    connection.send("connected")
    system.update(load_file(weights))
    connection.send("updated")


def start_and_wait(connection: Connection, start: Callable[..., System], server_args: Mapping[str, Any]) -> None:
    """Body of a trainer: start a server, report its process ids, and wait."""
    import torch

    torch.set_num_threads(1)
    system = start(**server_args)
    connection.send(system.server_pids())
    connection.recv()


def wait_for_end(pids: Iterable[int], timeout_s: float) -> None:
    """Wait until processes have ended. Raises CheckFailedError with their number if some are left."""
    deadline = time.monotonic() + timeout_s
    while left := [pid for pid in pids if is_running(pid)]:
        if time.monotonic() > deadline:
            raise CheckFailedError(f"{len(left)} processes of the server still run after {timeout_s:g} s")
        time.sleep(POLL_S)


def is_running(pid: int) -> bool:
    """Whether a process exists and has a thread that has not ended."""
    return start_time(pid) is not None


def require_no_files(pid: int, timeout_s: float) -> None:
    """Wait until no file in `/dev/shm` has the id of an ended process in its name.

    Raises CheckFailedError with the number of files that are left, and removes these files.
    """
    deadline = time.monotonic() + timeout_s
    while left := _files_named_after(pid):
        if time.monotonic() > deadline:
            remove_shared_memory(left)
            raise CheckFailedError(f"{len(left)} files of a killed trainer are left in shared memory")
        time.sleep(POLL_S)


def _files_named_after(pid: int) -> dict[str, int]:
    """The inode of each file in `/dev/shm` with this process id in its name."""
    with os.scandir(SHM_DIR) as entries:
        return {entry.name: entry.inode() for entry in entries if f"_{pid}_" in entry.name}


# -- Vllm python ------------------------------------------------------------------------------------
# The interpreter of vLLM servers. vLLM and SGLang cannot share an environment, so it is another one than this one.

DEFAULT_PATH = Path(".venv-vllm/bin/python")
"""Where `make setup-vllm` makes the environment, below the current folder."""


@dataclass(frozen=True)
class VllmPython:
    """An interpreter whose environment has vLLM."""

    path: Path
    version: str
    """Version of vLLM."""


def find_vllm_python(setting: Path | None) -> VllmPython:
    """The interpreter at `setting`, or at `DEFAULT_PATH` without a setting, after checks.

    Raises BadInputError if there is no interpreter, StartupError for an environment without vLLM.
    """
    if setting is None and not DEFAULT_PATH.exists():
        raise BadInputError(
            f"engines with vLLM need an interpreter with vLLM, and there is no {DEFAULT_PATH} here: run "
            "`make setup-vllm` in the repository of this library, or pass --vllm-python PATH"
        )
    path = interpreter_path(DEFAULT_PATH if setting is None else setting)
    report = read_environment(path, {}, VLLM, distributions=DISTRIBUTIONS)
    require_packages(path, report, VLLM)
    version = next((found for name in DISTRIBUTIONS if (found := report.versions[name])), "unknown")
    return VllmPython(Path(path), version)
