"""Settings of this library, typed and frozen. Settings of the server are SGLang's own arguments.

Nothing here imports torch, ray or sglang.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, fields
from pathlib import Path

from verl_server.errors import BadInputError


@dataclass(frozen=True)
class Timeouts:
    """Deadlines in seconds, by class of operation. None waits as long as the server's process lives."""

    start_s: float = 600.0
    """From spawn to ready; loading a large model from a cold disk takes minutes."""
    connect_s: float = 5.0
    """To open one connection."""
    control_s: float = 60.0
    """Pause, continue, flush, abort, information, memory release and resume."""
    weights_s: float = 600.0
    """One request of a weight update."""
    generation_s: float | None = None
    """One generation. A 32k-token rollout takes many minutes, and the server's death is noticed anyway."""
    ranks_s: float = 300.0
    """Between the arrival of the first and the last trainer rank at a collective call."""
    stop_s: float = 10.0
    """From the order to stop until the last process is gone."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value is None and item.name == "generation_s":
                continue
            if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
                raise BadInputError(f"timeouts.{item.name} must be a positive number of seconds, got {value!r}")


class PauseMode(enum.StrEnum):
    """What a pause does to requests in flight (names but the last are SGLang's)."""

    ABORT = "abort"
    """They end with `finish_reason: abort` and what they have."""
    RETRACT = "retract"
    """They go back to the queue and are recomputed after `continue_generation`."""
    IN_PLACE = "in_place"
    """They keep their KV cache; a cache flush is refused until they are done."""
    WAIT = "wait"
    """They are finished first, while new ones wait. Of a fleet only: its router keeps new ones out."""


class MemoryTag(enum.StrEnum):
    """Parts of a server's memory that can be released and resumed on their own."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    CUDA_GRAPH = "cuda_graph"


@dataclass(frozen=True)
class AdapterConfig:
    """Settings of one server adapter."""

    timeouts: Timeouts = field(default_factory=Timeouts)
    log_dir: Path | str | None = None
    """Where the server's log is kept. None: in a temporary folder that a clean shutdown removes."""
    start_attempts: int = 3
    """How often a start is tried again on another port when the port was taken in between."""
    repeats: int = 3
    """How often a call that is safe to repeat is sent again when its connection breaks."""
    router_ip: str | None = None
    """Host of an SGLang router to register with; needs `router_port`."""
    router_port: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.log_dir, str):
            object.__setattr__(self, "log_dir", Path(self.log_dir))
        if (self.router_ip is None) != (self.router_port is None):
            raise BadInputError("router_ip and router_port go together: give both or neither")


@dataclass(frozen=True)
class RemoteServer:
    """A server that runs already, started by `verl-server launch` or by another engine."""

    base_url: str
    api_key: str | None = field(default=None, repr=False)
    admin_api_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class WeightsConfig:
    """How weights get to the servers."""

    transport: str = "auto"
    """A file of `verl_server/weights/transports/`. "auto": `shared_memory` on one machine (`buckets` when
    `max_staging_bytes` is too little for it), else `distributed`."""
    folder: Path | str | None = None
    """For `disk`: a folder that trainer and servers share."""
    host: str | None = None
    """For broadcasts: the trainer's address as the servers reach it. None: found out."""
    max_staging_bytes: int | None = None
    """What staging may take on this machine. When one copy of the weights is larger, "auto" takes `buckets`, which
    needs twice the largest tensor, and other transports refuse to start. None: no limit. On GPUs: for each rank."""

    def __post_init__(self) -> None:
        limit = self.max_staging_bytes
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit <= 0):
            raise BadInputError(f"max_staging_bytes must be a positive number of bytes, got {limit!r}")
