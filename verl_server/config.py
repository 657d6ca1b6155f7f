"""Settings of this library: frozen dataclasses and enumerations. The settings of a server are SGLang's own arguments.

This module imports neither torch nor ray nor sglang.
"""

from __future__ import annotations

import enum
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field

from verl_server.errors import BadInputError
from verl_server.validation import check_fields, did_you_mean, require_http_url

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveInt = Annotated[int, Field(ge=1)]
NotNegativeInt = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1)]

#: Environment variable with the value of `AdapterConfig.engine_kind` where the setting is None.
ENGINE = "VERL_SERVER_ENGINE"
#: Environment variable with the value of `AdapterConfig.server_python` where the setting is None.
SERVER_PYTHON = "VERL_SERVER_PYTHON"
#: Environment variable with the folder through which processes of a user share forkservers.
FORKSERVER_FOLDER = "VERL_SERVER_FORKSERVER_DIR"
#: Weight transports: the files of `verl_server/weights/transports/` that define a `Receiver`.
TRANSPORTS = ("buckets", "cuda_ipc", "delta", "disk", "distributed", "distributed_buckets", "shared_memory")
WHOLE_MODEL_TRANSPORTS = ("disk", "shared_memory")
"""Transports whose tensors are all available at once. vLLM loads a module when the last of its tensors arrives."""
#: Ends of the errors about words that are often taken for transports.
_TRANSPORT_HINTS = {
    "nccl": "; NCCL is not a transport of its own: 'distributed_buckets' broadcasts with NCCL between GPUs",
    "gloo": "; gloo is not a transport of its own: 'distributed' broadcasts with gloo between machines",
}


@check_fields()
@dataclass(frozen=True)
class Timeouts:
    """Deadlines of operations, in seconds. Only `generation_s` can be None."""

    start_s: Positive = 600.0
    """Seconds from the creation of a server process until the server is ready. Loading a large model from a cold disk
    takes minutes."""
    connect_s: Positive = 5.0
    """Seconds to open one connection."""
    control_s: Positive = 60.0
    """Seconds for one control request: pause, continue, flush, abort, information, release and resume of memory."""
    weights_s: Positive = 600.0
    """Seconds for one request of a weight update."""
    generation_s: Positive | None = None
    """Seconds for one generation request. None: no limit; the end of the server process still ends the request. A
    generation of 32k tokens takes many minutes."""
    ranks_s: Positive = 300.0
    """Seconds between the arrival of the first and of the last trainer rank at a collective call."""
    stop_s: Positive = 10.0
    """Seconds from the request to stop a server until its last process must have ended."""


class PauseMode(enum.StrEnum):
    """What a pause of generation does to running requests. All names except `WAIT` are SGLang's."""

    ABORT = "abort"
    """Running requests end with `finish_reason: abort` and return the tokens generated so far."""
    RETRACT = "retract"
    """Running requests return to the queue. They are recomputed after `continue_generation`."""
    IN_PLACE = "in_place"
    """Running requests keep their KV cache. The server refuses to flush its cache until these requests have ended."""
    WAIT = "wait"
    """Running requests are finished first; new requests wait. Only a fleet has this mode, because only its router can
    hold back new requests."""


class MemoryTag(enum.StrEnum):
    """Parts of a server's memory that can be released and resumed separately."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    CUDA_GRAPH = "cuda_graph"


class EngineKind(enum.StrEnum):
    """Inference engine of a server."""

    SGLANG = "sglang"
    VLLM = "vllm"
    """vLLM 0.32 and later, in an environment of its own (`server_python`). See docs/vllm.md."""

    @property
    def label(self) -> str:
        """The engine's name as its project writes it."""
        return {EngineKind.SGLANG: "SGLang", EngineKind.VLLM: "vLLM"}[self]


def parse_engine_kind(kind: EngineKind | str | None) -> EngineKind:
    """The engine kind of a setting. None: that of the environment variable, see `AdapterConfig.engine_kind`."""
    value, source = (kind, "engine_kind") if kind is not None else (os.environ.get(ENGINE) or "sglang", ENGINE)
    try:
        return EngineKind(value)
    except ValueError:
        known = [each.value for each in EngineKind]
        raise BadInputError(f"{source} must be one of {known}, got {value!r}{did_you_mean(value, known)}") from None


def shares_forkservers() -> bool:
    """Whether this process shares forkservers with other processes of the user."""
    return bool(os.environ.get(FORKSERVER_FOLDER))


class RolloutMode(enum.StrEnum):
    """How a fleet shares devices and weights with the trainer. The names are verl's."""

    HYBRID = "hybrid"
    """The fleet shares the trainer's devices. It takes pushed weights and can release its memory (on-policy)."""
    STANDALONE = "standalone"
    """The fleet has its own devices, on this machine or others. It takes pushed weights by broadcast and never
    releases its memory (off-policy)."""
    COLOCATED = "colocated"
    """The fleet shares devices but keeps the weights of its checkpoint, as a judge or a reward model does. It takes no
    pushed weights; it can release its memory."""


@check_fields()
@dataclass(frozen=True)
class AdapterConfig:
    """Settings of the adapter of one server."""

    timeouts: Timeouts = field(default_factory=Timeouts)
    log_dir: Path | str | None = None
    """Folder of the server's log. None: a temporary folder, which a clean shutdown removes. The last 20 logs of crashed
    servers are kept there."""
    max_start_attempts: PositiveInt = 3
    """Maximum number of attempts to start the server, the first included, when other programs take its port."""
    max_retries: NotNegativeInt = 3
    """Maximum number of retries of a request whose connection broke, the first attempt not included. Requests that are
    not safe to send twice are never retried."""
    router_ip: str | None = None
    """Host of an `sglang-router` that the server is registered with. Requires `router_port`."""
    router_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port of that `sglang-router`."""
    use_forkserver: bool = True
    """Whether servers may be forked by a forkserver that this process keeps, see `cpu/`. The
    second server of a process then starts in about 2 s. False: every server is a new program and no forkserver runs."""
    engine_kind: EngineKind | str | None = None
    """Inference engine of the servers that are started, "sglang" or "vllm". None: the value of the environment variable
    `VERL_SERVER_ENGINE`; without it, "sglang". A server that runs needs no setting."""
    server_python: Path | str | None = None
    """Path of the Python interpreter of the server on the machine of the server, for example
    `/opt/sglang/bin/python`. Its environment has the engine and can have other versions of all packages than this
    process. `~` is the home of the user there. None: the value of the environment variable `VERL_SERVER_PYTHON`;
    without it, the interpreter of the process that starts the server."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "engine_kind", parse_engine_kind(self.engine_kind))
        if self.log_dir is not None:
            object.__setattr__(self, "log_dir", Path(os.path.expanduser(self.log_dir)))
        if self.server_python is None:
            object.__setattr__(self, "server_python", os.environ.get(SERVER_PYTHON) or None)
        if (self.router_ip is None) != (self.router_port is None):
            raise BadInputError("router_ip and router_port go together: give both or neither")
        if self.router_ip is not None and not re.fullmatch(r"[^\s/]+", self.router_ip):
            raise BadInputError(
                f"router_ip must be a host name or an IP address without http://, got {self.router_ip!r}"
            )


@check_fields()
@dataclass(frozen=True)
class RemoteServer:
    """Address and keys of a running server, which `verl-server launch` or another engine started."""

    base_url: str
    """Base URL of the server, for example `http://10.0.0.1:30000`, or `http://proxy/server-1` behind a reverse proxy
    that removes the path prefix `/server-1`. A `/v1` at its end is removed."""
    api_key: str | None = field(default=None, repr=False)
    """Key for requests."""
    admin_api_key: str | None = field(default=None, repr=False)
    """Key for administrative requests, such as weight updates."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "base_url", require_http_url("RemoteServer.base_url", self.base_url))


@check_fields()
@dataclass(frozen=True)
class WeightsConfig:
    """How weights travel from the trainer to the servers."""

    transport: str = "auto"
    """Name of a weight transport, one of `verl_server.config.TRANSPORTS`. "auto": `shared_memory` when all servers run
    on this machine (`buckets` when the staging memory would exceed `max_staging_bytes`), otherwise `distributed`."""
    folder: Path | str | None = None
    """Folder that trainer and servers share. Only the transport `disk` uses it."""
    host: str | None = None
    """Address of the trainer's machine as the servers reach it, for broadcasts. None: determined automatically."""
    max_staging_bytes: PositiveInt | None = None
    """Maximum number of bytes of staging memory on this machine; on GPUs, of each rank. None: no limit. When one copy
    of the weights is larger, "auto" chooses `buckets`, which needs twice the largest tensor; other transports refuse
    to start."""

    def __post_init__(self) -> None:
        if self.folder is not None:
            object.__setattr__(self, "folder", Path(os.path.expanduser(self.folder)))
        if self.transport not in ("auto", *TRANSPORTS):
            raise BadInputError(
                f"WeightsConfig.transport must be one of {['auto', *TRANSPORTS]}, got {self.transport!r}"
                + _TRANSPORT_HINTS.get(self.transport.lower(), did_you_mean(self.transport, TRANSPORTS))
            )
        if self.transport == "disk" and self.folder is None:
            raise BadInputError(
                "weight transport 'disk' needs WeightsConfig(folder=...): a folder that trainer and servers share"
            )


@check_fields()
@dataclass(frozen=True)
class RecoveryConfig:
    """When a replica of a fleet counts as stalled, and how often its server is started again."""

    stall_timeout_s: Positive = 120.0
    """Seconds without a new token and without a sign of life before a replica with running requests counts as
    stalled. Signs of life are answers of its schedulers and CPU time, see `docs/decisions/signs-of-life.md`."""
    hard_stall_timeout_s: Positive = 1800.0
    """Seconds without a new token before a replica with running requests counts as stalled although it gives signs
    of life. At least `stall_timeout_s`."""
    backoff_s: NotNegative = 1.0
    """Seconds before the second restart in a row. The delay doubles with each further restart."""
    max_backoff_s: NotNegative = 60.0
    """Maximum number of seconds before a restart. At least `backoff_s`."""
    max_restarts: NotNegativeInt = 5
    """Maximum number of restarts within `restart_window_s` seconds. After one more failure the replica is not started
    again. 0: a replica is never started again."""
    restart_window_s: Positive = 600.0
    """Seconds after which a failure is no longer counted."""

    def __post_init__(self) -> None:
        for smaller, larger in (("stall_timeout_s", "hard_stall_timeout_s"), ("backoff_s", "max_backoff_s")):
            minimum, value = getattr(self, smaller), getattr(self, larger)
            if value < minimum:
                raise BadInputError(
                    f"RecoveryConfig.{larger} must be at least {smaller} ({minimum:g}), got {value:g}; pass both",
                    argument=larger,
                )


@check_fields()
@dataclass(frozen=True)
class RouterConfig:
    """How a router distributes requests over replicas, and how long it keeps results and sessions."""

    max_running_requests_per_dp_rank: PositiveInt = 256
    """Maximum number of requests that run on one replica at the same time, for each of its data parallel ranks
    (SGLang's `dp_size`)."""
    overload_factor: Positive = 1.5
    """Maximum load of a session's replica, as a multiple of the mean number of tokens in flight. A session may move to
    another replica when its own replica would exceed this load."""
    max_queued_requests: NotNegativeInt = 4096
    """Maximum number of queued requests of other processes. A further request over HTTP is refused with
    ServerBusyError. Requests of this process are never refused."""
    max_attempts: PositiveInt = 8
    """Maximum number of failed attempts per call. The error of the last one is raised. Attempts that the server
    aborts, for example for a weight update, and probes of replicas that failed before are not counted."""
    min_tokens_per_event: PositiveInt = 64
    """Minimum number of tokens per stream event of a replica. A lost replica costs each of its requests at most the
    tokens of one event. Long generations use larger events, at most 64 events each."""
    result_cache_bytes: NotNegativeInt = 256 << 20
    """Maximum size of all finished results that a repeated request with the same `rid` still receives, in bytes. The
    size is an estimate from the number of tokens and log probabilities (`verl_server/router/dispatcher.py`). Results
    of requests without a `rid` are not stored. Aborted generations, which a repeated request continues, are kept beside
    them, up to 8 GiB."""
    max_sessions: NotNegativeInt = 65536
    """Maximum number of sessions whose replica is remembered."""
    orphan_timeout_s: NotNegative = 10.0
    """Seconds that a generation continues when no caller waits for it, so that a caller can connect again."""
    report_timeout_s: Positive = 20.0
    """Seconds without a report of the router process before it counts as hung and is restarted. It sends ten reports
    per second."""
