"""What a weight update does with accelerators, as far as a CPU shows it: shares, checksums, copies, order of calls."""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_server.config import PauseMode
from verl_server.errors import VerlServerError
from verl_server.ranks.coordinator import RankCoordinator
from verl_server.types import ServerInfo, TensorSpec
from verl_server.weights.arena import (
    POSITIONAL_SUM,
    XXH3,
    Arena,
    Checksums,
    ReceivedReport,
    Report,
    SharedReports,
    choose_algorithm,
    compute_checksum,
    plan_arena,
    positional_sum,
    shares_are_complete,
    verified_share,
)
from verl_server.weights.buckets import Buckets, plan_buckets
from verl_server.weights.device import CallerOrder, PinnedMemory, StagingCopies
from verl_server.weights.loader import load_weights
from verl_server.weights.manifest import Manifest
from verl_server.weights.transports.base import Receiver, UpdateAttempt
from verl_server.weights.update import streamed
from verl_server.weights.update.options import ValidatedUpdate
from verl_server.weights.update.source import ShardWriter, StagedChecksums
from verl_server.weights.update.staged import verify_reports
from verl_server.weights.update.streamed import BucketFiller, OpenedUpdate, RankBuckets

# -- checksums and shares ----------------------------------------------------------------------------


@given(st.integers(1, 8), st.integers(1, 4), st.integers(0, 50))
def test_tp_ranks_that_share_memory_verify_each_tensor_once(sharing: int, nodes: int, num_tensors: int) -> None:
    for node in range(nodes):
        shares = [verified_share(node * sharing + rank, sharing) for rank in range(sharing)]
        positions = [position for first, step in shares for position in range(num_tensors)[first::step]]
        assert sorted(positions) == list(range(num_tensors))
        assert shares_are_complete(shares)
        assert shares_are_complete([*shares[1:], (0, 1)])
        if sharing > 1:
            assert not shares_are_complete(shares[1:])


def report_of(share: tuple[int, int], checksums: Sequence[int]) -> ReceivedReport:
    report = Report("x", ok=True, num_tensors=5, share=share)
    return ReceivedReport(report, list(checksums)[share[0] :: share[1]])


def test_each_tp_rank_answers_for_its_share() -> None:
    attempt = UpdateAttempt("x", [f"t{i}" for i in range(5)], True, [ServerInfo("a", 2)])
    staged = [10, 11, 12, 13, 14]
    first, second = "TP rank 0 of the server", "TP rank 1 of the server"
    reports: dict[str, ReceivedReport | None] = {first: report_of((0, 2), staged), second: report_of((1, 2), staged)}
    verify_reports(reports, attempt, staged, is_whole=True)
    reports[second] = report_of((1, 2), [10, 11, 12, 99, 14])
    with pytest.raises(VerlServerError, match=r"TP rank 1 of the server read 1 tensors that differ .*'t3' first"):
        verify_reports(reports, attempt, staged, is_whole=True)
    reports[second] = report_of((0, 2), staged)
    with pytest.raises(
        VerlServerError, match="TP rank 0 of the server and the other TP ranks of its server have not verified all"
    ):
        verify_reports(reports, attempt, staged, is_whole=True)
    reports[second] = report_of((0, 1), staged)
    verify_reports(reports, attempt, staged, is_whole=True)


def test_a_report_keeps_its_share() -> None:
    memory = mmap.mmap(-1, 4096 * 128)
    reports = SharedReports(memory, checksums_offset=4096 * 64, num_tensors=5)
    report = Report("x", ok=True, num_tensors=5, share=(1, 2))
    reports.write(3, report, [7, -8])
    assert reports.read(3, "x", 5) == ReceivedReport(report, [7, -8])
    assert reports.read(3, "x", 0) == ReceivedReport(report, [])


@given(st.lists(st.binary(min_size=0, max_size=40), max_size=5), st.sampled_from([XXH3, POSITIONAL_SUM]))
def test_checksums_of_many_tensors_are_those_of_each(parts: list[bytes], algorithm: str) -> None:
    tensors = [torch.tensor(list(part), dtype=torch.uint8) for part in parts]
    checksums = Checksums(algorithm, torch.device("cpu"))
    for tensor in tensors:
        checksums.add(tensor)
    assert checksums.values() == [compute_checksum(tensor, algorithm) for tensor in tensors]
    if algorithm == POSITIONAL_SUM:
        assert checksums.values() == [positional_sum(tensor) for tensor in tensors]


class FullAccelerator(torch.Tensor):
    """The bytes of a tensor in host memory, for which an accelerator without free memory is asked."""

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args[0] != torch.device("cpu"):
            raise torch.OutOfMemoryError("the memory is full")
        return self.as_subclass(torch.Tensor)


def test_a_checksum_is_computed_on_the_host_where_the_accelerator_is_full() -> None:
    tensor = torch.arange(40.0)
    checksums = Checksums(POSITIONAL_SUM, torch.device("meta"))
    checksums.add(tensor.as_subclass(FullAccelerator))
    assert checksums.values() == [positional_sum(tensor.view(torch.uint8))]


def test_checksums_of_staged_tensors_do_not_depend_on_when_they_are_computed() -> None:
    """Tensors that one rank writes whole are read when they are copied, the others after all ranks have written."""
    layout = plan_arena({name: TensorSpec((5, 3), "bfloat16") for name in ("whole", "same", "shards")})
    arena, whole = Arena.create(layout), torch.randn(5, 3)
    manifest = Manifest({name: slot.spec for name, slot in layout.slots.items()}, frozenset(), frozenset())
    checksums = StagedChecksums(arena.tensor, choose_algorithm())
    writer = ShardWriter(
        arena.tensor,
        manifest,
        frozenset({0}),
        RankCoordinator(0, 1, {}, 1.0),
        "update",
        gather_timeout_s=1.0,
        check_finite=False,
        writes_whole_tensors=True,
        checksums=checksums,
    )
    arena.tensor("same").fill_(2.0)
    assert writer.write({"whole": whole, "same": arena.tensor("same")}) == ["whole", "same"]
    arena.tensor("shards").copy_(torch.randn(5, 3))
    staged = {name: compute_checksum(arena.tensor(name), choose_algorithm()) for name in ("shards", "same", "whole")}
    arena.tensor("whole").zero_()
    assert checksums.values(list(staged)) == list(staged.values()), "also if a tensor is overwritten after its copy"
    assert staged["whole"] == compute_checksum(whole.bfloat16(), choose_algorithm())
    arena.close()


def test_an_unknown_checksum_is_an_error() -> None:
    with pytest.raises(ValueError, match="no checksum 'md5'"):
        compute_checksum(torch.ones(3), "md5")


# -- copies ------------------------------------------------------------------------------------------


def test_copies_on_a_cpu() -> None:
    target, pinned = torch.zeros(4, 6, dtype=torch.bfloat16), []
    copies = StagingCopies(lambda: pinned.append(1))
    source = torch.randn(4, 3)
    assert copies.copy(target[:, 3:], source).dtype == torch.bfloat16
    copies.copy(target[:, :0], source[:, :0])
    same = target[1:]
    assert copies.copy(same, same) is same
    copies.wait()
    assert torch.equal(target[:, 3:], source.bfloat16())
    assert not target[:, :3].any()
    assert not pinned, "only copies from an accelerator need pinned memory"


class FullAcceleratorTensor(torch.Tensor):
    """A tensor in host memory that stands for a tensor on an accelerator whose memory is full."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("the memory is full")


def test_a_tensor_is_cast_on_the_host_where_the_accelerator_is_full() -> None:
    source, target = torch.randn(4, 6), torch.zeros(4, 6, dtype=torch.bfloat16)
    copies = StagingCopies()
    assert copies.copy(target, source.as_subclass(FullAcceleratorTensor)) is target
    copies.wait()
    assert torch.equal(target, source.bfloat16())


class MetaReceiver(Receiver):
    """A receiver of one tensor without values, so that its checksum cannot be fetched."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "t", torch.empty(8, device="meta")

    def send_report(self, report: Report, checksums: list[int]) -> None:
        pass


class ReadingModel(torch.nn.Module):
    """A model that reads all tensors and keeps none."""

    def load_weights(self, named_tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        list(named_tensors)


def test_checksums_that_cannot_be_fetched_are_reported() -> None:
    """Without a report, the trainer would not learn of the error."""
    receiver = MetaReceiver({"checksum": POSITIONAL_SUM}, 0)
    report, checksums = load_weights(receiver, ReadingModel(), "x", verify=True)
    assert (report.ok, checksums) == (False, [])
    assert "meta" in str(report.error)


def test_memory_is_not_pinned_without_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    memory = PinnedMemory(mmap.mmap(-1, 4096))
    assert not memory.pin()
    memory.unpin()


# -- the order of calls on an accelerator: torch's device module is replaced by one that records them --


class RecordingModule:
    """Stands for torch's module of an accelerator, with one stream of each name."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.stream = "caller"

    def current_stream(self, device: torch.device) -> Any:
        return RecordingStream(self, self.stream)

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.calls.append(f"enter {device}")
        yield
        self.calls.append("leave")


class RecordingStream:
    def __init__(self, module: RecordingModule, name: str) -> None:
        self._module, self._name = module, name

    def record_event(self) -> str:
        self._module.calls.append(f"record on {self._name}")
        return f"event of {self._name}"

    def wait_event(self, event: str) -> None:
        self._module.calls.append(f"{self._name} waits for {event}")

    def synchronize(self) -> None:
        self._module.calls.append(f"synchronize {self._name}")


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> RecordingModule:
    """The module of the device "meta"."""
    module = RecordingModule()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module


def test_another_thread_waits_for_the_callers_stream(accelerator: RecordingModule) -> None:
    order = CallerOrder(torch.empty(3, device="meta"))
    accelerator.stream = "other"
    with order.continue_here():
        accelerator.calls.append("work")
    assert accelerator.calls == [
        "record on caller", "enter meta", "other waits for event of caller", "work", "synchronize other", "leave",
    ]  # fmt: skip


def test_checksums_use_the_device_of_the_callers_thread(
    accelerator: RecordingModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that computes them would start with device 0, where another trainer rank works."""
    monkeypatch.setattr(streamed, "accelerator", lambda: torch.device("meta"))
    specs = {"t": TensorSpec((5,), "float32")}
    buckets = Buckets.create(plan_buckets(specs, None, in_host_memory=True))
    descriptions = [buckets.description()]
    buffers = RankBuckets("buckets", buckets.layout, descriptions, 1, 20.0, buckets, is_lead_writer=True)
    validated = ValidatedUpdate(1, verify=True, pause_mode=PauseMode.RETRACT, flush_cache=True)
    opened = OpenedUpdate(validated, "x", 1, [ServerInfo("a", 1)])
    filler = BucketFiller(buffers, opened, lambda: None, lambda: None, time.monotonic() + 20.0)
    target = filler.reserve("t", specs["t"])
    assert target is not None
    target.fill_(3.0)
    filler.finish()
    report = Report("x", ok=True, num_tensors=1)
    buckets.reports.write(0, report, [compute_checksum(torch.full((5,), 3.0))])
    assert filler.report_error(["t"], Manifest(specs), timeout_s=20.0) is None
    filler.close()
    assert accelerator.calls == ["enter meta", "leave"]
    del target
    buckets.close()


def test_all_copies_are_waited_for_once(accelerator: RecordingModule) -> None:
    copies = StagingCopies()
    for _ in range(3):
        copies.copy(torch.empty(3, device="meta"), torch.empty(3, device="meta", dtype=torch.float64))
    assert accelerator.calls == []
    copies.wait()
    copies.wait()
    assert accelerator.calls == ["synchronize caller"]


@pytest.mark.parametrize(
    ("trainer_has_gpu", "servers_read_host_memory", "expected"),
    [(True, False, POSITIONAL_SUM), (True, True, XXH3), (False, False, XXH3), (False, True, XXH3)],
)
def test_servers_that_hash_on_the_host_get_the_checksum_that_is_fast_there(
    trainer_has_gpu: bool, servers_read_host_memory: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: trainer_has_gpu)
    assert choose_algorithm(servers_read_host_memory=servers_read_host_memory) == expected


def test_a_tensor_on_an_accelerator_is_hashed_in_the_staging_memory() -> None:
    staged = torch.arange(6.0)
    checksums = StagedChecksums(lambda _: staged, XXH3)
    checksums.add("weight", torch.empty(6, device="meta"))
    assert checksums.values(["weight"]) == [compute_checksum(staged, XXH3)]
