"""Engines with several trainer ranks: shards of every kind, failures on one rank, two nodes."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from helpers import (
    GREEDY,
    PROMPTS,
    Ranks,
    adapter_of,
    assert_equals_reference,
    change_weights,
    mesh_of,
    raised,
    reference_model,
    remote_server_of,
    trainer_ranks,
    wait_until,
)
from model_servers import ModelServers, push, staged_updater
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl_server import HttpServerEngineAdapter, PauseMode, RemoteServer, Timeouts, VerlEngine, WeightsConfig
from verl_server.engine.start import broadcast_function, connect_coordinator
from verl_server.errors import BadInputError, PeerError, TornWeightsError, VerlServerError
from verl_server.ranks import shared_meshes
from verl_server.ranks.coordinator import RankCoordinator
from verl_server.ranks.placement import compute_placement, reachable_address
from verl_server.types import TensorSpec
from verl_server.weights.arena import XXH3, Arena, compute_checksum, plan_arena
from verl_server.weights.manifest import Manifest, read_manifest
from verl_server.weights.update.options import UpdateOptions
from verl_server.weights.update.source import ShardWriter, StagedChecksums
from verl_server.weights.update.staged import StagedUpdater
from verl_server.weights.update.updater import EngineRanks


def _one_engine(rank: int, world: int, folder: str) -> tuple[list[Any], list[Any]]:
    """Shards of every kind, then several failures. After each failure the engine must continue to serve."""
    model = reference_model(folder)
    weights = model.state_dict()
    engine = VerlEngine(
        mesh_of(world),
        model_path=folder,
        tp_size=1,
        dtype="float32",
        max_total_tokens=8192,
        timeouts=Timeouts(ranks_s=5.0),
    )
    with engine:
        same = _same_results(engine, folder, rank)
        engine.update_weights_from_tensor(weights.items())
        found: list[Any] = []
        # rank 1 brings other names
        fewer = dict(list(weights.items())[: 5 if rank == 1 else 7])
        found.append(raised(lambda: engine.update_weights_from_tensor(fewer.items())))
        # rank 1 arrives after the deadline, and gets the same error when it arrives
        if rank == 1:
            time.sleep(6.5)
        started = time.monotonic()
        found.append(raised(lambda: engine.generate(input_ids=[1], sampling_params=GREEDY)))
        assert time.monotonic() - started < 6.0
        # bad input is the same error on both
        found.append(raised(lambda: engine.generate(input_ids=[-5], sampling_params=GREEDY)))
        if rank == 1:
            time.sleep(0.5)
        assert_equals_reference(engine, model)
        # rank 1 dies: rank 0 raises at once, also during a generation
        if rank == 1:
            time.sleep(1.0)
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        found.append(raised(lambda: [engine.generate(input_ids=[1], sampling_params=GREEDY) for _ in range(10**6)]))
        assert time.monotonic() - started < 5.0
        found.append(raised(engine.flush_cache))
    return same, found


def test_shards_of_every_kind_and_failures_on_one_rank(tiny: Callable[..., Path]) -> None:
    with trainer_ranks(2) as ranks:
        (same, found), _ = ranks.run(_one_engine, str(tiny("qwen2")), dying=1)
    assert same[0] == same[1], "every rank gets the same results and errors"
    assert [kind for kind, _ in same[0][:3]] == ["WeightManifestError", "BadInputError", "BadInputError"]
    assert "model.norm.weight" in same[0][0][1]
    names, late, bad, dead, after = found
    assert names[0] == BadInputError.__name__
    assert "rank 1 pushed 5" in names[1]
    assert late[0] == PeerError.__name__
    assert "rank(s) [1] did not arrive" in late[1]
    assert bad == (BadInputError.__name__, bad[1])
    assert dead[0] == PeerError.__name__
    assert "rank 1" in dead[1]
    assert after == dead


def _same_results(engine: VerlEngine, folder: str, rank: int) -> list[Any]:
    """The errors and results of both ranks for the same calls."""
    weights = reference_model(folder).state_dict()
    mine = weights | ({"model.norm.weight": torch.zeros(3)} if rank == 1 else {})
    found = [
        raised(lambda: engine.update_weights_from_tensor(mine.items())),
        raised(lambda: engine.generate(input_ids=[-5], sampling_params=GREEDY)),
        raised(lambda: engine.release_memory_occupation(["no_such"])),
    ]
    events = list(engine.generate(input_ids=[1, 2], sampling_params=GREEDY, stream=True))

    async def many() -> list[Any]:
        calls = [engine.async_generate(input_ids=[i, 9], sampling_params=GREEDY) for i in range(8)]
        return list(await asyncio.gather(*calls))

    replies = asyncio.run(many())
    found.append(("stream", str(events[-1]["output_ids"])))
    found.append(("async", str([reply["output_ids"] for reply in replies])))
    shards_of_every_kind(engine, folder)
    mistakes_while_the_other_rank_gathers(engine, rank, folder)
    everybody: list[Any] = [None, None]
    dist.all_gather_object(everybody, found)
    return everybody


def shards_of_every_kind(engine: VerlEngine, folder: str) -> None:
    """Push shards of rows, of columns, of uneven size, replicated tensors, and a placement that needs a gather."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    model = reference_model(folder)
    change_weights(model, seed=11)
    flat = init_device_mesh("cpu", (2,))
    square = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    placed = {}
    for i, (name, tensor) in enumerate(model.state_dict().items()):
        choice = i % 4 if tensor.dim() == 2 else 3
        if choice == 0:
            placed[name] = distribute_tensor(tensor, flat, [Shard(0)])
        elif choice == 1:
            placed[name] = distribute_tensor(tensor, flat, [Shard(1)])
        elif choice == 2:
            placed[name] = distribute_tensor(tensor, square, [Shard(0), Shard(1)])
        else:
            placed[name] = distribute_tensor(tensor, flat, [Replicate()])
    result = engine.update_weights_from_tensor(placed.items())
    assert result.num_missing == 0
    assert_equals_reference(engine, model)
    # a pending sum, of which each rank holds half
    from torch.distributed.tensor import DTensor

    name = "model.norm.weight"
    half = model.state_dict()[name] / 2
    pending = DTensor.from_local(half, flat, [Partial()])
    engine.update_weights_from_tensor([(name, pending)])
    assert_equals_reference(engine, model)


def mistakes_while_the_other_rank_gathers(engine: VerlEngine, rank: int, folder: str) -> None:
    """A mistake on rank 1 is raised on both ranks at once, and the trainer's process group can be used afterwards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    model, mesh = reference_model(folder), init_device_mesh("cpu", (2,))
    version = engine.weight_version
    pending = {name: DTensor.from_local(t / 2, mesh, [Partial()]) for name, t in model.state_dict().items()}
    name = sorted(pending)[3]
    nan = DTensor.from_local(torch.full_like(pending[name].to_local(), torch.nan), mesh, [Partial()])
    wrong: dict[str, Any] = pending if rank == 0 else {**pending, name: nan}
    misnamed = pending if rank == 0 else {("typo" if key == name else key): value for key, value in pending.items()}
    sources: list[tuple[Any, str]] = [
        (wrong, "not finite"), (iter(wrong.items()), "not finite"),
        (misnamed, "no parameter 'typo'"),
    ]  # fmt: skip
    for source, message in sources:
        started = time.monotonic()
        found = raised(functools.partial(engine.update_weights_from_tensor, source, check_finite=True))
        assert (found[0], message in found[1]) == ("WeightManifestError", True), found
        assert time.monotonic() - started < 10.0
    assert engine.weight_version == version
    engine.update_weights_from_tensor(pending.items())
    assert_equals_reference(engine, model)


def _two_nodes(rank: int, world: int, folder: str) -> list[list[int]]:
    model = reference_model(folder)
    with VerlEngine(mesh_of(world), nnodes=2, model_path=folder, dtype="float32", max_total_tokens=8192) as engine:
        first = assert_equals_reference(engine, model)
        change_weights(model, seed=2)
        engine.update_weights_from_tensor(model.state_dict().items())
        second = assert_equals_reference(engine, model)
        assert first != second
        # plain tensors on the first rank only: the arena of the second node would lack them
        on_first = model.state_dict() if rank == 0 else {}
        found = raised(lambda: engine.update_weights_from_tensor(on_first.items()))
        assert (found[0], "rank 1 pushed 0 tensors" in found[1]) == ("BadInputError", True), found
        assert assert_equals_reference(engine, model) == second
        assert engine.adapter is not None
        main_pid = engine.adapter.pids.main  # the first rank of each node has its own server
        # the server of the second node dies: the first rank raises at once
        if rank == 1:
            time.sleep(1.0)
            os.kill(main_pid, signal.SIGKILL)
        started = time.monotonic()
        kind, message = raised(
            lambda: [engine.generate(input_ids=PROMPTS, sampling_params=GREEDY) for _ in range(10**6)]
        )
        assert kind == "ServerDiedError", message
        assert time.monotonic() - started < 5.0
        return second


def test_two_nodes_on_this_machine(two_ranks: Ranks, tiny: Callable[..., Path]) -> None:
    first, second = two_ranks.run(_two_nodes, str(tiny("qwen3")))
    assert first == second


def _ranks_on_two_machines(rank: int, world: int) -> tuple[bool, bool]:
    """Whether this rank has a connection at the address for other machines, with LOCAL_WORLD_SIZE 1 and 2."""
    master, found = os.environ["MASTER_ADDR"], []
    try:
        os.environ["MASTER_ADDR"] = "192.0.2.77"
        for ranks_per_machine in (1, 2):
            os.environ["LOCAL_WORLD_SIZE"] = str(ranks_per_machine)
            coordinator = connect_coordinator(mesh_of(world), 1, 30.0)
            hosts = {item.raddr.ip for item in psutil.Process().net_connections("tcp") if item.raddr}
            found.append(reachable_address() in hosts)
            dist.barrier()  # the connection of the other rank ends when this rank closes its own
            coordinator.close()
    finally:
        os.environ["MASTER_ADDR"] = master
        del os.environ["LOCAL_WORLD_SIZE"]
    return found[0], found[1]


def test_ranks_of_other_machines_can_reach_the_first_rank(two_ranks: Ranks) -> None:
    """Also when the server runs on one machine, or elsewhere."""
    try:
        reachable_address()
    except BadInputError:
        pytest.skip("this machine has no network")
    assert two_ranks.run(_ranks_on_two_machines) == [(True, False)] * 2


def _one_node_fails(rank: int, world: int, folder: str) -> tuple[str, str]:
    env = {"SGLANG_PLATFORM": "no_such_platform"} if rank == 1 else {}
    started = time.monotonic()
    found = raised(lambda: VerlEngine(mesh_of(world), nnodes=2, model_path=folder, env=env))
    assert time.monotonic() - started < 60.0
    return found


def test_a_node_that_does_not_start_is_an_error_on_all_ranks_at_once(
    two_ranks: Ranks, tiny: Callable[..., Path]
) -> None:
    """Without the error, the server of the first node would wait ten minutes for the second node."""
    first, second = two_ranks.run(_one_node_fails, str(tiny("qwen3")))
    assert first == second
    assert first[0] == "StartupError"


# -- updates without a server ------------------------------------------------------------------------

GROUP_TIMEOUT_S = 8.0
"""Deadline of the collective operations of the trainer's process group in these tests."""
NAMES = [f"t{number}" for number in range(4)]
MANIFEST = Manifest({name: TensorSpec((4,), "float32") for name in NAMES})


def _rank_0_is_not_in_the_mesh(rank: int, world: int) -> list[Any]:
    """What a rank writes, or the error, for DTensors of a mesh with rank 1 alone. Only rank 0 writes whole tensors."""
    from torch.distributed.tensor import DTensor, Partial, Shard

    mesh = DeviceMesh("cpu", torch.tensor([1]))
    found: list[Any] = []
    for placement, writer_ranks in ((Shard(0), {0, 1}), (Shard(0), set()), (Partial(), {0, 1})):
        shard = DTensor.from_local(torch.ones(4 * rank), mesh, [placement], shape=torch.Size([4]), stride=(1,))
        staged = torch.zeros(4)
        checksums = StagedChecksums({NAMES[0]: staged}.__getitem__, XXH3)
        writer = ShardWriter(
            {NAMES[0]: staged}.get,
            MANIFEST,
            frozenset(writer_ranks),
            RankCoordinator(0, 1, {}, 10.0),
            "update",
            gather_timeout_s=10.0,
            check_finite=False,
            writes_whole_tensors=rank == 0,
            checksums=checksums,
        )
        error = raised(functools.partial(writer.write, [(NAMES[0], shard)]))
        found.append(error[1] or staged.tolist())
        staged.fill_(1.0)  # as the other rank does in staging memory that both have
        assert error[1] or checksums.values([NAMES[0]]) == [compute_checksum(torch.ones(4))]
    return found


def test_a_tensor_that_rank_0_cannot_gather_is_refused(two_ranks: Ranks) -> None:
    """Otherwise the staged tensor of an earlier update would be loaded and verified."""
    first, second = two_ranks.run(_rank_0_is_not_in_the_mesh)
    assert first[0] == [0.0] * 4, "rank 1 writes its own shard"
    assert second == [[1.0] * 4, [0.0] * 4, [0.0] * 4]
    for message in first[1:]:
        assert "'t0' is a DTensor of a device mesh without this rank" in str(message)


def _second_node_cannot_load(rank: int, world: int) -> list[tuple[list[str], int]]:
    """The steps of the servers and the weight version on this rank: after a failed, and after a good update."""
    sizes = {"weight": 8}
    servers = ModelServers(sizes, tp_size=2)  # rank 0 calls the loaders of both nodes
    coordinator = RankCoordinator.connect(rank, world, broadcast_function(mesh_of(world)), False, 60.0)
    updater = staged_updater("shared_memory", servers, sizes, coordinator, nnodes=2)
    weights = {"weight": torch.full((8,), 3.0)}
    servers.models[1].is_broken = True
    kind, message = raised(lambda: push(updater, weights))
    assert (kind, "the model is broken" in message) == ("TornWeightsError", True), message
    found = [(list(servers.steps), updater.weight_version)]
    servers.models[1].is_broken = False
    assert push(updater, weights).weight_version == 1
    found.append((servers.steps, updater.weight_version))
    coordinator.close()
    return found


def _interrupted_before_the_version_is_published(rank: int, world: int) -> tuple[str, list[str]]:
    """The error of an update on this rank, and the steps of the servers afterwards."""
    sizes = {"weight": 8}
    servers = ModelServers(sizes, tp_size=2)
    coordinator = RankCoordinator.connect(rank, world, broadcast_function(mesh_of(world)), False, 60.0)
    updater = staged_updater("shared_memory", servers, sizes, coordinator, nnodes=2)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(servers, "published", interrupt)
        with pytest.raises((KeyboardInterrupt, TornWeightsError)) as caught:
            push(updater, {"weight": torch.ones(8)})
    assert updater.find_torn() is not None
    push(updater, {"weight": torch.ones(8)})
    coordinator.close()
    return caught.typename, servers.steps


def test_generation_continues_when_all_nodes_have_verified_the_update(two_ranks: Ranks) -> None:
    """Otherwise the server would generate with the new weights of one node and the old weights of the other."""
    first, second = two_ranks.run(_second_node_cannot_load)
    failed = ["pause", "begin", "end"]
    assert first == [(failed, 0), ([*failed, *failed, "published", "resume"], 1)]
    assert second == [([], 0), ([], 1)], "only rank 0 calls the servers"


def test_an_interrupt_before_the_version_is_published_leaves_torn_weights_on_all_nodes(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(_interrupted_before_the_version_is_published)
    assert first == ("KeyboardInterrupt", [*["pause", "begin", "end"] * 2, "published", "resume"])
    assert second == ("TornWeightsError", [])


def _updater(rank: int, world: int, manifest: Manifest = MANIFEST) -> StagedUpdater:
    """The updater of one of the trainer ranks. It has no server."""
    layout, all_ranks = plan_arena(manifest.tensors), frozenset(range(world))
    coordinator = RankCoordinator.connect(rank, world, broadcast_function(mesh_of(world)), False, 60.0)
    ranks = EngineRanks(coordinator, compute_placement(rank, world, 1, {}), all_ranks, None, 60.0)
    return StagedUpdater(ranks, manifest, 0, layout, Arena.create(layout), all_ranks, None, XXH3)


def _update(updater: StagedUpdater, tensors: Any, load_format: str | None = None) -> tuple[str, str]:
    """Type and message of the error of an update that cannot succeed, because a rank makes a mistake."""
    options = UpdateOptions(None, verify=True, check_finite=True, pause_mode=PauseMode.RETRACT, flush_cache=True)
    return raised(lambda: updater.update(tensors, load_format, options))


def _gather_lora(updater: StagedUpdater, tensors: Any) -> tuple[tuple[str, str], dict[str, list[float]]]:
    """Type and message of the error of `VerlEngine.load_lora_adapter` before servers are involved, and the tensors."""
    gathered: dict[str, torch.Tensor] = {}

    def gather() -> None:
        call_id = updater.coordinator.next_call_id("load_lora_adapter")
        whole, error = updater.gather_on_cpu(call_id, tensors)
        updater.coordinator.agree(call_id, lambda _: None, error=error, action_timeout_s=1.0)
        gathered.update(whole)

    try:
        gather()
    except VerlServerError as error:
        return (type(error).__name__, error.message), {}
    return ("", ""), {name: tensor.tolist() for name, tensor in gathered.items()}


def _failing_disk(pending: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The first tensor, then an error that is not of this library."""
    yield from list(pending.items())[:1]
    raise OSError("the disk is gone")


def _a_rank_leaves_the_collectives(rank: int, world: int) -> list[tuple[str, str]]:
    """Errors of a rank that stops gathering: its iterator fails, or it makes another mistake than rank 0."""
    from torch.distributed.tensor import DTensor, Partial

    errors = []
    updater = _updater(rank, world)
    for attempt in ("iterator", "load_format", "lora"):
        group: Any = dist.new_group(timeout=timedelta(seconds=GROUP_TIMEOUT_S))
        mesh = DeviceMesh.from_group(group, "cpu")
        pending = {name: DTensor.from_local(torch.ones(4), mesh, [Partial()]) for name in NAMES}
        mine = pending.items() if rank == 0 else _failing_disk(pending)
        if attempt == "iterator":
            errors.append(_update(updater, mine))
        elif attempt == "load_format":
            errors.append(_update(updater, pending, "direct" if rank == 1 else None))
        else:
            errors.append(_gather_lora(updater, mine)[0])
    updater.coordinator.close()
    updater.close()
    return errors


def test_a_rank_that_leaves_the_collectives_is_an_error_on_all_ranks_at_once(two_ranks: Ranks) -> None:
    """The other rank does not wait for the deadline of the process group, whose error does not name the cause."""
    first, second = two_ranks.run(_a_rank_leaves_the_collectives)
    assert first == second
    disk = ("PeerError", "reading named_tensors failed on rank 1: OSError: the disk is gone")
    assert (first[0], first[2]) == (disk, disk)
    assert first[1][0] == "BadInputError"
    assert "load_format 'direct'" in first[1][1]


Failure = tuple[str, tuple[str, str], float]
"""Name of a failure, the type and the message of the error, and how many seconds it took."""


def _engines_on_one_mesh(rank: int, world: int, folder: str, transport: str) -> list[list[Failure]]:
    """Each rank has an engine of its own, and the ranks share an FSDP2 mesh: what happens to one reaches the other.

    Returns the failures of both ranks.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp", "tp"))
    model = reference_model(folder)
    found: list[Failure] = []

    def start() -> VerlEngine:
        return VerlEngine(
            mesh["tp"], model_path=folder, tp_size=1, dtype="float32", max_total_tokens=4096,
            weights=WeightsConfig(transport=transport), timeouts=Timeouts(weights_s=60.0),
        )  # fmt: skip

    def shards() -> dict[str, Any]:
        return {name: distribute_tensor(part, mesh["dp"], [Shard(0)]) for name, part in model.state_dict().items()}

    def fail(name: str, push: Callable[[dict[str, Any]], Any]) -> None:
        """A push that fails on rank 0 only."""
        change_weights(model, len(found))
        tensors = shards()
        dist.barrier()
        started = time.monotonic()
        found.append((name, raised(lambda: push(tensors)), time.monotonic() - started))

    def succeed() -> None:
        """The next pushes, of a dict and of a generator, load the weights of this step on both ranks."""
        change_weights(model, 100 + len(found))
        for tensors in (shards(), (item for item in shards().items())):
            engine.update_weights_from_tensor(tensors)
        assert_equals_reference(engine, model)

    def failing(tensors: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        for number, item in enumerate(tensors.items()):
            if rank == 0 and number == 5:
                raise OSError("the disk is gone")
            yield item

    engine = start()
    try:
        succeed()
        fail("refused", lambda all: engine.update_weights_from_tensor(all, "direct" if rank == 0 else None))
        succeed()
        more = {"no.such.weight": torch.zeros(1)} if rank == 0 else {}
        fail("name", lambda all: engine.update_weights_from_tensor(all | more))
        succeed()
        fail("step", lambda all: engine.update_weights_from_tensor(all, weight_version=50 + rank))
        fail("generator", lambda all: engine.update_weights_from_tensor(failing(all)))
        succeed()
        if rank == 0:
            engine.release_memory_occupation(["weights"])
        fail("released", lambda all: engine.update_weights_from_tensor(all))
        if rank == 0:
            engine.resume_memory_occupation(["weights"])
        succeed()
        if rank == 0:
            process = adapter_of(engine).process
            assert process is not None
            os.kill(process.pids.main, signal.SIGKILL)
            # Once the ranks have agreed, a rank that loses its server stays in the collective: the other one succeeds.
            wait_until(lambda: process.exit is not None, 10.0, "the end of the server is not noticed")
        dist.barrier()
        fail("killed", lambda all: engine.update_weights_from_tensor(all))
        if rank == 0:
            engine.shutdown()
        for _ in range(2):  # rank 0 makes no updates meanwhile
            fail("without", lambda all: engine.update_weights_from_tensor(all) if rank == 1 else None)
        if rank == 0:
            engine = start()
        dist.barrier()
        succeed()
        everybody: list[Any] = [[], []]
        dist.all_gather_object(everybody, found)
        tensors = shards()
        if rank == 1:  # rank 0 has the store of the trainer
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        error = raised(lambda: engine.update_weights_from_tensor(tensors))
        everybody.append([("died", error, time.monotonic() - started)])
    finally:
        engine.shutdown()
    return everybody


@pytest.mark.parametrize("transport", ["shared_memory", "buckets"])
def test_engines_on_one_mesh(tiny: Callable[..., Path], transport: str) -> None:
    """No rank is left alone in a collective, and shards of two steps are not mixed.

    It takes longer than 8 s, because three servers start.
    """
    with trainer_ranks(2) as ranks:
        folder = str(tiny("qwen2", weight_std=0.1))  # small weights keep float32 within 1e-5 of float64 on every CPU
        found, _ = ranks.run(_engines_on_one_mesh, folder, transport, dying=1)
    first, second, [(_, dead, after_s)] = found
    assert dead[0] == "PeerError"
    assert "its process has ended" in dead[1]
    assert after_s < 5.0
    words = {
        "refused": "load_format 'direct' is not supported",
        "name": "no.such.weight",
        "step": "(version 51), but rank 0",
        "generator": "the disk is gone",
        "released": "the memory of the server's weights is released",
        "killed": "ServerDiedError",
        "without": "ServerDiedError",
    }
    assert [name for name, _, _ in second] == [*words, "without"]
    for (name, own, _), (_, other, seconds) in zip(first, second, strict=True):
        assert other[0] in ("PeerError", "TornWeightsError"), (name, own, other)
        assert words[name] in other[1], (name, other)
        assert seconds < 5.0, (name, seconds)


def _tensors_end_early(rank: int, world: int) -> list[tuple[tuple[str, str], float]]:
    """One rank has fewer tensors than the other one, which gathers the next."""
    from torch.distributed.tensor import DTensor, Partial

    found = []
    for short, length, as_dict in ((1, 2, False), (0, 2, False), (1, 0, False), (1, 3, True)):
        updater = _updater(rank, world)
        group: Any = dist.new_group(timeout=timedelta(seconds=GROUP_TIMEOUT_S))
        mesh = DeviceMesh.from_group(group, "cpu")
        pending = {name: DTensor.from_local(torch.ones(4), mesh, [Partial()]) for name in NAMES}
        items = list(pending.items())[: length if rank == short else None]
        started = time.monotonic()
        error = _update(updater, dict(items) if as_dict else (item for item in items))
        found.append((error, time.monotonic() - started))
        dist.barrier()
        updater.coordinator.close()
        updater.close()
    return found


def test_a_rank_whose_tensors_end_early_is_an_error_on_all_ranks_within_seconds(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(_tensors_end_early)
    assert [error for error, _ in first] == [error for error, _ in second]
    assert all(seconds < 4.0 for _, seconds in first + second), (first, second)
    for (kind, message), short, length in zip((error for error, _ in first), (1, 0, 1, 1), (2, 2, 0, 3), strict=True):
        assert kind == "PeerError"
        cause = (
            f"rank {1 - short} gathers 't{length}' with rank {short}, but named_tensors of rank {short} ended before"
        )
        assert cause in message


SIZES = {"a": 8, "b": 4}


def _engine_of_one_rank(rank: int) -> StagedUpdater:
    """The updater of an engine of this rank alone, which has a model in this process."""
    updater = staged_updater("shared_memory", ModelServers(SIZES), SIZES)
    updater.ranks = dataclasses.replace(updater.ranks, global_ranks=frozenset({rank}))
    updater._writer_ranks = frozenset({rank})
    shared_meshes.engine_started(updater, updater.ranks.global_ranks)
    return updater


def _engines_that_end_and_start(rank: int, world: int) -> list[bool]:
    """Whether the other ranks know of an end of this rank's last engine."""
    first, second, third, ranks = object(), object(), object(), frozenset({rank})
    error, known = PeerError("ended"), list[bool]()

    def note() -> None:
        known.append(shared_meshes._end_of_engine(rank) is not None)

    shared_meshes.engine_started(first, ranks)
    shared_meshes.engine_ended(second, ranks, error)  # it failed while it started
    note()
    shared_meshes.engine_ended(first, ranks, error)
    note()
    for turn in range(100):  # a lost engine ends in another thread while the next one starts
        shared_meshes.engine_started(second, ranks)
        thread = threading.Thread(target=shared_meshes.engine_ended, args=(second, ranks, error))
        thread.start()
        time.sleep(turn * 1e-5)
        shared_meshes.engine_started(third, ranks)
        thread.join()
        note()
        shared_meshes.engine_ended(second, ranks, error)
        note()
        shared_meshes.engine_ended(third, ranks, error)
    return known


def test_an_engine_that_ends_late_does_not_end_the_next_one_of_its_rank(two_ranks: Ranks) -> None:
    for known in two_ranks.run(_engines_that_end_and_start):
        assert known == [False, True] + [False] * 200


def _tensors_of_step(mesh: DeviceMesh | None, step: int) -> dict[str, Any]:
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = {name: torch.full((size,), float(step)) for name, size in SIZES.items()}
    return whole if mesh is None else {n: distribute_tensor(t, mesh, [Shard(0)]) for n, t in whole.items()}


def _plain_updates_fail_on_one_rank(rank: int, world: int) -> list[tuple[str, tuple[str, str]]]:
    """Updates without a shared mesh that fail on one rank, and after each one an update with a shared mesh."""
    mesh, updater = mesh_of(world), _engine_of_one_rank(rank)
    servers: Any = updater.ranks.servers
    found: list[tuple[str, tuple[str, str]]] = []
    step = 0

    def fail(name: str, tensors: Callable[[dict[str, Any]], Any], load_format: str | None, mesh: Any = None) -> None:
        nonlocal step
        step += 1
        options = UpdateOptions(None, True, True, PauseMode.RETRACT, True)
        all_tensors = _tensors_of_step(mesh, step)
        found.append((name, raised(lambda: updater.update(tensors(all_tensors), load_format, options))))

    def succeed() -> None:
        nonlocal step
        for as_dict in (True, False):
            step += 1
            tensors = _tensors_of_step(mesh, step)
            push(updater, tensors if as_dict else (item for item in tensors.items()))  # type: ignore[arg-type]
            for tensor in servers.models[0].tensors.values():
                assert tensor.tolist() == [float(step)] * len(tensor), "shards of two steps are mixed"

    def failing(tensors: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        for number, item in enumerate(tensors.items()):
            if rank == 1 and number == 1:
                time.sleep(1.0)  # the other rank is in its next update already
                raise OSError("the disk is gone")
            yield item

    def generator(tensors: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        return (item for item in tensors.items())

    wrong = "direct" if rank == 0 else None
    succeed()
    fail("first", generator, wrong)
    succeed()
    fail("dict", dict, wrong)
    succeed()
    fail("late", failing, None)
    succeed()
    for name in ("one", "two"):
        fail(name, generator, wrong)
    fail("none", generator, None)
    succeed()
    fail("shared", generator, wrong, mesh)
    succeed()
    updater.close()
    return found


def test_an_update_without_a_shared_mesh_may_fail_on_one_rank(two_ranks: Ranks) -> None:
    """The next update with a shared mesh pairs with that of the same step, and the ranks raise no error for it."""
    first, second = two_ranks.run(_plain_updates_fail_on_one_rank)
    refused, none = "BadInputError", "nothing"
    assert [(name, kind) for name, (kind, _) in first] == [
        ("first", refused), ("dict", refused), ("late", none), ("one", refused), ("two", refused), ("none", none),
        ("shared", refused),
    ]  # fmt: skip
    assert [(name, kind) for name, (kind, _) in second] == [
        ("first", none), ("dict", none), ("late", "PeerError"), ("one", none), ("two", none), ("none", none),
        ("shared", "PeerError"),
    ]  # fmt: skip
    assert "load_format 'direct' is not supported" in second[-1][1][1]


class _Bar:
    """A progress bar around a generator: it has a length, and can be read once."""

    def __init__(self, items: Iterator[tuple[str, Any]], total: int) -> None:
        self._items, self._total = items, total

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return self._items

    def __len__(self) -> int:
        return self._total


class _InterruptedDict(dict[str, Any]):
    def items(self) -> Any:
        raise KeyboardInterrupt


def _tensors_that_are_read_once(rank: int, world: int) -> float:
    mesh, updater = mesh_of(world), _engine_of_one_rank(rank)
    servers: Any = updater.ranks.servers
    tensors = _tensors_of_step(mesh, 1)
    with pytest.raises(KeyboardInterrupt if rank == 0 else PeerError):
        push(updater, _InterruptedDict(tensors) if rank == 0 else tensors)
    pushed: Any = _Bar(iter(_tensors_of_step(mesh, 2).items()), len(SIZES))
    push(updater, pushed)
    updater.close()
    return float(servers.models[0].tensors["a"][0])


def test_tensors_with_a_length_that_can_be_read_once(two_ranks: Ranks) -> None:
    """And an interrupt while the meshes are found ends this update on all ranks, and no other one."""
    assert two_ranks.run(_tensors_that_are_read_once) == [2.0, 2.0]


def _ranks_make_different_updates(rank: int, world: int) -> list[list[str]]:
    """After each thing that only one rank does, an update with a shared mesh, which may fail, and two that succeed."""
    from verl_server.errors import ShutDownError

    mesh, updater = mesh_of(world), _engine_of_one_rank(rank)
    servers: Any = updater.ranks.servers
    found: list[list[str]] = []
    step = 0

    def update(mesh: DeviceMesh | None, fails: bool = False, as_dict: bool = False) -> str:
        nonlocal step
        step += 1
        tensors = _tensors_of_step(mesh, step)
        options = UpdateOptions(None, True, True, PauseMode.RETRACT, True)
        pushed: Any = tensors if as_dict else (item for item in tensors.items())
        return raised(lambda: updater.update(pushed, "direct" if fails else None, options))[0]

    def then_together(fails: bool) -> None:
        nonlocal step
        numbers: list[Any] = [None] * world
        dist.all_gather_object(numbers, step)
        step = max(numbers)
        kinds = []
        for number in range(3):
            kinds.append(update(mesh, fails=fails and rank == 0 and number == 0))
            if number:
                for tensor in servers.models[0].tensors.values():
                    assert tensor.tolist() == [float(step)] * len(tensor), "shards of two steps are mixed"
        found.append(kinds)

    update(None, as_dict=True)
    if rank == 1:
        update(None, as_dict=True)  # repeated on one rank
    then_together(fails=True)
    update(None, as_dict=True)
    if rank == 0:  # a new engine
        shared_meshes.engine_ended(updater, updater.ranks.global_ranks, ShutDownError("the engine was shut down"))
        updater.close()
        updater = _engine_of_one_rank(rank)
        servers = updater.ranks.servers
    then_together(fails=True)
    update(None, fails=rank == 0)
    update(None, fails=True)
    then_together(fails=False)
    for _ in range(rank):
        update(None)  # from a generator, on one rank
    then_together(fails=False)
    update(None, fails=rank == 1)
    if rank == 1:
        update(None)  # repeated from a generator, on one rank
    then_together(fails=False)
    updater.close()
    return found


def test_ranks_that_make_different_updates_never_mix_two_steps(two_ranks: Ranks) -> None:
    """All ranks refuse the same update, or none."""
    first, second = two_ranks.run(_ranks_make_different_updates)
    good, refused = ["nothing"] * 3, ["PeerError", "nothing", "nothing"]
    failed = ["BadInputError", "nothing", "nothing"]
    assert first == [failed, failed, good, refused, refused]
    assert second == [refused, refused, good, refused, refused]


def _the_process_with_the_store_is_stopped(rank: int, world: int) -> tuple[tuple[str, str], float]:
    """Rank 0, which has the store, is stopped while rank 1 waits for it, and continues when rank 1 has given up."""
    mesh, updater = mesh_of(world), _engine_of_one_rank(rank)
    push(updater, _tensors_of_step(mesh, 1))
    pids: list[Any] = [None] * world
    dist.all_gather_object(pids, os.getpid())
    tensors = _tensors_of_step(mesh, 2)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    started = time.monotonic()
    error = raised(lambda: push(updater, tensors))
    if rank == 1:
        os.kill(pids[0], signal.SIGCONT)
    found = error, time.monotonic() - started
    push(updater, _tensors_of_step(mesh, 3))
    updater.close()
    return found


def test_the_process_with_the_store_is_stopped(two_ranks: Ranks) -> None:
    """It takes 10 s, the deadline of an operation of the store. Then all ranks have an error, and go on together."""
    (first, _), (second, seconds) = two_ranks.run(_the_process_with_the_store_is_stopped)
    assert (first[0], second[0]) == ("PeerError", "PeerError"), (first, second)
    assert "trainer rank 1" in first[1]
    assert "is stopped or cannot be reached: the trainer's machine did not answer within 10 s" in second[1]
    assert seconds < 15.0


def _a_rank_is_killed_in_a_collective(rank: int, world: int) -> tuple[tuple[str, str], float]:
    from torch.distributed.tensor import DTensor

    mesh, updater = mesh_of(world), _engine_of_one_rank(rank)
    tensors = _tensors_of_step(mesh, 1)
    if rank == world - 1:  # not the rank that has the store
        DTensor.full_tensor = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, assignment]
    started = time.monotonic()
    error = raised(lambda: push(updater, tensors))
    return error, time.monotonic() - started


def test_a_rank_that_is_killed_in_a_collective_is_named() -> None:
    with trainer_ranks(3) as ranks:
        *others, _ = ranks.run(_a_rank_is_killed_in_a_collective, dying=1)
    for (kind, message), seconds in others:
        assert kind == "PeerError"
        assert "trainer rank 2" in message
        assert "its process has ended" in message
        assert seconds < 5.0


def _failing_with(error: BaseException) -> Iterator[tuple[str, Any]]:
    yield NAMES[0], torch.ones(4)
    raise error


def _a_generator_fails(rank: int, world: int) -> list[tuple[list[str], float]]:
    """Types and texts of the errors of a generator of one rank, and their causes; and the seconds until then."""
    found = []
    for failing, error in ((1, OSError("the disk is gone")), (1, KeyboardInterrupt()), (0, KeyboardInterrupt())):
        updater = _updater(rank, world)
        tensors = _failing_with(error) if rank == failing else {name: torch.ones(4) for name in NAMES}.items()
        started = time.monotonic()
        try:
            updater.update(tensors, None, UpdateOptions(None, True, True, PauseMode.RETRACT, True))
        except BaseException as raised_error:  # noqa: BLE001 - what the caller sees
            caught: BaseException | None = raised_error
        texts = []
        while caught is not None:
            texts.append(f"{type(caught).__name__}: {caught}")
            caught = caught.__cause__
        found.append((texts, time.monotonic() - started))
        dist.barrier()
        updater.coordinator.close()
        updater.close()
    return found


def test_the_exception_of_a_generator_is_raised_on_all_ranks_at_once(two_ranks: Ranks) -> None:
    """Also KeyboardInterrupt. The rank itself gets its own exception, the other one its words."""
    first, second = two_ranks.run(_a_generator_fails)
    assert all(seconds < 10.0 for _, seconds in first + second), (first, second)
    disk = "PeerError: reading named_tensors failed on rank 1: OSError: the disk is gone"
    interrupted = "PeerError: reading named_tensors failed on rank {}: KeyboardInterrupt: "
    assert [texts[0] for texts, _ in first] == [disk, interrupted.format(1), "KeyboardInterrupt: "]
    assert [texts[0] for texts, _ in second] == [disk, "KeyboardInterrupt: ", interrupted.format(0)]
    assert second[0][0] == [disk, "OSError: the disk is gone"]


def _update_in_an_update(rank: int, world: int) -> tuple[str, str]:
    updater = _updater(rank, world)

    def nested() -> Iterator[tuple[str, Any]]:
        yield NAMES[0], torch.ones(4)
        updater.update([], None, UpdateOptions(None, True, True, PauseMode.RETRACT, True))

    found = _update(updater, nested())
    updater.coordinator.close()
    updater.close()
    return found


def test_an_update_in_the_generator_of_an_update_is_refused_by_name(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(_update_in_an_update)
    assert first == second
    assert (first[0], "generator of an update cannot start an update" in first[1]) == ("BadInputError", True), first


def _ranks_pass_other_shards(rank: int, world: int) -> list[Any]:
    """Rank 1 passes the shards of a LoRA adapter in another order, none of them, and those of rank 0."""
    from torch.distributed.tensor import DTensor, Shard

    updater = _updater(rank, world)
    group: Any = dist.new_group(timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    mesh = DeviceMesh.from_group(group, "cpu")
    shards = {
        name: DTensor.from_local(torch.full((1,), float(index)), mesh, [Shard(0)]) for index, name in enumerate(NAMES)
    }
    results = []
    for mine in (dict(reversed(shards.items())), {}, shards):
        results.append(_gather_lora(updater, shards if rank == 0 else mine))
    updater.coordinator.close()
    updater.close()
    return results


def test_ranks_with_other_shards_of_a_lora_adapter_gather_nothing(two_ranks: Ranks) -> None:
    """Tensors of other names would be mixed without an error, or a rank would wait for the other one."""
    first, second = two_ranks.run(_ranks_pass_other_shards)
    assert first == second
    (reversed_error, _), (missing_error, _), (no_error, gathered) = first
    cure = "of rank 0; all ranks must push the same names in the same order"
    assert reversed_error == ("BadInputError", f"rank 1 pushed 4 DTensors that differ from the 4 {cure}")
    assert missing_error == ("BadInputError", f"rank 1 pushed 0 DTensors that differ from the 4 {cure}")
    assert no_error == ("", "")
    assert gathered == {name: [float(index)] * 2 for index, name in enumerate(NAMES)}


def _a_rank_that_gathers_nothing_makes_a_mistake(rank: int, world: int) -> tuple[tuple[str, str], int]:
    """Returns the error, and the number of tensors that were read. Rank 0 gathers over a mesh without rank 1."""
    from torch.distributed.tensor import DTensor, Partial

    updater = _updater(rank, world)
    group: Any = dist.new_group([0])
    mesh = DeviceMesh.from_group(group, "cpu") if rank == 0 else None
    read = []

    def tensors() -> Iterator[tuple[str, Any]]:
        for name in NAMES:
            read.append(name)
            tensor = torch.full((4,), torch.nan if rank == 1 else 1.0)
            time.sleep(0.2 * (rank == 0))  # rank 1 arrives first
            yield name, tensor if mesh is None else DTensor.from_local(tensor, mesh, [Partial()])

    error = _update(updater, tensors())
    updater.coordinator.close()
    updater.close()
    return error, len(read)


def test_a_mistake_on_a_rank_that_gathers_nothing_does_not_stop_the_collectives_of_others(two_ranks: Ranks) -> None:
    """A rank that stops in the middle would leave the other ranks of its mesh alone in the collective operation."""
    (first, read), (second, _) = two_ranks.run(_a_rank_that_gathers_nothing_makes_a_mistake)
    assert first == second
    assert (first[0], "'t0' has values that are not finite" in first[1]) == ("WeightManifestError", True)
    assert read == len(NAMES)


def _a_mistake_before_a_tensor_that_is_left_out(rank: int, world: int, folder: str) -> tuple[str, str]:
    """Rank 1 has a bad tensor. A later tensor becomes tensors of other names, all of which are left out."""
    from torch.distributed.tensor import DTensor, Partial

    checkpoint_names = read_manifest({"model_path": folder}).checkpoint_names
    assert checkpoint_names is not None
    fused_name, fused = "model.layers.0.mlp.experts.gate_up_proj", torch.ones(4, 128, 64)
    ignored = frozenset(checkpoint_names.specs(fused_name, TensorSpec.of(fused)))
    assert fused_name not in ignored
    updater = _updater(rank, world, Manifest(MANIFEST.tensors, ignored=ignored, checkpoint_names=checkpoint_names))
    group: Any = dist.new_group(timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    mesh = DeviceMesh.from_group(group, "cpu")
    tensors = {
        NAMES[0]: torch.full((4,), torch.nan if rank == 1 else 1.0), fused_name: fused, NAMES[1]: torch.ones(4),
    }  # fmt: skip
    error = _update(updater, ((name, DTensor.from_local(t, mesh, [Partial()])) for name, t in tensors.items()))
    updater.coordinator.close()
    updater.close()
    return error


def test_no_rank_gathers_a_tensor_that_is_left_out(two_ranks: Ranks, tiny: Callable[..., Path]) -> None:
    """Also the rank that has made a mistake. Otherwise the ranks would gather different tensors with each other."""
    first, second = two_ranks.run(_a_mistake_before_a_tensor_that_is_left_out, str(tiny("qwen3_moe")))
    assert first == second
    assert (first[0], "'t0' has values that are not finite" in first[1]) == ("WeightManifestError", True), first


def _generate_with_servers_of_rank_0(rank: int, world: int, folder: str, server: RemoteServer) -> list[int] | None:
    servers = [server] if rank == 0 else []
    timeouts = Timeouts(start_s=20.0)
    with VerlEngine(mesh_of(world), servers=servers, model_path=folder, dtype="float32", timeouts=timeouts) as engine:
        reply = engine.generate(input_ids=[1, 2], sampling_params={"max_new_tokens": 1, "temperature": 0.0})
        return None if reply is None else reply["output_ids"]


def test_the_first_rank_alone_may_know_the_servers(
    two_ranks: Ranks, adapter: HttpServerEngineAdapter, tiny: Callable[..., Path]
) -> None:
    """The other rank takes part in every agreement of the start, although it would start a server by itself."""
    expected = adapter.generate(input_ids=[1, 2], sampling_params={"max_new_tokens": 1, "temperature": 0.0})
    found = two_ranks.run(_generate_with_servers_of_rank_0, str(tiny("qwen3")), remote_server_of(adapter))
    assert found[0] == expected["output_ids"]
