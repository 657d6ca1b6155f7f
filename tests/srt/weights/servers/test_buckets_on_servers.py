"""The tests of `test_buckets.py` that need servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    GREEDY,
    PROMPTS,
    Ranks,
    assert_equals_reference,
    change_weights,
    mesh_of,
    raised,
    reference_model,
    remote_server_of,
)
from test_ranks import shards_of_every_kind
from torch.distributed.device_mesh import DeviceMesh

from verl_server import HttpServerEngineAdapter, RemoteServer, Timeouts, VerlEngine, WeightsConfig
from verl_server.config import AdapterConfig, PauseMode
from verl_server.engine.servers import connect_servers
from verl_server.errors import BadInputError, TornWeightsError, UnsupportedError, VerlServerError, WeightManifestError
from verl_server.ranks.coordinator import RankCoordinator
from verl_server.ranks.placement import compute_placement
from verl_server.weights.buckets import Buckets, plan_buckets
from verl_server.weights.manifest import read_manifest
from verl_server.weights.update.options import UpdateOptions
from verl_server.weights.update.streamed import RankBuckets, StreamedUpdater
from verl_server.weights.update.updater import EngineRanks

STAGING = 3 << 17
"""Bytes of staging memory: less than half of the tiny model in float32, more than twice its largest tensor."""


@pytest.fixture(scope="module")
def server(tiny: Callable[..., Path]) -> Iterator[Any]:
    with HttpServerEngineAdapter(model_path=str(tiny("qwen2")), dtype="float32", max_total_tokens=8192) as adapter:
        yield adapter


def engine_on(server: RemoteServer, mesh: Any, folder: str, **arguments: Any) -> VerlEngine:
    config = WeightsConfig(max_staging_bytes=STAGING)
    return VerlEngine(mesh, servers=[server], model_path=folder, dtype="float32", weights=config, **arguments)


def test_staging_smaller_than_the_model(server: Any, one_rank: DeviceMesh, tiny: Callable[..., Path]) -> None:
    """The transport is chosen automatically. A bad list is refused completely; a bad generator leaves torn weights."""
    folder = str(tiny("qwen2"))
    model = reference_model(folder)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight")
    with engine_on(remote_server_of(server), one_rank, folder) as engine:
        result = engine.update_weights_from_tensor(weights.items())
        assert (result.transport, result.num_missing) == ("buckets", 0)
        assert result.staging_bytes <= STAGING < result.num_bytes
        old = assert_equals_reference(engine, model)

        wrong = {**weights, "model.norm.weight": torch.zeros(3)}
        with pytest.raises(WeightManifestError, match=r"model\.norm\.weight"):
            engine.update_weights_from_tensor(wrong.items())
        poisoned = {**weights, "model.norm.weight": weights["model.norm.weight"] * float("nan")}
        with pytest.raises(WeightManifestError, match="not finite"):
            engine.update_weights_from_tensor(list(poisoned.items()), check_finite=True)
        with pytest.raises(BadInputError, match="nothing to push"):
            engine.update_weights_from_tensor(iter([]))
        with pytest.raises(BadInputError, match="weight_version"):
            engine.update_weights_from_tensor(weights, weight_version=engine.weight_version)
        with pytest.raises(UnsupportedError, match="no memory that holds the whole model"):
            engine.staging_tensors()
        assert assert_equals_reference(engine, model) == old

        for bad, finite in ((wrong, False), (poisoned, True)):
            with pytest.raises(TornWeightsError, match=r"model\.norm\.weight"):
                engine.update_weights_from_tensor((pair for pair in bad.items()), check_finite=finite)
            with pytest.raises(TornWeightsError):
                engine.generate(input_ids=[1])
            with pytest.raises(TornWeightsError, match="lacks"):
                engine.update_weights_from_tensor([("model.norm.weight", weights["model.norm.weight"])])
            with pytest.raises(TornWeightsError, match="lacks"):
                engine.update_weights_from_tensor(iter([("model.norm.weight", weights["model.norm.weight"])]))
            change_weights(model, seed=3)
            engine.update_weights_from_tensor(pair for pair in model.state_dict().items())
            assert_equals_reference(engine, model)

        part = {"model.norm.weight": weights["model.norm.weight"]}
        assert engine.update_weights_from_tensor(part.items(), verify=False).num_tensors == 1
        model.load_state_dict(part, strict=False)
        assert_equals_reference(engine, model)


def test_a_server_that_cannot_open_the_buckets_keeps_its_weights(
    server: Any, one_rank: DeviceMesh, tiny: Callable[..., Path]
) -> None:
    """The server has no GPU, so it opens the host memory of `cuda_ipc`, but not the buckets. It says so at once."""
    folder = str(tiny("qwen2"))
    model = reference_model(folder)
    with engine_on(remote_server_of(server), one_rank, folder) as engine:
        engine.update_weights_from_tensor(model.state_dict().items())
        old = assert_equals_reference(engine, model)
        manifest = read_manifest({"model_path": folder, "dtype": "float32"})
        buckets = Buckets.create(plan_buckets(manifest.tensors, None, in_host_memory=True))
        description = {"location": buckets.location, "ipc_handle": "", "device_uuid": "GPU-a"}
        layout = replace(buckets.layout, in_host_memory=False)
        servers = connect_servers([remote_server_of(server)], AdapterConfig(), weight_version=1)
        ranks = EngineRanks(
            RankCoordinator(0, 1, {}, 20.0), compute_placement(0, 1, 1, {}), frozenset({0}), servers, 20.0
        )
        buffers = RankBuckets("cuda_ipc", layout, [description], 1, 20.0, buckets, is_lead_writer=True)
        updater = StreamedUpdater(ranks, manifest, servers.weight_version, buffers, frozenset({0}))
        change_weights(model, seed=9)
        options = UpdateOptions(None, True, False, PauseMode.RETRACT, True)
        message = r"cannot open the staging memory .* GPU-a, which this server does"
        with pytest.raises(UnsupportedError, match=message):
            updater.update(model.state_dict().items(), None, options)
        assert updater.find_torn() is None
        updater.close()
        servers.shutdown()
        reply = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
        assert [one["output_ids"] for one in reply] == old
        assert {one["meta_info"]["weight_version"] for one in reply} == {engine.weight_version}
        engine.update_weights_from_tensor(model.state_dict().items())
        assert_equals_reference(engine, model)


def test_a_limit_below_the_largest_tensor_is_refused(
    server: Any, one_rank: DeviceMesh, tiny: Callable[..., Path]
) -> None:
    with pytest.raises(BadInputError, match="the model's largest tensor has"):
        VerlEngine(
            one_rank,
            servers=[remote_server_of(server)],
            model_path=str(tiny("qwen2")),
            weights=WeightsConfig(max_staging_bytes=4096),
        )


def _two_ranks(rank: int, world: int, folder: str, server: RemoteServer) -> list[str]:
    model = reference_model(folder)
    weights = model.state_dict()
    messages = []
    with engine_on(server, mesh_of(world), folder) as engine:
        shards_of_every_kind(engine, folder)
        pairs = list(weights.items())

        def attempt(mine: Any) -> None:
            try:
                engine.update_weights_from_tensor(mine)
                messages.append("")
            except VerlServerError as error:
                messages.append(f"{type(error).__name__}: {error.message}")

        def failing() -> Iterator[tuple[str, torch.Tensor]]:
            yield from pairs[:7]
            raise KeyError("no more")

        attempt(pairs if rank == 0 else pairs[:5])
        attempt(iter(pairs if rank == 0 else pairs[:5]))
        attempt(iter(pairs if rank == 1 else pairs[:5]))
        attempt(iter(pairs if rank == 0 else [*pairs[1:], pairs[0]]))
        attempt(iter(pairs) if rank == 0 else failing())
        attempt(failing() if rank == 0 else iter(pairs))
        attempt(iter(pairs if rank == 0 else []))
        assert_equals_reference(engine, model)
        attempt(pairs if rank == 0 else [])
        assert_equals_reference(engine, model)
    return messages


def _a_mistake_while_ranks_gather(rank: int, world: int, folder: str, server: RemoteServer) -> tuple[str, str]:
    """A generator has a bad tensor on rank 1, while rank 0 writes gathered tensors into the buckets."""
    from torch.distributed.tensor import DTensor, Partial

    model, mesh = reference_model(folder), mesh_of(world)
    pending = {name: DTensor.from_local(t / 2, mesh, [Partial()]) for name, t in model.state_dict().items()}
    name = sorted(pending)[0]
    nan = DTensor.from_local(torch.full_like(pending[name].to_local(), torch.nan), mesh, [Partial()])
    bad = {name: nan if rank == 1 else pending[name], **{n: t for n, t in pending.items() if n != name}}
    with engine_on(server, mesh, folder, timeouts=Timeouts(weights_s=20.0)) as engine:
        found = raised(lambda: engine.update_weights_from_tensor(iter(bad.items()), check_finite=True))
        engine.update_weights_from_tensor(iter(pending.items()))  # the trainer's process group can be used
        assert_equals_reference(engine, model)
    return found


def test_a_mistake_on_one_rank_while_the_ranks_gather(server: Any, two_ranks: Ranks, tiny: Callable[..., Path]) -> None:
    """Rank 0 does not wait for free buckets while rank 1 waits for rank 0 in a collective operation."""
    first, second = two_ranks.run(_a_mistake_while_ranks_gather, str(tiny("qwen2")), remote_server_of(server))
    assert first == second
    assert (first[0], "not finite" in first[1]) == ("TornWeightsError", True), first


def test_two_ranks_fill_the_buckets_together(server: Any, two_ranks: Ranks, tiny: Callable[..., Path]) -> None:
    """Shards of every kind.

    Every disagreement of the ranks is the same error on both; weights are torn only if unavoidable.
    """
    first, second = two_ranks.run(_two_ranks, str(tiny("qwen2")), remote_server_of(server))
    assert first == second
    assert "BadInputError: rank 1 pushed 5 tensors that differ" in first[0]
    assert "rank 1 pushed 5 tensors that differ" in first[1]
    assert "pushes more tensors than rank 0" in first[2] or "differ from the 5 of rank 0" in first[2]
    assert "tensors that differ" in first[3]
    assert "reading named_tensors failed on rank 1: KeyError: 'no more'" in first[4]
    assert "reading named_tensors failed on rank 0: KeyError: 'no more'" in first[5]
    assert all(message.startswith("TornWeightsError") for message in first[1:6])
    assert first[6:] == ["", ""]
