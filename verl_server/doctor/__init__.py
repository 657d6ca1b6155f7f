"""`verl-server doctor`: is this machine ready, and does this model fit it?

Each file looks at one topic. Its `check_*` functions are pure: values in, findings out. Its `probe_*`
functions and `examine` read the machine; they start no server and change nothing.
"""

from __future__ import annotations

from verl_server.doctor.finding import Finding, Level

__all__ = ["Finding", "Level", "examine"]


def examine(model: str | None = None, *, tp: int = 1, dtype: str = "auto") -> dict[str, list[Finding]]:
    """All findings, by section of the report. Imports torch."""
    from verl_server.doctor import accelerator, checkpoint, hardware, leftovers, limits, memory, network, packages

    facts = hardware.probe()
    sections = {
        "Packages": packages.examine(nvidia=facts.accelerator == "cuda"),
        "Compute": accelerator.examine(facts),
        "Memory": [*memory.examine(), *leftovers.examine()],
        "System": [*limits.examine(), *network.examine()],
    }
    if model is not None:
        sections[f"Model {model}"] = checkpoint.examine(model, facts, tp=tp, dtype=dtype)
    return sections
