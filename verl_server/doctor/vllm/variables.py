"""Checks of the environment variables of vLLM. A server inherits those of the process that starts it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from verl_server.doctor.finding import Finding, fail, gib, ok, warn
from verl_server.vllm_server.start_environment import FIXED_VARIABLES

KV_CACHE, CPU_BINDING, PORT, RPC_FOLDER = (
    "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_PORT", "VLLM_RPC_BASE_PATH",
)  # fmt: skip
GIB = 2**30


def check_kv_cache(value: str, *, tp: int, free: int) -> Finding | None:
    """Check the KV cache of each worker on a CPU. `value`: GiB as text; `free`: bytes of the machine."""
    size = None
    with contextlib.suppress(ValueError):
        size = int(value)
    if size is None or size < 0:
        return fail(
            KV_CACHE,
            f"{value!r} is not a whole number of GiB",
            symptom="the server ends during its start: ValueError, invalid literal for int()",
            fix=f"unset {KV_CACHE}, or export {KV_CACHE}=1",
        )
    if size * GIB * tp > free:
        return fail(
            KV_CACHE,
            f"{size} GiB for each of {tp} workers, free memory {gib(free)}",
            symptom="the server ends during its start with out of memory or `killed by SIGKILL`: the cache is resident "
            "at once",
            fix=f"unset {KV_CACHE}, or export {KV_CACHE}=1",
        )
    return None


def check_cpu_binding(value: str, *, tp: int) -> Finding | None:
    """Check the binding of threads to CPUs: one list of CPUs for each worker."""
    parts = len(value.split("|"))
    if value == "nobind" or (value == "auto" and tp == 1) or (value != "auto" and parts == tp):
        return None
    detail = f"auto with {tp} workers" if value == "auto" else f"{parts} lists of CPUs for {tp} workers"
    return (warn if value == "auto" else fail)(
        CPU_BINDING,
        detail,
        symptom="the server ends during its start: Not enough allowed NUMA nodes (with fewer NUMA nodes than workers)"
        if value == "auto"
        else "the server ends during its start: Given number of CPU id list doesn't match local world size",
        fix=f"unset {CPU_BINDING}: the CPUs are then divided among the workers",
    )


def check_port(value: str) -> Finding | None:
    """Check the first port of vLLM's internal sockets."""
    if value.isdigit():
        return None
    return fail(
        PORT,
        f"{value!r} is not a port; Kubernetes sets it in all containers beside a service that is called vllm",
        symptom="the server ends during its start: VLLM_PORT appears to be a URI",
        fix=f"unset {PORT}, or rename the service",
    )


def check_rpc_folder(value: str) -> Finding:
    """Report a folder of vLLM's sockets that the warden does not know."""
    return warn(
        RPC_FOLDER,
        f"{value}: the sockets of servers stay there when a server ends",
        symptom="the folder fills with sockets whose names are UUIDs",
        fix=f"unset {RPC_FOLDER}: the sockets are then in a folder that is removed with the server",
    )


def examine(environment: Mapping[str, str], *, tp: int, free: int, on_cpu: bool) -> list[Finding]:
    """Check the variables that a server would inherit. `free`: bytes of free memory of the machine."""
    found = [
        check_kv_cache(environment[KV_CACHE], tp=tp, free=free) if on_cpu and environment.get(KV_CACHE) else None,
        check_cpu_binding(environment[CPU_BINDING], tp=tp) if on_cpu and environment.get(CPU_BINDING) else None,
        check_port(environment[PORT]) if PORT in environment else None,
        check_rpc_folder(environment[RPC_FOLDER]) if RPC_FOLDER in environment else None,
    ]
    problems = [finding for finding in found if finding is not None]
    replaced = sorted(name for name in FIXED_VARIABLES if name in environment)
    named = {problem.title for problem in problems}
    inherited = sorted(
        name for name in environment if name.startswith("VLLM_") and name not in replaced and name not in named
    )
    texts = [
        f"inherited by servers: {', '.join(inherited)}" if inherited else "",
        f"replaced in servers: {', '.join(replaced)}" if replaced else "",
    ]
    return [*problems, ok("Variables", "; ".join(filter(None, texts)) or "no variable of vLLM is set")]
