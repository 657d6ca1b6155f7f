"""Weights through a pair of buckets: staging memory smaller than the model, filled while the server loads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import (
    open_files,
)
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from verl_server.config import PauseMode
from verl_server.errors import BadInputError, UnsupportedError, VerlServerError
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
from verl_server.weights.update.options import ValidatedUpdate
from verl_server.weights.update.streamed import OpenedUpdate, RankBuckets

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
