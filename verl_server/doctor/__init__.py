"""`verl-server doctor`: checks whether this machine can run servers, and whether a model fits on it.

Each file checks one topic. The `check_*` functions are pure: they turn values into findings. The `probe_*` functions
and `examine` read the machine. No function starts a server or changes the machine.
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
    from verl_server.doctor import accelerator, machine
    from verl_server.doctor import engine as environment
    from verl_server.doctor import engine as packages
    from verl_server.doctor import engine as variables
    from verl_server.doctor import model as checkpoint
    from verl_server.platforms.limits import available_memory

    if engine_kind is not None:
        environment.require_engine_kind(engine_kind)
    facts = machine.probe()
    is_own = server_python is None
    own_kind = engine_kind or environment.find_own_engine_kind()
    if is_own and own_kind == "sglang":
        engine = environment.InstalledEngine("sglang")
        sections = {"Packages": packages.examine_packages(nvidia=facts.accelerator == "cuda")}
    else:
        found, engine = environment.examine_server_environment(
            server_python or sys.executable, facts, engine_kind=own_kind if is_own else engine_kind
        )
        sections = {"Packages": found} if is_own else {
            "Packages": packages.examine_trainer(), f"Server {server_python}": found
        }  # fmt: skip
    sections["Compute"] = accelerator.examine(facts, runs_servers=is_own and engine.kind == "sglang")
    sections["Memory"] = [*machine.examine_memory(), *machine.examine_leftovers()]
    sections["System"] = [*machine.examine_limits(), *machine.examine_network()]
    if engine.kind == "vllm":
        on_cpu = facts.accelerator is None
        sections["System"] += variables.examine_variables(os.environ, tp=tp, free=available_memory(), on_cpu=on_cpu)
    if model is not None:
        sections[f"Model {model}"] = checkpoint.examine_checkpoint(model, facts, tp=tp, dtype=dtype, engine=engine)
    return sections


def examine_gateway(url: str, env: Mapping[str, str]) -> list[Finding]:
    """Check the chain agent -> gateway -> router -> engine. `env`: the environment of the agent."""
    from verl_server.doctor import gateway

    return gateway.examine(url, env)
