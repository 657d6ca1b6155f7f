"""Weights through a pair of buckets: staging memory smaller than the model, filled while the server loads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
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
    open_files,
    raised,
    reference_model,
    remote_server_of,
)
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_ranks import shards_of_every_kind
from torch.distributed.device_mesh import DeviceMesh

from verl_server import HttpServerEngineAdapter, RemoteServer, Timeouts, VerlEngine, WeightsConfig
from verl_server.config import AdapterConfig, PauseMode
from verl_server.engine.servers import connect_servers
from verl_server.errors import BadInputError, TornWeightsError, UnsupportedError, VerlServerError, WeightManifestError
from verl_server.ranks.coordinator import RankCoordinator
from verl_server.ranks.placement import compute_placement
from verl_server.types import ServerInfo, TensorSpec
from verl_server.weights import buckets as buckets_module
from verl_server.weights.arena import tensor_bytes
from verl_server.weights.buckets import (
    NUM_BUCKETS,
    BucketReader,
    Buckets,
    BucketWriter,
    ProgressCounters,
    find_device,
    plan_buckets,
    require_own_gpus,
)
from verl_server.weights.device import copies_on
from verl_server.weights.manifest import read_manifest
from verl_server.weights.update.options import UpdateOptions, ValidatedUpdate
from verl_server.weights.update.streamed import OpenedUpdate, RankBuckets, StreamedUpdater
from verl_server.weights.update.updater import EngineRanks

STAGING = 3 << 17
"""Bytes of staging memory: less than half of the tiny model in float32, more than twice its largest tensor."""


def peers_are_alive() -> None:
    """A `require_peers` that never raises."""


def deadline() -> float:
    """A deadline in two seconds."""
    return time.monotonic() + 2.0


# -- the two ends ------------------------------------------------------------------------------------


SPECS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 40), max_size=2).map(tuple), st.sampled_from(["float32", "bfloat16", "int64", "uint8"])
    ),
    min_size=1,
    max_size=20,
)


@settings(max_examples=60, phases=[Phase.explicit, Phase.generate])
@given(SPECS, st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_readers_get_what_writers_wrote_whoever_is_faster(
    given_specs: list[Any], writers: int, readers: int, number: int
) -> None:
    """Every reader gets every tensor, bit by bit. Each writer writes its own part of every tensor."""
    specs = {f"t{i}": TensorSpec(shape, dtype) for i, (shape, dtype) in enumerate(given_specs)}
    generator = torch.Generator().manual_seed(number)
    values = {
        name: torch.randint(0, 100, spec.shape, generator=generator).to(getattr(torch, spec.dtype))
        for name, spec in specs.items()
    }
    layout = plan_buckets(specs, None, in_host_memory=True)
    buckets = Buckets.create(layout)
    other = Buckets.open(buckets.location, layout)

    def write(index: int) -> None:
        writer = BucketWriter(buckets, number, index, index == 0, range(readers), peers_are_alive)
        for name, spec in specs.items():
            rows = writer.reserve(name, spec, deadline()).reshape(-1)[index::writers]
            rows.copy_(values[name].reshape(-1)[index::writers])
        writer.finish()

    def read(index: int) -> list[Any]:
        reader = BucketReader(other, number, index, writers, peers_are_alive, deadline())
        return [(name, tensor.clone()) for name, tensor in reader.tensors()]

    with ThreadPoolExecutor(writers + readers) as pool:
        reading = [pool.submit(read, index) for index in range(readers)]
        writing = [pool.submit(write, index) for index in range(writers)]
        for one in writing:
            one.result()
        for found in [one.result() for one in reading]:
            assert [name for name, _ in found] == list(specs)
            assert all(torch.equal(tensor, values[name]) for name, tensor in found)
    other.close()
    buckets.close()


@given(SPECS, st.integers(1, 100))
def test_staging_keeps_its_limit(given_specs: list[Any], pages: int) -> None:
    specs = {f"t{i}": TensorSpec(shape, dtype) for i, (shape, dtype) in enumerate(given_specs)}
    limit = pages * 4096
    try:
        layout = plan_buckets(specs, limit, in_host_memory=True)
    except BadInputError:
        assert NUM_BUCKETS * max(tensor_bytes(spec) for spec in specs.values()) > limit - NUM_BUCKETS * 4096
    else:
        assert NUM_BUCKETS * layout.bucket_bytes <= limit
        assert layout.bucket_bytes >= max(tensor_bytes(spec) for spec in specs.values())


class WriterThread:
    """A writer in a thread. Every tensor has one value in all elements."""

    def __init__(self, tensors: int = 30, tensors_per_bucket: int = 5) -> None:
        self.specs = {f"t{i}": TensorSpec((1024,), "float32") for i in range(tensors)}
        limit = NUM_BUCKETS * tensors_per_bucket * 4096
        self.buckets = Buckets.create(plan_buckets(self.specs, limit, in_host_memory=True))
        self._thread = threading.Thread(target=self._write)
        self._thread.start()

    def _write(self) -> None:
        writer = BucketWriter(self.buckets, 1, 0, is_lead_writer=True, readers=[0], require_peers=peers_are_alive)
        with contextlib.suppress(VerlServerError):  # the reader of a test may fail
            for i, (name, spec) in enumerate(self.specs.items()):
                writer.reserve(name, spec, deadline()).fill_(i)
            writer.finish()

    def reader(self) -> BucketReader:
        return BucketReader(self.buckets, 1, 0, 1, peers_are_alive, deadline())

    def join(self) -> None:
        self._thread.join(20.0)
        assert not self._thread.is_alive()
        self.buckets.close()


def test_a_reader_that_looks_while_the_writer_finishes_reads_no_bucket_twice() -> None:
    """The writer finishes between the two things that the reader looks at: the total, and the count of the writer."""
    specs = {"t": TensorSpec((1024,), "float32")}
    buckets = Buckets.create(plan_buckets(specs, None, in_host_memory=True))
    writer = BucketWriter(buckets, 1, 0, is_lead_writer=True, readers=[0], require_peers=peers_are_alive)
    reader = BucketReader(buckets, 1, 0, 1, peers_are_alive, deadline())

    class FinishesMeanwhile(ProgressCounters):
        @property
        def num_buckets(self) -> int | None:
            total = super().num_buckets
            if taken and total is None:
                writer.finish()
            return total

    reader._progress = FinishesMeanwhile(buckets._mapping, buckets.layout, 1)
    writer.reserve("t", specs["t"], deadline()).fill_(1)
    writer._publish_bucket()
    taken: list[str] = []
    for name, _ in reader.tensors():
        taken.append(name)
        del _
    buckets.close()
    assert taken == ["t"]


def test_a_model_may_keep_tensors_for_a_while() -> None:
    """Some models keep tensors to fuse them with later ones. Their memory is not overwritten in the meantime."""
    writer_thread = WriterThread()
    kept: list[torch.Tensor] = []
    for number, (_, tensor) in enumerate(writer_thread.reader().tensors()):
        kept.append(tensor)
        if len(kept) == 4:
            time.sleep(0.01)  # without a lease, the writer would overwrite them now
            assert [float(one[7]) for one in kept] == [float(i) for i in range(number - 3, number + 1)]
            kept.clear()
    writer_thread.join()


def test_a_model_may_load_in_threads() -> None:
    writer_thread = WriterThread()

    def load_late(tensor: torch.Tensor) -> float:
        part = tensor[3:9]
        del tensor
        time.sleep(0.05)
        return float(part[0])

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(load_late, tensor) for _, tensor in writer_thread.reader().tensors()]
        assert [one.result() for one in futures] == [float(i) for i in range(30)]
    writer_thread.join()


def test_a_model_that_keeps_everything_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets_module, "RECLAIM_TIMEOUT_S", 0.2)
    writer_thread = WriterThread()
    with pytest.raises(RuntimeError, match="keeps tensors while it loads many others"):
        list(tensor[3:9] for _, tensor in writer_thread.reader().tensors())
    writer_thread.buckets.progress(1).fail("the reader failed")
    writer_thread.join()


class AcceleratorTensor(torch.Tensor):
    """A tensor in host memory that stands for a tensor on an accelerator."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


def test_a_bucket_on_an_accelerator_may_hold_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable of the model's loop holds a tensor until the next one is there. Only then its bucket is free."""
    monkeypatch.setattr(buckets_module, "RECLAIM_TIMEOUT_S", 0.2)
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(Stream=lambda device: None))
    writer_thread = WriterThread(tensors=4, tensors_per_bucket=1)

    def on_accelerator() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in writer_thread.reader().tensors():
            yield name, tensor.as_subclass(AcceleratorTensor)
            del tensor

    try:
        found = []
        for _, loaded in copies_on(torch.device("cuda", 0), on_accelerator()):
            found.append(float(loaded[7]))
        del loaded
        assert found == [0.0, 1.0, 2.0, 3.0]
    finally:
        writer_thread.buckets.progress(1).fail("the reader has ended")
        writer_thread.join()


def test_rank_0_opens_the_staging_memory_of_all_trainer_ranks() -> None:
    """A rank on another machine is an error of this library: after it, generation continues."""
    layout = plan_buckets({"t": TensorSpec((1024,), "float32")}, None, in_host_memory=True)
    mine, gone = Buckets.create(layout), Buckets.create(layout)
    buffers = RankBuckets("cuda_ipc", layout, [{"location": one.location} for one in (mine, gone)], 1, 20.0)
    gone.close()
    validated = ValidatedUpdate(1, verify=True, pause_mode=PauseMode.RETRACT, flush_cache=True)
    opened = OpenedUpdate(validated, "x", 1, [ServerInfo("a", 2)])
    before = open_files()
    message = "rank 0 cannot open the staging memory of trainer rank 1: .*'cuda_ipc' needs all trainer ranks on one"
    with pytest.raises(UnsupportedError, match=message):
        buffers.require_opened(opened)
    assert open_files() == before
    mine.close()


def test_waiting_ends_when_the_other_side_fails_or_misses_the_deadline() -> None:
    specs = {"t": TensorSpec((1024,), "float32")}
    buckets = Buckets.create(plan_buckets(specs, None, in_host_memory=True))
    with pytest.raises(VerlServerError, match="bucket 0 was not filled by the trainer in time"):
        next(BucketReader(buckets, 1, 0, 1, peers_are_alive, time.monotonic() + 0.05).tensors())
    buckets.progress(1).fail("é" * 5000)
    with pytest.raises(VerlServerError, match="éééé"):
        next(BucketReader(buckets, 1, 0, 1, peers_are_alive, deadline()).tensors())
    writer = BucketWriter(buckets, 2, 0, is_lead_writer=True, readers=[0], require_peers=peers_are_alive)
    for _ in range(NUM_BUCKETS):
        writer.reserve("t", specs["t"], deadline())
    with pytest.raises(VerlServerError, match="bucket 2 was not emptied"):
        writer.reserve("t", specs["t"], time.monotonic() + 0.05)
    buckets.close()


def test_the_gpu_of_a_bucket_is_found_by_its_uuid() -> None:
    """Its number differs between processes that see different GPUs."""
    assert find_device("GPU-b", ["GPU-a", "GPU-b"]) == 1
    with pytest.raises(UnsupportedError, match=r"on the GPU GPU-c, which this server does not see .*CUDA_VISIBLE_"):
        find_device("GPU-c", ["GPU-a", "GPU-b"])


def test_two_ranks_with_one_current_gpu_are_refused() -> None:
    """Unless they see only this GPU."""
    seen = [{"device_uuid": "GPU-a", "num_visible": 2}, {"device_uuid": "GPU-b", "num_visible": 2}]
    require_own_gpus(seen)
    require_own_gpus([{"device_uuid": "GPU-a", "num_visible": 1}] * 2)
    with pytest.raises(BadInputError, match=r"ranks 0 and 2 have the same current GPU \(GPU-a\).*set_device"):
        require_own_gpus([*seen, seen[0]])


def test_gpu_buckets_without_a_gpu_are_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    layout = plan_buckets({"t": TensorSpec((4,), "float32")}, None, in_host_memory=False)
    with pytest.raises(UnsupportedError, match="'cuda_ipc' needs an NVIDIA GPU"):
        Buckets.create(layout)


# -- a real server -----------------------------------------------------------------------------------


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
        with pytest.raises(
            UnsupportedError,
            match=r"cannot open the staging memory .* GPU-a, which this server does",
        ):
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
