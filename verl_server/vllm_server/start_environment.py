"""Environment variables of vLLM that a server needs. Imports the standard library only."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import Any

#: Server arguments that vLLM takes as environment variables.
VARIABLES = {
    "cpu_kv_cache_gib": "VLLM_CPU_KVCACHE_SPACE",
    "cpu_omp_threads_bind": "VLLM_CPU_OMP_THREADS_BIND",
    "log_level": "VLLM_LOGGING_LEVEL",
}
#: GiB of KV cache of each worker on a CPU without `cpu_kv_cache_gib`. vLLM's own default is a part of the machine's
#: memory, which it makes resident at once.
DEFAULT_CPU_KV_CACHE_GIB = 1
#: Variables that have this value in every server. Routes for weights, pauses and memory need VLLM_SERVER_DEV_MODE, and
#: `keys.py` protects them. With VLLM_API_KEY, vLLM would refuse the keys of this library. The warden finds vLLM's
#: processes by the prefix of their names.
FIXED_VARIABLES: Mapping[str, str] = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_API_KEY": "",
    "VLLM_PROCESS_NAME_PREFIX": "VLLM",
}
#: Variables that vLLM reads when it is imported.
IMPORT_VARIABLES: Mapping[str, str] = {"VLLM_LOGGING_COLOR": "0"}
#: Maximum number of characters of the path of a socket (`sun_path`), and of the names that vLLM gives to its sockets.
MAX_SOCKET_PATH, SOCKET_NAME_CHARACTERS = 107, 48


def server_variables(server_args: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that are added to the `environment` of a server.

    Values of the user are kept, if there are any, except for `FIXED_VARIABLES`.
    """
    defaults = {
        "VLLM_CPU_KVCACHE_SPACE": str(DEFAULT_CPU_KV_CACHE_GIB),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1" if server_args.get("enable_lora") else "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        **IMPORT_VARIABLES,
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # as `vllm serve` does
    }
    folder = tempfile.gettempdir()  # the warden removes it
    if len(folder) + SOCKET_NAME_CHARACTERS <= MAX_SOCKET_PATH:
        defaults["VLLM_RPC_BASE_PATH"] = folder
    if (workers := int(server_args.get("tensor_parallel_size") or 1)) > 1:
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = divide_cpus(sorted(os.sched_getaffinity(0)), workers)
    given = {
        variable: str(server_args[name]) for name, variable in VARIABLES.items() if server_args.get(name) is not None
    }
    if "VLLM_LOGGING_LEVEL" in given:
        given["VLLM_LOGGING_LEVEL"] = given["VLLM_LOGGING_LEVEL"].upper()
    missing = {name: value for name, value in defaults.items() if name not in environment}
    return {**missing, **given, **FIXED_VARIABLES}


def divide_cpus(cpus: list[int], workers: int) -> str:
    """The CPUs of each worker in vLLM's notation, for example "0,1|2,3".

    vLLM's own default refuses two workers on a machine with one NUMA node. Workers share CPUs if there are too few.
    """
    size = max(len(cpus) // workers, 1)
    parts = [cpus[worker * size % len(cpus) :][:size] for worker in range(workers)]
    return "|".join(",".join(map(str, part)) for part in parts)
