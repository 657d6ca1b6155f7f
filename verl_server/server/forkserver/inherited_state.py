"""What a server inherits from the process that starts it: a forkserver fits a server only if both inherit the same."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from verl_server.server.forkserver import socket_folder
from verl_server.server.warden.warden import IGNORED_SIGNALS

#: Variables that no import of a server on a machine without an accelerator depends on, or that differ for each server.
#: A forked server gets their values at its start. Libraries set many of them in a running program: an import of torch,
#: transformers or SGLang sets the folders of caches, an import of ray sets `RAY_` variables and PYTHONBREAKPOINT, and
#: torchrun sets a variable of NCCL.
LATE_VARIABLES = frozenset({
    "TMPDIR", "PWD", "OLDPWD", "SHLVL", "_", "COLUMNS", "LINES", "PYTEST_CURRENT_TEST", "PYTHONBREAKPOINT", "SPT_NOENV",
    "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "TILELANG_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE",
    "http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", socket_folder.FOLDER_VARIABLE,
})  # fmt: skip
#: Other late variables: those of Ray, which a server does not import, and those that select devices, for example
#: CUDA_VISIBLE_DEVICES. A server that can be forked sees no device, whatever their values are.
LATE_PREFIX, LATE_SUFFIX = "RAY_", "_VISIBLE_DEVICES"
INHERITED_FIELDS = (
    "Umask", "Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "NoNewPrivs",
    "Seccomp", "Cpus_allowed", "Mems_allowed",
)  # fmt: skip


@dataclass(frozen=True)
class InheritedState:
    """What a new program would inherit from this process, as far as a forked server cannot change it afterwards."""

    environment: Mapping[str, str] = field(repr=False)
    """Environment variables without the late variables."""
    attributes: tuple[str, ...]
    """Resource limits, control group, namespaces, priority, `INHERITED_FIELDS` of `/proc/thread-self/status`, and
    ignored signals."""

    @classmethod
    def of_server(cls, environment: Mapping[str, str]) -> InheritedState:
        """The state of a server with this `environment` that would be started by the calling thread now."""
        status = dict(line.split(":", 1) for line in _read_text("/proc/thread-self/status").splitlines())
        files = (_read_text(f"/proc/self/{name}") for name in ("limits", "cgroup", "oom_score_adj"))
        return cls(
            {name: value for name, value in environment.items() if not is_late(name)},
            (
                *(f"{name}: {status.get(name, '').strip()}" for name in INHERITED_FIELDS),
                f"ignored signals: {_without_signals_of_warden(status.get('SigIgn', '0')):x}",
                *files,
                *(os.readlink(entry) for entry in sorted(Path("/proc/self/ns").glob("*"))),
                str(os.getpriority(os.PRIO_PROCESS, 0)),
            ),
        )

    def fingerprint(self, python: str = sys.executable, engine: str = "") -> str:
        """A hash of the state, of the path of the interpreter, of the engine's module and of this package's folder."""
        code = (python, engine, str(Path(__file__).parents[2]))
        text = json.dumps([sorted(self.environment.items()), self.attributes, code])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def describe_difference(self, other: InheritedState) -> str:
        """Names of the variables that differ (their values may be secret), or the attributes that differ."""
        names = {name for name, _ in self.environment.items() ^ other.environment.items()}
        if names:
            return f"the environment variables {', '.join(sorted(names))} have changed"
        return f"the process attributes {set(self.attributes) ^ set(other.attributes)} have changed"


def is_late(name: str) -> bool:
    return name in LATE_VARIABLES or name.startswith(LATE_PREFIX) or name.endswith(LATE_SUFFIX)


def _without_signals_of_warden(mask: str) -> int:
    """The ignored signals, one bit for each, without those that the warden ignores in any case."""
    return int(mask, 16) & ~sum(1 << (number - 1) for number in IGNORED_SIGNALS)


def _read_text(path: str) -> str:
    """Content of a file of `/proc`; empty where the kernel does not have the file."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
