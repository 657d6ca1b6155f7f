"""Start of an engine's backend on the trainer ranks: a server process on each node, or a connection on rank 0."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl_server.adapter.engine import get_engine
from verl_server.adapter.server_engine import ServerEngine
from verl_server.adapter.sglang.server_arguments import complete_server_args, validate_launch_args
from verl_server.config import AdapterConfig, EngineKind, RemoteServer
from verl_server.engine.backend import Backend, RolloutFleet
from verl_server.engine.servers import connect_servers, launch_one_server
from verl_server.errors import BadInputError, ServerDiedError, VerlServerError
from verl_server.ranks.coordinator import RankCoordinator
from verl_server.ranks.machine import machine_id, reachable_address, spans_machines
from verl_server.ranks.placement import Placement
from verl_server.server.ports import PortReservation, join_host_port
from verl_server.server.visible_devices import (
    VISIBLE_DEVICES,
    SeenByRank,
    allowed_cores,
    gpus_needed,
    seen_by_server,
)
from verl_server.type_checks import checked_value
from verl_server.types import Json, parse_weight_version

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def require_mesh(mesh: object) -> None:
    """Raise BadInputError unless `mesh` is a DeviceMesh with one dimension."""
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise BadInputError(
            "device_mesh_cpu must be a DeviceMesh with one dimension, the trainer ranks of the engine, for example "
            f'init_device_mesh("cpu", (world_size,)); got {mesh!r}'
        )


def broadcast_function(mesh: DeviceMesh) -> Callable[[Any], Any]:
    """A function that returns rank 0's value on all ranks of `mesh`. It is the only use of the trainer's own group."""
    import torch.distributed as dist

    def broadcast(value: Any) -> Any:
        values = [value]
        dist.broadcast_object_list(values, src=int(mesh.mesh.flatten()[0]), group=mesh.get_group())
        return values[0]

    return broadcast


def connect_coordinator(mesh: DeviceMesh, nnodes: int, timeout_s: float) -> RankCoordinator:
    """Connect the ranks of `mesh`. Rank 0 listens for other machines if the server or the ranks need several machines.

    Raises PeerError, and BadInputError if rank 0 does not know an address that other machines can reach.
    """
    multiple_machines = nnodes > 1 or spans_machines(mesh.mesh.flatten().tolist())
    return RankCoordinator.connect(
        mesh.get_local_rank(), mesh.size(), broadcast_function(mesh), multiple_machines, timeout_s
    )


@dataclass(frozen=True)
class BackendSource:
    """The caller's choice of inference engines: arguments of `VerlEngine` that exclude each other."""

    launch_server: bool | None
    """True: start a server process. False: run SGLang in this process. None: not given, which means True."""
    servers: Sequence[RemoteServer]
    """Running servers to connect to."""
    fleet: RolloutFleet | None
    """Fleet to use, on rank 0."""

    def validate(
        self, nnodes: int = 1, engine_kind: EngineKind | str | None = EngineKind.SGLANG
    ) -> VerlServerError | None:
        """The error of arguments of a wrong type, or of a choice that contradicts itself, `nnodes` or `engine_kind`.
        Otherwise None.

        The error is not raised here: `servers` and `fleet` can differ between the ranks, and all ranks must raise it.
        """
        try:
            checked_value("servers", self.servers, Sequence[RemoteServer])
            checked_value("fleet", self.fleet, RolloutFleet | None)
        except BadInputError as error:
            return error
        given = [f"launch_server={self.launch_server}"] if self.launch_server is not None else []
        given += [f"servers ({len(self.servers)} of them)"] if self.servers else []
        given += ["fleet"] if self.fleet is not None else []
        if nnodes > 1 and (self.servers or self.fleet is not None):
            return BadInputError(
                f"nnodes={nnodes} is for a server that VerlEngine starts; use nnodes=1 with {given[-1]}",
                argument="nnodes",
            )
        if engine_kind != EngineKind.SGLANG and (nnodes > 1 or self.launch_server is False):
            choice = f"nnodes={nnodes}" if nnodes > 1 else "launch_server=False"
            return BadInputError(
                f"engine_kind={str(engine_kind)!r} does not support {choice}: only SGLang does. Use a server process "
                "on one machine (launch_server=True)",
                argument="engine_kind",
            )
        if len(given) < 2:
            return None
        return BadInputError(
            f"launch_server, servers and fleet exclude each other, but {' and '.join(given)} were given. Give one: "
            "launch_server=True (the default) starts a server process, launch_server=False runs SGLang in this "
            "process, servers=[RemoteServer(...)] connects to running servers, fleet=RolloutManager(...) uses a fleet"
        )


def start_backend(
    group: RankCoordinator,
    placement: Placement,
    source: BackendSource,
    server_args: Mapping[str, Any],
    config: AdapterConfig,
    env: Mapping[str, str],
    on_server_death: Callable[[ServerDiedError], None],
) -> Backend | None:
    """Start or connect the backend. Called on all ranks; returns None on ranks that have no backend.

    A server process is started on the first rank of each node, on all nodes at the same time. Rank 0 connects to
    running servers, or uses a fleet. When one node fails, all ranks raise its error at once and the servers of the
    other nodes are ended.
    """
    starts_server = source.fleet is None and not source.servers
    error = source.validate(placement.nnodes, config.engine_kind)
    engine = get_engine(config.engine_kind)
    args = _agree_on_server_args(group, placement, engine, server_args, env, error, starts_server=starts_server)
    env, cores = _agree_on_devices(group, placement, source, args, env, starts_server=starts_server)
    backend: Backend | None = None
    if placement.is_node_leader:
        try:
            with may_use_cores(cores):
                backend = _make_backend(group, source, args, config, env, on_server_death)
        except VerlServerError as failure:
            group.fail_all(failure)  # the servers of other nodes wait for this node's server: end them now
            raise
    try:
        group.agree(group.next_call_id("start"), lambda _: None, action_timeout_s=config.timeouts.start_s)
    except BaseException:
        if backend is not None:
            backend.shutdown()
        raise
    return backend


def _make_backend(
    group: RankCoordinator,
    source: BackendSource,
    args: Json,
    config: AdapterConfig,
    env: Mapping[str, str],
    on_server_death: Callable[[ServerDiedError], None],
) -> Backend:
    """The backend of this node's first rank."""
    if source.fleet is not None:
        fleet = source.fleet.backend
        fleet.attach()
        return fleet
    if source.servers:
        return connect_servers(source.servers, config, parse_weight_version(args["weight_version"]))
    if source.launch_server is False:
        from verl_server.engine.inprocess import InProcessBackend

        return InProcessBackend(validate_launch_args(args))
    backend = launch_one_server(args, config, env, check_abort=lambda: group.failure)
    process = backend.adapter.process
    assert process is not None
    process.on_exit(lambda _: on_server_death(process.died(backend.adapter.base_url)))
    return backend


def _agree_on_devices(
    group: RankCoordinator,
    placement: Placement,
    source: BackendSource,
    args: Json,
    env: Mapping[str, str],
    *,
    starts_server: bool,
) -> tuple[Mapping[str, str], list[int]]:
    """The environment of this node's server, and its cores.

    The environment is `env`, and the GPUs that the trainer ranks of the node see together. The cores are those that
    these ranks may use together: launchers such as srun give each rank the cores next to its GPU. With nnodes=1 the
    ranks can be on several machines; then those on the machine of the first rank count.

    Rank 0 decides whether a server is started: the other ranks need not know of its `servers` or its `fleet`.
    All ranks raise BadInputError if a server would see too few GPUs, or if an engine in the process of the first rank
    would: it sees the GPUs of that rank only.
    """
    import torch

    def choose(contributions: list[Json]) -> list[Json]:
        ranks = len(contributions) // placement.nnodes
        chosen: list[Json] = []
        if not starts_server:
            return [{"visible": None, "cores": []}] * placement.nnodes
        for node in range(placement.nnodes):
            on_node = contributions[node * ranks : (node + 1) * ranks]
            sharing = on_node[:1] if source.launch_server is False else on_node
            seen = [SeenByRank(**item["seen"]) for item in sharing]
            visible, cores = seen_by_server(seen, gpus_needed(args, placement.ranks_per_node), on_node[0]["env"])
            chosen.append({"visible": visible, "cores": cores})
        return chosen

    own = SeenByRank(os.environ.get(VISIBLE_DEVICES), torch.cuda.device_count(), sorted(allowed_cores()), _machine())
    contribution = {"env": env.get(VISIBLE_DEVICES), "seen": dataclasses.asdict(own)}
    call_id = group.next_call_id("devices")
    chosen = group.agree(call_id, choose, contribution=contribution, action_timeout_s=10.0)[placement.node_rank]
    visible = chosen["visible"]
    return (env if visible is None else {**env, VISIBLE_DEVICES: visible}), chosen["cores"]


def _machine() -> str | None:
    """The id of this machine. None in a sandbox without the files of /proc that have it: then all ranks have None."""
    with contextlib.suppress(OSError):
        return machine_id()
    return None


@contextlib.contextmanager
def may_use_cores(cores: Iterable[int]) -> Iterator[None]:
    """Let this thread also use `cores`, and the processes that the thread starts meanwhile: they inherit its cores."""
    own = allowed_cores()
    if not own or own.issuperset(cores):
        yield
        return
    with contextlib.suppress(OSError):  # a sandbox may forbid it; the server then has the cores of this thread
        os.sched_setaffinity(0, own.union(cores))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, own)


def _agree_on_server_args(
    group: RankCoordinator,
    placement: Placement,
    engine: ServerEngine,
    server_args: Mapping[str, Any],
    env: Mapping[str, str],
    error: VerlServerError | None,
    *,
    starts_server: bool,
) -> Json:
    """The server arguments of rank 0, on all ranks. They differ only in the number of the node.

    With an `error` of this rank, all ranks raise that error. `starts_server`: a server will be started with them.
    """

    def complete(_: list[Json]) -> Json:
        args: Json = {**engine.validate_server_args(server_args), "tp_size": placement.tp_size}
        if starts_server:
            engine.require_pushable(args, env)
        args.setdefault("weight_version", "0")
        if placement.nnodes > 1:
            completed = complete_server_args(args)
            args.update({name: completed[name] for name in ("api_key", "admin_api_key")})
            if not args.get("dist_init_addr"):
                host = reachable_address()
                reservation = PortReservation(host)
                reservation.release()
                args["dist_init_addr"] = join_host_port(host, reservation.port)
        return args

    args = dict(group.agree(group.next_call_id("arguments"), complete, error=error, action_timeout_s=10.0))
    if placement.nnodes > 1:
        args.update(nnodes=placement.nnodes, node_rank=placement.node_rank)
        if placement.node_rank > 0:
            args["port"] = None
    return args
