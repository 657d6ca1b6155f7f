"""The geometry of buckets of own shards, against brute force and against `DTensor.full_tensor`."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import trainer_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from verl_server.types import TensorSpec
from verl_server.weights.double_buffer.shard_plan import (
    BucketPlan,
    ShardedTensor,
    assemble,
    plan_buckets,
    sharded_tensor_of,
)
from verl_server.weights.gather import local_slices, split_order
from verl_server.weights.layout import ALIGNMENT
from verl_server.weights.views import tensor_view

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "uint8": torch.uint8}


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, list[ShardedTensor], int]:
    """Number of ranks, tensors with meshes of these ranks, and the preferred rank."""
    mesh_shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    num_ranks = math.prod(mesh_shape)
    tensors = []
    for number in range(draw(st.integers(1, 6))):
        shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
        dims = tuple(draw(st.one_of(st.none(), st.integers(0, len(shape) - 1))) for _ in mesh_shape)
        ranks = tuple(draw(st.permutations(range(num_ranks))))
        spec = TensorSpec(shape, draw(st.sampled_from(sorted(DTYPES))))
        tensors.append(ShardedTensor(f"t{number}", spec, mesh_shape, ranks, dims))
    return num_ranks, tensors, draw(st.integers(0, num_ranks - 1))


def fill_buckets(plan: BucketPlan, whole: dict[str, torch.Tensor], rank: int, bucket: torch.Tensor) -> None:
    """What trainer rank `rank` does: write its own shards."""
    for index, tensor in enumerate(plan.tensors):
        slices = tensor.slices_of(rank)
        if slices is not None:
            shard = whole[tensor.name][slices]
            spec = TensorSpec(tuple(shard.shape), tensor.spec.dtype)
            tensor_view(bucket, plan.offsets[index][rank], spec).copy_(shard)


@settings(max_examples=200)
@given(cases(), st.integers(0, 400))
def test_tensors_are_put_together_from_the_buckets_of_all_ranks(case: Any, extra_bytes: int) -> None:
    num_ranks, tensors, preferred = case
    whole = {tensor.name: torch.randint(0, 200, tensor.spec.shape).to(DTYPES[tensor.spec.dtype]) for tensor in tensors}
    largest = max(tensor.num_bytes_of(rank) for tensor in tensors for rank in range(num_ranks))
    bucket_bytes = largest + extra_bytes
    plans = list(plan_buckets(tensors, num_ranks, bucket_bytes))
    assert [tensor for plan in plans for tensor in plan.tensors] == tensors
    for plan in plans:
        buckets = [torch.zeros(bucket_bytes, dtype=torch.uint8) for _ in range(num_ranks)]
        for rank, bucket in enumerate(buckets):
            fill_buckets(plan, whole, rank, bucket)
            ranges = [plan.byte_range(index, rank) for index in range(len(plan.tensors))]
            assert all(start % ALIGNMENT == 0 for start, _ in ranges)
            assert all(first[1] <= second[0] for first, second in itertools.pairwise(ranges)), "no overlap"
            assert ranges[-1][1] <= bucket_bytes
        for index, tensor in enumerate(plan.tensors):
            target = torch.full_like(whole[tensor.name], 77)
            assemble(plan, index, preferred, target, lambda rank, at, spec: tensor_view(buckets[rank], at, spec))  # noqa: B023
            assert torch.equal(target, whole[tensor.name])


@given(cases())
def test_parts_cover_each_element_once_and_prefer_a_rank(case: Any) -> None:
    _, tensors, preferred = case
    for tensor in tensors:
        count = torch.zeros(tensor.spec.shape)
        chosen = [rank for rank, _ in tensor.parts(preferred)]
        for _, slices in tensor.parts(preferred):
            count[slices] += 1
        assert torch.equal(count, torch.ones(tensor.spec.shape))
        assert preferred in chosen or not tensor.num_bytes_of(preferred)
        assert ShardedTensor.from_message(json.loads(json.dumps(tensor.to_message()))) == tensor


def test_a_shard_that_is_larger_than_a_bucket_is_an_error() -> None:
    tensor = ShardedTensor.replicated("t", TensorSpec((10,), "float32"), 2)
    assert len(list(plan_buckets([tensor], 2, 40))) == 1
    with pytest.raises(ValueError, match="'t' has 40 bytes, a bucket has 39"):
        list(plan_buckets([tensor], 2, 39))


# -- real DTensors on four ranks ---------------------------------------------------------------------


def placements_of_every_kind() -> list[tuple[tuple[int, ...], list[Any]]]:
    """Shapes of meshes and placements: FSDP, column and row parallel, HSDP, FSDP with TP, replicated."""
    return [
        ((4,), [Shard(0)]),
        ((4,), [Shard(1)]),
        ((4,), [Replicate()]),
        ((2, 2), [Replicate(), Shard(0)]),
        ((2, 2), [Shard(0), Shard(1)]),
        ((2, 2), [Shard(0), Replicate()]),
        ((2, 2), [Shard(1), Shard(0)]),
        ((2, 2), [Replicate(), Replicate()]),
        ((2, 2), [Shard(0), Shard(0)]),
    ]


def _own_shards(rank: int, world: int) -> int:
    """Each rank fills its own bucket; every rank puts all tensors together and compares with `full_tensor`."""
    generator = torch.Generator().manual_seed(0)
    meshes: dict[tuple[int, ...], Any] = {shape: init_device_mesh("cpu", shape) for shape in ((4,), (2, 2))}
    tensors, sharded = {}, []
    for number, (mesh_shape, placements) in enumerate(placements_of_every_kind()):
        for shape in ((8, 8), (7, 5), (3, 2), (1, 9)):
            name = f"{number}-{shape}"
            full = torch.randn(shape, generator=generator)
            tensors[name] = distribute_tensor(full, meshes[mesh_shape], placements)
            found = sharded_tensor_of(name, tensors[name], "bfloat16", range(world))
            assert found is not None
            sharded.append(found)
    full = torch.randn(6, 3, generator=generator)
    plain = sharded_tensor_of("plain", full, "bfloat16", range(world))
    assert plain == ShardedTensor.replicated("plain", TensorSpec((6, 3), "bfloat16"), world)
    pending = DTensor.from_local(full, meshes[(4,)], [Partial()])
    assert sharded_tensor_of("pending", pending, "bfloat16", range(world)) is None
    assert sharded_tensor_of("elsewhere", tensors["0-(8, 8)"], "bfloat16", range(1, 1 + world)) is None

    plans = list(plan_buckets(sharded, world, 512))
    for plan in plans:
        bucket = torch.zeros(512, dtype=torch.uint8)
        for index, tensor in enumerate(plan.tensors):
            local = tensors[tensor.name].to_local()
            if local.numel():
                view = tensor_view(bucket, plan.offsets[index][rank], TensorSpec(tuple(local.shape), "bfloat16"))
                view.copy_(local)
        buckets = [torch.empty_like(bucket) for _ in range(world)]
        dist.all_gather(buckets, bucket)
        for index, tensor in enumerate(plan.tensors):
            target = torch.full(tensor.spec.shape, 7.0, dtype=torch.bfloat16)
            assemble(plan, index, rank, target, lambda rank, at, spec: tensor_view(buckets[rank], at, spec))  # noqa: B023
            assert torch.equal(target, tensors[tensor.name].full_tensor().bfloat16()), tensor.name
    return len(plans)


def test_shards_of_four_ranks_equal_full_tensor() -> None:
    with trainer_ranks(4) as ranks:
        counts = ranks.run(_own_shards)
        placements = ranks.run(_shards_of_fsdp_over_tp)
    assert counts[0] > 1
    assert counts == counts[:1] * 4
    assert "_StridedShard" in placements[0] or "_S(" in placements[0]


class Projections(torch.nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.column = torch.nn.Linear(6, rows)
        self.row = torch.nn.Linear(rows, 6, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.row(self.column(x))


def _shards_of_fsdp_over_tp(rank: int, world: int) -> str:
    """FSDP2 shards what TP has sharded. Each rank knows its part of each full tensor, if all parts are equal."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for rows in (8, 6):
        torch.manual_seed(0)
        model = Projections(rows)
        expected = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        parallelize_module(model, mesh["tp"], {"column": ColwiseParallel(), "row": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        shards: dict[str, Any] = dict(model.named_parameters())
        for name, parameter in shards.items():
            slices = local_slices(parameter, frozenset(range(world)))
            if rows == 6 and name.startswith("column"):
                assert slices is None, "3 rows of a TP rank make parts of 2 and 1 rows"
            else:
                assert slices is not None, name
                assert torch.equal(expected[name][slices], parameter.to_local()), name
    return str(shards["column.weight"].placements)


@pytest.mark.parametrize(
    ("mesh_shape", "shard_dims", "split_factors", "order"),
    [
        ((2, 2), (0, 0), (1, 1), [0, 1]),
        ((2, 2), (0, 0), (2, 1), [1, 0]),
        ((2, 2, 2), (None, 0, 0), (1, 2, 1), [0, 2, 1]),
        ((2, 2, 2), (0, 0, 0), (4, 2, 1), [2, 1, 0]),
        ((2, 2, 2), (0, 1, 0), (2, 1, 1), [2, 1, 0]),
        ((2, 2), (0, 0), (4, 1), None),
        ((2, 2), (0, None), (2, 1), None),
        ((2, 4), (0, 0), (4, 1), [1, 0]),
        ((2, 3), (0, 0), (3, 1), None),
    ],
)
def test_the_order_in_which_a_mesh_splits_a_tensor(
    mesh_shape: Any, shard_dims: Any, split_factors: Any, order: list[int] | None
) -> None:
    assert split_order((8, 8), mesh_shape, shard_dims, split_factors) == order
