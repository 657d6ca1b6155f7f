"""Start of an engine: its backend, and its weight updater on the trainer ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl_server.adapter.engine import get_engine
from verl_server.adapter.server_engine import ServerEngine
from verl_server.adapter.sglang.server_arguments import complete_server_args, validate_server_args, with_absolute_paths
from verl_server.config import WHOLE_MODEL_TRANSPORTS, AdapterConfig, EngineKind, RemoteServer, WeightsConfig
from verl_server.engine.servers import InProcessBackend, connect_servers, launch_one_server
from verl_server.errors import BadInputError, ServerDiedError, UnsupportedError, VerlServerError
from verl_server.platforms.limits import available_memory
from verl_server.ranks.coordinator import RankCoordinator
from verl_server.ranks.placement import Placement, is_loopback, known_machine_id, reachable_address, spans_machines
from verl_server.server.environment import VISIBLE_DEVICES, SeenByRank, allowed_cores, gpus_needed, seen_by_server
from verl_server.server.launch import PortReservation, join_host_port
from verl_server.types import Json, parse_weight_version
from verl_server.validation import checked_value
from verl_server.weights.arena import Arena, choose_algorithm, plan_arena
from verl_server.weights.buckets import MAX_WRITERS, Buckets, plan_buckets, require_own_gpus
from verl_server.weights.manifest import MANIFEST, Manifest, checkpoint_names_of, read_manifest
from verl_server.weights.transports.base import SenderSettings, is_streamed, sender_class
from verl_server.weights.update.options import Servers
from verl_server.weights.update.staged import StagedUpdater
from verl_server.weights.update.streamed import RankBuckets, StreamedUpdater
from verl_server.weights.update.updater import EngineRanks, WeightUpdater

logger = logging.getLogger(__name__)


# -- Start backend ----------------------------------------------------------------------------------
# Start of an engine's servers on the trainer ranks: a server process on each node, or a connection on rank 0.


@runtime_checkable
class RolloutFleet(Protocol):
    """What `VerlEngine(fleet=...)` takes: a `RolloutManager`, or the fleet of a plugin for another trainer."""

    @property
    def backend(self) -> Servers: ...


def require_mesh(mesh: object) -> DeviceMesh:
    """`mesh`, or for None a mesh of this process alone.

    Raises BadInputError unless `mesh` is a DeviceMesh with one dimension, and for None in one of several ranks.
    """
    if mesh is None:
        return _mesh_of_one_rank()
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise BadInputError(
            "device_mesh_cpu must be a DeviceMesh with one dimension, the trainer ranks of the engine, for example "
            f'init_device_mesh("cpu", (world_size,)); got {mesh!r}. The model is model_path=...'
        )
    return mesh


def _mesh_of_one_rank() -> DeviceMesh:
    """A mesh for a process that is the only rank: a notebook, or a script without torchrun.

    Without a default process group, one is made, which this process keeps.
    """
    num_ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks > 1:
        raise BadInputError(
            f"this process is one of {num_ranks} ranks: pass device_mesh_cpu, a DeviceMesh of the engine's ranks, for "
            f'example init_device_mesh("cpu", ({num_ranks},))',
            argument="device_mesh_cpu",
        )
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    return init_device_mesh("cpu", (1,))


def broadcast_function(mesh: DeviceMesh) -> Callable[[Any], Any]:
    """A function that returns rank 0's value on all ranks of `mesh`. It is the only use of the trainer's own group."""

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
        choices = {
            f"launch_server={self.launch_server}": self.launch_server is not None,
            f"servers ({len(self.servers)} of them)": bool(self.servers),
            "fleet": self.fleet is not None,
        }
        given = [choice for choice, is_given in choices.items() if is_given]
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
) -> Servers | None:
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
    backend: Servers | None = None
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
) -> Servers:
    """The backend of this node's first rank."""
    if source.fleet is not None:
        fleet = source.fleet.backend
        fleet.attach()
        return fleet
    if source.servers:
        return connect_servers(source.servers, config, parse_weight_version(args["weight_version"]))
    if source.launch_server is False:
        return InProcessBackend(validate_server_args(args))
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

    own = SeenByRank(
        os.environ.get(VISIBLE_DEVICES), torch.cuda.device_count(), sorted(allowed_cores()), known_machine_id()
    )
    contribution = {"env": env.get(VISIBLE_DEVICES), "seen": dataclasses.asdict(own)}
    call_id = group.next_call_id("devices")
    chosen = group.agree(call_id, choose, contribution=contribution, action_timeout_s=10.0)[placement.node_rank]
    visible = chosen["visible"]
    return (env if visible is None else {**env, VISIBLE_DEVICES: visible}), chosen["cores"]


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


# -- Start updater ----------------------------------------------------------------------------------

M = TypeVar("M", Arena, Buckets)


def start_weight_updater(ranks: EngineRanks, server_args: Mapping[str, Any], config: WeightsConfig) -> WeightUpdater:
    """Agree on the model's tensors and on the transport, and create the staging memory. Called on all ranks."""
    server_args = with_absolute_paths(server_args)

    def decide(_: list[Json]) -> Json:
        """Rank 0 asks the servers for their parameters and their state, and chooses the transport."""
        servers = ranks.servers
        assert servers is not None
        manifest = read_manifest(server_args, servers.parameter_dtypes())
        model_bytes = plan_arena(manifest.tensors).size_bytes
        reads_host_memory = any(member.fused_modules is not None for member in servers.members)
        return {
            "manifest": MANIFEST.dump_python(manifest, mode="json", exclude={"checkpoint_names"}),
            "transport": _choose_transport(servers, ranks.placement.nnodes, config, model_bytes),
            "checksum": choose_algorithm(servers_read_host_memory=reads_host_memory),
            "weight_version": servers.weight_version,
            "released_memory": sorted(servers.released_memory),
        }

    decided = ranks.coordinator.agree(ranks.coordinator.next_call_id("weights"), decide, action_timeout_s=120.0)
    weight_version, transport = decided["weight_version"], decided["transport"]
    names = checkpoint_names_of(server_args)
    manifest = dataclasses.replace(MANIFEST.validate_python(decided["manifest"]), checkpoint_names=names)
    if is_streamed(transport):
        updater = _start_streamed(ranks, manifest, weight_version, config, transport)
    else:
        updater = _start_staged(ranks, manifest, weight_version, config, transport, decided["checksum"])
    # A server with random weights gets others when it starts again.
    is_unchanged = weight_version == parse_weight_version(server_args.get("weight_version"))
    updater.starts_from_checkpoint = is_unchanged and server_args.get("load_format") != "dummy"
    updater.released_memory = frozenset(decided["released_memory"])  # not empty for a fleet that was in use before
    return updater


def _choose_transport(servers: Servers, nnodes: int, config: WeightsConfig, model_bytes: int) -> str:
    """The name of the transport. `model_bytes`: size of the staging memory for the whole model.

    Raises BadInputError for a transport that does not support several nodes, exceeds `max_staging_bytes`, or needs more
    memory than is available: the kernel would kill the trainer or the server during the first update.
    """
    limit, available = config.max_staging_bytes, available_memory()
    transport = config.transport
    if transport == "auto":
        transport = servers.nearest_transport()
        exceeds = model_bytes > available or (limit is not None and model_bytes > limit)
        if transport == "shared_memory" and exceeds and nnodes == 1:
            transport = "buckets"
    needs_modules = any(member.fused_modules is not None for member in servers.members)
    if needs_modules and config.transport == "auto" and is_loopback(servers.trainer_host):
        transport = "shared_memory"  # all servers are on this machine, whatever the mode of a fleet prefers
    if needs_modules and transport not in WHOLE_MODEL_TRANSPORTS:
        raise BadInputError(
            f"vLLM servers do not take the weight transport {transport!r}: they need all tensors of a module at once. "
            f"They take {' and '.join(WHOLE_MODEL_TRANSPORTS)}, with a model that fits into this machine's memory a "
            "second time, and servers on this machine or with a folder that both machines have",
            argument="transport",
        )
    if nnodes > 1 and transport != "shared_memory":
        raise BadInputError(
            f"weight transport {transport!r} does not support nnodes={nnodes}: do not set `transport` in WeightsConfig"
        )
    other = "" if needs_modules else ", or use WeightsConfig(transport='buckets') on one machine"
    problem = None
    if limit is not None and model_bytes > limit:
        problem = f"more than max_staging_bytes={limit}; raise the limit"
    elif model_bytes > available:
        problem = (
            f"but only {available} bytes are available on this machine or in this container; free memory or raise the "
            "limit of the container"
        )
    if problem is not None and not is_streamed(transport):
        raise BadInputError(
            f"staging this model for the transport {transport!r} takes {model_bytes} bytes of memory, {problem}{other}"
        )
    return transport


def _start_staged(
    ranks: EngineRanks,
    manifest: Manifest,
    weight_version: int,
    config: WeightsConfig,
    transport: str,
    checksum: str,
) -> WeightUpdater:
    """Create an arena on the first rank of each node. With one node, every rank maps that arena if all ranks can."""
    layout, placement = plan_arena(manifest.tensors), ranks.placement
    arena = Arena.create(layout) if placement.is_node_leader else None
    locations = _gather_values(ranks.coordinator, "arena", arena.location if arena else None)
    shared = False
    if placement.nnodes == 1:
        arena, shared = _map_on_all_ranks(ranks.coordinator, arena, lambda: Arena.open(locations[0], layout))
    arena = arena or Arena.create(layout)  # a rank on another machine: pages that are never written use no memory
    sender = None
    if ranks.servers is not None:
        settings = SenderSettings(
            arena=arena,
            layout=layout,
            timeout_s=ranks.timeout_s,
            arena_locations=locations,
            ranks_per_node=placement.ranks_per_node if placement.nnodes > 1 else 0,
            node_rank=placement.node_rank,
            folder=None if config.folder is None else str(config.folder),
            host=config.host or ranks.servers.trainer_host,
            checksum=checksum,
        )
        logger.info("weights are staged in %.1f MB of memory and go by %s", layout.size_bytes / 1e6, transport)
        sender = sender_class(transport)(settings)
    writer_ranks = ranks.global_ranks if shared else frozenset()
    return StagedUpdater(ranks, manifest, weight_version, layout, arena, writer_ranks, sender, checksum)


def _start_streamed(
    ranks: EngineRanks,
    manifest: Manifest,
    weight_version: int,
    config: WeightsConfig,
    transport: str,
) -> WeightUpdater:
    """Create one pair of buckets that all ranks write, or, when the buckets lie on GPUs, one on each rank's GPU."""
    coordinator, in_host_memory = ranks.coordinator, transport != "cuda_ipc"
    layout = plan_buckets(manifest.tensors, config.max_staging_bytes, in_host_memory)
    is_lead_writer = coordinator.rank == 0 or not in_host_memory
    if coordinator.size > MAX_WRITERS:
        raise UnsupportedError(
            f"{coordinator.size} trainer ranks are more than the {MAX_WRITERS} that can write one pair of buckets"
        )
    own: Buckets | None = None
    description: Json | None = None
    failure: VerlServerError | None = None
    try:
        if is_lead_writer:
            own = Buckets.create(layout)
            description = own.description()
    except VerlServerError as error:
        failure = error
    except Exception as error:  # noqa: BLE001 - all ranks must raise it
        failure = VerlServerError(f"the staging memory cannot be created: {type(error).__name__}: {error}")
    try:
        descriptions = _gather_values(coordinator, "buckets", description, failure)
        if not in_host_memory:
            require_own_gpus(descriptions)
    except BaseException:
        if own is not None:
            own.close()  # memory of a GPU is not freed automatically
        raise
    logger.info("weights go by %s, through %.1f MB of memory", transport, len(descriptions) * layout.size_bytes / 1e6)
    shared = False
    if in_host_memory:
        own, shared = _map_on_all_ranks(coordinator, own, lambda: Buckets.open(descriptions[0]["location"], layout))
    buckets = RankBuckets(
        transport,
        layout,
        descriptions,
        num_writers=coordinator.size if shared else 1,
        timeout_s=ranks.timeout_s,
        own=own,
        writer_index=coordinator.rank if shared else 0,
        is_lead_writer=is_lead_writer,
        own_index=0 if in_host_memory else coordinator.rank,
    )
    writer_ranks = ranks.global_ranks if shared or coordinator.size == 1 else frozenset()
    return StreamedUpdater(ranks, manifest, weight_version, buckets, writer_ranks)


def _gather_values(
    coordinator: RankCoordinator, operation: str, value: Any, error: VerlServerError | None = None
) -> list[Any]:
    """The values of all ranks in the order of the ranks, without None. With an `error`, all ranks raise that error."""
    values: list[Any] = coordinator.agree(
        coordinator.next_call_id(operation),
        lambda contributions: [item["value"] for item in contributions if item["value"] is not None],
        contribution={"value": value},
        error=error,
        action_timeout_s=10.0,
    )
    return values


def _map_on_all_ranks(
    coordinator: RankCoordinator, created: M | None, open_memory: Callable[[], M]
) -> tuple[M | None, bool]:
    """Map the memory that rank 0 created. Returns the mapped memory, and whether every rank has mapped it.

    When a rank cannot map it (it runs on another machine), only the rank that created the memory keeps it; the other
    ranks get None.
    """
    mapped = created
    if mapped is None:
        with contextlib.suppress(OSError):  # this rank runs on another machine
            mapped = open_memory()
    everywhere = len(_gather_values(coordinator, "mapped", True if mapped is not None else None)) == coordinator.size
    if not everywhere and created is None and mapped is not None:
        mapped.close()
        mapped = None
    return mapped, everywhere
