"""The mesh of the trainer ranks, which `VerlEngine` needs. TRL has none: Accelerate makes the process group."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from verl_server.errors import UnsupportedError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@contextlib.contextmanager
def trainer_mesh() -> Iterator[DeviceMesh]:
    """All trainer ranks as a mesh with a gloo group of its own.

    Under `accelerate launch` and `torchrun`, Accelerate makes the default process group as it does for the trainer. A
    script that is started as `python script.py` has no process group: it gets one of a single rank until the end of
    the context.
    """
    import torch.distributed as dist
    from accelerate import PartialState
    from torch._C._distributed_c10d import HashStore
    from torch.distributed.device_mesh import DeviceMesh

    PartialState()
    owns_group = not dist.is_initialized()
    if owns_group:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)  # this rank is a member
        yield DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    finally:
        if owns_group:
            dist.destroy_process_group()


def require_one_gpu(args: Any) -> None:
    """Raise UnsupportedError if this rank trains on several GPUs. `args`: the arguments of the trainer."""
    if args.n_gpu > 1:
        raise UnsupportedError(
            f"one trainer process sees {args.n_gpu} GPUs, so that transformers would use nn.DataParallel, which "
            "cannot work here: set CUDA_VISIBLE_DEVICES=0 for one trainer rank, or start several ranks with "
            "`accelerate launch`. Give the servers their GPUs with start_servers(env={'CUDA_VISIBLE_DEVICES': '1'})"
        )
