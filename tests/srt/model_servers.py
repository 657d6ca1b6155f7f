"""Weight updates of models in this process: real updaters and loaders, without a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from verl_server.config import PauseMode
from verl_server.ranks.coordinator import RankCoordinator
from verl_server.ranks.placement import compute_placement
from verl_server.types import Json, ServerInfo, TensorSpec, WeightUpdateResult
from verl_server.weights.arena import XXH3, Arena, plan_arena
from verl_server.weights.buckets import Buckets, plan_buckets
from verl_server.weights.loader import load_weights
from verl_server.weights.manifest import Manifest
from verl_server.weights.transports.base import SenderSettings, receiver_class, sender_class
from verl_server.weights.update.options import ReplayFn, Servers, UpdateOptions
from verl_server.weights.update.staged import StagedUpdater
from verl_server.weights.update.streamed import RankBuckets, StreamedUpdater
from verl_server.weights.update.updater import EngineRanks, WeightUpdater


class LoadedModel(torch.nn.Module):
    """A model of float32 zeros, with `sizes[name]` elements for each name."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__()
        self.tensors = torch.nn.ParameterDict({name: torch.zeros(size) for name, size in sizes.items()})
        self.is_broken = False

    def load_weights(self, weights: Any) -> None:
        if self.is_broken:
            raise RuntimeError("the model is broken")
        for name, tensor in weights:
            self.tensors[name].data.copy_(tensor)


class ModelServers(Servers):
    """One server, with a model for each TP rank, as the servers of an update."""

    members: Sequence[ServerInfo] = ()

    def __init__(self, sizes: Mapping[str, int], tp_size: int = 1) -> None:
        self.models = [LoadedModel(sizes) for _ in range(tp_size)]
        self.members = [ServerInfo("server", tp_size)]
        self.steps: list[str] = []
        """Names of the steps that were called."""

    def pause(self, mode: PauseMode) -> None:
        self.steps.append("pause")

    def resume(self) -> None:
        self.steps.append("resume")

    def begin_weight_update(self) -> None:
        self.steps.append("begin")

    def load(self, messages: Sequence[Json], weight_version: int | None, flush_cache: bool) -> None:
        (message,) = messages
        for tp_rank, model in enumerate(self.models):
            transport = receiver_class(message["transport"])
            if message.get("opens_only"):
                transport.open_only(message, tp_rank)
                continue
            receiver = transport(message, tp_rank)
            receiver.send_report(*load_weights(receiver, model, message["update_id"], message["verify"]))

    def end_weight_update(self) -> None:
        self.steps.append("end")

    def published(self, version: int, whole: bool, replay: ReplayFn | None) -> None:
        self.steps.append("published")


def staged_updater(
    transport: str,
    servers: ModelServers,
    sizes: Mapping[str, int],
    coordinator: RankCoordinator | None = None,
    nnodes: int = 1,
    folder: str | None = None,
) -> StagedUpdater:
    """The updater of one trainer rank. The models have `sizes[name]` elements for each name.

    With several nodes, `coordinator` connects one rank for each node.
    """
    coordinator = coordinator or RankCoordinator(0, 1, {}, 20.0)
    specs = {name: TensorSpec((size,), "float32") for name, size in sizes.items()}
    layout = plan_arena(specs)
    arena = Arena.create(layout)
    locations = coordinator.agree(
        coordinator.next_call_id("arena"),
        lambda contributions: [item["location"] for item in contributions],
        contribution={"location": arena.location},
        action_timeout_s=10.0,
    )
    settings = SenderSettings(
        arena,
        layout,
        20.0,
        arena_locations=locations,
        ranks_per_node=len(servers.models) // nnodes if nnodes > 1 else 0,
        node_rank=coordinator.rank,
        folder=folder,
    )
    placement = compute_placement(coordinator.rank, coordinator.size, nnodes, {})
    ranks = EngineRanks(coordinator, placement, frozenset({coordinator.rank}), servers, 20.0)
    sender = sender_class(transport)(settings)
    return StagedUpdater(ranks, Manifest(specs), 0, layout, arena, frozenset({coordinator.rank}), sender, XXH3)


def streamed_updater(servers: ModelServers, sizes: Mapping[str, int]) -> StreamedUpdater:
    """The updater of one trainer rank with buckets in host memory."""
    specs = {name: TensorSpec((size,), "float32") for name, size in sizes.items()}
    buckets = Buckets.create(plan_buckets(specs, None, in_host_memory=True))
    descriptions = [buckets.description()]
    buffers = RankBuckets("buckets", buckets.layout, descriptions, 1, 20.0, buckets, is_lead_writer=True)
    placement = compute_placement(0, 1, 1, {})
    ranks = EngineRanks(RankCoordinator(0, 1, {}, 20.0), placement, frozenset({0}), servers, 20.0)
    return StreamedUpdater(ranks, Manifest(specs), 0, buffers, frozenset({0}))


def push(updater: WeightUpdater, tensors: Mapping[str, torch.Tensor], verify: bool = True) -> WeightUpdateResult:
    """One update with the default version."""
    return updater.update(tensors, None, UpdateOptions(None, verify, True, PauseMode.RETRACT, True))
