"""How the ranks of one engine start: who spawns what, and the arenas that they share."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from verl_server.adapter.sglang.server_arguments import complete_server_args, validate_server_args
from verl_server.config import AdapterConfig, RemoteServer, WeightsConfig
from verl_server.engine.backend import Backend, ServerBackend
from verl_server.engine.servers import RemoteBackend
from verl_server.errors import BadInputError, ServerDiedError, UnsupportedError, VerlServerError
from verl_server.ranks.placement import Placement
from verl_server.server.ports import PortReservation, join_host_port
from verl_server.types import TensorSpec
from verl_server.weights.arena import Arena
from verl_server.weights.double_buffer import MAX_WRITERS, DoubleBuffer, plan_double_buffer
from verl_server.weights.layout import plan
from verl_server.weights.manifest import Manifest, manifest_of
from verl_server.weights.transports import end_of, is_stream
from verl_server.weights.transports.base import Settings
from verl_server.weights.update.staged import StagedUpdater
from verl_server.weights.update.streamed import Seat, StreamedUpdater
from verl_server.weights.update.updater import Ranks, WeightUpdater, first_version

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from verl_server.ranks.coordinator import RankCoordinator

M = TypeVar("M", Arena, DoubleBuffer)

logger = logging.getLogger(__name__)

Json = dict[str, Any]


def share_over(mesh: DeviceMesh) -> Callable[[Any], Any]:
    """A function that gives rank 0's value to all ranks of `mesh`: the one use of the trainer's group."""
    import torch.distributed as dist

    def share(value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src=int(mesh.mesh.flatten()[0]), group=mesh.get_group())
        return box[0]

    return share


def start_backend(
    group: RankCoordinator,
    placement: Placement,
    launch_server: bool,
    servers: Sequence[RemoteServer],
    fleet: Backend | None,
    server_args: Mapping[str, Any],
    config: AdapterConfig,
    env: Mapping[str, str],
    on_death: Callable[[ServerDiedError], None],
) -> Backend | None:
    """Start the server process of each node on the node's first rank, at the same time; None elsewhere.

    With `servers`, which run already, only connect to them, on rank 0; a `fleet` there is the backend itself.

    If one does not start, all ranks raise its error at once and the others are ended.
    """
    args = _agree_on_args(group, placement, server_args)
    backend: Backend | None = None
    if placement.is_node_leader:
        try:
            if fleet is not None:
                backend = fleet
            elif servers:
                backend = RemoteBackend(servers, config)
            else:
                backend = _start(group, args, launch_server, config, env, on_death)
        except VerlServerError as failure:
            group.fault(failure)  # the servers of other nodes wait for this one: end them now
            raise
    try:
        group.agree(group.next_call("start"), lambda _: None, action_s=config.timeouts.start_s)
    except BaseException:
        if backend is not None:
            backend.shutdown()
        raise
    return backend


def _agree_on_args(group: RankCoordinator, placement: Placement, server_args: Mapping[str, Any]) -> Json:
    """The server arguments, equal on all nodes but for the node's number: rank 0's count."""

    def complete(_: list[Json]) -> Json:
        args: Json = {**validate_server_args(server_args), "tp_size": placement.tp_size}
        args.setdefault("weight_version", "0")
        if placement.nnodes > 1:
            keyed = complete_server_args(args)
            args.update({name: keyed[name] for name in ("api_key", "admin_api_key")})
            if not args.get("dist_init_addr"):
                host = socket.gethostbyname(socket.gethostname())
                reservation = PortReservation(host)
                reservation.release()
                args["dist_init_addr"] = join_host_port(host, reservation.port)
        return args

    args = dict(group.agree(group.next_call("arguments"), complete, action_s=10.0))
    if placement.nnodes > 1:
        args.update(nnodes=placement.nnodes, node_rank=placement.node_rank)
        if placement.node_rank > 0:
            args["port"] = None
    return args


def _start(
    group: RankCoordinator,
    args: Json,
    launch_server: bool,
    config: AdapterConfig,
    env: Mapping[str, str],
    on_death: Callable[[ServerDiedError], None],
) -> Backend:
    if not launch_server:
        from verl_server.engine.inprocess import InProcessBackend

        return InProcessBackend(args)
    backend = ServerBackend(args, config, env, check_abort=lambda: group.broken)
    process = backend.adapter.asynchronous.process
    assert process is not None
    process.on_exit(lambda _: on_death(process.died(backend.adapter.base_url)))
    return backend


def start_weight_updater(
    ranks: Ranks, backend: Backend | None, server_args: Mapping[str, Any], config: WeightsConfig
) -> WeightUpdater:
    """Agree on what the model accepts and how it travels, and make the staging memory."""
    manifest = _agree_on_manifest(ranks.group, server_args)
    layout = plan(manifest.tensors)
    transport = ranks.group.agree(
        ranks.group.next_call("transport"), lambda _: _transport(ranks, backend, config, layout.size), action_s=10.0
    )
    start = _start_streamed if is_stream(transport) else _start_staged
    return start(ranks, backend, manifest, first_version(server_args), config, transport)


def _transport(ranks: Ranks, backend: Backend | None, config: WeightsConfig, whole: int) -> str:
    """On rank 0: the transport. `whole`: bytes to stage the whole model."""
    nnodes, limit = ranks.placement.nnodes, config.max_staging_bytes
    assert backend is not None
    transport = config.transport
    if transport == "auto":
        transport = backend.nearest_transport
        if transport == "shared_memory" and limit is not None and whole > limit and nnodes == 1:
            transport = "buckets"
    if nnodes > 1 and transport != "shared_memory":
        raise BadInputError(f"weight transport {transport!r} does not go with nnodes={nnodes}: leave it out")
    if limit is not None and whole > limit and not is_stream(transport):
        raise BadInputError(
            f"staging this model for the transport {transport!r} takes {whole} bytes of memory, more than "
            f"max_staging_bytes={limit}"
        )
    return transport


def _start_staged(
    ranks: Ranks,
    backend: Backend | None,
    manifest: Manifest,
    version: int,
    config: WeightsConfig,
    transport: str,
) -> WeightUpdater:
    """Make an arena on each node's leader; with one node, let every rank map it, if every rank can."""
    layout, placement = plan(manifest.tensors), ranks.placement
    arena = Arena.create(layout) if placement.is_node_leader else None
    paths = _all(ranks.group, "arena", arena.path if arena else None)
    shared = False
    if placement.nnodes == 1:
        arena, shared = _mapped_by_all(ranks.group, arena, lambda: Arena.open(paths[0], layout))
    arena = arena or Arena.create(layout)  # on another machine: pages that are never written cost nothing
    sender = None
    if backend is not None:
        settings = Settings(
            arena=arena,
            layout=layout,
            timeout_s=ranks.timeout_s,
            paths=paths,
            ranks_per_node=placement.ranks_per_node if placement.nnodes > 1 else 0,
            node_rank=placement.node_rank,
            folder=None if config.folder is None else str(config.folder),
            host=config.host or backend.trainer_host,
        )
        logger.info("weights are staged in %.1f MB of memory and go by %s", layout.size / 1e6, transport)
        sender = end_of(transport, "Sender")(settings)
    writers = ranks.numbers if shared else frozenset()
    return StagedUpdater(ranks, manifest, version, layout, arena, writers, sender)


def _start_streamed(
    ranks: Ranks,
    backend: Backend | None,
    manifest: Manifest,
    version: int,
    config: WeightsConfig,
    transport: str,
) -> WeightUpdater:
    """Make one lane that all ranks write, or one for each rank on its GPU."""
    stream, group = end_of(transport, "Stream"), ranks.group
    layout = plan_double_buffer(manifest.tensors, config.max_staging_bytes, stream.on_host)
    leads = group.rank == 0 or not stream.on_host
    if group.size > MAX_WRITERS:
        raise UnsupportedError(f"{group.size} trainer ranks are more than {MAX_WRITERS} for buckets")
    lane: DoubleBuffer | None = None
    mine: Any = None
    failure: VerlServerError | None = None
    try:
        if leads:
            lane = stream.create(layout)
            mine = stream.describe(lane)
    except Exception as error:  # noqa: BLE001 - all ranks must learn of it
        failure = error if isinstance(error, VerlServerError) else VerlServerError(f"no staging memory: {error}")
    try:
        described = _all(group, "lane", mine, failure)
    except BaseException:
        if lane is not None:
            lane.close()  # a GPU's memory is not freed by itself
        raise
    logger.info("weights go by %s, through %.1f MB of memory", transport, len(described) * layout.size / 1e6)
    seat, writers = None, ranks.numbers if group.size == 1 else frozenset()
    if stream.on_host:
        lane, shared = _mapped_by_all(group, lane, lambda: stream.open(described[0], layout))
        writers = ranks.numbers if shared else frozenset()
        if shared or leads:
            assert lane is not None
            seat = Seat(lane, group.rank if shared else 0, group.size if shared else 1, leads, number=0)
    else:
        assert lane is not None
        seat = Seat(lane, 0, 1, leads=True, number=group.rank)
    return StreamedUpdater(ranks, manifest, version, transport, layout, seat, writers, described)


def _all(group: RankCoordinator, call: str, value: Any, error: VerlServerError | None = None) -> list[Any]:
    """What the ranks bring, on all ranks, without those that bring None."""
    found: list[Any] = group.agree(
        group.next_call(call),
        lambda brought: [one["value"] for one in brought if one["value"] is not None],
        bring={"value": value},
        error=error,
        action_s=10.0,
    )
    return found


def _mapped_by_all(group: RankCoordinator, mine: M | None, open_it: Callable[[], M]) -> tuple[M | None, bool]:
    """Rank 0's memory, mapped here, and whether every rank could map it (or None, then no rank but 0 needs it)."""
    mapped = mine
    if mapped is None:
        with contextlib.suppress(OSError):  # on another machine
            mapped = open_it()
    everywhere = len(_all(group, "mapped", True if mapped is not None else None)) == group.size
    if not everywhere and mine is None and mapped is not None:
        mapped.close()
        mapped = None
    return mapped, everywhere


def _agree_on_manifest(group: RankCoordinator, server_args: Mapping[str, Any]) -> Manifest:
    def describe(_: list[Json]) -> Json:
        manifest = manifest_of(server_args)
        tensors = {name: [list(spec.shape), spec.dtype] for name, spec in manifest.tensors.items()}
        return {"tensors": tensors, "ignored": sorted(manifest.ignored)}

    wire = group.agree(group.next_call("manifest"), describe, action_s=120.0)
    tensors = {name: TensorSpec(tuple(shape), dtype) for name, (shape, dtype) in wire["tensors"].items()}
    return Manifest(tensors, frozenset(wire["ignored"]))
