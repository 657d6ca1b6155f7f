"""What the launcher of servers knows about one inference engine. The engine's adapter provides the values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class EngineProfile:
    """Facts about an inference engine that `launch_server` needs to start its server and to see that it is ready.

    `adapter/sglang/launch.py` defines the profile of SGLang, `adapter/vllm/launch.py` that of vLLM.
    """

    name: str
    """Name of the engine, for messages."""
    main_module: str
    """Python module that the server process runs (`python -m`). It reads the server arguments from standard input."""
    secret_arguments: tuple[str, ...]
    """Names of the server arguments that hold keys. Their values are replaced by `***` in the server's log."""
    ready_paths: tuple[str, ...]
    """URL paths of the readiness probe, the preferred path first. A path that answers 404 does not exist in the
    engine's version; the next path is then requested. The server is ready when a path answers 200."""
    worker_node_ready_paths: tuple[str, ...]
    """URL paths of the readiness probe on the nodes after the first node of a multi-node server."""
    authenticated_path: str
    """URL path that answers 401 when the API key is wrong. It shows whether the server behind the port is our own."""
    port_taken_phrases: tuple[str, ...]
    """Lower-case phrases in the server's log that mean that another program listens on the server's port."""
    worker_prefix: str
    """Begin of the titles of the engine's worker processes. The server ends when one of them ends."""
    forked_module: str | None = None
    """Python module through which a forkserver imports the engine and runs its servers (`ForkedEngine` in
    `forkserver/forkserver_main.py`). None: servers of the engine are never forked."""
    installation: str = ""
    """What to do where the environment of this process does not have the engine, for an error."""
    wrong_environment: str = ""
    """What to do where another environment does not have the engine: the last part of an error."""
    distribution: str = ""
    """Name of the engine's package for pip."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Python modules that the server process needs, and the requirement with which pip installs each."""
