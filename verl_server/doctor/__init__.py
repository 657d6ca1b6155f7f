"""`verl-server doctor`: checks whether this machine can run servers, and whether a model fits on it.

Each file checks one topic. The `check_*` functions are pure: they turn values into findings. The `probe_*` functions
and `examine` read the machine. No function starts a server or changes the machine. What this library refuses at once,
before it starts a server, is not checked here, except for the environment of the interpreter and the ranks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from verl_server.doctor.report import Finding, Level

__all__ = ["Finding", "Level", "examine", "examine_gateway"]


def examine(
    model: str | None = None,
    *,
    tp: int = 1,
    dtype: str = "auto",
    server_python: Path | str | None = None,
    engine_kind: str | None = None,
) -> dict[str, list[Finding]]:
    """Run all checks and return the findings by section of the report. Imports torch.

    `model` is a folder or a name on the Hugging Face Hub; without it only the machine is checked. `tp` is the number
    of tensor parallel ranks, `dtype` the --dtype of the server, `server_python` the interpreter of the server if it is
    not that of this process, and `engine_kind` the engine of the server, "sglang" or "vllm"; None is the engine that
    the environment of the server has. Raises BadInputError for another `engine_kind`.
    """
    from verl_server.config import EngineKind, parse_engine_kind
    from verl_server.doctor import engine, machine
    from verl_server.doctor.model import examine_checkpoint
    from verl_server.platforms.limits import available_memory

    wanted = None if engine_kind is None else parse_engine_kind(engine_kind)
    facts = machine.probe()
    found, kind, folder = engine.examine_environment(server_python or sys.executable, facts, wanted)
    sections = {
        "Packages" if server_python is None else f"Server {server_python}": found,
        "Compute": machine.examine_compute(facts),
        "Memory": [*machine.examine_memory(), *machine.examine_leftovers()],
        "System": [*machine.examine_limits(), machine.check_proxies(os.environ)],
    }
    if kind is EngineKind.VLLM:
        on_cpu = facts.accelerator is None
        sections["System"] += engine.check_variables(os.environ, tp=tp, free=available_memory(), on_cpu=on_cpu)
    if model is not None:
        sections[f"Model {model}"] = examine_checkpoint(
            model, facts, tp=tp, dtype=dtype, kind=kind, engine_folder=folder
        )
    return sections


def examine_gateway(url: str, env: Mapping[str, str]) -> list[Finding]:
    """Check the chain agent -> gateway -> router -> engine. `env`: the environment of the agent."""
    from verl_server.doctor import gateway

    return gateway.examine(url, env)
