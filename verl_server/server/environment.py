"""Environment variables of a server."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from verl_server.server.server_folder import temporary_folder

if TYPE_CHECKING:
    from verl_server.server.interpreter.server_python import ServerPython

#: Environment variables of the trainer's own rendezvous, which servers must not inherit. With those of torchrun,
#: SGLang's scheduler would connect to the trainer's store instead of creating its own (TORCHELASTIC_USE_AGENT_STORE).
RENDEZVOUS_VARIABLES = (
    "TORCHELASTIC_", "MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME",
    "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE",
)  # fmt: skip


#: Variables with the settings of torch's allocator: the earlier and the present name, and that of AMD.
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
#: Settings of the allocator with which memory of a server cannot be released: its pages do not come from `cudaMalloc`.
#: Trainers set the first for themselves.
UNRELEASABLE = re.compile(r"\s*(expandable_segments\s*:\s*\w+|backend\s*:\s*cudaMallocAsync)\s*(,|$)")
#: Variable with the names of the only plugins that SGLang loads, and the name of ours in `setup.py`.
PLUGINS, OWN_PLUGIN = "SGLANG_PLUGINS", "verl_server_cpu"


def server_environment(env: Mapping[str, str], python: ServerPython | None) -> dict[str, str]:
    """All environment variables of a server. `env` are those that the caller adds. `python`: see `ServerProcess`.

    Without `UNRELEASABLE` settings, and with this library's plugin for SGLang also where others are chosen.
    """
    all_variables = {**inherited_environment(), **env} if python is None else python.environment(env)
    for name in all_variables.keys() & set(ALLOCATOR_VARIABLES):
        all_variables[name] = UNRELEASABLE.sub("", all_variables[name]).strip(" ,")
        if not all_variables[name]:
            del all_variables[name]
    if plugins := all_variables.get(PLUGINS):
        all_variables[PLUGINS] = plugins if OWN_PLUGIN in plugins.split(",") else f"{plugins},{OWN_PLUGIN}"
    return all_variables


def inherited_environment() -> dict[str, str]:
    """The environment of every server: this process's variables and our defaults.

    Servers do not inherit `RENDEZVOUS_VARIABLES`, nor the OMP_NUM_THREADS that torchrun or Ray has set for a worker.
    Raises StartupError without a writable temporary folder.
    """
    left_out = (*RENDEZVOUS_VARIABLES, "OMP_NUM_THREADS") if _has_threads_of_worker() else RENDEZVOUS_VARIABLES
    user_cache = temporary_folder() / f"torchinductor_{os.getuid()}"
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(left_out)},
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(user_cache)),  # shared, and kept
        "PYTHONUNBUFFERED": "1",
        # Idle OpenMP threads spin for about 50 us, which covers the gap between two tensors of a weight update, and
        # then sleep, because the trainer needs the cores. OMP_WAIT_POLICY=PASSIVE made loading a third slower.
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "20000"),
    }


def _has_threads_of_worker() -> bool:
    """Whether torchrun or Ray has set OMP_NUM_THREADS: the number of threads of one worker, often 1.

    Both leave a number that the user has set. A worker of Ray sets the variable itself, torchrun in its own process.
    The programs that a worker starts inherit it; what the user has set is not known there.
    """
    if (raylet := os.environ.get("RAY_RAYLET_PID")) is not None:
        is_worker = raylet == str(os.getppid())
        return not is_worker or "OMP_NUM_THREADS" not in _variables_at_start("self")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        parent = _variables_at_start(str(os.getppid()))
        return "TORCHELASTIC_RUN_ID" in parent or "OMP_NUM_THREADS" not in parent
    return False


def _variables_at_start(pid: str) -> set[str]:
    """Names of the variables that a process was started with. Empty for processes of other users."""
    try:
        content = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return set()
    return {variable.partition(b"=")[0].decode(errors="replace") for variable in content.split(b"\0")}


def no_proxy_environment(host: str) -> dict[str, str]:
    """Variables that exclude the server from proxies: SGLang's warm-up calls its own server through `requests`."""
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    value = ",".join(filter(None, [known, "127.0.0.1", "localhost", "::1", host]))
    return {"no_proxy": value, "NO_PROXY": value}
