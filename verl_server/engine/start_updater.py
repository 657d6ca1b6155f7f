"""Start of an engine's weight updater on the trainer ranks: manifest, transport and staging memory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from verl_server.adapter.sglang.server_arguments import with_absolute_paths
from verl_server.config import WeightsConfig
from verl_server.engine.backend import Backend
from verl_server.errors import BadInputError, UnsupportedError, VerlServerError
from verl_server.platforms.available_memory import available_memory
from verl_server.ranks.machine import is_loopback
from verl_server.types import Json, TensorSpec, parse_weight_version
from verl_server.weights.arena import Arena
from verl_server.weights.checksum import choose_algorithm
from verl_server.weights.double_buffer.buffer import DoubleBuffer
from verl_server.weights.double_buffer.layout import plan_double_buffer
from verl_server.weights.double_buffer.progress import MAX_WRITERS
from verl_server.weights.layout import plan_arena
from verl_server.weights.manifest import Manifest
from verl_server.weights.read_manifest import checkpoint_names_of, read_manifest
from verl_server.weights.transports import is_streamed, sender_class, stream_class
from verl_server.weights.transports.base import SenderSettings
from verl_server.weights.update.buffer_filler import BufferRole
from verl_server.weights.update.opening import DoubleBuffers
from verl_server.weights.update.staged import StagedUpdater
from verl_server.weights.update.streamed import StreamedUpdater
from verl_server.weights.update.updater import EngineRanks, WeightUpdater

if TYPE_CHECKING:
    from verl_server.ranks.coordinator import RankCoordinator

M = TypeVar("M", Arena, DoubleBuffer)

logger = logging.getLogger(__name__)

WHOLE_MODULE_TRANSPORTS = ("shared_memory", "disk")
"""Transports of engines that load a module only with all of its tensors (`ServerInfo.fused_modules`)."""


def start_weight_updater(
    ranks: EngineRanks, backend: Backend | None, server_args: Mapping[str, Any], config: WeightsConfig
) -> WeightUpdater:
    """Agree on the model's tensors and on the transport, and create the staging memory. Called on all ranks."""
    manifest = _agree_on_manifest(ranks.coordinator, backend, with_absolute_paths(server_args))
    layout = plan_arena(manifest.tensors)

    def decide(_: list[Json]) -> Json:
        """Rank 0 chooses the transport and reads the state of the backend."""
        assert backend is not None
        transport = _choose_transport(backend, ranks.placement.nnodes, config, layout.size_bytes)
        released_memory = sorted(backend.released_memory)
        reads_host_memory = any(member.fused_modules is not None for member in backend.members)
        return {
            "transport": transport, "weight_version": backend.weight_version, "released_memory": released_memory,
            "checksum": choose_algorithm(servers_read_host_memory=reads_host_memory),
        }  # fmt: skip

    decided = ranks.coordinator.agree(ranks.coordinator.next_call_id("transport"), decide, action_timeout_s=10.0)
    weight_version, transport = decided["weight_version"], decided["transport"]
    if is_streamed(transport):
        updater = _start_streamed(ranks, manifest, weight_version, config, transport)
    else:
        updater = _start_staged(ranks, backend, manifest, weight_version, config, transport, decided["checksum"])
    # A server with random weights gets others when it starts again.
    is_unchanged = weight_version == parse_weight_version(server_args.get("weight_version"))
    updater.starts_from_checkpoint = is_unchanged and server_args.get("load_format") != "dummy"
    updater.released_memory = frozenset(decided["released_memory"])  # not empty for a fleet that was in use before
    return updater


def _choose_transport(backend: Backend, nnodes: int, config: WeightsConfig, model_bytes: int) -> str:
    """The name of the transport. `model_bytes`: size of the staging memory for the whole model.

    Raises BadInputError for a transport that does not support several nodes, exceeds `max_staging_bytes`, or needs more
    memory than is available: the kernel would kill the trainer or the server during the first update.
    """
    limit, available = config.max_staging_bytes, available_memory()
    transport = config.transport
    if transport == "auto":
        transport = backend.nearest_transport()
        exceeds = model_bytes > available or (limit is not None and model_bytes > limit)
        if transport == "shared_memory" and exceeds and nnodes == 1:
            transport = "buckets"
    needs_modules = any(member.fused_modules is not None for member in backend.members)
    if needs_modules and config.transport == "auto" and is_loopback(backend.trainer_host):
        transport = "shared_memory"  # all servers are on this machine, whatever the mode of a fleet prefers
    if needs_modules and transport not in WHOLE_MODULE_TRANSPORTS:
        raise BadInputError(
            f"vLLM servers do not take the weight transport {transport!r}: they need all tensors of a module at once. "
            f"They take {' and '.join(WHOLE_MODULE_TRANSPORTS)}, with a model that fits into this machine's memory a "
            "second time, and servers on this machine or with a folder that both machines have",
            argument="transport",
        )
    if nnodes > 1 and transport != "shared_memory":
        raise BadInputError(
            f"weight transport {transport!r} does not support nnodes={nnodes}: do not set `transport` in WeightsConfig"
        )
    other = "" if needs_modules else ", or use WeightsConfig(transport='buckets') on one machine"
    if limit is not None and model_bytes > limit and not is_streamed(transport):
        raise BadInputError(
            f"staging this model for the transport {transport!r} takes {model_bytes} bytes of memory, more than "
            f"max_staging_bytes={limit}; raise the limit{other}"
        )
    if model_bytes > available and not is_streamed(transport):
        raise BadInputError(
            f"staging this model for the transport {transport!r} takes {model_bytes} bytes of memory, but only "
            f"{available} bytes are available on this machine or in this container; free memory or raise the limit of "
            f"the container{other}"
        )
    return transport


def _start_staged(
    ranks: EngineRanks,
    backend: Backend | None,
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
    if backend is not None:
        settings = SenderSettings(
            arena=arena,
            layout=layout,
            timeout_s=ranks.timeout_s,
            arena_locations=locations,
            ranks_per_node=placement.ranks_per_node if placement.nnodes > 1 else 0,
            node_rank=placement.node_rank,
            folder=None if config.folder is None else str(config.folder),
            host=config.host or backend.trainer_host,
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
    """Create one double buffer that all ranks write, or, when the buffers lie on GPUs, one on each rank's GPU."""
    stream, coordinator = stream_class(transport), ranks.coordinator
    layout = plan_double_buffer(manifest.tensors, config.max_staging_bytes, stream.in_host_memory)
    is_lead_writer = coordinator.rank == 0 or not stream.in_host_memory
    if coordinator.size > MAX_WRITERS:
        raise UnsupportedError(
            f"{coordinator.size} trainer ranks are more than the {MAX_WRITERS} that can write one buffer"
        )
    buffer: DoubleBuffer | None = None
    description: Any = None
    failure: VerlServerError | None = None
    try:
        if is_lead_writer:
            buffer = stream.create(layout)
            description = stream.describe(buffer)
    except Exception as error:  # noqa: BLE001 - all ranks must raise it
        failure = (
            error
            if isinstance(error, VerlServerError)
            else VerlServerError(f"the staging memory cannot be created: {type(error).__name__}: {error}")
        )
    try:
        descriptions = _gather_values(coordinator, "double_buffer", description, failure)
        stream.require_usable(descriptions)
    except BaseException:
        if buffer is not None:
            buffer.close()  # memory of a GPU is not freed automatically
        raise
    num_buffers = len(descriptions)
    logger.info("weights go by %s, through %.1f MB of memory", transport, num_buffers * layout.size_bytes / 1e6)
    role, writer_ranks = None, ranks.global_ranks if coordinator.size == 1 else frozenset()
    if stream.in_host_memory:
        buffer, shared = _map_on_all_ranks(
            coordinator, buffer, lambda: DoubleBuffer.open(descriptions[0]["location"], layout)
        )
        writer_ranks = ranks.global_ranks if shared else frozenset()
        index, count = (coordinator.rank, coordinator.size) if shared else (0, 1)
        if shared or is_lead_writer:
            assert buffer is not None
            role = BufferRole(buffer, index, count, is_lead_writer, buffer_index=0, num_buffers=num_buffers)
    else:
        assert buffer is not None
        role = BufferRole(buffer, 0, 1, True, buffer_index=coordinator.rank, num_buffers=num_buffers)
    num_writers = 1 if role is None else role.num_writers
    buffers = DoubleBuffers(transport, layout, descriptions, num_writers, ranks.timeout_s)
    return StreamedUpdater(ranks, manifest, weight_version, buffers, role, writer_ranks)


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


def _agree_on_manifest(
    coordinator: RankCoordinator, backend: Backend | None, server_args: Mapping[str, Any]
) -> Manifest:
    """The tensors that the model of rank 0's server arguments accepts, on all ranks. Rank 0 asks the servers."""

    def describe(_: list[Json]) -> Json:
        assert backend is not None
        manifest = read_manifest(server_args, backend.parameter_dtypes())
        tensors = {name: [list(spec.shape), spec.dtype] for name, spec in manifest.tensors.items()}
        return {
            "tensors": tensors, "optional": sorted(manifest.optional), "ignored": sorted(manifest.ignored),
            "tied": manifest.tied, "narrowest": dict(manifest.narrowest),
        }  # fmt: skip

    wire = coordinator.agree(coordinator.next_call_id("manifest"), describe, action_timeout_s=120.0)
    tensors = {name: TensorSpec(tuple(shape), dtype) for name, (shape, dtype) in wire["tensors"].items()}
    return Manifest(
        tensors,
        frozenset(wire["optional"]),
        frozenset(wire["ignored"]),
        None if wire["tied"] is None else tuple(wire["tied"]),
        wire["narrowest"],
        checkpoint_names_of(server_args),
    )
