"""How the ranks of one engine start: who spawns what, and the arenas that they share."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from verl_server.adapter.launch import checked_server_args, complete_server_args
from verl_server.adapter.ports import PortReservation, authority
from verl_server.config import AdapterConfig, RemoteServer, WeightsConfig
from verl_server.engine.backend import Backend, ServerBackend
from verl_server.engine.commit import Order, check_reports, checksums, commit
from verl_server.engine.placement import Placement
from verl_server.engine.remote import RemoteBackend
from verl_server.engine.stage import Stage, check_same_names, digest
from verl_server.errors import BadInputError, ServerDiedError, TornWeightsError, VerlServerError
from verl_server.types import TensorSpec
from verl_server.weights.arena import Arena
from verl_server.weights.layout import Layout, plan
from verl_server.weights.lora import check_adapter
from verl_server.weights.manifest import Manifest, manifest_of
from verl_server.weights.transports import end_of
from verl_server.weights.transports.base import Sender, Settings, Update, in_layout_order

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from verl_server.engine.group import TpGroup

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
    group: TpGroup,
    placement: Placement,
    launch_server: bool,
    servers: Sequence[RemoteServer],
    server_args: Mapping[str, Any],
    config: AdapterConfig,
    env: Mapping[str, str],
    on_death: Callable[[ServerDiedError], None],
) -> Backend | None:
    """Start the server process of each node on the node's first rank, at the same time; None elsewhere.

    With `servers`, which run already, only connect to them, on rank 0.

    If one does not start, all ranks raise its error at once and the others are ended.
    """
    args = _agree_on_args(group, placement, server_args)
    backend: Backend | None = None
    if placement.is_node_leader:
        try:
            if servers:
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


def _agree_on_args(group: TpGroup, placement: Placement, server_args: Mapping[str, Any]) -> Json:
    """The server arguments, equal on all nodes but for the node's number: rank 0's count."""

    def complete(_: list[Json]) -> Json:
        args: Json = {**checked_server_args(server_args), "tp_size": placement.tp_size}
        args.setdefault("weight_version", "0")
        if placement.nnodes > 1:
            keyed = complete_server_args(args)
            args.update({name: keyed[name] for name in ("api_key", "admin_api_key")})
            if not args.get("dist_init_addr"):
                host = socket.gethostbyname(socket.gethostname())
                reservation = PortReservation(host)
                reservation.release()
                args["dist_init_addr"] = authority(host, reservation.port)
        return args

    args = dict(group.agree(group.next_call("arguments"), complete, action_s=10.0))
    if placement.nnodes > 1:
        args.update(nnodes=placement.nnodes, node_rank=placement.node_rank)
        if placement.node_rank > 0:
            args["port"] = None
    return args


def _start(
    group: TpGroup,
    args: Json,
    launch_server: bool,
    config: AdapterConfig,
    env: Mapping[str, str],
    on_death: Callable[[ServerDiedError], None],
) -> Backend:
    if not launch_server:
        from verl_server.engine.inprocess import InProcessBackend

        return InProcessBackend(args)
    backend = ServerBackend(args, config, env, give_up=lambda: group.broken)
    process = backend.adapter.asynchronous.process
    assert process is not None
    process.on_exit(lambda _: on_death(process.died(backend.adapter.base_url)))
    return backend


class WeightsSide:
    """What one rank needs to push weights: the manifest, the layout, the arena that it writes, and the sender."""

    def __init__(
        self,
        manifest: Manifest,
        layout: Layout,
        arena: Arena,
        writers: frozenset[int],
        placement: Placement,
        sender: Sender | None,
    ) -> None:
        self._manifest, self._layout, self._arena = manifest, layout, arena
        self._writers, self._placement, self._sender = writers, placement, sender
        self._leads = placement.is_node_leader
        self.asleep: frozenset[str] = frozenset()

    def stage(self, group: TpGroup, deadline_s: float, finite: bool) -> Stage:
        return Stage(self._arena, self._manifest, self._writers, self._leads, group, deadline_s, finite)

    def bring(self, names: list[str], sharded: bool) -> Json:
        """What this rank tells of its part; node leaders also put the table into their arena."""
        if self._leads and names:
            self._arena.write_table(in_layout_order(self._layout, names))
        return {"tensors": len(names), "digest": digest(names), "sharded": sharded}

    def commit(self, backend: Backend, brought: list[Json], names: list[str], order: Order, torn: bool) -> Json:
        """On rank 0: check that the ranks brought the same, then make the servers load it."""
        check_same_names(brought)
        missing = sorted(self._layout.slots.keys() - set(names))
        if missing and torn:
            raise TornWeightsError(
                f"the served weights are torn and this update lacks {len(missing)} parameters, {missing[0]!r} "
                "among them: push all of them"
            )
        assert self._sender is not None
        result, update = commit(backend, self._sender, names, order, torn)
        return {"result": asdict(result), "update_id": update.id, "verify": update.verify}

    def check(self, update_id: str, verify: bool, names: list[str]) -> VerlServerError | None:
        """On a node's leader: the error that a TP rank of this node reported, or None."""
        update = Update(update_id, in_layout_order(self._layout, names), verify)
        assert self._sender is not None
        try:
            check_reports(self._sender.reports(update), update, checksums(self._arena, update), len(self._layout.slots))
        except VerlServerError as error:
            return error
        return None

    def check_adapter(self, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
        """Raises BadInputError or WeightManifestError for a LoRA adapter that does not fit."""
        specs = {
            name: TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in tensors.items()
        }
        check_adapter(specs, config, self._manifest)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of the model in place, by name."""
        return {name: self._arena.tensor(name) for name in self._layout.slots}

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._arena.close()


def start_weights_side(
    group: TpGroup,
    placement: Placement,
    server_args: Mapping[str, Any],
    ranks: frozenset[int],
    backend: Backend | None,
    config: WeightsConfig,
    timeout_s: float,
) -> WeightsSide:
    """Make an arena on each node's leader; with one node, let every rank map it, if every rank can."""
    manifest = _agree_on_manifest(group, server_args)
    layout = plan(manifest.tensors)
    if config.max_staging_bytes is not None and layout.size > config.max_staging_bytes:
        raise BadInputError(
            f"staging this model takes {layout.size} bytes of memory, more than "
            f"max_staging_bytes={config.max_staging_bytes}"
        )
    arena = Arena.create(layout) if placement.is_node_leader else None
    bring = {"path": arena.path if arena else None}
    paths = group.agree(
        group.next_call("arena"), lambda brought: [b["path"] for b in brought if b["path"]], bring=bring, action_s=10.0
    )
    mapped = arena is not None
    if arena is None and placement.nnodes == 1:
        try:
            arena, mapped = Arena.open(paths[0], layout), True
        except OSError:
            arena = Arena.create(layout)  # on another machine: pages that are never written cost nothing
    shared = group.agree(
        group.next_call("mapped"),
        lambda brought: all(b["mapped"] for b in brought),
        bring={"mapped": mapped},
        action_s=10.0,
    )
    writers = ranks if shared and placement.nnodes == 1 else frozenset()
    arena = arena or Arena.create(layout)
    sender = None if backend is None else _sender(arena, layout, paths, placement, backend, config, timeout_s)
    return WeightsSide(manifest, layout, arena, writers, placement, sender)


def _agree_on_manifest(group: TpGroup, server_args: Mapping[str, Any]) -> Manifest:
    def describe(_: list[Json]) -> Json:
        manifest = manifest_of(server_args)
        tensors = {name: [list(spec.shape), spec.dtype] for name, spec in manifest.tensors.items()}
        return {"tensors": tensors, "ignored": sorted(manifest.ignored)}

    wire = group.agree(group.next_call("manifest"), describe, action_s=120.0)
    tensors = {name: TensorSpec(tuple(shape), dtype) for name, (shape, dtype) in wire["tensors"].items()}
    return Manifest(tensors, frozenset(wire["ignored"]))


def _sender(
    arena: Arena,
    layout: Layout,
    paths: list[str],
    placement: Placement,
    backend: Backend,
    config: WeightsConfig,
    timeout_s: float,
) -> Sender:
    """On each node's leader: its end of the transport."""
    transport = backend.nearest_transport if config.transport == "auto" else config.transport
    if placement.nnodes > 1 and transport != "shared_memory":
        raise BadInputError(f"weight transport {transport!r} does not go with nnodes={placement.nnodes}: leave it out")
    settings = Settings(
        arena=arena,
        layout=layout,
        tp_sizes=backend.tp_sizes,
        timeout_s=timeout_s,
        paths=paths,
        ranks_per_node=placement.ranks_per_node if placement.nnodes > 1 else 0,
        node_rank=placement.node_rank,
        folder=None if config.folder is None else str(config.folder),
        host=config.host or backend.trainer_host,
    )
    logger.info("weights are staged in %.1f MB of memory and go by %s", layout.size / 1e6, transport)
    sender: Sender = end_of(transport, "Sender")(settings)
    return sender
