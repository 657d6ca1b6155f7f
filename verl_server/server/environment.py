"""Environment variables of a server."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

#: Environment variables of the trainer's own rendezvous, which servers must not inherit. With those of torchrun,
#: SGLang's scheduler would connect to the trainer's store instead of creating its own (TORCHELASTIC_USE_AGENT_STORE).
RENDEZVOUS_VARIABLES = (
    "TORCHELASTIC_", "MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME",
    "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE",
)  # fmt: skip
#: Variables that torchrun and Ray set for their workers. There, OMP_NUM_THREADS is the number of threads that torchrun
#: or Ray gives to one worker, often 1. In other processes the user has chosen the number, also for servers.
WORKER_VARIABLES = ("TORCHELASTIC_RUN_ID", "RAY_RAYLET_PID")


def inherited_environment() -> dict[str, str]:
    """The environment of every server: this process's variables and our defaults.

    Servers do not inherit `RENDEZVOUS_VARIABLES`, nor the OMP_NUM_THREADS of a worker of torchrun or Ray.
    """
    is_worker = any(name in os.environ for name in WORKER_VARIABLES)
    left_out = (*RENDEZVOUS_VARIABLES, "OMP_NUM_THREADS") if is_worker else RENDEZVOUS_VARIABLES
    user_cache = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(left_out)},
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(user_cache)),  # shared, and kept
        "PYTHONUNBUFFERED": "1",
        # Idle OpenMP threads spin for about 50 us, which covers the gap between two tensors of a weight update, and
        # then sleep, because the trainer needs the cores. OMP_WAIT_POLICY=PASSIVE made loading a third slower.
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "20000"),
    }


def no_proxy_environment(host: str) -> dict[str, str]:
    """Variables that exclude the server from proxies: SGLang's warm-up calls its own server through `requests`."""
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    value = ",".join(filter(None, [known, "127.0.0.1", "localhost", "::1", host]))
    return {"no_proxy": value, "NO_PROXY": value}
