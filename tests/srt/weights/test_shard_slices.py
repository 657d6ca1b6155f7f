"""Which part of a tensor the shard of a trainer rank is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import trainer_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from verl_server.weights.update.source import local_slices, split_order


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


def _own_shards(rank: int, world: int) -> None:
    """Each rank compares its shard with the part of the full tensor."""
    generator = torch.Generator().manual_seed(0)
    meshes: dict[tuple[int, ...], Any] = {shape: init_device_mesh("cpu", shape) for shape in ((4,), (2, 2))}
    for mesh_shape, placements in placements_of_every_kind():
        for shape in ((8, 8), (7, 5), (3, 2), (1, 9)):
            full = torch.randn(shape, generator=generator)
            tensor = distribute_tensor(full, meshes[mesh_shape], placements)
            slices, local = local_slices(tensor, frozenset(range(world))), tensor.to_local()
            assert slices is not None
            assert not local.numel() or torch.equal(full[slices], local), (placements, shape)


def test_shards_of_four_ranks_are_parts_of_the_full_tensor() -> None:
    with trainer_ranks(4) as ranks:
        ranks.run(_own_shards)
        placements = ranks.run(_shards_of_fsdp_over_tp)
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
