"""`verl-server doctor`: checks whether this machine can run servers, and whether a model fits on it.

Each file checks one topic. The `check_*` functions are pure: they turn values into findings. The `probe_*` functions
and `examine` read the machine. No function starts a server or changes the machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from verl_server.doctor.finding import Finding, Level

__all__ = ["Finding", "Level", "examine", "examine_gateway"]


def examine(
    model: str | None = None, *, tp: int = 1, dtype: str = "auto", server_python: Path | str | None = None
) -> dict[str, list[Finding]]:
    """Run all checks and return the findings by section of the report. Imports torch.

    `model` is a folder or a name on the Hugging Face Hub; without it only the machine is checked. `tp` is the number
    of tensor parallel ranks, `dtype` the --dtype of the server, `server_python` the interpreter of the server if it is
    not that of this process.
    """
    from verl_server.doctor import accelerator, checkpoint, hardware, leftovers, limits, memory, network, packages
    from verl_server.doctor import server_environment as environment

    facts = hardware.probe()
    nvidia = facts.accelerator == "cuda"
    sections = {
        "Packages": packages.examine(nvidia=nvidia) if server_python is None else packages.examine_trainer(),
        **(
            {}
            if server_python is None
            else {f"Server {server_python}": environment.examine(server_python, nvidia=nvidia)}
        ),
        "Compute": accelerator.examine(facts, runs_servers=server_python is None),
        "Memory": [*memory.examine(), *leftovers.examine()],
        "System": [*limits.examine(), *network.examine()],
    }
    if model is not None:
        sections[f"Model {model}"] = checkpoint.examine(model, facts, tp=tp, dtype=dtype)
    return sections


def examine_gateway(url: str, env: Mapping[str, str]) -> list[Finding]:
    """Check the chain agent -> gateway -> router -> engine. `env`: the environment of the agent."""
    from verl_server.doctor import gateway

    return gateway.examine(url, env)
